"""Facts that the import of a Triton file reads: variables, versions, what is asked of the device.

A fact has a name: `variable FLA_TILES`, `version numpy`, `device name`, `path /etc/tiles.json`,
`names /opt/tiles` (of a folder), `module peft` (whether it is found). The worker that imports the
file answers from the target and notes each fact, and what it found holds where all have the same
values (`now`).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jitkern.source import gpus
from jitkern.source.key import version_of
from jitkern.source.module_spec import spec_of
from jitkern.target import Target

Facts = tuple[tuple[str, Any], ...]  # names and plain values, sorted


def now(name: str, target: Target) -> Any:
    """Return the value of a fact in this process, for a target; None or "" for an absent one."""
    kind, _, what = name.partition(" ")
    return _KINDS[kind](what) if kind in _KINDS else device(target).get(what)


def _path(path: str) -> str | None:
    """Return what a path is: its modes, where a link leads, and the size of a file; None if absent.

    A link that leads nowhere is itself.
    """
    place, found = Path(path), None
    with contextlib.suppress(OSError):
        status = place.lstat()
        found = stat.filemode(status.st_mode)
        if place.is_symlink():
            found += f" {place.readlink()}"
            status = place.stat()
            found += f" {stat.filemode(status.st_mode)}"
        found += f" {status.st_size}" if stat.S_ISREG(status.st_mode) else ""
    return found


def _names(folder: str) -> str | None:
    with contextlib.suppress(OSError):
        return ", ".join(sorted(os.listdir(folder)))
    return None


def _has_module(name: str) -> bool:
    try:
        return spec_of(name) is not None
    except ValueError:  # this process has made it
        return True


_KINDS: dict[str, Callable[[str], Any]] = {
    "variable": os.environ.get,
    "version": version_of,
    "path": _path,
    "names": _names,
    "module": _has_module,
}


def hold(facts: Facts, target: Target) -> bool:
    """Return whether facts still have these values in this process, for a target.

    Modules and their versions stay: this process has imported them, or has gone on without.
    """
    stay = ("version ", "module ")
    return all(name.startswith(stay) or now(name, target) == value for name, value in facts)


def device(target: Target) -> dict[str, Any]:
    """Return what a GPU of a target tells of itself, by the names that Torch gives its properties.

    It is that of this process where Torch has started CUDA on one of this arch, else the usual one.
    """
    import torch

    if torch.cuda.is_initialized():
        own = torch.cuda.get_device_properties(torch.cuda.current_device())
        if (own.major, own.minor) == gpus.capability_of(target):
            found = {name: getattr(own, name, None) for name in _usual(target)}
            return {**found, "count": torch.cuda.device_count()}
    return _usual(target)


def _usual(target: Target) -> dict[str, Any]:
    gpu = gpus.usual(target)
    major, minor = gpus.capability_of(target)
    return {
        "count": 1, "name": gpu.name, "major": major, "minor": minor, "warp_size": 32,
        "multi_processor_count": gpu.multiprocessors, "total_memory": gpu.memory << 30,
        "max_threads_per_multi_processor": gpu.threads, "regs_per_multiprocessor": 65536,
        "shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": gpu.block << 10,
        "shared_memory_per_multiprocessor": gpu.multiprocessor << 10,
        "L2_cache_size": gpu.l2_cache << 10,
    }  # fmt: skip
