"""Find ops: in packages that declare them on first use, and by name.

A package that is only imported has declared no op yet, and loads none of the modules that ops need.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jitkern import (
    calls,
    mega_cache,  # noqa: F401  registers itself: an import of ops can load a mega-cache
    op as op_room,
)
from jitkern.errors import DeclarationError, meant_op

if TYPE_CHECKING:
    from jitkern.op.op import Op

ANNOUNCED: dict[str, Callable[[], object]] = {}  # packages, with what declares all of their ops
registering = threading.local()  # `op`: Torch asks its namespace for an op that is not there yet


def discover(package: str) -> list[Op]:
    """Import `kernel.py` in a package and in every folder below the package.

    Returns the declared ops, sorted by name.
    """
    paths = importlib.import_module(package).__path__
    before, modules = set(op_room.op.OPS), set()
    for root in paths:
        for folders in _folders_of_kernels(root):
            modules.add(".".join((package, *folders, "kernel")))
            importlib.import_module(".".join((package, *folders, "kernel")))
    ops = (op for op in op_room.op.OPS.values() if op.name not in before or op.module in modules)
    return sorted(ops, key=lambda op: op.name)


def op_of(op: Any) -> Op:
    """Return the op, or the op of a function that has one. Raises DeclarationError."""
    declared = getattr(op, "op", op)
    if not isinstance(declared, op_room.op.Op):
        raise DeclarationError(
            f"`{op!r:.80}` is not an op of jitkern: pass what `kernel(...)` returned, e.g. "
            "`jitkern.ops.softmax`"
        )
    return declared


def attach(
    module: str, package: str, namespace: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose attributes are the ops of a package.

    The files `kernel.py` of the package are imported when their ops are first used, through the
    module or `torch.ops.<namespace>`. So the import of the module takes no longer for 200 ops than
    for 4. Put an op into a folder of its name, as `softmax/kernel.py`, or of the first words of its
    name, as `softmax_backward`; to find other ops, the whole package is imported.
    """

    def found(name: str) -> Op | None:
        op = f"{namespace}::{name}"
        for folder in _folders_for(package, name):
            if op not in op_room.op.OPS:
                importlib.import_module(f"{package}.{folder}.kernel")
        if op not in op_room.op.OPS:
            discover(package)
        return op_room.op.OPS.get(op)

    def attribute(name: str) -> Op:
        op = None if name.startswith("__") else found(name)
        if op is None:
            near = "" if name.startswith("__") else meant_op(name, op_room.op.OPS)
            raise AttributeError(f"module `{module}` has no op `{name}`{near}", name=name)
        vars(sys.modules[module])[name] = op
        return op

    def names() -> list[str]:
        return sorted(op.__name__ for op in discover(package))

    namespace_of_torch = getattr(torch.ops, namespace)
    plain: Any = type(namespace_of_torch)

    def op_of_torch(self: Any, name: str) -> Any:
        if not name.startswith("__") and not hasattr(registering, "op"):
            found(name)
        return vars(self)[name] if name in vars(self) else plain.__getattr__(self, name)

    # Torch finds pickled ops by the module of their namespace.
    body = {"__getattr__": op_of_torch, "__module__": plain.__module__}
    namespace_of_torch.__class__ = type(plain.__name__, (plain,), body)
    ANNOUNCED[package] = lambda: discover(package)
    return attribute, names


def _folders_for(package: str, name: str) -> list[str]:
    """Return the folders that may declare an op, by their names, the likeliest first."""
    words = name.split("_")
    named = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    roots = importlib.import_module(package).__path__
    is_file = os.path.isfile
    return [f for f in named if any(is_file(f"{root}/{f}/kernel.py") for root in roots)]


def _folders_of_kernels(root: str) -> list[tuple[str, ...]]:
    """Return the folders with a `kernel.py` as tuples of names, folders near the root first.

    A package may lie in a zip file, whose members are imported as files are.
    """
    archive = next((path for path in Path(root).parents if path.is_file()), None)
    if archive:
        import zipfile  # 5 ms, for such a package alone

        with zipfile.ZipFile(archive) as file:
            members = [archive / name for name in file.namelist()]
        found = [m.parent for m in members if m.name == "kernel.py" and m.is_relative_to(root)]
    else:
        found = []
        for path, folders, files in os.walk(root):
            folders[:] = filter(str.isidentifier, folders)  # those that a package may have
            found += [Path(path)] * ("kernel.py" in files)
    paths = [path.relative_to(root).parts for path in found]
    named = [names for names in paths if all(map(str.isidentifier, names))]
    return sorted(named, key=lambda names: (len(names), names))


def all_ops() -> dict[str, Op]:
    """Declare the ops of all announced packages, and return all ops by name."""
    for package in [*ANNOUNCED]:
        ANNOUNCED[package]()
        del ANNOUNCED[package]
    return op_room.op.OPS


def ops_named(name: str) -> list[Op]:
    """Return the ops of this name, of this namespace, or declared in this package or module.

    The digest at the end of the name of a pointwise function's op may be left out.
    """
    return [
        op
        for op in all_ops().values()
        if op.name in (name, f"jitkern::{name}")
        or re.sub(calls.signature.GENERATED, "", op.name) == name
        or op.name.split("::")[0] == name
        or f"{op.module}.".startswith(f"{name}.")
    ]
