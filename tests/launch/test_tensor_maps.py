"""`k.tensor_map`: descriptors for TMA, made by programs and by the Python launcher."""

import struct

import pytest
import torch
from fake_gpu import TARGET
from helpers import needs_nvrtc
from tuning import op_of

from jitkern import jit
from jitkern.declare import Cpp, Cuda
from jitkern.errors import LaunchError
from jitkern.launch.resources.device_view import AbsentDevice, PresentDevice
from jitkern.launch.resources.tensor_maps import TensorMap, layout_of, options_of
from jitkern.loading import cuda_driver
from jitkern.op.needed_kernels import needs_of
from jitkern.prewarming.call_traces import refused_by
from jitkern.source.kinds import Variant

CU = """
#include <cuda.h>

template <typename T> __global__ void tile(T *out, const __grid_constant__ CUtensorMap map, int row) {
  __shared__ alignas(128) T tile[16 * 64];
  __shared__ alignas(8) unsigned long long barrier;
  unsigned to = __cvta_generic_to_shared(tile), at = __cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(0), "r"(row), "r"(at) : "memory");
  }
  out[threadIdx.x] = tile[threadIdx.x];
}
"""
BF16, U8, F32 = torch.bfloat16, torch.uint8, torch.float32


def on_cuda(of=lambda k, x: k.tensor_map(x, (16, 64))):
    def launch(k, x):
        out = torch.empty(16 * 64, dtype=x.dtype, device=x.device)
        k.tile[{"T": x.dtype}](out, of(k, x), 3, grid=1, block=128)
        return out

    sample = lambda device: torch.ones(100, 64, device=device, dtype=BF16)
    return op_of(Cuda(text=CU), launch, sample=sample)


META = torch.ones(100, 64, dtype=BF16, device="meta")


def made(noted):
    """(type, rank, address, swizzle, promotion, fill), sizes, box and strides as the driver got them."""
    rank = min(noted[1], 3)
    return noted[:6], noted[6 : 6 + rank], noted[9 : 9 + rank], noted[12 : 11 + rank]


@pytest.mark.long
@needs_nvrtc
def test_a_program_makes_the_map_of_each_call(gpu):
    def of(k, x):
        return k.tensor_map(x, (16, 64), swizzle="128B", l2_promotion="256B", oob_fill="nan")

    text = gpu.learn(on_cuda(of), (META,))
    assert text.count("tensor_map ") == 1
    for shape in ((100, 64), (7, 64), (33, 4096)):
        x = torch.ones(shape, dtype=BF16)
        _, noted, row = gpu.call(x)
        assert row == 3
        assert made(noted) == (
            [9, 2, x.data_ptr(), 3, 3, 1], [shape[1], shape[0]], [64, 16], [2 * shape[1]],
        )  # fmt: skip


@pytest.mark.long
@needs_nvrtc
def test_a_call_that_breaks_a_rule_of_tma_goes_to_python(gpu):
    gpu.learn(on_cuda(), (META,))
    wide = torch.ones(100, 128, dtype=BF16)
    assert made(gpu.call(wide[:, :64])[1])[3] == [256]  # rows apart are fine
    assert made(gpu.call(wide[3:, 8:72])[1])[0][2] == wide.data_ptr() + 2 * (3 * 128 + 8)
    for bad in (wide[:0], wide[:, 1:65], wide[:, ::2], torch.ones(9, 60, dtype=BF16)):
        assert gpu.call(bad) is None
    gpu.tell("refuses_maps", 1)
    assert gpu.call(wide) is None


@pytest.mark.long
@needs_nvrtc
def test_a_map_of_a_view_and_of_an_allocation(gpu):
    def of(k, x):
        return k.tensor_map(x[4:].view(-1, 8, 64), (4, 8, 64))

    text = gpu.learn(on_cuda(of), (META,))
    x = torch.ones(44, 64, dtype=BF16)
    noted = gpu.call(x)[1]
    head = [9, 3, x.data_ptr() + 4 * 2 * 64, 0, 0, 0]
    assert made(noted) == (head, [64, 8, 5], [64, 8, 4], [128, 1024])
    assert "tensor_map memory+0, 9, 3," in text
    op = on_cuda(lambda k, x: k.tensor_map(torch.empty_like(x), (16, 64)))
    text = gpu.learn(op, (META,), slot=1)
    assert made(gpu.call(x, slot=1)[1])[1] == [64, 44] and "allocate" in text


def test_a_tensor_without_its_values_in_memory_is_refused(gpu):
    device = PresentDevice(TARGET, torch.device("cpu"))
    x = torch.ones(20, 64)
    assert device.tensor_map(x, (8, 16), "none", "none", "zeros").encoded
    with pytest.raises(LaunchError, match="resolve_neg"):
        device.tensor_map(torch._neg_view(x), (8, 16), "none", "none", "zeros")


