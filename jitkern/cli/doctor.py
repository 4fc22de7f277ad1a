"""Check what works on this machine, and print the exact remedy for each problem.

Problems and warnings come first. What only GPUs need is not a problem on a machine without a GPU.
`-v` also prints every setting, and where each value comes from. Exit code 0 if all checks pass, 1
if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jitkern
from jitkern import config, jit, remote, runtime
from jitkern._version import __version__
from jitkern.cache.entry import Entry
from jitkern.cache.store import Cache
from jitkern.cache_tools.check import Check, counted, human_age, human_bytes
from jitkern.cache_tools.health import health
from jitkern.cli.output import BOLD, GREEN, RED, YELLOW, fitted, print_json, styled
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.cuda import nvrtc_api, toolkit
from jitkern.compilers.triton.build import REMEDY as TRITON_REMEDY
from jitkern.config.settings import SYSTEM_FILE, user_file
from jitkern.errors import JitkernError, SettingError
from jitkern.remote.index import read_index
from jitkern.remote.patience import run_with_timeout
from jitkern.remote.store import Service, Unavailable, shown
from jitkern.target import short_version

TESTED = (  # pairs of Python and Torch: see `make test-matrix`
    ("3.10", "2.11.0"),
    ("3.11", "2.13.0"),
    ("3.12", "2.14.1"),
    ("3.13", "2.15.0"),
    ("3.14", "2.15.0"),
)
NO_COMPILER = (JitkernError, OSError, ValueError)  # ValueError: the variable is not a command
NEEDED = ("platformdirs", "ninja")
HEADERS = (("cuda_fp16.h", "cudart"), ("crt/mma.h", "crt"), ("cub/cub.cuh", "cccl"))
MOST_ENTRIES = 1000  # entries that are read to see which compilers made them


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sections = _sections()
    checks = [check for found in sections.values() for check in found]
    ok = all(check.ok for check in checks)
    if args.json:
        print_json(ok=ok, checks=[asdict(check) for check in checks])
        return 0 if ok else 1
    bad = sorted((check for check in checks if check.remedy), key=lambda check: check.ok)
    failed = sum(not check.ok for check in bad)
    numbers = ((failed, "problem"), (len(bad) - failed, "warning"))
    told = ", ".join(counted(number, what) for number, what in numbers if number)
    verdict = f"jitkern does not work as it should: {told}" if failed else (
        f"jitkern works here, with {told}" if bad else "jitkern works here"
    )  # fmt: skip
    print(styled(verdict, RED if failed else YELLOW if bad else GREEN))
    for check in bad:
        _print(check, whole=True)
    for title, found in sections.items():
        shown = [check for check in found if not check.remedy]
        if args.level < 0 or not shown or (title == SETTINGS and args.level == 0):
            continue
        print(f"\n{styled(title, BOLD)}")
        for check in shown:
            _print(check, whole=args.level > 0)
    return 0 if ok else 1


def _sections() -> dict[str, list[Check]]:
    """Return all checks; on a machine that is not supported, one that says so."""
    if why := jitkern.target.unsupported():
        return {"machine": [Check("machine", ok=False, value=why, remedy="use Linux with glibc")]}
    sections = {title: [c for look in looks for c in look()] for title, looks in CHECKS.items()}
    return {**sections, "cache": health(config.current())}


def _print(check: Check, *, whole: bool) -> None:
    good = (GREEN, "skip " if check.value.startswith("missing") else "ok   ")
    good = (YELLOW, "warn ") if check.remedy else good
    color, mark = good if check.ok else (RED, "FAIL ")
    line = f"{check.name:20} {check.value or '-'}"
    if whole and check.origin:
        line += f"  ({check.origin})"
    whole = whole or check.value.startswith("missing")  # it ends with the remedy
    print(fitted(line, whole=whole, mark=mark, color=color))
    if check.remedy:
        print(f"     {'':20} {check.remedy}")


def _python() -> list[Check]:
    version = ".".join(map(str, sys.version_info[:2]))
    note = "" if version in {python for python, _ in TESTED} else ", not tested"
    value = sys.version.split()[0] + note
    pairs = ", ".join(f"{python} with Torch {torch}" for python, torch in TESTED)
    return [
        Check("python", ok=True, value=value, origin=sys.executable),
        Check("tested", ok=True, value=pairs),
    ]


def _torch() -> list[Check]:
    try:
        import torch
    except (ImportError, OSError) as e:
        return [Check("torch", ok=False, value=f"missing: {e}", remedy="pip install torch")]
    tested = short_version(torch.__version__) in {version for _, version in TESTED}
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    note = "" if tested else ", not tested"
    origin = str(Path(torch.__file__).parent)
    return [Check("torch", ok=True, value=f"{torch.__version__}, {cuda}{note}", origin=origin)]


def _targets() -> list[Check]:
    try:
        return [
            Check("target", ok=True, value=str(target))
            for target in jitkern.target.Target.visible()
        ]
    except (ImportError, OSError):
        return []


def _host_compiler() -> list[Check]:
    checks = []
    for name, tool in (("cc", config.current().cc), ("c++", config.current().cxx)):
        try:
            check = Check(name, ok=True, value=cc_build.identity(tool)["version"], origin=tool)
        except NO_COMPILER:
            value = f"`{tool}` is missing, or cannot be run"
            check = Check(name, ok=False, value=value, remedy=cc_build.REMEDY)
        checks.append(check)
    return checks


def _launch_runtime() -> list[Check]:
    """Return the check of what serves calls: C code, if it is cached or can be compiled."""
    try:
        cached = Cache.open(config.current()).find(jit.load.key_here(runtime.binding.variant()))
    except (ImportError, *NO_COMPILER):  # no Torch, or no cache: other checks tell
        return []
    if cached:
        return [Check("launch runtime", ok=True, value="in the cache: C serves calls")]
    if all(check.ok for check in _host_compiler()):
        value = "not in the cache: it is compiled at the first call of an op"
        return [Check("launch runtime", ok=True, value=value)]
    return [
        Check(
            "launch runtime", ok=True,
            value="not in the cache, and no C compiler: Python serves calls, which is slower",
            remedy=f"{cc_build.REMEDY}, or unpack a bundle: each brings the launch runtime",
        )
    ]  # fmt: skip


def _cuda_of_torch() -> tuple[int, int] | None:
    """Return the CUDA version of Torch; None for a build without CUDA, or no Torch."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    major, _, minor = (torch.version.cuda or "").partition(".")
    return (int(major), int(minor)) if major else None


