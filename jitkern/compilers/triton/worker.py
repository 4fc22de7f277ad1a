"""The child process that runs Triton: reads JSON requests line by line, and writes answers so.

It imports Triton once, and forks for each file, so that no import meets what another has changed.
The process ends when its parent closes the pipe (or dies), or after being idle for a while.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import operator
import os
import queue
import re
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from jitkern.compilers.cuda import ptx
from jitkern.compilers.triton.importing import Import, ImportRefused, gpu_of
from jitkern.source import triton_decorators, triton_globals
from jitkern.source.closure import imports_of
from jitkern.source.constants import NotConstant, decoded
from jitkern.source.declarations import data_of
from jitkern.source.dtypes import DTYPES
from jitkern.source.global_names import code_names
from jitkern.source.import_facts import now
from jitkern.source.kinds import SOURCES, Variant
from jitkern.source.triton_decorators import BARE
from jitkern.target import Target

IDLE = 300.0  # seconds
FORKS = 8  # processes of files that are kept
_WITH_TORCH = "with Torch"  # the file of the process that has imported it


@dataclass(eq=False)
class Fork:
    """A process with the import of a file; what it is asked, and what it answers.

    facts: what the import has read besides files.
    """

    process: int
    asked: Any
    answers: Any
    file: str
    facts: dict[str, Any] = field(default_factory=dict)

    def has(self, file: str, world: dict[str, Any]) -> bool:
        """Return whether the process may answer for a file in a world."""
        return self.file == file and all(_now(f, world) == v for f, v in self.facts.items())


def _now(fact: str, world: dict[str, Any]) -> Any:
    """Return the value of a fact in the process that asks."""
    kind, _, name = fact.partition(" ")
    given = {"variable": "variables", "device": "device"}.get(kind)
    return world[given].get(name) if given else now(fact, Target.parse(world["target"]))


def main() -> None:
    # What a kernel's module prints must not reach the pipes, nor what processes print and read that
    # it starts.
    asked, answers = os.dup(0), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked, requests), daemon=True).start()
    forks: list[Fork] = []
    with contextlib.suppress(queue.Empty):
        while True:
            line = requests.get(timeout=IDLE)
            answers.write(_forwarded(json.loads(line), forks, (asked, answers.fileno())))
            answers.flush()
    os._exit(0)  # the other thread still reads


def _read(pipe: int, requests: queue.SimpleQueue[bytes]) -> None:
    """Queue the lines of a pipe. At its end, kill this process and its children at once."""
    rest = b""
    while data := os.read(pipe, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            requests.put(line)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _forwarded(
    request: dict[str, Any], forks: list[Fork], pipes: Sequence[int], *, has_torch: bool = False
) -> str:
    """Return the answer of the process that has the import of a request's file.

    Where the import fails with stubs of packages, whose `__init__` import one another, another
    process imports the packages themselves. Files that import Torch have a process that forks for
    them, so that a file meets the same modules, whichever files came before. has_torch: whether
    this process is it.
    """
    world = request["world"]
    _prepare(world["target"])
    if not has_torch and _imports_torch(world["covered"]):
        fork = next((one for one in forks if one.file == _WITH_TORCH), None)
        fork = fork or _forked(_WITH_TORCH, forks, pipes, _serve_with_torch)
        return json.dumps(_answer_through(fork, request, forks)) + "\n"
    told = (world["target"], world["source"], world["files"], world["covered"])
    file = json.dumps(told, sort_keys=True)
    fork = next((one for one in forks if one.has(file, world)), None)
    serve = functools.partial(_serve_file, has_torch)
    fork = fork or _forked(file, forks, pipes, serve)
    answer = _answer_through(fork, request, forks)
    if "import failed" in answer:
        other = _forked(file, forks, pipes, serve)
        again = {**request, "world": {**world, "stubs": False}}
        second = _answer_through(other, again, forks)
        fork, answer = (fork, answer) if "import failed" in second else (other, second)
    if "facts" in answer:
        fork.facts = dict(answer["facts"])
    return json.dumps(answer) + "\n"


@functools.cache
def _prepare(target: str) -> None:
    """Do once what each fork would do at its first compile: imports, and the version of `ptxas`."""
    from triton.compiler import code_generator, make_backend  # noqa: F401  itself a lazy import

    with contextlib.suppress(Exception):  # which a compile raises again
        make_backend(gpu_of(Target.parse(target))).hash()


def _answer_through(fork: Fork, request: dict[str, Any], forks: list[Fork]) -> dict[str, Any]:
    """Return the answer of a process, which is none of `forks` any more if its import failed."""
    forks.remove(fork)
    forks.append(fork)  # the last used last
    line = ""
    with contextlib.suppress(BrokenPipeError):
        fork.asked.write(json.dumps(request) + "\n")
        fork.asked.flush()
        line = fork.answers.readline()
    answer: dict[str, Any] = json.loads(line) if line.endswith("\n") else {"ended": None}
    is_over = answer == {"ended": None}  # itself, and not one that it forked
    if is_over or ("import failed" in answer and fork.file != _WITH_TORCH):
        status = _end(fork)
        forks.remove(fork)
        if is_over:
            answer["ended"] = status
    return answer


def _imports_torch(covered: list[str]) -> bool:
    texts = (Path(path).read_bytes() for path in covered if Path(path).is_file())
    return any(name.partition(".")[0] == "torch" for text in texts for _, name in imports_of(text))


def _forked(
    file: str, forks: list[Fork], pipes: Sequence[int], serve: Callable[[Any, Any], None]
) -> Fork:
    """Return a new process, the last of `forks`, of which the first ends if there are many.

    serve: answers its requests.
    """
    while len(forks) >= FORKS:
        _end(forks.pop(0))
    pipes = [*pipes, *(pipe.fileno() for one in forks for pipe in (one.asked, one.answers))]
    (asked, to), (of, answers) = os.pipe(), os.pipe()
    process = os.fork()
    if process:
        os.close(asked)
        os.close(answers)
        forks.append(Fork(process, os.fdopen(to, "w"), os.fdopen(of), file))
        return forks[-1]
    for pipe in (*pipes, to, of):
        os.close(pipe)
    with os.fdopen(asked) as lines, os.fdopen(answers, "w") as answered:
        serve(lines, answered)
    os._exit(0)


def _serve_file(has_torch: bool, lines: Any, answers: Any) -> None:  # noqa: FBT001
    """Answer requests for a file that is imported here."""
    kernels: KernelFile | None = None
    for line in lines:
        request = json.loads(line)
        kernels = kernels or KernelFile(request["world"], has_torch=has_torch)
        answers.write(json.dumps(kernels.answer(request)) + "\n")
        answers.flush()


def _serve_with_torch(lines: Any, answers: Any) -> None:
    """Answer requests for files that import Torch."""
    importlib.import_module("torch")
    forks: list[Fork] = []
    for line in lines:
        request, pipes = json.loads(line), (lines.fileno(), answers.fileno())
        answers.write(_forwarded(request, forks, pipes, has_torch=True))
        answers.flush()


def _end(fork: Fork) -> int:
    """End a process, and return its status; 0 if it ended by itself."""
    with contextlib.suppress(OSError):
        fork.asked.close()
    fork.answers.close()
    return os.waitstatus_to_exitcode(os.waitpid(fork.process, 0)[1])


class KernelFile:
    """The kernels of one file in its process: what they declare, and what compiles them."""

    def __init__(self, request: dict[str, Any], *, has_torch: bool) -> None:
        self._source = SOURCES["triton"](**request["source"])
        self._request, self._has_torch = request, has_torch

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request: what is declared, or for a variant what was compiled."""
        fields = request["variant"]
        for name in ("template", "options", "signature", "facts"):
            fields[name] = tuple(tuple(v) if isinstance(v, list) else v for v in fields[name])
        variant = Variant(**{**fields, "source": self._source})
        log = io.StringIO()
        failed = True
        found: dict[str, Any]
        try:
            with redirect_stdout(log), redirect_stderr(log):
                failed = not self._module
                found = (
                    {"meta": self._compile(variant, Path(request["staging"]), log)}
                    if variant.function
                    else {"functions": self._functions()}
                )
        except (Exception, SystemExit, ImportRefused) as e:  # noqa: BLE001  the edge of this process
            found = {"error": _explain(e, variant), **({"import failed": True} if failed else {})}
            log.write(traceback.format_exc())
        read = {} if failed else {"facts": self._facts()}
        return {**found, **read, "log": log.getvalue()}

    @functools.cached_property
    def _import(self) -> Import:
        found = Import(self._source, self._request, has_torch=self._has_torch)
        found.run()
        return found

    @property
    def _module(self) -> ModuleType:
        module: ModuleType = self._import.module
        return module

    def _facts(self) -> list[tuple[str, Any]]:
        return sorted(self._import.facts.items())

    def _functions(self) -> dict[str, Any]:
        """Return what the functions of the file declare, or why they are not supported."""
        found: dict[str, Any] = {}
        for name, value in [*vars(self._module).items()]:
            below = triton_decorators.bare(value)
            if below is None or triton_decorators.inner(below).__module__.startswith("triton."):
                continue
            for full, function in ((name, value), (name + BARE, below)):
                try:
                    read = triton_decorators.read(function)
                    found[full] = data_of(read, self._source)
                except TypeError as e:
                    found[full] = f"`{full}` {e}"
                except (triton_decorators.UnsupportedDecorator, NotConstant) as e:
                    found[full] = f"`{full}`: {e}"
        return found

    def _compile(self, variant: Variant, staging: Path, log: io.StringIO) -> dict[str, Any]:
        import triton

        triton.knobs.cache.manager_class = stages = _Stages(staging)
        triton.knobs.nvidia.dump_ptxas_log = True  # which tells the resources of the kernel
        # Triton's own cache is new each time, so spare it the hash of its 500 MB for that key.
        triton.runtime.cache.triton_key = lambda: triton.__version__
        fn = self._function(variant.function)
        template = {name: decoded(v, self._dtype, self._find) for name, v in variant.template}
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        classes = iter(variant.signature)
        parameters = []
        for index, name in enumerate(fn.arg_names):
            if name in template:
                signature[name], constants[index,] = "constexpr", template[name]
                continue
            kind, _, aligned = next(classes).partition(":")
            if kind in ("1", "None"):
                signature[name], constants[index,] = "constexpr", {"1": 1, "None": None}[kind]
                continue
            pointer = "*" if kind.startswith("*") else ""
            signature[name] = pointer + DTYPES[kind.removeprefix("*")].triton
            if aligned:
                attributes[index,] = [["tt.divisibility", int(aligned)]]
            parameters.append(kind)
        source = _language_of(fn)(fn, signature, constants, attributes)
        options = {**dict(variant.options), **({"debug": True} if fn.debug else {})}
        with self._import.watched():  # functions that compute constants run now
            kernel = triton.compile(source, target=gpu_of(self._import.target), options=options)
        (staging / "metadata.json").unlink()
        if self._facts() != sorted(variant.facts):
            raise ImportError(
                f"the import read {self._facts()}, and {sorted(variant.facts)} when its functions "
                "were declared: it reads something else each time"
            )
        meta = _meta(kernel.metadata, stages.ptx, parameters, log.getvalue())
        names = [variant.function.removesuffix(BARE)]
        names += [v for v in template.values() if triton_decorators.bare(v) is not None]
        used = self._used(names)
        return {**meta, **({"globals": used} if used else {})}

    def _function(self, name: str) -> Any:
        """Return the JITFunction of a name, below decorators: the variant has their choices."""
        value = getattr(self._module, name.removesuffix(BARE), None)
        fn = triton_decorators.bare(value)
        if fn is None:
            has = [
                n for n, v in vars(self._module).items() if triton_decorators.bare(v) is not None
            ]
            raise AttributeError(
                f"{self._source.paths[0]} has no @triton.jit function `{name}`; it has: "
                f"{', '.join(has) or 'none'}"
            )
        return fn

    def _dtype(self, code: str) -> Any:
        import triton.language as tl

        return getattr(tl, DTYPES[code].language)

    def _find(self, kind: str, *words: Any) -> Any:
        """Return the object that an encoded constant names; see `constants.decoded`."""
        file, module, name = words if kind == "function" else ("", *words[:2])
        home = importlib.import_module(module) if module else self._module
        found = operator.attrgetter(name)(home)
        if kind == "enum":
            return found(words[2])
        path = os.path.realpath(Path(self._source.folder, file)) if file else ""
        if file and os.path.realpath(str(home.__file__)) != path:
            raise ImportError(f"`{module}` is {home.__file__} here, and {path} where it is passed")
        return found

    def _used(self, functions: list[Any]) -> list[tuple[str, str, str]]:
        """Return the global names that functions use in their own files, with their values."""
        folder = os.path.realpath(self._source.folder)
        used: dict[tuple[Path, str], Any] = {}

        def follow(names: dict[str, Any], chain: Sequence[str]) -> None:
            for name in chain:
                if name not in names:
                    return
                value, path = names[name], Path(names.get("__file__") or "")
                file = path.parent.resolve() / path.name  # of a link, too, as a process names it
                covered = os.path.realpath(path) in self._import.covered
                if covered and not name.startswith("__") and not isinstance(value, ModuleType):
                    if (file, name) in used:
                        return
                    used[file, name] = value
                    visit(value)
                if not isinstance(value, ModuleType):
                    return
                names = vars(value)

        def visit(value: Any) -> None:
            function = triton_decorators.inner(value)
            if isinstance(function, FunctionType):
                for read in code_names(function.__code__).reads:
                    follow(function.__globals__, (read.name, *read.attributes))

        for function in functions:
            follow(vars(self._module), [function]) if isinstance(function, str) else visit(function)
        return [
            (os.path.relpath(path, folder), name, text)
            for (path, name), value in used.items()
            if (text := triton_globals.text_of(value))
        ]


