"""A summary of a run in short tables: its health, what is slow, what would help, how far to trust it.

Takes manifest, steps, findings, predictions and the trust in the replay; returns words and frames. Neither
replays nor draws, and does not escape names from traces: callers that show them do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import polars as pl

from dpro.analysis.end import JobEnd
from dpro.analysis.step_time import step_time_in_words
from dpro.detect.findings import Finding
from dpro.detect.hang.evidence import verdict_in_words
from dpro.detect.words import join_hangs, summarise
from dpro.replay.fidelity.accuracy import COPIED, SURE, Criterion, Trust
from dpro.replay.whatif.edit import EFFORTS
from dpro.replay.whatif.predict import Prediction
from dpro.store import Manifest
from dpro.units import format_duration, ms
from dpro.words import capitalised, first_few, missing_in_words

_RANKS_NAMED = 8


def run_info(manifest: Manifest, steps: pl.DataFrame) -> list[tuple[str, str]]:
    """Return what was recorded as names and values, the step time first."""
    rows = [
        ("step time", step_time_in_words(steps)),
        ("steps", f"{steps['step'].n_unique():,}" if steps.height else ""),
        ("ranks", ranks_recorded(manifest.ranks, manifest.missing_ranks, manifest.world_size)),
        ("hosts", ", ".join(manifest.hosts)),
        ("GPUs", ", ".join(manifest.gpus)),
        ("command", " ".join(manifest.command)),
    ]
    rows += [
        ("warning", warning)
        for warning in other_warnings(manifest.warnings, manifest.missing_ranks, manifest.world_size)
    ]
    return [(name, value) for name, value in rows if value]


def ranks_recorded(ranks: Sequence[int], missing: Sequence[int], world_size: int) -> str:
    """Return how many ranks were recorded, and which are missing: `6 of 8, missing 3, 5`."""
    of_all = f"{len(ranks)} of {world_size}"
    return f"{of_all}, missing {first_few(missing, _RANKS_NAMED)}" if missing else of_all


def other_warnings(warnings: Sequence[str], missing: Sequence[int], world_size: int) -> list[str]:
    """Return the warnings, except the one on missing ranks, which `ranks_recorded` covers."""
    return [warning for warning in warnings if warning != missing_in_words(missing, world_size)]


NO_FIT = "Not diagnosed: the replay does not fit the trace"


def health_info(
    findings: Sequence[Finding],
    unknown: Sequence[str],
    trust: Trust | None,
    end: JobEnd | None = None,
    binds: str = "",
    unrecorded: str = "",
) -> tuple[str, str]:
    """Return the state of the run (good, bad, unknown) and a sentence.

    Args:
        trust: trust in the replay; None if findings rest on calls alone.
        end: end of the job, which leads the sentence if it was early; None if unknown.
        binds: what limits the job if it is not compute, as a sentence.
        unrecorded: why the run has no steps; empty if it has some.
    """
    if end is not None and end.early:
        cause = f" {_worst_hang(findings)}" if findings and findings[0].of_hang else ""
        slow = not cause and bool(findings)
        before = f" Until then: {health_info(findings, unknown, trust)[1]}" if slow else ""
        return ("bad" if end.bad or slow else "unknown"), f"{end.sentence}{cause}{before}"
    if findings:
        worst = findings[0]
        if worst.of_hang:
            return "bad", f"The job is stuck. {_worst_hang(findings)}"
        return "bad", summarise(worst)
    if trust is not None and not trust.answerable:
        return "unknown", NO_FIT
    if unrecorded:
        return "unknown", capitalised(unrecorded)
    if binds:
        return "unknown", binds
    if unknown:
        return "unknown", "No slow rank or component found, but not everything could be checked"
    return "good", "Healthy: neither a rank nor the input pipeline slows the job down"


def _worst_hang(findings: Sequence[Finding]) -> str:
    """Return the surest cause of a hang in words, and the number of further ones."""
    hangs = join_hangs(findings)
    more = len(hangs) - 1
    return capitalised(verdict_in_words(hangs[0])) + (f"; {more} more below" if more else "")


_TEXT, _NUMBER = pl.String(), pl.Float64()
FINDING_COLUMNS: dict[str, pl.DataType] = {
    "class": _TEXT, "component": _TEXT, "ranks": pl.List(pl.Int64), "cost_ms_per_step": _NUMBER,
    "severity": _NUMBER, "confidence": _NUMBER, "cause": _TEXT, "evidence": _TEXT, "remedy": _TEXT,
}  # fmt: skip


def finding_info(findings: Sequence[Finding]) -> pl.DataFrame:
    """Return the findings as a table, in their order."""
    return pl.DataFrame(
        {
            "class": [finding.class_ for finding in findings],
            "component": [finding.component for finding in findings],
            "ranks": [list(finding.ranks) for finding in findings],
            "cost_ms_per_step": [finding.cost_ms for finding in findings],
            "severity": [finding.severity for finding in findings],
            "confidence": [finding.confidence for finding in findings],
            "cause": [finding.cause for finding in findings],
            "evidence": ["; ".join(finding.evidence) for finding in findings],
            "remedy": [finding.remedy for finding in findings],
        },
        schema=FINDING_COLUMNS,
    )


def gain_info(predictions: Sequence[Prediction]) -> pl.DataFrame:
    """Return predictions as a table, in their order.

    Returns:
        `edit`, `what`, `predicted_ms`, `low_ms` and `high_ms` (the step at both ends of its interval),
        `speedup`, `how`, `block` (proven, unproven or bound), `effect` (faster, slower, or unclear if the
        interval contains the unchanged step).
    """
    names = ("edit", "what", "predicted_ms", "low_ms", "high_ms", "speedup", "how", "block", "effect")
    return pl.DataFrame(
        {
            "edit": ["\n".join(map(str, prediction.edits)) for prediction in predictions],
            "what": [prediction.what() for prediction in predictions],
            "predicted_ms": [ms(prediction.predicted_ns) for prediction in predictions],
            "low_ms": [ms(prediction.between_ns[0]) for prediction in predictions],
            "high_ms": [ms(prediction.between_ns[1]) for prediction in predictions],
            "speedup": [prediction.speedup for prediction in predictions],
            "how": [prediction.how() for prediction in predictions],
            "block": [prediction.block for prediction in predictions],
            "effect": [prediction.effect for prediction in predictions],
        },
        schema=dict(zip(names, [pl.String, pl.String, *[pl.Float64] * 4, *[pl.String] * 3])),
    )


def copied_in_words(share: float, figures: Sequence[Criterion]) -> str:
    """Return the share of starts that come from the trace: `15.6%, at least 9.66% (95% confidence)`.

    Args:
        share: as counted.
        figures: those of trust, one of which is the lower bound: a few starts are no certain share.
    """
    least = next((figure.value for figure in figures if figure.name == COPIED), None)
    return f"{share:.1%}" if not least else f"{share:.1%}, at least {least:.3g}% ({SURE:.0%} confidence)"


def trust_info(trust: Trust) -> list[tuple[str, str]]:
    """Return the fit of the replay as names and values."""
    coverage = trust.coverage
    classified, matched = coverage.kernels_classified, coverage.collectives_matched
    starts = "not derived: all are taken from the trace"
    if trust.start_error_ns is not None:
        p50, p95 = map(format_duration, trust.start_error_ns)
        starts = f"{p50} (median), {p95} (95th percentile)"
    rows = [
        ("step time off by", f"{trust.error_pct:.2f}% on average"),
        ("starts off by", starts),
        ("collectives found on all ranks", f"{1.0 if matched is None else matched:.1%}"),
        ("collectives outside the window of some rank", f"{coverage.collectives_outside_window or 0.0:.1%}"),
        ("GPU time in known kernels", "no kernels" if classified is None else f"{classified:.1%}"),
        ("unexplained time", f"{coverage.time_unexplained:.2%}"),
        ("CPU time in no span", f"{coverage.host_gaps:.1%}"),
        ("start times copied from the trace", copied_in_words(coverage.starts_anchored, trust.figures)),
    ]
    if trust.overlap is not None:
        overlap = trust.overlap
        beside = f"x{overlap.factor:.2f} ({overlap.low:.2f} to {overlap.high:.2f})"
        rows.append(("kernels beside communication", beside))
    return rows


# Changes that would help.

WIDE = 0.5  # share of the predicted time: an interval that reaches further on either side says little
WORTH_SHOWING = 1.005  # smallest speed-up that is not rounded to x1.00
MAX_ANCHORED = 0.2  # share of anchored starts, which hardly move under an edit
PROOFS = {"proven": "real jobs, before and after"}  # by the block of a prediction


class Gains(NamedTuple):
    """Changes that are advice and would help: those of TRY, then those of the search, each in its order.

    Attributes:
        clear: predictions that stand out from the noise of the steps.
        within_noise: predictions whose interval contains the unchanged step, or with hardly any gain.
    """

    clear: list[Prediction]
    within_noise: list[Prediction]


def what_helps(predictions: Sequence[Prediction], advised: Sequence[Prediction] = ()) -> Gains:
    """Split the helpful changes into clear gains and those within the noise.

    Args:
        predictions: predictions as ranked by `dpro.replay.whatif.search`.
        advised: predictions of what TRY advises; they come first.
    """
    tried = {prediction.edits for prediction in advised}
    others = [
        prediction for prediction in predictions if prediction.is_advice and prediction.edits not in tried
    ]
    advice = [prediction for prediction in (*advised, *others) if prediction.speedup > 1]
    clear = [stands_out(prediction) for prediction in advice]
    return Gains(
        [prediction for prediction, stands in zip(advice, clear) if stands],
        [prediction for prediction, stands in zip(advice, clear) if not stands],
    )


def stands_out(prediction: Prediction) -> bool:
    """Return whether an edit shortens the step by more than the noise, and by more than x1.00."""
    return prediction.effect == "faster" and prediction.speedup >= WORTH_SHOWING


HEADINGS = {  # groups of predictions, in their order
    "advised": "Advised under TRY",
    "faster": "Faster over the whole interval",
    "unclear": "May gain nothing",
    "unfit": "Uncertain, since the replay does not fit",
    "slower": "Slower over the whole interval",
    "bound": "What parts are worth: upper bounds and hypotheticals, not advice",
}


def heals_as_advised(prediction: Prediction, advised: Collection[str]) -> bool:
    """Return whether edits that alone would be bounds remove faults, as the verdict advises.

    Args:
        advised: edits that the verdict advises, each as text.
    """
    hypothetical = [str(edit) for edit in prediction.edits if not edit.is_advice]
    singles = {edit for text in advised for edit in text.split()}
    return bool(hypothetical) and singles.issuperset(hypothetical)


def group_of(prediction: Prediction, answerable: bool, advised: bool) -> str:
    """Return the key of `HEADINGS` under which a prediction is listed.

    Args:
        answerable: whether the replay fits; without that, no effect is certain.
        advised: whether TRY has the edits.
    """
    if advised:
        return "advised"
    if not prediction.is_advice:
        return "bound"
    return prediction.effect if answerable else "unfit"


def gain_in_words(prediction: Prediction) -> str:
    """Return the speed-up with its interval: `x1.24 (0.98 to 1.36)`."""
    low, high = map(prediction.speedup_at, (prediction.gain_low_ns, prediction.gain_high_ns))
    ends = f"{low:.2f} to {high:.2f}" if high < math.inf else f"{low:.2f} or more"
    return f"x{prediction.speedup:.2f} ({ends})"


def step_in_words(prediction: Prediction) -> str:
    """Return the predicted step: `25.00 ms`, or `50.00 ms for x2 the samples`."""
    more = "" if prediction.samples == 1 else f" for x{prediction.samples:.3g} the samples"
    return f"{ms(prediction.predicted_ns):.2f} ms{more}"


def effort_in_words(prediction: Prediction) -> str:
    """Return the effort of a change, and whether such predictions are proven: `a line of code; unproven`."""
    proof = {"proven": "; proven on real jobs", "unproven": "; unproven"}.get(prediction.block, "")
    training = "; changes the training" if prediction.training and prediction.is_advice else ""
    return f"{EFFORTS[prediction.effort]}{proof}{training}"


def interval_doubts(trust: Trust, predictions: Sequence[Prediction]) -> list[str]:
    """Return reasons to doubt the predictions that the grade does not show, one line each."""
    said = []
    anchored = trust.coverage.starts_anchored
    if anchored > MAX_ANCHORED:
        said.append(
            f"{anchored:.0%} of start times come from the trace: predictions hardly move what depends on them"
        )
    for prediction in predictions:
        predicted_ns, base_ns = prediction.predicted_ns / prediction.samples, prediction.base_ns
        low_ns, high_ns = base_ns - prediction.gain_high_ns, base_ns - prediction.gain_low_ns  # as shown
        if low_ns <= 0:
            said.append(f"the interval of “{prediction.what()}” reaches 0")
        elif max(high_ns - predicted_ns, predicted_ns - low_ns) > WIDE * predicted_ns:
            said.append(f"the interval of “{prediction.what()}” spans more than ±{WIDE:.0%}")
    return said


def shown_grade(trust: Trust, doubts: Sequence[str]) -> str:
    """Return the grade to show: no better than `fair` if there are doubts.

    Args:
        doubts: lines of `interval_doubts`.
    """
    return "fair" if doubts and trust.grade == "good" else trust.grade
