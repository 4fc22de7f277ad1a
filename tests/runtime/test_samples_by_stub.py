"""Every sample of every shipped op: what a program does is what the Python launcher does, to the bit."""

import pytest
import torch
from helpers import by_python, needs_triton, programs_of

from benches.common import of_kind
from jitkern import config
from jitkern.calls.signature import tensors_in
from jitkern.declare import discover
from jitkern.launch.measure import copied
from jitkern.runtime import specializer
from jitkern.source.kinds import Extension

pytestmark = pytest.mark.common_cache


def cases():
    for op in discover("jitkern.kernels_src"):
        for device in ("cpu", "cuda"):
            for source in op.sources[device]:
                if isinstance(source, Extension):
                    continue
                marks = [pytest.mark.gpu if device == "cuda" else pytest.mark.long]
                if source.kind == "triton":
                    marks.append(needs_triton)
                case = f"{op.name[9:]}-{device}-{source.kind}"
                yield pytest.param(op, device, source, id=case, marks=marks)


@pytest.mark.parametrize(("op", "device", "source"), list(cases()))
def test_every_sample_is_the_same_by_c_and_by_python(op, device, source):
    op = of_kind(op, device, source.kind)
    slot, by_c = programs_of(op, device), 0
    with config.using(fallback="raise"):
        for sample in op.sample_inputs(device):
            args, kwargs = op.signature.complete(sample, {})
            given, again = copied(args, {}), copied(args, {})
            for _ in range(2):  # the first may wait for a workspace alone
                op(*copied(args, {}), **kwargs)
                specializer.settle()
            before = slot.misses
            result = op(*given, **kwargs)
            by_c += slot.misses == before
            python = by_python(op, source, device, *again, *kwargs.values())
            changed = zip(tensors_in([result, given]), tensors_in([python, again]), strict=True)
            for one, other in changed:
                assert one.stride() == other.stride()
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert by_c, slot.refused
