"""Ranks that the others wait for, persistently, told from the calls that are always recorded.

In: calls, steps, counters and workers on one clock. Out: findings, and what they cannot show. What is judged
is each rank's own time per step against that of its peers, in log-ratios: by its median over the latest
steps, in units of what that varies by from step to step. Heavy tails and periodic work (a checkpoint) do not
move a median.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.detect.causes import EXPLAINED, HOST_CAUSES, counted_more, host_cause
from dpro.detect.findings import Finding
from dpro.detect.lateness import MESSAGES, calls_of, own_time, teams
from dpro.detect.uneven import LATEST, REST, Uneven, amounts_of, explain, find_uneven_work
from dpro.units import format_duration

Floats = NDArray[np.float64]

WINDOWS = (10, 20, 40)  # steps that are judged, the latest of: a large effect shows in few
HISTORY = 240  # steps that tell how much is noise
LEAST_RATIO = 0.035  # of the peers' own time: less is everywhere
LEAST_SHARE = 0.02  # of the step
BROKEN = 1.5  # times the peers' own time: from here on worth a finding even if the step hardly waits for it
AS_LARGE = 0.9  # of the largest effect: of windows that show as much, the one with the most steps tells
PERSISTENT = 0.8  # of the steps a rank must be slower in
# Standard errors that the median must reach, beside all else. Every look is one more chance to be wrong, and
# a job of a week is looked at 100,000 times.
CLEAR = 4.5
LEAST_NOISE = 0.01  # noise is never believed to be less
SCARCE = (
    8.0  # with few steps the noise is hardly known: its estimate is raised by this many over their number
)
MAD_TO_SIGMA = 1.4826
_CPU = "step_training_thread_cpu_ns"
MESSAGES_UNSEEN = (
    "waits for messages between ranks are not in the times of calls: a rank may be late because of one"
)
HOSTS_ONLY = (
    "a GPU that computes slowly shows in the times of calls only where the host waits for it: deep "
    "windows, or NCCL's Inspector, would tell"
)


@dataclass(frozen=True)
class Team:
    """Ranks that do alike work, and what they did in the steps that all of them have.

    Attributes:
        ranks: [R] who.
        steps: [T] which.
        own: [T, R] ns of work.
        waited: [T, R] ns of waiting for others.
        start: [T, R] ns, when the steps began.
    """

    ranks: list[int]
    steps: NDArray[np.int64]
    own: Floats
    waited: Floats
    start: NDArray[np.int64]


@dataclass(frozen=True)
class Excess:
    """How much slower one rank of a team is.

    Attributes:
        column: of the team.
        num_steps: how many of the latest steps show it.
        median: of the log-ratio to its peers.
        error: standard error of that.
        persistent: share of the steps in which the rank is slower.
    """

    column: int
    num_steps: int
    median: float
    error: float
    persistent: float


def find_late_ranks(
    collectives: pl.DataFrame, steps: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Name the ranks that the others wait for, costliest first; none where nothing is wrong.

    Args:
        collectives, steps, counters, workers: the tables, or their latest rows, all times on one clock.
    """
    calls = calls_of(collectives)
    if calls.is_empty() or steps.is_empty():
        return []
    own = own_time(calls, steps)
    return judge(own, calls, counters, workers, doubtful=messages_unseen(collectives, workers))


def judge(
    own: pl.DataFrame, calls: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame, *, doubtful: bool
) -> list[Finding]:
    """The same from own times, which need not be computed anew at each look.

    Args:
        own: as `own_time` gives it.
        calls: as `calls_of` gives them; for which ranks belong together.
        counters, workers: the tables.
        doubtful: whether ranks may also have waited for what calls do not show.
    """
    stages = {rank: stage for rank, stage in workers.select("rank", "pp").iter_rows() if stage >= 0}
    found: list[tuple[int, Excess, Finding]] = []
    uneven_work: list[Finding] = []
    for number, ranks in enumerate(teams(calls, own, stages)):
        team = team_of(own, ranks)
        uneven = explain(team.own, amounts_of(counters, ranks, team.start), team.steps)
        late = late_columns(team)
        if uneven is not None and (late or uneven.relation.clear):
            uneven_work += _uneven(team, uneven)
            team = replace(team, own=uneven.equal)
            late = [each for each in late_columns(team) if _is_more(each, uneven)]
        found += [(number, excess, _finding(team, excess, counters, workers)) for excess in late]
    findings = [finding for _, excess, finding in found if _matters(excess, finding)]
    findings += sorted(uneven_work, key=lambda finding: -finding.cost_ns)[
        :1
    ]  # of stages the one that waits most
    doubtful = doubtful or len({number for number, *_ in found}) > 1
    told = [_doubted(finding) if doubtful else finding for finding in findings]
    return sorted(told, key=lambda finding: -finding.cost_ns)


