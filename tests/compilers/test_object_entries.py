"""Objects of units are entries: an edit compiles one unit, a killed build keeps what was finished."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cpp_texts import MODULE
from helpers import until, write_files

import jitkern
from jitkern import cache_tools, config, jit
from jitkern.cache import eviction
from jitkern.cache_tools import EntryFilter
from jitkern.compilers.cuda import toolkit
from jitkern.errors import CompileError
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
ONE, TWO = "int one() { return 1; }\n", "int two() { return 2; }\n"
LIBRARY = """
#include <torch/csrc/stable/library.h>
int one();
STABLE_TORCH_LIBRARY(objects_of_two, m) { m.def("one() -> int"); }
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "units"
    bind = MODULE % "int one();\nint two();\n#define ANSWER one() + two()"
    write_files(folder, {"bind.cpp": bind, "one.cpp": ONE, "two.cpp": TWO})
    return folder


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A compiler that notes its units, and waits at `one.cpp` while `slow` is there; what it noted."""
    noted, slow, script = tmp_path / "noted", tmp_path / "slow", tmp_path / "c++.sh"
    script.write_text(
        f"""\
for word; do
  case "$word" in
    -c) compiles=yes;;
    *.cpp) [ "$compiles" ] && echo "${{word##*/}}" >> {noted} && unit="$word";;
  esac
