"""What the site needs beside mkdocs.yml: pages from the root, help texts, names, parameters."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

import jitkern
from jitkern import cache_tools, cli

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}

RESULTS = "benches/results/"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie at the root of the repository, and the figures of the benches."""
    for name, page in PAGES.items():
        text = _linked((ROOT / name).read_text(), "")
        files.append(File.generated(config, page, content=text))
    for figure in sorted((ROOT / RESULTS).glob("*.svg")):
        files.append(File.generated(config, f"figures/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Print the help texts, files that a line links, and the docstrings of public names."""
    shown = r"^\[.+\]\(\.\./(examples/\S+)\)$"
    markdown = re.sub(shown, _file, markdown, flags=re.MULTILINE)
    if page.file.src_uri not in PAGES.values():
        markdown = _linked(markdown, "../")
    markdown = re.sub(r"^\$ jitkern (.* --help)$", _help, markdown, flags=re.MULTILINE)
    if page.file.src_uri == "api.md":
        markdown = re.sub(r"^- `([\w.]+)`(?:: (.+))?$", _object, markdown, flags=re.MULTILINE)
    return markdown


def _linked(markdown: str, root: str) -> str:
    """Return a page with its links to files of the repository as the site has them.

    root: the way from the page to the root of the repository. What the site lacks is named instead.
    """

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match.groups(default="")
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        if path.startswith(RESULTS):
            return f"[{text}](figures/{path.removeprefix(RESULTS)})"
        if path in PAGES:
            return f"[{text}]({PAGES[path]}{anchor})"
        return f"{text} (`{path}` in the repository)"

    pattern = rf"\[([^\]]+)\]\({re.escape(root)}((?!https?:|#|\.\.)[^)#\s]+)(#[^)\s]*)?\)"
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if part.startswith("```") else re.sub(pattern, link, part) for part in parts
    )


def _help(match: re.Match[str]) -> str:
    """Return the line of a page that asks for the help of a command, with what that prints."""
    printed = io.StringIO()
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main(shlex.split(match[1]))
    return f"{match.group()}\n{printed.getvalue()}"


def _file(match: re.Match[str]) -> str:
    """Return the block of code that shows a file of the repository."""
    path = ROOT / match[1]
    others = {".conf": "nginx", ".service": "ini", ".cu": "cuda"}
    language = others.get(path.suffix, path.suffix[1:])
    return f'\n```{language} title="{match[1]}"\n{path.read_text()}```\n'


def _object(match: re.Match[str]) -> str:
    """Return the block of mkdocstrings for a line of the list of names: a name, and its members."""
    package, _, name = match[1].rpartition(".")
    home = {"jitkern": jitkern, "jitkern.cache_tools": cache_tools}.get(package)
    lines = [f"::: {match[1]}", "    options:", f"      heading: {match[1]}"]
    if home and name in home._HOMES:
        # A function that is wrapped names the module of what it is wrapped around.
        of = getattr(getattr(home, name), "__module__", None)
        lines[0] = f"::: {of or f'{package}.{home._HOMES[name]}'}.{name}"
    if match[2]:
        lines += [f"      members: [{match[2]}]", "      inherited_members: true"]
    return "\n".join(["", *lines, ""])


class Parameters(griffe.Extension):
    """Docstrings name each parameter on a line of its own, `name: what it is`: make it a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            lines = []
            for line in obj.docstring.value.split("\n"):
                names, colon, rest = line.partition(": ")
                if colon and re.fullmatch(r"[a-z_]+(, [a-z_]+)*", names):
                    spelled = ", ".join(f"`{name}`" for name in names.split(", "))
                    before = (
                        [""]
                        if lines and lines[-1] and not lines[-1].startswith(("- ", " "))
                        else []
                    )
                    lines += [*before, f"- {spelled}: {rest}"]
                elif line and lines and lines[-1].startswith("- ") and not line.startswith(" "):
                    lines += ["", line]
                else:
                    lines.append(line)
            obj.docstring.value = "\n".join(lines)
