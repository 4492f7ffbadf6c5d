"""The part of `dpro diagnose` that is about jobs that stand still: the verdict, how it came, what to do.

In: a run. Out: text or JSON about what hangs; nothing, where the run is to be searched for what is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpro.analysis.told import told_while_it_ran
from dpro.cli.output import console, finding_document, print_json

if TYPE_CHECKING:
    from dpro.detect.findings import Finding
    from dpro.store import Run


def say_what_hangs(run: Run, as_json: bool) -> bool:
    """Print what hangs in a run, if anything does or the run can tell nothing else.

    Args:
        run: the run.
        as_json: print one object.

    Returns:
        Whether anything was printed.
    """
    from dpro.analysis.verdict import what_hangs
    from dpro.detect.hang.find import examine
    from dpro.detect.hang.records import read_records

    told = what_hangs(run, examine(read_records(run)))
    if told is None:
        return False
    findings, unknown = told
    if as_json:
        print_json(_document(run, findings, unknown))
    else:
        _print(run, findings, unknown)
    return True


def _document(run: Run, findings: list[Finding], unknown: list[str]) -> dict[str, Any]:
    return {
        "run": run.label,
        "findings": [finding_document(finding, None) for finding in findings],
        "healthy": not findings and not unknown,
        "answerable": True,
        "reasons": unknown,
        "while_it_ran": told_while_it_ran(run),
    }


def _print(run: Run, findings: list[Finding], unknown: list[str]) -> None:
    from dpro.detect.hang.words import advice_in_words, verdict_in_words
    from dpro.schema import WORKERS

    out, workers = console(), run.table(WORKERS)
    if not findings:
        out.print("Nothing hangs that these calls can show; what is slow they do not tell.")
    for finding in findings:
        verdict = verdict_in_words(finding)
        out.print(f"{finding.class_}: {verdict} (confidence {finding.confidence:.2f})")
        for line in finding.evidence:
            out.print(f"  - {line}")
        out.print(f"  do: {advice_in_words(finding, workers)}")
    for reason in unknown:
        out.print(f"  not known: {reason}")
