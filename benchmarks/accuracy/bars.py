"""Table and bars of predictions for pairs of jobs before and after a change.

In: a row per pair, as `whatif.py` makes them. Out: check -> {n, figures, bar, holds}, and the table of the
documentation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from dpro.extensions.trial.changes import CHANGES
from dpro.replay.whatif.registry import EDITS, kind_named

CONTROLLED_MEDIAN_PCT, CONTROLLED_WORST_PCT, NOISY_MEDIAN_PCT = 2.0, 8.0, 6.0
HELD, SIGNS, NUM_PAIRS = 0.9, 0.95, 30
GAIN_HELD, GAIN_WIDTH = 0.85, 0.5
EFFECT_PCT = 3.0  # of the step: a smaller change counts as none

Row = dict[str, Any]
Check = dict[str, Any]


def spread_pct(times: Sequence[float]) -> float | None:
    """Return the median difference between any two rounds of one job, in percent; None for a single round."""
    differences = [100 * abs(a / b - 1) for a, b in combinations(times, 2)]
    return statistics.median(differences) if differences else None


def signs(before: float, after: float, predicted: float, same_job_pct: float | None) -> Row:
    """Return whether a change had an effect beyond the noise of the job, and was predicted with its sign.

    Args:
        before, after, predicted: time for a batch of the size before.
        same_job_pct: difference between recordings of one job; None where it was recorded once.
    """
    noise_pct = max(EFFECT_PCT, same_job_pct or 0.0)
    return {
        "has_effect": abs(after / before - 1) > noise_pct / 100,
        "sign_right": (predicted - before) * (after - before) > 0,
    }


def checks(results: Sequence[Row], whole: bool) -> dict[str, Check]:
    """Compute the checks, and whether their bars hold.

    Args:
        results: a row per pair.
        whole: whether these are all pairs, so that edits without a pair can be named.
    """
    judged = [row for row in results if "refused" not in row]
    found = {}
    for name, controlled in (("controlled", True), ("noisy", False)):
        if mine := [row for row in judged if row["controlled"] is controlled]:
            found[name] = _errors(mine, controlled)
    if not judged:
        return found
    effects = [row for row in judged if row["has_effect"]]
    right = sum(bool(row["sign_right"]) for row in effects)
    wrong = [row["pair"] for row in effects if not row["sign_right"]]
    found["signs"] = check(
        len(effects), {"right": right, "wrong": wrong}, {"share": SIGNS}, right >= SIGNS * len(effects)
    )
    found["gains"] = _gains([row for row in judged if row["controlled"]] or judged)
    refused = {row["pair"]: row["refused"] for row in results if "refused" in row}
    found["pairs"] = check(
        len(judged), {"refused": refused}, {"at_least": NUM_PAIRS}, len(judged) >= NUM_PAIRS
    )
    if whole:
        found["families"] = _families(judged)
    return found


def check(n: int, figures: Row, bar: Row, holds: bool) -> Check:
    """Make the row of a check: number judged, figures, bar, and whether the bar holds."""
    return {"n": n, "figures": figures, "bar": bar, "holds": holds}


def _errors(mine: Sequence[Row], controlled: bool) -> Check:
    errors = [abs(row["error_pct"]) for row in mine]
    known = [row["same_job_pct"] for row in mine if row["same_job_pct"] is not None]
    figures = {
        "median_error_pct": statistics.median(errors),
        "worst_error_pct": max(errors),
        "held": statistics.fmean(row["held"] for row in mine),
        "same_job_pct": statistics.median(known) if known else None,
    }
    bar = {"median_error_pct": CONTROLLED_MEDIAN_PCT if controlled else NOISY_MEDIAN_PCT, "held": HELD}
    bar |= {"worst_error_pct": CONTROLLED_WORST_PCT} if controlled else {}
    holds = figures["held"] >= HELD and all(figures[name] <= bar[name] for name in bar if name != "held")
    return check(len(mine), figures | {"pairs": list(mine)}, bar, holds)


def _gains(mine: Sequence[Row]) -> Check:
    """Check the intervals of gains: the share that held, and their width relative to those of step times."""
    held = statistics.fmean(row["gain_held"] for row in mine)
    width = statistics.median(row["gain_width"] for row in mine)
    missed = [row["pair"] for row in mine if row["gain_held"] < 1]
    return check(
        len(mine),
        {"held": held, "width": width, "missed": missed},
        {"held": GAIN_HELD, "width": GAIN_WIDTH},
        held >= GAIN_HELD and width <= GAIN_WIDTH,
    )


def _families(judged: Sequence[Row]) -> Check:
    """Check that no edit that `dpro try` makes counts as proven without a pair."""
    tryable = [name for name in CHANGES if name in EDITS]
    measured = {edit.partition(":")[0] for row in judged for edit in row["edits"]}
    without = [name for name in tryable if name not in measured]
    overstated = [name for name in without if kind_named(name).proof]
    figures = {"without_pair": without, "proven_without_pair": overstated}
    return check(len(tryable), figures, {"proven_without_pair": 0}, not overstated)


def table(results: Sequence[Row], found: dict[str, Check]) -> Iterator[str]:
    """Yield the table of the documentation, and a line on each bar.

    Args:
        results: a row per pair.
        found: `checks` of them.
    """
    yield "| change | class | before ms | after ms | predicted ms | error | same job | interval | held |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in results:
        class_ = "controlled" if row["controlled"] else "noisy"
        if "refused" in row:
            yield f"| {row['pair']} | {class_} | | | refused: {row['refused']} | | | | |"
            continue
        same = f"{row['same_job_pct']:.1f}%" if row["same_job_pct"] is not None else ""
        times = " | ".join(f"{row[key]:.1f}" for key in ("before_ms", "after_ms", "predicted_ms"))
        yield (
            f"| {row['pair']} | {class_} | {times} | {row['error_pct']:+.1f}% | {same} "
            f"| ±{row['interval_pct']:.0f}% | {row['held']:.0%} |"
        )
    for name, check in found.items():
        figures = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in check["figures"].items()
            if key != "pairs"
        )
        bar = ", ".join(f"{key} {value:g}" for key, value in check["bar"].items())
        yield f"{name}: {'holds' if check['holds'] else 'MISSED'}; n {check['n']}; {figures} (bar: {bar})"
