"""In each Python process of a run: compiles are counted or refused, and caches made to travel.

Python reads this file by itself, also in environments without jitkern, so it imports the standard
library alone, and jitkern only where it is installed. Modules of JITs are changed when the program
imports them; see `_PATCHES`.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # as in `typing`, whose import would delay the start of each process
if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _beside(name: str) -> types.ModuleType:
    """Return a module of this folder, read by itself."""
    module = type(sys)(f"_jitkern_run_{name}")
    loader = type(__loader__)(module.__name__, os.path.join(_HERE, f"{name}.py"))  # type: ignore[name-defined]
    loader.exec_module(module)
    sys.modules[module.__name__] = module
    return module


jits = _beside("jits")
events = _beside("events")


class CompileRefused(RuntimeError):
    """Something compiles, and the run is frozen."""


def install() -> None:
    """Change modules of JITs as they are imported, and refuse compilers if the run is frozen."""
    sys.meta_path.insert(0, _ChangingFinder())
    _register()
    os.register_at_fork(after_in_child=_register)
    if os.environ.get(events.MODE):
        sys.addaudithook(_audit)


def _register() -> None:
    """Have the stand-ins of compilers leave the children of this process to it."""
    try:
        with open(f"{os.environ[events.FOLDER]}/pids/{os.getpid()}", "w"):
            pass
    except OSError:
        pass  # the run has ended before this process


# ---- modules, as they are imported ---------------------------------------------------------------


class _ChangingFinder:
    """A finder that changes the modules of `_PATCHES` once they are loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec that the other finders give, with a loader that changes the module."""
        if name not in _PATCHES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec and spec.loader:
                spec.loader = _ChangingLoader(spec.loader, _PATCHES[name])  # type: ignore[assignment]
                return spec
        return None


class _ChangingLoader:
    """The loader of a module that is changed once it is loaded."""

    def __init__(self, loader: Any, patches: list[Callable[[Any], object]]) -> None:
        self._loader = loader
        self._patches = patches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        """Load the module, then change it."""
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader
        for patch in self._patches:
            try:
                patch(module)
            except Exception as e:  # noqa: BLE001  another version of it: it runs as without us
                sys.stderr.write(f"jitkern run: {module.__name__} is not the one known: {e!r}\n")


# ---- compiles ------------------------------------------------------------------------------------


def _counted(jit: str, name: str, module: Any) -> None:
    """Have a function of a module counted as a compile of a JIT, and refused.

    name: the function; or several with `|`, the first of which that is there is taken.
    """
    import functools

    names = [part.split(".") for part in name.split("|")]
    path = next((path for path in names if hasattr(module, path[0])), names[0])
    owner = functools.reduce(getattr, path[:-1], module)
    compile_it = getattr(owner, path[-1])

    @functools.wraps(compile_it)
    def compiles(*args: Any, **kwargs: Any) -> Any:
        what = _name_in(args) or path[-1]
        _begins(jit, what)
        started = time.perf_counter()
        try:
            return compile_it(*args, **kwargs)
        finally:
            _ended(jit, what, time.perf_counter() - started)

    setattr(owner, path[-1], compiles)


def _counter(jit: str, name: str) -> Callable[[Any], object]:
    return lambda module: _counted(jit, name, module)


def _name_in(args: tuple[Any, ...]) -> str:
    """Return the name of what is compiled, from the first argument that has one."""
    for argument in args:
        for found in (argument, getattr(argument, "fn", None), getattr(argument, "py_func", None)):
            name = getattr(found, "__name__", "")
            if isinstance(name, str) and name:
                return f"`{name}`"
    return ""


def _begins(tool: str, what: str) -> None:
    """Refuse a compile that begins in a frozen run, and tell of it in one that warns."""
    mode = os.environ.get(events.MODE)
    if not mode:
        return
    message = events.refusal(tool, what, _asked_at())
    if mode == "frozen":
        events.note(tool=tool, what=what, where=_asked_at(), refused=True)
        raise CompileRefused(message)
    import traceback

    stack = "".join(traceback.format_stack()[:-2])
    sys.stderr.write(f"{message}\n{stack}")


def _ended(tool: str, what: str, seconds: float) -> None:
    events.note(tool=tool, what=what, where=_asked_at(), seconds=round(seconds, 3))


def _asked_at() -> str:
    """Return the innermost line of the program itself, else the innermost of a library."""
    frame: types.FrameType | None = sys._getframe(1)
    lines = []
    while frame:
        path = frame.f_code.co_filename
        lines.append(f"{path}:{frame.f_lineno}")
        library = "site-packages" in path or "dist-packages" in path or path.startswith("<")
        if not (library or path.startswith((_HERE, os.path.dirname(os.__file__)))):
            return lines[-1]
        frame = frame.f_back
    return lines[-1] if lines else "?"


# ---- compilers that are started ------------------------------------------------------------------


def _compiler_in(words: Any) -> str:
    """Return the compiler that a command starts to compile something, or ""."""
    if isinstance(words, (str, bytes)):
        import shlex

        try:
            words = shlex.split(os.fsdecode(words))
        except ValueError:
            return ""
    words = [os.fsdecode(word) for word in words or ()]
    name = os.path.basename(words[0]) if words else ""
    if name in ("sh", "bash", "dash") and words[1:2] == ["-c"] and len(words) > 2:
        return _compiler_in(words[2])
    plain = name.rstrip("0123456789.").rstrip("-")
    asks = len(words) < 2 or any(word in jits.ASKS or word.startswith("-print") for word in words)
    return plain if plain in jits.COMPILERS and not asks else ""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        words = args[1]
    elif event == "os.system":
        words = args[0]
    else:
        return
    tool = _compiler_in(words)
    if tool:
        _begins(tool, _source_in(words))


def _source_in(words: Any) -> str:
    """Return the file that a compiler compiles, as far as its command says."""
    words = words if isinstance(words, (list, tuple)) else os.fsdecode(words).split()
    ends = (".cu", ".cpp", ".cc", ".c", ".cxx", ".ptx", ".ll", ".hpp")
    found = [os.fsdecode(word) for word in words if os.fsdecode(word).endswith(ends)]
    return found[0] if found else os.fsdecode(words[-1])


def _count_children(subprocess: Any) -> None:
    """Have the compilers that a process starts counted, with the seconds that they take."""
    import functools

    start, ended = subprocess.Popen.__init__, subprocess.Popen._handle_exitstatus

    @functools.wraps(start)
    def __init__(self: Any, args: Any, *rest: Any, **options: Any) -> None:  # noqa: N807
        tool = _compiler_in(args)
        if tool:
            self._jitkern_started = tool, _source_in(args), time.perf_counter()
        start(self, args, *rest, **options)

    @functools.wraps(ended)
    def _handle_exitstatus(self: Any, *args: Any, **options: Any) -> Any:
        started = self.__dict__.pop("_jitkern_started", None)
        if started:
            _ended(started[0], started[1], time.perf_counter() - started[2])
        return ended(self, *args, **options)

    subprocess.Popen.__init__ = __init__
    subprocess.Popen._handle_exitstatus = _handle_exitstatus


# ---- caches that travel --------------------------------------------------------------------------


def _key_numba_by_content(caching: Any) -> None:
    """Have Numba name and compare sources by content: its folders have hashes of paths."""
    import hashlib

    def digest_of_folder(path: str) -> Any:
        digest = hashlib.sha256()
        folder = os.path.dirname(os.path.abspath(path))
        names = sorted(
            {os.path.basename(path), *(n for n in os.listdir(folder) if n.endswith(".py"))}
        )
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(f"{name}\0".encode() + hashlib.sha256(file.read()).digest())
        return digest

    def get_suitable_cache_subpath(_: Any, py_file: str) -> str:
        stem = os.path.splitext(os.path.basename(py_file))[0]
        return f"{stem}_{digest_of_folder(py_file).hexdigest()[:32]}"

    def get_source_stamp(self: Any) -> bytes:
        return bytes(digest_of_folder(self._py_file).digest())

    provided = caching.UserProvidedCacheLocator
    provided.get_suitable_cache_subpath = classmethod(get_suitable_cache_subpath)
    provided.get_source_stamp = get_source_stamp


def _need_no_header(codecache: Any) -> None:
    """Have Inductor precompile a header for what is not compiled yet alone."""
    import functools

    precompile = codecache._precompile_header

    @functools.wraps(precompile)
    def _precompile_header(*args: Any, **options: Any) -> Any:
        known = sys._getframe(1).f_locals
        built = os.path.splitext(str(known.get("main_path", "")))[0] + ".so"
        return "" if os.path.exists(built) else precompile(*args, **options)

    codecache._precompile_header = _precompile_header


def _name_compiler_alike(cpp_builder: Any) -> None:
    """Have Inductor leave out of its keys by which path a compiler was started."""
    import functools

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


def _patches() -> dict[str, list[Callable[[Any], object]]]:
    """Return what is done to each module once it is loaded."""
    patches: dict[str, list[Callable[[Any], object]]] = {
        "subprocess": [_count_children],
        "numba.core.caching": [_key_numba_by_content],
        "torch._inductor.codecache": [_need_no_header],
        "torch._inductor.cpp_builder": [_name_compiler_alike],
        "torch.utils.cpp_extension": [_use_drop_ins],
    }
    for jit in jits.JITS:
        for place in jit.compiles:
            module, _, name = place.partition(":")
            patches.setdefault(module, []).append(_counter(jit.name, name))
    return patches


_PATCHES = _patches()
