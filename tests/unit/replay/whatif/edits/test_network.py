"""Another network, by hand: what depends on bytes and what does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from tests.builders import US, TinyRun

LATENCY_US, US_PER_KB = 40.0, 2.0
SIZES_KB = (1, 10, 100, 1000)


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Graph:
    """Two ranks reduce four sizes, twice each, that take 40 us and 2 us per KB."""
    run = TinyRun()
    at, number = 100.0, 0
    for _ in range(2):
        for size in SIZES_KB:
            end = at + 20 + LATENCY_US + US_PER_KB * size
            for rank in (0, 1):
                facts = {"bytes_in": 1000 * size, "bytes_out": 1000 * size}
                run.gloo((at, at + 10), (at + 20, end), rank, sequence=number, **facts)
            at, number = end + 50, number + 1
    for rank in (0, 1):
        run.op("train", 0, at, rank)
        run.step(0, 0, at, rank)
    folder = tmp_path_factory.mktemp("network") / "run"
    run.write(folder)
    return build_graph(open_run(folder)).graph


def _transfers_us(graph: Graph) -> list[float]:
    mine = np.flatnonzero((graph.nodes.kind == NodeKind.TRANSFER) & (graph.nodes.rank == 0))
    return (graph.nodes.duration[mine] / US).tolist()[: len(SIZES_KB)]


@pytest.mark.parametrize(("bandwidth", "latency"), [(1, 1), (4, 1), (1, 3), (2, 0), (0.5, 2)])
def test_bandwidth_changes_the_time_for_bytes_and_latency_the_rest(graph, bandwidth, latency):
    changed = parse_edit(f"network:bandwidth={bandwidth},latency={latency}").apply(graph)
    expected = [LATENCY_US * latency + US_PER_KB * size / bandwidth for size in SIZES_KB]
    assert _transfers_us(changed) == pytest.approx(expected, abs=0.1)


def test_a_longer_way_adds_to_each_transfer(graph):
    changed = parse_edit("delay:us=70").apply(graph)
    expected = [LATENCY_US + 70 + US_PER_KB * size for size in SIZES_KB]
    assert _transfers_us(changed) == pytest.approx(expected, abs=0.1)


def test_transfers_that_overlap_wait_for_a_longer_way_at_once(graph):
    """What lies on the way at the same time is late once, and not once each."""
    first, second = np.flatnonzero((graph.nodes.kind == NodeKind.TRANSFER) & (graph.nodes.rank == 0))[:2]
    draft = GraphEditor(graph)
    draft.link(int(first), int(second), EdgeKind.STREAM, lag=round(-5 * US))
    side_by_side = draft.finish()
    changed = parse_edit("delay:us=70").apply(side_by_side)
    apart = changed.edges.lag != side_by_side.edges.lag
    assert changed.edges.lag[apart].tolist() == [-75 * US]


def test_a_network_like_this_one_changes_nothing(graph):
    changed = parse_edit("network:bandwidth=1,latency=1").apply(graph)
    assert (changed.nodes.duration == graph.nodes.duration).all()
    assert (changed.edges.lag == graph.edges.lag).all()


@given(st.floats(0.1, 50), st.floats(0.1, 50))
def test_two_changes_of_bandwidth_are_one(graph, first, second):
    one_by_one = parse_edit(f"network:bandwidth={second}").apply(
        parse_edit(f"network:bandwidth={first}").apply(graph)
    )
    at_once = parse_edit(f"network:bandwidth={first * second}").apply(graph)
    assert _transfers_us(one_by_one) == pytest.approx(_transfers_us(at_once), rel=1e-3, abs=0.2)


def test_a_transfer_that_takes_less_than_the_latency_is_all_latency(graph, monkeypatch):
    most = np.full(graph.num_nodes, round(50 * US))
    monkeypatch.setattr("dpro.replay.whatif.edits.communication.latencies", lambda _: most)
    changed = parse_edit("network:bandwidth=2,latency=3").apply(graph)
    expected = [3 * (LATENCY_US + US_PER_KB), *(150 + (US_PER_KB * size - 10) / 2 for size in SIZES_KB[1:])]
    assert _transfers_us(changed) == pytest.approx(expected, abs=0.1)


def test_where_bytes_are_unknown_all_is_bandwidth(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        run.op("train", 0, 1000, rank)
        run.step(0, 0, 1000, rank)
        run.gloo((10, 20), (20, 120), rank)
    graph = run.build(tmp_path / "r").graph
    assert _transfers_us(parse_edit("network:bandwidth=4").apply(graph)) == [25]
