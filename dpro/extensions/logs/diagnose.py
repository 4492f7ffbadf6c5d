"""Finds what ended a job that was not recorded, from its logs: the first cause, and whether to restart it.

Takes `JobLogs`; returns a `Diagnosis` with the findings and words of a recorded job that hangs or dies.
Reports of machines and schedulers are in its notes, and with the finding about the rank that a report names.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
from msgspec.structs import replace as with_values

from dpro.analysis.answers.diagnosis import LOGS, Diagnosis
from dpro.analysis.end import ENDED, FAILED, RUNNING, UNKNOWN, JobEnd, judge_end
from dpro.detect.findings import Finding
from dpro.detect.hang.case import Case, examine, lost_peer
from dpro.detect.hang.evidence import RAISED
from dpro.detect.hang.find import find_causes
from dpro.detect.hang.memory import CAUSE as GPU_MEMORY
from dpro.detect.hang.records import records_of
from dpro.detect.machine.gpu_state import HARDWARE, error_of, remedy_of
from dpro.detect.observations import observe
from dpro.extensions.logs.files import log_files
from dpro.extensions.logs.read import (
    ENDS,
    GPU,
    MEMORY,
    NETWORK,
    NODE,
    CommunicatorInit,
    JobLogs,
    Report,
    read_logs,
)  # fmt: skip
from dpro.schema import STEPS, WORKERS, conform
from dpro.units import DATED_NS, NS_PER_S, format_duration, time_in_words
from dpro.words import counted, first_few

MAX_NAMED = 8  # ranks
MAX_REPORTS = 6  # that are listed
MAX_SLOWEST = 4  # ranks that are listed with the creation time of their communicators
INIT_PARTS = {  # NCCL's name of a part of creating a communicator -> its meaning
    "kernels": "loading NCCL's kernels onto the GPU", "alloc": "allocating memory",
    "bootstrap": "finding the other ranks, and waiting for the last of them",
    "allgathers": "exchanging what the ranks know", "topo": "detecting the hardware",
    "graphs": "searching rings and trees", "connections": "connecting to other ranks",
    "rest": "NCCL does not say what",
}  # fmt: skip
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|MemoryError")
_MORE_MEMORY = "give it more host memory, or fewer DataLoader workers and smaller caches in each"
NOT_KNOWN = "it is unknown whether it would end like this again"
_AS_IT_IS = "do not restart it unchanged: it would end like this again"


def diagnose_paths(paths: list[Path]) -> Diagnosis | None:
    """Find what ended a job from its logs; None if one of the paths is not a log.

    Raises:
        InputError: a log cannot be read.
    """
    files = log_files(paths)
    return None if files is None else diagnose_logs(" ".join(map(str, paths)), read_logs(files))


def diagnose_logs(label: str, logs: JobLogs) -> Diagnosis:
    """Find what ended a job from its logs."""
    case = examine(records_of(logs.frames, logs.manifest.world_size))
    workers = logs.frames[WORKERS.name]
    findings = [_with_reports(_of_logs(finding), logs.reports) for finding in find_causes(case)]
    end = _end_of(case, findings, workers, logs.reports)
    if end.how == ENDED:  # failures of ranks follow from an end from outside
        findings = []
    notes = [_in_words(report) for report in _distinct_reports(logs.reports)]
    shown = bool(findings) or end.how != UNKNOWN or bool(notes)
    restart = f"start it again? {_restart(findings, workers, logs.reports, end)}" if shown else ""
    return Diagnosis(
        label, LOGS, findings, _unknown(logs, shown=shown), end, _all_ended(workers, logs), STEPS.empty(),
        notes=[*notes, *([restart] if restart else []), *_communicators(logs.inits)],
    )  # fmt: skip


def _communicators(inits: Sequence[CommunicatorInit]) -> list[str]:
    """Return lines on the creation time of NCCL's communicators, slowest rank first, with largest parts."""
    by_rank: dict[object, list[CommunicatorInit]] = {}
    for init in inits:
        who = init.gpu or (init.stated if init.stated >= 0 else (init.rank, init.ranks))
        by_rank.setdefault(who, []).append(init)
    slowest = sorted(by_rank.values(), key=lambda made: -sum(init.total_s for init in made))
    if not slowest:
        return []
    took_ns = [sum(init.total_s for init in made) * NS_PER_S for made in slowest]
    median = format_duration(statistics.median(took_ns))
    of = f" on the slowest of {len(slowest):,} ranks, {median} in the median" if len(slowest) > 1 else ""
    said = [f"making NCCL's communicators took {format_duration(took_ns[0])}{of}"]
    for made, ns in zip(slowest[:MAX_SLOWEST], took_ns, strict=False):
        largest = max(made, key=lambda init: init.ranks)
        who = f"rank {largest.stated if largest.stated >= 0 else f'{largest.rank} of {largest.ranks}'}"
        where = f" ({largest.gpu})" if largest.gpu else ""
        count = counted(len(made), "communicator")
        said.append(f"{who}{where}: {format_duration(ns)} for {count}{_most_of(made)}")
    return said


