"""Predictions with intervals that are widened by what was tried on this machine.

In: predictions, and the ledger. Out: predictions whose intervals hold the errors that were seen for the
same kind of change, and why they are wider. An interval never becomes narrower than the
replay's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dpro.extensions.trial.changes import kind_of_edit
from dpro.extensions.trial.ledger import LedgerEntry, held, joint_kind, read, usual_error, widened
from dpro.replay.whatif.predict import Prediction


def calibrated(prediction: Prediction, entries: Sequence[LedgerEntry]) -> Prediction:
    """Widen the interval of a prediction where the ledger has enough entries of its kind.

    It becomes proven, too, where most tries of its kind took as long as was predicted.
    """
    kinds = [kind_of_edit(str(edit)) for edit in prediction.edits]
    kind = joint_kind(kinds) if all(kinds) else ""
    error, count = usual_error(entries, kind)
    low, high = widened(prediction.predicted_ns, prediction.low_ns, prediction.high_ns, error)
    prediction = replace(prediction, proven=prediction.proven or held(entries, kind))
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
