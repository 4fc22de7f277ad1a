"""`patch_extensions`: Torch's own `load` and `load_inline` build through the cache."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from cpp_texts import MODULE
from helpers import run_threads, write_files
from inline_modules import value
from torch.utils import cpp_extension

import jitkern
from jitkern import config, target
from jitkern.dropin import api
from jitkern.errors import CompileError, LoadError, NotCached, TargetError
from jitkern.source.flags import NotSupported

NAMES = ("load", "load_inline")
TORCHS = {name: getattr(cpp_extension, name) for name in NAMES}


@pytest.fixture
def torchs(monkeypatch):
    """The calls that reach Torch's functions, of which none builds."""
    calls = []
    for name in NAMES:

        def built(*args, _name=name, **keywords):
            calls.append((_name, args, keywords))
            return f"Torch's {_name}"

        built.__name__ = name
        monkeypatch.setattr(cpp_extension, name, built)
    return calls


@pytest.fixture
def ours(monkeypatch):
    """The calls that reach the drop-ins, which return or raise what the test appends to `answers`."""
    calls = types.SimpleNamespace(seen=[], answers=["ours"])
    for name in NAMES:
        assert getattr(jitkern, name).__wrapped__  # calls what this replaces

        def answered(*args, _name=name, **keywords):
            calls.seen.append((_name, args, keywords))
            if isinstance(calls.answers[-1], Exception):
                raise calls.answers[-1]
            return calls.answers[-1]

        monkeypatch.setattr(api, name, answered)
    return calls


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# The way there and back.


@pytest.mark.parametrize("name", NAMES)
def test_calls_reach_the_drop_ins_until_the_end(name, ours, torchs):
    call = lambda: getattr(cpp_extension, name)("x", ["x.cpp"], verbose=True)
    before = getattr(cpp_extension, name)
    with jitkern.patch_extensions() as patch:
        assert call() == "ours" and not torchs
    assert call() == f"Torch's {name}" and getattr(cpp_extension, name) is before
    assert ours.seen == [(name, ("x", ["x.cpp"]), {"verbose": True})] == torchs
    patch.undo()
    assert getattr(cpp_extension, name) is before


def test_an_error_in_the_block_ends_the_patch(ours):
    ours.answers.append(CompileError("why"))
    with pytest.raises(CompileError), jitkern.patch_extensions():
        cpp_extension.load("x", [])
    assert {name: getattr(cpp_extension, name) for name in NAMES} == TORCHS


def test_the_functions_look_as_torchs_do():
    with jitkern.patch_extensions():
        for name, function in TORCHS.items():
            patched = getattr(cpp_extension, name)
            assert inspect.signature(patched) == inspect.signature(function)
            assert (patched.__doc__, patched.__module__) == (function.__doc__, function.__module__)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_patches_hold_until_the_last_is_undone(order, ours, torchs):
    patches = [jitkern.patch_extensions() for _ in range(3)]
    for number in order:
        assert cpp_extension.load("x", []) == "ours"
        patches[number].undo()
        patches[number].undo()
    assert cpp_extension.load("x", []) == "Torch's load"


def test_a_function_kept_from_a_patch_is_torchs_after_it(ours, torchs):
    with jitkern.patch_extensions():
        kept = cpp_extension.load
    assert kept("x", []) == "Torch's load"
    with jitkern.patch_extensions():
        assert kept("x", []) == "ours"


def test_what_somebody_wraps_meanwhile_stays(ours, torchs, monkeypatch):
    seen = []
    patch = jitkern.patch_extensions()
    below = cpp_extension.load
    wrapper = lambda *args: seen.append(args) or below(*args)
    monkeypatch.setattr(cpp_extension, "load", wrapper)
    assert cpp_extension.load("a", []) == "ours"
    patch.undo()
    assert cpp_extension.load is wrapper and cpp_extension.load("b", []) == "Torch's load"
    with jitkern.patch_extensions():
        assert cpp_extension.load("c", []) == "ours" and len(seen) == 2
        ours.answers.append(NotSupported("no"))
        assert cpp_extension.load("d", []) == "Torch's load" and len(seen) == 3
    assert cpp_extension.load is wrapper


def test_threads_may_patch_and_undo_at_once():
    barrier = threading.Barrier(8)
    ours = set()

    def work():
        for _ in range(50):
            barrier.wait()
            with jitkern.patch_extensions():
                ours.add(cpp_extension.load)
                barrier.wait()

    run_threads(*[work] * 8)
    assert len(ours) <= 50 and not ours & {*TORCHS.values()}
    assert {name: getattr(cpp_extension, name) for name in NAMES} == TORCHS


def is_patched(_):
    """In another process: whether Torch's functions are the drop-ins there."""
    return hasattr(cpp_extension.load, "__wrapped__")


