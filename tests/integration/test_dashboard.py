"""The dashboard in a real browser: every view fills, links and keys work, names are text."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from benchmarks.dashboard import BARS, checks, make_run
from dpro.dashboards.account import WIDTH
from dpro.dashboards.app import VIEWS
from dpro.dashboards.command import load, offered_runs
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.runs import OfferedRun, Runs, ShownRun
from dpro.dashboards.server import listen, new_token, way_in
from dpro.opening import open_path
from dpro.store import open_run
from tests.browser import EVIL, PATIENCE_S, complaints, evil_run, served, settle, start_browser, wait

pytestmark = pytest.mark.usefixtures("searched_once")

BEYOND = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
DRAWN = "dproTimeline.info && dproTimeline.data && dproTimeline.data.size > 0"
CURRENT = "return document.querySelector(':is(#nav, #more) a.current').textContent"
NAMES = "return [...document.querySelectorAll('{} a')].map(each => each.lastChild.textContent)"
TABS = NAMES.format("#nav")
ROOM = "const nav = document.querySelector('#nav'); return nav.clientWidth - nav.scrollWidth"
KEYED = [*zip("1234567890-=[];'\\`~", VIEWS, strict=True)]
SOMETHING = "return document.querySelector('#content :is(.js-plotly-plot, .message, table, canvas)')"


try:
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.support.ui import Select, WebDriverWait
except ImportError:  # `start_browser` says so
    ActionChains = Keys = Select = WebDriverWait = None


@pytest.mark.slow
def test_every_view_fills_without_a_complaint_and_without_a_network(browser, sample):
    for view in VIEWS:
        browser.get(f"{sample}?view={view.name}")
        settle(browser)
        assert browser.execute_script(CURRENT).endswith(view.title)
        foreign = "return performance.getEntriesByType('resource').map(e => e.name)"
        assert {name for name in browser.execute_script(foreign) if not name.startswith(sample)} == set()
        assert complaints(browser) == []


def test_the_first_view_names_the_slow_rank(browser, sample):
    browser.get(sample)
    settle(browser)
    said = browser.find_element("css selector", ".health.bad").text
    assert said.startswith("slow host work")
    assert "rank 1" in said
    wait(browser, "return document.querySelector('#verdict-step-0 .ytick text')")
    labels = browser.find_elements("css selector", "#verdict-step-0 .ytick text")
    marked = ["".join(label.text.split()) for label in labels if "LIMIT" in label.text]  # they wrap
    assert marked == ["LIMITunevenranks:rank1"]
    assert len(browser.find_elements("css selector", "#verdict-advice .card .gain")) == 2
    assert browser.find_elements("css selector", "#verdict-step-0 .modebar") == []


def test_the_first_view_is_saved_as_a_picture_and_its_link_copied_by_one_click(browser, sample, tmp_path):
    kept = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", kept)
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    browser.get(f"{sample}?ranks=1&theme=dark")
    settle(browser)
    wait(browser, "return window.Plotly")
    browser.find_element("id", "save-picture").click()
    asks_for_file = WebDriverWait(browser, 60, 0.1)
    (file,) = asks_for_file.until(lambda _: [*tmp_path.glob("dpro-slow_rank*.png")])
    picture = asks_for_file.until(lambda _: file.read_bytes())
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width == 2 * WIDTH
    assert height == 2 * browser.execute_script(
        "return JSON.parse(document.getElementById('save-picture').dataset.figure).layout.height"
    )
    button = browser.find_element("id", "copy-link")
    button.send_keys("\n")  # by the keyboard
    wait(browser, "return document.getElementById('copy-link').textContent .startsWith('copied')")
    copied = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied.startswith(sample)
    assert {*copied.partition("?")[2].split("&")} == {"view=verdict", "ranks=1", "theme=dark"}
    wait(browser, "return document.getElementById('copy-link').textContent === 'copy link'")
    assert complaints(browser) == []


@pytest.mark.slow
def test_a_click_on_what_to_try_leads_to_its_command_and_to_the_spans_that_it_changes(browser, sample):
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    browser.get(f"{sample}?view=verdict")
    settle(browser)
    browser.find_element("partial link text", "have 1 DataLoader worker").click()
    wait(browser, "return location.search.includes('view=whatif')")
    settle(browser)
    button = wait(browser, "return document.querySelector('#whatif-answer [data-copies]')")
    button.click()
    wait(browser, "return document.querySelector('[data-copies]').textContent === 'copied'")
    copied = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied.startswith("dpro try workers:count=1 -- torchrun --nproc-per-node 2 sample_traces/train.py")
    browser.find_element("id", "changed-spans").click()
    wait(browser, f"return location.search.includes('view=timeline') && {DRAWN}")
    wait(browser, "return /[1-9].* spans/.test(dproTimeline.foundText.textContent)")
    assert complaints(browser) == []


def sized(browser, width):
    """Give the page a size, whatever the size of its window."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def box(browser, selector):
    """Where an element is: left, top, right, bottom, pixels."""
    script = "const it = document.querySelector(arguments[0]).getBoundingClientRect();"
    return browser.execute_script(f"{script} return [it.left, it.top, it.right, it.bottom]", selector)


