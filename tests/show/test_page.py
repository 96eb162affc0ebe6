"""The page in headless Chromium: it opens without network or errors, boxes open on both sides, search, hover, edges.

Without a browser these are skipped; where ``CI`` is set they fail.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_compile.demo_model import Llama
from cp_compile.export import export
from cp_compile.show.listing import Line, listing
from cp_compile.show.page import page
from tests.show.test_picture import line, moved

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
VIEW = {"width": 1600, "height": 900}
Q = "[data-op=blocks_0_attention_q]"


def _missing(what: str) -> Any:
    """Ends the test."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)


@cache
def _lines() -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    with torch.device("meta"):
        model, ids = Llama(layers=3), torch.zeros(1, 1001, dtype=torch.int64)
    program = export(model, [ids], cp_size=4, loss_chunks=1)
    return listing(program.plain, 1), listing(program.graph_module, 4)


@cache
def _html(layers: int) -> str:
    plain, rewritten = (_deeper(lines, layers) for lines in _lines())
    return page(plain, rewritten, 4, f"Llama, {layers} layers")


def _deeper(lines: tuple[Line, ...], layers: int) -> tuple[Line, ...]:
    """The listing of a deeper model: the last of three layers again and again. To export one takes a while."""
    last = [each for each in lines if each.module.startswith("blocks.2")]
    rest = lines[lines.index(last[-1]) + 1 :]
    found = list(lines[: len(lines) - len(rest)])
    for i in range(3, layers):
        found += [_renamed(each, {1: i - 1, 2: i}) for each in last]
    return (*found, *(_renamed(each, {2: layers - 1}) for each in rest))


