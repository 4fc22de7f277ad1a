"""Sources of several files: each kernel is built from its own, and an edit counts for what used it."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import H100, needs_nvrtc_13, write_files

from jitkern import jit
from jitkern.declare import kernel
from jitkern.errors import CompileError, DeclarationError
from jitkern.launch.call import Call, variant_of
from jitkern.source.closure import closure_of
from jitkern.source.defining_file import unit_of
from jitkern.source.key import make_key
from jitkern.source.kinds import Cpp, Cuda, Extension, Include, Unit, Variant
from jitkern.target import Target

TARGET = Target.parse(H100)

FILES = {
    "ops/k/rows.cu": '#include "rows.cuh"\n#include <shared.cuh>\n__global__ void rows(float* o) { *o = ROWS + SHARED; }\n',
    "ops/k/columns.cu": '#include "columns.cuh"\n#include <shared.cuh>\n__global__ void columns(float* o) { *o = COLUMNS + SHARED; }\n',
    "ops/k/plain.cu": "__global__ void plain(float* o) { *o = 1; }\n",
    "ops/k/rows.cuh": '#include "deep.cuh"\n#define ROWS DEEP\n',
    "ops/k/columns.cuh": "#define COLUMNS 2\n",
    "ops/k/deep.cuh": "#define DEEP 3\n",
    "ops/k/unused.cuh": "",
    "ops/include/shared.cuh": "#define SHARED 4\n",
}
NAMES = ("rows", "columns", "plain")
UNITS = [f"{name}.cu" for name in NAMES]


@pytest.fixture
def folder(tmp_path):
    write_files(tmp_path, FILES)
    return tmp_path / "ops" / "k"


@pytest.fixture
def source(folder):
    return Cuda(UNITS, folder=str(folder))


def variant(source, function):
    return variant_of("test::k", source, Call(function, (), (), {}))[0]


def keys(source):
    """Digest of the key of each kernel."""
    return {name: jit.key_of(variant(source, name), TARGET).digest for name in NAMES}


def changed(before, after):
    """The kernels whose keys differ."""
    return {name for name in before if before[name] != after[name]}


EDITS = {
    "k/rows.cu": {"rows"}, "k/columns.cu": {"columns"}, "k/plain.cu": {"plain"},
    "k/rows.cuh": {"rows"}, "k/deep.cuh": {"rows"}, "k/columns.cuh": {"columns"},
    "include/shared.cuh": {"rows", "columns"}, "k/unused.cuh": set(),
}  # fmt: skip


@pytest.mark.parametrize("edited", EDITS)
def test_an_edit_changes_the_keys_of_exactly_what_used_the_file(source, tmp_path, edited):
    before = keys(source)
    with open(tmp_path / "ops" / edited, "a") as file:
        file.write("// changed\n")
    assert changed(before, keys(source)) == EDITS[edited]


def test_flags_of_a_unit_change_its_key_alone(source, folder):
    units = [Unit("rows.cu", flags=("-maxrregcount=32",)), *UNITS[1:]]
    assert changed(keys(source), keys(Cuda(units, folder=str(folder)))) == {"rows"}


def test_a_kernel_has_the_key_that_its_file_alone_would_give(source, folder):
    alone = Cuda("rows.cu", folder=str(folder))
    assert keys(source)["rows"] == jit.key_of(variant(alone, "rows"), TARGET).digest


def test_flags_of_a_unit_of_an_extension_are_in_its_key(folder):
    (folder / "a.cpp").write_text("")
    (folder / "b.cpp").write_text("")
    target = Target.parse("cpu-x86_64-torch2.11.0")

    def digest(*files):
        source = Extension(files, function="f", folder=str(folder))
        return make_key(Variant("t::e", source), target, ("-O2",), closure_of(source)).digest

    plain = digest("a.cpp", "b.cpp")
    assert plain == digest(Unit("a.cpp"), "b.cpp")
    flagged = {digest(Unit("a.cpp", ("-DX",)), "b.cpp"), digest("a.cpp", Unit("b.cpp", ("-DX",)))}
    assert len({plain, *flagged}) == 3


def test_a_function_in_no_file_or_in_two_is_an_error_that_lists(source, folder):
    with pytest.raises(DeclarationError, match=r"`other`; there are: rows.cu: rows; columns.cu: c"):
        unit_of(source, "other")
    (folder / "plain.cu").write_text("__global__ void rows(float* o) {}")
    with pytest.raises(DeclarationError, match=r"`rows` is in several files, rows.cu, plain.cu"):
        unit_of(source, "rows")
    (folder / "plain.cu").unlink()
    with pytest.raises(DeclarationError, match=r"plain.cu does not exist"):
        unit_of(source, "rows")


def test_a_kernel_that_a_macro_defines_is_found_by_its_name(source, folder):
    (folder / "plain.cu").write_text("#define K(n) __global__ void n(int* o) {}\nK(made)\n")
    assert unit_of(source, "made").files == ("plain.cu",)


@pytest.mark.long
@needs_nvrtc_13
def test_units_are_compiled_each_by_itself_and_in_parallel(source):
    variants = [variant(source, name) for name in NAMES]
    with ThreadPoolExecutor(3) as pool:
        entries = list(pool.map(lambda one: jit.ensure(one, TARGET), variants))
    assert [list(entry.manifest.inputs["source"]["closure"]) for entry in entries] == [
        ["../include/shared.cuh", "deep.cuh", "rows.cu", "rows.cuh"],
        ["../include/shared.cuh", "columns.cu", "columns.cuh"],
        ["plain.cu"],
    ]


@needs_nvrtc_13
def test_flags_of_a_unit_reach_the_compiler(folder):
    (folder / "plain.cu").write_text("__global__ void plain(float* o) { *o = VALUE; }")
    source = Cuda(["rows.cu", Unit("plain.cu", flags=("-DVALUE=5",))], folder=str(folder))
    assert jit.ensure(variant(source, "plain"), TARGET)
    assert jit.ensure(variant(source, "rows"), TARGET)


@needs_nvrtc_13
@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (
            "__device__ float helper(float x);",
            r"`helper` is defined in plain\.cu, .* put it in a h",
        ),
        ("__device__ float other(float x);", r"`other` is declared but not defined in .*rows"),
        ("extern __device__ float table[4];", r"uses `table`, which plain\.cu defines"),
    ],
)
def test_what_another_unit_defines_is_an_error_with_a_remedy(source, folder, declared, says):
    (folder / "plain.cu").write_text(
        "__device__ float helper(float x) { return x; }\n__device__ float table[4];\n"
    )
    use = "table[0]" if "table" in declared else declared.split()[2].replace("(float", "(1)")
    (folder / "rows.cu").write_text(f"{declared}\n__global__ void rows(float* o) {{ *o = {use}; }}")
    with pytest.raises(CompileError, match=says):
        jit.ensure(variant(source, "rows"), TARGET)


CPP = {
    "scale.cpp": "template <typename T> void scale(T* o, const T* x, double alpha, long n) {\n"
    "  for (long i = 0; i < n; i++) o[i] = T(alpha) * x[i];\n}\n",
    "fill.cpp": 'extern "C" void fill(float* o, long n) { for (long i = 0; i < n; i++) o[i] = VALUE; }\n',
    "lost.cpp": 'float helper(float);\nextern "C" void lost(float* o) { *o = helper(1); }\n',
    "helper.cpp": "float helper(float x) { return x; }\n",
}


@pytest.fixture
def cpp(tmp_path):
    write_files(tmp_path, CPP)
    units = ["scale.cpp", Unit("fill.cpp", flags=["-DVALUE=7"]), "lost.cpp", "helper.cpp"]
    return Cpp(units, folder=str(tmp_path))


def test_a_function_of_another_cpp_unit_is_an_error(cpp):
    says = r"`helper` is defined in helper\.cpp.* put it in a head"
    with pytest.raises(CompileError, match=says):
        jit.ensure(variant(cpp, "lost"), Target.current("cpu"))


@pytest.mark.long
def test_an_op_of_several_files_runs(cpp):
    op = kernel("jitkern_multi::twice(Tensor x) -> Tensor", cpu=cpp.replace(folder=""))
    op.sources["cpu"] = (cpp,)

    @op.launch("cpu")
    def _(k, x):
        out = torch.empty_like(x)
        k.fill(out, x.numel())
        k.scale[{"T": x.dtype}](out, x, 2.0, x.numel())
        return out

    for _ in range(3):
        assert op(torch.ones(4)).tolist() == [2, 2, 2, 2]


@pytest.fixture
def versioned(folder, tmp_path):
    """A source over a library of many headers that stands by its version."""
    library = tmp_path / "library"
    headers = {f"h{n}.h": f'#include "h{n + 1}.h"\n#define H{n} {n}\n' for n in range(49)}
    write_files(library, {**headers, "h49.h": "#define H49 49\n"})
    plain = "#include <h0.h>\n__global__ void plain(float* o) { *o = H49; }\n"
    (folder / "plain.cu").write_text(plain)

    def source(version):
        return Cuda(UNITS, folder=str(folder), include=[Include(str(library), version=version)])

    source.library = library
    return source


OPENED: list[str] = []  # by Python, in this process


@pytest.fixture(scope="module")
def opened():
    """What is opened from now on; the hook stays for good, and notes nothing afterwards."""
    noting = [True]

    def note(event, args):
        if noting and event == "open":
            OPENED.append(str(args[0]))

    sys.addaudithook(note)
    yield OPENED
    noting.clear()


@needs_nvrtc_13
def test_a_versioned_roots_version_stands_for_its_headers(versioned, opened):
    def read():
        return [path for path in opened if path.startswith(str(versioned.library))]

    entry = jit.ensure(variant(versioned("1"), "plain"), TARGET)
    opened.clear()
    assert jit.ensure(variant(versioned("1"), "plain"), TARGET).path == entry.path
    assert jit.key_of(variant(versioned("2"), "plain"), TARGET).digest != entry.manifest.digest
    assert read() == []
    (versioned.library / "h0.h").read_text()
    assert len(read()) == 1


@needs_nvrtc_13
def test_a_versioned_header_may_open_versioned_ones_alone(versioned, folder):
    (versioned.library / "h49.h").write_text('#include "unused.cuh"\n#define H49 1\n')
    with pytest.raises(CompileError, match=r"opened .*unused\.cuh, which the cache key does not"):
        jit.ensure(variant(versioned("1"), "plain"), TARGET)
    with open(folder / "plain.cu", "a") as file:
        file.write('#include "unused.cuh"\n')
    assert jit.ensure(variant(versioned("1"), "plain"), TARGET)


@pytest.mark.gpu
def test_kernels_of_several_files_run_on_a_gpu(source, folder):
    op = kernel("jitkern_multi::sums(Tensor x) -> Tensor", cuda=Cuda(UNITS))
    op.sources["cuda"] = (source,)

    @op.launch("cuda")
    def _(k, x):
        out = torch.empty(3, dtype=x.dtype, device=x.device)
        k.rows(out, grid=1, block=1)
        k.columns(out[1:], grid=1, block=1)
        k.plain(out[2:], grid=1, block=1)
        return out

    for _ in range(3):
        assert op(torch.ones(4, device="cuda")).tolist() == [7, 6, 1]
