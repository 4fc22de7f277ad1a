"""The names for kernel authors: `kernel(...)`, the kinds of source, and functions to find ops."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.calls.signature import Signature
from jitkern.errors import DeclarationError, shown
from jitkern.op.all_ops import attach, discover, registering
from jitkern.op.declaration import Declaration
from jitkern.op.op import OPS, Op
from jitkern.source.kinds import (
    SOURCES,
    Cpp,
    Cuda,
    Cute,
    CuTile,
    Extension,
    Include,
    Source,
    Triton,
    Unit,
    strings,
    true_or_false,
    unknown_keyword,
)

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = [
    "Cpp", "CuTile", "Cuda", "Cute", "Extension", "Include", "Op", "Triton", "Unit",
    "attach", "discover", "installed", "kernel",
]  # fmt: skip

ENTRY_POINTS = "jitkern.kernels"
_KEYWORDS = ("cuda", "cpu", "fusible", "nondifferentiable", "prewarm")
_BODIES = ("<module>", "<cell line")  # names of code that is no function
_OF_TORCH = ("aten", "prim", "prims", "inductor", "higher_order")
MAX_NAME = 100  # files of the cache are named after ops


def __dir__() -> list[str]:
    return __all__


def kernel(
    schema: str,
    *,
    cuda: Source | Sequence[Source] = (),
    cpu: Source | Sequence[Source] = (),
    fusible: bool = False,
    nondifferentiable: Sequence[str] = (),
    prewarm: Sequence[Any] = (),
    **unknown: NoReturn,
) -> Op:
    """Declare and register an op, and return the op, which is the public function.

    schema: a Torch schema, `mylib::name(...)`; only shipped ops have no namespace.
    cuda, cpu: sources of the kernels, best first; files are relative to the calling file's folder.
    fusible: whether torch.compile replaces the op by its reference, for Inductor to fuse.
    nondifferentiable: names of outputs that have no gradient; `out`, or `out0`, …, where the schema
        names none. Names of tensor inputs, too: a backward pass that needs their gradient raises.
    prewarm: calls to prewarm, in addition to the samples: tuples of arguments where a string like
        `f16[64, 1000]` stands for a contiguous tensor of that dtype and shape.

    Raises DeclarationError.
    """
    frame = sys._getframe(1)
    place = f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}: "
    try:
        module = str(frame.f_globals.get("__name__", ""))
        _check(schema, module, prewarm, unknown)
        sources = _placed({"cuda": cuda, "cpu": cpu}, schema, module, frame)
        body = _body_around(frame)
        if body is not None:  # of a module that calls a function of another one, to make ops
            module = str(body.f_globals.get("__name__", ""))
        named = (nondifferentiable,) if isinstance(nondifferentiable, str) else nondifferentiable
        true_or_false("fusible", fusible)
        declaration = Declaration(
            sources, fusible=fusible, module=module, place=place, prewarm=prewarm,
            nondifferentiable=strings("nondifferentiable", named),
        )  # fmt: skip
        return _declare(schema, declaration, body)
    except DeclarationError as e:
        raise DeclarationError(f"{place}{e}") from e.__cause__


def _check(schema: str, module: str, prewarm: object, unknown: Mapping[str, Any]) -> None:
    """Refuse a name that the op cannot have, keywords that there are not, and a text as calls."""
    if not isinstance(schema, str):
        raise DeclarationError(f"`{schema!r:.80}` is no schema of an op: write it as a string")
    name = schema.partition("(")[0]
    if len(name) > MAX_NAME:
        raise DeclarationError(
            f"the op name `{name[:40]}...` has {len(name)} characters, more than {MAX_NAME}"
        )
    package = module.partition(".")[0].strip("_")
    example = package if package.isidentifier() and package != "main" else "mylib"
    namespace, _, bare = name.strip().rpartition("::")
    if not bare.split(".")[0].isidentifier() or (namespace and not namespace.isidentifier()):
        raise DeclarationError(
            f"`{schema}` is no schema of an op: write one like "
            f"`{example}::name(Tensor x, float alpha) -> Tensor`"
        )
    if namespace in _OF_TORCH:
        raise DeclarationError(
            f"`{schema}`: the namespace `{namespace}` is PyTorch's own: write "
            f"`{example}::{schema.partition('::')[2]}`"
        )
    if not namespace and not f"{module}.".startswith("jitkern."):
        raise DeclarationError(
            f"`{schema}` has no namespace, and only the ops of jitkern itself go without: write "
            f"`{example}::{schema}`"
        )
    if isinstance(prewarm, str):
        raise DeclarationError(f"prewarm={prewarm!r} is a string: give a list, [{prewarm!r}]")
    if unknown:
        raise DeclarationError(f"`{schema}`: {unknown_keyword('kernel()', unknown, _KEYWORDS)}")


def _placed(
    declared: dict[str, Any], schema: str, module: str, frame: types.FrameType
) -> dict[str, tuple[Source, ...]]:
    """Return the sources for each device, with the folder and the module that declare them."""
    caller, place = frame.f_globals, (frame.f_code.co_filename, frame.f_lineno)
    folder = _folder_of(caller.get("__file__", "kernel.py"))
    package = caller.get("__package__") or ""
    sources: dict[str, tuple[Source, ...]] = {}
    for device, value in declared.items():
        items = tuple(value) if isinstance(value, Sequence) else (value,)
        if isinstance(value, str):
            remedy = f"{device}={_source_of(value, device)}"
            raise DeclarationError(f"`{schema}`: {device}={value!r} is a string: write {remedy}")
        wrong = [source for source in items if not isinstance(source, _allowed(device))]
        if wrong:
            names = ", ".join(kind.__name__ for kind in _allowed(device))
            fitting = " or ".join(f"{d}=" for d in getattr(wrong[0], "devices", ()))
            if isinstance(wrong[0], type):
                fitting = f"{device}={wrong[0].__name__}(...)"
            remedy = f": write {fitting}" if fitting else ""
            raise DeclarationError(f"`{schema}`: {device}= takes {names}, got {wrong[0]!r}{remedy}")
        sources[device] = tuple(
            source.placed(folder, place, package=package, module=module) for source in items
        )
    return sources


def _declare(schema: str, declaration: Declaration, body: types.FrameType | None) -> Op:
    """Declare an op, or declare anew what an earlier run of the same module declared.

    body: the module's body or the cell that runs; None if that is not known. Raises
    DeclarationError.
    """
    signature = Signature(schema)
    name, module = signature.name, declaration.module
    tensors = [a.name for a in signature.arguments if "Tensor" in str(a.type)]
    for value in declaration.nondifferentiable:
        if value not in (*signature.outputs, *tensors):
            raise DeclarationError(
                f"{name}: nondifferentiable={value!r} is neither an output nor a tensor; those of "
                f"`{signature.schema}` are {', '.join((*signature.outputs, *tensors))}"
            )
    op = OPS.get(name)
    before = op.newest if op is not None else declaration
    of_one_file = _file_of(before.place) == _file_of(declaration.place)
    if op is None:
        op = registered(signature, declaration)
    elif (
        before.module != module
        or body is None
        or body.f_code is op.execution
        or (module != "__main__" and not of_one_file)
    ):
        modules = dict.fromkeys(f"`{m}`" for m in (before.module, module) if m)
        remedy = "give one of them another name, or another namespace"
        if of_one_file and len(modules) == 2 and "`__main__`" in modules:
            remedy = "a script is imported, too: put its ops into a module of their own"
        elif not of_one_file and len(modules) == 1:
            remedy = f"first in {_file_of(before.place)}: two copies of the package are on sys.path"
        raise DeclarationError(
            f"{name} is declared twice, by {' and '.join(modules) or 'one module'}: {remedy}"
        )
    elif op.schema != signature.schema:
        raise DeclarationError(
            f"{name} is registered as `{op.schema}`, and Torch cannot change the schema of an op "
            f"to `{signature.schema}` in a running process: start a new one (restart the kernel "
            "of a notebook), or give the op another name"
        )
    else:
        op.declare_again(declaration, body)
    op.execution = body.f_code if body is not None else None
    return op


def registered(signature: Signature, declaration: Declaration) -> Op:
    """Register an op of a name that no op has yet, and return the op."""
    registering.op = signature.name
    try:
        return Op(signature, declaration)
    finally:
        del registering.op


def _file_of(place: str) -> str:
    """Return the file of a place, `kernel.py:12: `."""
    return place.rsplit(":", 2)[0]


def _body_around(frame: types.FrameType) -> types.FrameType | None:
    """Return the body of the module, or the cell, that runs now; None if a function is called.

    It is the body of the caller's module, or of any other that is being imported: its import makes
    the op. The code of a module that is reloaded, or of a cell that runs again, is another object.
    """
    body: types.FrameType | None = frame
    while body is not None:
        if body.f_code.co_name.startswith(_BODIES):
            name = str(body.f_globals.get("__name__", ""))
            module = None if name == "__main__" else sys.modules.get(name)
            imported = module is not None and vars(module) is body.f_globals
            if imported or body.f_globals is frame.f_globals:
                return body
        body = body.f_back
    return None


def _allowed(device: str) -> tuple[type[Source], ...]:
    """The kinds of source that may be declared for a device."""
    return tuple(kind for kind in SOURCES.values() if device in kind.devices)


def _source_of(file: str, device: str) -> str:
    """Return Python text of the source that a file name suggests, e.g. `Cuda('scale.cu')`."""
    kinds = [kind for kind in _allowed(device) if file.endswith(kind.suffixes)]
    return f"{(kinds or _allowed(device))[0].__name__}({file!r})"


@functools.cache
def _folder_of(file: str) -> str:
    return str(Path(file).absolute().parent)


def installed() -> list[str]:
    """Return the modules that installed packages list in the entry points `jitkern.kernels`."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return list(dict.fromkeys(point.module for point in points))
