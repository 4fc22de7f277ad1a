"""`patch_triton`: a package's own launches go through the cache."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import needs_triton, write_files

import jitkern
from jitkern.errors import LaunchError
from jitkern.raw import patch as patching
from jitkern.raw.from_triton import TritonKernel

pytestmark = needs_triton

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def helper(x):
    return 2 * x

@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % 128 == 0})
@triton.jit
def tuned(out, x, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, helper(tl.load(x + i, mask=i < n)), mask=i < n)

@triton.jit
def double(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, helper(tl.load(x + i, mask=i < n)), mask=i < n)

class Chosen(triton.runtime.autotuner.Autotuner):
    pass  # of the library, as flash-linear-attention has it

def chosen(fn):
    return Chosen(fn, fn.arg_names, [triton.Config({"BLOCK": 64})], ["n"], None, None)

@chosen
@triton.heuristics({"EVEN": lambda args: args["n"] % 128 == 0})
@triton.jit
def by_class(out, x, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

def doubled(x, kernel=double, **options):
    out = x.new_empty(x.shape)
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](out, x, x.numel(), **options)
    return out
"""


LAUNCHED = SimpleNamespace(choice=None)


@pytest.fixture
def library(tmp_path, monkeypatch):
    files = {"__init__.py": "", "ops/__init__.py": "", "ops/kernels.py": KERNELS}
    write_files(tmp_path / "patched_library", files)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "patched_library"
    for name in [name for name in sys.modules if name.startswith("patched_library")]:
        del sys.modules[name]


@pytest.fixture
def launches(monkeypatch):
    """The launches that reach jitkern; None of them runs."""
    seen = []

    def made(function):
        def kernel(*args, grid, **keywords):
            seen.append((function, args, keywords))
            return LAUNCHED

        return kernel

    monkeypatch.setattr(patching, "triton_kernel", made)
    return seen


def kernels_of(library):
    return importlib.import_module(f"{library}.ops.kernels")


def by_triton(call):
    """Check that Triton itself launches, which finds no tensor of a GPU."""
    with pytest.raises(Exception, match=r"driver|CUDA|Pointer|cpu"):
        call()


def test_a_package_launches_through_the_cache_until_undone(library, launches):
    with jitkern.patch_triton(library) as patch:
        kernels = kernels_of(library)  # imported after the patch
        for kernel in (kernels.double, kernels.tuned):
            launch = kernel[(1,)]
            assert launch(torch.zeros(128), torch.zeros(128), 128, num_warps=8) is LAUNCHED
    assert [function for function, _, _ in launches] == [kernels.double, kernels.tuned]
    assert [keywords for _, _, keywords in launches] == [{"num_warps": 8}] * 2
    assert patch.taken == [f"{library}.ops.kernels:double", f"{library}.ops.kernels:tuned"]
    by_triton(lambda: kernels.doubled(torch.zeros(128), BLOCK=64))
    assert len(launches) == 2


def test_other_packages_stay_with_triton(library, launches):
    kernels = kernels_of(library)
    with jitkern.patch_triton("patched"):
        by_triton(lambda: kernels.doubled(torch.zeros(128), BLOCK=64))
    assert not launches


def test_patches_are_undone_in_any_order(library, launches):
    first, second = jitkern.patch_triton(library), jitkern.patch_triton(kernels_of(library))
    first.undo()
    first.undo()
    kernels_of(library).doubled(torch.zeros(128), BLOCK=64)
    assert (len(first.taken), len(second.taken), len(launches)) == (0, 1, 1)
    second.undo()
    by_triton(lambda: kernels_of(library).doubled(torch.zeros(128), BLOCK=64))


def test_what_is_refused_goes_to_triton_with_a_warning(library, monkeypatch, caplog):
    tried = []

    def made(function):
        def kernel(*args, grid, **keywords):
            tried.append(function)
            raise LaunchError("it cannot be")

        return kernel

    monkeypatch.setattr(patching, "triton_kernel", made)
    kernels = kernels_of(library)
    with jitkern.patch_triton(library) as patch:
        for _ in range(2):
            by_triton(lambda: kernels.doubled(torch.zeros(128), BLOCK=64))
    assert tried == [kernels.double]
    assert patch.refused == {f"{library}.ops.kernels:double": "it cannot be"}
    assert not patch.taken
    assert caplog.text.count("double is left to Triton") == 1


