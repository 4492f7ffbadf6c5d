"""Detectors of ranks that others wait for, inferred from the calls that are always recorded.

Takes calls, steps, counters and workers on one clock; or, where clocks need not agree, collectives outside of
deep windows that have a duration. Returns findings, and what calls cannot show. `excess.py` decides which
ranks are slower than their peers, or than before; this module, how long others wait for them, and why.

Three kinds are distinguished. Persistently late: one rank comes last in nearly all steps. Taking turns: in
each step, ranks are late one after another, at equal distances, because they share something, and no rank is
at fault; ranks that are late by chance are not equally far apart. Jitter: a rank's steps vary far more than
those of its peers, though they are not slower in most; a varying time does not show which part of the machine
is at fault, so none is blamed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import MAD_TO_SIGMA, Floats
from dpro.detect.findings import HIDDEN, Finding, costliest_first, ranks_of
from dpro.detect.load_model import LATEST, MODEL_ERROR, Uneven, describe_uneven_work, explain_counted
from dpro.detect.observations import Observation, observe
from dpro.detect.significance import MIN_COST, PERSISTENT
from dpro.detect.stragglers.causes import (
    COUNTED,
    CPU,
    EXPLAINED,
    HOST_CAUSES,
    NEARLY_AS_LATE,
    RUN_QUEUE,
    counted_more,
    host_cause,
    idle_cause,
)
from dpro.detect.stragglers.excess import MIN_RATIO, Excess, Team, late_columns, midmean
from dpro.detect.stragglers.own_time import COALESCED, MESSAGES, calls_of, teams_by_calls, usual_ones
from dpro.schema.members import num_members

HISTORY = 240  # steps from which noise is estimated
# Multiple of the peers' own time, over 20 steps or more, for a finding even if the step hardly waits for the
# rank. GPUs of one model differ by up to 8 or 9% (Sinha et al., "Not All GPUs Are Created Equal", SC 2022).
APART, APART_STEPS = 1.1, 20
TOGETHER = 1.5  # ranks are named together if healing all saves this multiple of healing one
SHORTEST_STRETCH = 5  # steps needed on each side of a step to say what began there
NEGLIGIBLE = 0.001  # of the step: lower costs count as none
COSTS_NOTHING = 0.5  # most confidence in a rank that no other waits for, however slow it is
PAUSES = 0.1  # share of steps, the costliest, whose cost is clipped to that of the next
MESSAGES_UNSEEN = (
    "the times of calls do not include waits for messages between ranks: a rank may be late because of one"
)
FIRST_CAUSE_UNKNOWN = observe(
    "first-cause-not-known", f"not known: whether it is the first cause; {MESSAGES_UNSEEN}"
)
HOST_OR_GPU = observe(
    "host-or-gpu",
    "not known: whether its host or its GPU is slow; no counter of its host explains it, and "
    "the host makes the calls",
)
HOST_OR_GPU_SURE = 0.5  # factor of the confidence with this doubt
IS_HOST = observe(
    "host-ahead",
    "its host is slow, not its GPU: the host finishes most steps before the GPU does, so it does not "
    "wait for it",
)
QUEUED = observe(HIDDEN, "queued GPU work hides this")
OF_ONE = ("longer-work", "waited-for", QUEUED.kind, NEARLY_AS_LATE.kind)  # left out for ranks late together


class KeptWaiting(NamedTuple):
    """How long a GPU waits for new work from its host in some steps, which steps, and ns per step."""

    pause_ns: float = 0.0
    recurring: str = ""
    cost_ns: float = 0.0


class AheadHosts(NamedTuple):
    """Hosts that enqueue steps long before their GPUs run them.

    Attributes:
        ranks: ranks of these hosts.
        kept_waiting: how long GPUs wait for ranks that keep them waiting nevertheless.
        step_ns: step time on the GPUs.
    """

    ranks: Collection[int]
    kept_waiting: Mapping[int, KeptWaiting]
    step_ns: float


NONE_AHEAD = AheadHosts((), {}, 0.0)
HOSTS_ONLY = (
    "a GPU that computes slowly shows in the times of calls only where the host waits for it: deep "
    "windows, or `dpro record --nccl-timing`, would show it"
)


def find_late_ranks(
    own_times: pl.DataFrame,
    calls: pl.DataFrame,
    counters: pl.DataFrame,
    workers: pl.DataFrame,
    *,
    doubtful: bool,
    ahead: AheadHosts = NONE_AHEAD,
) -> list[Finding]:
    """Find the ranks that others wait for, costliest first.

    Args:
        own_times: as from `own_time`.
        calls: as from `calls_of`; these show which ranks belong together.
        doubtful: whether ranks may also have waited for something that calls do not show.
        ahead: hosts whose own times do not include those of their GPUs.
    """
    by_excess: list[tuple[Team, Excess, Finding]] = []
    uneven_work: list[Finding] = []
    together: list[Finding] = []
    for team in teams_of(own_times, calls, workers):
        uneven = explain_counted(team.own_ns, counters, team.ranks, team.start_ns, team.steps)
        late = late_columns(team)
        if uneven is not None and (late or uneven.model.significance):
            uneven_work += _uneven(team, uneven)
            team = replace(team, own_ns=uneven.equal_ns)
            late = [excess for excess in late_columns(team) if _is_more(excess, uneven)]
        alone = [(excess, finding_of(team, excess, counters, workers, ahead)) for excess in late]
        # Ranks that wait for a message that calls do not show would look as late as its sender, and so would
        # those of a slow group.
        ambiguous = doubtful or _has_group(calls, [team.ranks[excess.column] for excess in late])
        joint = [] if ambiguous else _together(team, alone)
        together += joint
        named = ranks_of(joint)
        by_excess += [(team, excess, finding) for excess, finding in alone if named.isdisjoint(finding.ranks)]
    late_alone = [finding for team, excess, finding in by_excess if _matters(team, excess, doubtful)]
    of_rank = {finding.ranks: finding for finding in reversed(late_alone)}  # the first of each rank
    uneven_stage = costliest_first(uneven_work)[:1]  # of one stage at most
    findings = [*uneven_stage, *together, *reversed(of_rank.values())]
    if doubtful or len({team.ranks[0] for team, *_ in by_excess}) > 1:
        findings = [
            replace(finding, confidence=min(finding.confidence, 0.5)).observing(FIRST_CAUSE_UNKNOWN)
            for finding in findings
        ]
    return costliest_first(findings)


def teams_of(own_times: pl.DataFrame, calls: pl.DataFrame, workers: pl.DataFrame) -> list[Team]:
    """Return the teams of the job, each within one pipeline stage."""
    stages = {rank: stage for rank, stage in workers.select("rank", "pp").iter_rows() if stage >= 0}
    return [team_of(own_times, ranks) for ranks in teams_by_calls(calls, own_times, stages)]


def _has_group(calls: pl.DataFrame, ranks: list[int]) -> bool:
    """Return whether some of these ranks call collectives among themselves."""
    inside = pl.col("rank").is_in(ranks).all()
    groups = calls.group_by("key").agg(inside=inside, members=pl.col("rank").n_unique())
    return not groups.filter(pl.col("inside") & (pl.col("members") > 1)).is_empty()


def _together(team: Team, late: list[tuple[Excess, Finding]]) -> list[Finding]:
    """Return at most one finding, of ranks that are late together: healing one of them alone saves little.

    Args:
        late: ranks that are slower than their peers, each with its own finding.
    """
    slow = {excess.column: (excess, finding) for excess, finding in late if not excess.against_past}
    if len(slow) < 2 or 2 * len(slow) > len(team.ranks):  # if most were slow, the fast ones would stand out
        return []
    num_steps = min(excess.num_steps for excess, _ in slow.values())
    joint = _mean_but_pauses(_waited_for(team, list(slow), num_steps))
    alone = max(_mean_but_pauses(_waited_for(team, [column], num_steps)) for column in slow)
    worst, finding = max(slow.values(), key=lambda pair: pair[0].level)
    cycle = _cycle(team, worst)
    if joint < max(TOGETHER * alone, MIN_COST * cycle):
        return []
    ranks = tuple(sorted(team.ranks[column] for column in slow))
    by_rank = [slow[column][1] for column in sorted(slow)]
    observations = (
        *(one for late_rank in by_rank for one in late_rank.observations if one.kind == "longer-work"),
        observe(
            "waited-for-together",
            "the others wait {waited_ns} per step for {ranks} together; fixing one of them alone saves "
            "{alone_ns} at most, since the others are as late",
            waited_ns=joint, ranks=ranks, alone_ns=alone,
        ),
        *(one for one in finding.observations if one.kind not in OF_ONE),
    )  # fmt: skip
    sure = min(by_itself.confidence for _, by_itself in slow.values())
    severity = round(joint / cycle, 4) if cycle else 0.0
    return [
        Finding(
            finding.class_, "ranks", ", ".join(map(str, ranks)), ranks, severity, sure, joint,
            observations, finding.cause,
        )
    ]  # fmt: skip


def slowdown_with(own_times: pl.DataFrame, steps: pl.DataFrame, rank: int) -> float:
    """Return by how much steps became longer when a rank's own time came to exceed others', in ns.

    That is the step at which two levels of the excess fit best, by least squares; the later one must be at
    least twice the earlier one. 0 without such a step.

    Args:
        own_times: as from `own_time`.
        steps: the job's, as from `job_steps`.
    """
    of_rank = pl.col("rank") == rank
    excess = (
        own_times.group_by("step")
        .agg(more=pl.col("own_ns").filter(of_rank).first() - pl.col("own_ns").filter(~of_rank).median())
        .drop_nulls()
        .join(steps, on="step")
        .sort("step")
    )
    more = excess["more"].to_numpy().astype(np.float64)
    cuts = np.arange(SHORTEST_STRETCH, more.size - SHORTEST_STRETCH + 1)
    if not cuts.size:
        return 0.0
    before = np.cumsum(more)[cuts - 1]
    cut = int(cuts[np.argmax(before**2 / cuts + (more.sum() - before) ** 2 / (more.size - cuts))])
    if np.median(more[:cut]) > np.median(more[cut:]) / 2:
        return 0.0
    durations = excess["duration_ns"].to_numpy()
    return float(np.median(durations[cut:]) - np.median(durations[:cut]))


def _uneven(team: Team, uneven: Uneven) -> list[Finding]:
    """Return the finding of uneven work, whose cost is at most what ranks waited for each other."""
    latest = slice(-LATEST, None)
    own_ns, waited_ns = team.own_ns[latest], team.waited_ns[latest]
    saved = float((own_ns.max(axis=1) - uneven.equal_ns[latest].max(axis=1)).mean())
    cost = min(saved, float(waited_ns.mean()))
    return describe_uneven_work(uneven, cost, float(np.median((own_ns + waited_ns).mean(axis=1))), team.ranks)


def _is_more(excess: Excess, uneven: Uneven) -> bool:
    """Return whether a rank is slower by more than the error of the load model."""
    more = excess.effect * float(np.median(uneven.equal_ns[-excess.num_steps :, excess.column]))
    return more >= MODEL_ERROR * float(uneven.explained[excess.column])


def _matters(team: Team, excess: Excess, doubtful: bool) -> bool:
    """Return whether others wait for a rank, or it is, or became, so slow that it matters anyway.

    Devices differ, which does not matter unless it costs something. Where waits are not recorded, an excess
    without cost may be a wait.
    """
    many = excess.num_steps >= APART_STEPS  # over few steps, a single one dominates the mean
    waited_for = _waited_for(team, [excess.column], excess.num_steps)
    least = MIN_COST * _cycle(team, excess)
    if np.median(waited_for) >= least or (many and _mean_but_pauses(waited_for) >= least):
        return True
    apart = excess.level >= np.log(APART) and many
    return not doubtful and (apart or excess.against_past)


def _waited_for(team: Team, columns: list[int], num_steps: int) -> Floats:
    """Return [num_steps] ns that others waited for ranks: their excess over the next slowest rank."""
    own_ns, waited_ns = team.own_ns[-num_steps:], team.waited_ns[-num_steps:]
    others = np.delete(own_ns, columns, axis=1).max(axis=1)
    waits = np.median(np.delete(waited_ns, columns, axis=1), axis=1)
    return np.asarray(np.clip(np.minimum(own_ns[:, columns].max(axis=1) - others, waits), 0, None))


def _mean_but_pauses(waited_for: Floats) -> float:
    """Return the mean with the costliest steps clipped, as these may be pauses; steps without waits count."""
    return float(np.minimum(waited_for, np.quantile(waited_for, 1 - PAUSES)).mean())


def _cycle(team: Team, excess: Excess) -> float:
    """Return the typical time from the end of one step to that of the next, in ns."""
    return float(np.median((team.own_ns + team.waited_ns)[-excess.num_steps :, excess.column]))


def cannot_show(collectives: pl.DataFrame, workers: pl.DataFrame) -> list[str]:
    """Return what the times of calls do not show in this run, one line each."""
    reasons = [MESSAGES_UNSEEN] if messages_unseen(collectives, workers) else []
    return reasons + ([HOSTS_ONLY] if on_gpus(workers) else [])


def team_of(own_times: pl.DataFrame, ranks: list[int]) -> Team:
    """Return as arrays the latest `HISTORY` steps that all ranks of a team have.

    Args:
        own_times: as from `own_time`.
        ranks: of the team, ascending.
    """
    of_team = own_times.filter(pl.col("rank").is_in(ranks))
    common = of_team.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
    common = common.tail(HISTORY * len(ranks))
    shape = (-1, len(ranks))
    own_ns, waited, start, step = (
        common[name].to_numpy().reshape(shape) for name in ("own_ns", "waited_ns", "start_ns", "step")
    )
    return Team(ranks, step[:, 0], own_ns.astype(float), waited.astype(float), start)


def finding_of(
    team: Team, excess: Excess, counters: pl.DataFrame, workers: pl.DataFrame, ahead: AheadHosts = NONE_AHEAD
) -> Finding:
    """Return the finding of a rank that is late for its team."""
    column, latest = excess.column, slice(-excess.num_steps, None)
    own_ns, waited_ns = team.own_ns[latest], team.waited_ns[latest]
    waits = np.median(np.delete(waited_ns, column, axis=1), axis=1)
    waited_for = _waited_for(team, [column], excess.num_steps)
    cost = _mean_but_pauses(waited_for)
    cycle = _cycle(team, excess)
    # From the level, as the median of differences may differ in sign from that of ratios.
    longer = float(np.median(own_ns[:, column])) * -float(np.expm1(-excess.level))
    rank = team.ranks[column]
    class_, cause, how, sure = _cause(team, excess, longer, counters, workers, ahead)
    if rank in ahead.ranks:
        pause_ns, recurring, cost = ahead.kept_waiting.get(rank, KeptWaiting())
        cycle = ahead.step_ns
        waits_for_it = (
            QUEUED.then(", except {pause_ns} {recurring}", pause_ns=pause_ns, recurring=recurring)
            if recurring
            else QUEUED.then(": it costs nothing now")
        )
    else:
        of_it = (
            "none of it for rank {rank} alone: it costs nothing now"
            if cost < NEGLIGIBLE * cycle
            else "{waited_ns} of it for rank {rank} alone"
        )
        own_wait_ns = float(np.median(waited_ns[:, column]))
        it_waits = "it waits {own_wait_ns}" if own_wait_ns else "it waits for none"
        waits_for_it = observe(
            "waited-for",
            f"the others wait {{peer_wait_ns}} per step in collectives, {of_it}; {it_waits}",
            peer_wait_ns=float(np.median(waits)), waited_ns=cost, rank=rank, own_wait_ns=own_wait_ns,
        )  # fmt: skip
    observations = [*_slower(team, excess, longer), waits_for_it, how]
    if cost < longer / 2 and rank not in ahead.ranks:
        observations.append(NEARLY_AS_LATE)
    confidence = excess.persistent * (1 - excess.error / excess.effect) * sure
    if cost < NEGLIGIBLE * cycle:
        confidence = min(confidence, COSTS_NOTHING)
    severity = round(cost / cycle, 4) if cycle else 0.0
    return Finding(
        class_, "rank", str(rank), (rank,), severity, round(confidence, 3), cost, tuple(observations), cause
    )  # fmt: skip


def _slower(team: Team, excess: Excess, longer: float) -> list[Observation]:
    """Return how much slower the rank is, and than what."""
    longer_share = _share(excess.level)
    steps = "in the latest {steps} steps" if excess.against_past else "in {often_share} of {steps} steps"
    slower = observe(
        "longer-work",
        f"rank {{rank}} takes {{longer_ns}} ({_field('longer_share', longer_share)}) more of its own "
        f"time per step than its peers, {steps} (up to step {{last_step}})",
        rank=team.ranks[excess.column], longer_ns=longer, longer_share=longer_share,
        steps=excess.num_steps, often_share=excess.persistent, last_step=int(team.steps[-1]),
    )  # fmt: skip
    if not excess.against_past:
        return [slower]
    before_share, than = _share(excess.before), "longer" if excess.before > 0 else "less"
    became = observe(
        "became-slower",
        f"it became slower: before, it took {_field('before_share', before_share)} {{than}} than its "
        "peers, less than in {often_share} of these steps",
        before_share=before_share, than=than, often_share=excess.persistent,
    )  # fmt: skip
    return [slower, became]


def _share(log_ratio: float) -> float:
    """Return the ratio of a log-ratio, less 1, as an absolute value."""
    return float(abs(np.expm1(log_ratio)))


def _field(name: str, share: float) -> str:
    """Return the field of a share in a sentence, with one more digit for small ones."""
    return f"{{{name}}}" if share >= 0.1 else f"{{{name}:.1%}}"


def _cause(
    team: Team,
    excess: Excess,
    longer: float,
    counters: pl.DataFrame,
    workers: pl.DataFrame,
    ahead: AheadHosts,
) -> tuple[str, str, Observation, float]:
    """Return class, cause within the rank, its evidence, and the factor that it puts on the confidence."""
    # How much more of each counter the rank has per step than its peers, in ns.
    latest = slice(-excess.num_steps, None)
    places = pl.DataFrame(
        {
            "rank": pl.Series(np.tile(team.ranks, len(team.steps[latest])), dtype=pl.Int32),
            "time_ns": team.start_ns[latest].ravel(),
            "step": np.repeat(team.steps[latest], len(team.ranks)),
        }
    )
    rows = counters.filter(pl.col("counter").is_in(COUNTED)).join(places, on=["rank", "time_ns"])
    more = counted_more(rows, team.ranks[excess.column])
    counted = host_cause(more, longer)
    if counted is not None:
        return "slow.host", counted.cause, counted.observation, 1.0
    if team.ranks[excess.column] in ahead.ranks:
        return "slow.host", "", IS_HOST, 1.0
    if on_gpus(workers):
        return "slow.compute", "", HOST_OR_GPU, HOST_OR_GPU_SURE
    idle = idle_cause(more, longer)
    if idle is not None:
        return "slow.host", idle.cause, idle.observation, 1.0
    if CPU not in more:
        unknown = "not known: whether it computes meanwhile; its CPU time was not recorded"
        return "slow.compute", "", observe("cpu-time-not-recorded", unknown), 0.7
    how = observe(
        "cpu-time",
        "its training thread computes {longer_ns} longer per step than those of its peers",
        longer_ns=more[CPU],
    )
    if more.get(RUN_QUEUE, 0.0) >= more[CPU]:
        how = how.then(", for which it waits {wait_ns} longer for a core", wait_ns=more[RUN_QUEUE])
    return "slow.compute", "", how, 1.0


def messages_unseen(collectives: pl.DataFrame, workers: pl.DataFrame) -> bool:
    """Return whether ranks also wait for messages, which calls of collectives do not show."""
    return bool(collectives["op"].is_in(MESSAGES).any()) or bool((workers["pp"] >= 0).any())


def on_gpus(workers: pl.DataFrame) -> bool:
    """Return whether the job computes on GPUs."""
    return bool((workers["gpu_uuid"] != "").any() or (workers["gpu_name"] != "").any())


# Ranks that others wait for on their GPUs, by calls that were timed without deep windows (NCCL's Inspector,
# or the flight recorder with timing on). All members of a call end together, so a member's excess over the
# shortest duration is its wait for the last member; the remainder of its steps is its own time. Clocks need
# not agree, and hosts may run ahead of their GPUs.

LAST_ON_GPU = observe(
    "last-on-gpu",
    "by the times of its collectives on the GPU, to which it comes last; no counter of its host explains it, "
    "but its host may launch late",
)
LAST_ON_GPU_SURE = 0.6  # factor of the confidence with this evidence
WHOLE = 0.9  # share of a rank's calls in a step that all members must have timed
_OWN = ["rank", "step", "start_ns", "own_ns", "waited_ns", "signature", "usual"]


def find_late_gpus(
    collectives: pl.DataFrame,
    steps: pl.DataFrame,
    counters: pl.DataFrame,
    workers: pl.DataFrame,
    *,
    doubtful: bool,
) -> list[Finding]:
    """Find the ranks that others wait for by timed calls; none where no call was timed.

    Args:
        steps: rows of that table, with `time_ns`, the time of the step on the device, where it is known.
        doubtful: whether ranks may also have waited for messages.
    """
    own_times = own_time_when_timed(collectives, steps)
    if own_times.is_empty():
        return []
    findings = find_late_ranks(
        usual_ones(own_times), calls_of(collectives), counters, workers, doubtful=doubtful
    )
    # Simultaneous waits in several streams count several times, which may explain small costs.
    return [_on_gpu(finding) for finding in findings if finding.severity >= MIN_COST]


def is_timed(collectives: pl.DataFrame) -> bool:
    """Return whether calls outside of deep windows were timed."""
    return not _timed(collectives).is_empty()


def own_time_when_timed(collectives: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return work and waits of each rank, by its GPU, in each whole step outside of deep windows.

    Args:
        collectives, steps: as for `find_late_gpus`.

    Returns:
        The columns of `own_time_of_all`, without steps with calls that not all members timed.
    """
    outside = steps.filter(pl.col("window") < 0)
    calls = _timed(collectives)
    if calls.is_empty() or outside.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(_OWN, pl.Int64) | {"usual": pl.Boolean})
    begins = steps.select("rank", "step", "window", begun_ns="start_ns").sort("begun_ns")
    inside = calls.sort("enqueued_ns").join_asof(
        begins, left_on="enqueued_ns", right_on="begun_ns", by="rank", check_sortedness=False
    )
    waits = (
        inside.filter(pl.col("window") < 0)
        .group_by("rank", "step")
        .agg(
            waited_ns=pl.col("wait_ns").sum(),
            known=pl.col("wait_ns").is_not_null().mean(),
            signature=pl.struct("op", "size").hash().sum(),
        )
    )
    usual = waits.group_by("rank").agg(usual=pl.col("signature").mode().min())
    own_ns = pl.col("took_ns") - pl.col("waited_ns")
    # Where only the host timed steps, the mean counts: a host that runs ahead is done with most of them
    # long before its GPU is.
    device_ns = (
        pl.col("time_ns").clip(lower_bound=-1) if "time_ns" in outside.columns else pl.lit(-1, pl.Int64)
    )
    by_device = pl.col("by_device") if "by_device" in outside.columns else pl.lit(value=False)
    mean = pl.col("duration_ns").mean().over("rank").cast(pl.Int64)
    took = pl.when(by_device).then(device_ns).otherwise(mean)
    timed = outside.with_columns(took_ns=took).filter(pl.col("took_ns") > 0)
    return (
        timed.join(waits.filter(pl.col("known") >= WHOLE), on=["rank", "step"])
        .join(usual, on="rank")
        .with_columns(usual=pl.col("signature") == pl.col("usual"), own_ns=own_ns.clip(lower_bound=1))
        .select(_OWN)
        .sort("step", "rank")
    )


