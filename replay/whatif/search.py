"""Search for edits worth making on a run: each by itself, and the best combinations.

Takes a graph, and the ranks that findings name; returns predictions, edits that the run cannot answer, and
edits that cannot gain. Every edit names its candidates for this run. Those whose bound shows no gain are not
replayed. The others are replayed, and those that gain are predicted with their intervals, and ranked by their
certain gain. With condensed ranks, for which bounds are not known, all candidates are predicted.

The best pair is found by branch and bound, best first (Land and Doig, An automatic method of solving discrete
programming problems, 1960), since two edits may save the same time, or make room for each other. No pair
gains more than both take from the critical path as it is, nor more than the gain of one plus what the other
can take from the critical path of the graph that the first one makes: there an edit may gain much that gains
nothing by itself. Bounds of a pair are computed only as long as it may still be the best, the cheap ones
first, and the remaining pairs are replayed.

A pair is extended by the edit that gains most on top of it, each time by a replay of the whole set. Nothing
is random: one run always gives one answer.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph, GraphError, computed_once, once, with_own_facts
from dpro.replay.timeline import changed_durations, changed_ends, replay
from dpro.replay.whatif.edit import Edit, refuse_foreign
from dpro.replay.whatif.edits.heal import Heal
from dpro.replay.whatif.facts import RunFacts, facts_of
from dpro.replay.whatif.job import WHOLE_ONLY, ReplayedJob, job_of
from dpro.replay.whatif.predict import Prediction, Refusal, apply_all, compare, predict, ranked
from dpro.replay.whatif.rankwise import RankwiseEdit
from dpro.replay.whatif.registry import EDITS, all_kinds
from dpro.stages import Progress, ignore
from dpro.units import format_duration, ms

MIN_GAIN = 0.002  # of the step: edits that cannot gain more get no interval


class EditSets:
    """Gains and predictions of sets of edits.

    Attributes:
        facts: of the run.
        changed: graphs that single edits have made of its graph.
        least_after: least time left by a first edit and a second one on top of it, ns; the key says whether
            the graph of the second was known then.
        left: number of further sets of several edits that may be tried.
        trust: of the replay.
    """

    compares_pairs = True  # whether pairs are compared with each other, each by a replay

    def __init__(self, facts: RunFacts, trust: Trust, report: Progress = ignore) -> None:
        """Begin with nothing tried.

        Args:
            report: called with the number of replays made, and their possible total.
        """
        self.facts, self.trust, self.left = facts, trust, 0
        self.changed: dict[Edit, Graph] = {}
        self.least_after: dict[tuple[Edit, Edit, bool], float] = {}
        self._report, self._made = report, 0
        self._gains: dict[frozenset[Edit], float | None] = {}
        self._taken: dict[tuple[Edit, bool], float] = {}

    def bounds(self, kinds: Collection[type[Edit]]) -> tuple[dict[Edit, float], list[Refusal]]:
        """Return candidates with upper bounds of their gain, ns of the mean step, and kinds without any."""
        edits, refused = candidates(self.facts, kinds)
        bounds, refusals = bounds_of(self.facts, edits)
        return bounds, refused + refusals

    def single_gains(self, edits: Sequence[Edit], left: int) -> tuple[dict[Edit, float], list[Refusal]]:
        """Return each edit's gain, ns of the time for a batch of today's size, and refusals.

        Args:
            left: number of sets of several edits that may be tried after that.
        """
        self.left = left
        gains, refused = self._single_gains(edits)
        self._gains |= {frozenset([edit]): gain for edit, gain in gains.items()}
        return gains, refused

    def _single_gains(self, edits: Sequence[Edit]) -> tuple[dict[Edit, float], list[Refusal]]:
        return replayed_gains(self.facts, edits, self.count, self.changed)

    def knows(self, edit: Edit) -> bool:
        """Return whether an edit was tried by itself."""
        return frozenset([edit]) in self._gains

    def count(self) -> None:
        """Report one more replay."""
        self._made += 1
        self._report(self._made, self._made + max(self.left, 0))

    def together(self, edits: Iterable[Edit]) -> float | None:
        """Return the gain of edits together, ns of the time for a batch of today's size.

        None where one leaves nothing for another to change, or the budget is used up.

        Args:
            edits: in any order.
        """
        chosen = frozenset(edits)
        if chosen not in self._gains:
            if self.left <= 0:
                return None
            self.left -= 1
            self.count()
            self._gains[chosen] = self._gain(in_order(chosen))
        return self._gains[chosen]

    def _gain(self, edits: Sequence[Edit]) -> float | None:
        changed, samples = self.facts.graph, 1.0
        try:
            for number, edit in enumerate(edits):
                samples *= edit.samples(changed)
                first = self.changed.get(edit) if number == 0 else None
                changed = edit.apply(changed) if first is None else first
        except (Unanswerable, GraphError):
            return None
        if len(edits) == 1 and is_slim(self.facts.graph, changed):
            self.changed[edits[0]] = changed
        return gain_of(self.facts, changed, replay(changed).end, samples)

    def taken_anywhere_ns(self, edit: Edit, was: Ints, then: Ints) -> float:
        """Return the sum of what an edit takes from all durations, or from all lags, of the run's graph.

        Args:
            was: [K] ns as they are.
            then: [K] ns under the edit.
        """
        place = (edit, was is self.facts.graph.edges.lag)
        if place not in self._taken:
            self._taken[place] = float(np.maximum(was - then, 0).sum())
        return self._taken[place]

    def answer(self, edits: Iterable[Edit]) -> Prediction:
        """Predict edits together.

        Args:
            edits: one or more, in any order.

        Raises:
            Unanswerable: one leaves nothing for another to change, or no step would take any time.
        """
        applied = apply_all(ReplayedJob(self.facts.graph, self.changed), in_order(edits))
        return compare(applied, self.facts.baseline, self.trust)


class PredictedSets(EditSets):
    """Gains and predictions of sets of edits in a job of condensed ranks, where a set is predicted at once.

    Edits that need the graph of all ranks are refused. The rank with most of the critical path proposes edits
    inside ranks.
    """

    compares_pairs = False

    def __init__(self, job: ReplayedJob, facts: RunFacts, trust: Trust, report: Progress = ignore) -> None:
        """Begin with nothing tried.

        Args:
            facts: of the joined graph.
            report: as in `EditSets`.
        """
        super().__init__(facts, trust, report)
        self._job = job
        self._answers: dict[frozenset[Edit], Prediction] = {}

    def bounds(self, kinds: Collection[type[Edit]]) -> tuple[dict[Edit, float], list[Refusal]]:
        """Return candidates with infinite bounds, since none is known, and refusals."""
        graph, facts = self.facts.graph, self.facts
        rank = int(np.argmax(np.bincount(graph.nodes.rank + 1, facts.of_critical_path)[1:]))
        inside = facts_of(self._job.graph_of(rank, facts.timeline), suspects=facts.suspects)
        bounds, refused = dict[Edit, float](), list[Refusal]()
        for kind in kinds:
            if kind.within_ranks is Edit.within_ranks:
                refused.append(Refusal(kind.name, WHOLE_ONLY))
                continue
            edits, reasons = candidates(inside if issubclass(kind, RankwiseEdit) else facts, [kind])
            if not edits and not reasons:  # one rank does not show what compares ranks
                edits, reasons = candidates(facts, [kind])
            bounds |= dict.fromkeys(edits, math.inf)
            refused += reasons
        return bounds, refused

    def _single_gains(self, edits: Sequence[Edit]) -> tuple[dict[Edit, float], list[Refusal]]:
        gains, refused = dict[Edit, float](), list[Refusal]()
        for edit in edits:
            self.count()
            try:
                gains[edit] = self._predicted([edit]).gain_ns
            except Unanswerable as error:
                refused.append(Refusal(str(edit), str(error)))
        return gains, refused

    def _gain(self, edits: Sequence[Edit]) -> float | None:
        try:
            return self._predicted(edits).gain_ns
        except Unanswerable:  # one leaves nothing for another to change
            return None

    def _predicted(self, edits: Sequence[Edit]) -> Prediction:
        answer = predict(self._job, self.facts.baseline, edits, self.trust)
        self._answers[frozenset(edits)] = answer
        return answer

    def answer(self, edits: Iterable[Edit]) -> Prediction:
        """Return the prediction of edits whose gain is known."""
        return self._answers[frozenset(edits)]


def candidates(
    facts: RunFacts, kinds: Iterable[type[Edit]] | None = None
) -> tuple[list[Edit], list[Refusal]]:
    """Return the candidates of each kind of edit for a run, and the kinds that have none, with reasons.

    Args:
        kinds: the edits to consider, all where None.
    """
    edits: list[Edit] = []
    refused = []
    for kind in all_kinds() if kinds is None else kinds:
        try:
            refuse_foreign(kind, facts.graph)
            edits += kind.candidates(facts)
        except (Unanswerable, GraphError) as error:
            refused.append(Refusal(kind.name, str(error)))
    return edits, refused


def bounds_of(facts: RunFacts, edits: Iterable[Edit]) -> tuple[dict[Edit, float], list[Refusal]]:
    """Return an upper bound of each edit's gain, ns of the mean step, and what the run cannot answer."""
    bounds, refused = dict[Edit, float](), []
    for edit in edits:
        try:
            bounds[edit] = edit.bound(facts)
        except (Unanswerable, GraphError) as error:
            refused.append(Refusal(str(edit), str(error)))
    return bounds, refused


