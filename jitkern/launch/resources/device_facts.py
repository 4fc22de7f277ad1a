"""Facts of a device for launch functions, e.g. `k.multiprocessors`.

A program asks the driver for a fact when it runs, so that it holds for any device. A
launch function that launches nothing (a fake, a prewarm) gets the usual numbers of the target.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from jitkern import compilers, loading
from jitkern.errors import LaunchError
from jitkern.target import Target

ATTRIBUTES = {  # of CUdevice_attribute
    "multiprocessors": 16,
    "threads_per_multiprocessor": 39,
    "shared_memory_per_block": 97,
    "shared_memory_per_multiprocessor": 81,
    "l2_cache_size": 38,
}
FACTS = (*ATTRIBUTES, "capability", "warp_size")
_USUAL = {  # by arch: the model in data centres, or else the largest; KiB but for the first two
    "sm_70": (80, 2048, 96, 96, 6144), "sm_75": (40, 1024, 64, 64, 4096),
    "sm_80": (108, 2048, 163, 164, 40960), "sm_86": (84, 1536, 99, 100, 6144),
    "sm_87": (16, 1536, 163, 164, 4096), "sm_89": (142, 1536, 99, 100, 98304),
    "sm_90": (132, 2048, 227, 228, 51200), "sm_100": (148, 2048, 227, 228, 129536),
    "sm_103": (148, 2048, 227, 228, 129536), "sm_110": (20, 1536, 227, 228, 32768),
    "sm_120": (188, 1536, 99, 100, 131072), "sm_121": (48, 1536, 99, 100, 24576),
}  # fmt: skip


def capability_of(target: Target) -> tuple[int, int]:
    """Return the compute capability of a CUDA target: (9, 0) of `sm_90` and of `sm_90a`."""
    digits = re.sub(r"\D", "", target.arch)
    return int(digits[:-1]), int(digits[-1])


def constant(name: str, target: Target) -> Any:
    """Return a fact that is the same for all devices of a target; None for one that is not."""
    if target.device == "cuda" and name not in ATTRIBUTES:
        return 32 if name == "warp_size" else capability_of(target)
    return None


def present(name: str, target: Target, index: int | None) -> Any:
    """Return a fact of a device of this machine. Raises LaunchError for a fact of GPUs on the CPU.

    index: the number of a GPU; None for the CPU.
    """
    value = constant(name, target)
    if value is not None:
        return value
    if target.device == "cuda":
        torch.cuda.init()
        return loading.cuda_driver.device_attribute(ATTRIBUTES[name], index or 0)
    if name != "multiprocessors":
        raise LaunchError(
            f"`k.{name}` is a fact of GPUs, and this launch is for the CPU: read it below "
            "`if x.is_cuda:`, or declare a launch function for the CPU alone"
        )
    return compilers.parallelism.processors()


def usual(name: str, target: Target) -> Any:
    """Return a fact as it usually is for a target: another model may differ. Raises LaunchError."""
    value = constant(name, target)
    if value is not None:
        return value
    if target.device != "cuda":
        return present(name, target, None)
    major, minor = capability_of(target)
    numbers = _USUAL.get(f"sm_{major}{minor}") or _USUAL["sm_90"]
    return dict(zip(ATTRIBUTES, (*numbers[:2], *(kib << 10 for kib in numbers[2:]))))[name]
