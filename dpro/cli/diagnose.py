"""`dpro diagnose`: name what is slow or broken, with evidence and cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.analysis import layout_option, open_or_import, with_graph
from dpro.cli.following import print_following
from dpro.cli.output import console, json_option, print_end, print_json, warn
from dpro.errors import UsageError
from dpro.opening import is_trace_folder
from dpro.plugins import extended, hooks_of
from dpro.words import capitalised

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.analysis.answers.diagnosis import Diagnosis
    from dpro.detect.pipeline_slowdown import Slowdown

MIN_STEPS_OUTSIDE = 10  # steps outside deep windows from which a verdict by steps and calls is printed
SHOWN = 4  # slowdowns printed of each kind, the largest ones


@click.command()
@click.argument("runs", metavar="RUN | LOG...", nargs=-1, required=True, type=click.Path())
@layout_option
@json_option
def diagnose(runs: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Find the rank or component that hangs or slows the job down, why, and its cost per step.

    If the job failed, hung or was killed, the answer begins with how it ended, and closes with what the run
    can still answer. In a hang, waits are followed to their root cause through flight recorder dumps, of a
    recorded run or in a folder. Otherwise a rank is blamed for taking longer than its peers over the same
    work, never for waiting. The cost is the step time saved if the component were healed, computed by
    a replay. What the trace cannot show is listed.

    \b
    dpro diagnose RUN
    dpro diagnose FOLDER_OF_DUMPS
    dpro diagnose job.log dmesg.txt        # a job that was not recorded
    dpro diagnose RUN --json | jq '.findings[].component'
    """
    from dpro.analysis.analysis import Analysis
    from dpro.analysis.answers.diagnosis import diagnose_replay, diagnose_tables, diagnosis_document
    from dpro.detect.findings_log import describe_logged

    alone = _diagnose_logs(runs) or (_diagnose_dumps(Path(runs[0])) if is_trace_folder(runs[0]) else None)
    if alone is not None:
        if not as_json and alone.end.sentence:
            print_end(alone.end)
        print_json(diagnosis_document(alone)) if as_json else print_diagnosis(alone)
        return
    (run,) = runs
    analysis = Analysis(open_or_import(run))
    if not as_json:
        print_end(analysis.end)  # before the graph is built, which may fail
    diagnosis = diagnose_tables(analysis) or diagnose_replay(with_graph(analysis))
    diagnosis = extended("diagnosed", diagnosis, analysis.run, given)
    if as_json:
        from dpro.verdict.verdict import with_account

        document = with_account(diagnosis_document(diagnosis), analysis)
        print_json(extended("answered", document, analysis.run))
        return
    print_diagnosis(diagnosis, _limits(analysis, diagnosis))
    for line in describe_logged(list(diagnosis.while_it_ran)):
        console().print(f"while it ran, {line}")
    for line in diagnosis.end.can_say:
        console().print(f"{capitalised(line)}.")
    for print_more in hooks_of("printed"):
        print_more(analysis.run)
    leads_on = diagnosis.findings or not (diagnosis.answerable or analysis.run.manifest.num_cut)
    if leads_on and not diagnosis.end.hung:
        print_following(run, analysis, ["explain"])


def _limits(analysis: Analysis, diagnosis: Diagnosis) -> str:
    """Return what limits a job without faults; empty if something is at fault, or if the limit is unknown."""
    from dpro.verdict.words import limit_of_run

    if diagnosis.findings or not diagnosis.answerable or diagnosis.end.early:
        return ""
    return limit_of_run(analysis)


def _diagnose_logs(paths: tuple[str, ...]) -> Diagnosis | None:
    """Diagnose a job that was not recorded by its logs; None if the only path is something else.

    Raises:
        UsageError: there are several paths, not all of which are logs.
    """
    for diagnose_logs in hooks_of("logs"):
        diagnosis: Diagnosis | None = diagnose_logs([Path(path) for path in paths])
        if diagnosis is not None:
            return diagnosis
    if len(paths) > 1:
        raise UsageError("several paths must all be text logs of one job; otherwise give one RUN")
    return None


def _diagnose_dumps(folder: Path) -> Diagnosis | None:
    """Diagnose hangs from a folder of flight recorder dumps; None if it contains anything else."""
    from dpro.analysis.answers.diagnosis import diagnose_dumps
    from dpro.ingest.dumps import read_dumps

    dumps = read_dumps(folder)
    if dumps is None:
        return None
    for warning in dumps.manifest.warnings:
        warn(warning)
    return diagnose_dumps(str(folder), dumps.frames, dumps.manifest)


def print_diagnosis(diagnosis: Diagnosis, limits: str = "") -> None:
    """Print a diagnosis.

    Args:
        limits: what limits the job, printed if nothing is at fault.
    """
    from dpro.analysis.answers.diagnosis import CALLS, LOGS
    from dpro.detect.words import describe_all

    out, of_hangs = console(), diagnosis.basis in (LOGS, CALLS)
    said = "" if diagnosis.findings else _nothing_found(diagnosis, limits)
    if said:
        out.print(said)
    for described in describe_all(diagnosis.findings, diagnosis.workers):
        out.print(described.headline)
        for line in described.details:
            out.print(f"  {line}")
    for note in diagnosis.notes:
        out.print(f"  note: {note}")
    if diagnosis.findings and not diagnosis.answerable and not of_hangs:
        out.print("  not known: what deep windows show, since their replay does not fit the trace")
    for reason in diagnosis.unknown:
        if reason not in said:
            out.print(f"  not known: {reason}")
    if diagnosis.slowdown is not None and not of_hangs:
        _print_slowdown(diagnosis.slowdown)


def _nothing_found(diagnosis: Diagnosis, limits: str) -> str:
    from dpro.analysis.answers.diagnosis import CALLS, LOGS, REPLAY

    if diagnosis.basis == CALLS:
        return "No hang found in these calls; they do not show what is slow."
    if diagnosis.basis == LOGS:
        return "" if diagnosis.end.bad else "No rank at fault found in these logs."
    if not diagnosis.answerable:
        if diagnosis.steps.filter(diagnosis.steps["window"] < 0)["step"].n_unique() >= MIN_STEPS_OUTSIDE:
            return (
                "No slow rank or component found in its steps and calls; what its deep windows show is not "
                "known, since their replay does not fit."
            )
        return "Not diagnosed: the replay does not fit the trace."
    if diagnosis.end.early:
        return "No slow rank or component found before that."
    where = "" if diagnosis.basis == REPLAY else " in its steps and calls"
    return f"{limits}." if limits else f"No slow rank or component found{where}."


def _print_slowdown(slowdown: Slowdown) -> None:
    out = console()
    out.print(
        "With every operation as fast as others of its kind typically are, the step would be "
        f"{slowdown.total:.3f} times as fast; launches, which were not recorded, make it "
        f"{slowdown.launch:.3f} times as long"
    )
    shown = (
        ("stage", slowdown.by_stage),
        ("data-parallel rank", slowdown.by_dp),
        ("rank", slowdown.by_rank),
        ("kind of operation", slowdown.by_op),
    )
    for what, ratios in shown:
        worst = sorted(((ratio, str(key)) for key, ratio in ratios.items()), reverse=True)[:SHOWN]
        times = ", ".join(f"{key} {ratio - 1:.1%}" for ratio, key in worst)
        out.print(f"  slowdown due to one {what} alone: {times}")
    if slowdown.micro_batches is not None:
        varied = slowdown.micro_batches
        out.print(
            f"  forward and backward of micro-batches: correlation {varied.correlation:.2f} within ranks and "
            f"steps, forward varies by {varied.forward:.1%}"
        )
