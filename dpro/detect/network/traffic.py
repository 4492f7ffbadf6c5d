"""Transfers between the ranks of a job, and what its steps would save if some of them were faster.

Takes a graph; or collectives outside of deep windows that have durations, which NCCL's Inspector records for
all and the flight recorder if timing is on; or sends, as timed by NCCL's network threads. Returns one row per
transfer, without waiting, and the savings of steps under other transfer times. Does not decide what is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.observations import Observation, observe, observe_replay
from dpro.errors import DproError, Unanswerable
from dpro.replay.cost.fabric.placement import placed
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.mesh import axis_of_group, mesh_of_run
from dpro.replay.steps import job_steps
from dpro.replay.timeline import measured_step_times
from dpro.replay.whatif.graph_ops.selected import hosts_of
from dpro.replay.whatif.graph_ops.shared_fabric import with_links_apart
from dpro.schema.members import num_members
from dpro.store import Run

MESSAGE = "message"
_NO_WINDOWS = "deep windows would show how much of it other work hides"
_NO_FIT = "the replay does not fit, so how much of it other work hides is not known"
LIKE = ["op", "bytes", "num_ranks", "num_hosts"]  # equal in transfers that can be compared
KEYS = [*LIKE, "members"]  # equal in transfers of one group


class Healed(NamedTuple):
    """Savings of steps.

    Attributes:
        steps: [T] step numbers.
        saved: [T] savings, in ns.
        base: [T] step times, in ns.
    """

    steps: Ints
    saved: Floats
    base: Floats


@dataclass(frozen=True)
class Traffic:
    """Transfers between ranks.

    Attributes:
        transfers: as from `recorded_transfers`.
        hosts: host of each rank, where known.
        healed: returns the savings of steps if transfers (`instance`) took this many `times` as long.
        unsure: why savings are upper bounds, of which other work may hide some; empty where they are
            replayed.
        run: which says where its ranks are; None without a run.
        apart: returns the transfers as they would be if connections of the job that share links between
            switches had a cable each; None where it is not known which do.
    """

    transfers: pl.DataFrame
    hosts: Mapping[int, str]
    healed: Callable[[pl.DataFrame], Healed]
    unsure: str = ""
    run: Run | None = None
    apart: Callable[[], pl.DataFrame | None] = lambda: None

    def gain(self, like: str, steps_take: str, saved_ns: float, step_ns: float) -> Observation:
        """Return the observation of what faster transfers would save.

        Args:
            like: the transfers that these would be as fast as, in words.
            steps_take: the steps in question, with their verb.
        """
        if not self.unsure:
            faster = f"these transfers as fast as {like}"
            return observe_replay(faster, step_ns - saved_ns, step_ns, steps_take)
        return observe(
            "most-saved-by-faster-transfers",
            f"with these transfers as fast as {like}, a step of {{step_ns}} would save {{saved_ns}} at most: "
            "{why}",
            step_ns=step_ns,
            saved_ns=saved_ns,
            why=self.unsure,
        )


def traffic_of(baseline: Baseline) -> Traffic:
    """Return the traffic of a graph, with savings from its replay."""
    graph = baseline.graph
    return _traffic(graph, recorded_transfers(graph), partial(replayed_with, baseline))


def traffic_as_measured(graph: Graph) -> Traffic:
    """Return the traffic of a graph whose replay does not fit: transfers are measured, savings at most."""
    transfers = recorded_transfers(graph)
    return _traffic(graph, transfers, partial(max_savings, transfers, measured_step_times(graph)), _NO_FIT)


def _traffic(
    graph: Graph, transfers: pl.DataFrame, healed: Callable[[pl.DataFrame], Healed], unsure: str = ""
) -> Traffic:
    """Return a graph's transfers, with how their savings are computed, and why these are upper bounds."""
    return Traffic(transfers, host_of(graph), healed, unsure, graph.run, partial(transfers_apart, graph))


def transfers_apart(graph: Graph) -> pl.DataFrame | None:
    """Return the transfers as if connections that share links between switches had a cable each.

    None where paths are not known, or the topology does not fit.
    """
    try:
        placement = placed(graph)
        return None if placement.known_missing else recorded_transfers(with_links_apart(graph, placement))
    except DproError:
        return None


