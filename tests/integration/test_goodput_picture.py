"""The life of a job in a real browser: one picture that says when it failed, and what that cost."""

from __future__ import annotations

import pytest

from dpro.dashboards.command import load
from tests.browser import complaints, served, settle, wait
from tests.lives import job, killed_five_times

PICTURE = "document.getElementById('goodput-life-figure')"
PLOT = f"{PICTURE}.querySelector('.js-plotly-plot')"


@pytest.mark.slow
def test_life_of_a_job_that_was_killed_five_times_is_in_one_picture(browser, tmp_path):
    with served(load(job(tmp_path / "run", killed_five_times()))) as address:
        browser.get(f"{address}?view=goodput")
        settle(browser)
        wait(browser, f"return {PICTURE}.querySelectorAll('.barlayer .point path').length > 20")
        texts = f"return Array.from({PICTURE}.querySelectorAll('text'), each => each.textContent)"
        written = browser.execute_script(texts)
        assert written.count("SIGKILL") == 5
        lost = [each for each in written if each.startswith("−")]
        assert lost == ["−2 steps", "−4 steps", "−4 steps", "−1 step"]
        assert any(each.startswith("steps done again ") for each in written)
        assert {"attempt 0", "1", "5", "finished", "rank 1"} <= set(written)
        assert "5 attempts did not end well" in browser.find_element("id", "goodput-life").text
        assert complaints(browser) == []


@pytest.mark.slow
def test_zoom_of_the_strips_is_one_of_the_steps(browser, tmp_path):
    with served(load(job(tmp_path / "run", killed_five_times()))) as address:
        browser.get(f"{address}?view=goodput")
        settle(browser)
        wait(browser, f"return !!{PLOT} && !!{PLOT}._fullLayout")
        browser.execute_script(f"Plotly.relayout({PLOT}, {{'xaxis2.range': [20, 40]}})")
        wait(browser, f"return {PLOT}._fullLayout.xaxis.range.join() === '20,40'")