def replayed_gains(
    facts: RunFacts,
    edits: Sequence[Edit],
    count: Callable[[], None] = lambda: None,
    changed_by: dict[Edit, Graph] | None = None,
) -> tuple[dict[Edit, float], list[Refusal]]:
    """Return the gain of each edit by a replay, ns of the time for a batch of today's size.

    Args:
        count: called for each edit that was replayed or refused.
        changed_by: where given, receives the changed graphs of edits that gain, and of those that keep the
            nodes of the unchanged graph.

    Returns:
        Gains, in the order of the edits, and what the run cannot answer.
    """
    graph, gains, refused = facts.graph, dict[Edit, float](), []
    for edit in edits:
        count()
        try:
            changed = edit.apply(graph)
        except (Unanswerable, GraphError) as error:  # one failing edit must not end the search
            refused.append(Refusal(str(edit), str(error)))
            continue
        gains[edit] = gain_of(facts, changed, replay(changed).end, edit.samples(graph))
        kept = is_slim(graph, changed) or gains[edit] > MIN_GAIN * facts.base_ns
        if changed_by is not None and kept:
            changed_by[edit] = changed
    return gains, refused


def is_slim(graph: Graph, changed: Graph) -> bool:
    """Return whether a changed graph shares its nodes with its origin: keeping it takes little memory."""
    return changed.has_nodes_of(graph)


