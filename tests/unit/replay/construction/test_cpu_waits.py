"""Where the results of CPU collectives and messages are needed, by hand; times in microseconds."""

from __future__ import annotations

from itertools import pairwise

import polars as pl
import pytest

from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import EdgeKind, NodeKind
from dpro.schema import COLLECTIVES
from tests.builders import MAIN, US, Seen, TinyRun


def _functional(asked: float) -> TinyRun:
    """Two ranks, rank 1 later, each with a functional all-reduce that is over at 500, and who waits for it.

    rank 0   forward 0-100, all_reduce 100-130, [compute 140-480 or to 700], wait_tensor from `asked`, after
    rank 1   the same from 300 on
    """
    run = TinyRun()
    for rank, begin in ((0, 100), (1, 300)):
        run.step(0, 0, 1000, rank)
        run.op("forward", 0, begin, rank)
        run.op("_c10d_functional::all_reduce", begin, begin + 30, rank)
        run.gloo((begin + 5, begin + 20), (begin + 15, 500), rank)
        run.op("compute", begin + 40, asked - 10, rank)
        run.op("_c10d_functional::wait_tensor", asked, max(asked, 500) + 4, rank)
        run.op("after", max(asked, 500) + 10, 950, rank)
    return run


def test_an_operator_that_waits_is_a_wait_and_not_work(tmp_path):
    seen = Seen(_functional(400).build(tmp_path / "r").graph)
    assert seen.misses() == 0
    # Without the lateness of rank 1 both go on earlier; they did not work in between.
    assert seen.lasting("forward", -50, rank=1).start("after", 0) == 460
    sync = seen.graph.edges.kind == EdgeKind.SYNC
    assert sync.sum() == 2
    assert not seen.graph.edges.inferred[sync].any()


def test_a_result_that_came_before_it_was_asked_for_is_needed_by_the_next_operator_that_waits(tmp_path):
    seen = Seen(_functional(700).build(tmp_path / "r").graph)
    assert seen.misses() == 0
    # Done at 650, 150 later: still before rank 0 asks; done at 800, it is awaited.
    assert seen.lasting("gloo:all_reduce", 150, rank=0).start("after", 0) == 710
    assert seen.lasting("gloo:all_reduce", 300, rank=0).start("after", 0) == 810


