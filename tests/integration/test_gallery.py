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
