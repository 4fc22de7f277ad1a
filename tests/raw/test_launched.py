"""What a launch of a Triton function returns: a kernel that is launched again, as Triton's is."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import struct
import sys
import weakref

import pytest
import torch
from fake_gpu import OnGpu
from helpers import H100, FakeCompiler, needs_triton

import jitkern
from jitkern import testing
from jitkern.compilers import COMPILERS
from jitkern.errors import LaunchError
from jitkern.launch import autotune
from jitkern.launch.autotune import Choice
from jitkern.raw import patch as patching
from jitkern.raw.from_triton import triton_kernel

pytestmark = needs_triton

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def add(out, x, n, other, BLOCK: tl.constexpr, ACT: tl.constexpr = None):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + other, mask=i < n)

@triton.heuristics({"EVEN": lambda args: args["n"] % 128 == 0})
@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(out, x, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)
"""
ATTRIBUTES = {3: 24, 4: 40}  # bytes of local memory, registers


class Driver:
    """CUDA's driver, which notes launches: the grid, and the parameters as numbers of 64 bits."""

    def __init__(self):
        self.launches = []
        self.kernels = 0

    def cuLibraryLoadData(self, *_):
        return 0

    def cuLibraryGetKernel(self, kernel, library, symbol):
        self.kernels += 1
        kernel._obj.value = self.kernels
        return 0

    def cuKernelGetAttribute(self, value, number, kernel, device):
        value._obj.value = ATTRIBUTES[number]
        return 0

    def cuLaunchKernelEx(self, config, kernel, pointers, _):
        grid = struct.unpack_from("=3I", config)
        values = [ctypes.c_uint64.from_address(at).value for at in pointers]
        self.launches.append((kernel.value, grid, values))
        return 0


