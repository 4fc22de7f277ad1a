"""A compiled graph from Torch's caches on disk never answers for an op that was edited since."""

import functools
import json
import os
import sys
import threading
import types
from types import SimpleNamespace

import pytest
import torch
from helpers import ran

import jitkern.declare
from jitkern.op import compile_cache_key
from jitkern.op.op import OPS

MODULE = """
import os
import torch
from jitkern.declare import kernel

SLOPE = float(os.environ.get("SLOPE", 1))
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
def compiled(tmp_path, run_python):
    """Compile and run the op as it is written now, in a process of its own."""

    def run(*, reference=0.1, backward=1.0, fusible=False, control=False, **environment):
        (tmp_path / "stale.py").write_text(
            MODULE.format(reference=reference, backward=backward, fusible=fusible)
        )
        done = run_python(
            RUN.format(control=control), PYTHONDONTWRITEBYTECODE="1",
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"), **environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        value, slope, counts = json.loads(done.stdout.splitlines()[-1])
        return slope, bool(counts.get("autograd_cache_hit"))

    return run


@pytest.mark.long
def test_an_edited_backward_is_not_answered_by_an_old_graph(compiled):
    assert compiled(backward=1.0) == (1.0, False)
    assert compiled(backward=1.0) == (1.0, True)
    assert compiled(backward=3.0) == (3.0, False)


@pytest.mark.long
def test_without_the_tag_an_old_graph_does_answer(compiled):
    """pytorch#144344; where this fails, Torch has mended it, and `key_compile_caches` can go."""
    assert compiled(backward=1.0, control=True) == (1.0, False)
    assert compiled(backward=3.0, control=True) == (1.0, True)


@pytest.mark.long
def test_the_tag_of_the_user_is_kept():
    assert jitkern.ops.vec_add  # there is an op
    # The digest differs each time if an op of another test reads what has no text.
    assert torch.compiler.config.cache_key_tag.startswith(":")
    with torch.compiler.config.patch(cache_key_tag="mine"):
        assert torch.compiler.config.cache_key_tag.startswith("mine:")
    assert torch.compiler.config.cache_key_tag.startswith(":")


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
        op, (_, begin, arguments) = scope["op"], scope["op"].schema.partition("(")
        same = SimpleNamespace(
            schema=begin + arguments, declaration=op.declaration, gradient=op.gradient
        )
        digests.append(compile_cache_key.digest({"f": same}))
    assert digests[0] != digests[1]


