"""Which rows of several ranks are one collective, on jobs written by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.replay.graph import NodeKind
from tests.builders import US, Seen, TinyRun
from tests.unit.replay.alignment.test_collectives import two_ranks


def _clipped(counts: tuple[int, ...], late: float = 0) -> TinyRun:
    """Ranks in one series of all-reduces; rank 0's window begins too late for the first ones."""
    run = TinyRun()
    total = max(counts)
    ends = np.cumsum([100 + 37 * (i % 5) + 11 * (i % 3) for i in range(total)])
    for rank, count in enumerate(counts):
        for index in range(total - count, total):
            end = float(ends[index]) + late * rank
            run.call(end - 95, end - 90, index, rank)
            run.nccl(end - 60 - 20 * rank, end + rank, index, rank)
    return run


def test_a_collective_that_one_rank_lacks_within_its_window_is_not_matched_and_not_outside(tmp_path):
    run = _clipped((10, 10))
    lost = [row for row in run.rows["collectives"] if row["rank"] == 0][4]
    lost["op"] = "all_gather"  # as good as lost: it is no counterpart of the other rank's
    matching = run.build(tmp_path / "r").matching
    assert matching.share_outside == 0
    assert matching.share_on_all_ranks == pytest.approx(9 / 11)  # of the two in question neither is matched


def test_what_the_fullest_rank_did_not_record_the_others_are_matched_on_all_the_same(tmp_path):
    # Rank 0 holds ten, and its window begins one later than those of ranks 1 and 2, which end two earlier.
    run = _clipped((11, 11, 11))
    kept = []
    for rank in range(3):
        own = [row for row in run.rows["collectives"] if row["rank"] == rank]
        kept += own[1:] if rank == 0 else own[:9]
    run.rows["collectives"] = kept
    matching = run.build(tmp_path / "r").matching
    members = matching.rows.group_by("instance").agg(pl.col("rank").sort()).sort("instance")["rank"].to_list()
    assert sorted(map(str, members)) == sorted(map(str, [[1, 2], *[[0, 1, 2]] * 8, [0], [0]]))
    assert matching.share_on_all_ranks == 1.0
    assert matching.share_outside == pytest.approx(3 / 11)


def test_a_collective_that_a_clipped_window_does_not_hold_stays_single(tmp_path):
    built = _clipped((8, 10)).build(tmp_path / "r")
    rows = built.matching.rows
    assert rows.filter(rows["rank"] == 0)["members"].to_list() == [2] * 8
    assert rows.filter(rows["rank"] == 1)["members"].to_list() == [1, 1] + [2] * 8
    assert built.matching.share_on_all_ranks == 1.0
    assert built.matching.share_outside == 0.2  # rank 0's window begins after the first two of ten
    assert (built.graph.nodes.kind == NodeKind.RENDEZVOUS).sum() == 8
    single = rows.filter(rows["members"] == 1)["instance"].to_list()
    transfer = built.graph.nodes.kind == NodeKind.TRANSFER
    lone = transfer & np.isin(built.graph.nodes.collective, single)
    # Nothing separates its waiting from its moving: it counts as moving.
    assert (built.graph.nodes.duration[lone] == 81 * US).all()


@pytest.mark.parametrize("late", [-5_000, 200, 50_000])
def test_matching_does_not_trust_clocks(tmp_path, late):
    run = _clipped((8, 10), late=late)
    for rank in (0, 1):
        run.worker(rank, f"host{rank}")
    built = run.build(tmp_path / "r")
    assert built.matching.rows.filter(built.matching.rows["rank"] == 0)["members"].to_list() == [2] * 8
    assert built.alignment.of(1).line.offset_ns == pytest.approx(late * US, abs=2 * US)


def test_ranks_of_one_host_share_a_clock_even_where_ends_differ(tmp_path):
    run = _clipped((10, 10), late=300)
    for rank in (0, 1):
        run.worker(rank, "node7")
    clock = run.build(tmp_path / "r").alignment.of(1)
    assert (clock.line.offset_ns, clock.line.uncertainty_ns, clock.source) == (0, 0, "same host")


def test_an_offset_from_a_single_collective_is_not_called_certain(tmp_path):
    run = two_ranks(end=(400, 900))
    offset = run.build(tmp_path / "r").alignment.of(1).line
    assert offset.offset_ns == 0 or offset.uncertainty_ns != 0


def test_a_late_rank_is_not_taken_for_a_late_clock(tmp_path):
    # Rank 1 always arrives 60 later, but all leave together.
    run = TinyRun()
    for rank in (0, 1):
        for index in range(6):
            end = 200 * (index + 1) + 13 * (index % 2)
            run.call(end - 100, end - 95, index, rank)
            run.nccl(end - 90 + 60 * rank, end, index, rank)
    assert run.build(tmp_path / "r").alignment.of(1).line.offset_ns == 0


