"""Whether a changed job learns what it did: its losses beside those of the job as it is, sample by sample.

In: recordings of both, each with the losses that its ranks asked gradients of. Out: how far the changed job's
are from the others' in the second half, and whether that is more than recordings of one job differ by
(Student's interval of a difference of means). Short jobs show a change that breaks training, not one that
costs a little of its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.documents import DocumentPart, finite
from dpro.schema import COUNTERS
from dpro.store import Run

LOSS = "loss"
MIN_PASSES = 6
SHARE = 0.02  # of the loss, or of its fall, within which losses count as the same
NOT_SEEN = "no rank of some recording asked for gradients of one number"


class Training(DocumentPart, frozen=True):
    """What the changed job learnt, beside the job as it is, over the same samples.

    Attributes:
        differs: whether its losses are further off than the tolerance.
        base, changed: mean loss in the second half; null where it is not finite.
        spread: the most by which two recordings of the job as it is differ in it; null of a single one.
        tolerance: what recordings of one job differ by, or 2% of the loss or of its fall.
        passes: passes of the job as it is that were compared.
    """

    differs: bool
    base: float | None
    changed: float | None
    spread: float | None
    tolerance: float | None
    passes: int


def losses_of(run: Run) -> Floats:
    """Return the losses of a run in order, the mean over its ranks; none where they were not recorded."""
    rows = run.table(COUNTERS, ["rank", "counter", "time_ns", "value"]).filter(pl.col("counter") == LOSS)
    by_rank = [each["value"].to_numpy() for each in rows.sort("rank", "time_ns").partition_by("rank")]
    if not by_rank:
        return np.empty(0)
    shortest = min(each.size for each in by_rank)
    mean: Floats = np.mean([each[:shortest] for each in by_rank], axis=0)
    return mean


def compare_losses(
    baseline: Sequence[Floats], changed: Sequence[Floats], passes: float = 1.0
) -> Training | None:
    """Compare losses over the samples that all recordings have seen.

    Args:
        baseline: `[L]` losses of the job as it is in order, by recording.

    Returns:
        The comparison; None where a recording has too few.
    """
    common = min(*(each.size for each in baseline), *(int(each.size * passes) for each in changed))
    if common < MIN_PASSES or common / passes < 2:
        return None
    before = np.array([_late(each, common) for each in baseline])
    after = np.array([_late(each, round(common / passes)) for each in changed])
    base = float(before.mean())
    fall = float(np.mean([each[: common // 2].mean() for each in baseline])) - base
    spread = float(np.ptp(before)) if before.size > 1 else None
    tolerance = max(_noise(before, after), SHARE * max(abs(base), abs(fall)))
    learnt = float(after.mean())
    differs = math.isfinite(base) and not abs(learnt - base) <= tolerance
    return Training(differs, finite(base), finite(learnt), finite(spread), finite(tolerance), common)


def _noise(before: Floats, after: Floats) -> float:
    """Half of the 95% interval of a difference of means, by how recordings of either job differ; else 0."""
    freedom = before.size + after.size - 2
    if freedom < 1:
        return 0.0
    from scipy.special import stdtrit

    squares = ((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum()
    deviation = math.sqrt(squares / freedom * (1 / before.size + 1 / after.size))
    return float(stdtrit(freedom, 0.975)) * deviation


def _late(losses: Floats, common: int) -> float:
    return float(losses[common // 2 : common].mean())
