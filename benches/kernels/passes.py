"""The passes of a shape: their arguments, what they must give, and how they are timed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benches.kernels import checks, peers
from benches.kernels.peers import Contender
from benches.kernels.shapes import Shape, family_of, random_like
from benches.kernels.subject import Subject, differentiable
from jitkern.calls.signature import tensors_in
from jitkern.devtools import timing
from jitkern.devtools.check import leaves
from jitkern.launch.measure import copied
from jitkern.runtime import specializer

Pair = tuple[tuple[Any, ...], list[torch.Tensor]]  # arguments, and gradients of the results


class Forward:
    """The forward passes of a shape: its arguments, what they must give, and what must move."""

    def __init__(self, subject: Subject, shape: Shape, device: torch.device, stream: Any) -> None:
        self.subject, self.device, self.stream = subject, device, stream
        first = self.subject.complete(shape.make())
        count = timing.rotation(first, device)
        rest = (self.subject.complete(shape.make()) for _ in range(count - 1))
        self.copies = [first, *rest]
        self.bytes = self.subject.bytes(first)
        reference = self.subject.reference()
        with torch.no_grad():
            own = self.subject.results(reference, first)
            precise = _precise(lambda: self.subject.results(reference, checks.widened(first)), own)
        self.results = [torch.empty_like(t, device="meta") for t in own]
        self.oracle: checks.Oracle | None = checks.Oracle(family_of(self.subject), own, precise)

    def forget_oracle(self) -> None:
        """Free the expected results."""
        self.oracle = None

    def problem(self, contender: Contender) -> str:
        """Return what is wrong with the result of a contender, or ""."""
        assert self.oracle
        checks.poison(self.results, self.device)
        with torch.no_grad():
            for _ in range(2):  # by Python, and then by C
                results = self.subject.results(contender.function, self.copies[0])
                if problem := self.oracle.problem(results, exact=contender.exact):
                    return problem
                specializer.settle()
        return ""

    def _calls(self, contender: Contender) -> list[timing.Call]:
        calls: list[timing.Call] = []
        for copy in self.copies:
            positional, by_name = self.subject.op.signature.split(copy)
            calls.append(functools.partial(contender.function, *positional, **by_name))
        return calls

    def kernels(self, contender: Contender, pool: Any) -> timing.Sampler:
        """Return the sampler of the kernels alone."""
        with torch.no_grad():
            calls = self._calls(contender)
            return timing.captured(calls, self.device, stream=self.stream, pool=pool)

    def wall(self, contender: Contender) -> timing.Sampler:
        """Return the sampler of calls as Python issues them."""
        sampler = timing.issued(timing.repeated(self._calls(contender), self.device), self.device)
        return torch.no_grad()(sampler)


class Backward:
    """The backward passes of a shape.

    Peers from elsewhere have arguments of their own, which are restored before each measurement:
    some write gradients over them, as Liger's swiglu does.
    """

    def __init__(self, subject: Subject, shape: Shape, device: torch.device, stream: Any) -> None:
        self.subject, self.device, self.stream = subject, device, stream
        first = leaves(subject.op, self.subject.complete(shape.make()))
        count = timing.rotation([*first, *differentiable(first)], device)
        rest = (self.subject.complete(shape.make()) for _ in range(count - 1))
        copies = [first, *(leaves(subject.op, args) for args in rest)]
        reference = self.subject.reference()
        outputs = self._forward(reference, copies[0])
        meta = [torch.empty_like(t, device="meta") for t in outputs]
        grads = [[random_like(t, device) for t in meta] for _ in copies]
        self.pairs = list(zip(copies, grads))
        self._own: dict[str, list[Pair]] = {}
        results = tensors_in([self.subject.call(reference, copies[0])])
        self.bytes = self.subject.backward_bytes(copies[0], results)
        own = self._gradients(outputs, copies[0], grads[0], materialize_grads=True)

        def widely() -> list[torch.Tensor]:
            args = leaves(subject.op, checks.widened(first))
            wide_grads = checks.widened(grads[0])
            wide_outputs = self._forward(reference, args)
            return self._gradients(wide_outputs, args, wide_grads, materialize_grads=True)

        precise = _precise(widely, own)
        self.oracle: checks.Oracle | None = checks.Oracle(
            family_of(self.subject), own, precise, steps=2
        )

    def forget_oracle(self) -> None:
        """Free the expected gradients."""
        self.oracle = None

    def _forward(self, function: Any, args: Sequence[Any]) -> list[torch.Tensor]:
        """Return the results that have a gradient."""
        results = tensors_in([self.subject.call(function, args)])
        plain = self.subject.op.declaration.nondifferentiable
        named = zip(self.subject.op.signature.outputs, results)
        return [t for name, t in named if name not in plain and t.requires_grad]

    @staticmethod
    def _gradients(
        outputs: Sequence[torch.Tensor], args: Sequence[Any], grads: Sequence[Any], **options: Any
    ) -> list[torch.Tensor]:
        inputs = differentiable(args)
        return [*torch.autograd.grad(outputs, inputs, grads, allow_unused=True, **options)]

    def problem(self, contender: Contender) -> str:
        """Return what is wrong with the gradients of a contender, or ""."""
        assert self.oracle
        checks.poison(differentiable(self.pairs[0][0]), self.device)
        for _ in range(2):
            args, grads = _copied(self.pairs[0])
            outputs = self._forward(contender.function, args)
            gradients = self._gradients(outputs, args, grads, materialize_grads=True)
            if problem := self.oracle.problem(gradients, exact=contender.exact):
                return problem
            specializer.settle()
        return ""

    def _pairs_of(self, contender: Contender) -> list[Pair]:
        """Return arguments and gradients of results, as they were made."""
        if contender.name in peers.BUILT_IN:
            return self.pairs
        own = self._own.setdefault(contender.name, [])
        if not own:
            own += map(_copied, self.pairs)
        with torch.no_grad():
            for pair, kept in zip(self.pairs, own):
                for old, new in zip(
                    tensors_in([*pair[0], *pair[1]]), tensors_in([*kept[0], *kept[1]])
                ):
                    new.copy_(old)
        return own

    def _pass(self, contender: Contender, pair: Pair, **options: Any) -> timing.Call:
        """Return the backward pass of a forward pass that is made now."""
        args, grads = pair
        outputs = self._forward(contender.function, args)
        return functools.partial(self._gradients, outputs, args, grads, **options)

    def kernels(self, contender: Contender, pool: Any) -> timing.Sampler:
        """Return the sampler of the kernels alone. The graph of autograd is kept for the replays.

        A backward pass runs on the stream of its forward pass, which is therefore the captured one.
        """
        stream = self.stream
        assert stream
        pairs = self._pairs_of(contender)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            calls = [self._pass(contender, pair, retain_graph=True) for pair in pairs]
        sampler = timing.captured(calls, self.device, stream=stream, pool=pool)

        def sample() -> float:
            self._pairs_of(contender)
            return sampler()

        return sample

    def wall(self, contender: Contender) -> timing.Sampler:
        """Return the sampler of passes as Python issues them, each on a new graph of autograd."""
        turns = itertools.cycle(range(len(self.pairs)))

        def prepare() -> list[timing.Call]:
            pairs = self._pairs_of(contender)
            chosen = pairs if self.device.type == "cuda" else [pairs[next(turns)]]
            return [self._pass(contender, pair) for pair in chosen]

        return timing.issued(prepare, self.device)


def _precise(
    compute: Callable[[], list[torch.Tensor]], own: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return results in float64, or those of the reference itself where it takes no float64."""
    try:
        return compute()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  whatever an author's reference raises
        return own


def _tensors(pair: Pair) -> list[torch.Tensor]:
    return tensors_in([*pair[0], *pair[1]])


def _copied(pair: Pair) -> Pair:
    args, grads = pair
    return tuple(map(_like, copied(list(args), {}), args)), copied(list(grads), {})


def _like(value: Any, original: Any) -> Any:
    """Return the value as a leaf of a graph where the original is one."""
    wanted = isinstance(value, torch.Tensor) and original.requires_grad
    return value.detach().requires_grad_() if wanted else value
