"""Which edits are worth trying on a run: each for itself, and those that can be done together.

In: a graph. Out: predictions, the largest gain first, and what the run cannot answer. The search is greedy:
what saves most is taken, then what saves most on top of it, each time by a replay of all that is taken so
far, since two edits may save the same time, or make room for each other. The same run gives the same answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.accuracy import Trust
from dpro.replay.graph import Graph, GraphError, NodeKind
from dpro.replay.timeline import durations_of, replay, time_on_critical_path
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.heal import Heal
from dpro.replay.whatif.parse import parse_edit
from dpro.replay.whatif.predict import Prediction, Refusal, baseline_steps, predict
from dpro.replay.whatif.registry import EDITS
from dpro.replay.whatif.scale import Scale
from dpro.replay.whatif.select import Selection
from dpro.units import format_duration

# What can be done to a job without buying anything; several go together.
ACTIONS = (
    "hide-input",
    "no-sync:within=aten::item",
    "optimizer:impl=fused",
    "compile",
    "cuda-graph",
    "precision:dtype=bf16",
    "bucket:mb=1",
    "bucket:mb=5",
    "bucket:mb=100",
    "compress:to=bf16",
    "gc:every=100",
)
# What no change of the job alone can do: how much there is to gain.
BOUNDS = ("no-launch", "network:bandwidth=2", "no-comm")
MOST_RANKS = 8  # that are healed one by one: those that decide most of the critical path
LARGEST_OPS = 4  # how many kernels (on a CPU job: operators) are tried at half their time
MOST_TOGETHER = 4
WORTH = 0.01  # of the step: what an edit has to save on top of those taken before


def search(graph: Graph, trust: Trust) -> tuple[list[Prediction], list[Refusal]]:
    """Predict every candidate, and the best of them together; largest gain first.

    Args:
        graph: the unchanged graph.
        trust: how well its replay fits.

    Returns:
        Predictions, and what was refused: of edits of one kind that are refused alike, the first.

    Raises:
        Unanswerable: there is no whole step.
    """
    baseline = baseline_steps(graph)
    predictions, refused = [], dict[tuple[str, str], Refusal]()
    for edit in candidates(graph):
        try:
            predictions.append(predict(graph, baseline, [edit], trust))
        except (Unanswerable, GraphError) as error:  # one edit that fails is no reason to say nothing
            refused.setdefault((edit.name, str(error)), Refusal(str(edit), str(error)))
    predictions += _together(graph, baseline, trust, _by_gain(predictions))
    return _by_gain(predictions), list(refused.values())


def candidates(graph: Graph) -> list[Edit]:
    """Edits worth trying on any run: what can be done, ranks healed, bounds, and the largest work."""
    known = [parse_edit(text) for text in (*ACTIONS, *BOUNDS)]
    heals = [Heal(rank) for rank in _deciding_ranks(graph)]
    return [*heals, *known, *_largest_ops(graph)]


def _deciding_ranks(graph: Graph) -> list[int]:
    """The ranks that most of the critical path runs over, in order; none where there is only one."""
    nodes = graph.nodes
    ranks = np.unique(nodes.rank[nodes.rank >= 0])
    if ranks.size < 2:
        return []
    mine = nodes.rank >= 0
    share = np.bincount(nodes.rank[mine], time_on_critical_path(replay(graph))[mine])
    most = sorted(ranks.tolist(), key=lambda rank: (-share[rank], rank))[:MOST_RANKS]
    return sorted(most)


def _largest_ops(graph: Graph) -> list[Edit]:
    kind = NodeKind.KERNEL if (graph.nodes.kind == NodeKind.KERNEL).any() else NodeKind.CPU
    word = "kernel" if kind == NodeKind.KERNEL else "cpu"
    mine = graph.nodes.kind == kind
    total = np.bincount(graph.nodes.name[mine], graph.nodes.duration[mine], minlength=len(graph.names))
    largest = [int(i) for i in np.argsort(-total, kind="stable")[:LARGEST_OPS] if total[i] > 0]
    return [Scale(Selection(name=graph.names[i], kind=word), 0.5) for i in largest]


def _together(
    graph: Graph, baseline: pl.DataFrame, trust: Trust, singles: list[Prediction]
) -> list[Prediction]:
    """What the best edits save together, one more at a time."""
    base = float(durations_of(baseline)["duration_ns"].to_numpy().mean())
    doable = [parse_edit(text) for text in ACTIONS]
    usable = [
        single
        for single in singles
        if (single.edits[0] in doable or isinstance(single.edits[0], Heal))
        and single.predicted_ns <= (1 - WORTH) * base
    ]
    found: list[Prediction] = []
    taken = usable[:1]
    for single in usable[1:]:
        if len(taken) == MOST_TOGETHER or not _goes_with(single.edits[0], taken):
            continue
        so_far = found[-1].predicted_ns if found else taken[0].predicted_ns
        edits = _in_order(edit for each in (*taken, single) for edit in each.edits)
        try:
            both = predict(graph, baseline, edits, trust)
        except (Unanswerable, GraphError):  # what one leaves over is not what the other needs
            continue
        if both.predicted_ns <= so_far - WORTH * base:
            taken.append(single)
            apart = sum(base - each.predicted_ns for each in taken)
            note = (
                f"together they save {format_duration(base - both.predicted_ns)} per step; "
                f"apart, {format_duration(apart)} in sum"
            )
            found.append(dataclasses.replace(both, notes=(note, *both.notes)))
    return found


def _goes_with(edit: Edit, taken: Iterable[Prediction]) -> bool:
    """Whether an edit can be done beside others: not twice the same kind, but for ranks."""
    return isinstance(edit, Heal) or all(type(edit) is not type(each.edits[0]) for each in taken)


def _in_order(edits: Iterable[Edit]) -> list[Edit]:
    """In the order of the registry, so that a set of edits has one text."""
    order = {kind: number for number, kind in enumerate(EDITS.values())}
    return sorted(edits, key=lambda edit: (order[type(edit)], str(edit)))


def _by_gain(predictions: list[Prediction]) -> list[Prediction]:
    return sorted(
        predictions,
        key=lambda prediction: (prediction.predicted_ns, len(prediction.edits), str(prediction.edits[0])),
    )
