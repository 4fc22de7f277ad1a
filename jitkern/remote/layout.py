"""Names below the URL of a remote.

    jitkern.json                               {"schema":1}, to tell a remote from any other place
    v1/<machine>/index.json                    which entries lie in which bundle; see `index`
    v1/<machine>/<SHA-256>.tar[.zst]           a bundle of a package for a machine, never changed

A machine is a target with its platform, e.g. `cuda-sm_90-cu130-torch2.13.0-linux_x86_64`: all that
its processes may miss, be it for the kernels, the records or the Extensions, is in its bundles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from jitkern.cache import VERSION
from jitkern.target import Target, this_platform

ROOT = "jitkern.json"
BUILD = f"{VERSION}/build"  # what a call is posted to, at a service
BUILDS = "Jitkern-Builds"  # the header, with the value 1, of a service that builds what is missing
ROOT_CONTENT = json.dumps({"schema": 1}, separators=(",", ":")).encode()
RUNTIME_PACKAGE = "jitkern-runtime"  # what an index calls the package of what all ops share
LARGEST_INDEX = 4 << 20  # bytes
LARGEST_BUNDLE = 512 << 20  # bytes
FULL_BUNDLE = 64 << 20  # bytes of entries; a package that needs more has several bundles
LARGE_ENTRY = 1 << 20  # bytes; a larger entry has a bundle of its own
SHORT_LIVED = "max-age=30"
IMMUTABLE = "max-age=31536000, immutable"
_BUNDLE = re.compile(r"[0-9a-f]{64}\.tar(\.zst)?")


def machine_of(target: str) -> str:
    """Return the machine whose processes use entries of this target. Raises TargetError.

    Targets of kernels name no platform: theirs is the platform of this process. The instruction set
    and the ABI of a target are left out, since the processes of one machine differ in them, and so
    is the `a` of `sm_90a`, since each machine with `sm_90` runs both.
    """
    parsed = Target.parse(target)
    arch = parsed.arch.removesuffix("a")
    if parsed.device == "cpu":
        arch = parsed.arch.partition("_v")[0]
    return str(parsed._replace(arch=arch, platform=parsed.platform or this_platform(), abi=""))


def host_of(machine: str) -> str:
    """Return the machine without a GPU that has the launch runtime. Raises TargetError."""
    parsed = Target.parse(machine)
    arch = parsed.platform.partition("_")[2]
    return str(parsed._replace(device="cpu", arch=arch, cuda=""))


def index_of(machine: str) -> str:
    """Return the name of a machine's index."""
    return f"{VERSION}/{machine}/index.json"


def bundle_of(machine: str, file: str) -> str:
    """Return the name of a bundle: `file` is `<SHA-256>.tar` or `<SHA-256>.tar.zst`."""
    return f"{VERSION}/{machine}/{file}"


def machines_in(names: Iterable[str]) -> list[str]:
    """Return the machines whose indexes are among the names of objects, sorted."""
    folders = (name.split("/") for name in names)
    return sorted(parts[1] for parts in folders if len(parts) == 3 and parts[2] == "index.json")


def is_bundle(file: str) -> bool:
    """Return whether a file of a machine's folder has the name of a bundle."""
    return _BUNDLE.fullmatch(file) is not None


def cache_control(name: str) -> str:
    """Return the header `Cache-Control` of an object: what holds bundles is never changed."""
    changing = name == ROOT or name.endswith("/index.json")
    return SHORT_LIVED if changing else f"public, {IMMUTABLE}"
