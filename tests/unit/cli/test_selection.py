"""`--steps` and `--ranks` of the commands that read a run."""

from __future__ import annotations

import json
from typing import Any

import click
import polars as pl
import pytest
from click.testing import CliRunner

from dpro.cli import cli
from dpro.cli.analysis import analyse
from dpro.cli.diff import diff
from dpro.cli.replay import replay
from dpro.errors import UsageError
from dpro.extensions.export.command import drawing_of, export
from dpro.selection import Selection
from dpro.timelines.slices import FINDINGS
from tests.builders import TinyRun, cpu_job
from tests.jobs import ROOT

HEALTHY, SLOW_RANK = (str(ROOT / "sample_traces" / name) for name in ("healthy", "slow_rank"))
report, whatif = (
    cli.get_command(click.Context(cli), name) for name in ("report", "whatif")
)  # with extensions
ALL_OF_JOB = ("--steps", "0-99", "--ranks", "0-99")


def answer(command, *arguments: str) -> dict[str, Any]:
    """What a command prints for programs."""
    done = CliRunner().invoke(command, [*arguments, "--json"])
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


def refused(command, *arguments: str) -> str:
    """Why a command refuses."""
    error = CliRunner().invoke(command, arguments).exception
    assert isinstance(error, UsageError)
    return str(error)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> str:
    return str(cpu_job().write(tmp_path_factory.mktemp("runs") / "job").path)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> str:
    """Steps 3 (100 us) and 4 (150 us) of two ranks, each with an operator and a collective; work before."""
    run = TinyRun()
    for rank in (0, 1):
        run.op("before", -20, -10, rank)
        run.step(3, 0, 100, rank)
        run.step(4, 100, 250, rank)
    run.op("a", 0, 40, 0)
    run.op("b", 0, 69, 1)
    run.gloo((40, 41), (41, 90), 0, sequence=0)
    run.gloo((69, 70), (70, 90), 1, sequence=0)
    run.op("a", 100, 160, 0)
    run.op("b", 100, 219, 1)
    run.gloo((160, 161), (161, 250), 0, sequence=1)
    run.gloo((219, 220), (220, 250), 1, sequence=1)
    return str(run.write(tmp_path_factory.mktemp("runs") / "two").path)


