"""Symbols: the numbers a traced launch function computes with, which stand for any later call's.

A `Symbol` is an expression in C and its present value, the hint. Arithmetic makes another Symbol; a
comparison returns a real bool at once and records this answer as a guard, so that `if`, `and`,
`min`, `while` and `torch._check` just work, and the stub serves exactly the calls for which the
same answers hold. The hint is never read without a guard.
"""

from __future__ import annotations

import math
import operator
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from jitkern.named_tuple import NamedTuple

_INT64 = range(-(2**63), 2**63)
MOST = 1000  # statements of a stub: a second of the C compiler; shipped ops need up to 172


class Unsupported(Exception):
    """A launch function does something that C cannot follow; its op keeps its Python launcher.

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


class Statement(NamedTuple):
    """A line of a stub, and the line of the launch function that asked for it."""

    text: str
    line: int


class Frozen(NamedTuple):
    """A value that a variant holds for constant, and a description of its origin."""

    what: str
    value: Any


class Facts:
    """Values computed from the arguments and guards on them, in order; nothing with an effect.

    line: returns the line of the launch function that is running.
    """

    def __init__(self, line: Callable[[], int]) -> None:
        self.statements: list[Statement] = []
        self.frozen: list[Frozen] = []
        self.line = line
        self._count = 0
        self._seen: set[str] = set()
        self._values: dict[str, str] = {}

    def statement(self, text: str) -> Statement:
        """Return a line of C of the stub. Raises Unsupported for one more than a stub may have."""
        self._count += 1
        if self._count > MOST:
            raise Unsupported(
                f"more than {MOST} steps cannot be traced, since a stub has each turn of a loop: "
                "loop inside the kernel, or launch it once for a list, by k.tables"
            )
        return Statement(text, self.line())

    def guard(self, condition: str) -> None:
        """Serve only calls for which this C condition holds."""
        self._check()
        if condition not in self._seen:
            self._seen.add(condition)
            self.statements.append(self.statement(f"if (!({condition})) return MISS;"))

    def value(self, kind: type, expression: str, name: str = "") -> str:
        """Return a name for the value of this C expression; equal expressions share a name."""
        self._check()
        if expression not in self._values:
            name = self._values[expression] = name or f"v{len(self._values)}"
            ctype = "double" if kind is float else "i64"
            self.statements.append(self.statement(f"const {ctype} {name} = {expression};"))
        return self._values[expression]

    def declare(self, text: str) -> None:
        """Add a declaration, which may read what the guards before it allow to be read."""
        self._check()
        self.statements.append(self.statement(text))

    def _check(self) -> None:
        if self is not running.facts:
            raise Unsupported("a number kept from an earlier call cannot be traced")


class Symbol:
    """A number: an expression in C (`text`), its present value (`hint`), its name for users."""

    __slots__ = ("facts", "hint", "natural", "text", "what")

    def __init__(
        self, facts: Facts, text: str, hint: float, what: str = "", *, natural: bool = False
    ) -> None:
        self.natural = natural  # never below 0
        self.facts = facts
        self.text = text
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
        same = "same({}, {})" if isinstance(self.hint, float) else "{} == {}"
        self.facts.guard(same.format(self.text, literal(self.hint)))
        self.facts.frozen.append(Frozen(self.what, self.hint))
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
            "a stub: loop inside the kernel, or pass the number as a template argument"
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
            return self._made(float, f"__builtin_fabs({self.text})", abs(self.hint))
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
        return self._rounded("floored", math.floor)

    def __ceil__(self) -> Any:
        return self._rounded("ceiled", math.ceil)

    def __trunc__(self) -> Any:
        return self._rounded("truncated", math.trunc)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.freeze(), digits)

    def as_integer(self) -> Any:
        """Return the number as int() would convert it."""
        return self.__trunc__()

    def as_real(self) -> Any:
        """Return the number as float() would convert it."""
        if _is_float(self):
            return self
        return self._made(float, f"(double){self.text}", float(self.hint))

    def square_root(self) -> Any:
        """Return the square root, as math.sqrt() does. Raises Unsupported for a number below 0."""
        real = self.as_real()
        if _less(real, 0.0):
            raise Unsupported("the square root of a negative number cannot be traced")
        return self._made(float, f"__builtin_sqrt({real.text})", math.sqrt(real.hint))

    def is_integer(self) -> bool:
        """Whether the value is an integer, as float.is_integer() tells."""
        if not _is_float(self) or not _less(abs(self), 2.0**53):
            return self.freeze().is_integer()
        return bool(self.as_integer() == self)

    def bit_length(self) -> Symbol:
        """Return int.bit_length() of the number. Raises Unsupported for a number below 0."""
        if _less(self, 0):
            raise Unsupported("bit_length() of a negative number cannot be traced")
        return self._made(int, f"bit_length({self.text}, &odd)", int(self.hint).bit_length())

    def _rounded(self, function: str, python: Callable[[float], int]) -> Any:
        if isinstance(self.hint, int):
            return self
        hint = _computed(python, self.hint)
        return self._made(int, f"{function}({self.text}, &odd)", hint)

    def _made(self, kind: type, expression: str, hint: float) -> Symbol:
        if kind is int and hint not in _INT64:
            raise Unsupported("an integer beyond the range of int64 cannot be traced")
        return Symbol(self.facts, self.facts.value(kind, expression), hint, self.what)


def is_symbol(value: object) -> bool:
    """Whether `value` is a Symbol, whose `__class__` is that of its hint."""
    return type(value) is Symbol


def concrete(value: Any) -> Any:
    """Return the value itself; of a Symbol, the guarded hint."""
    return value.freeze() if is_symbol(value) else value


def literal(value: float) -> str:
    """Return a number in C."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        if value not in _INT64:
            raise Unsupported("an integer beyond the range of int64 cannot be traced")
        return (
            str(value)
            if abs(value) < 2**31
            else f"{value}LL"
            if value > -(2**63)
            else "(-0x7fffffffffffffffLL - 1)"
        )
    if math.isinf(value):
        return "__builtin_inf()" if value > 0 else "-__builtin_inf()"
    return '__builtin_nan("")' if math.isnan(value) else repr(value)


