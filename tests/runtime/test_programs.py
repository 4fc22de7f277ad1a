"""Programs: what C makes of the steps of a trace, and of steps that no trace would make."""

from __future__ import annotations

import pytest
import torch
from calls_of_ops import SCALE, X
from helpers import programs_of, served

from jitkern import config
from jitkern.launch.runner import Runner
from jitkern.runtime import binding
from jitkern.runtime.programs import CallClassState, LoadedProgram
from jitkern.trace.program import CODES, parsed_program
from jitkern.trace.trace import trace

pytestmark = pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform")


def launch(k, x):
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, 2.0, x.numel())
    return out


@pytest.fixture
def op(declare):
    return declare("(Tensor x) -> Tensor", SCALE, launch)


@pytest.fixture
def traced(op):
    """The trace of a call."""
    op(X)
    runner = op.backends["cpu"].devices.runner(op.sources["cpu"][0], X.device)
    assert isinstance(runner, Runner)
    return trace(op.signature, launch, [X], frozenset(), X.device, runner)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 3)], ids=str)
def test_a_tensor_of_any_rank_is_served(op, shape):
    x = torch.ones(shape)
    assert torch.equal(served(op, x), 2 * x)


def changed(name, place, value):
    """A program whose first step of this name has another operand."""

    def change(program):
        words, at = list(program.words), 0
        while words[at] != CODES[name]:
            at += 2 + words[at + 1]
        words[at + 2 + place] = value
        return program._replace(words=tuple(words))

    return change


UNSOUND = {
    "a register that is not there yet": changed("PASS", 1, 99),
    "an argument that is none": changed("TENSOR", 0, 7),
    "a dimension beyond the rank": changed("SIZE", 2, 6),
    "a kernel that is not given": changed("CALL", 0, 3),
    "a result twice": changed("RETURN", 0, 1),
    "an argument as a result": changed("RETURN", 1, 0),
    "no end": lambda program: program._replace(words=program.words[:-1]),
    "no result": lambda program: program._replace(words=program.words[:-4]),
    "too few registers": lambda program: program._replace(registers=2),
    "no words": lambda program: program._replace(words=()),
    "no such step": lambda program: program._replace(words=(9999, 0, *program.words)),
}


@pytest.mark.parametrize("how", UNSOUND)
def test_a_program_that_is_not_sound_never_serves(op, traced, how, caplog):
    slot = programs_of(op)
    program = UNSOUND[how](traced.program)
    kernels = [kernel.function for kernel in traced.kernels]
    before, known = slot.misses, {*slot.known}
    slot.append(
        CallClassState(), LoadedProgram(program, kernels, traced.world), X.device, config.current()
    )
    assert "not sound" in caplog.text and slot.known == known
    assert torch.equal(op(X), 2 * X) and slot.misses == before


@pytest.mark.parametrize(
    "content",
    [[], [[1], [], []], [["1"], [], [], 0, 0, 0, 0], [[2**31], [], [], 0, 0, 0, 0], [[1.5], [], [], 0, 0, 0, 0]],
    ids=str,
)  # fmt: skip
def test_what_is_no_program_is_refused(content):
    with pytest.raises((TypeError, ValueError)):
        parsed_program(content)
