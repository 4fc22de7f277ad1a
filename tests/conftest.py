"""Fixtures: every test has a cache of its own, and compilers are fakes unless a test asks for real ones."""

import atexit
import collections
import contextlib
import gc
import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jitkern import config, jit, testing
from jitkern.cli import main
from jitkern.compilers import COMPILERS
from jitkern.errors import CompilerNotFound
from jitkern.op import recorder, recording
from jitkern.runtime import binding, specializer
from jitkern.source.kinds import Cpp, Variant
from jitkern.target import Target

pytest.register_assert_rewrite(
    "helpers",
    "bundling",
    "calls_of_ops",
    "inline_modules",
    "processes",
    "publishing",
    "servers",
    "stocked",
    "subject",
    "tuning",
)
import processes  # noqa: E402
from helpers import REPOSITORY, FakeCompiler, replaced  # noqa: E402

ENDS = pytest.StashKey[float]()  # a time of time.monotonic, after which no test begins
LEFT_OUT = pytest.StashKey[collections.Counter[str]]()  # deselected tests, by their marker
NO_GPU = "needs a CUDA device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seconds", type=float, default=math.inf, metavar="N",
        help="begin tests for N seconds only; each commit begins with other modules",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = collections.Counter()
    if not is_controller(config):
        load_runtime()


def is_controller(config: pytest.Config) -> bool:
    """Whether this process runs no test itself, but has workers of pytest-xdist for them."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def load_runtime() -> None:
    """Load the launch runtime before any op is declared, as a process with a warm cache does."""
    root = Path(tempfile.mkdtemp(prefix="jitkern-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    with config.using(cache_dir=root), contextlib.suppress(CompilerNotFound):
        jit.ensure(binding.variant(), Target.current("cpu"))
        assert binding.runtime()
    testing.count_recorded_calls_from(recorder.ENOUGH + 1)  # only tests of the node load it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--seconds") < math.inf:
        command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout

        def place(item: pytest.Item) -> bytes:
            module = item.nodeid.partition("::")[0]
            return hashlib.sha256((commit + module).encode()).digest()

        items.sort(key=place)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was collected lives to the end: no later collection of garbage walks it


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marker = next((m for m in ("conformance", "long") if item.get_closest_marker(m)), "")
        item.config.stash[LEFT_OUT][marker] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # else the end of the process frees none of it, and Triton's bindings warn
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take from a worker what it left out: all workers have collected the same tests."""
    left_out = getattr(node, "workeroutput", {}).get("left out", {})
    node.config.stash[LEFT_OUT] = collections.Counter(left_out)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    """Say what was left out, below all else, and how to run it."""
    yield
    left_out = config.stash[LEFT_OUT]
    skipped = terminalreporter.stats.get("skipped", ())
    counts = (
        (left_out["long"], "long (make test-long)"),
        (left_out["conformance"], "for servers (make conformance)"),
        (
            sum(NO_GPU in str(r.longrepr) for r in skipped),
            "for a GPU (pytest -m gpu, where one is)",
        ),
    )
    if parts := [f"{count} {what}" for count, what in counts if count]:
        terminalreporter.write_line(f"Left out: {', '.join(parts)}.")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[ENDS] = time.monotonic() + session.config.getoption("--seconds")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash[ENDS]:
        pytest.skip("the time of --seconds is over")


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest, which its workers share."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session")
def compilers(common: Path) -> Path:
    """A folder with a `cc` and a `c++` that compile what most tests need once for all of them."""
    folder = common / "bin"
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name("compile_once.sh").read_text()
    script = script.replace("STORE", str(common / "compiled"))
    script = script.replace("LIBRARY", str(REPOSITORY / "kernels_src"))
    for name in "cc", "c++":
        real = shutil.which(name)
        if real:
            own = folder / f"{os.getpid()}"
            own.write_text(script.replace("REAL", real))
            own.chmod(0o755)
            own.replace(folder / name)
    return folder


