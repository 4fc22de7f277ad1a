"""In each Python process of a run: compiles are counted or refused, and caches made to travel.

Python reads this file by itself, also in environments without jitkern, so it imports the standard
library alone, and jitkern only where it is installed. Modules of JITs are changed when the program
imports them; see `_patches`.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import types

TYPE_CHECKING = False  # as in `typing`, whose import would delay the start of each process
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PYTHON = os.path.dirname(os.__file__)
_compiling: list[str] = []  # the lines that asked for what compiles right now
jits: Any
events: Any
jits, events = (sys.modules.get(f"_jitkern_run_{name}") for name in ("jits", "events"))


class CompileRefused(RuntimeError):
    """Something compiles, and the run is frozen."""


def install() -> None:
    """Change modules of JITs as they are imported, and refuse compilers if the run is frozen."""
    sys.meta_path.insert(0, _ChangingFinder())
    if os.environ.get(events.MODE):
        sys.addaudithook(_audit)


# ---- modules, as they are imported ---------------------------------------------------------------


class _ChangingFinder:
    """A finder that changes modules once they are loaded, by `_patches`."""

    def __init__(self) -> None:
        self._patches = _patches()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec that the other finders give, whose loader also changes the module."""
        if name not in self._patches:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec and spec.loader:
                spec.loader.exec_module = functools.partial(_load, self._patches[name], spec.loader)  # type: ignore[method-assign]
                return spec
        return None


def _load(patches: list[Callable[[Any], object]], loader: Any, module: Any) -> None:
    """Load a module as its loader does, then change it."""
    del loader.exec_module
    loader.exec_module(module)
    for patch in patches:
        try:
            patch(module)
        except Exception as e:  # noqa: BLE001  another version of it: it runs as without us
            sys.stderr.write(f"jitkern run: {module.__name__} is not the one known: {e!r}\n")


# ---- compiles ------------------------------------------------------------------------------------


def _counted(jit: Any, name: str, module: Any) -> None:
    """Have a function of a module counted as a compile of a JIT, and refused.

    name: the function; or several with `|`, the first of which that is there is taken.
    """
    names = [part.split(".") for part in name.split("|")]
    path = next((path for path in names if hasattr(module, path[0])), names[0])
    owner = functools.reduce(getattr, path[:-1], module)
    compile_it = getattr(owner, path[-1])

    @functools.wraps(compile_it)
    def compiles(*args: Any, **kwargs: Any) -> Any:
        what, where = _name_in(args) or "a kernel", _asked_at()
        _begins(jit.name, what, where, jit.remark)
        started = time.monotonic()
        _compiling.append(where)
        try:
            return compile_it(*args, **kwargs)
        finally:
            _compiling.remove(where)
            events.ended(jit.name, what, where, started)

    setattr(owner, path[-1], compiles)


def _name_in(args: tuple[Any, ...]) -> str:
    """Return the name of what is compiled, from the first argument that has one."""
    for argument in args:
        if op := getattr(getattr(argument, "variant", None), "op", ""):  # a request of jitkern's
            return f"`{op}`"
        for found in (argument, getattr(argument, "fn", None), getattr(argument, "py_func", None)):
            name = getattr(found, "__name__", "")
            if isinstance(name, str) and name:
                return f"`{name}`"
    return ""


def _begins(tool: str, what: str, where: str, remark: str = "") -> None:
    """Refuse a compile that begins in a frozen run, and tell of it in one that warns.

    Of compiles within a compile the outermost is told.
    """
    message = events.begins(tool, what, where, remark)
    if message and os.environ[events.MODE] == "frozen":
        raise CompileRefused(message)
    if message and not _compiling:
        import traceback

        own = [line for line in traceback.extract_stack() if not _is_of_library(line.filename)]
        sys.stderr.write("".join((f"{message}\n", *traceback.format_list(own))))


def _asked_at() -> str:
    """Return the innermost line of the program itself, in this thread or where one compiles.

    Else the innermost line of a library.
    """
    frame: types.FrameType | None = sys._getframe(1)
    others = []
    while frame:
        path, line = frame.f_code.co_filename, f"{frame.f_code.co_filename}:{frame.f_lineno}"
        of_option_c = path == "<string>" and frame.f_globals.get("__name__") == "__main__"
        if of_option_c or not _is_of_library(path):
            return line
        others += [] if path.startswith(_HERE) else [line]
        frame = frame.f_back
    return (*_compiling, *others, "?")[0]


def _is_of_library(path: str) -> bool:
    """Return whether a file is of Python, a package or a JIT, and not of the program."""
    installed = "site-packages" in path or "dist-packages" in path or path.startswith("<")
    ours = os.path.dirname(_HERE), os.environ.get(events.CACHES, _HERE)
    return installed or path.startswith((_PYTHON, *ours))


# ---- compilers that are started ------------------------------------------------------------------


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        tool, what = events.compile_in(args[event != "os.system"])
        if tool:
            _begins(tool, what, _asked_at())


