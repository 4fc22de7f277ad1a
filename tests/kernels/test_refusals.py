"""What an op without a kernel for the CPU refuses there, as its launch function does.

refusals.txt has, a line each, an op, an argument, how it is wrong, and the error that the op's own kernel for the CPU
raised while it had one.
"""

import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import jitkern.ops

CHANGES = {
    "more": lambda t: t.unsqueeze(0),
    "behind": lambda t: t.unsqueeze(-1),
    "scalar": lambda t: t.flatten()[0],
    "short0": lambda t: t[:-1],
    "short1": lambda t: t[:, :-1],
    "expanded0": lambda t: t[:1].clone().expand(t.shape),
    "expanded3": lambda t: t[..., :1].clone().expand(t.shape),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "given f32[3]": lambda _: torch.ones(3),
    "given f32[]": lambda _: torch.ones(()),
    "given i32[2,2]": lambda _: torch.ones(2, 2, dtype=torch.int32),
    "bogus": lambda _: "bogus",
    "nan": lambda _: math.nan,
    "-1": lambda _: -1,
    "-1.0": lambda _: -1.0,
    "3": lambda _: 3,
}


def refusals():
    found = defaultdict(list)
    for line in Path(__file__).with_name("refusals.txt").read_text().splitlines():
        op, argument, how, error = line.split(" | ", 3)
        found[op].append((argument, how, error))
    return found.items()


def changed(value, how):
    if how in CHANGES:
        return CHANGES[how](value)
    dtype = getattr(torch, how)
    return [t.to(dtype) for t in value] if isinstance(value, list) else value.to(dtype)


def right_call(op):
    """The first sample of float32 that has numbers."""
    for args in op.sample_inputs("cpu"):
        first, *_ = args[0] or [None] if isinstance(args[0], list) else args
        if first is not None and first.dtype == torch.float32 and first.numel():
            return list(op.signature.complete(args, {})[0])
    raise AssertionError(op.name)


@pytest.mark.parametrize(("name", "wrong"), [pytest.param(*row, id=row[0]) for row in refusals()])
def test_wrong_arguments_give_the_errors_of_a_kernel(name, wrong):
    op = getattr(jitkern.ops, name)
    assert not op.sources["cpu"]
    names = [argument.name for argument in op.signature.arguments]
    for argument, how, error in wrong:
        args = right_call(op)
        at = names.index(argument)
        args[at] = changed(args[at], how)
        versions = [a._version for a in args if isinstance(a, torch.Tensor)]
        with pytest.raises(RuntimeError) as raised:
            op(*args)
        assert str(raised.value) == error
        assert versions == [a._version for a in args if isinstance(a, torch.Tensor)]


def test_every_op_without_a_kernel_for_the_cpu_has_refusals():
    from jitkern.op.all_ops import all_ops

    of_silu = ("gelu_", "gelu_tanh_", "relu2_")  # which share the launch functions of silu_and_mul
    shipped = ((name[9:], op) for name, op in all_ops().items() if name.startswith("jitkern::"))
    names = {name for name, op in shipped if not op.sources["cpu"]}
    names = {name for name in names if not name.startswith((*of_silu, "block_sparse_"))}
    assert names == {name for name, _ in refusals()}
