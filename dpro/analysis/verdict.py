"""What is wrong with a run, by all detectors in the order in which they exclude each other, and what is open.

In: a run, or its `Analysis`. Out: findings, and one line for each thing that the run cannot show. Of a job
that hangs, calls alone tell; of one without deep windows, steps and calls; else the replay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import polars as pl

from dpro.detect.findings import Finding
from dpro.errors import DproError, Unanswerable
from dpro.schema import COLLECTIVES, SPANS, STEPS, WORKERS

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.detect.context import Context
    from dpro.detect.stragglers.own_time import AlwaysOn
    from dpro.store import Manifest, Run

# Of what a recording says of itself, what is about windows.
_FAILED_WINDOWS = re.compile(r"goes on without windows: |stopped recording in |window \d+ is lost: ")

Verdict = tuple[list[Finding], list[str]]


def judge(analysis: Analysis) -> Verdict:
    """What `dpro diagnose` says of a run: findings, costliest first, and what the run cannot show.

    Raises:
        Unanswerable: it holds nothing that could tell.
    """
    hangs = what_hangs(analysis)
    if hangs is not None:
        return hangs
    late = without_windows(analysis.run)
    if late is not None:
        return late
    return find(analysis), not_known(analysis)


def what_hangs(analysis: Analysis) -> Verdict | None:
    """What hangs in a run and what is not known of that; None if nothing does, and the run can tell more."""
    rows = analysis.run.rows()
    if not analysis.hangs and (rows[SPANS.name] or rows[STEPS.name] or not rows[COLLECTIVES.name]):
        return None
    return analysis.hangs, not_read(analysis.run.manifest)


def not_read(manifest: Manifest) -> list[str]:
    """What of a job that hangs was not read, one line each."""
    from dpro.detect.hang.evidence import ranks_in_words

    missing = manifest.missing_ranks
    unknown = [f"what {ranks_in_words(missing)} did: no dump of theirs"] if missing else []
    unknown += [manifest.unrecorded] if manifest.unrecorded else []
    return unknown + [warning for warning in manifest.warnings if warning.startswith("left out: ")]


def find(analysis: Analysis) -> list[Finding]:
    """Run all detectors; those that replay only where the replay fits, since costs would mean nothing else.

    Deep windows have few steps; the steps between them show what is too small, or too recent, for those.
    """
    from dpro.detect.run import diagnose

    return diagnose(_context(analysis))


def _context(analysis: Analysis) -> Context:
    """What detectors see of a run with deep windows."""
    from dpro.detect.context import Context

    graph = analysis.built.graph
    if analysis.slowdown is not None:
        return Context(analysis.run, graph, analysis.slowdown)
    known = graph if analysis.trust.answerable else None
    return Context(analysis.run, known, breakdown=lambda: analysis.breakdown)


def notes(analysis: Analysis, findings: list[Finding]) -> list[str]:
    """What deep windows show that is worth a sentence though it is no finding, one line each."""
    from dpro.detect.run import notes_of

    return notes_of(_context(analysis), findings) if analysis.run.rows()[SPANS.name] else []


def notes_of_few_steps(analysis: Analysis, findings: list[Finding]) -> list[str]:
    """The notes of a run whose windows have too few steps for a verdict; none if they cannot be replayed."""
    try:
        return notes(analysis, findings)
    except DproError:
        return []


def without_windows(run: Run) -> Verdict | None:
    """What the steps and calls of a run show, and what they leave open; None where windows show more."""
    from dpro.detect.context import Context, has_windows
    from dpro.detect.run import diagnose

    if has_windows(run):
        return None
    context = Context(run)
    reason = why_no_window(run)
    no_window = [f"what operators and kernels take: {reason}"] if reason else []
    return diagnose(context), [*bad_ends(run), *_not_shown(*context.aligned), *no_window]


def _not_shown(rows: AlwaysOn, apart: list[int]) -> list[str]:
    """What the calls leave open, one line each."""
    from dpro.detect.hang.evidence import ranks_in_words
    from dpro.detect.stragglers.excess import WINDOWS
    from dpro.detect.stragglers.from_calls import HOSTS_ONLY, cannot_show
    from dpro.detect.stragglers.timed_ranks import is_timed

    reasons = cannot_show(rows.collectives, rows.workers)
    if HOSTS_ONLY in reasons and is_timed(rows.collectives):
        reasons.remove(HOSTS_ONLY)
    if apart:
        reasons.append(f"{ranks_in_words(apart)}: no comparison of their clocks with the others'")
    if rows.steps["step"].n_unique() <= min(WINDOWS):
        reasons.append(f"fewer than {min(WINDOWS)} whole steps cannot show that anything persists")
    return reasons


def not_known(analysis: Analysis) -> list[str]:
    """What keeps a replayed run from showing all that may be wrong, one line each."""
    from dpro.detect.significance import MIN_STEPS

    reasons = [*bad_ends(analysis.run), *analysis.trust.reasons]
    steps = analysis.trust.steps.height
    if 0 < steps < MIN_STEPS:
        reasons.append(f"{steps} step cannot show that anything persists: record at least {MIN_STEPS}")
    return reasons


def bad_ends(run: Run) -> list[str]:
    """How ranks ended, where it was not well, and not because they were told to."""
    from dpro.detect.hang.deaths import ENDED_FROM_OUTSIDE

    workers = run.table(WORKERS)
    told_to = [0, -1, *(int(number) for number in ENDED_FROM_OUTSIDE)]
    killed = workers.filter(~pl.col("exit_signal").is_in(told_to))
    failed = workers.filter(pl.col("exit_code") > 0)
    return [
        *(f"rank {rank} was ended by signal {number}" for rank, number in _pairs(killed, "exit_signal")),
        *(f"rank {rank} ended with exit code {code}" for rank, code in _pairs(failed, "exit_code")),
    ]


def _pairs(workers: pl.DataFrame, column: str) -> list[tuple[Any, Any]]:
    return workers.select("rank", column).rows()


@contextmanager
def why_unanswerable(analysis: Analysis) -> Iterator[None]:
    """Where a run lacks what is needed, say why, if that is known; how the job ended first."""
    try:
        yield
    except Unanswerable as error:
        if analysis.end.bad:
            missing, why = str(error).partition(":")[0], why_no_window(analysis.run)
            said = [f"{missing[:1].upper()}{missing[1:]}", *([why] if why else [])]
            more = "`dpro diagnose` says what is known"
            raise Unanswerable(f"{analysis.end.sentence} {'; '.join([*said, more])}") from error
        reason = why_no_window(analysis.run) or _what_calls_tell(analysis.run)
        what = analysis.run.manifest.unrecorded or str(error)
        raise Unanswerable(f"{what}; {reason}" if reason else what) from error


def _what_calls_tell(run: Run) -> str:
    """What a run without spans can be asked, such as dumps of a flight recorder."""
    rows = run.rows()
    if rows[SPANS.name] or not rows[COLLECTIVES.name]:
        return ""
    return "what it holds, collective calls, is enough for `dpro diagnose` and `dpro info`"


def why_no_window(run: Run) -> str:
    """Why a recording has steps and no deep window; empty where it has one, or is no recording."""
    options = run.manifest.options
    if run.rows()[SPANS.name] or not {"skip", "window_steps"} <= options.keys():
        return ""
    if not options.get("windows", True):
        return "the job was recorded without deep windows (--no-windows)"
    last = run.table(STEPS, ["step"])["step"].max()
    if not isinstance(last, int):
        return ""
    steps = last + 1
    first, end = options["skip"], options["skip"] + options["window_steps"]
    if steps < end:
        whole = f"before its first deep window (steps {first} to {end - 1}) was whole"
        advice = "" if run.manifest.exit_status else ": record more steps, or lower --skip"
        return f"the job ended after {steps} steps, {whole}{advice}"
    manifest = run.manifest
    failed = [each for each in manifest.warnings if _FAILED_WINDOWS.search(each)]
    missed = [
        f"{count} {each}" for each, count in manifest.skipped.items() if each.startswith("deep windows")
    ]
    reasons = failed[:1] or missed or ["the recording does not tell why"]
    return f"no deep window was kept: {'; '.join(reasons)}"
