"""cuTile, in its child process; it needs no GPU."""

import itertools
import os
import shutil
import sys

import pytest
import torch
from fake_gpu import FakeGpu
from helpers import REPOSITORY, needs_cutile, one_in_four

import jitkern
from jitkern import config, jit
from jitkern.declare import CuTile, kernel
from jitkern.errors import (
    CompileError,
    CompilerNotFound,
    DeclarationError,
    LaunchError,
    NotCached,
    TargetError,
)
from jitkern.launch.call import Call, variant_of
from jitkern.source.kinds import Variant
from jitkern.target import Target

TARGETS = {
    arch: Target.parse(f"cuda-{arch}-cu130-torch2.13.0")
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
}
TARGET = TARGETS["sm_90"]
pytestmark = needs_cutile
_number = itertools.count()

HEAD = "import cuda.tile as ct\nInt = ct.Constant[int]\n"
SCALE = HEAD + (
    "@ct.kernel\n"
    "def k(out, x, by, B: Int):\n"
    "    i = ct.bid(0)\n"
    "    tile = ct.load(x, index=(i,), shape=(B,)) * by\n"
    "    ct.store(out, index=(i,), tile=ct.astype(tile, out.dtype))\n"
)
VECTOR = "*f32:16:16:=1"


@pytest.fixture
def build(tmp_path):
    """Compile a kernel of a text; by default SCALE."""
    run_folder = tmp_path / "kernels"
    run_folder.mkdir()

    def run(
        text=SCALE, template=(("B", 64),), signature=(VECTOR, VECTOR, "float"), target=TARGET,
        folder=run_folder, function="k", **source
    ):  # fmt: skip
        if text is not None:
            (folder / "k.py").write_text(text)
        kind = CuTile("k.py", folder=str(folder), **source)
        return jit.ensure(Variant("test::k", kind, function, template, signature), target)

    run.folder = run_folder
    return run


def cubin(entry):
    return (entry.path / entry.manifest.meta["artifact"]).read_bytes()


@pytest.mark.long
def test_parameters_are_flat(build):
    entry = build()
    meta = entry.manifest.meta
    assert meta["parameters"] == ["*f32", "i32", "i32", "*f32", "i32", "i32", "f32"]
    assert (meta["symbol"], meta["smem"]) == ("k", 0)
    assert cubin(entry)[:4] == b"\x7fELF"


@pytest.mark.long
def test_the_manifest_names_the_compiler_and_its_digest(build):
    compiler = build().manifest.compiler
    name, version, digest = compiler["version"].split(", ")[1].split()
    assert (compiler["name"], name, len(digest)) == ("cutile", "tileiras", 43)
    assert version.startswith("13.")


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
def test_a_kernel_is_built_for_any_arch_without_a_gpu(build, arch):
    assert cubin(build(target=TARGETS[arch]))[:4] == b"\x7fELF"


@pytest.mark.long
def test_an_arch_that_the_compiler_does_not_know_is_named(build):
    with pytest.raises(TargetError, match=r"tileiras 13\S+ does not know sm_75"):
        build(target=TARGETS["sm_75"])


def test_a_target_with_an_older_cuda_is_refused(build):
    with pytest.raises(TargetError, match="needs a Torch with CUDA 13"):
        build(target=Target.parse("cuda-sm_90-cu128-torch2.13.0"))


ANNOTATED = {
    "B: Int": (VECTOR, VECTOR, "int", ["i32", "i32", "i32"]),
    "by: ct.ScalarInt64": (VECTOR, VECTOR, "int", ["i32", "i32", "i64"]),
    "x: ct.IndexedWithInt64": (VECTOR, VECTOR, "bool", ["i64", "i64", "bool"]),
}


@pytest.mark.long
@pytest.mark.parametrize("annotated", ANNOTATED)
def test_annotations_choose_the_types_of_parameters(build, annotated):
    name = annotated.partition(":")[0]
    parameters = "out, x, by, B: Int"
    *signature, last = ANNOTATED[annotated]
    text = SCALE.replace(parameters, parameters.replace(f"{name},", f"{annotated},"))
    assert build(text, signature=tuple(signature)).manifest.meta["parameters"][-3:] == last