def gain_of(facts: RunFacts, changed: Graph, end: Ints, samples: float) -> float:
    """Return the time saved for a batch of today's size, by the replay of a changed graph, ns.

    Args:
        end: [N] ns of its nodes.
    """
    steps = changed_durations(facts.baseline, changed, end)
    return facts.base_ns - float(steps.mean()) / samples


def can_combine(edit: Edit, taken: Iterable[Edit]) -> bool:
    """Return whether an edit can be combined with others: no kind occurs twice."""
    return all(type(edit) is not type(other) for other in taken)


def in_order(edits: Iterable[Edit]) -> list[Edit]:
    """Sort edits in the order of the registry, so that a set of edits has one text."""
    order = {name: number for number, name in enumerate(EDITS)}
    return sorted(edits, key=lambda edit: (order[edit.name], str(edit)))


EQUAL_SHARE = 0.002  # of the time that is left: a pair better by less counts as equal


def best_pair(sets: EditSets, edits: Collection[Edit]) -> frozenset[Edit]:
    """Find the two edits that gain most together; within `EQUAL_SHARE` of the best, any pair.

    Returns:
        The pair, or an empty set where none gains more than the best single edit.
    """
    limits, base_ns = _Limits(sets), sets.facts.base_ns
    queue = list[tuple[float, int, bool, list[Edit], frozenset[Edit]]]()
    for number, (one, other) in enumerate(combinations(edits, 2)):
        pair = frozenset([one, other])
        if can_combine(other, [one]) and (firsts := limits.firsts(pair)):
            queue.append((limits.least_ns(pair), number, all(map(sets.knows, pair)), firsts, pair))
    heapq.heapify(queue)
    best, left_ns = frozenset[Edit](), min((limits.left_ns(edit) for edit in edits), default=base_ns)
    while queue and queue[0][0] < left_ns * (1 - EQUAL_SHARE):
        least_ns, number, both_known, firsts, pair = heapq.heappop(queue)
        if firsts:
            least_ns = max(least_ns, limits.least_after_ns(firsts[0], pair))
            heapq.heappush(queue, (least_ns, number, both_known, firsts[1:], pair))
        elif any(sets.together([edit]) is None for edit in pair):
            continue  # the run cannot answer one of them
        elif not both_known:
            least_ns = max(least_ns, limits.least_ns(pair))
            heapq.heappush(queue, (least_ns, number, True, limits.firsts(pair), pair))
        elif (gain := sets.together(pair)) is not None and base_ns - gain < left_ns * (1 - EQUAL_SHARE):
            best, left_ns = pair, base_ns - gain
    return best


