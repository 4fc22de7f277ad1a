"""A kernel's own modules, made from their texts without data that the cache key does not cover.

Triton puts the values of global names into its output. The key covers the texts of the kernel's own
modules, and so every value that they compute without other data. An import would also run the
`__init__` of each package above, and import Torch and more for what only launches need. So the
statements of a text are run one by one, when something is first asked of its module. A value of a
module that is not the kernel's own, of a data file or of the machine is refused, and a statement
that fails leaves its names unknown (`PythonText`).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.util
import io
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from jitkern.source.module_spec import spec_in
from jitkern.source.triton_decorators import KNOWN, Unknown
from jitkern.source.triton_text import (
    ASKING_KNOWN,
    PURE,
    READING,
    AskingKnown,
    PythonText,
    given_by,
    is_kernel,
)

# The results of these follow from their arguments, or from a version that the key has.
_FOLLOWED = PURE | {"packaging", "sys", "torch", "triton"}
_OF_THE_MACHINE = (  # or of files
    "torch.backends", "torch.cuda", "torch.from_file", "torch.hub", "torch.jit", "torch.load",
    "triton.runtime",
)  # fmt: skip
_DECORATING = ("triton.runtime.autotuner", "triton.runtime.jit")  # but what they define
_OF_LAUNCHES = ("do_not_specialize", "do_not_specialize_on_alignment")  # and of no code
_OF_THE_KEY = ("os.environ", "os.getenv")  # only variables that a source names are there
INSTEAD = "write the value out in the kernel's own file, or pass it as a constexpr argument"


class NotCovered(BaseException):
    """A text uses data that the key does not cover; no `except Exception` of it is to catch this.

    what: what reads the data, if the data is no other module. path: the file of that module.
    """

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"the cache key does not cover `{what}`")
        self._what, self._path = what, path

    def told_of(self, name: str) -> str:
        """Return the message for a name whose value follows from the data."""
        if self._path:
            return (
                f"`{name}` comes from {self._path}, which the cache key does not cover: define it "
                f"in the kernel's own file or package, or {INSTEAD}"
            )
        return (
            f"the kernel uses a value made by `{self._what}`, and the cache key does not cover the "
            f"data that `{self._what}` reads: {INSTEAD}"
        )


class NeedsTorch(BaseException):
    """A text needs Torch, which is not imported yet."""


class OwnModules:
    """The modules of a kernel's own files, for as long as the texts of these are the same.

    beside: a folder where modules are searched first, as beside a script. texts: by the file.
    """

    def __init__(self, covered: Iterable[str], beside: str = "") -> None:
        self._covered = {*covered}
        self._beside = [beside] if beside else []
        self._specs: dict[str, ModuleSpec] = {}
        self.real_path: Callable[[str], str] = functools.cache(os.path.realpath)
        self._is_fresh = False  # whether folders were read anew
        self.texts: dict[str, OwnText] = {}
        self.is_free = False  # whether texts see all that an import sees

    def hold(self) -> bool:
        """Return whether the files still have the texts that the modules were made from."""
        return all(text.is_current() for text in self.texts.values())

    def of_file(self, path: Path, package: str) -> OwnText:
        """Return the text of a kernel's file; its statements have been run."""
        text = self._text(
            f"{package}.{path.stem}" if package else f"jitkern_of_{path.stem}", str(path)
        )
        text.run_once()
        return text

    def imported(self, name: str, package: str | None = None) -> Any:
        """Return the module of this name as statements see it."""
        full = importlib.util.resolve_name(name, package)
        for text in self.texts.values():
            if text.module.__name__ == full:
                return text.module
        if full in sys.modules:
            return self.seen(sys.modules[full])
        spec, top = self.spec(full), full.partition(".")[0]
        if spec and self.real_path(spec.origin or "") in self._covered:
            return self._text(full, str(spec.origin)).module
        is_light = top in sys.stdlib_module_names or top in _FOLLOWED - {"torch"}
        if is_light or top in sys.modules or self.is_free:
            return self.seen(importlib.import_module(full))
        if spec:
            return Part(self, full)
        if top == "torch" and self.spec(top):
            raise NeedsTorch(full)  # which may make it
        raise ModuleNotFoundError(f"No module named {full!r}", name=full)

    def seen(self, module: ModuleType) -> Any:
        """Return a module that was imported as statements see it."""
        if self.path_of(vars(module)) in self._covered:
            return self._text(module.__name__, str(module.__file__)).module
        pure = module.__name__.partition(".")[0] in PURE | {"packaging"}
        return module if pure or self.is_free else Part(self, module.__name__)

    def path_of(self, names: dict[str, Any]) -> str:
        """Return the file of a module with these names."""
        return self.real_path(names.get("__file__") or "")

    def spec(self, name: str) -> ModuleSpec | None:
        """Return the path of a module without importing its packages, or None."""
        if name not in self._specs:
            found = self._found(name)
            if not found and not self._is_fresh:  # a file may be as new as the list of its folder
                self._is_fresh = True
                importlib.invalidate_caches()
                found = self._found(name)
            if found:
                self._specs[name] = found
        return self._specs.get(name)

    def _found(self, name: str) -> ModuleSpec | None:
        package = name.rpartition(".")[0]
        above = self.spec(package) if package else None
        folders = self._beside if not package else (above and above.submodule_search_locations)
        spec = spec_in(folders or (), name)
        if package or (spec and spec.loader):
            return spec
        found = (f.find_spec(name, None) for f in sys.meta_path if hasattr(f, "find_spec"))
        return next(filter(None, found), spec)

    def refusal(self, full: str) -> BaseException:
        """Return why a member of a module that is not imported is not known."""
        package = full.rpartition(".")[0] or full
        error = refusal(full, None, getattr(self.spec(package), "origin", None) or package)
        return error or NeedsTorch(full)

    @contextlib.contextmanager
    def freely(self) -> Iterator[None]:
        """Let texts see what an import sees, for values that the key need not cover."""
        before, self.is_free = self.is_free, True
        try:
            yield
        finally:
            self.is_free = before

    @contextlib.contextmanager
    def as_imported(self) -> Iterator[None]:
        """Replace stand-ins for modules by the modules, which Triton needs."""
        parts = [
            (text.names, name, value)
            for text in self.texts.values()
            for name, value in text.names.items()
            if isinstance(value, Part) and value.__name__ in sys.modules
        ]
        for names, name, value in parts:
            names[name] = sys.modules[value.__name__]
        try:
            yield
        finally:
            for names, name, value in parts:
                names[name] = value

    def _text(self, name: str, path: str) -> OwnText:
        file = self.real_path(path)
        if file not in self.texts:
            self.texts[file] = OwnText(self, name, path)
        return self.texts[file]


