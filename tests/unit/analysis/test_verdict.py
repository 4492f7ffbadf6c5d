"""How findings of different detectors exclude each other."""

from __future__ import annotations

import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.findings import Finding
from dpro.store import open_run
from tests.builders import cpu_job
from tests.reference.training_jobs import Job, run_job
from tests.reference.training_records import Recording, write_run


@pytest.mark.slow
def test_rank_that_is_late_by_messages_over_a_slow_network_is_not_blamed(tmp_path, empty_cache):
    windows = tuple((first, 2) for first in range(5, 40, 12))
    job = Job("tp_pp", 16, 40, noise="10%", seed=9070, fault="network", how="rank", severity=5.0, victim=1,
              windows=windows)  # fmt: skip
    run = write_run(tmp_path / "run", job, run_job(job), Recording())
    found = [
        (each.class_, each.component_kind, each.component_id) for each in Analysis(open_run(run)).verdict[0]
    ]
    assert found == [("slow.nic", "rank", "1")]


def test_rank_that_is_late_by_messages_of_a_slow_rank_is_not_blamed_beside_it(tmp_path, empty_cache):
    windows = tuple((first, 2) for first in range(5, 80, 12))
    job = Job("tp_pp", 16, 80, noise="5%", seed=31046, fault="compute", severity=1.5, victim=15, since=40,
              windows=windows)  # fmt: skip
    run = write_run(tmp_path / "run", job, run_job(job), Recording())
    found = Analysis(open_run(run)).verdict[0]
    assert [each.component_id for each in found if each.component_kind == "rank"] == ["15"]


def test_ranks_are_suspects_only_where_a_finding_calls_them_slow_by_themselves(tmp_path):
    def finding(class_: str, kind: str, *ranks: int) -> Finding:
        return Finding(class_, kind, "it", ranks, 0.1, 0.9, 1e6, ())

    class Judged(Analysis):
        verdict = (
            [
                finding("slow.host", "job", 0, 1, 2, 3),
                finding("slow.compute", "rank", 2),
                finding("slow.link", "rank", 1),
                finding("slow.host", "host", 4, 5),
            ],
            [],
        )

    assert Judged(cpu_job().write(tmp_path / "r")).suspects == {2, 4, 5}
