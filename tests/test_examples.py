"""The worked migration in `examples/`, before and after."""

import contextlib
import importlib
import inspect
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, ran

from jitkern import jit
from jitkern.compilers.cuda import toolkit
from jitkern.declare import discover
from jitkern.op.op import OPS
from jitkern.source.kinds import Variant

EXAMPLE = REPOSITORY / "examples" / "from_cuda_extension"
TEXT = (EXAMPLE / "README.md").read_text()

LINES = re.search(r"```sh\n(.*?)```", TEXT, re.DOTALL)[1].splitlines()

needs_cxx = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
pytestmark = [pytest.mark.long, needs_cxx]


def run(folder, lines, **more):
    """Run these lines of the README in this folder; returns what they print."""
    script = "\n".join(lines).replace("python ", f"{sys.executable} -W ignore ")
    environment = {**os.environ, "PYTHONPATH": ".", **more}
    return ran("sh", "-ec", script, cwd=folder, env=environment)


@pytest.fixture
def example(tmp_path):
    return shutil.copytree(EXAMPLE, tmp_path / "example")


DEVICES = [
    pytest.param("cpu", marks=pytest.mark.long),  # half a minute or more of compilers
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
def test_the_readme_is_what_runs(example, cache_dir, device):
    """The whole migration; on a machine with a GPU, the ops run on it, too."""
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": "9.0"}
    assert run(example, LINES, **hidden).count("are right") == 2
    logs = [path.read_text() for path in cache_dir.rglob("compile.log")]
    builds = sum("csrc/ops.cpp" in log for log in logs)
    assert builds == 1 + (device == "cuda"), "the two ops share one build for each device"


@pytest.mark.skipif(not toolkit.nvcc(), reason="needs nvcc")
def test_the_cuda_units_compile_ahead_without_a_gpu(example, cuda_target, monkeypatch):
    run(example, [line.partition(" && python")[0] for line in LINES if "setup.py" not in line])
    monkeypatch.syspath_prepend(example / "work")
    monkeypatch.delitem(sys.modules, "mathops", raising=False)
    ops = discover("mathops")
    try:
        variants = [Variant(op.name, told(op.sources["cuda"][0])) for op in ops]
        built = [jit.ensure_and_tell(variant, cuda_target) for variant in variants]
    finally:
        for op in ops:
            del OPS[op.name]
    assert [new for _, new in built] == [True, False]
    log = (built[0][0].path / "compile.log").read_text()
    assert log.count("arch=compute_90,code=sm_90") == 2


def told(source):
    """The source, told that this Torch, which has no CUDA, has no settings of CUDA either."""
    flags = (*source.flags, "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE")
    return source.replace(flags=flags, environment=("LIBRARY_PATH",))


def test_the_table_has_every_argument():
    from setuptools._distutils.extension import Extension
    from torch.utils.cpp_extension import BuildExtension

    text = (REPOSITORY / "docs" / "from_cuda_extension.md").read_text()
    cells = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| "))
    known = {*inspect.signature(Extension.__init__).parameters} - {"self", "kw"}
    known |= {"py_limited_api", "dlink", "dlink_libraries"}
    known |= {*re.findall(r'kwargs\.get\("(\w+)"', inspect.getsource(BuildExtension.__init__))}
    assert known - {*re.findall(r"\w+", cells)} == set()


# ------------------------------------------------------------------ a training loop

LOOP = [sys.executable, "-W", "ignore", str(REPOSITORY / "examples" / "training_loop" / "train.py")]
FEW = ["--every", "4", "--layers", "2", "--width", "16", "--batch", "8", "--rounds", "1"]


def trained(device, *arguments):
    return ran(*LOOP, "--device", device, *FEW, *arguments)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_quiet_loop_reports_what_the_plain_one_does(device):
    out = trained(device, "--steps", "12")
    counts = dict(re.findall(r"^(plain|quiet) +([\d.]+) +[\d.]+$", out, re.MULTILINE))
    assert counts == {"plain": "3.00", "quiet": "0.00"}
    plain, quiet = (re.findall(rf"{name}:\n((?:  .*\n)+)", out)[0] for name in counts)
    assert plain.count("mean loss") == 3
    if device == "cpu":
        assert plain == quiet
    last = [float(text.split()[-1]) for text in (plain, quiet)]
    assert last[0] == pytest.approx(last[1], rel=0.02)


def test_both_loops_notice_a_nan():
    plain, quiet = trained("cpu", "--steps", "12", "--spoil", "5").splitlines()
    assert plain == "plain: the loss of step 5, noticed in step 5"
    assert quiet == "quiet: the loss of a step up to 7, noticed in step 7"


# ------------------------------------------------------------------ a small Llama

LLAMA = [sys.executable, "-W", "ignore", str(REPOSITORY / "examples" / "llama_block" / "train.py")]


@pytest.mark.parametrize(
    ("device", "ways", "steps"),
    [
        ("cpu", ["eager", "jitkern"], 12),
        pytest.param("cpu", ["eager", "torch.compile", "both"], 12, marks=pytest.mark.long),
        pytest.param("cuda", ["eager", "jitkern"], 200, marks=pytest.mark.gpu),
    ],
)
def test_a_llama_learns_the_same_with_jitkerns_ops(device, ways, steps):
    out = ran(*LLAMA, "--device", device, "--ways", *ways, "--steps", str(steps))
    lines = re.findall(r"^ *(\d+)((?: +\d+\.\d{4})+)$", out, re.MULTILINE)
    losses = {int(step): [*map(float, numbers.split())] for step, numbers in lines}
    assert max(losses) == steps - 1 and len(losses) > 5
    assert all(len(row) == len(ways) for row in losses.values())
    first, last = losses[0], losses[steps - 1]
    assert all(after < before - 0.1 for before, after in zip(first, last)), "the loss falls"
    numbers = re.findall(r" by (?:at most )?(\d\S*) in ", out)
    bound = 1e-4 if device == "cpu" else 0.05
    assert len(numbers) == 3 * (len(ways) - 1)
    for way in range(len(ways) - 1):
        start, end, most = map(float, numbers[3 * way : 3 * way + 3])
        assert max(start, end, most / 10) <= bound
    table = re.findall(r"^(\S+)(?: +\d+\.\d\d){4}$", out, re.MULTILINE)
    assert table == ways


@contextlib.contextmanager
def imported(script, monkeypatch):
    """The module of an example."""
    monkeypatch.syspath_prepend(Path(script).parent)
    yield importlib.import_module(Path(script).stem)
    for name in (Path(script).stem, "model"):
        del sys.modules[name]


@pytest.fixture
def train(monkeypatch):
    with imported(LLAMA[-1], monkeypatch) as module:
        yield module


# ------------------------------------------------------------------ a small Llama that generates

DECODE = [*LLAMA[:-1], str(REPOSITORY / "examples" / "llama_decode" / "decode.py")]
SMALL = ["--layers", "2", "--width", "256", "--heads", "4", "--kv-heads", "2", "--hidden", "512"]
SMALL += ["--vocabulary", "1000", "--prompt", "40", "--steps", "40"]


def decoded(*arguments):
    return ran(*DECODE, *arguments)


@pytest.mark.parametrize(
    ("device", "dtype", "ways"),
    [
        ("cpu", "float32", ["jitkern-w4"]),
        pytest.param(
            "cpu", "float32", ["eager", "torch.compile", "jitkern"], marks=pytest.mark.long
        ),
        pytest.param(
            "cuda", "bfloat16", ["eager", "torch.compile", "jitkern", "jitkern-w4"],
            marks=pytest.mark.gpu,
        ),
        pytest.param("cuda", "float32", ["jitkern", "jitkern-w4"], marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_a_llama_generates_the_same_with_jitkern(device, dtype, ways):
    sizes = [*(SMALL if device == "cuda" else []), "--dtype", dtype, "--bound", "0.05"]
    out = decoded("--device", device, *sizes, "--ways", *ways, "--batch", "2", "6")
    apart = re.findall(r"^(\S+) and (\S+): logits differ by at most (\S+)", out, re.MULTILINE)
    peers = {way: "eager-w4" if way == "jitkern-w4" else "eager" for way in ways}
    assert [(a, b) for a, b, _ in apart] == [pair for pair in peers.items() if len({*pair}) == 2]
    assert all(float(number) <= (1e-4 if dtype == "float32" else 0.05) for *_, number in apart)
    table = re.findall(r"^(\S+) +[1-9]\d* +[1-9]\d* +\d+\.\d\d +\d+\.\d\d$", out, re.MULTILINE)
    assert table == ways


@pytest.mark.parametrize("device", DEVICES)
def test_a_prewarmed_start_compiles_nothing(device):
    out = decoded("--device", device, *(SMALL if device == "cuda" else []), "--starts")
    rows = re.findall(r"^(\w+) (?: +\d+\.\d\d){3} +(\d+) +(\d+)$", out, re.MULTILINE)
    (cold, kernels, _), prewarmed = rows
    assert cold == "cold" and int(kernels) >= {"cpu": 1, "cuda": 7}[device]  # CPUs have few
    assert prewarmed == ("prewarmed", "0", "0")
    assert re.search(r"^jitkern prewarm took \d", out, re.MULTILINE)


@pytest.fixture
def decode(monkeypatch):
    with imported(DECODE[-1], monkeypatch) as module:
        yield module


@pytest.mark.gpu
@pytest.mark.common_cache
def test_a_captured_step_generates_what_the_same_step_does(decode, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["decode.py", "--way", "jitkern-w4", *SMALL])
    args, tokens = decode.parsed(), {}
    with torch.inference_mode():
        for captures in (False, True):
            decoder = decode.decoder_of(args, decode.made(args), 3)
            decoder.prompt(decode.tokens_of(args, 3)[:, : args.prompt])
            decoder.step()
            if captures:
                decoder.capture()
            found = []
            for _ in range(args.steps):  # over the ends of pages
                decoder.step()
                found.append(decoder.tokens.clone())
            tokens[captures] = torch.cat(found, 1)
    assert torch.equal(tokens[False], tokens[True])
