"""Which edits are worth trying on a run: each for itself, and those that can be done together.

In: a graph. Out: predictions, and what the run cannot answer. What is proven comes first, then what no pair
of recordings has shown, then bounds and suppositions; of each the largest gain. The search is greedy:
what saves most is taken, then what saves most on top of it, each time by a replay of all that is taken so
far, since two edits may save the same time, or make room for each other. Of the best, each two are tried
together first. Nothing is random: the same run gives the same answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph, GraphError, NodeKind
from dpro.replay.timeline import durations_of, replay, time_on_critical_path
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.gradients import Bucket
from dpro.replay.whatif.edits.heal import Heal, RanksAt
from dpro.replay.whatif.edits.selected_work import Scale
from dpro.replay.whatif.graph_ops.bucket_candidates import sizes_worth_replaying
from dpro.replay.whatif.graph_ops.reduction import reduced
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.replay.whatif.predict import Prediction, Refusal, baseline_steps, predict, ranked
from dpro.replay.whatif.registry import EDITS, parse_edit
from dpro.units import format_duration

# What can be done to a job without buying anything; several go together. Sizes of buckets come on top.
ACTIONS = (
    "hide-input",
    "no-sync:within=aten::item",
    "optimizer:impl=fused",
    "compile",
    "cuda-graph",
    "precision:dtype=bf16",
    "compress:to=bf16",
    "prefetch:ahead=1",
    "gc:every=100",
)
# What no change of the job alone can do: how much there is to gain.
BOUNDS = ("no-launch", "free-host", "network:bandwidth=2", "no-comm")
MAX_RANKS = 8  # that are healed one by one: those that decide most of the critical path
LARGEST_OPS = 4  # how many kernels (on a CPU job: operators) are tried at half their time
MAX_TOGETHER = 4
MAX_PAIRED = 5  # of the best edits each two are tried together
WORTH = 0.01  # of the step: what an edit has to save on top of those taken before
INTERACT = 0.01  # of the step: by how much two together differ from their sum to be worth saying
BUDGET = 100  # predictions


@dataclass(frozen=True)
class Interaction:
    """Two edits that save more or less together than each for itself.

    Attributes:
        edits: the two.
        together_ns, apart_ns: what they save per step together, and in sum.
    """

    edits: tuple[Edit, Edit]
    together_ns: float
    apart_ns: float


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        predictions: as `ranked`; of ranks only those whose healing gains beyond noise, or that are named.
        refused: what the run cannot answer; of edits of one kind that are refused for one reason, the first.
        interactions: pairs of the best edits whose gains do not add up.
        untried: edits that the budget left no room for.
    """

    predictions: list[Prediction]
    refused: list[Refusal]
    interactions: list[Interaction]
    untried: list[Edit]


def search(
    graph: Graph, trust: Trust, suspects: Collection[int] = ()
) -> tuple[list[Prediction], list[Refusal]]:
    """Predictions and refusals of `explore`.

    Args:
        graph: the unchanged graph.
        trust: how well its replay fits.
        suspects: ranks that findings name.
    """
    found = explore(graph, trust, suspects=suspects)
    return found.predictions, found.refused


def explore(
    graph: Graph,
    trust: Trust,
    budget: int = BUDGET,
    report: Callable[[int, int], None] = lambda *_: None,
    suspects: Collection[int] = (),
    baseline: pl.DataFrame | None = None,
) -> Found:
    """Predict every candidate, and the best of them together.

    Args:
        graph: the unchanged graph.
        trust: how well its replay fits.
        budget: how many predictions to make at most.
        report: is called with how many predictions were made, and how many there will be at most.
        suspects: ranks that findings name.
        baseline: `baseline_steps` of the graph, if it is at hand or not of all steps.

    Raises:
        Unanswerable: there is no whole step.
    """
    tries = _Tries(graph, trust, budget, report, baseline_steps(graph) if baseline is None else baseline)
    every = candidates(graph)
    tries.expected = len(every) + MAX_PAIRED * (MAX_PAIRED - 1) // 2 + MAX_TOGETHER
    predictions, refused = [], dict[tuple[str, str], Refusal]()
    for edit in every[:budget]:
        try:
            predictions.append(tries.predict([edit]))
        except (Unanswerable, GraphError) as error:  # one edit that fails is no reason to say nothing
            refused.setdefault((edit.name, str(error)), Refusal(str(edit), str(error)))
    predictions = [each for each in predictions if not _heals_the_healthy(each, suspects)]
    usable = _usable(tries, ranked(predictions))
    pairs, interactions = _pairs(tries, usable)
    predictions += _together(tries, usable, pairs)
    return Found(ranked(predictions), list(refused.values()), interactions, every[budget:])


class _Tries:
    """Predictions on one graph, counted.

    Attributes:
        base_ns: the mean step as it is.
        left: how many more there may be.
        expected: how many there will be at most, to be reported.
    """

    def __init__(
        self,
        graph: Graph,
        trust: Trust,
        budget: int,
        report: Callable[[int, int], None],
        baseline: pl.DataFrame,
    ) -> None:
        self._graph, self._trust, self._report = graph, trust, report
        self._baseline = baseline
        self.base_ns = float(durations_of(self._baseline)["duration_ns"].to_numpy().mean())
        self.left, self._made, self.expected = budget, 0, budget

    def predict(self, edits: Sequence[Edit]) -> Prediction:
        """Predict these edits together, and count it."""
        self.left -= 1
        self._made += 1
        self._report(self._made, min(self.expected, self._made + self.left))
        return predict(self._graph, self._baseline, edits, self._trust)

    def together(self, edits: Iterable[Edit]) -> Prediction | None:
        """One of several edits; None where one leaves nothing for another to change, or no budget is left."""
        if self.left <= 0:
            return None
        try:
            return self.predict(_in_order(edits))
        except (Unanswerable, GraphError):
            return None