@pytest.fixture(autouse=True)
def cache_dir(
    tmp_path: Path,
    common: Path,
    compilers: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """An empty cache for this test, its child processes too; or see the marker `common_cache`."""
    shared = request.node.get_closest_marker("common_cache")
    root = (common if shared else tmp_path) / "cache"
    for name in [name for name in os.environ if name.startswith("JITKERN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{compilers}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JITKERN_CACHE_DIR", str(root))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-settings"))
    monkeypatch.setattr("jitkern.jit.active_cache.spilled", [])
    testing.set_settings(monkeypatch)
    yield root
    specializer.settle()  # no stub is still in the making when this test's cache goes
    testing.forget_caches()


@pytest.fixture
def launch_runtime(cache_dir: Path) -> None:
    """The launch runtime is loaded, and serves calls."""
    if not binding.runtime():
        pytest.skip("no launch runtime on this platform")


@pytest.fixture
def signing_package() -> None:
    """Skip a test that signs where the package for that is missing."""
    pytest.importorskip("cryptography", reason='needs the extra sign: pip install "jitkern[sign]"')


@pytest.fixture
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that no other test of this user waits for, in any thread."""
    tmp_path.chmod(0o700)
    testing.set_settings(monkeypatch, replaced(runtime_dir=tmp_path))


@pytest.fixture
def target() -> Target:
    return Target("cpu", "x86_64", "", "2.13.0")


@pytest.fixture
def cuda_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Target:
    """Of a Torch that is one of CUDA's, or calls itself so, with libraries that hold nothing."""
    if torch.version.cuda is None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name in ("c10_cuda", "torch_cuda"):
            command = ["c++", "-shared", "-x", "c++", "/dev/null", "-o", tmp_path / f"lib{name}.so"]
            subprocess.run(command, check=True)
        monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
        testing.set_settings(monkeypatch)
    cuda = torch.version.cuda.replace(".", "")
    return Target("cuda", "sm_90", cuda, Target.current("cpu").torch)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """The compiler of Cpp sources, faked."""
    fake = FakeCompiler()
    monkeypatch.setitem(COMPILERS, "cc", fake)
    return fake


@pytest.fixture
def source(tmp_path: Path) -> Cpp:
    """A Cpp source in a folder of its own."""
    folder = tmp_path / "scale"
    folder.mkdir()
    (folder / "scale.cpp").write_text('extern "C" void scale(float* out) { *out = 1; }\n')
    return Cpp("scale.cpp", folder=str(folder))


@pytest.fixture
def variant(source: Cpp) -> Variant:
    return Variant("test::scale", source, "scale", (("T", "f32"),))


@pytest.fixture(scope="session")
def recorder_cache(common: Path) -> Path:
    """A cache that holds the node of recorder.cpp, which is built once: that takes 20 s."""
    with config.using(cache_dir=common / "cache"):
        jit.ensure(recorder.variant(), Target.current("cpu"))
    return common / "cache"


@pytest.fixture(params=["python", pytest.param("c++", marks=pytest.mark.long)])
def recorded_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Calls that need a gradient are recorded by Python, and then by the node of recorder.cpp."""
    if request.param == "python" or not binding.runtime():
        yield request.param
        return
    with config.using(cache_dir=request.getfixturevalue("recorder_cache")):
        functions = jit.loaded(recorder.variant(), Target.current("cpu"))
    node = recording.CppRecorder(*functions())
    monkeypatch.setattr(recording, "cpp", node)
    yield request.param
    for slot in recording.GRADIENTS:  # of ops declared meanwhile, too
        binding.runtime().record(slot, node.record, 0)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python code in another process with this test's cache and these environment variables.

    Torch is imported there by then; see torch_server.py.
    """

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-c", code]
        return processes.run(command, cwd=tmp_path, env={**os.environ, **environment}, timeout=1200)

    return run


@pytest.fixture
def fresh_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Do the same in a fresh process, which has not imported Torch."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as e:
            code = int(e.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