class Part:
    """A module whose members are refused if they follow from data outside of the key.

    It is imported when that is needed to tell.
    """

    def __init__(self, modules: OwnModules, name: str) -> None:
        self._modules = modules
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        modules, full = self._modules, f"{self.__name__}.{name}"
        if modules.is_free:
            return getattr(importlib.import_module(self.__name__), name)
        if self.__name__ not in sys.modules:
            if modules.spec(full):
                return modules.imported(full)
            raise modules.refusal(full)
        module = sys.modules[self.__name__]
        value = getattr(module, name)
        if value is sys.modules:
            return {text.module.__name__: text.module for text in modules.texts.values()}
        if value is importlib.import_module:
            return modules.imported
        if isinstance(value, ModuleType):
            return modules.seen(value)
        if error := refusal(full, value, getattr(module, "__file__", None) or self.__name__):
            raise error
        return value

    def real(self) -> ModuleType:
        """Return the module itself. Raises NotCovered or NeedsTorch if it is not imported."""
        if self.__name__ not in sys.modules:
            raise self._modules.refusal(self.__name__)
        return sys.modules[self.__name__]

    def public(self) -> dict[str, Any]:
        """Return what `from module import *` gives."""
        found = {}
        names = [name for name in vars(self.real()) if name[0] != "_"]
        for name in getattr(self.real(), "__all__", names):
            try:
                found[name] = getattr(self, name)
            except NotCovered as e:
                found[name] = Unknown(e)
        return found


