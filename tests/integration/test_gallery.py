"""The gallery's views of a sample, as a phone shows them: nothing is wider than the window or broken up."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpro.dashboards.app import VIEWS
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.report import html_of
from dpro.opening import open_path
from dpro.verdict.report import make_report
from tests.browser import served, start_browser
from tests.gallery import OVERFLOW, show
from tests.jobs import ROOT

pytestmark = pytest.mark.slow
BROKEN = r"""
return [...document.querySelectorAll("th")].filter(cell => {
  const text = document.createRange();
  text.selectNodeContents(cell);
  const words = cell.innerText.trim().split(/[\s-]+/).length;
  return text.getBoundingClientRect().height > 24 * words;
}).map(cell => cell.innerText);
"""
BEYOND = """
return [...document.querySelectorAll(".dash-graph")].filter(figure =>
  figure.getBoundingClientRect().right > document.documentElement.clientWidth).map(figure => figure.id);
"""
# Titles of axes that lie over the numbers of their axis, and texts of figures that are cut or nearly unseen.
UNREADABLE = r"""
const shown = (each) => each.getBoundingClientRect();
const meet = (a, b) => a.width && b.width
  && a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
const found = [];
for (const figure of document.querySelectorAll(".dash-graph .main-svg")) {
  for (const title of figure.querySelectorAll(".xtitle"))
    for (const tick of document.querySelectorAll(".xtick text"))
      if (meet(shown(title), shown(tick))) found.push(`${title.textContent} over ${tick.textContent}`);
  const { left, right } = shown(figure);
  for (const text of figure.querySelectorAll(".cbaxis text, .legendtext"))
    if (shown(text).right > right + 1 || shown(text).left < left - 1) found.push(`cut: ${text.textContent}`);
}
return found;
"""
# Texts of the waterfall that reach beyond its panel, and parts of the first view that scroll sideways.
CUT = """
const panel = document.querySelector("#verdict-short").getBoundingClientRect();
const texts = [...document.querySelectorAll("#verdict-step-0 .main-svg text")];
if (texts.length < 10) return ["no waterfall"];
const beyond = texts.filter(text => {
  const at = text.getBoundingClientRect();
  return at.width && (at.left < panel.left - 1 || at.right > panel.right + 1);
}).map(text => text.textContent);
const parts = [...document.querySelectorAll("main .section, main .card")];
const scroll = parts.filter(part => part.scrollWidth > part.clientWidth).map(part => part.id || "card");
return [...beyond, ...scroll];
"""
# Texts that are seen whole, each with its colour and where it is in the window.
TEXTS = r"""
const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const within = (box, inner) => inner.left >= box.left - 1 && inner.right <= box.right + 1
  && inner.top >= box.top - 1 && inner.bottom <= box.bottom + 1;
const clips = (element) => !/visible/.test(getComputedStyle(element).overflow);
function inside(element) {  // what its scroll bars leave
  const { left, top } = element.getBoundingClientRect();
  return { left, top, right: left + element.clientWidth, bottom: top + element.clientHeight };
}
const isWhole = (element, box) => element === document.body
  || ((!clips(element) || within(inside(element), box)) && isWhole(element.parentElement, box));
