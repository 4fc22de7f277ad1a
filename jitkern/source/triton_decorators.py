"""A Triton function and the decorators over it, read from Triton's objects or from stand-ins.

The stand-ins have the names and attributes of Triton's objects, so one function reads both: a
launch has the text run with the stand-ins, and the process that compiles imports Triton.
"""

from __future__ import annotations

import dis
import functools
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from jitkern.errors import LaunchError
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import DTYPES, Constant

TRITON_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # keywords that are compiled in
BARE = ".fn"  # after a name: the function below the decorators, which is theirs by this attribute

Heuristic = tuple[str, Callable[[dict[str, Any]], Any]]
_TYPES = {  # the names of types in annotations, without `tl.`
    "int": "i32", "float": "f32", "double": "f64", "half": "f16", "u1": "bool", "uint1": "bool",
    **{name: code for code, d in DTYPES.items() for name in (d.torch, d.triton, d.language)},
}  # fmt: skip
_NARROW = {code for code, dtype in DTYPES.items() if not dtype.ctype}  # passed only in tensors
_NUMBERS = (int, float, type(None))
_OF_DECORATORS = (  # fields of a function
    "plain", "unaligned", "configs", "key", "zeroed", "restored", "heuristics", "before", "pruning",
)  # fmt: skip
# Keywords that concern no launch: of @triton.jit, and of @triton.autotune.
_OF_COMPILING = {"version", "repr", "launch_metadata", "debug", "noinline"}
_OF_MEASURING = {"warmup", "rep", "use_cuda_graph", "do_bench", "cache_results"}


class UnsupportedDecorator(Exception):
    """A decorator or an annotation says what launches do not do; the message names it."""


class TritonConfig(NamedTuple):
    """A `triton.Config`: constexprs, and compile options such as num_warps."""

    constexprs: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]


class Pruning(NamedTuple):
    """What `prune_configs_by` has of functions, and the configurations as these get them."""

    early: Any
    model: Any
    top: Any
    configs: Sequence[Any]


class TritonFunction(NamedTuple):
    """A `@triton.jit` function as data: all that a launch needs without Triton.

    function: the Python function below the decorators.
    configs, key: of `@triton.autotune`: the configurations, and the arguments for each value of
    which one configuration is chosen. zeroed, restored: its `reset_to_zero` and `restore_value`:
    the arguments that each measured run finds as zeros, or as they were. heuristics: of all
    `@triton.heuristics`, in the order in which they run: constexprs computed from the rest; the
    first `before` of them before a configuration is chosen. pruning: its `prune_configs_by`.
    unread: what beyond the text tells this, and why the text does not.
    """

    function: Any
    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    defaults: tuple[tuple[str, Any], ...]  # of constexprs, where they are literals
    passed: tuple[tuple[str, Constant | None], ...]  # defaults of others: numbers and None
    annotated: tuple[tuple[str, str], ...]  # `n: tl.int64`: the type, whatever the argument
    plain: frozenset[str]  # do_not_specialize: neither ==1 nor %16
    unaligned: frozenset[str]  # do_not_specialize_on_alignment: ==1 but not %16
    configs: tuple[TritonConfig, ...] = ()
    key: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    heuristics: tuple[Heuristic, ...] = ()
    before: int = 0
    pruning: Pruning | None = None
    unread: str = ""

    def of_config(self, config: TritonConfig) -> dict[str, Any]:
        """The constexprs of a configuration; an option is one, too, if a parameter has its name."""
        options = {name: value for name, value in config.options if name in self.parameters}
        return {**options, **dict(config.constexprs)}


# ------------------------------------------------------------------ stand-ins


class _JITFunction:
    def __init__(self, fn: Any, plain: Iterable[Any], unaligned: Iterable[Any]) -> None:
        self.fn = fn
        self.do_not_specialize = [*plain]
        self.do_not_specialize_on_alignment = [*unaligned]


