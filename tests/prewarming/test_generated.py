"""Ops that a factory makes in a loop, from texts and closures: plans, prewarm and edits of one."""

import json
import os
import subprocess
import sys

import pytest
from helpers import needs_runtime

pytestmark = needs_runtime
FACTORY = """
import torch
from jitkern.declare import Cpp, kernel

TEXT = 'extern "C" void f(float *out, const float *x, double s, long n) { for (long i = 0; i < n; i++) out[i] = %s; }'

def made(name, expression, scale, dtype, count):
    op = kernel(f"generated::{name}(Tensor x) -> Tensor", cpu=Cpp(text=TEXT % expression))

    @op.launch("cpu")
    def _(k, x):
        out = torch.empty(x.shape, dtype=dtype)
        k.f(out, x, scale[0], count(x.numel()))
        return out

    op.samples(lambda device: [(torch.empty(3, device=device),)])
    return op
"""
OPS = """
import functools, os
import torch
from factory import made
from jitkern.declare import Cpp, kernel

def count(n):
    return n

SEVEN = os.environ.get("SEVEN", "7")
OPS = [
    made(f"f{i}", f"s * x[i] + {SEVEN if i == 7 else i}", (i / 2, "a"), torch.float32, count)
    for i in range(20)
]

def scaled(s, k, x, *, times):
    out = x.clone()
    k.f(out, out, s * times, out.numel())
    return out

text = made.__globals__["TEXT"] % "s * x[i]"
by_lambda = kernel("generated::by_lambda(Tensor x) -> Tensor", cpu=Cpp(text=text))
by_lambda.launch("cpu")(lambda k, x: scaled(3.0, k, x, times=2))
by_partial = kernel("generated::by_partial(Tensor x) -> Tensor", cpu=Cpp(text=text))
by_partial.launch("cpu")(functools.partial(scaled, 3.0, times=4))
for op in (by_lambda, by_partial):
    op.samples(lambda device: [(torch.empty(3, device=device),)])
OPS += [by_lambda, by_partial]
"""
RUN = """
import json, torch, jitkern
from jitkern.runtime import specializer
traced, real = [], specializer.trace
specializer.trace = lambda signature, *rest: (traced.append(signature.name), real(signature, *rest))[1]
import generated
results = []
for op in generated.OPS:
    for _ in range(2):
        result = op(torch.ones(3))
        specializer.settle()
    results.append(result[0].item())
    assert not op.programs["cpu"].refused, op
stats = jitkern.stats()
print(json.dumps([results, stats["compiles"], stats["runtimes"], traced, generated.OPS[0].module]))
"""
WANTED = [i / 2 + i for i in range(20)] + [6.0, 12.0]


@pytest.fixture
def generated(tmp_path, run_python):
    (tmp_path / "factory.py").write_text(FACTORY)
    (tmp_path / "generated.py").write_text(OPS)

    def run(**environment):
        done = run_python(RUN, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def keys(cache_dir, pattern="v1/*/generated.*"):
    return {entry.name for entry in cache_dir.glob(pattern)}


@pytest.mark.long
def test_a_second_process_compiles_only_what_was_edited(generated, cache_dir):
    results, compiles, _, traced, module = generated()
    assert (results, compiles, len(traced)) == (WANTED, 22, 22)
    assert module == "generated", "the module whose import makes the ops, not that of the factory"
    made = keys(cache_dir)
    assert generated() == [WANTED, 0, 0, [], "generated"]
    assert keys(cache_dir) == made
    results, compiles, stubs, traced, _ = generated(SEVEN="8")
    assert results == [*WANTED[:7], 11.5, *WANTED[8:]]
    assert (compiles, stubs, traced) == (1, 0, ["generated::f7"])
    new = {name.rpartition("-")[0] for name in keys(cache_dir) - made}
    assert {name.partition(".call.")[0] for name in new} == {"generated.f7.f", "generated.f7"}
    assert generated() == [WANTED, 0, 0, [], "generated"]


@pytest.mark.long
def test_workers_find_ops_that_another_modules_factory_makes(generated, tmp_path, cache_dir):
    command = [sys.executable, "-m", "jitkern", "prewarm", "generated", "--jobs", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(keys(cache_dir, "v1/*/generated.*.call.*")) == 22
    assert generated() == [WANTED, 0, 0, [], "generated"]


@pytest.mark.long
def test_what_is_not_plain_is_named(run_python):
    done = run_python(
        """
import torch
from jitkern.declare import Cpp, kernel
from jitkern.runtime import specializer
def made(name, value):
    op = kernel(f"generated::{name}(Tensor x) -> Tensor", cpu=Cpp(text='extern "C" void f(float *x, double a) { *x = a; }'))
    def launch(k, x):
        out = torch.empty_like(x)
        k.f(out, value[0])
        return out
    op.launch("cpu")(launch)
    op(torch.ones(1)); specializer.settle()
    return list(op.programs["cpu"].refused.values())
print(made("plain", (1.0,)), made("changing", [1.0]))
"""
    )
    assert done.returncode == 0, done.stderr
    plain, changing = done.stdout.split("] [")
    assert plain == "["
    assert "`value`, of type list, cannot be traced: it can change unseen" in changing
