"""What would help: the fix of each finding first, then predictions that noise does not hide.

In: findings and predictions. Out: rows in words, those within the noise apart, and why intervals are not to
be relied on. Nothing is replayed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpro.detect.findings import Finding
from dpro.detect.hang.evidence import HANGS
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.whatif.predict import Prediction
from dpro.units import ms

WIDE = 0.5  # of the predicted time on either side: a wider interval says little
WORTH_SHOWING = 1.005  # speed-up: less is ×1.00
MAX_ANCHORED = 0.2  # share of starts that are tied to the trace and hardly move under an edit
INPUT = "the input pipeline"
_FIXES = {  # class of a finding -> what to do
    "slow.compute": "check the device's clocks, temperature, power cap and errors, and what else runs on it; "
    "else move the rank to another device",
    "slow.host": "see what the host does there (evidence above; `dpro record --stacks` shows the code)",
    "slow.link": "test the link by itself, then its cable and ports; else place the ranks elsewhere",
    "slow.nic": "test the port by itself, then its cable and settings; else move the ranks to another host",
    "slow.fabric": "compare with the fabric's expected bandwidth; look for other jobs on it",
    "slow.regression": "see what changed then (evidence above)",
    "imbalance.stage": "distribute layers evenly over the stages: `dpro whatif RUN --edit balance`",
    "imbalance.data": "distribute the input evenly over ranks, by its length",
    "pauses": "see which steps and what works in them (evidence above)",
}
_REMEDIES = {  # class of a finding -> edits that undo it
    "imbalance.stage": ["balance:over=stages"],
    "imbalance.data": ["balance:over=sequences"],
    "pauses": ["gc:every=100"],
}
_INPUT_FIX = "DataLoader(num_workers=N, prefetch_factor=…, pin_memory=True), or less work per sample"


class Improvement(NamedTuple):
    """Something that would help.

    Attributes:
        what: if this were so.
        edits: what `--edit` accepts; empty where the cost of a finding is all that is known.
        speedup: of the step.
        predicted_ns: the step then.
        interval: low and high, ns; None where it is not known.
        block: proven, unproven, bound, or `finding`: the cost that a detector found by replaying.
        how: how to do it.
        fixes: the finding that it fixes, as `slow.host: rank 1`; else empty.
    """

    what: str
    edits: tuple[str, ...]
    speedup: float
    predicted_ns: float
    interval: tuple[float, float] | None
    block: str
    how: str
    fixes: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Speed-up, step, interval and proof, as reports have them."""
        low_high = " to ".join(f"{ms(each):.2f}" for each in self.interval or ())
        proof = {"proven": "real jobs, before and after", "finding": "cost found by replay"}
        return (
            f"x{self.speedup:.2f}",
            f"{ms(self.predicted_ns):.2f} ms",
            f"{low_high} ms" if low_high else "not known",
            proof.get(self.block, "none: unproven"),
        )


class Gains(NamedTuple):
    """What would help.

    Attributes:
        rows: the fix of each finding, then predictions in their order.
        within_noise: predictions whose interval holds the step as it is, or that change hardly anything.
    """

    rows: list[Improvement]
    within_noise: list[Improvement]


def what_helps(findings: Sequence[Finding], predictions: Sequence[Prediction], base_ns: float) -> Gains:
    """Sort out what would help.

    Args:
        predictions: as `dpro.replay.whatif.search` ranks them.
    """
    advice = [each for each in predictions if each.is_advice and each.speedup > 1]
    fixes = [_fix(finding, advice, base_ns) for finding in findings if _has_cost(finding)]
    used = {row.edits for row in fixes if row.edits}
    others = [each for each in advice if tuple(map(str, each.edits)) not in used]
    clear = [stands_out(each) for each in others]
    shown, folded = (
        [_row(each) for each, is_clear in zip(others, clear) if is_clear is want] for want in (True, False)
    )
    return Gains([*fixes, *shown], folded)


def stands_out(prediction: Prediction) -> bool:
    """Whether an edit shortens the step by more than its noise, and by more than ×1.00."""
    return prediction.effect == "faster" and prediction.speedup >= WORTH_SHOWING


def _has_cost(finding: Finding) -> bool:
    return finding.class_ not in HANGS and finding.cost_ns > 0


def _fix(finding: Finding, advice: Sequence[Prediction], base_ns: float) -> Improvement:
    """The edit that undoes a finding, or its cost where there is no such edit."""
    from_input = INPUT in (finding.cause, finding.component_id)
    how = _INPUT_FIX if from_input else _FIXES.get(finding.class_, "see the evidence above")
    wanted = [f"heal:rank={rank}" for rank in finding.ranks] if finding.component_kind == "rank" else []
    wanted += ["hide-input"] if from_input else []
    wanted += _REMEDIES.get(finding.class_, [])
    for each in advice:
        if len(each.edits) == 1 and str(each.edits[0]) in wanted:
            row = _row(each)._replace(fixes=finding.title)
            return row if from_input else row._replace(how=how)  # that of a healed rank names no cause
    left = max(base_ns - finding.cost_ns, 1.0)
    what = f"{finding.component} is no longer slow"
    return Improvement(what, (), base_ns / left, left, None, "finding", how, finding.title)


def _row(prediction: Prediction) -> Improvement:
    return Improvement(
        what=prediction.what(),
        edits=tuple(map(str, prediction.edits)),
        speedup=prediction.speedup,
        predicted_ns=prediction.predicted_ns,
        interval=(prediction.low_ns, prediction.high_ns),
        block=prediction.block,
        how=prediction.how(),
    )


def interval_doubts(trust: Trust, rows: Sequence[Improvement]) -> list[str]:
    """Say why predictions are not to be relied on that the grade alone would not show."""
    said = []
    anchored = trust.coverage.starts_anchored
    if anchored > MAX_ANCHORED:
        said.append(
            f"{anchored:.0%} of starts are tied to the trace: what depends on them hardly moves in "
            "predictions"
        )
    for row in rows:
        if row.interval is None:
            continue
        low, high = row.interval
        if low <= 0:
            said.append(f"the interval of “{row.what}” reaches 0")
        elif max(high - row.predicted_ns, row.predicted_ns - low) > WIDE * row.predicted_ns:
            said.append(f"the interval of “{row.what}” spans more than ±{WIDE:.0%}")
    return said


def shown_grade(trust: Trust, doubts: Sequence[str]) -> str:
    """Return the grade that is shown: no better than `fair` where intervals are in doubt.

    Args:
        doubts: as `interval_doubts`.
    """
    return "fair" if doubts and trust.grade == "good" else trust.grade
