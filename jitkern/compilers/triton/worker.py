"""The child process that runs Triton: reads JSON requests line by line, and writes answers so.

The process ends when its parent closes the pipe (or dies), or after being idle for a while.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import operator
import os
import queue
import re
import signal
import sys
import threading
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from jitkern.compilers.cuda import ptx
from jitkern.compilers.triton.origins import Origins
from jitkern.compilers.triton.own_modules import NeedsTorch, NotCovered, OwnModules, OwnText
from jitkern.source import triton_decorators, triton_globals, triton_text
from jitkern.source.constants import decoded
from jitkern.source.dtypes import DTYPES
from jitkern.source.kinds import SOURCES, Source, Variant
from jitkern.source.triton_decorators import BARE
from jitkern.target import Target

IDLE = 300.0  # seconds
_modules: dict[tuple[str, ...], OwnModules] = {}  # of each kernel's file


def main() -> None:
    # What a kernel's module prints must not reach the pipes, nor what processes print and read that
    # it starts.
    asked, answers = os.dup(0), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked, requests), daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while True:
            request = json.loads(requests.get(timeout=IDLE))
            answers.write(json.dumps(_answer(request)) + "\n")
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


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    variant = _variant(request["variant"])
    log = io.StringIO()
    search_path = [*sys.path]
    try:
        with redirect_stdout(log), redirect_stderr(log):
            target, staging = Target.parse(request["target"]), Path(request["staging"])
            try:
                meta = _compile(variant, target, staging, request["covered"], log)
            except NeedsTorch:
                importlib.import_module("torch")
                _modules.clear()
                meta = _compile(variant, target, staging, request["covered"], log)
    except (Exception, NotCovered) as e:  # noqa: BLE001  the edge of this process: the parent raises it
        return {"error": _explain(e, variant), "log": log.getvalue() + traceback.format_exc()}
    finally:
        sys.path[:] = search_path
    return {"meta": meta, "log": log.getvalue()}


def _variant(fields: dict[str, Any]) -> Variant:
    source = fields.pop("source")
    for name in ("template", "options"):
        fields[name] = tuple(map(tuple, fields[name]))
    return Variant(
        source=SOURCES["triton"](**source),
        signature=tuple(fields.pop("signature")),
        **fields,
    )


def _compile(
    variant: Variant, target: Target, staging: Path, covered: list[str], log: io.StringIO
) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    triton.knobs.cache.manager_class = stages = _Stages(staging)
    triton.knobs.nvidia.dump_ptxas_log = True  # which tells the resources of the kernel
    # Triton's own cache is new each time, so spare it the hash of its 500 MB for that cache's key.
    triton.runtime.cache.triton_key = lambda: triton.__version__
    modules = _own_modules(variant.source, covered)
    own = modules.of_file(variant.source.paths[0], variant.source.package)
    origins = Origins(modules)
    if (name := variant.function.removesuffix(BARE)) in own.names:
        origins.follow(own.names, name)
    by_text = _is_by_text(variant)
    if by_text and variant.function in own.names:
        own.complete(variant.function)
    fn = _function(own.module, variant, by_text=by_text)
    of = Constants(modules, own, variant.source, origins)
    template = {name: decoded(value, of.dtype, of.find) for name, value in variant.template}
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
            _check_annotation(fn.params[index], kind)
            continue
        pointer = "*" if kind.startswith("*") else ""
        signature[name] = pointer + DTYPES[kind.removeprefix("*")].triton
        _check_annotation(fn.params[index], signature[name])
        if aligned:
            attributes[index,] = [["tt.divisibility", int(aligned)]]
        parameters.append(kind)
    source = _language_of(fn)(fn, signature, constants, attributes)
    arch = int(re.sub(r"\D", "", target.arch))
    options = {**dict(variant.options), **({"debug": True} if fn.debug else {})}
    with modules.as_imported():
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    (staging / "metadata.json").unlink()
    folder = os.path.realpath(variant.source.folder)
    used = [
        (os.path.relpath(path, folder), name, text)
        for (path, name), value in origins.used.items()
        if (text := triton_globals.text_of(value))
    ]
    meta = _meta(kernel.metadata, stages.ptx, parameters, log.getvalue())
    return {**meta, **({"globals": used} if used else {})}


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


def _check_annotation(parameter: Any, passed: str) -> None:
    """Raise TypeError for an annotated type that launches, which read only text, did not see."""
    annotation = parameter.annotation_type.replace("*k", "*").replace("u1", "i1")
    if annotation not in ("", passed):
        raise TypeError(
            f"`{parameter.name}` is annotated as {annotation}, and passed as {passed}: launches do "
            "not import Triton, so write `tl.int64` or the like in place of a name of your own"
        )


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


def _is_by_text(variant: Variant) -> bool:
    """Whether launches read the decorators of a function in its text, and not Triton's objects."""
    with contextlib.suppress(KeyError):
        try:
            triton_text.functions(variant.source.paths[0])[variant.function]
        except triton_text.UntoldByText:
            return False
    return True


