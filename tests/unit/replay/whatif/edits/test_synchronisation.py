"""Parameters gathered ahead, by hand: a job with FSDP, layer by layer, on CPUs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.edits.synchronisation import redundant_reductions
from dpro.replay.whatif.registry import parse_edit
from tests.builders import WORKER, TinyRun, cpu_job
from tests.ddp import ACCUMULATE, ddp_job
from tests.edits import step_us

LAYERS, LAYER, GATHER, REDUCE, COPY = 4, 1000.0, 600.0, 500.0, 40.0


def fsdp_job(num_steps: int = 3) -> TinyRun:
    """Two ranks gather each layer before its forward and backward pass, and reduce its gradients."""
    run = TinyRun()
    at, number = 0.0, 0

    def communicate(name: str, op: str, what: str, layer: int, lasts: float) -> None:
        nonlocal at, number
        for rank in (0, 1):
            run.mark(f"{name} ({layer})", at, at + 20 + lasts, rank)
            called = run.op(what, at + 2, at + 20, rank)
            ran = run.mark(f"gloo:{op}", at + 20, at + 20 + lasts, rank, tid=WORKER + number % 2)
            facts = {"group": "dp", "group_ranks": "0,1", "bytes_in": 1000, "bytes_out": 1000}
            run.member(ran, op, launched_by=called, sequence=number, **facts)
        at, number = at + 20 + lasts, number + 1

    def work(name: str, lasts: float) -> None:
        nonlocal at
        for rank in (0, 1):
            run.mark(name, at, at + lasts, rank)
            run.op("work", at + 1, at + lasts - 1, rank)
        at += lasts

    for step in range(num_steps):
        begin = at
        for layer in range(LAYERS):
            communicate("FSDP::all_gather", "all_gather", "c10d::_allgather_base_", layer, GATHER)
            work(f"FSDP::all_gather_copy_out ({layer})", COPY)
            work("forward", LAYER)
        for layer in reversed(range(LAYERS)):
            work(f"FSDP::pre_backward ({layer})", 10)
            communicate("FSDP::all_gather", "all_gather", "c10d::_allgather_base_", layer, GATHER)
            work(f"FSDP::all_gather_copy_out ({layer})", COPY)
            work("backward", LAYER)
            communicate(
                "FSDP::post_backward_reduce", "reduce_scatter", "c10d::_reduce_scatter_base_", layer, REDUCE
            )
        work("update", 100)
        for rank in (0, 1):
            run.step(step, begin, at, rank)
    return run


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return fsdp_job().build(tmp_path_factory.mktemp("fsdp") / "run").graph


WHOLE = 2 * LAYERS * (20 + GATHER + COPY + LAYER) + LAYERS * (10 + 20 + REDUCE) + 100


def test_the_made_up_job_takes_what_it_should(graph):
    assert step_us(graph) == pytest.approx(WHOLE)


@pytest.mark.parametrize("only", ["forward", "backward"])
def test_all_but_the_first_gather_of_a_pass_hide_behind_the_layer_before(graph, only):
    expected = WHOLE - (LAYERS - 1) * GATHER
    assert step_us(graph, f"prefetch:ahead=1,only={only}") == pytest.approx(expected, abs=1)


def test_both_passes_gain(graph):
    expected = WHOLE - 2 * (LAYERS - 1) * GATHER
    assert step_us(graph, "prefetch:ahead=1") == pytest.approx(expected, abs=1)


def test_a_gather_that_takes_longer_than_a_layer_is_awaited_for_what_is_left(graph):
    slow = parse_edit("scale:op=all_gather,factor=3").apply(graph)  # 1800 us
    hidden = LAYER + 20  # a layer, and the next call
    gained = step_us(slow) - step_us(slow, "prefetch:ahead=1,only=forward")
    assert gained == pytest.approx((LAYERS - 1) * hidden, abs=3)
    # Two ahead, two move at a time, on one worker each; they share the link, so that none comes earlier.
    assert step_us(slow, "prefetch:ahead=2,only=forward") == pytest.approx(step_us(slow) - gained, rel=0.02)


def test_nothing_ahead_changes_nothing(graph):
    assert parse_edit("prefetch:ahead=0").apply(graph) is graph


def test_gathering_earlier_lets_no_step_take_longer(graph):
    now, *times = (step_us(graph, f"prefetch:ahead={ahead}") for ahead in range(LAYERS + 2))
    assert max(times) < now


def test_what_is_gathered_ahead_shares_the_link_with_what_is_reduced(graph):
    slow = parse_edit("scale:op=all_gather,factor=3").apply(graph)
    forward = LAYERS * (20 + 3 * GATHER + COPY + LAYER)
    moved = LAYERS * (3 * GATHER + REDUCE)  # in backward, one after the other
    ahead = step_us(slow, "prefetch:ahead=1,only=backward")
    assert ahead >= forward + moved + 100
    assert ahead < step_us(slow)


def accumulated(num_passes: int, updates: bool = False, modules: int = 1) -> TinyRun:
    """A job with DDP that goes forward and backward several times in each of three steps, reducing each time.

    Args:
        updates: whether an optimizer updates after each pass, else after the last of a step.
        modules: which have buckets of the same sizes.
    """
    run = ddp_job(num_steps=3 * num_passes)
    for rank in (0, 1):
        ends = [row for row in run.rows["steps"] if row["rank"] == rank]
        run.rows["steps"] = [row for row in run.rows["steps"] if row["rank"] != rank]
        for step in range(3):
            first, last = ends[step * num_passes], ends[(step + 1) * num_passes - 1]
            end_ns = last["start_ns"] + last["duration_ns"]
            whole = {"step": step, "start_ns": first["start_ns"], "duration_ns": end_ns - first["start_ns"]}
            run.rows["steps"].append(first | whole)
    updating = sorted({row["start_ns"] for row in run.rows["spans"] if row["name"].startswith("Optimizer")})
    kept = updating if updates else updating[num_passes - 1 :: num_passes]
    spans = run.rows["spans"]
    run.rows["spans"] = [
        row for row in spans if not row["name"].startswith("Optimizer") or row["start_ns"] in kept
    ]
    run.rows["buckets"] = [
        row | {"module": module} for row in run.rows["buckets"] for module in range(modules)
    ]
    return run


def test_gradients_of_an_update_are_reduced_in_its_last_pass(tmp_path: Path):
    graph = accumulated(3).build(tmp_path / "run").graph
    gained = step_us(graph) - step_us(graph, "reduce-last")
    assert gained == pytest.approx(2 * (4096 * 4 + 10), rel=2e-3)
    assert step_us(graph, "reduce-last", "reduce-last") == pytest.approx(step_us(graph, "reduce-last"))


@pytest.mark.parametrize(
    "job",
    [
        {"num_passes": 1},
        {"num_passes": 3, "updates": True},
        {"num_passes": 2, "modules": 2},  # each reduces its own
    ],
    ids=str,
)
def test_gradients_that_are_reduced_once_are_left_alone(tmp_path: Path, job):
    with pytest.raises(Unanswerable, match="gradients are reduced once in each update"):
        redundant_reductions(accumulated(**job).build(tmp_path / "run").graph)


def test_two_modules_that_each_reduce_twice_could_once(tmp_path: Path):
    graph = accumulated(4, modules=2).build(tmp_path / "run").graph
    vain = redundant_reductions(graph) & (graph.nodes.kind == NodeKind.TRANSFER)
    assert vain.sum() == 2 * 2 * 3  # passes, ranks, steps


def test_what_is_reduced_tensor_by_tensor_behind_backward_is_one_pass(tmp_path: Path):
    run = TinyRun()
    for step, rank in product(range(3), (0, 1)):
        at, facts = 5000 * step, {"group": "dp", "group_ranks": "0,1", "bytes_in": 4000, "bytes_out": 4000}
        run.op("LinearForward", at, at + 1000, rank, sequence_number=step)
        run.op("LinearBackward", at + 1000, at + 1900, rank, sequence_number=step, forward_thread=1)
        run.op(ACCUMULATE, at + 1900, at + 1950, rank)
        for tensor in range(4):
            call = at + 2000 + 500 * tensor
            run.gloo((call, call + 10), (call + 10, call + 300), rank, sequence=4 * step + tensor, **facts)
            run.op(
                "aten::div_", call + 300, call + 400, rank, sequence_number=step + 1
            )  # as a forward operator
        run.step(step, at, at + 5000, rank)
    with pytest.raises(Unanswerable, match="once in each update"):
        redundant_reductions(run.build(tmp_path / "run").graph)


def test_a_job_without_fsdp_is_refused(tmp_path: Path):
    with pytest.raises(Unanswerable, match="no all-gather within a range FSDP::all_gather"):
        parse_edit("prefetch").apply(cpu_job().build(tmp_path / "run").graph)