def candidates(graph: Graph) -> list[Edit]:
    """Edits worth trying on any run: what can be done, ranks healed, bounds, and the largest work."""
    known = [parse_edit(text) for text in (*ACTIONS, *BOUNDS)]
    heals = [Heal(RanksAt(rank)) for rank in _deciding_ranks(graph)]
    return [*heals, *_buckets(graph), *known, *_largest_ops(graph)]


def _buckets(graph: Graph) -> list[Edit]:
    """Sizes of buckets that may be best; where nothing is known of them, one to be refused."""
    try:
        return [Bucket(size) for size in sizes_worth_replaying(reduced(graph))]
    except Unanswerable:
        return [Bucket(1.0)]


def _deciding_ranks(graph: Graph) -> list[int]:
    """The ranks that most of the critical path runs over, in order; none where there is only one."""
    nodes = graph.nodes
    ranks = np.unique(nodes.rank[nodes.rank >= 0])
    if ranks.size < 2:
        return []
    mine = nodes.rank >= 0
    share = np.bincount(nodes.rank[mine], time_on_critical_path(replay(graph))[mine])
    most = sorted(ranks.tolist(), key=lambda rank: (-share[rank], rank))[:MAX_RANKS]
    return sorted(most)


def _largest_ops(graph: Graph) -> list[Edit]:
    kind = NodeKind.KERNEL if (graph.nodes.kind == NodeKind.KERNEL).any() else NodeKind.CPU
    word = "kernel" if kind == NodeKind.KERNEL else "cpu"
    mine = graph.nodes.kind == kind
    total = np.bincount(graph.nodes.name[mine], graph.nodes.duration[mine], minlength=len(graph.names))
    largest = [int(i) for i in np.argsort(-total, kind="stable")[:LARGEST_OPS] if total[i] > 0]
    return [Scale(NodeSelection(name=graph.names[i], kind=word), 0.5) for i in largest]


def _usable(tries: _Tries, singles: list[Prediction]) -> list[Prediction]:
    """Those that can be done to a job, and save enough."""
    most_ns = (1 - WORTH) * tries.base_ns
    return [single for single in singles if single.is_advice and single.predicted_ns <= most_ns]


def _heals_the_healthy(prediction: Prediction, suspects: Collection[int]) -> bool:
    """Whether it heals a rank that no finding names, and the step as it is lies in its interval."""
    edit = prediction.edits[0]
    return isinstance(edit, Heal) and edit.at.rank not in suspects and prediction.effect != "faster"


def _pairs(
    tries: _Tries, usable: list[Prediction]
) -> tuple[dict[frozenset[Edit], Prediction], list[Interaction]]:
    """Each two of the best together, and those that do not save what they do in sum."""
    pairs, found = {}, []
    for one, other in combinations(usable[:MAX_PAIRED], 2):
        if not _goes_with(other.edits[0], [one]):
            continue
        edits = (one.edits[0], other.edits[0])
        both = tries.together(edits)
        if both is None:
            continue
        pairs[frozenset(edits)] = both
        together = tries.base_ns - both.predicted_ns
        apart = 2 * tries.base_ns - one.predicted_ns - other.predicted_ns
        if abs(together - apart) > INTERACT * tries.base_ns:
            found.append(Interaction(edits, together, apart))
    return pairs, found


def _together(
    tries: _Tries, usable: list[Prediction], pairs: dict[frozenset[Edit], Prediction]
) -> list[Prediction]:
    """What the best edits save together, one more at a time, from the best two on."""
    base, found = tries.base_ns, list[Prediction]()
    ordered = _best_pair_first(usable, pairs)
    taken = ordered[:1]
    for single in ordered[1:]:
        if len(taken) == MAX_TOGETHER or not _goes_with(single.edits[0], taken):
            continue
        so_far = found[-1].predicted_ns if found else taken[0].predicted_ns
        edits = [edit for each in (*taken, single) for edit in each.edits]
        both = pairs.get(frozenset(edits)) or tries.together(edits)
        if both is not None and both.predicted_ns <= so_far - WORTH * base:
            taken.append(single)
            apart = sum(base - each.predicted_ns for each in taken)
            note = (
                f"together they save {format_duration(base - both.predicted_ns)} per step; "
                f"apart, {format_duration(apart)} in sum"
            )
            found.append(dataclasses.replace(both, notes=(note, *both.notes)))
    return found


def _best_pair_first(usable: list[Prediction], pairs: dict[frozenset[Edit], Prediction]) -> list[Prediction]:
    """Single edits, those of the best pair before the others where that beats the best of them.

    A pair that is not proven comes before no edit that is.
    """
    if not pairs:
        return usable
    best = min(
        pairs, key=lambda pair: (not pairs[pair].proven, pairs[pair].predicted_ns, sorted(map(str, pair)))
    )
    first = usable[0]
    if pairs[best].predicted_ns >= first.predicted_ns or first.proven > pairs[best].proven:
        return usable
    return sorted(usable, key=lambda single: single.edits[0] not in best)


def _goes_with(edit: Edit, taken: Iterable[Prediction]) -> bool:
    """Whether an edit can be combined with others: not twice the same kind, but for ranks."""
    return isinstance(edit, Heal) or all(type(edit) is not type(each.edits[0]) for each in taken)


def _in_order(edits: Iterable[Edit]) -> list[Edit]:
    """In the order of the registry, so that a set of edits has one text."""
    order = {kind: number for number, kind in enumerate(EDITS.values())}
    return sorted(edits, key=lambda edit: (order[type(edit)], str(edit)))