@pytest.fixture
def offered(browser, repository):
    """The address of a dashboard of a job that hangs and of other runs; windows get their size back."""
    with served(offered_runs([str(repository / "sample_traces" / "h200_hang")])) as address:
        yield address
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_tabs_are_the_views_with_data_and_the_menu_says_why_others_have_none(browser, sample):
    browser.get(f"{sample}?ranks=1")
    settle(browser)
    tabs = browser.execute_script(TABS)
    assert {"Verdict", "Timeline", "Kernels"} <= set(tabs)
    browser.find_element("id", "menu").click()
    wait(browser, "return document.getElementById('more').getClientRects().length")
    listed = browser.execute_script(NAMES.format("#more"))
    assert sorted(tabs + listed) == sorted(view.title for view in VIEWS)
    reasons = [each.text for each in browser.find_elements("css selector", "#more dd")]
    assert len(reasons) == len(listed)
    assert all(len(reason) > 30 for reason in reasons)
    why = reasons[listed.index("Fabric")]
    browser.find_element("partial link text", "Fabric").click()
    wait(browser, "return document.querySelector('#content .message')")
    assert browser.find_element("css selector", "#content .message").text == why
    assert "ranks=1" in browser.current_url
    assert browser.execute_script("return document.getElementById('menu').dataset.view") == "Fabric"
    chips = "return [...document.querySelectorAll('#nav kbd, #more kbd')].map((each) => each.textContent)"
    assert sorted(browser.execute_script(chips)) == list("123456789")
    assert not browser.find_element("id", "more").is_displayed()
    browser.get(f"{sample}?view=serving")
    wait(browser, "return document.querySelector('#content .message')")
    assert browser.execute_script(TABS) == tabs
    assert browser.execute_script(CURRENT).endswith("Serving")
    body = browser.find_element("css selector", "body")
    body.send_keys("1")
    wait(browser, "return document.getElementById('menu').dataset.view === undefined")
    assert complaints(browser) == []


@pytest.mark.slow
def test_tabs_are_one_row_no_title_is_doubled_and_content_begins_near_the_top(browser, offered):
    sized(browser, 1440)
    for view, content in (("timeline", "#timeline canvas"), ("heatmap", ".panel"), ("verdict", ".panel")):
        browser.get(f"{offered}?view={view}")
        settle(browser)
        wait(browser, f"return document.querySelector('#content {content}')")
        assert box(browser, f"#content {content}")[1] <= 140
        assert len({tab.rect["y"] for tab in browser.find_elements("css selector", "#nav a")}) == 1
        assert browser.execute_script(ROOM) >= 0
        headings = [each.text for each in browser.find_elements("css selector", "#content h2")]
        assert not {other.title for other in VIEWS} & set(headings)
    assert complaints(browser) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [1440, 390])