def text_of(value: Any) -> str:
    """Return a number or Symbol in C."""
    if not is_symbol(value):
        return literal(value)
    value.facts._check()
    return str(value.text)


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
    texts = [_as_double(x, exact=True) for x in (base, exponent)]
    if isinstance(value, complex):
        raise Unsupported("a complex power of a negative number cannot be traced")
    return symbol._made(float, f"power(api, {', '.join(texts)}, &odd)", value)


def _less(a: Any, b: Any) -> bool:
    return bool(a < b)


def _is_float(value: Any) -> bool:
    return isinstance(_hint_of(value), float)


def _arithmetic(name: str, integer: str, floating: str) -> None:
    """Define one operator: how C writes it for integers, and for floats where it can."""
    compute = getattr(operator, name)

    def forward(a: Any, b: Any) -> Any:
        if not isinstance(_hint_of(b), (int, float)):
            return NotImplemented
        symbol: Symbol = a if is_symbol(a) else b
        if name == "mul" and any(type(x) is int and x == 1 for x in (a, b)):
            return symbol
        real = _is_float(a) or _is_float(b) or name == "truediv"
        form = floating if real else integer
        if not form:
            raise Unsupported(f"`{name}` of floats cannot be traced")
        hint = _computed(compute, _hint_of(a), _hint_of(b))
        whole = name == "truediv" and not (_is_float(a) and _is_float(b))
        operands = [_as_double(x, exact=whole) if real else text_of(x) for x in (a, b)]
        return symbol._made(float if real else int, form.format(*operands), hint)

    special = {"and_": "and", "or_": "or"}.get(name, name)
    setattr(Symbol, f"__{special}__", forward)
    setattr(
        Symbol,
        f"__r{special}__",
        lambda a, b: forward(b, a) if isinstance(_hint_of(b), (int, float)) else NotImplemented,
    )


def _as_double(value: Any, *, exact: bool) -> str:
    if _is_float(value):
        return text_of(value)
    if is_symbol(value):
        return f"exact({value.text}, &odd)" if exact else f"(double){value.text}"
    if exact and float(value) != value:
        raise Unsupported(f"{value} beside a float cannot be traced: no double is exactly {value}")
    return literal(float(value))


def _comparison(name: str, sign: str) -> None:
    """Define one comparison, which returns a bool and guards the answer."""
    compute = getattr(operator, name)

    def compare(self: Symbol, other: Any) -> Any:
        hint = _hint_of(other)
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
            left, right = self.text, text_of(other)
        else:
            left, right = (_as_double(x, exact=True) for x in (self, other))
        if "exact(" in left + right:
            condition = self.facts.value(int, f"{left} {sign} {right}")
        else:
            condition = f"{left} {sign} {right}"
        # `!(a < b)` is not `a >= b` if either is a NaN.
        self.facts.guard(condition if answer else f"!({condition})")
        return answer

    setattr(Symbol, f"__{name}__", compare)


for _row in (
    ("add", "add({}, {}, &odd)", "{} + {}"),
    ("sub", "sub({}, {}, &odd)", "{} - {}"),
    ("mul", "mul({}, {}, &odd)", "{} * {}"),
    ("floordiv", "floordiv({}, {}, &odd)", ""),
    ("mod", "mod({}, {}, &odd)", ""),
    ("truediv", "", "quotient({}, {}, &odd)"),
    ("and_", "{} & {}", ""),
    ("or_", "{} | {}", ""),
    ("xor", "{} ^ {}", ""),
    ("lshift", "shl({}, {}, &odd)", ""),
    ("rshift", "shr({}, {}, &odd)", ""),
):
    _arithmetic(*_row)
for _name, _sign in (
    ("lt", "<"),
    ("le", "<="),
    ("gt", ">"),
    ("ge", ">="),
    ("eq", "=="),
    ("ne", "!="),
):
    _comparison(_name, _sign)


def line_in(code: Any) -> Callable[[], int]:
    """Return a function that returns the line of `code` that is running, further up the stack."""

    def line() -> int:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return frame.f_lineno if frame else 0

    return line
