"""The kinds of kernel that the benches compare, and the proof that a call of ours was of its kind.

Timed processes import this before their clock starts, so it imports nothing that Torch does not.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Kind:
    """One way to a kernel; for ours, `prefer` is JITKERN_PREFER, the kind of source."""

    name: str
    devices: tuple[str, ...]
    imports: str = ""  # the module that it starts with, for the most part
    needs: str = ""  # a package that must be installed
    op: str = ""  # jitkern's op, where it is one of ours
    prefer: str = ""
    cold_rounds: int = 3

    def missing(self) -> str:
        """What it needs of this machine's Python and does not find, or nothing."""
        if self.name == "compile_kernel" and not hasattr(torch.cuda, "_compile_kernel"):
            return "torch.cuda._compile_kernel"
        return self.needs if self.needs and not importlib.util.find_spec(self.needs) else ""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("jitkern.cuda", ("cuda",), "jitkern.ops", op="vec_add", prefer="nvrtc"),
        Kind("jitkern.triton", ("cuda",), "jitkern.ops", "triton", op="vec_add", prefer="triton"),
        Kind("jitkern.cpp", ("cpu",), "jitkern.ops", op="vec_add", prefer="cc"),
        Kind("jitkern.extension", ("cpu", "cuda"), "jitkern.ops", op="muladd", prefer="extension"),
        Kind("load_inline", ("cpu", "cuda"), "torch.utils.cpp_extension", cold_rounds=1),
        Kind("triton", ("cuda",), "triton", "triton"),
        Kind("cupy", ("cuda",), "cupy", "cupy"),
        Kind("compile_kernel", ("cuda",), "torch.cuda"),
    )
}
RAW = ("jitkern.cuda", "jitkern.triton", "jitkern.cpp")  # ours that need no Torch header


def custom_op(name: str) -> Any:
    """The sum of two tensors as an op of `torch.library.custom_op`."""

    @torch.library.custom_op(name, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    return add


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def verify_events(events: Iterable[Any], op: str, kind: str) -> None:
    """Raise AssertionError unless a jitkern.Event is about an artifact of `op` of this kind."""
    manifests = [
        Path(event.path, "manifest.json")
        for event in events
        if event.op in (f"jitkern::{op}", f"benches::{op}_{kind}") and event.path
    ]
    used = {json.loads(manifest.read_bytes())["inputs"]["source"]["kind"] for manifest in manifests}
    if kind not in used:
        raise AssertionError(f"{op} ran kernels of {sorted(used) or 'no kind'}, not of {kind}")
