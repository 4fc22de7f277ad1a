"""What the benches share: the command line, the facts that each prints, and a fresh process."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import jitkern
from jitkern.cli.output import print_json, print_table
from jitkern.cli.parser import at_least_one


class ChildFailed(RuntimeError):
    """A process that a bench started failed; the message is the end of what it wrote."""


def of_kind(op: Any, device: str, kind: str) -> Any:
    """The op itself if its first source for a device is of this kind, else an op of that source.

    A block that prefers another kind would send its calls to Python.
    """
    from jitkern.calls.signature import Signature
    from jitkern.declare import registered
    from jitkern.op.op import OPS

    sources = [source for source in op.sources[device] if source.kind == kind]
    if sources == [*op.sources[device]][:1]:
        return op
    name = f"benches::{op.__name__}_{kind}"
    if name not in OPS:
        alone = op.declaration._replace(sources={device: tuple(sources)}, gradient=None)
        registered(Signature(op.schema.replace(op.name, name, 1)), alone)
    return OPS[name]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The command line of a bench, described by its docstring: --device, --rounds and --json."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default=default, help="default here: %(default)s"
    )
    made.add_argument(
        "--rounds",
        type=at_least_one,
        metavar="N",
        help="how often each is measured; the median counts",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def parsed(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options given. Exits with code 2 where they cannot be met on this machine."""
    options = made.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("--device cuda: Torch finds no CUDA device")
    return options


def report(
    options: argparse.Namespace,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    **fields: object,
) -> None:
    """Print the outcome: one JSON object under --json, else what it was measured on and a table."""
    device, measured, with_versions = device_name(options.device), commit(), versions()
    if options.json:
        print_json(device=device, commit=measured, versions=with_versions, **fields)
        return
    print(f"{device}, commit {measured}")
    print(", ".join(f"{name} {version}" for name, version in with_versions.items()) + "\n")
    print_table(header, rows)


def versions() -> dict[str, str]:
    """What was measured with what; `none` for what is not installed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": _installed("triton"),
        "cupy": _installed("cupy", "cupy-cuda13x", "cupy-cuda12x"),
        "gcc": _output("gcc", "-dumpfullversion") or "none",
        "nvcc": _first(r"release ([\d.]+)", _output("nvcc", "--version")),
        "jitkern": jitkern.__version__,
    }


def device_name(device: str) -> str:
    """The model of the GPU, or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        described = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        described = ""
    return _first(r"model name\s*: (.+)", described, platform.processor() or platform.machine())


def commit() -> str:
    """The commit measured, `-dirty` where files differ from it; `unknown` outside a checkout."""
    checkout = ("git", "-C", str(Path(__file__).parent))
    return _output(*checkout, "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def _installed(*distributions: str) -> str:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def distribution(package: str) -> str:
    """Name and version of the distribution of a package, e.g. `liger-kernel 0.8.5`."""
    # Python 3.10 knows only the packages that a distribution lists in top_level.txt.
    for name in (*importlib.metadata.packages_distributions().get(package, ()), package):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return package


def _first(pattern: str, text: str, otherwise: str = "none") -> str:
    found = re.search(pattern, text)
    return found.group(1).strip() if found else otherwise


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def private_environment(home: Path, **settings: str) -> dict[str, str]:
    """The environment with every kernel cache under `home`, and of jitkern's settings these alone.

    Python may write its bytecode: without it every process would compile what it imports.
    """
    ours = ("JITKERN_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    scripts = str(Path(sys.executable).parent)  # pip's ninja
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    caches = {
        "JITKERN_CACHE_DIR": "jitkern",
        "TORCH_EXTENSIONS_DIR": "extensions",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUPY_CACHE_DIR": "cupy",
        "CUDA_CACHE_PATH": "driver",
    }
    return {
        **kept,
        "PATH": path,
        **{name: str(home / folder) for name, folder in caches.items()},
        **settings,
    }


def fresh_process(
    *arguments: str, environment: dict[str, str], timeout: float = 1200
) -> dict[str, Any]:
    """What `python arguments` prints last, as JSON. Raises ChildFailed."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise ChildFailed(f"no end after {timeout:.0f} s") from e
    if done.returncode:
        raise ChildFailed("\n".join((done.stdout + done.stderr).splitlines()[-40:]))
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last
