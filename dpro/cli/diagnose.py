"""`dpro diagnose`: name what is slow or broken, with evidence and cost; silent when nothing is."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.analysis import Analysis, analyse, run_argument
from dpro.cli.output import console, json_option, print_json
from dpro.units import format_duration, ms

if TYPE_CHECKING:
    import polars as pl

    from dpro.detect.findings import Finding


@click.command()
@run_argument
@json_option
def diagnose(run: str, as_json: bool) -> None:
    """Name the rank or part that slows the job down, why, and what it costs per step.

    \b
    A rank is blamed for working longer than its peers on the same work, never for waiting. The cost is what
    the step would save if the part were healed, found by replaying it so. Nothing is said when nothing is
    wrong; what the trace cannot tell is said to be so.

    \b
    dpro diagnose RUN
    dpro diagnose RUN --json | jq '.findings[].component'
    """
    analysis = analyse(run)
    findings = find(analysis)
    if as_json:
        print_json(diagnose_document(analysis, findings))
    else:
        print_findings(analysis, findings)


def find(analysis: Analysis) -> list[Finding]:
    """Run all detectors; none on a run whose replay does not fit, since costs would mean nothing."""
    from dpro.detect.diagnose import diagnose_graph

    return diagnose_graph(analysis.built.graph) if analysis.trust.answerable else []


def not_known(analysis: Analysis) -> list[str]:
    """What keeps this run from showing all that may be wrong, one line each."""
    from dpro.detect.straggler import FEWEST_STEPS

    reasons = [*_ends(analysis), *analysis.trust.reasons]
    steps = analysis.trust.steps.height
    if 0 < steps < FEWEST_STEPS:
        reasons.append(f"{steps} step cannot show that anything persists: record at least {FEWEST_STEPS}")
    return reasons


def _ends(analysis: Analysis) -> list[str]:
    """How ranks ended, where it was not well; SIGTERM is what launchers send to the rest."""
    import polars as pl

    from dpro.schema import WORKERS

    workers = analysis.run.table(WORKERS)
    killed = workers.filter((pl.col("exit_signal") > 0) & (pl.col("exit_signal") != signal.SIGTERM))
    failed = workers.filter(pl.col("exit_code") > 0)
    return [
        *(f"rank {rank} was ended by signal {number}" for rank, number in _pairs(killed, "exit_signal")),
        *(f"rank {rank} ended with exit code {code}" for rank, code in _pairs(failed, "exit_code")),
    ]


def _pairs(workers: pl.DataFrame, column: str) -> list[tuple[int, int]]:
    return [(int(rank), int(value)) for rank, value in workers.select("rank", column).iter_rows()]


def diagnose_document(analysis: Analysis, findings: list[Finding]) -> dict[str, Any]:
    """The command's JSON; a run is healthy only if it could have shown that it is not."""
    unknown = not_known(analysis)
    return {
        "run": analysis.run.label,
        "findings": [
            {
                "class": finding.class_,
                "component": {"kind": finding.component_kind, "id": finding.component_id},
                "ranks": list(finding.ranks),
                "severity": finding.severity,
                "confidence": finding.confidence,
                "cost_ms_per_step": ms(finding.cost_ns),
                "evidence": list(finding.evidence),
            }
            for finding in findings
        ],
        "healthy": not findings and not unknown,
        "answerable": analysis.trust.answerable,
        "reasons": unknown,
    }


def print_findings(analysis: Analysis, findings: list[Finding]) -> None:
    """The findings for people."""
    out = console()
    if not analysis.trust.answerable:
        out.print("Not diagnosed: the replay does not fit the trace.")
    elif not findings:
        out.print("Nothing is wrong that this run can show.")
    for finding in findings:
        out.print(
            f"{finding.class_}: {finding.component_kind} {finding.component_id} costs "
            f"{format_duration(finding.cost_ns)} per step ({finding.severity:.0%} of it); "
            f"confidence {finding.confidence:.2f}"
        )
        for line in finding.evidence:
            out.print(f"  - {line}")
    for reason in not_known(analysis):
        out.print(f"  not known: {reason}")
