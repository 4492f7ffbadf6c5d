"""Ranks that are built and condensed one by one against the graph of the whole run: nothing may differ."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.opening import open_path
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.sharded import (
    JoinedGraph,
    build_rank,
    condense_rank,
    inside_of,
    join_skeletons,
    load_rank,
    match_run,
    path_through,
    pool,
    rank_file,
    with_pooled_lags,
)
from dpro.replay.timeline import critical_stretches, rank_step_times, replay, step_ends
from dpro.store import Run
from tests.builders import cpu_job
from tests.jobs import ROOT

# What a node of a rank is, whatever its number.
IDENTITY = ("rank", "window", "kind", "span", "collective", "measured_start", "measured_end", "step")
VALUES = ("duration", "earliest", "anchored", "phase", "bytes", "message")


def joined_of(run: Run, folder: Path) -> JoinedGraph:
    """All that a process is given or gives goes through pickle."""
    matched = match_run(run)
    facts = [
        pickle.loads(pickle.dumps(build_rank(*pickle.loads(pickle.dumps((run, matched.of(rank), folder))))))
        for rank in reversed(matched.ranks)
    ]
    pooled = pool(facts)
    with ThreadPoolExecutor(2) as executor:
        skeletons = list(executor.map(lambda rank: condense_rank(folder, pooled.of(rank)), matched.ranks))
    return join_skeletons(pickle.loads(pickle.dumps(skeletons)), matched, pooled, run)


def described(graph: Graph, rows: np.ndarray) -> pl.DataFrame:
    """Nodes by what they are, with their values, the names in words, and when they start."""
    timeline = replay(graph)
    columns = {name: getattr(graph.nodes, name)[rows] for name in (*IDENTITY, *VALUES)}
    names = [graph.names[code] for code in graph.nodes.name[rows].tolist()]
    lanes = [graph.lanes[lane] for lane in graph.nodes.lane[rows].tolist()]
    frame = pl.DataFrame(columns | {"start": timeline.start[rows]})
    frame = frame.with_columns(named=pl.Series(names), lane=pl.Series([str(lane) for lane in lanes]))
    return frame.sort(pl.all())


def assert_same_as_whole(run: Run, folder: Path) -> Graph:
    """The joined graph, once compared."""
    whole, joined = build_graph(run).graph, joined_of(run, folder)
    small = joined.graph
    assert small.num_nodes < whole.num_nodes
    transfers = [np.flatnonzero(graph.nodes.kind == NodeKind.TRANSFER) for graph in (whole, small)]
    shared = np.isin(whole.nodes.collective[transfers[0]],
                     whole.nodes.collective[whole.nodes.kind == NodeKind.RENDEZVOUS])  # fmt: skip
    one, other = described(whole, transfers[0][shared]), described(small, transfers[1])
    assert one.equals(other.join(one, on=IDENTITY, how="semi").sort(pl.all()))
    for steps in (step_ends, rank_step_times):
        expected = steps(whole, *_times(whole))
        assert expected.equals(steps(small, *_times(small)))
    assert not beside_rendezvous(small).any()
    assert small.origin_ns == whole.origin_ns
    assert small.messages == whole.messages
    return small


def beside_rendezvous(graph: Graph) -> np.ndarray:
    """[E] edges from an arrival to its own transfer, with a rendezvous between the two as well."""
    nodes, edges = graph.nodes, graph.edges
    met = nodes.collective[nodes.kind == NodeKind.RENDEZVOUS]
    own = (nodes.kind[edges.source] == NodeKind.ARRIVE) & (nodes.kind[edges.target] == NodeKind.TRANSFER)
    own &= nodes.collective[edges.source] == nodes.collective[edges.target]
    return own & np.isin(nodes.collective[edges.source], met) & (edges.lag <= 0)


def _times(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    timeline = replay(graph)
    return timeline.start, timeline.end


SAMPLES = sorted(path.parent.name for path in (ROOT / "sample_traces").glob("*/manifest.json"))


@pytest.mark.parametrize("sample", SAMPLES)
def test_ranks_built_and_condensed_alone_replay_as_the_whole_run(sample, tmp_path):
    small = assert_same_as_whole(open_path(ROOT / "sample_traces" / sample), tmp_path)
    if np.unique(small.nodes.rank[small.nodes.rank >= 0]).size > 1:
        assert (small.nodes.kind == NodeKind.RENDEZVOUS).any()


def test_the_nodes_of_a_rank_are_those_of_the_whole_graph(tmp_path):
    run = open_path(ROOT / "sample_traces" / "slow_rank")
    matched = match_run(run)
    pooled = pool([build_rank(run, matched.of(rank), tmp_path) for rank in matched.ranks])
    whole = build_graph(run).graph
    for rank in matched.ranks:
        graph = with_pooled_lags(load_rank(rank_file(tmp_path, rank)), pooled.of(rank))
        mine = np.flatnonzero(whole.nodes.rank == rank)
        one = described(whole, mine).drop("start")
        assert one.equals(described(graph, np.arange(graph.num_nodes)).drop("start"))


def test_the_critical_path_goes_on_over_the_rank_that_arrives_last(tmp_path):
    run = cpu_job(num_ranks=3, num_steps=2, slow_rank=1).write(tmp_path / "run")
    matched = match_run(run)
    pooled = pool([build_rank(run, matched.of(rank), tmp_path) for rank in matched.ranks])
    skeletons = [condense_rank(tmp_path, pooled.of(rank)) for rank in matched.ranks]
    joined = join_skeletons(skeletons, matched, pooled, run)
    timeline = replay(joined.graph)

    def built(rank):
        bare = load_rank(rank_file(tmp_path, rank))
        return bare, with_pooled_lags(bare, pooled.of(rank))

    stretches = list(critical_stretches(timeline, path_through(joined, timeline, inside_of(timeline, built))))
    ranks = [int(inner.graph.nodes.rank[path[0]]) for inner, path in stretches]
    assert ranks[:-1] == [1, 1]  # to its arrival in each step; then any rank, to the end
    times = [(inner.start[path[0]], inner.end[path[-1]]) for inner, path in stretches]
    assert times[0][0] == 0
    assert times[-1][1] == timeline.end.max()
    assert all(arrived == moves for (_, arrived), (moves, _) in pairwise(times))


@pytest.mark.slow
def test_real_jobs_replay_as_the_whole_run(traces, tmp_path):
    for folder in sorted(path for path in (traces / "multirank").iterdir() if path.is_dir()):
        assert_same_as_whole(open_path(folder), tmp_path / folder.name)
