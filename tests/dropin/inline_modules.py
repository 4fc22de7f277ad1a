"""Modules of `load_inline`, and what became of them."""

from __future__ import annotations

from cpp_texts import MODULE

import jitkern
from jitkern.dropin import memo
from jitkern.loading import LOADED


def answers():
    """The calls that this process answers without asking the cache."""
    return [key for key in LOADED if key.startswith(memo.CALL)]


def forget_answers():
    """Have calls ask the cache again, as in a new process."""
    for key in answers():
        del LOADED[key]


def module(name, defines="", **arguments):
    return jitkern.load_inline(name, MODULE % defines, no_implicit_headers=True, **arguments)


def value(number):
    return f"#define ANSWER {number}"


def entries(cache_dir):
    """All but the objects of units."""
    paths = (path.parent for path in cache_dir.glob("v1/*/*/manifest.json"))
    return sorted(path for path in paths if not path.name.startswith("object."))


def compiles():
    return jitkern.stats()["compiles"]