def _uneven(team: Team, uneven: Uneven) -> list[Finding]:
    """What uneven work costs: no more than ranks waited for each other."""
    latest = slice(-LATEST, None)
    own, waited = team.own[latest], team.waited[latest]
    saved = float((own.max(axis=1) - uneven.equal[latest].max(axis=1)).mean())
    cost = min(saved, float(waited.mean()))
    return find_uneven_work(uneven, cost, float(np.median((own + waited).mean(axis=1))), team.ranks)


def _is_more(excess: Excess, uneven: Uneven) -> bool:
    """Whether a rank is slower by more than what its amounts may be wrong about."""
    more = excess.median * float(np.median(uneven.equal[-excess.num_steps :, excess.column]))
    return more >= REST * float(uneven.explained[excess.column])


def _matters(excess: Excess, finding: Finding) -> bool:
    return finding.severity >= LEAST_SHARE or excess.median >= np.log(BROKEN)


def cannot_show(collectives: pl.DataFrame, workers: pl.DataFrame) -> list[str]:
    """What the times of calls leave open in this run, one line each."""
    reasons = [MESSAGES_UNSEEN] if messages_unseen(collectives, workers) else []
    return reasons + ([HOSTS_ONLY] if on_gpus(workers) else [])


def team_of(own: pl.DataFrame, ranks: list[int]) -> Team:
    """The steps that all ranks of a team have, as arrays; the latest `HISTORY` of them."""
    mine = own.filter(pl.col("rank").is_in(ranks))
    common = mine.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
    common = common.tail(HISTORY * len(ranks))
    shape = (-1, len(ranks))
    own_ns, waited, start, step = (
        common[name].to_numpy().reshape(shape) for name in ("own_ns", "waited_ns", "start_ns", "step")
    )
    return Team(ranks, step[:, 0], own_ns.astype(float), waited.astype(float), start)


def late_columns(team: Team) -> list[Excess]:
    """The ranks of a team that are clearly and persistently slower than the rest."""
    found = []
    if len(team.steps) < min(WINDOWS):
        return []
    logs = np.log(np.maximum(team.own, 1.0))
    excess = logs - median_of_others(logs)
    for column in range(len(team.ranks)):
        judged = (_judge(excess[:, column], column, size) for size in WINDOWS if size <= len(excess))
        clear = [each for each in judged if each is not None]
        if clear:
            enough = AS_LARGE * max(each.median for each in clear)
            found.append([each for each in clear if each.median >= enough][-1])
    return found


def median_of_others(values: Floats) -> Floats:
    """[T, R] the median over all columns but the own."""
    size = values.shape[1]
    order = np.argsort(values, axis=1)
    place = np.argsort(order, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)

    def without(index: int) -> Floats:
        after = ordered[:, min(index + 1, size - 1), None]
        return np.where(place > index, ordered[:, index, None], after)

    low, high = (size - 2) // 2, (size - 1) // 2
    return (without(low) + without(high)) / 2


def _judge(excess: Floats, column: int, size: int) -> Excess | None:
    """Whether the latest steps show a rank as slower.

    Args:
        excess: [T] log-ratio of its own time to that of its peers.
        column: of the rank.
        size: how many of the latest steps are judged.
    """
    latest = excess[-size:]
    median, persistent = float(np.median(latest)), float((latest > 0).mean())
    if median < LEAST_RATIO or persistent < PERSISTENT:
        return None
    error = _error(excess, size)
    return Excess(column, size, median, error, persistent) if median >= CLEAR * error else None


def _error(excess: Floats, size: int) -> float:
    """Standard error of a median of some successive steps.

    Noise is taken from differences of neighbours, which a lasting change does not touch; where there are
    enough steps, also from those of the medians of successive blocks, which tells noise that lasts for
    several steps. The median of N normal values varies by sqrt(pi / 2 / N) of what one of them does.
    """
    error = max(_sigma(np.diff(excess)), LEAST_NOISE) * np.sqrt(np.pi / 2 / size)
    blocks = len(excess) // size
    if blocks > 4:
        medians = np.median(excess[len(excess) - blocks * size :].reshape(blocks, size), axis=1)
        error = max(error, _sigma(np.diff(medians)))
    return float(error * (1 + SCARCE / len(excess)))


