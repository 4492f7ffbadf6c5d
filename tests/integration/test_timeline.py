"""The timeline in a real browser: search, zoom, a click with its arrows, folding, keys, and links to it."""

from __future__ import annotations

import itertools
import re
from contextlib import contextmanager
from threading import Semaphore

import pytest

from benchmarks.timeline import BARS, checks, made_up, measured, repeated
from dpro.dashboards.command import load, offered_runs
from dpro.dashboards.loaded import EarlierFindings, Loaded
from dpro.dashboards.timeline.measured import MeasuredLanes
from dpro.detect.findings import Finding
from dpro.store import open_run
from tests.browser import EVIL, complaints, evil_run, served, settle, start_browser, wait
from tests.builders import gpu_job

DRAWN = """
const t = window.dproTimeline;
return t && t.root && t.info && t.info.complete && t.fitting && t.data && !t.since && t.data.size;
"""
# Where each rank is drawn, and bars of a rank in another's rows, frame by frame.
RECORDED = """
const t = dproTimeline;
window.recorded = { places: {}, misplaced: 0 };
const frame = () => {
  for (const row of t.rows.filter((row) => row.type === 'rank')) {
    (recorded.places[row.label] ||= new Set()).add(row.y);
  }
  if (t.data) t.data.ask.from.forEach((row, n) => {
    if (row && !(t.rows.includes(row) && row.rank === t.data.ask.sources[n].rank)) recorded.misplaced++;
  });
  requestAnimationFrame(frame);
};
frame();
"""
PATH = "return dproTimeline.info.replay.state === 'ready'"
# Where the middle of the first bar of a name is drawn, relative to the frame.
BAR = """
const t = dproTimeline, name = arguments[0], data = t.data;
for (let at = 0; at < data.size; at++) {
  if (data.count[at] !== 1 || data.layer[at] !== 0 || t.names.get(data.name[at]) !== name) continue;
  const from = t.source(at);
  if (from.side !== 'm' || from.rank !== 0) continue;
  const begin = data.ask.begin + data.x[at] * data.nsPerPixel, end = begin + data.width[at] * data.nsPerPixel;
  const [left, right] = [Math.max(t.xOf(begin), t.gutter()), Math.min(t.xOf(end), t.frame.clientWidth)];
  if (right - left < 2) continue;
  const box = t.frame.getBoundingClientRect(), row = data.ask.from[data.row[at]];
  return [box.left + (left + right) / 2, box.top + row.y - t.frame.scrollTop + t.AXIS + row.height / 2];
}
return null;
"""

try:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select
except ImportError:  # `start_browser` says so
    ActionChains = ScrollOrigin = Keys = Select = None


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Two ranks, the second of which comes late."""
    with served(load(gpu_job().write(tmp_path_factory.mktemp("run")))) as address:
        yield address


def _open(browser, address: str) -> None:
    browser.get(address)
    wait(browser, DRAWN)


def _view(browser) -> tuple[float, float]:
    view = browser.execute_script("return dproTimeline.view")
    return view["begin"], view["end"]


def _keys(browser, keys: str) -> None:
    browser.execute_script("document.querySelector('.timeline-frame').focus()")
    ActionChains(browser).send_keys(keys).perform()


def _bar(browser, name: str) -> tuple[int, int]:
    found = browser.execute_script(BAR, name)
    assert found, f"no bar of {name} is drawn"
    return round(found[0]), round(found[1])


def _at(browser, place: tuple[int, int]):
    """The pointer at a place of the page."""
    actions = ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(*place)
    return actions


def test_the_measured_lanes_are_drawn_and_a_link_reproduces_what_is_seen(browser, job):
    _open(browser, f"{job}?view=timeline")
    before = _view(browser)
    _keys(browser, "w")
    wait(browser, "return location.search.includes('time=')")
    wait(browser, DRAWN)
    closer = _view(browser)
    assert closer[1] - closer[0] == pytest.approx((before[1] - before[0]) / 2, rel=1e-6)
    address = browser.current_url
    browser.get("about:blank")
    _open(browser, address)
    assert _view(browser) == pytest.approx(closer, abs=2)
    browser.back()
    assert complaints(browser) == []


@pytest.mark.slow
def test_a_row_is_drawn_once_its_place_is_final(browser, tmp_path, monkeypatch):
    read, gate = MeasuredLanes._lanes, Semaphore(0)
    monkeypatch.setattr(MeasuredLanes, "_lanes", lambda *args: gate.acquire() and read(*args))
    with served(load(gpu_job(num_ranks=3).write(tmp_path))) as address:
        browser.get(f"{address}?view=timeline&order=late")  # rank 1 is above rank 0, which is read first
        wait(browser, "return window.dproTimeline && dproTimeline.info")
        browser.execute_script(RECORDED)
        for number, drawn in enumerate([[], ["rank 1"], ["rank 1", "rank 2", "rank 0"]], start=1):
            gate.release()
            have = "dproTimeline.info.ranks.filter((each) => each.side === 'm' && each.lanes).length"
            wait(browser, f"return {have} === {number}")
            wait(browser, "return !dproTimeline.since")
            rows = "dproTimeline.rows.filter((row) => row.type === 'rank')"
            assert browser.execute_script(f"return {rows}.map((row) => row.label)") == drawn
        wait(browser, PATH)
        wait(browser, DRAWN)
        recorded = browser.execute_script(
            "return [Object.values(recorded.places).map((places) => places.size), recorded.misplaced]"
        )
        assert recorded == [[1, 1, 1], 0]
        browser.get("about:blank")  # before the server is gone


@contextmanager
def _window(browser, width: int, height: int):
    device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_the_frame_fills_the_window_and_ranks_are_unfolded_as_far_as_they_fit_those_at_fault_first(
    browser, tmp_path, monkeypatch
):
    slow = Finding("slow.compute", "rank", "7", (7,), 0.5, 1.0, 3e6, ())
    monkeypatch.setattr(Loaded, "findings_so_far", lambda _: EarlierFindings((slow,)))
    page = "const { scrollHeight } = document.documentElement, panel = dproTimeline.root.closest('.panel');"
    page += "return [scrollHeight <= innerHeight, innerHeight - panel.getBoundingClientRect().bottom]"
    ranks = "dproTimeline.rows.filter((row) => row.type === 'rank')"
    opened = f"return {ranks}.filter((row) => row.open).map((row) => row.rank)"
    room = "return dproTimeline.frame.clientHeight - dproTimeline.AXIS - dproTimeline.height"
    with served(load(gpu_job(num_ranks=12).write(tmp_path))) as address:
        for height, unfolded in ((810, [0, 1, 2, 3, 7]), (600, [7])):
            with _window(browser, 1440, height):
                _open(browser, f"{address}?view=timeline")
                wait(browser, PATH)
                settle(browser)
                fits, below = browser.execute_script(page)
                assert fits
                assert 0 <= below < 12
                assert browser.execute_script(opened) == unfolded
                assert 0 <= browser.execute_script(room) < 51  # pixels: of the three lanes of a rank
                browser.execute_script("document.querySelector('[data-key=\"8\"]').click()")
                assert browser.execute_script(opened) == sorted([*unfolded, 8])
                wait(browser, "return location.search.includes('open=8')")
        _open(browser, browser.current_url)  # in a larger window the link keeps what it says
        assert 8 in browser.execute_script(opened)
        assert complaints(browser) == []
        browser.get("about:blank")  # before the server is gone


@pytest.mark.slow
def test_a_hang_opens_where_it_stopped_with_the_last_calls_of_each_rank_in_view(browser, repository):
    with served(load(open_run(repository / "sample_traces" / "h200_hang"))) as address:
        _open(browser, f"{address}?view=timeline")
        begin, end = _view(browser)
        stop = browser.execute_script("return dproTimeline.info.stop")
        assert begin < stop[0] < stop[1] < end
        drawn = "const t = dproTimeline; return [...t.data.order].map((at) => "
        drawn += "[t.source(at).rank, t.names.get(t.data.name[at]), t.yOf(t.data.ask.from[t.data.row[at]])])"
        bars = [bar for bar in browser.execute_script(drawn) if bar[1]]
        height = browser.execute_script("return dproTimeline.frame.clientHeight")
        assert all(y < height for _, _, y in bars)
        names = {(rank, name) for rank, name, _ in bars}
        assert names >= {(rank, "all_reduce #124") for rank in (0, 1)}  # the last that finished
        assert names >= {(0, "all_reduce #125: started, never finished")}
        assert names >= {(1, "all_reduce #125: scheduled, never finished")}
        browser.get("about:blank")  # before the server is gone


@pytest.mark.slow
def test_keys_zoom_move_and_choose(browser, job):
    _open(browser, f"{job}?view=timeline")
    begin, end = _view(browser)
    _keys(browser, "s")
    assert _view(browser)[1] - _view(browser)[0] == pytest.approx(2 * (end - begin))
    _keys(browser, "wd")
    assert _view(browser)[0] == pytest.approx(begin + (end - begin) / 4, abs=2)
    _keys(browser, "a" + Keys.ARROW_RIGHT + Keys.ARROW_LEFT)
    assert _view(browser)[0] == pytest.approx(begin, abs=2)
    _keys(browser, "/")
    assert browser.execute_script("return document.activeElement.id") == "timeline-find"
    ActionChains(browser).send_keys("softmax", Keys.ENTER).perform()
    wait(browser, "return dproTimeline.span && dproTimeline.span.place.name === 'softmax'")
    _keys(browser, ".")
    wait(browser, "return dproTimeline.span.place.name === 'norm'")
    _keys(browser, ",f")
    wait(browser, "return dproTimeline.span.place.name === 'softmax'")
    _keys(browser, Keys.ESCAPE)
    wait(browser, "return !dproTimeline.span && !location.search.includes('span=')")
    assert complaints(browser) == []


@pytest.mark.slow
def test_the_wheel_zooms_about_the_pointer_with_ctrl_and_moves_with_shift(browser, job):
    _open(browser, f"{job}?view=timeline")
    begin, end = _view(browser)
    frame = browser.find_element("css selector", ".timeline-frame")
    origin = ScrollOrigin.from_element(frame, 200, 0)
    where = browser.execute_script(
        "const t = dproTimeline, box = t.frame.getBoundingClientRect();"
        "return t.timeAt(Math.floor(box.width / 2) + 200)"
    )
    zoom = (
        ActionChains(browser).key_down(Keys.CONTROL).scroll_from_origin(origin, 0, -100).key_up(Keys.CONTROL)
    )
    zoom.perform()
    closer = _view(browser)
    assert closer[1] - closer[0] < 0.8 * (end - begin)
    assert closer[0] < where < closer[1]
    share = (where - closer[0]) / (closer[1] - closer[0])
    assert share == pytest.approx((where - begin) / (end - begin), abs=0.02)
    ActionChains(browser).key_down(Keys.SHIFT).scroll_from_origin(origin, 0, 100).key_up(Keys.SHIFT).perform()
    moved = _view(browser)
    assert moved[0] > closer[0]
    assert moved[1] - moved[0] == pytest.approx(closer[1] - closer[0])
    _at(browser, _bar(browser, "softmax")).click_and_hold().move_by_offset(-80, 0).release().perform()
    assert _view(browser)[0] > moved[0]
    assert complaints(browser) == []


@pytest.mark.slow
def test_search_counts_goes_on_and_back_and_dims_the_rest(browser, job):
    _open(browser, f"{job}?view=timeline")
    box = browser.find_element("id", "timeline-find")
    box.send_keys("soft.ax")
    wait(browser, "return document.querySelector('.found').textContent.startsWith('6 spans')")
    wait(browser, "return dproTimeline.data.layer.some((layer) => layer === 1)")
    box.send_keys(Keys.ENTER)
    wait(browser, "return document.querySelector('.found').textContent.startsWith('1 of 6')")
    shown = "const t = dproTimeline, { place } = t.span, row = t.rowOf('m', place.rank, place.row)"
    shown += "; return row.label.includes('compute') && t.view.begin < place.start && place.end < t.view.end"
    assert browser.execute_script(shown)
    browser.find_element("id", "timeline-next").click()
    wait(browser, "return document.querySelector('.found').textContent.startsWith('2 of 6')")
    browser.find_element("id", "timeline-previous").click()
    wait(browser, "return document.querySelector('.found').textContent.startsWith('1 of 6')")
    assert "find=soft.ax" in browser.current_url
    box.clear()
    box.send_keys("(")
    wait(browser, "return document.querySelector('.found.bad')")
    assert "is not a regular expression" in browser.find_element("class name", "found").text
    box.send_keys(Keys.ESCAPE)
    wait(browser, "return !document.querySelector('.found').textContent && !location.search.includes('find')")
    wait(browser, "return dproTimeline.data.ask.find === ''")
    assert not browser.find_elements("css selector", ".found.bad")


@pytest.mark.slow
def test_a_search_counts_and_goes_to_spans_of_the_selected_ranks_alone(browser, job):
    _open(browser, f"{job}?view=timeline&find=soft.ax&ranks=1")
    wait(browser, "return dproTimeline.span?.place.rank === 1")
    wait(browser, "return document.querySelector('.found').textContent === '1 of 3 spans'")
    browser.find_element("id", "clear").click()
    browser.find_element("id", "timeline-find").send_keys("soft.ax")
    wait(browser, "return document.querySelector('.found').textContent.startsWith('6 spans')")


@pytest.mark.slow
def test_two_changes_in_a_row_are_both_in_the_link(browser, job):
    _open(browser, f"{job}?view=timeline")
    script = "dpro.go({ colour: 'phase' }); dpro.go({ tracks: 'rank' }); dpro.go({ colour: null });"
    script += "return location.search"
    assert browser.execute_script(script) == "?tracks=rank&view=timeline"
    wait(browser, "return dproTimeline.link.tracks === 'rank' && !dproTimeline.link.colour")
    browser.execute_script("history.go(-2)")
    wait(browser, "return dproTimeline.link.colour === 'phase' && !dproTimeline.link.tracks")
    assert browser.execute_script("return location.search") == "?colour=phase&view=timeline"


@pytest.mark.slow
def test_a_choice_outlasts_a_change_of_the_link_that_comes_before_its_answer(browser, job):
    _open(browser, f"{job}?view=timeline")
    wait(browser, PATH)
    browser.execute_script("dpro.go({ span: '0.4' }); dpro.go({ find: 'softmax' })")
    wait(browser, "return dproTimeline.link.find === 'softmax' && dproTimeline.span?.key === '0.4'")
    script = """
    const t = dproTimeline, get = t.get, done = arguments[0];
    t.get = async (path, values) => {  // the link changes, and is followed, before the span is known
      if (path === 'span') { t.get = get; dpro.go({ colour: 'phase' }); t.follow(); }
      return get(path, values);
    };
    t.jump({ rank: 1, item: 0, row: 0, id: 15, start: 0, end: 1000, name: 'x' });
    setTimeout(() => done(location.search), 500);
    """
    assert "span=1.15" in browser.execute_async_script(script)
    wait(browser, "return dproTimeline.span?.key === '1.15' && location.search.includes('colour=phase')")


@pytest.mark.slow
def test_a_click_shows_what_a_span_is_with_arrows_both_ways(browser, job):
    _open(browser, f"{job}?view=timeline&show=measured")
    wait(browser, PATH)
    names = browser.execute_script("return [...dproTimeline.names.values()]")
    name = next(each for each in names if each.startswith("nccl"))
    _at(browser, _bar(browser, name)).click().perform()
    facts = wait(
        browser, "const box = document.querySelector('#timeline-facts dl'); return box && box.innerText"
    )
    assert "collective" in facts
    assert re.search(r"for rank 1, which arrived last", facts)
    assert re.search(r"span=0\.\d+", browser.current_url)
    arrows = browser.execute_script("return dproTimeline.span.arrows")
    assert {arrow["out"] for arrow in arrows} == {True, False}
    rows = browser.find_elements("css selector", "#timeline-facts tbody tr")
    assert len(rows) == len(arrows)
    arrived_last = next(row for row in rows if "arrived last" in row.text)
    arrived_last.find_element("css selector", "button").click()
    wait(browser, "return dproTimeline.span.place.rank === 1")
    wait(browser, "return document.querySelector('#timeline-facts dl').innerText.includes('arrived last')")
    _open(browser, browser.current_url)
    wait(browser, "return dproTimeline.span && dproTimeline.span.place.rank === 1")
    assert complaints(browser) == []


@pytest.mark.slow
def test_the_box_of_a_chosen_span_goes_with_its_lane_and_its_panel_needs_no_scroll_bar(browser, sample):
    size = {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        _open(browser, f"{sample}?view=timeline&find=autograd::engine::evaluate_function")
        wait(browser, "return document.querySelector('#timeline-facts table')")
        wide = "const panel = document.querySelector('#timeline-facts .panel');"
        assert browser.execute_script(f"{wide} return panel.scrollWidth <= panel.clientWidth")
        cut = "each.scrollHeight > each.clientHeight + 1 || each.scrollWidth > each.clientWidth + 1"
        cut = f"return [...document.querySelectorAll('.jump')].filter((each) => {cut}).length"
        assert browser.execute_script(cut) == 0
        box = "dproTimeline.boxOf(dproTimeline.span.side, dproTimeline.span.place)"
        assert browser.execute_script(f"return {box}")
        browser.find_element("css selector", "#timeline-tracks").send_keys("gloo")
        wait(browser, f"return {box} === null")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert complaints(browser) == []


@pytest.mark.slow
def test_rows_of_nested_spans_that_are_empty_in_a_stretch_take_no_room_there(browser, sample):
    _open(browser, f"{sample}?view=timeline")
    heights = "dproTimeline.rows.filter((row) => row.type === 'lane').map((row) => row.height)"
    whole = browser.execute_script(f"return {heights}")
    assert 0 not in whole
    _open(browser, f"{sample}?view=timeline&time=30~31")
    wait(browser, f"return {heights}.includes(0)")
    wait(browser, "return !document.querySelector('[data-loading]')")
    assert browser.execute_script("return dproTimeline.labels() || true")
    drawn = "dproTimeline.data.row.every((row) => dproTimeline.data.ask.from[row].height)"
    browser.execute_script("dproTimeline.look(60e6, 140e6)")
    wait(
        browser,
        f"return dproTimeline.view.begin === 60e6 && !document.querySelector('[data-loading]') && {drawn}",
    )
    browser.execute_script("dproTimeline.lookAtAll()")
    wait(browser, f"return !{heights}.includes(0)")
    assert complaints(browser) == []


def test_lanes_fold_and_the_link_keeps_it(browser, sample):
    _open(browser, f"{sample}?view=timeline")
    wait(browser, PATH)
    rows = "return dproTimeline.rows.length"
    before = browser.execute_script(rows)
    rank = "document.querySelector('.timeline-labels .label.rank')"
    wait(browser, f"return {rank} && {rank}.getAttribute('aria-expanded') === 'true'")
    browser.execute_script(f"{rank}.click()")
    wait(browser, "return location.search.includes('open=-0')")
    assert browser.execute_script(rows) < before
    label = "return document.querySelector('.timeline-labels .label.rank').getAttribute('aria-expanded')"
    wait(browser, f"{label} === 'false'")
    browser.back()
    wait(browser, f"return dproTimeline.rows.length === {before}")
    labels = "[...document.querySelectorAll('.timeline-labels button')]"
    thread = f"{labels}.find((each) => each.dataset.key === '0.0')"
    wait(browser, f"return {thread}")
    browser.execute_script(f"{thread}.click()")
    wait(browser, "return location.search.includes('open=-0.0')")
    assert browser.execute_script(rows) < before
    folded = "dproTimeline.rows.find((row) => row.folded && row.key === '0.0')"
    strips = f"const row = {folded}; return row.from.map((each) => dproTimeline.strip(row, each.row))"
    tops = browser.execute_script(strips)  # one for each depth, one below the other
    assert len(tops) > 1
    assert all(top + height == pytest.approx(below) for (top, height), (below, _) in itertools.pairwise(tops))
    wait(browser, DRAWN)
    depths = "return new Set([...dproTimeline.data.row].map((n) => dproTimeline.data.ask.sources[n])"
    depths += f".filter((each) => {folded}.from.some((of) => of.row === each.row && each.rank === 0))"
    assert browser.execute_script(f"{depths}.map((each) => each.row)).size") > 1
    _keys(browser, "e")
    assert browser.execute_script("return dproTimeline.rows.filter((row) => row.open).length") == 0
    assert complaints(browser) == []


@pytest.mark.slow
def test_two_clicks_measure_and_the_selection_is_zoomed_to(browser, job):
    _open(browser, f"{job}?view=timeline")
    browser.find_element("id", "timeline-ruler").click()
    width = browser.execute_script("return dproTimeline.width()")  # before the panel stands beside it
    box = browser.execute_script("return dproTimeline.frame.getBoundingClientRect().toJSON()")
    for x in (300, 500):
        _at(browser, (round(box["left"]) + x, round(box["top"]) + 20)).click().perform()
    marked = browser.execute_script("return dproTimeline.range")
    begin, end = _view(browser)
    assert marked["b"] - marked["a"] == pytest.approx(200 / width * (end - begin), rel=0.02)
    browser.find_element("id", "timeline-zoom").click()
    closer = _view(browser)
    assert closer[1] - closer[0] == pytest.approx(1.1 * (marked["b"] - marked["a"]), rel=0.01)
    assert closer[0] < marked["a"] < marked["b"] < closer[1]


@pytest.mark.slow
def test_an_area_of_some_rows_is_totalled_and_kept_in_the_link(browser, job):
    _open(browser, f"{job}?view=timeline")
    wait(browser, PATH)  # its row is above those
    wait(browser, DRAWN)
    softmax = _bar(browser, "softmax")
    drag = _at(browser, (softmax[0], softmax[1])).key_down(Keys.SHIFT).click_and_hold()
    drag.move_by_offset(400, 2).release().key_up(Keys.SHIFT).perform()
    table = "[...document.querySelectorAll('.totals tbody')].map((each) => each.innerText)"
    names, lanes = wait(browser, f"const of = {table}; return of.length && of")
    assert "softmax" in names
    assert "nccl" not in names.lower()
    assert [line.split("\t")[0] for line in lanes.splitlines()] == ["rank 0 stream 7 (compute)"]
    wait(browser, "return location.search.includes('area=')")
    assert "of its marked rows alone" in browser.execute_script(
        "return [...document.querySelectorAll('.totals caption')].at(-1).textContent"
    )
    top, *drawn = browser.execute_script("return dproTimeline.marks")  # on the axis, and on what counts
    assert top == [0, browser.execute_script("return dproTimeline.AXIS")]
    row = browser.execute_script(
        "const { top, height } = dproTimeline.boxOf('m', { rank: 0, row: 1 }); return [top, top + height]"
    )
    assert len(drawn) == 1
    assert drawn[0][0] <= row[0] < row[1] <= drawn[0][1]
    beside = "const [facts, frame] = [document.querySelector('#timeline-facts .panel'), dproTimeline.frame]"
    beside += ".map((each) => each.getBoundingClientRect());"
    beside += "return [frame.right <= facts.left, facts.top >= frame.top, facts.bottom <= frame.bottom]"
    assert browser.execute_script(beside) == [True, True, True]
    address = browser.current_url
    browser.get("about:blank")
    _open(browser, address)
    assert wait(browser, f"const of = {table}; return of.length && of") == [names, lanes]
    _keys(browser, Keys.ESCAPE)
    wait(browser, "return !location.search.includes('area=') && !document.querySelector('.totals')")
    assert complaints(browser) == []


@pytest.mark.slow
def test_counters_are_below_the_lanes_of_their_rank_and_fold(browser, tmp_path):
    run = gpu_job()
    for at, watts in [(0, 300.0), (400, 500.0)]:
        sample = {"host": "a", "device": "", "time_ns": 1000 * at, "value": watts}
        run.rows["counters"] += [
            sample | {"rank": 1, "counter": name} for name in ("power_w", "sm_clock_mhz")
        ]
    with served(load(run.write(tmp_path))) as address:
        _open(browser, f"{address}?view=timeline")
        wait(browser, PATH)
        wait(browser, DRAWN)
        counted = "dproTimeline.rows.filter((row) => row.type === 'counter')"
        rows = browser.execute_script(f"return {counted}.map((row) => [row.label, row.note, row.rank])")
        assert rows == [["SM clock", "500 MHz", 1], ["power", "500 W", 1]]
        where = "const t = dproTimeline, row = counted[1], box = t.frame.getBoundingClientRect();"
        where += "return [box.left + t.xOf(200000), box.top + row.y - t.frame.scrollTop + t.AXIS + 9]"
        x, y = browser.execute_script(where.replace("counted", counted))
        _at(browser, (round(x), round(y))).perform()
        wait(browser, "return document.getElementById('tip').innerText.includes('300 W')")
        browser.execute_script("document.querySelector('.timeline-labels .label.counter').click()")
        wait(browser, f"return {counted}.length === 1")
        wait(browser, "return location.search.includes('open=-1.c')")
        browser.execute_script("dpro.go({ open: '-1' })")  # a folded rank keeps them, in one row
        wait(browser, f"return {counted}.length === 1 && {counted}[0].from.length === 2")
        folded = "dproTimeline.rows.find((row) => row.type === 'rank' && row.rank === 1)"
        assert browser.execute_script(f"return [{folded}.open, {counted}[0].y > {folded}.y]") == [False, True]
        wait(browser, DRAWN)
        assert browser.execute_script(
            f"return {counted}[0].from.every(({{ row }}) => dproTimeline.data.counters[row])"
        )
        assert complaints(browser) == []
        browser.get("about:blank")  # before the server is gone


@pytest.mark.slow
def test_only_lanes_whose_names_fit_an_expression_are_shown_and_pinned_ones(browser, job):
    labels = (
        "return dproTimeline.rows.filter((row) => row.type === 'lane' && row.label).map((row) => row.label)"
    )
    said = "return document.querySelector('#timeline-tracks + .found').textContent"
    _open(browser, f"{job}?view=timeline&pin=0.1")
    wait(browser, PATH)
    everything = browser.execute_script(labels)
    box = browser.find_element("css selector", "#timeline-tracks")
    box.send_keys("rank 1.*nccl")
    wait(browser, f"{said}.startsWith('1 of ')")
    wait(browser, "return location.search.includes('tracks=')")
    assert browser.execute_script(labels) == ["0: stream 7 (compute)", "critical path", "stream 20 (NCCL)"]
    _open(browser, browser.current_url)
    wait(browser, PATH)
    assert browser.execute_script(labels) == ["0: stream 7 (compute)", "critical path", "stream 20 (NCCL)"]
    box = browser.find_element("css selector", "#timeline-tracks")
    assert box.get_attribute("value") == "rank 1.*nccl"
    box.send_keys("(")
    wait(browser, f"{said}.includes('is not a regular expression: a ( is not closed')")
    assert browser.execute_script(labels) == everything
    _keys(browser, Keys.ESCAPE)
    wait(browser, "return !location.search.includes('tracks=')")
    wait(browser, "return document.querySelector('#timeline-tracks').value === ''")
    assert browser.execute_script(labels) == everything
    assert complaints(browser) == []


@pytest.mark.slow
def test_a_pinned_lane_stays_while_the_others_scroll(browser, job):
    _open(browser, f"{job}?view=timeline")
    wait(browser, PATH)
    wait(browser, DRAWN)
    pin = "[...document.querySelectorAll('.timeline-labels .pin')]"
    pin += ".find((each) => each.getAttribute('aria-label') === 'Pin to the top: stream 7 (compute)')"
    wait(browser, f"return {pin}")
    browser.execute_script(f"{pin}.click()")
    wait(browser, "return location.search.includes('pin=0.1')")
    _open(browser, browser.current_url)
    pinned = "dproTimeline.rows.filter((row) => row.pinned)"
    assert browser.execute_script(f"return {pinned}.map((row) => row.label)") == ["0: stream 7 (compute)"]
    wait(browser, "return document.querySelector('.timeline-labels .pin.on')")
    before = browser.execute_script(f"return dproTimeline.yOf({pinned}[0])")
    browser.execute_script(
        "dproTimeline.frame.style.height = '120px'; dproTimeline.space.style.height = '900px'"
    )
    browser.execute_script("dproTimeline.frame.scrollTop = 60")
    assert browser.execute_script(f"return dproTimeline.yOf({pinned}[0])") == before
    assert browser.execute_script("return dproTimeline.heightAt(dproTimeline.AXIS + 5)") == 5
    browser.execute_script("document.querySelector('.timeline-labels .pin.on').click()")
    wait(browser, f"return !{pinned}.length && !location.search.includes('pin=')")
    assert complaints(browser) == []


@pytest.mark.slow
def test_names_are_text_and_a_click_says_what_a_span_is(browser, tmp_path):
    with served(load(evil_run(tmp_path))) as address:
        _open(browser, f"{address}?view=timeline")
        wait(browser, PATH)  # its rows move those below
        place = _bar(browser, EVIL)
        _at(browser, place).perform()
        wait(browser, f"return document.getElementById('tip').innerText.includes({EVIL!r})")
        _at(browser, place).click().perform()
        wait(browser, "return document.querySelector('#timeline-facts dl')")
        assert EVIL in browser.find_element("id", "timeline-facts").text
        assert browser.execute_script("return [window.pwned, document.querySelector('img[src=x]')]") == [
            None,
            None,
        ]
        assert complaints(browser) == []
        browser.get("about:blank")  # before the server is gone


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 820, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_timeline_fits_pages_of_all_widths(browser, job, width, theme):
    with _window(browser, width, 900):
        _open(browser, f"{job}?view=timeline&theme={theme}&span=0.1")
        settle(browser)
        box = browser.execute_script(
            "return document.getElementById('timeline').getBoundingClientRect().toJSON()"
        )
        assert 0 <= box["left"] < box["right"] <= width
        inner = browser.execute_script(
            "const frame = dproTimeline.frame; return [frame.scrollWidth, frame.clientWidth]"
        )
        assert inner[0] <= inner[1]
        assert complaints(browser) == []


@pytest.mark.slow
def test_the_benchmark_measures_a_tiny_run(tmp_path):
    start_browser().quit()  # or skip
    spans = repeated(made_up(tmp_path / "step"), tmp_path / "run", 2, 6000)
    rows = checks(measured(tmp_path / "run", 6), 2, spans)
    assert spans >= 6000
    assert {name for name in rows if "bar" in rows[name]} == set(BARS)
    assert rows["wheel_p95_ms"]["n"] >= 6


@pytest.mark.slow
def test_two_runs_are_on_one_axis_from_a_chosen_step_on_with_what_their_lanes_differ_by(browser, tmp_path):
    gpu_job(extra=0).write(tmp_path / "after")
    gpu_job(extra=300).write(tmp_path / "before")
    with served(offered_runs([str(tmp_path / "after")], str(tmp_path / "before"))) as address:
        _open(browser, f"{address.partition('?')[0]}?view=timeline&against=before")
        ranks = "dproTimeline.rows.filter((row) => row.type === 'rank').map((row) => row.label)"
        assert wait(browser, f"return {ranks}.length === 4 && {ranks}") == [
            "rank 0", "rank 0 of before", "rank 1", "rank 1 of before",
        ]  # fmt: skip
        drawn = "new Set([...dproTimeline.data.row].map((n) => dproTimeline.data.ask.sources[n].side))"
        wait(browser, f"const sides = {drawn}; return sides.has('m') && sides.has('o')")
        wait(browser, PATH)
        wait(browser, "return dproTimeline.data.layer.some((layer) => layer === 2)")
        begins = "const { steps, beside } = dproTimeline.info;"
        begins += "return [steps, beside.steps].map((of) => of[arguments[0]][2])"
        apart = [browser.execute_script(begins, step) for step in range(3)]
        assert apart[0][0] == apart[0][1]
        assert apart[1][0] < apart[1][1]  # steps of the run before are longer
        table = "document.querySelector('#timeline-beside table')"
        lanes = wait(browser, f"return {table} && {table}.innerText")
        assert "rank 1 stream 7 (compute)" in lanes
        first = browser.find_element("css selector", ".align select")
        Select(first).select_by_visible_text("step 2")
        wait(browser, "return location.search.includes('align=2')")
        title = "document.querySelector('#timeline-beside h2').innerText"
        wait(browser, f"return {title}.includes('in step 2, and in step 0 of before')")
        wait(browser, DRAWN)
        here = browser.execute_script(begins, 2)[0]
        assert here == pytest.approx(browser.execute_script(begins, 0)[1])
        begin, end = _view(browser)
        assert begin < here * 1e6 < end
        span = "const t = dproTimeline, of = t.data; const at = [...of.order].find((at) => of.count[at] === 1"
        span += " && t.source(at).side === 'o' && t.names.get(of.name[at]) === 'softmax');"
        span += "const { side, rank } = t.source(at); t.chooseItem(side, rank, of.item[at])"
        browser.execute_script(span)
        wait(
            browser, "return /span=o\\d/.test(location.search) && dproTimeline.span.place.name === 'softmax'"
        )
        _open(browser, browser.current_url)
        wait(browser, "return dproTimeline.span && dproTimeline.span.side === 'o'")
        box = browser.execute_script(
            "return dproTimeline.boxOf(dproTimeline.span.side, dproTimeline.span.place)"
        )
        assert box["right"] > box["left"]
        browser.execute_script("dpro.go({ show: 'measured' })")
        wait(browser, f"return {ranks}.length === 2 && !{table}")
        assert complaints(browser) == []
        browser.get("about:blank")  # before the server is gone
