"""What tests of several rooms share by name."""

import contextlib
import ctypes
import importlib.util
import json
import linecache
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from jitkern import config
from jitkern.cache.key import Key
from jitkern.cache.manifest import Manifest
from jitkern.cache.store import Cache, Entry
from jitkern.compilers import Compiler, child_process
from jitkern.compilers.cuda import toolkit
from jitkern.compilers.result import Built
from jitkern.declare import kernel
from jitkern.errors import CompileError
from jitkern.launch.kernels import Kernels
from jitkern.launch.runner import Runner
from jitkern.op.op import Op
from jitkern.runtime import binding, specializer
from jitkern.runtime.programs import OpPrograms
from jitkern.runtime.records import BACKOFF
from jitkern.source.closure import Closure, closure_of
from jitkern.source.key import make_key
from jitkern.source.kinds import Cpp, Source, Variant
from jitkern.target import Target, short_version

REPOSITORY = Path(__file__).parent.parent
LONGEST = 500  # seconds, after which an event that a test waits for will never come
PATIENT_SERVICE = """
import sys
from jitkern.cli import main
from jitkern.service import builds, server
server.Server.patience = server.LAST = server.IDLE = 600.0
builds.KEPT = builds.PATIENCE = 600.0
server.Server.drain.__defaults__ = (600.0,)
sys.exit(main(["serve", *sys.argv[1:]]))
"""  # `jitkern serve`, none of whose deadlines comes


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write texts to their paths below a folder."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


COUNTED_CALLS = """
import collections, json, sys, torch
{before}
imported, events = set(sys.modules), collections.Counter()
sys.addaudithook(lambda event, _: events.update([event]))
import jitkern, jitkern.ops
from jitkern.runtime import binding, specializer, programs
x, y = torch.rand(16), torch.rand(16)
for _ in range(3):
    assert torch.equal(jitkern.ops.vec_add(x, y), x + y)
    specializer.settle()
earlier = events.copy()
before = sum(one.misses for one in programs.SLOTS)
for _ in range(1000):
    jitkern.ops.vec_add(x, y)
costly = ("open", "_thread.start_new_thread", "subprocess.Popen", "os.posix_spawn", "os.fork")
print(json.dumps({{
    "misses": sum(one.misses for one in programs.SLOTS) - before,
    "costly": [event for event in costly if events[event] > earlier[event]],
    "sockets": [event for event in events if event.startswith("socket.")],
    "imported": [name for name in set(sys.modules) - imported
                 if name.split(".")[0] in ("http", "ssl", "obstore") or name.startswith("jitkern.remote")],
    "loaded": binding.runtime() is not None, "stats": jitkern.stats(),
}}))
"""  # tells what warm calls do beside computing, and what the process did


def target_of(arch: str) -> str:
    """The target of a GPU for the Torch and the newest NVRTC that are installed."""
    major, minor = max(toolkit.nvrtc_libraries(), default=(13, 0))
    return f"cuda-{arch}-cu{major}{minor}-torch{short_version(torch.__version__)}"


