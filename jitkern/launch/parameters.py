"""A kernel's parameters as its author wrote them, for messages about a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jitkern.errors import JitkernError
from jitkern.source import cpp_text
from jitkern.source.closure import closure_of
from jitkern.source.kinds import Variant
from jitkern.source.triton_text import functions


def written(
    variant: Variant, kept: Sequence[int] | None, count: int
) -> tuple[Sequence[int], list[str]]:
    """Positions of the `count` parameters of the compiled kernel, and the text of each argument.

    A text is `const T* x`, for Triton `x`. kept: the positions, where the kernel does not have all
    arguments. There are no texts where the source does not tell, as where a macro writes it.
    """
    try:
        texts = _of_triton(variant) if variant.source.kind == "triton" else _of_cxx(variant, count)
    except (OSError, JitkernError):  # gone since it was compiled
        return (), []
    positions = range(len(texts)) if kept is None else kept
    return (positions, texts) if len(positions) == count else ((), [])


def _of_triton(variant: Variant) -> list[str]:
    path = variant.source.paths[0]
    function = functions(str(path), path.stat().st_mtime_ns)[variant.function]
    compiled_in = dict(variant.template)
    return [name for name in function.parameters if name not in compiled_in]


def _of_cxx(variant: Variant, count: int) -> list[str]:
    """Of the one function of that name that takes so many, in its file or else its headers."""
    path = variant.source.paths[0]
    return _of_text(path, variant, count) or next(
        (
            found
            for header in sorted(closure_of(variant.source).paths - {path})
            if (found := _of_text(header, variant, count))
        ),
        [],
    )


def _of_text(path: Path, variant: Variant, count: int) -> list[str]:
    text = cpp_text.read(path)
    if cpp_text.plain_name(variant.function).rpartition("::")[2] not in text:
        return []
    named = cpp_text.named(cpp_text.functions_in(text), variant.function)
    lists = dict.fromkeys(tuple(cpp_text.split(function.parameters)) for function in named)
    fitting = [found for found in lists if len(found) == count]
    return list(fitting[0]) if len(fitting) == 1 else []
