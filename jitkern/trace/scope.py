"""The scope of a launch function: all that it depends on besides its arguments.

A `Scope` is a closed copy of all that a function and the functions it calls can read by a name:
plain values, functions, and known parts of Torch, `math`, `operator` and the builtins. Each name is
kept with the object bound to it, to check whether the function would read the same now (`holds`,
and in C the guards that `runtime/guards.py` makes of a scope). A value that can change without
being rebound (a dict, a list, an object, a class, the environment, the time) is trapped: a trace
that touches such a value ends, and the function runs in Python at each call.

`identity` is equal in two processes with equal code and values: it is made of the code objects and
values of this process, not of the files that they came from. Known functions are in it by name; of
functions and trapped values it tells which names mean one object.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import operator
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from jitkern.errors import shown
from jitkern.named_tuple import NamedTuple
from jitkern.source.global_names import Read, Refusal, code_names
from jitkern.trace.values import (
    ABSENT,
    homes_of,
    is_inert,
    is_ordered,
    is_plain,
    known_name,
    spelled,
    spelled_code,
)

Function = Callable[..., Any]
_OF_A_DEVICE = ("get_device_capability", "get_device_properties")  # of torch.cuda


class Binding(NamedTuple):
    """A name in a namespace, and the id of its value, which is `ABSENT` for none."""

    namespace: dict[str, Any]
    name: str
    value: int


class Member(NamedTuple):
    """The content of a cell, or the class of a module; value: its id."""

    owner: Any
    name: str  # `cell_contents` or `__class__`
    value: int


class Known(NamedTuple):
    """A value that the closed copy shares with the original, unless `seen` replaces the value."""

    value: Any


class Namespace(NamedTuple):
    """A module in the closed copy, with only the members that are read."""

    members: dict[str, Any]


class Trapped(NamedTuple):
    """A value that can change unseen, or that no trace follows; `what`: the reason, for users.

    number: equal for one object. value: the object, if it is inert, else None: what no trace uses
    is not kept alive.
    """

    number: int
    what: str
    value: Any


class Called(NamedTuple):
    """A function in the closed copy, by its place in `Scope.functions`."""

    number: int


class FollowedFunction:
    """A function to copy, with the values of its names, enclosing variables and defaults."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        self.names: dict[str, Any] = {}
        self.cells: list[Any] = []
        self.defaults: list[Any] = []
        self.keywords: dict[str, Any] = {}