def transfers_of(graph: Graph) -> pl.DataFrame:
    """Return each collective within steps whose members are all recorded.

    Returns:
        `instance`, `op`, `bytes`, `num_ranks`, `num_hosts`, `members` (ranks as text, the sender of a message
        first), `step`, `transfer_ns` (of the fastest member: the others' may include waiting).
    """
    return recorded_transfers(graph).filter("whole").drop("whole")


def recorded_transfers(graph: Graph) -> pl.DataFrame:
    """Return each collective within steps with at least two recorded members, and whether it is `whole`.

    The other columns are those of `transfers_of`. Unless whole, the time includes waiting for other members.
    """
    nodes, edges = graph.nodes, graph.edges
    met = np.zeros(graph.num_nodes, np.bool_)
    met[edges.target[edges.kind == EdgeKind.RENDEZVOUS]] = True
    chosen = np.flatnonzero(
        (nodes.kind == NodeKind.TRANSFER) & met & (nodes.message >= 0) & (nodes.step >= 0)
    )
    message = nodes.message[chosen]
    op = pl.Series([kind.op for kind in graph.messages], dtype=pl.String).gather(message)
    size = pl.Series([kind.num_ranks for kind in graph.messages], dtype=pl.Int64).gather(message)
    hosts = host_of(graph)
    host = pl.Series(nodes.rank[chosen]).replace_strict(hosts, default="", return_dtype=pl.String)
    rows = pl.DataFrame(
        {
            "instance": nodes.collective[chosen],
            "rank": nodes.rank[chosen],
            "host": host,
            "receives": op.str.starts_with("recv"),
            "op": op.replace({"send": MESSAGE, "recv": MESSAGE}),
            "size": size,
            "bytes": nodes.bytes[chosen],
            "step": nodes.step[chosen],
            "transfer_ns": nodes.duration[chosen],
        }
    )
    ordered = pl.col("rank").sort_by("receives", "rank").cast(pl.String).str.join(",")
    is_message = pl.col("op").first() == MESSAGE
    return (
        rows.group_by("instance")
        .agg(
            pl.col("op").first(),
            pl.col("bytes").max(),
            num_ranks=pl.len().cast(pl.Int64),
            num_hosts=pl.col("host").n_unique().cast(pl.Int64),
            members=ordered,
            step=pl.col("step").min(),
            transfer_ns=pl.col("transfer_ns").min(),
            whole=(pl.len() == pl.col("size").max()) | is_message,
        )
        .filter((pl.col("num_ranks") > 1) & (pl.col("transfer_ns") > 0))
        .sort("instance")
    )


def host_of(graph: Graph) -> dict[int, str]:
    """Return the host of each rank; empty if the run does not show it."""
    try:
        return hosts_of(graph)
    except Unanswerable:
        return {}


def replayed_with(baseline: Baseline, factor: pl.DataFrame) -> Healed:
    """Replay with other transfer times.

    Args:
        factor: `instance` of collectives, and how many `times` as long their transfers take.
    """
    graph = baseline.graph
    scale = np.ones(int(graph.nodes.collective.max()) + 2)
    scale[factor["instance"].to_numpy()] = factor["times"].to_numpy()
    nodes = graph.nodes
    moved = (nodes.kind == NodeKind.TRANSFER) & (nodes.collective >= 0)
    duration = np.where(moved, np.rint(nodes.duration * scale[nodes.collective]), nodes.duration)
    base, changed = (
        baseline.step_ns,
        baseline.changed_step_ns(graph.with_durations(duration.astype(np.int64))),
    )
    steps = np.unique(nodes.step[nodes.step >= 0])
    return Healed(steps, (base - changed).astype(np.float64), base.astype(np.float64))


# The axis of parallelism of slow transfers.


def with_axis(finding: Finding, traffic: Traffic, groups: Iterable[str]) -> Finding:
    """Add the axis along which ranks of all slow groups differ, if there is a single one.

    Args:
        groups: `members` of slow transfers, as from `recorded_transfers`.
    """
    if traffic.run is None:
        return finding
    mesh = mesh_of_run(traffic.run)
    axes = {axis_of_group(mesh, [int(rank) for rank in members.split(",")]) for members in groups}
    axis = axes.pop() if len(axes) == 1 else ""
    if not axis:
        return finding
    along = observe("axis-of-transfers", "these transfers are along {axis}", axis=axis)
    return replace(finding.observing(along), axis=axis)


