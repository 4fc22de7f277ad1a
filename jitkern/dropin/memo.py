"""A shortcut from the arguments of `load_inline` to an artifact built earlier, with few imports.

Computing a key and looking an entry up need modules whose import takes longer than the rest of a
warm start. So a call that depends on no file beyond the toolchain leaves a receipt in the user
root, in `inline`: the entry, the content of its manifest, and the absent files that its texts ask
for. A receipt is only a shorter way to the result of the lookup: the artifact is read under the
same rules (owner, mode, no link followed, size, SHA-256), and anything odd leads to the lookup.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jitkern import cache, config
from jitkern.cache import RECEIPTS, VERSION, events
from jitkern.files import owned
from jitkern.loading import library
from jitkern.source.build_environment import ENVIRONMENT, NVCC_FLAGS

_SCHEMA = 2  # bump when the meaning of a request or of a receipt changes
_PLAIN_FLAGS = ("-O", "-W", "-D", "-U", "-f", "-m", "-std=", "-g", "-arch=sm_")
_hits: list[tuple[Path, float]] = []
_answers: dict[str, Any] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hits.clear)  # the parent counts its hits


def digest_of(call: Mapping[str, Any]) -> str:
    """A digest of the call and all it depends on; "" if the call alone does not determine that."""
    import torch

    flags = [*call["cflags"], *call["cuda_cflags"], *call["ldflags"]]
    if call["places"] or call["include"] or not all(_is_plain(flag) for flag in flags):
        return ""
    arch = _archs() if any(file.endswith((".cu", ".cuh")) for file in call["files"]) else []
    if arch is None:
        return ""
    environment = config.current().environment
    if any(environment.get(name) for name in (*config.SEARCHED, *NVCC_FLAGS)):
        return ""
    request = {
        "call": dict(call),
        "schema": _SCHEMA,
        "torch": [torch.__version__, torch.version.cuda, torch.__file__, arch],
        "python": [sys.implementation.cache_tag, sys.abiflags, sys.platform],
        "machine": [os.uname().machine, os.confstr("CS_GNU_LIBC_VERSION")],
        "environment": [environment.get(name) for name in ENVIRONMENT],
    }
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _is_plain(flag: str) -> bool:
    """Whether a flag names no file; the value of a macro may name one in quotes."""
    quotes = '"<' if "/" in flag else ""
    odd = quotes if flag.startswith("-D") else ",/"
    return flag.startswith(_PLAIN_FLAGS) and not set(flag) & set(f" \t\n@{odd}")


def _archs() -> list[Any] | None:
    """The data that determine the archs to build for; None if Torch has not looked at the GPUs."""
    import torch

    listed = config.cuda_arch_list()
    if listed and listed != "native":
        return [listed]
    if not torch.cuda.is_initialized():
        return None
    devices = range(torch.cuda.device_count())
    capabilities = [torch.cuda.get_device_capability(number) for number in devices]
    return [capabilities, torch._C._cuda_getArchFlags()]


def recall(digest: str) -> Any:
    """The loaded result of an earlier call with this digest; None if no receipt gives it."""
    known = _answers.get(digest)
    if known is not None and (not isinstance(known, str) or os.path.exists(known)):  # noqa: PTH110
        return known
    settings = config.current()
    if events.heard() or settings.compiler == "exact":
        return None  # a listener wants the event, or the compiler must be compared
    try:
        with _read(settings, digest) as (receipt, place):
            if any(map(os.path.lexists, receipt["absent"])):
                return None
            answer = library.open_library(**receipt["opens"], place=place)
    except (OSError, ValueError, KeyError, TypeError, ImportError, library.Registered):
        return None  # the lookup will find the error, and report it
    if not _hits:
        atexit.register(_settle)
    events.count_hit()
    _hits.append((settings.cache_dir, receipt["seconds"]))
    return remember(digest, answer)


def remember(digest: str, answer: Any) -> Any:
    """Keep the answer of a call for later calls in this process; returns the answer."""
    if digest:
        _answers[digest] = answer
    return answer


def _settle() -> None:
    """Add the hits that receipts gave to the counts."""
    for root, seconds in _hits:
        cache.usage.hit(root, root, seconds)
    _hits.clear()
    cache.usage.flush()  # at exit, `usage` can register no function of its own any more


@contextmanager
def _read(settings: config.Config, digest: str) -> Iterator[tuple[dict[str, Any], str]]:
    """A receipt whose entry is whole, and the place to load its artifact from meanwhile.

    Raises ValueError, OSError, KeyError, TypeError.
    """
    root = settings.cache_dir
    if owned.distrust_root(root, settings.trusted):
        raise ValueError(root)
    owners = frozenset({os.geteuid()})
    with ExitStack() as stack:
        top = stack.enter_context(owned.opened(root, follow=True))
        folder = stack.enter_context(owned.opened(root / RECEIPTS, top))
        data = owned.read(root / RECEIPTS, folder, digest, 1 << 20, owners)
        if hashlib.sha256(data[64:]).hexdigest().encode() != data[:64]:
            raise ValueError(digest)
        receipt: dict[str, Any] = json.loads(data[64:])
        entry = root
        for name in (VERSION, receipt["target"], receipt["entry"]):
            entry /= name
            top = stack.enter_context(owned.opened(entry, top))
            owned.check_owner("it", entry.stat() if top is None else os.fstat(top), owners)
        artifact = os.path.basename(receipt["opens"]["path"])  # noqa: PTH119  imports less
        if receipt["opens"]["path"] != str(entry / artifact):
            raise ValueError("another root")
        binary = owned.read(entry, top, artifact, receipt["size"], owners)
        hashed = "" if settings.verify == "size" else hashlib.sha256(binary).hexdigest()
        if len(binary) != receipt["size"] or hashed not in ("", receipt["sha256"]):
            raise ValueError(artifact)
        with owned.opened_file(entry, top, "manifest.json", owners) as (file, status):
            owned.touch(file.fileno(), status)  # an entry without its manifest is no entry
        yield receipt, owned.path_in(top, entry, artifact)
