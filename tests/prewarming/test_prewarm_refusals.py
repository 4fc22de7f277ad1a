"""What prewarm says of launch functions that cannot work: a failed row, with the line at fault."""

import importlib
import itertools
import re

import pytest
import torch
from helpers import H100, last_json, needs_nvrtc

from jitkern.errors import LaunchError
from jitkern.op.all_ops import all_ops
from jitkern.op.op import OPS
from jitkern.target import short_version

NUMBERS = itertools.count()  # Torch keeps an op for good, so each test declares another one
CPU = f"--target=cpu-x86_64-torch{short_version(torch.__version__)}"
KERNEL = """
import torch
from jitkern.declare import Cpp, Cuda, kernel
op = kernel("{package}::f(Tensor x) -> {returns}", cpu=Cpp("f.cpp"), cuda=Cuda("f.cu"))
@op.launch("cpu", "cuda")
def _(k, x):
    out = torch.empty_like(x)
    {launch}
    return {result}
@op.samples
def _(device):
    yield torch.ones(3, device=device)
"""
CPP = 'extern "C" void f(float* out, const float* x, long n) {}\n'
CUDA = 'extern "C" __global__ void f(float* out, const float* x, long long n) {}\n'
LAUNCH = "k.f(out, x, x.numel(), grid=1, block=32)"


class Package:
    """A package with one op."""

    def __init__(self, folder, cli):
        self.folder = folder / f"refusals{next(NUMBERS)}"
        self.file = self.folder / "kernel.py"
        self.name = self.folder.name
        self.cli = cli

    def write(self, launch=LAUNCH, result="out", returns="Tensor", cuda=CUDA):
        self.folder.mkdir()
        parts = {"package": self.name, "launch": launch, "result": result, "returns": returns}
        self.file.write_text(KERNEL.format(**parts))
        (self.folder / "__init__.py").write_text(f"from {self.name}.kernel import op")
        (self.folder / "f.cpp").write_text(CPP)
        (self.folder / "f.cu").write_text(cuda)

    def prewarm(self, *arguments):
        """The exit code, and the reasons of what failed."""
        code, out, err = self.cli("prewarm", self.name, "--json", *arguments)
        rows = last_json(out)["results"]
        assert rows, err
        return code, [row["reason"] for row in rows if row["status"] == "failed"]


@pytest.fixture
def package(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    importlib.import_module("jitkern.ops")
    before = set(all_ops())
    yield Package(tmp_path, cli)
    for name in OPS.keys() - before:
        del OPS[name]


@pytest.mark.long
def test_the_total_stays_when_a_launch_is_refused(package):
    package.write(launch="k.f(out, x, grid=1, block=32)")
    code, _, err = package.cli("prewarm", package.name, CPU, "-v")
    steps = re.findall(r"^\[(\d)/(\d)\] (failed)?", err, re.MULTILINE)
    totals = {total for _, total, _ in steps}
    assert (code, len(totals), steps[-1][::2]) == (1, 1, (*totals, "failed")), err


@needs_nvrtc
@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ("k.f(out, x, grid=1, block=32)", "takes 3 arguments (float* out, const float* x, long long n), got 2"),
        ("k.f(out, 2, x.numel(), grid=1, block=32)", "argument 2 (`const float* x`) must be a tensor, got int `2`; it takes (float* out, const "),
        pytest.param("k.f(out, x.half(), 3, grid=1, block=32)", "argument 2 (`const float* x`) must be a float32 tensor", marks=pytest.mark.long),
        pytest.param("k.f(out, x, x.numel(), block=32)", "`grid` must be one to three sizes, got None", marks=pytest.mark.long),
        pytest.param("k.f(out, x, x.numel(), grid=1)", "`block` must be one to three sizes, got None", marks=pytest.mark.long),
        pytest.param("k.f(out, x, 1, grid=1, block=2048)", "block=2048 has 2048 threads, and no GPU takes more", marks=pytest.mark.long),
        pytest.param("k.f(out, x, 1, grid=1, block=(32, 64))", "block=(32, 64) has 2048 threads", marks=pytest.mark.long),
    ],
)  # fmt: skip
@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_a_launch_that_cannot_work_fails_with_its_line(package, launch, says, jobs):
    package.write(launch)
    code, reasons = package.prewarm("--target", H100, "--jobs", jobs)
    assert code == 1
    (reason,) = reasons
    assert f"{package.file}:8: " in reason and says in reason, reason


