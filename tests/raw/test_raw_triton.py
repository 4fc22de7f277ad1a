"""Triton functions from elsewhere, as they are: by module and name."""

from __future__ import annotations

import copy
import enum
import importlib
import json
import math
import sys

import pytest
import torch
from helpers import H100, needs_triton, one_in_four, run_cell, write_files
from torch.fx.experimental.proxy_tensor import make_fx

import jitkern
from jitkern import jit
from jitkern.errors import CompileError, DeclarationError, LaunchError
from jitkern.source import constants
from jitkern.source.kinds import Triton

TRITON = """
import triton
import triton.language as tl
from . import common

@triton.jit
def add(out, x, y, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr = 1):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + common.same(tl.load(y + i, mask=i < n)), mask=i < n)
"""
COMMON = "import triton\n\n@triton.jit\ndef same(x):\n    return x\n"

# The same kernel without the module beside it.
ALONE = TRITON.replace("from . import common\n", "").replace("common.same", "")
HEAD = "import triton\nimport triton.language as tl\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module and import it."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return importlib.import_module(name)

    return written


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a Triton kernel."""
    files = {"ops/__init__.py": "", "ops/kernels.py": TRITON, "ops/common.py": COMMON}
    write_files(tmp_path / "somelib", {"__init__.py": "", **files})
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "somelib" / "ops"


def tensors():
    return [torch.zeros(1000, device="meta") for _ in range(3)]


def test_a_triton_function_of_a_module_that_is_not_imported(package):
    k = jitkern.triton_kernel("somelib.ops.kernels:add")
    assert (k.source.package, k.source.files) == ("somelib.ops", ("kernels.py",))
    assert k.op == "raw::kernels"
    (variant,) = k.variants(*tensors(), 1000, BLOCK=128, num_warps=8)
    assert variant.template == (("BLOCK", 128), ("DTYPE", 1))
    assert variant.signature == ("*f32:16", "*f32:16", "*f32:16", "i32")
    assert variant.options == (("num_warps", 8),)
    assert "somelib" not in sys.modules
    assert k.variants(*tensors(), n=1000, BLOCK=128, num_warps=8) == [variant]
    assert k.variants(*tensors(), 1000, 128, num_warps=8) == [variant]


@needs_triton
def test_a_triton_function_compiles_through_the_cache(package):
    k = jitkern.triton_kernel("somelib.ops.kernels:add")
    (entry,) = k.compile(*tensors(), 1000, BLOCK=128, target=H100)
    assert entry.manifest.compiler["name"] == "triton"
    assert {"common.py", "kernels.py"} <= {*entry.manifest.inputs["source"]["closure"]}
    (again,) = k.compile(*tensors(), 1000, BLOCK=128, target=H100)
    assert (again.path, again.manifest) == (entry.path, entry.manifest)
    (package / "common.py").write_text(COMMON.replace("return x", "return x * 1"))
    (another,) = k.compile(*tensors(), 1000, BLOCK=128, target=H100)
    assert another.path != entry.path


@pytest.mark.long
@needs_triton
def test_a_package_that_comes_to_the_path_later_is_found(package, tmp_path_factory, monkeypatch):
    def compiled(name):
        jitkern.triton_kernel(name).compile(*tensors(), 1000, BLOCK=128, target=H100)

    compiled("somelib.ops.kernels:add")
    later = tmp_path_factory.mktemp("later")
    (later / "laterlib").mkdir()
    for file in package.iterdir():
        if file.suffix == ".py":
            (later / "laterlib" / file.name).write_text(f"{file.read_text()}# moved\n")
    monkeypatch.syspath_prepend(str(later))
    compiled("laterlib.kernels:add")


@needs_triton
def test_a_triton_function_object_and_a_file(package):
    import triton.language as tl
    from somelib.ops import kernels

    by_object = jitkern.triton_kernel(kernels.add)
    assert by_object.source == jitkern.triton_kernel("somelib.ops.kernels:add").source
    by_path = jitkern.triton_kernel(f"{package}/kernels.py:add")
    assert (by_path.function, by_path.source.package) == ("add", "")
    (variant,) = by_object.variants(*tensors(), 1000, BLOCK=128, DTYPE=tl.int32)
    assert variant.template == (("BLOCK", 128), ("DTYPE", "i32"))


CONSTEXPRS = """
import enum
import triton
import triton.language as tl

