"""Questions that a run cannot answer, and the reasons: data not recorded, and what the records leave open.

Takes a run, the trust in its replay, and the end of its job; returns one line for each open question, the
reason why the run has no deep window, and the lines on pretended ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import polars as pl

from dpro.errors import Unanswerable
from dpro.schema import COLLECTIVES, ITERATIONS, REQUESTS, SPANS, STEPS, WORKERS
from dpro.words import capitalised

if TYPE_CHECKING:
    from dpro.analysis.end import JobEnd
    from dpro.detect.stragglers.own_time import AlwaysOn
    from dpro.replay.fidelity.accuracy import Trust
    from dpro.replay.pretended import PretendedStep
    from dpro.store import Manifest, Run

# Warnings of the recorder that concern deep windows; older recordings say `goes on`.
_FAILED_WINDOWS = re.compile(
    r"(?:continues|goes on) without windows: |stopped recording in |window \d+ is lost: "
)


def not_read(manifest: Manifest) -> list[str]:
    """Return the data of a hanging job that were not read, one line each."""
    from dpro.words import ranks_in_words

    missing = manifest.missing_ranks
    unknown = [f"what {ranks_in_words(missing)} did: no dump of them was given"] if missing else []
    unknown += [manifest.unrecorded] if manifest.unrecorded else []
    return unknown + [warning for warning in manifest.warnings if warning.startswith("left out: ")]


def not_shown_by_calls(run: Run, rows: AlwaysOn, apart: list[int]) -> list[str]:
    """Return why steps and calls cannot show every fault, one line each.

    Args:
        run: a run judged without deep windows.
        rows: its always-on tables, on one clock.
        apart: ranks missing from `rows`, since their clocks were never compared with the others'.
    """
    from dpro.detect.significance import LATEST_STEPS
    from dpro.detect.stragglers.from_calls import HOSTS_ONLY, cannot_show, is_timed
    from dpro.words import ranks_in_words

    reasons = cannot_show(rows.collectives, rows.workers)
    if HOSTS_ONLY in reasons and is_timed(rows.collectives):
        reasons.remove(HOSTS_ONLY)
    if apart:
        reasons.append(f"{ranks_in_words(apart)}: their clocks were never compared with the others'")
    if rows.steps["step"].n_unique() <= min(LATEST_STEPS):
        reasons.append(f"fewer than {min(LATEST_STEPS)} whole steps cannot show a persistent fault")
    why = why_no_window(run)
    return [*bad_ends(run), *reasons, *([f"what operators and kernels take: {why}"] if why else [])]


def not_shown_by_replay(run: Run, trust: Trust) -> list[str]:
    """Return why a replayed run cannot show every fault, one line each."""
    from dpro.detect.significance import MIN_STEPS

    reasons = [*bad_ends(run), *trust.reasons]
    steps = trust.steps.height
    if 0 < steps < MIN_STEPS:
        reasons.append(f"one step cannot show a persistent fault: record at least {MIN_STEPS}")
    return reasons


def refuse_pretended(run: Run) -> None:
    """Raise if the ranks of a run were pretended, since they cannot be diagnosed.

    Raises:
        Unanswerable: the ranks were pretended.
    """
    if run.manifest.is_pretended:
        raise Unanswerable(
            f"{run.label}: {pretended_in_words(run.manifest)}: none waited for another, so no rank can be "
            "found slow or stuck; `dpro replay` says what a step would take"
        )


def pretended_in_words(manifest: Manifest) -> str:
    """Return `2 of 256 ranks were pretended, one by one on one machine`."""
    count, world = len(manifest.ranks), manifest.world_size
    return f"{count} of {world} ranks {'was' if count == 1 else 'were'} pretended, one by one on one machine"


def bad_ends(run: Run) -> list[str]:
    """Return one line for each rank that failed or was killed, other than on a request from outside."""
    from dpro.detect.hang.case import ENDED_FROM_OUTSIDE

    workers = run.table(WORKERS)
    requested = [0, -1, *(int(number) for number in ENDED_FROM_OUTSIDE)]
    killed = workers.filter(~pl.col("exit_signal").is_in(requested))
    failed = workers.filter(pl.col("exit_code") > 0)
    return [
        *(f"rank {rank} was ended by signal {number}" for rank, number in _pairs(killed, "exit_signal")),
        *(f"rank {rank} ended with exit code {code}" for rank, code in _pairs(failed, "exit_code")),
    ]


def _pairs(workers: pl.DataFrame, column: str) -> list[tuple[Any, Any]]:
    return workers.select("rank", column).rows()


@contextmanager
def why_unanswerable(run: Run, end: Callable[[], JobEnd]) -> Iterator[None]:
    """Extend an `Unanswerable` inside by the reason for missing data, after the end of a failed job.

    Args:
        end: returns the end of the job; called only after such an error.

    Raises:
        Unanswerable: the block raised it; with the reason added, if known.
    """
    try:
        yield
    except Unanswerable as error:
        if end().bad:
            why = why_no_window(run)
            said = [capitalised(error.what), *([why] if why else [])]
            diagnosed = end().ranks or run.num_rows(COLLECTIVES)  # without both, `dpro diagnose` fails, too
            more = ["`dpro diagnose` says what is known"] if diagnosed else end().can_say
            raise Unanswerable(f"{end().sentence} {'; '.join([*said, *more])}") from error
        reason = why_no_window(run) or _what_else_answers(run)
        unrecorded = run.manifest.unrecorded
        parts = [unrecorded or error.what, *([reason] if reason else [])]
        raise Unanswerable("; ".join(parts), "" if unrecorded else error.do) from error


def _what_else_answers(run: Run) -> str:
    """Return which commands can use a run without spans: one of flight-recorder dumps, or of request logs."""
    rows = run.rows()
    if rows[SPANS.name]:
        return ""
    if rows[REQUESTS.name] or rows[ITERATIONS.name]:
        return "its server records are enough for `dpro serving`"
    if not rows[COLLECTIVES.name]:
        return ""
    return "its collective calls are enough for `dpro diagnose` and `dpro info`"


def why_no_window(run: Run) -> str:
    """Return why a recording has steps but no deep window; empty if it has one, or dpro did not record it."""
    options = run.manifest.options
    if run.num_rows(SPANS) or not {"skip", "window_steps"} <= options.keys():
        return ""
    if not options.get("windows", True):
        return "the job was recorded without deep windows (--no-windows)"
    last = run.table(STEPS, ["step"])["step"].max()
    if not isinstance(last, int):
        return ""
    # The recorder's reasons for windows that failed or were missed, if any.
    manifest = run.manifest
    failed = [reason for reason in manifest.warnings if _FAILED_WINDOWS.search(reason)]
    missed = [
        f"{count} {reason}" for reason, count in manifest.skipped.items() if reason.startswith("deep windows")
    ]
    reasons = failed[:1] or missed
    why_not = f"no deep window was kept: {'; '.join(reasons)}" if reasons else ""
    if options.get("on_request"):
        return why_not or (
            "the job was recorded with deep windows on request only (--on-request), and none was asked for: "
            "ask for one with `dpro attach RUN --steps K` while it runs"
        )
    steps = last + 1
    first, end = options["skip"], options["skip"] + options["window_steps"]
    if steps < end:
        whole = f"before its first deep window (steps {first} to {end - 1}) was complete"
        advice = "" if run.manifest.exit_status else ": record more steps, or lower --skip"
        return f"the job ended after {steps} steps, {whole}{advice}"
    return why_not or "no deep window was kept: the recording does not say why"


# Lines on a run of pretended ranks. Nothing in them was measured on the job itself.


def pretended_lines(manifest: Manifest, step: PretendedStep | None) -> list[str]:
    """Return lines on a run of pretended ranks; none for other runs."""
    if not manifest.is_pretended:
        return []
    lines = [f"{pretended_in_words(manifest)}: what follows is their own work, and no waiting was measured"]
    if step is None:
        return lines
    if step.step_ms is None:
        lines.append(f"mean step without communication {step.compute_ms:.2f} ms; with it, not known:")
        return lines + [f"  - {reason}" for reason in step.unknown]
    lines.append(
        f"mean step {step.step_ms:.2f} ms ({step.low_ms:.2f} to {step.high_ms:.2f}), of which "
        f"{step.compute_ms:.2f} ms without communication"
    )
    return lines + [f"  - {line}" for line in step.how]
