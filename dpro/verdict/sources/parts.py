"""Advice on parts that findings name: ranks, hosts, pauses, bad numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpro.detect import load_model
from dpro.detect.findings import PAUSES, START, Finding, class_in_words
from dpro.detect.machine.oversubscribed import CAUSE as CROWDED
from dpro.errors import DproError
from dpro.units import format_duration
from dpro.verdict.advice import MAX_GAIN, WORTH, Advice, best_of, interval_of, partly
from dpro.verdict.facts import JobFacts

EVEN_SEQUENCES = "balance:over=sequences"


def heal_slow_parts(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Find and end what slows down a rank that a finding names."""
    for finding in facts.findings:
        if finding.class_ == load_model.CLASS and best_of(facts, [EVEN_SEQUENCES]) is not None:
            continue
        if finding.class_ == PAUSES or finding.of_job:  # the few replayed steps do not show these
            yield from remedies_of([finding])
            continue
        if finding.component_kind != "rank" or not finding.ranks or finding.of_numbers:
            continue
        edits = [f"heal:rank={rank}" for rank in finding.ranks]
        try:
            prediction = facts.predict(*edits)
        except DproError:
            continue
        names = ", ".join(map(str, finding.ranks))
        find = _to_be_found(f"rank {names}", finding)
        yield Advice(
            "heal",
            f"{finding.remedy} (rank {names}: {finding.cause or class_in_words(finding.class_)})"
            if finding.remedy
            else find,
            *interval_of(prediction),
            _effort_of(finding),
            "its peers do the same work",
            f"dpro whatif RUN --edit heal:rank={finding.ranks[0]}",
            edits[0] if len(edits) == 1 else "",
        )


def correct_numbers(findings: Sequence[Finding]) -> list[Advice]:
    """Return what to do about bad losses; that shortens no step."""
    bad = [finding for finding in findings if finding.of_numbers]
    return [Advice("correct", finding.remedy, None, None, "") for finding in bad[:1]]


def remedies_of(findings: Sequence[Finding]) -> Iterator[Advice]:
    """Yield the remedies of findings, or what to look for, with the gain of the mean step without each."""
    for finding in findings:
        gain = 1 / (1 - min(finding.severity, 1 - 1 / MAX_GAIN))
        if gain < WORTH or (finding.class_, finding.component_id) == (PAUSES, START):
            continue  # a start is over once it was recorded
        is_of_data = finding.class_ == load_model.CLASS
        if finding.remedy:
            shown = finding.evidence and not is_of_data  # FAULT names the batches
            do = f"{finding.remedy} ({finding.evidence[0]})" if shown else finding.remedy
        elif finding.component_kind == "rank":
            do = _to_be_found(finding.component, finding)
        else:
            continue
        kind = "balance-input" if is_of_data else "heal"
        yield Advice(
            kind, do, partly(gain, 0.5), gain, _effort_of(finding), "of the mean step, with its pauses"
        )


def _effort_of(finding: Finding) -> str:
    """Return `no code` if a finding's remedy concerns the machine of a rank."""
    of_machine = finding.remedy and finding.component_kind in ("rank", "host") and finding.class_ != PAUSES
    return "no code" if of_machine else "new code"


def _to_be_found(part: str, finding: Finding) -> str:
    """Return what to do about a part that is slow for a reason that the finding does not know."""
    where = f", in {finding.place.in_words}" if finding.place else ""
    return f"find what makes {part} slower than its peers{where}, and remove it"


def give_cores(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Give ranks that wait for a core fewer threads, or more cores.

    If other processes take the cores, fewer threads may leave these more of them, and gain nothing.
    """
    for finding in facts.findings:
        if finding.cause == CROWDED and finding.cost_ns > 0:
            left_ns = max(facts.step_ns - finding.cost_ns, 1.0)
            gain = max(facts.step_ns / left_ns, 1.0)
            shared = finding.component_id in facts.analysis.shared_hosts
            wait = (
                f"ranks on {finding.component_id} wait {format_duration(finding.cost_ns)} a step for a core"
            )
            yield Advice(
                "cores",
                f"{finding.remedy}: {wait}",
                1.0 if shared else partly(gain, 0.5),
                gain,
                "a setting",
                "" if shared else "no other process takes the cores",
            )
