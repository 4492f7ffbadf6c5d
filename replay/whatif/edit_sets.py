"""Edits that a search tries, one by one and several together: what they can gain, and what they gain.

In: what a run shows. Out: candidates with bounds of their gains, gains by a plain replay, and predictions
with their intervals. Of condensed ranks, for which bounds are not known, all of it is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from dpro.arrays import Ints
from dpro.errors import Unanswerable
from dpro.replay.construction.progress import Progress, ignore
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph, GraphError
from dpro.replay.timeline import changed_durations, replay
from dpro.replay.whatif.edit import Edit, refuse_foreign
from dpro.replay.whatif.facts import RunFacts, facts_of
from dpro.replay.whatif.job import WHOLE_ONLY, ReplayedJob
from dpro.replay.whatif.predict import Prediction, Refusal, apply_all, compare, predict
from dpro.replay.whatif.registry import EDITS, all_kinds

MIN_GAIN = 0.002  # of the step: what cannot gain more is not worth an interval


class EditSets:
    """Gains and predictions of sets of edits.

    Attributes:
        facts: what the run shows.
        changed: graphs that single edits have made of its graph.
        least_after: what is left at least by a first edit and a second one on top of it, ns; and whether the
            graph of the second was known then.
        left: how many more sets of several edits may be tried.
        trust: of the replay.
    """

    compares_pairs = True  # pairs with each other, each by a replay

    def __init__(self, facts: RunFacts, trust: Trust, report: Progress = ignore) -> None:
        """Begin with nothing tried.

        Args:
            report: is called with how many were made, and how many there will be at most.
        """
        self.facts, self.trust, self.left = facts, trust, 0
        self.changed: dict[Edit, Graph] = {}
        self.least_after: dict[tuple[Edit, Edit, bool], float] = {}
        self._report, self._made = report, 0
        self._gains: dict[frozenset[Edit], float | None] = {}
        self._taken: dict[tuple[Edit, bool], float] = {}

    def bounds(self, kinds: Collection[type[Edit]]) -> tuple[dict[Edit, float], list[Refusal]]:
        """What edits propose, and the most that each can gain, ns of the mean step; what has nothing to."""
        edits, refused = candidates(self.facts, kinds)
        bounds, refusals = bounds_of(self.facts, edits)
        return bounds, refused + refusals

    def single_gains(self, edits: Sequence[Edit], left: int) -> tuple[dict[Edit, float], list[Refusal]]:
        """What each edit gains, ns of the time for a batch of today's size, and what the run cannot answer.

        Args:
            left: how many sets of several edits may be tried after that.
        """
        self.left = left
        gains, refused = self._single_gains(edits)
        self._gains |= {frozenset([edit]): gain for edit, gain in gains.items()}
        return gains, refused

    def _single_gains(self, edits: Sequence[Edit]) -> tuple[dict[Edit, float], list[Refusal]]:
        return replayed_gains(self.facts, edits, self.count, self.changed)

    def knows(self, edit: Edit) -> bool:
        """Whether it was tried by itself."""
        return frozenset([edit]) in self._gains

    def count(self) -> None:
        """Report one more."""
        self._made += 1
        self._report(self._made, self._made + max(self.left, 0))

    def together(self, edits: Iterable[Edit]) -> float | None:
        """What these gain together, ns of the time for a batch of today's size.

        None where one leaves nothing for another to change, or no budget is left.

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
        """What an edit takes from all durations, or from all lags, of the run's graph.

        Args:
            was: [K] ns as they are.
            then: [K] ns under the edit.
        """
        place = (edit, was is self.facts.graph.edges.lag)
        if place not in self._taken:
            self._taken[place] = float(np.maximum(was - then, 0).sum())
        return self._taken[place]

    def answer(self, edits: Iterable[Edit]) -> Prediction:
        """Predict these edits together.

        Args:
            edits: one or more, in any order.

        Raises:
            Unanswerable: one leaves nothing for another to change.
        """
        applied = apply_all(ReplayedJob(self.facts.graph, self.changed), in_order(edits))
        return compare(applied, self.facts.baseline, self.trust)


