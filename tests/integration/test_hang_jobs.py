"""Faults put into real jobs of pipelines with data parallelism: what `dpro diagnose` makes of the recordings.

A job that hangs is watched until its recorder has saved what its ranks wait for, and then killed.
"""

from __future__ import annotations

from typing import Any

import pytest

from dpro.detect.hang.stacks import MIN_COMPUTING
from tests.hang_jobs import ctrl_c, diagnosed, quickly, scancel, terminate
from tests.hanging import AT

pytest.importorskip("torch")


def the_finding(document: dict[str, Any]) -> dict[str, Any]:
    assert not document["healthy"]
    (finding,) = document["findings"]
    return dict(finding)


def evidence_of(finding: dict[str, Any]) -> str:
    return "\n".join(finding["evidence"])


@pytest.mark.slow
def test_a_rank_whose_host_sleeps_is_named_through_pipeline_and_data_parallelism(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "sleep", launch=quickly))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [2])
    assert finding["component"] == {"kind": "rank", "id": "2"}
    assert finding["confidence"] > 0.9
    assert "hanging.py" in evidence_of(finding)  # where it sleeps
    assert "ranks 0-1, 3" in evidence_of(finding)  # the ranks that wait because of it


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "gil"])
def test_a_process_that_is_stopped_or_keeps_the_gil_cannot_save_calls_and_is_named(tmp_path, fault):
    finding = the_finding(diagnosed(tmp_path, fault))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [2])
    assert "no thread of rank 2 has run since" in evidence_of(finding)


@pytest.mark.slow
@pytest.mark.parametrize("spawn", [False, True])
def test_a_rank_that_is_killed_is_dead(tmp_path, spawn):
    finding = the_finding(diagnosed(tmp_path, "die", spawn=spawn))
    assert (finding["class"], finding["ranks"]) == ("dead.rank", [2])
    assert "SIGKILL" in evidence_of(finding)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["skip", "order", "size", "dtype"])
def test_a_rank_that_calls_otherwise_than_its_peers_is_named_and_no_hardware_blamed(tmp_path, fault):
    finding = the_finding(diagnosed(tmp_path, fault))
    assert (finding["class"], finding["ranks"]) == ("hang.mismatch", [2])


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "runs"), [("compute", True), ("sleep", False)])
def test_a_rank_that_computes_is_distinguished_from_one_that_is_stuck(tmp_path, fault, runs):
    finding = the_finding(diagnosed(tmp_path, fault, "--flat", end=terminate))
    assert (finding["class"], finding["ranks"], finding["place"]["name"]) == ("hang.host", [2], "go_wrong")
    shares = [one["values"]["ran_share"] for one in finding["observations"] if "ran_share" in one["values"]]
    assert [share > MIN_COMPUTING for share in shares] == [runs]
    assert "py-spy" not in finding["remedy"]  # it is gone
    assert ("init_process_group" in finding["remedy"]) == runs


@pytest.mark.slow
def test_a_rank_that_makes_a_group_without_its_peers_calls_otherwise_than_they_do(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "group", "--flat", end=terminate))
    assert (finding["class"], finding["ranks"], finding["place"]["name"]) == (
        "hang.mismatch",
        [2],
        "go_wrong",
    )
    assert "call `new_group` on all ranks and in one order" in finding["remedy"]
    (peers,) = [one["values"] for one in finding["observations"] if one["values"].get("ranks") == [0, 1, 3]]
    assert (peers["doing"], peers["own_call"].rpartition(" ")[2]) == ("backward", "run")


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


@pytest.mark.slow
@pytest.mark.parametrize("end", [ctrl_c, terminate, scancel])
@pytest.mark.parametrize(
    ("fault", "class_"), [("sleep", "hang.host"), ("stop", "hang.host"), ("skip", "hang.mismatch")]
)
def test_a_hang_that_is_ended_as_people_do_stays_a_hang(tmp_path, fault, class_, end):
    document = diagnosed(tmp_path, fault, end=end)
    finding = the_finding(document)
    assert (finding["class"], finding["ranks"]) == (class_, [2])
    assert (document["end"]["hung"], document["end"]["how"]) == (True, "ended")
    assert document["end"]["ranks"] == [2]
    assert document["end"]["step"] == AT


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--flat"]])
@pytest.mark.parametrize("fault", ["leave", "exit"])
def test_a_rank_that_leaves_early_is_the_cause_and_no_rank_that_fails_without_it(tmp_path, fault, options):
    document = diagnosed(tmp_path, fault, *options)
    finding = the_finding(document)
    assert (finding["class"], finding["ranks"]) == ("hang.mismatch", [2])
    assert (document["end"]["how"], document["end"]["ranks"]) == ("failed", [2])
    assert "exited early" in document["end"]["sentence"]


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_its_exception(tmp_path):
    document = diagnosed(tmp_path, "raise", "--flat")
    assert the_finding(document)["ranks"] == [2]
    assert "rank 2 ended first, by RuntimeError: something of the user's (" in document["end"]["sentence"]
    assert "go_wrong)" in document["end"]["sentence"]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "end"), [("sleep", ctrl_c), ("stop", terminate), ("gil", terminate)])
def test_two_ranks_that_are_stuck_at_once_stay_two(tmp_path, fault, end):
    document = diagnosed(tmp_path, fault, "--flat", "--rank", "1", "2", end=end)
    found = [(each["class"], each["ranks"]) for each in document["findings"]]
    assert found == [("hang.host", [1]), ("hang.host", [2])]


@pytest.mark.slow
def test_what_the_watcher_saw_is_the_verdict_with_the_stacks_it_kept(tmp_path):
    document = diagnosed(tmp_path, "sleep", end=ctrl_c, record=("--watch",))
    finding = the_finding(document)
    assert (finding["class"], finding["ranks"]) == ("hang.host", [2])
    assert "`dpro watch` saw it" in evidence_of(finding)
    assert "hanging.py" in evidence_of(finding)