def _sigma(differences: Floats) -> float:
    """Standard deviation of one value, from differences of two, by their median absolute deviation."""
    spread = np.median(np.abs(differences - np.median(differences)))
    return float(MAD_TO_SIGMA * spread / np.sqrt(2))


def _finding(team: Team, excess: Excess, counters: pl.DataFrame, workers: pl.DataFrame) -> Finding:
    column, latest = excess.column, slice(-excess.num_steps, None)
    own, waited = team.own[latest], team.waited[latest]
    others = np.delete(own, column, axis=1)
    waits = np.median(np.delete(waited, column, axis=1), axis=1)
    waited_for = np.clip(np.minimum(own[:, column] - others.max(axis=1), waits), 0, None)
    cost, cycle = float(np.median(waited_for)), float(np.median((own + waited)[:, column]))
    longer = float(np.median(own[:, column] - np.median(others, axis=1)))
    rank = team.ranks[column]
    class_, cause, how, sure = _cause(team, excess, longer, counters, workers)
    evidence = [
        f"rank {rank} takes {format_duration(longer)} ({np.expm1(excess.median):.0%}) more of its own time "
        "per step "
        f"than its peers, in {excess.persistent:.0%} of {excess.num_steps} steps (up to step "
        f"{team.steps[-1]})",
        f"the others wait {format_duration(float(np.median(waits)))} per step in collectives, "
        f"{format_duration(cost)} of it for rank {rank} alone; it waits "
        f"{format_duration(float(np.median(waited[:, column])))}",
        how,
    ]
    if cost < longer / 2:
        evidence.append("other ranks are nearly as late: healing this one alone saves less than it lost")
    confidence = excess.persistent * (1 - excess.error / excess.median) * sure
    severity = round(cost / cycle, 4) if cycle else 0.0
    return Finding(
        class_, "rank", str(rank), (rank,), severity, round(confidence, 3), cost, tuple(evidence), cause
    )  # fmt: skip


def _cause(
    team: Team, excess: Excess, longer: float, counters: pl.DataFrame, workers: pl.DataFrame
) -> tuple[str, str, str, float]:
    """Class, cause within the rank, evidence of it, and by how much less sure that makes."""
    more = _counted(team, excess, counters)
    told = host_cause(more, longer)
    if told is not None:
        return "slow.host", told.cause, told.evidence, 1.0
    if on_gpus(workers):
        how = (
            "not known: whether its host or its GPU; no counter of its host explains it, and calls "
            "are the host's"
        )
        return "slow.compute", "", how, 0.5
    if _CPU not in more:
        return "slow.compute", "", "not known: whether it computes; its CPU time was not recorded", 0.7
    if more[_CPU] >= EXPLAINED * longer:
        how = f"its training thread computes {format_duration(more[_CPU])} longer per step than theirs"
        return "slow.compute", "", how, 1.0
    how = (
        "it neither computes in that time, nor waits for its data, a core or garbage: something in the "
        "host's code "
        "sleeps or waits (a lock, a disk, the network)"
    )
    return "slow.host", "host code that waits", how, 1.0


def _counted(team: Team, excess: Excess, counters: pl.DataFrame) -> dict[str, float]:
    """How much more of each counter the rank has per step than its peers, ns."""
    latest = slice(-excess.num_steps, None)
    size = len(team.ranks)
    places = pl.DataFrame(
        {
            "rank": pl.Series(np.tile(team.ranks, len(team.steps[latest])), dtype=pl.Int32),
            "time_ns": team.start[latest].ravel(),
            "step": np.repeat(team.steps[latest], size),
        }
    )
    rows = counters.filter(pl.col("counter").is_in([*HOST_CAUSES, _CPU])).join(places, on=["rank", "time_ns"])
    return counted_more(rows, team.ranks[excess.column])


def _doubted(finding: Finding) -> Finding:
    doubt = f"not known: whether it is the first cause; {MESSAGES_UNSEEN}"
    confidence = min(finding.confidence, 0.5)
    return replace(finding, confidence=confidence, evidence=(*finding.evidence, doubt))


def messages_unseen(collectives: pl.DataFrame, workers: pl.DataFrame) -> bool:
    """Whether ranks also wait for messages, which calls of collectives do not tell."""
    return bool(collectives["op"].is_in(MESSAGES).any()) or bool((workers["pp"] >= 0).any())


def on_gpus(workers: pl.DataFrame) -> bool:
    """Whether the job computes on GPUs."""
    return bool((workers["gpu_uuid"] != "").any() or (workers["gpu_name"] != "").any())