class Scope:
    """The scope of these functions.

    refusal: why no copy can follow them, or "". handler: where one of them may catch an error, and
    "" for nowhere: no trace can follow that one.
    """

    def __init__(self, functions: Iterable[Function]) -> None:
        self.bindings: dict[tuple[int, str], Binding] = {}
        self.members: list[Member] = []  # of cells and modules
        self.functions: list[tuple[types.FunctionType, Any, Any, Any]] = []
        self._checks: list[tuple[Callable[..., Any], str, Any]] | None = None
        self._gone: list[Binding] = []  # those whose values are not kept alive
        self.refusal = self.handler = ""
        # False if refused, if a value holds for the devices of this machine only, or the order of
        # a set for this process only: the hash of a text is another one in the next process.
        self.portable = True
        self.attributes: set[str] = set()
        self.compares = ""  # where a function may ask if two arguments are one object
        self.tensors = False  # whether a function reads a tensor, which may be an argument too
        self.nodes: list[FollowedFunction] = []
        self._numbers: dict[int, int] = {}  # of functions, by their ids
        self._spelled: list[str] = []
        self.known: dict[str, Any] = {}  # the values that always answer alike, by their names
        self._uses: set[int] = set()
        self._modules: set[int] = set()  # whose class is among the members
        self.traps = False  # whether there is a value that no trace follows
        self.is_inert = True  # whether these values are all inert
        self._numbered: dict[int, int] = {}  # trapped values, by their ids
        self._alive: dict[int, Any] = {}  # the values of names, whose ids are compared
        self.entries = [self._entry(function) for function in functions]
        self._bind_attributes_of_tensors()

    @functools.cached_property
    def identity(self) -> str:
        """A digest, equal for equal code and values in any process of this version of Python."""
        text = repr((sys.version_info[:2], self._spelled))
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def holds(self) -> bool:
        """Whether the functions would read the same now."""
        alive = self._alive
        if self._checks is None:
            bindings = self.bindings.values()
            self._gone = [bound for bound in bindings if bound.value not in alive]
            kept = [bound for bound in bindings if bound.value in alive]
            self._checks = [(space.get, name, alive[value]) for space, name, value in kept]
        for look_up, name, value in self._checks:
            if look_up(name, ABSENT) is not value:
                return False
        for namespace, name, number in self._gone:
            if id(namespace.get(name, ABSENT)) != number:
                return False
        for function, code, defaults, keywords in self.functions:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keywords
            ):
                return False
        return all(id(read_member(owner, name)) == value for owner, name, value in self.members)

    def uses(self, value: object) -> bool:
        """Whether the functions read this object by a name."""
        return id(value) in self._uses

    def _entry(self, function: Function) -> int:
        entry: Any = _no_function
        if not isinstance(function, types.FunctionType):
            refusal = f"it is a {type(function).__name__}, not a Python function"
        elif not (refusal := _refusal(function, code_names(function.__code__).refusals)):
            entry = function
            handlers = code_names(function.__code__).handlers
            self.handler = self.handler or _refusal(function, handlers)
        self.refusal = self.refusal or refusal
        self.portable &= not refusal
        return self._follow(entry)

    def _follow(self, function: types.FunctionType) -> int:
        """Return the number of a function; follows its reads when it is first met."""
        if id(function) in self._numbers:
            return self._numbers[id(function)]
        number = self._numbers[id(function)] = len(self.nodes)
        node = FollowedFunction(function)
        self.nodes.append(node)
        code = function.__code__
        self.functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        self._spelled.append(f"function {spelled_code(code)}")
        reads = code_names(code)
        self.attributes |= reads.attributes
        self.compares = self.compares or _refusal(function, reads.compares)
        self.portable &= not reads.sets
        defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        self._spelled.append(f"defaults {len(defaults)} {[*keywords]}")
        node.defaults = [self._value(value, "a default") for value in defaults]
        for name, value in keywords.items():
            self._bind(keywords, name, value)
            node.keywords[name] = self._value(value, f"the default of {name}")
        self._follow_cells(node, reads.reads)
        for read in reads.reads:
            if not read.cell:
                self._merge(node.names, read.name, self._global(function, read))
        return number

    def _follow_cells(self, node: FollowedFunction, reads: Iterable[Read]) -> None:
        function = node.function
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            value = read_member(cell, "cell_contents")
            self._member_of(cell, "cell_contents", value)
            own = [read for read in reads if read.cell and read.name == name]
            values: dict[str, Any] = {}
            for read in own or [Read(name, (), 0, cell=True)]:
                taken = self._taken(value, read.name, read.attributes, tested=read.tested)
                self._merge(values, name, taken)
            node.cells.append(values[name])

    def _merge(self, names: dict[str, Any], name: str, part: Any) -> None:
        """Add the part that a name refers to; parts of one module are merged."""
        before = names.get(name)
        if isinstance(before, Namespace) and isinstance(part, Namespace):
            for member, value in part.members.items():
                self._merge(before.members, member, value)
        elif not isinstance(before, Trapped):
            names[name] = part

    def _global(self, function: types.FunctionType, read: Read) -> Any:
        own: dict[str, Any] = function.__globals__
        value = own.get(read.name, ABSENT)
        self._bind(own, read.name, value)
        if value is ABSENT:
            namespace: dict[str, Any] = getattr(function, "__builtins__")  # noqa: B009  mypy forgets it
            value = namespace.get(read.name, ABSENT)
            self._bind(namespace, read.name, value)
        return self._taken(value, read.name, read.attributes, tested=read.tested)

    def _taken(
        self, value: Any, name: str, attributes: Sequence[str], *, tested: bool = False
    ) -> Any:
        """Return the part for a name and its attributes; a module's attributes are bound, too.

        tested: whether the function only asks what is in the value.
        """
        self._spelled.append(f"name {name}")
        if type(value) is types.ModuleType and attributes:
            return self._member(value, name, attributes, tested=tested)
        if type(value) is types.FunctionType and attributes:
            what = f"`{attributes[0]}` of the function `{name}` cannot be traced"
            return self._not_followed(value, what)
        return self._value(value, f"`{name}`", tested=tested)

    def _member(
        self, module: types.ModuleType, name: str, attributes: Sequence[str], *, tested: bool
    ) -> Namespace:
        """Return the part of a module that holds the attributes; the first one is bound."""
        first, inside = attributes[0], vars(module)
        if id(module) not in self._modules:
            self._modules.add(id(module))
            self._member_of(module, "__class__", types.ModuleType)
        member = inside.get(first, ABSENT)
        self._bind(inside, first, member)
        if module is torch.cuda and first in _OF_A_DEVICE:
            self.portable = False
            return Namespace({first: Known(member)})
        part = Namespace(
            {first: self._taken(member, f"{name}.{first}", attributes[1:], tested=tested)}
        )
        if member is ABSENT:  # the module may make it, by a function `__getattr__`
            what = f"`{first}`, which the module `{name}` does not have, cannot be traced"
            part.members["__getattr__"] = self._not_followed(member, what)
        return part

    def _value(self, value: Any, name: str, *, tested: bool = False) -> Any:
        if is_plain(value):
            self.portable &= tested or is_ordered(value)
            self._spelled.append(spelled(value))
            return Known(value)
        if known := known_name(value):
            self._spelled.append(f"known {known}")
            self.known[known] = value
            self._uses.add(id(value))
            if value in (operator.is_, operator.is_not):
                self.compares = self.compares or f"{name} cannot be traced beside a tensor"
            self.portable &= value not in (set, frozenset)
            return Known(value)
        if value is ABSENT:
            self._spelled.append("absent")
            return Known(ABSENT)
        if type(value) is types.FunctionType and not all(
            home.startswith("torch.") for home in homes_of(value)
        ):
            reads = code_names(value.__code__)
            refusal = _refusal(value, reads.refusals + reads.handlers)
            if refusal:
                return self._not_followed(value, refusal)
            called = Called(self._follow(value))
            self._spelled.append(f"function {called.number}")
            return called
        self._uses.add(id(value))
        self.tensors |= issubclass(type(value), torch.Tensor)
        what = f"{name} cannot be traced"
        if not callable(value) and not isinstance(value, types.ModuleType):
            kind = type(value).__name__
            what = f"{name}, of type {kind}, cannot be traced: it can change unseen"
        return self._not_followed(value, what)

    def _not_followed(self, value: Any, what: str) -> Trapped:
        """Return the part for a value that ends a trace that uses it. `what`: the reason.

        A trace that does not use the value depends on no more than which values are one object.
        """
        number, inert = self._number(value), is_inert(value)
        self.traps = True
        self.is_inert &= inert
        self._spelled.append(f"not followed {number}")
        if not inert:
            self._alive.pop(id(value), None)
        return Trapped(number, what, value if inert else None)

    def _number(self, value: Any) -> int:
        """Return the number of an object that this scope keeps, in the order that they are met."""
        return self._numbered.setdefault(id(value), len(self._numbered))

    def _bind_attributes_of_tensors(self) -> None:
        overrides = overrides_of_tensors()
        for name in ("__getitem__", *sorted(self.attributes)):
            if hasattr(torch._C.TensorBase, name):
                self._bind(overrides, name, overrides.get(name, ABSENT))
                self._spelled.append(f"attribute {name} {name in overrides}")

    def _bind(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        self._alive[id(value)] = value
        self.bindings[id(namespace), name] = Binding(namespace, name, id(value))

    def _member_of(self, owner: Any, name: str, value: Any) -> None:
        self._alive[id(value)] = value
        self.members.append(Member(owner, name, id(value)))


def _no_function() -> None:
    """Stand for an entry that is not a function, or that cannot be followed."""


@functools.lru_cache(maxsize=1024)
def _scope(functions: tuple[Function, ...]) -> list[Scope]:
    return [Scope(functions)]


def scope_of(functions: tuple[Function, ...]) -> Scope:
    """Return the current scope of these functions: the known one if it still holds."""
    memo = _scope(functions)
    if not memo[0].holds():
        memo[0] = Scope(functions)
    return memo[0]


def _refusal(function: types.FunctionType, refusals: Sequence[Refusal]) -> str:
    """Return the first of the constructs that cannot be followed, with its place, or ""."""
    return (
        f"{shown(function.__code__.co_filename)}:{refusals[0].line}: {refusals[0].what}"
        if refusals
        else ""
    )


def read_member(owner: Any, name: str) -> Any:
    """Return the content of a cell, `ABSENT` if it has none, or the value of another member."""
    try:
        return getattr(owner, name)
    except ValueError:  # a cell that is not bound yet
        return ABSENT


@functools.cache
def overrides_of_tensors() -> dict[str, Any]:
    """Return the attributes that Python gives to tensors, before those of C count."""
    (own,) = gc.get_referents(vars(torch._tensor.Tensor))
    return own  # type: ignore[no-any-return]