class _Autotuner:
    def __init__(
        self, fn: Any, configs: Any, key: Any, zeroed: Any, restored: Any, prune: Any
    ) -> None:
        self.fn = fn
        self.configs = [*configs] or [_Config({})]
        self.keys = [*key]
        self.reset_to_zero = [*(zeroed or ())]
        self.restore_value = [*(restored or ())]
        prune = prune or {}
        self.early_config_prune = prune.get("early_config_prune")
        self.perf_model = prune.get("perf_model")
        self.configs_top_k = prune.get("top_k", 1.0)


class _Heuristics:
    def __init__(self, fn: Any, values: dict[str, Any]) -> None:
        self.fn = fn
        self.values = values


class _Config:
    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1,
        maxnreg: int | None = None, pre_hook: Any = None, ir_override: Any = None,
    ) -> None:  # fmt: skip
        _refuse("triton.Config", pre_hook=pre_hook, ir_override=ir_override)
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.num_ctas = num_ctas
        self.maxnreg = maxnreg
        self.pre_hook = self.ir_override = None

    def all_kwargs(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in TRITON_OPTIONS}
        return {**self.kwargs, **{name: v for name, v in options.items() if v is not None}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self.all_kwargs() == other.all_kwargs()

    def __hash__(self) -> int:
        return hash(tuple(self.all_kwargs().items()))


def _jit(
    fn: Any = None, *, do_not_specialize: Any = None, do_not_specialize_on_alignment: Any = None,
    **rest: object,
) -> Any:  # fmt: skip
    _refuse("@triton.jit", **{name: rest[name] for name in rest.keys() - _OF_COMPILING})
    lists = do_not_specialize or (), do_not_specialize_on_alignment or ()
    return (lambda fn: _JITFunction(fn, *lists)) if fn is None else _JITFunction(fn, *lists)


def _autotune(
    configs: Any, key: Any, prune_configs_by: Any = None, reset_to_zero: Any = None,
    restore_value: Any = None, pre_hook: Any = None, post_hook: Any = None, *_: object,
    **rest: object,
) -> Any:  # fmt: skip
    _refuse(
        "@triton.autotune", pre_hook=pre_hook, post_hook=post_hook,
        **{name: rest[name] for name in rest.keys() - _OF_MEASURING},
    )  # fmt: skip
    return lambda fn: _Autotuner(fn, configs, key, reset_to_zero, restore_value, prune_configs_by)


def _heuristics(values: dict[str, Any]) -> Any:
    return lambda fn: _Heuristics(fn, values)


def _refuse(what: str, **unsupported: object) -> None:
    for name, value in unsupported.items():
        if value is not None:
            raise UnsupportedDecorator(
                f"`{name}` of {what} is not supported: remove it, and list the configurations that "
                "remain, with `reset_to_zero` or `restore_value` for what a hook prepares"
            )


def cdiv(a: int, b: int) -> int:
    """The quotient a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


class Unknown:
    """Stands for a value that a text did not give when it was run: each use of it raises `why`."""

    def __init__(self, why: BaseException) -> None:
        self.why = why

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.why

    def _refuse(self, *_: object, **__: object) -> Any:
        raise self.why


_USES = """
abs add and bool call contains delitem divmod enter eq exit float floordiv format ge getitem gt hash
index int invert iter le len lshift lt mod mul ne neg next or pos pow radd rand rfloordiv rmod rmul
ror round rpow rshift rsub rtruediv rxor setitem str sub truediv xor"""
for _use in _USES.split():
    setattr(Unknown, f"__{_use}__", Unknown._refuse)


class Standin(Unknown):
    """A module of Triton, or anything in it, that has none of Triton's values."""

    def __init__(self, name: str, error: type[BaseException] = TypeError) -> None:
        super().__init__(error(f"the value of `{name}` is known to Triton alone"))
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [*KNOWN]
        if (self._name, name) == ("triton", "__version__"):
            return importlib.metadata.version("triton")
        if name.startswith("__"):
            raise AttributeError(f"`{self._name}.{name}` is known to Triton alone")
        return KNOWN.get(name) or Standin(f"{self._name}.{name}", type(self.why))

    def __repr__(self) -> str:
        return self._name


KNOWN: dict[str, Any] = {  # by their names in `triton`
    "jit": _jit, "autotune": _autotune, "heuristics": _heuristics, "Config": _Config,
    "cdiv": cdiv, "next_power_of_2": next_power_of_2,
}  # fmt: skip


# ------------------------------------------------------------------ one reading of both


def read(value: Any) -> TritonFunction:
    """Return a Python function with the decorators that made `value` of it, as data.

    Raises UnsupportedDecorator for what launches do not do, and TypeError for what is no Triton
    function.
    """
    heuristics: list[Heuristic] = []
    tuner, before = None, 0
    while (kind := _kind(value)) in ("Autotuner", "Heuristics"):
        if kind == "Heuristics":
            heuristics += value.values.items()
        elif tuner:
            raise UnsupportedDecorator(
                "two `@triton.autotune` above one function are not supported"
            )
        else:
            tuner, before = value, len(heuristics)
        value = value.fn
    if not is_bare(value):
        raise TypeError(f"is a {type(value).__name__}, not a plain @triton.jit function")
    found = _undecorated(value)._replace(heuristics=tuple(heuristics), before=before)
    if not tuner:
        return found
    hooks = ("pre_hook", "post_hook")
    _refuse(
        "@triton.autotune",
        **{hook: getattr(tuner, f"user_defined_{hook}", False) or None for hook in hooks},
    )
    functions = tuner.early_config_prune, tuner.perf_model
    pruned = any(function is not None for function in functions)
    return found._replace(
        configs=tuple(map(_config, tuner.configs)),
        key=tuple(tuner.keys),
        zeroed=tuple(tuner.reset_to_zero),
        restored=tuple(tuner.restore_value),
        pruning=Pruning(*functions, tuner.configs_top_k, tuner.configs) if pruned else None,
    )


def _undecorated(value: Any) -> TritonFunction:
    """Return what `@triton.jit` made of a function, as its parameters declare it.

    Of a stand-in the annotations are texts, and a default that is not a literal is an ellipsis.
    """
    function = unwrapped(value.fn)
    names = parameters_of(function)
    if is_standin(value):
        texts = {name: function.__annotations__.get(name, "") for name in names}
    else:
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
    literals = [(name, given[name]) for name in names if given.get(name, ...) is not ...]
    return TritonFunction(
        value.fn,
        tuple(names),
        constexprs,
        tuple((n, v) for n, v in literals if n in constexprs),
        tuple((n, v) for n, v in literals if n not in constexprs and isinstance(v, _NUMBERS)),
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


def remaining(pruning: Pruning, named: dict[str, Any]) -> list[int]:
    """Return the numbers of the configurations that `prune_configs_by` leaves, as Triton does.

    named: the arguments by name. Raises LaunchError for a configuration that is not listed and for
    none at all, and what the author's functions raise.
    """
    early, model, top, listed = pruning
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


def _kind(value: Any) -> str:
    """The name of a value's class, if the class is Triton's or a stand-in for one."""
    kind = type(value)
    ours = kind.__module__ == __name__
    return kind.__name__.removeprefix("_") if ours or kind.__module__.startswith("triton.") else ""


def is_standin(value: Any) -> bool:
    """Return whether a value is a stand-in for an object of Triton."""
    return isinstance(value, (_Autotuner, _Config, _Heuristics, _JITFunction))


def _config(config: Any) -> TritonConfig:
    _refuse("triton.Config", pre_hook=config.pre_hook, ir_override=config.ir_override)
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
    return _kind(value) in ("JITFunction", "GluonJITFunction")


def bare(value: Any) -> Any:
    """Return the function that `@triton.jit` made, below decorators; None if there is none."""
    while value is not None and not is_bare(value):
        value = None if isinstance(value, Unknown) else getattr(value, "fn", None)
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


# ------------------------------------------------------------------ one reading against the other


def difference(read: TritonFunction, real: TritonFunction) -> str:
    """Return how two readings of one function's decorators differ, in words, or ""."""
    mine, theirs = (
        f"{unwrapped(f).__name__}({', '.join(parameters_of(f))})"
        for f in (read.function, real.function)
    )
    if mine != theirs:
        return f"over `{mine}` and over `{theirs}`"
    for name in _OF_DECORATORS:
        ours, other = getattr(read, name), getattr(real, name)
        if name == "heuristics":
            if [n for n, _ in ours] != [n for n, _ in other]:
                return f"heuristics: {_listed(ours)} and {_listed(other)}"
            for (key, f), (_, g) in zip(ours, other):
                if not is_alike(f, g):
                    return f"the heuristic of `{key}`, or a value that it reads"
        elif name == "pruning":
            if not is_alike(ours and ours[:3], other and other[:3]):
                return "`prune_configs_by`, or a value that it reads"
        else:
            shown = [repr(sorted(v) if isinstance(v, frozenset) else v) for v in (ours, other)]
            if shown[0] != shown[1]:  # 1 == 1.0 == True
                return f"{name}: {' and '.join(shown)}"
    return ""


def _listed(heuristics: Iterable[Heuristic]) -> str:
    return ", ".join(name for name, _ in heuristics) or "none"


def is_alike(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether a value of a text that was run with stand-ins is what an import makes of it."""
    seen = set() if seen is None else seen
    if (id(a), id(b)) in seen or isinstance(a, Unknown) or any(a is k for k in KNOWN.values()):
        return True
    seen.add((id(a), id(b)))
    if isinstance(a, type) or isinstance(b, type):
        return getattr(a, "__qualname__", "") == getattr(b, "__qualname__", "")
    mine, theirs = parts_of(a), parts_of(b)
    if type(a).__qualname__ != type(b).__qualname__ or len(mine) != len(theirs):
        return False
    pairs = [*zip(mine, theirs)]
    if isinstance(a, FunctionType):
        if not _alike_code(a.__code__, b.__code__):
            return False
        read = names_in(a.__code__) & a.__globals__.keys() & b.__globals__.keys()
        pairs += [(a.__globals__[name], b.__globals__[name]) for name in read]
    return all(is_alike(x, y, seen) for x, y in pairs) and (bool(pairs) or _shown(a) == _shown(b))


def parts_of(value: Any) -> list[Any]:
    """The values that a kept value was computed from; [] for a plain value."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return [*value]
    return [*getattr(value, "__dict__", {}).values()] if not isinstance(value, ModuleType) else []


def _shown(value: Any) -> str:
    """The text of a value, without its address."""
    return re.sub(r"<.* at 0x\w+>", "", repr(value))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions in it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from codes_in(part)


def names_in(code: CodeType) -> set[str]:
    """The names of globals, builtins and attributes that a code and the functions in it have."""
    return {name for part in codes_in(code) for name in part.co_names}


def _alike_code(a: CodeType, b: CodeType) -> bool:
    """Whether two codes of one text do the same."""
    if any(name.startswith("@") for name in b.co_names):
        return True  # pytest has rewritten its assertions
    fields = ("co_names", "co_varnames", "co_freevars", "co_cellvars")
    return (
        all(getattr(a, name) == getattr(b, name) for name in fields)
        and _operations(a) == _operations(b)
        and len(a.co_consts) == len(b.co_consts)
        and all(
            _alike_code(x, y)
            if isinstance(x, CodeType) and isinstance(y, CodeType)
            else repr(x) == repr(y)
            for x, y in zip(a.co_consts, b.co_consts)
        )
    )


def _operations(code: CodeType) -> list[tuple[str, Any]]:
    """The operations of a code, without calls and attributes.

    The bytecode of `a.b()` depends on whether the text that is compiled with it imports `a`.
    """
    return [
        (step.opname, None if "JUMP" in step.opname else step.arg)
        for step in dis.get_instructions(code)
        if not re.match("PUSH_NULL|PRECALL|LOAD_(ATTR|METHOD|GLOBAL|NAME)|CALL", step.opname)
    ]
