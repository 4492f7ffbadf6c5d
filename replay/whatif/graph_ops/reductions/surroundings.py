"""What is linked with the reductions of backward passes: what others call, what waits, which work is before.

In: how a graph reduces gradients. Out: `Surroundings` of each pass, worked out for the first edit that asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.kept import kept
from dpro.replay.models.gradients.passes import MAIN_THREAD, Launches, Pass
from dpro.replay.timeline import differs_from_last
from dpro.replay.whatif.graph_ops.reductions.recorded import GradientReductions


@dataclass(frozen=True)
class Surroundings:
    """What is linked with the reductions of a pass.

    Attributes:
        launch_lag, queue_lag, input_lag: usual lags ns of calls, of the worker, of GPU work before.
        before, after: [K] when other communication on the same workers was called, and its transfer or
            arrival, in this order; some of it may be between reductions of the pass.
        awaited: [W] where results are needed: of which recorded bucket, by which node and kind of edge.
        issued: [N] as of `_issued`.
        inputs: GPU work that gradients may come from, in the order of its launches on the thread.
        launched: ns of these launches.
        end: the last node of the step on the thread that drives the rank, -1 where none is known.
        are_bytes_known: whether each of its transfers says how many bytes it moves.
    """

    launch_lag: int
    queue_lag: int
    input_lag: int
    before: tuple[Ints, Ints]
    after: tuple[Ints, Ints]
    awaited: tuple[Ints, Ints, Ints]
    issued: Ints
    inputs: Ints
    launched: Ints
    end: int
    are_bytes_known: bool


def surroundings_of(known: GradientReductions) -> list[Surroundings]:
    """For each pass what is linked with its reductions."""
    graph = known.graph
    columns = (*graph.nodes.columns, *graph.edges.columns, graph.lanes, graph.messages, graph.run)
    records, found = {"Surroundings": Surroundings}, lambda: tuple(_surroundings_of(known))
    return list(kept(graph, "surroundings-of-reductions", columns, found, records))


def recorded_reductions(known: GradientReductions) -> Bools:
    """[N] the nodes of the recorded reductions of all passes, with their rendezvous."""
    nodes = known.graph.nodes
    gone = np.zeros(known.graph.num_nodes, np.bool_)
    for each in known.passes:
        gone[each.arrive] = gone[each.transfer] = True
    instances = np.unique(nodes.collective[np.concatenate([each.arrive for each in known.passes])])
    met = np.flatnonzero(nodes.kind == NodeKind.RENDEZVOUS)
    gone[met[np.isin(nodes.collective[met], instances)]] = True
    return gone


def _surroundings_of(known: GradientReductions) -> list[Surroundings]:
    graph = known.graph
    gone, issued, launched = recorded_reductions(known), _issued(graph), _LaunchedWork(graph)
    leaving = np.flatnonzero(gone[graph.edges.source] & ~gone[graph.edges.target])
    leaving = leaving[np.argsort(graph.edges.source[leaving], kind="stable")]
    ends = _ends_of_steps(graph)
    found = []
    for each in known.passes:
        source = graph.edges.source[leaving]
        bounds = zip(
            np.searchsorted(source, each.transfer), np.searchsorted(source, each.transfer, side="right")
        )
        mine = np.sort(np.concatenate([leaving[first:last] for first, last in bounds]))
        end = ends.get((each.rank, each.window, each.step), -1)
        found.append(_surroundings(graph, each, gone, mine, issued, launched, end))
    return found


def _issued(graph: Graph) -> Ints:
    """[N] ns as measured, when each node was issued: GPU work and communication by a thread, earlier."""
    nodes, edges, launches = graph.nodes, graph.edges, Launches(graph)
    issued = nodes.measured_start.copy()
    launch = edges.kind == EdgeKind.LAUNCH
    issued[edges.target[launch]] = nodes.measured_start[edges.source[launch]]
    moved = launches.transfer >= 0
    issued[launches.transfer[moved]] = issued[launches.arrive[moved]]
    return issued


def _ends_of_steps(graph: Graph) -> dict[tuple[int, int, int], int]:
    """By rank, window and step, the last node of the thread that drives the rank; the first of several."""
    nodes = graph.nodes
    drives = np.array([what == MAIN_THREAD for _, what in graph.lanes] + [False], np.bool_)
    mine = np.flatnonzero(drives[nodes.lane])
    if not mine.size:
        return {}
    starts, columns = nodes.measured_start[mine], (nodes.rank[mine], nodes.window[mine], nodes.step[mine])
    runs = np.flatnonzero(differs_from_last(*columns))  # nodes that follow each other are mostly of one step
    latest = np.maximum.reduceat(starts, runs)
    last = np.flatnonzero(starts == np.repeat(latest, np.diff(runs, append=mine.size)))
    last = last[np.lexsort((-last, starts[last]))]  # those that count come last
    places = zip(*(column[last].tolist() for column in columns))
    return dict(zip(places, mine[last].tolist()))


def _surroundings(
    graph: Graph, each: Pass, gone: Bools, leaving: Ints, issued: Ints, launched: _LaunchedWork, end: int
) -> Surroundings:
    """What is linked with the reductions of a pass.

    Args:
        gone: [N] reductions and rendezvous of all passes.
        leaving: edges from transfers of the pass to what is none of these.
        issued: [N] as of `_issued`.
    """
    nodes, edges = graph.nodes, graph.edges
    entering = graph.edges_into(each.arrive)
    of_kind = edges.kind[entering]
    by_call, by_stream, by_event = (
        entering[of_kind == kind] for kind in (EdgeKind.LAUNCH, EdgeKind.STREAM, EdgeKind.EVENT)
    )
    queued = edges.source[by_stream]
    source, target, kinds = edges.source[leaving], edges.target[leaving], edges.kind[leaving]
    called = int(max(nodes.measured_start[pieces].max() for pieces in each.calls))
    needed = (kinds == EdgeKind.SYNC) | (kinds == EdgeKind.EVENT)
    needed &= nodes.measured_start[target] >= called
    bucket, at = np.nonzero(needed & (source == each.transfer[:, None]))
    inputs, launches = launched.on_streams_of(edges.source[by_event], int(nodes.lane[each.ready[0]]))
    lags = (edges.lag[found].tolist() for found in (by_call, by_stream, by_event))
    launch_lag, queue_lag, input_lag = (round(median(own or [0])) for own in lags)
    return Surroundings(
        launch_lag,
        queue_lag,
        input_lag,
        _in_turn(queued[~gone[queued]], issued),
        _in_turn(target[kinds == EdgeKind.STREAM], issued),
        (bucket, target[at], kinds[at]),
        issued,
        inputs,
        launches,
        end,
        bool((nodes.bytes[each.transfer] > 0).all()),
    )


def _in_turn(nodes: Ints, issued: Ints) -> tuple[Ints, Ints]:
    """[K] when each node was issued, and the nodes, in this order."""
    nodes = nodes[np.lexsort((nodes, issued[nodes]))]
    return issued[nodes], nodes


class _LaunchedWork:
    """GPU work by the thread that launched it, in the order of the launches."""

    def __init__(self, graph: Graph) -> None:
        nodes, edges = graph.nodes, graph.edges
        launch = np.flatnonzero(edges.kind == EdgeKind.LAUNCH)
        thread, at = nodes.lane[edges.source[launch]], nodes.measured_start[edges.source[launch]]
        order = np.lexsort((at, thread))
        self._lane, self._thread, self._at = nodes.lane, thread[order], at[order]
        self._work = edges.target[launch][order]
        self._found: dict[tuple[int, ...], tuple[Ints, Ints]] = {}

    def on_streams_of(self, sources: Ints, thread: int) -> tuple[Ints, Ints]:
        """Work on the streams of some work that a thread launched, and when it did."""
        if sources.size == 0:
            return sources, sources
        streams = np.unique(self._lane[sources])
        place = (thread, *streams.tolist())
        if place not in self._found:
            first, last = np.searchsorted(self._thread, (thread, thread + 1))
            work, at = self._work[first:last], self._at[first:last]
            on_stream = np.isin(self._lane[work], streams)
            self._found[place] = work[on_stream], at[on_stream]
        return self._found[place]