# Traffic of calls, or of sends, that were timed while they ran, without deep windows.
#
# All members of a call end together, so the shortest of their durations is the transfer, and any excess is
# waiting for the last; clocks of hosts need not agree. How much of it other work hides is not known. A
# collective shows all its members together. Each send is measured by itself, without waits for the GPU or the
# peer, and counts as a message, so that senders, receivers and links of one ring or tree are distinguished.

_COLUMNS = ("op", "bytes", "members", "num_ranks", "num_hosts", "step", "transfer_ns", "whole")


def traffic_of_calls(
    collectives: pl.DataFrame, steps: pl.DataFrame, workers: pl.DataFrame, world_size: int
) -> Traffic:
    """Return the traffic of timed calls; no transfers if none was timed.

    Args:
        world_size: number of ranks of the job, recorded or not.
    """
    hosts = {rank: host for rank, host in workers.select("rank", "host").iter_rows() if host}
    outside = steps.filter(pl.col("window") < 0)
    # Calls between steps belong to the step before.
    begins = steps.select("rank", "step", "start_ns", "window").sort("start_ns")
    # What each call moves for its rank, and when it began.
    is_timed = (pl.col("window") < 0) & (pl.col("duration_ns") > 0) & (pl.col("sequence") >= 0)
    began = pl.when(pl.col("start_ns") >= 0).then("start_ns").otherwise("enqueued_ns")
    timed = collectives.filter(is_timed & (pl.col("group") != "")).select(
        "rank",
        "op",
        "group",
        "sequence",
        "peer",
        "duration_ns",
        "source",
        num_members().alias("size"),
        bytes=pl.max_horizontal("bytes_in", "bytes_out"),
        began_ns=began,
    )
    calls = timed.filter(pl.col("began_ns") >= 0).sort("began_ns")
    calls = calls.join_asof(
        begins, left_on="began_ns", right_on="start_ns", by="rank", check_sortedness=False
    ).filter(pl.col("window") < 0)
    others = calls.filter(~pl.col("op").is_in(["send", "recv", "send_recv"]))
    all_recorded = outside["rank"].n_unique() >= world_size
    transfers = pl.concat(
        [
            _join_members(
                _messages(calls), ["group", "sequence", "sender", "receiver", "source"], hosts, all_recorded
            ),
            _join_members(
                others.with_columns(receives=pl.lit(False)),
                ["group", "sequence", "op", "source"],
                hosts,
                all_recorded,
            ),
        ]
    )
    transfers = transfers.sort("step", *KEYS, "transfer_ns").with_row_index("instance")
    transfers = transfers.with_columns(pl.col("instance").cast(pl.Int64))
    return Traffic(transfers, hosts, partial(max_savings, transfers, job_steps(outside)), _NO_WINDOWS)


def _messages(calls: pl.DataFrame) -> pl.DataFrame:
    """Return both ends of each message, numbered per sender and receiver: each end counts its own calls.

    Pairs whose ends differ in number are left out, as their calls cannot be matched.
    """
    ends = calls.filter(pl.col("op").is_in(["send", "recv"]) & (pl.col("peer") >= 0))
    sends = pl.col("op") == "send"
    ends = ends.with_columns(
        sender=pl.when(sends).then("rank").otherwise("peer"),
        receiver=pl.when(sends).then("peer").otherwise("rank"),
        receives=~sends,
    )
    way = ["group", "sender", "receiver", "source"]
    numbered = ends.sort("sequence", "began_ns").with_columns(
        sequence=pl.int_range(pl.len()).over(*way, "receives"),
        sent=sends.sum().over(way),
        got=(~sends).sum().over(way),
        op=pl.lit(MESSAGE),
        size=pl.lit(2, pl.Int64),
    )
    return numbered.filter(pl.col("sent") == pl.col("got"))


