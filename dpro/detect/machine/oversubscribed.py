"""Detectors of cores and GPUs that more processes use than they have room for, the fault of no rank.

Takes steps and the host's counters. Returns one finding for each host on which all ranks wait for a core, and
filters other findings that crowding explains. The time that a training thread was ready to run without a core
is the kernel's own account; what a rank computed in that time is its CPU time. Also takes spans of deep
windows; returns a finding for each rank whose GPU is shared with other processes: it idles despite queued
work, repeatedly and equally long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.findings import TIME_SLICES, Finding
from dpro.detect.observations import Observation, name_range, observe
from dpro.detect.significance import PERSISTENT
from dpro.detect.stragglers.causes import CPU, EXPLAINED, HOST_CAUSES, counted_more
from dpro.replay.steps import host_facts
from dpro.schema import GPU_WORK_KINDS, SPANS, STEPS
from dpro.store import Run
from dpro.units import NS_PER_S

MIN_SHARE = 0.1  # least wait for a core: of the steps of each rank, and of nearly each step of all
WINDOWS = (40, 20, 10)  # numbers of latest steps, tried in turn: crowding may have begun while the job ran
MAX_SHARED = 0.75  # of the cores: if a waiting job uses less, other processes use the remainder
MIN_RANKS = 2  # per host: a single rank that waits cannot be distinguished from its host
MIN_ALONE = 0.5  # of its steps: above this, a job of one rank starves, though its host does not seem crowded
TIMES_AS_LONG = 1.6  # as any other rank of the host: a rank that waits this much longer has its own reason
CONTENTION = HOST_CAUSES["step_run_queue_ns"][0]
CAUSE = "more threads than cores"
NO_RANK = observe("no-rank-at-fault", "this delays all ranks of the host")
FEWER_THREADS = "start fewer threads per rank (OMP_NUM_THREADS)"
FEWER_PROCESSES = "run fewer processes beside the ranks (DataLoader workers, other jobs)"
MORE_CORES = "give the job more cores"


@dataclass(frozen=True)
class Crowd:
    """A host whose ranks wait for a core, in the latest steps.

    Attributes:
        steady: share of these steps in which its ranks wait for long.
        least_ns, most_ns: mean wait per step of the ranks that wait least and most.
        cores: mean number of cores that the ranks' processes compute on; NaN where that was not counted.
        beside: of these, those that other threads than the training ones compute on.
    """

    host: str
    ranks: tuple[int, ...]
    steps: int
    steady: float
    least_ns: float
    most_ns: float
    step_ns: float
    cores: float
    beside: float

    @property
    def by_threads(self) -> bool:
        """Whether the ranks' other threads compute for a large part of what the training threads wait."""
        return self.beside >= EXPLAINED * len(self.ranks) * self.least_ns / self.step_ns


def crowds_of(steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame) -> list[Crowd]:
    """Return the hosts on which all ranks wait long for a core in nearly each of the latest steps.

    Args:
        steps: table `steps`; those of deep windows count, too.
    """
    facts = _facts_by_host(steps, counters, workers)
    alone = workers.filter(pl.col("host") != "")["rank"].n_unique() == 1
    crowded = []
    for (host,), rows in facts.group_by("host", maintain_order=True):
        sampled = counters.filter(pl.col("host") == host)
        is_full = _typical(sampled, "runnable_threads") > _typical(sampled, "cpus") > 0
        least, fewest = (MIN_SHARE, MIN_RANKS) if not alone else (MIN_SHARE if is_full else MIN_ALONE, 1)
        crowds = (_crowd(str(host), rows, size, least, fewest) for size in WINDOWS)
        crowd = next((candidate for candidate in crowds if candidate is not None), None)
        crowded += [crowd] if crowd is not None else []
    return crowded


def _facts_by_host(steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame) -> pl.DataFrame:
    """Return `host_facts` of the ranks whose wait for a core was counted, with `host`."""
    hosts = workers.filter(pl.col("host") != "").select("rank", "host").unique("rank")
    return host_facts(steps, counters).drop_nulls("run_queue_ns").join(hosts, on="rank")


