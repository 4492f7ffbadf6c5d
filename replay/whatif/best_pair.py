"""The best two edits together, without a replay of every pair.

In: sets of edits of which single ones were tried. Out: the two that gain most together.

The best two are found by branch and bound, best first (Land and Doig, An automatic method of solving discrete
programming problems, 1960). No pair gains more than both take from the critical path as it is, nor more than
what one gains and what the other can take from the critical path of the graph that the first one makes: there
an edit may gain much that gains nothing by itself. Bounds are worked out for a pair only as long as it may
still be the best, the cheap ones first, and what remains is replayed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from itertools import combinations

import numpy as np

from dpro.arrays import Ints
from dpro.errors import Unanswerable
from dpro.replay.engine import NO_NODE
from dpro.replay.graph import Graph, GraphError, once, with_own_known
from dpro.replay.timeline import changed_ends, replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edit_sets import EditSets, goes_with, in_order, is_slim
from dpro.replay.whatif.facts import RunFacts

NEAR = 0.002  # of the time that is left: a pair that may be better by no more is as good


def best_pair(sets: EditSets, edits: Collection[Edit]) -> frozenset[Edit]:
    """The two edits that gain most together; of those that gain as much within `NEAR` any.

    Returns:
        The pair, or nothing where none gains more than the best single edit.
    """
    limits, base_ns = _Limits(sets), sets.facts.base_ns
    queue = list[tuple[float, int, bool, list[Edit], frozenset[Edit]]]()
    for number, (one, other) in enumerate(combinations(edits, 2)):
        pair = frozenset([one, other])
        if goes_with(other, [one]) and (firsts := limits.firsts(pair)):
            queue.append((limits.least_ns(pair), number, all(map(sets.knows, pair)), firsts, pair))
    heapq.heapify(queue)
    best, left_ns = frozenset[Edit](), min((limits.left_ns(edit) for edit in edits), default=base_ns)
    while queue and queue[0][0] < left_ns * (1 - NEAR):
        least_ns, number, both_known, firsts, pair = heapq.heappop(queue)
        if firsts:
            least_ns = max(least_ns, limits.least_after_ns(firsts[0], pair))
            heapq.heappush(queue, (least_ns, number, both_known, firsts[1:], pair))
        elif any(sets.together([edit]) is None for edit in pair):
            continue  # the run cannot answer one of them
        elif not both_known:
            least_ns = max(least_ns, limits.least_ns(pair))
            heapq.heappush(queue, (least_ns, number, True, limits.firsts(pair), pair))
        elif (gain := sets.together(pair)) is not None and base_ns - gain < left_ns * (1 - NEAR):
            best, left_ns = pair, base_ns - gain
    return best


class _Limits:
    """What edits leave at least of the time for a batch of today's size."""

    def __init__(self, sets: EditSets) -> None:
        self._sets = sets
        self._after: dict[Edit, RunFacts] = {}
        self._taken: dict[tuple[Edit, bool], float] = {}

    def left_ns(self, edit: Edit) -> float:
        """What one that was replayed leaves; all where it was not."""
        gain = self._sets.together([edit]) if self._sets.knows(edit) else None
        return self._sets.facts.base_ns - (gain or 0.0)

    def firsts(self, pair: Collection[Edit]) -> list[Edit]:
        """Those of two whose graphs are at hand; first those after which bounds take least to work out."""
        before, changed = self._sets.facts.graph, self._sets.changed
        made = [edit for edit in pair if edit in changed]
        return sorted(
            made,
            key=lambda edit: (not is_slim(before, changed[edit]), self.left_ns(edit), str(edit)),
        )

    def least_ns(self, pair: Collection[Edit]) -> float:
        """What two leave at least, of themselves or by what both take from the critical path as it is."""
        facts = self._sets.facts
        one, other = pair
        on_path = sum(map(self._taken_ns, pair))
        try:
            most = min(on_path, one.bound_with(other, facts))
        except Unanswerable:
            most = on_path
        return max(facts.base_ns - most, 0.0)

    def _taken_ns(self, edit: Edit) -> float:
        """What an edit takes from the critical path as it is, as far as its graph is at hand."""
        place = (edit, edit in self._sets.changed)
        if place not in self._taken:
            self._taken[place] = taken(self._sets, self._sets.facts, edit)[0]
        return self._taken[place]

    def least_after_ns(self, first: Edit, pair: frozenset[Edit]) -> float:
        """What two leave at least by what the second can take from the critical path under the first."""
        (second,) = pair - {first}
        place = (first, second, second in self._sets.changed)
        if place not in self._sets.least_after:
            self._sets.least_after[place] = self._least_on_top_ns(first, second)
        return self._sets.least_after[place]

    def _least_on_top_ns(self, first: Edit, second: Edit) -> float:
        """As `least_after_ns`, worked out."""
        before = self._sets.facts
        if first not in self._after:
            self._after[first] = _facts_after(before, self._sets.changed[first])
        after = self._after[first]
        samples = first.samples(before.graph)
        can, is_known = taken(self._sets, after, second, samples)
        if not is_known:
            try:
                can = min(can, second.bound_on_top(before, after))
            except (Unanswerable, GraphError):
                return math.inf if in_order([first, second])[0] is first else 0.0
        return (after.base_ns - max(can, 0.0)) / samples