class OwnText(PythonText):
    """The text of a kernel's own file, whose statements make the module."""

    def __init__(self, modules: OwnModules, name: str, path: str) -> None:
        import triton.language

        self._modules = modules
        self._data = Path(path).read_bytes()
        self._tree = ast.parse(self._data, path)
        imports = (node for node in self._tree.body if isinstance(node, ast.ImportFrom))
        futures = {a.name for node in imports if node.module == "__future__" for a in node.names}
        if "annotations" not in futures:
            self.flags = 0
        self._ran = False
        self._failed: dict[str, ast.stmt] = {}  # the statements that gave names no values
        self._above: dict[str, list[ast.expr]] = {}  # decorators of kernels that failed
        self.module = ModuleType(name)
        is_package = Path(path).name == "__init__.py"
        own = vars(self.module)
        own.update(__file__=path, __getattr__=self._missing)
        own["__package__"] = name if is_package else name.rpartition(".")[0]
        if is_package:
            own["__path__"] = [str(Path(path).parent)]
        given = {name: getattr(triton, name) for name in KNOWN}
        given.update(triton=modules.seen(triton), tl=modules.seen(triton.language))
        super().__init__(path, own, given)
        own["__builtins__"].update({name: self._reading(name) for name in READING})
        own["__builtins__"].update(ASKING_KNOWN)
        # Triton reads the text of a function here, as `inspect` does.
        lines = io.StringIO(importlib.util.decode_source(self._data) + "\n").readlines()
        linecache.cache[path] = len(self._data), None, lines, path

    def is_current(self) -> bool:
        """Return whether the file still has this text."""
        with contextlib.suppress(OSError):
            return Path(self.path).read_bytes() == self._data
        return False

    def run_once(self) -> None:
        """Run the statements if they have not been; meanwhile the module is found by its name."""
        if self._ran:
            return
        self._ran = True
        name, modules = self.module.__name__, self._modules
        before, free = sys.modules.get(name), modules.is_free
        sys.modules[name], modules.is_free = self.module, False
        try:
            self.run(self._tree)
        finally:
            modules.is_free = free
            sys.modules.pop(name, None)
            if before:
                sys.modules[name] = before

    def value(self, name: str) -> Any:
        """Return the value of a name, which a free run may give if it is Triton's own."""
        value = self.names[name]
        if isinstance(value, Unknown) and not isinstance(value.why, NeedsTorch):
            names = {**self.names}
            with contextlib.suppress(Exception, NotCovered), self._modules.freely():
                node = ast.Module([self._failed[name]], [])
                exec(compile(node, self.path, "exec", self.flags, True), names)  # noqa: S102  as above
                if is_tritons(names[name]):
                    value = self.names[name] = names[name]
        return value

    def complete(self, name: str) -> None:
        """Put the decorators over a kernel that failed; a launch's reading is compared with them.

        Raises what they raise, and TypeError for values that are unknown.
        """
        try:
            for decorator in self._above.pop(name, ()):
                with self._modules.freely():
                    self.names[name] = self._applied(decorator, self.names[name])
        except NotCovered as e:
            raise TypeError(e.told_of(name)) from None

    def _missing(self, name: str) -> Any:
        """The attribute of this name, which the module does not have yet."""
        path = f"{self.module.__name__}.{name}"
        is_package = "__path__" in self.names
        if not self._ran:
            if is_package and not self._may_give(name) and self._modules.spec(path):
                return self._modules.imported(path)
            self.run_once()
            if name in self.names:
                return self.names[name]
        if is_package and self._modules.spec(path):
            self.names[name] = self._modules.imported(path)
            return self.names[name]
        raise AttributeError(f"module {self.module.__name__!r} has no attribute {name!r}")

    def _may_give(self, name: str) -> bool:
        """Whether the statements may give a name a value."""
        return any(not {name, "*"}.isdisjoint(given_by(node)) for node in self._tree.body)

    def _reading(self, name: str) -> Callable[..., Any]:
        def read(*args: Any, **options: Any) -> Any:
            if not self._modules.is_free:
                raise NotCovered(name)
            return getattr(builtins, name)(*args, **options)

        return read

    def _import(
        self, name: str, names: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        relative = f"{'.' * level}{name}"
        found = self._modules.imported(relative, self.names["__package__"])
        if not fromlist:
            return self._modules.imported(name.partition(".")[0])
        if own := self._modules.texts.get(self._modules.path_of(vars(found))):
            if "*" in fromlist:
                own.run_once()
        elif "*" in fromlist and isinstance(found, Part):
            self.names.update(found.public())
            return ModuleType(name)
        elif module := sys.modules.get(found.__name__):
            for member in fromlist:
                if not hasattr(module, member):
                    with contextlib.suppress(ModuleNotFoundError):
                        importlib.import_module(f"{module.__name__}.{member}")
        return found

    def _explained(self, error: BaseException, line: int) -> BaseException:
        return error

    def _compiled(self, tree: ast.Module | ast.Expression) -> CodeType:
        return super()._compiled(AskingKnown().visit(tree))

    def _decorated(self, node: ast.FunctionDef) -> Any:
        if not is_kernel(node):
            self._exec(node)
            return self.names[node.name]
        value = self._undecorated(node)
        value.__code__ = value.__code__.replace(co_firstlineno=node.decorator_list[0].lineno)
        above = [*reversed(node.decorator_list)]
        while above:
            try:
                value = self._applied(above[0], value)
            except (Exception, NotCovered, NeedsTorch):
                if isinstance(value, FunctionType):
                    raise
                self._above[node.name] = above
                break
            del above[0]
        return value

    def _applied(self, decorator: ast.expr, value: Any) -> Any:
        """Apply a decorator; if that fails, Triton's `jit` without what only launches need."""
        try:
            return super()._applied(decorator, value)
        except (Exception, NotCovered, NeedsTorch) as e:
            if not isinstance(decorator, ast.Call):
                raise
            kept = [keyword for keyword in decorator.keywords if keyword.arg not in _OF_LAUNCHES]
            function = ast.unparse(decorator.func)
            if kept == decorator.keywords or not is_tritons(eval(function, self.names)):  # noqa: S307  as above
                raise
            self._forget(ast.copy_location(ast.Expr(decorator), decorator), e)
            less = ast.copy_location(ast.Call(decorator.func, decorator.args, kept), decorator)
            return super()._applied(less, value)

    def _fail(self, node: ast.stmt, error: BaseException) -> None:
        super()._fail(node, error)
        self._failed.update(dict.fromkeys(given_by(node), node))
        if "*" in given_by(node):
            self.names.update(self._given)
        self._forget(node, error)

    def _may_change(self, value: Any) -> bool:
        if isinstance(value, type) and value.__module__.partition(".")[0] in _FOLLOWED:
            return False
        return not isinstance(value, Part) and super()._may_change(value)


def refusal(full: str, value: Any, origin: str) -> NotCovered | None:
    """Why a member of a module is refused: its value follows from data outside of the key.

    full: its whole name. origin: the file of the module.
    """
    top = full.partition(".")[0]
    if f"{full}.".startswith(tuple(f"{place}." for place in _OF_THE_MACHINE)):
        decorates = getattr(value, "__module__", "") in _DECORATING and hasattr(value, "__name__")
        return None if decorates else NotCovered(full)
    if top in _FOLLOWED or full in _OF_THE_KEY:
        return None
    return NotCovered(full, "" if top in sys.stdlib_module_names else origin)


def is_tritons(value: Any) -> bool:
    """Return whether a value is Triton's own; its text depends on Triton's version."""
    if isinstance(value, (ModuleType, Part)):
        return value.__name__.partition(".")[0] == "triton"
    if isinstance(value, Unknown):
        return False
    function = getattr(value, "fn", value)
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return package == "triton" and hasattr(function, "__qualname__")
