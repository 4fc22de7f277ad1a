"""Facts of a device for launch functions, e.g. `k.multiprocessors`.

A program asks the driver for a fact when it runs, so that it holds for any device. A
launch function that launches nothing (a fake, a prewarm) gets the usual numbers of the target.
"""

from __future__ import annotations

from typing import Any

import torch

from jitkern import compilers, loading
from jitkern.errors import LaunchError
from jitkern.source import gpus
from jitkern.target import Target

ATTRIBUTES = {  # of CUdevice_attribute
    "multiprocessors": 16,
    "threads_per_multiprocessor": 39,
    "shared_memory_per_block": 97,
    "shared_memory_per_multiprocessor": 81,
    "l2_cache_size": 38,
}
FACTS = (*ATTRIBUTES, "capability", "warp_size")


def constant(name: str, target: Target) -> Any:
    """Return a fact that is the same for all devices of a target; None for one that is not."""
    if target.device == "cuda" and name not in ATTRIBUTES:
        return 32 if name == "warp_size" else gpus.capability_of(target)
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
    gpu = gpus.usual(target)
    sizes = (kib << 10 for kib in (gpu.block, gpu.multiprocessor, gpu.l2_cache))
    return dict(zip(ATTRIBUTES, (gpu.multiprocessors, gpu.threads, *sizes)))[name]
