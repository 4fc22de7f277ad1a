"""The CuTe DSL, in its child process; it needs no GPU. See also test_nvidia_languages.py."""

import ast
import ctypes
import importlib.util
import itertools
import os
from pathlib import Path

import pytest
import torch
from fake_gpu import OnGpu
from helpers import REPOSITORY, run_threads
from nvidia_languages import (
    CUTE,
    TARGET,
    TARGETS,
    VECTOR,
    artifact,
    assert_serves_its_class_alone,
    learn,
    on_meta,
)

from jitkern import config, jit
from jitkern.declare import Cute
from jitkern.errors import CompilerNotFound, LaunchError, TargetError
from jitkern.launch.call import Call
from jitkern.launch.runner import Runner
from jitkern.source.kinds import Variant
from jitkern.target import Target

LANGUAGE = CUTE
pytestmark = CUTE.needs


@pytest.mark.long
def test_a_library_needs_the_driver_alone(build):
    entry = build()
    codes = ["*f32", "i32", "i64", "*f32", "i32", "i64", "f32"]
    assert entry.manifest.meta["parameters"] == codes
    ctypes.CDLL(str(entry.path / entry.manifest.meta["artifact"]))  # with no CUDA in this process
    assert b"libcuda" not in artifact(entry)
    assert b"libcudart" not in artifact(entry)


@pytest.mark.long
def test_the_manifest_names_the_compiler_and_its_digest(build):
    compiler = build().manifest.compiler
    version, library, linker = compiler["version"].split(", ", 2)
    flavour, digest = library.split()
    assert (compiler["name"], flavour, len(digest)) == ("cute", "cu13", 43)
    assert version.startswith("4.")
    assert linker


@pytest.mark.long
@pytest.mark.parametrize(("arch", "exact"), [("sm_80", "sm_80"), ("sm_100", "sm_100a")])
def test_a_kernel_is_built_for_any_arch_without_a_gpu(build, arch, exact):
    entry = build(target=TARGETS[arch])
    assert entry.manifest.inputs["target"].startswith(f"cuda-{exact}-cu130-")
    assert entry.manifest.inputs["target"].endswith("-linux_x86_64")
    assert artifact(entry)[:4] == b"\x7fELF"


def test_another_platform_is_refused(build):
    with pytest.raises(TargetError, match="linux_riscv64"):
        build(target=TARGET._replace(platform="linux_riscv64"))


@pytest.mark.long
def test_the_cuda_of_the_target_picks_the_compiler(build):
    """Both compilers are installed; without a driver the DSL itself would take the newest."""
    thirteen = build()
    twelve = build(target=Target.parse("cuda-sm_90-cu128-torch2.13.0"))
    assert ", cu12 " in twelve.manifest.compiler["version"]
    assert artifact(twelve) != artifact(thirteen)


# ------------------------------------------------------------------ what the key covers


@pytest.mark.long
def test_options_are_in_the_key(build):
    plain, slow = build(), build(flags=["--opt-level 0"])
    assert plain.path != slow.path
    assert artifact(plain) != artifact(slow)


