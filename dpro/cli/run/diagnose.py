"""`dpro diagnose`: name what is slow or broken, with evidence and cost; silent when nothing is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.analysis import run_argument, with_graph
from dpro.cli.output import console, finding_document, json_option, print_json
from dpro.cli.run.end import NOTHING_BEFORE, end_keys, print_end
from dpro.cli.run.hangs import say_what_dumps_tell, say_what_hangs
from dpro.cli.run.lateness import say_who_is_late
from dpro.cli.runs import open_or_import
from dpro.detect.findings_log import describe_logged, logged_findings
from dpro.opening import holds_traces
from dpro.units import format_duration, ms

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.detect.findings import Finding
    from dpro.detect.pipeline_slowdown import Slowdown


SHOWN = 4  # largest slowdowns of each kind that are printed


@click.command()
@run_argument
@json_option
def diagnose(run: str, as_json: bool) -> None:
    """Name the rank or part that hangs or slows the job down, why, and what it costs per step.

    \b
    How the job ended comes first, where it failed, hung or was ended, and what the run can still say last.
    Of a job that hangs, who waits for whom is followed to the first cause, from the flight recorder's dumps:
    those of a recorded run, or a folder of them. Otherwise a rank is blamed for working longer than its peers
    on the same work, never for waiting. The cost is what the step would save if the part were healed, found
    by replaying it so. Nothing is said when nothing is wrong; what the trace cannot tell is said to be so.

    \b
    dpro diagnose RUN
    dpro diagnose FOLDER_OF_DUMPS
    dpro diagnose RUN --json | jq '.findings[].component'
    """
    from dpro.analysis.analysis import Analysis

    if holds_traces(run) and say_what_dumps_tell(Path(run), as_json):
        return
    analysis = Analysis(open_or_import(run))
    if as_json:
        _say(analysis, as_json)
        return
    print_end(analysis.end)
    _say(analysis, as_json)
    for line in describe_logged(logged_findings(analysis.run.path)):
        console().print(f"while it ran, {line}")
    for line in analysis.end.can_say:
        console().print(f"still known: {line}")


def _say(analysis: Analysis, as_json: bool) -> None:
    """Print what is wrong: what hangs, else who is late where no window shows more, else by replay."""
    from dpro.analysis.verdict import find

    if say_what_hangs(analysis, as_json) or say_who_is_late(analysis, as_json):
        return
    with_graph(analysis)
    findings, slowdown = find(analysis), analysis.slowdown
    if as_json:
        told = {} if slowdown is None else {"slowdown": slowdown_document(slowdown)}
        print_json(diagnose_document(analysis, findings) | told)
    else:
        print_findings(analysis, findings)
        print_slowdown(slowdown)


def diagnose_document(analysis: Analysis, findings: list[Finding]) -> dict[str, Any]:
    """The command's JSON; a run is healthy only if it could have shown that it is not."""
    from dpro.analysis.step_time import step_time_document
    from dpro.analysis.verdict import not_known, notes

    unknown = not_known(analysis)
    return {
        "run": analysis.run.label,
        "findings": [finding_document(finding, ms(finding.cost_ns)) for finding in findings],
        "healthy": not findings and not unknown and not analysis.end.bad,
        "step_time": step_time_document(analysis.steps),
        "answerable": analysis.trust.answerable,
        "reasons": unknown,
        "notes": notes(analysis, findings),
        "while_it_ran": logged_findings(analysis.run.path),
        **end_keys(analysis),
    }


def print_findings(analysis: Analysis, findings: list[Finding]) -> None:
    """The findings for people."""
    from dpro.analysis.verdict import not_known, notes

    out = console()
    if not analysis.trust.answerable and not findings:
        out.print("Not diagnosed: the replay does not fit the trace.")
    elif not findings:
        out.print(NOTHING_BEFORE if analysis.end.early else "Nothing is wrong that this run can show.")
    for finding in findings:
        cause = f" ({finding.cause})" if finding.cause else ""
        out.print(
            f"{finding.class_}: {finding.component_kind} {finding.component_id}{cause} costs "
            f"{format_duration(finding.cost_ns)} per step ({finding.severity:.0%} of it); "
            f"confidence {finding.confidence:.2f}"
        )
        for line in finding.evidence:
            out.print(f"  - {line}")
    for note in notes(analysis, findings):
        out.print(f"  note: {note}")
    if findings and not analysis.trust.answerable:
        out.print("  not known: what deep windows show, since their replay does not fit the trace")
    for reason in not_known(analysis):
        out.print(f"  not known: {reason}")


def slowdown_document(slowdown: Slowdown) -> dict[str, Any]:
    """Ratios of step times as JSON."""
    ratios = (slowdown.by_rank, slowdown.by_stage, slowdown.by_dp)
    by_rank, by_stage, by_dp = ({str(key): ratio for key, ratio in each.items()} for each in ratios)
    return {
        "total": slowdown.total,
        "launch": slowdown.launch,
        "by_rank": by_rank,
        "by_stage": by_stage,
        "by_dp": by_dp,
        "by_op": dict(slowdown.by_op),
        "workers_share": slowdown.workers_share,
        "last_stage_share": slowdown.last_stage_share,
        "micro_batches": slowdown.batches and dataclasses.asdict(slowdown.batches),
    }


def print_slowdown(slowdown: Slowdown | None) -> None:
    """What slows the job down against evenly fast operations, for people."""
    if slowdown is None:
        return
    out = console()
    out.print(
        "With every operation as fast as its like typically is, the step would be "
        f"{slowdown.total:.3f} times as fast; unrecorded launches make it {slowdown.launch:.3f} times as long"
    )
    shown = (
        ("stage", slowdown.by_stage),
        ("data-parallel rank", slowdown.by_dp),
        ("rank", slowdown.by_rank),
        ("kind of operation", slowdown.by_op),
    )
    for what, ratios in shown:
        worst = sorted(((ratio, str(key)) for key, ratio in ratios.items()), reverse=True)[:SHOWN]
        out.print(f"  with the own times of one {what} only: " + ", ".join(f"{k} x{v:.3f}" for v, k in worst))
    if slowdown.batches is not None:
        varied = slowdown.batches
        out.print(
            f"  forward and backward of micro-batches: correlation {varied.correlation:.2f} within ranks and "
            f"steps, forward varies by {varied.forward:.1%}"
        )
