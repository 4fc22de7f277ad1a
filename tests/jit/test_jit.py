import contextlib
import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from helpers import LONGEST, run_threads

from jitkern import compilers, config, jit, testing
from jitkern.cache import events, lock
from jitkern.cache.store import Cache
from jitkern.cache.temporary_cache import private_root
from jitkern.errors import (
    CacheError,
    CompileError,
    CompilerNotFound,
    JitkernError,
    LoadError,
    NotCached,
    UntrustedCache,
)
from jitkern.jit import active_cache
from jitkern.loading import loader
from jitkern.target import Target


def test_miss_compiles_and_hit_does_not(compiler, variant, target):
    first, built = jit.ensure_and_tell(variant, target)
    again, built_again = jit.ensure_and_tell(variant, target)
    assert (built, built_again, first.path) == (True, False, again.path)
    assert len(compiler.compiles) == 1


def test_a_compile_reads_its_sources_twice_and_a_hit_once(variant, target, compiler, monkeypatch):
    reads, read = [], compilers.closure_of
    noting = lambda source: reads.append(source) or read(source)
    monkeypatch.setattr(compilers, "closure_of", noting)
    jit.ensure(variant, target)
    assert len(reads) == 2
    jit.ensure(variant, target)
    assert len(reads) == 3


def test_the_manifest_holds_what_the_compiler_said(compiler, variant, target):
    manifest = jit.ensure(variant, target).manifest
    assert manifest.compiler == {"name": "fake", "version": "1"}
    assert manifest.inputs["variant"]["function"] == "scale"
    assert manifest.meta == {"artifact": "out.so"}


def test_an_edit_compiles_again(compiler, variant, target):
    first = jit.ensure(variant, target)
    variant.source.paths[0].write_text("// edited\n")
    assert jit.ensure(variant, target).path != first.path
    assert len(compiler.compiles) == 2


@pytest.mark.parametrize("undone", [False, True], ids=["edited", "undone"])
@pytest.mark.parametrize("fails", [False, True], ids=["built", "failed"])
def test_an_edit_in_mid_compile_compiles_again(compiler, variant, target, undone, fails):
    path = variant.source.paths[0]

    def edit_once():
        first = len(compiler.compiles) == 1
        compiler.fail = fails and first
        if first:
            before, status = path.read_bytes(), path.stat()
            path.write_text("// edited\n")
            if undone:
                path.write_bytes(before)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    compiler.during = edit_once
    entry = jit.ensure(variant, target)
    assert entry.manifest.digest == jit.key_of(variant, target).digest
    assert len(compiler.compiles) == 2
    assert len(list(jit.open_cache().entries())) == 1


def test_a_source_that_keeps_changing_is_an_error(compiler, variant, target):
    compiler.during = lambda: variant.source.paths[0].write_text(f"// {len(compiler.compiles)}")
    with pytest.raises(CompileError, match="keeps changing"):
        jit.ensure(variant, target)


def test_never_says_how_to_prewarm(compiler, variant, target):
    says = r"jitkern prewarm test::scale --target cpu-x86_64-torch2.13.0"
    with config.using(compile="never"), pytest.raises(NotCached, match=says):
        jit.ensure(variant, target)
    assert compiler.compiles == []


def test_a_failed_compile_leaves_nothing_and_is_tried_again(compiler, variant, target, cache_dir):
    compiler.fail = "kernel.cpp:3:7: error: expected ';'"
    for _ in range(2):
        with pytest.raises(CompileError, match="^the fake refuses"):
            jit.ensure(variant, target)
    assert list((cache_dir / "v1" / "tmp").iterdir()) == []
    compiler.fail = False
    jit.ensure(variant, target)
    assert len(compiler.compiles) == 3


def test_refresh_compiles_again_and_replaces(compiler, variant, target):
    jit.ensure(variant, target)
    compiler.version = "2"
    assert jit.ensure(variant, target).manifest.compiler["version"] == "1"
    assert jit.ensure(variant, target, refresh=True).manifest.compiler["version"] == "2"
    assert jit.ensure(variant, target).manifest.compiler["version"] == "2"


def test_exact_compiles_again_when_the_compiler_changed(compiler, variant, target):
    jit.ensure(variant, target)
    with config.using(compiler="exact"):
        jit.ensure(variant, target)
        assert len(compiler.compiles) == 1
        compiler.version = "2"
        assert jit.ensure(variant, target).manifest.compiler["version"] == "2"
        jit.ensure(variant, target)
    assert len(compiler.compiles) == 2


