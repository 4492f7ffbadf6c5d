"""Plans that are made: with operator fusion, in memory that is short, interrupted; and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dpro.analysis.analysis import Analysis
from dpro.errors import Unanswerable
from dpro.extensions.tensors import joint
from dpro.extensions.tensors.joint import PlanSearch, make_plan, ways_to_free_memory
from dpro.extensions.tensors.plan_file import read_plan
from dpro.replay.gradient_passes import MB
from dpro.replay.whatif.edits.gradients import Bucket
from dpro.replay.whatif.graph_ops.divisions import SIZES_MB
from dpro.replay.whatif.predict import predict
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from tests.builders import TinyRun
from tests.commands import dpro, refused
from tests.ddp import KB, ddp_job, gpu_ddp_job
from tests.unit.replay.whatif.edits.gpu.test_kernels import ADD
from tests.unit.replay.whatif.edits.test_batch import remembered


def analysed(run: TinyRun, folder: Path) -> Analysis:
    run.write(folder)
    return Analysis(open_run(folder))


@pytest.fixture
def slow_link(tmp_path) -> Path:
    """A run of seven gradients whose reductions take longer than backward."""
    ddp_job((64, 512, 512, 300, 700, 1024, 64), (0, 6), latency=300, us_per_kb=2.5).write(tmp_path / "run")
    return tmp_path / "run"


def test_a_plan_is_predicted_as_it_was_found_and_better_than_any_size(slow_link, tmp_path):
    analysis = Analysis(open_run(slow_link))
    plan, search = make_plan(analysis)
    done = dpro("whatif", slow_link, "--make-plan", tmp_path / "plan.json", "--json")
    document = json.loads(done.stdout)
    made = document["made_plan"]
    assert read_plan(tmp_path / "plan.json") == dataclasses.replace(plan, made_from=str(plan.made_from))
    predicted = document["predictions"][0]
    assert predicted["edits"][-1] == f"tensors:plan={tmp_path / 'plan.json'}"
    assert predicted["predicted_ms"] == pytest.approx(made["step_ms"])
    assert made["replays"] == search.made
    graph, baseline = analysis.built.predictive, analysis.baseline
    sizes = [predict(graph, baseline, [Bucket(mb)], analysis.trust).predicted_ns / 1e6 for mb in SIZES_MB]
    assert made["uniform_ms"] == pytest.approx(min(sizes))
    assert made["step_ms"] <= made["uniform_ms"] * 1.001
    again = dpro("whatif", slow_link, "--plan", tmp_path / "plan.json", "--json")
    assert json.loads(again.stdout)["predictions"] == document["predictions"]


def test_the_command_says_what_was_found_and_what_to_do_next(slow_link, tmp_path):
    plan = tmp_path / "plan.json"
    done = dpro("whatif", slow_link, "--make-plan", plan)
    assert done.returncode == 0, done.stderr
    for said in (
        "divisions were replayed",
        "the best size for all buckets (bucket:mb=",
        f"Written: {plan}",
        f"To measure it: dpro try --plan {plan} -- COMMAND",
        "the job 2; they begin or end elsewhere at",
    ):
        assert said in done.stdout


def test_interrupted_from_the_keyboard_the_best_so_far_is_written(slow_link, tmp_path, monkeypatch):
    def interrupt(search: PlanSearch) -> None:
        if search.made == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(PlanSearch, "count", interrupt)
    plan, search = make_plan(Analysis(open_run(slow_link)))
    assert search.is_interrupted
    assert search.made == 5
    _, replays = search.best()
    assert replays.best_ns == min(replays.steps_ns.values())
    done = dpro("whatif", slow_link, "--make-plan", tmp_path / "plan.json")
    assert "Search interrupted; this is the best until then: 5 divisions were replayed." in done.stdout
    assert read_plan(tmp_path / "plan.json").reductions == plan.reductions


def test_interrupted_before_anything_was_replayed_nothing_is_written(slow_link, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(joint, "search_division", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_plan(Analysis(open_run(slow_link)))


def _fusable(us_per_kb: float, *names: str) -> TinyRun:
    """A job on GPUs with one bucket, some of whose kernels `compile` makes one of."""
    run = gpu_ddp_job((3,), us_per_kb=us_per_kb)
    for row in run.rows["spans"]:
        if row["name"] in names:
            row["name"] = ADD
    return run


def test_a_fusion_that_gains_by_itself_and_delays_reductions_is_found_out(tmp_path):
    analysis = analysed(_fusable(0.9, "backward_gemm"), tmp_path / "run")
    plan, search = make_plan(analysis)
    tried = {tuple(map(str, edits)): replays.best_ns for edits, replays in search.tried}
    # Fused, backward takes less time; but no gradient is ready before all are, whatever the buckets.
    alone = predict(analysis.built.predictive, analysis.baseline, [parse_edit("compile")], analysis.trust)
    assert alone.predicted_ns < 0.9 * analysis.baseline_ns
    assert tried["compile",] > 1.1 * tried[()]
    assert plan.edits == ()


def test_a_fusion_that_helps_is_part_of_the_plan(tmp_path):
    run = _fusable(0.1, "backward_gemm", "forward_gemm")
    plan, search = make_plan(analysed(run, tmp_path / "run"))
    assert plan.edits == ("compile",)
    steps = [replays.best_ns for _, replays in search.tried]
    assert min(steps) < 0.9 * steps[0]


def test_memory_that_is_short_is_freed_first(tmp_path):
    run = remembered(ddp_job(), free=1 << 30)
    graph = run.build(tmp_path / "run").graph
    assert ways_to_free_memory(graph, None) == [()]
    assert ways_to_free_memory(graph, 1e3) == [()]
    with pytest.raises(Unanswerable, match="neither recomputing modules nor half the batch"):
        ways_to_free_memory(graph, 1e-9)
    peak = max(joint.peaks_of(graph.run).values())
    ways = ways_to_free_memory(graph, (peak - 1) / 1e9)
    assert ("accumulate", "batch") in [tuple(edit.name for edit in way) for way in ways]
    for way in ways:
        samples = 1.0
        for edit in way:
            samples *= edit.samples(graph)
        assert samples == 1.0


def test_a_run_that_says_nothing_of_memory_is_refused(tmp_path):
    graph = ddp_job().build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match="record --memory"):
        ways_to_free_memory(graph, 80.0)


def test_half_precision_of_gradients_that_have_few_bits_is_refused(tmp_path):
    run = ddp_job((KB, KB), (0, 1))
    for row in run.rows["collectives"]:
        row["dtype"] = "bfloat16"
    with pytest.raises(Unanswerable, match="bfloat16 already"):
        make_plan(analysed(run, tmp_path / "run"), reduce_in="bf16")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--plan", "p", "--make-plan", "q"], "omit one of them"),
        (["--reduce-in", "bf16"], "--reduce-in is for a search"),
        (["--plan", "p", "--memory-gb", "8"], "--memory-gb is for a search"),
        (["--plan", "p", "--budget", "5"], "--budget limits a search"),
        (["--make-plan", "q", "--edit", "compile"], "omit --edit"),
        (["--make-plan", "q", "--sensitivity"], "--make-plan: --sensitivity and --pareto"),
        (["--plan", "p", "--pareto"], "--plan: --sensitivity and --pareto"),
        (["--plan", "nothing.json"], "nothing.json: no such file"),
    ],
)
def test_options_that_do_not_go_together_are_refused(slow_link, options, said):
    assert said in refused(dpro("whatif", slow_link, *options), 2)


def test_a_job_without_reductions_is_refused_and_nothing_is_written(tmp_path):
    run = ddp_job((MB // KB,), (0,), hook="fp16_compress_hook")
    run.write(tmp_path / "run")
    done = dpro("whatif", tmp_path / "run", "--make-plan", tmp_path / "plan.json")
    assert "communication hook" in refused(done, 1)
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_without_names_cannot_be_tried(tmp_path):
    run = ddp_job((KB, KB), (0, 1), us_per_kb=1)
    for row in run.rows["buckets"]:
        row["names"] = []
    run.write(tmp_path / "run")
    done = dpro("whatif", tmp_path / "run", "--make-plan", tmp_path / "plan.json")
    assert "have no names" in done.stdout
    assert "To measure it" not in done.stdout
