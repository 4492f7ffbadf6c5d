"""A real job whose process keeps more with each step is named, and one that does not is not."""

from __future__ import annotations

import json
import time

import pytest

from dpro.detect.findings_log import BEGINS
from dpro.extensions.watch import memory
from dpro.extensions.watch.watcher import Watcher
from tests.commands import dpro
from tests.jobs import RECORD, record, script, start, wait_until

pytestmark = pytest.mark.slow

JOB = """
    import numpy, time
    kept = []
    for step in range(450):
        train_step()
        time.sleep(0.1)
        page = numpy.ones(1_000_000)  # 8 MB: far more than what else runs here takes and gives back
        {keep}
"""


@pytest.mark.parametrize("keep", [True, False])
def test_a_job_that_keeps_what_it_made_is_named_with_when_the_host_is_full(keep, tmp_path):
    job = script(tmp_path, JOB.format(keep="kept.append(page)" if keep else "kept = [page]"))
    _, done = record(tmp_path, job, "--every", "40")
    assert done.returncode == 0, done.stderr
    diagnosis = json.loads(dpro("diagnose", tmp_path / "run", "--json").stdout)
    growing = [one for one in diagnosis["findings"] if one["class"] == "memory.growth"]
    assert len(growing) == keep
    for one in growing:
        assert one["ranks"] == [0]
        (kept, left) = (observation["values"] for observation in one["observations"])
        pace = (kept["last_bytes"] - kept["first_bytes"]) / kept["lasted_ns"] * 1e9
        assert 40e6 < pace < 100e6  # 8 MB in each tenth of a second, and what a step takes
        assert left["full_in_ns"] == pytest.approx(left["left_bytes"] / pace * 1e9, rel=0.01)
        assert "memory grows by" in dpro("explain", tmp_path / "run").stdout


def test_a_job_that_runs_is_watched_for_memory_that_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "POLL_S", 2.0)
    job = script(tmp_path, JOB.format(keep="kept.append(page)"))
    recorded = start([*RECORD, "-o", "run", "--", *job], tmp_path)
    try:
        wait_until((tmp_path / "run").exists, "nothing was recorded")
        watcher, begun = Watcher(tmp_path / "run"), []
        while recorded.poll() is None and not begun:
            begun = [notice for notice in watcher.look() if notice.finding.class_ == "memory.growth"]
            time.sleep(1)
    finally:
        recorded.kill()
        recorded.wait()
    assert [(notice.event, notice.finding.ranks) for notice in begun] == [(BEGINS, (0,))]