class Mode(enum.Enum):
    MEAN = "mean"
    SUM = "sum"

MEAN = tl.constexpr(Mode.MEAN)

@triton.jit
def own(x):
    return -x

@triton.jit
def k(out, x, V: tl.constexpr = "mean", W: tl.constexpr = None):
    v = tl.load(x)
    if V is None:
        v += 1
    elif V == "mean":
        v += 2
    elif V == MEAN:
        v += 3
    if W is not None:
        v = W[1][0](v.to(W[0]))
        v += W[1][1]
    tl.store(out, v)
"""
ACTS = "import triton\n\n@triton.jit\ndef twice(x):\n    return 2 * x\n"


@needs_triton
@pytest.mark.long
def test_constexprs_are_all_that_triton_takes(tmp_path, monkeypatch):
    files = {"__init__.py": "", "consts.py": CONSTEXPRS, "acts.py": ACTS}
    write_files(tmp_path / "constlib", files)
    monkeypatch.syspath_prepend(tmp_path)
    import triton.language as tl
    from constlib import acts, consts

    k = jitkern.triton_kernel(consts.k)
    x = torch.zeros(4, device="meta")
    tuples = [
        (tl.float32, (f, v)) for f in (consts.own, acts.twice) for v in (1, 1.0, float("inf"))
    ]
    given = [{}, {"V": None}, {"V": "sum"}, {"V": consts.Mode.MEAN}, *({"W": w} for w in tuples)]
    entries = [k.compile(x, x, target=H100, **constexprs)[0] for constexprs in given]
    assert k.compile(x, x, target=H100, V="mean", W=None)[0].path == entries[0].path
    assert len({entry.read("kernel.cubin") for entry in entries}) == len(given) - 2  # 1 and 1.0
    assert len({entry.path for entry in entries}) == len(given)
    templates = [dict(e.manifest.inputs["variant"]["template"]) for e in entries]
    assert templates[3]["V"] == "enum('', 'Mode', 'mean')"
    assert templates[4]["W"] == "(f32, (function('', '', 'own'), 1, ), )"
    assert templates[9]["W"] == "(f32, (function('acts.py', 'constlib.acts', 'twice'), inf, ), )"


@needs_triton
def test_the_file_of_a_function_as_constexpr_is_in_the_key(package, module):
    (package / "consts.py").write_text(CONSTEXPRS)
    own_acts = module("own_acts", ACTS)
    import triton.language as tl

    k = jitkern.triton_kernel(f"{package}/consts.py:k")
    x = torch.zeros(4, device="meta")
    paths = []
    for text in (ACTS, ACTS.replace("2", "3"), ACTS):
        module("own_acts", text)
        (entry,) = k.compile(x, x, W=(tl.float32, (own_acts.twice, 1)), target=H100)
        paths.append(entry.path)
    assert paths[0] == paths[2] != paths[1]

    class Local(enum.Enum):
        A = 1

    for value in (Local.A, [1], object()):
        with pytest.raises(LaunchError, match="the constexpr V=.* cannot be compiled in"):
            k.variants(x, x, V=value)


def test_constants_that_are_equal_stay_apart(package):
    k = jitkern.triton_kernel("somelib.ops.kernels:add")
    values = [1, 1.0, True, 0, 0.0, -0.0, False, "1", "f32", torch.float32, (1,), (1.0,), (), None]
    variants = [k.variants(*tensors(), 1000, BLOCK=8, DTYPE=value)[0] for value in values]
    assert len({*variants}) == len(values)
    source = k.source
    for value in (*values, ("a'b\n", (-1, (float("-inf"),)), None), "\ud800"):
        constant = json.loads(json.dumps(constants.encoded(value, source)))
        assert repr(constants.decoded(constant, {"f32": torch.float32}.get, None)) == repr(value)
    nan = constants.encoded(float("nan"), source)
    assert math.isnan(constants.decoded(nan, None, None))


@needs_triton
@pytest.mark.parametrize("edit", [("5.0", "6.0"), ("import triton\n", "import triton\n#\n#\n")])
def test_a_nested_function_has_the_text_it_was_made_of(module, tmp_path, edit):
    nested = "def made():\n    @triton.jit\n    def scale(x):\n        tl.store(x, 5.0)\n    return scale"
    name = f"kernels_edited_{len(edit[0])}"
    m = module(name, HEAD + nested)
    made = m.made()
    path = tmp_path / f"{name}.py"
    path.write_text(path.read_text().replace(*edit))
    assert "tl.store(x, 5.0)" in jitkern.triton_kernel(made).source.text


@pytest.mark.long
@needs_triton
def test_a_heuristic_gives_an_enum_and_a_function_of_its_file(tmp_path, monkeypatch):
    text = (
        "import enum\nclass Mode(enum.Enum):\n    ADD = 1\n@triton.jit\ndef double(x):\n    return 2.0 * x\n"
        "@triton.heuristics({'M': lambda _: Mode.ADD, 'F': lambda _: double})\n"
        "@triton.jit\ndef k(x, M: tl.constexpr, F: tl.constexpr):\n    tl.store(x, F(3.0))\n"
    )
    (tmp_path / "gives_of_its_file.py").write_text(HEAD + text)
    monkeypatch.syspath_prepend(tmp_path)
    k = jitkern.triton_kernel("gives_of_its_file:k")
    (variant,) = k.variants(tensors()[0], target=H100)
    assert dict(variant.template) == {"M": "enum('', 'Mode', 1)", "F": "function('', '', 'double')"}
    k.compile(tensors()[0], target=H100)


@needs_triton
def test_a_function_of_an_edited_file_needs_a_reload(module, tmp_path):
    """Triton would run the text that it has read, and the file has another one."""
    m = module("kernels_edited_live", f"{HEAD}@triton.jit\ndef k(x):\n    tl.store(x, 5.0)\n")
    compiled = [jitkern.triton_kernel(m.k).compile(tensors()[0], target=H100)]
    path = tmp_path / "kernels_edited_live.py"
    path.write_text(path.read_text().replace("5.0", "6.0"))
    with pytest.raises(DeclarationError, match="`k` of .* reload a file that was edited"):
        jitkern.triton_kernel(m.k).compile(tensors()[0], target=H100)
    importlib.reload(m)
    compiled += [jitkern.triton_kernel(m.k).compile(tensors()[0], target=H100)]
    assert compiled[0] != compiled[1]


@pytest.mark.long
@needs_triton
def test_a_nested_function_is_not_that_of_the_file(module):
    text = """