def _facts_after(facts: RunFacts, changed: Graph) -> RunFacts:
    """What a changed graph shows, its windows counted from where those of the unchanged one begin."""
    timeline = replay(with_own_known(changed))
    baseline = changed_ends(facts.baseline, changed, timeline.end)
    return RunFacts(timeline.graph, timeline, baseline, facts.suspects)


def taken(sets: EditSets, facts: RunFacts, edit: Edit, samples: float = 1.0) -> tuple[float, bool]:
    """What an edit can take from the critical path of a graph: what it took from the same work as it was.

    Of what takes longer by now it can take as large a part. What the run has not can go away, but in all no
    more than the edit took anywhere.

    Args:
        sets: has the graph that the edit makes of the run's.
        facts: of the run, or of a graph that another edit made of the run's.
        edit: one that leaves all dependencies and the batch; of others infinite.

    Returns:
        ns of the mean step, and whether the run has all of the path.
    """
    before, changed, now = sets.facts.graph, sets.changed.get(edit), facts.graph
    if changed is None or edit.samples(before) != 1 or not _keeps_dependencies(before, changed):
        return math.inf, False
    path, edges = facts.path, facts.timeline.binding[facts.path]
    edges = edges[edges != NO_NODE]
    columns = [(before.nodes.duration, changed.nodes.duration, now.nodes.duration[path])]
    origin = (path, before.nodes.measured_start)
    same = [once(now, "path as before", origin, lambda: _as_before(before, now, path))]
    if changed.edges.lag is not before.edges.lag:
        columns.append((before.edges.lag, changed.edges.lag, now.edges.lag[edges]))
        origin = (path, before.edges.source)
        same.append(once(now, "edges as before", origin, lambda: _edges_as_before(before, now, edges)))
    total = anywhere = 0.0
    has_all = all((place >= 0).all() for place in same)
    for (was, then, lasts), place in zip(columns, same):
        longer = np.maximum(lasts / np.maximum(was[place], 1), 1)  # by what it takes longer by now
        can = np.where(place >= 0, np.maximum(was[place] - then[place], 0) * longer, np.inf)
        total += float(np.minimum(can, np.maximum(lasts, 0)).sum())
        anywhere += total if has_all else samples * sets.taken_anywhere_ns(edit, was, then)
    return facts.per_step(min(total, anywhere)), has_all


def _keeps_dependencies(graph: Graph, changed: Graph) -> bool:
    """Whether a changed graph differs in durations and lags alone."""
    kept = changed.edges.source is graph.edges.source and changed.nodes.earliest is graph.nodes.earliest
    return kept and is_slim(graph, changed)


def _as_before(before: Graph, graph: Graph, nodes: Ints) -> Ints:
    """Which nodes of the unchanged graph some of another are, or are copies of; -1 for others."""
    if is_slim(before, graph):
        return nodes
    columns = (before.nodes.lane, before.nodes.kind, before.nodes.measured_start, before.nodes.measured_end)
    order, keys = once(before, "nodes by what they are", columns, lambda: _sorted(_what(*columns)))
    here = [getattr(graph.nodes, name)[nodes] for name in ("lane", "kind", "measured_start", "measured_end")]
    likely = order[np.searchsorted(keys, _what(*here)).clip(max=keys.size - 1)]
    equal = np.logical_and.reduce([now == was[likely] for now, was in zip(here, columns)])
    return np.where(equal, likely, -1)


def _what(lane: Ints, kind: Ints, start: Ints, end: Ints) -> Ints:
    """A number of each node that is hardly that of another: it may leave the range of int64."""
    return ((start * 1_000_003 + end) * 1_009 + lane) * 31 + kind


def _sorted(keys: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(keys, kind="stable")
    return order, keys[order]


def _edges_as_before(before: Graph, graph: Graph, edges: Ints) -> Ints:
    """The edges of the unchanged graph between the same nodes as some of another; -1 where there is none."""
    source, target, count = before.edges.source, before.edges.target, before.num_nodes
    if graph.edges.source is source:
        return edges
    keys = once(before, "ends of edges", (source, target), lambda: target * count + source)
    begins = _as_before(before, graph, graph.edges.source[edges])
    ends = _as_before(before, graph, graph.edges.target[edges])
    wanted = ends * count + begins
    likely = np.searchsorted(keys, wanted).clip(max=keys.size - 1)
    return np.where((keys[likely] == wanted) & (begins >= 0) & (ends >= 0), likely, -1)