def _function(module: ModuleType, variant: Variant, *, by_text: bool) -> Any:
    """The JITFunction of a variant, if its decorators say what launches read in its text."""
    from triton.runtime.jit import JITFunction

    path, name = variant.source.paths[0], variant.function
    fn: Any = getattr(module, name.removesuffix(BARE), None)
    if name.endswith(BARE):
        fn = triton_decorators.bare(fn)
    if fn is None:
        names = [name for name, value in vars(module).items() if isinstance(value, JITFunction)]
        raise AttributeError(
            f"{path} has no function `{name}`; it has: {', '.join(names) or 'none'}"
        )
    try:
        real = triton_decorators.read(fn)
    except TypeError as e:
        raise TypeError(f"`{name}` in {path} {e}") from e
    found = triton_text.functions(path)
    known = name in found
    told = ""
    if known and by_text:
        told = triton_decorators.difference(found[name], real)
    if not known or told:
        raise TypeError(
            f"a launch reads the decorators of `{name}` in the text, without Triton, and "
            + (f"an import gives something else ({told})" if known else "finds none there")
            + ": write them above the function, with values that statements of this file give"
        )
    while not isinstance(fn, JITFunction):  # the variant has the choices of the others
        fn = fn.fn
    if by_text and (unlike := found[name].constexprs ^ real.constexprs):
        wrong = min(unlike)
        raise TypeError(
            f"`{wrong}` is annotated by a name of the file's own: write `{wrong}: tl.constexpr` "
            "for a constexpr, as launches read the text, and no other annotation so"
        )
    return fn


def _own_modules(source: Source, covered: list[str]) -> OwnModules:
    """The modules of a kernel's own files, kept while these are the same."""
    key = (str(source.paths[0]), source.package, *covered)
    modules = _modules.get(key)
    if not modules or not modules.hold():
        beside = "" if source.package else source.folder
        modules = _modules[key] = OwnModules(covered, beside)
    return modules


class Constants:
    """The values of constexprs that their texts only name. own: the kernel's own text."""

    def __init__(self, modules: OwnModules, own: OwnText, source: Source, origins: Origins) -> None:
        self._modules, self._own, self._source, self._origins = modules, own, source, origins

    def dtype(self, code: str) -> Any:
        import triton.language as tl

        return getattr(tl, DTYPES[code].language)

    def find(self, kind: str, *words: Any) -> Any:
        """Return the object that an encoded constant names; see `constants.decoded`."""
        file, module, name = words if kind == "function" else ("", *words[:2])
        path = Path(os.path.realpath(Path(self._source.folder, file)))
        home = self._own.module
        with self._modules.freely():
            if module:
                home = self._modules.imported(module)
            elif file:
                home = self._modules.of_file(path, "").module
            found = operator.attrgetter(name)(home)
        if kind == "enum":
            return found(words[2])
        if file and os.path.realpath(str(home.__file__)) != str(path):
            raise ImportError(f"`{module}` is {home.__file__} here, and {path} where it is passed")
        self._origins.follow(vars(home), name)
        return found


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