@pytest.mark.long
def test_cutiles_own_cache_is_not_used(build, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path / "own"))
    with config.using(environment={**os.environ}):
        build(environment=["CUDA_TILE_CACHE_DIR"])
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "own").exists()


# ------------------------------------------------------------------ what the key covers

HELPED = SCALE.replace(HEAD, f"{HEAD}from helper import twice\n").replace("* by", "* twice(by)")
HELPER = "def twice(x):\n    return {} * x\n"


@pytest.mark.long
def test_a_helper_file_is_in_the_key(build):
    (build.folder / "helper.py").write_text(HELPER.format(2))
    first = build(HELPED)
    (build.folder / "helper.py").write_text(HELPER.format(3))
    second = build(HELPED)
    assert first.path != second.path
    assert cubin(first) != cubin(second)


CLOSURE = HEAD + (
    "def made(n):\n"
    "    @ct.kernel\n"
    "    def k(out, x, B: Int):\n"
    "        ct.store(out, index=(n,), tile=ct.load(x, index=(n,), shape=(B,)))\n"
    "    return k\n"
    "k = made(3)\n"
)


@pytest.mark.long
def test_a_kernel_may_be_made_by_a_function_of_its_file(build):
    first, second = (
        build(CLOSURE.replace("(3)", f"({n})"), signature=(VECTOR,) * 2) for n in (3, 4)
    )
    assert cubin(first) != cubin(second)


@pytest.mark.long
def test_a_file_may_be_named_like_a_module_of_python(build):
    (build.folder / "types.py").write_text(HELPER.format(2))
    (build.folder / "math.py").write_text(HELPED.replace("from helper", "from .types"))
    kind = CuTile("math.py", folder=str(build.folder))
    variant = Variant("test::k", kind, "k", (("B", 64),), (VECTOR, VECTOR, "float"))
    assert jit.ensure(variant, TARGET).manifest.meta["symbol"] == "k"


@pytest.mark.long
def test_a_package_is_not_run_for_its_kernel(build):
    package = build.folder / "mypkg" / "kernels"
    package.mkdir(parents=True)
    for folder in package, package.parent:
        (folder / "__init__.py").write_text("raise RuntimeError('this is run')\n")
    (package / "helper.py").write_text(HELPER.format(2))
    text = HELPED.replace("from helper", "from .helper")
    assert build(text, folder=package, package="mypkg.kernels").manifest.meta["symbol"] == "k"


OUTSIDE = {
    "import numpy": r"`numpy` is imported, .*packages={'numpy': '\d",
    "import torch": "`torch` is imported, which the cache key does not cover",
    "from numpy import pi": "`numpy` is imported",
    "def read():\n    import numpy\nread()": "`numpy` is imported",
    "import other": "it is no module of the kernel's package",
    "import sys\nsys.path.insert(0, FOLDER)\nimport other": "`other` is imported",
    "import importlib": "`importlib` is imported",
    "__import__('numpy')": "`numpy` is imported",
    "open(FOLDER + '/other.py').read()": "opens .*other.py, which the cache key does not cover",
    "import pathlib\npathlib.Path(FOLDER, 'other.py').read_text()": "opens .*other.py",
    "import os\nos.system('true')": r"calls os.system",
    "import subprocess\nsubprocess.run(['true'])": "calls subprocess.Popen",
}


@pytest.mark.parametrize("text", one_in_four(OUTSIDE))
def test_what_no_key_covers_is_refused(build, tmp_path, text):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.py").write_text("X = 1\n")
    whole = f"FOLDER = {str(tmp_path / 'elsewhere')!r}\n{text}\n{SCALE}"
    with pytest.raises(CompileError, match=OUTSIDE[text]):
        build(whole)


