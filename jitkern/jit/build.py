"""After a miss: compile in staging, publish, and report errors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import config, source
from jitkern.cache import events
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
from jitkern.jit import active_cache
from jitkern.jit.active_cache import open_cache
from jitkern.jit.announcement import announced
from jitkern.jit.request import OTHER_COMPILER, REFRESH, Request, capturing, report
from jitkern.source.closure import states
from jitkern.source.key import package_of
from jitkern.source.kinds import SOURCES, Source, Variant

if TYPE_CHECKING:
    from jitkern.compilers.result import Built


def lock_name(key: Key) -> str:
    """The name of the lock for this key in this cache, so that other caches need not wait."""
    root = hashlib.sha256(os.fsencode(open_cache().root)).hexdigest()
    return f"{key.digest[:24]}-{root[:8]}"


def build(request: Request, started: float, why: str) -> Entry:
    """Compile and publish an entry; report a failure, and raise its error."""
    variant, key = request.variant, request.key
    shown = contextlib.nullcontext() if variant.source.kind == events.RUNTIME else announced(
        f"{variant.op} for {key.target}"
    )  # fmt: skip
    try:
        with shown:
            return _into_a_cache(request, started, why)
    except JitkernError as e:
        if (own := variant.source).text and e.args:
            written = str(own.paths[0]), own.text, own.written_at
            e.args = (source.texts.with_places(str(e), *written, variant.op), *e.args[1:])
        report(variant, key, "failed", started, reason=str(e))
        if isinstance(e, CacheError) and variant.op not in str(e):
            raise type(e)(f"{variant.op} for {key.target}: {e}", **vars(e)) from e
        raise


def _into_a_cache(request: Request, started: float, why: str) -> Entry:
    try:
        return _publish(open_cache(), request, started, why)
    except CacheError as e:
        return _publish(active_cache.use_temporary(e), request, started, why)


def _publish(cache: Cache, request: Request, started: float, reason: str) -> Entry:
    """Compile in staging and publish; again if a source was edited or staging removed meanwhile."""
    variant = request.variant
    changed = False
    for _ in range(3):
        with cache.staging() as staging:
            begin = time.perf_counter()
            built, request = _built(cache, request, staging, reason)
            seconds = round(time.perf_counter() - begin, 4)
            if built is None:
                changed |= staging.is_dir()
                continue
            key = request.key
            if reason in (REFRESH.reason, OTHER_COMPILER) and (old := cache.find(key)):
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
        report(variant, key, "built", started, entry, reason)
        return entry
    cause = (
        f"its source in {variant.source.folder} keeps changing while it compiles" if changed
        else f"its build folder in {cache.root} is deleted while it compiles: "
        "point JITKERN_CACHE_DIR at a directory that nothing else cleans"
    )  # fmt: skip
    raise CompileError(f"{variant.op}: {cause}", op=variant.op)


def _built(
    cache: Cache, request: Request, staging: Path, reason: str
) -> tuple[Built | None, Request]:
    """Return the compiler's result, and the request with the files read after the compile.

    The result is None if a file was edited meanwhile, though it be as before by now, or if another
    process deleted the staging directory as dead (when the clock jumps).
    """
    variant = request.variant
    _check_version(request)
    _check_include(variant.op, variant.source)
    anew = reason == REFRESH.reason
    before = states(request.closure.paths)
    try:
        built = request.compiler.compile_parts(
            variant, request.exact, request.closure, staging, cache, anew=anew
        )
    except CompileError as e:
        current = request.again()
        edited = current.key != request.key or states(current.closure.paths) != before
        if edited or not staging.is_dir():
            return None, current
        if e.log:
            log = cache.keep_log(request.key, staging)
            e.args = (f"{e}\nfull log: {log}",)
        raise
    except OSError as e:
        if not staging.is_dir():
            return None, request.again()
        raise _failed(cache, request, staging, e) from e
    current = request.again()
    edited = current.key != request.key or states(current.closure.paths) != before
    return None if edited else built, current


def _failed(cache: Cache, request: Request, staging: Path, e: OSError) -> JitkernError:
    """The error for a compile that the system stopped."""
    variant = request.variant
    staged = str(e.filename).startswith(str(staging))
    if staged and e.errno == errno.ENOENT:
        name = Path(str(e.filename)).name
        cause = f"its compiler ended without an error and did not write {name}"
    elif staged or e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        return cache.write_error(e)
    elif e.errno == errno.ENOEXEC:
        cause = f"`{e.filename}` cannot be run: {e.strerror}: set CC or CXX to another compiler"
    else:
        cause = f"it cannot be compiled: {reason_of(e)}"
    return CompileError(f"{variant.op} for {request.exact}: {cause}", op=variant.op)


def _check_version(request: Request) -> None:
    op, source = request.variant.op, request.variant.source
    oldest = source.min_compiler
    if oldest:
        compiler = request.compiler.identities(source, request.exact)[0]
        if version_numbers(compiler["version"]) < version_numbers(oldest):
            raise CompilerNotFound(
                f"{op} for {request.exact} needs {compiler['name']} {oldest} or newer, and this is "
                f"{compiler['version']}: upgrade it",
                remedy=f"upgrade {compiler['name']} to {oldest} or newer",
            )


def _check_include(op: str, source: Source) -> None:
    """Raise DeclarationError for a declared directory that does not exist.

    For `load_inline` and `load` a directory may be absent, as it may for Torch's own.
    """
    for root in source.include if source.kind in SOURCES else ():
        folder = Path(source.home, root.path)
        if not folder.is_dir():
            raise DeclarationError(
                f"{op}: include=[{root.path!r}] is not a directory: {folder} does not exist"
            )


def version_numbers(version: str) -> list[int]:
    """The first version in a text: `[12, 2, 0]` for `c++ (Debian 12.2.0-14) 12.2.0`."""
    match = re.search(r"\d+(?:\.\d+)+", version) or re.search(r"\d+", version)
    return [int(part) for part in match.group().split(".")] if match else []


def not_cached(variant: Variant, key: Key, said: str = "") -> NotCached:
    """The error that says why nothing is compiled, and how to prewarm the variant.

    said: what the remotes said.
    """
    reason = (
        "a CUDA graph is being captured, during which nothing can be compiled" if capturing()
        else "compiling is off (JITKERN_COMPILE=never)" if config.current().compile == "never"
        else "it is being compiled in the background"
    )  # fmt: skip
    name = f"{variant.op} ({variant.label})" if variant.label else variant.op
    what = f"{name} for {key.target} is not cached in {open_cache().root}"
    what += (
        f".\nNo remote has it: {said}.\n{reason[0].upper()}{reason[1:]}.\n"
        if said
        else f", and {reason}. "
    )
    what += "Prewarm it:"
    command = _command(variant, key.target)
    remedy = (
        f"{command}. If its samples have no such call, record one where compiling is on: "
        "jitkern record -- COMMAND, then jitkern prewarm --from FILE" if command
        else "declare the op in a module, which `jitkern prewarm MODULE` imports"
    )  # fmt: skip
    return NotCached(f"{what} {remedy}", path=key.name, what=what, command=command)


def _command(variant: Variant, target: str) -> str:
    """A command that prewarms the op; "" if its op is in no module that can be imported."""
    module = variant.source.module or variant.source.package
    package, _, inside = module.partition(".")
    if package == "__main__":
        return ""
    name = variant.op.removeprefix("jitkern::")
    if "::" in name and module:  # a package's name finds its own module and files `kernel.py`
        findable = not variant.source.module or not inside or module.endswith(".kernel")
        name = package if findable else module
    return f"jitkern prewarm {name} --target {target}"
