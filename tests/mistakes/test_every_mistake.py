"""Each mistake that kernel authors make is told with the op, the line of their file, and the remedy."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback

import pytest
import torch
from author import CALLS, CPU_LAUNCH, DECLARATIONS, PREWARMED
from helpers import H100, needs_nvrtc

from jitkern.declare import kernel
from jitkern.errors import DeclarationError, JitkernError
from jitkern.op.op import OPS


def named(mistakes):
    return pytest.mark.parametrize("mistake", mistakes, ids=lambda mistake: mistake.name)


def assert_told(mistake, package, text, *, op=True):
    """The text has the op, the line of the package's file that is at fault, and the remedy."""
    if op:
        assert f"{mistake.name}::scale" in text, text
    if mistake.at:
        path, line = mistake.place(package)
        assert any(
            f"{path}{place}" in text for place in (f":{line}:", f"({line}):", f'", line {line},')
        ), text
    for part in mistake.says:
        assert part in text, text


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Write and import the package with a mistake; returns its folder and the module."""
    monkeypatch.syspath_prepend(tmp_path)
    written = set()

    def run(mistake):
        written.add(f"{mistake.name}.kernel")
        package = mistake.write(tmp_path)
        return package, lambda: importlib.import_module(f"{mistake.name}.kernel")

    yield run
    for op in [op for op in OPS.values() if op.module in written]:
        del OPS[op.name]


@named(CALLS)
def test_a_mistake_that_a_call_meets(mistake, imported):
    package, module = imported(mistake)
    names = {"torch": torch, "scale": module().scale}
    if not mistake.says:
        assert eval(mistake.call, names).sum() == (90 if "30" in mistake.call else 6)
        return
    with pytest.raises(Exception) as raised:
        eval(compile(mistake.call, "the caller", "eval"), names)
    e = raised.value
    whole = "".join(traceback.format_exception(e))
    assert '"the caller", line 1' in whole
    if sys.version_info < (3, 11) and not isinstance(e, JitkernError):
        return  # the rest is a note, which Python 3.10 has not
    text = (
        "\n".join([str(e), *getattr(e, "__notes__", ())]) if isinstance(e, JitkernError) else whole
    )
    compared = isinstance(e, AssertionError)  # Torch's, by the test of an author
    assert_told(mistake, package, text, op=not compared)


@named(DECLARATIONS)
def test_a_mistake_is_told_where_it_is_declared(mistake, imported):
    package, module = imported(mistake)
    with pytest.raises(JitkernError) as raised:
        module()
    source = mistake.name in ("source_keyword", "flags_string")  # wrong before an op has it
    bare = mistake.name == "schema_no_namespace"
    assert_told(mistake, package, str(raised.value), op=not source and not bare)


def test_what_an_author_raises_stays_as_it_is(imported):
    (mistake,) = [m for m in CALLS if m.name == "returns_none"]
    mistake = mistake._replace(
        name="boom", new="raise ValueError('boom')", at="raise", says=("boom",)
    )
    package, module = imported(mistake)
    with pytest.raises(ValueError, match="^boom$") as raised:
        module().scale(torch.ones(3), 2.0)
    assert_told(mistake, package, "".join(traceback.format_exception(raised.value)), op=False)


def test_an_op_without_kernels_says_that_it_runs_its_reference(imported, caplog):
    (right,) = [m for m in CALLS if m.name == "right_call"]
    mistake = right._replace(
        name="no_kernels", old='    cuda=Cuda("scale.cu"),\n    cpu=Cpp("scale.cpp"),\n', new="",
        at="scale = kernel(", says=("no kernel is declared for cpu: give one as cpu= in ",),
    )  # fmt: skip
    package, module = imported(mistake)
    assert module().scale(torch.ones(3), 2.0).sum() == 6
    assert_told(mistake, package, f"{caplog.messages[-1]}:")


def test_an_op_with_neither_kernel_nor_reference_says_so(caplog):
    op = kernel("neither::f(Tensor x) -> Tensor")
    try:
        with pytest.raises(
            DeclarationError,
            match=r"^neither::f has no reference, and no kernel is declared for cpu",
        ):
            op(torch.ones(3))
    finally:
        del OPS["neither::f"]
    assert not caplog.messages


@pytest.mark.long
def test_a_module_that_is_reloaded_declares_its_op_again(imported):
    (right,) = [m for m in CALLS if m.name == "right_call"]
    package, module = imported(right._replace(name="reloaded"))
    first = module()
    kernel = package / "kernel.py"
    for changed in (kernel.read_text(), kernel.read_text() + "\nCHANGED = True\n"):
        kernel.write_text(changed)
        assert importlib.reload(first).scale(torch.ones(3), 2.0).sum() == 6
    assert first.CHANGED


@pytest.mark.long
def test_a_kernel_that_writes_too_far_is_found_at_its_launch(tmp_path):
    (right,) = [m for m in CALLS if m.name == "right_call"]
    mistake = right._replace(
        name="too_far", file="scale.cpp", old="out[i]", new="out[i + (1ll << 50)]"
    )
    package = mistake.write(tmp_path)
    code = "import torch; from too_far.kernel import scale; scale(torch.ones(30), 3.0)"
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode < 0
    path = package / "kernel.py"
    line = 1 + path.read_text().split("\n").index("    " + CPU_LAUNCH.strip())
    assert f'File "{path}", line {line} in on_cpu' in done.stderr, done.stderr


@pytest.fixture(scope="module")
def prewarmed(tmp_path_factory):
    """Prewarm all packages at once; returns the folder, the exit code, and the rows of each op."""
    folder = tmp_path_factory.mktemp("prewarmed")
    names = [mistake.name for mistake in PREWARMED if mistake.write(folder)]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "jitkern",
        "prewarm",
        *names,
        "--target",
        H100,
        "--keep-going",
        "--json",
    ]
    environment = {**os.environ, "JITKERN_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    rows = {}
    for row in json.loads(done.stdout.splitlines()[-1])["results"]:
        rows.setdefault(row["op"], []).append(row)
    return folder, done.returncode, rows


@needs_nvrtc
@named(PREWARMED)
@pytest.mark.long
def test_a_mistake_that_prewarm_meets(mistake, prewarmed):
    folder, code, rows = prewarmed
    failed = [
        row for row in rows[f"{mistake.name}::scale"] if row["status"] in ("failed", "unsampled")
    ]
    if not mistake.says:
        assert not failed
        return
    row = failed[0]
    assert code == 1
    assert row["status"] == ("unsampled" if mistake.name == "samples_none" else "failed")
    assert_told(mistake, folder / mistake.name, row["reason"])


@pytest.mark.long
@pytest.mark.parametrize(("name", "says"), [("wrong_sum", ", limit "), ("wrong_shape", "gave")])
def test_check_tells_of_a_reference_that_differs(name, says, imported, cli):
    (mistake,) = (mistake for mistake in CALLS if mistake.name == name)
    name = f"checked_{name}"  # a module of its own
    _, module = imported(mistake._replace(name=name))
    module()
    code, out, err = cli("check", f"{name}::scale")
    (line,) = (line for line in out.splitlines() if "cpu" in line and "reference" in line)
    assert code == 1, err
    assert line.startswith("FAIL")
    assert f"{name}::scale" in line
    assert says in out