@pytest.mark.long
def test_a_spawned_process_needs_the_line_too():
    context = multiprocessing.get_context("spawn")
    with jitkern.patch_extensions():
        for line, patched in ((None, False), (jitkern.patch_extensions, True)):
            with context.Pool(1, initializer=line) as pool:
                assert pool.map(is_patched, [0]) == [patched]


def test_a_fork_is_patched_whatever_other_threads_do(run_python):
    done = run_python(
        "import os, threading, jitkern\n"
        "from torch.utils import cpp_extension\n"
        "def work():\n"
        "    while not done.is_set():\n"
        "        jitkern.patch_extensions().undo()\n"
        "done, codes = threading.Event(), set()\n"
        "with jitkern.patch_extensions():\n"
        "    thread = threading.Thread(target=work)\n"
        "    thread.start()\n"
        "    for _ in range(4):\n"
        "        if not (child := os.fork()):\n"
        "            jitkern.patch_extensions().undo()\n"
        "            os._exit(hasattr(cpp_extension.load, '__wrapped__'))\n"
        "        codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "    done.set()\n"
        "    thread.join()\n"
        "print(codes)\n"
    )
    assert done.stdout == "{1}\n", done.stderr


# What falls back.


@pytest.mark.parametrize(
    "call",
    [
        lambda: cpp_extension.load("x", ["a.cpp", "b.sycl"], extra_cflags=["-O2"]),
        lambda: cpp_extension.load(name="x", sources=["a.cpp"], with_sycl=True),
        lambda: cpp_extension.load_inline("x", "", None, "a text", extra_sycl_cflags=["-O2"]),
        lambda: cpp_extension.load_inline(name="x", cpp_sources="", with_sycl=True),
    ],
)
def test_sycl_is_left_to_torch_with_one_warning(call, torchs, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = call(), torchs.pop()
    with jitkern.patch_extensions():
        assert (call(), torchs.pop()) == expected and not torchs
    (warning,) = warnings_of(caplog)
    assert warning.startswith("`x` is left to Torch, which builds it without the cache: ")
    assert "SYCL" in warning


@pytest.mark.parametrize("name", NAMES)
def test_other_systems_are_left_to_torch(name, ours, torchs, caplog, monkeypatch):
    monkeypatch.setattr(target, "glibc", lambda: "")
    monkeypatch.setattr(sys, "platform", "darwin")
    with jitkern.patch_extensions():
        assert getattr(cpp_extension, name)("x", "") == f"Torch's {name}" and not ours.seen
    assert "macOS is not supported" in warnings_of(caplog)[0]


@pytest.mark.parametrize("arguments", [{"cuda_sources": "// nothing"}, {"with_cuda": True}])
def test_rocm_is_left_to_torch_and_its_cpp_is_not(arguments, torchs, caplog, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with jitkern.patch_extensions(), config.using(compile="never"):
        with pytest.raises(NotCached, match="`x` is never in the cache: .* ROCm"):
            cpp_extension.load_inline("x", "", **arguments)
        with pytest.raises(NotCached, match="is not cached in"):
            cpp_extension.load_inline("x", "int x;", no_implicit_headers=True)
    with jitkern.patch_extensions():
        assert cpp_extension.load_inline("x", "", **arguments) == "Torch's load_inline"
    assert "ROCm" in warnings_of(caplog)[0]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_far_below_is_left_to_torch(name, ours, torchs, caplog):
    ours.answers.append(NotSupported("`@flags`: files of flags are not read"))
    with jitkern.patch_extensions():
        assert getattr(cpp_extension, name)(name="x") == f"Torch's {name}"
    assert warnings_of(caplog)[0].endswith(": `@flags`: files of flags are not read")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_to_torch_where_nothing_may_compile(name, ours, torchs, caplog):
    ours.answers.append(NotSupported("jitkern compiles no SYCL"))
    says = "`x` is never in the cache: jitkern compiles no SYCL. .*off"
    off = config.using(compile="never")
    with jitkern.patch_extensions(), off, pytest.raises(NotCached, match=says):
        getattr(cpp_extension, name)("x", [])
    assert not torchs and not warnings_of(caplog)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "error",
    [CompileError, NotCached, LoadError, TargetError, TypeError, ValueError, NotImplementedError, RuntimeError],
)  # fmt: skip
def test_all_other_errors_are_raised(error, name, ours, torchs, caplog):
    ours.answers.append(error("why"))
    with jitkern.patch_extensions(), pytest.raises(error, match="why") as caught:
        getattr(cpp_extension, name)("x", [])
    assert caught.value is ours.answers[-1] and not torchs and not warnings_of(caplog)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (TypeError, lambda: cpp_extension.load("x")),
        (TypeError, lambda: cpp_extension.load_inline("x", "", no_such_argument=1)),
        (TypeError, lambda: cpp_extension.load_inline("x", "", extra_cflags="-O3")),
        (ValueError, lambda: cpp_extension.load_inline("x", "", functions=5)),
        (ValueError, lambda: cpp_extension.load("x", [], is_standalone=True)),
        (ValueError, lambda: cpp_extension.load_inline("a-b", "")),
        (FileNotFoundError, lambda: cpp_extension.load("x", ["no_such_file.cpp"])),
    ],
)
def test_bad_arguments_are_raised(error, call, torchs):
    with jitkern.patch_extensions(), pytest.raises(error):
        call()
    assert not torchs


