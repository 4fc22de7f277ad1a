"""Symbols: the numbers of a traced launch function, which represent those of later calls.

A `Symbol` is a register of the program that the trace makes, and its present value, the hint.
Arithmetic makes another Symbol; a comparison returns a real bool at once and records this answer as
a guard, so that `if`, `and`, `min`, `while` and `torch._check` just work, and the program serves
exactly the calls for which the same answers hold. The hint is never read without a guard.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from jitkern.named_tuple import NamedTuple

_INT64 = range(-(2**63), 2**63)
MOST = 1000  # steps of a program beside its reads; shipped ops need up to 172
READS = frozenset((  # instructions whose value may be left out if nothing uses it
    "SIZE", "STRIDE", "DATA", "NUMEL", "NUMBER", "OPTIONAL", "COUNT", "ITEM", "FIELD", "MEMORY",
    "MAX1", "REAL",
))  # fmt: skip


class Unsupported(Exception):
    """A launch function does something that C cannot follow; its op stays on the Python launcher.

    What a launch function calls may catch this error: `running.problem` is the first of a trace.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        running.problem = running.problem or self


class _Running(threading.local):
    """The trace of this thread."""

    facts: Facts | None = None
    problem: Unsupported | None = None


running = _Running()


class Instruction(NamedTuple):
    """A step of a program (see `trace.program`), and the line of the launch function it is for.

    operands: registers are numbers from 0 on, constants are numbers below 0 (see
    `Facts.constant`); the register that takes the value comes first.
    """

    name: str
    operands: tuple[int, ...]
    line: int


class Specialized(NamedTuple):
    """A value that a variant holds for constant, and a description of its origin."""

    what: str
    value: Any


class Facts:
    """Values computed from the arguments and guards on them, in order; nothing with an effect.

    line: returns the line of the launch function that is running.
    """

    def __init__(self, line: Callable[[], int]) -> None:
        self.instructions: list[Instruction] = []
        self.constants: dict[int, int] = {}  # their places, by their 64 bits
        self.frozen: list[Specialized] = []
        self.line = line
        self.registers = 0
        self._count = 0
        self._seen: set[tuple[Any, ...]] = set()
        self._values: dict[tuple[Any, ...], int] = {}

    def instruction(self, name: str, *operands: int) -> Instruction:
        """Return a step. Raises Unsupported for one more than a program may have."""
        self._count += name not in READS
        if self._count > MOST:
            raise Unsupported(
                f"more than {MOST} steps cannot be traced, since a program has each turn of a "
                "loop: loop inside the kernel, or launch it once for a list, by k.tables"
            )
        return Instruction(name, operands, self.line())

    def guard(self, name: str, *operands: int) -> None:
        """Serve only calls that pass this step."""
        self._check()
        step = (name, *operands)
        if step not in self._seen:
            self._seen.add(step)
            self.instructions.append(self.instruction(name, *operands))

    def value(self, name: str, *operands: int) -> int:
        """Return the register of the value of this step; equal steps share one."""
        self._check()
        step = (name, *operands)
        if step not in self._values:
            at = self._values[step] = self.register()
            self.instructions.append(self.instruction(name, at, *operands))
        return self._values[step]

    def register(self) -> int:
        """Return a new register."""
        self.registers += 1
        return self.registers - 1

    def constant(self, value: float) -> int:
        """Return a number as an operand."""
        if isinstance(value, int) and value not in _INT64:
            raise Unsupported("an integer beyond the range of int64 cannot be traced")
        form = "<d" if isinstance(value, float) else "<q"
        bits = int.from_bytes(struct.pack(form, value), "little")
        return ~self.constants.setdefault(bits, len(self.constants))

    def _check(self) -> None:
        if self is not running.facts:
            raise Unsupported("a number kept from an earlier call cannot be traced")


