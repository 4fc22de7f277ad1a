"""The path of one call: key, lookup, and on a miss lock, compile, publish.

`ensure` serves first use, prewarm and the tests alike: prewarm is first use without the load.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import config, counters, events
from jitkern.cache import Cache, Entry, Found, reason_of
from jitkern.compilers import compiler_for
from jitkern.config import Config
from jitkern.errors import (
    CacheError,
    CompileError,
    CompilerNotFound,
    DeclarationError,
    JitkernError,
    LoadError,
    NotCached,
    TargetError,
    UntrustedCache,
)
from jitkern.kernel import SOURCES, Source, Variant
from jitkern.key import Key
from jitkern.launch.loaded import load
from jitkern.manifest import Manifest
from jitkern.request import Request
from jitkern.target import Target
from jitkern.trust import Trust, installed_layers

if TYPE_CHECKING:
    from jitkern.compilers.result import Built

_COMPILER = "another compiler made it"
_REFRESH = Found(None, reason="refresh")
_OPENED_BY = (  # the settings that say which cache it is, and how it is used
    "cache_dir", "system_cache", "trusted", "trusted_keys", "signed", "verify", "fsync", "fallback",
    "max_size", "max_age",
)  # fmt: skip
_log = logging.getLogger(__name__)
_loaded: dict[str, Any] = {}
_locks: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
_guard = threading.Lock()
_spilled: list[bool] = []  # something was compiled into the private root


def _after_fork() -> None:
    """A child forgets the locks that its parent's other threads held."""
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()
    _locks.clear()
    _open_cache.cache_clear()  # it may be in the private root of the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def exact_target(variant: Variant, target: Target) -> Target:
    """`target` with what this variant's artifact depends on: platform, ABI, instruction set."""
    return compiler_for(variant.source).target(variant.source, target)


def key_of(variant: Variant, target: Target) -> Key:
    """The key under which `variant` for `target` is cached. Needs no compiler."""
    return Request.of(variant, target).key


def ensure(
    variant: Variant, target: Target, *, refresh: bool = False, may_compile: bool = True
) -> Entry:
    """The published entry of `variant` for `target`, compiled if no layer of the cache has it.

    Raises NotCached where compiling is off, CompilerNotFound, TargetError, CompileError,
    CacheError.
    """
    return ensure_and_tell(variant, target, refresh=refresh, may_compile=may_compile)[0]


def ensure_and_tell(
    variant: Variant, target: Target, *, refresh: bool = False, may_compile: bool = True
) -> tuple[Entry, bool]:
    """What `ensure` returns, and whether it was compiled just now."""
    started = time.perf_counter()
    request = Request.of(variant, target)
    key = request.key
    found = _REFRESH if refresh else _look_up(request)
    if found.entry is None:
        if not may_compile or config.current().compile == "never" or capturing():
            raise _not_cached(variant, key)
        from jitkern import lock  # a hit takes none

        with (
            _one_at_a_time(key.digest),
            lock.held(_lock_name(key), f"{variant.op} for {key.target}"),
        ):
            why = found.reason
            found = _REFRESH if refresh else _look_up(request)
            if found.entry is None:
                return _compile(request, started, why), True
    events.report(variant, key, "hit", started, found.entry)
    _count_hit(found.entry)
    return found.entry, False


def _lock_name(key: Key) -> str:
    """Of this key in this cache: builders for another one need not wait."""
    root = hashlib.sha256(os.fsencode(open_cache().root)).hexdigest()
    return f"{key.digest[:24]}-{root[:8]}"


def loaded(variant: Variant, target: Target, *, may_compile: bool = True) -> Any:
    """What `variant` compiles to, callable in this process (see launch.loaded.load).

    Raises what `ensure` does, and LoadError.
    """
    entry = ensure(variant, target, may_compile=may_compile)
    digest = entry.manifest.digest
    with _one_at_a_time(f"load {digest}"):
        if digest not in _loaded:
            try:
                _loaded[digest] = load(variant.source, entry)
            except LoadError as e:
                if e.whole:
                    raise
                gone = not entry.path.exists()  # evicted since it was found, which is a miss
                if not gone:
                    _log.warning("%s; compiling it again", e)
                    open_cache().quarantine(entry)
                _loaded[digest] = load(
                    variant.source,
                    ensure(variant, target, refresh=not gone, may_compile=may_compile),
                )
        return _loaded[digest]


