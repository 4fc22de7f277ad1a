"""What a build of the package says, and what an installation of a clone is."""

import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from helpers import REPOSITORY

BUILD = (
    "from setuptools import build_meta as b; b.build_wheel('wheel'); b.build_editable('editable')"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(clone, what the builds of a wheel and of an editable wheel said)."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "DESCRIPTION.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, clone)
    for name in ("jitkern", "kernels_src", "cache_tools"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, clone / name, ignore=ignored, symlinks=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=clone, capture_output=True, text=True, check=True
    )
    return clone, done.stdout + done.stderr


@pytest.mark.long
def test_a_build_has_no_warnings(built):
    assert "WARNING" not in built[1] and "Deprecat" not in built[1]


@pytest.mark.long
def test_a_wheel_has_each_file_of_the_package(built):
    clone = built[0]
    (wheel,) = (clone / "wheel").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc", ".cubin"))]
    assert not [name for name in names if name.startswith(("tests", "benches"))]
    folders = {
        "jitkern": "jitkern",
        "kernels_src": "jitkern/kernels_src",
        "cache_tools": "jitkern/cache_tools",
    }
    there = {
        f"{place}/{path.relative_to(clone / folder).as_posix()}"
        for folder, place in folders.items()
        for path in (clone / folder).rglob("*.*")
    }
    assert there == {name for name in names if name.startswith("jitkern/")}


@pytest.mark.long
def test_an_editable_installation_is_a_path(built):
    """Type checkers follow a path, and it is no namespace package that a folder `jitkern` extends."""
    clone = built[0]
    (wheel,) = (clone / "editable").iterdir()
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
    assert archive.read(path).decode().split() == [str(clone)]
    assert not [name for name in archive.namelist() if name.endswith(".py")]


@pytest.mark.long
def test_a_source_distribution_has_each_file_of_the_repository(tmp_path):
    git = ("git", "-C", str(REPOSITORY), "ls-files", "-z")
    listed = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split("\0")[
        :-1
    ]
    if not listed:
        pytest.skip("which files belong to it is known in a git checkout alone")
    for name in listed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name, follow_symlinks=False)
    build = "from setuptools import build_meta as b; b.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, check=True)
    (sdist,) = (tmp_path / "dist").iterdir()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not {*listed} - names
