"""What is wrong with a run, by all detectors in the order in which they exclude each other, and what is open.

In: a run, or its `Analysis`. Out: findings, and one line for each thing that the run cannot show. Of a job
that hangs, calls alone tell; of one without deep windows, steps and calls; else the replay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl

from dpro.detect.findings import Finding
from dpro.errors import DproError, Unanswerable
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, SENDS, SPANS, STEPS, WORKERS

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.detect.pauses.find import Lost
    from dpro.detect.stragglers.own_time import AlwaysOn
    from dpro.store import Manifest, Run

# Of what a recording says of itself, what is about windows.
_FAILED_WINDOWS = re.compile(r"goes on without windows: |stopped recording in |window \d+ is lost: ")
NETWORK = ("slow.link", "slow.nic", "slow.fabric")

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

    Deep windows have few steps; the steps between them tell of what is too small, or too recent, for those.
    """
    from dpro.detect.machine.gpu_state import with_gpus
    from dpro.detect.machine.idle_gpus import find_idle_gpus
    from dpro.detect.run import diagnose_graph, diagnose_operations

    graph = analysis.built.graph
    if analysis.slowdown is not None:
        return diagnose_operations(graph, analysis.slowdown)
    slow = diagnose_graph(graph) if analysis.trust.answerable else []
    if analysis.trust.answerable:
        slow += find_idle_gpus(graph, lambda: analysis.breakdown, sum(each.cost_ns for each in slow))
    found = [*slow, *_between_windows(analysis.run, slow)]
    found = _with_crowded_hosts(found, analysis.steps, analysis.counters, analysis.workers)
    found = with_gpus(found, analysis.steps, analysis.counters, analysis.workers)
    return [*_costliest(found), *_regression(analysis.run)]


def _costliest(findings: list[Finding]) -> list[Finding]:
    """The findings, costliest first."""
    return sorted(findings, key=lambda finding: -finding.cost_ns)


def notes(analysis: Analysis, findings: list[Finding]) -> list[str]:
    """What deep windows show that is worth a sentence though it is no finding, one line each."""
    from dpro.detect.machine.idle_gpus import note_idle_gpus
    from dpro.detect.notes import note_waiting

    if not analysis.run.rows()[SPANS.name] or not analysis.trust.answerable or analysis.built.of_operations:
        return []
    graph = analysis.built.graph
    return [*note_waiting(graph, findings), *note_idle_gpus(graph, lambda: analysis.breakdown)]


def notes_of_few_steps(analysis: Analysis, findings: list[Finding]) -> list[str]:
    """The notes of a run whose windows have too few steps for a verdict; none if they cannot be replayed."""
    try:
        return notes(analysis, findings)
    except DproError:
        return []


def _between_windows(run: Run, found: list[Finding]) -> list[Finding]:
    """What the steps that are always recorded show, and windows did not."""
    from dpro.detect.stragglers.excess import WINDOWS
    from dpro.detect.stragglers.from_calls import messages_unseen
    from dpro.detect.stragglers.own_time import on_one_clock
    from dpro.detect.stragglers.work_causes import INPUT_PIPELINE

    outside = run.table(STEPS, ["step", "window"]).filter(pl.col("window") < 0)
    if outside["step"].n_unique() < min(WINDOWS):
        return []
    always = _always_of(run)
    aligned, apart = on_one_clock(always)
    of_ranks = [each for each in found if each.component_kind != "job" and each.class_ != "slow.fabric"]
    ranks = {rank for each in of_ranks for rank in each.ranks}
    known = any(INPUT_PIPELINE in (each.component_id, each.cause) for each in found)
    jobs = {each.class_ for each in found if each.component_kind == "job"}
    lost, late, network = _late(always, aligned, apart)
    late = [
        each
        for each in late
        if (each.class_ not in jobs if each.component_kind == "job" else not ranks & {*each.ranks})
    ]
    slow_network = any(each.class_ in NETWORK for each in found)
    if (ranks or slow_network) and messages_unseen(aligned.collectives, aligned.workers):
        # Others may be late because of messages from those ranks, or over that network: calls cannot tell.
        late = [each for each in late if each.component_kind == "job"]
    network = [] if slow_network else _timed(run, always) or ([] if ranks else network)
    waiting = [] if known else _waiting(always, aligned.workers, lost)
    return [*lost.findings, *late, *network, *waiting]


def without_windows(run: Run) -> Verdict | None:
    """What the steps and calls of a run show, and what they leave open; None where windows show more."""
    from dpro.detect.machine.gpu_state import with_gpus
    from dpro.detect.significance import MIN_STEPS
    from dpro.detect.stragglers.own_time import on_one_clock

    rows = run.rows()
    if not rows[STEPS.name] or not rows[COLLECTIVES.name]:
        return None
    windows = run.table(STEPS, ["step", "window"]).filter(pl.col("window") >= 0)
    if rows[SPANS.name] and windows["step"].n_unique() >= MIN_STEPS:
        return None
    always = _always_of(run)
    aligned, apart = on_one_clock(always)
    lost, late, network = _late(always, aligned, apart)
    network = _timed(run, always) or network
    found = [*lost.findings, *late, *network, *_waiting(always, aligned.workers, lost)]
    found = _with_crowded_hosts(found, always.steps, always.counters, always.workers)
    found = with_gpus(found, always.steps, always.counters, always.workers)
    findings = [*_costliest(found), *_regression(run)]
    reason = why_no_window(run)
    no_window = [f"what operators and kernels take: {reason}"] if reason else []
    return findings, [*bad_ends(run), *_not_shown(aligned, apart), *no_window]