class Symbol:
    """A number: its register, its present value (`hint`), its name for users."""

    __slots__ = ("facts", "hint", "natural", "register", "what")

    def __init__(
        self, facts: Facts, register: int, hint: float, what: str = "", *, natural: bool = False
    ) -> None:
        self.natural = natural  # never below 0
        self.facts = facts
        self.register = register
        self.hint = hint
        self.what = what or "a value computed from the arguments"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the hint, so that `isinstance(n, int)` answers as without a trace."""
        return type(self.hint)

    def freeze(self) -> float:
        """Return the hint, guarded: another value will need another variant."""
        if self.hint != self.hint:
            raise Unsupported("a NaN that must be constant cannot be traced")
        self.facts.guard("EQUAL", self.register, self.facts.constant(self.hint), 1)
        self.facts.frozen.append(Specialized(self.what, self.hint))
        return self.hint

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"{type(self.hint).__name__}.{name} cannot be traced")

    def __bool__(self) -> bool:
        return bool(self.__ne__(0))

    def __int__(self) -> int:
        return int(self.as_integer().freeze())

    def __float__(self) -> float:
        return float(self.freeze())

    def __index__(self) -> int:
        raise Unsupported(
            f"{self.what} in range() or as an index cannot be traced, since each value would need "
            "a program: loop inside the kernel, or pass the number as a template argument"
        )

    def __hash__(self) -> int:
        return hash(self.freeze())

    def __repr__(self) -> str:
        return repr(self.freeze())

    def __format__(self, spec: str) -> str:
        return format(self.freeze(), spec)

    def __neg__(self) -> Any:
        zero: Any = 0 if isinstance(self.hint, int) else -0.0
        return zero - self

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Any:
        if _is_float(self):
            return self.made(abs(self.hint), "ABS", self.register)
        negative: bool = _less(self, 0)
        return -self if negative else self

    def __invert__(self) -> Any:
        last: Any = -1
        return NotImplemented if _is_float(self) else last - self

    def __pow__(self, exponent: Any, modulus: None = None) -> Any:
        if modulus is None and (_is_float(self) or _is_float(exponent)):
            return _power(self, exponent)
        power = concrete(exponent)
        if modulus is not None or type(power) is not int or not 1 <= power <= 4:
            return pow(self.freeze(), power, concrete(modulus))
        result: Any = self
        for _ in range(power - 1):
            result = result * self
        return result

    def __rpow__(self, base: Any) -> Any:
        return _power(base, self) if type(base) is float else base ** self.freeze()

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __floor__(self) -> Any:
        return self._rounded("FLOOR", math.floor)

    def __ceil__(self) -> Any:
        return self._rounded("CEIL", math.ceil)

    def __trunc__(self) -> Any:
        return self._rounded("TRUNCATE", math.trunc)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.freeze(), digits)

    def as_integer(self) -> Any:
        """Return the number as int() would convert it."""
        return self.__trunc__()

    def as_real(self) -> Any:
        """Return the number as float() would convert it."""
        if _is_float(self):
            return self
        return self.made(float(self.hint), "REAL", self.register)

    def square_root(self) -> Any:
        """Return the square root, as math.sqrt() does. Raises Unsupported for a number below 0."""
        real = self.as_real()
        if _less(real, 0.0):
            raise Unsupported("the square root of a negative number cannot be traced")
        return self.made(math.sqrt(real.hint), "SQUARE_ROOT", real.register)

    def is_integer(self) -> bool:
        """Whether the value is an integer, as float.is_integer() tells."""
        if not _is_float(self) or not _less(abs(self), 2.0**53):
            return self.freeze().is_integer()
        return bool(self.as_integer() == self)

    def bit_length(self) -> Symbol:
        """Return int.bit_length() of the number. Raises Unsupported for a number below 0."""
        if _less(self, 0):
            raise Unsupported("bit_length() of a negative number cannot be traced")
        return self.made(int(self.hint).bit_length(), "BIT_LENGTH", self.register)

    def _rounded(self, function: str, python: Callable[[float], int]) -> Any:
        if isinstance(self.hint, int):
            return self
        hint = _computed(python, self.hint)
        return self.made(hint, function, self.register)

    def made(self, hint: float, name: str, *operands: int) -> Symbol:
        """Return the Symbol of a step that computes with this one."""
        if isinstance(hint, int) and hint not in _INT64:
            raise Unsupported("an integer beyond the range of int64 cannot be traced")
        return Symbol(self.facts, self.facts.value(name, *operands), hint, self.what)


def is_symbol(value: object) -> bool:
    """Whether `value` is a Symbol, whose `__class__` is that of its hint."""
    return type(value) is Symbol


def concrete(value: Any) -> Any:
    """Return the value itself; of a Symbol, the guarded hint."""
    return value.freeze() if is_symbol(value) else value


def operand_of(value: Any, facts: Facts) -> int:
    """Return a number or Symbol as an operand."""
    if not is_symbol(value):
        return facts.constant(value)
    value.facts._check()
    return int(value.register)


def _hint_of(value: Any) -> Any:
    return value.hint if is_symbol(value) else value


def _computed(compute: Callable[..., Any], *hints: Any) -> Any:
    """Return the value for these hints. Raises Unsupported: other values may not fail."""
    try:
        return compute(*hints)
    except (ArithmeticError, ValueError) as e:
        raise Unsupported(f"arithmetic that raises {type(e).__name__} cannot be traced: {e}") from e


def _power(base: Any, exponent: Any) -> Any:
    """Return a power of floats, by the pow() that Python calls; odd in Python's special cases."""
    hints = _hint_of(base), _hint_of(exponent)
    if not all(isinstance(hint, (int, float)) for hint in hints):
        return NotImplemented
    symbol: Symbol = base if is_symbol(base) else exponent
    value = _computed(operator.pow, *hints)
    operands = [_as_double(x, symbol.facts, exact=True) for x in (base, exponent)]
    if isinstance(value, complex):
        raise Unsupported("a complex power of a negative number cannot be traced")
    return symbol.made(value, "POWER", *operands)


