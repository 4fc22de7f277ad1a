"""GPUs as they usually are, by arch: the model in data centres, or else the largest."""

from __future__ import annotations

import re

from jitkern.named_tuple import NamedTuple
from jitkern.target import Target


class Gpu(NamedTuple):
    """A model. Memory is in KiB: shared by a block, shared by a multiprocessor, the L2 cache."""

    name: str
    memory: int  # GiB
    multiprocessors: int
    threads: int  # of a multiprocessor
    block: int
    multiprocessor: int
    l2_cache: int


_USUAL = {
    "sm_70": Gpu("Tesla V100-SXM2-32GB", 32, 80, 2048, 96, 96, 6144),
    "sm_75": Gpu("Tesla T4", 16, 40, 1024, 64, 64, 4096),
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", 80, 108, 2048, 163, 164, 40960),
    "sm_86": Gpu("NVIDIA A40", 48, 84, 1536, 99, 100, 6144),
    "sm_87": Gpu("Orin", 32, 16, 1536, 163, 164, 4096),
    "sm_89": Gpu("NVIDIA L40S", 48, 142, 1536, 99, 100, 98304),
    "sm_90": Gpu("NVIDIA H100 80GB HBM3", 80, 132, 2048, 227, 228, 51200),
    "sm_100": Gpu("NVIDIA B200", 180, 148, 2048, 227, 228, 129536),
    "sm_103": Gpu("NVIDIA B300", 270, 148, 2048, 227, 228, 129536),
    "sm_110": Gpu("NVIDIA Thor", 128, 20, 1536, 227, 228, 32768),
    "sm_120": Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 188, 1536, 99, 100, 131072),
    "sm_121": Gpu("NVIDIA GB10", 128, 48, 1536, 99, 100, 24576),
}


def capability_of(target: Target) -> tuple[int, int]:
    """Return the compute capability of a CUDA target: (9, 0) of `sm_90` and of `sm_90a`."""
    digits = re.sub(r"\D", "", target.arch)
    return int(digits[:-1]), int(digits[-1])


def usual(target: Target) -> Gpu:
    """Return the usual GPU of a CUDA target."""
    major, minor = capability_of(target)
    return _USUAL.get(f"sm_{major}{minor}") or _USUAL["sm_90"]
