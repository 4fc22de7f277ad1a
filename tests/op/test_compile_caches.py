"""A compiled graph from Torch's caches on disk never answers for an op that was edited since."""

import json
import os
import subprocess
import sys

import pytest
import torch

import jitkern.ops  # noqa: F401
from jitkern.op import compile_cache_key
from jitkern.op.all_ops import OPS

MODULE = """
import torch
from jitkern.declare import kernel

op = kernel("jitkern_stale::twice(Tensor x) -> Tensor", fusible={fusible})

@op.reference
def _(x):
    return x * {reference}

@op.backward
def _(grad):
    return grad * {backward}
"""
RUN = """
import json, sys, torch
if {control}:
    from jitkern.op import op
    op.key_compile_caches = lambda: None
import stale
from torch._dynamo.utils import counters
x = torch.ones(3, requires_grad=True)
out = torch.compile(lambda x: (stale.op(x) + 1).sin())(x)
out.sum().backward()
slope = (x.grad / (stale.op(torch.ones(3)) + 1).cos())[0].item()
print(json.dumps([round((out.asin() - 1)[0].item(), 3), round(slope, 3), dict(counters["aot_autograd"])]))
"""


@pytest.fixture
def compiled(tmp_path):
    """Compile and run the op as it is written now, in a process of its own."""

    def run(*, reference=0.1, backward=1.0, fusible=False, control=False):
        (tmp_path / "stale.py").write_text(
            MODULE.format(reference=reference, backward=backward, fusible=fusible)
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUN.format(control=control)],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        value, slope, counts = json.loads(done.stdout.splitlines()[-1])
        return slope, bool(counts.get("autograd_cache_hit"))

    return run


@pytest.mark.slow
def test_an_edited_backward_is_not_answered_by_an_old_graph(compiled):
    assert compiled(backward=1.0) == (1.0, False)
    assert compiled(backward=1.0) == (1.0, True)
    assert compiled(backward=3.0) == (3.0, False)


@pytest.mark.stress
def test_without_the_tag_an_old_graph_does_answer(compiled):
    """pytorch#144344; where this fails, Torch has mended it, and `key_compile_caches` can go."""
    assert compiled(backward=1.0, control=True) == (1.0, False)
    assert compiled(backward=3.0, control=True) == (1.0, True)


def test_the_tag_of_the_user_is_kept():
    before = torch.compiler.config.cache_key_tag
    assert before.startswith(":")
    with torch.compiler.config.patch(cache_key_tag="mine"):
        assert torch.compiler.config.cache_key_tag == f"mine{before}"
    assert torch.compiler.config.cache_key_tag == before


@pytest.mark.parametrize(
    ("old", "new"),
    [("x + y", "x - y"), ("fusible=True", "fusible=False"), ("(Tensor x, Tensor y)", "(Tensor y, Tensor x)")],
    ids=["reference", "fusible", "schema"],
)  # fmt: skip
def test_an_edit_changes_the_digest(tmp_path, old, new):
    text = (
        "from jitkern.declare import kernel\n"
        "op = kernel('jitkern_digest{}::f(Tensor x, Tensor y) -> Tensor', fusible=True)\n"
        "@op.reference\ndef _(x, y):\n    return x + y\n"
    )
    digests = []
    for number, body in enumerate((text, text.replace(old, new))):
        path = tmp_path / f"digest{old[:1]}{number}.py"
        path.write_text(body)
        scope = {"__file__": str(path), "__name__": "m"}
        exec(compile(body.replace("{}", f"{abs(hash(old))}_{number}"), str(path), "exec"), scope)
        parts = compile_cache_key._parts(scope["op"])
        digests.append(
            compile_cache_key._digest_of(
                (("f", *parts[1:]),) if old != "(Tensor x, Tensor y)" else (parts,)
            )
        )
    assert digests[0] != digests[1]


def test_it_costs_an_import_nothing(run_python):
    done = run_python(
        "import torch, sys\nbefore = set(sys.modules)\nimport jitkern.ops\n"
        "print([m for m in set(sys.modules) - before if m.startswith(('torch._inductor', 'torch._dynamo'))])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_all_declared_ops_count():
    assert compile_cache_key.digest(OPS) != compile_cache_key.digest(dict(list(OPS.items())[:1]))