def _most_of(made: Sequence[CommunicatorInit]) -> str:
    """Describe the largest part, from complete lines: `; most of it, 52.3 s, in "kernels" (loading …)`."""
    parts: dict[str, float] = {}
    for init in made:
        for name, took_s in init.parts_s.items():
            parts[name] = parts.get(name, 0.0) + took_s
    name = max(parts, key=parts.__getitem__, default="")
    if not parts.get(name):
        return ""
    meaning = f" ({INIT_PARTS[name]})" if name in INIT_PARTS else ""
    most = "most of it" if parts[name] > sum(parts.values()) / 2 else "the largest part"
    return f'; {most}, {format_duration(parts[name] * NS_PER_S)}, in "{name}"{meaning}'


def _all_ended(workers: pl.DataFrame, logs: JobLogs) -> pl.DataFrame:
    """Return table `workers` with all ranks of the job, each with an exit code, since no process is alive."""
    ranks = pl.DataFrame({"rank": range(logs.manifest.world_size)}, schema={"rank": workers.schema["rank"]})
    named = conform(WORKERS, ranks.join(workers.select("rank"), on="rank", how="anti"))
    unknown = (pl.col("exit_code") < 0) & (pl.col("exit_signal") < 0)
    ended = pl.when(unknown).then(1).otherwise("exit_code").cast(workers.schema["exit_code"])
    return pl.concat([workers, named]).with_columns(exit_code=ended) if workers.height else workers


def _unknown(logs: JobLogs, *, shown: bool) -> list[str]:
    missing, size = logs.manifest.missing_ranks, logs.manifest.world_size
    silent = [f"how {len(missing)} of {size} ranks ended: {first_few(missing, MAX_NAMED)}"] if missing else []
    silent += logs.cut
    if logs.num_made and not logs.inits:
        silent.append("how long NCCL's communicators took to make: NCCL says it from 2.22 on")
    if shown:
        return silent
    return [
        f"how the job ended: none of {logs.num_lines:,} lines is an exception that ended a rank, an exit, a "
        "call that timed out, or a report of a kernel or a scheduler",
        *silent,
    ]


def _of_logs(finding: Finding) -> Finding:
    """Replace observations on missing dumps with one on ranks that wrote no timeout."""
    kept = tuple(one for one in finding.observations if one.kind not in ("no-dump", "unknown-whether-stuck"))
    if len(kept) == len(finding.observations):
        return finding
    silent = observe(
        "no-timeout",
        "{ranks} wrote no timeout: it never called this, or what it wrote is not in these logs",
        ranks=list(finding.ranks),
    )
    return replace(finding, observations=(silent, *kept))


def _with_reports(finding: Finding, reports: Sequence[Report]) -> Finding:
    """Add reports about processes of the finding's ranks; a failing GPU replaces an exception as cause."""
    for report in reports:
        failed = report.kind == GPU and error_of("xid", report.number).of == HARDWARE
        unplaced = failed and report.rank < 0 and any("CUDA error" in line for line in finding.evidence)
        if report.kind not in (MEMORY, GPU) or not (unplaced or report.rank in finding.ranks):
            continue
        whose = "; which rank used that GPU is not stated" if unplaced else ""
        said = f"{report.what}{_meaning(report)}{whose}"
        finding = finding.observing(observe("log-report", said, rank=report.rank))
        if report.kind == GPU:
            cause = "" if failed and finding.cause == RAISED else finding.cause
            finding = replace(finding, cause=cause, remedy=finding.remedy or remedy_of("xid", report.number))
        else:
            finding = replace(finding, remedy=finding.remedy or _MORE_MEMORY)
    return finding