class _Limits:
    """Lower bounds of the time left by edits, for a batch of today's size."""

    def __init__(self, sets: EditSets) -> None:
        self._sets = sets
        self._after: dict[Edit, RunFacts] = {}
        self._taken: dict[tuple[Edit, bool], float] = {}

    def left_ns(self, edit: Edit) -> float:
        """Return the time left by an edit that was replayed; the whole step where it was not."""
        gain = self._sets.together([edit]) if self._sets.knows(edit) else None
        return self._sets.facts.base_ns - (gain or 0.0)

    def firsts(self, pair: Collection[Edit]) -> list[Edit]:
        """Return the edits of a pair whose graphs are known; first those after which bounds are cheapest."""
        before, changed = self._sets.facts.graph, self._sets.changed
        made = [edit for edit in pair if edit in changed]
        return sorted(
            made,
            key=lambda edit: (not is_slim(before, changed[edit]), self.left_ns(edit), str(edit)),
        )

    def least_ns(self, pair: Collection[Edit]) -> float:
        """Return a lower bound of what two edits leave, by joint bound and present critical path."""
        facts = self._sets.facts
        one, other = pair
        on_path = sum(map(self._taken_ns, pair))
        try:
            most = min(on_path, one.bound_with(other, facts))
        except Unanswerable:
            most = on_path
        return max(facts.base_ns - most, 0.0)

    def _taken_ns(self, edit: Edit) -> float:
        """Return ns that an edit takes off the present critical path; infinite while its graph is unknown."""
        place = (edit, edit in self._sets.changed)
        if place not in self._taken:
            self._taken[place] = taken(self._sets, self._sets.facts, edit)[0]
        return self._taken[place]

    def least_after_ns(self, first: Edit, pair: frozenset[Edit]) -> float:
        """Return the least time left if the second edit shortens the critical path under the first."""
        (second,) = pair - {first}
        place = (first, second, second in self._sets.changed)
        if place not in self._sets.least_after:
            self._sets.least_after[place] = self._least_on_top_ns(first, second)
        return self._sets.least_after[place]

    def _least_on_top_ns(self, first: Edit, second: Edit) -> float:
        before = self._sets.facts
        if first not in self._after:
            changed = self._sets.changed[first]
            timeline = replay(with_own_facts(changed))
            baseline = changed_ends(before.baseline, changed, timeline.end)
            self._after[first] = RunFacts(timeline.graph, timeline, baseline, before.suspects)
        after = self._after[first]
        samples = first.samples(before.graph)
        can, is_known = taken(self._sets, after, second, samples)
        if not is_known:
            try:
                can = min(can, second.bound_on_top(before, after))
            except (Unanswerable, GraphError):
                return math.inf if in_order([first, second])[0] is first else 0.0
        return (after.base_ns - max(can, 0.0)) / samples


def taken(sets: EditSets, facts: RunFacts, edit: Edit, samples: float = 1.0) -> tuple[float, bool]:
    """Return an upper bound of what an edit takes from a critical path, by what it took from the same work.

    Work that takes longer now can shrink in proportion. Work that the run lacks can disappear, but in total
    by no more than the edit took anywhere.

    Args:
        sets: has the graph that the edit makes of the run's.
        facts: of the run, or of a graph that another edit made of the run's.
        edit: infinite unless it keeps all dependencies and the batch.

    Returns:
        ns of the mean step, and whether the run has all of the path.
    """
    before, changed, now = sets.facts.graph, sets.changed.get(edit), facts.graph
    if changed is None or edit.samples(before) != 1 or not is_slim(before, changed):
        return math.inf, False
    if changed.edges.source is not before.edges.source or changed.nodes.earliest is not before.nodes.earliest:
        return math.inf, False
    path, edges = facts.path, facts.edges_of_path
    columns = [(before.nodes.duration, changed.nodes.duration, now.nodes.duration[path])]
    origin = (path, edges, before.nodes.measured_start, before.edges.source)
    same = [once(now, "path as before", lambda now: _original_nodes(before, now, path), origin)]
    if changed.edges.lag is not before.edges.lag:
        columns.append((before.edges.lag, changed.edges.lag, now.edges.lag[edges]))
        same.append(once(now, "edges as before", lambda now: _original_edges(before, now, edges), origin))
    total = anywhere = 0.0
    has_all = all((place >= 0).all() for place in same)
    for (was, then, lasts), place in zip(columns, same):
        longer = np.maximum(lasts / np.maximum(was[place], 1), 1)  # growth of its duration since
        can = np.where(place >= 0, np.maximum(was[place] - then[place], 0) * longer, np.inf)
        total += float(np.minimum(can, np.maximum(lasts, 0)).sum())
        anywhere += total if has_all else samples * sets.taken_anywhere_ns(edit, was, then)
    return facts.per_step(min(total, anywhere)), has_all


