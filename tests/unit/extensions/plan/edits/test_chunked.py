"""Work and the communication next to it in chunks, by hand: on threads and on streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable
from dpro.extensions.plan.edits.chunks import LARGEST_SLOWDOWN, SLOWDOWN, Order
from dpro.members import members_text
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.predict import apply_all
from dpro.replay.whatif.registry import parse_edit
from tests.builders import TinyRun, gpu_job, tiny_graph
from tests.edits import changed, steps_us

LATENCY, PER_BYTE = 40.0, 0.24  # us
SMALL, LARGE = 2000, 4000  # bytes, in turn
WORK = 1000.0
CALL, LAUNCH = 10.0, 10.0  # a call lasts that long, and its collective begins that much later
RANKS = 2


def took(size: int) -> float:
    return LATENCY + PER_BYTE * size


def facts(step: int, size: int) -> dict[str, object]:
    return {
        **{"sequence": step, "group": "tp", "group_ranks": members_text(range(RANKS))},
        **{"bytes_in": size, "bytes_out": size},
    }


def on_axis(run: TinyRun, axis: str = "tp") -> TinyRun:
    """All ranks along one axis."""
    run.rows["workers"] += [{"rank": rank, "host": "node", axis: rank} for rank in range(RANKS)]
    return run


def tensor_job(
    *, feeds: bool = False, steps: int = 8, between: float = 0.0, update: float = 50, axis: str = "tp"
) -> TinyRun:
    """Each step has a product and the collective that it feeds, or that feeds it, called by a thread."""
    run, begin = TinyRun(), 0.0
    for step in range(steps):
        size = (SMALL, LARGE)[step % 2]
        for rank in range(RANKS):
            at = begin if feeds else begin + WORK
            if not feeds:
                run.op("aten::mm", begin, at, rank)
                if between:
                    run.op("aten::gelu", at, at + between, rank)
                    at += between
            moved = at + CALL + LAUNCH + took(size)
            known = facts(step, size) | {"op": "all_gather" if feeds else "all_reduce"}
            run.gloo((at, at + CALL), (at + CALL + LAUNCH, moved), rank, **known)
            run.mark("wait", at + CALL, moved, rank)
            if feeds:
                run.op("aten::mm", moved, moved + WORK, rank)
                moved += WORK
            run.op("update", moved, moved + update, rank)
            run.step(step, begin, moved + update, rank)
        begin = moved + update
    return on_axis(run, axis) if axis else run


def experts_job(steps: int = 8, work: str = "aten::mm") -> TinyRun:
    """Each step sends tokens to their experts, computes, and sends them back."""
    run, begin = TinyRun(), 0.0
    for step in range(steps):
        size = (SMALL, LARGE)[step % 2]
        for rank in range(RANKS):
            at = begin
            for number in range(2):
                moved = at + CALL + LAUNCH + took(size)
                known = facts(2 * step + number, size) | {"op": "all_to_all"}
                run.gloo((at, at + CALL), (at + CALL + LAUNCH, moved), rank, **known)
                run.mark("wait", at + CALL, moved, rank)
                if number == 0:
                    run.op(work, moved, moved + WORK, rank)
                    at = moved + WORK
            run.op("update", moved, moved + 50, rank)
            run.step(step, begin, moved + 50, rank)
        begin = moved + 50
    return run


def streams_job(steps: int = 8) -> TinyRun:
    """The same with kernels: a product, its reduction on another stream, and what waits for that."""
    run, begin = TinyRun(), 0.0
    for step in range(steps):
        size = (SMALL, LARGE)[step % 2]
        for rank in range(RANKS):
            call = iter(range(100 * step, 100 * step + 100))
            product, reduced, after = next(call), next(call), next(call)
            run.call(begin, begin + 10, product, rank)
            ready = begin + 20 + WORK
            run.kernel("ampere_sgemm_128x64", begin + 20, ready, product, rank)
            run.call(begin + 10, begin + 20, reduced, rank)
            run.nccl(ready, ready + took(size), reduced, rank, **facts(step, size))
            run.call(begin + 20, begin + 22, next(call), rank, name="cudaStreamWaitEvent")
            run.call(begin + 22, begin + 32, after, rank)
            over = ready + took(size) + 50
            run.kernel("elementwise_kernel", over - 50, over, after, rank)
            run.call(begin + 32, over + 4, next(call), rank, name="cudaDeviceSynchronize")
            run.step(step, begin, over + 10, rank)
        begin = over + 10
    return on_axis(run)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Graph]:
    made = {
        "drains": tensor_job(),
        "feeds": tensor_job(feeds=True),
        "experts": experts_job(),
        "streams": streams_job(),
        "far": tensor_job(between=400, update=400),
    }
    return {name: run.build(tmp_path_factory.mktemp(name) / "run").graph for name, run in made.items()}


def chunk(size: int, chunks: int) -> float:
    return LATENCY + PER_BYTE * size / chunks


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_product_is_reduced_chunk_by_chunk_while_the_next_one_is_computed(jobs, chunks):
    # The link decides where a chunk moves for longer than one is computed, else the thread does.
    steps = steps_us(jobs["drains"], f"split:op=all_reduce,chunks={chunks}")
    part = WORK / chunks
    for step in (2, 3):
        moves = chunk((SMALL, LARGE)[step % 2], chunks)
        by_link = part + CALL + LAUNCH + chunks * moves
        by_thread = chunks * (part + CALL) + LAUNCH + moves
        assert steps[step] == pytest.approx(max(by_link, by_thread) + 50, abs=2)


def test_a_product_begins_once_the_first_chunk_of_its_input_has_come(jobs):
    # Four calls, the first chunk, and then what takes longer: the other chunks or the product.
    steps = steps_us(jobs["feeds"], "split:op=all_gather,chunks=4")
    for step in (2, 3):
        moves = chunk((SMALL, LARGE)[step % 2], 4)
        first = CALL + LAUNCH + moves
        assert steps[step] == pytest.approx(first + max(WORK, 3 * moves + WORK / 4) + 50, abs=2)


def test_experts_compute_while_tokens_of_other_chunks_come_and_go(jobs):
    steps = steps_us(jobs["experts"], "moe-pipeline:chunks=2")
    for step in (2, 3):
        expected = there_and_back(chunk((SMALL, LARGE)[step % 2], 2), WORK / 2)
        assert steps[step] == pytest.approx(expected, abs=15)


def there_and_back(moves: float, part: float) -> float:
    """A step of two chunks: the first goes back once it is computed and all have come, then the second.

    Args:
        moves, part: us of a chunk of an exchange, and of the experts.
    """
    first = CALL + LAUNCH + moves
    computed = max(first + part + CALL, CALL + LAUNCH + 2 * moves) + part
    back = max(first + part + CALL + LAUNCH, CALL + LAUNCH + 2 * moves)
    return max(back + moves, computed + CALL + LAUNCH) + moves + 50


def dispatching(run: TinyRun) -> TinyRun:
    """The job with kernels that dispatch and combine, which do not say how many bytes they move."""
    for row in run.rows["collectives"]:
        row |= {"op": ("dispatch", "combine")[row["sequence"] % 2], "bytes_in": -1, "bytes_out": -1}
    return run


def test_kernels_that_dispatch_and_combine_are_an_exchange_of_tokens(tmp_path):
    graph = dispatching(experts_job()).build(tmp_path / "run").graph
    steps = steps_us(graph, "moe-pipeline:chunks=2")
    # No bytes, so no latency; at worst the shortest exchange is latency alone, and work beside one is slower.
    worst = steps_us(parse_edit("moe-pipeline:chunks=2").bounds(graph)[1])
    for step in (2, 3):
        whole = took((SMALL, LARGE)[step % 2])
        assert steps[step] == pytest.approx(there_and_back(whole / 2, WORK / 2), abs=15)
        late = took(SMALL) + (whole - took(SMALL)) / 2
        assert worst[step] == pytest.approx(there_and_back(late, SLOWDOWN * WORK / 2), abs=15)


def test_a_combine_takes_back_the_last_dispatch_alone(tmp_path):
    run = dispatching(experts_job())
    for row in run.rows["collectives"]:
        row["op"] = "combine"
    graph = run.build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match="no all-to-all in the run is followed by work"):
        changed(graph, "moe-pipeline")


def test_experts_of_a_served_model_are_cut_into_chunks(traces):
    graph = build_graph(open_quietly(traces / "multirank" / "lightllm_h200_8r_deepep_cudagraph")).predictive
    edit = parse_edit("moe-pipeline:chunks=2")
    without, recorded, cut = (
        float(steps_us(graph, *edits).sum()) for edits in (("no-comm",), (), (str(edit),))
    )
    assert without < cut < recorded
    assert any("return_recv_hook" in note for note in edit.notes(graph))
    assert not edit.is_proven(graph)


def test_kernels_beside_a_collective_are_slowed_down_as_others_measured(jobs):
    # A kernel keeps 3 us of its time however small it is; the first chunk has no communication beside it.
    steps = steps_us(jobs["streams"], "split:op=all_reduce,chunks=2")
    before = steps_us(jobs["streams"])
    alone = 3 + (WORK - 3) / 2
    for step in (2, 3):
        size = (SMALL, LARGE)[step % 2]
        beside = alone + (SLOWDOWN - 1) * min(chunk(size, 2), alone)
        saved = before[step] - steps[step]
        expected = WORK + took(size) - alone - max(beside, chunk(size, 2)) - chunk(size, 2)
        assert saved == pytest.approx(expected, abs=15)  # a thread launches two more


def test_both_ends_of_the_slowdown_are_in_the_interval(jobs):
    edit = parse_edit("split:op=all_reduce,chunks=2")
    best, worst = (steps_us(graph) for graph in edit.bounds(jobs["streams"]))
    expected = steps_us(jobs["streams"], str(edit))
    assert (best < expected).all()
    assert (expected < worst).all()
    assert (worst - best).max() <= (LARGEST_SLOWDOWN - 1) * WORK


@pytest.mark.parametrize("edit", ["split:chunks=1", "moe-pipeline:chunks=1"])
def test_one_chunk_is_the_job_as_it_is(jobs, edit):
    graph = jobs["experts"]
    assert changed(graph, edit) is graph


def test_as_many_bytes_move_in_chunks(jobs):
    for name, edit in (("drains", "split:chunks=4"), ("experts", "moe-pipeline:chunks=4")):
        graph = jobs[name]
        moved = [each.nodes.bytes.clip(0).sum() for each in (graph, changed(graph, edit))]
        assert moved[0] == moved[1]


def test_a_collective_far_from_its_product_is_no_pair(jobs):
    with pytest.raises(Unanswerable, match=r"no all_reduce in the run stands next to a matmul and is waited"):
        changed(jobs["far"], "split:op=all_reduce")
    assert changed(jobs["far"], "split:op=all_reduce,work=aten::gelu") is not jobs["far"]


@pytest.mark.parametrize("axis", ["dp", ""])
def test_a_reduction_once_per_step_between_replicas_or_on_an_unknown_axis_may_be_of_gradients(tmp_path, axis):
    graph = tensor_job(axis=axis).build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match=r"stands next to a matmul"):
        changed(graph, "split:op=all_reduce")


def test_a_reduction_that_nothing_waits_for_at_once_is_no_pair(tmp_path: Path):
    graph = gpu_job().build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match=r"stands next to a matmul"):
        changed(graph, "split:op=all_reduce")


def test_without_an_exchange_of_tokens_there_is_no_pipeline_of_experts(jobs):
    with pytest.raises(Unanswerable, match=r"has no all-to-all"):
        changed(jobs["drains"], "moe-pipeline")


def test_what_comes_back_must_be_as_much_as_was_sent(tmp_path: Path):
    run = experts_job()
    for row in run.rows["collectives"]:
        row["bytes_in"] = row["bytes_out"] = row["bytes_in"] * (1 + row["sequence"] % 2)
    graph = run.build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match=r"no all-to-all .* return all-to-all of equal size"):
        changed(graph, "moe-pipeline")


def test_gradients_of_what_was_sent_forward_are_no_tokens_that_come_back(tmp_path: Path):
    graph = experts_job(work="autograd::engine::evaluate_function: MmBackward0").build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match=r"no all-to-all .* return all-to-all of equal size"):
        changed(graph, "moe-pipeline")


def test_what_a_chunk_costs_must_be_in_the_run(tmp_path: Path):
    graph = tensor_job(steps=1).build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match=r"too few transfers .* to fit the cost of all_reduce"):
        changed(graph, "split")


def test_the_candidates_are_the_operations_next_to_products(jobs):
    found = parse_edit("split").candidates(facts_of(jobs["drains"]))
    assert [str(each) for each in found] == [f"split:op=all_reduce,chunks={chunks}" for chunks in (2, 4)]


def test_the_notes_say_how_many_pairs_there_are(jobs):
    notes = apply_all(jobs["drains"], [parse_edit("split")]).notes
    assert notes[0] == "collectives that are cut up: 8 behind its matmul"


def test_nodes_are_in_order_along_one_lane_only():
    order = Order(tiny_graph([1, 1, 1], [(0, 1, 0), (1, 2, 0)], lane=[0, 0, 1]))
    assert order.are_in_order(0, 1)
    assert order.are_in_order(1, 1)
    assert not order.are_in_order(1, 0)
    assert not order.are_in_order(0, 2)  # behind it, on another lane
