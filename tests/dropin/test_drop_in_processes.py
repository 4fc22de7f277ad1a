"""`load_inline` and `load` in several processes, after failures, and where they look for files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from cpp_texts import MODULE
from inline_modules import answers, forget_answers, module, value

from jitkern import config, testing
from jitkern.dropin import memo
from jitkern.errors import CompileError, CompilerNotFound, NotCached
from jitkern.loading import LOADED

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")


def shortcuts(cache_dir):
    return sorted(cache_dir.glob("v1/*/inline.*.shortcut.*"))


@pytest.fixture
def asked(monkeypatch):
    """The keys of the records that calls ask for."""
    keys, key_of = [], memo.shortcut_key
    monkeypatch.setattr(memo, "shortcut_key", lambda call: keys.append(key_of(call)) or keys[-1])
    return keys


# Processes, locks, failures.


@pytest.mark.long
def test_a_failed_build_can_be_retried():
    for _ in range(2):
        with pytest.raises(CompileError):
            module("drop_in_retry", "#error no")
    assert module("drop_in_retry").answer() == 42


@pytest.mark.long
def test_processes_of_one_name_get_their_own():
    code = f"""
import sys, jitkern
source = {MODULE!r} % ("#define ANSWER " + sys.argv[1])
print(jitkern.load_inline("drop_in_race", source, no_implicit_headers=True).answer())
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    numbers = [str(n % 3) for n in range(6)]
    started = [
        subprocess.Popen([*command, number], stdout=subprocess.PIPE, text=True)
        for number in numbers
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in started] == numbers


@pytest.mark.long
def test_a_warm_start_needs_no_compiler_ninja_or_subprocess(run_python, cache_dir):
    module("drop_in_warm")
    code = f"""
import json, subprocess, sys
def refuse(*a, **k): raise AssertionError("a subprocess")
subprocess.Popen.__init__ = refuse
import torch, jitkern
m = jitkern.load_inline("drop_in_warm", {MODULE % ""!r}, no_implicit_headers=True)
unwanted = {{"torch.utils.cpp_extension", "jitkern.%s", "jitkern.compilers.child_process", "setuptools"}}
print(json.dumps([m.answer(), sorted(unwanted & set(sys.modules)), jitkern.stats()]))
"""
    by_record = run_python(code % "cache.store", PATH="/nonexistent", JITKERN_COMPILE="never")
    shutil.rmtree(shortcuts(cache_dir)[0])
    by_lookup = run_python(code % "jit.build", PATH="/nonexistent", JITKERN_COMPILE="never")
    for done in (by_record, by_lookup):
        assert done.returncode == 0, done.stderr
        answer, loaded, stats = json.loads(done.stdout)
        assert (answer, loaded, stats["hits"], stats["compiles"]) == (42, [], 1, 0)
    assert len(shortcuts(cache_dir)) == 1, "the lookup leaves one, too"


@pytest.mark.long
@pytest.mark.parametrize("broken", ["record", "artifact", "mode", "link", "entry"])
def test_a_record_that_is_odd_in_any_way_leads_to_the_lookup(broken, cache_dir, tmp_path, asked):
    path = Path(module("drop_in_odd").__file__)
    (record,) = shortcuts(cache_dir)
    forget_answers()
    assert memo.recall(asked[0]).answer() == 42
    forget_answers()
    LOADED.pop(str(path))
    if broken == "record":
        manifest = record / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-1])
    elif broken == "artifact":
        binary = path.read_bytes()
        path.unlink()  # what is loaded keeps its file
        path.write_bytes(binary[:-1] + b"x")
    elif broken == "mode":
        path.chmod(0o666)
    elif broken == "link":
        moved = path.rename(tmp_path / path.name)
        path.symlink_to(moved)
    else:
        (path.parent / "manifest.json").unlink()
    assert memo.recall(asked[0]) is None


@pytest.mark.long
def test_a_record_serves_another_root_too(cache_dir, tmp_path, asked):
    """No path is in it: it is as good in a bundle, a layer or a copy."""
    module("drop_in_moved")
    shutil.copytree(cache_dir, tmp_path / "copy")
    forget_answers()
    with config.using(cache_dir=tmp_path / "copy", compile="never"):
        moved = memo.recall(asked[0])
    assert Path(moved.__file__).is_relative_to(tmp_path / "copy") and moved.answer() == 42


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        '#inc\\\nlude "\\\n{d}/x.h"',
        '#if __has_include("{d}/y.h")\n#endif',
        "#define S(x) #x\n#define P(x) S({d}/x)\n#if __has_include(P(y.h))\n#endif",
        'asm(".inc" "bin \\"{d}/x.h\\"");',
        'asm(".incbin \\"{d}/x.h\\"");',
        'asm(".include \\"{d}/x.h\\"");',
    ],
)
def test_a_text_that_asks_for_files_is_looked_up_at_each_call(cache_dir, files, text):
    folder = files(x_dot_h="")
    module("drop_in_asks", text.replace("{d}", str(folder)))
    assert not shortcuts(cache_dir) and not answers()


@pytest.mark.long
def test_a_record_serves_until_a_header_that_was_not_there_comes(asked, files, monkeypatch):
    folder = files(keep="")
    monkeypatch.setattr("jitkern.source.includes.SITE", str(folder))
    module("drop_in_header", "#if __has_include(<x.h>)\n#endif")
    forget_answers()
    assert memo.recall(asked[0]).answer() == 42 and answers()
    files(x_dot_h="")
    assert memo.recall(asked[0]) is None


