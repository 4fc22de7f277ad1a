"""`load` and `load_inline`, which leave to Torch what the cache cannot hold.

Also `patch_extensions`, for programs that call Torch's own functions.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from jitkern import config
from jitkern._fork import after_fork
from jitkern.dropin import api
from jitkern.errors import NotCached
from jitkern.source.flags import NotSupported
from jitkern.target import unsupported

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_patches: list[ExtensionPatch] = []
_replaced: dict[str, tuple[Any, Any]] = {}  # by name: Torch's function, and the one in its place


class ExtensionPatch(AbstractContextManager["ExtensionPatch"]):
    """A patch that `patch_extensions` has made, and the way back."""

    def undo(self) -> None:
        """Let Torch build again, unless another patch holds; a second time, do nothing."""
        from torch.utils import cpp_extension

        with _lock:
            if self in _patches:
                _patches.remove(self)
            for name, (original, ours) in _replaced.items():
                # If somebody has wrapped ours, it stays below the wrapper, and passes on to Torch.
                if not _patches and getattr(cpp_extension, name) is ours:
                    setattr(cpp_extension, name, original)

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch_extensions() -> ExtensionPatch:
    """Have `torch.utils.cpp_extension.load` and `load_inline` build through the cache.

    They become `jitkern.load` and `jitkern.load_inline`, with the errors of these. Torch builds all
    that these leave to it, and everything on other systems than Linux with glibc. Modules that have
    imported the functions by name keep Torch's, and a warning names them. Holds in this process and
    its forks until `undo()`, or to the end of a `with`.
    """
    from torch.utils import cpp_extension

    patch = ExtensionPatch()
    with _lock:
        if not _patches:
            for drop_in in (load, load_inline):
                original = getattr(cpp_extension, name := drop_in.__name__)
                _replaced[name] = original, _through_the_cache(drop_in, original)
            _warn_of_holders(cpp_extension)
            for name, (_, ours) in _replaced.items():
                setattr(cpp_extension, name, ours)
        _patches.append(patch)
    return patch


def _warn_of_holders(cpp_extension: object) -> None:
    """Warn of the modules that have imported Torch's functions by name."""
    ids = {id(original) for original, _ in _replaced.values()}
    first = {id(m): (n, m) for n, m in reversed([*sys.modules.items()]) if m is not cpp_extension}
    others = first.values()  # a module of two names, such as `__mp_main__`, by its first one
    names = [n for n, m in others if ids & {*map(id, [*getattr(m, "__dict__", {}).values()])}]
    if names:
        _log.warning(
            "patch_extensions comes too late for %s: what they have imported from "
            "torch.utils.cpp_extension is Torch's; call it before", ", ".join(sorted(names)),
        )  # fmt: skip


def _through_the_cache(drop_in: F, original: Callable[..., Any] | None = None) -> F:
    """Return a drop-in that stands in the place of Torch's `original` while a patch holds."""
    name = drop_in.__name__

    @functools.wraps(original or drop_in)
    def build(*args: Any, **keywords: Any) -> Any:
        if original and not _patches:  # a module has kept this function
            return original(*args, **keywords)
        return _built(name, args, keywords, unsupported() if original else "", original)

    return cast("F", build)


def _built(
    name: str, args: Sequence[Any], keywords: Mapping[str, Any], why: str = "", original: Any = None
) -> Any:
    """Build through the cache; what it cannot hold by Torch's own function, with a warning.

    why: the reason for the latter, if it is known. Raises NotCached if it compiles and must not.
    """
    if not why:
        try:
            return getattr(api, name)(*args, **keywords)
        except NotSupported as e:
            why = str(e)
    what = (*args, keywords.get("name"))[0]
    if config.current().compile == "never":
        raise NotCached(
            f"`{what}` is never in the cache: {why}. Torch would compile it, and compiling is "
            "off (JITKERN_COMPILE=never): allow it, or load a library that was built before"
        )
    _log.warning("`%s` is left to Torch, which builds it without the cache: %s", what, why)
    if original is None:
        from torch.utils import cpp_extension

        original = getattr(cpp_extension, name)
        replaced, ours = _replaced.get(name, (None, None))
        original = replaced if original is ours else original
    return original(*args, **keywords)


load, load_inline = _through_the_cache(api.load), _through_the_cache(api.load_inline)
after_fork(_lock)
