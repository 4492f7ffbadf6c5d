"""Gradient buckets of another size: by hand on made-up DDP jobs, and properties."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.gradient_passes import MB, parameters_of, passes_of
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.timeline import replay, step_ends
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.reductions import closing
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from tests.builders import TinyRun
from tests.ddp import ddp_job, gpu_ddp_job
from tests.edits import steps_us


def built(run: TinyRun, folder: Path) -> Graph:
    run.write(folder / "run")
    return build_graph(open_run(folder / "run")).graph


# Four gradients of 1 MB. A step: forward 4 x 1000 us, backward 4 x 1000 us, the call 10 us, 50 us to copy
# results, 100 us of optimizer. One reduction of all takes 4 x 4096 us.
ONE_BUCKET = 8000 + 10 + 4 * 4096 + 150


def test_the_made_up_job_takes_what_it_should(tmp_path):
    assert steps_us(built(ddp_job(), tmp_path))[1] == ONE_BUCKET


@pytest.mark.parametrize(
    ("mb", "first_ready"),
    [
        (1, 5000),  # each gradient by itself: the first is moved from 5000 on, the others queue
        (2, 6000),  # two and two
        (3, 7000),  # three and one
    ],
)
def test_smaller_buckets_begin_earlier_and_queue_on_the_link(tmp_path, mb, first_ready):
    graph = built(ddp_job(), tmp_path)
    expected = first_ready + 10 + 4 * 4096 + 150
    assert steps_us(graph, f"bucket:mb={mb}")[1:] == pytest.approx([expected] * 2, abs=25)


def test_one_bucket_for_all_begins_with_the_last_gradient(tmp_path):
    graph = built(ddp_job(closes=(0, 1, 2, 3)), tmp_path)
    assert steps_us(graph)[1] == pytest.approx(5000 + 10 + 4 * 4096 + 150, abs=1)
    assert steps_us(graph, "bucket:mb=25")[1:] == pytest.approx([ONE_BUCKET] * 2, abs=25)


def test_there_and_back_is_where_it_was(tmp_path):
    graph = built(ddp_job(closes=(0, 1, 2, 3), latency=30, sizes_kb=(512, 2048, 1024, 256)), tmp_path)
    there = steps_us(graph, "bucket:mb=25", "bucket:mb=0.01")
    assert there[1:] == pytest.approx(steps_us(graph)[1:], rel=0.01)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([(3,), (1, 3), (0, 1, 2, 3), (0, 3)]), st.floats(0, 300), st.floats(0.1, 8))
def test_the_size_that_was_recorded_changes_nothing(tmp_path_factory, closes, late, us_per_kb):
    folder = tmp_path_factory.mktemp("same")
    graph = built(ddp_job(closes=closes, late=late, us_per_kb=us_per_kb), folder)
    sizes = {(3,): "mb=25", (1, 3): "mb=2", (0, 1, 2, 3): "mb=1", (0, 3): "mb=3,first_mb=1"}
    assert parse_edit(f"bucket:{sizes[closes]}").apply(graph) is graph


@given(st.lists(st.integers(1, 4 * MB), min_size=1, max_size=40), st.integers(1, 8 * MB))
def test_every_bucket_but_the_last_holds_the_cap_and_none_could_close_earlier(sizes, cap):
    closes = closing(np.array(sizes), cap, cap)
    assert closes[-1] == len(sizes) - 1
    for first, last in zip([0, *(closes[:-1] + 1)], closes):
        assert sum(sizes[first:last]) < cap
        assert sum(sizes[first : last + 1]) >= cap or last == len(sizes) - 1


def test_that_latency_is_not_known_is_said(tmp_path):
    graph = built(ddp_job(), tmp_path)
    for text in ("bucket:mb=1", "compress:to=fp16", "network:bandwidth=2"):
        (line,) = parse_edit(text).notes(graph)
        assert "too similar to show latency" in line


def test_reductions_still_wait_for_the_last_rank(tmp_path):
    graph = built(ddp_job(late=500), tmp_path)
    assert steps_us(graph, "bucket:mb=1")[1] == pytest.approx(5500 + 10 + 4 * 4096 + 150, abs=25)


def test_latencies_of_small_buckets_overlap_with_what_others_move(tmp_path):
    sizes = (64, 1024, 512, 2048)
    graph = built(ddp_job(sizes_kb=sizes, closes=(0, 1, 2, 3), latency=200, us_per_kb=8), tmp_path)
    # All is moved without a break from the first gradient on, but for its latency.
    measured = steps_us(graph)[1]
    assert steps_us(graph, "bucket:mb=25", "bucket:mb=0.01")[1] == pytest.approx(measured, rel=0.02)
    one = 8000 + 10 + 200 + 8 * sum(sizes) + 150
    assert steps_us(graph, "bucket:mb=25")[1] == pytest.approx(one, rel=0.02)


def test_a_faster_network_and_other_buckets_agree_in_either_order(tmp_path):
    graph = built(ddp_job(sizes_kb=(64, 1024, 512, 2048), closes=(0, 1, 2, 3), latency=100), tmp_path)
    one = steps_us(graph, "network:bandwidth=2", "bucket:mb=25")
    other = steps_us(graph, "bucket:mb=25", "network:bandwidth=2")
    assert one == pytest.approx(other, rel=0.02)


def test_new_reductions_carry_their_bytes_and_leave_no_old_ones(tmp_path):
    graph = parse_edit("bucket:mb=2").apply(built(ddp_job(), tmp_path))
    moved = graph.nodes.bytes[graph.nodes.kind == NodeKind.TRANSFER]
    assert moved.tolist() == [2 * MB] * (2 * 3 * 2)  # buckets, steps, ranks


def test_what_a_run_does_not_hold_is_refused_with_the_reason(tmp_path):
    hooked = built(ddp_job(hook="fp16_compress_hook"), tmp_path / "hooked")
    with pytest.raises(Unanswerable, match="communication hook"):
        parse_edit("bucket:mb=1").apply(hooked)
    unrecorded = ddp_job()
    for row in unrecorded.rows["spans"]:
        row["name"] = row["name"].removeprefix("autograd::engine::evaluate_function: ")
        row.pop("forward_thread", None)
    with pytest.raises(Unanswerable, match="holds no autograd spans"):
        parse_edit("bucket:mb=1").apply(built(unrecorded, tmp_path / "unrecorded"))


@pytest.mark.parametrize("edit", ["bucket:mb=1", "compress:to=bf16", "overlap:mode=off", "local-updates"])
def test_what_buckets_hold_is_inferred_where_it_is_not_recorded(tmp_path, edit):
    recorded = built(ddp_job(closes=(1, 3)), tmp_path / "recorded")
    unrecorded = ddp_job(closes=(1, 3))
    del unrecorded.rows["buckets"]
    unrecorded.mark("DistributedDataParallel.forward", 0, 1)
    older = ddp_job(closes=(1, 3))
    for row in older.rows["buckets"]:
        row["parameter_bytes"] = []
    for name, run in {"unrecorded": unrecorded, "older": older}.items():
        assert steps_us(built(run, tmp_path / name), edit) == pytest.approx(steps_us(recorded, edit), abs=3)


def test_a_job_that_reduces_its_gradients_itself_has_no_buckets(tmp_path):
    run = ddp_job(closes=(1, 3))
    del run.rows["buckets"]
    graph = built(run, tmp_path)
    with pytest.raises(Unanswerable, match="no DistributedDataParallel"):
        parse_edit("bucket:mb=1").apply(graph)
    assert parse_edit("overlap:mode=off").apply(graph) is not graph


@pytest.mark.parametrize("closes", [(3,), (0, 1, 2, 3)])
@pytest.mark.parametrize(("mb", "first_ready"), [(1, 1), (2, 2), (3, 3), (25, 4)])
def test_on_gpus_a_bucket_waits_for_the_kernel_of_its_last_gradient(tmp_path, closes, mb, first_ready):
    graph = built(gpu_ddp_job(closes), tmp_path)
    expected = 20 + 1000 * (1 + first_ready) + 4 * 1024 + 70
    assert steps_us(graph, f"bucket:mb={mb}") == pytest.approx([expected] * 3, abs=5)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=25), st.integers(1, 20_000), st.integers(1, 20_000)
)
def test_buckets_close_where_torch_closes_them(sizes, first_cap, cap):
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed")
    tensors = [torch.empty(size) for size in sizes]
    order = list(range(len(sizes)))
    dense = [False] * len(sizes)
    assigned, _ = distributed._compute_bucket_assignment_by_size(tensors, [first_cap, cap], dense, order)
    closes = closing(4 * np.array(sizes), first_cap, cap)
    assert [bucket[-1] for bucket in assigned] == closes.tolist()


def test_wait_between_the_calls_of_a_pass_is_not_taken_for_one_for_later_calls(tmp_path):
    # On busy cores a thread stands still within a pass, and seems to wait for a reduction that it called.
    graph = built(ddp_job(closes=(1, 3)), tmp_path)
    draft = GraphEditor(graph)
    for each in passes_of(graph, parameters_of(graph.run)):
        called = int(each.calls[1][0])
        later = graph.edges.target[(graph.edges.source == called) & (graph.edges.kind == EdgeKind.THREAD)]
        draft.link(int(each.transfer[0]), int(later[0]), EdgeKind.SYNC)
    waiting = draft.finish()
    for edit in ("bucket:mb=100", "bucket:mb=1", "compress:to=bf16", "overlap:mode=off"):
        assert len(steps_us(waiting, edit)) == 3


@pytest.mark.parametrize("edit", ["bucket:mb=1", "overlap:mode=off", "local-updates:every=2"])
def test_each_window_of_a_run_is_changed_in_the_same_way(tmp_path, edit):
    one, two = ddp_job(), ddp_job()
    later = {"start_ns": 10**9, "window": 1, "span_id": 10**6, "launch_span_id": 10**6, "step": 10}
    later["sequence"] = 100
    for table in ("spans", "collectives", "steps"):
        rows = two.rows[table]
        two.rows[table] = rows + [
            {name: value + later[name] if name in later else value for name, value in row.items()}
            for row in rows
        ]
    alone = steps_us(built(one, tmp_path / "one"), edit).tolist()
    assert steps_us(built(two, tmp_path / "two"), edit).tolist() == [*alone, *alone]


# What is known of a graph is not taken for what is known of another.


def test_a_job_whose_memory_was_changed_before_keeps_that(tmp_path):
    graph, edit = built(ddp_job(), tmp_path), parse_edit("bucket:mb=1")
    assert edit.apply(graph).step_bytes is None
    assert edit.apply(dataclasses.replace(graph, step_bytes=7)).step_bytes == 7


def test_a_bound_is_of_the_steps_that_count(tmp_path):
    graph, edits = built(ddp_job(), tmp_path), [parse_edit("bucket:mb=1"), parse_edit("priority:mb=1")]
    timeline = replay(graph)
    steps = step_ends(graph, timeline.start, timeline.end)

    def bound(graph: Graph, counted: pl.DataFrame) -> float:
        return edits[0].bound_with(edits[1], facts_of(graph, counted))

    every, last = bound(graph, steps), bound(graph, steps.tail(1))
    assert last == bound(dataclasses.replace(graph, facts={}), steps.tail(1)) != every