def _renamed(old: Line, numbers: dict[int, int]) -> Line:
    def text(words: str) -> str:
        return re.sub(r"\bblocks([_.])(\d+)", lambda m: f"blocks{m[1]}{numbers.get(int(m[2]), m[2])}", words)

    names = {name: text(getattr(old, name)) for name in ("name", "arguments", "module", "source")}
    return replace(old, reads=tuple(map(text, old.reads)), **names)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        _missing("no Chromium on PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("no playwright")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield chromium
        chromium.close()


class Opened:
    """A page that is open; what it asked for and complained of."""

    def __init__(self, browser: Any, folder: Path, layers: int = 3, **options: Any) -> None:
        file = folder / "model.html"
        file.write_text(_html(layers), "utf-8")
        self.context = browser.new_context(viewport=VIEW, **options)
        self.context.set_default_timeout(10_000)
        self.tab = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.url = file.as_uri()
        self.tab.goto(self.url)

    def visible(self, selector: str) -> list[bool]:
        return [found.is_visible() for found in self.tab.locator(selector).all()]

    def expanded(self, title: str) -> list[str | None]:
        found = self.tab.get_by_role("button", name=title, exact=False, include_hidden=True)
        return [each.get_attribute("aria-expanded") for each in found.all()]

    def title(self, side: str, box: str) -> Any:
        return self.tab.locator(f'.{side} [data-box="{box}"] > .head .title')


@pytest.fixture
def opened(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    found = Opened(browser, tmp_path, color_scheme=getattr(request, "param", "light"))
    found.tab.wait_for_selector("html[data-ready]")
    yield found
    found.context.close()
    assert found.complaints == []
    assert [url for url in found.requests if not url.startswith("data:")] == [found.url]


def test_a_model_of_32_layers_opens_folded_on_one_screen(browser: Any, tmp_path: Path) -> None:
    found = Opened(browser, tmp_path, 32)
    found.tab.wait_for_selector("html[data-ready]")
    assert found.expanded("blocks.0-31 (32 equal layers)") == ["false", "false"]
    assert found.visible(Q) == [False, False]
    assert found.tab.evaluate("document.documentElement.scrollHeight") <= VIEW["height"]
    assert found.tab.evaluate("document.documentElement.scrollWidth") <= VIEW["width"]
    assert found.complaints == []
    found.context.close()


def test_boxes_open_and_close_on_both_sides(opened: Opened) -> None:
    opened.title("plain", "blocks.0").click()
    assert opened.expanded("blocks.0-2") == ["true", "true"]
    assert opened.visible("[data-op=blocks_0_norm1]") == [True, True]
    assert opened.visible(Q) == [False, False]
    opened.title("ranks", "blocks.0.attention").click()
    assert opened.visible(Q) == [True, True]
    opened.title("ranks", "blocks.0").click()
    assert opened.visible("[data-op=blocks_0_norm1]") == [False, False]


def test_boxes_open_and_close_by_keyboard(opened: Opened) -> None:
    opened.title("ranks", "blocks.0").focus()
    opened.tab.keyboard.press("Enter")
    assert opened.expanded("blocks.0-2") == ["true", "true"]
    opened.tab.keyboard.press("Space")
    assert opened.expanded("blocks.0-2") == ["false", "false"]
    opened.tab.get_by_role("button", name="Expand all").press("Enter")
    assert all(opened.visible("[data-op]"))
    opened.tab.get_by_role("button", name="Collapse all").press("Enter")
    assert opened.visible(Q) == [False, False]


def test_search_by_keyboard(opened: Opened) -> None:
    press, count, here = opened.tab.keyboard.press, opened.tab.locator("#count"), opened.tab.locator(".ranks .here")
    press("/")
    opened.tab.keyboard.type("silu")
    assert opened.visible("[data-op=blocks_0_silu]") == [True, True]
    assert opened.visible(Q) == [False, False]
    total = int(count.inner_text().split(" of ")[1])
    assert total > 1
    assert opened.tab.locator(".ranks .hit").count() == total
    assert here.get_attribute("data-op") == "blocks_0_silu"  # the op itself, before what only stands in its line
    first = count.inner_text()
    seen = []
    for _ in range(total):
        press("Enter")
        seen.append(here.get_attribute("data-op"))
    assert len(set(seen)) == total
    assert count.inner_text() == first
    press("Shift+Enter")
    assert here.get_attribute("data-op") == seen[-2]
    assert here.evaluate("op => op.getBoundingClientRect().top > 0 && op.getBoundingClientRect().bottom < innerHeight")
    press("Escape")
    assert count.inner_text() == ""
    assert opened.tab.locator(".hit, .here, .searching").count() == 0
    assert opened.expanded("blocks.0-2") == ["false", "false"]


def test_search_looks_at_modules_ops_and_code_and_says_when_nothing_is_there(opened: Opened) -> None:
    for words, name in [("blocks.0.gate", "blocks_0_gate"), ("F.pad(ids", "pad_2"), ("attention_q rotate", None)]:
        opened.tab.locator("#search").fill(words)
        hits = opened.tab.locator(".ranks .hit").evaluate_all("ops => ops.map(op => op.dataset.op)")
        assert name in hits if name else hits == []
    assert opened.tab.locator("#count").inner_text() == "no match"


def test_hover_and_focus_show_the_line_of_the_model_and_the_shapes(opened: Opened) -> None:
    opened.tab.get_by_role("button", name="Expand all").click()
    about, q = opened.tab.locator("#about"), opened.tab.locator(f".ranks {Q}")
    assert not about.is_visible()
    q.hover()
    text = about.inner_text()
    assert "demo_model.py:36 (q = self.q(x).view(" in text
    assert "blocks_0_attention_q = linear(blocks_0_norm1, blocks_0_attention_q_weight)" in text
    assert "f32[1, 1001, 128] sequence/4" in text
    assert "f32[1, 251, 128]" in text
    assert "blocks.0.attention.q" in text
    assert opened.tab.locator("path.near").count() == 2  # in and out
    opened.tab.locator("[data-port=blocks_0_attention_cat_heads]").focus()
    opened.tab.wait_for_function("document.getElementById('about').textContent.includes('all_to_all_single')")
    assert "sequence/4 to heads/4, sends 94.1 KiB" in about.inner_text()
    opened.tab.keyboard.press("Escape")
    assert not about.is_visible()


EDGES = "paths => paths.map(p => [p.dataset.source, p.dataset.target, p.dataset.move])"


def test_edges_end_at_what_is_visible_and_moves_are_marked(opened: Opened) -> None:
    def drawn(kind: str = ".edge", side: str = "ranks") -> int:
        return int(opened.tab.locator(f'.edges {kind}[data-side="{side}"]').count())

    # ids to embed and the slice, embed to the layers, these to the norm, two chains of 3, their 3 ends, the return
    assert (drawn(), drawn(".moved"), drawn(".sent")) == (4 + 4 + 3 + 1, 3, 1)
    opened.tab.get_by_role("button", name="Expand all").click()
    sent = opened.tab.locator(".edges .sent").evaluate_all(EDGES)
    attention = "blocks_0_attention_scaled_dot_product_attention"
    assert {source for source, target, _ in sent if target == attention} == {
        "blocks_0_attention_transpose_3",
        "blocks_0_attention_cat",
        "blocks_0_attention_cat_2",
    }
    assert drawn(".moved", "plain") == 0
    texts = opened.tab.locator(".port.sends").all_inner_texts()
    assert sorted(text.split("\n")[0] for text in texts if "94.1" in text) == ["all-to-all 94.1 KiB"] * 4


# names of ops that an edge runs through, other than those at its ends
THROUGH = """() => {
  const ops = [...document.querySelectorAll('.op')].filter(op => op.offsetParent);
  const from = document.querySelector('.panes').getBoundingClientRect();
  return [...document.querySelectorAll('.edges g path')].flatMap(path => {
    const found = new Set(), length = path.getTotalLength();
    for (let at = 8; at < length - 8; at += 3) {
      const point = path.getPointAtLength(at), x = point.x + from.left, y = point.y + from.top;
      for (const op of ops) {
        const r = op.getBoundingClientRect();
        if (x > r.left && x < r.right && y > r.top && y < r.bottom) found.add(op.dataset.op);
      }
    }
    return [...found].map(op => `${path.dataset.source} to ${path.dataset.target} through ${op}`);
  });
}"""

# pairs of marks and ops that lie on each other
UPON = """() => {
  const all = [...document.querySelectorAll('.op, .port:not(.ghost), .names')].filter(each => each.offsetParent);
  const at = all.map(each => each.getBoundingClientRect());
  return all.flatMap((one, i) => all.slice(i + 1).filter((_, j) => {
    const a = at[i], b = at[i + 1 + j];
    return a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  }).map(other => `${one.textContent} on ${other.textContent}`));
}"""

# ops that are at another height on the other side
LEVELS = """() => [...document.querySelectorAll('.plain .op')].filter(op => {
  const other = document.querySelector(`.ranks [data-op="${op.dataset.op}"]`);
  return Math.abs(op.getBoundingClientRect().top - other.getBoundingClientRect().top) > 1;
}).map(op => op.dataset.op)"""


def test_the_drawing_is_readable_open_and_closed(opened: Opened) -> None:
    for press in (lambda: None, opened.title("plain", "blocks.0").click, opened.tab.locator("#open").click):
        press()
        assert opened.tab.evaluate(THROUGH) == []
        assert opened.tab.evaluate(UPON) == []
    assert opened.tab.evaluate(LEVELS) == []


# contrast of the text of an element with its ground, as WCAG 2 counts it
CONTRAST = """elements => elements.map(element => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const light = colour => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(each => each / 255);
    const [r, g, b] = parts.map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let ground = element;
  while (getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(ground).backgroundColor)];
  return [element.textContent, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
})"""


@pytest.mark.parametrize("opened", ["light", "dark"], indirect=True)
def test_text_has_contrast_in_light_and_dark(opened: Opened) -> None:
    opened.tab.get_by_role("button", name="Expand all").click()
    opened.tab.locator("#search").fill("silu")
    found = opened.tab.locator(".legend b, .op span, .op small, .port, .port small, .title, .sum, h2, .hit small")
    pairs = found.evaluate_all(CONTRAST)
    assert len(pairs) > 200
    dark = opened.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
    assert dark == opened.tab.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert [(text, ratio) for text, ratio in pairs if ratio < 4.5] == []


def test_the_page_reads_without_its_script(browser: Any, tmp_path: Path) -> None:
    found = Opened(browser, tmp_path, java_script_enabled=False)
    assert found.visible(Q) == [True, True]
    assert found.visible("[data-port=blocks_0_attention_cat_heads]") == [True]
    found.context.close()


def test_a_box_that_is_closed_keeps_the_marks_of_what_leaves_it(browser: Any, tmp_path: Path) -> None:
    given = [line("x", kind="input"), line("a", "x", module="m"), line("b", "a", module="m"), moved("left", "b")]
    file = tmp_path / "moved.html"
    file.write_text(page(given, [*given, line("c", "left")], 2, ""), "utf-8")
    context = browser.new_context(viewport=VIEW)
    tab = context.new_page()
    tab.goto(file.as_uri())
    tab.wait_for_selector("html[data-ready]")
    begins = """path => document.querySelector('.panes').getBoundingClientRect().top + path.getPointAtLength(0).y"""
    for mark in (".ranks .ports > [data-port=left]", ".ranks .cells .cells > .cell > [data-port=left]"):
        at = tab.locator(mark).bounding_box()
        assert at is not None
        path = tab.locator(".edges .sent[data-move=left]")
        assert path.count() == 1
        assert abs(path.evaluate(begins) - at["y"] - at["height"]) < 1
        tab.locator("#open").click()
    assert not tab.locator(".ranks .ports > [data-port=left]").is_visible()
    context.close()