def one_in_four(cases: Iterable[Any], name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters of a test of like cases, three of four of which are long."""
    return [
        pytest.param(case, id=name(case), marks=pytest.mark.long if at % 4 else ())
        for at, case in enumerate(cases)
    ]


H100 = target_of("sm_90")
needs_nvrtc = pytest.mark.skipif(
    not toolkit.nvrtc_libraries(), reason="needs NVRTC: pip install jitkern[cuda]"
)
needs_nvrtc_13 = pytest.mark.skipif(
    not any(major == 13 for major, _ in toolkit.nvrtc_libraries()),
    reason="needs NVRTC 13: pip install jitkern[cuda]",
)
needs_cutile = pytest.mark.skipif(
    importlib.util.find_spec("cutile_cache") is None,
    reason="needs cuTile: pip install jitkern[cutile]",
)
needs_cute = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is None,
    reason="needs the CuTe DSL: pip install jitkern[cute]",
)
needs_runtime = pytest.mark.usefixtures("launch_runtime")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def replaced(**settings: object) -> config.Config:
    """The settings with others, to be those of the process: `using` counts in one thread alone."""
    return config.Config(**{**vars(config.current()), **settings})


def declared(
    schema: str,
    path: Path,
    text: str,
    launch: Callable[..., object],
    reference: Callable[..., object] | None = None,
    *,
    cpu: bool = True,
    **keywords: Any,
) -> Op:
    """A fresh op on the real C compiler: its source is this text, written to this path."""
    path.write_text(text)
    op = kernel(schema, cpu=Cpp(str(path)) if cpu else (), **keywords)
    op.launch("cpu")(launch)
    if reference:
        op.reference(reference)
    return op


def assert_refused(
    build: Callable[..., object], text: str, given: Mapping[str, Any], reason: str
) -> None:
    """Check that a kernel of this text, built with these keywords, is no kernel for this reason."""
    with pytest.raises(CompileError, match=reason):
        build(text, **given)


def run_cell(name: str, text: str, variables: dict[str, Any]) -> dict[str, Any]:
    """Run a cell of a notebook, whose text `linecache` knows as a notebook's does."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), variables)
    return variables


def published(
    cache: Cache, variant: Variant, target: Target, *flags: str, package: Any = None, **files: bytes
) -> tuple[Key, Entry]:
    """The key and the entry of a variant. files: its content, with `_` for the dot of a name."""
    key = make_key(variant, target, flags, closure_of(variant.source))
    with cache.staging() as staging:
        (staging / "compile.log").write_text(str(staging))
        for name, data in (files or {"out_so": b"code"}).items():
            (staging / name.replace("_", ".")).write_bytes(data)
        return key, cache.publish(key, staging, Manifest(key.inputs, package=package or {}))


def ran(*command: object, **options: Any) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def own_programs_first() -> str:
    """PATH with the programs of this environment first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def programs_of(op: Op, device: str = "cpu") -> OpPrograms:
    slot = op.programs[device]
    assert slot
    return slot


def served(op: Op, *args: object, device: str = "cpu") -> object:
    """The result of a call that asks no Python, once it came as often as it must, to be traced."""
    slot = programs_of(op, device)
    for _ in range(2 << BACKOFF[0]):
        before = slot.misses
        result = op(*args)
        if binding.runtime() and slot.misses == before:
            return result
        specializer.settle()
    raise AssertionError(slot.refused)


def by_python(op: Op, source: Source, device: str, *args: object) -> object:
    """The result of the op's launch function, run by Python over the kernels of one source."""
    where = torch.empty(0, device=device).device
    runner = Runner(op.name, source, Target.current(device), where)
    return op.launch_function(source, device)(Kernels(runner), *args)


def until(happened: Callable[[], Any], *, of: Iterable[Any] = ()) -> Any:
    """Wait for an event; return what `happened` returns once that is true.

    of: started processes, all of which run as long as the event may come.
    """
    end = time.monotonic() + LONGEST
    while not (found := happened()):
        for process in of:
            assert process.poll() is None or happened(), process.communicate()
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
    return found


def run_threads(*works: Callable[[], object]) -> None:
    """Run these together; what they raise is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def alive(pid: int) -> bool:
    """Whether a process runs, of this one's children or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> set[int]:
    """The numbers of a process's children."""
    return {int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def guarded(pid: int) -> bool:
    """Whether a compiler that a process has started would end with it by now, after a kill -9 too."""
    for child in children(pid):
        with contextlib.suppress(OSError):  # it has ended
            if child_process.GUARD in Path(f"/proc/{child}/cmdline").read_text():
                return True
    return False


def last_json(out):
    return json.loads(out.splitlines()[-1])


def kernels(report):
    """The rows of a report that are about kernels, and not about launching them."""
    return [
        row
        for row in report["results"]
        if row["op"] not in ("jitkern::runtime", "jitkern_recorder")
        and row["variant"].partition(".")[0] != "call"
    ]


@dataclass
class FakeCompiler(Compiler):
    """Counts, and writes a file where a compiler would. `fail` makes it refuse, with a log perhaps, `during` runs in mid-compile."""

    compiles: list[Variant] = field(default_factory=list)
    fail: bool | str = False
    during: Callable[[], None] = lambda: None
    version: str = "1"

    def target(self, source: Source, target: Target) -> Target:
        return target

    def flags(self, source: Source, target: Target) -> tuple[str, ...]:
        return ("-O2", *source.flags)

    def identities(self, source: Source, target: Target) -> list[dict[str, str]]:
        return [{"name": "fake", "version": self.version}]

    def compile(self, variant: Variant, target: Target, closure: Closure, staging: Path) -> Built:
        self.compiles.append(variant)
        self.during()
        (staging / "compile.log").write_text("log")
        if self.fail:
            log = {"log": self.fail} if isinstance(self.fail, str) else {}
            raise CompileError("the fake refuses", op=variant.op, **log)
        (staging / "out.so").write_bytes(f"code of {variant.label}".encode())
        return Built(self.identities(variant.source, target)[0], {"artifact": "out.so"})


@contextlib.contextmanager
def waiting_gpu():
    """Within, the current stream waits: what comes there runs after the block, however long that takes."""
    go_on = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    assert (
        wait(stream, ctypes.c_uint64(go_on.data_ptr()), ctypes.c_uint32(1), ctypes.c_uint(0)) == 0
    )
    given_up = threading.Timer(LONGEST, go_on.fill_, [1])  # somebody waits for the stream
    given_up.start()
    try:
        yield
    finally:
        given_up.cancel()
        go_on.fill_(1)
        torch.cuda.current_stream().synchronize()


@contextlib.contextmanager
def refusing_to_wait():
    """Within, Torch refuses what would wait for a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, which Torch says once
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def symbolic_sizes(call: Callable[..., Any], args: Sequence[Any], device: str = "cpu") -> Any:
    """Return what Torch knows of sizes, all of them symbolic at first, after a call with them."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    sizes = ShapeEnv()
    with FakeTensorMode(shape_env=sizes) as mode:

        def fake(x: torch.Tensor, name: str) -> torch.Tensor:
            dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC] * x.dim())
            x = mode.from_tensor(x, source=ConstantSource(name), symbolic_context=dynamic)
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

        call(*(fake(a, f"a{i}") if isinstance(a, torch.Tensor) else a for i, a in enumerate(args)))
    return sizes


def constant_sizes(sizes: Any) -> set[str]:
    """Return the symbols of sizes that were made constants."""
    return {str(symbol) for symbol, value in sizes.replacements.items() if value.is_number}