def _timed(collectives: pl.DataFrame) -> pl.DataFrame:
    """Return timed calls, from the source with most of them, with each rank's wait.

    The wait is null if a member is missing: it is unknown then which rank it was for.
    """
    timed = collectives.filter(
        (pl.col("window") < 0)
        & (pl.col("duration_ns") > 0)
        & (pl.col("sequence") >= 0)
        & (pl.col("enqueued_ns") >= 0)
        & (pl.col("group") != "")
        & (num_members() != 1)
        & ~pl.col("op").is_in([*MESSAGES, "send_recv"])
        & ~pl.col("op").str.ends_with(COALESCED)
    )
    timed = timed.filter(pl.col("source") == pl.col("source").mode().min())
    call = ["group", "group_ranks", "op", "sequence"]
    callers = timed.group_by("group", "group_ranks").agg(callers=pl.col("rank").n_unique())
    size = pl.when(num_members() > 0).then(num_members())
    return (
        timed.join(callers, on=["group", "group_ranks"])
        .with_columns(
            size=pl.coalesce(size, "callers").cast(pl.Int64),
            met=pl.len().over(call),
            transfer_ns=pl.col("duration_ns").min().over(call),
        )
        .with_columns(
            wait_ns=pl.when(pl.col("met") == pl.col("callers")).then(
                pl.col("duration_ns") - pl.col("transfer_ns")
            )
        )
        .filter(pl.col("callers") > 1)
        .select("rank", "op", "size", "enqueued_ns", "wait_ns")
    )