def _late(recorded: AlwaysOn, rows: AlwaysOn, apart: list[int]) -> tuple[Lost, list[Finding], list[Finding]]:
    """What is lost to pauses; in all other steps, ranks that the others wait for, or hosts that all wait.

    Args:
        recorded: what was always recorded.
        rows: the same on one clock.
        apart: ranks that are no part of that.
    """
    from dpro.detect.network.host_waits import find_idle_hosts
    from dpro.detect.pauses.find import find_pauses
    from dpro.detect.stragglers.from_calls import judge as judge_lateness
    from dpro.detect.stragglers.from_calls import messages_unseen, on_gpus
    from dpro.detect.stragglers.own_time import calls_of, own_time_of_all, usual_ones

    calls = calls_of(rows.collectives)
    all_own = own_time_of_all(calls, rows.steps)
    lost = find_pauses(recorded.steps, recorded.counters, lambda: all_own)
    if calls.is_empty() or rows.steps.is_empty():
        return lost, [], []
    own = usual_ones(all_own).filter(~pl.col("step").is_in(lost.steps))
    unseen = messages_unseen(rows.collectives, rows.workers)
    late = judge_lateness(own, calls, rows.counters, rows.workers, doubtful=unseen)
    late += _late_on_gpu(recorded, lost, late, doubtful=unseen)
    if late or unseen or on_gpus(rows.workers):
        return lost, late, []
    return lost, [], find_idle_hosts(own, calls, rows.steps, rows.counters, apart)


def _late_on_gpu(recorded: AlwaysOn, lost: Lost, late: list[Finding], *, doubtful: bool) -> list[Finding]:
    """Ranks that the others wait for on their GPUs, beside those whose hosts are late."""
    from dpro.detect.stragglers.timed_ranks import find_late_gpus

    steps = recorded.steps.filter(~pl.col("step").is_in(lost.steps))
    tables = (recorded.collectives, steps, recorded.counters, recorded.workers)
    named = {rank for finding in late for rank in finding.ranks}
    return [each for each in find_late_gpus(*tables, doubtful=doubtful) if not named & {*each.ranks}]


def _with_crowded_hosts(
    findings: list[Finding], steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Hosts with more threads than cores, and of the findings those that are not explained by that."""
    from dpro.detect.machine.oversubscribed import crowds_of, find_crowded_hosts, not_crowding

    crowds = crowds_of(steps, counters, workers)
    if not crowds:
        return findings
    return [*find_crowded_hosts(crowds, counters), *not_crowding(findings, crowds, steps, counters)]


def _timed(run: Run, rows: AlwaysOn) -> list[Finding]:
    """What is slow in the network by what was timed without a deep window: wires tell more than calls."""
    from dpro.detect.network.timed_calls import traffic_of_calls
    from dpro.detect.network.wires import traffic_of_sends
    from dpro.detect.run import diagnose_traffic

    wires = traffic_of_sends(run.table(SENDS), rows.steps, rows.workers)
    found = diagnose_traffic(wires) if wires.transfers.height else []
    if found:
        return found
    calls = traffic_of_calls(rows.collectives, rows.steps, rows.workers, run.manifest.world_size)
    return diagnose_traffic(calls) if calls.transfers.height else []


def _waiting(rows: AlwaysOn, workers: pl.DataFrame, lost: Lost) -> list[Finding]:
    from dpro.detect.stragglers.from_calls import on_gpus
    from dpro.detect.stragglers.input_bound import find_waiting_for_data

    steps = rows.steps.filter(~pl.col("step").is_in(lost.steps))
    return find_waiting_for_data(steps, rows.counters, on_gpus=on_gpus(workers))


def _regression(run: Run) -> list[Finding]:
    from dpro.detect.regression import find_regression
    from dpro.replay.steps.durations import steps_of

    read_counters, read_spans = partial(run.table, COUNTERS), partial(run.table, SPANS)
    return find_regression(steps_of(run), run.table(WORKERS), read_counters, read_spans)


def _always_of(run: Run) -> AlwaysOn:
    """What of a run was always recorded."""
    from dpro.detect.stragglers.own_time import AlwaysOn
    from dpro.replay.steps.durations import steps_of

    others = (COUNTERS, WORKERS, CLOCK_SAMPLES)
    return AlwaysOn(run.table(COLLECTIVES), steps_of(run), *(run.table(table) for table in others))


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