@pytest.mark.parametrize(
    ("result", "returns", "says"),
    [
        ("None", "Tensor", "returned None, and its schema says one tensor"),
        ("3.0", "Tensor", "returned a float, and its schema says one tensor"),
        ("(out, torch.empty_like(x))", "Tensor", "returned 2 values, and its schema says one tensor"),
        ("out", "(Tensor, Tensor)", "returned a tensor, and its schema says 2 tensors"),
        ("(out, 1)", "(Tensor, Tensor)", "returned an int as result 2, and its schema says 2 tensors"),
        ("out", "()", "returned a tensor, and its schema says nothing is returned"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_schema_names_the_launch_function(package, result, returns, says):
    package.write(result=result, returns=returns)
    line = f"{package.file}:5: "
    code, reasons = package.prewarm(CPU)
    assert (code, len(reasons)) == (1, 1)
    assert says in reasons[0] and line in reasons[0], reasons
    op = OPS[f"{package.name}::f"]
    with pytest.raises(LaunchError) as raised:
        op(torch.ones(3))
    assert says in str(raised.value) and line in str(raised.value)


@pytest.mark.parametrize(
    ("statement", "raised"),
    [
        ("undefined_name(k)", "NameError: name 'undefined_name' is not defined"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_what_a_launch_function_raises_is_told_with_its_line(package, statement, raised):
    package.write(statement)
    code, (reason,) = package.prewarm(CPU)
    assert code == 1
    where = f"{package.name}::f: {package.file}:8: "
    assert reason == f"{where}its launch function failed on sample 1: {raised}"


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.long
def test_any_error_of_a_build_is_a_failed_row(package, compiler, jobs):
    package.write()

    def broken():
        raise ZeroDivisionError("in a compiler")

    compiler.during = broken
    code, reasons = package.prewarm(CPU, "--jobs", jobs, "--keep-going")
    assert (code, len(reasons)) == (1, 1)
    assert "ZeroDivisionError: in a compiler" in reasons[0]
    assert "test_prewarm_refusals.py:" in reasons[0], "the place"


TUNED = """
import torch
from jitkern.declare import Cpp, kernel
op = kernel("{package}::f(Tensor x) -> Tensor", cpu=Cpp("f.cpp"))
@op.tune("cpu")
def _(x):
    return [{{"N": n}} for n in (1, 2, 3)]
@op.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    if k.config["N"] in {raises}:
        raise ValueError("no such N")
    k.f[k.config](out, x, x.numel())
    k.g[{{"N": 1}}](out, x, x.numel())
    return out
@op.samples
def _(device):
    yield torch.ones(3, device=device)
"""
ONLY = (
    "#if N == {wrong}\n#error no N here\n#endif\n"
    'extern "C" void {name}(float* out, const float* x, long n) {{}}\n'
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "raises", "failed", "left_out"),
    [
        (2, (), [], ["N2"]),
        (4, (2,), [], [""]),
        (2, (1, 3), ["N2"], [""]),
        (1, (), ["g.N1"], ["N1"]),  # each configuration launches g with it
        (4, (1, 2, 3), [""], []),
    ],
    ids=["compile", "raise", "both", "needed", "all raise"],
)
def test_a_configuration_that_fails_is_left_out_unless_all_do(
    package, wrong, raises, failed, left_out
):
    package.write()
    package.file.write_text(TUNED.format(package=package.name, raises=raises))
    texts = [ONLY.format(wrong=wrong, name=name) for name in "fg"]
    (package.folder / "f.cpp").write_text("".join(texts))
    code, out, err = package.cli("prewarm", package.name, "--json", "--keep-going", "--jobs=1", CPU)
    rows = last_json(out)["results"]
    found = {
        status: [r["variant"] for r in rows if r["status"] == status]
        for status in ("failed", "skipped", "built")
    }
    assert code == bool(failed)
    assert found["failed"] == failed
    assert found["skipped"] == left_out
    reasons = [row["reason"] for row in rows if row["status"] == "skipped"]
    assert all(reason.startswith("one of several configurations is left") for reason in reasons)
    says = "ValueError: no such N" if raises else "no N here"
    alike = "the same error as of" in err
    assert all(says in reason and (alike or f"skipped: {reason}" in err) for reason in reasons)