def shared_hosts(steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame) -> list[str]:
    """Return the hosts whose ranks wait long, on average, for cores that other processes use.

    Args:
        steps: table `steps`; those of deep windows count, too.
    """
    duration = pl.col("duration_ns")
    hosts = (
        _facts_by_host(steps, counters, workers)
        .group_by("host", maintain_order=True)
        .agg(
            waits=pl.col("run_queue_ns").sum() / duration.sum(),
            used=(pl.col("cpu_ns") / duration).mean().fill_null(np.nan) * pl.col("rank").n_unique(),
        )
        .filter(pl.col("waits") >= MIN_SHARE)
    )
    return [host for host, _, used in hosts.iter_rows() if others_use(host, used, counters)]


def _crowd(host: str, facts: pl.DataFrame, size: int, least: float, fewest: int) -> Crowd | None:
    """Return the crowd of a host; None unless each rank waits for long, and all do in most steps.

    Args:
        facts: of its ranks' steps, as from `host_facts`.
        least: share of the steps above which a wait is long.
        fewest: least number of ranks with samples that make a step count.
    """
    ranks = tuple(sorted(facts["rank"].unique().to_list()))
    seen = facts.filter(pl.len().over("step") >= max(len(ranks) / 2, fewest))  # samples may be missing
    steps = seen["step"].unique().sort().tail(size)
    latest = seen.filter(pl.col("step").is_in(steps.to_list()))
    if steps.len() < size or latest["rank"].n_unique() < len(ranks):
        return None
    duration, wait = pl.col("duration_ns"), pl.col("run_queue_ns")
    shares = latest.group_by("step").agg(share=wait.sum() / duration.sum())["share"].to_numpy()
    per_rank = latest.group_by("rank").agg(wait.mean(), share=wait.sum() / duration.sum())
    steady = float((shares >= least).mean())
    if steady < PERSISTENT or per_rank["share"].to_numpy().min() < least:
        return None
    waits = per_rank["run_queue_ns"].to_numpy()
    beside = pl.col("cpu_ns") - pl.col("training_thread_cpu_ns")
    cores, threads = (
        latest.select((used_ns / duration).mean().fill_null(np.nan)).item() * len(ranks)
        for used_ns in (pl.col("cpu_ns"), beside)
    )
    step = float(latest["duration_ns"].to_numpy().mean())
    return Crowd(host, ranks, size, steady, float(waits.min()), float(waits.max()), step, cores, threads)


def find_crowded_hosts(crowds: Iterable[Crowd], counters: pl.DataFrame) -> list[Finding]:
    """Return one finding per crowded host, with what to do; its cost is the least wait of any rank."""
    findings = []
    for crowd in crowds:
        waits = name_range(crowd.least_ns, crowd.most_ns)
        no_core = observe(
            "no-core",
            f"{_training_threads(crowd)} for a CPU core for {waits} of a step of {{step_ns}}, in "
            "{steady_share} of the latest {steps} steps",
            ranks=crowd.ranks, least_ns=crowd.least_ns, most_ns=crowd.most_ns, step_ns=crowd.step_ns,
            steady_share=crowd.steady, steps=crowd.steps,
        )  # fmt: skip
        cores = _observe_cores(counters.filter(pl.col("host") == crowd.host), crowd)
        shared = others_use(crowd.host, crowd.cores, counters)
        fewer = [FEWER_THREADS] * (crowd.by_threads or not shared) + [FEWER_PROCESSES] * shared
        remedy = f"{', '.join(fewer)}, or {MORE_CORES}"
        share = round(crowd.least_ns / crowd.step_ns, 4)
        findings.append(
            Finding(
                "slow.host", "host", crowd.host, crowd.ranks, share, round(crowd.steady, 3), crowd.least_ns,
                (no_core, *cores, NO_RANK), CAUSE, remedy=remedy,
            )
        )  # fmt: skip
    return findings


def _training_threads(crowd: Crowd) -> str:
    many = len(crowd.ranks)
    return f"the training threads of its {many} ranks wait" if many > 1 else "the training thread waits"


def others_use(host: str, used: float, counters: pl.DataFrame) -> bool:
    """Return whether other processes are known to use the cores for which ranks wait.

    Args:
        used: mean number of cores that the ranks' processes compute on; NaN where that was not counted.
    """
    cores = _typical(counters.filter(pl.col("host") == host), "cpus")
    return bool(cores) and used < MAX_SHARED * cores


def _typical(counters: pl.DataFrame, name: str) -> float:
    """Return the median of a counter; 0 where it was not sampled."""
    values = counters.filter(pl.col("counter") == name)["value"]
    return float(np.median(values.to_numpy())) if values.len() else 0.0