def test_a_job_that_hangs_is_shown_as_that_first_with_what_to_do(browser, offered, width):
    sized(browser, width)
    browser.get(offered)
    settle(browser)
    assert browser.execute_script(CURRENT).endswith("Hang")
    assert browser.find_element("css selector", ".do").text.startswith("Do: ")
    assert box(browser, ".do")[3] < 450
    story = [row.text for row in browser.find_elements("css selector", "#hang-story tbody tr")]
    assert len(story) == 5
    assert "ranks 0-1 call all_reduce #125" in story[0]
    assert "step 30 ends, the last step" in story[1]
    stood = browser.find_element("css selector", "#hang-stacks pre").text.splitlines()
    assert [line.split()[-1] for line in stood] == ["<module>", "main", "train"]
    browser.find_element("partial link text", "Verdict").click()
    wait(browser, "return document.querySelector('#verdict-short')")
    assert browser.execute_script(CURRENT).endswith("Verdict")
    assert complaints(browser) == []


def test_nothing_is_cut_off_in_a_narrow_window(browser, offered):
    sized(browser, 390)
    for view in ("goodput", "serving"):  # the last tab, and a view of the menu
        browser.get(f"{offered}?view={view}")
        settle(browser)
        assert browser.execute_script(BEYOND) <= 0
        for part in browser.find_elements("css selector", "header > *, .selection > *, .shown > *"):
            assert part.rect["x"] >= 0, part.text
            assert part.rect["x"] + part.rect["width"] <= 390, part.text
        menu = box(browser, "#menu")
        if view != "serving":
            left, _, right, _ = box(browser, "#nav a.current")
            assert box(browser, "#nav")[0] <= left < right <= box(browser, "#nav")[2] + 1
        browser.find_element("id", "menu").click()
        wait(browser, "return document.getElementById('more').getBoundingClientRect().height > 0")
        left, top, right, bottom = box(browser, "#more")
        assert left >= 0
        assert right <= 390
        assert top >= menu[3]
        assert bottom <= 900
    assert complaints(browser) == []


def test_the_total_of_a_kernel_is_beside_its_name_on_a_phone_and_what_has_the_focus_is_outlined(
    browser, offered
):
    sized(browser, 390)
    browser.get(f"{offered}?view=kernels")
    wait(browser, "return document.querySelector('#kernels-table tbody td')")
    right = box(browser, "#kernels-table tbody td:nth-child(2)")[2]
    assert browser.find_element("css selector", "#kernels-table th:nth-child(2)").text.startswith("total")
    assert right <= box(browser, "#kernels-table")[2]
    browser.get(f"{offered}?view=whatif")
    wait(browser, "return document.getElementById('edits')")
    style = "const it = getComputedStyle(arguments[0]); return it.outlineStyle + it.outlineWidth"
    for name, around in (("steps", "closest('.dash-input-container')"), ("edits", "closest('textarea')")):
        browser.execute_script(f"document.getElementById('{name}').focus()")
        outlined = browser.execute_script(f"return document.getElementById('{name}').{around}")
        assert browser.execute_script(style, outlined) == "solid2px", name
    assert complaints(browser) == []


def test_what_is_of_the_whole_run_says_so_and_stays_while_steps_are_selected_and_its_links_keep_them(
    browser, sample
):
    notes = "return [...document.querySelectorAll('.whole-run')].filter((each) => each.offsetParent).length"
    browser.get(f"{sample}?view=verdict")
    settle(browser)
    assert browser.execute_script(notes) == 0
    browser.execute_script("document.querySelector('#verdict-findings .card').dataset.kept = 'yes'")
    browser.find_element("id", "steps").send_keys("31\n")
    wait(browser, "return location.search.includes('steps=31')")
    settle(browser)
    assert browser.execute_script(notes) == 1  # at the top
    wait(
        browser,
        "return document.querySelector('#verdict-run').innerText.includes('only one step was recorded')",
    )
    assert browser.execute_script("return document.querySelector('#verdict-findings .card').dataset.kept")
    browser.find_element("link text", "what if").click()
    wait(browser, "return new URLSearchParams(location.search).get('edit') === 'heal:rank=1'")
    assert "steps=31" in browser.current_url
    settle(browser)
    wait(browser, "return document.querySelector('#whatif-answer')?.innerText.includes('instead of 123 ms')")
    browser.execute_script("dpro.go({edit: 'no-launch'})")
    wait(browser, "return !document.querySelector('#whatif-answer').innerText.includes('instead of 123 ms')")
    assert complaints(browser) == []


