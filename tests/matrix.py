"""Run the default tests with the pairs of Python and Torch that jitkern is tested with.

python -m tests.matrix                       every pair
python -m tests.matrix --besides 2.13.0      one pair with another Torch, another one at each commit

A pair is left out, and this says so, where its Python is not installed as `python3.x`, or pip finds
no wheel of its Torch. The exit code is 1 if the tests of a pair failed.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence

from jitkern.cli.doctor import TESTED

VENV = ".venv-matrix"  # of one pair at a time: make replaces the environment in it
Pair = tuple[str, str]


def lacking(pair: Pair) -> str:
    """Return why the tests cannot be run with a pair here; "" if they can."""
    python, torch = f"python{pair[0]}", f"torch=={pair[1]}"
    if subprocess.run([shutil.which(python) or "false", "-c", ""], check=False).returncode:
        return f"there is no {python}"
    install = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    if subprocess.run([*install, "--no-deps", torch], check=False).returncode:
        return f"pip finds no {torch} for {python}"
    return ""


def passes(pair: Pair) -> bool:
    """Whether the tests pass with a pair."""
    python, torch = pair
    make = ["make", "test", f"PYTHON=python{python}", f"TORCH={torch}", f"VENV={VENV}"]
    return subprocess.run(make, check=False).returncode == 0


def in_turn(pairs: Sequence[Pair], commit: str) -> list[Pair]:
    """Return the pairs in their order, from one on that the commit decides on."""
    first = int(commit, 16) % len(pairs)
    return [*pairs[first:], *pairs[:first]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--besides", metavar="TORCH")
    besides = parser.parse_args(arguments).besides
    pairs = [pair for pair in TESTED if pair[1] != besides]
    if besides:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True)
        pairs = in_turn(pairs, commit)
    told, failed = [], False
    for pair in pairs:
        why = lacking(pair)
        passed = not why and passes(pair)
        failed |= not (why or passed)
        answer = f"not run: {why}" if why else "passed" if passed else "failed"
        told.append(f"Python {pair[0]} with Torch {pair[1]}: {answer}")
        if besides and not why:
            break
    print(*told, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
