"""A process that starts on an empty cache: it is as quick as any other once its stubs are built."""

import json

import pytest
from helpers import COUNTED_CALLS

NO_CODE = """
from jitkern.runtime import code_page
def refuse(code):
    raise OSError("Operation not permitted")
code_page.executable = refuse
"""


def counted(run_python, before="", **environment):
    done = run_python(COUNTED_CALLS.format(before=before), **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_its_calls_are_served_by_the_runtime_that_it_built(run_python):
    for built in (1, 0):
        found, stderr = counted(run_python)
        assert (found["costly"], found["loaded"], found["misses"], stderr) == ([], True, 0, "")
        assert found["stats"]["runtimes"] == built


@pytest.mark.long
def test_without_a_c_compiler_calls_start_nothing(run_python):
    found, stderr = counted(run_python, CC="/nonexistent")
    assert (found["costly"], found["loaded"]) == ([], False)
    assert "no C compiler" in stderr and len(stderr.splitlines()) == 1


@pytest.mark.long
def test_without_executable_memory_calls_go_through_python(run_python):
    found, stderr = counted(run_python, NO_CODE)
    assert (found["costly"], found["stats"]["runtimes"]) == ([], 0)
    assert "this system allows no executable memory" in stderr


@pytest.mark.long
def test_errors_and_gradients_are_right_before_the_runtime(run_python):
    done = run_python(
        "import torch\n"
        "from jitkern.config import background\n"
        "background.BUILDS.later = lambda work: True\n"
        "import jitkern.ops\n"
        "from jitkern.runtime import binding\n"
        "for _ in range(3):\n"
        "    try: torch.ops.jitkern.vec_add(torch.ones(2), torch.ones(3))\n"
        "    except RuntimeError as e: print('shapes differ' in str(e))\n"
        "    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)\n"
        "    jitkern.ops.softmax(x).square().sum().backward()\n"
        "    wanted, = torch.autograd.grad(x.softmax(-1).square().sum(), x)\n"
        "    print(torch.allclose(x.grad, wanted))\n"
        "print(binding.runtime())\n"
    )
    assert done.stdout.split() == ["True"] * 6 + ["None"], done.stderr


@pytest.mark.long
def test_a_process_that_ends_at_once_waits_no_longer_than_it_may(run_python, tmp_path):
    slow = tmp_path / "cc"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o755)
    done = run_python(
        "import torch, jitkern.ops\n"
        "from jitkern.config import background\n"
        "background.PATIENCE = 0.5\n"
        "print(jitkern.ops.vec_add(torch.ones(1), torch.ones(1)).item())\n",
        CC=str(slow),
    )
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr


CONSTANTS = """
import glob, json, math, os, sys, threading, torch
from jitkern.declare import Cpp, kernel
from jitkern.runtime import specializer, programs
open("k.cpp", "w").write('extern "C" void scale(float* out, double a, long n) { for (long i = 0; i < n; i++) out[i] = a; }')
op = kernel("jitkern_constants::f(Tensor x, float a) -> Tensor", cpu=Cpp(os.path.abspath("k.cpp")))
@op.launch("cpu")
def _(k, x, a):
    out = torch.empty_like(x)
    k.scale(out, math.exp(-a), x.numel())  # another constant for each a
    return out
x, most = torch.ones(4), 0
for value in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
    assert op(x, float(value))[0].item() == torch.tensor(math.exp(-float(value))).item()
    most = max(most, threading.active_count())
specializer.settle()
for _ in range(300):
    op(x, 5000.0)
specializer.settle()
(own,) = programs.SLOTS
before = own.misses
op(x, 5000.0)
cache = os.environ["JITKERN_CACHE_DIR"]
print(json.dumps({
    "threads": most, "served": own.misses == before,
    "plans": len(glob.glob(f"{cache}/v1/*torch*/*.call.*")),
}))
"""


@pytest.mark.long
def test_a_thousand_constants_leave_few_programs(run_python):
    for _ in range(2):
        done = run_python(CONSTANTS)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["threads"] <= 2  # this one, and the one that builds the runtime
        assert found["plans"] <= 16
        assert found["served"]