@pytest.mark.slow
def test_keys_change_the_theme_and_going_back_undoes_a_selection(browser, sample):
    browser.get(sample)
    settle(browser)
    body = browser.find_element("css selector", "body")
    body.send_keys("t")
    wait(browser, "return location.search.includes('theme=dark')")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    ranks = browser.find_element("id", "ranks")
    ranks.send_keys("1\n")
    wait(browser, "return location.search.includes('ranks=1')")
    browser.back()
    wait(browser, "return !location.search.includes('ranks=1')")
    wait(browser, "return document.getElementById('ranks').value === ''")
    theme = "return document.documentElement.dataset.theme"
    browser.get(f"{sample}?view=breakdown")  # an address without a theme
    settle(browser)
    assert browser.execute_script(theme) == "dark"
    browser.find_element("css selector", "body").send_keys("t")
    wait(browser, "return location.search.includes('theme=light')")
    browser.get(f"{sample}?view=breakdown")
    settle(browser)
    assert browser.execute_script(theme) == "light"
    assert complaints(browser) == []


@pytest.mark.slow
def test_names_are_never_html_in_any_view(browser, tmp_path):
    with served(load(evil_run(tmp_path))) as address:
        for view in VIEWS:
            browser.get(f"{address}?view={view.name}")
            settle(browser)
            assert browser.execute_script("return [window.pwned, document.querySelector('img[src=x]')]") == [
                None,
                None,
            ]
        assert complaints(browser) == []


@pytest.mark.slow
def test_a_rectangle_over_steps_and_ranks_is_what_all_views_show(browser, sample):
    browser.get(f"{sample}?view=heatmap")
    settle(browser)
    box = wait(browser, "return document.querySelector('#heat-figure .nsewdrag')")
    drag = ActionChains(browser).move_to_element(box).click_and_hold().move_by_offset(60, 5)
    drag.move_by_offset(60, 5).release().perform()
    wait(browser, "return location.search.includes('steps=')")
    link = "document.querySelector('#nav a[href*=breakdown][href*=steps]')"  # follows the selection
    wait(browser, f"const link = {link}; if (link) link.click(); return link !== null")
    wait(browser, "return location.search.includes('view=breakdown')")
    assert "steps=" in browser.current_url
    settle(browser)
    assert complaints(browser) == []


@pytest.mark.slow
def test_every_view_fills_on_a_real_job_of_eight_gpus(browser, traces):
    with served(load(open_path(traces / "multirank" / "nanogpt_h100_8r_rs_ag"))) as address:
        for view in VIEWS:
            browser.get(f"{address}?view={view.name}&theme=dark")
            settle(browser)
            wait(browser, SOMETHING)
            assert complaints(browser) == []


@pytest.mark.slow
def test_every_view_fills_on_dumps_of_a_job_that_hangs_and_the_chain_is_drawn(browser, traces):
    with served(load(open_path(traces / "flight_recorder" / "lock_gil_1st"))) as address:
        for view in VIEWS:
            browser.get(f"{address}?view={view.name}")
            settle(browser)
            assert complaints(browser) == []
        browser.get(f"{address}?view=hang")
        settle(browser)
        assert "ranks 9, 14: their host code has not" in browser.find_element("id", "hang-verdict").text
        wait(browser, "return document.querySelectorAll('#chain-figure .annotation-arrow-g').length > 5")


