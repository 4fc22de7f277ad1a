"""The calls to prewarm an op for: samples, a recording, or a shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jitkern.calls import record
from jitkern.calls.record import RecordedCall
from jitkern.calls.samples import Sample, spelt
from jitkern.errors import DeclarationError
from jitkern.op.op import Op
from jitkern.source.kinds import ITSELF, Source

Calls = Mapping[tuple[str, str], Sequence[Sample]]  # by device and kind of source


class OpCalls:
    """An op, and the calls to prewarm it for.

    calls: the calls of a recording or of a shard, by device and kind of source; None for the
    samples of the op and its `prewarm=`.
    node: whether to build the node that records calls for Autograd, too, if the op can use it.
    """

    def __init__(self, op: Op, calls: Calls | None = None, *, node: bool = True) -> None:
        self.op = op
        self.calls = calls
        self.node = node and op.gradient is not None and op.gradient.in_cpp

    def of(self, source: Source, device: str) -> Sequence[Sample]:
        """Return the calls to prewarm `source` for; one call without arguments for an Extension."""
        calls = None if self.calls is None else self.calls.get((device, source.kind), ())
        if source.runs == ITSELF:
            return [Sample("")] if calls or calls is None else []
        return self.op.prewarm_samples() if calls is None else calls


def spelt_calls(op: Op, texts: Iterable[str], devices: Iterable[str]) -> OpCalls:
    """Return an op with calls that are spelt as texts, like `f16[64, 1000], 2.0`."""
    calls = spelt(op.signature, texts)
    kinds = [(device, source.kind) for device in devices for source in op.sources.get(device, ())]
    return OpCalls(op, dict.fromkeys(kinds, calls))


def read_recording(path: Path) -> list[RecordedCall]:
    """Return the calls of a recording. Raises DeclarationError for any other file."""
    try:
        recorded = record.read(path)
    except OSError as e:
        raise DeclarationError(f"cannot read the recording {path}: {e.strerror}") from e
    if not recorded:
        raise DeclarationError(f"{path} contains no calls: that run compiled nothing")
    return recorded


def recorded_calls(
    ops: Iterable[Op], recorded: Sequence[RecordedCall], path: Path
) -> list[OpCalls]:
    """Return the ops, each with its calls in a recording.

    The node that records calls for Autograd is wanted if the recorded run needed gradients.
    """
    calls: dict[str, dict[tuple[str, str], list[Sample]]] = {op.name: {} for op in ops}
    signatures = {op.name: op.signature for op in ops}
    differentiated = {call.op for call in recorded if call.gradient}
    for call in recorded:
        if call.op in calls:
            origin = f"{path}, line {call.line}"
            why = signatures[call.op].misfit(call.args)
            problem = f"{origin} does not fit the op: {why}" if why else ""
            sample = Sample(origin, call.args, problem)
            calls[call.op].setdefault((call.device, call.kind), []).append(sample)
    return [OpCalls(op, calls[op.name], node=op.name in differentiated) for op in ops]