def _count_children(subprocess: Any) -> None:
    """Have the compilers that a process starts counted, with the seconds that they take."""
    start, ended = subprocess.Popen.__init__, subprocess.Popen._handle_exitstatus

    def __init__(self: Any, args: Any, *rest: Any, **options: Any) -> None:  # noqa: N807
        args = args if isinstance(args, (str, bytes, os.PathLike)) else [*args]
        tool, what = events.compile_in(args)
        self._jitkern_started = tool, what, time.monotonic()
        if tool or "ninja" in f"{args}":  # their shims leave it to this process, or tell the line
            asked = {events.ASKED: events.SEPARATOR.join((tool or "ninja", _asked_at()))}
            given = rest[9] if rest[9:] else options.get("env")
            environment = {**(os.environ if given is None else given), **asked}
            if rest[9:]:
                rest = (*rest[:9], environment, *rest[10:])
            else:
                options["env"] = environment
        start(self, args, *rest, **options)

    def _handle_exitstatus(self: Any, *args: Any, **options: Any) -> Any:
        tool, what, started = self.__dict__.pop("_jitkern_started", ("", "", 0.0))
        if tool:
            events.ended(tool, what, _asked_at(), started)
        return ended(self, *args, **options)

    subprocess.Popen.__init__ = functools.update_wrapper(__init__, start)
    subprocess.Popen._handle_exitstatus = functools.update_wrapper(_handle_exitstatus, ended)


# ---- caches that travel --------------------------------------------------------------------------


def _key_numba_by_content(caching: Any) -> None:
    """Have Numba name folders, and key code, by the content of all that the code follows from.

    Numba itself goes by the path of the source, and knows nothing of what a function names.
    """
    import hashlib

    init, index_key = caching.FunctionCache.__init__, caching.Cache._index_key

    def digest(pieces: Iterable[bytes]) -> str:
        return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in pieces)).hexdigest()

    def digest_of_file(path: str) -> str:
        with open(path, "rb") as file:
            return digest([file.read()])

    def get_suitable_cache_subpath(_: Any, py_file: str) -> str:
        stem = os.path.splitext(os.path.basename(py_file))[0]
        return f"{stem}_{digest_of_file(py_file)[:32]}"

    def get_source_stamp(self: Any) -> str:
        return digest_of_file(self._py_file)

    def __init__(self: Any, function: Any) -> None:  # noqa: N807
        init(self, function)
        self._owner = sys._getframe(1).f_locals.get("self", function)  # which has the options

    def content(value: Any) -> str:
        return digest(_content(value, frozenset(), caching.dumps, {}))

    def plain(value: Any) -> bytes:
        text = _text(value)
        return (repr(type(value)) if " at 0x" in text else text).encode()

    @functools.lru_cache(maxsize=1)
    def overloads(_: int) -> str:
        pieces: list[bytes] = []
        for function in _overloads():
            try:  # noqa: SIM105  contextlib is not imported for this
                pieces.extend(_content(function, frozenset(), plain, {}))
            except Exception:  # noqa: BLE001, S110  what is found so far counts
                pass
        return digest(pieces)

    def _index_key(self: Any, *about: Any) -> Any:
        owner = getattr(self, "_owner", self._py_func)
        try:
            fields = [getattr(kind, "fields", ()) for kind in getattr(about[0], "args", about[0])]
            named = content((owner, fields)) + overloads(len(_templates()))
        except Exception:  # noqa: BLE001  something has no content that can be compared
            named = os.urandom(16).hex()
        return (*index_key(self, *about)[:2], named)  # the rest are digests of what `named` has

    caching.FunctionCache.__init__, caching.Cache._index_key = __init__, _index_key
    provided = caching.UserProvidedCacheLocator
    provided.get_suitable_cache_subpath = classmethod(get_suitable_cache_subpath)
    provided.get_source_stamp = get_source_stamp


def _templates() -> list[Any]:
    """Return what is registered at Numba for functions and attributes, by itself and by others."""
    registry = sys.modules["numba.core.typing.templates"].builtin_registry
    return [*registry.functions, *registry.attributes]


def _overloads() -> list[Any]:
    """Return what `numba.extending.overload` and its like got from others than Numba."""
    found = (getattr(template, "_overload_func", None) for template in _templates())
    return [f for f in found if f and not f.__globals__["__name__"].startswith("numba.")]