@pytest.mark.slow
def test_what_explains_the_difference_of_two_runs_is_drawn(browser, repository):
    slow, healthy = (str(repository / "sample_traces" / name) for name in ("slow_rank", "healthy"))
    with served(offered_runs([slow], healthy)) as address:
        browser.get(f"{address}&view=difference")
        settle(browser)
        wait(browser, "return document.querySelectorAll('#difference-figure .point').length > 3")
        assert "steps outside deep windows" in browser.find_element("id", "difference-summary").text
        assert complaints(browser) == []


@pytest.mark.slow
def test_runs_are_chosen_and_compared_on_the_page_at_any_width_and_going_back_undoes_it(browser, repository):
    def pick(name, value):
        Select(browser.find_element("id", name)).select_by_value(value)
        wait(browser, f"return (new URLSearchParams(location.search)).get('{name[5:]}') === '{value}'")
        wait(browser, f"return document.getElementById('{name}').value === '{value}'")

    with served(offered_runs([str(repository / "sample_traces" / "slow_rank")])) as address:
        for width in (390, 820, 1500):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(address)
            settle(browser)
            pick("pick-against", "healthy")
            wait(browser, "return location.search.includes('view=difference')")  # what they differ by
            wait(browser, "return document.querySelector('#difference-summary .job')")
            assert browser.find_element("css selector", "#difference-summary .job").text == (
                "B slow_rank, compared with A healthy"
            )
            browser.find_element("css selector", "#nav a[data-view=verdict]").click()
            wait(browser, "return document.querySelectorAll('#verdict-short .dash-graph').length === 3")
            pick("pick-run", "slow_input")
            wait(browser, "return document.title.endsWith('slow_input')")
            browser.back()
            wait(browser, "return document.title.endsWith('slow_rank')")
            assert browser.execute_script(BEYOND) <= 0
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.find_element("css selector", "body").send_keys("r")
        assert browser.switch_to.active_element.accessible_name == "run"
        for own, other in (("slow_input", "slow_rank"), ("slow_rank", "slow_input")):
            browser.get(f"{address}?view=timeline&run={own}")
            wait(browser, f"return document.title.endsWith('{own}') && {DRAWN}")
            end = browser.execute_script("return dproTimeline.info.end")
            Select(browser.find_element("id", "pick-run")).select_by_visible_text(other)
            wait(
                browser,
                f"return document.title.endsWith('{other}') && {DRAWN} && dproTimeline.info.end !== {end}",
            )
        assert complaints(browser) == []


def test_another_run_shows_that_it_is_worked_out_until_it_is_and_never_the_cards_of_the_earlier_one(
    browser, repository
):
    """The page and each of its sections are answered by different requests, some of them much later."""

    class Unanswered(Loaded):
        @property
        def verdict(self):
            answered.wait()
            return super().verdict

    blocked, opened, answered = "healthy", threading.Event(), threading.Event()

    def show(offer):
        loaded = load(open_run(offer.path))
        if offer.name == blocked:
            opened.wait(PATIENCE_S)
            loaded = Unanswered(loaded.run)
        return ShownRun(loaded)

    first, second = (str(repository / "sample_traces" / name) for name in ("slow_rank", blocked))
    offers = [OfferedRun("slow_rank", first), OfferedRun(blocked, second)]
    cards = "return [...document.querySelectorAll('#content .panel .card, #content .said')]"
    shown = f"{cards}.filter(each => getComputedStyle(each).visibility !== 'hidden').length"
    with served(Runs(ShownRun(load(open_run(first))), "slow_rank", lambda: offers, show)) as address:
        browser.get(f"{address}?view=verdict")
        settle(browser)
        assert browser.execute_script(shown) > 0
        Select(browser.find_element("id", "pick-run")).select_by_value(blocked)
        wait(browser, "return location.search.includes('run=healthy')")
        assert browser.execute_script(shown) == 0
        assert "healthy" in browser.find_element("id", "changing").text
        opened.set()
        wait(browser, "return document.title.endsWith('healthy')")
        assert browser.execute_script(shown) == 0
        assert browser.find_element("css selector", "#verdict-findings .pending").is_displayed()
        Select(browser.find_element("id", "pick-run")).select_by_value("")  # and back before it has an answer
        wait(browser, "return document.title.endsWith('slow_rank')")
        wait(browser, f"{shown} > 0")
        assert not browser.find_element("id", "changing").is_displayed()
        answered.set()