def test_decorators_of_a_class_of_its_own_stay_with_it(library, monkeypatch):
    seen = []

    def launch(kernel, *args, grid, **keywords):
        seen.append((kernel.function, keywords))
        if keywords["num_warps"] == 8:
            raise LaunchError("too many")
        return LAUNCHED

    monkeypatch.setattr(TritonKernel, "__call__", launch)
    kernels = kernels_of(library)
    with jitkern.patch_triton(library) as patch:
        kernels.doubled(torch.zeros(128), kernels.by_class)
        kernels.by_class.configs[0].num_warps = 8
        by_triton(lambda: kernels.doubled(torch.zeros(128), kernels.by_class))  # too many warps
        kernels.by_class.configs[0].num_warps = 2
        kernels.doubled(torch.zeros(128), kernels.by_class)
    assert [function for function, _ in seen] == ["by_class.fn"] * 3
    given = {"BLOCK": 64, "EVEN": True, "num_stages": 3, "num_ctas": 1}
    assert [k | {"maxnreg": None} for _, k in seen] == [
        {**given, "num_warps": warps, "maxnreg": None} for warps in (4, 8, 2)
    ]
    assert patch.taken == [f"{library}.ops.kernels:by_class.fn"]
    assert patch.refused == {f"{library}.ops.kernels:by_class.fn": "too many"}


@pytest.mark.parametrize("packages", [(), ("",), (3,)])
def test_what_is_no_package_is_refused(packages):
    with pytest.raises(TypeError, match="modules or their names"):
        jitkern.patch_triton(*packages)


def test_a_package_that_is_not_there_is_warned_of(library, caplog):
    with jitkern.patch_triton(library, "sys", "no_such_library.ops"):
        pass
    (message,) = caplog.messages
    assert "there is no package `no_such_library.ops`" in message


@pytest.mark.gpu
def test_what_a_launch_returned_launches_again(library):
    kernels = kernels_of(library)
    x = torch.randn(1000, device="cuda")
    triton_s = kernels.double[(8,)](torch.empty_like(x), x, 1000, BLOCK=128)
    with jitkern.patch_triton(library):
        out, again, tuned = torch.zeros(3, 1000, device="cuda").unbind()
        ours = kernels.double[(8,)](out, x, 1000, BLOCK=128)
        for kernel in (triton_s, ours):
            again.zero_()
            kernel[(8, 1, 1)](again, x, 1000, 128)
            assert again.equal(2 * x)
        chosen = kernels.tuned[lambda meta: (1000 // meta["BLOCK"] + 1,)](tuned, x, 1000)
        block = kernels.tuned.best_config.kwargs["BLOCK"]
        chosen[(1000 // block + 1, 1, 1)](again.zero_(), x, 1000, False, block)
        assert out.equal(2 * x)
        assert tuned.equal(again)
    for name in ("num_warps", "shared", "num_ctas", "launch_pdl", "launch_cooperative_grid"):
        assert getattr(ours.metadata, name) == getattr(triton_s.metadata, name), name
    assert (ours.n_regs, ours.n_spills) == (triton_s.n_regs, triton_s.n_spills)


@pytest.mark.gpu
def test_a_patched_package_computes_the_same(library):
    kernels = kernels_of(library)
    x = torch.randn(1000, device="cuda")
    with jitkern.patch_triton(library) as patch:
        assert kernels.doubled(x, BLOCK=128).equal(2 * x)
        assert kernels.doubled(x, kernels.tuned).equal(2 * x)
    assert len(patch.taken) == 2
    assert not patch.refused
    assert not kernels.double.device_caches  # Triton compiled nothing


@pytest.mark.gpu
def test_a_patched_kernel_below_wrap_triton_and_compile(library):
    kernels = kernels_of(library)
    x = torch.randn(1000, device="cuda")

    def doubled(x):
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernels.double)[(8,)](out, x, x.numel(), BLOCK=128)
        return out

    with jitkern.patch_triton(library):
        assert doubled(x).equal(2 * x)
        assert torch.compile(doubled, fullgraph=True)(x).equal(2 * x)