def made(number):
    FACTOR = tl.constexpr(number)

    @triton.jit
    def scale(x):
        tl.store(x, FACTOR)
    return scale

@triton.jit
def scale(x):
    tl.store(x, 5.0)
"""
    m = module("kernels_made", HEAD + text)
    found = [jitkern.triton_kernel(f) for f in (m.scale, m.made(6.0), m.made(7.0))]
    entries = [e for kernel in found for e in kernel.compile(tensors()[0], target=H100)]
    assert len({entry.read("kernel.cubin") for entry in entries}) == 3


def test_a_module_lies_in_packages_without_an_init(tmp_path, monkeypatch):
    write_files(tmp_path, {"partslib/more/kernels.py": TRITON})
    monkeypatch.syspath_prepend(tmp_path)
    k = jitkern.triton_kernel("partslib.more.kernels:add")
    assert k.source.package == "partslib.more"


def test_of_two_functions_of_a_name_the_last_counts(package):
    other = TRITON.partition("common\n")[2].replace("BLOCK", "WIDTH")
    (package / "kernels.py").write_text(TRITON + other)
    k = jitkern.triton_kernel(f"{package}/kernels.py:add")
    (variant,) = k.variants(*tensors(), 1000, WIDTH=128)
    assert dict(variant.template)["WIDTH"] == 128


@needs_triton
@pytest.mark.parametrize("place", ["a file", "a cell"])
def test_a_function_object_is_what_its_module_has(module, place):
    text = f"{HEAD}@triton.jit\ndef k(x, n, BLOCK: tl.constexpr = 32): tl.store(x, n)\n"
    text += 'wide = triton.heuristics({"BLOCK": lambda args: 64})(k)\n'
    in_a_file = place == "a file"
    scope = vars(module("decorated", text)) if in_a_file else run_cell("<a cell>", text, {})
    for name, block in (("k", 32), ("wide", 64)):
        (variant,) = jitkern.triton_kernel(scope[name]).variants(tensors()[0], 9)
        assert dict(variant.template) == {"BLOCK": block}


@needs_triton
@pytest.mark.parametrize("make", [jitkern.triton_kernel, Triton])
def test_a_function_object_that_no_module_has_is_refused(module, make):
    import triton

    m = module("kernels_alone", ALONE)
    elsewhere = triton.heuristics({"BLOCK": lambda args: 128})(m.add)
    with pytest.raises(DeclarationError, match="`add` of its module is another function"):
        make(elsewhere)


@needs_triton
def test_a_configuration_that_does_not_compile_is_left_out(package, caplog):
    (package / "kernels.py").write_text(
        f"{HEAD}@triton.autotune([triton.Config({{'BLOCK': b}}) for b in (64, 48)], key=[])\n"
        "@triton.jit\ndef k(x, LEAST: tl.constexpr, BLOCK: tl.constexpr):\n"
        "    tl.static_assert(BLOCK > LEAST)\n    tl.store(x + tl.arange(0, BLOCK), 1.0)\n"
    )
    k = jitkern.triton_kernel(f"{package}/kernels.py:k")
    (entry,) = k.compile(tensors()[0], LEAST=16, target=H100)
    assert entry.manifest.inputs["variant"]["template"] == [["LEAST", 16], ["BLOCK", 64]]
    assert "leaving out a configuration, which does not compile: could not compile" in caplog.text
    with pytest.raises(CompileError, match="static_assert"):
        k.compile(tensors()[0], LEAST=64, target=H100)


@needs_triton
def test_a_global_that_the_program_has_patched_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "patchlib"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "shared.py").write_text(
        f"{HEAD}W = tl.constexpr(2)\n"
        "@triton.jit\ndef half(x):\n    return x * W\n@triton.jit\ndef same(x):\n    return x\n"
    )
    (folder / "kernels.py").write_text(
        f"{HEAD}from . import shared\nfrom .shared import half\n"
        "V = tl.constexpr(4)\nT = tl.constexpr((1, tl.float32))\nUNUSED = tl.constexpr(1)\n"
        "@triton.jit\ndef k(x):\n    tl.store(x, half(V + T[0]) + shared.W)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import patchlib.kernels as module
    import triton.language as tl
    from patchlib import shared

    def entries(kernel):
        return jitkern.triton_kernel(kernel).compile(tensors()[0], target=H100)

    def refused(where, name, value, says):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            with pytest.raises(DeclarationError, match=says):
                entries(module.k)

    for _ in range(2):  # compiled, and then from the cache
        refused(module, "V", tl.constexpr(8), "`V` of .*kernels.py is 8 in this .* and 4 by")
    refused(shared, "W", tl.constexpr(3), "`W` of .*shared.py is 3")
    refused(module, "T", tl.constexpr((1.0, tl.float32)), r"`T` of .* is \(1.0, fp32\)")
    refused(module, "half", shared.same, "`half` of .* is same of line")
    (entry,) = entries("patchlib.kernels:k")
    monkeypatch.setattr(module, "UNUSED", 5)
    assert entries(module.k) == [entry]
    monkeypatch.setattr(module, "V", 5)
    monkeypatch.delitem(sys.modules, "patchlib.kernels")  # nobody has imported it
    assert entries("patchlib.kernels:k") == [entry]
    monkeypatch.undo()


@pytest.mark.long
@needs_triton
def test_triton_is_not_imported_when_its_kernel_is_cached(package, run_python):
    code = (
        "import sys, json, torch, jitkern; sys.path.insert(0, '.')\n"
        "k = jitkern.triton_kernel('somelib.ops.kernels:add')\n"
        "x = torch.zeros(64, device='meta')\n"
        f"k.compile(x, x, x, 64, BLOCK=64, target={H100!r})\n"
        "print(json.dumps(['triton' in sys.modules, 'somelib' in sys.modules, jitkern.stats()['compiles']]))"
    )
    for _ in range(2):
        done = run_python(code)
        assert json.loads(done.stdout)[:2] == [False, False], done.stderr


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("somelib.ops.kernels:nothing", r"no function `nothing` below `@triton.jit`.*it has: add"),
        ("somelib.ops.missing:add", r"there is no module `somelib.ops.missing`"),
        ("nolib.kernels:add", r"there is no module `nolib.kernels`"),
        ("somelib.add", "`somelib.add` lacks a `:` before the function's name"),
        ("nothing.py:add", "there is no file .*nothing.py"),
        (print, "is not a Triton function"),
    ],
)
def test_a_wrong_triton_function_says_what_is_wrong(package, named, says):
    with pytest.raises(DeclarationError, match=says):
        jitkern.triton_kernel(named)


def test_a_default_of_any_triton_parameter_is_taken(package):
    (package / "kernels.py").write_text(
        f"""{HEAD}
