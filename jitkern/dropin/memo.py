"""A shortcut from the arguments of `load_inline` to an artifact built earlier, with few imports.

Computing a key and looking an entry up need modules whose import takes longer than the rest of a
warm start. So a call that depends on no file beyond the toolchain leaves a receipt in the user
root: where its entry lies and what the artifact is, how to open the artifact, and the files that
its texts look for and that must be absent. A receipt is only a shorter way to the result of the
lookup: the artifact is read under the same rules (owner, mode, no link followed, size, SHA-256),
and anything odd leads to the lookup.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jitkern import config
from jitkern.cache import events, receipts, usage
from jitkern.loading import LOADED, library
from jitkern.source.build_environment import ENVIRONMENT, NVCC_FLAGS
from jitkern.target import Target, processor_for, this_abi

_SCHEMA = 4  # bump when the meaning of a request or of a receipt changes
_CALL = "call "  # in the table of loaded code, before the digest of a call


def digest_of(call: Mapping[str, Any]) -> str:
    """A digest of the call and all it depends on; "" if the call alone does not determine that.

    Raises TargetError on a machine that is not supported.
    """
    import torch

    here = Target.current("cpu").for_host_code(abi=this_abi(python=True))
    flags = [*call["cflags"], *call["cuda_cflags"], *call["ldflags"]]
    if call["places"] or call["include"] or not all(map(receipts.is_plain, flags)):
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
        "abiflags": sys.abiflags,
        "machine": [str(here), processor_for(flags)],
        "environment": [environment.get(name) for name in ENVIRONMENT],
    }
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


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
    answer, absent = LOADED.get(_CALL + digest, (None, ()))
    gone = isinstance(answer, str) and not os.path.exists(answer)  # noqa: PTH110
    if answer is not None and not gone and not any(map(os.path.lexists, absent)):
        return answer
    settings = config.current()
    if events.heard() or settings.compiler == "exact":
        return None  # a listener wants the event, or the compiler must be compared
    try:
        with receipts.read(settings, digest) as (receipt, (opened,)):
            if any(map(os.path.lexists, receipt["absent"])):
                return None
            answer = library.open_library(**receipt["opens"], place=opened.place)
    except (OSError, ValueError, KeyError, TypeError, ImportError, library.Registered):
        return None  # the lookup will find the error, and report it
    events.count_hit()
    usage.hit(settings.cache_dir, settings.cache_dir, opened.described["seconds"])
    return remember(digest, answer, receipt["absent"])


def remember(digest: str, answer: Any, absent: Sequence[str]) -> Any:
    """Keep the answer of a call for later calls in this process; returns the answer.

    absent: the paths that must not be there, or the call has another answer.
    """
    LOADED[_CALL + digest] = answer, absent
    return answer