def _less(a: Any, b: Any) -> bool:
    return bool(a < b)


def _is_float(value: Any) -> bool:
    return isinstance(_hint_of(value), float)


def _arithmetic(name: str, integer: str, floating: str) -> None:
    """Define one operator: its instruction for integers, and for floats if there is one."""
    compute = getattr(operator, name)

    def forward(a: Any, b: Any) -> Any:
        if not isinstance(_hint_of(b), (int, float)):
            return NotImplemented
        symbol: Symbol = a if is_symbol(a) else b
        if name == "mul" and any(type(x) is int and x == 1 for x in (a, b)):
            return symbol
        real = _is_float(a) or _is_float(b) or name == "truediv"
        instruction = floating if real else integer
        if not instruction:
            raise Unsupported(f"`{name}` of floats cannot be traced")
        hint = _computed(compute, _hint_of(a), _hint_of(b))
        whole = name == "truediv" and not (_is_float(a) and _is_float(b))
        facts = symbol.facts
        return symbol.made(
            hint,
            instruction,
            *(_as_double(x, facts, exact=whole) if real else operand_of(x, facts) for x in (a, b)),
        )

    special = {"and_": "and", "or_": "or"}.get(name, name)
    setattr(Symbol, f"__{special}__", forward)
    setattr(
        Symbol,
        f"__r{special}__",
        lambda a, b: forward(b, a) if isinstance(_hint_of(b), (int, float)) else NotImplemented,
    )


def _as_double(value: Any, facts: Facts, *, exact: bool) -> int:
    if _is_float(value):
        return operand_of(value, facts)
    if is_symbol(value):
        return facts.value("EXACT" if exact else "REAL", operand_of(value, facts))
    if exact and float(value) != value:
        raise Unsupported(f"{value} beside a float cannot be traced: no double is exactly {value}")
    return facts.constant(float(value))


def _comparison(name: str, integer: str, floating: str, *, swapped: bool, negated: bool) -> None:
    """Define one comparison, which returns a bool and guards the answer.

    swapped, negated: how it follows from its instruction for integers: `a > b` is `b < a`. Those
    for floats are swapped alike; none is negated, since `!(a < b)` is not `a >= b` beside a NaN.
    """
    compute = getattr(operator, name)

    def compare(self: Symbol, other: Any) -> Any:
        hint, facts = _hint_of(other), self.facts
        if isinstance(hint, complex):  # 1 == 1 + 0j
            raise Unsupported("a comparison with a complex number cannot be traced")
        if not isinstance(hint, (int, float)):
            return NotImplemented
        answer = compute(self.hint, hint)
        if isinstance(self.hint, int) and isinstance(hint, int):
            low = 0 if self.natural else _INT64[0]
            known = hint not in _INT64 or (hint <= low and name in ("ge", "lt"))
            if not is_symbol(other) and known:
                return answer  # no value compares otherwise
            pair = operand_of(self, facts), operand_of(other, facts)
            if swapped != (negated and integer == "LESS"):
                pair = pair[::-1]
            facts.guard(integer, *pair, int(answer != negated))
            return answer
        left, right = (_as_double(x, facts, exact=True) for x in (self, other))
        pair = (right, left) if swapped else (left, right)
        facts.guard(floating, *pair, int(answer != (name == "ne")))
        return answer

    setattr(Symbol, f"__{name}__", compare)


for _row in (
    ("add", "ADD", "REAL_ADD"), ("sub", "SUBTRACT", "REAL_SUBTRACT"),
    ("mul", "MULTIPLY", "REAL_MULTIPLY"), ("floordiv", "DIVIDE", ""), ("mod", "MODULO", ""),
    ("truediv", "", "QUOTIENT"), ("and_", "AND", ""), ("or_", "OR", ""), ("xor", "XOR", ""),
    ("lshift", "SHIFT_LEFT", ""), ("rshift", "SHIFT_RIGHT", ""),
):  # fmt: skip
    _arithmetic(*_row)
_comparison("lt", "LESS", "REAL_LESS", swapped=False, negated=False)
_comparison("le", "LESS", "REAL_AT_MOST", swapped=False, negated=True)
_comparison("gt", "LESS", "REAL_LESS", swapped=True, negated=False)
_comparison("ge", "LESS", "REAL_AT_MOST", swapped=True, negated=True)
_comparison("eq", "EQUAL", "REAL_EQUAL", swapped=False, negated=False)
_comparison("ne", "EQUAL", "REAL_EQUAL", swapped=False, negated=True)


def line_in(code: Any) -> Callable[[], int]:
    """Return a function that returns the line of `code` that is running, further up the stack."""

    def line() -> int:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return frame.f_lineno if frame else 0

    return line