def _join_members(
    calls: pl.DataFrame, call: list[str], hosts: Mapping[int, str], all_recorded: bool
) -> pl.DataFrame:
    """Return one row per call that at least two members timed.

    Args:
        call: columns that identify a call.
        all_recorded: whether all ranks of the job are recorded; only then are a group's callers all its
            members.
    """
    if calls.is_empty():
        return _NOTHING
    host = pl.col("rank").replace_strict(hosts, default="", return_dtype=pl.String)
    callers = calls.group_by("group").agg(callers=pl.col("rank").n_unique().cast(pl.Int64))
    size = pl.when(pl.col("size") > 0).then("size").when(all_recorded).then("callers").otherwise(-1)
    met = (
        calls.join(callers, on="group")
        .with_columns(size=size, host=host)
        .unique([*call, "rank"], keep="none")  # numbers that occur twice are ambiguous
        .group_by(call)
        .agg(
            *([] if "op" in call else [pl.col("op").first()]),
            pl.col("bytes").max(),
            members=pl.col("rank").sort_by("receives", "rank").cast(pl.String).str.join(","),
            num_ranks=pl.len().cast(pl.Int64),
            num_hosts=pl.col("host").n_unique().cast(pl.Int64),
            step=pl.col("step").min(),
            transfer_ns=pl.col("duration_ns").min(),
            whole=pl.len() == pl.col("size").max(),
        )
    )
    return met.filter(pl.col("num_ranks") > 1).select(_COLUMNS)


_NOTHING = pl.DataFrame(
    schema={
        "op": pl.String,
        "bytes": pl.Int64,
        "members": pl.String,
        "num_ranks": pl.Int64,
        "num_hosts": pl.Int64,
        "step": pl.Int64,
        "transfer_ns": pl.Int64,
        "whole": pl.Boolean,
    }
)


def traffic_of_sends(sends: pl.DataFrame, steps: pl.DataFrame, workers: pl.DataFrame) -> Traffic:
    """Return the traffic on the wires, without peers that sent nothing, as their ranks are not known."""
    hosts = {rank: host for rank, host in workers.select("rank", "host").iter_rows() if host}
    host = [pl.col(end).replace_strict(hosts, default="", return_dtype=pl.String) for end in ("rank", "to")]
    begins = steps.select("rank", "step", "start_ns").sort("start_ns")
    places = sends.select("group", to="rank", peer_member="member").unique()
    places = places.unique(["group", "peer_member"], keep="none")
    transfers = (
        sends.filter((pl.col("time_ns") >= 0) & (pl.col("wire_ns") > 0))
        .join(places, on=["group", "peer_member"])
        .sort("time_ns")
        .join_asof(begins, left_on="time_ns", right_on="start_ns", by="rank", check_sortedness=False)
        .drop_nulls("step")
        .select(
            "bytes",
            "step",
            op=pl.lit(MESSAGE),
            members=pl.format("{},{}", "rank", "to"),
            num_ranks=pl.lit(2, pl.Int64),
            num_hosts=pl.when(host[0] == host[1]).then(1).otherwise(2).cast(pl.Int64),
            transfer_ns="wire_ns",
            whole=pl.lit(True),
        )
        .sort("step", "members", "bytes", "transfer_ns")
        .with_columns(instance=pl.int_range(pl.len()))
    )
    return Traffic(transfers, hosts, partial(max_savings, transfers, job_steps(steps)), _NO_WINDOWS)


def max_savings(transfers: pl.DataFrame, steps: pl.DataFrame, factor: pl.DataFrame) -> Healed:
    """Return upper bounds of the savings of steps: what transfers lose on the rank that loses most.

    Args:
        steps: the job's, as from `job_steps`.
        factor: `instance` of transfers, and how many `times` as long they take.
    """
    lost = (
        transfers.join(factor, on="instance")
        .with_columns(
            rank=pl.col("members").str.split(","), lost_ns=pl.col("transfer_ns") * (1 - pl.col("times"))
        )
        .explode("rank")
        .group_by("step", "rank")
        .agg(pl.col("lost_ns").sum())
        .group_by("step")
        .agg(pl.col("lost_ns").max())
    )
    seen = transfers.select("step").unique()
    of_steps = steps.join(seen, on="step", how="semi").join(lost, on="step", how="left").sort("step")
    base = of_steps["duration_ns"].to_numpy().astype(np.float64)
    saved = of_steps["lost_ns"].fill_null(0.0).to_numpy()
    return Healed(of_steps["step"].to_numpy(), np.minimum(saved, base), base)
