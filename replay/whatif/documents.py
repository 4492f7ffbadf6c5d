"""Predictions, and what a search finds, for programs.

In: predictions, refusals, interactions, curves and points. Out: the parts of documents of the same.
"""

from __future__ import annotations

import math

from dpro.documents import Part
from dpro.replay.whatif.pareto import Point
from dpro.replay.whatif.predict import Prediction, Refusal
from dpro.replay.whatif.search import Interaction
from dpro.replay.whatif.sensitivity import Curve
from dpro.units import ms


class PredictionDocument(Part, frozen=True):
    """What edits together would make of the mean step.

    Attributes:
        edits: as `--edit` accepts them, in the order in which they apply.
        predicted_ms: mean step under the edits.
        speedup: of throughput; null where nothing is left of the step.
        proven: whether recordings before and after such changes have confirmed such predictions.
        block: proven, unproven or bound.
        effect: faster, slower, or unclear where the interval holds the step as it is.
        low, high: interval of the predicted time, ms.
        how: how to make the change to the job, and what is assumed.
        notes: what the edits found in the run, one line each.
    """

    edits: list[str]
    predicted_ms: float
    speedup: float | None
    proven: bool
    block: str
    effect: str
    low: float
    high: float
    how: str
    notes: list[str]


class RefusalDocument(Part, frozen=True):
    """An edit that the run cannot answer.

    Attributes:
        edit: as `--edit` accepts it.
        reason: why, and what to record instead.
    """

    edit: str
    reason: str


class InteractionDocument(Part, frozen=True):
    """Two edits whose gains do not add up.

    Attributes:
        edits: the two.
        together_ms: what they save per step together.
        apart_ms: the sum of what each saves by itself.
    """

    edits: list[str]
    together_ms: float
    apart_ms: float


class CurveDocument(Part, frozen=True):
    """How the step follows the speed of one part of the machine.

    Attributes:
        part: network, kernels, host or input.
        base_ms: mean step as it is.
        factors: how many times as fast the part is.
        step_ms: mean step for each of the factors.
        break_even: from this factor on hardly anything more is gained; null where the part limits nothing.
        then: what limits the step from there on; null where the part limits nothing.
    """

    part: str
    base_ms: float
    factors: list[float]
    step_ms: list[float]
    break_even: float | None
    then: str | None


class PointDocument(Part, frozen=True):
    """One way to run the job: its time and its memory.

    Attributes:
        edits: what is changed; empty for the job as it is.
        ms_per_batch: mean time for a batch of the size that was recorded.
        within_step_bytes: the most that a step allocates beyond what it found.
        fits: whether there is so much memory; null where the run does not show it.
        best: whether no other point takes less of one and no more of the other.
    """

    edits: list[str]
    ms_per_batch: float
    within_step_bytes: int
    fits: bool | None
    best: bool


def prediction_document(prediction: Prediction) -> PredictionDocument:
    """A prediction for programs."""
    return PredictionDocument(
        edits=[str(edit) for edit in prediction.edits],
        predicted_ms=ms(prediction.predicted_ns),
        speedup=prediction.speedup if math.isfinite(prediction.speedup) else None,
        proven=prediction.proven,
        block=prediction.block,
        effect=prediction.effect,
        low=ms(prediction.low_ns),
        high=ms(prediction.high_ns),
        how=prediction.how(),
        notes=list(prediction.notes),
    )


def refusal_document(refusal: Refusal) -> RefusalDocument:
    """A refusal for programs."""
    return RefusalDocument(refusal.edit, refusal.reason)


def interaction_document(pair: Interaction) -> InteractionDocument:
    """An interaction for programs."""
    return InteractionDocument([str(edit) for edit in pair.edits], ms(pair.together_ns), ms(pair.apart_ns))


def curve_document(curve: Curve) -> CurveDocument:
    """A curve for programs."""
    return CurveDocument(
        part=curve.part,
        base_ms=ms(curve.base_ns),
        factors=list(curve.factors),
        step_ms=[ms(step) for step in curve.step_ns],
        break_even=curve.break_even,
        then=curve.then or None,
    )


def point_document(point: Point) -> PointDocument:
    """A point for programs."""
    return PointDocument(
        edits=[str(edit) for edit in point.edits],
        ms_per_batch=ms(point.ns_per_batch),
        within_step_bytes=point.within_step_bytes,
        fits=point.fits,
        best=point.best,
    )
