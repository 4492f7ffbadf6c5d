"""How findings of different detectors exclude each other."""

from __future__ import annotations

import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.verdict import find
from dpro.store import open_run
from tests.reference.training_jobs import Job, run_job
from tests.reference.training_records import Recording, write_run


@pytest.mark.slow
def test_rank_that_is_late_by_messages_over_a_slow_network_is_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path / "cache"))
    windows = tuple((first, 2) for first in range(5, 40, 12))
    job = Job("tp_pp", 16, 40, noise="10%", seed=9070, fault="network", how="rank", severity=5.0, victim=1,
              windows=windows)  # fmt: skip
    run = write_run(tmp_path / "run", job, run_job(job), Recording())
    found = [(each.class_, each.component_kind, each.component_id) for each in find(Analysis(open_run(run)))]
    assert found == [("slow.nic", "rank", "1")]


def test_rank_that_is_late_by_messages_of_a_slow_rank_is_not_blamed_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path / "cache"))
    windows = tuple((first, 2) for first in range(5, 80, 12))
    job = Job("tp_pp", 16, 80, noise="5%", seed=31046, fault="compute", severity=1.5, victim=15, since=40,
              windows=windows)  # fmt: skip
    run = write_run(tmp_path / "run", job, run_job(job), Recording())
    found = find(Analysis(open_run(run)))
    assert [each.component_id for each in found if each.component_kind == "rank"] == ["15"]
