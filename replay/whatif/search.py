"""Which edits are worth trying on a run: each for itself, and those that can be done together.

In: a graph, and the ranks that findings name. Out: predictions, what the run cannot answer, and what cannot
gain. Every edit there is names its candidates for this run. Those whose bound shows that they gain nothing
are not replayed. The others are replayed, and those that gain are predicted with their intervals, and ranked
by what they gain for certain.

The best pair of all is found by branch and bound (`together.py`), since two edits may save the same time, or
make room for each other. What gains most on top of a pair is taken with it, each time by a replay of all that
is taken so far. Nothing is random: the same run gives the same answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import polars as pl

from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph, GraphError
from dpro.replay.timeline import replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.heal import Heal
from dpro.replay.whatif.facts import RunFacts, facts_of
from dpro.replay.whatif.graph_ops.kept_tables import with_kept_tables
from dpro.replay.whatif.predict import Prediction, Refusal, ranked
from dpro.replay.whatif.registry import all_kinds
from dpro.replay.whatif.together import Tries, best_pair, gain_of, goes_with, in_order, is_slim
from dpro.units import format_duration, ms

MIN_GAIN = 0.002  # of the step: what cannot gain more is not worth an interval
MAX_TOGETHER = 4
MAX_PAIRED = 6  # of the best edits each two are compared with their sum
WORTH = 0.01  # of the step: what an edit has to save on top of those taken before
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
    found = explore(graph, trust, suspects=suspects)
    return found.predictions, found.refused


def explore(
    graph: Graph,
    trust: Trust,
    budget: int = BUDGET,
    report: Callable[[int, int], None] = lambda *_: None,
    suspects: Collection[int] = (),
    baseline: pl.DataFrame | None = None,
    kinds: Collection[type[Edit]] | None = None,
) -> SearchResult:
    """Predict every candidate that may gain, and the best of them together.

    Args:
        budget: how many replays of changed graphs to make at most.
        report: is called with how many were made, and how many there will be at most.
        baseline: `baseline_steps` of the graph, if it is at hand or not of all steps.
        kinds: the edits to consider; None for all.

    Raises:
        Unanswerable: there is no whole step.
    """
    facts = facts_of(with_kept_tables(graph), baseline, suspects)
    every, refused = candidates(facts, kinds)
    bounds, refusals = bounds_of(facts, every)
    refused += refusals
    promising = sorted(
        (edit for edit, bound in bounds.items() if bound > MIN_GAIN * facts.base_ns),
        key=lambda edit: -bounds[edit],
    )
    tried = promising[:budget]
    tries = Tries(facts, trust, budget - len(tried), report)
    gains, refusals = replayed_gains(facts, tried, tries.count, tries.changed)
    tries.keep(gains)
    refused += refusals
    at_most = [*bounds.items(), *gains.items()]
    little = [SmallGain(str(edit), ms(most)) for edit, most in at_most if most <= MIN_GAIN * facts.base_ns]
    worth = [edit for edit, gain in gains.items() if gain > MIN_GAIN * facts.base_ns]
    predictions = [tries.answer([edit]) for edit in worth]
    predictions = [each for each in predictions if not heals_the_healthy(each, facts.suspects)]
    predictions += _with_room(tries, [edit for edit in tried if edit not in gains], bounds)
    best = usable(predictions, facts.base_ns)
    advice = [edit for edit in bounds if edit.is_advice and (edit in gains or edit not in promising)]
    predictions += _together(tries, best, gains, advice)
    interactions = _interactions(tries, best, gains)
    untried = list(map(str, promising[budget:]))
    return SearchResult(ranked(predictions), once_each(refused), interactions, untried, little)


def candidates(
    facts: RunFacts, kinds: Collection[type[Edit]] | None = None
) -> tuple[list[Edit], list[Refusal]]:
    """What each edit there is proposes for a run, in the order of the registry, and what has nothing to.

    Args:
        kinds: the edits to consider; None for all.
    """
    found: list[Edit] = []
    refused = []
    for kind in all_kinds() if kinds is None else kinds:
        try:
            found += kind.candidates(facts)
        except (Unanswerable, GraphError) as error:
            refused.append(Refusal(kind.name, str(error)))
    return found, refused


def bounds_of(facts: RunFacts, edits: Iterable[Edit]) -> tuple[dict[Edit, float], list[Refusal]]:
    """The most that each edit can gain, ns of the mean step, and what the run cannot answer."""
    found, refused = dict[Edit, float](), []
    for edit in edits:
        try:
            found[edit] = edit.bound(facts)
        except (Unanswerable, GraphError) as error:
            refused.append(Refusal(str(edit), str(error)))
    return found, refused


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
    graph, found, refused = facts.graph, dict[Edit, float](), []
    for edit in edits:
        count()
        try:
            changed = edit.apply(graph)
        except (Unanswerable, GraphError) as error:  # one edit that fails is no reason to say nothing
            refused.append(Refusal(str(edit), str(error)))
            continue
        found[edit] = gain_of(facts, changed, replay(changed).end, edit.samples(graph))
        kept = is_slim(graph, changed) or found[edit] > MIN_GAIN * facts.base_ns
        if changed_by is not None and kept:
            changed_by[edit] = changed
    return found, refused


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
    return sorted(
        (each for each in ranked(singles) if each.is_advice and each.gain_ns >= WORTH * base_ns),
        key=lambda each: (each.effect != "faster", not each.proven, bool(each.training), -each.speedup),
    )


def _with_room(tries: Tries, refused: Iterable[Edit], every: Iterable[Edit]) -> list[Prediction]:
    """What edits gain that there is memory for only with others that free some; of each the best."""
    room = [edit for edit in every if edit.memory == "frees"]
    found = []
    for edit in refused:
        if edit.memory != "takes":
            continue
        ways = [(gain, other) for other in room if (gain := tries.together([edit, other])) is not None]
        most, best = max(ways, key=lambda way: way[0], default=(0.0, edit))
        if most > MIN_GAIN * tries.facts.base_ns:
            found.append(tries.answer([edit, best]))
    return found


def heals_the_healthy(prediction: Prediction, suspects: Collection[int]) -> bool:
    """Whether it heals a rank that no finding names, and the step as it is lies in its interval."""
    edit = prediction.edits[0]
    return isinstance(edit, Heal) and edit.at.rank not in suspects and prediction.effect != "faster"


def _interactions(tries: Tries, usable: list[Prediction], gains: Mapping[Edit, float]) -> list[Interaction]:
    """Of each two of the best those that do not save together what they do in sum."""
    found = []
    best = [each.edits[0] for each in _best_of_each(tries.facts, usable) if len(each.edits) == 1]
    for pair in combinations(best[:MAX_PAIRED], 2):
        both = tries.together(pair) if goes_with(tries.facts, pair[1], [pair[0]]) else None
        apart = gains[pair[0]] + gains[pair[1]]
        if both is not None and abs(both - apart) > INTERACT * tries.facts.base_ns:
            found.append(Interaction(list(map(str, pair)), ms(both), ms(apart)))
    return found


def _best_of_each(facts: RunFacts, usable: list[Prediction]) -> list[Prediction]:
    """Of several edits of one kind the best, of ranks as many as go together; what gains most first."""
    kept: list[Prediction] = []
    for single in sorted(usable, key=lambda each: -each.speedup):
        if goes_with(facts, single.edits[0], [each.edits[0] for each in kept]):
            kept.append(single)
    return kept


def _together(
    tries: Tries, usable: list[Prediction], gains: Mapping[Edit, float], advice: Collection[Edit]
) -> list[Prediction]:
    """What edits save together, one more at a time: all, those that leave the training as it is, proven ones.

    Args:
        usable: single edits in the order in which they are taken.
        advice: all that the best pair may be of, which edits may be that gain nothing by themselves.
    """
    ordered = [each.edits for each in usable]
    sets = _from_best_pair(tries, advice, ordered)
    if any(edit.training for edits in sets for edit in edits):
        same = [edit for edit in advice if not edit.training]
        sets += _from_best_pair(tries, same, [each.edits for each in usable if not each.training])
    proven = [each.edits for each in usable if each.proven]
    if proven and not (sets and all((edit,) in proven for edit in sets[0])):
        sets += _one_more(tries, list(proven[0]), proven[1:])
    found = []
    for edits in dict.fromkeys(map(tuple, sets)):
        answer = tries.answer(edits)
        apart = sum(gains.get(edit, 0.0) for edit in edits)
        note = (
            f"together they save {format_duration(answer.gain_ns)} per step; "
            f"apart, {format_duration(apart)} in sum"
        )
        found.append(dataclasses.replace(answer, notes=(note, *answer.notes)))
    return found


def _from_best_pair(
    tries: Tries, edits: Collection[Edit], ordered: Iterable[Sequence[Edit]]
) -> list[list[Edit]]:
    """The best two of some edits, and these with one more at a time; nothing where no two gain more than one.

    Args:
        edits: all that the pair may be of.
        ordered: what is taken with it, in order.
    """
    pair = best_pair(tries, edits)
    return _one_more(tries, in_order(pair), ordered) if pair else []


def _one_more(tries: Tries, first: list[Edit], others: Iterable[Sequence[Edit]]) -> list[list[Edit]]:
    """The first edits where they are several, and these with one more at a time that saves more."""
    taken, found = first, [first] if len(first) > 1 else []
    so_far = tries.together(taken)
    for edits in others:
        if len(taken) + len(edits) > MAX_TOGETHER or so_far is None:
            break
        if not all(edit not in taken and goes_with(tries.facts, edit, taken) for edit in edits):
            continue
        more = tries.together([*taken, *edits])
        if more is not None and more >= so_far + WORTH * tries.facts.base_ns:
            taken, so_far = in_order([*taken, *edits]), more
            found.append(taken)
    return found
