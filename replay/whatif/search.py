"""Which edits are worth trying on a run: each for itself, and those that can be done together.

In: a graph, and the ranks that findings name. Out: predictions, what the run cannot answer, and what cannot
gain. Every edit there is names its candidates for this run. Those whose bound shows that they gain nothing
are not replayed. The others are replayed, and those that gain are predicted with their intervals, and ranked
by what they gain for certain.

The best pair of all is found by branch and bound (`best_pair.py`), since two edits may save the same time, or
make room for each other. What gains most on top of a pair is taken with it, each time by a replay of all that
is taken so far. Nothing is random: the same run gives the same answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import polars as pl

from dpro.documents import DocumentPart
from dpro.replay.construction.progress import Progress, ignore
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph
from dpro.replay.whatif.best_pair import best_pair
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edit_sets import MIN_GAIN, EditSets, PredictedSets, goes_with, in_order
from dpro.replay.whatif.edits.heal import Heal
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.job import ReplayedJob, job_of
from dpro.replay.whatif.predict import Prediction, Refusal, ranked
from dpro.replay.whatif.registry import all_kinds
from dpro.units import format_duration, ms

MAX_TOGETHER = 4
MAX_PAIRED = 6  # of the best edits each two are compared with their sum
WORTH = 0.01  # of the step: what an edit has to save on top of those taken before
ADDS = 0.05  # of the step: what each has to save on top of the others
INTERACT = 0.01  # of the step: by how much two together differ from their sum to be worth saying
BUDGET = 100  # replays


class Interaction(DocumentPart, frozen=True):
    """Two edits whose gains do not add up.

    Attributes:
        edits: the two.
        together_ms: what they save per step together.
        apart_ms: the sum of what each saves by itself.
    """

    edits: list[str]
    together_ms: float
    apart_ms: float


class SmallGain(DocumentPart, frozen=True):
    """An edit that gains next to nothing, or makes the job slower.

    Attributes:
        edit: as `--edit` accepts it.
        at_most_ms: what it gains at most of the mean step, by a bound or by a replay.
    """

    edit: str
    at_most_ms: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        predictions: as `ranked`; of ranks only those whose healing gains beyond noise, or that are named.
        refused: what the run cannot answer; of edits of one kind that are refused for one reason, the first.
        interactions: pairs of the best edits whose gains do not add up.
        untried: edits that the budget left no room for.
        little: edits that gain next to nothing.
    """

    predictions: list[Prediction]
    refused: list[Refusal]
    interactions: list[Interaction]
    untried: list[str]
    little: list[SmallGain] = dataclasses.field(default_factory=list)


