"""A Triton function and its decorators as plain data, read from Triton's own objects."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

from jitkern.errors import LaunchError
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES, Constant

TRITON_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # keywords that are compiled in
BARE = ".fn"  # after a name: the function below the decorators, which is theirs by this attribute

_TYPES = {  # the names of types in annotations, without `tl.`
    "int": "i32", "float": "f32", "double": "f64", "half": "f16", "u1": "bool", "uint1": "bool",
    **{name: code for code, d in DTYPES.items() for name in (d.torch, d.triton, d.language)},
}  # fmt: skip
_NARROW = {code for code, dtype in DTYPES.items() if not dtype.ctype}  # passed only in tensors
_NUMBERS = (int, float, type(None))
_DECORATORS = ("Autotuner", "Heuristics")
_IN_CONFIGS = {"kwargs", *TRITON_OPTIONS}  # fields of triton.Config that launches use


class UnsupportedDecorator(Exception):
    """A decorator or an annotation says what launches do not do; the message names it."""


class TritonConfig(NamedTuple):
    """A `triton.Config`: constexprs, and compile options such as num_warps."""

    constexprs: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]


class TritonFunction(NamedTuple):
    """A `@triton.jit` function as data: all that a launch needs without Triton.

    name: of the Python function. constexprs: parameters that are compiled in.
    configs, key: of `@triton.autotune`: the configurations, and the arguments for each value of
    which one configuration is chosen. zeroed, restored: its `reset_to_zero` and `restore_value`:
    the arguments that each measured run finds as zeros, or as they were. heuristics: the names of
    all `@triton.heuristics`, in the order in which they run: constexprs computed from the rest; the
    first `before` of them before a configuration is chosen. pruned: whether it has
    `prune_configs_by`. facts: what its module read when it was imported; see `import_facts`.
    """

    name: str
    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    defaults: tuple[tuple[str, Any], ...]  # of constexprs
    passed: tuple[tuple[str, Constant | None], ...]  # defaults of others: numbers and None
    annotated: tuple[tuple[str, str], ...]  # `n: tl.int64`: the type, whatever the argument
    plain: frozenset[str]  # do_not_specialize: neither ==1 nor %16
    unaligned: frozenset[str]  # do_not_specialize_on_alignment: ==1 but not %16
    configs: tuple[TritonConfig, ...] = ()
    key: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    heuristics: tuple[str, ...] = ()
    before: int = 0
    pruned: bool = False
    facts: tuple[tuple[str, Any], ...] = ()

    def of_config(self, config: TritonConfig) -> dict[str, Any]:
        """The constexprs of a configuration; an option is one, too, if a parameter has its name."""
        options = {name: value for name, value in config.options if name in self.parameters}
        return {**options, **dict(config.constexprs)}


class Functions(NamedTuple):
    """The functions that decorators have: of Triton's objects alone.

    heuristics: by name. early, model, top: of `prune_configs_by`, with the configurations as these
    functions get them.
    """

    heuristics: dict[str, Callable[[dict[str, Any]], Any]]
    early: Any = None
    model: Any = None
    top: Any = 1.0
    configs: Sequence[Any] = ()


def read(value: Any) -> TritonFunction:
    """Return a function with the decorators over it, as data.

    Raises UnsupportedDecorator for what launches do not do, and TypeError for what is no Triton
    function.
    """
    heuristics: list[str] = []
    tuner, before = None, 0
    for kind, decorator in _decorators(value):
        if kind == "Heuristics":
            heuristics += decorator.values
        elif tuner:
            raise UnsupportedDecorator(
                "two `@triton.autotune` above one function are not supported"
            )
        else:
            tuner, before = decorator, len(heuristics)
    function = below(value)
    if not is_bare(function):
        raise TypeError(f"is a {type(function).__name__}, not a plain @triton.jit function")
    found = _undecorated(function)._replace(heuristics=tuple(heuristics), before=before)
    if not tuner:
        return found
    hooks = ("pre_hook", "post_hook")
    _refuse(
        "@triton.autotune",
        {hook: getattr(tuner, f"user_defined_{hook}", False) or None for hook in hooks},
    )
    return found._replace(
        configs=tuple(map(_config, tuner.configs)),
        key=tuple(tuner.keys),
        zeroed=tuple(tuner.reset_to_zero),
        restored=tuple(tuner.restore_value),
        pruned=tuner.early_config_prune is not None or tuner.perf_model is not None,
    )


def functions_of(value: Any) -> Functions:
    """Return what the decorators over a function have of functions."""
    found = Functions({})
    for kind, decorator in _decorators(value):
        if kind == "Heuristics":
            found = found._replace(heuristics={**found.heuristics, **decorator.values})
        else:
            pruning = decorator.early_config_prune, decorator.perf_model, decorator.configs_top_k
            found = Functions(found.heuristics, *pruning, decorator.configs)
    return found


def _decorators(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield Triton's decorators over a function, from above, each with its kind."""
    while (under := _under(value)) is not None:
        if _is_tritons(type(value)):
            yield type(value).__name__, value
        value = under


def below(value: Any) -> Any:
    """Return what is below Triton's decorators, and below wrappers that only have `fn`."""
    while (under := _under(value)) is not None:
        value = under
    return value