const page = { left: 0, top: 0, right: innerWidth, bottom: innerHeight };
for (let node; (node = walker.nextNode());) {
  const element = node.parentElement, svg = element.closest("svg");
  if (!node.textContent.trim() || !element.checkVisibility({ opacityProperty: true })) continue;
  if (element.closest("script, style, option")) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  const box = range.getBoundingClientRect(), { x, y, width, height } = box;
  if (!width || !within(page, box) || (!svg && !isWhole(element, box))) continue;
  const above = document.elementFromPoint(x + width / 2, y + height / 2);
  if (!svg && above && !element.contains(above) && !above.contains(element)) continue;
  const { fill, color } = getComputedStyle(element);
  texts.push({ text: node.textContent.trim().slice(0, 40), x, y, width, height, colour: svg ? fill : color });
}
return texts;
"""
# Of texts in a screenshot, the contrast of each with what is most of its box, as WCAG 2.2 defines it.
CONTRASTS = r"""
const [shot, texts, done] = arguments, image = new Image();
image.onload = () => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const weighted = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const luminance = (rgb) => weighted(rgb.map((part) => part / 255));
  done(texts.map(({ x, y, width, height, colour }) => {
    const { data } = context.getImageData(x, y, Math.ceil(width), Math.ceil(height)), counts = new Map();
    for (let at = 0; at < data.length; at += 4) {
      const rgb = `${data[at]},${data[at + 1]},${data[at + 2]}`;
      counts.set(rgb, (counts.get(rgb) || 0) + 1);
    }
    const most = [...counts].reduce((a, b) => (b[1] > a[1] ? b : a))[0].split(",").map(Number);
    const ink = colour.match(/[\d.]+/g).slice(0, 3).map(Number);
    const [low, high] = [luminance(most), luminance(ink)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }));
};
image.src = "data:image/png;base64," + shot;
"""
ENOUGH = 4.5  # contrast of texts, level AA
SCROLLS = ("matrix", "hang")  # within a panel: below some width their figures cannot be read


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Any, str, Path]]:
    """A browser, the address of the sample's dashboard, and a folder with its report."""
    browser = start_browser()
    loaded = Loaded(open_path(ROOT / "sample_traces" / "slow_rank"))
    try:
        with tempfile.TemporaryDirectory() as place, served(loaded) as address:
            (Path(place) / "report.html").write_text(html_of(loaded, make_report(loaded)))
            yield browser, address, Path(place)
    finally:
        browser.quit()


@pytest.mark.parametrize("view", [*(view.name for view in VIEWS), "report"])
def test_a_view_fits_a_phone_and_no_heading_is_broken_into_letters(opened, view):
    browser, address, place = opened
    show(browser, view, 390, "light", address, place)
    assert browser.execute_script(OVERFLOW) <= 0
    beyond = browser.execute_script(BEYOND)
    assert not beyond or view in SCROLLS
    assert browser.execute_script(BROKEN) == []


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("view", ["heatmap", "collectives", "layout", "breakdown", "whatif"])
def test_texts_of_figures_are_whole_and_none_lies_over_another(opened, view, width):
    browser, address, place = opened
    show(browser, view, width, "dark", address, place)
    assert browser.execute_script(UNREADABLE) == []


@pytest.mark.parametrize("width", [390, 1440])
def test_no_word_of_the_waterfall_is_cut_and_no_card_scrolls(opened, width):
    browser, address, place = opened
    show(browser, "verdict", width, "light", address, place)
    assert browser.execute_script(CUT) == []


@pytest.mark.parametrize("view", ["heatmap", "kernels"])
def test_the_same_holds_of_eight_ranks_on_gpus(traces, view):
    browser = start_browser()
    loaded = Loaded(open_path(traces / "multirank" / "nanogpt_h100_8r_rs_ag"))
    try:
        with tempfile.TemporaryDirectory() as place, served(loaded) as address:
            show(browser, view, 1440, "light", address, Path(place))
            assert browser.execute_script(UNREADABLE) == []
    finally:
        browser.quit()


def screenshot(browser: Any) -> str:
    """What the window shows, as a PNG in base64."""
    return str(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", [*(view.name for view in VIEWS), "report"])
def test_texts_in_a_screenshot_of_a_view_stand_out_from_what_is_behind_them(opened, view, theme):
    browser, address, place = opened
    faint = []
    for width in (390, 1440):
        show(browser, view, width, theme, address, place)
        texts, shot = browser.execute_script(TEXTS), screenshot(browser)
        assert len(texts) > 10
        browser.get("about:blank")  # which may read the pixels of a picture
        contrasts = browser.execute_async_script(CONTRASTS, shot, texts)
        faint += [(width, text["text"], round(of, 1)) for text, of in zip(texts, contrasts) if of < ENOUGH]
    assert faint == []
