"""A kernel's parameters as its author wrote them, for messages about a launch."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from jitkern.errors import JitkernError
from jitkern.launch.declared import declared_in
from jitkern.source import cpp_text
from jitkern.source.argument_classes import words_of
from jitkern.source.closure import closure_of
from jitkern.source.kinds import HOST, Variant


def written(
    variant: Variant, kept: Sequence[int] | None, count: int
) -> tuple[Sequence[int], list[str]]:
    """Return the positions of the kernel's `count` parameters, and the text of each argument.

    A text is `const T* x`, in Python `x`. kept: the positions, if the kernel does not take all
    arguments. There are no texts if the source does not show them, e.g. if a macro writes them.
    """
    try:
        texts = (
            _texts_in_triton(variant) if variant.source.declares
            else _texts_in_python(variant) if variant.source.in_python
            else _texts_in_cxx(variant, count)
        )  # fmt: skip
    except (OSError, SyntaxError, JitkernError):  # the file is gone since it was compiled
        return (), []
    positions: Sequence[int] = range(len(texts)) if kept is None else kept
    if variant.source.flat and variant.signature:
        classes = enumerate(variant.signature)
        positions = [i for i, argument in classes for _ in range(words_of(argument))]
    return (positions, texts) if len(positions) == count else ((), [])


def _texts_in_triton(variant: Variant) -> list[str]:
    function = declared_in(variant.op, variant.source, variant.function)
    compiled_in = dict(variant.template)
    return [name for name in function.parameters if name not in compiled_in]


def _texts_in_python(variant: Variant) -> list[str]:
    compiled_in = dict(variant.template)
    for node in ast.walk(ast.parse(variant.source.paths[0].read_bytes())):
        if isinstance(node, ast.FunctionDef) and node.name == variant.function:
            names = [a.arg for a in node.args.args if a.arg not in compiled_in]
            return names[:-1] if variant.source.runs == HOST else names  # without the stream
    return []


def _texts_in_cxx(variant: Variant, count: int) -> list[str]:
    """Return the texts of the only function with `count` parameters, from file or headers."""
    path = variant.source.paths[0]
    return _texts_in_file(path, variant, count) or next(
        (
            texts
            for header in sorted(closure_of(variant.source).paths - {path})
            if (texts := _texts_in_file(header, variant, count))
        ),
        [],
    )


def _texts_in_file(path: Path, variant: Variant, count: int) -> list[str]:
    text = cpp_text.read(path)
    if cpp_text.last_name(variant.function) not in text:
        return []
    matches = cpp_text.named(cpp_text.functions_in(text), variant.function)
    lists = dict.fromkeys(tuple(cpp_text.split(function.parameters)) for function in matches)
    fitting = [texts for texts in lists if len(texts) == count]
    return list(fitting[0]) if len(fitting) == 1 else []
