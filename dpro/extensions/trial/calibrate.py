"""Predictions with intervals that are widened by what was tried on this machine.

In: predictions, and the ledger. Out: predictions whose intervals hold the errors that were seen for the
same kind of change, and a line for each that was widened. An interval never becomes narrower than the
replay's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpro.extensions.trial.changes import kind_of_edit
from dpro.extensions.trial.ledger import LedgerEntry, held, joint_kind, read, usual_error, widened
from dpro.replay.whatif.predict import Prediction, ranked


@dataclass(frozen=True)
class Calibration:
    """Why an interval is wider than the replay's own.

    Attributes:
        kind: of the change.
        error: how far predictions of the kind are off, as a share.
        num_tries: number of tries that show it.
    """

    kind: str
    error: float
    num_tries: int

    def __str__(self) -> str:
        """In words."""
        tries = f"{self.num_tries} tries of {self.kind}"
        return f"widened by {tries}, where predictions were off by up to {self.error:.0%}"


def calibrated(
    prediction: Prediction, entries: Sequence[LedgerEntry]
) -> tuple[Prediction, Calibration | None]:
    """Widen the interval of a prediction where the ledger has enough entries of its kind.

    It becomes proven, too, where most tries of its kind took as long as was predicted.

    Returns:
        The prediction, and why its interval is wider; None where it is not.
    """
    kinds = [kind_of_edit(str(edit)) for edit in prediction.edits]
    kind = joint_kind(kinds) if all(kinds) else ""
    error, count = usual_error(entries, kind)
    low, high = widened(prediction.predicted_ns, prediction.low_ns, prediction.high_ns, error)
    prediction = replace(prediction, proven=prediction.proven or held(entries, kind))
    if (low, high) == (prediction.low_ns, prediction.high_ns):
        return prediction, None
    after_ns = prediction.predicted_ns / prediction.samples
    widest = replace(
        prediction,
        low_ns=low,
        high_ns=high,
        gain_low_ns=min(prediction.gain_low_ns, prediction.gain_ns - after_ns * math.expm1(error)),
        gain_high_ns=max(prediction.gain_high_ns, prediction.gain_ns - after_ns * math.expm1(-error)),
    )
    return widest, Calibration(kind, math.expm1(error), count)


def as_tried(predictions: Sequence[Prediction]) -> tuple[list[Prediction], list[str]]:
    """Calibrate predictions by the ledger of this machine, and rank them.

    Returns:
        The predictions, and a line for each widened interval.

    Raises:
        DproError: there is a ledger, and it cannot be read.
    """
    entries, _ = read()
    calibrations = [calibrated(prediction, entries) for prediction in predictions]
    widened_ones = [
        f"{' + '.join(map(str, prediction.edits))}: interval {calibration}"
        for prediction, calibration in calibrations
        if calibration
    ]
    return ranked(prediction for prediction, _ in calibrations), widened_ones