@needs_nvrtc
def test_the_python_launcher_passes_the_drivers_bytes(gpu):
    x = torch.ones(20, 64)
    options = options_of(TARGET, x, (8, 16), "64B", "none", "zeros")
    layout = layout_of(x)
    encoded = cuda_driver.encoded_map(options, x.data_ptr(), layout.sizes, layout.strides, (16, 8))
    head = [7, 2, x.data_ptr(), 2, 0, 0]
    assert made(list(struct.unpack("16Q", encoded))) == (head, [64, 20], [16, 8], [256])
    parameters = ["*f32", "tensor_map", "i32", "tensor_map", "f64"]
    meta = {"parameters": parameters, "symbol": "k"}
    function = cuda_driver.CudaFunction(b"", meta, "`k`", ("", "", ""))
    gpu.expect(parameters[:4])
    other = encoded[::-1]
    one = (1, 1, 1)
    for row in (5, 6):
        arguments = [x.data_ptr(), encoded, row, other, 1.5]
        function.launch(arguments, 0, 0, one, one, 0, None, False, False)
        address, first, number, second = gpu.launched()
        assert (address, number) == (x.data_ptr(), row)
        assert (struct.pack("16Q", *first), struct.pack("16Q", *second)) == (encoded, other)
    gpu.tell("refuses_maps", 1)
    with pytest.raises(LaunchError, match=r"CUDA error 1 .*tensor map of sizes \(64, 20\)"):
        cuda_driver.encoded_map(options, x.data_ptr(), layout.sizes, layout.strides, (16, 8))


@pytest.mark.long
@needs_nvrtc
def test_a_parameter_that_is_a_tensor_map_takes_nothing_else():
    op = on_cuda(lambda k, x: x)
    source = op.sources["cuda"][0]
    (variant,) = needs_of(op, source, "cuda", TARGET).variants
    assert jit.ensure(variant, TARGET).manifest.meta["parameters"] == ["*bf16", "tensor_map", "i32"]
    (reason,) = refused_by(op, source, TARGET, [(META,)], {})
    assert "argument 2 (`const __grid_constant__ CUtensorMap map`) must be a tensor map" in reason


@pytest.mark.long
@needs_nvrtc
def test_a_pointer_to_a_map_or_another_struct_is_no_map(tmp_path):
    (tmp_path / "k.cu").write_text(
        "#include <cuda.h>\nstruct Other { char bytes[128]; };\n"
        "__global__ void k(const CUtensorMap *p, Other o, CUtensorMap m) {}\n"
    )
    entry = jit.ensure(Variant("t::k", Cuda("k.cu", folder=str(tmp_path)), "k"), TARGET)
    assert entry.manifest.meta["parameters"] == ["*", "", "tensor_map"]


BAD = {
    "rank": (torch.ones(()), (), {}, "1 to 5 dimensions, got 0"),
    "box_rank": (torch.ones(4, 4), (4,), {}, "a size for each of the 2 dimensions"),
    "box_size": (torch.ones(4, 4), (257, 4), {}, "1 to 256 elements"),
    "box_zero": (torch.ones(4, 4), (0, 4), {}, "1 to 256 elements"),
    "box_bytes": (torch.ones(4, 4), (4, 2), {}, "a multiple of 16 bytes, got 8"),
    "swizzle": (torch.ones(4, 64), (4, 16), {"swizzle": "32B"}, "32 bytes at most, got 64"),
    "no_swizzle": (torch.ones(4, 4), (4, 4), {"swizzle": "256B"}, "there are 'none', '32B', '64B', '128B'"),
    "promotion": (torch.ones(4, 4), (4, 4), {"l2_promotion": "1B"}, "there are 'none', '64B'"),
    "fill": (torch.ones(4, 4), (4, 4), {"oob_fill": 0}, "there are 'zeros', 'nan'"),
    "nan": (torch.ones(4, 16, dtype=U8), (4, 16), {"oob_fill": "nan"}, "the NaN of larger floats"),
    "dtype": (torch.ones(4, 4, dtype=torch.complex64), (4, 4), {}, "TMA copies no torch.complex64"),
    "no_tensor": (3, (4,), {}, "takes a tensor first, got int"),
    "empty": (torch.ones(0, 4), (4, 4), {}, "launch nothing for an empty tensor"),
    "stride": (torch.ones(4, 6), (4, 4), {}, r"got \(6, 1\) elements of 4 bytes: pad the rows"),
    "last_stride": (torch.ones(4, 8).t(), (4, 4), {}, r"side by side, got strides \(1, 8\)"),
    "address": (torch.ones(65)[1:].view(8, 8), (4, 4), {}, "address of x must be a multiple of 16"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_tma_cannot_copy_is_refused(case):
    x, box, options, says = BAD[case]
    given = {"swizzle": "none", "l2_promotion": "none", "oob_fill": "zeros", **options}
    with pytest.raises(LaunchError, match=says):
        options_of(TARGET, x, box, *given.values()) and layout_of(x)


def test_a_size_of_1_has_any_stride():
    x = torch.as_strided(torch.ones(64), (1, 3, 1), (7, 8, 5))
    assert layout_of(x) == ([1, 3, 1], [32, 16])


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_a_gpu_without_tma_is_refused_in_prewarm_and_fake(arch):
    with pytest.raises(LaunchError, match=f"from sm_90 on, and this launch is for cuda-{arch}"):
        AbsentDevice(TARGET._replace(arch=arch)).tensor_map(META, (16, 64), "none", "none", "zeros")


def test_the_cpu_has_no_tma():
    op = op_of(Cpp(text='extern "C" void k() {}\n'), lambda k, x: k.tensor_map(x, (4,)))
    with pytest.raises(LaunchError, match="GPUs from sm_90 on, and this launch is for cpu-"):
        op(torch.ones(4))


@needs_nvrtc
def test_a_fake_makes_no_map():
    assert on_cuda()(META).shape == (1024,)
    assert repr(TensorMap(META, b"")) == "k.tensor_map(...)"