@pytest.mark.slow
def test_replayed_lanes_stand_below_replayed_marks_and_only_they_have_a_line_about_the_replay(
    browser, sample
):
    line = "return document.querySelector('.timeline').innerText.includes('The replay')"
    browser.get(f"{sample}?view=timeline")
    wait(browser, f"return {DRAWN} && dproTimeline.info.replay.state === 'ready'")
    assert not browser.execute_script(line)
    browser.get(f"{sample}?view=timeline&show=replayed")
    wait(browser, f"return {DRAWN} && dproTimeline.info.replay.state === 'ready'")
    assert browser.execute_script(line)
    path = "dproTimeline.rows.find(({ label }) => label === 'critical path')"
    assert browser.execute_script(f"return {path}.from.map(({{ rank }}) => rank)") == [-2]
    lanes = browser.execute_script("return dproTimeline.rows.map(({ rank, label }) => `${rank} ${label}`)")
    assert lanes
    assert len(lanes) == len(set(lanes))


def test_tables_of_edits_and_of_an_area_fit_beside_the_rest_of_the_page(browser, sample):
    beyond = "const it = document.querySelector('{}'); return it.scrollWidth - it.clientWidth"
    broken = (
        "return [...document.querySelectorAll('.examples code')].filter("
        "({ childNodes }) => [...childNodes].some((text) => {"
        "const range = document.createRange(); range.selectNodeContents(text);"
        "return range.getClientRects().length > 1; })).map((code) => code.textContent)"
    )
    for width in (1440, 390):
        sized(browser, width)
        browser.get(f"{sample}?view=whatif&examples=1")
        settle(browser)
        assert browser.execute_script(beyond.format("#whatif-form")) <= 0
        assert all("/" in edit for edit in browser.execute_script(broken))  # others wrap between keys alone
        browser.get(f"{sample}?view=timeline&area=20~90")
        wait(browser, "return document.querySelector('#timeline-facts .totals table')")
        assert browser.execute_script(beyond.format("#timeline-facts .panel")) <= 0
        names = "#timeline-facts .totals table"
        assert browser.execute_script(beyond.format(names)) <= 0 or width == 390  # it scrolls on a phone


def test_runs_are_readable_on_a_phone(browser, repository):
    with served(offered_runs([str(repository / "sample_traces")])) as address:
        sized(browser, 390)
        browser.get(f"{address}?view=runs")
        settle(browser)
        wait(browser, "return document.querySelectorAll('#runs-table tbody tr').length > 7")
        wait(browser, "return document.querySelectorAll('#runs-figure .xtick').length > 7")
        boxes = "[...document.querySelectorAll('{}')].map((it) => it.getBoundingClientRect().{})"
        most = f"return Math.max(...{boxes})"
        lowest = browser.execute_script(most.format("#runs-figure .xtick text", "bottom"))
        assert lowest <= browser.execute_script(most.format("#runs-picture .legend", "top"))
        assert browser.execute_script(most.format("#runs-table tbody tr", "height")) < 40
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_opened_details_of_a_card_stay_within_it(browser, sample):
    sized(browser, 1440)
    try:
        browser.get(f"{sample}?view=verdict")
        settle(browser)
        browser.execute_script("document.querySelectorAll('.cards details').forEach(it => it.open = true)")
        panel = box(browser, "#verdict-advice")
        edges = "return [...document.querySelectorAll('#verdict-advice :is(.card, .card *)')]"
        edges += ".map(each => each.getBoundingClientRect().right)"
        assert max(browser.execute_script(edges)) <= panel[2]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_kernels_are_filtered_while_typing_and_going_back_undoes_it(browser, sample):
    browser.get(f"{sample}?view=kernels")
    settle(browser)
    rows = "document.querySelectorAll('#kernels-table tbody tr').length"
    count = browser.execute_script(f"return {rows}")
    box = browser.find_element("id", "filter")
    box.send_keys("gemm")
    wait(browser, f"return location.search.includes('filter=gemm') && 0 < {rows} && {rows} < {count}")
    box.send_keys("xyz")
    wait(browser, "return document.querySelector('#kernels-table .message')")
    assert "'gemmxyz'" in browser.find_element("css selector", "#kernels-table .message").text
    assert browser.switch_to.active_element == box
    browser.execute_script("document.activeElement.blur()")
    browser.execute_script("history.go(-2)")
    wait(browser, f"return document.getElementById('filter').value === '' && {rows} === {count}")
    assert complaints(browser) == []