@triton.heuristics({{"EVEN": lambda args: args["n"] % args["BLOCK"] == 0 and args["alpha"] == 2}})
@triton.jit
def heur(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr, alpha=2.0, beta=-1, mask=None, SIGN: tl.constexpr = -1):
    tl.store(x_ptr, alpha)
"""
    )
    k = jitkern.triton_kernel(f"{package}/kernels.py:heur")
    x = tensors()[0]
    (variant,) = k.variants(x, 1024, BLOCK=128)
    assert dict(variant.template) == {"BLOCK": 128, "EVEN": True, "SIGN": -1}
    assert variant.signature == ("*f32:16", "i32:16", "f32", "i32", "None")
    assert k.variants(x, 1024, BLOCK=128, alpha=2.0, beta=-1) == [variant]
    assert k.variants(x, 1024, 128, True, 2.0) == [variant]
    (other,) = k.variants(x, 1024, BLOCK=128, beta=32)
    assert other.signature == ("*f32:16", "i32:16", "f32", "i32:16", "None")


def test_a_keyword_that_is_an_option_and_a_parameter_is_both(package):
    path = package / "kernels.py"
    path.write_text(TRITON.replace("DTYPE: tl.constexpr = 1", "num_stages: tl.constexpr"))
    k = jitkern.triton_kernel(f"{path}:add")
    (variant,) = k.variants(*tensors(), 1000, BLOCK=128, num_stages=4, num_warps=8)
    assert dict(variant.template)["num_stages"] == 4
    assert dict(variant.options) == {"num_stages": 4, "num_warps": 8}


@pytest.mark.parametrize(
    ("args", "keywords", "says"),
    [
        ((1, 2, 3), {"BLOCK": 1}, "got no value for `n`"),
        ((1, 2, 3, 4), {}, "got no value for `BLOCK`"),
        ((1, 2, 3, 4, 5, 6, 7), {}, "got 7 arguments"),
        ((1, 2, 3, 4), {"BLOCK": 1, "blok": 2}, "unknown keyword `blok`"),
        ((1, 2, 3, 4, 5), {"BLOCK": 1}, "two values for `BLOCK`"),
    ],
)
def test_a_wrong_triton_call_says_what_is_wrong(package, args, keywords, says):
    k = jitkern.triton_kernel("somelib.ops.kernels:add")
    with pytest.raises(LaunchError, match=says):
        k.variants(*args, **keywords)


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize(
    "unguarded",
    ["k(x, x, x, 64, grid=1, BLOCK=64)", f"k.compile(x, x, x, 64, BLOCK=64, target={H100!r})"],
)
def test_a_script_that_runs_when_it_is_imported_is_refused(tmp_path, run_python, unguarded):
    compiles = f"print(k.compile(x, x, x, 64, BLOCK=64, target={H100!r}))\n"
    text = (
        f"{ALONE}\nimport torch, jitkern\nk = jitkern.triton_kernel(add)\n"
        f"x = torch.zeros(64, device='meta')\n{unguarded}\n"
    )
    (tmp_path / "script.py").write_text(text)
    done = run_python(
        "k = __import__('jitkern').triton_kernel('script.py:add')\n"
        f"import torch; x = torch.zeros(64, device='meta')\n{compiles}"
    )
    assert done.returncode == 1
    assert "script.py " in done.stderr and 'if __name__ == "__main__":' in done.stderr
    (tmp_path / "script.py").write_text(text.replace(f"{unguarded}\n", compiles))
    done = run_python("import runpy; runpy.run_path('script.py', run_name='__main__')")
    assert (done.returncode, "raw.add" in done.stdout) == (0, True), done.stderr


GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def copy(out, x, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(out + i, gl.load(x + i, mask=i < n), mask=i < n)
"""


