"""The documentation site builds strictly, leaves no page out, and its reference pages name all there is."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import browser, executable
from documents import words

from cplus.jobs.settings import AdaptConfig, RepairConfig
from cplus.methods.table import METHODS
from cplus.probes.settings import ProbeSettings

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from docs_hooks import ROOT_PAGES, outside, rewritten, shown  # noqa: E402
from docs_reference import API, PAGES, RECORDS  # noqa: E402


def pages(nav: Any) -> list[str]:
    """The files of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


def test_every_page_is_in_the_navigation_and_exists() -> None:
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == written | set(PAGES) | set(ROOT_PAGES.values()) - {"project/readme.md"}


DOCS = sorted((ROOT / "docs").rglob("*.md"))
PROSE = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md")] + DOCS


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The names by which links reach a page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading(path: Path) -> None:
    for link, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(path)):
        if not link.startswith("https://"):
            target = path.parent / link if link else path
            assert target.exists(), link
            assert not heading or target.suffix != ".md" or heading in anchors(target), f"{link}#{heading}"


def test_the_documentation_is_small_and_each_page_begins_with_its_use() -> None:
    assert sum(words(path) for path in (ROOT / "README.md", *DOCS)) <= 25_000
    assert len(DOCS) <= 20
    assert words(ROOT / "docs" / "log.md") <= 1_500
    late = [path.name for path in DOCS if not re.match(r"# .+\n\nAfter this page ", path.read_text(encoding="utf-8"))]
    assert late == []


ODD = (
    r"rightly", r"wrongly", r"part(?:ed|ing) (?:in|into|from)", r"ask(?:s|ed) the model", r"gone (?:through|on)",
    r"goes on with", r"taken (?:up|off)", r"looked at", r"a look\b", r"so many\b", r"(?:bytes|words) a parameter",
    r"(?:tokens?|rows|steps) a second", r"loss a token", r"put away", r"let (?:through|have)", r"in the end\b",
    r"in turn\b", r"once an? (?:epoch|step|batch|task)", r"stands? (?:above|below|in|on)", r"speaks? about",
    r"one time\b", r"is had\b", r"of the (?:past|new)\b(?=[.,;:)])", r"as it lay", r"whose words",
    r"is no part of", r"hears? who", r"in nobody",
)  # fmt: skip
"""Phrases that a native reader stumbles over."""


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_has_an_odd_phrase(path: Path) -> None:
    assert re.findall(rf"\b(?:{'|'.join(ODD)})", " ".join(prose(path).split()), re.I) == []


def test_what_holds_a_choice_exists() -> None:
    """The tests and files in the last column of the page about choices that the paper leaves open."""
    text = (ROOT / "docs" / "interpretations.md").read_text(encoding="utf-8")
    named = [re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1]) for row in text.splitlines() if row.startswith("| ")]
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for name in {name for names in named for name in names}:
        here = [ROOT / name, ROOT / "tests" / name]
        assert any(path.exists() for path in here) or f"def {name}(" in tests or name in METHODS, name


def test_links_out_of_the_folder_lead_to_pages_that_show_the_files() -> None:
    text = "[a](../../examples/trainer.py) [b](../data.md#files) [c](../../README.md#x)\n"
    text += "```\n[d](../../examples/lora.py)\n```\n"
    assert outside(text, "docs/guides/x.md") == {"examples/trainer.py"}
    assert rewritten(text, "docs/guides/x.md", "guides/x.md").splitlines() == [
        "[a](../files/examples/trainer.py.md) [b](../data.md#files) [c](../project/readme.md#x)",
        *text.splitlines()[1:],
    ]


def test_the_reference_names_every_command_option_and_setting() -> None:
    commands, settings = PAGES["reference/commands.md"](), PAGES["reference/settings.md"]()
    surface = (ROOT / "tests" / "data" / "cli.txt").read_text().splitlines()
    headings = re.findall(r"^## `(.*)`$", commands, re.M)
    assert set(headings) == {line for line in surface if any(other.startswith(f"{line} ") for other in surface)}
    options = {name for line in surface for name in re.findall(r"--[a-z0-9-]+", line)} - {"--help"}
    assert all(f"`{option}`" in commands for option in options)
    assert all(f"| `{name}` |" in settings for name in AdaptConfig.model_fields)


def test_what_the_reference_shows_of_python_exists() -> None:
    for name in (name for table in (API, RECORDS) for names in table.values() for name in names):
        module, _, member = name.rpartition(".")
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        assert re.search(rf"^(def|class) {member}\b", source, re.M), name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for the module."""
    if any(importlib.util.find_spec(name) is None for name in ("material", "mkdocstrings")):
        pytest.skip("the extra 'docs' is not installed: pip install --constraint constraints.txt --editable '.[docs]'")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    found = list(site.rglob("*.html"))
    assert len(found) > 30
    for page in found:
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*?src=\"?([^\"\s>]+)", page.read_text())
        loaded += re.findall(r"<link[^>]*?rel=\"?(?:stylesheet|icon|preconnect)[^>]*", page.read_text())
        assert not [link for link in loaded if "//" in link], page


@pytest.mark.browser
def test_pages_opened_as_files_are_quiet_and_searchable(site: Path) -> None:
    if executable() is None:
        pytest.skip("no Chromium on this machine")
    with browser() as tab:
        tab.size(1280, 900)
        for page in ("index.html", "tutorial.html", "reference/api.html", "studies.html"):
            tab.open(site / page)
            assert tab.complaints() == [], page
            assert all(request.startswith(("file:", "data:")) for request in tab.requests()), page
        tab.open(site / "index.html")
        found = tab.js(SEARCH)
        assert any("Alpaca" in text for text in found), found
        assert tab.complaints() == []


SEARCH = """new Promise(resolve => {
    const field = document.querySelector("[data-md-component=search-query]")
    field.focus()
    field.value = "alpaca"
    field.dispatchEvent(new Event("input", {bubbles: true}))
    field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true, key: "a"}))
    let tries = 0
    const timer = setInterval(() => {
        const found = [...document.querySelectorAll(".md-search-result__item")].map(item => item.textContent)
        if (found.length || ++tries > 100) { clearInterval(timer); resolve(found) }
    }, 200)
})"""


def test_a_notebook_is_shown_cell_by_cell() -> None:
    page = shown("examples/quickstart.ipynb")
    assert page.startswith("# Quickstart")
    assert "```python\nfrom pathlib import Path" in page
    assert "(../../results.md#the-frontier)" in page


def test_every_option_that_the_page_of_adapt_names_exists() -> None:
    page = (ROOT / "docs" / "adapt.md").read_text()
    known = set(re.findall(r"cplus adapt --([a-z-]+)", (ROOT / "tests" / "data" / "cli.txt").read_text()))
    assert set(re.findall(r"--([a-z][a-z-]+)", page)) - {"dtype", "clock"} <= known


def test_every_setting_that_a_page_sets_exists() -> None:
    known = {*RepairConfig.model_fields, *(field.name for field in dataclasses.fields(ProbeSettings))}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert set(re.findall(r"--set ([a-z_]+)=", page.read_text())) <= known, page
