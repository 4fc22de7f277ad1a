"""Load a published entry into this process, without compiler, Triton or subprocess.

The modules for one kind of source are imported when an entry of that kind is loaded: the launch
runtime, which each process loads, needs none of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jitkern import loading, source as source_room
from jitkern.errors import DeclarationError, LaunchError, LoadError
from jitkern.loading import LOADED, preserved_float_environment
from jitkern.source.dtypes import DTYPES, STREAM
from jitkern.source.kinds import CUDA, DRIVER, FUNCTION, TEXT, Extension, Generated, Source

if TYPE_CHECKING:
    from jitkern.cache.entry import Entry

_Room = tuple[list[Any], ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_char]]


class HostFunction:
    """The function FUNCTION of a loaded library, which takes an array of addresses of values.

    It returns an exception of the kernel as a text (see `compilers/cpp/parameter_types.py`).
    """

    def __init__(self, library: ctypes.CDLL, meta: dict[str, Any], reference: str) -> None:
        self.meta = meta
        self.reference = reference
        self.parameters: list[str] = meta["parameters"]
        self.passed = self.parameters  # and what else a program passes, as of a CudaFunction
        self._library = library
        self._function = library[FUNCTION]
        self._types = [
            ctypes.c_void_p if code[:1] == "*" else DTYPES[code].ctype
            for code in self.parameters
            if code
        ]
        if hasattr(library, DRIVER):
            loading.cuda_driver.bind(library)
            self.passed = [*self.parameters, STREAM]
            self._types += [ctypes.c_void_p, ctypes.c_int]  # the stream and its device
        self._addresses = ctypes.c_void_p * len(self._types)
        self._rooms: list[_Room] = []

    @property
    def address(self) -> int:
        """The address of the function's code, as programs take it."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def call(self, values: list[Any], what: str) -> None:
        """Call the function; `values` match `parameters`. Raises LaunchError for an exception.

        values: for a function that launches on a GPU also the stream, and the device's number.
        what: the function and the op, for that error.
        """
        try:
            room = self._rooms.pop()
        except IndexError:  # all rooms are in use by other threads
            cells = [kind() for kind in self._types]
            addresses = self._addresses(*map(ctypes.addressof, cells))
            room = cells, addresses, ctypes.create_string_buffer(TEXT)
        cells, addresses, text = room
        for cell, value in zip(cells, values):
            cell.value = value
        if self._function(addresses, text):  # whose room nobody gets again
            said = text.value.decode(errors="replace")
            raise LaunchError(f"{what} raised an exception: {said}", launched=1)
        self._rooms.append(room)


def load(source: Source, entry: Entry, op: str = "") -> Any:
    """A CudaFunction, a HostFunction, or for an Extension the function itself, for `op`.

    Raises LoadError, and DeclarationError for an Extension that registers a name already
    registered, or lacks its function.
    """
    place = str(entry.path)  # that the loader of the system is given
    try:
        _refuse_address_sanitizer(source)
        if isinstance(source, Extension):
            return _extension(source, entry, op)
        meta = dict(entry.manifest.meta)
        if source.runs == CUDA:
            return code_of(source, entry.read(meta["artifact"]), "", meta, entry.reference)
        with entry.loadable() as place, preserved_float_environment():
            return code_of(source, b"", place, meta, entry.reference)
    except (LoadError, DeclarationError):
        raise
    except Exception as e:  # of the system's loader, or because of an odd manifest
        hint = ""
        if _is_noexec(entry):
            hint = f"; {entry.root} is mounted noexec: point JITKERN_CACHE_DIR elsewhere"
        elif "cannot open shared object" in str(e) and not str(e).startswith(place):
            hint = "; name its directory in library_dirs, and link it with -Wl,-soname,NAME"
        said = str(e).replace(place, str(entry.path))
        raise LoadError(f"could not load {entry.path}: {said}{hint}", whole=bool(hint)) from e


def _refuse_address_sanitizer(source: Source) -> None:
    """Raise LoadError for code whose runtime would end this process: it must be loaded first."""
    asking = [f for f in source.every_flag if f.startswith("-fsanitize=") and "address" in f]
    if asking and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise LoadError(
            f"{source.files[0]} is compiled with {asking[0]}, and this program was started without "
            "the runtime of that: leave the flag out, or start the program with "
            'LD_PRELOAD="$(gcc -print-file-name=libasan.so)"; `jitkern check` finds what a kernel '
            "writes beyond its tensors",
            whole=True,
        )