@needs_triton
def test_a_function_of_gluon_is_one_of_triton(module):
    m = module("kernels_in_gluon", GLUON)
    x = torch.zeros(128, device="meta")
    for named in (f"{m.__file__}:copy", m.copy):
        (entry,) = jitkern.triton_kernel(named).compile(x, x, 128, BLOCK=128, target=H100)
        assert entry.manifest.meta["symbol"] == "copy"


BELOW = """
import triton
import triton.language as tl
from packaging import version  # which a launch does not import

NEW = version.parse(triton.__version__) >= version.parse("2.0")

def zeroed(nargs):
    nargs["out"].zero_()

@triton.autotune([triton.Config({"BLOCK": b}, pre_hook=zeroed) for b in (64, 128)], key=["n"])
@triton.jit
def twice(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

MAJOR = int(triton.__version__.partition(".")[0])

@triton.autotune([triton.Config({}, num_warps=2 if MAJOR >= 2 else 1)], key=["n"])
@triton.jit
def thrice(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 3 * tl.load(x + i, mask=i < n), mask=i < n)
"""


@needs_triton
def test_the_function_below_decorators_is_one_by_itself(tmp_path, monkeypatch):
    (tmp_path / "kernels_below.py").write_text(BELOW)
    monkeypatch.syspath_prepend(tmp_path)
    x = torch.zeros(128, device="meta")
    with pytest.raises(CompileError, match="`pre_hook` of triton.Config is not supported"):
        jitkern.triton_kernel("kernels_below:twice").variants(x, x, 128)
    named = jitkern.triton_kernel("kernels_below:twice.fn")
    (entry,) = named.compile(x, x, 128, BLOCK=64, target=H100)
    import kernels_below

    live = jitkern.triton_kernel(kernels_below.twice.fn)
    wanted = named.variants(x, x, 128, BLOCK=64)
    assert live.variants(x, x, 128, BLOCK=64, num_ctas=1, maxnreg=None) == wanted
    (same,) = live.compile(x, x, 128, BLOCK=64, target=H100)
    assert same.path == entry.path
    with pytest.raises(LaunchError, match="no value for `BLOCK`"):
        live.variants(x, x, 128)
    with pytest.raises(DeclarationError, match=r"`twice.fn` is below decorators"):
        Triton(kernels_below.twice.fn)


