"""Time calls: the kernels alone, and the calls as Python issues them.

A *sampler* takes one measurement, and `taken` lets several samplers take turns, so that a slow
moment of the machine hits all of them. Arguments rotate through more memory than caches hold.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jitkern.calls.signature import tensors_in
from jitkern.launch.measure import copied

Call = Callable[[], object]
Sampler = Callable[[], float]  # returns the seconds of one call

_L2_SIZES = 4  # arguments rotate through this many times the L2 of a GPU
CPU_BYTES = 256 << 20  # the same for a CPU, of whose caches Torch tells nothing
COPIES = 64  # at most: calls with arguments of a few kB are bound by their launch, not by memory
_GRAPH_SECONDS, _GRAPH_CALLS = 1e-3, 512  # long beside the launch of a graph, and the most calls
_ISSUED = 4  # calls, at least, that are issued in a row
MOST, LEAST = 200, 5  # samples


def rotation(args: Sequence[Any], device: torch.device) -> int:
    """Return how many copies of the arguments have more bytes together than caches hold."""
    size = sum(tensor.nbytes for tensor in tensors_in(args))
    return max(1, min(COPIES, math.ceil(past_caches(device) / max(size, 1))))


def past_caches(device: torch.device) -> int:
    """Return the size in bytes of a buffer that flushes the caches."""
    if device.type != "cuda":
        return CPU_BYTES
    return _L2_SIZES * int(torch.cuda.get_device_properties(device).L2_cache_size)


def rotated(args: Sequence[Any], device: torch.device) -> list[tuple[Any, ...]]:
    """Return copies of the arguments, strides kept, as many as `rotation` says."""
    return [tuple(copied(list(args), {})) for _ in range(rotation(args, device))]


def captured(
    calls: Sequence[Call], device: torch.device, *, stream: Any = None, pool: Any = None
) -> Sampler:
    """Return a sampler of kernel time only: it replays a CUDA graph of these calls.

    The calls have run before, and nothing is compiled in the background.
    stream: to capture; a backward pass runs on the stream of its forward pass.
    pool: memory that graphs share whose results nobody reads.

    Raises RuntimeError if a call cannot be captured.
    """
    stream = stream or torch.cuda.Stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # libraries allocate their workspaces for each stream
        for call in calls:
            call()
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
    once = float(start.elapsed_time(end)) / 1e3
    passes = max(1, min(_GRAPH_CALLS // len(calls), math.ceil(_GRAPH_SECONDS / max(once, 1e-6))))
    graph = torch.cuda.CUDAGraph()
    # Results are kept for a pass: a call that got the memory of the one before would write to L2.
    results: deque[object] = deque(maxlen=len(calls))
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            for _ in range(passes):
                for call in calls:
                    results.append(call())
    except RuntimeError:
        _release_generator(device)
        raise
    results.clear()
    graph.replay()
    torch.cuda.synchronize(device)

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / (passes * len(calls))

    return sample


def _release_generator(device: torch.device) -> None:
    """Give random numbers back to a device after a capture that failed: PyTorch keeps refusing."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


def issued(prepare: Callable[[], Sequence[Call]], device: torch.device) -> Sampler:
    """Return a sampler of calls that Python issues one after the other, without waiting.

    prepare: is called before each measurement, untimed; issues work that keeps the queue of a GPU
        busy, and returns the calls.

    A sample is the longer of what Python and what the device takes for a call.
    """

    def on_the_cpu() -> float:
        calls = prepare()
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    def on_a_gpu() -> float:
        calls = prepare()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / len(calls)

    return on_a_gpu if device.type == "cuda" else on_the_cpu


def repeated(calls: Sequence[Call], device: torch.device) -> Callable[[], Sequence[Call]]:
    """Return what `issued` takes for calls that can be made again and again.

    A measurement makes all of the calls on a GPU, and one of them on the CPU.
    """
    if device.type != "cuda":
        turns = itertools.cycle(calls)
        return lambda: [next(turns)]
    row = [*calls] * math.ceil(_ISSUED / len(calls))

    def prepare() -> Sequence[Call]:
        for call in row:
            call()
        return row

    return prepare


def interleaved(
    samplers: Mapping[str, Sampler], seconds: float, most: int = MOST
) -> dict[str, list[float]]:
    """Return the samples of each, taken in turns.

    seconds: after this time no more are taken, once each has LEAST (or `most`, if fewer). A first
    round is thrown away.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    until = time.perf_counter() + seconds
    for number in range(most + 1):
        if number > LEAST and time.perf_counter() > until:
            break
        for name, sampler in samplers.items():
            samples[name].append(sampler())
    return {name: found[1:] for name, found in samples.items()}
