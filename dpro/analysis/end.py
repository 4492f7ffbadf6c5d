"""The end of a run's job: if the job failed, hung or was ended, every answer about the run begins with it.

Takes the recorded ends of ranks, and the findings on hangs; returns a `JobEnd` with its sentence. When one
rank fails, the launcher ends the others: their signals are never reported as the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import polars as pl
from msgspec.structs import replace

from dpro.detect.findings import Finding, ranks_of
from dpro.detect.hang.case import INTERRUPTED, has_left, signal_name
from dpro.detect.hang.evidence import LEFT, SKIPPED
from dpro.detect.hang.stacks import own_call, works
from dpro.documents import DocumentPart
from dpro.schema import COUNTERS, PROCESS_GROUPS, RECORDER, SPANS
from dpro.units import DATED_NS, NS_PER_S, format_duration, time_in_words
from dpro.words import capitalised, counted, ranks_in_words

if TYPE_CHECKING:
    from dpro.detect.hang.case import Case, Death
    from dpro.store import Run

COMPLETED, FAILED, ENDED, RUNNING, UNKNOWN = "completed", "failed", "ended", "running", "unknown"
# A stall is reported if no step ended for both of these before the end of the job.
MIN_STALL_NS = 10 * NS_PER_S
MIN_STALL_STEPS = 20  # typical steps
MIN_RUNNING_STALL_NS = 2 * NS_PER_S  # in place of `MIN_STALL_NS` while a job runs: steps are saved within 1 s
_RAN_OUT = re.compile(r"time(d )?-?out|failed to pass monitoredBarrier", re.IGNORECASE)  # of exceptions
_FROM_OUTSIDE = {
    signal.SIGINT: "Ctrl-C (SIGINT)",
    signal.SIGTERM: "SIGTERM (schedulers and `kill` send this)",
    signal.SIGHUP: "SIGHUP (a terminal that closes sends this)",
    signal.SIGKILL: "SIGKILL (schedulers send this after SIGTERM)",
}


class JobEnd(DocumentPart, frozen=True):
    """How the job ended.

    Attributes:
        how: completed, failed, ended (from outside), running, or unknown.
        hung: whether the job hung before that.
        time_ns: when the job began to hang, failed, or was ended; null if unknown.
        step: the step that the job was in; null if unknown.
        by: what ended the job from outside, or its exit code or signal; null if nothing did, or if unknown.
        ranks: ranks of the first cause.
        cause: the first cause; null if there is none or it is unknown.
        sentence: the end in one sentence; null if there is nothing to report.
        can_say: questions that the run can still answer, one line each.
    """

    how: str
    hung: bool
    time_ns: int | None
    step: int | None
    by: str | None
    ranks: list[int]
    cause: str | None
    sentence: str | None
    can_say: list[str]

    @property
    def bad(self) -> bool:
        """Whether the job failed or hung."""
        return self.hung or self.how == FAILED

    @property
    def comes_first(self) -> bool:
        """Whether the sentence leads every answer: the job failed, hung, was ended, or is stalled."""
        return self.sentence is not None and (self.early or self.how == RUNNING)

    @property
    def early(self) -> bool:
        """Whether the job failed, hung, or was ended from outside."""
        return self.bad or self.how == ENDED


NOT_WATCHED = JobEnd(UNKNOWN, False, None, None, None, [], None, None, [])


class EndEvidence(Protocol):
    """Data that show how a job ended, each read or computed on first use."""

    @property
    def steps(self) -> pl.DataFrame:
        """Table `steps`."""

    @property
    def workers(self) -> pl.DataFrame:
        """Table `workers`."""

    @property
    def waiting(self) -> Case:
        """The progress of each rank, and which ranks wait for which."""

    @property
    def hangs(self) -> Sequence[Finding]:
        """Findings on what hangs in the run, or ended it, the surest first."""


class RunEvidence(EndEvidence, Protocol):
    """The evidence of a run directory."""

    run: Run


def judge_end(evidence: EndEvidence) -> JobEnd:
    """Judge the end of a job without a run directory, from the records of its ranks."""
    end = replace(_judged(evidence, evidence.hangs, None), step=None)
    if end.time_ns is not None and end.time_ns < DATED_NS:
        end = replace(end, time_ns=None)
    return replace(end, sentence=_sentence(end, evidence) or None)


def end_of(evidence: RunEvidence) -> JobEnd:
    """Judge how the job of a run ended; the end is unknown where no process was watched."""
    workers, status = evidence.workers, evidence.run.manifest.exit_status
    ended = workers.filter((pl.col("exit_code") >= 0) | (pl.col("exit_signal") > 0))
    rows = evidence.run.rows()
    ended_well = ended.height == workers.height > 0 and (ended["exit_code"] == 0).all()
    if ended_well and (status or 0) <= 0:
        step, steps = _seen(_last_step(evidence)), evidence.steps["step"].n_unique()
        after = f" after {steps:,} steps" if steps else ""
        if not status:
            return replace(NOT_WATCHED, how=COMPLETED, step=step, sentence=f"The job completed{after}.")
        by = signal_name(-status)  # it may have asked the ranks to end, or come once they had
        said = f"All ranks ended without an error{after}; {by} ended their launcher."
        return replace(NOT_WATCHED, how=ENDED, step=step, by=by, sentence=said)
    if not _recorded(workers) and not rows[PROCESS_GROUPS.name]:
        why = evidence.run.manifest.unrecorded
        if why and status:  # the job failed before any rank was recorded
            return replace(NOT_WATCHED, how=FAILED, sentence=f"{capitalised(why)}.")
        return NOT_WATCHED  # traces: nothing watched the processes
    end = _judged(evidence, evidence.hangs, status)
    said = _sentence(end, evidence) or (_stall_of_running(evidence) if end.how == RUNNING else "")
    return replace(end, sentence=said or None, can_say=_remaining_answers(evidence) if end.early else [])


def _recorded(workers: pl.DataFrame) -> bool:
    return bool((workers["source"] == RECORDER).any())


def _judged(evidence: EndEvidence, findings: Sequence[Finding], status: int | None) -> JobEnd:
    case, workers = evidence.waiting, evidence.workers
    step = _last_step(evidence) + 1
    how, by = _ended_by(workers, list(case.deaths.values()), status)

    def judged(how: str, time_ns: int, ranks: Sequence[int], cause: str = "", hung: bool = False) -> JobEnd:
        return JobEnd(how, hung, _seen(time_ns), _seen(step), by or None, [*ranks], cause or None, None, [])

    if findings and findings[0].class_.startswith("hang.") and findings[0].cause not in (LEFT, SKIPPED):
        roots = [root for root in case.roots if not has_left(root, case)]
        if roots or how != FAILED or findings[0].class_ != "hang.mismatch":
            waited = (operation.since_ns for root in roots for operation in root.operations)
            since_ns = min((ns for ns in waited if ns > 0), default=-1)
            return judged(how, since_ns, _ranks(findings), hung=True)
        when = min((death.ended_ns for death in case.deaths.values()), default=-1)
        cause = f"calls of {ranks_in_words(_ranks(findings))} do not match those of the others"
        return judged(FAILED, when, _ranks(findings), cause)
    if findings:
        ranks = _ranks(findings)
        if findings[0].cause in (LEFT, SKIPPED):
            cause = f"{ranks_in_words(ranks)} exited early without an error, and its peers failed without it"
            return judged(FAILED, min(case.left.values(), default=-1), ranks, cause)
        first = [case.deaths[rank] for rank in ranks if rank in case.deaths]
        when = min((death.ended_ns for death in first), default=-1)
        return judged(FAILED, when, ranks, _deaths_in_words(first, workers.height))
    died = sorted(case.deaths.values(), key=lambda death: (death.lost_peer, death.ended_ns))
    if died and how == FAILED:
        same = [death for death in died if death.how == died[0].how]
        return judged(FAILED, died[0].ended_ns, (), _deaths_in_words(same, workers.height))
    return judged(how, min(_signalled_ns(workers), default=-1), ())


def _signalled_ns(workers: pl.DataFrame) -> list[int]:
    """Return when signals reached ranks that ended by them: of Ctrl-C, when Python raised it."""
    rows = workers.filter(pl.col("exit_signal") > 0)
    return (
        rows.select(pl.when(pl.col("failed_ns") > 0).then("failed_ns").otherwise("ended_ns"))
        .to_series()
        .to_list()
    )


def _seen(number: int) -> int | None:
    """Return a time or a step; None for a negative one, which is unknown."""
    return number if number >= 0 else None


def _ranks(findings: Sequence[Finding]) -> tuple[int, ...]:
    return tuple(sorted(ranks_of(findings[:1])))


def _deaths_in_words(deaths: Sequence[Death], num_ranks: int) -> str:
    if not deaths:
        return ""
    ranks = ranks_in_words(death.rank for death in deaths)
    when = " at once," if len(deaths) > 1 else " first," if num_ranks > 1 else ""
    return f"{ranks} ended{when} by {deaths[0].how}"


def _ended_by(workers: pl.DataFrame, deaths: Sequence[Death], status: int | None) -> tuple[str, str]:
    """Return how the job ended, and by what; after a failure, signals from the launcher do not count."""
    signals = set(workers.filter(pl.col("exit_signal") > 0)["exit_signal"].to_list())
    interrupted = signal.SIGINT in signals or workers["error"].str.starts_with(INTERRUPTED).any()
    if interrupted:
        return ENDED, _FROM_OUTSIDE[signal.SIGINT]
    unprompted = [death for death in deaths if not death.lost_peer or _RAN_OUT.search(death.how)]
    all_killed = workers.height > 0 and bool((workers["exit_signal"] == signal.SIGKILL).all())
    killed = all_killed and not any(death.first for death in unprompted)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number in signals and not unprompted:
            return ENDED, _FROM_OUTSIDE[number]
    if killed:
        return ENDED, _FROM_OUTSIDE[signal.SIGKILL]
    if deaths:
        return FAILED, ""
    if status:
        return FAILED, f"signal {-status} ({signal_name(-status)})" if status < 0 else f"exit code {status}"
    return (RUNNING if _recorded(workers) else UNKNOWN), ""


def _last_step(evidence: EndEvidence) -> int:
    last = evidence.steps["step"].max()
    return last if isinstance(last, int) else -1


def _sentence(end: JobEnd, evidence: EndEvidence) -> str:
    """Return the end in one sentence, without the cause of a hang, which the finding names."""
    where = f" at step {end.step:,}" if end.step else " in its first steps" if end.step == 0 else ""
    when = "" if end.time_ns is None else f", {time_in_words(end.time_ns)}"
    if end.hung:
        since = "" if end.time_ns is None else f" since {time_in_words(end.time_ns)}"
        busy = works(evidence.hangs[0])  # the ranks at fault were working: the job would have continued
        if end.how == UNKNOWN:
            return "The job is stuck."
        if end.how == RUNNING:
            stands = "has been stuck" if busy else "has been hanging"
            return f"The job {stands}{where}{since}: no step has ended since."
        after, from_then = _hang_duration(end, evidence), since.replace(" since ", " at ")
        ended = f"was ended{after} by {end.by}" if end.how == ENDED else f"failed{after}"
        return f"The job {'was stuck' if busy else 'hung'}{where}{from_then}, and {ended}."
    if end.how == FAILED:
        cause = end.cause or f"the command ended with {end.by}, and no rank is known to have failed"
        stood = "" if end.cause else _stall_before_end(evidence.workers["ended_ns"].max(), evidence)
        cause += f"; {stood}" if stood else ""
        return f"The job failed{where}{when}: {cause}."
    if end.how == ENDED:
        stood = _stall_before_end(end.time_ns, evidence) or "its calls show no hang before that"
        return f"The job was ended{where}{when}, by {end.by}; {stood}."
    return ""


def _stall_before_end(ended_ns: object, evidence: EndEvidence) -> str:
    """Describe the time without a step before the job ended; empty unless far longer than a step.

    Args:
        ended_ns: int, when the job ended; None if unknown.
    """
    lasted = _stall_until(ended_ns, evidence.steps, MIN_STALL_NS)
    if not lasted:
        return ""
    calls = evidence.workers.filter(pl.col("stack") != "").select("rank", "stack").sort("rank")
    at = {rank: own_call(stack.splitlines()) for rank, stack in calls.iter_rows()}
    places = "; ".join(
        f"{ranks_in_words(rank for rank in at if at[rank] == place)}: {place}"
        for place in dict.fromkeys(at.values())
    )
    said = f"no step had ended for {lasted}, and no call waited for another rank"
    return f"{said} ({places})" if places else said


def _stall_of_running(evidence: RunEvidence) -> str:
    """Describe the time without a step in a running job; empty unless far longer than a step."""
    now_ns = evidence.run.table(COUNTERS, ["time_ns"])["time_ns"].max()
    lasted = _stall_until(now_ns, evidence.steps, MIN_RUNNING_STALL_NS)
    again = "if this continues, another copy shows which rank the others wait for (`dpro attach RUN -o COPY`)"
    return f"No step has ended for {lasted}: {again}." if lasted else ""


def _stall_until(until_ns: object, steps: pl.DataFrame, least_ns: int) -> str:
    """Describe the time without a step before a moment; empty unless far longer than a step.

    Args:
        until_ns: int, the moment; None if unknown.
        least_ns: shortest time that is reported, however short steps are.
    """
    last_ns, usual_ns = (steps["start_ns"] + steps["duration_ns"]).max(), steps["duration_ns"].median()
    if not (isinstance(until_ns, int) and isinstance(last_ns, int) and isinstance(usual_ns, float)):
        return ""
    still_ns = until_ns - last_ns
    if still_ns < max(least_ns, MIN_STALL_STEPS * usual_ns):
        return ""
    return f"{format_duration(float(still_ns))}, while a step takes {format_duration(usual_ns)}"


def _hang_duration(end: JobEnd, evidence: EndEvidence) -> str:
    """Describe how long the job hung before its first rank ended; empty if unknown."""
    died = [death.ended_ns for death in evidence.waiting.deaths.values()]
    gone = [*died, *_signalled_ns(evidence.workers)]
    if end.time_ns is None or not gone or min(gone) <= end.time_ns:
        return ""
    return f" {format_duration(float(min(gone) - end.time_ns))} later"


def _remaining_answers(evidence: RunEvidence) -> list[str]:
    """Return what the run of a job that ended early can still answer, one line each."""
    steps = evidence.steps
    count = steps["step"].n_unique()
    if not count:
        return ["no earlier step was recorded completely: what slowed the job is unknown"]
    in_depth = steps.filter(pl.col("window") >= 0)["step"].n_unique()
    if not in_depth or not evidence.run.num_rows(SPANS):
        return [f"only the times of {counted(count, 'earlier step')} are known: none was profiled"]
    commands = "`dpro report`, `dpro replay` and `dpro whatif --edit` can analyse them"
    are = "is" if count == 1 else "are"
    return [f"{counted(count, 'earlier step')} {are} intact ({in_depth:,} profiled): {commands}"]