def test_sequence_numbers_decide_where_they_are_known(tmp_path):
    # By the clocks rank 1's first would be rank 0's second.
    run = TinyRun()
    for rank, first in ((0, 0), (1, 400)):
        for number in range(3):
            begin = 400 * number + first
            run.call(begin, begin + 5, number, rank)
            run.nccl(begin + 10, begin + 100, number, rank, sequence=number, group="0", group_ranks="0,1")
    rows = run.build(tmp_path / "r").matching.rows
    instances = [rows.filter(rows["rank"] == rank)["instance"].to_list() for rank in (0, 1)]
    assert instances[0] == instances[1]
    assert len(set(instances[0])) == 3


def test_groups_are_matched_apart(tmp_path):
    run = TinyRun()
    for rank in range(4):
        group = rank // 2
        for number in range(2):
            begin = 300 * number
            run.call(begin, begin + 5, number, rank)
            facts = {"group": "tp", "group_ranks": f"{2 * group},{2 * group + 1}", "sequence": number}
            run.nccl(begin + 10 + 40 * rank, begin + 200 + 10 * group, number, rank, **facts)
    built = run.build(tmp_path / "r")
    assert (built.graph.nodes.kind == NodeKind.RENDEZVOUS).sum() == 4
    assert built.matching.rows["members"].to_list() == [2] * 8
    seen = Seen(built.graph)
    # Rank 3 is slow, at the cost of its own group only.
    late = seen.lasting("ncclDevKernel", 500, rank=3)
    assert late.timeline.end.max() > seen.timeline.end.max()
    assert late.end("ncclDevKernel", 0) == seen.end("ncclDevKernel", 0)