def test_it_costs_an_import_nothing(run_python):
    done = run_python(
        "import torch, sys\nbefore = set(sys.modules)\nimport jitkern.ops\n"
        "print([m for m in set(sys.modules) - before if m.startswith(('torch._inductor', 'torch._dynamo'))])"
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.long
def test_all_declared_ops_count():
    assert compile_cache_key.digest(OPS) != compile_cache_key.digest(dict(list(OPS.items())[:1]))


VALUES = """
import math, sys, types
import torch
from jitkern.declare import kernel
from jitkern.op import compile_cache_key

RATE, KIND, PAIR = 2.0, torch.float64, (1, frozenset("ab"))
LISTED, TABLE, NAMES = [1, [2]], {"a": {"b": 1}}, {"x", "y", "z"}
settings = types.ModuleType("settings")
settings.rate = 2.0
sys.modules["settings"] = settings
RATE_OF_HELPER = RATE_OF_INNER = 2.0

def helper(x): return x * RATE_OF_HELPER

def other(x): return x

def made(closed):
    def backward(grad, x):
        def inner(): return RATE_OF_INNER
        x = torch.nn.functional.relu(torch.cat([x, x])) * math.sqrt(2.0) + torch.ops.aten.add(x, x)
        x = x.to(KIND) * settings.rate + RATE + len(PAIR) + LISTED[0] + TABLE["a"]["b"] + len(NAMES)
        return grad * closed * inner() * helper(x)
    return backward

op = kernel("jitkern_values::op(Tensor x) -> Tensor")

@op.reference
def _(x, rate=2.0):
    return x * rate

op.backward(made(2.0))

def digest(closed=2.0):
    op.gradient.function = made(closed)
    return compile_cache_key.digest({"op": op})
"""
CHANGES = [
    "RATE = 3.0", "RATE = 2", "KIND = torch.float32", "PAIR = (1, frozenset('ac'))", "LISTED[1].append(3)",
    "TABLE['a']['b'] = 2", "NAMES.add('w')", "settings.rate = 3.0", "RATE_OF_HELPER = 3.0", "RATE_OF_INNER = 3.0",
    "helper = other", "helper = math.sqrt", "del RATE", "op.declaration.reference.__defaults__ = (3.0,)",
    "torch.nn.functional.relu = torch.relu",
]  # fmt: skip


@pytest.fixture(scope="module")
def digests_of_values(tmp_path_factory):
    """The digests of an op in two processes: as it is, and after each change of a value it reads."""
    (folder := tmp_path_factory.mktemp("values")).joinpath("values.py").write_text(VALUES)
    script = (
        "import json, os, values\n"
        "found = [values.digest(), values.digest(), values.digest(closed=3.0)]\n"
        f"for change in {CHANGES!r}:\n"
        "    if os.fork():\n"
        "        assert os.wait()[1] == 0, change\n"
        "        continue\n"
        "    exec(change, vars(values))\n"
        "    print(json.dumps([change, values.digest()]), flush=True)\n"
        "    os._exit(0)\n"
        "print(json.dumps(found))"
    )
    outputs = []
    for seed in "12":
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": seed}
        out = ran(sys.executable, "-W", "ignore", "-c", script, env=environment)
        outputs.append([json.loads(line) for line in out.splitlines()])
    return outputs


@pytest.mark.long
def test_the_digest_is_the_same_in_each_process(digests_of_values):
    first, second = digests_of_values
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_a_value_that_a_function_reads_changes_the_digest(digests_of_values, change):
    *changed, (before, again, closed) = digests_of_values[0]
    assert before == again != closed
    assert dict(changed)[change] != before


def test_every_shipped_op_has_one_digest():
    ops = {op.__name__: op for op in jitkern.declare.discover("jitkern.kernels_src")}
    assert compile_cache_key.digest(ops) == compile_cache_key.digest(ops)


def test_a_pointwise_function_has_one_digest():
    f = jitkern.pointwise(lambda x: x * RATE)
    f(torch.ones(3))
    ops = {name: op for name, op in OPS.items() if "pointwise" in name or op.module == __name__}
    assert ops
    assert compile_cache_key.digest(ops) == compile_cache_key.digest(ops)


RATE = 2.0
MODULE_OF_A_USER = types.ModuleType("settings")


class Rates:
    rate = 2.0


RATES, BOUND, NESTED = Rates(), Rates().__init__, [{"a": threading.Lock()}]
ITSELF = []
ITSELF.append(ITSELF)


@functools.cache
def cached(x):
    return x * 2


@pytest.mark.parametrize(
    "reference",
    [
        lambda x: x * RATES.rate, lambda x: x * Rates.rate, lambda x: x * cached(2), lambda x: BOUND() or x,
        lambda x: x * getattr(MODULE_OF_A_USER, "rate", 2.0), lambda x: x * len(NESTED), lambda x: x * len(ITSELF),
        lambda x: torch.no_grad()(lambda: x)() * RATES.rate,
    ],
    ids=["object", "class", "cache", "method", "module", "lock", "list in itself", "inner function"],
)  # fmt: skip
def test_an_op_that_reads_more_has_another_digest_each_time(reference):
    declared = OPS["jitkern::vec_add"].declaration._replace(reference=reference, module=__name__)
    op = SimpleNamespace(schema="f(Tensor x) -> Tensor", declaration=declared, gradient=None)
    assert compile_cache_key.digest({"f": op}) != compile_cache_key.digest({"f": op})
