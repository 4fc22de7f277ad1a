"""The real Triton, in its child process; it needs no GPU."""

import importlib
import os
import py_compile
import signal
import subprocess
import sys
import threading

import pytest
import torch
from helpers import H100, assert_refused, needs_triton, one_in_four, until

import jitkern
from jitkern import config, jit
from jitkern.compilers.triton import build as compiler
from jitkern.errors import CompileError, CompilerNotFound, LaunchError, TargetError
from jitkern.launch.declared import declared_in
from jitkern.source.dtypes import DTYPES
from jitkern.source.kinds import Triton, Variant
from jitkern.target import Target

TARGET = Target.parse(H100)
pytestmark = needs_triton

HEAD = "import triton\nimport triton.language as tl\n"
COPY = HEAD + (
    "@triton.jit\n"
    "def k(out, x, n, scale, B: tl.constexpr):\n"
    "    i = tl.arange(0, B)\n"
    "    tl.store(out + i, tl.load(x + i, mask=i < n) * scale, mask=i < n)\n"
)
# The kernel without its head: `V`, a number, is to be declared above it.
WITH_V = COPY.removeprefix(HEAD).replace("* scale", "* scale * V")
SIGNATURE = ("*f32:16", "*f32:16", "i32", "f32")
BESIDE = "import sys, os\nsys.path.insert(0, os.path.dirname(__file__))\n"


@pytest.fixture
def build(tmp_path):
    folder = tmp_path / "kernels" / "k"
    folder.mkdir(parents=True)

    def run(
        text=COPY, function="k", template=(("B", 64),), signature=SIGNATURE, options=(), target=TARGET,
    ):  # fmt: skip
        if text is not None:
            (run.folder / "k.py").write_text(text)
        source = Triton("k.py", folder=str(run.folder))
        variant = Variant("test::k", source, function, template, signature, options)
        return jit.ensure(variant, target)

    run.folder = folder
    return run


def declared(folder, file="k.py", function="k"):
    """Return the declaration of a function in a file of this folder."""
    return declared_in("test::k", Triton(file, folder=str(folder)), function, TARGET)


@pytest.mark.long
def test_cubin_metadata_and_signature_are_kept(build):
    meta = build().manifest.meta
    assert meta["parameters"] == ["*f32", "*f32", "i32", "f32"]
    assert (meta["symbol"], meta["block"]) == ("k", 128)
    assert (meta["scratch"], meta["cluster"]) == ([0, 0], 1)


@pytest.mark.long
def test_one_and_none_are_compiled_in(build):
    meta = build(signature=("*f32:16", "*f32", "1", "f32")).manifest.meta
    assert meta["parameters"] == ["*f32", "*f32", "f32"]


@pytest.mark.long
def test_options_reach_triton(build):
    assert build(options=(("num_warps", 8),)).manifest.meta["block"] == 256


