"""Every launch function for GPUs becomes a program for C, as is seen without a GPU or a compiler."""

import pytest
import torch
from uncompiled import UncompiledKernels

import jitkern.ops  # noqa: F401  whose ops are traced
from jitkern.launch.symbols import Unsupported
from jitkern.op.all_ops import all_ops
from jitkern.source.kinds import ITSELF
from jitkern.target import Target
from jitkern.trace.trace import trace
from jitkern.trace.tracer import metadata_of

H200 = Target.parse("cuda-sm_90-cu130-torch2.11.0")
LAUNCHED = [
    pytest.param(op, source, id=f"{name[9:]}-{source.kind}")
    for name, op in sorted(all_ops().items())
    if name.startswith("jitkern::")
    for source in op.sources["cuda"]
    if source.runs != ITSELF
]


# Some calls of these leave the work to PyTorch, which Python calls.
BY_TORCH = {"int8_linear", "topk", "w4a16_linear", "w8a16_linear"}


@pytest.mark.parametrize(("op", "source"), LAUNCHED)
def test_calls_of_each_launch_function_run_no_python(op, source):
    function, traced, left = op.launch_function(source, "cuda"), [], []
    for sample in op.prewarm_samples():
        args, kwargs = op.signature.complete(*op.signature.split(sample.args))
        given = metadata_of(op.signature.in_order(args, kwargs))
        kernels = UncompiledKernels(op.name, source, H200, "", {})
        place = torch.device("cuda:0")
        try:
            traced.append(trace(op.signature, function, given, frozenset(kwargs), place, kernels))
        except Unsupported as e:
            left.append(str(e))
    assert any(one.kernels for one in traced)
    assert bool(left) == (op.name[9:] in BY_TORCH), left
