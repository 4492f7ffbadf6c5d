"""What is said about other people's jobs: the one with a known fault, and those without."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.graphs import graph_of
from dpro.analysis.predictions import predict_edits
from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.notes import note_waiting
from dpro.opening import open_path
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, SPANS, STEPS, SYNCS
from dpro.store import Run, open_run
from tests.unit.detect.jobs import found_in_graph

MS = 1_000_000
SLEEPER = "torchrec_v100_4r_sleep1s_rank2"
SHORT_SLEEPER = "torchrec_v100_4r_a2a_ar"


def imported(traces: Path, job: str) -> Run:
    return open_path(traces / "multirank" / job)


def diagnosed(run: Run) -> list[Finding]:
    return found_in_graph(graph_of(run)[0].graph)


def shift_clock(run: Path, rank: int, by_ns: int) -> None:
    """Move everything a rank recorded, as if its host's clock were ahead."""
    for table in (SPANS, COLLECTIVES, STEPS, SYNCS, CLOCK_SAMPLES):
        times = [name for name in ("start_ns", "enqueued_ns", "time_ns") if name in table.columns]
        for part in (run / table.name).glob("*.parquet"):
            moved = [
                pl.when((pl.col("rank") == rank) & (pl.col(name) >= 0))
                .then(pl.col(name) + by_ns)
                .otherwise(pl.col(name))
                .alias(name)
                for name in times
            ]
            pl.read_parquet(part).with_columns(moved).write_parquet(part)


def test_the_rank_that_slept_is_the_only_one_named(traces):
    (finding,) = diagnosed(imported(traces, SLEEPER))
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.host", "rank", "2")
    # It slept for about a second per step, around its all-to-alls.
    assert 0.8e9 < finding.cost_ns < 1.1e9


def test_the_rank_whose_short_sleep_is_mostly_hidden_is_the_only_one_named(traces):
    # It sleeps 20 ms in the forward and 20 ms in the backward pass of each step. By the starts of the kernels
    # that follow, its GPU goes on 8.6 and 10.3 ms later than those of its peers in the last two steps.
    (finding,) = diagnosed(imported(traces, SHORT_SLEEPER))
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.host", "rank", "2")
    assert 4 * MS < finding.cost_ns < 11 * MS
    assert "_AlltoAllSingleBackward" in finding.evidence[0]


def test_the_rank_that_is_always_last_is_named_though_the_backlog_hides_most_of_it(traces):
    # Its host sleeps some 20 ms in three places of each step. By their kernels the others wait for it 9 ms
    # a step. Healing gains 10.3 of 144 ms, the usual step.
    (finding,) = diagnosed(imported(traces, "torchrec_v100_4r_opt4"))
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.host", "rank", "2")
    assert 0.065 < finding.severity < 0.08
    assert "comes last to 12 of 27" in finding.evidence[1]


@pytest.mark.parametrize("job", [SLEEPER, SHORT_SLEEPER, "torchrec_v100_4r_opt4"])
def test_a_slow_rank_costs_what_healing_it_is_predicted_to_save(traces, job):
    analysis = Analysis(imported(traces, job))
    (finding,) = analysis.verdict[0]
    healed = predict_edits(analysis, [parse_edit("heal:rank=2")])
    assert finding.cost_ns == pytest.approx(healed.base_ns - healed.predicted_ns, abs=1000)


def test_which_rank_others_of_a_healthy_job_wait_for_is_a_note_with_the_reason(traces):
    graph = graph_of(imported(traces, "nanogpt_h100_8r_rs_ag"))[0].graph
    (note,) = note_waiting(Baseline(graph), [])
    assert "of it for rank 1; it comes last to 17 of 56" in note
    assert "they would then wait" in note


# The rank whose clock is the reference, and the one that slept; the others are as these.
@pytest.mark.parametrize("rank", [0, 2, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 3))])
def test_a_clock_five_milliseconds_ahead_changes_no_finding(rank, traces, tmp_path):
    run = imported(traces, SLEEPER)
    (before,) = diagnosed(run)
    moved = tmp_path / "run"
    shutil.copytree(run.path, moved)
    shift_clock(moved, rank, 5 * MS)
    (after,) = diagnosed(open_run(moved))
    assert (after.class_, after.component_id) == (before.class_, before.component_id)
    assert after.cost_ns == pytest.approx(before.cost_ns, rel=0.02)


@pytest.mark.parametrize(
    "job",
    [
        "nanogpt_h100_8r_rs_ag",
        "param_dlrm_v100_8r",
        "torchrec_v100_2r_kjt",
        "lightllm_h200_8r_deepep_cudagraph",
    ],
)
def test_jobs_without_a_known_fault_raise_nothing(job, traces):
    assert diagnosed(imported(traces, job)) == []


def test_two_ranks_of_many_cannot_be_diagnosed_and_the_reasons_say_why(traces):
    run = imported(traces, "hta_a100_sampled_0_1_of_128")
    _, trust = graph_of(run)
    assert not trust.answerable
    assert any("126 of 128 ranks are missing" in reason for reason in trust.reasons)
    assert any("the orders of ranks 0 and 1 cannot be matched" in reason for reason in trust.reasons)