@pytest.mark.long
def test_a_variable_reaches_a_kernel_only_if_it_is_declared(build, monkeypatch):
    text = f"import os\nassert 'SECRET' not in os.environ\n{SCALE}"
    monkeypatch.setenv("SECRET", "1")
    with config.using(environment={**os.environ}):
        assert build(text)
        with pytest.raises(CompileError, match="AssertionError"):
            build(text, environment=["SECRET"])


@pytest.mark.long
def test_another_package_counts_by_its_declared_version(build):
    numpy = pytest.importorskip("numpy")
    text = f"import numpy\n{SCALE}"
    entry = build(text, packages={"numpy": numpy.__version__})
    assert f"numpy=={numpy.__version__}" in str(entry.manifest.inputs)
    reason = (
        rf"`numpy` is not installed as numpy==0.1: .* packages={{'numpy': '{numpy.__version__}'}}"
    )
    with pytest.raises(CompileError, match=reason):
        build(text, packages={"numpy": "0.1"})


@pytest.mark.parametrize(
    ("keyword", "reason"),
    [
        ({"flags": ["-O3"]}, r"options stand at `@ct.kernel\(...\)`"),
        ({"include": ["more"]}, "a file in Python includes none"),
        ({"packages": ["numpy"]}, 'say the versions, as in {"numpy": '),
    ],
)
def test_flags_are_for_other_kinds(keyword, reason):
    with pytest.raises(DeclarationError, match=reason):
        CuTile("k.py", **keyword)


# ------------------------------------------------------------------ refusals

REFUSED = {
    "name": (SCALE, {"function": "j"}, "k.py: error: it has no @ct.kernel function `j`; it has: k"),
    "count": (SCALE, {"signature": (VECTOR,)}, r"takes 3 arguments \(out, x, by\), got 1"),
    "rank": (
        SCALE,
        {"signature": (VECTOR, "*f32:16:16,16:4,=1", "float")},
        r"k.py\(6\): error: .*does not match the array rank 2",
    ),
    "constant": (SCALE, {"template": ()}, r"needs the constant `B`, .*k.k\[{'B': …}\]"),
    "unknown": (SCALE, {"template": (("C", 1),)}, "has no parameter `C`"),
    "tuple": (
        SCALE.replace("by,", "by: tuple[int, int],"),
        {"signature": (VECTOR, VECTOR, "int")},
        "`by` is a tuple or a list: give each item a parameter",
    ),
    "syntax": (SCALE + "x = (\n", {}, r"k.py\(8\): error: SyntaxError: "),
    "raises": (SCALE + "1 / 0\n", {}, r"k.py\(8\): error: ZeroDivisionError"),
    "exits": (SCALE + "import os\nos._exit(3)\n", {}, "process ended with status 3"),
}


@pytest.mark.parametrize("case", one_in_four(REFUSED))
def test_what_is_not_compiled_is_refused_with_its_reason(build, case):
    text, given, reason = REFUSED[case]
    with pytest.raises(CompileError, match=reason):
        build(text, **given)


def test_a_missing_package_is_named_with_the_line_of_pip(build, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(REPOSITORY)])
    with pytest.raises(CompilerNotFound, match=r'pip install "jitkern\[cutile\]"'):
        build()


# ------------------------------------------------------------------ launches


@pytest.fixture
def declare(tmp_path):
    """Declare an op `(Tensor x, float by) -> Tensor` of SCALE."""
    (tmp_path / "k.py").write_text(SCALE)

    def declare(launch, schema="(Tensor x, float by) -> Tensor", **source):
        op = kernel(
            f"jitkern_cutile::f{next(_number)}{schema}",
            cuda=CuTile(str(tmp_path / "k.py"), **source),
        )
        op.launch("cuda")(launch)
        return op

    return declare


