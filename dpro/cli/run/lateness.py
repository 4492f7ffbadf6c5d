"""The part of `dpro diagnose` that is about ranks the others wait for, where no deep window shows it.

In: a run with steps and calls. Out: text or JSON; nothing, where the run has deep windows to be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpro.cli.output import console, finding_document, print_json
from dpro.cli.run.end import NOTHING_BEFORE, end_keys
from dpro.detect.findings_log import logged_findings
from dpro.units import format_duration, ms

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.detect.findings import Finding


def say_who_is_late(analysis: Analysis, as_json: bool) -> bool:
    """Print the ranks that the others wait for, if the run has calls and no deep windows to speak of.

    Returns:
        Whether anything was printed.
    """
    from dpro.analysis.verdict import notes_of_few_steps, without_windows

    told = without_windows(analysis.run)
    if told is None:
        return False
    findings, unknown = told
    notes = notes_of_few_steps(analysis, findings)
    if as_json:
        print_json(_document(analysis, findings, unknown, notes))
    else:
        print_late(findings, unknown, notes, early=analysis.end.early)
    return True


def print_late(
    findings: list[Finding], unknown: list[str], notes: Sequence[str] = (), *, early: bool = False
) -> None:
    """The findings for people; `early` is whether the job came to another end than its own."""
    out = console()
    if not findings:
        out.print(
            NOTHING_BEFORE if early else "Nothing is wrong that the steps and calls of this run can show."
        )
    for finding in findings:
        for line in in_words(finding):
            out.print(line)
    for note in notes:
        out.print(f"  note: {note}")
    for reason in unknown:
        out.print(f"  not known: {reason}")


def in_words(finding: Finding) -> list[str]:
    """What is found, and its evidence, one line each."""
    cause = f" ({finding.cause})" if finding.cause else ""
    costs = "costs its peers" if finding.component_kind == "rank" else "costs"
    return [
        f"{finding.class_}: {finding.component_kind} {finding.component_id}{cause} {costs} "
        f"{format_duration(finding.cost_ns)} per step ({finding.severity:.0%} of it); "
        f"confidence {finding.confidence:.2f}",
        *(f"  - {line}" for line in finding.evidence),
    ]


def _document(
    analysis: Analysis, findings: list[Finding], unknown: list[str], notes: list[str]
) -> dict[str, Any]:
    from dpro.analysis.step_time import step_time_document

    return {
        "run": analysis.run.label,
        "findings": [finding_document(finding, ms(finding.cost_ns)) for finding in findings],
        "healthy": not findings and not unknown and not analysis.end.bad,
        "step_time": step_time_document(analysis.steps),
        "answerable": True,
        "reasons": unknown,
        "notes": notes,
        "while_it_ran": logged_findings(analysis.run.path),
        **end_keys(analysis),
    }
