"""Predictions for programs.

In: predictions. Out: parts of documents, and which of them nothing else beats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpro.documents import DocumentPart, finite
from dpro.replay.whatif.edit import EFFORTS
from dpro.units import ms

if TYPE_CHECKING:  # a document of one says nothing of the others
    from dpro.replay.whatif.predict import Prediction


class PredictionDocument(DocumentPart, frozen=True):
    """What edits together would make of the mean step.

    Attributes:
        edits: as `--edit` accepts them, in the order in which they apply.
        predicted_ms: mean step under the edits.
        speedup: of throughput, samples per second; null where nothing is left of the step.
        proven: whether recordings before and after such changes have confirmed such predictions.
        block: proven, unproven or bound.
        effect: faster, slower, or unclear where the interval of the gain holds none.
        low, high: interval of the predicted time, ms.
        how: how to make the change to the job, and what is assumed.
        notes: what the edits found in the run, one line each.
        samples: how many times as many samples a step works on.
        speedup_low, speedup_high: interval of the speedup; null where nothing may be left of the step.
        gain_ms: what is saved of the time for as many samples as a step works on now; null where nothing is
            left of the step.
        gain_low_ms, gain_high_ms: interval of that.
        samples_per_s: elements of batches per second, all ranks; null where they were not counted.
        effort: what it takes: flag, line (of code), code, money, or none where it cannot be done.
        training: what changes in the training itself, one line each: what that does to how much a sample
            teaches is not predicted.
        best: whether nothing else that is advice gains as much for less effort.
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
    samples: float
    speedup_low: float | None
    speedup_high: float | None
    gain_ms: float | None
    gain_low_ms: float | None
    gain_high_ms: float | None
    samples_per_s: float | None
    effort: str
    training: list[str]
    best: bool


def undominated(predictions: Sequence[Prediction]) -> list[bool]:
    """[P] whether nothing else that is advice gains as much for less effort, or more for as much."""
    advice = [prediction for prediction in predictions if prediction.is_advice and prediction.speedup > 1]
    efforts = list(EFFORTS)

    def beats(one: Prediction, other: Prediction) -> bool:
        more = one.speedup - other.speedup
        less = efforts.index(other.effort) - efforts.index(one.effort)
        return more >= 0 and less >= 0 and (more > 0 or less > 0)

    best = {id(prediction) for prediction in advice if not any(beats(one, prediction) for one in advice)}
    return [id(prediction) in best for prediction in predictions]


def prediction_document(
    prediction: Prediction, best: bool = False, samples_per_s: float | None = None
) -> PredictionDocument:
    """A prediction for programs.

    Args:
        best: whether nothing else gains as much for less effort.
        samples_per_s: elements of batches per second as it is; None where not known.
    """
    speedup = finite(prediction.speedup)
    return PredictionDocument(
        edits=[str(edit) for edit in prediction.edits],
        predicted_ms=ms(prediction.predicted_ns),
        speedup=speedup,
        proven=prediction.proven,
        block=prediction.block,
        effect=prediction.effect,
        low=ms(prediction.low_ns),
        high=ms(prediction.high_ns),
        how=prediction.how(),
        notes=list(prediction.notes),
        samples=prediction.samples,
        speedup_low=finite(prediction.speedup_at(prediction.gain_low_ns)),
        speedup_high=finite(prediction.speedup_at(prediction.gain_high_ns)),
        gain_ms=finite(ms(prediction.gain_ns)),
        gain_low_ms=finite(ms(prediction.gain_low_ns)),
        gain_high_ms=finite(ms(prediction.gain_high_ns)),
        samples_per_s=samples_per_s * speedup if samples_per_s and speedup else None,
        effort=prediction.effort,
        training=list(prediction.training),
        best=best,
    )