@pytest.mark.long
def test_tritons_own_cache_is_not_used(build, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with config.using(environment={**config.current().environment, "HOME": str(tmp_path / "home")}):
        build()
    assert not (tmp_path / "home").exists()


OTHER = "V = tl.constexpr(2)\n"


OUTSIDE = [
    "from other import V",
    "from other import *",
    "from other import V as W\nV: tl.constexpr = W.value + 1",
    "try:\n    from other import V\nexcept Exception:\n    V = tl.constexpr(2)",
    "import importlib\nV = importlib.import_module('other').V",
    "def read():\n    from other import V\n    return V\nV = read()",
    "V = tl.constexpr(int(open(DATA).read()))",
    "from pathlib import Path\nV = tl.constexpr(int(Path(DATA).read_text()))",
    "import io\nV = tl.constexpr(int(io.open(DATA).read()))",
    "import os\nV = tl.constexpr(int(os.read(os.open(DATA, os.O_RDONLY), 1)))",
    "import numpy\nV = tl.constexpr(int(numpy.fromfile(DATA, dtype='uint8')[0]))",
    "def read(file=open):\n    return file(DATA).read()\nV = tl.constexpr(int(read()))",
    "try:\n    V = tl.constexpr(int(open(DATA).read()))\nexcept Exception:\n    V = tl.constexpr(2)",
    "import own\nV = own.made()",
    "import subprocess\nV = tl.constexpr(int(subprocess.check_output(['cat', DATA])))",
    "import os\nV = tl.constexpr(2 + os.system('true'))",
    "import os\nV = tl.constexpr(len(os.environ))",
    "import torch\nV = tl.constexpr(int(torch.zeros(1, device='cuda')[0]))",
    "V = tl.constexpr(triton.runtime.driver.active.get_current_stream(0))",
]


@pytest.mark.parametrize("text", one_in_four(OUTSIDE))
def test_an_import_that_reads_what_no_key_covers_is_refused(build, tmp_path, text):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.py").write_text(f"import triton.language as tl\n{OTHER}")
    data = tmp_path / "data.txt"
    data.write_text("2")
    (build.folder / "own.py").write_text(
        f"import triton.language as tl\ndef made(): return tl.constexpr(int(open({str(data)!r}).read()))\n"
    )
    head = f"{HEAD}import sys\nsys.path.append({str(tmp_path / 'elsewhere')!r})\nDATA = {str(data)!r}\n"
    says = r"(?s)error: the import of .*k\.py (opens|starts|reads the whole|calls|asks) .*put the kernel"
    with pytest.raises(CompileError, match=says):
        build(f"{head}{text}\n{WITH_V}")


@pytest.mark.long
@pytest.mark.parametrize("of", ["file", "package"])
def test_what_a_compile_reads_is_covered_or_refused(build, of):
    (build.folder / "data.txt").write_text("2")
    (build.folder / "__init__.py").write_text("V = 2")
    data = str(build.folder / "data.txt")
    text = {
        "file": f"@triton.constexpr_function\ndef v(): return int(open({data!r}).read())\n"
        + WITH_V.replace("* V", "* v()"),
        "package": f"import sys\nV = tl.constexpr(sys.modules[__package__].V)\n{WITH_V}",
    }[of]
    with pytest.raises(CompileError, match="which the cache key does not cover"):
        build(HEAD + text)


@pytest.mark.parametrize(
    "text",
    [
        "V = tl.constexpr(2)",
        "import math\nV = tl.constexpr(math.floor(math.pi))",
        "D = {}\nD['v'] = 2\nD.update(v=3)\nV = tl.constexpr(D['v'])",
        "import own\nV = tl.constexpr(own.V.value)",
        "from own import V",
        "from own import *",
        "def made(n):\n    open = n + 1\n    return open\nV = tl.constexpr(made(2))",
        "class C: pass\nC.v = 2\nV = tl.constexpr(C.v)",
        "V = tl.constexpr(2)\ndef chosen():\n    global V\n    V = tl.constexpr(3)\nchosen()",
        "V = tl.constexpr(2)\nif __name__ == '__main__':\n    V = open('/nowhere').read()",
        "V = tl.constexpr(2)\nprint('V' in globals(), len(vars()), globals()['V'])\nclass C: pass\nsetattr(C, 'V', open('/dev/null'))",
        "V = tl.constexpr(2)\nnames = {}\nexec('V = 3', names)\ndef run(): exec('V = 3')",
        "V = tl.constexpr(2)\nfor n in 'AB': globals()['W'] = n",
        "sys.modules[__name__].V = tl.constexpr(2)",
        "globals()['V'] = tl.constexpr(2)",
        "exec('V = tl.constexpr(2)')",
        "V = tl.constexpr(3)\nglobals().update(V=tl.constexpr(2))",
        "V = tl.constexpr(3)\ndef read(): exec('V = tl.constexpr(2)', globals())\nread()",
        "import os\nos.environ['OWN'] = '3'\nV = tl.constexpr(int(os.environ['OWN']))",
        "import torch\nV = tl.constexpr(3 if torch.cuda.get_device_capability() >= (9, 0) else 2)",
        "V = tl.constexpr(triton.runtime.driver.active.get_current_target().arch)",
        "from json import *\nV = tl.constexpr(2)",
        "@triton.jit\ndef half(x):\n    return x / 2\nV = tl.constexpr(2)\nfor name in ('a', 'b'):\n    print(open)",
    ],
)  # fmt: skip
def test_a_constant_of_the_kernels_own_modules_may_be_computed(build, text):
    (build.folder / "own.py").write_text(f"import triton.language as tl\n{OTHER}")
    build(f"{HEAD}{BESIDE}{text}\n{WITH_V}")


def test_a_file_that_asks_for_its_own_module_finds_it(build):
    head = f"from __future__ import annotations\n{HEAD}from dataclasses import dataclass\n"
    value = "@dataclass\nclass Sizes:\n    one: int = 2\nV = tl.constexpr(Sizes().one)\n"
    build(head + value + WITH_V)


@pytest.mark.parametrize(
    "chosen", ["from triton.language.extra.cuda.libdevice import tanh", "tanh = libdevice.tanh"]
)
def test_which_version_names_a_function_may_be_asked_of_any(build, chosen):
    head = (
        "import importlib\nfrom triton.language.extra.cuda import libdevice\n"
        f"if importlib.import_module('triton').__version__ > '2':\n    {chosen}\n"
    )
    build(head + COPY.replace("* scale", "* tanh(scale)"))


def test_what_only_a_launch_uses_may_come_from_anywhere(build):
    head = "import json\nLIST = json.loads('[1]')\ndef launch():\n    return open('/nowhere')\n"
    head += "json.dumps([*globals()])\n"
    build(head + COPY)


REFUSED = {
    "a name that is not defined": (COPY.replace("* scale", "* nothing"), {}, r"kernels/k/k\.py\(6\): error: .*nothing"),
    "an assertion without a word": (
        COPY.replace("    i = tl", "    tl.static_assert(B < 64)\n    i = tl", 1), {},
        r"k\.py\(5\): error: CompileTimeAssertionFailure: tl\.static_assert\(B < 64\)\nfull log",
    ),
    "without a line of ours": (
        COPY.replace("* scale", "* scale * int(open('/nowhere'))"), {},
        r"error: NameError\('open is not defined'\)\nfull log: ",
    ),
    "a syntax error": (f"{COPY}def broken(:\n", {}, r"kernels/k/k\.py\(\d\): error: "),
    "a missing function": (COPY, {"function": "other"}, r"has no @triton.jit function `other`; it has: k"),
    "a function without jit": (COPY.replace("@triton.jit\n", ""), {}, "has no @triton.jit function `k`; it has: none"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_compiled_is_refused_with_its_reason(build, case):
    assert_refused(build, *REFUSED[case])


@pytest.mark.parametrize("arch", ["sm_35", "sm_99"])
def test_an_arch_that_its_assembler_does_not_know_is_no_target(build, arch):
    says = f"test::k: Triton .* cannot build for cuda-{arch}-.*: it does not know {arch}"
    with pytest.raises(TargetError, match=says):
        build(target=TARGET._replace(arch=arch))


def test_an_error_in_a_called_function_names_its_line_there(build):
    text = COPY.replace("* scale", "* inner(scale)") + (
        "\n\nFACTOR = 2.0\n\n\n@triton.jit\ndef inner(x):\n    y = x\n    return y * FACTOR\n"
    )
    line = text.splitlines().index("    return y * FACTOR") + 1
    with pytest.raises(CompileError, match=rf"k\.py\({line}\): error: .*global variable FACTOR"):
        build(text)


DECORATED = "C = [triton.Config({'B': 64})]\nLIMIT = 9\n"
TUNED = "@triton.autotune(C, key=['n'])\n@triton.jit"


@pytest.mark.parametrize(
    ("text", "decorators", "wanted"),
    [
        ("import sys\nsetattr(sys.modules[__name__], 'C', [triton.Config({'B': 64}, num_warps=8)])", TUNED, {"configs": [("num_warps", 8)]}),
        ("from own import heuristics as more", "@more({'B': lambda a: 64})\n@triton.jit", {"heuristics": ("B",)}),
        ("from own import jit", "@jit", {"plain": frozenset({"n"})}),
        ("class Wrapper:\n    def __init__(self, fn): self.fn = fn", "@Wrapper\n@triton.jit", {"heuristics": ()}),
        ("exec('C = [triton.Config({\"B\": 32}, num_warps=2)]')", TUNED, {"configs": [("num_warps", 2)]}),
        ("I = tl.constexpr", "@triton.jit", {"constexprs": frozenset({"B"})}),
    ],
)  # fmt: skip
def test_decorators_are_what_an_import_gives(build, text, decorators, wanted):
    (build.folder / "own.py").write_text(
        "import triton\nfrom triton import heuristics\n"
        "def jit(f): return triton.jit(f, do_not_specialize=['n'])\n"
    )
    kernel = COPY.removeprefix(HEAD).replace("@triton.jit", decorators)
    kernel = kernel.replace("B: tl.constexpr", "B: I") if text.startswith("I =") else kernel
    build(f"{HEAD}{DECORATED}{text}\n{kernel}")
    found = declared(build.folder)
    for name, value in wanted.items():
        got = getattr(found, name)
        assert ([one.options[0] for one in got] if name == "configs" else got) == value


def test_a_class_that_chooses_in_its_own_way_is_refused(build):
    text = "class Mine(triton.runtime.autotuner.Autotuner): pass\n"
    over = "@(lambda f: Mine(f, f.arg_names, C, [], None, None))\n@triton.jit"
    build(HEAD + DECORATED + text + COPY.removeprefix(HEAD).replace("@triton.jit", over))
    with pytest.raises(CompileError, match="`k` is a Mine, not a plain @triton.jit function"):
        declared(build.folder)
    assert declared(build.folder, function="k.fn").configs == ()


def test_decorators_that_import_and_text_give_compile(build):
    build(
        f"{HEAD}import functools\nfrom enum import Enum\n{DECORATED}"
        "class Limits(Enum): LOW = 1\ndef more(b): C.append(triton.Config({'B': b}))\nmore(32)\n"
        "def limit(a, low=Limits.LOW): return triton.cdiv(a['n'], LIMIT) + low.value\n"
        "def tuned(f): return triton.autotune(C, key=['n'])(triton.heuristics({'S': half})(f))\n"
        "half = functools.partial(limit, low=Limits.LOW)\n@tuned\n"
        + COPY.removeprefix(HEAD).replace("B: tl", "S: tl.constexpr, B: tl"),
        template=(("S", 1), ("B", 64)),
    )


def test_the_worker_survives_a_failure_and_serves_again(build):
    with pytest.raises(CompileError):
        build(function="other")
    worker = compiler.idle[-1]
    build()
    ended = worker.process.poll() == 0  # idle for so long: this machine may be busy
    assert compiler.idle[-1] is worker or ended


def test_a_thread_takes_the_process_that_another_left(build, monkeypatch):
    monkeypatch.setattr(compiler, "idle", [])
    used = []
    for size in (32, 128):
        thread = threading.Thread(target=build, kwargs={"template": (("B", size),)})
        thread.start()
        thread.join()
        used += compiler.idle
    assert len(used) == 2
    assert used[0] is used[1] or used[0].process.poll() == 0  # idle for long: a busy machine


def test_a_variable_that_a_file_sets_is_its_own(build):
    reads = "import os\nV = tl.constexpr(int(os.environ.get('SET_BY_A_FILE', '2')))\n"
    sets = "import os\nos.environ['SET_BY_A_FILE'] = '3'\nV = tl.constexpr(4)\n"

    def compiled(name, text, size):
        (build.folder / f"{name}.py").write_text(f"{HEAD}{text}{WITH_V}")
        facts = declared(build.folder, f"{name}.py").facts
        source = Triton(f"{name}.py", folder=str(build.folder))
        variant = Variant("test::k", source, "k", (("B", size),), SIGNATURE, facts=facts)
        jit.ensure(variant, TARGET)
        return facts

    read = (("variable SET_BY_A_FILE", None),)
    assert compiled("sets", sets, 64) == ()
    assert compiled("reads", reads, 64) == read
    assert compiled("sets", sets, 128) == ()
    assert compiled("reads", reads, 128) == read


@pytest.mark.long
def test_helpers_of_one_name_beside_two_kernels_stay_apart(build):
    found = []
    for name, number in (("first", 1), ("second", 2)):
        build.folder = build.folder.parent / name
        build.folder.mkdir()
        text = f"import triton.language as tl\nV = tl.constexpr({number})\n"
        (build.folder / "beside.py").write_text(text)
        found.append(build(f"{BESIDE}from beside import V\n{HEAD}{WITH_V}").read("kernel.cubin"))
    assert found[0] != found[1]


def really_imported(tmp_path, name, text):
    """A kernel that uses a function of Triton's by way of another module."""
    own = tmp_path / "kernels" / "k"
    imports = "from triton.language.extra.cuda.libdevice import tanh"
    (own / f"{name}.py").write_text(f"{text}\n{imports}\n")
    return f"from {name} import tanh\n" + COPY.replace("* scale", "* tanh(scale)")


@pytest.fixture
def _new_worker(monkeypatch):
    monkeypatch.setattr(compiler, "idle", [])


@pytest.mark.long
@pytest.mark.usefixtures("_new_worker")
def test_no_file_of_the_current_directory_runs(build, tmp_path, monkeypatch):
    here = tmp_path / "downloads"
    here.mkdir()
    for name in ("queue", "json", "triton", "jitkern", "sitecustomize", "usercustomize"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(here)
    build()
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
@pytest.mark.usefixtures("_new_worker")
@pytest.mark.parametrize("place", ["k", "own"])
def test_bytecode_of_a_text_of_same_size_and_time_is_not_taken(build, monkeypatch, place):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    cubins = []
    for number in (2, 3):
        value = f"V = tl.constexpr({number})\n"
        own = build.folder / "own.py"
        own.write_text(f"import triton.language as tl\n{value}")
        head = f"{BESIDE}from own import V\n" if place == "own" else value
        (build.folder / "k.py").write_text(HEAD + head + WITH_V)
        for path in (own, build.folder / "k.py"):
            os.utime(path, (1e9, 1e9))
            if number == 2:
                py_compile.compile(str(path))
        cubins.append(build(None).read("kernel.cubin"))
    assert cubins[0] != cubins[1]


@pytest.mark.long
@pytest.mark.usefixtures("_new_worker")
@pytest.mark.parametrize("change", ["edited", "comes", "goes"])
def test_a_module_imported_for_another_kernel_is_taken_anew(tmp_path, monkeypatch, change):
    folder = tmp_path / f"eager_{change}"
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import first, second\n")
    choice = "try:\n    from .fast import V\nexcept ImportError:\n    V = tl.constexpr(2.0)\n"
    text = HEAD + choice + WITH_V
    files = {
        "first": HEAD + COPY,
        "second": text,
        "fast": "import triton.language as tl\nV = tl.constexpr(3.0)\n",
    }
    for name, content in files.items():
        if (name, change) != ("fast", "comes"):
            (folder / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)

    def built(name):
        source = Triton(f"{name}.py", folder=str(folder), package=folder.name)
        facts = declared_in("test::eager", source, "k", TARGET).facts
        variant = Variant("test::eager", source, "k", (("B", 64),), SIGNATURE, facts=facts)
        return jit.ensure(variant, TARGET, refresh=True).read("kernel.cubin")

    built("first")
    if change == "edited":
        (folder / "second.py").write_text(text.replace("* V", "* V * 5.0"))
    elif change == "comes":
        (folder / "fast.py").write_text(files["fast"])
    else:
        (folder / "fast.py").unlink()
    after = built("second")
    monkeypatch.setattr(compiler, "idle", [])
    assert after == built("second")


@pytest.mark.long
@pytest.mark.usefixtures("_new_worker")
def test_what_an_import_reads_follows_from_no_earlier_import(build, monkeypatch):
    importlib.import_module("setuptools")  # adds distributions below itself to sys.path
    head = f"{HEAD}import packaging.version, networkx\n"
    found = []
    for before in ("", "import torch\n", "import networkx\n", "import sys\nsys.tried = 1\n"):
        monkeypatch.setattr(compiler, "idle", [])
        if before:
            (build.folder / "other.py").write_text(before + COPY)
            declared(build.folder, "other.py")
        (build.folder / "k.py").write_text(f"{head}{COPY}# after {before!r}\n")
        found.append([name for name, _ in declared(build.folder).facts])
    assert {"version networkx", "version packaging"} <= {*found[0]}
    assert found == [found[0]] * 4


@pytest.mark.long
def test_a_file_of_another_folder_is_a_module_of_that_package(tmp_path, monkeypatch):
    for name, text in {
        "k": f"{HEAD}V = tl.constexpr(2.0)\n{COPY.removeprefix(HEAD)}",
        "sub/k": f"{HEAD}from placed.k import V\n{WITH_V}",
    }.items():
        path = tmp_path / "placed" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "placed" / "away").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    import placed.sub.k

    files = [
        ("", "k.py"), ("", "sub/k.py"), ("away", "../sub/k.py"), ("away", placed.sub.k.k),
        ("sub", placed.sub.k.k),
    ]  # fmt: skip
    codes = []
    for folder, file in files:
        package, place = f"placed.{folder}".rstrip("."), str(tmp_path / "placed" / folder)
        source = Triton(file).placed(place, ("decl.py", 1), package=package)
        variant = Variant("t::k", source, "k", (("B", 64),), SIGNATURE)
        cubin = jit.ensure(variant, TARGET, refresh=True).path / "kernel.cubin"
        words = ["readelf", "--hex-dump=.text.k", cubin]  # the code alone: the rest has the paths
        codes.append(subprocess.run(words, check=True, capture_output=True).stdout)
    assert len(codes[0]) > 1000 and codes[0] != codes[1]
    assert codes[1:] == [codes[1]] * 4


@pytest.mark.long
def test_what_an_imported_module_prints_or_reads_is_no_message(build, tmp_path):
    for number, text in enumerate(("print('no answer')", "os.write(1, b'{}\\n')")):
        kernel = really_imported(tmp_path, f"prints{number}", f"import os\n{text}")
        assert build(kernel).manifest.meta["symbol"] == "k"


@pytest.mark.long
def test_an_interrupted_compile_leaves_the_next_no_answer(build, tmp_path):
    interrupted = threading.Event()

    def interrupt(*_):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def interrupt_the_compile():
        until((tmp_path / "begun").exists)
        while not interrupted.wait(0.1):  # a signal just before a wait is heard after it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    build()
    begun = f"import os, time\nos.mkdir({str(tmp_path / 'begun')!r})\n"
    interrupter = threading.Thread(target=interrupt_the_compile)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            build(really_imported(tmp_path, "sleeps", f"{begun}time.sleep(1000)"))
    finally:
        interrupter.join()
        signal.signal(signal.SIGALRM, before)
    build.folder = build.folder.parent / "next"
    build.folder.mkdir()
    assert build(COPY.replace("def k(", "def other("), "other").manifest.meta["symbol"] == "other"


@pytest.mark.long
def test_a_worker_that_died_is_an_error_with_its_status(build, tmp_path):
    dies = "import os\nos.write(2, b'LLVM ERROR: no such thing')\nos._exit(7)"
    with pytest.raises(CompileError, match="ended with status 7: LLVM ERROR: no such thing"):
        build(really_imported(tmp_path, "exits", dies))
    build()


def test_no_triton_says_what_to_install(build, monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compiler, "idle", [])
    with pytest.raises(CompilerNotFound, match="pip install triton"):
        build()


def test_what_is_declared_is_what_triton_read(build):
    (build.folder / "k.py").write_text(
        HEAD + "@triton.jit(do_not_specialize=['n', 1], do_not_specialize_on_alignment=['x'])\n"
        "def k(x, y, n, B: tl.constexpr, *, C: 'tl.constexpr' = 1): pass\ndef no(): pass\n"
    )
    found = declared(build.folder)
    assert (found.defaults, found.parameters) == ((("C", 1),), ("x", "y", "n", "B", "C"))
    assert (found.constexprs, found.plain, found.unaligned) == ({"B", "C"}, {"n", "y"}, {"x"})
    with pytest.raises(LaunchError, match="has no @triton.jit function `no`; it has: k"):
        declared(build.folder, function="no")


def test_a_declaration_of_the_same_time_and_size_is_read_again(build):
    path, found = build.folder / "k.py", []
    for number in (2, 3):
        path.write_text(COPY.replace("B: tl.constexpr", f"B: tl.constexpr = {number}"))
        os.utime(path, (1e9, 1e9))
        found.append(declared(build.folder).defaults)
    assert found == [(("B", 2),), (("B", 3),)]


ANNOTATED = [  # annotation, argument
    ("tl.int64", 100000), ("tl.int64", 1), ("tl.int64", 3), ("'tl.uint32'", 16), ("'i64'", 2),
    ("int", 32), ("tl.float64", 0.1), ("float", 0.1), ("tl.int1", True), ("bool", True),
    ("tl.constexpr", 16), ("str", 16), ("object", 1),
    ("'*fp32'", torch.empty(8)), ("'const *fp32'", torch.empty(8)[1:]), ("'fp32*'", None),
    ("tl.pointer_type(tl.float32)", torch.empty(8)), ("torch.Tensor", torch.empty(8)),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value"), ANNOTATED)
def test_annotations_count_as_triton_has_them(tmp_path, annotation, value):
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    path = tmp_path / "annotated.py"
    path.write_text(f"import torch\n{HEAD}@triton.jit\ndef k(v: {annotation}): pass\n")
    scope = {"__name__": "annotated"}
    exec(compile(path.read_text().replace("@triton.jit\n", ""), path, "exec"), scope)
    fn = JITFunction(scope["k"])
    bind = create_function_from_signature(
        fn.signature, fn.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    ((kind, attribute),) = bind(value)[1]
    kernel = jitkern.triton_kernel(f"{path}:k")
    (variant,) = kernel.variants(value)
    if variant.template or kind == "constexpr":
        assert kind == "constexpr" and (variant.template or variant.signature[0] in ("1", "None"))
        return
    ours, _, aligned = variant.signature[0].partition(":")
    pointer = "*" * ours.startswith("*")
    ours = pointer + DTYPES[ours.removeprefix("*")].triton
    assert (ours.replace("i1", "u1"), bool(aligned)) == (kind.replace("*k", "*"), attribute == "D")


def test_an_annotation_by_a_name_of_the_files_own_counts(build):
    text = COPY.replace("triton.language as tl", "triton.language as tl\nI = tl.int64")
    build(text.replace("n, scale", "n: I, scale"), signature=("*f32", "*f32", "i64", "f32"))
    assert declared(build.folder).annotated == (("n", "i64"),)


@pytest.mark.parametrize("annotation", ["tl.float16", "tl.bfloat16", "'fp16'", "tl.float8e5"])
def test_a_scalar_that_is_a_narrow_float_is_refused_in_words(tmp_path, annotation):
    path = tmp_path / "narrow.py"
    path.write_text(
        f"{HEAD}@triton.jit\ndef wide(a: tl.float32): pass\n@triton.jit\ndef k(a: {annotation}): pass\n"
    )
    says = "`a` is annotated as .*16 bits or fewer cannot be passed: annotate it as tl.float32"
    with pytest.raises(CompileError, match=says):
        jitkern.triton_kernel(f"{path}:k").variants(1.0)
    (variant,) = jitkern.triton_kernel(f"{path}:wide").variants(1.0)
    assert variant.signature == ("f32",)


def test_a_worker_that_dies_within_its_answer_has_ended():
    dies = "import sys; sys.stdin.readline(); print(end='{', flush=True); sys.exit(3)"
    worker = compiler.TritonProcess([sys.executable, "-c", dies], dict(os.environ))
    assert worker.ask({})["status"] == 3


@pytest.mark.long
def test_a_process_that_compiled_ends_without_a_word(run_python, tmp_path):
    (tmp_path / "k.py").write_text(COPY)
    done = run_python(
        f"import torch, jitkern\nx = torch.empty(64, device='meta')\n"
        f"k = jitkern.triton_kernel({str(tmp_path / 'k.py')!r} + ':k')\n"
        f"k.compile(x, x, 64, 2.0, B=64, target={H100!r})\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