def _observe_cores(counters: pl.DataFrame, crowd: Crowd) -> Iterator[Observation]:
    """Yield the number of cores, of cores in use, and of threads ready to run, where they were sampled."""
    cores, limit, ready = (
        _typical(counters, name) for name in ("cpus", "cgroup_cpu_limit_cores", "runnable_threads")
    )
    if ready and cores:
        sentence = "the host has {cores:.0f} cores, and typically {threads:.0f} threads are ready to run"
        yield observe("runnable-threads", sentence, cores=cores, threads=ready)
    if cores and np.isfinite(crowd.cores):
        sentence = "the ranks' processes compute on {used_cores:.1f} of {cores:.0f} cores"
        used = observe("used-cores", sentence, used_cores=crowd.cores, cores=cores)
        shared = others_use(crowd.host, crowd.cores, counters)
        if crowd.by_threads:
            used = used.then(
                ", {beside_cores:.1f} of it in threads beside the training ones", beside_cores=crowd.beside
            )
        yield used.then(": other processes use the rest") if shared else used
    if 0 < limit < cores:
        yield observe("limit-of-job", "the job's cgroup may use {limit_cores:g} of them", limit_cores=limit)


def without_crowded(
    findings: Iterable[Finding], crowds: Collection[Crowd], steps: pl.DataFrame, counters: pl.DataFrame
) -> list[Finding]:
    """Remove findings of ranks that crowding explains: they wait longer for a core rather than work longer.

    A rank that waits `TIMES_AS_LONG` as any other of its host is kept.
    """
    kept = []
    for finding in findings:
        ranks = {*finding.ranks} if finding.component_kind in ("rank", "ranks") else set()
        crowd = next((crowd for crowd in crowds if ranks and ranks <= {*crowd.ranks}), None)
        explained = crowd is not None and _is_contention(finding, steps, counters)
        if not explained or _waits_most(finding, crowd, steps, counters):
            kept.append(finding)
    return kept


def _waits_most(finding: Finding, crowd: Crowd | None, steps: pl.DataFrame, counters: pl.DataFrame) -> bool:
    """Return whether ranks wait far longer for a core than any other of their host, in nearly each step."""
    if crowd is None or finding.cause != CONTENTION or {*finding.ranks} == {*crowd.ranks}:
        return False
    facts = host_facts(steps, counters).drop_nulls("run_queue_ns")
    facts = facts.filter(pl.col("rank").is_in(list(crowd.ranks)))
    latest = facts["step"].unique().sort().tail(crowd.steps).implode()
    is_named, wait = pl.col("rank").is_in(list(finding.ranks)), pl.col("run_queue_ns")
    compared = (
        facts.filter(pl.col("step").is_in(latest))
        .group_by("step")
        .agg(named=wait.filter(is_named).min(), others=wait.filter(~is_named).max())
        .drop_nulls()
    )
    if compared.is_empty():
        return False
    of_rank, of_others = (float(np.mean(compared[name].to_numpy())) for name in ("named", "others"))
    often = float((compared["named"] > compared["others"]).mean())  # type: ignore[arg-type]
    return of_rank >= TIMES_AS_LONG * of_others and often >= PERSISTENT


def _is_contention(finding: Finding, steps: pl.DataFrame, counters: pl.DataFrame) -> bool:
    """Return whether a rank waits for a core, or has hardly more CPU time than its peers."""
    if finding.cause == CONTENTION:
        return True
    if finding.class_ != "slow.compute":
        return False  # waiting for data, collecting garbage and sleeping have their own counters
    places = steps.select("rank", time_ns="start_ns")
    rows = counters.filter(pl.col("counter") == CPU).join(places, on=["rank", "time_ns"])
    compared = rows.filter(~pl.col("rank").is_in(list(finding.ranks)[1:]))
    more = counted_more(compared, finding.ranks[0]).get(CPU, 0.0)
    return more < EXPLAINED * finding.cost_ns


# Ranks that their own limit of CPU time holds back.

THROTTLED, LIMIT = "cgroup_throttled_s", "cgroup_cpu_limit_cores"
HELD_BACK = "its limit of CPU time"
RAISE_LIMIT = "raise cpu.max, or the CPU limit of its container"
MIN_SHARE_HELD = 0.03  # of the step time


