"""Workspaces: memory that stays from call to call, for `k.workspace`.

A workspace belongs to one stream of a GPU, whose kernels run one after the other, or to one thread
of the CPU. A captured CUDA graph has a workspace of its own, because a replay may run beside other
work of the stream on which the graph was captured. Workspaces grow and are never freed on a GPU: a
graph, or a thread that is about to launch, may hold the address of a smaller one.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import threading
from typing import Any

import torch

from jitkern import loading
from jitkern._fork import after_fork
from jitkern.errors import LaunchError
from jitkern.named_tuple import NamedTuple

_LEAST = 4096  # bytes that are made at once
_STREAMS = 64  # more than PyTorch has of one priority
_blocks: dict[tuple[Any, ...], list[torch.Tensor]] = {}  # the last one is the present one
_lock = threading.Lock()
after_fork(_lock)


class Block(NamedTuple):
    """The workspace of a stream of a GPU."""

    device: int
    stream: int
    zeroed: bool
    memory: torch.Tensor


class _Own(threading.local):
    """The workspaces of a thread on the CPU, by whether they are zeroed."""

    def __init__(self) -> None:
        self.blocks: dict[bool, torch.Tensor] = {}


_own = _Own()


def checked_count(size: Any, dtype: torch.dtype) -> Any:
    """Return how many elements of a dtype a workspace has. Raises LaunchError."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise LaunchError(f"k.workspace({size!r}): give the bytes as a whole number, not below 0")
    if dtype.itemsize > 1 and size % dtype.itemsize != 0:
        raise LaunchError(
            f"k.workspace({size}, dtype={dtype}): the bytes must be a multiple of an element's "
            f"{dtype.itemsize}"
        )
    return size // dtype.itemsize


def memory_of(device: torch.device, size: int, *, zeroed: bool) -> torch.Tensor:
    """Return the workspace of this thread, or of the current stream: at least `size` bytes.

    During a capture, the workspace of the graph that is captured.
    """
    if device.type == "cpu":
        block = _own.blocks.get(zeroed)
        if block is None or block.numel() < size:
            block = _own.blocks[zeroed] = torch.empty(_grown(size, block), dtype=torch.uint8)
            # torch.zeros would wait forever for the threads of OpenMP that a forked child lacks.
            ctypes.memset(block.data_ptr(), 0, block.numel())
        return block
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    graph = loading.cuda_driver.capture_of(stream, device.index)
    with _lock:
        blocks = _blocks.setdefault((device.index, stream, graph, zeroed), [])
        if not blocks or blocks[-1].numel() < size:
            count = _grown(size, blocks[-1] if blocks else None)
            blocks.append(new_memory(device, count, is_captured=bool(graph)))
        return blocks[-1]


def shared(device: torch.device) -> list[Block]:
    """Return the workspaces of the current stream of a GPU, which C may use too."""
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    found = ((zeroed, _blocks.get((device.index, stream, 0, zeroed))) for zeroed in (False, True))
    return [Block(device.index, stream, zeroed, blocks[-1]) for zeroed, blocks in found if blocks]


def _grown(size: int, before: torch.Tensor | None) -> int:
    """Return the bytes of a new workspace, which doubles the one before at least."""
    return max(_LEAST, size, 0 if before is None else 2 * before.numel())


def new_memory(device: torch.device, size: int, *, is_captured: bool) -> torch.Tensor:
    """Return zeroed memory outside of any graph and memory pool.

    A memory pool takes the allocations of a thread, as during the warm-up of a compiled graph, or
    of a stream, as while a graph is captured: so another thread allocates, on another stream. The
    current stream waits for that one; a captured stream cannot, and so this call does.
    """
    stream = None if is_captured else torch.cuda.current_stream(device)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_zeros, device, size, stream).result()


def _zeros(device: torch.device, size: int, then: torch.cuda.Stream | None) -> torch.Tensor:
    """Return memory that is zeroed by a stream that is not captured.

    then: the stream that waits for it; by default, this call waits.
    """
    with loading.cuda_driver.outside_of_capture():
        for _ in range(_STREAMS):
            side = torch.cuda.Stream(device)  # one of a few, of which some may be captured
            with torch.cuda.stream(side):
                if not torch.cuda.is_current_stream_capturing():
                    memory = torch.zeros(size, dtype=torch.uint8, device=device)
                    side.synchronize() if then is None else then.wait_stream(side)
                    return memory
    raise LaunchError("k.workspace(): all streams of PyTorch are captured; call the op once before")
