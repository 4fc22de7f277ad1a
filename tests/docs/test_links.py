"""Links of the README and the documentation resolve: files, and headings within them."""

import re

import pytest
from helpers import REPOSITORY
from pages import DOCS, PAGES, anchor_of, blocks_of, headings_of, links_of

import jitkern
from jitkern import cache_tools, errors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_resolves(page):
    for link in links_of(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in map(anchor_of, headings_of(target)), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_title_and_no_two_headings_of_one_anchor(page):
    anchors = [anchor_of(heading) for heading in headings_of(page)]
    assert len(anchors) == len(set(anchors))
    assert page.read_text().startswith("# ")
    assert len(re.findall(r"^# ", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)) == 1  # fmt: skip


def test_every_page_is_in_the_readme_and_in_the_menu():
    readme = links_of(REPOSITORY / "README.md")
    menu = (REPOSITORY / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert f"docs/{page.name}" in readme, page.name
        assert f": {page.name}\n" in menu, page.name


def test_the_readme_is_short_and_an_index_gets_no_links():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120
    assert 'readme = "DESCRIPTION.md"' in (REPOSITORY / "pyproject.toml").read_text()
    assert not links_of(REPOSITORY / "DESCRIPTION.md")


def test_the_api_has_every_public_name():
    listed = set(re.findall(r"^- `([\w.]+)`", (DOCS / "api.md").read_text(), re.MULTILINE))
    modules = {"ops", "declare", "cache_tools"}
    public = {f"jitkern.{name}" for name in set(jitkern.__all__) - modules}
    public |= {f"jitkern.declare.{name}" for name in jitkern.declare.__all__}
    assert public <= listed
    for name in listed:
        if name.startswith("jitkern.cache_tools."):
            assert name.rpartition(".")[2] in cache_tools.__all__


def test_each_error_has_an_entry_with_an_example():
    page = DOCS / "troubleshooting.md"
    kinds = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.JitkernError)
    ]
    text = page.read_text()
    for name in [*kinds, "BundleError"]:
        entry = text.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert "```python" in entry and "```text" in entry, name


def test_the_files_that_stand_beside_fifty_kinds_of_fault_exist():
    text = (DOCS / "where.md").read_text()
    rows = re.findall(r"^\| (.+) \| (`.+`) \|$", text, re.MULTILINE)
    titles = 2
    assert 50 <= len(rows) == text.count("\n| ") - titles
    for fault, files in rows:
        for file in re.findall(r"`([^`]+)`", files):
            assert (REPOSITORY / file).is_file(), fault


def test_what_pip_is_told_to_install_exists():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]  # fmt: skip
    for page in PAGES:
        for extra in re.findall(r"(?:jitkern|\.)\[(\w+)\]\"", page.read_text()):
            assert extra in extras, f"{page.name}: [{extra}]"


def test_a_block_says_its_language():
    for page in PAGES:
        for block in blocks_of(page):
            assert block.language, f"{page.name}:{block.line}"
