"""The answer of `dpro goodput`."""

from __future__ import annotations

import json

import polars as pl
import pytest

from dpro.extensions.goodput.document import goodput_document, in_words
from dpro.extensions.goodput.life import life_of
from dpro.schema import REQUESTS, conform
from dpro.store import open_run, write_part
from dpro.table import complete
from tests.commands import dpro
from tests.lives import WrittenAttempt, job, killed_five_times


@pytest.fixture
def restarted(tmp_path):
    first = WrittenAttempt(begin=0)
    last = first.trained(10)
    first.checkpoint("save", 4 + 3.01, 0.0, "/c")
    first.checkpoints[0]["duration_ns"] = 5 * 10**9
    second = WrittenAttempt(begin=last + 10)
    second.checkpoint("load", second.begin + 3.5, 0.0, "/c")
    second.ended(second.trained(8))
    return job(tmp_path / "run", [first.ended(last, code=1), second])


def test_document_says_what_each_attempt_did(restarted):
    document = goodput_document(life_of([restarted]), ["run"])
    found = [(each.first_step, each.steps, each.repeated, each.lost, each.end) for each in document.attempts]
    assert found == [(0, 10, 0, 7, "failed"), (3, 8, 7, 0, "completed")]
    assert document.steps == 11
    assert sum(each.share for each in document.classes) == pytest.approx(1)
    assert document.goodput == pytest.approx(2 * 11 / (2 * document.wall_s))
    assert document.saving_background_s == pytest.approx(5)


def test_command_prints_classes_largest_first_and_one_object_for_programs(restarted):
    path = str(restarted.path)
    lines = dpro("goodput", path).stdout.splitlines()
    assert lines[0].startswith("goodput 30.6% of 36 s on 2 ranks; 11 steps done in 2 attempts")
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[1:] if "a rank" in line]
    assert shares == sorted(shares, reverse=True)
    document = json.loads(dpro("goodput", path, "--json").stdout)
    assert document["runs"] == [path]
    assert {"class", "rank_hours", "share"} == set(document["classes"][0])


def test_run_of_an_import_has_no_moments_and_says_so(tmp_path):
    run = WrittenAttempt(begin=0).written(tmp_path / "run")
    document = goodput_document(life_of([run]), ["run"])
    assert (document.classes, document.goodput) == ([], 0.0)
    assert document.notes == ["no moment of any rank was recorded"]


def test_sentence_says_what_the_time_was_worth_and_what_most_was_lost_to(restarted):
    assert in_words(goodput_document(life_of([restarted]), ["run"])) == (
        "Of 36 s, 30.6% (11 s) was training that counts; the rest went to no process 28% (10 s), "
        "starting 22% (8 s), steps done again 19% (7 s). The job was started 2 times, 1 attempt did not end "
        "well, and 7 steps were done again."
    )


def test_command_says_of_each_attempt_which_steps_it_did_and_what_ended_it(tmp_path):
    run = job(tmp_path / "run", killed_five_times())
    lines = [
        line for line in dpro("goodput", str(run.path)).stdout.splitlines() if line.startswith("attempt ")
    ]
    assert lines == [
        "attempt 0: 2 ranks, steps 0 to 11, 2 of them lost with it; "
        "rank 0 ended first, by signal 9 (SIGKILL)",
        "attempt 1: 2 ranks, steps 10 to 18, 2 of them done again, 4 of them lost with it; "
        "rank 1 ended first, by signal 9 (SIGKILL)",
        "attempt 2: 2 ranks, no step; rank 0 ended first, by signal 9 (SIGKILL)",
        "attempt 3: 2 ranks, steps 15 to 28, 4 of them done again, 4 of them lost with it; "
        "rank 1 ended first, by signal 9 (SIGKILL)",
        "attempt 4: 2 ranks, steps 25 to 30, 4 of them done again, 1 of them lost with it; "
        "rank 0 ended first, by signal 9 (SIGKILL)",
        "attempt 5: 2 ranks, steps 30 to 37, 1 of them done again; ended well",
    ]


def test_steps_that_an_attempt_did_not_record_are_not_lost_with_it(tmp_path):
    attempts = [WrittenAttempt(begin=begin) for begin in (0, 100)]
    for attempt in attempts:
        attempt.ended(attempt.trained(10))
        attempt.starts.clear()  # as of an import: its first step is not recorded
    first, last = goodput_document(life_of([job(tmp_path / "run", attempts)]), ["run"]).attempts
    assert (first.steps, first.lost, last.repeated, last.lost) == (9, 9, 9, 0)
    said = [
        line
        for line in dpro("goodput", str(tmp_path / "run")).stdout.splitlines()
        if line.startswith("attempt ")
    ]
    assert [line.split(", ")[1].split(";")[0] for line in said] == ["steps 1 to 9", "steps 1 to 9"]


def test_run_of_a_server_is_sent_to_the_command_for_servers(tmp_path):
    run = WrittenAttempt(begin=0).written(tmp_path / "run")
    rows = pl.DataFrame({"request": [0], "arrival_ns": [5]}, schema_overrides=REQUESTS.dtypes)
    write_part(run.path, REQUESTS, "log", conform(REQUESTS, complete(REQUESTS, rows)))
    notes = goodput_document(life_of([open_run(run.path)]), ["run"]).notes
    assert any("ask `dpro serving RUN`" in note for note in notes)


def test_predictions_are_given_as_what_the_job_measured_of_the_same(restarted):
    lines = dpro("goodput", str(restarted.path), "--preset", "rsc-1", "--edit", "detect:s=1").stdout
    predicted = next(line for line in lines.splitlines() if line.startswith("Predicted"))
    assert "by RSC-1" in predicted
    assert ": ETTR " in predicted
    assert "goodput" not in predicted