def with_throttling(
    findings: Sequence[Finding], steps: pl.DataFrame, counters: pl.DataFrame
) -> list[Finding]:
    """Return the findings, with the rank that its own cgroup held back for far longer than others.

    A finding of that rank whose cause is waiting for a core gets this cause instead. The kernel throttles in
    periods of 100 ms, so it may show in some steps only.

    Args:
        counters: with samples of processes, whose throttled time is cumulative.
    """
    held = _held_back(steps, counters)
    worst = held.sort("held_ns").tail(1)
    others = held.join(worst, on="rank", how="anti")["held_ns"].max() if held.height else None
    next_ns = float(others) if isinstance(others, float) else 0.0
    explained = list(findings)
    for rank, held_ns, step_ns, limit in worst.iter_rows():
        if held_ns < max(MIN_SHARE_HELD * step_ns, TIMES_AS_LONG * next_ns):
            continue
        held_back = observe(
            "held-back",
            "the cgroup of rank {rank} has a limit of {limit_cores:g} cores, and throttled it for {held_ns} "
            "per step once that was used up (cpu.stat)",
            rank=rank, limit_cores=limit, held_ns=held_ns,
        )  # fmt: skip
        named = [
            finding for finding in findings if finding.component_kind == "rank" and finding.ranks == (rank,)
        ]
        explained = [
            replace(
                finding, cause=HELD_BACK, observations=(held_back, *finding.observations), remedy=RAISE_LIMIT
            )
            if finding in named and finding.cause == CONTENTION
            else finding
            for finding in explained
        ]
        if not named:
            share = round(held_ns / step_ns, 4)
            explained.append(
                Finding(
                    "slow.host", "rank", str(rank), (rank,), share, 0.9, held_ns, (held_back,), HELD_BACK,
                    remedy=RAISE_LIMIT,
                )
            )  # fmt: skip
    return explained


def _held_back(steps: pl.DataFrame, counters: pl.DataFrame) -> pl.DataFrame:
    """Return `rank`, `held_ns` and `step_ns` per step, and `limit` in cores, of ranks that have a limit."""
    sampled = counters.filter(pl.col("rank") >= 0).sort("time_ns")
    totals = (
        sampled.filter(pl.col("counter") == THROTTLED)
        .group_by("rank")
        .agg(
            held_s=pl.col("value").last() - pl.col("value").first(),
            first_ns=pl.col("time_ns").first(),
            last_ns=pl.col("time_ns").last(),
        )
    )
    limits = sampled.filter(pl.col("counter") == LIMIT).group_by("rank").agg(limit=pl.col("value").last())
    inside = (pl.col("start_ns") >= pl.col("first_ns")) & (pl.col("start_ns") < pl.col("last_ns"))
    made = (
        steps.join(totals, on="rank")
        .filter(inside)
        .group_by("rank")
        .agg(num_steps=pl.len(), step_ns=pl.col("duration_ns").mean())
    )
    return (
        totals.join(made, on="rank")
        .join(limits, on="rank")
        .select("rank", "step_ns", "limit", held_ns=NS_PER_S * pl.col("held_s") / pl.col("num_steps"))
        .select("rank", "held_ns", "step_ns", "limit")
    )


# GPUs shared with other processes. A driver that shares a GPU without MPS or MIG lets one process compute at
# a time, for a slice of a few milliseconds (NVIDIA: CUDA programming guide, compute modes and time slicing).
# In the slices of others, nothing of this process runs, although its next kernel was launched long before.
# Other causes look different: a late host has launched nothing yet, a kernel that waits for other ranks is
# running, and single waits differ in length.

OTHER_PROCESS = "another process uses its GPU"
FIND_PROCESS = (
    "find what else computes on its GPU (`nvidia-smi` on its host) and end it, or share the GPU by MIG or MPS"
)
MIN_GAP_NS = 500_000  # far longer than a launch takes to arrive, and shorter than a slice
MIN_GAPS = 5
EQUAL = 0.2  # a gap is a slice if it differs from the median by at most this share
MOSTLY = 0.6  # least share of gaps that are slices
MIN_SHARE_OF_GPU = 0.1  # of the time
SURE_OF_SLICES = 0.9
GAP_COLUMNS = ("rank", "window", "kind", "name", "start_ns", "duration_ns", "correlation")
# Calls that make a stream wait for a host, during which the GPU is idle with work queued.
_WAITS_FOR_HOST = r"(?i)LaunchHostFunc|StreamAddCallback|StreamWaitValue|BatchMemOp"


