"""What an import of ops, and the first call of a warm process, do without."""

import json
import subprocess
import sys

import pytest

from jitkern import jit
from jitkern.runtime import binding
from jitkern.target import Target

CHILD = """
import json, re, sys
import torch
before = set(sys.modules)
patterns = []
compiled = re._compiler.compile
re._compiler.compile = lambda p, flags=0: patterns.append(str(p)) or compiled(p, flags)
import jitkern.ops
found = {"import": sorted(set(sys.modules) - before), "patterns": [*patterns]}
x = torch.ones(8)
jitkern.ops.vec_add(x, x)
found["call"] = sorted(set(sys.modules) - before)
found["compiles"] = jitkern.stats()["compiles"]
print(json.dumps(found))
"""
OF_A_MISS = (
    "ninja", "platformdirs", "jitkern.cache_tools", "jitkern.source.cpp_text", "jitkern.cache.lock",
    "jitkern.source.key", "jitkern.launch.runner", "jitkern.compilers.cpp.cc_build", "jitkern.compilers.cuda.nvrtc_build",
    "jitkern.compilers.result", "jitkern.compilers.triton.build",
)  # fmt: skip
OF_AN_OP = ("jitkern.op.op", "jitkern.config", "jitkern.source.kinds", "jitkern.runtime.trampoline")
OF_A_CALL = (
    "jitkern.compilers.cpp.cc", "jitkern.compilers.cuda.nvrtc", "jitkern.compilers.triton.compiler",
    "jitkern.launch.arguments", "jitkern.loading.cuda_driver", "jitkern.loading.library", "jitkern.calls.samples",
)  # fmt: skip


def run():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture
def warm():
    jit.ensure(binding.variant(), Target.current("cpu"))
    run()
    run()
    found = run()
    assert not found["compiles"]
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="patterns are counted in re._compiler")
@pytest.mark.long
def test_a_warm_process_imports_no_more_than_it_needs(warm):
    assert not set(warm["import"]) & {*OF_A_MISS, *OF_A_CALL, *OF_AN_OP}
    assert not set(warm["call"]) & set(OF_A_MISS)
    assert len(warm["patterns"]) <= 1  # that of Torch's version


def test_a_free_threaded_python_is_refused_by_one_sentence():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.abiflags = 't'; import jitkern"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: jitkern does not run on a free-threaded build of Python")