# Who has Torch's functions already.


def test_modules_that_hold_torchs_functions_are_named(caplog, monkeypatch):
    for name, attributes in {
        "early_a": {"load_inline": TORCHS["load_inline"]},
        "early_b": {"build": TORCHS["load"], "load_inline": TORCHS["load_inline"]},
        "by_module": {"cpp_extension": cpp_extension},
        "of_its_own": {"load": lambda: 0},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "again_a", sys.modules["early_a"])  # as `__mp_main__`
    monkeypatch.setitem(sys.modules, "no_module", None)
    with jitkern.patch_extensions(), jitkern.patch_extensions():
        pass
    (warning,) = warnings_of(caplog)
    assert warning.startswith("patch_extensions comes too late for early_a, early_b: ")


def test_a_program_that_holds_none_is_warned_of_nothing(run_python):
    done = run_python(
        "import jitkern, torch.utils.cpp_extension as c\n"
        "jitkern.patch_extensions().undo()\n"
        "from torch.utils.cpp_extension import load\n"
        "jitkern.patch_extensions()\n"
    )
    warnings = re.findall("patch_extensions comes too late for .*?:", done.stderr)
    assert done.returncode == 0, done.stderr
    assert warnings == ["patch_extensions comes too late for __main__:"]


# The real thing.


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_a_program_of_others_is_compiled_once_for_all_starts(cache_dir, monkeypatch):
    def program(number):
        from torch.utils.cpp_extension import load_inline

        return load_inline("patched_program", MODULE % value(number), no_implicit_headers=True)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache_dir.parent / "torch_extensions"))
    with jitkern.patch_extensions():
        assert program(1).answer() == 1
        with config.using(compile="never"):
            assert program(1).answer() == 1
            with pytest.raises(NotCached, match="patched_program"):
                program(2)
        with pytest.raises(CompileError, match="nonsense"):
            cpp_extension.load_inline("broken", "nonsense;", no_implicit_headers=True)
    assert not (cache_dir.parent / "torch_extensions").exists()


PROGRAM = """
import json, sys
import jitkern
jitkern.patch_extensions()  # the one line
import torch
from torch.utils.cpp_extension import load_inline

SOURCE = '''
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
at::Tensor doubled(at::Tensor x) { return x * 2; }
'''
module = load_inline(
    "doubled", SOURCE, functions=["doubled"], no_implicit_headers=True,
    with_pytorch_error_handling=False,
)
import library
print(json.dumps([module.doubled(torch.ones(3)).tolist(), library.scale.answer(), jitkern.stats()["compiles"]]))
"""
LIBRARY = """
import pathlib
from torch.utils import cpp_extension  # as DeepSpeed does
here = pathlib.Path(__file__).parent
scale = cpp_extension.load("scale", [str(here / "scale.cpp")], extra_include_paths=[str(here)])
"""


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_a_program_runs_from_a_bundle_without_a_compiler(cache_dir, tmp_path):
    """Another path of the program, another home, another root: right, and nothing is compiled."""
    here, there, bundle = tmp_path / "here", tmp_path / "there" / "app", tmp_path / "bundle.tar"
    files = {"program.py": PROGRAM, "library.py": LIBRARY, "value.h": value(7)}
    write_files(here, {**files, "scale.cpp": MODULE % '#include "value.h"'})

    def run(*words, cwd=here, **environment):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *map(str, words)], cwd=cwd, check=False, capture_output=True, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(run("program.py")) == [[2.0] * 3, 7, 2]
    run("-m", "jitkern", "cache", "pack", "-o", bundle)
    shutil.rmtree(cache_dir)
    shutil.copytree(here, there)
    shutil.rmtree(here)
    elsewhere = {name: str(tmp_path / name.lower()) for name in ("HOME", "PATH", "TMPDIR")}
    for place in elsewhere.values():
        Path(place).mkdir()
    elsewhere.update(JITKERN_CACHE_DIR=str(tmp_path / "root"), CC="/no/cc", CXX="/no/c++")
    run("-m", "jitkern", "cache", "unpack", bundle, cwd=there, **elsewhere)
    never = {**elsewhere, "JITKERN_COMPILE": "never"}
    assert json.loads(run("program.py", cwd=there, **never)) == [[2.0] * 3, 7, 0]
