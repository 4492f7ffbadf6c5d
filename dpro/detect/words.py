"""Wording of findings, shared by the terminal, reports, the dashboard and notices.

Takes a finding, and where its processes run; returns a `FindingInWords`, text without markup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from dpro.detect.findings import Finding, class_in_words, ranks_of
from dpro.detect.hang.evidence import ATTENDANCE, advice_in_words, verdict_in_words
from dpro.units import format_duration
from dpro.words import numbers_in_words


@dataclass(frozen=True)
class FindingInWords:
    """A finding in words.

    Attributes:
        title: what is wrong with what.
        meaning: what that means, or costs, and the confidence.
        headline: title and meaning in one line.
        evidence: its evidence, one line each.
        do: what to do about it; empty where unknown.
    """

    title: str
    meaning: str
    headline: str
    evidence: Sequence[str]
    do: str

    @property
    def details(self) -> list[str]:
        """The lines below the headline."""
        return [*(f"- {line}" for line in self.evidence), *([f"do: {self.do}"] if self.do else [])]


def describe(finding: Finding, workers: pl.DataFrame | None = None) -> FindingInWords:
    """Put a finding into words.

    Args:
        workers: that table, which says where the processes of hanging ranks are; None to leave out advice on
            hangs.
    """
    sure = f"confidence {finding.confidence:.2f}"
    if finding.of_hang:
        advice = advice_in_words(finding, workers) if workers is not None else ""
        do = "; ".join(filter(None, [finding.remedy, advice]))
        meaning = f"{verdict_in_words(finding)}; {sure}"
        return FindingInWords(
            finding.title, meaning, f"{class_in_words(finding.class_)}: {meaning}", finding.evidence, do
        )
    cost = cost_in_words(finding)
    meaning = f"costs {cost}; {sure}" if cost else sure
    headline = f"{summarise(finding)}; {sure}"
    return FindingInWords(_title_of(finding), meaning, headline, finding.evidence, finding.remedy)


def describe_all(findings: Sequence[Finding], workers: pl.DataFrame) -> list[FindingInWords]:
    """Put findings into words, joining hangs of one operation.

    Args:
        workers: that table.
    """
    return [describe(finding, workers) for finding in join_hangs(findings)]


def join_hangs(findings: Sequence[Finding]) -> list[Finding]:
    """Join hangs of several ranks that agree on the operation, cause and remedy; others are unchanged."""
    cases: dict[object, list[Finding]] = {}
    for finding in findings:
        awaited = [one.text for one in finding.observations if one.kind == ATTENDANCE]
        alone = not finding.of_hang or finding.component_kind != "rank" or not awaited
        case = id(finding) if alone else (finding.class_, finding.cause, finding.remedy, awaited[0])
        cases.setdefault(case, []).append(finding)
    return [_joined(one) for one in cases.values()]


def _joined(findings: Sequence[Finding]) -> Finding:
    """Return one finding of all ranks, with the evidence of each; its confidence is the lowest."""
    if len(findings) == 1:
        return findings[0]
    ranks = tuple(sorted(ranks_of(findings)))
    observations = {one.text: one for finding in findings for one in finding.observations}
    order = list(dict.fromkeys(one.kind for one in observations.values()))
    return replace(
        findings[0],
        component_kind="ranks",
        component_id=numbers_in_words(ranks),
        ranks=ranks,
        confidence=min(finding.confidence for finding in findings),
        observations=tuple(sorted(observations.values(), key=lambda one: order.index(one.kind))),
        place=findings[0].place if len({finding.place for finding in findings}) == 1 else None,
    )


def summarise(finding: Finding) -> str:
    """Return title and cost: `slow host work: rank 1 (kernels) costs 3 ms per step (5% of it)`."""
    cost = cost_in_words(finding)
    return f"{_title_of(finding)} {cost_verb(finding)} {cost}" if cost else _title_of(finding)


def cost_in_words(finding: Finding) -> str:
    """Return the cost of a finding: `3 ms per step (5% of it)`; empty where it is unknown, or nothing yet."""
    if finding.of_hang or not finding.cost_ns or not math.isfinite(finding.cost_ns):
        return ""
    cost, share = f"{format_duration(finding.cost_ns)} per step", f"{finding.severity:.0%} of"
    return f"{cost} on average ({share} the time)" if finding.costs_pauses else f"{cost} ({share} it)"


def cost_verb(finding: Finding) -> str:
    """Return `costs`, or `cost` for batches, a plural."""
    return "cost" if finding.of_job and finding.component_id.endswith("batches") else "costs"


def name_part(finding: Finding) -> str:
    """Return what is at fault, and why: `rank 1 (the input pipeline)`."""
    if finding.of_job:
        return finding.cause or finding.component_id
    return f"{finding.component} ({finding.cause or class_in_words(finding.class_)})"


def _title_of(finding: Finding) -> str:
    return f"{finding.title} ({finding.cause})" if finding.cause else finding.title