@pytest.mark.long
def test_a_declared_variable_is_in_the_key(build, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    with config.using(environment={**os.environ}):
        plain, told = build(), build(environment=["CUTE_DSL_LINEINFO"])
    assert artifact(plain) != artifact(told)


SET_BY_JITKERN = {"ARCH", "DRYRUN", "ENABLE_TVM_FFI", "LIBS"}


def test_the_variables_are_those_of_the_dsl():
    """`affects_compile` marks them; the file is read, since an import takes seconds."""
    place = importlib.util.find_spec("cutlass").origin
    text = (Path(place).parent / "base_dsl" / "env_manager.py").read_text()
    found = set()
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "env_var":
            affects = next(k.value.value for k in call.keywords if k.arg == "affects_compile")
            name = call.args[0].value if isinstance(call.args[0], ast.Constant) else "LIBS"
            found |= {name} if affects else set()
    passed = {name.removeprefix(Cute.prefix) for name in Cute.variables}
    assert found == passed | SET_BY_JITKERN


@pytest.mark.long
def test_variables_that_are_not_declared_are_not_used(build, tmp_path, monkeypatch):
    plain = build()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    with config.using(environment={**os.environ}, cache_dir=tmp_path / "other"):
        assert artifact(build()) == artifact(plain)


def test_a_missing_linker_is_named(build):
    with config.using(cc="no-such-cc"), pytest.raises(CompilerNotFound, match="no-such-cc"):
        build()


# ------------------------------------------------------------------ launches


def scaled(k, x, by):
    out = torch.empty_like(x)
    k.k[{"B": 64}](out, x, by)
    return out


@pytest.mark.long
def test_a_call_is_traced_and_served_by_c(declare, gpu):
    op = declare(scaled, "(Tensor x, int by) -> Tensor", CUTE.scale_by_int)
    learn(gpu, op, on_meta(64), 2)
    gpu.expect(["Qi4x", "Qi4x", "i", "i"])  # of the kernel, as the host code passes them
    for n in (64, 128, 1600):
        x = torch.ones(n)
        out, given, by, count = gpu.call(x, 2)
        assert (given, by, count) == ([x.data_ptr(), n], 2, n)
        assert out[1] == n
        assert out[0] != x.data_ptr()
        assert gpu.array("config", ctypes.c_uint, 7) == [n // 64, 1, 1, 64, 1, 1, 0]
        assert gpu.launched_on == 77
    assert gpu.libraries == 1
    assert_serves_its_class_alone(gpu)


@pytest.mark.long
def test_the_code_is_prepared_once_for_each_device(build, gpu):
    build(template=(("B", 32),))
    source = Cute("k.py", folder=str(build.folder))
    variant = Variant("test::k", source, "k", (("B", 32),), (VECTOR, VECTOR, "float"))
    function = jit.loaded(variant, TARGET)
    gpu.expect(["Qi4x", "Qi4x", "f", "i"])
    values = [1 << 40, 48, 1, 1 << 41, 48, 1, 0.5]
    prepared = []
    gpu.tell("current", 0)
    run_threads(*[lambda: function.call([*values, 70, 0], "`k`")] * 4)
    for device in (0, 0, 3, 0, 3):
        gpu.tell("current", device)
        gpu.tell("without_context", 1)  # as in a thread that has not used CUDA
        function.call([*values, 70 + device, device], "`k`")
        assert gpu.launched() == [[1 << 40, 48], [1 << 41, 48], 0.5, 48]
        assert (gpu.grid, gpu.launched_on, gpu.without_context) == (2, 70 + device, 0)
        prepared.append((gpu.libraries, gpu.sets))
    first, _, third, *_ = prepared
    assert [libraries for libraries, _ in prepared] == [1] * 5
    assert first[1] < third[1], "attributes are set for each device"
    assert prepared[1:4:2] == [first, third]
    launches = gpu.launches
    function.call([1 << 40, 0, 1, 1 << 41, 0, 1, 0.5, 70, 3], "`k`")
    assert gpu.launches == launches, "an empty grid launches nothing"
    gpu.tell("refuses_launches", 1)
    with pytest.raises(LaunchError, match="CUDA error 1 .of the fake driver. when launching it"):
        function.call([*values, 70, 3], "`k`")
    with pytest.raises(LaunchError, match="CUDA error 101 .* when loading it"):
        function.call([*values, 70, 64], "`k`")


@pytest.mark.long
def test_a_launch_from_python_passes_stream_and_device(build, gpu, monkeypatch):
    exchanged = []
    (build.folder / "k.py").write_text(CUTE.scale)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda to: exchanged.append(to) or 1)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchanged.append)
    source = Cute("k.py", folder=str(build.folder))
    run = Runner("test::k", source, TARGET, torch.device("cuda:0"))
    out, x = torch.empty(96).as_subclass(OnGpu), torch.ones(96).as_subclass(OnGpu)
    gpu.expect(["Qi4x", "Qi4x", "f", "i"])
    run(Call("k", (("B", 48),), (out, x, 2), {}))
    assert gpu.launched() == [[out.data_ptr(), 96], [x.data_ptr(), 96], 2.0, 96]
    assert (gpu.grid, gpu.launched_on, exchanged) == (2, 99, [0, 1])
    wanted = r"argument 3 \(`by`\) must be f32, got bool `True`; it takes \(out, x, by\)"
    with pytest.raises(LaunchError, match=wanted):
        run(Call("k", (("B", 48),), (out, x, True), {}))