def test_each_operator_that_waits_is_taken_once(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 1000, rank)
        for number, begin in enumerate((0, 100)):
            run.op("_c10d_functional::all_reduce", begin, begin + 30, rank)
            run.gloo((begin + 5, begin + 20), (begin + 15, begin + 60), rank, sequence=number)
        run.op("compute", 140, 300, rank)
        run.op("_c10d_functional::wait_tensor", 300, 305, rank)
        run.op("first user", 310, 600, rank)
        run.op("_c10d_functional::wait_tensor", 600, 605, rank)
        run.op("second user", 610, 900, rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    second = seen.nodes("gloo:all_reduce", 0, NodeKind.TRANSFER)[1]
    longer = seen.graph.nodes.duration.copy()
    longer[second] += 400 * US  # over at 560
    changed = Seen(seen.graph.with_durations(longer))
    assert changed.start("first user", 0) == 310
    assert changed.start("second user", 0) == 610


def test_a_caller_inside_an_operator_that_begins_nothing_else_was_waiting(tmp_path):
    # As in a layer of one's own, with a collective in its forward.
    run = TinyRun()
    for rank, begin in ((0, 100), (1, 300)):
        run.step(0, 0, 900, rank)
        run.op("forward", 0, begin, rank)
        run.op("reduce from tensor-parallel region", begin, 510, rank)
        run.gloo((begin + 10, begin + 20), (begin + 15, 500), rank)
        run.op("after", 510, 850, rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == 0
    assert seen.lasting("forward", -100, rank=1).start("after", 0) == 410


def test_a_thread_that_waited_in_all_other_steps_did_so_where_it_woke_up_late(tmp_path):
    run = TinyRun()
    late = 1  # step in which rank 0 gets no core for 30 ms after a wait of 4 ms
    begin = 0.0
    for number in range(4):
        over = begin + 5_000
        goes_on = over + (30_000 if number == late else 10)
        for rank, work in ((0, 900), (1, 4_900)):
            run.op("compute", begin, begin + work, rank)
            run.gloo((begin + work, begin + work + 20), (begin + work + 15, over), rank, sequence=number)
            run.op("update", goes_on if rank == 0 else over + 10, goes_on + 1_000, rank)
            run.step(number, begin, goes_on + 1_000, rank)
        begin = goes_on + 1_000
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == 0
    update = seen.nodes("update", 0)[late]
    compute = seen.nodes("compute", 1)[late]
    shorter = seen.graph.nodes.duration.copy()
    shorter[compute] -= 3_000 * US
    changed = Seen(seen.graph.with_durations(shorter))
    assert changed.timeline.start[update] == seen.timeline.start[update] - 3_000 * US


def _messages(asked: float = 420) -> TinyRun:
    """Rank 0 sends what rank 1 computes on; it computes on, and asks later whether it was sent.

    rank 0   compute 0-200, send 200-210, more 220-400, asked at 420, after 430-600
    rank 1   recv 0-10, waits to 250, use 260-500
    """
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 600, rank)
    run.op("compute", 0, 200)
    sent = run.mark("gloo:send", 205, asked, tid=MAIN)
    run.member(sent, "send", run.op("c10d::send", 200, 210), peer=1, sequence=1, bytes_in=64)
    run.op("more", 220, 400)
    run.op("after", asked + 10, 600)
    received = run.mark("gloo:recv", 5, 250, 1, tid=MAIN)
    run.member(received, "recv", run.op("c10d::recv_", 0, 10, 1), peer=0, sequence=1, bytes_out=64)
    run.op("use", 260, 500, 1)
    return run


def test_a_receiver_waits_for_the_sender(tmp_path):
    seen = Seen(_messages().build(tmp_path / "r").graph)
    assert seen.misses() == 0
    assert seen.lasting("compute", -100).start("use", 1) == 160
    assert seen.lasting("compute", 100).start("use", 1) == 360


def test_a_message_took_as_long_as_on_the_side_that_asked_first(tmp_path):
    seen = Seen(_messages().build(tmp_path / "r").graph)
    (send,) = seen.nodes("gloo:send", 0, NodeKind.TRANSFER)
    assert seen.graph.nodes.duration[send] == 45 * US
    # The sender never waited: its own work alone decides when it goes on.
    assert seen.lasting("more", -100).start("after") == 330
    # Unless the message takes longer than what it does meanwhile: over at 550.
    assert seen.lasting("gloo:send", 300).start("after") == 550


def test_messages_of_one_thread_wait_for_none_of_its_others(tmp_path):
    # Both send first and ask later: in order on their threads, each would wait for the other for ever.
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 600, rank)
        run.op("compute", 0, 100, rank)
        peer = {"peer": 1 - rank, "sequence": 1, "group": "0", "group_ranks": "0,1"}
        for number, op in enumerate(("send", "recv")):
            at = 100 + 20 * number
            call = run.op(f"c10d::{op}", at, at + 10, rank)
            run.member(run.mark(f"gloo:{op}", at + 5, 200, rank, tid=MAIN), op, call, **peer)
        run.op("after", 210, 500, rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == 0
    assert seen.lasting("compute", 50, rank=1).start("after", 0) == 260


def test_messages_go_by_their_numbers_since_when_a_caller_asked_for_them_implies_no_order(tmp_path):
    # Each is asked for just before the next is sent: the ends of sends fit the receives of the next best.
    run = TinyRun()
    sent = [0, 110, 250, 330, 500, 590, 720]
    for number, (at, following) in enumerate(pairwise(sent)):
        numbered = {"group": "0", "group_ranks": "0,1", "sequence": number + 40}
        run.op("compute", at + 20, following - 20)
        send = run.mark("gloo:send", at + 6, following - 5, tid=MAIN)
        run.member(send, "send", run.op("c10d::send", at, at + 10), peer=1, **numbered)
        receive = run.mark("gloo:recv", at + 1, at + 8, 1, tid=MAIN)
        run.member(receive, "recv", run.op("c10d::recv_", at, at + 2, 1), peer=0, **numbered)
    for rank in (0, 1):
        run.step(0, 0, 800, rank)
    built = run.build(tmp_path / "r")
    pairs = built.matching.rows.group_by("instance").agg(pl.col("sequence").n_unique(), pl.len())
    assert pairs["sequence"].to_list() == [1] * 6
    assert pairs["len"].to_list() == [2] * 6


def test_a_worker_that_found_no_core_keeps_its_delay_and_is_counted(tmp_path):
    run = TinyRun()
    begin = 0.0
    for number in range(5):
        delay = 20_000 if number == 2 else 15
        for rank in (0, 1):
            run.op("compute", begin, begin + 1_000, rank)
            start = begin + 1_020 + (delay if rank == 0 else 15)
            over = begin + 1_020 + delay + 300
            run.gloo((begin + 1_000, begin + 1_020), (start, over), rank, sequence=number)
            run.op("update", over + 10, over + 500, rank)
            run.step(number, begin, over + 500, rank)
        begin = over + 500
    graph = run.build(tmp_path / "r").graph
    seen = Seen(graph)
    assert seen.misses() == pytest.approx(0, abs=1)
    assert graph.nodes.anchored[graph.nodes.kind == NodeKind.ARRIVE].sum() == 1


def test_a_rank_with_no_communication_has_no_results(tmp_path):
    run = TinyRun()
    run.step(0, 0, 100)
    run.op("compute", 0, 100)
    built = build_graph(run.write(tmp_path / "r"))
    assert COLLECTIVES.name not in run.rows
    assert not (built.graph.edges.kind == EdgeKind.SYNC).any()