def scaled(k, x, by):
    out = torch.empty_like(x)
    k.k[{"B": 64}](out, x, by, grid=(x.numel() + 63) // 64)
    return out


@pytest.mark.long
def test_a_call_is_traced_and_served_by_c(declare, tmp_path, monkeypatch):
    op = declare(scaled, "(Tensor x, int by) -> Tensor")
    meta = torch.ones(64, device="meta"), 2
    op.samples(lambda device: iter([meta]))
    gpu = FakeGpu(tmp_path, monkeypatch)
    gpu.learn(op, meta)
    for n in (64, 128, 1600):
        x = torch.ones(n)
        out, size, stride, pointer, *rest = gpu.call(x, 2)
        assert (size, stride, pointer, rest) == (n, 1, x.data_ptr(), [n, 1, 2])
        assert out != pointer
        assert gpu.grid == n // 64
    assert gpu.call(torch.ones(65), 2) is None, "a size of another class"
    assert gpu.call(torch.ones(65)[1:], 2) is None, "an address of another class"
    assert gpu.call(torch.ones(64, dtype=torch.float64), 2) is None, "another dtype"
    assert gpu.call(torch.ones(128)[::2], 2) is None, "not contiguous"


def classes(*args, strided=False, **keywords):
    call = Call("k", (("B", 64),), args, {"grid": 1, **keywords})
    return variant_of("test::k", CuTile("k.py", strided=strided), call)[0].signature


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


CLASSES = [  # as cuTile's own launches have them
    (on_meta(64), "*f32:16:16:=1"),
    (on_meta(63), "*f32:16:1:=1"),
    (on_meta(63)[1:], "*f32:1:1:=1"),
    (on_meta(64, 40), "*f32:16:16,1:4,=1"),
    (on_meta(64, 33), "*f32:16:16,1:1,=1"),
    (on_meta(64, 1), "*f32:16:16,1:1,=1"),
    (on_meta(8, 64, dtype=torch.bfloat16), "*bf16:16:1,16:8,=1"),
    (on_meta(3, 4, 16, dtype=torch.int8), "*i8:16:1,1,16:16,16,=1"),
    (on_meta(), "*f32:16::"),
    (on_meta(0, 5), "*f32:16:16,1:1,=1"),
    (True, "bool"),
    (3, "int"),
    (0.5, "float"),
]


@pytest.mark.parametrize(("arg", "wanted"), CLASSES)
def test_a_kernel_is_compiled_for_the_class_of_an_argument(arg, wanted):
    assert classes(arg) == (wanted,)


def test_a_size_of_one_does_not_change_the_class():
    """Torch calls any stride there contiguous."""
    x = on_meta(2, 64)[:1]
    odd = x.as_strided((1, 64), (7, 1))
    assert odd.is_contiguous()
    assert classes(odd) == classes(x)


STRIDED = [
    (on_meta(64, 40).t(), "*f32:16:1,16:=1,4"),
    (on_meta(64, 1).expand(64, 8), "*f32:16:16,1:=1,=0"),
    (on_meta(64, 64)[:, ::2], "*f32:16:16,16:4,1"),
    (on_meta(64, 64)[:, ::4], "*f32:16:16,16:4,4"),
]


@pytest.mark.parametrize(("arg", "wanted"), STRIDED)
def test_a_strided_source_takes_strides_of_its_tensors(arg, wanted):
    assert classes(arg, strided=True) == (wanted,)


@pytest.mark.long
def test_a_strided_kernel_is_compiled_for_its_strides(build):
    text = SCALE.replace("index=(i,), shape=(B,)", "index=(i, 0), shape=(B, 1)")
    text = text.replace("index=(i,)", "index=(i, 0)")
    matrices = tuple(one for _, one in STRIDED[:2])
    entry = build(text, signature=(*matrices, "float"), strided=True)
    assert entry.manifest.meta["parameters"] == [*["*f32", *["i32"] * 4] * 2, "f32"]


WRONG = [
    (([on_meta(4)],), {}, "takes tensors and numbers, not list"),
    ((None,), {}, "not NoneType `None`"),
    ((on_meta(4, dtype=torch.complex64),), {}, "no kernel knows torch.complex64"),
    ((on_meta(4),), {"block": 128}, "launched with `block`, and a cuTile kernel takes a `grid` al"),
    ((on_meta(4),), {"num_ctas": 2}, r"options like num_ctas stand at `@ct.kernel\(...\)`"),
]


@pytest.mark.parametrize(("args", "keywords", "reason"), WRONG)
def test_an_argument_that_cannot_be_passed_is_refused(args, keywords, reason):
    with pytest.raises(LaunchError, match=reason):
        classes(*args, **keywords)


@pytest.mark.parametrize("value", [torch.float32, "a", None, float("nan"), (1, 2)])
def test_a_constant_is_a_number(value):
    call = Call("k", (("B", value),), (), {"grid": 1})
    with pytest.raises(LaunchError, match="constant B=.* must be a bool, an int or a finite float"):
        variant_of("test::k", CuTile("k.py"), call)


@pytest.mark.long
def test_a_grid_that_cutile_would_refuse_is_refused(declare):
    """Beyond 2**24 tiles the number of a tile would be wrong."""

    def launch(k, x, by):
        k.k[{"B": 64}](x, x, by, grid=1 << 24)
        return x

    op = declare(launch)
    op.samples(lambda device: iter([(torch.ones(64, device=device), 2.0)]))
    said = jitkern.prewarm([op], targets=[TARGET])
    assert "got 16777216: launch several times, each with sizes below 16777216" in str(said)


@pytest.mark.long
def test_a_number_that_does_not_fit_names_the_argument(declare):
    def launch(k, x, by):
        out = torch.empty_like(x)
        k.k[{"B": 64}](out, x, 1 << 40, grid=1)
        return out

    op = declare(launch)
    op.samples(lambda device: iter([(torch.ones(64, device=device), 2.0)]))
    said = jitkern.prewarm([op], targets=[TARGET])
    assert r"argument 3 (`by`) must be an integer that fits i32" in str(said)


def test_a_tensor_that_is_not_contiguous_names_the_parameter(declare):
    def launch(k, x, by):
        k.k[{"B": 64}](x, x.t(), by, grid=1)
        return x

    op = declare(launch)
    op.samples(lambda device: iter([(torch.ones(8, 8, device=device), 2.0)]))
    said = jitkern.prewarm([op], targets=[TARGET])
    assert "argument 2 (`x`) is not contiguous" in str(said)


def test_nothing_is_compiled_where_compiling_is_off(build):
    with config.using(compile="never"), pytest.raises(NotCached, match=r"test::k \(f32.B64\)"):
        build()


@pytest.mark.long
def test_a_lookup_needs_no_cutile(build, run_python):
    entry = build()
    code = (
        "import sys\nsys.modules['cuda'] = None\n"
        "from jitkern import jit\nfrom jitkern.source.kinds import CuTile, Variant\n"
        "from jitkern.target import Target\n"
        f"source = CuTile('k.py', folder={str(build.folder)!r})\n"
        f"v = Variant('test::k', source, 'k', (('B', 64),), {(VECTOR, VECTOR, 'float')!r})\n"
        f"print(jit.ensure(v, Target.parse({str(TARGET)!r})).path)\n"
        "print(*(m for m in sys.modules if m.startswith('jitkern.compilers.cutile')))\n"
    )
    path, modules = run_python(code, JITKERN_COMPILE="never").stdout.splitlines()
    assert path == str(entry.path)
    assert modules.split() == ["jitkern.compilers.cutile", "jitkern.compilers.cutile.compiler"]


@pytest.mark.long
def test_processes_and_folders_give_equal_bytes(build, tmp_path):
    """Each compile has a process of its own, whose hashes have a seed of their own."""
    (build.folder / "helper.py").write_text(HELPER.format(2))
    found = set()
    for number in range(20):
        folder = build.folder if number % 2 else tmp_path / f"other{number}"
        if folder != build.folder:
            folder.mkdir()
            shutil.copy(build.folder / "helper.py", folder)
        with config.using(cache_dir=tmp_path / f"cache{number}"):
            found.add(cubin(build(HELPED, folder=folder)))
    assert len(found) == 1
