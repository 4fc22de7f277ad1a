"""Measure an op and its peers, forward and backward, at each of some shapes.

Contenders take turns on the same arguments, which are random and rotate through more memory than
the caches hold. Each result is compared with the reference in float64 first; a wrong one gets no
time. The kernels alone are timed by replays of a CUDA graph, and calls as Python issues them behind
a busy queue; on the CPU there is only the latter.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._functorch import config as functorch

from benches.common import ChildFailed
from benches.kernels import first_call, peers
from benches.kernels.passes import Backward, Forward
from benches.kernels.peers import Contender, Peers, Unsupported, failure
from benches.kernels.shapes import Shape, given_shapes, shapes_of
from benches.kernels.subject import Subject, subject_of
from jitkern import config
from jitkern.devtools import timing
from jitkern.devtools.roofline import Bandwidth, bandwidth

FORWARD, BACKWARD = "forward", "backward"
SECONDS = 0.6  # for the samples of all contenders of a shape, in one direction and one way


@dataclass
class Row:
    """One contender at one shape in one direction. Times are medians, in microseconds.

    kernel_us: of the kernels alone; None on the CPU. wall_us: as Python issues calls.
    bytes: what must move at least; None if nothing says how many.
    gbs, of_copy, of_read: bytes by kernel_us (on the CPU by wall_us), and shares of the ceilings.
    samples: how many samples the median is of.
    first_call_s: a cold first call in a process of its own, of the first shape alone.
    note: why there is no time: `wrong: …` or an error.
    """

    op: str
    direction: str
    shape: str
    who: str
    kernel_us: float | None = None
    wall_us: float | None = None
    bytes: int | None = None
    gbs: float | None = None
    of_copy: float | None = None
    of_read: float | None = None
    samples: int = 0
    first_call_s: float | None = None
    note: str = ""


@dataclass
class Bench:
    """What was measured of one op. left_out: peers that are not there, with the reasons."""

    op: str
    device: str
    ceilings: Bandwidth
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether jitkern itself was wrong or did not run."""
        return any(row.note for row in self.rows if row.who == peers.OURS)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "ceilings": self.ceilings._asdict()}


