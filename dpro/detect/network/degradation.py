"""Detectors of a network that became slower, by its transfers or the waits of hosts; or that loses packets.

From a job's traffic over many steps, returns a finding for transfers between hosts, and one for those within:
since when, by how much, and what the groups that became slower have in common. A group is compared with
itself, so what affects all groups equally is found, too. Transfers do not include waiting.

From own times of ranks, as inferred from their calls, and what hosts counted in each step, returns findings
of groups in which all ranks wait longer since some step, and not for each other.

From TCP segments that were sent again, which the kernel counts per connection, summed per pair of hosts, and
the fabric (all hosts on one switch if the run has none), returns findings of what loses packets. Losses that
do not slow down any transfer yet are found, too, so their cost is not stated. Does not see traffic outside of
TCP (InfiniBand, RoCE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.detect.findings import NETWORK, Finding
from dpro.detect.network.traffic import KEYS, Traffic, with_axis
from dpro.detect.network.transfers import DEVIATIONS, MAX_UNSURE, Suspect, blame, words_of
from dpro.detect.network.wires import (
    CLASSES,
    Blamed,
    Wires,
    blame_parts,
    blame_wires,
    votes_of_losses,
    wires_of,
)
from dpro.detect.observations import Observation, observe
from dpro.detect.regression import Regression, regression_of
from dpro.detect.significance import CHANCE, MIN_COST_OF_SLOW, MIN_LATEST, PERSISTENT, SHORTEST, change_points
from dpro.detect.stragglers.own_time import outside_calls
from dpro.members import members_of
from dpro.replay.cost.fabric.connections import crossings
from dpro.replay.cost.fabric.flows import flows_of
from dpro.replay.cost.fabric.network import fabric_of, routes_of
from dpro.replay.steps import host_facts, job_steps
from dpro.store import Run
from dpro.topology.file import PORT, HostEntry, LinkEntry, SwitchEntry, TopologyFile
from dpro.words import ranks_in_words

MIN_RATIO = 1.15  # least factor by which transfers became slower
MIN_SEEN = 3  # transfers of a group needed on each side of a change
MAX_LINES = 3  # of evidence
SIDES = {True: "between hosts", False: "within hosts"}
_NOT_WHOLE = observe(
    "members-not-recorded",
    "not all of their members are recorded: a missing one that is late since then would look the same",
)


class LevelShift(NamedTuple):
    """Transfers that became slower.

    Attributes:
        since: first step of the slower level.
        times: factor by which transfers take longer.
        between: whether transfers between hosts became slower, or those within.
        groups: `KEYS` columns, `before_ns`, `after_ns`, whether each is `whole`, and became `slow`.
    """

    since: int
    times: float
    between: bool
    groups: pl.DataFrame


def find_slower_transfers(traffic: Traffic) -> list[Finding]:
    """Find transfers that take clearly longer since some step, and that the steps wait for."""
    changes = [change for side in SIDES if (change := change_of(traffic.transfers, between=side))]
    findings = (_describe(traffic, change) for change in changes)
    return [finding for finding in findings if finding]


def change_of(transfers: pl.DataFrame, *, between: bool) -> LevelShift | None:
    """Return the change for the worse that lasts to the end; None if there is none.

    All transfers of the side are tested together, which finds small changes that affect all; if that shows
    nothing, each group is tested by itself, which finds changes that affect few of many.

    Args:
        transfers: as from `recorded_transfers`.
    """
    relative = (pl.col("transfer_ns") / pl.col("transfer_ns").median().over(KEYS)).alias("relative")
    of_side = transfers.filter((pl.col("num_hosts") > 1) == between).with_columns(relative)
    change = _change(of_side, of_side, between)
    if change is not None:
        return change
    by_group = of_side.partition_by("members")
    alone = [group for group in by_group if _first_slow_step(group, CHANCE / len(by_group)) is not None]
    return _change(of_side, pl.concat(alone), between) if alone else None


def _change(of_side: pl.DataFrame, tested: pl.DataFrame, between: bool) -> LevelShift | None:
    """Return the change that the tested transfers of a side show; None without one."""
    since = _first_slow_step(tested, CHANCE)
    if since is None:
        return None
    among = pl.col("members").is_in(tested["members"].unique().to_list())
    groups = sides_of(of_side, since).with_columns(slow=pl.col("slow") & among)
    slow = groups.filter("slow")
    times = (slow["after_ns"] / slow["before_ns"]).median()
    return LevelShift(since, float(times), between, groups) if slow.height else None  # type: ignore[arg-type]


def _first_slow_step(transfers: pl.DataFrame, chance: float) -> int | None:
    """Return the first step of the slower level that lasts to the end; None without one.

    Steps are compared by their medians; if there are few steps, as in windows, the transfers themselves are.

    Args:
        transfers: `step`, `instance`, `relative`.
    """
    typical = transfers.group_by("step").agg(pl.col("relative").median()).sort("step")
    ordered = typical if typical.height >= 2 * SHORTEST else transfers.sort("step", "instance")
    times, steps = ordered["relative"].to_numpy(), ordered["step"].to_numpy()
    cuts = change_points(times, MIN_RATIO - 1, chance, clear=DEVIATIONS)
    levels = [float(np.median(part)) for part in np.split(times, cuts)] if cuts else []
    if len(levels) < 2 or levels[-1] < MIN_RATIO * min(levels[:-1]):
        return None
    first = len(levels) - 1  # index of the first level of those that are slower to the end
    while first > 0 and levels[first - 1] >= MIN_RATIO * min(levels):
        first -= 1
    if first == 0:
        return None
    cut = cuts[first - 1]
    begin, end = np.searchsorted(steps, steps[cut]), np.searchsorted(steps, steps[cut], side="right")
    mostly_before = cut - begin > (end - begin) / 2  # the step with the cut goes to the side of most of it
    return int(steps[min(end, steps.size - 1)] if mostly_before else steps[cut])


def sides_of(transfers: pl.DataFrame, since: int) -> pl.DataFrame:
    """Return what each group typically took before a step and takes since, and whether it is slow now.

    It is slow if nearly every step shows it, on both sides: steps count rather than their transfers, since
    what affects a step affects all of its transfers.

    Args:
        transfers: as from `recorded_transfers`.

    Returns:
        `KEYS` columns, `before_ns`, `after_ns`, `whole`, `slow`; for groups known on both sides.
    """
    late = pl.col("step") >= since
    times = pl.col("transfer_ns")
    typical = transfers.group_by(KEYS).agg(
        before_ns=times.filter(~late).median(),
        after_ns=times.filter(late).median(),
        seen=pl.min_horizontal(times.filter(~late).len(), times.filter(late).len()),
        whole=pl.col("whole").all(),
    )
    middle = (pl.col("before_ns") * pl.col("after_ns")).sqrt()
    steps = (
        transfers.join(typical, on=KEYS)
        .group_by(*KEYS, "step")
        .agg(over=times.median() > middle.first())
        .group_by(KEYS)
        .agg(
            shown=pl.min_horizontal(
                pl.col("over").filter(late).mean(), 1 - pl.col("over").filter(~late).mean()
            ),
            steps=pl.min_horizontal(late.sum(), (~late).sum()),
        )
    )
    slower = pl.col("after_ns") >= MIN_RATIO * pl.col("before_ns")
    persistent = (pl.col("shown") >= PERSISTENT) & (pl.col("steps") >= MIN_LATEST)
    return (
        typical.filter(pl.col("seen") >= MIN_SEEN)
        .join(steps, on=KEYS)
        .select(*KEYS, "before_ns", "after_ns", "whole", slow=slower & persistent)
        .sort(KEYS)
    )


def _describe(traffic: Traffic, change: LevelShift) -> Finding | None:
    """Return the finding; None if the steps since then hardly wait for these transfers."""
    transfers = traffic.transfers
    slow = change.groups.filter("slow")
    faster = slow.select(*KEYS, times=pl.col("before_ns") / pl.col("after_ns"))
    since = transfers.filter(pl.col("step") >= change.since)
    steps, saved, base = traffic.healed(since.join(faster, on=KEYS))
    late = steps >= change.since
    grown = np.median(base[late]) - np.median(base[~late]) if traffic.unsure else np.inf
    saved, base = saved[late], base[late]
    cost = min(float(saved.mean()), float(grown))  # steps do not wait for more than they grew by
    if cost < MIN_COST_OF_SLOW * base.mean():
        return None
    part = _part_at_fault(change, traffic)
    sure = part.sure
    ranks = sorted({int(rank) for members in slow["members"] for rank in members.split(",")})
    step = float(base.mean())
    worst = slow.sort(pl.col("after_ns") / pl.col("before_ns"), "members", descending=[True, False])
    worst = worst.select("op", "bytes", "members", "before_ns", "after_ns").head(MAX_LINES)
    observations = [
        observe(
            "slower-since",
            "since step {step} transfers {side} take {times:.2f} times as long as before, {slow_groups} of "
            "{groups} groups that make the same calls before and after",
            step=change.since, side=SIDES[change.between], times=change.times, slow_groups=slow.height,
            groups=change.groups.height,
        ),
        *(
            observe(
                "slower-transfer",
                "{operation} of {each_bytes} among ranks {members}: {after_ns}, before {before_ns}",
                operation=op, each_bytes=size, members=members, ranks=[*members_of(members)], after_ns=after,
                before_ns=before,
            )
            for op, size, members, before, after in worst.iter_rows()
        ),
        *part.shown,
        _other_side(transfers, change),
        traffic.gain("before", "the steps since then take", cost, step),
    ]  # fmt: skip
    if slow["members"].n_unique() == 1 and part.kind == "network":
        sentence = "only one group is slow: which of its {size} ranks or links is at fault is not known"
        observations.append(observe("one-group", sentence, size=len(ranks)))
    if not slow["whole"].any():
        sure = min(sure, MAX_UNSURE)
        observations.append(_NOT_WHOLE)
    sure = round(sure * float((saved > 0).mean()), 3)
    finding = Finding(
        part.class_, part.kind, part.name, tuple(ranks), round(cost / step, 4), sure, cost,
        tuple(observations), part_ranks=part.ranks,
    )  # fmt: skip
    return with_axis(finding, traffic, slow["members"])


class _Part(NamedTuple):
    """Part at fault: the confidence in it (shared by suspects that fit equally well), and the evidence."""

    class_: str
    kind: str
    name: str
    sure: float = 1.0
    shown: Sequence[Observation] = ()
    ranks: tuple[int, ...] = ()


def _part_at_fault(change: LevelShift, traffic: Traffic) -> _Part:
    """Return what slow groups have in common where others did not change; else the whole network."""
    everywhere = _Part("slow.fabric", "network", SIDES[change.between])
    if change.groups.group_by("members").agg(pl.col("slow").any())["slow"].all():
        return everywhere
    suspects: list[Suspect] = []
    sure, shown = 1.0, list[Observation]()
    wires = wires_of(traffic.run) if change.between else None
    blamed = blame_wires(change.groups, wires) if wires is not None else []
    if len(blamed) == 1 and blamed[0][1] == set(change.groups.filter("slow")["members"]):
        # A single part of the fabric explains everything slow.
        of_wires = blamed[0][0]
        suspects = [Suspect(part.words, part.kind, part.name) for part in of_wires.suspects]
        sure, shown = of_wires.verdict.confidence, of_wires.observations("groups", "became slower")
    if not suspects:
        explained = list(blame(change.groups, traffic.hosts))
        if len(explained) != 1:
            return everywhere
        suspects = explained[0][0]
    if len(suspects) > 1:
        names = ", ".join(map(words_of, suspects))
        return _Part(suspects[0].class_, "one of", names, sure / len(suspects), shown)
    (part,) = suspects
    return _Part(part.class_, part.kind, part.id, sure, shown, part.ranks)


def _other_side(transfers: pl.DataFrame, change: LevelShift) -> Observation:
    """Return whether transfers on the other side, within hosts or between them, changed as well."""
    rest = sides_of(transfers.filter((pl.col("num_hosts") > 1) != change.between), change.since)
    side = SIDES[not change.between]
    if rest.is_empty():
        return observe("other-side-unknown", "nothing is known about transfers {side}", side=side)
    times = float((rest["after_ns"] / rest["before_ns"]).median())  # type: ignore[arg-type]
    sentence = "transfers {side} take {times:.2f} times as long as before"
    return observe("other-side", sentence, side=side, times=times)


# Hosts that became communication-bound: they wait longer than before, and not for each other.
#
# Where hosts wait for their transfers, as with gloo, the own time in which a rank neither computes nor waits
# for data, a core or garbage is spent on transfers, or on code that sleeps. A single rank that sleeps is
# late, and found elsewhere; here, all ranks of a group must wait longer since some step. Only deep windows
# show which of the two it is, as the finding says.

COUNTED = ("training_thread_cpu_ns", "data_wait_ns", "gc_ns", "run_queue_ns")
MIN_KNOWN = 0.5  # of a group's ranks in a step: some samples may be missing
MIN_GROWTH = 0.5  # of the growth of waits: the least growth of the steps
_LIKELY_NETWORK = observe(
    "likely-the-network",
    "either hosts wait for transfers, or their code sleeps; since all of them began to at once, the network "
    "between them is the likely cause",
)
_WHICH_UNKNOWN = observe(
    "link-unknown",
    "not known: which, and which link or port; deep windows, or NCCL's Inspector, would show it",
)


class ExchangeGroup(NamedTuple):
    """Ranks that exchange data.

    Attributes:
        ranks: those that were recorded.
        unseen: unrecorded ranks that these also call with, here or in other groups.
    """

    ranks: list[int]
    unseen: list[int]


def find_communication_bound(
    own_times: pl.DataFrame,
    calls: pl.DataFrame,
    steps: pl.DataFrame,
    counters: pl.DataFrame,
    apart: list[int],
) -> list[Finding]:
    """Find groups in which all ranks wait longer since some step, and for nothing that was counted.

    Args:
        own_times: as from `dpro.detect.stragglers.own_time.own_time`.
        calls: as from `dpro.detect.stragglers.own_time.calls_of`.
        apart: ranks left out of these, which others may have waited for.
    """
    counted = host_facts(steps.filter(pl.col("window") < 0), counters).select("rank", "step", *COUNTED)
    counted_times = own_times.join(counted.drop_nulls("training_thread_cpu_ns"), on=["rank", "step"])
    # Idle time is own time without work and without counted waits.
    rest = pl.col("own_ns") - pl.sum_horizontal(COUNTED)
    idle = counted_times.select("rank", "step", idle_ns=rest.clip(lower_bound=0).cast(pl.Float64))
    job = job_steps(steps)
    if idle.is_empty() or job.is_empty():
        return []
    changes: list[tuple[ExchangeGroup, Regression]] = []
    # Groups with several recorded ranks, largest first; none that may wait for ranks apart.
    seen = calls.group_by("key").agg(pl.col("rank").unique().sort()).sort("key")
    members = [set(members_of(key.rpartition("|")[2])) for key in seen["key"]]
    recorded = {*calls["rank"]}
    groups = {}
    for ranks in seen["rank"].to_list():
        met = set().union(*(others for others in members if others & {*ranks}))
        if len(ranks) > 1 and not met & {*apart}:
            groups[tuple(ranks)] = ExchangeGroup(ranks, sorted(met - recorded))
    for group in sorted(groups.values(), key=lambda group: (-len(group.ranks), group.ranks)):
        # Ranks of a larger group that waits need no finding of their own.
        inside = any(set(group.ranks) <= set(other.ranks) for other, _ in changes)
        change = None if inside else _longer_waits(idle, job, group.ranks)
        code = change is not None and outside_calls(calls, steps, group.ranks, change.since)
        changes += [(group, change)] if change and not code else []
    return [_finding(group, change, job) for group, change in changes]


def _longer_waits(idle: pl.DataFrame, job: pl.DataFrame, ranks: list[int]) -> Regression | None:
    """Return since when all ranks of a group wait longer; None if they do not, or steps hardly show it.

    Waits that become longer and longer are no slow network, which becomes slow at once.
    """
    least = (
        idle.filter(pl.col("rank").is_in(ranks))
        .group_by("step")
        .agg(pl.col("idle_ns").min(), known=pl.len())
        .filter(pl.col("known") >= max(2, MIN_KNOWN * len(ranks)))
    )
    typical = job["duration_ns"].median()
    series = job.join(least, on="step").sort("step").with_columns(duration_ns=pl.col("idle_ns") + typical)
    change = regression_of(series) if series.height else None
    if change is None or change.last_ns is not None:
        return None
    late = pl.col("step") >= change.since
    before, after = (job.filter(side)["duration_ns"].median() for side in (~late, late))
    grown = float(after) - float(before)  # type: ignore[arg-type]
    return change if grown >= MIN_GROWTH * (change.after_ns - change.before_ns) else None


def _finding(group: ExchangeGroup, change: Regression, job: pl.DataFrame) -> Finding:
    typical = float(job["duration_ns"].median())  # type: ignore[arg-type]
    before, after = change.before_ns - typical, change.after_ns - typical
    cost = after - before
    step = float(job.filter(pl.col("step") >= change.since)["duration_ns"].median())  # type: ignore[arg-type]
    observations = [
        observe(
            "idle-since",
            "since step {step} each of {ranks} spends {after_ns} per step neither computing nor waiting for "
            "a later rank, its data, a core or garbage collection; before, {before_ns}",
            step=change.since, ranks=group.ranks, after_ns=after, before_ns=before,
        ),
        _LIKELY_NETWORK,
        _WHICH_UNKNOWN,
    ]  # fmt: skip
    either = [f"the network between {ranks_in_words(group.ranks)}", "code that waits on all of them"]
    if group.unseen:
        either.append(f"{ranks_in_words(group.unseen)} coming late")
        sentence = "they may wait for {unseen_ranks}, which left no record"
        observations.append(observe("unseen-ranks", sentence, unseen_ranks=group.unseen))
    sure = round(change.persistent / len(either), 3)
    return Finding(
        "slow.fabric", "one of", ", ".join(either), tuple(group.ranks), round(cost / step, 4), sure, cost,
        tuple(observations),
    )  # fmt: skip


SENT, AGAIN = "tcp_sent_segments", "tcp_retransmitted_segments"
CAUSE = "packet loss"
MIN_SENT = 200  # segments between two hosts, below which the pair is left out
_COST_UNKNOWN = observe(
    "cost-unknown",
    "its cost is not known: a transfer takes longer when it waits for a segment to be sent again",
)
_NETWORK = "network"  # the switch, where no topology is known


def with_losses(
    findings: Sequence[Finding], counters: pl.DataFrame, workers: pl.DataFrame, run: Run
) -> list[Finding]:
    """Add findings of what loses packets; they absorb findings of what is slow because of it."""
    pairs = pairs_of_hosts(counters)
    if pairs.is_empty():
        return list(findings)
    wires = wires_of(run)
    if wires is None:
        wires, gpus = _on_one_switch(pairs)
    else:  # a GPU of each host, as a node of the fabric
        ranks = workers.filter(pl.col("rank").is_in(list(wires.gpus))).sort("rank", descending=True)
        gpus = {host: wires.gpus[rank] for host, rank in ranks.select("host", "rank").iter_rows()}
    lossy = _findings(pairs, wires, gpus)
    hosts = dict(workers.select("rank", "host").iter_rows())
    by_name = {finding.component_id: finding for finding, _ in lossy}
    name_of_pair = {pair: finding.component_id for finding, losing in lossy for pair in losing}
    kept = []
    for finding in findings:
        ends = frozenset(hosts.get(rank, "") for rank in finding.ranks)
        name = finding.component_id if finding.component_id in by_name else name_of_pair.get(ends, "")
        if finding.class_ in NETWORK and name:
            loss = by_name[name]
            cost, severity = loss.cost_ns + finding.cost_ns, round(loss.severity + finding.severity, 4)
            of_loss = [one for one in loss.observations if one.kind != _COST_UNKNOWN.kind]
            observations = (*finding.observations, *of_loss)
            by_name[name] = replace(loss, cost_ns=cost, severity=severity, observations=observations)
        else:
            kept.append(finding)
    return [*kept, *by_name.values()]


def pairs_of_hosts(counters: pl.DataFrame) -> pl.DataFrame:
    """Return `source`, `target` (hosts), `sent`, `again`: segments of all connections between two hosts.

    A pair's count grows while its connections last, and drops by the share of one that ends.
    """
    rows = counters.filter(pl.col("counter").is_in([SENT, AGAIN]) & pl.col("device").str.contains(">"))
    ends = pl.col("device").str.split(">").list
    rows = rows.with_columns(local=ends.get(0), remote=ends.get(1)).sort("time_ns")
    hosts = dict(rows.select("local", "host").unique("local", keep="first").iter_rows())
    grown = pl.col("value").diff().clip(lower_bound=0).sum() + pl.col("value").first()
    totals = rows.group_by("rank", "host", "device", "remote", "counter").agg(value=grown)
    named = totals.with_columns(
        target=pl.col("remote").replace_strict(hosts, default="", return_dtype=pl.String)
    )
    of = {"sent": SENT, "again": AGAIN}
    return (
        named.filter((pl.col("target") != "") & (pl.col("target") != pl.col("host")))
        .group_by(source="host", target="target")
        .agg(pl.col("value").filter(counter=name).sum().cast(pl.Int64).alias(key) for key, name in of.items())
        .filter(pl.col("sent") >= MIN_SENT)
        .sort("source", "target")
    )


def _on_one_switch(pairs: pl.DataFrame) -> tuple[Wires, dict[str, int]]:
    """Return the wires and GPUs of hosts without a known fabric: each has a port, all on one switch."""
    hosts = sorted({*pairs["source"], *pairs["target"]})
    topology = TopologyFile(
        hosts=[HostEntry(host, gpus=1, nics=1) for host in hosts],
        switches=[SwitchEntry(_NETWORK)],
        links=[LinkEntry(f"{host}{PORT}nic0", _NETWORK) for host in hosts],
    )
    fabric = fabric_of(topology)
    gpus = {host: gpus_of_host[0] for host, gpus_of_host in zip(fabric.hosts, fabric.gpus)}
    return Wires(routes_of(fabric), dict(enumerate(gpus.values()))), gpus


def _findings(
    pairs: pl.DataFrame, wires: Wires, gpus: dict[str, int]
) -> list[tuple[Finding, set[frozenset[str]]]]:
    """Return findings of what loses packets, each with the pairs of hosts that it explains.

    Args:
        pairs: as from `pairs_of_hosts`.
    """
    pairs = pairs.filter(pl.all_horizontal(pl.col("source", "target").is_in(list(gpus))))
    if pairs.is_empty():
        return []
    ends = [[gpus[source], gpus[target]] for source, target in pairs.select("source", "target").iter_rows()]
    flows = flows_of(wires.fabric, ends, ["send"] * len(ends))
    evidence = votes_of_losses(pairs["sent"].to_numpy(), pairs["again"].to_numpy())
    blamed = blame_parts(wires.components, crossings(flows, wires.routes, wires.paths), flows.of, evidence)
    ranks = {gpu: rank for rank, gpu in wires.gpus.items()}
    hosts_at = {host: ranks[gpu] for host, gpu in gpus.items() if gpu in ranks}
    return [_loss_finding(part, pairs, hosts_at) for part in blamed]


def _loss_finding(
    blamed: Blamed, pairs: pl.DataFrame, ranks: dict[str, int]
) -> tuple[Finding, set[frozenset[str]]]:
    is_explained = pl.Series(blamed.verdict.explained)
    losing, others = pairs.filter(is_explained), pairs.filter(~is_explained)
    suspects = blamed.suspects
    kind, name = suspects[0].kind, suspects[0].name
    if len(suspects) > 1:
        kind, name = "one of", ", ".join(suspect.words for suspect in suspects)
    worst = losing.sort(pl.col("again") / pl.col("sent"), descending=True).head(MAX_LINES)
    observations = (
        *blamed.observations("pairs of hosts", "retransmit packets"),
        observe(
            "segments-sent-again",
            "{again_share:.2%} of the TCP segments between these pairs were retransmitted, of others' "
            "{others_share:.2%}",
            again_share=_share(losing), others_share=_share(others),
        ),
        *(
            observe(
                "segments-of-pair",
                "{source} > {target}: {again:,} of {sent:,} segments",
                source=source, target=target, again=again, sent=sent,
            )
            for source, target, sent, again in worst.rows()
        ),
        _COST_UNKNOWN,
    )  # fmt: skip
    hosts = {*losing["source"], *losing["target"]}
    finding = Finding(
        CLASSES[suspects[0].kind], kind, name, tuple(sorted(ranks[host] for host in hosts if host in ranks)),
        0.0, round(blamed.verdict.confidence / len(suspects), 3), 0.0, observations, CAUSE,
    )  # fmt: skip
    return finding, {frozenset(pair) for pair in losing.select("source", "target").iter_rows()}


def _share(pairs: pl.DataFrame) -> float:
    return int(pairs["again"].sum()) / max(int(pairs["sent"].sum()), 1)
