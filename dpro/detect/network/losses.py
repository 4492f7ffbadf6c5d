"""Parts of the network that lose packets, by what TCP had to send again to each peer.

In: what the kernel counted of the job's connections, per pair of hosts; and the fabric, where the run has
one, else all hosts on one switch. Out: findings. Losses that slow no transfer down yet are found, too, so
what they cost is not said here. Traffic that does not go over TCP (InfiniBand, RoCE) is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from dpro.detect.findings import NETWORK, Finding
from dpro.detect.network.wires import CLASSES, Blamed, Wires, blame_parts, votes_of_losses, wires_of
from dpro.replay.cost.fabric.connections import crossings
from dpro.replay.cost.fabric.flows import flows_of
from dpro.replay.cost.fabric.network import fabric_of, routes_of
from dpro.store import Run
from dpro.topology.file import PORT, HostEntry, LinkEntry, SwitchEntry, TopologyFile

SENT, AGAIN = "tcp_sent_segments", "tcp_retransmitted_segments"
CAUSE = "packet loss"
MIN_SENT = 200  # segments between two hosts, below which nothing is said of them
MAX_LINES = 3
_UNKNOWN = "what it costs is not known: a transfer that waits for a segment that is sent again takes longer"
_NETWORK = "network"  # the switch, where no topology is known


def with_losses(
    findings: Sequence[Finding], counters: pl.DataFrame, workers: pl.DataFrame, run: Run
) -> list[Finding]:
    """The findings, and those about what loses packets, in place of what is slow because of it."""
    pairs = pairs_of_hosts(counters)
    if pairs.is_empty():
        return list(findings)
    wires = wires_of(run)
    lossy = _findings(
        pairs, *(_on_one_switch(pairs) if wires is None else (wires, _on_hosts(wires, workers)))
    )
    hosts = dict(workers.select("rank", "host").iter_rows())
    by_name = {finding.component_id: finding for finding, _ in lossy}
    name_of_pair = {pair: finding.component_id for finding, losing in lossy for pair in losing}
    kept = []
    for finding in findings:
        ends = frozenset(hosts.get(rank, "") for rank in finding.ranks)
        name = finding.component_id if finding.component_id in by_name else name_of_pair.get(ends, "")
        if finding.class_ in NETWORK and name:
            by_name[name] = _with_cost(by_name[name], finding)
        else:
            kept.append(finding)
    return [*kept, *by_name.values()]


def _with_cost(lossy: Finding, slow: Finding) -> Finding:
    """What loses packets, with what is slow because of it: a pair of ranks, or the part itself."""
    cost, severity = lossy.cost_ns + slow.cost_ns, round(lossy.severity + slow.severity, 4)
    evidence = tuple(line for line in lossy.evidence if line != _UNKNOWN)
    return replace(lossy, cost_ns=cost, severity=severity, evidence=(*slow.evidence, *evidence))


def pairs_of_hosts(counters: pl.DataFrame) -> pl.DataFrame:
    """`source`, `target` (hosts), `sent`, `again`: segments of all connections between two hosts.

    Counts only grow while a connection lasts; one that ends takes its own away.
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


def _on_hosts(wires: Wires, workers: pl.DataFrame) -> dict[str, int]:
    """A GPU of each host, as a node of the fabric."""
    ranks = workers.filter(pl.col("rank").is_in(list(wires.gpus))).sort("rank", descending=True)
    return {host: wires.gpus[rank] for host, rank in ranks.select("host", "rank").iter_rows()}


def _on_one_switch(pairs: pl.DataFrame) -> tuple[Wires, dict[str, int]]:
    """The same of hosts whose fabric is not known: each has a port, and all are on one switch."""
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
    """What loses packets, and between which two hosts.

    Args:
        pairs: as `pairs_of_hosts` gives them.
    """
    pairs = pairs.filter(pl.all_horizontal(pl.col("source", "target").is_in(list(gpus))))
    if pairs.is_empty():
        return []
    ends = [[gpus[source], gpus[target]] for source, target in pairs.select("source", "target").iter_rows()]
    flows = flows_of(wires.fabric, ends, ["send"] * len(ends))
    evidence = votes_of_losses(pairs["sent"].to_numpy(), pairs["again"].to_numpy())
    blamed = blame_parts(wires.components, crossings(flows, wires.routes, wires.known), flows.of, evidence)
    ranks = {gpu: rank for rank, gpu in wires.gpus.items()}
    hosts_at = {host: ranks[gpu] for host, gpu in gpus.items() if gpu in ranks}
    return [_finding(part, pairs, hosts_at) for part in blamed]


def _finding(
    blamed: Blamed, pairs: pl.DataFrame, ranks: dict[str, int]
) -> tuple[Finding, set[frozenset[str]]]:
    is_explained = pl.Series(blamed.verdict.explained)
    losing, others = pairs.filter(is_explained), pairs.filter(~is_explained)
    suspects = blamed.suspects
    kind, name = suspects[0].kind, suspects[0].name
    if len(suspects) > 1:
        kind, name = "one of", ", ".join(suspect.words for suspect in suspects)
    worst = losing.sort(pl.col("again") / pl.col("sent"), descending=True).head(MAX_LINES)
    evidence = [
        *blamed.lines("pairs of hosts", "send packets again"),
        f"of the TCP segments between these pairs {_share(losing):.2%} had to be sent again, of others' "
        f"{_share(others):.2%}",
        *(
            f"{source} > {target}: {again:,} of {sent:,} segments"
            for source, target, sent, again in worst.rows()
        ),
        _UNKNOWN,
    ]
    hosts = {*losing["source"], *losing["target"]}
    finding = Finding(
        CLASSES[suspects[0].kind], kind, name, tuple(sorted(ranks[host] for host in hosts if host in ranks)),
        0.0, round(blamed.verdict.confidence / len(suspects), 3), 0.0, tuple(evidence), CAUSE,
    )  # fmt: skip
    return finding, {frozenset(pair) for pair in losing.select("source", "target").iter_rows()}


def _share(pairs: pl.DataFrame) -> float:
    return int(pairs["again"].sum()) / max(int(pairs["sent"].sum()), 1)