def test_a_text_knows_the_version_of_triton(tmp_path):
    (tmp_path / "by_version.py").write_text(BELOW)
    x = torch.zeros(128, device="meta")
    kernel = jitkern.triton_kernel(f"{tmp_path}/by_version.py:thrice")
    (variant,) = kernel.variants(x, x, 128, BLOCK=64)
    assert dict(variant.options)["num_warps"] == 2


@needs_triton
def test_decorators_may_follow_from_the_environment(module, monkeypatch):
    import triton

    head, kernel = TORCH.split("@triton.autotune")
    blocks = '((64,) if os.environ.get("FAST") else (64, 128))'
    text = f"import os\n{head}@triton.autotune{kernel.replace('(64, 128)', blocks)}"
    x = torch.zeros(128, device="meta")
    for fast, count in (("1", 1), ("", 2)):
        monkeypatch.setenv("FAST", fast)
        m = module(f"kernels_of_environment{fast}", text)
        kernels = [f"{m.__file__}:tuned", m.tuned]
        for kernel in map(jitkern.triton_kernel, kernels):
            assert len(kernel.compile(x, x, 128, target=H100)) == count
        again = triton.heuristics({"n": lambda args: 1})(kernels[1])
        with pytest.raises(DeclarationError, match="`tuned` of its module is another"):
            jitkern.triton_kernel(again)