def load_entry(source: Source, entry: Entry) -> Any:
    """What an entry of this kind of source holds, loaded once in a process. Raises LoadError."""
    digest = entry.manifest.digest
    with _one_at_a_time(f"load {digest}"):
        new = digest not in _loaded
        if new:
            _loaded[digest] = load(source, entry)
    if new:
        events.recall(source, entry)
        _count_hit(entry)
    return _loaded[digest]


def _count_hit(entry: Entry) -> None:
    counters.hit(open_cache().root, entry.root, entry.manifest.seconds)


def open_cache() -> Cache:
    """The cache of the settings, or, warned of once, a private one where that is not trusted."""
    settings = config.current()
    return _open_cache(*(getattr(settings, name) for name in _OPENED_BY))


@functools.lru_cache(maxsize=8)
def _open_cache(*values: Any) -> Cache:
    settings = Config(**dict(zip(_OPENED_BY, values)))
    try:
        return Cache.open(settings)
    except UntrustedCache as e:
        if settings.fallback == "raise":
            raise
        _warn_of_private_root(e)
        from jitkern.private import private_root

        return Cache(
            private_root(), (*settings.system_cache, *installed_layers()),
            verify=settings.verify, fsync=False, rules=Trust.of(settings),
        )  # fmt: skip


def _warn_of_private_root(why: CacheError) -> None:
    from jitkern.private import private_root

    _log.warning(
        "%s. Until then kernels are compiled into %s, for this process alone", why, private_root()
    )


def _look_up(request: Request) -> Found:
    key = request.key
    found = open_cache().look_up(key.target, key.name, key.digest)
    if found.entry is None and _spilled:
        found = found._replace(entry=_spill().find(key))
    if found.entry and config.current().compiler == "exact":
        source = request.variant.source
        with contextlib.suppress(CompilerNotFound, TargetError):  # what cannot be rebuilt is kept
            installed = request.compiler.identities(source, request.exact)
            if found.entry.manifest.compiler not in installed:
                return Found(None, reason=_COMPILER)
    return found


def _compile(request: Request, started: float, why: str) -> Entry:
    variant, key = request.variant, request.key
    try:
        return _into_a_cache(request, started, why)
    except JitkernError as e:
        events.report(variant, key, "failed", started, reason=str(e))
        if isinstance(e, CacheError) and variant.op not in str(e):
            raise type(e)(f"{variant.op} for {key.target}: {e}", **vars(e)) from e
        raise


def _into_a_cache(request: Request, started: float, why: str) -> Entry:
    try:
        return _publish(open_cache(), request, started, why)
    except CacheError as e:
        settings = config.current()
        code = getattr(e, "errno", None)
        no_home = code in (errno.ENOTDIR, errno.EEXIST) and settings.cache_dir_origin == "default"
        readonly = no_home or code in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOENT)
        if not readonly or settings.fallback == "raise":
            raise
        if not _spilled:
            _warn_of_private_root(e)
            _spilled.append(True)
        return _publish(_spill(), request, started, why)


def _spill() -> Cache:
    from jitkern.private import private_root

    return Cache(private_root(), fsync=False)


def _publish(cache: Cache, request: Request, started: float, why: str) -> Entry:
    """Compile in staging and publish, again if a source was edited or staging swept meanwhile."""
    variant = request.variant
    changed = False
    for _ in range(3):
        with cache.staging() as staging:
            began = time.perf_counter()
            built, now = _built(cache, request, staging)
            seconds = round(time.perf_counter() - began, 4)
            key, edited = request.key, now.key != request.key
            changed |= edited
            request = now
            if built is None or edited:
                continue
            if why in (_REFRESH.reason, _COMPILER) and (old := cache.find(key)):
                cache.remove(old.path)
            from jitkern.package import package_of

            manifest = Manifest(
                key.inputs, meta=built.meta, compiler=built.compiler, seconds=seconds,
                package=package_of(variant.source),
            )  # fmt: skip
            try:
                entry = cache.publish(key, staging, manifest)
            except CacheError:
                if staging.is_dir():
                    raise
                continue
        events.report(variant, key, "built", started, entry, why)
        counters.miss(cache.root, why, seconds)
        return entry
    what = (
        f"its source in {variant.source.folder} keeps changing while it compiles" if changed
        else f"the folder in {cache.root} that it is built in is deleted while it compiles: "
        "point JITKERN_CACHE_DIR at a directory that nothing else cleans"
    )  # fmt: skip
    raise CompileError(f"{variant.op}: {what}", op=variant.op)


