"""The cost of recording a job: one figure for all commands that show it.

Takes manifests of runs; returns shares of the job's time, and their wording. Measures nothing: the recorder
does.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpro.documents import DocumentPart
from dpro.store import Manifest
from dpro.units import format_ms
from dpro.words import counted


class RecordingShare(DocumentPart, frozen=True):
    """The cost of recording on the rank that it slowed most, as shares of the time from first to last step.

    Attributes:
        share: share of that time, in total.
        at_ends: share of the recorder's own work at the ends of steps and around timed backward passes.
        windows: share of deep windows: opening and closing them, and the slowdown of their steps.
        budget: share that `--budget` allowed in total; null if windows were off, or not bound by a budget.
    """

    share: float
    at_ends: float
    windows: float
    budget: float | None = None


def recording_share(manifest: Manifest) -> RecordingShare | None:
    """Return the cost of recording; None for older runs, or without steps outside deep windows."""
    costs = manifest.windows
    if "ends_share" not in costs:
        return None
    at_ends, windows, options = costs["ends_share"], costs.get("share", 0.0), manifest.options
    is_kept = options.get("windows", True) and options.get("every") is None
    budget = options.get("budget") if is_kept else None
    return RecordingShare(at_ends + windows, at_ends, windows, budget)


def mean_share(shares: Sequence[tuple[RecordingShare | None, float]]) -> RecordingShare | None:
    """Return the cost of recording over several attempts of a job, weighted by time; None if none shows it.

    Args:
        shares: cost and duration of each attempt, the latter in any unit.
    """
    seen = [(share, lasted) for share, lasted in shares if share is not None and lasted > 0]
    whole = sum(lasted for _, lasted in seen)
    if not whole:
        return None
    at_ends = sum(share.at_ends * lasted for share, lasted in seen) / whole
    windows = sum(share.windows * lasted for share, lasted in seen) / whole
    return RecordingShare(at_ends + windows, at_ends, windows)


def recording_in_words(cost: RecordingShare, num_windows: int = 0, window_ms: float = 0.0) -> str:
    """Return `0.6% of the time in steps: 0.2% at the ends of steps, 0.4% by 7 deep windows that cost 9 ms`.

    Args:
        num_windows: number of deep windows; 0 to leave it out.
        window_ms: median cost of a deep window.
    """
    deep = windows_in_words(num_windows, window_ms, "that cost") if num_windows else "deep windows"
    windows = f", {cost.windows:.2%} by {deep}" if cost.windows else ""
    spent = cost.budget is not None and cost.at_ends >= cost.budget
    why = f"; that used up the budget ({cost.budget:.1%}), so no more windows followed" if spent else ""
    return f"{cost.share:.2%} of the time in steps: {cost.at_ends:.2%} at the ends of steps{windows}{why}"


def windows_in_words(num_windows: int, window_ms: float, verb: str = "cost") -> str:
    """Return `3 deep windows cost 104 ms each`: the time that a window adds, not its length.

    Args:
        window_ms: median cost of a deep window.
    """
    plural = " each" * (num_windows > 1)
    return f"{counted(num_windows, 'deep window')} {verb} {format_ms(window_ms)}{plural}"