def test_report_is_of_selected_steps_and_ranks_alone(two_steps):
    document = answer(report, two_steps, "--steps", "4", "--ranks", "0")
    assert document["selection"] == {"steps": "4", "ranks": "0"}
    (step,) = document["steps"]
    assert (step["step"], step["rank"], step["duration_ms"]) == (4, 0, 0.15)
    assert {each["name"]: each["total_ms"] for each in document["kernels"]} == {
        "a": 0.06,
        "c10d::allreduce_": 0.001,
    }
    (collective,) = document["collectives"]  # what rank 1, which is not selected, came later by is wait
    assert (collective["count"], collective["matched"]) == (1, 1)
    assert (collective["total_ms"], collective["wait_ms"], collective["transfer_ms"]) == (0.089, 0.059, 0.03)
    assert document["mean_step"]["duration_ms"] == pytest.approx(0.15, rel=0.01)  # as replayed
    assert document["step_time"] is None  # of one step, whose mark may end before the devices do


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> str:
    """Four ranks: two replicas of two tensor-parallel ranks."""
    built = cpu_job(num_ranks=4)
    for rank in range(4):
        built.worker(rank, "n1", dp=rank // 2, tp=rank % 2)
    return str(built.write(tmp_path_factory.mktemp("runs") / "grid").path)


def test_ranks_are_selected_by_their_places_in_the_layout(grid):
    by_place = answer(report, grid, "--ranks", "tp=1")
    assert by_place["selection"] == {"ranks": "1,3"}
    assert by_place == answer(report, grid, "--ranks", "1,3")
    assert answer(report, grid, "--ranks", "dp=1,tp=0")["selection"] == {"ranks": "2"}
    assert answer(diff, grid, grid, "--ranks", "dp=0")["selection"] == {"ranks": "0-1"}


def test_places_that_no_rank_has_are_refused_with_the_layout(grid, two_steps):
    assert refused(report, grid, "--ranks", "tp=2") == (
        "--ranks tp=2: no rank stands there (places count from 0): 4 ranks = dp 2 x tp 2"
    )
    assert refused(report, grid, "--ranks", "pp=0") == (
        "--ranks pp=0: there is no axis 'pp': 4 ranks = dp 2 x tp 2"
    )
    assert "nothing recorded says how the ranks are laid out" in refused(report, two_steps, "--ranks", "tp=0")
    assert "are invalid" in str(CliRunner().invoke(report, [grid, "--ranks", "tp="]).exception)


def test_work_outside_of_steps_counts_where_all_steps_are_selected(two_steps):
    def before(*selected: str) -> list[int]:
        kernels = answer(report, two_steps, *selected)["kernels"]
        return [each["count"] for each in kernels if each["name"] == "before"]

    assert before() == before("--steps", "3-4") == [2]
    assert before("--steps", "3") == []
    assert before("--ranks", "1") == [1]


@pytest.mark.few(1)
@pytest.mark.parametrize("run", ["job", SLOW_RANK])
def test_selecting_all_of_a_report_is_selecting_nothing(run, job):
    run = job if run == "job" else run
    document = answer(report, run, *ALL_OF_JOB)
    assert document.pop("selection") == {"steps": "0-99", "ranks": "0-99"}
    assert document == answer(report, run)


@pytest.mark.slow
def test_reports_of_each_rank_add_up_to_that_of_all():
    whole, *parts = (answer(report, SLOW_RANK, *ranks) for ranks in ((), ("--ranks", "0"), ("--ranks", "1")))
    for table, key in (("kernels", "total_ms"), ("collectives", "wait_ms")):
        of_parts = sum(row[key] or 0 for part in parts for row in part[table])
        assert of_parts == pytest.approx(sum(row[key] or 0 for row in whole[table]))


def test_a_report_says_what_it_is_of_and_reports_to_send_are_refused(job, tmp_path):
    text = CliRunner().invoke(report, [job, "--steps", "1,3", "--ranks", "2"]).output
    assert text.startswith("Selected: --steps 1,3 --ranks 2\n")
    assert "selected ranks" in text
    assert "whole run" in refused(report, job, "--steps", "1", "--html", str(tmp_path / "x.html"))


@pytest.mark.slow
def test_difference_is_of_selected_steps_and_of_the_work_of_selected_ranks():
    document = answer(diff, HEALTHY, SLOW_RANK, "--steps", "5-7", "--ranks", "1")
    parts = sum(each["delta_ms"] for each in document["contributors"]) + document["unexplained_ms"]
    assert parts == pytest.approx(document["delta_ms"])
    assert list(document["by_rank"]) == ["1"]
    assert document["contributors"][0]["name"].startswith("enumerate(DataLoader)")
    replayed = answer(whatif, SLOW_RANK, "--edit", "heal:rank=1", "--steps", "5-7")
    assert document["b_ms"] == pytest.approx(replayed["baseline_ms"])
    other = answer(diff, HEALTHY, SLOW_RANK, "--steps", "5-7", "--ranks", "0")  # the fault is not in its work
    assert other["unexplained_ms"] > 0.7 * other["delta_ms"]


@pytest.mark.slow
def test_difference_of_all_steps_and_ranks_is_the_difference():
    document = answer(diff, HEALTHY, SLOW_RANK, *ALL_OF_JOB)
    assert document.pop("selection") == {"steps": "0-99", "ranks": "0-99"}
    whole = answer(diff, HEALTHY, SLOW_RANK)
    assert (document.pop("measured"), whole.pop("measured")["a_steps"]) == (None, 47)
    assert document == whole


def test_export_draws_selected_steps_and_ranks_with_the_arrows_between_them():
    analysis = analyse(SLOW_RANK)
    whole = drawing_of(analysis)
    drawn = drawing_of(analysis, Selection(steps=((5, 5), (30, 31)), ranks=((1, 1),)))
    of_ranks = drawn.rows.filter(pl.col("group") != FINDINGS)
    assert set(of_ranks["rank"]) == {1}
    assert set(drawn.rows["step"]) == {5, 30, 31}
    kept = whole.rows.filter((pl.col("rank") == 1) & pl.col("step").is_in([5, 30, 31]))
    assert of_ranks.height == kept.filter(pl.col("group") != FINDINGS).height
    ends = drawn.arrows.select("source", "target").to_numpy()
    assert 0 < len(ends) < whole.arrows.height
    assert 0 <= ends.min() <= ends.max() < drawn.rows.height
    times = drawn.counters["time_ns"]
    assert drawn.rows["start_ns"].min() <= times.min() <= times.max() <= drawn.rows["end_ns"].max()


def test_exporting_all_steps_and_ranks_leaves_out_only_what_is_in_no_step():
    analysis = analyse(SLOW_RANK)
    whole, drawn = drawing_of(analysis), drawing_of(analysis, Selection(((0, 99),), ((0, 99),)))
    columns = ["group", "name", "start_ns", "end_ns", "node"]
    in_steps = whole.rows.filter(pl.col("step") >= 0).select(columns).sort(columns)
    assert drawn.rows.select(columns).sort(columns).equals(in_steps)


def test_export_says_what_it_wrote(job, tmp_path):
    document = answer(export, job, "--chrome", str(tmp_path / "x.json"), "--ranks", "0,2")
    assert document["selection"] == {"ranks": "0,2"}
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert {event["args"]["rank"] for event in events if event["ph"] == "X"} == {0, 2}
    assert "selection" not in answer(export, job, "--chrome", str(tmp_path / "x.json"))


@pytest.mark.slow
def test_predictions_are_of_the_mean_of_selected_steps():
    each = [answer(whatif, SLOW_RANK, "-e", "heal:rank=1", "--steps", step) for step in ("5", "6", "7")]
    together = answer(whatif, SLOW_RANK, "-e", "heal:rank=1", "--steps", "5-7")
    for key in ("baseline_ms", "measured_ms"):
        assert together[key] == pytest.approx(sum(one[key] for one in each) / 3)
    predicted = [one["predictions"][0] for one in (*each, together)]
    mean = sum(one["predicted_ms"] for one in predicted[:3]) / 3
    assert predicted[3]["predicted_ms"] == pytest.approx(mean)
    assert predicted[3]["low"] < mean < predicted[3]["high"]


def test_predictions_of_all_steps_are_those_without_a_selection(job):
    for edits in (("-e", "heal:rank=1"), ("--budget", "3")):
        document = answer(whatif, job, *edits, "--steps", "0-99")
        assert document.pop("selection") == {"steps": "0-99"}
        assert document == answer(whatif, job, *edits)


def test_replay_takes_several_steps(job):
    assert [each["step"] for each in answer(replay, job, "--steps", "1,3")["steps"]] == [1, 3]


def test_what_is_not_in_the_run_is_refused_with_what_is(job, tmp_path):
    there = "steps recorded in depth: 0-3; ranks 0-2"
    file = str(tmp_path / "x.json")
    assert there in refused(report, job, "--steps", "9")
    assert there in refused(whatif, job, "--steps", "9", "--edit", "heal:rank=1")
    assert there in refused(export, job, "--ranks", "7", "--chrome", file)
    assert f"A: --ranks 7 selects nothing; {there}" in refused(diff, job, job, "--ranks", "7")
    assert "ranks wait for each other" in refused(whatif, job, "--ranks", "0")
    assert "--sensitivity" in refused(whatif, job, "--steps", "1", "--sensitivity")
    assert "is empty" in refused(report, job, "--ranks", ",")