def _built(cache: Cache, request: Request, staging: Path) -> tuple[Built | None, Request]:
    """What the compiler made, and the request with the files as they are after that.

    None where another process took the staging directory for dead, as when the clock jumped, and
    where the compiler failed on a file that was edited since the request was made.
    """
    variant = request.variant
    _check_version(request)
    _check_include(variant.op, variant.source)
    try:
        built = request.compiler.compile(variant, request.exact, request.closure, staging)
    except CompileError as e:
        now = request.again()
        if not staging.is_dir() or now.key != request.key:
            return None, now
        if e.log:
            e.args = (f"{e}\nfull log: {cache.keep_log(request.key, staging)}",)
        raise
    except OSError as e:
        if not staging.is_dir():
            return None, request.again()
        raise _failed(cache, request, staging, e) from e
    return built, request.again()


def _failed(cache: Cache, request: Request, staging: Path, e: OSError) -> JitkernError:
    """What to raise for a compile that the system put an end to."""
    variant = request.variant
    staged = str(e.filename).startswith(str(staging))
    if staged and e.errno == errno.ENOENT:
        name = Path(str(e.filename)).name
        what = f"its compiler ended without an error and did not write {name}"
    elif staged or e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        return cache.write_error(e)
    else:
        what = f"it cannot be compiled: {reason_of(e)}"
    return CompileError(f"{variant.op} for {request.exact}: {what}", op=variant.op)


def _check_version(request: Request) -> None:
    op, source = request.variant.op, request.variant.source
    wanted = source.min_compiler
    if wanted:
        found = request.compiler.identities(source, request.exact)[0]
        if version_numbers(found["version"]) < version_numbers(wanted):
            raise CompilerNotFound(
                f"{op} for {request.exact} wants {found['name']} {wanted} or newer, and this is "
                f"{found['version']}: upgrade it",
                remedy=f"upgrade {found['name']} to {wanted} or newer",
            )


def _check_include(op: str, source: Source) -> None:
    """Raise DeclarationError for a directory that is declared and not there.

    Of `load_inline` and `load` one may be absent, as it may for Torch's.
    """
    for root in source.include if source.kind in SOURCES else ():
        place = Path(source.folder, root.path)
        if not place.is_dir():
            raise DeclarationError(
                f"{op}: include=[{root.path!r}] is no directory: there is no {place}"
            )


def version_numbers(version: str) -> list[int]:
    """`[12, 2, 0]` for `c++ (Debian 12.2.0-14) 12.2.0`: the first version that it names."""
    found = re.search(r"\d+(?:\.\d+)+", version) or re.search(r"\d+", version)
    return [int(part) for part in found.group().split(".")] if found else []


def _not_cached(variant: Variant, key: Key) -> NotCached:
    why = (
        "and a CUDA graph is being captured, during which nothing can be compiled" if capturing()
        else "and compiling is off (JITKERN_COMPILE=never)" if config.current().compile == "never"
        else "and is being compiled in the background"
    )  # fmt: skip
    what = f"{variant.op} ({variant.label})" if variant.label else variant.op
    return NotCached(
        f"{what} for {key.target} is not cached in {open_cache().root}, {why}. "
        f"Prewarm it: {_remedy(variant, key.target)}",
        path=key.name,
    )


def _remedy(variant: Variant, target: str) -> str:
    """What makes a variant ready: a command where its op is in a module that one can import."""
    register = sys.modules.get("jitkern.register")
    op = register.OPS.get(variant.op) if register else None
    module = op.module if op else variant.source.package
    package, _, inside = module.partition(".")
    if package == "__main__":
        return "declare the op in a module, which `jitkern prewarm MODULE` imports"
    name = variant.op.removeprefix("jitkern::")
    if "::" in name and module:  # of a package, which is found by its name where it lies
        found = not op or not inside or module.endswith(".kernel")
        name = package if found else module
    return (
        f"jitkern prewarm {name} --target {target}. If its samples have no such call, record one "
        "where it may compile: jitkern record -- COMMAND, then jitkern prewarm --from FILE"
    )


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be compiled or measured."""
    torch = sys.modules.get("torch")
    return bool(
        torch
        and torch.cuda.is_initialized()  # asks no device
        and torch.cuda.is_current_stream_capturing()
    )


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    with _guard:
        this = _locks.setdefault(name, threading.Lock())
    with this:
        yield
