"""Keys and the names of records are the same in each process: none follows a hash, or an address."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
FOLDER = Path(__file__).parent


def listing(folder: Path, seed: int, compiled: Path) -> dict[str, list[str]]:
    """Return what `listing.py` prints in a process of its own, with this seed of hashes.

    compiled: the folder of the `.pyc` of all files, also those of Python and Torch.
    """
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("JITKERN_", "PYTHON"))}
    paths = [REPOSITORY, FOLDER, FOLDER.parent, FOLDER.parent / "composition"]
    kept |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONHASHSEED": str(seed)}
    kept |= {"PYTHONPYCACHEPREFIX": str(compiled), "JITKERN_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-W", "ignore", str(FOLDER / "listing.py"), str(folder / "keys")]
    done = subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads((folder / "keys").read_text())
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> dict[str, list[str]]:
    """The keys of a process that compiles all files, which the others read as `.pyc`."""
    return listing(tmp_path_factory.mktemp("first"), 0, compiled)


def test_keys_of_all_kinds_are_listed(first):
    assert len(first) > 120
    names = {name for listed in first.values() for name in listed}
    shipped = {name for name in names if ".call." in name and not name.startswith("keyed")}
    assert len(shipped) > 500
    assert not any("no record" in name for name in names)
    for kind in (
        "keyed.op.scaled.", "keyed.op.choice-", "keyed.op.call.", "keyed.mapped.choice.mapped-",
        "keyed.mapped.call.", "keyed_ops.shifted_clamped_", "inline.keyed.shortcut.",
        "inline.keyed.inline-", "raw.keyed_triton.mapped.", "raw.scaled-", "jitkern_chains.",
    ):  # fmt: skip
        assert any(name.startswith(kind) for name in names), kind


@pytest.mark.parametrize("seed", range(1, 20))
def test_keys_are_the_same_in_each_process(first, compiled, tmp_path, seed):
    again = listing(tmp_path, seed, compiled)
    assert [*again] == [*first]
    assert {name: keys for name, keys in again.items() if keys != first[name]} == {}