def _on_gpu(finding: Finding) -> Finding:
    """Replace the doubt between host and GPU, where the finding has it, by the evidence of GPU times."""
    if HOST_OR_GPU not in finding.observations:
        return finding
    observations = tuple(LAST_ON_GPU if one == HOST_OR_GPU else one for one in finding.observations)
    confidence = round(min(finding.confidence / HOST_OR_GPU_SURE * LAST_ON_GPU_SURE, 1.0), 3)
    return replace(finding, observations=observations, confidence=confidence)


COMPONENT = "what ranks take in turn"
SHARED = observe(
    "no-rank-at-fault",
    "ranks take turns at something they share, such as a file lock, a server or a disk: it slows all of them",
)
CPU_COLUMN = "training_thread_cpu_ns"
MIN_STEPS_IN_TURN = 20
MIN_GAP_IN_TURN = 0.05  # least distance from one rank to the next, as a share of the step
MAX_SPREAD = 0.25  # of a distance; normal noise has 0.6 or more, whatever its scale
MAX_RATIO = 2.0  # of the largest distance over the smallest
MAX_LAST = 0.9  # share of steps in which one rank comes last, above which it is late by itself


def find_turns(
    own_times: pl.DataFrame, calls: pl.DataFrame, workers: pl.DataFrame, facts: pl.DataFrame
) -> list[Finding]:
    """Find ranks that take turns at something other than a core, idle meanwhile, costliest first.

    Args:
        own_times: as from `dpro.detect.stragglers.own_time.own_time`, without pauses.
        calls: as from `calls_of`; these show which ranks belong together.
        workers: table `workers`, with the stages of ranks.
        facts: as from `host_facts`: how long ranks computed, and waited for a core.
    """
    findings = []
    for team in teams_of(own_times, calls, workers):
        ranks = team.ranks
        if len(ranks) < 2 or team.steps.size < MIN_STEPS_IN_TURN:
            continue
        cycle = float(np.median((team.own_ns + team.waited_ns).mean(axis=1)))
        gaps_ns = distances(team.own_ns, cycle)
        still_ns = team.own_ns - _of_team(team, facts, "run_queue_ns") - _of_team(team, facts, CPU_COLUMN)
        if gaps_ns is None or distances(still_ns, cycle) is None:
            continue
        cost = float(min(gaps_ns.sum(), team.waited_ns.max(axis=1).mean()))
        last = np.bincount(team.own_ns.argmax(axis=1), minlength=len(ranks)) / team.steps.size
        shares = {f"rank_{rank}_last_share": float(share) for rank, share in zip(ranks, last, strict=True)}
        which = ", ".join(f"rank {rank} {{{name}}}" for rank, name in zip(ranks, shares, strict=True))
        in_turn = observe(
            "in-turn",
            "in each step ranks come one after another, each {later_ns} later, and which comes last changes: "
            f"{which} of {{steps}} steps",
            later_ns=float(np.median(gaps_ns)), steps=team.steps.size, **shares,
        )  # fmt: skip
        sure = round(float(1 - last.max()) * len(ranks) / (len(ranks) - 1), 3)
        findings.append(
            Finding(
                "slow.host",
                "job",
                COMPONENT,
                tuple(ranks),
                round(cost / cycle, 4),
                min(sure, 0.9),
                cost,
                (in_turn, SHARED),
                remedy="check what all of them open in each step",
            )
        )
    return costliest_first(findings)