def _meaning(report: Report) -> str:
    return f" ({error_of('xid', report.number).means})" if report.kind == GPU else ""


def _in_words(report: Report) -> str:
    """Word a report: `node3, 12:00:01 UTC: XID 79 of GPU 0000:c1:00 (the GPU has fallen off the bus)`."""
    who = f"rank {report.rank}" if report.rank >= 0 else f"process {report.pid}" if report.pid >= 0 else ""
    when = time_in_words(report.time_ns) if report.time_ns > DATED_NS else ""
    where = ", ".join(filter(None, [report.host, who, when]))
    return f"{where}{': ' if where else ''}{report.what}{_meaning(report)}"


def _distinct_reports(reports: Sequence[Report]) -> list[Report]:
    """Return at most `MAX_REPORTS` distinct reports, causes before consequences."""
    first: dict[tuple[Any, ...], Report] = {}
    for report in reports:
        first.setdefault((report.kind, report.host, report.what, report.rank), report)
    order = [*ENDS, GPU, MEMORY, NETWORK]
    return sorted(first.values(), key=lambda one: (order.index(one.kind), one.time_ns))[:MAX_REPORTS]


def _end_of(
    case: Case, findings: Sequence[Finding], workers: pl.DataFrame, reports: Sequence[Report]
) -> JobEnd:
    """Return how the job ended: by a rank, or from outside if a scheduler says so before a rank failed."""
    end = judge_end(_Evidence(case, findings, workers))
    outside = [report for report in reports if report.kind in ENDS]
    failed_ns = min((death.ended_ns for death in case.deaths.values() if not death.lost_peer), default=-1)
    if outside and not end.hung and not 0 <= failed_ns < outside[0].time_ns:
        by = outside[0]
        dated = by.time_ns > DATED_NS
        when = f", {time_in_words(by.time_ns)}" if dated else ""
        return with_values(
            end, how=ENDED, by=by.what, time_ns=by.time_ns if dated else None, ranks=[], cause=None,
            sentence=f"The job was ended{when}: {by.what}.",
        )  # fmt: skip
    if end.hung and (workers["gpu_name"] != "").any():
        since = f" since {time_in_words(end.time_ns)}" if end.time_ns else ""
        return with_values(end, how=FAILED, sentence=f"The job hung{since}, until NCCL's watchdog ended it.")
    if end.how == RUNNING or not (end.hung or findings or case.deaths):
        return with_values(end, how=UNKNOWN, sentence=None)
    return end


@dataclass(frozen=True)
class _Evidence:
    """Evidence of a job without a run, with the properties that `judge_end` reads."""

    waiting: Case
    hangs: Sequence[Finding]
    workers: pl.DataFrame

    @property
    def steps(self) -> pl.DataFrame:
        return STEPS.empty()


def _restart(
    findings: Sequence[Finding], workers: pl.DataFrame, reports: Sequence[Report], end: JobEnd
) -> str:
    """Advise whether to restart the job, or whether it would end in the same way."""
    kinds = {report.kind: report for report in reversed(reports)}
    hardware = [one for one in reports if one.kind == GPU and error_of("xid", one.number).of == HARDWARE]
    errors = [error for error in workers["error"].to_list() if error and not lost_peer(error)]
    if hardware or NODE in kinds:
        hosts = sorted({one.host for one in [*hardware, *filter(None, [kinds.get(NODE)])] if one.host})
        return f"yes, without {', '.join(hosts) or 'the host of that GPU'}: the hardware failed, not the job"
    if MEMORY in kinds or any(_OUT_OF_MEMORY.search(error) for error in errors):
        return f"{_AS_IT_IS}, once memory is as full"
    if any(
        finding.class_ == "hang.mismatch" or finding.cause in (RAISED, GPU_MEMORY) for finding in findings
    ):
        return f"{_AS_IT_IS}, unless the cause is outside of the program (a file, a service)"
    if end.how == ENDED:
        return "yes, from the last checkpoint: it was ended from outside"
    if errors:
        return f"{_AS_IT_IS}, unless the cause is outside of the program (a file, a service)"
    return NOT_KNOWN
