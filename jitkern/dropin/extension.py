"""Answer calls of `load_inline` and `load` from the cache, or compile into it."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jitkern import cache, compilers, config, jit
from jitkern.cache.entry import Entry
from jitkern.cache.key import Key
from jitkern.compilers import compiler_for
from jitkern.compilers.cuda import arch_flags
from jitkern.compilers.torch_extension.inline import Inline, names_of
from jitkern.dropin import memo
from jitkern.errors import DeclarationError, LoadError, NotCached
from jitkern.files import atomic
from jitkern.loading import library
from jitkern.source import includes
from jitkern.source.flags import NotSupported, words
from jitkern.source.kinds import CUDA_SUFFIXES, Variant
from jitkern.target import Target

_FOLDERS = ("-I", "-L", "-isystem", "-iquote", "-idirafter")
_LINK_HINTS = (  # for what the system's loader says: see `first_hint`
    (
        r"undefined symbol: (\S+)",
        """\
. {0} is declared but not defined: define it, compile the unit that defines it, or link its \
library (extra_ldflags)""",
    ),
    (
        r"(\S+\.so\S*): cannot open shared object file",
        '. Say where {0} is: extra_ldflags=["-Wl,-rpath,/its/directory"], or LD_LIBRARY_PATH',
    ),
)
_log = logging.getLogger(__name__)


class _Unlinked(LoadError):
    """The system's loader refused a library: a symbol or another library is missing."""


def answer(call: Mapping[str, Any], key: Key | None, build_directory: str, *, verbose: bool) -> Any:
    """Return the module or the path for a call of `load_inline` or `load`.

    key: of the records of the call; build_directory: the folder for copies, or "".
    """
    source = source_of(call, build_directory)
    variant = Variant(f"inline::{memo.plain(source.name)}", source)
    target = target_of(source)
    entry, new = _ensured(variant, target)
    if verbose:
        sys.stderr.write(f"{'built' if new else 'found'} {entry.path}\n")
    try:
        result = _opened(source, entry)
    except _Unlinked as e:
        if new:
            raise
        _log.warning("%s; compiling it again", e)
        entry, new = jit.ensure(variant, target, refresh=True), True
        result = _opened(source, entry)
    absent = _absent(source) if key else None
    if source.output == "program":
        result = str(_runnable(Path(result)))
    elif key and absent is not None:
        memo.leave(key, source.name, source.output, entry, absent)
    if build_directory:
        copy = _leave_copies(source, entry, Path(build_directory))
        # A library is loaded from the cache, and a second copy of it would register itself again.
        return str(copy) if source.output == "program" else result
    return memo.remember(key, result, absent) if key and absent is not None else result


def source_of(call: Mapping[str, Any], build_directory: str = "") -> Inline:
    """Return the source that a call declares. Raises NotSupported."""
    import torch

    places = tuple(call["places"])
    files = names_of(places) if places else tuple(call["files"])
    if not files:
        raise DeclarationError(f"`{call['name']}` has no sources: give at least one")
    any_cuda = any(file.endswith(CUDA_SUFFIXES) for file in files)
    with_cuda = any_cuda if call["with_cuda"] is None else call["with_cuda"]
    if with_cuda and torch.version.hip:
        raise NotSupported("sources for ROCm are compiled by torch.utils.cpp_extension alone")
    kinds = ("cflags", "cuda_cflags", "ldflags")
    flags = {name: tuple(words(call[name])) for name in kinds}
    same = {name: call[name] for name in ("name", "texts", "output", "python", "include")}
    if build_directory:
        base = os.path.abspath(build_directory)  # noqa: PTH100
        flags = {name: tuple(_placed(given, base)) for name, given in flags.items()}
        same["include"] = [*call["include"], *((base,) if call["texts"] else ())]
    both: dict[str, Any] = {**flags, **same}
    source = Inline(files, with_cuda=with_cuda, places=places, **both)
    if any(map(source.is_cuda, files)):
        source.arch = arch_flags.arch_flags(config.cuda_arch_list(), source.cuda_cflags)
    return source


def _placed(flags: Sequence[str], base: str) -> Iterator[str]:
    """The flags with relative directories joined to `base`, where Torch runs its compilers."""
    for before, flag in zip(("", *flags), flags):
        option = "" if before in _FOLDERS else next(filter(flag.startswith, _FOLDERS), "")
        if option != flag and (option or before in _FOLDERS):
            yield option + os.path.normpath(os.path.join(base, flag[len(option) :]))  # noqa: PTH118
        else:
            yield flag.replace("$ORIGIN", base)


def target_of(source: Inline) -> Target:
    """This machine's target with the newest arch that the flags name; the key has all archs."""
    import torch

    here = Target.current("cpu")
    arch = arch_flags.named_arch((*source.arch, *source.cuda_cflags))
    if not (source.with_cuda and torch.version.cuda and arch):
        return here
    return here._replace(device="cuda", arch=arch, cuda=torch.version.cuda.replace(".", ""))


def _ensured(variant: Variant, target: Target) -> tuple[Entry, bool]:
    """The entry, and whether it was compiled just now."""
    try:
        return jit.ensure_and_tell(variant, target)
    except NotCached as e:
        raise NotCached(
            e.what.removesuffix("Prewarm it:") + "Call it once, with the same arguments, "
            "where compiling is allowed, and with this cache or one that becomes a layer of it",
            path=e.path,
        ) from None


def _opened(source: Inline, entry: Entry) -> Any:
    arguments = memo.arguments(source.name, source.output, entry)
    try:
        with entry.loadable() as place:
            return library.open_library(**arguments, place=place)
    except library.Registered as e:
        raise LoadError(f"`{source.name}` {e}") from e
    except library.Refused as e:
        hint = compilers.result.first_hint(str(e), _LINK_HINTS)
        raise _Unlinked(f"`{source.name}` cannot be loaded: {e}{hint}") from e


def _absent(source: Inline) -> list[str] | None:
    """The paths that must stay absent, if the call alone determines all else; None if it does not.

    None says that the entry depends on files, which must be read at each call.
    """
    if source.places:
        return None
    closure = compiler_for(source).closure(source)
    if closure.absent is None or closure.files.keys() - {*source.files}:
        return None
    elsewhere = [path for path in closure.absent if not path.startswith(source.folder)]
    paths = sorted(filter(os.path.isabs, elsewhere))
    return paths if all(path.startswith(f"{includes.SITE}/") for path in paths) else None


def _runnable(path: Path) -> Path:
    """The path of a program that may be run: its own, or a copy's if its mode cannot change."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IXUSR:
        return path
    try:
        path.chmod(mode | 0o111)
    except OSError:
        copy = cache.temporary_cache.private_root() / path.name
        _replace(copy, path.read_bytes(), 0o700)
        return copy
    return path


def _leave_copies(source: Inline, entry: Entry, folder: Path) -> Path:
    """Copy what was built, and the units that are texts, to `folder`; return the copy's path.

    Files with the same content stay. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(source.files, source.texts):
        _replace(folder / name, text.encode(), 0o644)
    copy = folder / (source.name + ("" if source.output == "program" else ".so"))
    _replace(copy, entry.read(entry.manifest.meta["artifact"]), 0o755)
    return copy


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Make `path` hold `data`, in one step: processes that mapped the old file keep it."""
    if not path.is_file() or path.read_bytes() != data:
        atomic.write(path, data, mode=mode)