class QueuedGaps(NamedTuple):
    """Times for which a rank's GPU is idle in a part of a window despite queued work.

    Attributes:
        gaps_ns: [G] length of each.
        lasted_ns: from the first work of the GPU to the last.
        waits_for_host: whether a stream may wait for a host instead.
    """

    rank: int
    gaps_ns: Floats
    lasted_ns: int
    waits_for_host: bool


def find_shared_gpus(run: Run) -> list[Finding]:
    """Find ranks whose GPU is shared with another process.

    Raises:
        InputError: a table cannot be read.
    """
    seen: dict[int, list[QueuedGaps]] = {}
    for part in run.part_by_part(SPANS, GAP_COLUMNS):
        for gaps in queued_gaps_of(part):
            seen.setdefault(gaps.rank, []).append(gaps)
    steps = run.table(STEPS, ["rank", "window"]).filter(pl.col("window") >= 0)
    findings = (
        _describe_gaps(rank, parts, steps.filter(pl.col("rank") == rank).height)
        for rank, parts in sorted(seen.items())
    )
    return [finding for finding in findings if finding is not None]


def queued_gaps_of(spans: pl.DataFrame) -> list[QueuedGaps]:
    """Return the gaps of each rank's GPU, in each window.

    Args:
        spans: `GAP_COLUMNS` of table `spans`.
    """
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0)).select(
        "rank", "correlation", launched_ns=pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)
    )
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    busy_until = end_ns.cum_max().shift().over("rank", "window")
    work = (
        spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS) & (pl.col("duration_ns") >= 0))
        .join(calls.unique(["rank", "correlation"], keep="first"), on=["rank", "correlation"], how="left")
        .sort("rank", "window", "start_ns")
        .with_columns(gap_ns=pl.col("start_ns") - pl.max_horizontal(busy_until, "launched_ns"))
    )
    seen = work.filter(busy_until.is_not_null() & pl.col("launched_ns").is_not_null())
    waiting = spans.filter(pl.col("name").str.contains(_WAITS_FOR_HOST))["rank"].unique().to_list()
    extents = work.group_by("rank", "window").agg(lasted_ns=end_ns.max() - pl.col("start_ns").min())
    gaps = seen.filter(pl.col("gap_ns") >= MIN_GAP_NS).group_by("rank", "window").agg("gap_ns")
    return [
        QueuedGaps(rank, np.asarray(gaps_ns or (), np.float64), lasted_ns, rank in waiting)
        for rank, lasted_ns, gaps_ns in extents.join(gaps, on=["rank", "window"], how="left")
        .select("rank", "lasted_ns", "gap_ns")
        .iter_rows()
    ]


def _describe_gaps(rank: int, parts: list[QueuedGaps], steps: int) -> Finding | None:
    """Return the finding of a rank; None where its GPU is not seen to be shared.

    Args:
        steps: number of steps in deep windows; 0 where unknown, so that all time counts as one step.
    """
    gaps_ns = np.concatenate([part.gaps_ns for part in parts])
    lasted_ns = sum(part.lasted_ns for part in parts)
    if gaps_ns.size < MIN_GAPS or any(part.waits_for_host for part in parts):
        return None
    slice_ns = float(np.median(gaps_ns))
    equal_ns = gaps_ns[np.abs(gaps_ns - slice_ns) <= EQUAL * slice_ns]
    share = float(equal_ns.sum()) / max(lasted_ns, 1)
    if equal_ns.size < MOSTLY * gaps_ns.size or equal_ns.size < MIN_GAPS or share < MIN_SHARE_OF_GPU:
        return None
    cost_ns = float(equal_ns.sum()) / max(steps, 1)
    standing = observe(
        TIME_SLICES,
        "its GPU is idle {gaps} times for {slice_ns} with its next work queued: {share} of the time",
        gaps=int(equal_ns.size), slice_ns=slice_ns, share=share,
    )  # fmt: skip
    return Finding(
        "slow.compute", "rank", str(rank), (rank,), round(share, 4), SURE_OF_SLICES, cost_ns, (standing,),
        OTHER_PROCESS, remedy=FIND_PROCESS,
    )  # fmt: skip