def _under(value: Any) -> Any:
    """Return the function that a decorator or a wrapper is over; None for another value.

    A class of another package that is made from one of Triton's decorators chooses in its own way.
    """
    kind = type(value)
    if _is_tritons(kind):
        return value.fn if kind.__name__ in _DECORATORS else None
    if hasattr(value, "__code__") or any(c.__name__ in _DECORATORS for c in kind.__mro__):
        return None
    return getattr(value, "fn", None)


def _is_tritons(kind: type) -> bool:
    return kind.__module__.startswith("triton.")


def _undecorated(value: Any) -> TritonFunction:
    """Return what `@triton.jit` made of a function, as its parameters declare it."""
    function = unwrapped(value.fn)
    names = parameters_of(function)
    kinds = (("constexpr" if p.is_constexpr else p.annotation_type) for p in value.params)
    texts = dict(zip(names, kinds))
    annotated = tuple((name, kind) for name in names if (kind := _annotated(texts[name])))
    for name, kind in annotated:
        if kind in _NARROW:
            raise UnsupportedDecorator(
                f"`{name}` is annotated as {texts[name]}, and scalars that are floats of 16 bits "
                "or fewer cannot be passed: annotate it as tl.float32, and convert it in the "
                "function"
            )
    constexprs = frozenset(name for name in names if "constexpr" in texts[name])
    last = reversed(names[: function.__code__.co_argcount])
    given = dict(zip(last, reversed(function.__defaults__ or ()))) | (function.__kwdefaults__ or {})
    defaults = [(name, given[name]) for name in names if name in given]
    return TritonFunction(
        inner(value).__name__,
        tuple(names),
        constexprs,
        tuple((n, v) for n, v in defaults if n in constexprs),
        tuple((n, v) for n, v in defaults if n not in constexprs and isinstance(v, _NUMBERS)),
        annotated,
        _named(value.do_not_specialize, names),
        _named(value.do_not_specialize_on_alignment, names),
    )


def _annotated(text: str) -> str:
    """The type that an annotation names as Triton reads it: `i64`, `*f32`; else ""."""
    if of := re.fullmatch(r"[\w.]*pointer_type\(([^,]*).*\)", text):
        kind = _annotated(of[1])
        return kind and f"*{kind}"
    text = text.strip("'\" ").removeprefix("const ").strip()
    pointer = text.startswith("*") or text.endswith("*")
    kind = _TYPES.get(text.strip("* ").rpartition(".")[2].removesuffix("_t"), "")
    return kind and f"{'*' if pointer else ''}{kind}"


def remaining(functions: Functions, named: dict[str, Any]) -> list[int]:
    """Return the numbers of the configurations that `prune_configs_by` leaves, as Triton does.

    named: the arguments by name. Raises LaunchError for a configuration that is not listed and for
    none at all, and what the author's functions raise.
    """
    _, early, model, top, listed = functions
    left = listed
    if early is not None:
        taken = inspect.signature(early).parameters
        every = any(p.kind == p.VAR_KEYWORD for p in taken.values())
        given = {name: value for name, value in named.items() if every or name in taken}
        left = early(listed, named, **given)
    if model is not None:
        most = max(1, int(len(left) * top)) if isinstance(top, float) and top <= 1.0 else top
        if len(left) > most:
            left = sorted(left, key=lambda c: model(**{**named, **c.all_kwargs()}))[:most]
    numbers = []
    for config in left or ():
        same = [n for n, known in enumerate(listed) if known is config or known == config]
        if not same:
            raise LaunchError(
                f"`prune_configs_by` returns {config.all_kwargs()}, which `configs` does not list: "
                "list it there"
            )
        numbers.append(same[0])
    if not numbers:
        raise LaunchError("`prune_configs_by` leaves no configuration: leave one at least")
    return numbers


def _refuse(what: str, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise UnsupportedDecorator(
                f"`{name}` of {what} is not supported: remove it, and list the configurations that "
                "remain, with `reset_to_zero` or `restore_value` for what a hook prepares"
            )


def _config(config: Any) -> TritonConfig:
    _refuse("triton.Config", {n: v for n, v in vars(config).items() if n not in _IN_CONFIGS})
    options = {name: getattr(config, name) for name in TRITON_OPTIONS}
    if options["num_ctas"] == 1:
        del options["num_ctas"]
    if not options["maxnreg"]:
        del options["maxnreg"]
    return TritonConfig(tuple(config.kwargs.items()), tuple(options.items()))


def _named(listed: Iterable[Any], names: list[str]) -> frozenset[str]:
    """The parameters that a list names, by name or position."""
    return frozenset(names[v] if isinstance(v, int) else str(v) for v in listed)


def is_bare(value: Any) -> bool:
    """Return whether a value is what `@triton.jit` makes, without a decorator above."""
    kind = type(value)
    return _is_tritons(kind) and kind.__name__ in ("JITFunction", "GluonJITFunction")


def bare(value: Any) -> Any:
    """Return the function that `@triton.jit` made, below decorators; None if there is none."""
    while value is not None and not is_bare(value):
        value = None if isinstance(value, ModuleType) else getattr(value, "fn", None)
    return value


def inner(function: Any) -> Any:
    """Return the Python function in a JITFunction and the decorators over it."""
    while not hasattr(function, "__code__") and hasattr(function, "fn"):
        function = function.fn
    return function


def unwrapped(function: Any) -> Any:
    """The function that `functools.wraps` was given, as `inspect` finds its source."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def parameters_of(function: Any) -> list[str]:
    """The names of a function's parameters."""
    code: CodeType = unwrapped(function).__code__
    return [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