def test_a_compiler_older_than_the_source_wants_is_refused(compiler, variant, target):
    newer = variant._replace(source=variant.source.replace(min_compiler="1.5"))
    compiler.version = "fake version 1.4.9-1ubuntu2.0"
    with pytest.raises(CompilerNotFound, match=r"needs fake 1.5 or newer, and this is .*1.4.9"):
        jit.ensure(newer, target)
    compiler.version = "V1.10.2"
    jit.ensure(newer, target)


def test_no_lock_outlives_what_it_was_for(compiler, variant, target):
    jit.ensure(variant, target)
    assert not testing.held_locks()


def test_threads_compile_once(compiler, variant, target):
    compiler.during = lambda: threading.Event().wait(0.05)
    run_threads(*[partial(jit.ensure, variant, target)] * 8)
    assert len(compiler.compiles) == 1


def test_variants_compile_side_by_side(compiler, variant, target):
    meet = threading.Barrier(2, timeout=LONGEST)
    compiler.during = meet.wait
    other = variant._replace(template=(("T", "f64"),))
    run_threads(*(partial(jit.ensure, v, target) for v in (variant, other)))
    assert len(list(jit.open_cache().entries())) == 2


def test_events_tell_of_every_hit_and_compile(compiler, variant, target):
    seen = []
    stop = events.on_compile(seen.append)
    before = events.stats()
    jit.ensure(variant, target)
    jit.ensure(variant, target)
    compiler.fail = True
    with pytest.raises(CompileError):
        jit.ensure(variant, target, refresh=True)
    stop()
    jit.ensure(variant, target)
    assert [(e.op, e.variant, e.status) for e in seen] == [
        ("test::scale", "f32", s) for s in ("built", "hit", "failed")
    ]
    after = events.stats()
    grown = {name: after[name] - before[name] for name in ("hits", "compiles", "failures")}
    assert grown == {"hits": 2, "compiles": 1, "failures": 1}


def test_a_callback_that_raises_fails_no_call(compiler, variant, target, caplog):
    def trouble(_):
        raise ZeroDivisionError

    seen = []
    stops = [events.on_compile(trouble), *(events.on_compile(seen.append) for _ in range(2))]
    before = events.stats()["compiles"]
    jit.ensure(variant, target)
    assert events.stats()["compiles"] == before + 1
    assert "a callback of on_compile failed on" in caplog.text
    assert len(seen) == 2
    for stop in (*stops[:2], *stops[:2]):
        stop()
    jit.ensure(variant, target)
    assert len(seen) == 3, "stopping one twice stops no other"
    stops[2]()


def test_a_root_that_cannot_be_written_spills_into_a_private_one(
    compiler, variant, target, monkeypatch, caplog
):
    real = Cache.staging

    def staging(self):
        if self.root != private_root():
            why = f"the cache {self.root} cannot be written: Permission denied"
            raise CacheError(why, errno=errno.EACCES)
        return real(self)

    monkeypatch.setattr(Cache, "staging", staging)
    entry = jit.ensure(variant, target)
    assert entry.path.is_relative_to(private_root())
    assert "for this process only" in caplog.text
    jit.ensure(variant, target)
    assert len(compiler.compiles) == 1
    says = r"test::scale for cpu-.*Permission denied"
    with config.using(fallback="raise"), pytest.raises(CacheError, match=says):
        jit.ensure(variant._replace(template=()), target)


def test_no_space_names_op_target_and_remedy(compiler, variant, target):
    def full():
        raise CacheError("the cache cannot be written: no space; free some", errno=errno.ENOSPC)

    compiler.during = full
    says = rf"test::scale for {target}: .*no space; free some"
    with pytest.raises(CacheError, match=says):
        jit.ensure(variant, target)


def test_a_cache_path_that_is_a_file_names_op_target_and_remedy(
    compiler, variant, target, cache_dir
):
    cache_dir.write_text("")
    with pytest.raises(CacheError, match=rf"test::scale for {target}: .*is a file; remove it"):
        jit.ensure(variant, target)


def test_an_untrusted_root_is_warned_of_and_not_used(compiler, variant, target, cache_dir, caplog):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    entry = jit.ensure(variant, target)
    assert not entry.path.is_relative_to(cache_dir)
    assert "not trusted" in caplog.text
    with config.using(fallback="raise"), pytest.raises(UntrustedCache):
        jit.ensure(variant, target)