def test_sends_and_receives_pair_by_peer_and_in_order(tmp_path):
    # Rank 0 sends twice to rank 1 and once to rank 2; all on one stream.
    run = TinyRun()

    def part(op: str, rank: int, peer: int, begin: float, end: float, number: int) -> None:
        run.call(begin - 10, begin - 5, number, rank)
        run.nccl(begin, end, number, rank, op=op, peer=peer, group="pp", group_ranks="0-2")

    part("send", 0, 1, 20, 130, 1)
    part("send", 0, 2, 140, 170, 2)
    part("send", 0, 1, 180, 320, 3)
    part("recv", 1, 0, 100, 131, 1)
    part("recv", 1, 0, 300, 321, 2)
    part("recv", 2, 0, 15, 171, 1)
    built = run.build(tmp_path / "r")
    rows = built.matching.rows.sort("rank", "start_ns")
    by_rank = {
        rank: rows.filter(rows["rank"] == rank).select("op", "peer", "instance").rows() for rank in (0, 1, 2)
    }
    sent = {(peer, i): instance for i, (_, peer, instance) in enumerate(by_rank[0])}
    assert [instance for *_, instance in by_rank[1]] == [sent[1, 0], sent[1, 2]]
    assert [instance for *_, instance in by_rank[2]] == [sent[2, 1]]
    # The receiver was late: the send waited for it, and moved for 30 (its own end minus the later start).
    transfers = built.graph.nodes.kind == NodeKind.TRANSFER
    assert sorted(built.graph.nodes.duration[transfers] // US) == [20, 21, 30, 30, 31, 31]


def test_messages_pair_by_peer_and_order_where_each_process_counts_those_to_all_its_peers(tmp_path):
    # Rank 0 first sends to rank 2, so that its number 2 is rank 1's number 1, and so on.
    run = TinyRun()

    def part(op: str, rank: int, peer: int, begin: float, end: float, sequence: int) -> None:
        run.call(begin - 10, begin - 5, sequence, rank)
        facts = {"peer": peer, "group": "pp", "group_ranks": "0-2", "sequence": sequence}
        run.nccl(begin, end, sequence, rank, op=op, **facts)

    part("send", 0, 2, 20, 50, 1)
    part("recv", 2, 0, 20, 51, 1)
    ends = np.cumsum([130, 170, 150, 210, 140])
    for index, end in enumerate(ends.tolist()):
        part("send", 0, 1, end - 80, end, 2 + index)
        part("recv", 1, 0, end - 60, end + 1, 1 + index)
    rows = run.build(tmp_path / "r").matching.rows
    for sequence in range(1, 6):
        sent = rows.filter((rows["rank"] == 0) & (rows["sequence"] == sequence + 1))["instance"].item()
        received = rows.filter((rows["rank"] == 1) & (rows["sequence"] == sequence))["instance"].item()
        assert sent == received


def test_messages_whose_order_shows_nothing_pair_by_numbers_that_both_ends_hold(tmp_path):
    # At equal distances any shift fits; the second rank's window opened one message later.
    run = TinyRun()
    for rank, op, first in ((0, "send", 0), (1, "recv", 1)):
        for index in range(first, 6):
            run.call(100 * index, 100 * index + 5, index, rank)
            facts = {"peer": 1 - rank, "group": "pp", "group_ranks": "0,1", "sequence": index}
            run.nccl(100 * index + 10, 100 * index + 90, index, rank, op=op, **facts)
    built = run.build(tmp_path / "r")
    pairs = built.matching.rows.filter(built.matching.rows["members"] == 2)
    assert pairs.height == 10
    assert (pairs.group_by("instance").agg(pl.col("sequence").n_unique())["sequence"] == 1).all()


def test_batched_messages_of_unknown_peers_are_no_collective_of_the_whole_group(tmp_path):
    # Each of four stages exchanges with its neighbours in one batch, at times of its own.
    run = TinyRun()
    uneven = np.random.default_rng(2).integers(40, 400, (4, 8))
    for rank in range(4):
        for index, end in enumerate(np.cumsum(uneven[rank]).tolist()):
            run.call(end - 35, end - 30, index, rank)
            facts = {"group": "pp", "group_ranks": "0-3", "sequence": index}
            run.nccl(end - 20, end, index, rank, op="send_recv", **facts)
    matching = run.build(tmp_path / "r").matching
    assert matching.rows["members"].max() == 1
    assert len(matching.refused) == 3


def test_a_kernel_with_messages_to_several_peers_ends_when_the_last_of_them_has_come(tmp_path):
    # Rank 1 exchanges with ranks 0 and 2 in one kernel; it waits for the later of them, and they only for it.
    run = TinyRun()
    arrive, end = {0: 100, 1: 150, 2: 300}, {0: 201, 1: 351, 2: 350}
    for rank in range(3):
        run.step(0, 0, 500, rank)
        run.call(0, 10, 1, rank)
        run.call(10, 20, 2, rank)
        run.kernel("gemm", 20, arrive[rank], 1, rank)
        span = run.kernel("ncclDevKernel_SendRecv", arrive[rank], end[rank], 2, rank, stream=20)
        for peer in (rank - 1, rank + 1):
            if 0 <= peer <= 2:
                facts = {"peer": peer, "group": "pp", "group_ranks": "0-2"}
                run.member(span, "send", **facts)
                run.member(span, "recv", **facts)
    built = run.build(tmp_path / "r")
    assert (built.graph.nodes.kind == NodeKind.RENDEZVOUS).sum() == 4
    seen = Seen(built.graph)
    transfer = {rank: seen.nodes("ncclDevKernel_SendRecv", rank)[0] for rank in range(3)}
    moved = {rank: seen.timeline.end[node] // US for rank, node in transfer.items()}
    assert moved == end
    assert [built.graph.nodes.duration[node] // US for node in transfer.values()] == [51, 51, 50]
    late = seen.lasting("gemm", 60, rank=0)  # now at 160: later than rank 1, earlier than rank 2
    assert [late.timeline.end[node] // US for node in transfer.values()] == [211, 351, 350]
    later = seen.lasting("gemm", 260, rank=0)
    assert [later.timeline.end[node] // US for node in transfer.values()] == [411, 411, 350]


def test_parts_of_a_coalesced_call_share_its_number_and_are_matched_one_by_one(tmp_path):
    # By the clocks, rank 1's parts would belong to the call before.
    run = TinyRun()
    for rank, late in ((0, 0), (1, 600)):
        for sequence in range(3):
            for place in range(2):
                begin = 600 * sequence + 200 * place + late
                run.call(begin, begin + 5, 10 * sequence + place, rank)
                facts = {"sequence": sequence, "group": "0", "group_ranks": "0,1"}
                run.nccl(begin + 10, begin + 100 + 50 * place, 10 * sequence + place, rank, **facts)
    rows = run.build(tmp_path / "r").matching.rows.sort("rank", "start_ns")
    first, second = (rows.filter(rows["rank"] == rank)["instance"].to_list() for rank in (0, 1))
    assert first == second
    assert len(set(first)) == 6


def test_orders_that_fit_at_every_shift_are_refused_and_said_to_be(tmp_path):
    run = TinyRun()
    for rank, count in ((0, 6), (1, 9)):
        for index in range(count):
            run.call(100 * index, 100 * index + 5, index, rank)
            run.nccl(100 * index + 10, 100 * index + 90, index, rank)
    built = run.build(tmp_path / "r")
    assert built.matching.refused == (
        "window 0, a group without a name: the orders of ranks 1 and 0 cannot be matched",
    )
    assert set(built.matching.rows["members"]) == {1}


def test_different_operations_are_never_one_collective(tmp_path):
    run = TinyRun()
    for rank, ops in ((0, ["all_reduce", "broadcast"] * 3), (1, ["broadcast", "all_reduce"] * 3)):
        for index, op in enumerate(ops):
            end = 100 * (index + 1) + 17 * (index % 3)
            run.call(end - 95, end - 90, index, rank)
            run.nccl(end - 80, end, index, rank, op=op)
    rows = run.build(tmp_path / "r").matching.rows
    paired = rows.filter(rows["members"] > 1).group_by("instance").agg("op")
    assert all(len(set(ops)) == 1 for ops in paired["op"])