def _for_cuda(name: str, places: str, *, fits: bool, remedy: str) -> Check:
    """Return the check of a part of the CUDA toolchain, optional where Torch has no GPU to use."""
    if fits or any(check.value.startswith("cuda") for check in _targets()):
        return Check(name, ok=fits, value=places or "missing", remedy="" if fits else remedy)
    value = f"{places or 'missing'}: needed only to compile for GPUs: {remedy}"
    return Check(name, ok=True, value=value)


def _nvrtc() -> list[Check]:
    found = toolkit.nvrtc_libraries()
    listing = ", ".join(f"{a}.{b} at {path}" for (a, b), (path, _) in sorted(found.items()))
    cuda = _cuda_of_torch()
    wanted = max(cuda, toolkit.OLDEST_NVRTC) if cuda else None
    usable = [version for version in found if version >= toolkit.OLDEST_NVRTC]
    return [_of_toolkit("nvrtc", "nvrtc", listing, usable, wanted)]


def _cuda_headers() -> list[Check]:
    checks = []
    wanted = _cuda_of_torch()
    for header, part in HEADERS:
        folders = toolkit.include_directories(wanted[0] if wanted else None)
        folder = next((d for d in folders if (d / header).is_file()), None)
        versions = [toolkit.headers_version(folder.parent)] if folder else []
        place = f"{versions[0][0]}.{versions[0][1]} at {folder}" if folder else ""
        if folder and part != "cudart":  # alone they do not tell their version
            place, versions = str(folder), [wanted or (0, 0)]
        checks.append(_of_toolkit(f"<{header}>", part, place, versions, wanted))
    return checks


def _of_toolkit(
    name: str,
    part: str,
    places: str,
    versions: Sequence[tuple[int, int]],
    wanted: tuple[int, int] | None,
) -> Check:
    """Return the check of a part of the CUDA toolkit, which should be of the version of Torch's."""
    remedy = toolkit.pip_line(part, wanted)
    fitting = [version for version in versions if not wanted or version[0] == wanted[0]]
    if fitting and wanted and wanted not in fitting:
        value = f"{places}, but Torch calls for {wanted[0]}.{wanted[1]}"
        return Check(name, ok=True, value=value, remedy=remedy)
    return _for_cuda(name, places, fits=bool(fitting), remedy=remedy)


def _nvcc() -> list[Check]:
    compiler = toolkit.nvcc()
    value = (
        f"{compiler[1][0]}.{compiler[1][1]} at {compiler[0]}"
        if compiler
        else "missing: needed only for CUDA files with host headers, and Extensions"
    )
    return [Check("nvcc", ok=True, value=value)]


def _packages() -> list[Check]:
    here = Check("jitkern", ok=True, value=__version__, origin=str(Path(jitkern.__file__).parent))
    needed = [_package(name, f"pip install {name}") for name in NEEDED]
    optional = [_package("cryptography", "", "signatures")]
    if not importlib.util.find_spec("compression"):  # of Python 3.14
        optional.append(_package("backports.zstd", "", "bundles named .tar.zst"))
    triton = _package("triton", TRITON_REMEDY)
    if not triton.ok:
        triton = _for_cuda("triton", "", fits=False, remedy=TRITON_REMEDY)
    return [here, triton, *needed, *optional]


