"""Find the ops and targets that a command line names.

This imports the modules that installed packages list, and packages that the command line names, in
the current directory too. Nothing else of that directory is imported, whatever a recording says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jitkern
from jitkern import calls, op as op_room, prewarming
from jitkern.cli.output import say
from jitkern.cli.parser import UsageError
from jitkern.errors import DeclarationError, error_line, meant, meant_op, then
from jitkern.named_tuple import NamedTuple
from jitkern.target import Target

if TYPE_CHECKING:
    from jitkern.calls.record import RecordedCall
    from jitkern.op.op import Op
    from jitkern.prewarming.op_calls import OpCalls

_OF_A_PACKAGE = "; for an op of a package that is not installed, name the package"
_NO_KERNEL_FILE = (
    "; only the package itself and each `kernel.py` in it were imported: name the module that "
    "declares its ops"
)
_MOST = 3  # ops that a message lists


class UnknownOp(UsageError):
    """No op, namespace or package has this name."""


class Chosen(NamedTuple):
    """The chosen ops.

    broken: the named packages whose import fails, each with the reason. unimported: ops that the
    import of a named package does not declare, each with the module that does.
    """

    ops: list[Op]
    broken: dict[str, str]
    unimported: dict[str, str]


def take_ops(
    parser: argparse.ArgumentParser, *, metavar: str = "WHAT", required: bool = False
) -> None:
    """Add the argument `what`, the names that `choose_ops` takes."""
    parser.add_argument(
        "what",
        nargs="+" if required else "*",
        metavar=metavar,
        help="an op, a namespace, a package or a module of one"
        + " (default: all)" * (not required),
    )


def choose_ops(names: list[str]) -> Chosen:
    """Return the ops that `names` mean: `softmax`, `ns::softmax`, a namespace, package or module.

    Default: all installed ops. Raises UnknownOp.
    """
    return _choose(names, _import_installed())


def choose_recorded(path: Path, names: list[str]) -> tuple[list[OpCalls], dict[str, str]]:
    """Return the ops that `names` mean, with their calls in a recording, and the broken packages.

    Raises DeclarationError for a file that is not a recording, and for a recorded op that is not
    installed, or whose module neither an installed package lists nor `names` has.
    """
    raising = _import_installed()
    recorded = prewarming.op_calls.read_recording(path)
    for call in recorded:
        if call.op not in op_room.all_ops.all_ops():
            _declare(call, path, names)
    ops, broken, _ = _choose(names, raising)  # after the imports, which may declare the ops
    return prewarming.op_calls.recorded_calls(ops, recorded, path), broken


def choose_calls(ops: list[Op], texts: list[str], targets: list[Target]) -> list[OpCalls]:
    """Return the ops with the calls that `texts` spell for them; without texts, with their samples.

    Raises UsageError for a text that is not a call of one of the ops.
    """
    if not texts:
        return [prewarming.op_calls.OpCalls(op) for op in ops]
    devices = {target.device for target in targets}
    spellings: dict[str, list[str]] = {}
    for text in texts:
        name, _, inside = text.strip().removesuffix(")").partition("(")
        named = text.strip().endswith(")")
        fitting = [op for op in ops if not named or f"::{op.name}".endswith(f"::{name}")]
        if len(fitting) != 1:
            why = _misnamed(name, ops, len(fitting)) if named else "name the op"
            write = "write OP(ARGS), as in `softmax(f16[64, 1000])`"
            raise UsageError(then(f"--call `{text}`: {why}", write))
        spelling = inside if named else text
        for sample in calls.samples.spelt(fitting[0].signature, [spelling]):
            if sample.problem:
                raise UsageError(sample.problem)
        spellings.setdefault(fitting[0].name, []).append(spelling)
    return [
        prewarming.op_calls.spelt_calls(op, spellings[op.name], devices)
        for op in ops
        if op.name in spellings
    ]


def _misnamed(name: str, ops: list[Op], fitting: int) -> str:
    """Return how many ops fit a name, with the near one, or else the chosen ones, if few."""
    near = "" if fitting else meant_op(name, [op.name for op in ops])
    known = [op.name.removeprefix("jitkern::") for op in ops]
    few = f", which are {', '.join(known)}" if not near and len(known) <= _MOST else ""
    return f"{fitting} of the chosen ops fit{few}{near}"


def _import_installed() -> dict[str, str]:
    """Import the modules that declare ops; returns those that raise, each with the reason."""
    importlib.import_module("jitkern.ops")
    raising = {}
    for module in jitkern.declare.installed():
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as e:  # noqa: BLE001  another's broken package must not take all ops away
            raising[module] = _leave_out(f"the installed {module}", e)
    return raising


def _leave_out(what: str, e: BaseException) -> str:
    reason = f"{what} cannot be imported: {error_line(e)}"
    say(reason)
    return reason


def _found_here(module: str) -> contextlib.AbstractContextManager[None]:
    """Let imports find the package of `module` in the current directory or a project there."""
    package = _package_of(module)
    here = Path.cwd()
    folders = [here, here / "src", here / package / "src"]  # `jitkern init` writes such projects
    return prewarming.jobs.found_in(package, [*map(str, folders)])


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _choose(names: list[str], raising: dict[str, str]) -> Chosen:
    chosen: dict[str, Op] = {}
    broken: dict[str, str] = {}
    unimported: dict[str, str] = {}
    for name in names:
        ops = op_room.all_ops.ops_named(name)
        reasons = [why for module, why in raising.items() if f"{module}.".startswith(f"{name}.")]
        if reasons:
            broken[name] = reasons[0]
        elif not ops or name in sys.modules:  # a package has ops that it does not import, perhaps
            try:
                with _found_here(name):
                    ops = _imported(name, unimported)
            except (Exception, SystemExit) as e:  # noqa: BLE001  as for an installed package
                broken[name] = _leave_out(name, e)
                ops = op_room.all_ops.ops_named(name)
        if not ops and name not in broken:
            near = _of_path(name) or meant_op(name, op_room.op.OPS) or meant(name, _beside(name))
            unknown = f"`{name}` is not an op, a namespace or a package with kernels{near}"
            raise UnknownOp(
                then(unknown, "`jitkern list` prints all")
                + _OF_A_PACKAGE * ("::" in name)
                + _NO_KERNEL_FILE * (name in sys.modules)
            )
        chosen.update((op.name, op) for op in ops)
    result = chosen if names else op_room.all_ops.all_ops()
    return Chosen(sorted(result.values(), key=lambda op: op.name), broken, unimported)


def _beside(module: str) -> Iterator[str]:
    """Yield what a module that is not there may mean: modules beside it, or packages found here."""
    package, _, _ = module.rpartition(".")
    if package:
        for found in pkgutil.iter_modules(getattr(sys.modules.get(package), "__path__", [])):
            yield f"{package}.{found.name}"
        return
    yield from map(_package_of, jitkern.declare.installed())
    here = Path.cwd()
    folders = [here, here / "src", *here.glob("*/src")]  # `jitkern init` writes such projects
    yield from (found.name for found in pkgutil.iter_modules(map(str, folders)) if found.ispkg)


def _of_path(text: str) -> str:
    """Return the end of a message about a path to a module: its name, and where to stand."""
    path = Path(text).absolute()
    path = Path(os.path.normpath(path / "kernel.py" if (path / "kernel.py").is_file() else path))
    if not path.exists() or not (os.sep in text or text.endswith(".py")):
        return ""
    here = root = path.parent if path.suffix == ".py" else path
    while (root / "__init__.py").is_file():
        root = root.parent
    if root == here and path.name == "kernel.py":  # a kernel's folder, which need not be a package
        root = root.parent
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    where = "" if root == Path.cwd() else f", in the folder {root}"
    return f"; a path is not a name: write `{name}`{where}" if name else ""


def _declare(call: RecordedCall, path: Path, names: list[str]) -> None:
    """Import the module that declares the op of a recorded call, if it may be imported.

    It may be imported if an installed package lists a module of the same package, or if `names` has
    the package: a recording may come from anywhere. Raises DeclarationError for a wanted op that is
    not declared afterwards.
    """
    calls = f"{path} has calls of {call.op}, declared in {call.module}"
    package = _package_of(call.module)
    if package not in map(_package_of, (*jitkern.declare.installed(), *names)):
        if names:
            return  # only ops of the named packages are wanted
        reason = (
            f"which no installed package lists. To import it, name it: "
            f"`jitkern prewarm --from {path} {package}`"
            if package not in ("", "__main__")
            else "which cannot be imported: declare the op in a module, and record again"
        )
        raise DeclarationError(f"{calls}, {reason}")
    reason = "which is not installed: install its package, or run where it can be imported"
    try:
        with _found_here(package):
            importlib.import_module(call.module)
        reason = "which no longer declares it: record again"
    except (Exception, SystemExit) as e:  # noqa: BLE001  whatever its author's code raises
        if not _is_absent(e, call.module):
            reason = f"which cannot be imported: {e!r}"
    if call.op not in op_room.all_ops.all_ops():
        raise DeclarationError(f"{calls}, {reason}")


def _is_absent(e: BaseException, module: str) -> bool:
    """Whether this module or a package around it is missing, and not a module that it imports."""
    return isinstance(e, ModuleNotFoundError) and f"{module}.".startswith(f"{e.name}.")


def _imported(name: str, unimported: dict[str, str]) -> list[Op]:
    """Return the ops that a package or module declares, and tell which ones need another import.

    Raises the errors of the import.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        return []
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as e:
        if _is_absent(e, name):
            return []
        raise
    if spec and spec.submodule_search_locations:
        importlib.import_module(name)
        imported = {*op_room.all_ops.all_ops()}
        jitkern.declare.discover(name)
        if spec.origin:  # else a folder without `__init__.py`, which imports nothing
            later = (op for op in op_room.all_ops.ops_named(name) if op.name not in imported)
            unimported.update((op.name, op.module) for op in later)
    elif spec:
        importlib.import_module(name)
    return op_room.all_ops.ops_named(name)


def choose_targets(texts: list[str]) -> list[Target]:
    """Return the targets of these texts, by default this machine's. Raises TargetError."""
    return [Target.parse(text) for text in texts] or Target.visible()