def test_a_corrupt_entry_is_compiled_again(compiler, variant, target, caplog):
    entry = jit.ensure(variant, target)
    (entry.path / "manifest.json").write_text("{")
    assert jit.ensure(variant, target).path == entry.path
    assert len(compiler.compiles) == 2
    assert "damaged" in caplog.text


def test_a_system_layer_serves(compiler, variant, target, tmp_path):
    entry = jit.ensure(variant, target)
    layered = {"cache_dir": tmp_path / "other", "system_cache": (config.current().cache_dir,)}
    with config.using(**layered, compile="never"):
        assert jit.ensure(variant, target).path == entry.path
    assert not Path(tmp_path / "other").exists()


def test_an_artifact_that_will_not_load_is_compiled_once_more(compiler, variant, target):
    with pytest.raises(LoadError, match="could not load"):
        jit.loaded(variant, target)
    assert len(compiler.compiles) == 2


def test_the_cache_stays_open_where_settings_of_others_change(cache_dir):
    opened = jit.open_cache()
    with config.using(cxx="g++-13", compile="never"):
        assert jit.open_cache() is opened
    with config.using(fsync=False, cache_dir=cache_dir / "other"):
        assert jit.open_cache().root == cache_dir / "other"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.EMFILE, "ulimit -n"), (errno.ENFILE, "ulimit -n"), (errno.EFBIG, "ulimit -f"),
        (errno.ENOMEM, "Cannot allocate"), (errno.EACCES, "make it writable"),
    ],
)  # fmt: skip
def test_what_the_system_refuses_a_compile_is_an_error_of_ours(
    code, says, compiler, variant, target
):
    def fail():
        raise OSError(code, os.strerror(code))

    compiler.during = fail
    with pytest.raises(JitkernError, match=says) as caught:
        jit.ensure(variant, target)
    assert "test::scale" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_compiler_that_writes_nothing_is_said_to(compiler, variant, target, monkeypatch):
    def compile_nothing(variant, target, closure, staging):
        (staging / "out.so").read_bytes()

    monkeypatch.setattr(compiler, "compile", compile_nothing)
    with pytest.raises(CompileError, match=r"without an error and did not write out\.so"):
        jit.ensure(variant, target)


def test_staging_that_something_deletes_is_not_an_edit(compiler, variant, target, cache_dir):
    def clean():
        for path in (cache_dir / "v1" / "tmp").iterdir():
            shutil.rmtree(path)

    compiler.during = clean
    with pytest.raises(CompileError, match="its build folder .* is deleted while it compiles"):
        jit.ensure(variant, target)


def test_seconds_are_those_of_the_compiler(compiler, variant, target, monkeypatch):
    now = [time.perf_counter()]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    @contextlib.contextmanager
    def waited_for(*names):
        now[0] += 1000
        yield

    def work():
        now[0] += 5

    monkeypatch.setattr(lock, "held", waited_for)
    compiler.during = work
    assert jit.ensure(variant, target).manifest.seconds == 5


def test_a_library_on_a_noexec_mount_says_so_and_stays(variant, target, monkeypatch):
    entry = jit.ensure(variant, Target.current("cpu"))
    fields = [*os.statvfs(entry.path)]
    fields[8] |= os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))

    def refuse(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(loader.ctypes, "CDLL", refuse)
    with pytest.raises(LoadError, match="is mounted noexec: point JITKERN_CACHE_DIR"):
        jit.loaded(variant, Target.current("cpu"))
    assert entry.path.is_dir()


def test_a_child_does_not_use_the_private_root_of_its_parent():
    mine = private_root()
    read, write = os.pipe()
    if not os.fork():
        os.write(write, str(private_root()).encode())
        shutil.rmtree(private_root())
        os._exit(0)
    os.wait()
    assert Path(os.read(read, 4096).decode()) != mine
    os.close(read)
    os.close(write)


def test_threads_that_cannot_write_share_one_temporary_cache(caplog):
    why = CacheError("the cache /c cannot be written: Permission denied", errno=13)
    together = threading.Barrier(8)

    def spill():
        together.wait()
        return active_cache.use_temporary(why)

    with ThreadPoolExecutor(8) as threads:
        caches = {future.result() for future in [threads.submit(spill) for _ in range(8)]}
    assert len(caches) == 1
    assert len([r for r in caplog.records if "temporary cache" in r.getMessage()]) == 1
