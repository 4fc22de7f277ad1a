"""The CuTe DSL, in its child process; it needs no GPU."""

import ctypes
import importlib.util
import itertools
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGpu
from helpers import REPOSITORY, needs_cute, one_in_four

import jitkern
from jitkern import config, jit
from jitkern.declare import Cute, kernel
from jitkern.errors import (
    CompileError,
    CompilerNotFound,
    DeclarationError,
    LaunchError,
    TargetError,
)
from jitkern.launch.call import Call, variant_of
from jitkern.launch.runner import Runner
from jitkern.source.kinds import Variant
from jitkern.target import Target

TARGETS = {
    arch: Target.parse(f"cuda-{arch}-cu130-torch2.13.0")
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
}
TARGET = TARGETS["sm_90"]
pytestmark = needs_cute
_number = itertools.count()

HEAD = (
    "import cuda.bindings.driver as cuda\nimport cutlass\nimport cutlass.cute as cute\n"
    "from cutlass import Constexpr, Float32, Int32, Int64\n"
)
SCALE = HEAD + (
    "@cute.kernel\n"
    "def scale(out: cute.Tensor, x: cute.Tensor, by: Float32, n: Int32, B: Constexpr):\n"
    "    i = cute.arch.block_idx()[0] * B + cute.arch.thread_idx()[0]\n"
    "    if i < n:\n"
    "        out[i] = x[i] * by\n"
    "@cute.jit\n"
    "def k(out: cute.Tensor, x: cute.Tensor, by: Float32, B: Constexpr, stream: cuda.CUstream):\n"
    "    n = cute.size(x, mode=[0])\n"
    "    blocks = (n + B - 1) // B\n"
    "    scale(out, x, by, n, B).launch(grid=[blocks, 1, 1], block=[B, 1, 1], stream=stream)\n"
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
        kind = Cute("k.py", folder=str(folder), **source)
        return jit.ensure(Variant("test::k", kind, function, template, signature), target)

    run.folder = run_folder
    return run


def library(entry):
    return (entry.path / entry.manifest.meta["artifact"]).read_bytes()


@pytest.mark.long
def test_a_library_needs_the_driver_alone(build):
    entry = build()
    codes = ["*f32", "i32", "i64", "*f32", "i32", "i64", "f32"]
    assert entry.manifest.meta["parameters"] == codes
    place = entry.path / entry.manifest.meta["artifact"]
    ctypes.CDLL(str(place))  # with no CUDA in this process
    assert b"libcuda" not in library(entry)
    assert b"libcudart" not in library(entry)


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
    assert library(entry)[:4] == b"\x7fELF"


@pytest.mark.long
def test_an_arch_that_the_compiler_does_not_know_is_named(build):
    with pytest.raises(TargetError, match=r"nvidia-cutlass-dsl 4\S+ does not know sm_75"):
        build(target=TARGETS["sm_75"])


def test_another_platform_is_refused(build):
    with pytest.raises(TargetError, match="linux_riscv64"):
        build(target=TARGET._replace(platform="linux_riscv64"))


@pytest.mark.long
def test_the_cuda_of_the_target_picks_the_compiler(build):
    """Both compilers are installed; without a driver the DSL itself would take the newest."""
    thirteen = build()
    twelve = build(target=Target.parse("cuda-sm_90-cu128-torch2.13.0"))
    assert ", cu12 " in twelve.manifest.compiler["version"]
    assert library(twelve) != library(thirteen)


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
    assert library(first) != library(second)


@pytest.mark.long
def test_options_are_in_the_key(build):
    plain, slow = build(), build(flags=["--opt-level 0"])
    assert plain.path != slow.path
    assert library(plain) != library(slow)


@pytest.mark.long
def test_a_declared_variable_is_in_the_key(build, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    with config.using(environment={**os.environ}):
        plain, told = build(), build(environment=["CUTE_DSL_LINEINFO"])
    assert library(plain) != library(told)


SET_BY_JITKERN = {"ARCH", "DRYRUN", "ENABLE_TVM_FFI", "LIBS"}


def test_the_variables_are_those_of_the_dsl():
    """`affects_compile` marks them; the file is read, since an import takes seconds."""
    place = importlib.util.find_spec("cutlass").origin
    text = (Path(place).parent / "base_dsl" / "env_manager.py").read_text()
    import ast

    found = set()
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "env_var":
            affects = next(k.value.value for k in call.keywords if k.arg == "affects_compile")
            name = call.args[0].value if isinstance(call.args[0], ast.Constant) else "LIBS"
            found |= {name} if affects else set()
    passed = {name.removeprefix(Cute.prefix) for name in Cute.variables}
    assert found == passed | SET_BY_JITKERN


@pytest.mark.parametrize(
    ("keyword", "reason"),
    [
        ({"flags": ["--gpu-arch sm_90a"]}, "takes --opt-level"),
        ({"flags": ["--enable-tvm-ffi"]}, "takes --opt-level"),
        ({"environment": ["CUTE_DSL_ARCH"]}, "jitkern sets it"),
        ({"environment": ["CUTE_DSL_KEEP"]}, "changes nothing that is compiled"),
        ({"include": ["more"]}, "a file in Python includes none"),
        ({"package_versions": {}}, "takes environment, .*, packages, strided, text, got package_v"),
    ],
)
def test_a_declaration_passes_on_what_changes_the_code_alone(keyword, reason):
    with pytest.raises(DeclarationError, match=reason):
        Cute("k.py", **keyword)


@pytest.mark.long
def test_the_dsls_own_variables_and_folders_are_not_used(build, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUTE_DSL_CACHE_DIR", str(tmp_path / "own"))
    plain = build()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    with config.using(environment={**os.environ}, cache_dir=tmp_path / "other"):
        assert library(build()) == library(plain)
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "own").exists()


OUTSIDE = {
    "import numpy": r"`numpy` is imported, .*Cute\(..., packages={'numpy': '\d",
    "import torch": "`torch` is imported, which the cache key does not cover",
    "import other": "it is no module of the kernel's package",
    "open(FOLDER + '/other.py').read()": "opens .*other.py, which the cache key does not cover",
}


@pytest.mark.long
@pytest.mark.parametrize("text", one_in_four(OUTSIDE))
def test_what_no_key_covers_is_refused(build, tmp_path, text):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.py").write_text("X = 1\n")
    whole = f"FOLDER = {str(tmp_path / 'elsewhere')!r}\n{text}\n{SCALE}"
    with pytest.raises(CompileError, match=OUTSIDE[text]):
        build(whole)


# ------------------------------------------------------------------ refusals

REFUSED = {
    "name": (SCALE, {"function": "j"}, "k.py: error: it has no @cute.jit function `j`; it has: k"),
    "count": (SCALE, {"signature": (VECTOR,)}, r"takes 3 arguments \(out, x, by\), got 1"),
    "constant": (SCALE, {"template": ()}, r"needs the constant `B`, .*k.k\[{'B': …}\]"),
    "unknown": (SCALE, {"template": (("B", 1), ("C", 1))}, "has no parameter `C`"),
    "no constant": (
        SCALE,
        {"template": (("B", 1), ("by", 2.0)), "signature": (VECTOR, VECTOR)},
        "`by` is no constant: annotate it as cutlass.Constexpr",
    ),
    "unannotated": (
        SCALE.replace("by: Float32, B", "by, B"),
        {},
        "`by` is not annotated, and gets a number, of the class float: annotate it as cutlass.Int32",
    ),
    "tuple": (
        SCALE.replace("by: Float32, B", "by: tuple[Int32, Int32], B"),
        {},
        r"`by` is annotated as tuple\[",
    ),
    "number": (
        SCALE,
        {"signature": (VECTOR, "int", "float")},
        "`x` is annotated as .*Tensor, and gets a number",
    ),
    "tensor": (
        SCALE,
        {"signature": (VECTOR, VECTOR, VECTOR)},
        "`by` is annotated as .*Float32, and gets a tensor.*annotate it as cute.Tensor",
    ),
    "bool": (
        SCALE,
        {"signature": (VECTOR, "*bool:16:16:=1", "float")},
        r"`x` is a tensor of bool: pass a view of its bytes, `x.view\(torch.uint8\)`",
    ),
    "stream": (
        SCALE.replace(", stream: cuda.CUstream", "").replace(", stream=stream", ""),
        {},
        "the last parameter of `k` must be the stream",
    ),
    "asks": (
        SCALE.replace("    blocks", "    cutlass.utils.HardwareInfo()\n    blocks"),
        {},
        r"k.py\(\d+\): error: it asks the GPU of this machine",
    ),
    "blocks": (
        SCALE.replace("block=[B", "min_blocks_per_mp=2, block=[B"),
        {},
        "it asks the GPU of this machine while it is compiled",
    ),
    "language": (SCALE.replace("x[i] * by", "'a'"), {}, r"k.py\(9\): error: "),
    "syntax": (SCALE + "x = (\n", {}, r"k.py\(15\): error: SyntaxError: "),
    "raises": (SCALE + "1 / 0\n", {}, r"k.py\(15\): error: ZeroDivisionError"),
    "exits": (SCALE + "import os\nos._exit(3)\n", {}, "process ended with status 3"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_compiled_is_refused_with_its_reason(build, case):
    text, given, reason = REFUSED[case]
    with pytest.raises(CompileError, match=reason) as raised:
        build(text, **given)
    assert "\x1b[" not in str(raised.value)


def test_a_missing_package_is_named_with_the_line_of_pip(build, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(REPOSITORY)])
    with pytest.raises(CompilerNotFound, match=r'pip install "jitkern\[cute\]"'):
        build()


def test_a_missing_linker_is_named(build):
    with config.using(cc="no-such-cc"), pytest.raises(CompilerNotFound, match="no-such-cc"):
        build()


# ------------------------------------------------------------------ launches


@pytest.fixture
def declare(tmp_path):
    """Declare an op `(Tensor x, float by) -> Tensor` of SCALE."""

    def declare(launch, schema="(Tensor x, float by) -> Tensor", text=SCALE, **source):
        (tmp_path / "k.py").write_text(text)
        op = kernel(
            f"jitkern_cute::f{next(_number)}{schema}",
            cuda=Cute(str(tmp_path / "k.py"), **source),
        )
        op.launch("cuda")(launch)
        return op

    return declare


def scaled(k, x, by):
    out = torch.empty_like(x)
    k.k[{"B": 64}](out, x, by)
    return out


WITH_INT = SCALE.replace("by: Float32", "by: Int32")


@pytest.mark.long
def test_a_call_is_traced_and_served_by_c(declare, tmp_path, monkeypatch):
    op = declare(scaled, "(Tensor x, int by) -> Tensor", WITH_INT)
    meta = torch.ones(64, device="meta"), 2
    op.samples(lambda device: iter([meta]))
    gpu = FakeGpu(tmp_path, monkeypatch)
    gpu.learn(op, meta)
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
    assert gpu.call(torch.ones(65), 2) is None, "a size of another class"
    assert gpu.call(torch.ones(65)[1:], 2) is None, "an address of another class"
    assert gpu.call(torch.ones(64, dtype=torch.float64), 2) is None, "another dtype"
    assert gpu.call(torch.ones(128)[::2], 2) is None, "not contiguous"


@pytest.mark.long
def test_the_code_is_prepared_once_for_each_device(build, tmp_path, monkeypatch):
    gpu = FakeGpu(tmp_path, monkeypatch)
    build(template=(("B", 32),))
    source = Cute("k.py", folder=str(build.folder))
    variant = Variant("test::k", source, "k", (("B", 32),), (VECTOR, VECTOR, "float"))
    function = jit.loaded(variant, TARGET)
    gpu.expect(["Qi4x", "Qi4x", "f", "i"])
    values = [1 << 40, 48, 1, 1 << 41, 48, 1, 0.5]
    prepared = []
    gpu.tell("current", 0)
    threads = [
        threading.Thread(target=function.call, args=([*values, 70, 0], "`k`")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda:0")


@pytest.mark.long
def test_a_launch_from_python_passes_stream_and_device(build, tmp_path, monkeypatch):
    gpu, exchanged = FakeGpu(tmp_path, monkeypatch), []
    (build.folder / "k.py").write_text(SCALE)
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


COPY = HEAD + (
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
def test_a_strided_source_passes_strides(declare, tmp_path, monkeypatch):
    def launch(k, x):
        out = torch.empty_strided(x.shape, (x.shape[1], 1), dtype=x.dtype, device=x.device)
        k.k(out, x)
        return out

    op = declare(launch, "(Tensor x) -> Tensor", COPY, strided=True)
    meta = (torch.ones(48, 32, device="meta").t(),)
    op.samples(lambda device: iter([meta]))
    gpu = FakeGpu(tmp_path, monkeypatch)
    gpu.learn(op, meta)
    gpu.expect(["Q2i1q", "Q2i1q"])
    x = torch.ones(64, 16).t()
    out, given = gpu.call(x)
    assert out[1:] == [16, 64, 64]
    assert given == [x.data_ptr(), 16, 64, 16], "the first stride, 1, is compiled in"
    assert gpu.call(torch.ones(16, 64)) is None, "strides of another class"


def classes(*args, template=(("B", 64),), **keywords):
    call = Call("k", template, args, keywords)
    return variant_of("test::k", Cute("k.py"), call)[0].signature


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_the_classes_of_arguments_are_those_of_cutile():
    given = on_meta(64, 40), on_meta(63, dtype=torch.bfloat16)[1:], 3
    assert classes(*given) == ("*f32:16:16,1:4,=1", "*bf16:1:1:=1", "int")


WRONG = [
    (([on_meta(4)],), {}, "takes tensors and numbers, not list"),
    (((1, 2),), {}, "not tuple"),
    ((None,), {}, "not NoneType `None`"),
    ((on_meta(4, dtype=torch.complex64),), {}, "no kernel knows torch.complex64"),
    ((on_meta(4),), {"grid": 128}, "with `grid`, and a function of CuTe takes no keyword: it"),
    ((on_meta(4),), {"num_warps": 2}, "with `num_warps`, and a function of CuTe takes no keyword"),
]


@pytest.mark.parametrize(("args", "keywords", "reason"), WRONG)
def test_an_argument_that_cannot_be_passed_is_refused(args, keywords, reason):
    with pytest.raises(LaunchError, match=reason):
        classes(*args, **keywords)


@pytest.mark.parametrize("value", [torch.float32, "a", lambda x: x, float("nan"), (1, 2)])
def test_a_constant_is_a_number(value):
    with pytest.raises(LaunchError, match="constant B=.* must be a bool, an int or a finite float"):
        classes(template=(("B", value),))


@pytest.mark.long
def test_a_number_that_does_not_fit_names_the_argument(declare):
    def launch(k, x, by):
        out = torch.empty_like(x)
        k.k[{"B": 64}](out, x, 1 << 40)
        return out

    op = declare(launch, text=WITH_INT)
    op.samples(lambda device: iter([(torch.ones(64, device=device), 2.0)]))
    said = jitkern.prewarm([op], targets=[TARGET])
    assert r"argument 3 (`by`) must be an integer that fits i32" in str(said)


@pytest.mark.long
def test_a_lookup_needs_no_cute(build, run_python):
    entry = build()
    code = (
        "import sys\nsys.modules['cuda'] = sys.modules['cutlass'] = None\n"
        "from jitkern import jit\nfrom jitkern.source.kinds import Cute, Variant\n"
        "from jitkern.target import Target\n"
        f"source = Cute('k.py', folder={str(build.folder)!r})\n"
        f"v = Variant('test::k', source, 'k', (('B', 64),), {(VECTOR, VECTOR, 'float')!r})\n"
        f"print(jit.ensure(v, Target.parse({str(TARGET)!r})).path)\n"
        "print(*(m for m in sys.modules if m.startswith('jitkern.compilers.cute')))\n"
    )
    path, modules = run_python(code, JITKERN_COMPILE="never").stdout.splitlines()
    assert path == str(entry.path)
    assert modules.split() == ["jitkern.compilers.cute", "jitkern.compilers.cute.compiler"]


@pytest.mark.long
def test_processes_and_folders_give_equal_bytes(build, tmp_path):
    """Each compile has a process of its own, whose hashes have a seed of their own."""
    (build.folder / "helper.py").write_text(HELPER.format(2))
    found = set()
    for number in range(8):
        folder = build.folder if number % 2 else tmp_path / f"other{number}"
        if folder != build.folder:
            folder.mkdir()
            shutil.copy(build.folder / "helper.py", folder)
        with config.using(cache_dir=tmp_path / f"cache{number}"):
            found.add(library(build(HELPED, folder=folder)))
    assert len(found) == 1


GEMM = REPOSITORY / "examples" / "cute_gemm" / "cute_gemm"


@pytest.mark.long
def test_the_example_launches_its_tiles(tmp_path, monkeypatch):
    gpu = FakeGpu(tmp_path, monkeypatch)
    template, matrix = (("M", 64), ("N", 64), ("K", 32)), "*bf16:16:1,1:1,=1"
    variant = Variant(
        "test::gemm", Cute("gemm.py", folder=str(GEMM)), "gemm", template, (matrix,) * 3
    )
    function = jit.loaded(variant, TARGET)
    m, n, k = 513, 257, 1023
    passed = [(1 << 40, m, n, n, 1), (1 << 41, m, k, k, 1), (1 << 42, k, n, n, 1)]
    gpu.expect(["Q2iq", "Q2iq", "Q2iq"])
    function.call([*itertools.chain(*passed), 77, 0], "`gemm`")
    assert gpu.launched() == [[1 << 40, m, n, n], [1 << 41, m, k, k], [1 << 42, n, k, n]]
    *sizes, shared = gpu.array("config", ctypes.c_uint, 7)
    assert sizes == [9, 5, 1, 256, 1, 1]
    assert shared == 2 * 2 * (63 * (32 + 8) + 32), "tiles of both matrices, in rows with padding"


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
def test_the_example_is_compiled_for_each_arch(arch):
    template, matrix = (("M", 128), ("N", 128), ("K", 32)), "*bf16:16:16,16:8,=1"
    variant = Variant(
        "test::gemm", Cute("gemm.py", folder=str(GEMM)), "gemm", template, (matrix,) * 3
    )
    assert library(jit.ensure(variant, TARGETS[arch]))[:4] == b"\x7fELF"
