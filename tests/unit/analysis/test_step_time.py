"""How long a step takes has the same names and numbers wherever it is said."""

from __future__ import annotations

import json

import polars as pl
import pytest
from click.testing import CliRunner

from dpro.analysis.step_time import step_time_document, step_time_in_words
from dpro.analysis.summary import run_info
from dpro.cli import cli
from dpro.documents import plain
from dpro.extensions.trial.measure import step_times
from dpro.schema import COLLECTIVES, COUNTERS, STEPS, WORKERS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from tests.builders import gpu_job
from tests.unit.detect.calling import counted, data_parallel, tables
from tests.unit.detect.pauses.test_find import EVERY_TENTH, PAUSE_MS, in_steps, paused

QUIET = data_parallel(2, 100)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 100 steps of which every tenth takes 200 ms longer, since rank 1 collects garbage."""
    folder = tmp_path_factory.mktemp("run")
    job = counted(paused(QUIET, 1, EVERY_TENTH), step_gc_ns=in_steps(QUIET, 1, EVERY_TENTH))
    collectives, steps, counters, _ = tables(job)
    workers = conform(WORKERS, steps.select("rank").unique().sort("rank"))
    parts = ((COLLECTIVES, collectives), (STEPS, steps), (COUNTERS, counters), (WORKERS, workers))
    for table, frame in parts:
        write_part(folder, table, "all", frame)
    write_manifest(folder, Manifest(2, [0, 1]))
    return open_run(folder)


def asked(run, command):
    done = CliRunner().invoke(cli, [command, str(run.path), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


def test_typical_step_and_mean_step_with_pauses_are_distinguished(run):
    document = step_time_document(run.table(STEPS))
    typical, mean = document.typical_ms, document.mean_with_pauses_ms
    assert mean - typical == pytest.approx(PAUSE_MS / 10)
    assert document.lost_to_pauses == pytest.approx(20 / mean, abs=1e-4)
    assert (document.steps, document.pauses, document.where) == (100, 10, "outside deep windows")


def test_the_mark_of_a_single_step_is_no_step_time(tmp_path):
    run = gpu_job(num_steps=1).write(tmp_path)
    steps = run.table(STEPS)
    assert (steps["step"].n_unique(), set(steps["window"])) == (1, {0})
    assert step_time_document(steps) is None
    assert step_time_in_words(steps) == "only one step was recorded, in a deep window"
    outside = steps.with_columns(pl.lit(-1, pl.Int32).alias("window"))
    assert step_time_document(outside).steps == 1


def test_every_command_says_the_same_of_the_same_run(run):
    document = step_time_document(run.table(STEPS))
    words = step_time_in_words(run.table(STEPS))
    assert words.startswith("typical step 41.1 ms, mean step with pauses 61.1 ms (100 steps, none in")
    assert asked(run, "info")["step_time"] == plain(document)
    answer = asked(run, "diagnose")
    assert answer["step_time"] == plain(document)
    assert [each["class"] for each in answer["findings"]] == ["pauses"]  # the same time is reported once
    assert answer["findings"][0]["cost_ms_per_step"] == pytest.approx(20, rel=0.01)
    assert any(
        "typical step 41.1 ms, mean step with pauses 61.1 ms" in x for x in answer["findings"][0]["evidence"]
    )
    assert dict(run_info(run.manifest, run.table(STEPS)))["step time"] == words
    assert sorted(step_times(run, 0))[50] / 1e6 == pytest.approx(document.typical_ms)


def test_mean_step_is_left_out_where_it_reads_as_the_typical_one():
    steps = pl.DataFrame({"rank": 0, "window": 0, "step": range(3), "start_ns": [0, 10**9, 2 * 10**9]})
    steps = conform(STEPS, steps.with_columns(rank=0, window=0, duration_ns=pl.lit(10**9)))
    assert step_time_in_words(steps) == "typical step 1 s (3 steps in deep windows)"


def test_run_without_timed_steps_says_so():
    assert step_time_document(STEPS.empty()) is None
    assert step_time_in_words(STEPS.empty()) == "no step was timed"