COPY = CUTE.head + (
    "@cute.kernel\n"
    "def copy(out: cute.Tensor, x: cute.Tensor):\n"
    "    i, j = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]\n"
    "    out[i, j] = x[i, j]\n"
    "@cute.jit\n"
    "def k(out: cute.Tensor, x: cute.Tensor, stream: cuda.CUstream):\n"
    "    rows, columns = x.shape\n"
    "    copy(out, x).launch(grid=[rows, 1, 1], block=[columns, 1, 1], stream=stream)\n"
)


@pytest.mark.long
def test_a_strided_source_passes_strides(declare, gpu):
    def launch(k, x):
        out = torch.empty_strided(x.shape, (x.shape[1], 1), dtype=x.dtype, device=x.device)
        k.k(out, x)
        return out

    op = declare(launch, "(Tensor x) -> Tensor", COPY, strided=True)
    learn(gpu, op, on_meta(48, 32).t())
    gpu.expect(["Q2i1q", "Q2i1q"])
    x = torch.ones(64, 16).t()
    out, given = gpu.call(x)
    assert out[1:] == [16, 64, 64]
    assert given == [x.data_ptr(), 16, 64, 16], "the first stride, 1, is compiled in"
    assert gpu.call(torch.ones(16, 64)) is None, "strides of another class"


def test_the_classes_of_arguments_are_those_of_cutile():
    given = on_meta(64, 40), on_meta(63, dtype=torch.bfloat16)[1:], 3
    assert CUTE.classes(*given) == ("*f32:16:16,1:4,=1", "*bf16:1:1:=1", "int")


def gemm(matrix, **template):
    source = Cute("gemm.py", folder=str(REPOSITORY / "examples" / "cute_gemm" / "cute_gemm"))
    return Variant("test::gemm", source, "gemm", tuple(template.items()), (matrix,) * 3)


@pytest.mark.long
def test_the_example_launches_its_tiles(gpu):
    function = jit.loaded(gemm("*bf16:16:1,1:1,=1", M=64, N=64, K=64), TARGET)
    m, n, k = 513, 257, 1023
    passed = [(1 << 40, m, n, n, 1), (1 << 41, m, k, k, 1), (1 << 42, k, n, n, 1)]
    gpu.expect(["Q2iq", "Q2iq", "Q2iq"])
    function.call([*itertools.chain(*passed), 77, 0], "`gemm`")
    assert gpu.launched() == [[1 << 40, m, n, n], [1 << 41, m, k, k], [1 << 42, k, n, n]]
    *sizes, shared = gpu.array("config", ctypes.c_uint, 7)
    assert sizes == [8, 5, 2, 128, 1, 1], "nine rows of tiles, in groups of eight"
    assert shared == 3 * 2 * (64 * 64 * 2), "three tiles of both matrices"


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
def test_the_example_is_compiled_for_each_arch(arch):
    variant = gemm("*bf16:16:16,16:8,=1", M=128, N=128, K=64)
    assert artifact(jit.ensure(variant, TARGETS[arch]))[:4] == b"\x7fELF"
