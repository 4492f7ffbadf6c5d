"""Faults put into real jobs of pipelines with data parallelism: what `dpro diagnose` makes of the recordings.

A job that hangs is watched until its recorder has saved what its ranks wait for, and then killed.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.hang_jobs import diagnosed

pytest.importorskip("torch")


def the_finding(document: dict[str, Any]) -> dict[str, Any]:
    assert not document["healthy"]
    (finding,) = document["findings"]
    return dict(finding)


def told(finding: dict[str, Any]) -> str:
    return "\n".join(finding["evidence"])


def test_a_rank_whose_host_sleeps_is_named_through_pipeline_and_data_parallelism(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "sleep"))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [2])
    assert finding["component"] == {"kind": "rank", "id": "2"}
    assert finding["confidence"] > 0.9
    assert "hanging.py" in told(finding)  # where it sleeps
    assert "ranks 0-1, 3" in told(finding)  # who waits because of it


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "gil"])
def test_a_process_that_is_stopped_or_keeps_the_gil_cannot_save_calls_and_is_named(tmp_path, fault):
    finding = the_finding(diagnosed(tmp_path, fault))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [2])
    assert "no thread of rank 2 has run since" in told(finding)


@pytest.mark.slow
@pytest.mark.parametrize("spawn", [False, True])
def test_a_rank_that_is_killed_is_dead(tmp_path, spawn):
    finding = the_finding(diagnosed(tmp_path, "die", spawn=spawn))
    assert (finding["class"], finding["ranks"]) == ("dead.rank", [2])
    assert "SIGKILL" in told(finding)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["skip", "order", "size", "dtype"])
def test_a_rank_that_calls_otherwise_than_its_peers_is_named_and_no_hardware_blamed(tmp_path, fault):
    finding = the_finding(diagnosed(tmp_path, fault))
    assert (finding["class"], finding["ranks"]) == ("hang.mismatch", [2])


@pytest.mark.slow
def test_two_ranks_that_receive_from_each_other_are_named_together(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "deadlock"))
    assert (finding["class"], finding["ranks"]) == ("hang.mismatch", [2, 3])


@pytest.mark.slow
def test_one_of_eight_ranks_is_named(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "sleep", "--rank", "5", num_ranks=8))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [5])


@pytest.mark.slow
def test_a_rank_of_a_data_parallel_job_without_stages_is_named(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "sleep", "--flat", "--rank", "1"))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [1])


@pytest.mark.slow
def test_a_job_that_ends_well_hangs_nowhere(tmp_path):
    document = diagnosed(tmp_path, "nothing", "--flat")
    assert [each for each in document["findings"] if not each["class"].startswith("slow")] == []
