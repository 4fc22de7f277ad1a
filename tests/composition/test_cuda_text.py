"""The kernels for CUDA, run on the CPU, one thread after the other: which element each touches."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from formulas import randn
from test_pointwise import SHAPES, bias, ends, mixed, of_bools, whole

from jitkern import pointwise
from jitkern.launch.kernels import Kernels
from jitkern.runtime import specializer
from jitkern.source.dtypes import DTYPES, codes_of_torch

CUDA_IN_CPP = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
struct Index { long long x; };
static Index blockIdx, threadIdx;
static float __int_as_float(int bits) { float f; std::memcpy(&f, &bits, 4); return f; }
struct Pointer {
  void* p;
  template <typename T> operator T*() const { return (T*)p; }
};
using namespace std;
"""
CASES = [*range(len(SHAPES))]


def spelled(value):
    if isinstance(value, torch.dtype):
        return DTYPES[codes_of_torch()[value]].cuda
    return str(int(value))


class Emulated:
    """The launches of calls, and the library of the kernels that they want."""

    def __init__(self, function, calls):
        self.launches, self.results = [], []
        launcher = function.op.launch_function(function.op.sources["cuda"][0], "cuda")
        for args in calls:
            self.results.append(launcher(Kernels(self.launches.append), *args))
        self.text = CUDA_IN_CPP + function.source("cuda")

    def run(self, folder):
        for number, call in enumerate(self.launches):
            kernel = f"{call.function}<{', '.join(spelled(value) for _, value in call.template)}>"
            kinds = {torch.Tensor: "void*", int: "long long", float: "double", bool: "bool"}
            types = [
                kinds[torch.Tensor if isinstance(a, torch.Tensor) else type(a)] for a in call.args
            ]
            named = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types))
            passed = [
                f"Pointer{{a{i}}}" if kind == "void*" else f"a{i}" for i, kind in enumerate(types)
            ]
            self.text += (
                f'extern "C" void go{number}(long long grid, {named}) {{\n'
                f"  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)\n"
                f"    for (threadIdx.x = 0; threadIdx.x < 128; threadIdx.x++)\n"
                f"      {kernel}({', '.join(passed)});\n}}\n"
            )
        library = f"{self.launches[0].function}.so"
        (folder / "kernels.cpp").write_text(self.text)
        command = [
            "c++",
            "-std=c++17",
            "-O1",
            "-w",
            "-shared",
            "-fPIC",
            "-fsanitize=undefined",
            "-fno-sanitize-recover",
        ]
        subprocess.run([*command, "kernels.cpp", "-o", library], cwd=folder, check=True)
        loaded = ctypes.CDLL(str(folder / library))
        for number, call in enumerate(self.launches):
            function = getattr(loaded, f"go{number}")
            convert = {int: ctypes.c_longlong, float: ctypes.c_double, bool: ctypes.c_bool}
            function(
                ctypes.c_longlong(call.keywords["grid"]),
                *(
                    ctypes.c_void_p(a.data_ptr())
                    if isinstance(a, torch.Tensor)
                    else convert[type(a)](a)
                    for a in call.args
                ),
            )


@pytest.mark.long
def test_every_element_is_computed_where_it_belongs(tmp_path):
    calls = [SHAPES[case](randn) for case in CASES]
    calls += [
        (randn(4, 8, 16)[:, :, 4:12], randn(8)),
        (randn(3, 64, 8), randn(64, 1)),
        (randn(1000), randn(1000)),
    ]
    emulated = Emulated(bias, calls)
    widths = {dict(call.template)["V"] for call in emulated.launches}
    assert widths == {1, 4}
    for result in emulated.results:
        result.fill_(torch.nan)
    emulated.run(tmp_path)
    for (x, b), got in zip(calls, emulated.results):
        assert torch.equal(got, x + b), (x.shape, x.stride(), b.shape, b.stride())


@pytest.mark.long
@pytest.mark.parametrize("flip", [False, True])
def test_several_outputs_dtypes_and_numbers(tmp_path, flip):
    calls = [
        (randn(100), randn(100).double(), 0.5, 3, flip),
        (torch.arange(77), randn(77), 0.5, 3, flip),
        (randn(6, 8) > 0, randn(8), 2.0, -1, flip),
    ]
    emulated = Emulated(mixed, calls)
    emulated.run(tmp_path)
    for args, got in zip(calls, emulated.results):
        torch.testing.assert_close(got, mixed.function(*args[:4], torch.tensor(flip)))


@pytest.mark.long
def test_no_overflow_is_undefined_and_any_byte_is_true(tmp_path):
    """The compiler's sanitizer ends the process at an overflow of signed integers."""
    a = torch.tensor([2, 0, 1, 255] * 9, dtype=torch.uint8).view(torch.bool)
    n = torch.zeros(36, dtype=torch.int32)
    for function, calls in (whole, [ends()]), (of_bools, [(a, n), (a[::2], n[::2]), (a[:1], n)]):
        emulated = Emulated(pointwise(function), calls)
        emulated.run(tmp_path)
        for args, results in zip(calls, emulated.results):
            for i, (got, want) in enumerate(zip(results, function(*args))):
                assert torch.equal(got, want), (function, i)


@pytest.mark.long
def test_positions_beyond_32_bits():
    launches = []
    launcher = bias.op.launch_function(bias.op.sources["cuda"][0], "cuda")
    for rows in (2**28, 2**28 - 1):
        x = torch.empty(rows, 8, dtype=torch.bfloat16, device="meta")
        launcher(Kernels(launches.append), x, torch.empty(8, dtype=torch.bfloat16, device="meta"))
    assert [dict(call.template)["I"] for call in launches] == [torch.int64, torch.uint32]
    assert [call.keywords["grid"] for call in launches] == [2**21, 2**21]


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    x = torch.arange(8, dtype=torch.int8, device="cuda").repeat(2**28 + 1)
    assert torch.equal(bias(x, x)[-16:], 2 * x[-16:])
    rows = bias(x.view(-1, 8), x[:8])
    assert torch.equal(rows[-2:], 2 * x[-16:].view(2, 8))
    assert int(rows.sum(dtype=torch.int64)) == 56 * (2**28 + 1)


@pytest.mark.gpu
def test_results_are_the_same_in_a_graph_and_on_another_stream():
    x, b = (randn(1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = bias(x, b)
    specializer.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bias(x, b)
    captured.fill_(torch.nan)
    graph.replay()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = bias(x, b)
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert torch.equal(beside, expected)
