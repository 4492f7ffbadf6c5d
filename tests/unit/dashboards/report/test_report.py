"""The report as one page: it is complete and reproducible, loads nothing, and runs no script from a trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from dpro.dashboards import report
from dpro.dashboards.guard import hash_of
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.report import html_of
from dpro.verdict.report import make_report
from tests.browser import complaints, start_browser, wait
from tests.builders import TinyRun, cpu_job

EVIL = "</script><script>window.pwned = 1</script><img src=x onerror=window.pwned=2>"


def _run(folder, name: str = "gemm"):
    run = TinyRun()
    for step in range(3):
        at = 1000 * step
        run.call(at, at + 5, step)
        run.kernel(name, at + 10, at + 470, step)
        run.step(step, at, at + 990)
    return run.write(folder)


def _page(run) -> str:
    loaded = Loaded(run)
    return html_of(loaded, make_report(loaded))


class Parts(HTMLParser):
    """The tags of a page, the text of its scripts, and its other text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self._running = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href")]
        self._running = tag == "script"
        if self._running:
            self.scripts.append("")

    def handle_endtag(self, _tag):
        self._running = False

    def handle_data(self, data):
        if self._running:
            self.scripts[-1] += data
        else:
            self.text += data


def test_the_page_says_what_the_report_says_and_has_its_figures(tmp_path):
    loaded = Loaded(cpu_job().write(tmp_path))
    report = make_report(loaded)
    parts = Parts(html_of(loaded, report))
    (fault,) = [line.removeprefix("FAULT  ") for line in report.in_short if line.startswith("FAULT")]
    assert parts.text.count(fault) == 1
    assert report.verdict not in parts.text  # which says the same
    assert report.gains[0].how() in parts.text
    for name in ("Step time", "Where the usual step of each rank goes", "Timeline"):
        assert name in parts.text
    figures = [json.loads(script) for script in parts.scripts if script.startswith('{"data"')]
    assert len(figures) == 7
    assert "scattergl" not in {trace["type"] for figure in figures for trace in figure["data"]}


def test_the_page_is_one_file_of_less_than_five_megabytes(tmp_path):
    text = _page(cpu_job().write(tmp_path))
    assert len(text.encode()) < 5_000_000
    parts = Parts(text)
    assert all(link.startswith("#") and f'id="{link[1:]}"' in text for link in parts.links)
    assert "default-src 'none'" in text


def test_the_page_lets_its_own_scripts_run_and_no_other(tmp_path):
    text = _page(_run(tmp_path, EVIL))
    script, plotly = Parts(text).scripts[-1], get_plotlyjs()
    assert f"script-src {hash_of(script)} {hash_of(plotly)};" in text
    assert not re.search(r"<[^>]*\son\w+=", text)


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(tmp_path):
    pages = {_page(cpu_job().write(tmp_path / place / "run")) for place in ("here", "there")}
    assert len(pages) == 1
    assert str(tmp_path) not in pages.pop()


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes_in_every_process(tmp_path, repository):
    sample = repository / "sample_traces" / "slow_rank"
    pages = []
    for threads in ("1", "4"):
        file = tmp_path / f"{threads}.html"
        command = [sys.executable, "-m", "dpro", "report", str(sample), "--html", str(file)]
        environment = {"POLARS_MAX_THREADS": threads, "PYTHONHASHSEED": threads, "DPRO_CACHE": str(tmp_path)}
        subprocess.run(command, cwd=repository, env=environment, check=True, capture_output=True)
        pages.append(file.read_bytes())
    assert pages[0] == pages[1]


def test_names_from_a_trace_make_no_tags(tmp_path):
    plain, evil = (Parts(_page(_run(tmp_path / str(len(name)), name))) for name in ("gemm", EVIL))
    assert plain.tags == evil.tags
    assert EVIL in evil.text


def test_a_figure_that_is_too_large_is_left_out_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_BYTES", 3000)
    parts = Parts(_page(cpu_job().write(tmp_path)))
    assert "left out: it takes" in parts.text
    assert "dpro dashboard" in parts.text


def test_the_lanes_of_blamed_ranks_come_first_where_there_are_too_many(tmp_path, monkeypatch):
    loaded = Loaded(cpu_job(num_ranks=12, slow_rank=11).write(tmp_path))
    lanes = report.lanes_of(loaded)
    assert lanes == [0, 1, 2, 3, 4, 5, 6, 11]
    monkeypatch.setattr(report, "MAX_POINTS", 1)
    figure = report.timeline_of(loaded, lanes)
    assert {label.split()[1] for label in figure.layout.yaxis.ticktext if label.startswith("rank")} == {"0"}


@pytest.mark.slow
def test_a_browser_draws_every_figure_from_the_file_alone_and_runs_no_name(tmp_path):
    (tmp_path / "page.html").write_text(_page(_run(tmp_path / "run", EVIL)))
    browser = start_browser()
    try:
        browser.get(f"file://{tmp_path}/page.html")
        wait(browser, "return document.documentElement.dataset.drawn === 'all'")
        asked = browser.execute_script("return performance.getEntriesByType('resource').length")
        count = "e => e.querySelectorAll('.main-svg').length"
        drawn = browser.execute_script(f"return [...document.querySelectorAll('.figure')].map({count})")
        assert asked == 0
        assert len(drawn) >= 4
        assert all(drawn)
        assert browser.execute_script("return [window.pwned, document.querySelector('img')]") == [None, None]
        assert EVIL in browser.execute_script("return document.body.textContent")
        assert complaints(browser) == []
    finally:
        browser.quit()


@pytest.mark.slow
def test_code_without_blanks_wraps_within_the_table_of_gains(tmp_path, monkeypatch):
    monkeypatch.setattr("dpro.replay.whatif.predict.Prediction.how", lambda _: "register(State(None)," * 20)
    (tmp_path / "page.html").write_text(_page(cpu_job().write(tmp_path / "run")))
    browser = start_browser()
    try:
        browser.get(f"file://{tmp_path}/page.html")
        assert "State(None),register" in browser.find_element("css selector", ".gains").text
        beyond = "const part = document.querySelector('#help'); return part.scrollWidth - part.clientWidth"
        assert browser.execute_script(beyond) <= 0
    finally:
        browser.quit()