def _package(name: str, remedy: str, use: str = "") -> Check:
    """Return the check of a package, which is optional if its `use` is for some users only."""
    try:
        return Check(name, ok=True, value=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        value = f"missing: needed only for {use}" if use else "missing"
        return Check(name, ok=bool(use), value=value, remedy=remedy)


def _other_compilers() -> list[Check]:
    """Return a check for each absent compiler that made some of the first entries."""
    counts: Counter[tuple[str, str]] = Counter()
    entries = Cache(config.current().cache_dir).entries()
    for _, entry in itertools.islice(entries, MOST_ENTRIES):
        if isinstance(entry, Entry):
            compiler = entry.manifest.compiler
            counts[compiler.get("name", ""), compiler.get("version", "")] += 1
    versions = {name: _versions(name) for name in {name for name, _ in counts}}
    checks = []
    for (name, version), count in sorted(counts.items()):
        if versions[name] and version not in versions[name]:
            made = f"{counted(count, 'entry')} made by {name} {version}"
            value = f"{made}, which is not installed"
            remedy = "jitkern prewarm --refresh"
            checks.append(Check("other compiler", ok=True, value=value, remedy=remedy))
    return checks


def _versions(compiler: str) -> set[str]:
    """Installed versions of `compiler`; empty for compilers that are not checked."""
    versions = set()
    for tool in (config.current().cc, config.current().cxx) if compiler == "cc" else ():
        with contextlib.suppress(*NO_COMPILER):
            versions.add(cc_build.identity(tool)["version"])
    for _, library in toolkit.nvrtc_libraries().values() if compiler == "nvrtc" else ():
        with contextlib.suppress(*NO_COMPILER):
            versions.add(nvrtc_api.build_id(library))
    return versions


def _settings() -> list[Check]:
    """Return a check for each setting, and for each file that settings may come from."""
    settings = config.current()
    checks = [
        Check(
            setting.variable or setting.name,
            ok=True,
            value=_text(setting.name, getattr(settings, setting.name)),
            origin=settings.origins.get(setting.name, "default"),
        )
        for setting in config.SETTINGS
    ]
    try:
        config.preferred()
    except SettingError as e:
        checks.append(Check("JITKERN_PREFER", ok=False, value=str(e), remedy="name another kind"))
    for path in (SYSTEM_FILE, user_file(settings.environment)):
        value = str(path) if os.access(path, os.F_OK) else f"{path}, absent"
        checks.append(Check("settings file", ok=True, value=value))
    return checks


def _text(name: str, value: object) -> str:
    """Return a setting as text, sizes and times in human units."""
    if value and isinstance(value, (int, float)):
        if name == "max_size":
            return human_bytes(value)
        if name in ("max_age", "lock_timeout"):
            return human_age(value)
    if isinstance(value, tuple):
        if "remote" in name:
            return " ".join(map(shown, value))
        return os.pathsep.join(map(str, value))
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def _variables() -> list[Check]:
    """Return a failed check for each environment variable that looks like a setting."""
    settings = config.current()
    checks = []
    for name, meant_one in config.unknown_variables(settings.environment):
        key = name.removeprefix("JITKERN_").lower()
        if key in vars(settings):
            value = f"`{key}` counts only in a settings file, not in the environment"
            remedy = f"move it to {user_file(settings.environment)}"
        else:
            value = "is not a setting" + (meant_one and f": did you mean {meant_one}?")
            remedy = f"unset {name}" + (meant_one and f", and set {meant_one}")
        checks.append(Check(name, ok=False, value=value, origin="environment", remedy=remedy))
    return checks


def _remotes() -> list[Check]:
    machines = sorted({remote.layout.machine_of(check.value) for check in _targets()})
    return [_remote(url, machines) for url in config.current().remotes]


def _remote(url: str, machines: list[str]) -> Check:
    """Return whether a remote can be used, and what it has for these machines."""
    name, settings, began = f"remote {shown(url)}", config.current(), time.perf_counter()
    try:
        store = remote.opening.opened(url)
        keys = remote.trust.keys_for(url, settings)
        indexes = [
            run_with_timeout(settings.remote_timeout, partial(read_index, store, machine))[0]
            for machine in machines
        ]
    except Unavailable as e:
        return Check(name, ok=False, value=f"{e.meaning}: {e}", remedy=e.remedy)
    except JitkernError as e:
        value, _, remedy = str(e).partition(": ")
        return Check(name, ok=False, value=value, remedy=remedy)
    digests = {digest for index in indexes if index for b in index.bundles for digest in b.entries}
    builds = isinstance(store, Service) and store.builds
    told = f"answers in {1000 * (time.perf_counter() - began):.0f} ms, has "
    told += f"{counted(len(digests), 'entry')} for {' or '.join(machines)}"
    told += ", and builds what is missing" * builds
    told += f"; one of {len(keys)} trusted keys must have signed them" if keys else ""
    remedy = "check bucket and path of the URL; prewarm there, and jitkern remote push"
    ok = bool(digests or builds)
    return Check(name, ok=ok, value=told, remedy="" if ok else remedy)


SETTINGS = "settings"
CHECKS: dict[str, tuple[Callable[[], list[Check]], ...]] = {
    "Python": (_python, _packages, _torch, _targets),
    "compilers": (_host_compiler, _launch_runtime, _nvrtc, _cuda_headers, _nvcc, _other_compilers),
    "remotes": (_remotes,),
    SETTINGS: (_settings, _variables),
}
