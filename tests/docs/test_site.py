"""`make docs`: the site builds without a warning, and no link of it is broken."""

import csv
import html.parser
import importlib.util
import json
import os
import re
import subprocess
import sys
from urllib.parse import unquote

import pytest
from browser import OUTSIDE, chromium
from helpers import REPOSITORY
from pages import DOCS

from benches import plots

mkdocs = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("material", "mkdocs", "mkdocstrings"))),
    reason="needs the extra docs: pip install jitkern[docs]",
)


# First lines of code of which an icon covers what can be seen.
COVERED = """[...document.querySelectorAll(".md-code__nav")].filter(nav => {
  const code = nav.parentElement.querySelector("code"), text = document.createRange();
  text.selectNodeContents(code);
  const icon = nav.getBoundingClientRect(), edge = code.getBoundingClientRect().right;
  return [...text.getClientRects()].some(t => t.width && Math.min(t.right, edge) > icon.left
    && t.left < icon.right && t.bottom > icon.top && t.top < icon.bottom);
}).map(nav => nav.parentElement.innerText.split("\\n")[0])"""


class Page(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.add(given.get("id"))
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@mkdocs
@pytest.mark.long
def test_the_site_builds_without_a_warning_and_no_link_is_broken(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert {path.name for path in pages} >= {f"{page.stem}.html" for page in DOCS.glob("*.md")}
    checked = 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links:
            if link.startswith(("http:", "https:", "data:", "mailto:")):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.name} links to {link}"
            assert not anchor or target.suffix != ".html" or anchor in pages[target].anchors, link
            checked += 1
        assert '"content.code.copy"' in path.read_text()
    assert checked > 500


@mkdocs
@pytest.mark.long
def test_no_parameter_of_the_api_is_torn_from_its_list(site):
    paragraphs = re.findall(r"<p>(.{9})", (site / "api.html").read_text())
    assert len(paragraphs) > 100
    assert [text for text in paragraphs if text[0].islower()] == []


@mkdocs
@pytest.mark.long
def test_the_page_of_the_command_line_prints_the_help_of_each_command(site):
    page = (DOCS / "command_line.md").read_text()
    asked = re.findall(r"^\$ (jitkern .*) --help$", page, re.MULTILINE)
    printed = re.sub(r"<[^>]+>", "", (site / "command_line.html").read_text())
    for command in asked:
        assert f"$ {command} --help\nusage: {command} [options]" in printed
    assert printed.count("options of every command:") == len(asked) > 20


@mkdocs
@pytest.mark.long
def test_in_a_browser_nothing_is_cut_and_no_icon_covers_code(site, tmp_path):
    icons = 0
    with chromium(tmp_path) as browser:
        for page in sorted(site.glob("*.html")):
            for width in (1280, 400):
                browser.open(page.as_uri(), width)
                assert browser.value(OUTSIDE) == [], (page.name, width)
                assert browser.value(COVERED) == [], (page.name, width)
                icons += browser.value("document.querySelectorAll('.md-code__nav').length")
                if width == 1280:
                    wide = "[...document.querySelectorAll('.md-content :is(pre > code, .md-typeset__scrollwrap)')]"
                    cut = f"{wide}.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"
                    assert browser.value(cut) == [], page.name
    assert icons > 100


def test_plots_show_what_was_measured():
    """Without drawing them again: names and numbers stand in the files as text."""
    files = sorted((DOCS / "figures").glob("*.json"))
    assert files
    for file in files:
        output = json.loads(file.read_text())
        numbers, unit = plots.bars_of(output)
        drawn = file.with_suffix(".svg").read_text()
        for name, number in numbers.items():
            assert f">{name}<" in drawn and f">{plots.label_of(number, unit)}<" in drawn, name
        assert plots.caption_of(output) in drawn
        assert file.with_suffix(".svg").name in (DOCS / "performance.md").read_text()


def test_plots_of_kernels_lie_beside_the_table_that_they_show():
    tables = sorted((REPOSITORY / "benches" / "results").glob("*.csv"))
    assert tables
    for table in tables:
        with table.open() as file:
            rows = list(csv.DictReader(file))
        drawn = table.with_suffix(".svg").read_text()
        assert table.with_suffix(".png").is_file()
        for row in rows:
            assert row["op"] in drawn and f">{row['who']}<" in drawn
            assert f"{row['device']}, commit {row['commit']}, " in drawn


@pytest.mark.long
@mkdocs
def test_a_plot_is_drawn_from_the_output_of_a_bench(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra docs: pip install jitkern[docs]")
    (tmp_path / "a.json").write_text(
        '{"schema": 1, "device": "a device", "commit": "c0ffee", "versions": {"torch": "2.13"}, '
        '"cold": {"jitkern.cpp": 0.25, "load_inline": 21.0}, "warm": {"jitkern.cpp": 0.1}}'
    )
    command = [sys.executable, "-m", "benches.plots", str(tmp_path)]
    drawn = []
    for _ in range(2):
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        drawn.append((tmp_path / "a.svg").read_text())
    assert drawn[0] == drawn[1]
    assert ">0.25 s<" in drawn[0] and "a device, commit c0ffee, torch 2.13" in drawn[0]
