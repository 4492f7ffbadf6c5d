"""Transfers on one link, moved by an edit: hand-computed meetings, and what never changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import replay
from dpro.replay.whatif.graph_ops.shared_links import shared_ns, with_shared_links
from dpro.replay.whatif.registry import parse_edit
from tests.builders import TinyRun

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


def test_what_queued_on_its_link_takes_alone_what_others_of_its_kind_and_size_did(tmp_path):
    """An all-to-all of 100 us that stood in line behind a reduction for 2 ms; half of that says its share."""
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
    graph = run.build(tmp_path / "r").graph
    twice = parse_edit("accumulate:steps=2").apply(graph)
    moving = sorted(us for us in _transfers_us(with_shared_links(graph, twice)) if us)
    assert moving == pytest.approx([100] * 3 * STEPS + [2000] * 2 * STEPS, abs=1)


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
    took = shared_ns(np.array([0.0, 0.0]), np.array([1000.0, 1000.0]), np.array([0.5, 0.5]))
    assert took.tolist() == [1000, 1000]
    assert shared_ns(np.zeros(2), np.full(2, 1000.0), np.array([1.0, 0.5])).tolist() == [1500, 1500]


TRANSFERS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(1, 1000), st.floats(0.1, 1)), min_size=1, max_size=12
)


@given(TRANSFERS)
def test_no_transfer_is_faster_than_alone_and_the_link_never_idles(transfers):
    start, work, demand = np.array(transfers, np.float64).T
    took = shared_ns(start, work, demand)
    assert (took >= work - 1e-6).all()
    last, whole = float((start + took).max()), float(start.max() + work.sum())
    assert last <= whole + 1e-6  # at worst one after the other, from the last call on


@given(TRANSFERS, st.randoms())
def test_the_order_in_which_transfers_are_listed_changes_nothing(transfers, random):
    order = list(range(len(transfers)))
    random.shuffle(order)
    start, work, demand = np.array(transfers, np.float64).T
    assert shared_ns(start[order], work[order], demand[order]) == pytest.approx(
        shared_ns(start, work, demand)[order]
    )
