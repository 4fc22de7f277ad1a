"""Choose the entries to remove, by limits of the cache or because this machine cannot use them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jitkern import target as targets
from jitkern.cache import eviction
from jitkern.cache.entry import Entry
from jitkern.cache.eviction import Use, remove
from jitkern.cache.store import Cache
from jitkern.errors import TargetError
from jitkern.source.key import version_of
from jitkern.target import Target

__all__ = ["Installed", "evictable", "remove"]


class Installed(NamedTuple):
    """The versions and GPUs of this machine; a field is empty where nothing is installed.

    torch: version of Torch; cuda: version that Torch was built with; archs: of the visible GPUs.
    """

    torch: str
    cuda: str
    archs: frozenset[str]

    @classmethod
    def found(cls) -> Installed:
        """Return the versions and GPUs of this machine and this Python, without importing Torch."""
        capabilities = targets.nvml_capabilities()
        archs = frozenset(f"sm_{major}{minor}" for major, minor in capabilities)
        return cls(targets.short_version(version_of("torch")), _cuda_of_torch(), archs)

    def uses_target(self, text: str) -> bool:
        """Return whether a process here may look for entries of this target.

        Without Torch or a GPU here, any version of Torch or any arch is accepted.
        """
        try:
            target = Target.parse(text)
        except TargetError:
            return False
        here = target._replace(
            torch=self.torch or target.torch,
            platform=target.platform and targets.this_platform(),
            abi=target.abi and targets.this_abi(python="_cp" in target.abi),
        )
        if target.device == "cuda" and self.archs:
            known = target.arch in self.archs
            return known and target == here._replace(cuda=self.cuda or target.cuda)
        return target == here

    @staticmethod
    def has(package: Mapping[str, str]) -> bool:
        """Return whether this version of a package is installed here; True for an empty mapping."""
        return not package or version_of(package.get("name", "")) == package.get("version")


def evictable(
    cache: Cache, *, max_size: int = 0, max_age: float = 0, stale: bool = False
) -> list[Use]:
    """Return the entries to remove so that the user root keeps to limits, oldest use first.

    max_size: bytes (0 = no limit). max_age: seconds since the last use (0 = no limit).
    stale: whether to evict entries for another Torch, CUDA, GPU or package version, too.
    """
    useless = _stale(cache) if stale else set()
    return eviction.evictable(cache, max_size=max_size or None, max_age=max_age, stale=useless)


def _stale(cache: Cache) -> set[Path]:
    """Return the entries of the user root that this machine cannot use.

    Such entries are for another Torch, CUDA or GPU, or of another version of their package.
    """
    here = Installed.found()
    return {
        path
        for path, entry in cache.entries()
        if path.is_relative_to(cache.root)
        and isinstance(entry, Entry)
        and (not here.uses_target(path.parent.name) or not here.has(entry.manifest.package))
    }


def _cuda_of_torch() -> str:
    """Return the CUDA version of Torch, e.g. `130`, from torch/version.py, or ""."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return ""
    try:
        return targets.cuda_in(Path(spec.origin).with_name("version.py").read_text())
    except OSError:
        return ""