def _content(
    value: Any, names: frozenset[str], dumps: Callable[[Any], bytes], done: dict[Any, Any]
) -> Iterator[bytes]:
    """Yield what a value is: code with options and all that it names, or content.

    names: what is looked up in it, or in its class. done: names that were looked up, by owner.
    """
    kernel = getattr(getattr(value, "kernel_ir", None), "func_id", None)  # of a stencil
    found = (getattr(value, name, None) for name in ("py_func", "__wrapped__"))
    wrapped = next(filter(None, (*found, getattr(kernel, "func", None))), None)
    function: Any = value if isinstance(value, types.FunctionType) else wrapped
    home = getattr(value, "__module__", None) or type(value).__module__
    inner: dict[str, Any] = {}
    if code := getattr(function, "__code__", None):
        compiler = getattr(value, "_compiler", value)
        yield _text((code, [getattr(compiler, name, None) for name in _OPTIONS])).encode()
        yield from _content((function.__defaults__, function.__kwdefaults__), names, dumps, done)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        inner = {**function.__globals__, **dict(zip(code.co_freevars, cells))}
        names = frozenset(("_fields", "_field_defaults", *_names_in(code)))  # of a namedtuple
        home = inner.get("__name__", "")
    elif isinstance(value, types.ModuleType):
        home, inner = value.__name__, vars(value)
        yield home.encode()
    elif struct := getattr(getattr(value, "class_type", None), "struct", None):  # of a jitclass
        inner = {**value.class_type.methods, **value.class_type.static_methods}
        names = frozenset(inner)
        yield _text(struct).encode()
    else:
        owner = value if isinstance(value, type) else type(value)
        inner = {name: getattr(owner, name) for name in names.intersection(dir(owner))}
        yield f"{owner.__module__}.{owner.__qualname__}".encode()
        if isinstance(value, (tuple, list)):
            for item in value:
                yield from _content(item, names, dumps, done)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(b"".join(_content(item, names, dumps, done)) for item in value)
        elif value is not owner:
            yield dumps(value)
    if str(home).partition(".")[0] in _KEYED:
        return
    for name in sorted(names & inner.keys()):
        if (id(value), name) not in done:
            done[id(value), name] = value
            yield name.encode()
            yield from _content(inner[name], names, dumps, done)


_KEYED = {*sys.stdlib_module_names, "numba", "numpy"}  # whose versions key the cache
_OPTIONS = ("targetoptions", "locals", "_ctor_kwargs", "mode", "options", "signature")


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _text(value: Any) -> str:
    """Return a text of plain values, or of instructions without their place, alike anywhere."""
    if isinstance(value, types.CodeType):
        instructions = value.co_code, value.co_names, value.co_varnames, value.co_flags
        return _text((*instructions, *value.co_consts))
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        texts = [_text(item) for item in (value.items() if isinstance(value, dict) else value)]
        return f"({', '.join(texts if isinstance(value, (tuple, list)) else sorted(texts))})"
    return repr(value)


def _need_no_header(codecache: Any) -> None:
    """Have Inductor precompile a header for what is not compiled yet alone."""
    precompile = codecache._precompile_header

    @functools.wraps(precompile)
    def _precompile_header(*args: Any, **options: Any) -> Any:
        known = sys._getframe(1).f_locals
        built = os.path.splitext(str(known.get("main_path", "")))[0] + ".so"
        return "" if os.path.exists(built) else precompile(*args, **options)

    codecache._precompile_header = _precompile_header


def _name_compiler_alike(cpp_builder: Any) -> None:
    """Have Inductor leave out of its keys by which path a compiler was started."""
    tell = cpp_builder.get_compiler_version_info

    @functools.lru_cache(None)
    def get_compiler_version_info(compiler: str) -> str:
        text = str(tell(compiler))
        before, found, after = text.partition("COLLECT_GCC=")
        return before + after.partition("_COLLECT")[2] if found else text

    cpp_builder.get_compiler_version_info = get_compiler_version_info


def _use_drop_ins(cpp_extension: Any) -> None:
    """Have `load` and `load_inline` served by jitkern's cache, which needs no compiler to do so."""
    try:
        import jitkern
    except ImportError:  # an environment without jitkern: Torch builds in our folder
        return
    cpp_extension.load, cpp_extension.load_inline = jitkern.load, jitkern.load_inline


def _tell_of_frozen(build: Any) -> None:
    """Have jitkern's own refusals told as those of other JITs."""
    made = build.not_cached

    @functools.wraps(made)
    def not_cached(variant: Any, *rest: Any) -> Any:
        error = made(variant, *rest)
        if message := events.begins("jitkern", f"`{variant.op}`", _asked_at()):
            error.args, error.command = (message,), ""
        return error

    build.not_cached = not_cached


def _patches() -> dict[str, list[Callable[[Any], object]]]:
    """Return what is done to each module once it is loaded."""
    patches: dict[str, list[Callable[[Any], object]]] = {
        "subprocess": [_count_children],
        "numba.core.caching": [_key_numba_by_content],
        "torch._inductor.codecache": [_need_no_header],
        "torch._inductor.cpp_builder": [_name_compiler_alike],
        "torch.utils.cpp_extension": [_use_drop_ins],
        "jitkern.jit.build": [_tell_of_frozen],
    }
    for jit in jits.JITS:
        for place in jit.compiles:
            module, _, name = place.partition(":")
            patches.setdefault(module, []).append(functools.partial(_counted, jit, name))
    return patches
