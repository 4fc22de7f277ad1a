"""A NamedTuple like that of `typing`; creating its classes takes a tenth of the time.

An import of ops makes twenty such classes. For each class, `typing` compiles the text of its
annotations and of a function, which takes 0.2 ms. Fields are read through objects of the same kind,
which Dynamo follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple  # noqa: PLC0414  exports the name to type checkers
else:
    import itertools
    from collections import _tuplegetter

    class _Maker(type):
        """The metaclass, which makes fields of annotations, and defaults of assigned values."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            fields = tuple(body.get("__annotations__", ()))
            defaults = {field: body[field] for field in fields if field in body}
            getters = dict(zip(fields, map(_tuplegetter, itertools.count(), fields)))
            own = {"_fields": fields, "__match_args__": fields, "_field_defaults": defaults}
            return super().__new__(cls, name, bases, {"__slots__": (), **body, **own, **getters})

    class NamedTuple(tuple, metaclass=_Maker):  # noqa: SLOT001  the metaclass sets __slots__
        """The base of all named tuples."""

        def __new__(cls, *items: Any, **named: Any) -> Any:
            fields = cls._fields
            if named or len(items) != len(fields):
                values = {**cls._field_defaults, **dict(zip(fields, items)), **named}
                twice = named.keys() & fields[: len(items)]
                if len(items) > len(fields) or twice or values.keys() != set(fields):
                    raise TypeError(f"{cls.__name__} takes the fields {', '.join(fields)}")
                items = tuple(map(values.__getitem__, fields))
            return tuple.__new__(cls, items)

        @classmethod
        def _make(cls, values: Any) -> Any:
            return cls(*values)

        def _replace(self, **fields: Any) -> Any:
            return type(self)(**{**dict(zip(self._fields, self)), **fields})

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self))

        def __repr__(self) -> str:
            fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({fields})"

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)
