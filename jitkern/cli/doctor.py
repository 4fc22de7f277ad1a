"""Check what works on this machine, and print the exact remedy for each problem.

Problems and warnings come first. What only GPUs need is not a problem on a machine without a GPU.
`-v` also prints every setting, and where each value comes from. Exit code 0 if all checks pass, 1
if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jitkern
from jitkern import config, jit, remote, runtime
from jitkern._version import __version__
from jitkern.cache.store import Cache
from jitkern.cache_tools import health
from jitkern.cache_tools.check import Check, Look, Problem, counted, human_age, human_bytes, refuse
from jitkern.cli.output import BOLD, GREEN, RED, YELLOW, fitted, print_json, styled
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.cuda import toolkit
from jitkern.compilers.cute.build import REMEDY as CUTE_REMEDY
from jitkern.compilers.cutile.build import REMEDY as CUTILE_REMEDY
from jitkern.compilers.triton.build import REMEDY as TRITON_REMEDY
from jitkern.config.settings import SYSTEM_FILE, user_file
from jitkern.errors import JitkernError
from jitkern.remote.index import read_index
from jitkern.remote.patience import run_with_timeout
from jitkern.remote.store import Service, Unavailable, shown
from jitkern.target import Target, short_version

TESTED = (  # pairs of Python and Torch: see `make test-matrix`
    ("3.10", "2.11.0"),
    ("3.11", "2.13.0"),
    ("3.12", "2.14.1"),
    ("3.13", "2.15.0"),
    ("3.14", "2.15.0"),
)
SETTINGS = "settings"
HEADERS = (("cuda_fp16.h", "cudart"), ("crt/mma.h", "crt"), ("cub/cub.cuh", "cccl"))


def table() -> dict[str, list[Look]]:
    """Return the checks by section; on a machine that is not supported, one that says so."""
    if why := jitkern.target.unsupported():
        return {"machine": [Look("machine", partial(refuse, why), "use Linux with glibc")]}
    now, targets, cuda = config.current(), _targets(), _cuda_of_torch()
    for_gpus = "" if any(t.device == "cuda" for t in targets) else "to compile for GPUs"
    for_keys = "" if now.trusted_keys or now.signed else "for signatures"
    packages = [
        ("triton", TRITON_REMEDY, for_gpus),
        ("cuda-tile", CUTILE_REMEDY, "for kernels in cuTile"),
        ("nvidia-cutlass-dsl", CUTE_REMEDY, "for kernels in the CuTe DSL"),
        *((name, f"pip install {name}", "") for name in ("platformdirs", "ninja")),
        ("cryptography", 'pip install "jitkern[sign]"', for_keys),
        ("backports.zstd", 'pip install "jitkern[zstd]"', "for bundles named .tar.zst"),
    ][: 7 if sys.version_info < (3, 14) else 6]
    major = cuda[0] if cuda else None
    nvrtc = toolkit.pip_line("nvrtc", max(cuda, toolkit.OLDEST_NVRTC) if cuda else None)
    machines = sorted({remote.layout.machine_of(str(target)) for target in targets})
    cc, cxx = (partial(_host_compiler, tool) for tool in (now.cc, now.cxx))
    bundle = f"{cc_build.REMEDY}, or unpack a bundle: each brings the launch runtime"
    return {
        "Python": [
            Look("python", _python, origin=sys.executable),
            Look("tested", ", ".join(f"{python} with Torch {torch}" for python, torch in TESTED)),
            Look("jitkern", __version__, origin=str(Path(jitkern.__file__).parent)),
            *(Look(name, partial(version, name), remedy, use) for name, remedy, use in packages),
            Look("torch", _torch, "pip install torch"),
            *(Look("target", str(target)) for target in targets),
        ],
        "compilers": [
            Look("cc", cc, cc_build.REMEDY, origin=now.cc),
            Look("c++", cxx, cc_build.REMEDY, origin=now.cxx),
            *(Look("launch runtime", partial(_runtime, cc, cxx), bundle) for _ in targets[:1]),
            Look("nvrtc", partial(_nvrtc, major), nvrtc, for_gpus),
            *(
                Look(f"<{n}>", partial(_header, n, major), toolkit.pip_line(part, cuda), for_gpus)
                for n, part in HEADERS
            ),
            Look(
                "nvcc", _nvcc, "install NVIDIA's CUDA toolkit",
                "for CUDA files with host headers, and Extensions",
            ),
        ],
        "remotes": [
            Look(f"remote {shown(url)}", partial(_remote, url, machines)) for url in now.remotes
        ],
        SETTINGS: [
            *map(_setting, config.SETTINGS),
            *(
                Look("settings file", f"{file}{'' if os.access(file, os.F_OK) else ', absent'}")
                for file in (SYSTEM_FILE, user_file(now.environment))
            ),
            *_variables(),
        ],
        "cache": health.table(now),
    }  # fmt: skip


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sections = {title: [look.check() for look in looks] for title, looks in table().items()}
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
        good = [check for check in found if not check.remedy]
        if args.level < 0 or not good or (title == SETTINGS and args.level == 0):
            continue
        print(f"\n{styled(title, BOLD)}")
        for check in good:
            _print(check, whole=args.level > 0)
    return 0 if ok else 1


def _print(check: Check, *, whole: bool) -> None:
    missing = check.value.startswith("missing")
    color, mark = (YELLOW, "warn ") if check.remedy else (GREEN, "skip " if missing else "ok   ")
    line = f"{check.name:20} {check.value or '-'}"
    if whole and check.origin:
        line += f"  ({check.origin})"
    if not check.ok:
        color, mark = RED, "FAIL "
    print(fitted(line, whole=whole or missing, mark=mark, color=color))  # it ends with the remedy
    if check.remedy:
        print(f"     {'':20} {check.remedy}")


def _python() -> str:
    here = ".".join(map(str, sys.version_info[:2]))
    known = here in {python for python, _ in TESTED}
    return sys.version.split()[0] + ("" if known else ", not tested")


def _torch() -> str:
    import torch

    known = short_version(torch.__version__) in {version for _, version in TESTED}
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"{torch.__version__}, {cuda}" + ("" if known else ", not tested")


def _targets() -> list[Target]:
    """Return the targets of this machine; none without Torch, of which another check tells."""
    with contextlib.suppress(ImportError, OSError):
        return Target.visible()
    return []


def _cuda_of_torch() -> tuple[int, int] | None:
    """Return the CUDA version of Torch; None for a build without CUDA, or no Torch."""
    with contextlib.suppress(ImportError, OSError, JitkernError):
        return Target.parse("sm_90").cuda_version
    return None


def _host_compiler(tool: str) -> str:
    return cc_build.identity(tool)["version"]


def _runtime(*compilers: partial[str]) -> str:
    """Return what serves calls: C code, if it is cached or can be compiled."""
    with contextlib.suppress(JitkernError, OSError, ValueError):
        if Cache.open(config.current()).find(jit.load.key_here(runtime.binding.variant())):
            return "in the cache: C serves calls"
    with contextlib.suppress(JitkernError, OSError, ValueError):
        for compiler in compilers:
            compiler()
        return "not in the cache: it is compiled at the first call of an op"
    value = "not in the cache, and no C compiler: Python serves calls, which is slower"
    raise Problem(value, ok=True)


def _nvrtc(major: int | None) -> str:
    found = sorted(toolkit.nvrtc_libraries().items())
    places = ", ".join(f"{a}.{b} at {path}" for (a, b), (path, _) in found)
    if not any(v >= toolkit.OLDEST_NVRTC and major in (None, v[0]) for v, _ in found):
        raise Problem(places or "missing")
    return places


def _header(name: str, major: int | None) -> str:
    folders = toolkit.include_directories(major)
    return next((str(folder) for folder in folders if (folder / name).is_file()), "")


def _nvcc() -> str:
    found = toolkit.nvcc()
    return f"{found[1][0]}.{found[1][1]} at {found[0]}" if found else ""


def _setting(setting: config.Setting) -> Look:
    """Return the row of a setting: its value, sizes and times in human units."""
    now, name = config.current(), setting.name
    value, origin = getattr(now, name), now.origins.get(name, "default")
    if name == "prefer":
        return Look(setting.variable, lambda: config.preferred() or "-", origin=origin)
    if isinstance(value, tuple):
        text = " ".join(map(shown, value)) if "remote" in name else os.pathsep.join(map(str, value))
    elif value and name == "max_size":
        text = human_bytes(value)
    elif value and name in ("max_age", "lock_timeout"):
        text = human_age(value)
    else:
        text = "" if value is None else str(int(value) if isinstance(value, bool) else value)
    return Look(setting.variable or name, text, origin=origin)


def _variables() -> list[Look]:
    """Return a failing row for each environment variable that looks like a setting."""
    now, rows = config.current(), []
    for name, near in config.unknown_variables(now.environment):
        key = name.removeprefix("JITKERN_").lower()
        value = f"is not a setting{near and f': did you mean {near}?'}"
        remedy = f"unset {name}{near and f', and set {near}'}"
        if key in vars(now):
            value = f"`{key}` counts only in a settings file, not in the environment"
            remedy = f"move it to {user_file(now.environment)}"
        rows.append(Look(name, partial(refuse, value), remedy, origin="environment"))
    return rows


def _remote(url: str, machines: list[str]) -> str:
    """Return how fast a remote answers, and what it has for these machines."""
    now, began = config.current(), time.perf_counter()
    try:
        store = remote.opening.opened(url)
        keys = remote.trust.keys_for(url, now)
        asked = [partial(read_index, store, machine) for machine in machines]
        indexes = [run_with_timeout(now.remote_timeout, ask)[0] for ask in asked]
    except Unavailable as e:
        raise Problem(f"{e.meaning}: {e}", e.remedy) from e
    digests = {digest for index in indexes if index for b in index.bundles for digest in b.entries}
    told = f"answers in {1000 * (time.perf_counter() - began):.0f} ms, has "
    told += f"{counted(len(digests), 'entry')} for {' or '.join(machines)}"
    told += f"; one of {len(keys)} trusted keys must have signed them" if keys else ""
    if isinstance(store, Service) and store.builds:
        return f"{told}; it builds what is missing"
    if not digests:
        push = "check bucket and path of the URL; prewarm there, and jitkern remote push"
        raise Problem(told, push)
    return told