class PredictedSets(EditSets):
    """The same of a job by condensed ranks, of which a set is predicted at once.

    Edits that look at the graph of all ranks are refused. Those of the inside of ranks are proposed by the
    rank that most of the critical path runs over.
    """

    compares_pairs = False

    def __init__(self, job: ReplayedJob, facts: RunFacts, trust: Trust, report: Progress = ignore) -> None:
        """Begin with nothing tried.

        Args:
            facts: that the joined graph shows.
            report: as of `EditSets`.
        """
        super().__init__(facts, trust, report)
        self._job = job
        self._answers: dict[frozenset[Edit], Prediction] = {}

    def bounds(self, kinds: Collection[type[Edit]]) -> tuple[dict[Edit, float], list[Refusal]]:
        """As of `EditSets`; no bound is known."""
        graph, facts = self.facts.graph, self.facts
        rank = int(np.argmax(np.bincount(graph.nodes.rank + 1, facts.of_critical_path)[1:]))
        inside = facts_of(self._job.graph_of(rank, facts.timeline), suspects=facts.suspects)
        bounds, refused = dict[Edit, float](), list[Refusal]()
        for kind in kinds:
            if kind.acts_on == "job":
                refused.append(Refusal(kind.name, WHOLE_ONLY))
                continue
            edits, reasons = candidates(inside if kind.acts_on == "ranks" else facts, [kind])
            if not edits and not reasons:  # what compares ranks, one shows not
                edits, reasons = candidates(facts, [kind])
            bounds |= {edit: math.inf for edit in edits if edit.scope() != "job"}
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
        """As of `EditSets`, of edits whose gain is known."""
        return self._answers[frozenset(edits)]


def candidates(
    facts: RunFacts, kinds: Iterable[type[Edit]] | None = None
) -> tuple[list[Edit], list[Refusal]]:
    """What each kind of edit proposes for a run, and what has nothing to propose.

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
    """The most that each edit can gain, ns of the mean step, and what the run cannot answer."""
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
    """What each edit gains by a replay, ns of the time for a batch of today's size.

    Args:
        count: is called for each that was replayed or refused.
        changed_by: is given the changed graphs of those that gain, and of those that have the nodes of the
            unchanged one, if it is there.

    Returns:
        Gains, in the order of the edits, and what the run cannot answer.
    """
    graph, gains, refused = facts.graph, dict[Edit, float](), []
    for edit in edits:
        count()
        try:
            changed = edit.apply(graph)
        except (Unanswerable, GraphError) as error:  # one edit that fails is no reason to say nothing
            refused.append(Refusal(str(edit), str(error)))
            continue
        gains[edit] = gain_of(facts, changed, replay(changed).end, edit.samples(graph))
        kept = is_slim(graph, changed) or gains[edit] > MIN_GAIN * facts.base_ns
        if changed_by is not None and kept:
            changed_by[edit] = changed
    return gains, refused


def is_slim(graph: Graph, changed: Graph) -> bool:
    """Whether a changed graph shares its nodes with its origin: keeping it takes little memory."""
    return changed.has_nodes_of(graph)


def gain_of(facts: RunFacts, changed: Graph, end: Ints, samples: float) -> float:
    """What is saved of the time for a batch of today's size, by the replay of a changed graph.

    Args:
        end: [N] ns of its nodes.
    """
    steps = changed_durations(facts.baseline, changed, end)
    return facts.base_ns - float(steps.mean()) / samples


def goes_with(edit: Edit, taken: Iterable[Edit]) -> bool:
    """Whether an edit can be combined with others: not twice the same kind."""
    return all(type(edit) is not type(other) for other in taken)


def in_order(edits: Iterable[Edit]) -> list[Edit]:
    """In the order of the registry, so that a set of edits has one text."""
    order = {name: number for number, name in enumerate(EDITS)}
    return sorted(edits, key=lambda edit: (order[edit.name], str(edit)))