def _of_team(team: Team, facts: pl.DataFrame, column: str) -> Floats:
    """Return [T, R] values of a column of `facts`, in ns; 0 where unknown."""
    places = pl.DataFrame(
        {
            "rank": pl.Series(np.tile(team.ranks, team.steps.size), dtype=facts.schema["rank"]),
            "step": pl.Series(np.repeat(team.steps, len(team.ranks)), dtype=facts.schema["step"]),
        }
    )
    values = places.join(facts, on=["rank", "step"], how="left", maintain_order="left")[column]
    values_ns: Floats = values.fill_null(0.0).to_numpy().reshape(team.own_ns.shape)
    return values_ns


def distances(own_ns: Floats, cycle_ns: float) -> Floats | None:
    """Return [R - 1] ns between successive ranks in order of arrival; None unless they take turns.

    Args:
        own_ns: [T, R] own times.
    """
    gaps_ns = np.diff(np.sort(own_ns, axis=1), axis=1)
    typical = midmean(gaps_ns)
    spread = MAD_TO_SIGMA * np.median(np.abs(gaps_ns - np.median(gaps_ns, axis=0)), axis=0)
    last = np.bincount(own_ns.argmax(axis=1), minlength=own_ns.shape[1]) / len(own_ns)
    steady = (gaps_ns >= typical / 2).mean(axis=0) >= PERSISTENT
    if typical.min() < MIN_GAP_IN_TURN * cycle_ns or typical.max() > MAX_RATIO * typical.min():
        return None
    if not steady.all() or (spread > MAX_SPREAD * typical).any() or last.max() > MAX_LAST:
        return None
    return typical


