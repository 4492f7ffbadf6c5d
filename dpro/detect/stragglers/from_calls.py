"""Ranks that the others wait for persistently, inferred from the calls that are always recorded.

In: calls, steps, counters and workers on one clock. Out: findings, and what they cannot show. Which ranks are
slower than their peers, or than before, is decided by `excess.py`; here, how long others wait for them, and
why.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.findings import Finding
from dpro.detect.imbalance.load_model import LATEST, REST, Uneven, describe_uneven_work, explain, workloads_of
from dpro.detect.significance import MIN_COST
from dpro.detect.stragglers.causes import CPU, HOST_CAUSES, counted_more, host_cause, idle_cause
from dpro.detect.stragglers.excess import Excess, Team, late_columns
from dpro.detect.stragglers.own_time import MESSAGES, teams_by_calls
from dpro.units import format_duration

HISTORY = 240  # steps that the noise is estimated from
# Times the peers' own time, over 20 steps or more: from here on worth a finding even if the step hardly waits
# for it. GPUs of one model differ by up to 8 or 9% (Sinha et al., "Not All GPUs Are Created Equal", SC 2022).
APART, APART_STEPS = 1.1, 20
NEGLIGIBLE = 0.001  # of the step: what costs less costs nothing
PAUSES = 0.1  # of the steps, the costliest: their cost is clipped to that of the next
MESSAGES_UNSEEN = (
    "waits for messages between ranks are not in the times of calls: a rank may be late because of one"
)
HOST_OR_GPU = (
    "not known: whether its host or its GPU; no counter of its host explains it, and calls are the host's"
)
HOST_OR_GPU_SURE = 0.5  # factor of the confidence then
HOSTS_ONLY = (
    "a GPU that computes slowly shows in the times of calls only where the host waits for it: deep "
    "windows, or `dpro record --nccl-timing`, would show it"
)


def find_late_ranks(
    own: pl.DataFrame, calls: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame, *, doubtful: bool
) -> list[Finding]:
    """Name the ranks that the others wait for, costliest first; none where nothing is wrong.

    Args:
        own: as `own_time` gives it.
        calls: as `calls_of` gives them; for which ranks belong together.
        doubtful: whether ranks may also have waited for what calls do not show.
    """
    stages = {rank: stage for rank, stage in workers.select("rank", "pp").iter_rows() if stage >= 0}
    found: list[tuple[Team, Excess, Finding]] = []
    uneven_work: list[Finding] = []
    for ranks in teams_by_calls(calls, own, stages):
        team = team_of(own, ranks)
        uneven = explain(team.own, workloads_of(counters, ranks, team.start), team.steps)
        late = late_columns(team)
        if uneven is not None and (late or uneven.model.significance):
            uneven_work += _uneven(team, uneven)
            team = replace(team, own=uneven.equal)
            late = [each for each in late_columns(team) if _is_more(each, uneven)]
        found += [(team, excess, finding_of(team, excess, counters, workers)) for excess in late]
    costliest = sorted(uneven_work, key=lambda finding: -finding.cost_ns)[:1]  # of several stages' ranks
    findings = [
        *costliest,
        *_once([each for team, excess, each in found if _matters(team, excess, doubtful)]),
    ]
    doubtful = doubtful or len({team.ranks[0] for team, *_ in found}) > 1
    doubted = [_doubted(finding) if doubtful else finding for finding in findings]
    return sorted(doubted, key=lambda finding: -finding.cost_ns)


def _uneven(team: Team, uneven: Uneven) -> list[Finding]:
    """The finding of uneven work: it costs no more than ranks waited for each other."""
    latest = slice(-LATEST, None)
    own, waited = team.own[latest], team.waited[latest]
    saved = float((own.max(axis=1) - uneven.equal[latest].max(axis=1)).mean())
    cost = min(saved, float(waited.mean()))
    return describe_uneven_work(uneven, cost, float(np.median((own + waited).mean(axis=1))), team.ranks)


def _is_more(excess: Excess, uneven: Uneven) -> bool:
    """Whether a rank is slower by more than what the load model may be wrong about."""
    more = excess.effect * float(np.median(uneven.equal[-excess.num_steps :, excess.column]))
    return more >= REST * float(uneven.explained[excess.column])


def _matters(team: Team, excess: Excess, doubtful: bool) -> bool:
    """Whether the others wait for it, or the rank is so slow, or became so, that it matters anyway.

    Devices differ, which does not matter where it costs nothing. Where waits are not recorded, what costs
    nothing may be a wait.
    """
    many = excess.num_steps >= APART_STEPS  # in few steps, a mean is what one of them makes it
    waited_for = _waited_for(team, excess)
    least = MIN_COST * _cycle(team, excess)
    if np.median(waited_for) >= least or (many and _mean_but_pauses(waited_for) >= least):
        return True
    apart = excess.level >= np.log(APART) and many
    return not doubtful and (apart or excess.against_past)


def _waited_for(team: Team, excess: Excess) -> Floats:
    """[num_steps] ns that the others waited for the rank: beyond the next slowest, no more than they did."""
    own, waited = team.own[-excess.num_steps :], team.waited[-excess.num_steps :]
    others = np.delete(own, excess.column, axis=1).max(axis=1)
    waits = np.median(np.delete(waited, excess.column, axis=1), axis=1)
    return np.asarray(np.clip(np.minimum(own[:, excess.column] - others, waits), 0, None))


def _mean_but_pauses(waited_for: Floats) -> float:
    """What is lost is lost on average, also where it is nothing in most steps; pauses are none of it."""
    return float(np.minimum(waited_for, np.quantile(waited_for, 1 - PAUSES)).mean())


def _cycle(team: Team, excess: Excess) -> float:
    """Typical ns from the end of one step to that of the next."""
    return float(np.median((team.own + team.waited)[-excess.num_steps :, excess.column]))


def _once(findings: list[Finding]) -> list[Finding]:
    """The first of each rank."""
    return list({finding.ranks: finding for finding in reversed(findings)}.values())[::-1]


def cannot_show(collectives: pl.DataFrame, workers: pl.DataFrame) -> list[str]:
    """What the times of calls do not show in this run, one line each."""
    reasons = [MESSAGES_UNSEEN] if messages_unseen(collectives, workers) else []
    return reasons + ([HOSTS_ONLY] if on_gpus(workers) else [])


def team_of(own: pl.DataFrame, ranks: list[int]) -> Team:
    """The steps that all ranks of a team have, as arrays; the latest `HISTORY` of them.

    Args:
        own: as `own_time` returns it.
        ranks: of the team, ascending.
    """
    mine = own.filter(pl.col("rank").is_in(ranks))
    common = mine.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
    common = common.tail(HISTORY * len(ranks))
    shape = (-1, len(ranks))
    own_ns, waited, start, step = (
        common[name].to_numpy().reshape(shape) for name in ("own_ns", "waited_ns", "start_ns", "step")
    )
    return Team(ranks, step[:, 0], own_ns.astype(float), waited.astype(float), start)


def finding_of(team: Team, excess: Excess, counters: pl.DataFrame, workers: pl.DataFrame) -> Finding:
    """Return the finding of a rank that is late for its team.

    Args:
        excess: of the rank's own time over that of its peers.
        counters: rows of `counters`.
        workers: rows of `workers`.
    """
    column, latest = excess.column, slice(-excess.num_steps, None)
    own, waited = team.own[latest], team.waited[latest]
    waits = np.median(np.delete(waited, column, axis=1), axis=1)
    waited_for = _waited_for(team, excess)
    cost = _mean_but_pauses(waited_for)
    cycle = _cycle(team, excess)
    # By the level: a median of differences may have another sign than one of ratios.
    longer = float(np.median(own[:, column])) * -float(np.expm1(-excess.level))
    rank = team.ranks[column]
    class_, cause, how, sure = _cause(team, excess, longer, counters, workers)
    waiting = f"the others wait {format_duration(float(np.median(waits)))} per step in collectives"
    itself = f"it waits {format_duration(float(np.median(waited[:, column])))}"
    if cost < NEGLIGIBLE * cycle:
        waits_for_it = f"{waiting}, none of it for rank {rank} alone: it costs nothing now; {itself}"
    else:
        waits_for_it = f"{waiting}, {format_duration(cost)} of it for rank {rank} alone; {itself}"
    evidence = [*_slower(team, excess, longer), waits_for_it, how]
    if cost < longer / 2:
        evidence.append("other ranks are nearly as late: healing this one alone saves less than it lost")
    confidence = excess.persistent * (1 - excess.error / excess.effect) * sure
    severity = round(cost / cycle, 4) if cycle else 0.0
    return Finding(
        class_, "rank", str(rank), (rank,), severity, round(confidence, 3), cost, tuple(evidence), cause
    )  # fmt: skip


def _slower(team: Team, excess: Excess, longer: float) -> list[str]:
    """How much slower the rank is, and than what."""
    rank, often, last = team.ranks[excess.column], f"{excess.persistent:.0%}", team.steps[-1]
    more = (
        f"rank {rank} takes {format_duration(longer)} ({_percent(excess.level)}) more of its own time "
        "per step than its peers"
    )
    if not excess.against_past:
        return [f"{more}, in {often} of {excess.num_steps} steps (up to step {last})"]
    before = f"{_percent(excess.before)} {'longer' if excess.before > 0 else 'less long'}"
    return [
        f"{more}, in the latest {excess.num_steps} steps (up to step {last})",
        f"it became slower: before, it took {before} than they, less than in {often} of these steps",
    ]


def _percent(log_ratio: float) -> str:
    ratio = float(abs(np.expm1(log_ratio)))
    return f"{ratio:.0%}" if ratio >= 0.1 else f"{ratio:.1%}"


def _cause(
    team: Team, excess: Excess, longer: float, counters: pl.DataFrame, workers: pl.DataFrame
) -> tuple[str, str, str, float]:
    """Class, cause within the rank, evidence of it, and by how much less sure that makes."""
    more = _counted(team, excess, counters)
    counted = host_cause(more, longer)
    if counted is not None:
        return "slow.host", counted.cause, counted.evidence, 1.0
    if on_gpus(workers):
        return "slow.compute", "", HOST_OR_GPU, HOST_OR_GPU_SURE
    idle = idle_cause(more, longer)
    if idle is not None:
        return "slow.host", idle.cause, idle.evidence, 1.0
    if CPU not in more:
        return "slow.compute", "", "not known: whether it computes; its CPU time was not recorded", 0.7
    how = f"its training thread computes {format_duration(more[CPU])} longer per step than theirs"
    return "slow.compute", "", how, 1.0


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
    rows = counters.filter(pl.col("counter").is_in([*HOST_CAUSES, CPU])).join(places, on=["rank", "time_ns"])
    return counted_more(rows, team.ranks[excess.column])


def _doubted(finding: Finding) -> Finding:
    doubt = f"not known: whether it is the first cause; {MESSAGES_UNSEEN}"
    confidence = min(finding.confidence, 0.5)
    return replace(finding, confidence=confidence, evidence=(*finding.evidence, doubt))


def messages_unseen(collectives: pl.DataFrame, workers: pl.DataFrame) -> bool:
    """Whether ranks also wait for messages, which calls of collectives do not show."""
    return bool(collectives["op"].is_in(MESSAGES).any()) or bool((workers["pp"] >= 0).any())


def on_gpus(workers: pl.DataFrame) -> bool:
    """Whether the job computes on GPUs."""
    return bool((workers["gpu_uuid"] != "").any() or (workers["gpu_name"] != "").any())
