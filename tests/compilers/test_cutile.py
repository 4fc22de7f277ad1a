"""cuTile, in its child process; it needs no GPU. See also test_nvidia_languages.py."""

import os

import pytest
import torch
from nvidia_languages import (
    CUTILE,
    HELPER,
    TARGETS,
    VECTOR,
    artifact,
    assert_serves_its_class_alone,
    learn,
    on_meta,
    said_by_prewarm,
)

from jitkern import config
from jitkern.errors import CompileError, TargetError
from jitkern.target import Target

LANGUAGE = CUTILE
pytestmark = CUTILE.needs


@pytest.mark.long
def test_parameters_are_flat(build):
    entry = build()
    meta = entry.manifest.meta
    assert meta["parameters"] == ["*f32", "i32", "i32", "*f32", "i32", "i32", "f32"]
    assert (meta["symbol"], meta["smem"]) == ("k", 0)
    assert artifact(entry)[:4] == b"\x7fELF"


@pytest.mark.long
def test_the_manifest_names_the_compiler_and_its_digest(build):
    compiler = build().manifest.compiler
    name, version, digest = compiler["version"].split(", ")[1].split()
    assert (compiler["name"], name, len(digest)) == ("cutile", "tileiras", 43)
    assert version.startswith("13.")


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
def test_a_kernel_is_built_for_any_arch_without_a_gpu(build, arch):
    assert artifact(build(target=TARGETS[arch]))[:4] == b"\x7fELF"


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
    text = CUTILE.scale.replace(parameters, parameters.replace(f"{name},", f"{annotated},"))
    assert build(text, signature=tuple(signature)).manifest.meta["parameters"][-3:] == last


# ------------------------------------------------------------------ what the key covers


CLOSURE = CUTILE.head + (
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
    assert artifact(first) != artifact(second)


@pytest.mark.long
def test_a_file_may_be_named_like_a_module_of_python(build):
    (build.folder / "types.py").write_text(HELPER.format(2))
    text = CUTILE.helped.replace("from helper", "from .types")
    assert build(text, file="math.py").manifest.meta["symbol"] == "k"


@pytest.mark.long
def test_a_package_is_not_run_for_its_kernel(build):
    package = build.folder / "mypkg" / "kernels"
    package.mkdir(parents=True)
    for folder in package, package.parent:
        (folder / "__init__.py").write_text("raise RuntimeError('this is run')\n")
    (package / "helper.py").write_text(HELPER.format(2))
    text = CUTILE.helped.replace("from helper", "from .helper")
    assert build(text, folder=package, package="mypkg.kernels").manifest.meta["symbol"] == "k"


@pytest.mark.long
def test_a_variable_reaches_a_kernel_only_if_it_is_declared(build, monkeypatch):
    text = f"import os\nassert 'SECRET' not in os.environ\n{CUTILE.scale}"
    monkeypatch.setenv("SECRET", "1")
    with config.using(environment={**os.environ}):
        assert build(text)
        with pytest.raises(CompileError, match="AssertionError"):
            build(text, environment=["SECRET"])


@pytest.mark.long
def test_another_package_counts_by_its_declared_version(build):
    numpy = pytest.importorskip("numpy")
    text = f"import numpy\n{CUTILE.scale}"
    entry = build(text, packages={"numpy": numpy.__version__})
    assert f"numpy=={numpy.__version__}" in str(entry.manifest.inputs)
    reason = (
        rf"`numpy` is not installed as numpy==0.1: .* packages={{'numpy': '{numpy.__version__}'}}"
    )
    with pytest.raises(CompileError, match=reason):
        build(text, packages={"numpy": "0.1"})


# ------------------------------------------------------------------ launches


def scaled(k, x, by):
    out = torch.empty_like(x)
    k.k[{"B": 64}](out, x, by, grid=(x.numel() + 63) // 64)
    return out


@pytest.mark.long
def test_a_call_is_traced_and_served_by_c(declare, gpu):
    op = declare(scaled, "(Tensor x, int by) -> Tensor")
    learn(gpu, op, on_meta(64), 2)
    for n in (64, 128, 1600):
        x = torch.ones(n)
        out, size, stride, pointer, *rest = gpu.call(x, 2)
        assert (size, stride, pointer, rest) == (n, 1, x.data_ptr(), [n, 1, 2])
        assert out != pointer
        assert gpu.grid == n // 64
    assert_serves_its_class_alone(gpu)


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
    assert CUTILE.classes(arg) == (wanted,)


def test_a_size_of_one_does_not_change_the_class():
    """Torch calls any stride there contiguous."""
    x = on_meta(2, 64)[:1]
    odd = x.as_strided((1, 64), (7, 1))
    assert odd.is_contiguous()
    assert CUTILE.classes(odd) == CUTILE.classes(x)


STRIDED = [
    (on_meta(64, 40).t(), "*f32:16:1,16:=1,4"),
    (on_meta(64, 1).expand(64, 8), "*f32:16:16,1:=1,=0"),
    (on_meta(64, 64)[:, ::2], "*f32:16:16,16:4,1"),
    (on_meta(64, 64)[:, ::4], "*f32:16:16,16:4,4"),
]


@pytest.mark.parametrize(("arg", "wanted"), STRIDED)
def test_a_strided_source_takes_strides_of_its_tensors(arg, wanted):
    assert CUTILE.classes(arg, strided=True) == (wanted,)


@pytest.mark.long
def test_a_strided_kernel_is_compiled_for_its_strides(build):
    text = CUTILE.scale.replace("index=(i,), shape=(B,)", "index=(i, 0), shape=(B, 1)")
    text = text.replace("index=(i,)", "index=(i, 0)")
    matrices = tuple(one for _, one in STRIDED[:2])
    entry = build(text, signature=(*matrices, "float"), strided=True)
    assert entry.manifest.meta["parameters"] == [*["*f32", *["i32"] * 4] * 2, "f32"]


@pytest.mark.long
def test_a_grid_that_cutile_would_refuse_is_refused(declare):
    """Beyond 2**24 tiles the number of a tile would be wrong."""

    def launch(k, x, by):
        k.k[{"B": 64}](x, x, by, grid=1 << 24)
        return x

    said = said_by_prewarm(declare(launch), 64)
    assert "got 16777216: launch several times, each with sizes below 16777216" in said


def test_a_tensor_that_is_not_contiguous_names_the_parameter(declare):
    def launch(k, x, by):
        k.k[{"B": 64}](x, x.t(), by, grid=1)
        return x

    assert "argument 2 (`x`) is not contiguous" in said_by_prewarm(declare(launch), 8, 8)