MIN_STEPS = 60  # fewer hardly show how slow the slowest tenth is
TAIL = 0.9  # quantile whose distance from the median is the spread: others wait for late steps only
MIN_SPREAD = 0.01  # of own time: lower spreads are raised to this
# Multiples of the peers' spread, of the typical one and of the largest: the quantile of 60 normal values has
# a relative error of a quarter, and each rank of each job is one more chance to be wrong.
MIN_TIMES, MIN_TIMES_NEXT = 4.0, 2.5
MIN_TIMES_HALF = 2.5  # multiple of the typical spread in each half of the steps: a slow spell is not jitter
CONFIDENCE = 0.7


def find_jitter(
    own_times: pl.DataFrame, calls: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Find ranks whose own time varies far more than that of their peers, costliest first.

    Args:
        own_times: as from `dpro.detect.stragglers.own_time.own_time`, without pauses.
        calls: as from `calls_of`; these show which ranks belong together.
    """
    findings: list[Finding] = []
    for team in teams_of(own_times, calls, workers):
        if len(team.ranks) < 2 or team.steps.size < MIN_STEPS:
            continue
        uneven = explain_counted(team.own_ns, counters, team.ranks, team.start_ns, team.steps)
        equal = team.own_ns if uneven is None else uneven.equal_ns
        findings += [_finding(team, equal, column, counters) for column in varying(equal)]
    return costliest_first([finding for finding in findings if finding.severity >= MIN_COST])


def varying(own_ns: Floats) -> list[int]:
    """Return columns that vary far more than others, in both halves of the steps, but are not slower in most.

    Args:
        own_ns: [T, R] own times, in ns.
    """
    spread = spread_of(own_ns)
    halves = [spread_of(half) for half in np.array_split(own_ns, 2)]
    level = np.median(np.log(own_ns), axis=0)
    columns = []
    for column in range(own_ns.shape[1]):
        usual, most = _peers(spread, column)
        lasts = all(half[column] >= MIN_TIMES_HALF * _peers(half, column)[0] for half in halves)
        slower = level[column] - np.median(np.delete(level, column)) >= np.log1p(MIN_RATIO)
        apart = spread[column] >= max(MIN_TIMES * usual, MIN_TIMES_NEXT * most)
        if apart and lasts and not slower:
            columns.append(column)
    return columns


def spread_of(own_ns: Floats) -> Floats:
    """Return [R] distances of the slowest tenth of the steps from the median, as logarithms.

    Args:
        own_ns: [T, R] own times, in ns.
    """
    late, middle = np.quantile(np.log(own_ns), [TAIL, 0.5], axis=0)
    spread: Floats = np.maximum(late - middle, MIN_SPREAD)
    return spread


def _peers(spread: Floats, column: int) -> tuple[float, float]:
    others = np.delete(spread, column)
    return float(np.median(others)), float(others.max())


def _finding(team: Team, own_ns: Floats, column: int, counters: pl.DataFrame) -> Finding:
    rank, spread = team.ranks[column], spread_of(own_ns)
    usual, _ = _peers(spread, column)
    middle = np.median(own_ns[:, column])
    calm = own_ns.copy()
    calm[:, column] = middle * (own_ns[:, column] / middle) ** (usual / spread[column])
    waits = np.median(np.delete(team.waited_ns, column, axis=1), axis=1)
    saved = np.clip(own_ns.max(axis=1) - calm.max(axis=1), 0, None)
    cost = min(float(saved.mean()), float(waits.mean()))  # means, as a wait may be counted in the step after
    step = float(np.median((team.own_ns + team.waited_ns)[:, column]))
    last = float((own_ns.argmax(axis=1) == column).mean())
    more_share, peers_share = _share(spread[column]), _share(usual)
    varies = observe(
        "own-time-varies",
        "rank {rank}'s own time of a step is {own_ns}, and in the slowest tenth of {steps} steps at least "
        f"{_field('more_share', more_share)} more; that of its peers {_field('peers_share', peers_share)}",
        rank=rank, own_ns=float(middle), steps=len(own_ns), more_share=more_share, peers_share=peers_share,
    )  # fmt: skip
    comes_last = observe(
        "comes-last",
        "it comes last in {last_share} of the steps; if it varied as its peers do, steps would take "
        "{less_ns} less",
        last_share=last, less_ns=cost,
    )  # fmt: skip
    cause, why = _explain_jitter(team, own_ns, column, counters)
    return Finding(
        "jitter", "rank", str(rank), (rank,), round(cost / step, 4) if step else 0.0, CONFIDENCE, cost,
        (varies, comes_last, why), cause,
    )  # fmt: skip


def _explain_jitter(
    team: Team, own_ns: Floats, column: int, counters: pl.DataFrame
) -> tuple[str, Observation]:
    """Return the counter that is higher in the rank's slow steps, by a large part of their excess.

    Returns:
        The cause, empty if unknown, and its evidence.
    """
    of_rank, start = own_ns[:, column], team.start_ns[:, column]
    late = of_rank >= np.quantile(of_rank, TAIL)
    longer = float(of_rank[late].mean() - np.median(of_rank))
    rows = counters.filter(
        (pl.col("rank") == team.ranks[column]) & pl.col("counter").is_in(list(HOST_CAUSES))
    )
    times = pl.DataFrame(
        {"time_ns": start, "late": late}, schema_overrides={"time_ns": rows["time_ns"].dtype}
    )
    means = (
        rows.join(times, on="time_ns")
        .group_by("counter")
        .agg(more=pl.col("value").filter("late").mean() - pl.col("value").filter(~pl.col("late")).mean())
        .drop_nulls("more")
        .sort("more", descending=True)
    )
    for counter, more in means.head(1).iter_rows():
        if more >= EXPLAINED * longer:
            cause, does = HOST_CAUSES[counter]
            sentence = f"in these steps it {does} {{longer_ns}} longer than in others"
            return cause, observe("longer-in-slow-steps", sentence, counter=counter, longer_ns=more)
    if means.is_empty():
        return "", observe("host-not-counted", "no counter of its host was recorded")
    return "", observe("host-does-not-explain", "no counter of its host explains it")
