"""Pages of Markdown as tests read them: code blocks, headings and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from helpers import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.glob("*.md")])


class Block(NamedTuple):
    """A fenced block of code. file: the path in its first line, `# a/b.py` or `// a/b.cu`, or ""."""

    language: str
    text: str
    file: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """The code blocks of a page, in order; so are files of examples/ that a line links."""
    text = page.read_text()
    blocks = []
    fenced, linked = r"^```(\w*)\n(.*?)^```$", r"^\[.+\]\(\.\./examples/(\S+)\)$"
    for match in re.finditer(f"{fenced}|{linked}", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        if match[3]:
            file = REPOSITORY / "examples" / match[3]
            blocks.append(Block(file.suffix[1:], file.read_text(), match[3], line))
        else:
            named = re.match(r"(?:#|//) ([\w.-]+(?:/[\w.-]+)*\.\w+)\n", match[2])
            blocks.append(Block(match[1], match[2], named[1] if named else "", line))
    return blocks


def prose_of(page: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`", text)


def headings_of(page: Path) -> list[str]:
    """The titles of a page, of every level."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def anchor_of(heading: str) -> str:
    """The anchor of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).strip().replace(" ", "-")


def links_of(page: Path) -> list[str]:
    """The targets of the links and images of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
