"""A shortcut from the arguments of `load_inline` to an artifact built earlier, with few imports.

Computing a key and looking an entry up need modules whose import takes longer than the rest of a
warm start. So a call that depends on no file beyond the toolchain leaves a record (`cache.records`)
under a digest of the call: the reference to its entry, how to open the artifact, and the files that
its texts look for and that must be absent. Anything odd leads to the lookup.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jitkern import config, jit
from jitkern._version import __version__
from jitkern.cache import events, records
from jitkern.cache.entry import Entry
from jitkern.cache.key import SCHEMA, Key, digest_of, label_of
from jitkern.loading import LOADED, library
from jitkern.source.flags import ENVIRONMENT, NVCC_FLAGS, names_no_file
from jitkern.target import Target, processor_for, this_abi

_SCHEMA = 6  # bump when the meaning of a request or of a record changes
CALL = "call "  # in the table of loaded code, before the digest of a call


def shortcut_key(call: Mapping[str, Any]) -> Key | None:
    """The key of the records of a call; None if the call alone does not determine its answer.

    Raises TargetError on a machine that is not supported.
    """
    import torch

    here = Target.current("cpu").for_host_code(abi=this_abi(python=True))
    flags = [*call["cflags"], *call["cuda_cflags"], *call["ldflags"]]
    if call["places"] or call["include"] or not all(map(names_no_file, flags)):
        return None
    arch = _archs() if any(file.endswith((".cu", ".cuh")) for file in call["files"]) else []
    if arch is None:
        return None
    environment = config.current().environment
    if any(environment.get(name) for name in (*config.SEARCHED, *NVCC_FLAGS)):
        return None
    request = {
        "call": dict(call),
        "schema": [_SCHEMA, SCHEMA, __version__],
        "torch": [torch.__version__, torch.version.cuda, arch],
        "abiflags": sys.abiflags,
        "processor": processor_for(flags),
        "environment": [environment.get(name) for name in ENVIRONMENT],
    }
    digest = digest_of(request)
    op = f"inline::{plain(call['name'])}"
    label = label_of(op, "shortcut", str(here), f".{digest[:8]}")
    return records.record_key("shortcut", op, str(here), label, {"call": digest})


def plain(name: str) -> str:
    """The name of a module in letters that the name of an op may have."""
    return name if name.isidentifier() else re.sub(r"[^\w.-]", "_", name)


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


def recall(key: Key) -> Any:
    """The loaded result of an earlier call with this key; None if no record gives it."""
    answer, absent = LOADED.get(CALL + key.digest, (None, ()))
    gone = isinstance(answer, str) and not os.path.exists(answer)  # noqa: PTH110
    if answer is not None and not gone and not any(map(os.path.lexists, absent)):
        return answer
    settings = config.current()
    if events.heard() or settings.compiler == "exact":
        return None  # a listener wants the event, or the compiler must be compared
    read = records.Reader(settings, lambda *place: jit.open_cache().look_up(*place).entry)
    for record in read.alternatives(key):
        try:
            content = records.content_of(record)
            if any(map(os.path.lexists, content["absent"])):
                continue
            entry = read.find(str(content["entry"]))
            if entry is None:
                continue
            with entry.loadable() as place:
                opened = arguments(content["name"], content["output"], entry)
                answer = library.open_library(**opened, place=place)
        except (OSError, ValueError, KeyError, TypeError, ImportError, library.Registered):
            continue  # the lookup will find the error, and report it
        events.count("hits")
        return remember(key, answer, content["absent"])
    return None


def leave(key: Key, name: str, output: str, entry: Entry, absent: Sequence[str]) -> None:
    """Leave a record for later processes. absent: the paths that must not be there."""
    content = {"name": name, "output": output, "entry": entry.reference, "absent": [*absent]}
    by = {"name": "jitkern", "version": __version__}
    records.write(jit.open_cache(), records.one_of(key, content), content, by)


def arguments(name: str, output: str, entry: Entry) -> dict[str, Any]:
    """The arguments of `library.open_library`, except `place`."""
    meta = entry.manifest.meta
    path = str(entry.path / meta["artifact"])
    registered = {"namespaces": meta["namespaces"], "ops": meta["ops"]}
    return {"name": name, "output": output, "path": path, **registered}


def remember(key: Key, answer: Any, absent: Sequence[str]) -> Any:
    """Keep the answer of a call for later calls in this process; returns the answer.

    absent: the paths that must not be there, or the call has another answer.
    """
    LOADED[CALL + key.digest] = answer, absent
    return answer
