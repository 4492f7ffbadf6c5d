"""Transfers on one link, moved by an edit: hand-computed meetings, and what never changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import replay
from dpro.replay.whatif.graph_ops.shared_links import shared_ns, with_shared_links
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import COLLECTIVES, SPANS
from tests.builders import US, TinyRun
from tests.ddp import ddp_job
from tests.edits import changed

STEPS, CALL = 4, 10


def _job(
    gap: float,
    first: tuple[float, float],
    second: tuple[float, float],
    same_thread: bool = False,
    steps: int = STEPS,
    ops: tuple[str, str] = ("all_reduce", "all_reduce"),
) -> TinyRun:
    """Two ranks reduce 1 MB twice, on a link of 1 byte per ns; times count from the end of the first call."""
    run = TinyRun()
    for rank in (0, 1):
        for step in range(steps):
            at = 20_000.0 * step
            for number, (begin, end) in enumerate((first, second)):
                called = at + number * (gap + CALL)
                op = run.op("c10d::allreduce_", called, called + CALL, rank)
                ran = run.mark(
                    "gloo:all_reduce",
                    at + CALL + begin,
                    at + CALL + end,
                    rank,
                    tid=20 + (0 if same_thread else number),
                )
                moved = {"bytes_in": 10**6, "bytes_out": 10**6, "sequence": 2 * step + number}
                run.member(ran, ops[number], launched_by=op, **moved)
            run.op("gap", at + CALL, at + CALL + gap, rank)
            run.op("rest", at + gap + 2 * CALL, at + 20_000, rank)
    return run


def _transfers_us(graph: Graph) -> list[float]:
    """Of rank 0, in the order in which they begin."""
    nodes = graph.nodes
    mine = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.rank == 0))
    order = mine[np.argsort(replay(graph).start[mine], kind="stable")]
    return (nodes.duration[order] / 1000).tolist()


def test_copies_of_a_step_share_its_links_and_leave_what_they_do_not_use(tmp_path):
    """Without the reduction beside it, an all-to-all has the link to itself: from 2 ms to 1."""
    ops = ("all_reduce", "all_to_all")
    graph = _job(0, (0, 2000), (CALL, 2000), ops=ops).build(tmp_path / "r").graph
    twice = parse_edit("accumulate:steps=2").apply(graph)
    shared = with_shared_links(graph, twice)
    alone = (2000 - CALL) / 2
    moving = [sorted(us for us in _transfers_us(each) if us) for each in (twice, shared)]
    assert moving[0] == pytest.approx([2000 - CALL] * 2 * STEPS + [2000] * STEPS)
    assert moving[1] == pytest.approx([alone] * STEPS + [2000 - CALL] * STEPS + [2000] * STEPS, abs=2 * CALL)


def _in_line(folder: Path) -> Graph:
    """An all-to-all of 100 us, and one that stands in line behind a reduction for 2 ms."""
    run = TinyRun()
    calls = (("all_to_all", 0, 100), ("all_reduce", 1000, 2000), ("all_to_all", 1010, 2000))
    for rank in (0, 1):
        for step in range(STEPS):
            at, ended = 20_000.0 * step, 0.0
            for number, (what, begin, lasts) in enumerate(calls):
                run.op("rest", at + ended, at + begin, rank)
                ended = begin + CALL
                op = run.op(f"c10d::{what}", at + begin, at + ended, rank)
                ran = run.mark(f"gloo:{what}", at + ended, at + ended + lasts, rank, tid=20 + number)
                moved = {"bytes_in": 10**6, "bytes_out": 10**6, "sequence": 3 * step + number}
                run.member(ran, what, launched_by=op, **moved)
            run.op("rest", at + ended, at + 20_000, rank)
    return run.build(folder / "r").graph


def test_what_queued_on_its_link_takes_alone_what_others_of_its_kind_and_size_did(tmp_path):
    """Half of its time beside the reduction is its even share of the link: 1 ms."""
    graph = _in_line(tmp_path)
    twice = parse_edit("accumulate:steps=2").apply(graph)
    moving = sorted(us for us in _transfers_us(with_shared_links(graph, twice)) if us)
    assert moving == pytest.approx([100] * 3 * STEPS + [2000] * 2 * STEPS, abs=1)


def test_what_a_transfer_stood_in_line_does_not_grow_with_the_batch(tmp_path):
    graph = _in_line(tmp_path)
    moving = sorted(us for us in _transfers_us(parse_edit("batch:factor=2").apply(graph)) if us)
    assert moving == pytest.approx([200] * STEPS + [2000] * STEPS + [2100] * STEPS, abs=1)


def test_transfers_that_meet_take_longer(tmp_path):
    graph = _job(3000, (0, 1000), (3010, 4010)).build(tmp_path / "r").graph
    assert _transfers_us(graph) == [1000, 1000] * STEPS
    closer = parse_edit("scale:name=gap,factor=0.1").apply(graph)
    # 310 us alone, 690 us of each at half the speed, then the rest of the second alone.
    assert _transfers_us(with_shared_links(graph, closer)) == pytest.approx([1690, 1690] * STEPS, abs=2)


def test_transfers_that_no_longer_meet_take_what_they_do_alone(tmp_path):
    graph = _job(300, (0, 1690), (310, 2000)).build(tmp_path / "r").graph
    apart = parse_edit("scale:name=gap,factor=10").apply(graph)
    assert _transfers_us(with_shared_links(graph, apart)) == pytest.approx([1000, 1000] * STEPS, abs=2)


def test_an_edit_that_moves_nothing_changes_no_nanosecond(tmp_path):
    graph = _job(300, (0, 1690), (310, 2000)).build(tmp_path / "r").graph
    same = graph.with_durations(graph.nodes.duration.copy())
    assert np.array_equal(with_shared_links(graph, same).nodes.duration, graph.nodes.duration)
    faster = parse_edit("scale:name=rest,factor=0.9").apply(graph)
    transfers = graph.nodes.kind == NodeKind.TRANSFER
    assert np.array_equal(
        with_shared_links(graph, faster).nodes.duration[transfers], graph.nodes.duration[transfers]
    )


def test_one_stream_shares_nothing(tmp_path):
    graph = _job(3000, (0, 1000), (3010, 4010), same_thread=True).build(tmp_path / "r").graph
    closer = parse_edit("scale:name=gap,factor=0.1").apply(graph)
    assert with_shared_links(graph, closer) is closer


def test_transfers_of_which_too_few_show_what_they_cost_need_the_link_all_the_time(tmp_path):
    graph = (
        _job(3000, (0, 1000), (3010, 4010), steps=1, ops=("all_reduce", "all_gather"))
        .build(tmp_path / "r")
        .graph
    )
    closer = parse_edit("scale:name=gap,factor=0.1").apply(graph)
    assert _transfers_us(with_shared_links(graph, closer)) == pytest.approx([1690, 1690], abs=2)


def test_what_needs_the_link_for_half_its_time_makes_room_for_another():
    none = np.zeros(2, np.bool_)
    took = shared_ns(np.array([0.0, 0.0]), np.array([1000.0, 1000.0]), np.array([0.5, 0.5]), none)
    assert took.tolist() == [1000, 1000]
    assert shared_ns(np.zeros(2), np.full(2, 1000.0), np.array([1.0, 0.5]), none).tolist() == [1500, 1500]


def test_a_queue_is_one_flow_beside_another():
    # 200 ns of overlap of two in a queue take nothing from each other, and half of what another has.
    start, work = np.array([0.0, 800.0, 0.0]), np.full(3, 1000.0)
    queue = np.array([True, True, False])
    alone = shared_ns(start[:2], work[:2], np.ones(2), queue[:2])
    assert alone.tolist() == [1000, 1000]
    # The other ends at 2000, the first of the queue as well; of the second 600 ns are done by then.
    assert shared_ns(start, work, np.ones(3), queue).tolist() == [2000, 1600, 2000]


TRANSFERS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(1, 1000), st.floats(0.1, 1)), min_size=1, max_size=12
)


@given(TRANSFERS)
def test_no_transfer_is_faster_than_alone_and_the_link_never_idles(transfers):
    start, work, demand = np.array(transfers, np.float64).T
    took = shared_ns(start, work, demand, np.zeros(start.size, np.bool_))
    assert (took >= work - 1e-6).all()
    last, whole = float((start + took).max()), float(start.max() + work.sum())
    assert last <= whole + 1e-6  # at worst one after the other, from the last call on


@given(TRANSFERS, st.randoms())
def test_the_order_in_which_transfers_are_listed_changes_nothing(transfers, random):
    order = list(range(len(transfers)))
    random.shuffle(order)
    start, work, demand = np.array(transfers, np.float64).T
    queue = start % 2 == 0
    assert shared_ns(start[order], work[order], demand[order], queue[order]) == pytest.approx(
        shared_ns(start, work, demand, queue)[order]
    )


def _beside_a_reduction() -> TinyRun:
    """DDP with one bucket of 2 MB, and an all-to-all of 1 MB that is called with its reduction.

    On the link, of 1 KB per us, they take 2048 and 1024 us alone; together the all-to-all takes 2048, and the
    reduction is left with half of the link for as long, so that it takes 3072.
    """
    run = ddp_job((1024, 1024), (1,), us_per_kb=1.5, call=0)
    reductions = [row for row in run.rows[COLLECTIVES.name] if row["op"] == "all_reduce"]
    spans = {row["span_id"]: row for row in run.rows[SPANS.name]}
    for number, row in enumerate(reductions):
        begins = spans[row["span_id"]]["start_ns"] / US
        called = run.op("c10d::alltoall_", begins, begins, row["rank"])
        ran = run.mark("gloo:all_to_all", begins, begins + 2048, row["rank"], tid=60)
        facts = {"group": "dp", "group_ranks": "0,1", "bytes_in": 1 << 20, "bytes_out": 1 << 20}
        run.member(ran, "all_to_all", launched_by=called, sequence=100 + number // 2, **facts)
    return run


def _moving_us(graph: Graph, op: str) -> list[float]:
    """Transfers of an operation on rank 0 in the second step."""
    nodes = graph.nodes
    of_op = np.array([message.op == op for message in graph.messages] + [False])[nodes.message]
    mine = (nodes.kind == NodeKind.TRANSFER) & (nodes.rank == 0) & (nodes.step == 1) & of_op
    return sorted((nodes.duration[mine] / 1000).tolist())


def test_reductions_that_an_edit_queues_share_the_link_with_what_another_stream_moves(tmp_path):
    graph = _beside_a_reduction().build(tmp_path / "r").graph
    assert _moving_us(graph, "all_reduce") == [3072]
    # Half the bytes: 1024 us alone, as the all-to-all, which it now meets from its beginning to its end.
    halved = changed(graph, "compress:to=fp16")
    assert _moving_us(halved, "all_reduce") == pytest.approx([2048], abs=5)
    assert _moving_us(halved, "all_to_all") == pytest.approx([2048], abs=5)
    # The first half is called 1000 us earlier, and is gone when the second one and the all-to-all begin.
    split = changed(graph, "bucket:mb=1")
    assert _moving_us(split, "all_reduce") == pytest.approx([1024, 2048], abs=40)
    assert _moving_us(split, "all_to_all") == pytest.approx([2048], abs=40)


def test_a_queue_that_is_alone_on_its_link_takes_what_the_line_says(tmp_path):
    graph = ddp_job((1024, 1024), (1,), us_per_kb=1.0).build(tmp_path / "r").graph
    split = parse_edit("bucket:mb=1").apply(graph)
    assert with_shared_links(graph, split) is split
    assert _moving_us(split, "all_reduce") == pytest.approx([1024, 1024], abs=1)


def test_transfers_share_a_link_where_none_was_recorded_to_move_anything(tmp_path: Path) -> None:
    graph = _job(100, (0, 2000), (500, 2500)).build(tmp_path).graph
    moves = graph.nodes.kind == NodeKind.TRANSFER
    silent = graph.with_durations(np.where(moves, 0, graph.nodes.duration))
    longer = silent.with_durations(np.where(moves, 3 * US * 1000, graph.nodes.duration))
    assert min(_transfers_us(with_shared_links(silent, longer))) >= 3000
