"""What works on this machine, and for what does not, the exact line that mends it.

Exit code 0 where kernels can be compiled or nothing is needed, 1 where a check failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from jitkern import config, trust
from jitkern.cli.output import print_json, styled
from jitkern.compilers import toolkit
from jitkern.compilers.cc import REMEDY as CC_REMEDY
from jitkern.compilers.triton import REMEDY as TRITON_REMEDY
from jitkern.target import short_version

TESTED_TORCH = ("2.11.0", "2.13.0")
TESTED_PYTHON = ((3, 11), (3, 12))


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was found and from where; for a failure, its remedy."""

    name: str
    ok: bool
    value: str
    origin: str = ""
    remedy: str = ""


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    checks = [check for look in CHECKS for check in look()]
    ok = all(check.ok for check in checks)
    if args.json:
        print_json(ok=ok, checks=[asdict(check) for check in checks])
    else:
        for check in checks:
            mark = styled("ok  ", "32") if check.ok else styled("FAIL", "31")
            print(
                f"{mark} {check.name:16} {check.value}"
                + (f"  ({check.origin})" if check.origin else "")
            )
            if not check.ok and check.remedy:
                print(f"     {'':16} {check.remedy}")
    return 0 if ok else 1


def _python() -> list[Check]:
    tested = sys.version_info[:2] in TESTED_PYTHON
    version = sys.version.split()[0]
    return [
        Check(
            "python",
            ok=True,
            value=version if tested else f"{version}, not among the tested versions",
            origin=sys.executable,
        )
    ]


def _torch() -> list[Check]:
    try:
        import torch
    except ImportError as e:
        return [Check("torch", ok=False, value=f"missing: {e}", remedy="pip install torch")]
    tested = short_version(torch.__version__) in TESTED_TORCH
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    note = "" if tested else f", not among the tested {', '.join(TESTED_TORCH)}"
    return [
        Check(
            "torch",
            ok=True,
            value=f"{torch.__version__}, {cuda}{note}",
            origin=str(Path(torch.__file__).parent),
        )
    ]


def _targets() -> list[Check]:
    from jitkern.target import Target

    try:
        return [Check("target", ok=True, value=str(target)) for target in Target.visible()]
    except ImportError:
        return []


def _host_compiler() -> list[Check]:
    settings = config.current()
    checks = []
    for name, tool in (("cc", settings.cc), ("c++", settings.cxx)):
        path = shutil.which(tool, path=settings.environment.get("PATH"))
        checks.append(
            Check(name, ok=bool(path), value=path or f"`{tool}` is missing", remedy=CC_REMEDY)
        )
    return checks


def _cuda_wanted() -> tuple[int, int]:
    try:
        import torch
    except ImportError:
        return 13, 0
    major, _, minor = (torch.version.cuda or "13.0").partition(".")
    return int(major), int(minor)


def _nvrtc() -> list[Check]:
    libraries = toolkit.nvrtc_libraries()
    wanted = _cuda_wanted()
    fitting = [v for v in libraries if v[0] == wanted[0] and v[1] <= wanted[1]]
    found = ", ".join(f"{a}.{b} at {path}" for (a, b), (path, _) in sorted(libraries.items()))
    return [
        Check(
            "nvrtc",
            ok=bool(fitting),
            value=found or "missing",
            remedy=toolkit.pip_line("nvidia-cuda-nvrtc", wanted),
        )
    ]


def _cuda_headers() -> list[Check]:
    checks = []
    for header, wheel in (
        ("cuda_fp16.h", "runtime"),
        ("crt/mma.h", "crt"),
        ("cub/cub.cuh", "cccl"),
    ):
        found = next((d for d in toolkit.include_directories() if (d / header).is_file()), None)
        remedy = toolkit.pip_line(f"nvidia-cuda-{wheel}", _cuda_wanted())
        checks.append(
            Check(f"<{header}>", ok=bool(found), value=str(found or "missing"), remedy=remedy)
        )
    return checks


def _nvcc() -> list[Check]:
    found = toolkit.nvcc()
    value = (
        f"{found[1][0]}.{found[1][1]} at {found[0]}"
        if found
        else "missing: needed only for CUDA files with host headers, and Extensions"
    )
    return [Check("nvcc", ok=True, value=value)]


def _triton() -> list[Check]:
    return [_package("triton", TRITON_REMEDY), _package("ninja", "pip install ninja")]


def _package(name: str, remedy: str) -> Check:
    try:
        return Check(name, ok=True, value=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, ok=False, value="missing", remedy=remedy)


def _cache() -> list[Check]:
    settings = config.current()
    root = settings.cache_dir
    reason = trust.distrust_root(root)
    checks = [
        Check(
            "cache",
            ok=not reason,
            value=reason or str(root),
            origin=settings.cache_dir_origin,
            remedy=f"chmod 700 {root}",
        )
    ]
    existing = next((p for p in (root, *root.parents) if p.exists()), root)
    probe = shutil.disk_usage(existing)
    writable = os.access(existing, os.W_OK) and existing.is_dir()
    free = f"{probe.free / 2**30:.1f} GiB free"
    remedy = "point JITKERN_CACHE_DIR at a directory that can be written"
    checks.append(
        Check(
            "cache writable",
            ok=writable,
            value=free if writable else f"{existing} is not",
            remedy=remedy,
        )
    )
    checks += [
        Check("system cache", ok=p.is_dir(), value=str(p), origin="JITKERN_SYSTEM_CACHE")
        for p in settings.system_cache
    ]
    return checks


def _settings() -> list[Check]:
    environment = config.current().environment
    return [
        Check(name, ok=True, value=environment[name], origin="environment")
        for name in sorted(environment)
        if name.startswith("JITKERN_")
    ]


CHECKS: tuple[Callable[[], list[Check]], ...] = (
    _python, _torch, _targets, _host_compiler, _nvrtc, _cuda_headers, _nvcc, _triton, _cache,
    _settings,
)  # fmt: skip
