"""Collectives by another algorithm, on four ranks of two hosts whose ring takes what a ring should."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.members import members_text
from dpro.replay.cost.transfers import fit_costs
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.edits.communication import Algorithm
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.registry import parse_edit
from tests.builders import US, TinyRun
from tests.ddp import ddp_job
from tests.edits import changed

ALPHA, BETA = 10.0, 0.002  # us of a message and of a byte
INSIDE = 0.0005  # us of a byte within a host
SIZES = (1_000, 10_000, 100_000, 1_000_000)


def four_ranks(folder: Path, *, hosts: bool = True, inside: bool = False, algorithm: str = "") -> Graph:
    """Four ranks reduce four sizes twice, by a ring; perhaps also pairs on one host do."""
    run = TinyRun()
    at, number = 100.0, 0
    jobs = [("all", [0, 1, 2, 3], 6 * ALPHA, 1.5 * BETA)]
    jobs += [("pair", pair, 0.0, INSIDE) for pair in ([0, 1], [2, 3]) if inside]
    for name, ranks, latency, per_byte in jobs:
        for size in (*SIZES, *SIZES):
            end = at + 20 + latency + per_byte * size
            facts = {"group": name, "group_ranks": members_text(ranks), "bytes_in": size, "bytes_out": size}
            for rank in ranks:
                run.gloo((at, at + 10), (at + 20, end), rank, sequence=number, algorithm=algorithm, **facts)
            at, number = end + 50, number + 1
    for rank in range(4):
        run.op("train", 0, at, rank)
        run.step(0, 0, at, rank)
        if hosts:
            run.worker(rank, f"host{rank // 2}")
    return run.build(folder / "run").graph


def times_us(graph: Graph, group: str = "all") -> list[float]:
    """Of the transfers of rank 0, one of each size."""
    nodes = graph.nodes
    of_group = np.array([message.group.startswith(group) for message in graph.messages] + [False])
    mine = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.rank == 0) & of_group[nodes.message])
    return (nodes.duration[mine] / US).tolist()[: len(SIZES)]


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Graph:
    return four_ranks(tmp_path_factory.mktemp("four"))


def test_a_tree_has_four_messages_where_a_ring_of_four_has_six(graph):
    expected = [4 * ALPHA + 2 * BETA * size for size in SIZES]
    assert times_us(changed(graph, "algorithm:to=tree")) == pytest.approx(expected, rel=0.01)


def test_halving_has_as_few_and_moves_no_more(graph):
    expected = [4 * ALPHA + 1.5 * BETA * size for size in SIZES]
    assert times_us(changed(graph, "algorithm:to=halving")) == pytest.approx(expected, rel=0.01)


def test_what_ran_changes_no_nanosecond(graph):
    assert (changed(graph, "algorithm:to=ring").nodes.duration == graph.nodes.duration).all()


def test_what_the_run_says_ran_counts_more_than_what_is_supposed(tmp_path):
    by_tree = four_ranks(tmp_path, algorithm="TREE")
    assert (changed(by_tree, "algorithm:to=tree").nodes.duration == by_tree.nodes.duration).all()
    ring = [6 * ALPHA * 6 / 4 + 1.5 * BETA * size * 1.5 / 2 for size in SIZES]
    assert times_us(changed(by_tree, "algorithm:to=ring")) == pytest.approx(ring, rel=0.01)


def test_hosts_first_saves_messages_between_them_and_bytes(graph):
    edit = "algorithm:to=hierarchical,inside_gbps=2,inside_us=1"
    within = [2 * 1 + 2 * 0.5 * INSIDE * size for size in SIZES]
    between = [2 * ALPHA + 2 * 0.5 * BETA * size for size in SIZES]
    expected = [sum(both) for both in zip(within, between)]
    assert times_us(changed(graph, edit)) == pytest.approx(expected, rel=0.01)


def test_a_group_within_a_host_shows_what_is_to_be_given_else(graph, tmp_path):
    both = four_ranks(tmp_path, inside=True)
    edit = parse_edit("algorithm:to=hierarchical")
    expected = times_us(changed(graph, "algorithm:to=hierarchical,inside_gbps=2"))
    assert times_us(edit.apply(both)) == pytest.approx(expected, rel=0.01)
    assert times_us(edit.apply(both), "pair") == times_us(both, "pair")
    assert all("all on one host" in note for note in edit.notes(both))
    with pytest.raises(Unanswerable, match="give inside_gbps="):
        edit.apply(graph)


def test_without_hosts_no_hierarchy_is_known(tmp_path):
    unknown = four_ranks(tmp_path, hosts=False)
    with pytest.raises(Unanswerable, match="the hosts of the ranks were not recorded"):
        changed(unknown, "algorithm:to=hierarchical,inside_gbps=2")


def test_a_group_that_is_not_in_the_run_is_refused(graph):
    with pytest.raises(Unanswerable, match="no group in the run fits 'tp'"):
        changed(graph, "algorithm:to=tree,group=tp")


def test_sizes_that_are_all_equal_do_not_show_what_a_message_costs(tmp_path):
    graph = ddp_job().build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match="too similar to separate the cost per message"):
        changed(graph, "algorithm:to=tree")


@pytest.mark.parametrize(
    ("num_transfers", "reason"),
    [(8, "may include waits for missing ranks"), (3, "too few transfers .*: record more steps")],
)
def test_of_one_rank_of_a_group_it_is_said_that_waiting_hides_the_cost(tmp_path, num_transfers, reason):
    run = TinyRun()
    for at in range(num_transfers):
        facts = {
            "group": "all",
            "group_ranks": "0-3",
            "bytes_in": SIZES[at % 4],
            "bytes_out": SIZES[at % 4],
        }
        run.gloo((100 * at, 100 * at + 10), (100 * at + 20, 100 * at + 90), 0, sequence=at, **facts)
    run.op("train", 0, 1000)
    run.step(0, 0, 1000)
    alone = run.build(tmp_path / "run").graph
    for edit in ("algorithm:to=tree", "data-parallel:ranks=8"):
        with pytest.raises(Unanswerable, match=reason):
            parse_edit(edit).apply(alone)


def protocols(**us_per_kb: float) -> pl.DataFrame:
    """A network table of all-reduces among 4 ranks: 10 us and so much per KB, by the protocol held to."""
    rows = [
        (2.0**power, 1e4 + each * 2**power, "" if name == "chosen" else name)
        for name, each in us_per_kb.items()
        for power in range(9, 22)
    ]
    frame = pl.DataFrame(rows, schema=["bytes", "time_ns", "protocol"], orient="row")
    words = {"op": "all_reduce", "device": "", "library": "", "version": "", "link": ""}
    return frame.with_columns(
        num_ranks=pl.lit(4), hosts=pl.lit(1), **{name: pl.lit(text) for name, text in words.items()}
    )


def test_a_protocol_takes_what_the_network_table_says_of_both(tmp_path):
    plain = four_ranks(tmp_path)
    graph = dataclasses.replace(plain, network=protocols(chosen=3.0, ll=9.0, simple=1.5))
    for proto, per_byte in (("ll", 9.0), ("simple", 1.5)):
        after = times_us(parse_edit(f"algorithm:proto={proto}").apply(graph))
        expected = [(1e4 + per_byte * size) / (1e4 + 3.0 * size) for size in SIZES]
        assert [one / other for one, other in zip(after, times_us(graph))] == pytest.approx(
            expected, rel=0.02
        )
    assert [str(each) for each in Algorithm.candidates(facts_of(graph))][-2:] == [
        "algorithm:proto=ll",
        "algorithm:proto=simple",
    ]
    assert parse_edit("algorithm:proto=ll128").how() == "NCCL_PROTO=LL128"


def test_a_protocol_that_no_table_has_is_refused(tmp_path):
    plain = four_ranks(tmp_path)
    for network in (None, protocols(chosen=3.0), protocols(ll=3.0), protocols(chosen=3.0).drop("protocol")):
        graph = dataclasses.replace(plain, network=network)
        with pytest.raises(Unanswerable, match="in no network table: give one with a column protocol"):
            parse_edit("algorithm:proto=ll").apply(graph)


def test_measurements_of_a_protocol_are_not_those_of_what_the_library_chooses(tmp_path):
    plain = four_ranks(tmp_path)
    held = dataclasses.replace(plain, network=protocols(chosen=3.0, ll=90.0))
    free = dataclasses.replace(plain, network=protocols(chosen=3.0))
    kind = next(iter(fit_costs(free)))
    assert fit_costs(held)[kind].time_ns(5e4) == fit_costs(free)[kind].time_ns(5e4)


@pytest.mark.parametrize("text", ["algorithm", "algorithm:to=tree,proto=ll", "algorithm:proto=ll64"])
def test_an_algorithm_or_a_protocol_is_asked_for(text):
    with pytest.raises(UsageError):
        parse_edit(text)
