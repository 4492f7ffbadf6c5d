"""Prediction intervals widened by the trials on this machine.

Takes predictions, and the ledger; returns predictions whose intervals cover the errors of past trials of
their kind of change, and why they are wider. An interval never becomes narrower than the replay's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dpro.extensions.trial.changes import kind_of_edit
from dpro.extensions.trial.ledger import LedgerEntry, joint_kind, mostly_inside, read, usual_error, widened
from dpro.replay.whatif.predict import Prediction


def calibrated(prediction: Prediction, entries: Sequence[LedgerEntry]) -> Prediction:
    """Widen the interval of a prediction if the ledger has enough entries of its kind.

    The prediction also becomes proven if most trials of its kind were measured within the predicted interval.
    """
    kinds = [kind_of_edit(str(edit)) for edit in prediction.edits]
    kind = joint_kind(kinds) if all(kinds) else ""
    error, count = usual_error(entries, kind)
    low, high = widened(prediction.predicted_ns, prediction.low_ns, prediction.high_ns, error)
    prediction = replace(prediction, proven=prediction.proven or mostly_inside(entries, kind))
    if (low, high) == (prediction.low_ns, prediction.high_ns):
        return prediction
    after_ns = prediction.predicted_ns / prediction.samples
    return replace(
        prediction,
        low_ns=low,
        high_ns=high,
        gain_low_ns=min(prediction.gain_low_ns, prediction.gain_ns - after_ns * math.expm1(error)),
        gain_high_ns=max(prediction.gain_high_ns, prediction.gain_ns - after_ns * math.expm1(-error)),
        widened=f"widened by {count} tries of {kind}, where predictions were off by up to "
        f"{math.expm1(error):.0%}",
    )


def as_tried(prediction: Prediction) -> Prediction:
    """Calibrate a prediction by the ledger of this machine.

    Raises:
        DproError: there is a ledger, and it cannot be read.
    """
    return calibrated(prediction, read()[0])
