"""Collectives between ranks, by hand: which rank waits for which, what is waiting and what is moving."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dpro.replay.alignment.transfers import split_members, wait_and_transfer
from dpro.replay.graph import EdgeKind, NodeKind
from dpro.replay.timeline import critical_path, step_times
from tests.builders import US, WORKER, Seen, TinyRun


def two_ranks(compute: tuple[float, float] = (100, 300), end: tuple[float, float] = (400, 405)) -> TinyRun:
    """A kernel, then an all-reduce queued behind it; times to which rank's kernel runs, and their ends.

    CPU    call-gemm 0-10, call-nccl 10-20
    GPU 7      gemm 20-100 (rank 0), 20-300 (rank 1)
    GPU 20         nccl from there to 400, 405
    """
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 500, rank)
        run.op("step", 0, 500, rank)
        run.call(0, 10, 1, rank)
        run.call(10, 20, 2, rank)
        run.kernel("gemm", 20, compute[rank], 1, rank)
        run.nccl(compute[rank], end[rank], 2, rank)
    return run


def test_a_replay_of_the_unchanged_run_starts_everything_when_it_was_measured(tmp_path):
    assert Seen(two_ranks().build(tmp_path / "r").graph).misses() == 0


def test_a_collective_starts_when_the_last_rank_arrives_and_each_member_ends_its_own_transfer_later(tmp_path):
    seen = Seen(two_ranks().build(tmp_path / "r").graph)
    assert [seen.end("ncclDevKernel", rank) for rank in (0, 1)] == [400, 405]
    # Rank 0 becomes the last: it arrives at 350, the transfers of 100 and 105 begin then.
    late = seen.lasting("gemm", 250, rank=0)
    assert [late.start("ncclDevKernel", rank) for rank in (0, 1)] == [350, 350]
    assert [late.end("ncclDevKernel", rank) for rank in (0, 1)] == [450, 455]


def test_a_rank_that_does_not_come_last_delays_no_other(tmp_path):
    seen = Seen(two_ranks().build(tmp_path / "r").graph)
    assert seen.lasting("gemm", 200, rank=0).end("ncclDevKernel", 1) == 405
    assert seen.lasting("gemm", 201, rank=0).end("ncclDevKernel", 1) == 406


def test_waiting_is_taken_out_of_a_collectives_time_and_moving_is_kept(tmp_path):
    built = two_ranks().build(tmp_path / "r")
    rows = wait_and_transfer(built.matching.rows).sort("rank")
    assert rows["duration_ns"].to_list() == [300 * US, 105 * US]
    assert rows["rendezvous_ns"].to_list() == [300 * US, 300 * US]
    assert rows["transfer_ns"].to_list() == [100 * US, 105 * US]
    graph = built.graph
    assert sorted(graph.nodes.duration[graph.nodes.kind == NodeKind.TRANSFER].tolist()) == [100_000, 105_000]


def test_tables_split_a_collective_as_the_graph_does(tmp_path):
    built = two_ranks(end=(400, 450)).build(tmp_path / "r")
    rows = split_members(built.matching.rows, built.alignment).sort("rank")
    assert rows["wait_ns"].to_list() == [200 * US, 0]
    assert rows["transfer_ns"].to_list() == [100 * US, 150 * US]
    graph = built.graph
    assert sorted(graph.nodes.duration[graph.nodes.kind == NodeKind.TRANSFER].tolist()) == [100_000, 150_000]


def test_a_member_that_leaves_before_the_last_arrives_moves_nothing_and_does_not_go_negative(tmp_path):
    # A reduce lets a sender go early: rank 0 is done at 250, rank 1 comes at 300.
    run = two_ranks(end=(250, 405))
    for rank in (0, 1):
        run.worker(rank, "node7")
    graph = run.build(tmp_path / "r").graph
    transfer = graph.nodes.kind == NodeKind.TRANSFER
    assert sorted(graph.nodes.duration[transfer].tolist()) == [0, 105_000]


def test_a_rendezvous_belongs_to_no_rank_and_takes_no_time(tmp_path):
    nodes = two_ranks().build(tmp_path / "r").graph.nodes
    meeting = nodes.kind == NodeKind.RENDEZVOUS
    assert meeting.sum() == 1
    assert (nodes.rank[meeting].item(), nodes.duration[meeting].item()) == (-1, 0)


def test_removing_the_rendezvous_lets_each_rank_go_alone(tmp_path):
    graph = two_ranks().build(tmp_path / "r").graph
    alone = Seen(graph.without_edges(graph.edges.kind == EdgeKind.RENDEZVOUS))
    assert [alone.end("ncclDevKernel", rank) for rank in (0, 1)] == [200, 405]


def test_a_steps_end_is_the_maximum_over_ranks(tmp_path):
    # Rank 1's step mark ends 80 later than rank 0's: the job's step lasts to it, and not to the mean.
    run = TinyRun()
    for rank, finish in ((0, 100), (1, 180)):
        run.step(3, 0, finish, rank)
        run.op("work", 0, finish, rank)
    graph = run.build(tmp_path / "r").graph
    seen = Seen(graph)
    steps = step_times(graph, seen.timeline.start, seen.timeline.end)
    assert steps.rows() == [(0, 3, 180 * US)]
    faster = seen.lasting("work", -80, rank=1)
    assert step_times(faster.graph, faster.timeline.start, faster.timeline.end).rows() == [(0, 3, 100 * US)]


def test_steps_follow_each_other_and_add_up_to_the_window(tmp_path):
    run = TinyRun()
    for rank, shift in ((0, 0), (1, 20)):
        run.worker(rank, "one host")  # else nothing says which began first
        for number in range(3):
            begin = shift + 100 * number
            run.step(number, begin, begin + 100, rank)
            run.op("work", begin, begin + 90, rank)
    graph = run.build(tmp_path / "r").graph
    seen = Seen(graph)
    steps = step_times(graph, seen.timeline.start, seen.timeline.end)
    assert steps["step"].to_list() == [0, 1, 2]
    # Up to the end of the last work: rank 1's step 0 ends at 120, step 1 at 220, its work of step 2 at 310.
    assert steps["duration_ns"].to_list() == [120 * US, 100 * US, 90 * US]


def test_the_critical_path_goes_through_the_late_rank_and_is_as_long_as_the_makespan(tmp_path):
    run = two_ranks()
    run.rows["spans"] = [row for row in run.rows["spans"] if row["name"] != "step"]
    for rank in (0, 1):
        run.op("step", 0, 100, rank)
    seen = Seen(run.build(tmp_path / "r").graph).lasting("gemm", 50, rank=1)
    path = critical_path(seen.timeline)
    assert path["duration_ns"].sum() == seen.timeline.end.max() == 455 * US
    assert set(path["rank"]) == {1}
    # 330 of the kernel and the 10 that its launch took to reach the GPU.
    assert ("gemm", "kernel", 340 * US) in path.select("name", "kind", "duration_ns").rows()


def test_no_meaning_is_parsed_out_of_names(tmp_path):
    # A kernel that is called like a collective, and a collective that is not.
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 500, rank)
        for number in (1, 2):
            run.call(10 * number, 10 * number + 5, number, rank)
        run.kernel("ncclDevKernel_AllReduce", 30, 100 + 100 * rank, 1, rank)
        found = run.kernel("mystery", 100 + 100 * rank, 300, 2, rank, stream=20)
        run.member(found)
    nodes = (graph := run.build(tmp_path / "r").graph).nodes
    kinds = {graph.names[name]: set() for name in nodes.name}
    for name, kind in zip(nodes.name.tolist(), nodes.kind.tolist()):
        kinds[graph.names[name]].add(NodeKind(kind))
    assert kinds["ncclDevKernel_AllReduce"] == {NodeKind.KERNEL}
    assert kinds["mystery"] == {NodeKind.ARRIVE, NodeKind.TRANSFER}


def test_a_gloo_collective_on_a_worker_thread_meets_on_all_ranks_too(tmp_path):
    run = TinyRun()
    for rank, begin in ((0, 10), (1, 400)):
        run.step(0, 0, 700, rank)
        run.op("forward", 0, begin, rank)
        run.gloo((begin, begin + 20), (begin + 10, 600 + rank), rank)
        run.op("after", 601, 690, rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == 0
    late = seen.lasting("forward", 100, rank=1)
    assert [late.start("after", rank) for rank in (0, 1)] == [701, 701]
    assert any(what == f"communication thread {WORKER}" for _, what in seen.graph.lanes)


def test_collective_that_is_the_last_thing_its_caller_did_in_the_window_is_no_cycle(tmp_path):
    # The caller waits for it, and that is all there is: its call comes before that wait, not after.
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 100, rank)
        run.op("compute", 0, 90 + rank, rank)
        run.gloo((100, 110), (112, 300), rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert [seen.end("gloo:all_reduce", rank) for rank in (0, 1)] == [300, 300]
    assert seen.lasting("compute", 50, rank=1).end("gloo:all_reduce", 0) == 350


def test_collectives_of_one_worker_run_one_after_another(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 1000, rank)
        run.gloo((0, 10), (10, 300), rank)
        run.gloo((20, 30), (300, 500), rank)
        run.op("compute", 40, 900, rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    first, second = seen.nodes("gloo:all_reduce", 0)
    longer = seen.lasting("gloo:all_reduce", 50)
    moved = longer.timeline.end - seen.timeline.end
    assert (moved[first], moved[second]) == (50 * US, 50 * US)


def test_collective_rows_whose_span_was_not_recorded_leave_the_spans_alone(tmp_path: Path):
    # The flight recorder or NCCL itself may know of collectives that no deep window saw.
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 100, rank)
        run.op("first", 0, 40, rank)
        run.op("last", 40, 100, rank)
        run.rows["collectives"].append(
            {
                "collective_id": 1,
                "rank": rank,
                "window": 0,
                "op": "all_reduce",
                "sequence": 1,
                "start_ns": 50 * US,
                "duration_ns": 20 * US,
            }
        )
    graph = run.build(tmp_path / "r").graph
    work = [
        graph.names[name] for name, kind in zip(graph.nodes.name, graph.nodes.kind) if kind == NodeKind.CPU
    ]
    assert sorted(work) == ["first", "first", "last", "last"]


def test_the_lanes_of_a_part_keep_their_order(tmp_path):
    graph = two_ranks().build(tmp_path / "r").graph
    for lane in range(len(graph.lanes)):
        on_lane = np.flatnonzero((graph.nodes.lane == lane) & (graph.nodes.kind != NodeKind.ARRIVE))
        starts = graph.nodes.measured_start[on_lane]
        assert all(a <= b for a, b in pairwise(starts.tolist()))


def test_a_transfer_knows_what_it_moves_and_all_other_nodes_move_nothing(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        run.op("step", 0, 500, rank)
        called = {"group": "dp", "group_ranks": "0,1", "dtype": "float32"}
        run.gloo((10, 20), (20, 100), rank, bytes_in=64, bytes_out=64, **called)
        run.gloo((110, 120), (120, 200), rank, op="all_gather", bytes_in=8, bytes_out=16, **called)
        run.gloo((210, 220), (220, 300), rank, op="barrier")
    graph = run.build(tmp_path / "r").graph
    nodes, moves = graph.nodes, graph.nodes.kind == NodeKind.TRANSFER
    assert (nodes.bytes[~moves] == -1).all()
    assert (nodes.message[~moves] == -1).all()
    order = np.flatnonzero(moves & (nodes.rank == 0))
    assert nodes.bytes[order].tolist() == [64, 16, -1]
    moved_by = [graph.messages[message] for message in nodes.message[order]]
    assert [(each.op, each.num_ranks, each.dtype) for each in moved_by] == [
        ("all_reduce", 2, "float32"),
        ("all_gather", 2, "float32"),
        ("barrier", 2, ""),
    ]
    assert moved_by[0].group == moved_by[1].group


@pytest.mark.parametrize(("late", "waited"), [(20, True), (300, False)])
def test_a_caller_that_was_notified_before_the_worker_closed_its_range_was_waiting(tmp_path, late, waited):
    # The caller was idle for 970 us: it may have been notified 20 us before the range closed, but not 300.
    run = TinyRun()
    for rank in (0, 1):
        run.mark("dpro::backward", 0, 1500, rank)
        run.op("mm", 0, 20, rank)
        run.gloo((20, 30), (30, 1000 + late), rank, sequence=0)
        run.op("copy", 1000, 1400, rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.start("copy") == 1000
    slower = seen.lasting("gloo:all_reduce", 500, kind=NodeKind.TRANSFER).start("copy")
    assert slower == (1500 if waited else 1000)
