"""Pointwise functions of a package: found, prewarmed, called by another process; a notebook's cells."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from helpers import run_threads

from jitkern import pointwise
from jitkern.op.all_ops import all_ops, ops_named
from jitkern.op.needed_kernels import units_of
from jitkern.op.op import OPS

MODULE = """
import torch
from jitkern import pointwise

@pointwise
def halved(x, alpha: float = 0.5):
    return torch.tanh(x) * alpha

@pointwise
def square(x):
    return x * x

both = halved >> square >> square
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "pointed.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("pointed")
    del sys.modules["pointed"]


def test_functions_with_a_name_are_found(package):
    assert not [name for name in OPS if name.startswith("pointed::halved_square_square")]
    names = {op.name.rpartition("_")[0] for op in ops_named("pointed")}
    assert names == {
        f"pointed::{name}{end}"
        for name in ("halved", "square", "halved_square_square")
        for end in ("", "_backward")
    }, "and not halved >> square, which has no name"
    assert package.both.op.module == "pointed"
    assert ops_named("pointed::halved") == [package.halved.op] and not ops_named("halved")


def test_equal_functions_are_one_op_and_others_are_others():
    scope = {"__name__": "cells", "torch": torch, "pointwise": pointwise}
    ops = []
    for text in ("x * x", "x * x", "x * x * x"):
        exec(f"@pointwise\ndef cell(x): return {text}", scope)
        ops.append(scope["cell"].op)
    assert ops[0] is ops[1]
    assert ops[0] is not ops[2]
    assert [op.name.rpartition("_")[0] for op in ops] == ["cells::cell"] * 3
    assert ops[2].name in all_ops()
    assert ops[0].name in OPS


def test_threads_declare_one_op():
    function = pointwise(lambda x: x + 123)
    ops = []
    run_threads(*[lambda: ops.append(function.op)] * 8)
    assert len(ops) == 8
    assert set(map(id, ops)) == {id(function.op)}


def test_samples_are_of_dtypes_that_fit():
    floats = pointwise(lambda x: x * 2)
    integers = pointwise(lambda x, n: x & n)
    assert {args[0].dtype for args in floats.op.sample_inputs("meta")} == {
        torch.bfloat16,
        torch.float16,
        torch.float32,
    }
    assert {args[0].dtype for args in integers.op.sample_inputs("meta")} == {torch.int64}
    with pytest.raises(
        RuntimeError,
        match=r"PyTorch refuses bitwise_and\(x: float32, n: float32\): .*not implemented",
    ):
        integers(torch.ones(2), torch.ones(2))


def test_a_division_that_torch_computes_needs_no_cpu_kernel():
    op = pointwise(dtypes=[torch.int64])(lambda x, n: (x & 7) // n).op
    for device, count in (("cpu", 0), ("cuda", 2)):
        units, problems = units_of(op, op.sources[device][0], device, op.prewarm_samples())
        assert not problems
        assert sum(len(unit.variants) for unit in units) == count


@pytest.mark.long
def test_what_is_prewarmed_is_not_compiled_again(package, cli, run_python, tmp_path):
    code, out, err = cli("prewarm", "pointed")
    assert code == 0, err
    script = """
        import jitkern, torch, pointed
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(4096, dtype=dtype, requires_grad=True)
            pointed.both(x, 0.25).backward(torch.ones(4096, dtype=dtype))
            pointed.square(torch.randn(64, 64, dtype=dtype))
        assert jitkern.stats()["compiles"] == 0, jitkern.stats()
    """
    done = run_python(textwrap.dedent(script), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