done
case "$unit" in *one.cpp) while [ -e {slow} ]; do sleep 0.05; done;; esac
exec c++ "$@"
"""
    )
    monkeypatch.setenv("CXX", f"sh {script}")

    def units():
        found = sorted(noted.read_text().split()) if noted.exists() else []
        noted.write_text("")
        return found

    units.noted, units.slow = noted, slow
    return units


UNITS = ["bind.cpp", "one.cpp", "two.cpp"]


def load(folder, name="objects", **arguments):
    return jitkern.load(name, [folder / file for file in UNITS], **arguments)


def loading(folder, cache_dir, **options):
    """A process that loads them, once two objects are in the cache."""
    files = [str(folder / file) for file in UNITS]
    code = f"import jitkern; print(jitkern.load('objects', {files}).answer())"
    child = subprocess.Popen([sys.executable, "-c", code], **options)
    until(lambda: len(objects(cache_dir)) >= 2, of=[child])
    return child


def objects(cache_dir, stem="*"):
    return sorted(cache_dir.glob(f"v1/*/object.{stem}-*/unit.o"))


@pytest.mark.long
def test_an_edit_compiles_what_reads_the_file(folder, compiled, cache_dir):
    assert load(folder).answer() == 3
    assert compiled() == UNITS
    (folder / "two.h").write_text("#define TWO 20\n")
    (folder / "two.cpp").write_text('#include "two.h"\nint two() { return TWO; }\n')
    assert (load(folder).answer(), compiled()) == (21, ["two.cpp"])
    (folder / "two.h").write_text("#define TWO 200\n")
    assert (load(folder).answer(), compiled()) == (201, ["two.cpp"])
    (folder / "two.cpp").write_text(TWO)
    assert (load(folder).answer(), compiled()) == (3, []), "as it was at first"
    assert load(folder, extra_cflags=["-DMORE"]).answer() == 3
    assert compiled() == UNITS


@pytest.mark.long
def test_a_build_without_a_change_of_units_only_links(folder, compiled):
    load(folder)
    compiled()
    assert load(folder, extra_ldflags=["-Wl,-z,now"]).answer() == 3
    assert compiled() == []


@pytest.mark.long
def test_extensions_share_units_that_lack_their_name(folder, compiled, tmp_path):
    load(folder)
    compiled()
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert load(moved, "other").answer() == 3
    assert compiled() == ["bind.cpp"]


@pytest.mark.long
def test_a_killed_build_keeps_what_was_finished(folder, compiled, cache_dir):
    compiled.slow.touch()
    child = loading(folder, cache_dir, start_new_session=True)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    compiled.slow.unlink()
    compiled()
    assert (load(folder).answer(), compiled()) == (3, ["one.cpp"])


@pytest.mark.long
def test_a_failed_build_keeps_what_was_finished(folder, compiled):
    (folder / "two.cpp").write_text("int two() { return two; }\n")
    with config.using(jobs=1), pytest.raises(CompileError, match=r"two\.cpp:1"):
        load(folder)
    (folder / "two.cpp").write_text(TWO)
    compiled()
    assert (load(folder).answer(), compiled()) == (3, ["two.cpp"])


@pytest.mark.long
def test_a_damaged_object_is_found_and_compiled_again(folder, compiled, cache_dir, caplog):
    load(folder)
    compiled()
    (path,) = objects(cache_dir, "two")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    bad = cache_tools.rows(jit.open_cache(), EntryFilter(problem=True), verify="always")
    assert [row.path for row in bad] == [str(path.parent)]
    (folder / "one.cpp").write_text("int one() { return 10; }\n")
    assert (load(folder).answer(), compiled()) == (12, ["one.cpp", "two.cpp"])
    assert "is damaged" in caplog.text


@pytest.mark.long
def test_a_unit_that_reads_beyond_its_key_is_left_to_torch(folder, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    header = folder.parent / "elsewhere.h"
    for two in (2, 20):  # Torch compares the texts of the units alone
        header.write_text(f"#define TWO {two}\n")
        text = f'// {two}\n#define H "{header}"\n#include H\nint two() {{ return TWO; }}\n'
        (folder / "two.cpp").write_text(text)
        assert load(folder).answer() == 1 + two
    assert "left to Torch" in caplog.text


@pytest.mark.long
def test_a_unit_that_is_edited_in_mid_compile_is_compiled_again(folder, compiled, cache_dir):
    compiled.slow.touch()
    child = loading(folder, cache_dir, stdout=subprocess.PIPE, text=True)
    (folder / "one.cpp").write_text("int one() { return 10; }\n")
    compiled.slow.unlink()
    assert child.communicate()[0] == "12\n"
    assert len(objects(cache_dir, "one")) == 1, "only of the text that was compiled"


@pytest.mark.long
def test_another_compiler_makes_its_own_objects(folder, compiled, tmp_path, monkeypatch):
    load(folder)
    compiled()
    other = tmp_path / "other.sh"
    other.write_text(
        f'[ "$1" = --version ] && echo "c++ (Other) 99.0" && exit\nexec {os.environ["CXX"]} "$@"\n'
    )
    monkeypatch.setenv("CXX", f"sh {other}")
    (folder / "two.cpp").write_text("int two() { return 20; }\n")
    assert (load(folder).answer(), compiled()) == (21, UNITS)


def variant_of(folder, *units):
    """A library of ops of these units."""
    (folder / "bind.cpp").write_text(LIBRARY)
    files = ("bind.cpp", *units)
    source = Extension(files, folder=str(folder), function="objects_of_two::one")
    return Variant("t::one", source)


@pytest.mark.long
def test_refresh_compiles_the_units_again(folder, compiled, cache_dir):
    variant, target = variant_of(folder, "one.cpp"), Target.current("cpu")
    with config.using(cxx=os.environ["CXX"]):
        jit.ensure(variant, target)
        made = {path: path.stat().st_ino for path in objects(cache_dir)}
        compiled()
        entry = jit.ensure(variant, target, refresh=True)
    assert compiled() == ["bind.cpp", "one.cpp"]
    assert entry.manifest.meta["namespaces"] == ["objects_of_two"]
    again = {path: path.stat().st_ino for path in objects(cache_dir)}
    assert made.keys() == again.keys() and not made.items() & again.items()


@pytest.mark.long
@pytest.mark.skipif(not toolkit.nvcc(), reason="needs nvcc")
def test_another_arch_takes_the_host_objects(folder, compiled, cuda_target, cache_dir):
    (folder / "kernel.cu").write_text("__global__ void fill(int* out) { *out = 1; }\n")
    variant = variant_of(folder, "one.cpp", "kernel.cu")
    with config.using(cxx=os.environ["CXX"]):
        for arch in ("sm_80", "sm_90"):
            with contextlib.suppress(CompileError):  # of the linker, if this Torch is for the CPU
                jit.ensure(variant, cuda_target._replace(arch=arch))
    assert compiled() == ["bind.cpp", "one.cpp"]
    assert len(objects(cache_dir, "kernel")) == 2


@pytest.mark.long
def test_objects_stay_at_home_and_go_first(folder, cache_dir):
    load(folder)
    cache = jit.open_cache()
    (library,) = cache_dir.glob("v1/*/inline.objects.inline-*")
    long_ago = time.time() - 1e6
    os.utime(library / "manifest.json", (long_ago, long_ago))
    assert [e.op for e in cache_tools.chosen(cache, EntryFilter())] == ["inline::objects"]
    wanted = EntryFilter(kind="object", op="object::two")
    assert [e.op for e in cache_tools.chosen(cache, wanted)] == ["object::two"]
    going = eviction.evictable(cache, max_size=0)
    assert [use.path.name.partition(".")[0] for use in going] == ["object"] * 3 + ["inline"]
    assert [Path(use.path) for use in going][-1] == library
