"""The variant that a launch needs: template arguments, and classes of arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple  # quicker to create than jitkern.named_tuple's

import torch

from jitkern import launch, source as source_room
from jitkern.errors import LaunchError
from jitkern.launch.declared import declared_in, functions_for
from jitkern.launch.flat import address_of, class_of
from jitkern.launch.symbols import concrete
from jitkern.source.declarations import Encoded
from jitkern.source.defining_file import unit_of
from jitkern.source.dtypes import Constant, codes_of_torch
from jitkern.source.kinds import ImportedSource, Source, Variant
from jitkern.source.triton_decorators import (
    TRITON_OPTIONS,
    TritonConfig,
    TritonFunction,
)
from jitkern.target import Target


class Call(NamedTuple):
    """A launch that a launch function requests.

    config: what was chosen among the configurations of `@triton.autotune`.
    """

    function: str
    template: tuple[tuple[str, Any], ...]
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    config: TritonConfig | None = None


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor are not in its memory: conj(), imag, zeros of a tangent."""
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def checked_address(what: str, tensor: torch.Tensor) -> int:
    """Return a tensor's address. Raises LaunchError if its memory does not hold its values."""
    if is_lazy(tensor):
        raise LaunchError(
            f"{what}: the memory of a tensor does not hold its values, because Torch computes "
            "conj() and its imag lazily: pass x.resolve_conj().resolve_neg()"
        )
    return tensor.data_ptr()


def expanded(
    op: str,
    source: Source,
    call: Call,
    choose: Callable[[TritonFunction, dict[str, Any]], TritonConfig],
    target: Target | None = None,
) -> Call:
    """Return the call with what the decorators of its kernel add: a configuration, heuristics.

    The decorators count from above, as in Triton: `@triton.heuristics` above `@triton.autotune` may
    give what its key names, and below it sees the configuration.

    choose: picks one of the function's configurations for these arguments by name. A `grid` that is
    a function is called here.
    """
    template, keywords, config = dict(call.template), call.keywords, None
    named: dict[str, Any] = {}
    defaults: dict[str, Constant] = {}
    if source.declares:
        declared = declared_in(op, source, call.function, target)
        tuned = {name for config in declared.configs for name in declared.of_config(config)}
        computed = {*declared.heuristics} - template.keys()
        heuristics = functions_for(source, call.function).heuristics if computed else {}
        defaults = dict(declared.defaults)
        passed = [
            name
            for name in declared.parameters
            if name not in {*template, *tuned, *computed, *defaults}
        ]
        named = dict(zip(passed, call.args))

        steps: list[str | None] = [*declared.heuristics]
        if declared.configs:
            steps.insert(declared.before, None)
        for step in steps:
            if step is None:
                config = choose(declared, {**template, **named})
                template |= declared.of_config(config)
                keywords = {**dict(config.options), **keywords}
            elif step in computed:
                value = concrete(heuristics[step]({**defaults, **named, **template}))
                if step in declared.parameters or step not in TRITON_OPTIONS:
                    template[step] = value
                else:
                    keywords = {step: value, **keywords}
    if callable(keywords.get("grid")):
        keywords = {**keywords, "grid": keywords["grid"]({**defaults, **named, **template})}
    return call._replace(template=tuple(template.items()), keywords=keywords, config=config)


def all_configurations(
    op: str, source: Source, call: Call, target: Target | None = None
) -> Iterator[Call]:
    """Yield each call that `expanded` may return: one for each configuration."""
    count = 1
    if source.declares:
        count = len(declared_in(op, source, call.function, target).configs) or 1
    for number in range(count):
        yield expanded(op, source, call, functools.partial(_numbered, number), target)


def _numbered(number: int, declared: TritonFunction, _: dict[str, Any]) -> TritonConfig:
    return declared.configs[number]


def variant_of(
    op: str, source: Source, call: Call, where: str = "", target: Target | None = None
) -> tuple[Variant, tuple[int, ...] | None]:
    """Return the variant that a call needs, and which arguments the kernel takes (None: all).

    where: the name of the op in errors, by default the op itself.
    """
    where = where or op
    if not source.in_python:
        template = tuple((name, _constant(where, name, value)) for name, value in call.template)
        return Variant(op, unit_of(source, call.function), call.function, template), None
    if isinstance(source, ImportedSource):
        return _flat_variant(op, source, call, where), None
    declared = declared_in(where, source, call.function, target)
    explicit = dict(call.template)
    values = *call.template, *(item for item in declared.defaults if item[0] not in explicit)
    template = tuple((name, _constexpr(where, name, value, source)) for name, value in values)
    names = [name for name in declared.parameters if name not in dict(template)]
    unset = [name for name in names if name in declared.constexprs]
    unknown = [name for name, _ in template if name not in declared.parameters]
    if unset or unknown or len(names) != len(call.args):
        what = f"{where}: `{call.function}({', '.join(declared.parameters)})`"
        if unset or unknown:
            at = f"in brackets: k.{call.function}"
            wrong = [f"needs the constexpr `{n}`, so pass it {at}[{{'{n}': …}}](…)" for n in unset]
            wrong += [f"has no parameter `{name}`" for name in unknown]
            raise LaunchError(f"{what} {', and '.join(wrong)}")
        raise LaunchError(
            f"{what} takes {len(names)} arguments ({', '.join(names)}), got {len(call.args)}"
        )
    annotated = dict(declared.annotated)
    signature = tuple(
        _triton_class(
            arg,
            annotated.get(name, ""),
            special=name not in declared.plain,
            aligned=name not in declared.plain | declared.unaligned,
        )
        for name, arg in zip(names, call.args)
    )
    options = tuple(
        (name, int(call.keywords[name])) for name in TRITON_OPTIONS if name in call.keywords
    )
    positions = tuple(i for i, kind in enumerate(signature) if kind not in ("1", "None"))
    unit = unit_of(source, call.function, template)
    variant = Variant(op, unit, call.function, template, signature, options, declared.facts)
    return variant, positions


