"""Findings in words, the same in the terminal, reports, the dashboard and notices.

In: a finding, and where its processes run. Out: a `FindingInWords`, text without markup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from dpro.detect.findings import Finding, class_in_words
from dpro.detect.hang.evidence import advice_in_words, verdict_in_words
from dpro.units import format_duration


@dataclass(frozen=True)
class FindingInWords:
    """A finding in words.

    Attributes:
        title: what is wrong with what.
        meaning: what that means, or costs, and how sure it is.
        headline: both in one line.
        evidence: what shows it, a line each.
        do: what to do about it; empty where that is not known.
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
        workers: that table, which says where the processes of ranks that hang are; None where it is not read.
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


def summarise(finding: Finding) -> str:
    """What is slow, and what it costs: `slow host work: rank 1 (kernels) costs 3 ms per step (5% of it)`."""
    cost = cost_in_words(finding)
    return f"{_title_of(finding)} costs {cost}" if cost else _title_of(finding)


def cost_in_words(finding: Finding) -> str:
    """What a finding costs: `3 ms per step (5% of it)`; empty where that is not known."""
    if finding.of_hang or not math.isfinite(finding.cost_ns):
        return ""
    return f"{format_duration(finding.cost_ns)} per step ({finding.severity:.0%} of it)"


def name_part(finding: Finding) -> str:
    """What is at fault, and by what: `rank 1 (the input pipeline)`."""
    if finding.of_job:
        return finding.cause or finding.component_id
    return f"{finding.component} ({finding.cause or class_in_words(finding.class_)})"


def _title_of(finding: Finding) -> str:
    return f"{finding.title} ({finding.cause})" if finding.cause else finding.title
