"""Versions of Torch and CUDA and the GPUs of this machine, read without importing Torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jitkern import target as targets
from jitkern.errors import TargetError
from jitkern.source.provenance import version_of
from jitkern.target import Target


class Installed(NamedTuple):
    """The versions and GPUs of this machine; a field is empty where nothing is installed.

    torch: version of Torch; cuda: version that Torch was built with; archs: of the visible GPUs.
    """

    torch: str
    cuda: str
    archs: frozenset[str]

    @classmethod
    def found(cls) -> Installed:
        """Return the versions and GPUs of this machine and this Python."""
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


def _cuda_of_torch() -> str:
    """Return the CUDA version of Torch, e.g. `130`, from torch/version.py, or ""."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return match.group(1).replace(".", "") if match else ""