def _flat_variant(op: str, source: ImportedSource, call: Call, where: str) -> Variant:
    if unknown := sorted(call.keywords.keys() - {*source.keywords}):
        raise LaunchError(
            f"{where}: `{call.function}` was launched with `{unknown[0]}`, and {source.takes}"
        )
    template = tuple((name, _number(where, name, value)) for name, value in call.template)
    what = f"`{call.function}` of {where}"
    classes = (class_of(what, arg, strided=source.strided) for arg in call.args)
    return Variant(op, source, call.function, template, tuple(classes))


def _number(op: str, name: str, value: Any) -> Constant:
    if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise LaunchError(
        f"{op}: the constant {name}={value!r} must be a bool, an int or a finite float: no "
        "other is compiled in; the dtype of a tensor is `x.dtype` in the kernel"
    )


def _constant(op: str, name: str, value: Any) -> Constant:
    if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    codes = codes_of_torch()
    if isinstance(value, torch.dtype) and value in codes:
        return codes[value]
    if isinstance(value, torch.dtype):
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in codes)
        raise LaunchError(
            f"{op}: template argument {name}: no kernel knows {value}; dtypes that kernels know "
            f"are {dtypes}: convert the tensor, or refuse its dtype"
        )
    raise LaunchError(
        f"{op}: template argument {name}={value!r} must be a dtype, bool, int or finite float"
        + ": write a dtype like torch.float32" * isinstance(value, str)
    )


def _constexpr(op: str, name: str, value: Any, source: Source) -> Constant:
    if type(value) is int or type(value) is bool or type(value) is Encoded:
        return value
    try:
        return source_room.constants.encoded(value, source)
    except source_room.constants.NotConstant as e:
        raise LaunchError(
            f"{op}: the constexpr {name}={value!r} cannot be compiled in ({e}): pass a number, a "
            "bool, a string, None, a dtype, a member of an enum, a `@triton.jit` function, or "
            "tuples of these"
        ) from None


def _triton_class(arg: Any, annotated: str, *, special: bool, aligned: bool) -> str:
    """Return Triton's class of an argument: type, and where specialised, `== 1` or `% 16 == 0`.

    annotated: the type that the parameter's annotation names; then no value is compiled in.
    """
    if annotated:
        kind = annotated
        aligned = aligned and annotated[0] in "*iu"
    elif arg is None:
        return "None"
    elif special and isinstance(arg, int) and not isinstance(arg, bool) and arg == 1:
        return "1"
    else:
        kind = _type_of(arg)
    return kind + (":16" if aligned and _is_aligned(arg) else "")


def _type_of(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        if code := codes_of_torch().get(arg.dtype):
            return f"*{code}"
        raise LaunchError(
            f"Triton has no {arg.dtype}: pass a view of the tensor as another type, e.g. "
            "`torch.view_as_real(x)`"
        )
    if isinstance(arg, bool):
        return "bool"
    if isinstance(arg, int):
        return "i32" if -(2**31) <= arg < 2**31 else "i64" if arg < 2**63 else "u64"
    if isinstance(arg, float):
        return "f32"
    raise LaunchError(
        f"a Triton kernel takes tensors, numbers and None, not {type(arg).__name__} `{arg}`"
    )


def _is_aligned(arg: Any) -> bool:
    """Whether Triton may take an argument to be divisible by 16."""
    if isinstance(arg, torch.Tensor):
        return address_of(arg) % 16 == 0
    return isinstance(arg, int) and not isinstance(arg, bool) and arg % 16 == 0


def check_contiguous(where: str, source: Source, call: Call) -> None:
    """Raise LaunchError for a tensor that is not contiguous, if the source takes no others.

    where: the op and its target. In a trace the answer is a guard.
    """
    for at, arg in enumerate(() if source.strided else call.args):
        if not isinstance(arg, torch.Tensor) or arg.is_contiguous():
            continue
        variant = Variant("", unit_of(source, call.function), call.function, call.template)
        _, texts = launch.parameters.written(variant, None, len(call.args))
        spelled = f" (`{texts[at]}`)" if texts else ""
        raise LaunchError(
            f"`{call.function}` of {where}: argument {at + 1}{spelled} is not contiguous, with "
            f"shape {[*arg.shape]} and strides {[*arg.stride()]}, and the kernel would take other "
            "elements: write `x = x.contiguous()` in the launch function (for a tensor that the "
            "kernel changes: `torch._check(x.is_contiguous())`), or "
            f"`{type(source).__name__}(..., strided=True)` if the kernels take any strides"
        )