def _is_noexec(entry: Entry) -> bool:
    """Whether libraries cannot be loaded from the file system of an entry."""
    try:
        return bool(os.statvfs(entry.path).f_flag & os.ST_NOEXEC)
    except (OSError, AttributeError):  # gone; not on Windows
        return False


def code_of(source: Source, data: bytes, place: str, meta: dict[str, Any], reference: str) -> Any:
    """A CudaFunction of the cubin `data`, else a HostFunction or CDLL of the library at `place`.

    meta, reference: of the entry that holds them.
    """
    if used := meta.get("globals"):  # of a Triton kernel
        source_room.triton_globals.check(source, used)
    if source.runs == CUDA:
        name = f"`{meta['symbol']}`"
        return loading.cuda_driver.CudaFunction(data, meta, name, reference)
    library = ctypes.CDLL(place)
    return library if isinstance(source, Generated) else HostFunction(library, meta, reference)


def _shared_libraries(source: Extension) -> Iterator[str]:
    """The shared libraries of `library_dirs` that are linked; what others need comes first."""
    for word in reversed(source.link_words):
        name = word.removeprefix("-l")
        file = name[1:] if name[:1] == ":" else f"lib{name}.so"
        paths = (os.path.join(folder, file) for folder in source.library_folders)  # noqa: PTH118
        found = next(filter(os.path.isfile, paths), "") if name != word else ""
        if found and source_room.flags.is_loaded(found):  # rather than a script of the linker
            yield found


def _load_shared(path: str, op: str) -> None:
    """Load a shared library that an Extension is linked with, for as long as the process lives.

    The loader of the system finds it by its SONAME then. Raises LoadError where the loader takes a
    library with other content, which an Extension before was linked with.
    """
    with open(path, "rb") as file:
        content = file.read()
    digest = hashlib.sha256(content).hexdigest()
    file_name = os.path.basename(path)  # noqa: PTH119  imports less
    names = re.findall(rb"\0(%s[.\d]*)(?=\0)" % re.escape(os.fsencode(file_name)), content)
    taken = [ctypes.CDLL(path)]  # an earlier one of this path, if it is loaded
    LOADED.setdefault(f"shared {taken[0]._handle}", digest)
    for name in {*names}:
        with suppress(OSError):  # no SONAME
            taken.append(ctypes.CDLL(os.fsdecode(name), os.RTLD_NOLOAD | os.RTLD_NOW))
    if any(LOADED.get(f"shared {library._handle}", digest) != digest for library in taken):
        raise LoadError(
            f"the Extension of {op} is linked with {path}, and this process has loaded another "
            f"{file_name} for an Extension before, which the system takes in its place: start a "
            "new process, or rename one of the two libraries",
            whole=True,
        )


def _extension(source: Extension, entry: Entry, op: str) -> Callable[..., Any]:
    import torch

    meta = entry.manifest.meta
    path, output = str(entry.path / meta["artifact"]), "module" if meta["module"] else "library"
    with preserved_float_environment():
        for library in _shared_libraries(source):
            _load_shared(library, op)
    try:
        with entry.loadable() as place:
            opened = loading.library.open_library(
                meta["module"], output, path, meta["namespaces"], meta["ops"], place,
                f"library {entry.manifest.digest}",
            )  # fmt: skip
    except loading.library.Registered as e:
        raise DeclarationError(f"the Extension of {op} {e}") from e
    namespace, _, name = source.function.rpartition("::")
    home = getattr(torch.ops, namespace) if namespace else opened
    if not hasattr(home, name):
        registered = torch._C._dispatch_get_all_op_names() if namespace else dir(home)
        begins = f"{namespace}::" if namespace else ""
        there = [n for n in registered if n.startswith(begins) and not n.startswith("_")]
        raise DeclarationError(
            f"the Extension of {op} has no function `{source.function}`; it has: "
            f"{', '.join(sorted(there)) or 'none'}"
        )
    function: Callable[..., Any] = getattr(home, name)
    return function.default if namespace else function  # type: ignore[attr-defined]