TORCH = """
import triton
import triton.language as tl

@triton.jit
def scale(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

@triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"])
@triton.jit
def tuned(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
"""


@pytest.fixture
def twice(tmp_path, module):
    """Makes a function of a tensor that launches a kernel, bare or by `wrap_triton`."""
    library = module(f"torchlib_{tmp_path.name}", TORCH)

    def make(form):
        function, constexprs = ("tuned", {}) if "tuned" in form else ("scale", {"BLOCK": 128})
        name = f"{library.__name__}:{function}"
        named = name if "name" in form else getattr(library, function)
        kernel = jitkern.triton_kernel(named)

        def wrapped(x):
            out = torch.empty_like(x)
            launched = torch.library.wrap_triton(kernel) if "wrap" in form else kernel
            grid = lambda meta: (-(-x.numel() // meta["BLOCK"]),)
            launched[grid](out, x, x.numel(), **constexprs)
            return out

        return wrapped

    return make


FORMS = ["scale", "scale wrap", "scale name wrap", "tuned", "tuned wrap"]


@needs_triton
@pytest.mark.filterwarnings("ignore")  # Torch warns where it has no device to compile for
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.long
def test_torch_takes_a_kernel_for_a_triton_function(twice, form, monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda *_, **__: True)  # without a device
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return lambda *args: args

    torch.compile(twice(form), fullgraph=True, backend=backend)(torch.zeros(200))
    if "wrap" in form:
        graphs.append(make_fx(twice(form), tracing_mode="fake")(torch.zeros(200)))
    for graph in graphs:
        (node,) = [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
        assert node.kwargs["grid"] == ([(4, 1, 1), (2, 1, 1)] if "tuned" in form else [(2, 1, 1)])


@needs_triton
def test_a_kernel_has_what_inductor_asks_of_a_function(tmp_path, monkeypatch):
    (tmp_path / "asked.py").write_text(ALONE)
    monkeypatch.syspath_prepend(tmp_path)
    kernel = jitkern.triton_kernel("asked:add")
    assert not hasattr(kernel, "params")
    import asked

    names = ("__name__", "params", "arg_names", "src", "fn", "cache_key")
    assert [getattr(kernel, n) == getattr(asked.add, n) for n in names] == [True] * len(names)
    assert copy.copy(kernel).variants(*tensors(), 9, BLOCK=8)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_runs_as_torch_launches_it(twice, form):
    x = torch.randn(200, device="cuda")
    before = jitkern.stats()["compiles"]
    assert torch.equal(twice(form)(x), 2 * x)
    assert jitkern.stats()["compiles"] > before
    for backend in ("eager", "aot_eager", "inductor"):
        torch.compiler.reset()
        compiled = torch.compile(twice(form), fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), 2 * x)


@pytest.mark.gpu
@needs_triton
def test_a_triton_function_runs(package):
    k = jitkern.triton_kernel("somelib.ops.kernels:add")
    x, y = (torch.randn(1000, device="cuda") for _ in range(2))
    out = torch.zeros_like(x)
    k(out, x, y, 1000, grid=8, BLOCK=128)
    assert torch.equal(out, x + y)
    k[lambda meta: (-(-1000 // meta["BLOCK"]),)](out, x, out, 1000, 128)
    assert torch.equal(out, x + (x + y))
    assert not jit.capturing()


PATCHED = [
    ("m.F = tl.constexpr(5.0)", "`F` of .* is 5.0"),
    ("m.f = other.f", "is f of line 4 of other_numbers.py, .* in this .* f of line 4 of linked_"),
    ("m.made = m.make(tl.constexpr(3.0))", "is g of line .*, 3.0 in this .*, 2.0 by"),
    ("del sys.modules['linked_kernels']; m.F = tl.constexpr(5.0)", ""),
]


@needs_triton
@pytest.mark.parametrize("case", one_in_four(PATCHED, lambda case: f"patched{PATCHED.index(case)}"))
def test_what_the_program_has_patched_is_found_behind_links(tmp_path, monkeypatch, case):
    patch, says = case
    head = f"{HEAD}from constants_of import F\n"
    scaled = "@triton.jit\ndef f(x):\n    return x * "
    (tmp_path / "constants_of.py").write_text(
        "import triton.language as tl\nF = tl.constexpr(2.0)\n"
    )
    (tmp_path / "other_numbers.py").write_text(f"{head}{scaled}7\n")
    (tmp_path / "kernels_elsewhere.py").write_text(
        f"{head}{scaled}2\n"
        "def make(s):\n    @triton.jit\n    def g(x):\n        return x * s\n    return g\n"
        "made = make(tl.constexpr(2.0))\n"
        "@triton.jit\ndef k(x):\n    tl.store(x, made(f(F)))\n"
    )
    (tmp_path / "linked_kernels.py").symlink_to("kernels_elsewhere.py")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("constants_of", "linked_kernels", "other_numbers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    m = importlib.import_module("linked_kernels")
    other, tl = map(importlib.import_module, ("other_numbers", "triton.language"))

    def cubin():
        (entry,) = jitkern.triton_kernel(m.k).compile(tensors()[0], target=H100)
        return entry.read("kernel.cubin")

    first = cubin()
    exec(patch, {"m": m, "tl": tl, "sys": sys, "other": other})
    if says:
        with pytest.raises(DeclarationError, match=says):
            cubin()
    else:
        assert cubin() != first


@needs_triton
def test_decorators_that_change_between_kernels_count(module):
    m = module(
        "decorated_later",
        f"{HEAD}@triton.autotune([triton.Config({{}}, num_warps=2)], key=[])\n"
        "@triton.heuristics({'B': lambda args: 32})\n"
        "@triton.jit\ndef k(x, B: tl.constexpr):\n    tl.store(x + tl.arange(0, B), 1.0)\n",
    )

    def blocks():
        (variant,) = jitkern.triton_kernel(m.k).variants(tensors()[0], target=H100)
        return dict(variant.template)["B"]

    assert blocks() == 32
    m.k.fn.values["B"] = lambda args: 64
    assert blocks() == 64
    m.k.configs[0].num_warps = 8
    with pytest.raises(DeclarationError, match=r"another `configs` in this process, .*8.*reload"):
        blocks()