@pytest.mark.long
def test_calls_that_name_files_leave_no_record(cache_dir, files):
    files(n_dot_h="")
    module("drop_in_files_named", extra_include_paths=["."])
    module("drop_in_flag_named", extra_cflags=["-I."])
    module("drop_in_text_named", '#if 0\n#include "/x.h"\n#endif')
    assert not shortcuts(cache_dir) and not answers()


def test_compiling_may_be_off():
    with config.using(compile="never"), pytest.raises(NotCached, match="Call it once, with") as e:
        module("drop_in_never")
    told = "".join(traceback.format_exception(None, e.value, None))
    assert "jitkern prewarm" not in told and told.count("Call it once") == 1


@pytest.mark.long
def test_a_lock_file_of_torch_is_nothing_to_us(tmp_path):
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "lock").touch()
    assert module("drop_in_lock", build_directory=folder).answer() == 42


@pytest.mark.long
def test_the_build_directory_gets_copies_that_stay(tmp_path):
    folder = tmp_path / "new" / "build"
    m = module("drop_in_copies", build_directory=folder)
    names = {"main.cpp", "drop_in_copies.so"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "drop_in_copies.so").read_bytes() == Path(m.__file__).read_bytes()
    before = (folder / "drop_in_copies.so").stat()
    module("drop_in_copies", build_directory=str(folder))
    assert (folder / "drop_in_copies.so").stat() == before
    module("drop_in_copies", value(1), build_directory=folder)
    assert (folder / "drop_in_copies.so").stat().st_ino != before.st_ino


@pytest.mark.long
def test_use_pch_writes_nothing_into_torch():
    assert module("drop_in_pch", use_pch=True, keep_intermediates=False).answer() == 42
    assert not list((Path(torch.__file__).parent / "include" / "torch").glob("extension.h.*"))


@pytest.mark.long
def test_a_library_that_no_longer_links_is_built_again(files, caplog):
    texts = {"other_dot_cpp": "int other() { return 1; }", "renamed_dot_cpp": "int renamed() { return 2; }"}  # fmt: skip
    folder = files(**texts)
    source = MODULE % "int other();\n#define ANSWER other()"
    link = f"-L{folder} -lmoved -Wl,-rpath,{folder}"
    link_of = ["c++", "-shared", "-fPIC", "-o", "libmoved.so"]
    subprocess.run([*link_of, "other.cpp"], check=True)
    code = f"""
import jitkern
print(jitkern.load_inline("drop_in_moved", {source!r}, no_implicit_headers=True, extra_ldflags=[{link!r}]).answer())
"""
    run = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.check_output(run, text=True).strip() == "1"
    subprocess.run([*link_of, "renamed.cpp"], check=True)
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "compiling it again" in done.stderr and "LoadError" not in done.stderr.splitlines()[0]
    assert "undefined symbol" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_verbose_tells_what_was_compiled(capsys):
    module("drop_in_verbose", verbose=True)
    shown = capsys.readouterr().err.splitlines()
    assert "-DTORCH_EXTENSION_NAME=drop_in_verbose" in shown[0] and shown[-1].startswith("built ")
    assert [line for line in shown if line.startswith("$ ")]
    module("drop_in_verbose", verbose=True)
    assert capsys.readouterr().err.splitlines() == [shown[-1].replace("built", "found")]


@pytest.mark.long
def test_a_header_that_the_call_does_not_name_is_watched(tmp_path, monkeypatch):
    monkeypatch.setenv("CPATH", str(tmp_path))
    testing.set_settings(monkeypatch)
    for number in (1, 2):
        (tmp_path / "drop_in_watched.h").write_text(value(number))
        assert module("drop_in_watched", '#include "drop_in_watched.h"').answer() == number


@pytest.mark.long
def test_the_environment_is_that_of_the_call(tmp_path, monkeypatch):
    for number in (1, 2):
        header = tmp_path / str(number) / "drop_in_environment.h"
        header.parent.mkdir()
        header.write_text(value(number))
        monkeypatch.setenv("CPATH", str(header.parent))
        m = module("drop_in_environment", "#include <drop_in_environment.h>")
        assert m.answer() == number
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerNotFound, match="no-such-compiler"):
        module("drop_in_environment", "#define X")


@pytest.mark.long
def test_relative_flags_and_includes_start_at_the_build_folder(files):
    headers = {"out__n_dot_h": "#define N 1", "inc__i_dot_h": "#define I 20"}
    files(**headers, lib__o_dot_cpp="int o() { return 300; }")
    subprocess.run(["c++", "-shared", "-fPIC", "lib/o.cpp", "-o", "out/libo.so"], check=True)
    define = '#include "n.h"\n#include <i.h>\nint o();\n#define ANSWER N + I + o()'
    linked = ["-L.", "-lo", "-Wl,-rpath,'$$ORIGIN'"]
    flags = {"extra_cflags": ["-I ../inc"], "extra_ldflags": linked}
    for number in (1, 2):
        files(out__n_dot_h=f"#define N {number}")
        m = module("drop_in_relative", define, build_directory="out", **flags)
        assert m.answer() == 320 + number
    with pytest.raises(CompileError):
        module("drop_in_relative", define)


@pytest.mark.long
def test_a_path_is_that_of_a_file(cache_dir):
    paths = []
    for _ in range(2):
        paths.append(module("drop_in_deleted", is_python_module=False))
        assert Path(paths[-1]).is_file()
        shutil.rmtree(cache_dir)
