"""`dpro diff` on the runs that ship."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from dpro.analysis.analysis import Analysis
from dpro.analysis.comparison import (
    WITHIN,
    difference_of,
    how_known,
    is_within_variation,
    pause_change,
    typical_change,
)
from dpro.cli.diff import _is_too_long, _rows_of, _summary_lines, diff
from dpro.errors import UsageError
from dpro.replay.difference import Contributor, DifferenceDocument, TypicalChange
from dpro.schema import STEPS, conform
from tests.builders import gpu_job
from tests.commands import dpro, refused
from tests.jobs import ROOT

HEALTHY, SLOW_RANK = (str(ROOT / "sample_traces" / name) for name in ("healthy", "slow_rank"))


def test_contributors_of_two_recorded_runs_add_up_and_the_fault_comes_first():
    done = CliRunner().invoke(diff, [HEALTHY, SLOW_RANK, "--json"])
    document = json.loads(done.stdout)
    assert document["delta_ms"] == pytest.approx(document["b_ms"] - document["a_ms"])
    first = document["contributors"][0]
    assert first["name"].startswith("enumerate(DataLoader)")
    assert first["delta_ms"] > 0.7 * document["delta_ms"]
    parts = sum(each["delta_ms"] for each in document["contributors"]) + document["unexplained_ms"]
    assert parts == pytest.approx(document["delta_ms"])
    assert max(document["by_rank"], key=document["by_rank"].get) == "1"


@pytest.mark.parametrize(("pair", "code"), [((HEALTHY, SLOW_RANK), 1), ((SLOW_RANK, HEALTHY), 0)])
def test_run_that_is_slower_by_more_than_allowed_fails(pair, code):
    done = CliRunner().invoke(diff, [*pair, "--fail-on", "3%"])
    assert done.exit_code == code
    assert ("longer than one of A" in done.stderr) == bool(code)


def test_a_comment_on_a_pull_request_says_first_what_changed_and_whether_that_is_allowed():
    done = CliRunner().invoke(diff, [HEALTHY, SLOW_RANK, "--markdown", "--fail-on", "3%"])
    head, _, runs, _, commands, _, ranks, _, typical, _, in_depth, _, columns, align, first, *_ = (
        done.stdout.splitlines()
    )
    assert head == "\U0001f534 **A step takes 123 ms instead of 73.7 ms: +66.9%** (limit: 3.0% more)"
    assert commands == "B also has `--slow-rank 1 --slow-ms 6`"
    assert typical.startswith("typical step of 47 and 47 steps outside deep windows (+47.8% to")
    assert ranks == "each rank alone: rank 1 +48.5 ms, rank 0 +1.34 ms"
    assert in_depth == "the usual step, as the job runs, changed by +48.3 ms, of which"
    assert runs == "A: `healthy`, B: `slow_rank`"
    assert columns.count("|") == align.count("|") == first.count("|") == 5
    assert "host code `enumerate(DataLoader)" in first
    assert done.exit_code == 1
    same = CliRunner().invoke(diff, [HEALTHY, HEALTHY, "--markdown", "--fail-on", "3%"])
    assert same.stdout.startswith("\U0001f7e2 **A step takes 73.7 ms instead of 73.7 ms: +0.0%**")
    assert same.exit_code == 0
    assert CliRunner().invoke(diff, [HEALTHY, HEALTHY, "--markdown"]).stdout.startswith("**A step")


@pytest.mark.parametrize("given", [["--json", "--markdown"], [HEALTHY, "--markdown"]])
def test_markdown_is_of_two_runs_and_not_beside_json(given):
    refused = CliRunner().invoke(diff, [HEALTHY, HEALTHY, *given])
    assert isinstance(refused.exception, UsageError)
    assert "--markdown" in str(refused.exception)


def test_allowance_that_is_no_share_is_refused():
    assert CliRunner().invoke(diff, [HEALTHY, HEALTHY, "--fail-on", "much"]).exit_code == 2


def test_what_explains_a_difference_is_a_table_and_no_difference_has_none():
    head, _, ranks, _, _, above, columns, first, *_ = (
        CliRunner().invoke(diff, [HEALTHY, SLOW_RANK]).stdout.splitlines()
    )
    assert head.startswith("A healthy 73.7 ms -> B slow_rank 123 ms a step: +49.3 ms")
    assert ranks.startswith("each rank alone: rank 1 +48.5 ms")  # the rank at fault comes first
    assert above.split() == ["effect", "on"]
    assert columns.split()[:4] == ["the", "step", "A", "B"]
    assert first.split(maxsplit=6)[6].startswith("host code enumerate(DataLoader)")
    assert len(CliRunner().invoke(diff, [HEALTHY, HEALTHY]).stdout.splitlines()) == 3


def difference(*parts: Contributor, **fields: object) -> DifferenceDocument:
    """A step that grew from 100 to 110 ms, with some contributors."""
    return DifferenceDocument(
        **{
            "a": "a", "b": "b", "a_ms": 100.0, "b_ms": 110.0, "delta_ms": 10.0, "contributors": list(parts),
            "unexplained_ms": 0.0, "by_rank": {}, "doubts": [], **fields,
        }
    )  # fmt: skip


NO_CHANGE = TypicalChange(
    a_ms=100.0, b_ms=101.0, change=0.01, between=(-0.02, 0.04), a_steps=40, b_steps=40
)  # fmt: skip


def test_no_row_shows_times_that_contradict_its_effect():
    # The rank that others wait for multiplies for longer, the other ones for less long.
    rows = _rows_of(
        difference(Contributor("mm", "kernel", 8.0, 20.0, 19.0), Contributor("add", "kernel", 2.0, 4.0, 6.0))
    )
    assert rows == [(8.0, "", "", "ranks differ in kernel", "mm"), (2.0, "4 ms", "6 ms", "kernel", "add")]


@pytest.mark.parametrize(
    "unclear",
    [
        {"measured": NO_CHANGE, "by_rank": {0: 5.0, 1: 5.0}},
        {"doubts": [WITHIN]},
    ],
)
def test_a_change_within_the_variation_of_steps_is_not_explained(unclear):
    document = difference(Contributor("mm", "kernel", 10.0, 20.0, 30.0), **unclear)
    assert _rows_of(document) == []
    assert not any("10 ms" in line or "rank" in line for line in _summary_lines(document))


def series(*others_ms: float, deep_ms: float = 10.0) -> pl.DataFrame:
    """Steps of one rank: two in a deep window, and others."""
    rows, at = [], 0
    lengths = [(0, deep_ms), (0, deep_ms), (-1, deep_ms), *((-1, ms) for ms in others_ms)]
    for step, (window, took) in enumerate(lengths):
        rows.append((0, step, window, at, round(took * 1e6)))
        at += round(took * 1e6)
    table = pl.DataFrame(rows, ["rank", "step", "window", "start_ns", "duration_ns"], orient="row")
    return conform(STEPS, table)


def test_a_change_is_that_of_all_steps_and_within_noise_no_change():
    slower, noisy = (
        typical_change(series(*[10.0, 10.1] * 20), series(*other))
        for other in ([12.0, 12.1] * 20, [9.0, 13.0] * 20)
    )
    assert slower is not None
    assert noisy is not None
    assert slower.change == pytest.approx(0.2, abs=0.01)
    assert slower.is_clear
    assert not noisy.is_clear
    assert typical_change(series(10.0), series(*[12.0] * 20)) is None


def test_pauses_count_in_the_change_of_the_mean_step_where_they_differ():
    steady, paused = [10.0, 10.1] * 40, [10.0, 10.1, 10.0, 40.1] * 20
    added = pause_change(series(*steady), series(*paused))
    assert added is not None
    assert (added.a_ms, added.b_ms) == (0.0, pytest.approx(30 / 4, rel=0.03))
    assert pause_change(series(*paused), series(*paused)) is None
    assert pause_change(series(*steady), series(*steady[:-1], 300.0)) is None  # one may be chance
    change = typical_change(series(*steady), series(*paused))
    document = difference(measured=change, pauses=added)
    a_ms, b_ms, share = document.known_change
    assert (a_ms, b_ms) == (pytest.approx(10.05, abs=0.1), pytest.approx(17.5, rel=0.03))
    assert share == pytest.approx(0.75, abs=0.03)
    assert _is_too_long(document, 0.5)
    assert not _is_too_long(document, 0.9)
    assert how_known(document)[0].startswith("of the mean step, pauses take nothing in A and 7."), how_known(
        document
    )


def deep(took_ms: list[float]) -> pl.DataFrame:
    """Steps of one rank in a deep window."""
    ends = np.cumsum(took_ms)
    rows = [
        (0, step, 0, round((end - took) * 1e6), round(took * 1e6))
        for step, (end, took) in enumerate(zip(ends, took_ms))
    ]
    return conform(
        STEPS, pl.DataFrame(rows, ["rank", "step", "window", "start_ns", "duration_ns"], orient="row")
    )


def test_the_mean_of_few_steps_has_changed_only_beyond_their_variation():
    # Means of 10 and 10.5 ms: their difference has a standard error of sqrt(2 / 3), then of 0.01 ms.
    varying, steady = ([9.0, 10.0, 11.0], [9.5, 10.5, 11.5]), ([9.99, 10.0, 10.01], [10.49, 10.5, 10.51])
    for (before, after), expected in ((varying, True), (steady, False)):
        assert is_within_variation(deep(before), deep(after)) is expected
    assert not is_within_variation(deep([10.0]), deep([10.0]))


def test_without_a_change_of_any_work_there_is_no_table():
    document = difference(b_ms=99.0, delta_ms=-1.0, unexplained_ms=-0.9)
    assert _rows_of(document) == []
    assert _summary_lines(document) == [
        "no kind of work changed by 0.5% of the step or more; -900 us is not explained"
    ]


def test_different_jobs_and_a_job_that_hung_are_said_to_be():
    gpu = str(ROOT / "sample_traces" / "h200_gpt")
    doubts = json.loads(CliRunner().invoke(diff, [gpu, SLOW_RANK, "--json"]).stdout)["doubts"]
    assert any(
        line.startswith("these are different jobs: 1 rank on NVIDIA H200, and 2 ranks") for line in doubts
    )
    lines = CliRunner().invoke(diff, [gpu, SLOW_RANK]).stdout.splitlines()
    assert [number for number, line in enumerate(lines) if "these are different jobs" in line] == [1]
    hung, other = (str(ROOT / "sample_traces" / name) for name in ("h200_hang", "h200_slow_host"))
    doubts = json.loads(CliRunner().invoke(diff, [hung, other, "--json"]).stdout)["doubts"]
    assert doubts[0].startswith("A: The job hung")


@pytest.mark.slow
def test_many_runs_have_a_line_each_with_step_limit_and_what_to_do_first():
    columns, first, second, third = (
        CliRunner().invoke(diff, [HEALTHY, SLOW_RANK, HEALTHY]).stdout.splitlines()
    )
    assert columns.split() == ["run", "step", "to", "first", "limit", "first", "to", "do"]
    assert (first.split()[:4], first) == (["healthy", "74.7", "ms", "+0.0%"], third)
    assert second.split()[:4] == ["slow_rank", "123", "ms", "+64.7%"]
    found = json.loads(CliRunner().invoke(diff, [HEALTHY, SLOW_RANK, HEALTHY, "--json"]).stdout)["runs"]
    assert [each["limit"]["kind"] for each in found] == ["compute", "imbalance", "compute"]


def test_an_allowance_for_many_runs_is_refused():
    done = CliRunner().invoke(diff, [HEALTHY, HEALTHY, HEALTHY, "--fail-on", "3%"])
    assert "give two runs: --steps" in str(done.exception)


def test_of_one_run_the_other_is_missing():
    line = refused(dpro("diff", HEALTHY), exit_code=2)
    assert line == f"dpro: Missing argument 'B': a run to compare {HEALTHY} with (see `dpro diff --help`)"


def test_a_rank_that_left_no_record_makes_no_other_job(tmp_path):
    job = gpu_job(num_ranks=3)
    whole = job.write(tmp_path / "whole")
    lacking = gpu_job(num_ranks=2).write(tmp_path / "lacking")
    manifest = dataclasses.replace(lacking.manifest, world_size=3)
    runs = Analysis(dataclasses.replace(lacking, manifest=manifest)), Analysis(whole)
    assert not any("different jobs" in doubt for doubt in difference_of(*runs).doubts)
    assert any(
        "different jobs" in doubt for doubt in difference_of(Analysis(lacking), Analysis(whole)).doubts
    )
