"""A miss: compile in staging, publish, and say what went wrong."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config
from jitkern.cache import usage
from jitkern.cache.key import Key
from jitkern.cache.manifest import Manifest
from jitkern.cache.root import reason_of
from jitkern.cache.store import Cache, Entry
from jitkern.errors import (
    CacheError,
    CompileError,
    CompilerNotFound,
    DeclarationError,
    JitkernError,
    NotCached,
)
from jitkern.jit import cache_in_use
from jitkern.jit.cache_in_use import open_cache
from jitkern.jit.obtain import OTHER_COMPILER, REFRESH, capturing, report
from jitkern.jit.request import Request
from jitkern.source.kinds import SOURCES, Source, Variant
from jitkern.source.provenance import package_of

if TYPE_CHECKING:
    from jitkern.compilers.result import Built


def lock_name(key: Key) -> str:
    """Of this key in this cache: builders for another one need not wait."""
    root = hashlib.sha256(os.fsencode(open_cache().root)).hexdigest()
    return f"{key.digest[:24]}-{root[:8]}"


def build(request: Request, started: float, why: str) -> Entry:
    """Compile and publish, or raise what went wrong and tell of it."""
    variant, key = request.variant, request.key
    try:
        return _into_a_cache(request, started, why)
    except JitkernError as e:
        report(variant, key, "failed", started, reason=str(e))
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
        if not cache_in_use.spilled:
            cache_in_use.warn_of_private_root(e)
            cache_in_use.spilled.append(True)
        return _publish(cache_in_use.spill(), request, started, why)


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
            if why in (REFRESH.reason, OTHER_COMPILER) and (old := cache.find(key)):
                cache.remove(old.path)
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
        report(variant, key, "built", started, entry, why)
        usage.miss(cache.root, why, seconds)
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


def not_cached(variant: Variant, key: Key) -> NotCached:
    """Say why nothing is compiled, and what makes the variant ready."""
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
    module = variant.source.module or variant.source.package
    package, _, inside = module.partition(".")
    if package == "__main__":
        return "declare the op in a module, which `jitkern prewarm MODULE` imports"
    name = variant.op.removeprefix("jitkern::")
    if "::" in name and module:  # of a package, which is found by its name where it lies
        found = not variant.source.module or not inside or module.endswith(".kernel")
        name = package if found else module
    return (
        f"jitkern prewarm {name} --target {target}. If its samples have no such call, record one "
        "where it may compile: jitkern record -- COMMAND, then jitkern prewarm --from FILE"
    )
