"""The signature of an op: the order of its arguments, their defaults, and how C passes them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from jitkern.errors import DeclarationError, LaunchError
from jitkern.named_tuple import NamedTuple
from jitkern.source.dtypes import codes_of_torch

_LONG = 500  # letters of an example, in place of which its digest is kept

MAX_ARGUMENTS, MAX_RETURNS, _MAX_NAME = 32, 16, 100  # the same as in runtime.c
_KINDS = {
    "Tensor": "T", "int": "i", "SymInt": "i", "float": "f", "bool": "b", "str": "s",
    "Optional[Tensor]": "t", "Optional[int]": "I", "Optional[SymInt]": "I",
    "Optional[float]": "F", "Optional[bool]": "B", "Optional[str]": "S",
    "List[Tensor]": "L", "List[int]": "n", "List[float]": "d", "List[bool]": "z",
    "Optional[List[int]]": "N", "Optional[List[float]]": "D", "Optional[List[bool]]": "Z",
}  # fmt: skip
_OWN: dict[str, tuple[type, ...]] = {  # the types of which Torch hands arguments on as they are
    "Tensor": (torch.Tensor, torch.nn.Parameter), "int": (int,), "SymInt": (int,),
    "float": (float,), "bool": (bool,), "str": (str,),
}  # fmt: skip
_OWN |= {f"Optional[{name}]": (*types, type(None)) for name, types in _OWN.items()}
_CHANGED = {"T": "W", "t": "w", "L": "V"}
GENERATED = "_[0-9a-f]{8}$"  # the end of the name of an op whose schema jitkern wrote
_CPU, _META = torch.device("cpu"), torch.device("meta")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # by position, and by name


class Parameter(NamedTuple):
    """An argument of an op as C takes it: its name, and its kind as a letter (see `runtime.c`)."""

    name: str
    kind: str


class Signature:
    """The schema of an op, read once. It does not change.

    name, schema: the op's qualified name, and the text with this name.
    arguments, returns: as Torch describes them. names, optional: of the arguments, and of those
        with a default.
    parameters: the arguments as C takes them; None if C cannot pass them or the results.
    changed: position and name of each argument that the op changes.
    outputs: the names of the results: `out`, or `out0`, …, where the schema names none.
    results: a letter for each result: `T` for a tensor, `t` for one that may be None, `?` for all
        others, which C cannot return.
    """

    def __init__(self, schema: str) -> None:
        """Read a schema; its default namespace is `jitkern`. Raises DeclarationError."""
        self.schema = schema if "::" in schema.partition("(")[0] else f"jitkern::{schema}"
        parsed = _parse(self.schema)
        self.name: str = parsed.name
        self.arguments: list[Any] = parsed.arguments
        self.returns: list[Any] = parsed.returns
        self.names = [argument.name for argument in self.arguments]
        self.optional = {a.name for a in self.arguments if a.has_default_value()}
        self._positional = sum(not argument.kwarg_only for argument in self.arguments)
        self.changed = [
            (position, argument.name)
            for position, argument in enumerate(self.arguments)
            if argument.alias_info and argument.alias_info.is_write
        ]
        self._required = [
            (position, argument.name)
            for position, argument in enumerate(self.arguments)
            if str(argument.type) == "Tensor"
        ]
        plain_name = "out" if len(parsed.returns) == 1 else "out{}"
        self.outputs = [r.name or plain_name.format(i) for i, r in enumerate(parsed.returns)]
        tensors = {"Tensor": "T", "Optional[Tensor]": "t"}
        self.results = "".join(tensors.get(str(value.type), "?") for value in parsed.returns)
        self.parameters = self._parameters()
        self._fitting: set[tuple[type, ...]] = set()  # found by `takes`

    def _parameters(self) -> list[Parameter] | None:
        kinds = [_KINDS.get(str(argument.type), "") for argument in self.arguments]
        if (
            not all(kinds)
            or "?" in self.results
            or len(kinds) > MAX_ARGUMENTS
            or len(self.results) > MAX_RETURNS
            or len(self.name) > _MAX_NAME
        ):
            return None
        for position, _ in self.changed:
            kinds[position] = _CHANGED[kinds[position]]
        return [Parameter(a.name, kind) for a, kind in zip(self.arguments, kinds)]

    def takes(self, args: tuple[Any, ...]) -> bool:
        """Return whether Torch would hand on arguments by position without converting any.

        For all others its own rules count: it converts some, and says what is wrong with the rest.
        """
        types = (*map(type, args),)
        if types in self._fitting:
            return True
        own = [_OWN.get(str(a.type), ()) for a in self.arguments[: self._positional]]
        fits = (
            len(types) <= len(own)
            and all(type_ in expected for type_, expected in zip(types, own))
            and not self.misfit(args)
        )
        if fits:
            self._fitting.add(types)
        return fits

    def complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments completed by the schema's defaults, which Torch leaves out.

        All that may be passed by position are: functions of ops may have other names for them.
        Raises LaunchError if None is passed for a tensor, which Torch allows.
        """
        if len(args) == len(self.arguments):
            for value in args:  # `None in args` would compare tensors
                if value is None:
                    break
            else:
                return args, kwargs
        for position, name in self._required:
            if (args[position] if position < len(args) else kwargs.get(name, name)) is None:
                written = not re.search(GENERATED, self.name)
                raise LaunchError(
                    f"{self.name} takes a tensor for its argument `{name}`, and got None; pass a "
                    "tensor" + f", or write `Tensor? {name}` in the schema" * written
                )
        if len(args) == self._positional and len(args) + len(kwargs) == len(self.arguments):
            return args, kwargs
        rest = {a.name: a.default_value for a in self.arguments[len(args) :]} | kwargs
        positional = [rest.pop(name) for name in self.names[len(args) : self._positional]]
        return (*args, *positional), rest

    def device_of(
        self, args: Sequence[Any], kwargs: dict[str, Any], *, meta_alone: bool = False
    ) -> torch.device:
        """Return the one device of the tensors; the CPU if there is none.

        As in ATen, a tensor without dimensions on the CPU counts as a number beside others, unless
        the op changes it. meta_alone: whether only meta tensors beside others are refused.

        Raises LaunchError for tensors on different devices.
        """
        devices: dict[torch.device, str] = {}  # each with the first argument on it
        changed = {name for _, name in self.changed}
        for name, value in (*zip(self.names, args), *kwargs.items()):
            for tensor in tensors_in([value]):
                if tensor.dim() or tensor.device != _CPU or name in changed:
                    devices.setdefault(tensor.device, name)
        if len(devices) > 1 and (not meta_alone or _META in devices):
            listed = " and ".join(f"`{name}` on {device}" for device, name in devices.items())
            raise LaunchError(
                f"{self.name}: the tensors of a call must be on one device, and this call has "
                f"{listed}; move them to one device"
                + (" (a meta tensor has no values: load it)" if _META in devices else "")
            )
        return next(iter(devices), _CPU)

    def in_order(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return complete arguments as one tuple, in the schema's order."""
        return (*args, *(kwargs[name] for name in self.names[len(args) :]))

    def split(self, args: Sequence[Any]) -> Arguments:
        """Return arguments in the schema's order, by name where they must be passed by name."""
        count = self._positional
        return tuple(args[:count]), dict(zip(self.names[count:], args[count:]))

    def misfit(self, args: Sequence[Any]) -> str:
        """Return why `args`, in the schema's order, do not fit it; "" if they may.

        Their number counts, and that no text is where none is expected: Torch converts all else.
        """
        if len(args) > len(self.arguments):
            return f"got {len(args)} arguments, and {self.schema} takes {len(self.arguments)}"
        missing = [a.name for a in self.arguments[len(args) :] if not a.has_default_value()]
        if missing:
            return f"got no {' and no '.join(missing)} for {self.schema}"
        for value, argument in zip(args, self.arguments):
            if isinstance(value, str) and str not in _OWN.get(str(argument.type), (str,)):
                return f"got `{value}` for `{argument.type} {argument.name}` of {self.schema}"
        return ""


def _parse(schema: str) -> Any:
    try:
        parsed = torch._C.parse_schema(schema, False)  # type: ignore[call-arg]  # no type variables
    except RuntimeError as e:
        raise DeclarationError(f"`{schema}` is not a Torch schema: {str(e).strip()}") from e
    if parsed.overload_name:
        raise DeclarationError(f"`{schema}`: an op has no overloads; give each a name of its own")
    if any(value.alias_info for value in parsed.returns):
        raise DeclarationError(
            f"`{schema}`: torch.compile refuses an op that returns an argument; "
            "return only new tensors"
        )
    if any(str(value.type) in ("number", "Scalar") for value in parsed.arguments):
        raise DeclarationError(f"`{schema}`: Scalar arguments are not supported; use float or int")
    return parsed


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among these arguments and in the lists among them."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, torch.Tensor)]
    return tensors


def class_of(args: Sequence[Any]) -> tuple[str, ...]:
    """Return the class of a call: what a trace assumes about the arguments, as texts.

    Calls of a class differ in sizes, numbers, and what `fixed_of` tells. A list counts by the types
    of its items: the guards of a program tell all else.
    """
    return tuple(map(_class_of, args))


def fixed_of(args: Sequence[Any]) -> str:
    """Return as a text what each program takes for constant beyond the class of its calls.

    These are strings, and the lengths and bools of lists, except for lists of tensors.
    """
    text = repr([fixed for arg in args for fixed in _fixed_of(arg)])
    return text if len(text) < _LONG else hashlib.sha256(text.encode()).hexdigest()


def _fixed_of(arg: Any) -> list[Any]:
    if isinstance(arg, str):
        return [arg]
    if hasattr(arg, "shape") or not isinstance(arg, (list, tuple)):
        return []
    if any(hasattr(item, "dtype") for item in arg):
        return []
    return [len(arg), *(item for item in arg if isinstance(item, bool))]


def _class_of(arg: Any) -> str:
    if hasattr(arg, "shape"):  # a tensor, or what is known of one
        return f"{_code(arg)}[{len(arg.shape)}]"
    if isinstance(arg, (list, tuple)):
        if arg and all(hasattr(item, "dtype") for item in arg):
            return f"[{' '.join(sorted({_code(item) for item in arg}))}]"
        return f"[{' '.join(sorted({type(item).__name__ for item in arg}))}]"
    if type(arg) is not bool and isinstance(arg, (int, float, str)):
        return type(arg).__name__
    return repr(arg)


def _code(tensor: Any) -> str:
    return str(codes_of_torch().get(tensor.dtype, tensor.dtype))


def example_of(args: Sequence[Any]) -> str:
    """Return the numbers of a call as a text: tensor sizes, integers and floats."""
    text = ",".join(map(_example_of, args))
    return text if len(text) < _LONG else hashlib.sha256(text.encode()).hexdigest()


def _example_of(arg: Any) -> str:
    if isinstance(arg, list):
        return f"[{' '.join(map(_example_of, arg))}]"
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return repr(arg)
    return "x".join(map(str, arg.shape))
