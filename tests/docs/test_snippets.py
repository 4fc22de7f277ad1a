"""Every snippet of the README and of the documentation is run, page by page, in the order of the page.

A block whose first line is a path is written there. Python blocks run in processes of their own; a
`text` block right behind one is what it prints. Each line of a shell block is a command. Pages with
tests of their own: shipping.md (test_shipping.py and remote/test_recipes.py), from_cuda_extension.md
(test_readme.py), and CONTRIBUTING.md (test_contributing.py).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import processes
import pytest
from helpers import REPOSITORY, needs_cute, needs_cutile, needs_nvrtc, own_programs_first
from pages import PAGES, blocks_of

from jitkern import Cache, cache_tools
from jitkern.config import Config
from jitkern.target import this_platform

ELSEWHERE = ("shipping.md", "from_cuda_extension.md", "CONTRIBUTING.md")
COMPILE_MUCH = ("DESCRIPTION.md", "first_kernel.md", "gradients.md", "pointwise.md")
# The node of recorder.cpp, too.
PREWARM = ("first_kernel.md", "gradients.md", "cache.md", "launch_functions.md")
QUICK = ("README.md", "install.md")


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    shared = [pytest.mark.common_cache] if page.name in COMPILE_MUCH else []
    shared += [needs_cutile] if page.name == "cutile.md" else []
    shared += [needs_cute] if page.name == "cute.md" else []
    return shared if page.name in QUICK else [*shared, pytest.mark.long]


RUN = [
    pytest.param(page, marks=marks_of(page), id=page.name)
    for page in PAGES
    if page.name not in ELSEWHERE and blocks_of(page)
]


class Reader:
    """Somebody who follows a page in a folder of their own."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache
        path = own_programs_first()
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
        for patience in "TIMEOUT", "BUDGET":
            self.environment[f"JITKERN_REMOTE_{patience}"] = "600"

    def run(self, *command: str, shown: str) -> str:
        """What a command prints. It must succeed."""
        settings = {"cwd": self.folder, "env": self.environment, "timeout": 600}
        python = [sys.executable, "-W", "ignore"]
        if command[0] == "jitkern":
            done = processes.run([*python, "-m", *command], **settings)
        elif command[0] == sys.executable:
            done = processes.run([*python, *command[1:]], **settings)
        else:
            done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
        assert done.returncode == 0, f"{shown}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def write(self, file: str, text: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def shell(self, text: str) -> None:
        for line in text.splitlines():
            command = shlex.split(line.replace("$PWD", str(self.folder)), comments=True)
            if command[:2] == ["pip", "install"]:  # test_links.py knows whether the extras exist
                continue
            if command[0] == "make":  # the real ones set up an environment, and run this very test
                command = [*command, "-n", "-C", str(REPOSITORY)]
            if command == ["jitkern", "doctor"]:  # its exit code is that of the machine
                command = [*command, "--help"]
            self.run(*command, shown=line)

    def plain(self, text: str) -> str:
        """Output without what differs between machines, as the page shows it."""
        text = text.replace(str(self.cache), "~/.cache/jitkern").replace(
            str(self.folder), "/home/me"
        )
        text = re.sub(r"torch\d+\.\d+\.\d+(\+\w+)?", "torch", text)
        return re.sub(r" +$", "", text, flags=re.MULTILINE).strip()


@pytest.fixture
def reader(tmp_path, cache_dir, request, page):
    """A reader who finds the node of recorder.cpp in the cache, since its build takes 20 s."""
    if page.name in PREWARM:
        shared = Cache(request.getfixturevalue("recorder_cache"))
        recorder = cache_tools.chosen(shared, cache_tools.EntryFilter(op="jitkern_recorder"))
        cache_tools.pack(shared, recorder, tmp_path / "recorder.tar")
        cache_tools.unpack(Cache(cache_dir), tmp_path / "recorder.tar")
    (tmp_path / "reader").mkdir()
    return Reader(tmp_path / "reader", cache_dir)


@needs_nvrtc
@pytest.mark.skipif(this_platform() != "linux_x86_64", reason="shows x86-64 targets")
@pytest.mark.parametrize("page", RUN)
def test_the_snippets_of_a_page_run(page, reader):
    blocks = blocks_of(page)
    for block, after in zip(blocks, [*blocks[1:], None]):
        if block.file:
            reader.write(block.file, block.text)
        elif block.language == "sh":
            reader.shell(block.text)
        elif block.language == "python":
            printed = reader.run(sys.executable, "-c", block.text, shown=block.text)
            if after and after.language == "text":
                assert reader.plain(printed) == reader.plain(after.text), block.text
        elif block.language == "toml":
            reader.write("config.toml", block.text)
            assert Config.from_env({}, [reader.folder / "config.toml"]).origins
        elif block.language == "asm":
            shown(block.text, reader)
        else:
            shown_alone = ("text", "console", "dockerfile")  # the last two need other machines
            assert block.language in shown_alone, (
                f"nothing runs the {block.language} of {page.name}"
            )


def shown(program: str, reader: Reader) -> None:
    """Check that a program is what `explain` prints for the kernel of first_kernel.md."""
    for block in blocks_of(REPOSITORY / "docs" / "first_kernel.md"):
        if block.file.startswith("scale/"):
            reader.write(block.file, block.text)
    reader.shell("jitkern prewarm scale")
    assert textwrap.indent(program, "    ") in reader.run("jitkern", "explain", "scale", "--source", shown="explain")  # fmt: skip


def test_pages_with_tests_of_their_own_have_them():
    tests = {path.name: path.read_text() for path in (REPOSITORY / "tests").glob("test_*.py")}
    for name in ELSEWHERE:
        assert any(name in text for text in tests.values()), name
