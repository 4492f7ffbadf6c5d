"""The dashboard in a real browser: every view fills, links and keys work, names are text."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from dpro.cli.dashboard import load
from dpro.dashboards.app import VIEWS
from dpro.store import open_run
from tests.browser import complaints, served, settle, start_browser, wait


@pytest.fixture(scope="module")
def browser():
    chromium = start_browser()
    yield chromium
    chromium.quit()


@pytest.fixture(scope="module")
def sample(repository):
    with served(load(open_run(repository / "sample_traces" / "slow_rank"))) as address:
        yield address


def test_every_view_fills_without_a_complaint_and_without_a_network(browser, sample):
    for view in VIEWS:
        browser.get(f"{sample}?view={view.name}")
        settle(browser)
        assert browser.find_element("css selector", "nav a.current").text.endswith(view.title)
        foreign = "return performance.getEntriesByType('resource').map(e => e.name)"
        assert {name for name in browser.execute_script(foreign) if not name.startswith(sample)} == set()
        assert complaints(browser) == []


def test_the_first_view_names_the_slow_rank(browser, sample):
    browser.get(sample)
    settle(browser)
    assert "rank 1: slow.host costs" in browser.find_element("css selector", ".health.bad").text


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
    assert complaints(browser) == []


def test_the_command_prints_an_address_and_ends_on_interrupt(repository, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(repository / "sample_traces" / "healthy", run)
    command = [sys.executable, "-m", "dpro", "dashboard", str(run), "--no-browser", "--host", "0.0.0.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        address = re.match(r"(http://0\.0\.0\.0:\d+/)\?token=\S{32}", line)
        assert address, line
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address[1].replace("0.0.0.0", "127.0.0.1"))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
