"""The receipt in a real browser: filters, pages, keyboard, hostile text, phone, dark mode, print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import receipts
from browser import Browser, browser, executable
from receipts import HOSTILE

from cplus.receipts.page import Receipt, to_json, write_receipt

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(executable() is None, reason="no Chromium: apt-get install chromium"),
]

# What is seen of the table, and how a control is changed as a person would change it.
KINDS = "[...document.querySelectorAll('#flips .badge')].map(e => e.classList[1])"
SHOWN = "document.getElementById('shown').textContent"
SET = """(id, value, event) => {
  const e = document.getElementById(id);
  e.value = value;
  e.dispatchEvent(new Event(event));
}"""
# The WCAG contrast of an element's text against the first ground behind it that is not clear.
CONTRAST = """(selector) => {
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = parts(text).map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const element = document.querySelector(selector);
  let ground = element;
  while (parts(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(light);
  return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
}"""
TEXTS = (
    *("h1", "header .soft", ".verdict li", ".met-ink", ".unmet-ink", ".notes p", ".sets .soft", ".counts span"),
    *("figcaption", "#flips th", "#flips .gold", "#flips .meta", "summary", "dt", "footer"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Receipt, Path]:
    """More than ten thousand rows."""
    folder = tmp_path_factory.mktemp("receipt")
    receipt = receipts.full(scale=25)
    write_receipt(receipt, folder)
    return receipt, folder / "receipt.html"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(window: Browser, made: tuple[Receipt, Path]) -> Browser:
    """The page, freshly opened by its file."""
    window.size(1200, 900)
    window.media()
    window.open(made[1])
    return window


def choose(page: Browser, id: str, value: str) -> None:
    page.js(f"({SET})({id!r}, {value!r}, {'input' if id == 'search' else 'change'!r})")


def only(page: Browser, *kinds: str) -> None:
    """Click the boxes until just these outcomes are chosen."""
    for kind in ("kept", "lost", "gained", "still_wrong", "same", "changed"):
        box = f"document.querySelector('#kinds [value={kind}]')"
        if page.js(f"{box}.checked") != (kind in kinds):
            page.js(f"{box}.click()")


def test_it_opens_without_complaint_and_asks_for_nothing(page: Browser, made: tuple[Receipt, Path]) -> None:
    assert page.js("document.querySelector('.verdict h2').textContent").startswith(
        "Unclear whether all was kept: 9 of 30 everyday"
    )
    assert page.js("document.getElementById('sha256').textContent") == to_json(made[0])["sha256"]
    assert page.complaints() == []
    assert page.requests() == [made[1].resolve().as_uri()]


def test_changes_come_first_and_the_filters_agree_with_the_record(page: Browser, made: tuple[Receipt, Path]) -> None:
    counts = Counter(row.kind for own in made[0].sets for row in own.rows if own.judged)
    for own in to_json(made[0])["figures"]["sets"]:
        counts.update(own["answers"] or {})
    counts = +counts
    chips = page.js("[...document.querySelectorAll('#kinds label')].map(e => [e.firstChild.value, e.innerText])")
    assert {kind: int(text.split()[-1].replace(",", "")) for kind, text in chips} == dict(counts)
    assert page.js(KINDS) == ["lost"] * 20
    for kind in ("gained", "still_wrong", "kept"):
        only(page, kind)
        assert page.js(KINDS) == [kind] * 20
        assert page.js(SHOWN) == f"1–20 of {counts[kind]:,} rows"
    only(page)
    assert page.js(SHOWN) == "no row fits the filters"


def test_set_and_search_narrow_the_table_together(page: Browser, made: tuple[Receipt, Path]) -> None:
    past, new = made[0].sets[:2]
    choose(page, "set", "1")
    assert page.js(SHOWN).endswith(f"of {len(new.rows):,} rows")
    assert page.js("document.querySelector('#kinds [value=kept]').parentElement.lastElementChild.textContent") == "0"
    choose(page, "set", "0")
    choose(page, "search", "  WINTER rain ")
    assert page.js(SHOWN).endswith(f"of {sum('winter rain' in row.input for row in past.rows):,} rows")
    choose(page, "search", "no such words")
    assert page.js(SHOWN) == "no row fits the filters"


def test_hostile_text_is_shown_as_text(page: Browser) -> None:
    choose(page, "search", "<script>")
    assert page.js("document.querySelector('#flips td:nth-child(3) .text').textContent") == HOSTILE
    assert HOSTILE in page.js("document.querySelector('[aria-labelledby=h-bank]').textContent")
    assert page.js("document.querySelectorAll('main script, main img').length") == 0
    assert page.js("document.title") != "in"
    assert page.complaints() == []


def test_no_other_script_runs_even_if_one_got_in(page: Browser) -> None:
    inline = "s.textContent = 'document.title = 1'"
    page.js(f"{{ const s = document.createElement('script'); {inline}; document.body.append(s); }}")
    page.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')")
    assert page.js("document.title").startswith("What arc_easy")
    assert any("Content Security Policy" in said for said in page.complaints())


def test_it_can_be_used_by_keyboard_and_every_control_has_a_name(page: Browser) -> None:
    page.js("document.querySelector('#kinds [value=lost]').focus()")
    page.key(" ", 32, " ")
    assert "lost" not in page.js(KINDS)
    named = page.named({"checkbox", "combobox", "searchbox", "button", "textbox"})
    assert len(named) >= 10
    assert all(name for _, name in named), named


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_wider_than_a_small_screen(page: Browser, width: int) -> None:
    page.size(width, 740, mobile=True)
    page.js("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    beyond = f"e.getBoundingClientRect().right > {width + 1} && !e.closest('.scroll')"
    assert page.js(f"[...document.querySelectorAll('body *')].filter(e => {beyond}).map(e => e.outerHTML)") == []
    assert page.js("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(page: Browser, scheme: str) -> None:
    page.media(scheme=scheme)
    channels = page.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(channels) < 60) == (scheme == "dark")
    weak = {place: round(found, 2) for place in TEXTS if (found := page.js(f"({CONTRAST})({place!r})")) < 4.5}
    assert weak == {}
    for kind in ("kept", "lost", "gained", "still_wrong", "same", "changed"):
        only(page, kind)
        assert page.js(f"({CONTRAST})('#flips .badge')") >= 4.5, kind
