"""Docstring, signature and annotations of an op, made of its declaration on demand."""

from __future__ import annotations

import inspect
import sys
import types
from typing import TYPE_CHECKING, Any, Optional

import torch

if TYPE_CHECKING:
    from jitkern.op.declaration import DeclaredOp

_TYPES = {
    "Tensor": torch.Tensor, "int": int, "SymInt": int, "float": float, "bool": bool, "str": str,
    "complex": complex, "Device": torch.device, "ScalarType": torch.dtype, "Layout": torch.layout,
    "MemoryFormat": torch.memory_format, "Generator": torch.Generator,
}  # fmt: skip
_AROUND: dict[str, Any] = {"Optional": Optional, "List": list}


def signature(op: DeclaredOp) -> inspect.Signature:
    """Return the parameters of an op as its schema has them."""
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value()
            else inspect.Parameter.empty,
            annotation=_annotation(str(argument.real_type)),
        )
        for argument in op.signature.arguments
    ]  # fmt: skip
    returns = [_annotation(str(value.real_type)) for value in op.signature.returns]
    if len(returns) != 1:
        returns = [types.GenericAlias(tuple, tuple(returns)) if returns else None]
    return inspect.Signature(parameters, return_annotation=returns[0])


def _annotation(text: str) -> Any:
    """Return the type that Torch writes as, say, `Optional[List[int]]`."""
    around, _, inner = text.partition("[")
    if around in _AROUND:
        return _AROUND[around][_annotation(inner.removesuffix("]"))]
    return _TYPES.get(text, Any)


def doc(op: DeclaredOp) -> str:
    """Return the docstring of an op: what its author wrote, then its schema and its sources.

    The author's words are those of the reference, else those of the module that declares the op.
    """
    authors = (op.declaration.reference, sys.modules.get(op.module))
    words = [inspect.getdoc(a) for a in authors if inspect.isfunction(a) or inspect.ismodule(a)]
    written = next(filter(None, words), "")
    kinds = [
        f"{device}: {', '.join(type(source).__name__ for source in sources)}"
        for device, sources in op.sources.items()
        if sources
    ]
    facts = [f"schema: {op.schema}", *kinds, *(["differentiable"] if op.gradient else [])]
    return "\n\n".join(filter(None, [f"{op.__name__}{signature(op)}", written, "\n".join(facts)]))