@pytest.mark.slow
def test_a_run_that_comes_is_listed_a_click_opens_one_or_says_what_changed(browser, repository, tmp_path):
    samples = repository / "sample_traces"
    for name in ("healthy", "slow_rank"):
        shutil.copytree(samples / name, tmp_path / name)
    with served(offered_runs([str(tmp_path)])) as address:
        browser.get(f"{address}?view=runs")
        settle(browser)
        shutil.copytree(samples / "healthy", tmp_path / "again")
        wait(browser, "return document.querySelector('#runs-table').innerText.includes('again')")
        wait(browser, "return document.querySelectorAll('#pick-run option').length === 3")
        changed = "[...document.querySelectorAll('#runs-table a')].find(a => /against/.test(a.search))"
        wait(browser, f"return {changed}")
        wait(browser, "return document.querySelector('#runs-figure .main-svg')")
        browser.execute_script(f"{changed}.click()")
        wait(browser, "return document.querySelector('#difference-figure .main-svg')")
        assert {"view=difference", "run=healthy", "against=again"} <= parameters(browser)
        browser.back()
        wait(browser, "return document.querySelector('#runs-figure .main-svg')")
        browser.execute_script("document.querySelector('#runs-table td a').click()")
        wait(browser, "return /^[?]run=/.test(location.search) && document.querySelector('#verdict-short')")
        assert complaints(browser) == []


@pytest.mark.slow
def test_a_query_is_typed_answered_and_kept_in_the_address(browser, sample):
    browser.get(f"{sample}?view=query")
    settle(browser)
    wait(browser, "return document.querySelector('#query-form .choice')").click()
    wait(browser, "return document.querySelector('#query-rows table')")
    box = browser.find_element("css selector", "#sql")
    box.send_keys(Keys.CONTROL + "a")
    box.send_keys("SELECT rank, count(*) AS n FROM steps GROUP BY rank")
    ActionChains(browser).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    wait(browser, "return /^2 rows/.test(document.querySelector('#query-rows')?.innerText)")
    assert "GROUP+BY+rank" in browser.current_url
    browser.back()
    wait(browser, "return /total_ms/.test(document.querySelector('#sql').value)")
    browser.get(f"{sample}?view=query&sql=SELECT+*+FROM+spans")
    wait(browser, "return document.querySelectorAll('#query-rows tbody tr').length === 1000")
    browser.get(f"{sample}?view=query&sql=FROM+read_text('/etc/passwd')")
    wait(browser, "return /disabled by configuration/.test(document.querySelector('#query-rows')?.innerText)")
    assert complaints(browser) == []


def parameters(browser) -> set[str]:
    """The parameters of the address."""
    return set(browser.current_url.partition("?")[2].split("&"))


@pytest.mark.slow
def test_the_page_follows_a_run_that_is_being_recorded_until_it_is_over(browser, repository):
    first, last = (open_run(repository / "sample_traces" / name) for name in ("healthy", "slow_rank"))
    go_on = threading.Event()

    def later():
        go_on.wait(60)
        yield load(last)

    shown = ShownRun(load(first), later())
    threading.Thread(target=shown.follow, daemon=True).start()
    with served(shown) as address:
        browser.get(address)
        settle(browser)
        assert browser.find_element("id", "live").text == "recording"
        assert not browser.find_elements("css selector", ".health.bad")
        go_on.set()
        wait(browser, "return document.querySelector('.health.bad')")
        wait(browser, "return document.getElementById('live').textContent === 'recorded'")
        assert complaints(browser) == []