class TritonWithoutTriton(FakeCompiler):
    def compile(self, variant, target, closure, staging):
        (staging / "kernel.cubin").write_bytes(repr(variant[2:]).encode())
        built = [kind.partition(":")[0] for kind in variant.signature if kind not in ("1", "None")]
        meta = {
            "artifact": "kernel.cubin", "symbol": "add_0d1d2d", "parameters": built, "scratch": [],
            "block": 32 * dict(variant.options).get("num_warps", 4), "smem": 512, "cluster": 1,
            "pdl": False, "cooperative": False,
        }  # fmt: skip
        return super().compile(variant, target, closure, staging)._replace(meta=meta)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    testing.set_driver(monkeypatch, driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 5, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setitem(COMPILERS, "triton", TritonWithoutTriton())
    return driver


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A module of a library that is patched, for a GPU that is not here."""
    (tmp_path / "launched_library.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(patching, "triton_kernel", functools.partial(triton_kernel, target=H100))
    import launched_library

    with jitkern.patch_triton("launched_library"):
        yield launched_library
    del sys.modules["launched_library"]


def tensors(count=2):
    return [torch.zeros(256).as_subclass(OnGpu) for _ in range(count)]


def ways(kernels):
    return {
        "patched": kernels.add,
        "object": jitkern.triton_kernel(kernels.add, target=H100),
        "name": jitkern.triton_kernel("launched_library:add", target=H100),
    }


@pytest.mark.parametrize("way", ["patched", "object", "name"])
def test_a_launched_kernel_is_launched_again(driver, kernels, way):
    (out, x), (other_out, other_x) = tensors(), tensors()
    function = ways(kernels)[way]
    kernel = function[(4,)](out, x, 200, other=2.0, BLOCK=64, num_warps=8)
    assert kernel[7, 2, 1](other_out, other_x, 201, 3.0, "not", "counted") is None
    (first, grid, values), (second, again, others) = driver.launches
    assert (first, grid, again) == (second, (4, 1, 1), (7, 2, 1))
    assert values[:2] == [out.data_ptr(), x.data_ptr()]
    assert others[:2] == [other_out.data_ptr(), other_x.data_ptr()]
    bits = struct.unpack("=I", struct.pack("=f", 3.0))
    assert [number & 0xFFFFFFFF for number in others[2:]] == [201, *bits]


def test_a_library_may_keep_what_the_first_launch_returned(driver, kernels):
    """FlagGems' `LibEntry` does so, and decides by itself when a launch needs another kernel."""

    class Entry:
        def __init__(self, function):
            self.function, self.kept = function, {}

        def __call__(self, grid, *args):
            if args[2] not in self.kept:
                self.kept[args[2]] = self.function.run(*args, grid=grid, warmup=False)
            else:
                self.kept[args[2]][grid](*args)
            return self.kept[args[2]]

    entry, (out, x) = Entry(kernels.add), tensors()
    kept = [entry((n,), out, x, n, 1.0, 64, None) for n in (8, 16, 8, 16)]
    assert [grid[0] for _, grid, _ in driver.launches] == [8, 16, 8, 16]
    assert kept[0] is kept[2]


def test_there_is_one_object_for_each_compiled_kernel(driver, kernels):
    out, x = tensors()
    launches = ((200, 64), (201, 64), (208, 64), (200, 128))  # 208 is a multiple of 16
    found = [kernels.add[(1,)](out, x, n, 2.0, BLOCK=block) for n, block in launches]
    assert found[0] is found[1]
    assert len({*map(id, found)}) == 3


def test_it_tells_what_tritons_kernel_tells(driver, kernels):
    out, x = tensors()
    kernel = kernels.add[(1,)](out, x, 200, 2.0, BLOCK=64, num_warps=8)
    assert (kernel.n_regs, kernel.n_spills) == (40, 6)
    told = kernel.metadata
    assert (told.name, told.shared, told.num_warps, told.num_ctas) == ("add_0d1d2d", 512, 8, 1)
    assert (told.launch_pdl, told.launch_cooperative_grid) == (False, False)
    assert not driver.launches[1:]


@pytest.mark.parametrize("name", ["asm", "function", "_init_handles", "num_warps"])
def test_what_it_has_not_is_named(driver, kernels, name):
    out, x = tensors()
    kernel = kernels.add[(1,)](out, x, 200, 2.0, BLOCK=64)
    says = rf"`add` of raw::launched_library.*has no `{name}`; it has .*metadata, n_regs, n_spills"
    with pytest.raises(AttributeError, match=says):
        getattr(kernel, name)
    assert not hasattr(kernel, name)
    with pytest.raises(AttributeError, match="has no `num_stages`; it has name, shared, num_warps"):
        kernel.metadata.num_stages  # noqa: B018
    assert copy.copy(kernel)[(1,)]


def test_arguments_that_are_too_few_or_many_are_refused(driver, kernels):
    out, x = tensors()
    kernel = kernels.add[(1,)](out, x, 200, 2.0, BLOCK=64)
    for args in ((out, x, 200), (out, x, 200, 2.0, 64, None, 1)):
        says = r"all of \(out, x, n, other, BLOCK, ACT\) by position"
        with pytest.raises(LaunchError, match=says):
            kernel[(1,)](*args)
    with pytest.raises(LaunchError, match="stream=6, which is not the current stream"):
        kernel[(1,)](out, x, 200, 2.0, 64, None, stream=6)
    kernel[(1,)](out, x, 200, 2.0, 64, None, stream=5)
    kernel[(1,)](out, x, 200, 2.0)  # as FlagGems does from Triton 3.7 on
    assert len(driver.launches) == 3


def test_arguments_of_another_class_get_their_own_code(driver, kernels):
    """Triton launches the code of the first ones, whatever that does then."""
    out, x = tensors()
    kernel = kernels.add[(1,)](out, x, 256, 2.0, BLOCK=64)
    kernel[(1,)](out, x[1:], 1, 2.0, 64, None)
    signatures = [variant.signature for variant in COMPILERS["triton"].compiles]
    first, second = ("*f32:16", "*f32:16", "i32:16", "f32"), ("*f32:16", "*f32", "1", "f32")
    assert signatures == [first, second]


def test_it_keeps_no_tensor_alive(driver, kernels):
    def launched():
        out, x = tensors()

        def grid(meta):
            return (x.numel() // meta["BLOCK"],)

        kernel = kernels.add[grid](out, x, 256, 2.0, BLOCK=64)
        kernel[(1,)](out, x, 256, 2.0, 64, None)
        return kernel, weakref.ref(x)

    kernel, held = launched()
    gc.collect()
    assert held() is None
    kernel[(1,)](*tensors(), 256, 2.0, 64, None)


def test_a_tuned_function_tells_its_choice_and_keeps_it(driver, kernels, monkeypatch):
    asked = []

    def choose(op, source, target, device, question, run, *, cold):
        asked.append(question)
        return Choice(question.configs[-1], "a GPU")

    monkeypatch.setattr(autotune, "choose", choose)
    out, x = tensors()
    kernel = kernels.tuned[lambda meta: (256 // meta["BLOCK"],)](out, x, 256)
    assert kernels.tuned.fn.best_config is kernels.tuned.fn.configs[1]  # as LibEntry reads it
    kernel[(3,)](out, x, 256, True, 128)
    kernel[(3,)](out, x, 100, False, 64)  # compiled in are EVEN=True and BLOCK=128
    assert [grid[0] for _, grid, _ in driver.launches] == [2, 3, 3]
    assert len(asked) == 1
    templates = {variant.template for variant in COMPILERS["triton"].compiles}
    assert templates == {(("EVEN", True), ("BLOCK", 128))}


def test_a_launch_in_another_way_is_another_kernel(driver, kernels):
    out, x = tensors()
    function = jitkern.triton_kernel(kernels.add, target=H100)
    plain, again, pdl = (
        function[(1,)](out, x, 256, 2.0, BLOCK=64, **options) for options in ({}, {}, {"pdl": True})
    )
    assert plain is again is not pdl
    assert len(COMPILERS["triton"].compiles) == 1