def bench_op(
    function: Any,
    shapes: Mapping[str, Sequence[Any]] | Sequence[str | Shape] = (),
    *,
    device: str = "",
    dtype: str = "",
    only: Sequence[str] = (),
    directions: Sequence[str] = (FORWARD, BACKWARD),
    seconds: float = SECONDS,
    most: int = timing.MOST,
    cold: bool = False,
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Bench:
    """Measure an op, or a function that has one as its `op`.

    shapes: arguments by the name of the shape, where `bf16[8192, 14336]` is a random tensor; or
        names of shapes, see `shapes_of`; or Shapes.
    device: "cuda" or "cpu", by default that which there is.
    dtype: of named shapes, e.g. "f16"; by default bf16 on a GPU, and f32 on the CPU.
    only: names of peers; by default all that can be imported.
    seconds, most: see `SECONDS`; samples of each contender at most.
    cold: also time cold first calls, each in a process of its own.
    tell: gets a line of progress.

    Raises UsageError for shapes that there are not, DeclarationError for an op without a reference.
    """
    subject = function if isinstance(function, Subject) else subject_of(function)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    peers.check_names(only)
    wanted = [shape for shape in shapes if isinstance(shape, Shape)]
    if isinstance(shapes, Mapping):
        wanted = given_shapes(subject, device, shapes)
    elif not wanted:
        wanted = shapes_of(subject, device, dtype=dtype, names=shapes)
    run = Run(subject, device, Peers(subject, device, only), seconds, most, tell)
    # The graph of autograd is kept while a CUDA graph of its kernels is replayed.
    with config.using(fallback="raise"), functorch.patch(donated_buffer=False):
        for shape in wanted:
            for direction in directions:
                run.measure(shape, direction)
    if cold:
        run.first_calls(wanted[0], FORWARD if FORWARD in directions else directions[0])
    return run.bench


class Run:
    """The measurements of one subject on one device."""

    def __init__(
        self,
        subject: Subject,
        device: str,
        contenders: Peers,
        seconds: float,
        most: int,
        tell: Callable[[str], None],
    ) -> None:
        self.subject, self.contenders = subject, contenders
        self.device = torch.device(
            device, torch.cuda.current_device() if device == "cuda" else None
        )
        self.seconds, self.most, self.tell = seconds, most, tell
        # One stream is captured for all: memory that a graph has freed serves others of its stream.
        self.stream = torch.cuda.Stream(self.device) if device == "cuda" else None
        ceilings = bandwidth(self.device)
        self.bench = Bench(subject.name, device, ceilings, left_out=contenders.left_out)
        self._contenders: dict[str, list[Contender]] = {}  # of the shape at hand

    def measure(self, shape: Shape, direction: str) -> None:
        """Measure all contenders at a shape in one direction."""
        if direction == BACKWARD and self.subject.op.gradient is None:
            return
        self.tell(f"{self.subject.name} {direction} {shape.name}")
        contenders = self._of_shape(shape)
        if direction == BACKWARD:
            contenders = [contender for contender in contenders if contender.differentiable]
        names = [contender.name for contender in contenders]
        rows = {n: Row(self.subject.name, direction, shape.name, n) for n in names}
        self.bench.rows += rows.values()
        try:
            kind = Forward if direction == FORWARD else Backward
            pass_ = kind(self.subject, shape, self.device, self.stream)
        except Exception as e:  # noqa: BLE001  memory runs out, or the reference takes no such shape
            for row in rows.values():
                row.note = f"nothing to compare with: {failure(e)}"
            return
        for contender in contenders:
            try:
                with self._noting(rows[contender.name], contender):
                    rows[contender.name].note = pass_.problem(contender)
            except Unsupported as e:
                self.bench.left_out[contender.name] = str(e)
                self.bench.rows.remove(rows.pop(contender.name))
        right = [c for c in contenders if c.name in rows and not rows[c.name].note]
        pass_.forget_oracle()
        self._time(pass_, right, rows)
        del pass_
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _of_shape(self, shape: Shape) -> list[Contender]:
        if shape.name not in self._contenders:
            self._contenders = {shape.name: self.contenders.of_shape()}
        return self._contenders[shape.name]

    @contextlib.contextmanager
    def _noting(self, row: Row, contender: Contender, what: str = "") -> Iterator[None]:
        """Note an error of a contender in its row, in place of a time."""
        try:
            yield
        except Unsupported:
            raise
        except Exception as e:  # noqa: BLE001  whatever a peer raises: it stops no other
            row.note = what + failure(e, contender.version)
            self.tell(f"  {row.who}: {row.note}")

    def _time(
        self, pass_: Forward | Backward, right: list[Contender], rows: dict[str, Row]
    ) -> None:
        """Fill in the times of the contenders whose results are right."""
        ways = ["wall_us"]
        if self.device.type == "cuda":
            ways.insert(0, "kernel_us")
        for way in ways:
            samplers = {}
            pool = torch.cuda.graph_pool_handle() if way == "kernel_us" else None
            for contender in right:
                what = "not captured: " if pool else ""
                with self._noting(rows[contender.name], contender, what):
                    sampler = pass_.kernels(contender, pool) if pool else pass_.wall(contender)
                    sampler()  # what fails does so here
                    samplers[contender.name] = sampler
            samples = timing.interleaved(samplers, self.seconds, self.most)
            for name, found in samples.items():
                setattr(rows[name], way, statistics.median(found) * 1e6)
                rows[name].samples = max(rows[name].samples, len(found))
        for contender in right:
            self._rate(rows[contender.name], pass_.bytes)

    def _rate(self, row: Row, count: int | None) -> None:
        """Fill in the rate of a row, and its shares of the ceilings."""
        us = row.kernel_us if self.device.type == "cuda" else row.wall_us
        row.bytes = count
        if count is None:
            reason = f"nothing says what a call moves: add `@{self.subject.op.__name__}.cost`"
            self.bench.left_out[f"GB/s of {self.subject.name}"] = reason
        if count is None or not us:
            return
        row.gbs = count / us / 1e3
        row.of_copy = row.gbs * 1e9 / self.bench.ceilings.copy
        row.of_read = row.gbs * 1e9 / self.bench.ceilings.read

    def first_calls(self, shape: Shape, direction: str) -> None:
        """Fill in cold first calls at a shape, ours and that of torch.compile."""
        args = self.subject.complete(shape.make())
        reason = first_call.can_be_found(self.subject, args)
        if reason:
            self.bench.left_out["first calls"] = reason
            return
        for row in self.bench.rows:
            cold = row.who in (peers.OURS, peers.STATIC)
            if not cold or (row.shape, row.direction) != (shape.name, direction) or row.note:
                continue
            self.tell(f"{self.subject.name} cold first call {row.who}")
            try:
                row.first_call_s = first_call.seconds_of(
                    row.who, self.subject, self.device.type, args
                )
            except ChildFailed as e:
                row.note = f"no first call: {str(e).strip().splitlines()[-1][:200]}"