def _language_of(fn: Any) -> Any:
    """The class that has the compiler's source of a function: of Triton, or of Gluon."""
    from triton.compiler import ASTSource

    if type(fn).__name__ != "GluonJITFunction":
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


class _Stages:
    """Takes the place of Triton's cache, and keeps what is read of the stages of one compile.

    Triton prints a stage to write it, so no other is written.
    """

    def __init__(self, staging: Path) -> None:
        self._paths = {"cubin": staging / "kernel.cubin", "json": staging / "metadata.json"}
        self.ptx = ""

    def __call__(self, _key: str, **_: bool) -> _Stages:
        return self

    def get_file(self, name: str) -> None:
        """Return the path of a stage that was kept: none."""

    def put(self, data: Any, name: str, binary: bool = True) -> str:  # noqa: FBT001, FBT002  as Triton calls it
        stage = name.rpartition(".")[2]
        if stage == "ptx":
            self.ptx = data
        if stage not in self._paths:
            return os.devnull
        self._paths[stage].write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(self._paths[stage])

    def get_group(self, name: str) -> None:
        """Return what was compiled before: nothing."""

    def put_group(self, name: str, group: dict[str, str]) -> None:
        """Keep nothing for a later compile."""


def _meta(metadata: Any, assembly: str, parameters: list[str], log: str) -> dict[str, Any]:
    trailing = ptx.parameter_count(assembly, metadata.name) - len(parameters)
    sizes = [
        getattr(metadata, name, 0) or 0 for name in ("global_scratch_size", "profile_scratch_size")
    ]
    return {
        "artifact": "kernel.cubin",
        "symbol": metadata.name,
        "parameters": parameters,
        "scratch": sizes[:trailing],  # bytes for each program of the grid
        "block": 32 * metadata.num_warps,
        "smem": metadata.shared,
        "cluster": metadata.num_ctas,
        "pdl": bool(getattr(metadata, "launch_pdl", False)),
        "cooperative": bool(getattr(metadata, "launch_cooperative_grid", False)),
        "resources": ptx.resources(assembly, metadata.name, log),
    }


def _explain(e: BaseException, variant: Variant) -> str:
    """The error as `file(line): error: message`, the form of the other compilers.

    If a function that the kernel calls is at fault, Triton's error names the call, and the error's
    cause has the message and the place in that function.
    """
    while getattr(e.__cause__, "node", None) is not None:
        assert e.__cause__
        e = e.__cause__
    path, line = str(variant.source.paths[0]), None
    node = getattr(e, "node", None)
    if isinstance(e, SyntaxError):
        path, line = e.filename or path, e.lineno
    elif node is not None:
        match = re.search(r"\bdef (\w+)", str(getattr(e, "src", "")))
        function = match.group(1) if match else variant.function.removesuffix(BARE)
        for number, row in enumerate(Path(path).read_text().splitlines()):
            if re.match(rf"\s*def {re.escape(function)}\b", row):
                line = number + node.lineno
    rows = [type(e).__name__, *filter(None, map(str.strip, str(e).splitlines()))]
    message = rows[-1]
    if message.strip("^") == "":  # below a line of the kernel, with no word on it
        message = f"{rows[0]}: {rows[-2]}"
    return f"{path}{f'({line})' if line else ''}: error: {message}"


if __name__ == "__main__":
    main()
