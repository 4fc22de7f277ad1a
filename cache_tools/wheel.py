"""Wheels of prebuilt kernels: entries of a cache that pip installs as a read-only layer.

    jitkern_layers/<name>/v1/<target>/<folder>/...      see files.trust.installed_layers
    <name>-<version>.dist-info/{METADATA, WHEEL, RECORD}

Equal entries give equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from jitkern.cache import VERSION
from jitkern.cache.entry import Entry
from jitkern.cache.store import Cache
from jitkern.cache_tools.bundle import shipped, written
from jitkern.cache_tools.ustar import BundleError
from jitkern.files.trust import INSTALLED

_NAME = re.compile(r"[A-Za-z0-9]+([._-]+[A-Za-z0-9]+)*")
_PEP_440 = re.compile(  # the canonical form of PEP 440, appendix B
    r"([1-9]\d*!)?(0|[1-9]\d*)(\.(0|[1-9]\d*))*((a|b|rc)(0|[1-9]\d*))?"
    r"(\.post(0|[1-9]\d*))?(\.dev(0|[1-9]\d*))?(\+[a-z0-9]+(\.[a-z0-9]+)*)?",
    re.ASCII,
)
_PLATFORM = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_HOST_CODE = re.compile(r"-torch[^-]+-([a-z]+_[a-z0-9_]+)(-[^-]+)?$")  # see jitkern.target


def pack_wheel(
    cache: Cache,
    chosen: Iterable[Entry],
    directory: Path,
    *,
    name: str,
    version: str,
    platform: str = "",
) -> Path:
    """Write a wheel of the entries into `directory`, and return its path.

    platform: the platform tag; by default the platform of the entries' host code, or `any`.
    Raises BundleError, and then leaves no wheel.
    """
    chosen = list(chosen)
    project = _project(name)
    _check_version(version)
    tag = _platform(platform, {entry.path.parent.name for entry in chosen})
    stem = f"{project}-{version}"
    path = directory / f"{stem}-py3-none-{tag}.whl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BundleError(f"cannot make {directory}: {e.strerror}; name another directory") from e
    with written(path) as file, zipfile.ZipFile(file, "w") as archive:
        record = []
        for folder, files in shipped(cache, chosen):
            for part, data in files.items():
                place = f"{INSTALLED}/{project}/{VERSION}/{folder}/{part}"
                record.append(_add(archive, place, data))
        for part, text in _metadata(project, version, tag).items():
            record.append(_add(archive, f"{stem}.dist-info/{part}", text.encode()))
        place = f"{stem}.dist-info/RECORD"
        _add(archive, place, "".join(f"{line}\n" for line in (*record, f"{place},,")).encode())
    return path


def _project(name: str) -> str:
    """Return a project's name for file names, e.g. `jitkern_prebuilt` for `JitKern-Prebuilt`."""
    if not _NAME.fullmatch(name):
        raise BundleError(
            f"`{name}` is not a package name: expected ASCII letters and digits, and between "
            "them `-`, `_` and `.`"
        )
    return re.sub(r"[-_.]+", "_", name).lower()


def _check_version(version: str) -> None:
    if not _PEP_440.fullmatch(version):
        raise BundleError(
            f"`{version}` is not a package version: expected something like 1.2.0, 1.2.0rc1, "
            "1.2.0.post1 or 1.2.0+cu130 (PEP 440)"
        )


def _platform(platform: str, targets: set[str]) -> str:
    """Return the platform tag of a wheel: `platform`, else that of the host code, else `any`."""
    platforms = {match.group(1) for target in targets if (match := _HOST_CODE.search(target))}
    if len(platforms) > 1:
        raise BundleError(
            f"the entries hold host code for {' and '.join(sorted(platforms))}: a wheel is for one "
            "platform, so choose entries with --target and pack one wheel for each"
        )
    tag = platform or next(iter(platforms), "any")
    if not _PLATFORM.fullmatch(tag):
        raise BundleError(f"`{tag}` is not a wheel platform: expected e.g. manylinux_2_28_x86_64")
    return tag


def _metadata(project: str, version: str, platform: str) -> dict[str, str]:
    tags = "".join(f"Tag: py3-none-{part}\n" for part in platform.split("."))
    return {
        "METADATA": (
            "Metadata-Version: 2.1\n"
            f"Name: {project.replace('_', '-')}\n"
            f"Version: {version}\n"
            "Summary: Kernels that jitkern finds already built\n"
            "Requires-Dist: jitkern\n"
        ),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: jitkern\nRoot-Is-Purelib: false\n{tags}",
    }


def _add(archive: zipfile.ZipFile, place: str, data: bytes) -> str:
    """Add a file to the archive, and return its line of RECORD."""
    info = zipfile.ZipInfo(place, (1980, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3  # Unix on every machine, so that installers use the mode
    info.external_attr = 0o100644 << 16
    archive.writestr(info, data, compresslevel=6)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{place},sha256={digest},{len(data)}"