def search(
    graph: Graph, trust: Trust, suspects: Collection[int] = ()
) -> tuple[list[Prediction], list[Refusal]]:
    """Predictions and refusals of `explore`."""
    result = explore(graph, trust, suspects=suspects)
    return result.predictions, result.refused


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
        job: or its whole graph.
        budget: how many changed jobs to replay at most.
        report: is called with how many were, and how many will be at most.
        baseline: `baseline_steps` of its graph, if it is at hand or not of all steps.
        kinds: the edits to consider; None for all.

    Raises:
        Unanswerable: there is no whole step.
    """
    job = job_of(job).with_kept_tables()
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
    predictions = [sets.answer([edit]) for edit, gain in gains.items() if gain > least_ns]
    predictions = [answer for answer in predictions if not heals_the_healthy(answer, facts.suspects)]
    predictions += _with_room(sets, [edit for edit in tried if edit not in gains], bounds)
    best = usable(predictions, facts.base_ns)
    advice = [edit for edit in bounds if edit.is_advice and (edit in gains or edit not in promising)]
    predictions += _together(sets, best, gains, advice)
    interactions = _interactions(sets, best, gains)
    untried = list(map(str, promising[budget:]))
    return SearchResult(ranked(predictions), once_each(refused), interactions, untried, little)


def once_each(refused: Iterable[Refusal]) -> list[Refusal]:
    """Of edits of one kind that are refused for one reason the first."""
    first: dict[tuple[str, str], Refusal] = {}
    for refusal in refused:
        first.setdefault((refusal.edit.partition(":")[0], refusal.reason), refusal)
    return list(first.values())


def usable(singles: list[Prediction], base_ns: float) -> list[Prediction]:
    """Those that can be done to a job, and save enough, in the order in which they are taken.

    What is faster beyond doubt, then what is proven, then what leaves the training as it is, then the gain.
    """
    advice = [single for single in ranked(singles) if single.is_advice and single.gain_ns >= WORTH * base_ns]

    def place(single: Prediction) -> tuple[bool, bool, bool, float]:
        return single.effect != "faster", not single.proven, bool(single.training), -single.speedup

    return sorted(advice, key=place)


def _with_room(sets: EditSets, refused: Iterable[Edit], every: Iterable[Edit]) -> list[Prediction]:
    """What edits gain that there is memory for only with others that free some; of each the best."""
    room = [edit for edit in every if edit.memory == "frees"]
    answers = []
    for edit in refused:
        if edit.memory != "takes":
            continue
        ways = [(gain, other) for other in room if (gain := sets.together([edit, other])) is not None]
        most, best = max(ways, key=lambda way: way[0], default=(0.0, edit))
        if most > MIN_GAIN * sets.facts.base_ns:
            answers.append(sets.answer([edit, best]))
    return answers


def heals_the_healthy(prediction: Prediction, suspects: Collection[int]) -> bool:
    """Whether it heals a rank that no finding names, and the step as it is lies in its interval."""
    edit = prediction.edits[0]
    return isinstance(edit, Heal) and edit.place.rank not in suspects and prediction.effect != "faster"


def _interactions(sets: EditSets, usable: list[Prediction], gains: Mapping[Edit, float]) -> list[Interaction]:
    """Of each two of the best those that do not save together what they do in sum."""
    if not sets.compares_pairs:
        return []
    interactions = []
    best = [single.edits[0] for single in _best_of_each(usable) if len(single.edits) == 1]
    for pair in combinations(best[:MAX_PAIRED], 2):
        together_ns = sets.together(pair) if goes_with(pair[1], [pair[0]]) else None
        apart_ns = gains[pair[0]] + gains[pair[1]]
        if together_ns is not None and abs(together_ns - apart_ns) > INTERACT * sets.facts.base_ns:
            interactions.append(Interaction(list(map(str, pair)), ms(together_ns), ms(apart_ns)))
    return interactions


def _best_of_each(usable: list[Prediction]) -> list[Prediction]:
    """Of several edits of one kind the best; what gains most first."""
    kept: list[Prediction] = []
    for single in sorted(usable, key=lambda other: -other.speedup):
        if goes_with(single.edits[0], [other.edits[0] for other in kept]):
            kept.append(single)
    return kept


def _together(
    sets: EditSets, usable: list[Prediction], gains: Mapping[Edit, float], advice: Collection[Edit]
) -> list[Prediction]:
    """What edits save together, one more at a time: all, those that leave the training as it is, proven ones.

    Args:
        usable: single edits in the order in which they are taken.
        advice: all that the best pair may be of, which edits may be that gain nothing by themselves.
    """
    chosen = dict.fromkeys(map(tuple, _sets_together(sets, usable, advice)))
    answers = []
    for edits in (edits for edits in chosen if _each_adds(sets, edits)):
        answer = sets.answer(edits)
        apart_ns = sum(gains.get(edit, 0.0) for edit in edits)
        note = (
            f"together they save {format_duration(answer.gain_ns)} per step; "
            f"apart, {format_duration(apart_ns)} in sum"
        )
        answers.append(dataclasses.replace(answer, notes=(note, *answer.notes)))
    return answers


def _each_adds(sets: EditSets, edits: Sequence[Edit]) -> bool:
    """Whether none of some edits can be left out without losing `ADDS`."""
    all_ns = sets.together(edits) or 0.0
    fewer = [sets.together(set(edits) - {edit}) or 0.0 for edit in edits]
    return all_ns >= max(fewer) + ADDS * sets.facts.base_ns


def _sets_together(sets: EditSets, usable: list[Prediction], advice: Collection[Edit]) -> list[list[Edit]]:
    """Sets of edits, each with one more than that before it; as of `_together`."""
    ordered = [single.edits for single in usable]
    if not sets.compares_pairs:
        return _one_more(sets, list(ordered[0]), ordered[1:]) if ordered else []
    chosen = _from_best_pair(sets, advice, ordered)
    if any(edit.training for edits in chosen for edit in edits):
        same = [edit for edit in advice if not edit.training]
        chosen += _from_best_pair(sets, same, [single.edits for single in usable if not single.training])
    proven = [single.edits for single in usable if single.proven]
    if proven and not (chosen and all((edit,) in proven for edit in chosen[0])):
        chosen += _one_more(sets, list(proven[0]), proven[1:])
    return chosen


def _from_best_pair(
    sets: EditSets, edits: Collection[Edit], ordered: Iterable[Sequence[Edit]]
) -> list[list[Edit]]:
    """The best two of some edits, and these with one more at a time; nothing where no two gain more than one.

    Args:
        edits: all that the pair may be of.
        ordered: what is taken with it, in order.
    """
    pair = best_pair(sets, edits)
    return _one_more(sets, in_order(pair), ordered) if pair else []


def _one_more(sets: EditSets, first: list[Edit], others: Iterable[Sequence[Edit]]) -> list[list[Edit]]:
    """The first edits where they are several, and these with one more at a time that saves more."""
    taken, chosen = first, [first] if len(first) > 1 else []
    so_far = sets.together(taken)
    for edits in others:
        if len(taken) + len(edits) > MAX_TOGETHER or so_far is None:
            break
        if not all(edit not in taken and goes_with(edit, taken) for edit in edits):
            continue
        more = sets.together([*taken, *edits])
        if more is not None and more >= so_far + WORTH * sets.facts.base_ns:
            taken, so_far = in_order([*taken, *edits]), more
            chosen.append(taken)
    return chosen