@pytest.mark.slow
def test_keys_reach_every_view(browser, sample):
    browser.get(sample)
    settle(browser)
    body = browser.find_element("css selector", "body")
    body.send_keys("?")
    listed = wait(browser, "return document.querySelector('#keys .keyed').innerText")
    assert "".join(listed.split()) == "".join(f"{key}{view.title}" for key, view in KEYED).replace(" ", "")
    body.send_keys("?")
    for key, view in KEYED:
        body.send_keys(key)
        wait(browser, f"{CURRENT}.endsWith({view.title!r})")
    first, *_, last = browser.execute_script(TABS)
    assert last != VIEWS[-1].title
    for key, title in (("n", first), ("p", last), ("n", first)):
        body.send_keys(key)
        wait(browser, f"{CURRENT}.endsWith({title!r})")
    assert complaints(browser) == []


@pytest.mark.slow
def test_a_browser_that_is_led_in_sees_the_run_and_keeps_no_token_in_its_address(browser, sample, repository):
    loaded, token = load(open_run(repository / "sample_traces" / "slow_rank")), new_token()
    server, address = listen(loaded, "127.0.0.1", 0, token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with way_in(address) as file:
            browser.get(file.as_uri())
            settle(browser)
        assert browser.current_url.rstrip("?") == address.partition("?")[0]
        assert complaints(browser) == []
        browser.get(sample)  # another dashboard of this host, whose cookies are its own
        settle(browser)
        browser.get(address.partition("?")[0] + "?view=timeline")
        settle(browser)
        assert browser.execute_script("return document.cookie") == ""  # out of reach of scripts
        browser.delete_all_cookies()
        browser.get(address.partition("?")[0])
        assert "access denied" in browser.find_element("css selector", "body").text
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_the_path_of_a_run_runs_no_script_and_injected_ones_are_refused(browser, tmp_path):
    evil = tmp_path / "<script>window.pwned=1<"
    with served(load(replace(evil_run(tmp_path / "run"), source=evil / "script>" / EVIL))) as address:
        browser.get(address)
        settle(browser)
        assert EVIL in browser.title
        browser.execute_script(
            "const made = document.createElement('div'); made.innerHTML = arguments[0];"
            "document.body.append(made); const script = document.createElement('script');"
            "script.textContent = 'window.pwned = 2'; document.body.append(script)",
            EVIL,
        )
        wait(browser, "return document.querySelector('img[src=x]').complete")
        assert browser.execute_script("return window.pwned") is None
        assert any("Content Security Policy" in said for said in complaints(browser))


@pytest.mark.few(1)
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_prints_an_address_and_leaves_no_token_where_it_is_ended(repository, tmp_path, by):
    run, files = tmp_path / "run", tmp_path / "files"
    files.mkdir()
    shutil.copytree(repository / "sample_traces" / "healthy", run)
    command = [sys.executable, "-m", "dpro", "dashboard", str(run), "--no-browser"]
    environment = os.environ | {"TMPDIR": str(files)}

    def heard() -> None:
        """Not ignored, as where `nohup` runs the tests, or a shell in the background."""
        for ended_by in (signal.SIGHUP, signal.SIGINT):
            signal.signal(ended_by, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=heard
    ) as process:
        line = process.stdout.readline()
        address = re.match(r"(http://127\.0\.0\.1:\d+/)\?token=\S{32}", line)
        assert address, line
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address[1])
        process.send_signal(by)
        assert process.wait(60) == 0
    assert list(files.glob("*.html")) == []


@pytest.mark.slow
def test_the_benchmark_measures_a_tiny_run(tmp_path):
    start_browser().quit()  # or skip
    make_run(tmp_path / "run", 4, 6000)
    rows = checks(tmp_path / "run", 6000, 1)
    assert {name for name in rows if "bar" in rows[name]} == set(BARS)
    assert rows["interaction_p95_ms"]["n"] > 20
