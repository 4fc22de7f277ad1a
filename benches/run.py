"""Programs with JITs alone and under `jitkern run`: cold, warm, and on a second root.

Each program of `benches/programs` that can run here is a process of its own, and is measured whole.
Alone: its JITs have empty folders (cold), the same ones (warm), and a copy of them with all times
kept at another path, as `tar` makes it (second). Under `jitkern run`: an empty cache, the same one,
and another root with another home that a bundle has filled, where `--frozen` proves that nothing
compiles. A ratio says how many times longer the program takes alone.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benches import common
from jitkern.adopt.jits import JITS

PROGRAMS = Path(__file__).parent / "programs"
NEEDS = {
    "triton_kernels": ("triton",), "compiled": (), "extension": (), "llama": ("transformers",),
    "cupy_kernels": ("cupy",), "numba_functions": ("numba",), "tvm_ffi_inline": ("tvm_ffi",),
    "flashinfer_norm": ("flashinfer",),
}  # fmt: skip
OF_A_GPU = {"triton_kernels", "cupy_kernels", "flashinfer_norm"}
WAYS = ("cold", "warm", "second")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--programs", type=lambda text: text.split(","), default=None)
    options = common.parsed(parser, arguments)
    names = [name for name in options.programs or NEEDS if runs_here(name, options.device)]
    seconds: dict[str, dict[str, float]] = {}
    compiles: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="benches-", ignore_cleanup_errors=True) as scratch:
        for name in names:
            print(f"{name} …", file=sys.stderr, flush=True)
            program = Program(Path(scratch, name), name, options.device)
            seconds[name] = {**program.alone(), **program.under_run()}
            compiles[name] = program.compiles
    ratio = {
        f"{way}.{name}": took[f"alone.{way}"] / took[f"run.{way}"]
        for name, took in seconds.items()
        for way in WAYS
        if took.get(f"run.{way}")
    }
    rows = [
        (name, way, f"{took[f'alone.{way}']:.2f}", f"{took[f'run.{way}']:.2f}",
         json.dumps(compiles[name].get(way, "")))  # type: ignore[attr-defined]
        for name, took in seconds.items() for way in WAYS
    ]  # fmt: skip
    header = ("program", "start", "alone s", "run s", "compiles under run")
    common.report(options, header, rows, seconds=seconds, compiles=compiles, ratio=ratio)
    return 0


def runs_here(name: str, device: str) -> bool:
    """Return whether the packages of a program are here, and its device."""
    there = all(importlib.util.find_spec(package) for package in NEEDS[name])
    return there and (device == "cuda" or name not in OF_A_GPU)


class Program:
    """A program with the folders that its processes leave each other."""

    def __init__(self, folder: Path, name: str, device: str) -> None:
        self.folder = folder
        self.command = [sys.executable, str(PROGRAMS / f"{name}.py"), device]
        self.compiles: dict[str, object] = {}
        for home in ("home", "other home"):
            (folder / home).mkdir(parents=True)

    def alone(self) -> dict[str, float]:
        """Seconds of the program by itself."""
        took = {way: self._took(self.command, self._variables("first")) for way in WAYS[:2]}
        shutil.copytree(self.folder / "first", self.folder / "copy", symlinks=True)
        took["second"] = self._took(self.command, self._variables("copy"))
        return {f"alone.{way}": seconds for way, seconds in took.items()}

    def under_run(self) -> dict[str, float]:
        """Seconds of the program under `jitkern run`, and what was compiled."""
        took = {}
        for way in WAYS:
            frozen = ["--frozen"] * (way == "second")
            if frozen:
                bundle = self.folder / "bundle.tar"
                for root, words in (("root", ("pack", "-o")), ("other root", ("unpack",))):
                    cache = {"JITKERN_CACHE_DIR": str(self.folder / root)}
                    self._took([*JITKERN, "cache", *words, str(bundle)], cache)
            report = self.folder / f"{way}.json"
            home, root = ("other home", "other root") if frozen else ("home", "root")
            words = [*JITKERN, "run", "-q", *frozen, "--report", str(report), "--", *self.command]
            variables = {
                "HOME": str(self.folder / home),
                "JITKERN_CACHE_DIR": str(self.folder / root),
            }
            took[f"run.{way}"] = self._took(words, variables)
            self.compiles[way] = json.loads(report.read_text())["by_tool"]
        return took

    def _variables(self, copy: str) -> dict[str, str]:
        root = self.folder / copy
        variables = {"HOME": str(self.folder / "home")}
        for jit in JITS:
            variables.update(dict.fromkeys(jit.variables, str(root / jit.name)))
        return variables

    def _took(self, words: Sequence[str], variables: Mapping[str, str]) -> float:
        theirs = {name for jit in JITS for name in jit.variables}
        inherited = common.private_environment(self.folder).items()
        environment = {**{k: v for k, v in inherited if k not in theirs}, **variables}
        started = time.perf_counter()
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise common.ChildFailed(f"{' '.join(words)}: {done.stderr[-3000:]}")
        return time.perf_counter() - started


JITKERN = [sys.executable, "-m", "jitkern"]

if __name__ == "__main__":
    sys.exit(main())