def _original_nodes(before: Graph, graph: Graph, nodes: Ints) -> Ints:
    """Return the nodes of the unchanged graph that nodes of another are, or are copies of; -1 for others."""
    if is_slim(before, graph):
        return nodes
    order, keys = once(before, "nodes by what they are", lambda graph: _sorted(_node_keys(*_columns(graph))))
    here = [column[nodes] for column in _columns(graph)]
    likely = order[np.searchsorted(keys, _node_keys(*here)).clip(max=keys.size - 1)]
    equal = np.logical_and.reduce([now == was[likely] for now, was in zip(here, _columns(before))])
    return np.where(equal, likely, -1)


def _columns(graph: Graph) -> tuple[Ints, ...]:
    nodes = graph.nodes
    return nodes.lane, nodes.kind, nodes.measured_start, nodes.measured_end


def _node_keys(lane: Ints, kind: Ints, start: Ints, end: Ints) -> Ints:
    """Return a nearly unique key of each node; it may wrap around in int64."""
    return ((start * 1_000_003 + end) * 1_009 + lane) * 31 + kind


def _sorted(keys: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(keys, kind="stable")
    return order, keys[order]


def _original_edges(before: Graph, graph: Graph, edges: Ints) -> Ints:
    """Return the edges of the unchanged graph between the same nodes as edges of another; -1 without one."""
    count = before.num_nodes
    if graph.edges.source is before.edges.source:
        return edges
    keys = _ends_of_edges(before)
    begins = _original_nodes(before, graph, graph.edges.source[edges])
    ends = _original_nodes(before, graph, graph.edges.target[edges])
    wanted = ends * count + begins
    likely = np.searchsorted(keys, wanted).clip(max=keys.size - 1)
    return np.where((keys[likely] == wanted) & (begins >= 0) & (ends >= 0), likely, -1)


@computed_once
def _ends_of_edges(graph: Graph) -> Ints:
    """Return [E] a key of each edge."""
    return graph.edges.target * graph.num_nodes + graph.edges.source


MAX_TOGETHER = 4
MAX_PAIRED = 6  # best edits whose pairs are compared with the sum of their gains
MIN_ADDED_GAIN = 0.01  # of the step: saving required of an edit on top of those taken before
MIN_MARGINAL_GAIN = 0.05  # of the step: saving required of each edit on top of the others
MIN_INTERACTION = 0.01  # of the step: difference between a pair and its sum that is reported
BUDGET = 100  # replays


class Interaction(DocumentPart, frozen=True):
    """Two edits whose gains do not add up.

    Attributes:
        edits: the two.
        together_ms: saving per step of both together.
        apart_ms: sum of the savings of each by itself.
    """

    edits: list[str]
    together_ms: float
    apart_ms: float


class SmallGain(DocumentPart, frozen=True):
    """An edit that gains next to nothing, or makes the job slower.

    Attributes:
        edit: as `--edit` accepts it.
        at_most_ms: largest gain in the mean step, by a bound or by a replay.
    """

    edit: str
    at_most_ms: float


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        predictions: as `ranked`; healed ranks only where the gain exceeds noise, or a finding names the rank.
        refused: what the run cannot answer; of edits of one kind refused for one reason, only the first.
        interactions: pairs of the best edits whose gains do not add up.
        untried: edits beyond the budget.
        little: edits that gain next to nothing.
    """

    predictions: list[Prediction]
    refused: list[Refusal]
    interactions: list[Interaction]
    untried: list[str]
    little: list[SmallGain] = dataclasses.field(default_factory=list)


def explore(
    job: ReplayedJob | Graph,
    trust: Trust,
    budget: int = BUDGET,
    report: Progress = ignore,
    suspects: Collection[int] = (),
    baseline: pl.DataFrame | None = None,
    kinds: Collection[type[Edit]] | None = None,
) -> SearchResult:
    """Predict every candidate that may gain, and the best of them together.

    Args:
        budget: largest number of changed jobs to replay.
        report: called with the number of replays made, and their possible total.
        suspects: ranks that findings name as slow.
        baseline: `baseline_steps` of its graph, where known already or not of all steps.
        kinds: the edits to consider; None for all.

    Raises:
        Unanswerable: there is no complete step.
    """
    job = job_of(job).with_kept_tables()
    # Facts found for edits take several times the memory of the graph: they are dropped after the search.
    job = dataclasses.replace(job, graph=with_own_facts(job.graph))
    facts = facts_of(job.graph, baseline, suspects)
    by_rank = job.by_rank
    sets = PredictedSets(job, facts, trust, report) if by_rank else EditSets(facts, trust, report)
    bounds, refused = sets.bounds(all_kinds() if kinds is None else kinds)
    least_ns = MIN_GAIN * facts.base_ns
    promising = sorted((edit for edit in bounds if bounds[edit] > least_ns), key=lambda edit: -bounds[edit])
    tried = promising[:budget]
    gains, refusals = sets.single_gains(tried, budget - len(tried))
    refused += refusals
    at_most = [*bounds.items(), *gains.items()]
    little = [SmallGain(str(edit), ms(most)) for edit, most in at_most if most <= least_ns]
    predictions = []
    for edit in (edit for edit, gain in gains.items() if gain > least_ns):
        try:
            predictions.append(sets.answer([edit]))
        except Unanswerable as error:
            refused.append(Refusal(str(edit), str(error)))
    predictions = [answer for answer in predictions if not heals_the_healthy(answer, facts.suspects)]
    predictions += _with_room(sets, [edit for edit in tried if edit not in gains], bounds)
    best = usable(predictions, facts.base_ns)
    advice = [edit for edit in bounds if edit.is_advice and (edit in gains or edit not in promising)]
    predictions += _combined(sets, best, gains, advice)
    interactions = _interactions(sets, best, gains)
    untried = list(map(str, promising[budget:]))
    return SearchResult(ranked(predictions), once_each(refused), interactions, untried, little)


def once_each(refused: Iterable[Refusal]) -> list[Refusal]:
    """Return, of edits of one kind refused for one reason, the first."""
    first: dict[tuple[str, str], Refusal] = {}
    for refusal in refused:
        first.setdefault((refusal.edit.partition(":")[0], refusal.reason), refusal)
    return list(first.values())


def usable(singles: list[Prediction], base_ns: float) -> list[Prediction]:
    """Return the predictions that are advice and save enough, in the order in which they are combined.

    First what is certainly faster, then proven, then without effect on the training, then by gain.
    """
    advice = [
        single
        for single in ranked(singles)
        if single.is_advice and single.gain_ns >= MIN_ADDED_GAIN * base_ns
    ]

    def place(single: Prediction) -> tuple[bool, bool, bool, float]:
        return single.effect != "faster", not single.proven, bool(single.training), -single.speedup

    return sorted(advice, key=place)


def _with_room(sets: EditSets, refused: Iterable[Edit], every: Iterable[Edit]) -> list[Prediction]:
    """Predict edits for which only others free enough memory, each with the best of those."""
    room = [edit for edit in every if edit.memory == "frees"]
    answers = []
    for edit in refused:
        if edit.memory != "takes":
            continue
        ways = [(gain, other) for other in room if (gain := sets.together([edit, other])) is not None]
        most, best = max(ways, key=lambda way: way[0], default=(0.0, edit))
        if most > MIN_GAIN * sets.facts.base_ns:
            with suppress(Unanswerable):  # they leave nothing that takes time
                answers.append(sets.answer([edit, best]))
    return answers


def heals_the_healthy(prediction: Prediction, suspects: Collection[int]) -> bool:
    """Return whether it heals a rank that no finding names, without a certain gain."""
    edit = prediction.edits[0]
    return isinstance(edit, Heal) and edit.place.rank not in suspects and prediction.effect != "faster"


def _interactions(sets: EditSets, usable: list[Prediction], gains: Mapping[Edit, float]) -> list[Interaction]:
    """Return pairs of the best edits whose joint saving differs from the sum of their savings."""
    if not sets.compares_pairs:
        return []
    of_kinds: list[Prediction] = []  # the best of each kind, by gain
    for single in sorted(usable, key=lambda other: -other.speedup):
        if can_combine(single.edits[0], [other.edits[0] for other in of_kinds]):
            of_kinds.append(single)
    interactions = []
    best = [single.edits[0] for single in of_kinds if len(single.edits) == 1]
    for pair in combinations(best[:MAX_PAIRED], 2):
        together_ns = sets.together(pair) if can_combine(pair[1], [pair[0]]) else None
        apart_ns = gains[pair[0]] + gains[pair[1]]
        if together_ns is not None and abs(together_ns - apart_ns) > MIN_INTERACTION * sets.facts.base_ns:
            interactions.append(Interaction(list(map(str, pair)), ms(together_ns), ms(apart_ns)))
    return interactions


def _combined(
    sets: EditSets, usable: list[Prediction], gains: Mapping[Edit, float], advice: Collection[Edit]
) -> list[Prediction]:
    """Predict growing sets of edits: of all, of those without effect on the training, and of proven ones.

    Args:
        usable: single edits in the order in which they are combined.
        advice: candidates of the best pair, including edits that gain nothing by themselves.
    """
    chosen = dict.fromkeys(map(tuple, _sets_together(sets, usable, advice)))
    answers = []
    for edits in (edits for edits in chosen if _each_adds(sets, edits)):
        try:
            answer = sets.answer(edits)
        except Unanswerable:  # they leave nothing that takes time
            continue
        apart_ns = sum(gains.get(edit, 0.0) for edit in edits)
        note = (
            f"together they save {format_duration(answer.gain_ns)} per step; "
            f"apart, {format_duration(apart_ns)} in sum"
        )
        answers.append(dataclasses.replace(answer, notes=(note, *answer.notes)))
    return answers


def _each_adds(sets: EditSets, edits: Sequence[Edit]) -> bool:
    """Return whether leaving out any of the edits would lose at least `MIN_MARGINAL_GAIN`."""
    all_ns = sets.together(edits) or 0.0
    fewer = [sets.together(set(edits) - {edit}) or 0.0 for edit in edits]
    return all_ns >= max(fewer) + MIN_MARGINAL_GAIN * sets.facts.base_ns


def _sets_together(sets: EditSets, usable: list[Prediction], advice: Collection[Edit]) -> list[list[Edit]]:
    """Return sets of edits, each with one more than the one before it; arguments as in `_combined`."""
    ordered = [single.edits for single in usable]
    if not sets.compares_pairs:
        return _extended_sets(sets, list(ordered[0]), ordered[1:]) if ordered else []
    chosen = _from_best_pair(sets, advice, ordered)
    if any(edit.training for edits in chosen for edit in edits):
        same = [edit for edit in advice if not edit.training]
        chosen += _from_best_pair(sets, same, [single.edits for single in usable if not single.training])
    proven = [single.edits for single in usable if single.proven]
    if proven and not (chosen and all((edit,) in proven for edit in chosen[0])):
        chosen += _extended_sets(sets, list(proven[0]), proven[1:])
    return chosen


def _from_best_pair(
    sets: EditSets, edits: Collection[Edit], ordered: Iterable[Sequence[Edit]]
) -> list[list[Edit]]:
    """Return the best pair, and its extensions by one edit at a time; nothing where no pair gains.

    Args:
        edits: candidates of the pair.
        ordered: candidates of the extensions, in order.
    """
    pair = best_pair(sets, edits)
    return _extended_sets(sets, in_order(pair), ordered) if pair else []


def _extended_sets(sets: EditSets, first: list[Edit], others: Iterable[Sequence[Edit]]) -> list[list[Edit]]:
    """Return `first` where it has several edits, and its extensions by one more edit that saves enough."""
    taken, chosen = first, [first] if len(first) > 1 else []
    so_far = sets.together(taken)
    for edits in others:
        if len(taken) + len(edits) > MAX_TOGETHER or so_far is None:
            break
        if not all(edit not in taken and can_combine(edit, taken) for edit in edits):
            continue
        more = sets.together([*taken, *edits])
        if more is not None and more >= so_far + MIN_ADDED_GAIN * sets.facts.base_ns:
            taken, so_far = in_order([*taken, *edits]), more
            chosen.append(taken)
    return chosen
