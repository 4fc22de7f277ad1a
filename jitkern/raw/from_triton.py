"""A `@triton.jit` function from any module, called through the cache, without Triton when warm."""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import jit, source
from jitkern.cache.entry import Entry
from jitkern.errors import CompileError, DeclarationError, LaunchError, TargetError
from jitkern.launch.call import Call, all_configurations, variant_of
from jitkern.launch.declared import compare_again, declared_in
from jitkern.raw.kernel import RawKernel, place_of, target_of
from jitkern.source.kinds import Source, Triton, Variant
from jitkern.source.module_spec import spec_of
from jitkern.source.triton_decorators import BARE, TRITON_OPTIONS
from jitkern.source.triton_globals import live_function
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.launch.launched import LaunchedKernel

_log = logging.getLogger(__name__)
_NAMED_AS = "name a Triton function as `package.module:name` or `path/to/file.py:name`"
_KEYWORDS = {"grid", "cooperative", "pdl", *TRITON_OPTIONS}
_UNSET = {"num_ctas": 1, "maxnreg": None}  # as Triton's autotuner passes what is not chosen


class TritonKernel(RawKernel):
    """A Triton function: `k(x, n, grid=…, BLOCK=128)`, or as Triton has it `k[grid](x, n, 128)`.

    Where this process has imported the function, `torch.library.wrap_triton` and `torch.compile`
    take the kernel for it: it has the class and the attributes of the function.
    """

    def __init__(
        self, source: Source, function: str, target: Target | None, live: Any = None
    ) -> None:
        super().__init__(source, function, target)
        self._live = live
        compare_again(self.source, function)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the function, for `isinstance`; without it, TritonKernel."""
        live = self._function()
        return TritonKernel if live is None else type(live)

    def __getattr__(self, name: str) -> Any:
        begun = name in ("_live", "source", "function")  # a copy is asked before it has these
        live = None if begun else self._function()
        if live is None:
            raise AttributeError(f"'TritonKernel' object has no attribute {name!r}")
        return getattr(live, name)

    def _function(self) -> Any:
        """Return the function as this process has imported it; None where it has not."""
        if self._live is None:
            self._live = live_function(self.source, self.function)
        return self._live

    def __call__(self, *args: Any, grid: Any, **keywords: Any) -> LaunchedKernel | None:
        """Launch the kernel on the current stream of its tensors' device, and return it.

        keywords: arguments by name, constexprs among them, and `num_warps` and the like.
        Raises LaunchError.
        """
        target = self._target_for((*args, *keywords.values()))
        return self._start(self._call(args, {"grid": grid, **keywords}, target))

    def run(
        self, *args: Any, grid: Any, warmup: bool = False, **keywords: Any
    ) -> LaunchedKernel | None:
        """Launch, or for a `warmup` compile: what Torch and decorators call of a function."""
        if not warmup:
            return self(*args, grid=grid, **keywords)
        self.compile(*args, **keywords)
        return None

    def __getitem__(self, grid: Any) -> Callable[..., LaunchedKernel | None]:
        return functools.partial(self.__call__, grid=grid)

    def variants(
        self, *args: Any, target: Target | str | None = None, **keywords: Any
    ) -> list[Variant]:
        """Return the variants that a call with these arguments compiles.

        There is one, or for an autotuned function one for each configuration. Tensors may be on any
        device, `meta` too. A named target needs no device.
        """
        chosen = target_of(target) or self._target_for((*args, *keywords.values()))
        call = self._call(args, {"grid": 1, **keywords}, chosen)
        expanded = all_configurations(self.op, self.source, call, chosen)
        return [variant_of(self.op, self.source, one, target=chosen)[0] for one in expanded]

    def _target_for(self, args: Sequence[Any]) -> Target | None:
        """Return the target of the device of these arguments; None where there is no GPU."""
        with contextlib.suppress(TargetError):
            return self._devices.target(self._devices.device_of(args).index)
        return None

    def compile(
        self, *args: Any, target: Target | str | None = None, **keywords: Any
    ) -> list[Entry]:
        """Return the entries of all variants of a call, built if need be.

        A configuration that does not compile is left out, with a warning, unless none is left. A
        named target needs no device. Raises the errors of `jit.ensure`.
        """
        chosen = self._target(target)
        ensure = functools.partial(self._ensure, target=chosen)
        entries, errors = [], []
        with jit.at_once.each(ensure, self.variants(*args, target=chosen, **keywords)) as results:
            for result in results:
                try:
                    entries.append(result())
                except CompileError as e:
                    errors.append(e)
        if errors and not entries:
            raise errors[0]
        for error in errors:
            _log.warning("leaving out a configuration, which does not compile: %s", error)
        return entries

    def _call(self, args: tuple[Any, ...], keywords: dict[str, Any], target: Target | None) -> Call:
        """Return a Call, with the constexprs apart from the other arguments."""
        declared = declared_in(self.op, self.source, self.function, target)
        named = dict(zip(declared.parameters, args))
        given = _KEYWORDS & keywords.keys()
        options = {n: v for n in given if _UNSET.get(n, ...) != (v := keywords[n])}
        for name in given - (declared.constexprs & {*TRITON_OPTIONS}):
            del keywords[name]
        listed = f"`{self.function}({', '.join(declared.parameters)})` of {self.op}"
        if len(args) > len(declared.parameters):
            raise LaunchError(f"{listed} got {len(args)} arguments")
        for name in keywords:
            if name not in declared.parameters:
                raise LaunchError(f"{listed} was called with the unknown keyword `{name}`")
            if name in named:
                raise LaunchError(f"{listed} got two values for `{name}`")
        named = {**dict(declared.passed), **named, **keywords}
        computed = {name for config in declared.configs for name in declared.of_config(config)}
        computed |= {*declared.heuristics} | dict(declared.defaults).keys()
        missing = [n for n in declared.parameters if n not in named and n not in computed]
        if missing:
            raise LaunchError(f"{listed} got no value for `{missing[0]}`")
        template = [(n, value) for n, value in named.items() if n in declared.constexprs]
        rest = [
            named[name]
            for name in declared.parameters
            if name in named and name not in declared.constexprs
        ]
        return Call(self.function, tuple(template), tuple(rest), options)


def triton_kernel(
    function: Any, *, environment: Sequence[str] = (), target: Target | str | None = None
) -> TritonKernel:
    """Return a `@triton.jit` function, to be called with `grid`.

    function: the function itself, `package.module:name`, which imports neither the module nor
        Triton, or `path/to/file.py:name` (relative as in `cuda_kernel`). `name.fn` is the function
        without the decorators above `@triton.jit`.
    environment: variables that its compilation depends on.

    Raises DeclarationError.
    """
    if isinstance(function, str):
        module, colon, name = function.rpartition(":")
        if not colon:
            raise DeclarationError(
                f"`{function}` lacks a `:` before the function's name: {_NAMED_AS}"
            )
        path, package = (place_of(module), "") if module.endswith(".py") else _module(module)
    else:
        definition, package, name = _definition_of(function)
        if definition is None:
            cell = Triton(function, environment=environment)
            return TritonKernel(cell, name, target_of(target), function)
        path = definition
    if isinstance(function, str):
        _check_name(path, name)
    file = Triton(path.name, folder=str(path.parent), package=package, environment=environment)
    return TritonKernel(
        file, name, target_of(target), None if isinstance(function, str) else function
    )


def _check_name(path: Path, name: str) -> None:
    """Raise DeclarationError for a name that no statement of a file gives, and CompileError."""
    try:
        tree = ast.parse(path.read_bytes(), path)
    except SyntaxError as e:
        raise CompileError(f"{path}({e.lineno}): error: {e.msg}") from e
    words = {getattr(node, "name", getattr(node, "id", "")) for node in ast.walk(tree)}
    words |= {node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if name.removesuffix(BARE) not in words | {"*"} and "*" not in words:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise DeclarationError(
            f"{path} has no function `{name}` below `@triton.jit` at its top level; "
            f"it has: {', '.join(functions) or 'none'}"
        )


def _module(name: str) -> tuple[Path, str]:
    """Return the file and the package of a module, without an import. Raises DeclarationError."""
    if name.partition(".")[0] == "__main__":
        raise DeclarationError("`__main__` is not found by its name: pass the function itself")
    spec = spec_of(name) if name else None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise DeclarationError(f"there is no module `{name}` with a Python file; {_NAMED_AS}")
    is_package = spec.submodule_search_locations is not None
    return Path(spec.origin), name if is_package else name.rpartition(".")[0]


def _definition_of(function: Any) -> tuple[Path | None, str, str]:
    """Return file, package and name of a function object; no file for a function of a cell.

    Raises DeclarationError.
    """
    plain = source.triton_decorators.inner(function)
    if not hasattr(plain, "__code__"):
        raise DeclarationError(f"{function!r} is not a Triton function; {_NAMED_AS}")
    name = source.triton_function.name_of(function)
    if not source.triton_function.in_file(plain):
        return None, "", plain.__name__
    source.triton_function.check(function, name)
    module = sys.modules.get(plain.__module__)
    path = Path(plain.__code__.co_filename).absolute()
    return path, getattr(module, "__package__", "") or "", name
