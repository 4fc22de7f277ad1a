"""Which ops and targets a command line means."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.errors import DeclarationError, JitkernError
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.register import Op

_OF_A_PACKAGE = "; for an op of a package that is not installed, give the package's name"


class UnknownOp(JitkernError):
    """No op, namespace or package has this name."""


def choose_ops(names: list[str]) -> list[Op]:
    """The ops that `names` mean: `softmax`, `ns::softmax`, a namespace or a package.

    Default: every installed one. Raises UnknownOp, listing what there is.
    """
    from jitkern import ops as _shipped  # noqa: F401  declares them
    from jitkern.declare import discover, installed
    from jitkern.register import OPS

    for module in installed():
        try:
            importlib.import_module(module)
        except Exception as e:  # noqa: BLE001  another's broken package must not take all ops away
            print(f"jitkern: the installed {module} is left out: {e!r}", file=sys.stderr)
    chosen: dict[str, Op] = {}
    sys.path.append(str(Path.cwd()))  # a folder that `jitkern init` wrote here is a package too
    for name in names:
        if Path(name, name, "__init__.py").is_file():  # so is a project that it wrote
            sys.path.append(str(Path(name).absolute()))
        found = _named(name)
        if not found and "::" not in name and _is_package(name):
            found = discover(name) or _named(name)
        if not found:
            raise UnknownOp(
                f"`{name}` is not an op, a namespace or a package with kernels; there are: "
                f"{', '.join(sorted(OPS))}" + _OF_A_PACKAGE * ("::" in name)
            )
        chosen.update((op.name, op) for op in found)
    return sorted((chosen or OPS).values(), key=lambda op: op.name)


def choose_recorded(path: Path, names: list[str]) -> list[Op]:
    """The ops that `names` mean, and have every op made ready for the calls in a recording alone.

    Raises DeclarationError for a file that is none, and UnknownOp for an op of it that is not here.
    """
    choose_ops([])
    from jitkern import record
    from jitkern.register import OPS

    try:
        calls = record.read(path)
    except OSError as e:
        raise DeclarationError(f"{path} cannot be read: {e.strerror}") from e
    if not calls:
        raise DeclarationError(f"{path} holds no call: nothing had to be readied in that run")
    for call in calls:
        if call.op not in OPS and call.module not in ("", "__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(call.module)
        if call.op not in OPS:
            raise UnknownOp(
                f"{path} has calls of {call.op}, declared in {call.module}, which is not here: "
                "install its package, or run where it can be imported"
            )
        problem = record.misfit(OPS[call.op].schema, call.args)
        if problem:
            raise DeclarationError(f"{path}, line {call.line} does not fit the op: {problem}")
    chosen = choose_ops(names)  # after those modules, which may declare them
    for op in OPS.values():
        recorded = op.recorded = {}
        for call in calls:
            if call.op == op.name:
                recorded.setdefault((call.device, call.kind), []).append(call.args)
    return chosen


def _named(name: str) -> list[Op]:
    """The ops of this name, of this namespace, or declared in this package or module."""
    from jitkern.register import OPS

    return [
        op
        for op in OPS.values()
        if op.name in (name, f"jitkern::{name}")
        or op.name.split("::")[0] == name
        or f"{op.module}.".startswith(f"{name}.")
    ]


def _is_package(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return bool(spec and spec.submodule_search_locations)


def choose_targets(texts: list[str]) -> list[Target]:
    """The targets that were spelled, by default those of this machine. Raises TargetError."""
    return [Target.parse(text) for text in texts] or Target.visible()
