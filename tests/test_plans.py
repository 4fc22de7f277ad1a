"""What a warm process needs not trace, and what it must trace all the same."""

import os

import pytest
import torch

from jitkern import ahead, config, jit
from jitkern.declare import Cpp, kernel
from jitkern.launch import linker, plans, runtime
from jitkern.launch.slot import SLOTS
from jitkern.register import OPS

X = torch.ones(3)
SIZES = (1, 2)
OBJECT = object()


def helper(x):
    return x.numel() + SIZES[0]


def plain(k, x, n=2):
    torch._check(x.dim() > 0, lambda: f"no scalars, got {tuple(x.shape)}")
    out = torch.empty_like(x, dtype=torch.float32)
    k.f(out, helper(x), max(n, 1))
    return out


def reads_the_environment(k, x):
    return torch.empty(int(os.environ["N"]))


def reads_the_device(k, x):
    return torch.empty(torch.cuda.device_count())


def reads_an_object(k, x):
    return OBJECT


def imports(k, x):
    import math

    return math.pi


def asks_the_builtins(k, x):
    return open("x")


def closes_over(value):
    def launch(k, x):
        return value

    return launch


def test_a_function_of_its_arguments_has_an_identity():
    found = plans.identity_of(plain)
    assert any(part.startswith("SIZES=(1, 2)") for part in found)
    assert any(part.startswith("helper()=") for part in found)


@pytest.mark.parametrize(
    "function",
    [reads_the_environment, reads_the_device, reads_an_object, imports, asks_the_builtins, closes_over(1), torch.add],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_function_that_reads_more_has_none(function):
    assert plans.identity_of(function) is None


def test_a_constant_of_the_module_is_part_of_the_identity(monkeypatch):
    before = plans.identity_of(plain)
    monkeypatch.setitem(globals(), "SIZES", (1, 3))
    assert plans.identity_of(plain) != before


def test_shipped_launch_functions_have_plans():
    import jitkern.ops  # noqa: F401

    for name, op in OPS.items():
        if name.startswith("jitkern::"):
            assert all(plans.identity_of(function) for function in op.launchers.values()), name


def test_a_situation_is_dtypes_ranks_and_what_is_none():
    args = (torch.ones(2, 3), None, True, 5, 0.5, torch.zeros(1, dtype=torch.int64))
    assert plans.situation_of(args) == ("f32[2]", "None", "True", "int", "float", "i64[1]")


CODE = """
import sys, torch
if {warm}:
    class Refuse:
        def find_spec(self, name, *_):
            if name in ("jitkern.launch.trace", "jitkern.launch.python", "triton", "filelock"):
                raise AssertionError(f"a warm process imported {{name}}")
    sys.meta_path.insert(0, Refuse())
import jitkern.ops
from jitkern.launch.slot import SLOTS
for dtype in (torch.float32, torch.float64):
    x = torch.arange(6, dtype=dtype).view(2, 3)
    assert torch.equal(jitkern.ops.vec_add(x, x), x + x)
    torch.testing.assert_close(jitkern.ops.softmax(x), x.softmax(-1))
print(jitkern.stats())
"""


@pytest.mark.skipif(not runtime.runtime(), reason="no launch runtime on this platform")
def test_after_prewarm_a_process_neither_compiles_nor_traces(run_python):
    done = run_python("from jitkern.cli import main; main(['prewarm', 'vec_add', 'softmax'])")
    assert done.returncode == 0, done.stderr
    done = run_python(CODE.format(warm=True), PATH="/nonexistent", JITKERN_COMPILE="never")
    assert done.returncode == 0, done.stderr
    assert "'compiles': 0" in done.stdout and "'stubs': 0" in done.stdout


@pytest.mark.skipif(not runtime.runtime(), reason="no launch runtime on this platform")
def test_after_one_run_the_next_neither_compiles_nor_traces(run_python):
    assert run_python(CODE.format(warm=False)).returncode == 0
    done = run_python(CODE.format(warm=True), PATH="/nonexistent", JITKERN_COMPILE="never")
    assert done.returncode == 0, done.stderr


MODULE = """
import torch
from jitkern.declare import Cpp, kernel
FACTOR = {factor}
op = kernel("jitkern_plan::scaled(Tensor x) -> Tensor", cpu=Cpp("k.cpp"))
@op.reference
def _(x): return x * FACTOR
@op.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    k.scale[{{"T": x.dtype}}](out, x, {body}, x.numel())
    return out
"""
EDITED = """
import torch, planned
from jitkern.launch import linker
for _ in range(2):
    print(planned.op(torch.ones(3)).tolist())
    linker.settle()
"""


@pytest.mark.skipif(not runtime.runtime(), reason="no launch runtime on this platform")
@pytest.mark.parametrize(
    "edit",
    [{"factor": 3.0}, {"body": "FACTOR + 1"}, {"kernel": "3 * a * x[i]"}],
    ids=["constant", "launch function", "kernel"],
)
def test_an_edit_is_never_answered_by_an_old_plan(run_python, tmp_path, edit):
    def run(factor=2.0, body="FACTOR", kernel="a * x[i]"):
        (tmp_path / "planned.py").write_text(MODULE.format(factor=factor, body=body))
        (tmp_path / "k.cpp").write_text(
            'extern "C" void scale(T* y, const T* x, double a, long n) '
            f"{{ for (long i = 0; i < n; i++) y[i] = {kernel}; }}"
        )
        done = run_python(EDITED, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first == second
        return first

    before = run()
    run()
    assert before == "[2.0, 2.0, 2.0]"
    assert run(**edit) in ("[3.0, 3.0, 3.0]", "[6.0, 6.0, 6.0]")
    assert run() == before


@pytest.fixture
def op(tmp_path):
    (tmp_path / "k.cpp").write_text(
        'extern "C" void f(float* y, long n, long m) { for (long i = 0; i < n - 1; i++) y[i] = m; }'
    )
    made = kernel(
        f"jitkern_plan::f{len(SLOTS)}(Tensor x, int n=2) -> Tensor",
        cpu=Cpp(str(tmp_path / "k.cpp")),
    )
    made.launch("cpu")(plain)
    made.samples(lambda device: iter([torch.ones(3, device=device)]))
    return made


def planned(op):
    slot = next(s for s in SLOTS if s.op == op.name)
    source = op.sources["cpu"][0]
    target = next(iter({jit.Target.current("cpu")}))
    return list(slot.plans(plain, source, target).find(("f32[1]", "int")))


def test_a_plan_is_kept_once(op):
    for _ in range(3):
        op(X, 2)
        linker.settle()
    assert len(planned(op)) == 1


def test_each_branch_has_a_plan(op):
    for n in (2, 0, 2):
        op(X, n)
        linker.settle()
    assert len(planned(op)) == 2


def test_prewarm_and_a_call_agree_on_the_stub(op):
    op(X, 2)
    linker.settle()
    (stub,), _ = ahead.stubs_of(op, op.sources["cpu"][0], jit.Target.current("cpu"))
    with config.using(compile="never"):
        assert jit.ensure(stub.variant, jit.Target.current("cpu")).manifest.inputs["op"] == op.name
