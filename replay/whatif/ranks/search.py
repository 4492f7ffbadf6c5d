"""Which edits are worth trying on condensed ranks: each for itself, and the best of them together.

In: a condensed job. Out: what `dpro.replay.whatif.search.explore` finds in a whole graph, with these
differences: edits that look at the graph of all ranks at once are refused; those of the inside of ranks are
proposed by one rank, over which most of the critical path runs; no bound spares a prediction; and what goes
together is found by taking the next best with those taken so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts, facts_of
from dpro.replay.whatif.predict import Prediction, Refusal, predict, ranked
from dpro.replay.whatif.ranks.condensed import CondensedJob
from dpro.replay.whatif.ranks.rank import WHOLE_ONLY
from dpro.replay.whatif.registry import all_kinds
from dpro.replay.whatif.search import (
    BUDGET,
    MAX_TOGETHER,
    MIN_GAIN,
    WORTH,
    SearchResult,
    SmallGain,
    candidates,
    heals_the_healthy,
    once_each,
    usable,
)
from dpro.replay.whatif.together import in_order
from dpro.units import format_duration, ms

Predict = Callable[[Sequence[Edit]], Prediction]


def explore_by_rank(
    job: CondensedJob,
    trust: Trust,
    budget: int = BUDGET,
    report: Callable[[int, int], None] = lambda *_: None,
    suspects: Collection[int] = (),
    baseline: pl.DataFrame | None = None,
    kinds: Collection[type[Edit]] | None = None,
) -> SearchResult:
    """Predict every candidate of the edits that condensed ranks answer, and the best of them together.

    Args:
        budget: how many predictions to make at most.
        report: is called with how many were made, and how many there will be at most.
        baseline: `baseline_steps` of its joined graph, if at hand or not of all steps.
        kinds: the edits to consider, all where None.

    Raises:
        Unanswerable: there is no whole step.
    """
    facts = facts_of(job.graph, baseline, suspects)
    proposed, refused = _proposed(job, facts, all_kinds() if kinds is None else kinds)
    tried, found, little = proposed[:budget], list[Prediction](), list[SmallGain]()
    made = 0

    def predicted(edits: Sequence[Edit]) -> Prediction:
        nonlocal made
        made += 1
        report(made, min(budget, len(tried) + MAX_TOGETHER))
        return predict(job, facts.baseline, edits, trust)

    for edit in tried:
        try:
            answer = predicted([edit])
        except Unanswerable as error:
            refused.append(Refusal(str(edit), str(error)))
            continue
        if answer.gain_ns <= MIN_GAIN * facts.base_ns:
            little.append(SmallGain(str(edit), ms(answer.gain_ns)))
        elif not heals_the_healthy(answer, facts.suspects):
            found.append(answer)
    found += _together(predicted, usable(found, facts.base_ns), facts.base_ns, budget - len(tried))
    return SearchResult(ranked(found), once_each(refused), [], list(map(str, proposed[budget:])), little)


def _proposed(
    job: CondensedJob, facts: RunFacts, kinds: Collection[type[Edit]]
) -> tuple[list[Edit], list[Refusal]]:
    """What each edit proposes: those of the inside of ranks to one rank, all others to the joined graph."""
    rank = int(np.argmax(np.bincount(facts.graph.nodes.rank + 1, facts.of_critical_path)[1:]))
    inside = facts_of(job.graph_of(rank, facts.timeline), suspects=facts.suspects)
    found, refused = list[Edit](), list[Refusal]()
    for kind in kinds:
        if kind.acts_on == "job":
            refused.append(Refusal(kind.name, WHOLE_ONLY))
            continue
        edits, why = candidates(inside if kind.acts_on == "ranks" else facts, [kind])
        if not edits and not why:  # what compares ranks, one shows not
            edits, why = candidates(facts, [kind])
        found += [edit for edit in edits if edit.scope() != "job"]
        refused += why
    return found, refused


def _together(predict: Predict, singles: list[Prediction], base_ns: float, budget: int) -> list[Prediction]:
    """What edits save together, one more at a time, each that saves more with those taken before.

    Args:
        singles: single edits in the order in which they are taken.
        budget: how many predictions to make at most.
    """
    taken, so_far, found = list[Prediction](), 0.0, list[Prediction]()
    for each in singles:
        edits = [one.edits[0] for one in taken] + [each.edits[0]]
        if len({type(edit) for edit in edits}) < len(edits) or len(edits) > MAX_TOGETHER:
            continue
        if not taken:
            taken, so_far = [each], each.gain_ns
            continue
        if budget <= 0:
            break
        budget -= 1
        try:
            answer = predict(in_order(edits))
        except Unanswerable:  # one leaves nothing for another to change
            continue
        if answer.gain_ns >= so_far + WORTH * base_ns:
            taken, so_far = [*taken, each], answer.gain_ns
            apart = sum(one.gain_ns for one in taken)
            note = (
                f"together they save {format_duration(so_far)} per step; "
                f"apart, {format_duration(apart)} in sum"
            )
            found.append(dataclasses.replace(answer, notes=(note, *answer.notes)))
    return found
