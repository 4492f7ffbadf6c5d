"""The part of `dpro diagnose` that is about ranks the others wait for, where no deep window shows it.

In: a run with steps and calls. Out: text or JSON; nothing, where the run has deep windows to be replayed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dpro.cli.output import console, finding_document, print_json
from dpro.cli.watch import told_while_it_ran
from dpro.units import format_duration, ms

if TYPE_CHECKING:
    from dpro.detect.findings import Finding
    from dpro.detect.one_clock import Always
    from dpro.store import Run


def say_who_is_late(run: Run, as_json: bool) -> bool:
    """Print the ranks that the others wait for, if the run has calls and no deep windows to speak of.

    Returns:
        Whether anything was printed.
    """
    told = without_windows(run)
    if told is None:
        return False
    findings, unknown = told
    if as_json:
        print_json(_document(run, findings, unknown))
    else:
        print_late(findings, unknown)
    return True


def without_windows(run: Run) -> tuple[list[Finding], list[str]] | None:
    """What the steps and calls of a run show, and what they leave open; None where windows show more."""
    import polars as pl

    from dpro.cli.diagnose import bad_ends
    from dpro.detect.late_ranks import find_late_ranks
    from dpro.detect.one_clock import on_one_clock
    from dpro.detect.regression import find_regression
    from dpro.detect.straggler import FEWEST_STEPS
    from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS

    rows = run.rows()
    if not rows[STEPS.name] or not rows[COLLECTIVES.name]:
        return None
    windows = run.table(STEPS, ["step", "window"]).filter(pl.col("window") >= 0)
    if rows[SPANS.name] and windows["step"].n_unique() >= FEWEST_STEPS:
        return None
    aligned, apart = on_one_clock(always_of(run))
    findings = find_late_ranks(aligned.collectives, aligned.steps, aligned.counters, aligned.workers)
    findings += find_regression(run.table(STEPS), partial(run.table, COUNTERS), partial(run.table, SPANS))
    return findings, [*bad_ends(run), *not_shown(aligned, apart), *_why_no_window(run)]


def always_of(run: Run) -> Always:
    """What of a run was always recorded."""
    from dpro.detect.one_clock import Always
    from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, STEPS, WORKERS

    tables = (COLLECTIVES, STEPS, COUNTERS, WORKERS, CLOCK_SAMPLES)
    return Always(*(run.table(table) for table in tables))


def not_shown(rows: Always, apart: list[int]) -> list[str]:
    """What the calls leave open, one line each."""
    from dpro.detect.hang.words import ranks_in_words
    from dpro.detect.late_ranks import WINDOWS, cannot_show

    reasons = cannot_show(rows.collectives, rows.workers)
    if apart:
        reasons.append(f"{ranks_in_words(apart)}: no comparison of their clocks with the others'")
    if rows.steps["step"].n_unique() <= min(WINDOWS):
        reasons.append(f"fewer than {min(WINDOWS)} whole steps cannot show that anything persists")
    return reasons


def print_late(findings: list[Finding], unknown: list[str]) -> None:
    """The findings for people."""
    out = console()
    if not findings:
        out.print("Nothing is wrong that the steps and calls of this run can show.")
    for finding in findings:
        for line in in_words(finding):
            out.print(line)
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


def _document(run: Run, findings: list[Finding], unknown: list[str]) -> dict[str, Any]:
    return {
        "run": run.label,
        "findings": [finding_document(finding, ms(finding.cost_ns)) for finding in findings],
        "healthy": not findings and not unknown,
        "answerable": True,
        "reasons": unknown,
        "while_it_ran": told_while_it_ran(run),
    }


def _why_no_window(run: Run) -> list[str]:
    from dpro.cli.analysis import why_no_window

    reason = why_no_window(run)
    return [f"what operators and kernels take: {reason}"] if reason else []
