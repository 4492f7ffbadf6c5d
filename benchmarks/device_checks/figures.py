"""Errors of predictions beside measurements, and coverage of their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NO_DATA = "no data: the folders lack tables of this, or hold nothing that is unseen"
HELD = (85.0, 95.0)  # per cent of measurements that intervals of 90% may contain


def compared(predicted, measured, bar: tuple[float, float | None] | None, note: str = "") -> dict[str, Any]:
    """Make a check of the errors of predictions, in per cent.

    Args:
        predicted, measured: [N] of any unit.
        bar: upper limits of median and 90th percentile; None where the figure is only reported.
        note: for the reader of the figure.
    """
    predicted, measured = np.asarray(predicted, float), np.asarray(measured, float)
    if not predicted.size:
        return nothing(bar_text(bar), note or NO_DATA)
    wrong = 100 * np.abs(predicted / measured - 1)
    median, p90 = float(np.median(wrong)), float(np.quantile(wrong, 0.9))
    holds = None if bar is None else median <= bar[0] and (bar[1] is None or p90 <= bar[1])
    found = {
        "n": int(predicted.size),
        "median_pct": round(median, 2),
        "p90_pct": round(p90, 2),
        "bar": bar_text(bar),
        "holds": holds,
    }
    return found | ({"note": note} if note else {})


def nothing(bar: str, reason: str) -> dict[str, Any]:
    """Make the row of a check that could not be made.

    Args:
        bar: as it is printed.
        reason: why.
    """
    return {"n": 0, "median_pct": None, "p90_pct": None, "bar": bar, "holds": None, "note": reason}


def covered(
    low, high, measured, groups: Sequence[Any] | None = None, reason: str = NO_DATA
) -> dict[str, Any]:
    """Make a check of the share of measurements inside their intervals, in per cent.

    Args:
        low, high, measured: [N] of one unit.
        groups: [N] group of each, whose shares are also reported.
        reason: why there are no measurements, if there are none.
    """
    low, high, measured = (np.asarray(each, float) for each in (low, high, measured))
    bar = f"{HELD[0]:.0f}..{HELD[1]:.0f}% held"
    if not measured.size:
        return nothing(bar, reason) | {"held_pct": None}
    inside = (low <= measured) & (measured <= high)
    held = 100 * float(inside.mean())
    width = 100 * (high / low - 1) / 2
    found = {
        "n": int(measured.size),
        "held_pct": round(held, 1),
        "median_pct": round(float(np.median(width)), 1),
        "p90_pct": round(float(np.quantile(width, 0.9)), 1),
        "bar": bar,
        "holds": HELD[0] <= held <= HELD[1],
        "note": "median_pct, p90_pct: half-widths",
    }
    if groups is not None:
        names = np.asarray(groups)
        shares = {str(name): round(100 * float(inside[names == name].mean()), 1) for name in np.unique(names)}
        found["by"] = shares
    return found


def bar_text(bar: tuple[float, float | None] | None) -> str:
    """Return a bar of median and 90th percentile as it is printed."""
    if bar is None:
        return "reported"
    return f"{bar[0]:g}" if bar[1] is None else f"{bar[0]:g} / {bar[1]:g}"
