"""What recording cost a job: one figure for every command that names it.

In: manifests of runs. Out: shares of the job's time, and the same in words.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpro.documents import DocumentPart
from dpro.store import Manifest
from dpro.words import counted


class RecordingShare(DocumentPart, frozen=True):
    """What recording cost the rank that it slowed most, of the time from its first step to its last.

    Attributes:
        share: of that time, in all.
        at_ends: the recorder's own work at the ends of steps, and around backward passes that are timed.
        windows: deep windows: opening and closing them, and by how much their steps took longer.
        budget: share that `--budget` allowed both; null where windows came whatever they cost, or not at all.
    """

    share: float
    at_ends: float
    windows: float
    budget: float | None = None


def recording_share(manifest: Manifest) -> RecordingShare | None:
    """What recording cost; None where no step outside deep windows shows it, and of older runs."""
    costs = manifest.windows
    if "ends_share" not in costs:
        return None
    at_ends, windows, options = costs["ends_share"], costs.get("share", 0.0), manifest.options
    is_kept = options.get("windows", True) and options.get("every") is None
    budget = options.get("budget") if is_kept else None
    return RecordingShare(at_ends + windows, at_ends, windows, budget)


def mean_share(shares: Sequence[tuple[RecordingShare | None, float]]) -> RecordingShare | None:
    """What recording cost several attempts of a job; None where none shows it.

    Args:
        shares: of each attempt, and how long it ran.
    """
    seen = [(share, lasted) for share, lasted in shares if share is not None and lasted > 0]
    whole = sum(lasted for _, lasted in seen)
    if not whole:
        return None
    at_ends = sum(share.at_ends * lasted for share, lasted in seen) / whole
    windows = sum(share.windows * lasted for share, lasted in seen) / whole
    return RecordingShare(at_ends + windows, at_ends, windows)


def recording_in_words(cost: RecordingShare, num_windows: int = 0, window_ms: float = 0.0) -> str:
    """`0.61% of the time: 0.25% at the ends of steps, 0.36% in 7 deep windows of 10.6 ms each`.

    Args:
        num_windows: how many deep windows there were; not said where 0.
        window_ms: the median cost of one.
    """
    plural = " each" * (num_windows > 1)
    of_windows = f"{counted(num_windows, 'deep window')} of {window_ms:.3g} ms{plural}"
    deep = of_windows if num_windows else "deep windows"
    windows = f", {cost.windows:.2%} in {deep}" if cost.windows else ""
    spent = cost.budget is not None and cost.at_ends >= cost.budget
    why = f"; that is the budget ({cost.budget:.1%}), so no more windows followed" if spent else ""
    return f"{cost.share:.2%} of the time: {cost.at_ends:.2%} at the ends of steps{windows}{why}"
