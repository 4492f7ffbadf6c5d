"""What communication costs: by the run's own transfers, or by a measured table.

`fit_costs` makes a curve for each operation and group of a replayed graph. Groups of one shape have one
curve; where the graph has a measured network table, that of its curves which fits best is moved to the run's
own times instead. Transfers of one group that run side by side on a rank share its link: what a transfer had
to wait for is all the bytes that moved while it ran, its own and others'.

`estimate` says what a collective of any group takes by a table alone, with an interval, or why it cannot say.
Where the table has no curve of the group, the nearest that it has stands in, in this order: another version
of the library; another GPU whose curves equal this one's wherever both were measured; the other half of an
all-reduce (an all-gather for a reduce-scatter); another number of ranks, times the ratio that other
operations or GPUs show between the two numbers. How wrong each kind of stand-in is, is measured on the table
itself: groups that it has are predicted from the others. Stand-ins are for groups within a host whose GPUs a
switch joins. Behind PCIe, pairs of GPUs differ in their paths and the rule does not hold: refused. On more
hosts than were measured only an interval is given.

`cost` says what an algorithm would cost that did not run: messages one after the other, and bytes on a link.
Of a fitted curve the latency is messages * alpha, and what depends on bytes share * beta(bytes) * bytes, of
the algorithm that ran, so that it predicts what another one, or another number of ranks, would cost. Ring and
halving (recursive halving and doubling): Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005). Tree, for
all-reduces: two binary trees at once (Sanders, Speck and Traeff, Parallel Computing 35, 2009), as NCCL does
it, in a pipeline of pieces. In two levels: reduce-scatter within hosts, all-reduce between them, all-gather
within (Cho et al., BlueConnect, MLSys 2019), with one port per host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil, log2

import numpy as np

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost import HOLDS
from dpro.replay.cost.curves import (
    FAR,
    LinkCost,
    corrected,
    fit_curve,
    fit_line,
    growth,
    left_out,
    medians,
    scale,
)
from dpro.replay.cost.tables import NVLINK, CurveGroup, NetworkTable
from dpro.replay.graph import EdgeKind, Graph, Message, NodeKind
from dpro.replay.kept import kept
from dpro.replay.timeline import Timeline, replayed
from dpro.units import format_bytes
from dpro.words import whole_number

CollectiveKind = tuple[str, str]  # operation and group

ENOUGH = 4  # transfers that a line is fitted to, and that make a size of a curve
MIN_SIZES = 3  # with fewer there is only the line
ALONE = 1.05  # of its own bytes: a transfer during which more moved on its link was not alone
BEYOND = 1.1  # times a size that was seen: larger ones, and smaller ones, are said


def fit_costs(graph: Graph) -> dict[CollectiveKind, LinkCost]:
    """A curve for each operation and group with enough transfers of known size."""
    nodes, edges = graph.nodes, graph.edges
    columns = (*nodes.columns, edges.source, edges.lag, edges.kind, graph.messages, graph.network)
    records = {"LinkCost": LinkCost}
    return kept(graph, "link-costs", columns, lambda: _fit_costs(graph, replayed(graph)), records)


def _fit_costs(graph: Graph, timeline: Timeline) -> dict[CollectiveKind, LinkCost]:
    # Only transfers of known size and of recorded peers count: the time of others is waiting, too.
    edges = graph.edges
    met = np.zeros(graph.num_nodes, np.bool_)
    met[edges.target[edges.kind == EdgeKind.RENDEZVOUS]] = True
    usable = np.flatnonzero(_of_known_size(graph) & met)
    pools: dict[tuple[object, ...], list[CollectiveKind]] = {}
    by_kind = messages_by_kind(graph)
    for kind, messages in by_kind.items():
        pools.setdefault(_shape(graph, kind, messages), []).append(kind)
    costs: dict[CollectiveKind, LinkCost] = {}
    for kinds in pools.values():
        messages = [message for kind in kinds for message in by_kind[kind]]
        transfers = usable[np.isin(graph.nodes.message[usable], messages)]
        if transfers.size >= ENOUGH:
            message = graph.messages[messages[0]]
            tables = list(_tables(graph, message.op, message.num_ranks).values())
            costs |= dict.fromkeys(kinds, _cost(graph, timeline, transfers, tables))
    return {kind: costs[kind] for kind in by_kind if kind in costs}


def _shape(graph: Graph, kind: CollectiveKind, messages: list[int]) -> tuple[object, ...]:
    """What groups on one axis of the mesh have in common: operation, size, and the distance of their ranks.

    A group of which not all ranks are recorded, or whose ranks are not evenly apart, is its own shape.
    """
    nodes = graph.nodes
    ranks = np.unique(nodes.rank[np.isin(nodes.message, messages)])
    apart = np.unique(np.diff(ranks))
    size = graph.messages[messages[0]].num_ranks
    if ranks.size != size or apart.size != 1:
        return kind
    return kind[0], size, int(apart[0])


def _tables(graph: Graph, op: str, num_ranks: int, protocol: str = "") -> dict[tuple[object, ...], LinkCost]:
    """Curves that the graph's network table has of an operation among this many ranks.

    By device, library, version and hosts. Where it was held to no protocol, the library chose by itself.
    """
    if graph.network is None:
        return {}
    rows = graph.network.filter(op=op, num_ranks=num_ranks)
    if "protocol" in rows.columns:
        rows = rows.filter(protocol=protocol)
    elif protocol:
        return {}
    software = ["device", "library", "version", "hosts"]
    curves = {}
    for key, part in rows.sort(*software, "bytes").partition_by(software, as_dict=True).items():
        sizes, times = medians(part["bytes"].to_numpy(), part["time_ns"].to_numpy())
        if sizes.size >= MIN_SIZES:
            curves[key] = fit_curve(sizes, times)
    return curves


def ratio_by_table(
    graph: Graph,
    message: Message,
    num_ranks: int,
    num_bytes: Floats,
    time_ns: Floats,
    protocols: tuple[str, str] = ("", ""),
) -> Floats | None:
    """[T] how many times as long collectives take among other ranks or by another protocol, by the table.

    Of the table's software and devices with curves of both numbers, the one counts that is nearest to the
    run's own times; of its numbers of hosts the fewest.

    Args:
        num_ranks: among how many instead.
        protocols: that ran, and instead; empty where the library chooses.
        num_bytes: [T] payloads above 0.
        time_ns: [T] what they took.

    Returns:
        None where the table lacks one of both, or sizes that are near enough.
    """
    now, then = (
        _tables(graph, message.op, ranks, protocol)
        for ranks, protocol in zip((message.num_ranks, num_ranks), protocols)
    )
    seen = medians(num_bytes, time_ns)
    pairs = [
        (curve.off(*seen), hosts, curve, other)
        for (*software, _), curve in now.items()
        for (*same, hosts), other in then.items()
        if same == software and _near(curve, seen[0]) and _near(other, seen[0])
    ]
    if not pairs:
        return None
    _, _, curve, other = min(pairs, key=lambda pair: pair[:2])
    return other.time_ns(num_bytes) / curve.time_ns(num_bytes)


def _near(curve: LinkCost, num_bytes: Floats) -> bool:
    """Whether payloads are within the sizes of a curve, or not far outside."""
    sizes, _ = curve.knots
    return bool(num_bytes.min() >= sizes[0] / FAR and num_bytes.max() <= sizes[-1] * FAR)


def beyond_sizes(graph: Graph, changed: Graph) -> tuple[str, ...]:
    """A line for each operation whose payloads become larger or smaller than any that the run shows."""
    one, other = graph.nodes, changed.nodes
    if one.bytes is other.bytes and one.message is other.message:
        return ()
    before, after = (_sizes(graph_of) for graph_of in (graph, changed))
    lines = []
    for (op, ranks), (least, most) in after.items():
        seen = before.get((op, ranks))
        if seen is None or _tables(graph, op, ranks):
            continue
        if least < seen[0] / BEYOND or most > seen[1] * BEYOND:
            lines.append(
                f"{op} of {format_bytes(least)} to {format_bytes(most)}: the run has {format_bytes(seen[0])} "
                f"to {format_bytes(seen[1])}, beyond which latency and bandwidth are taken to stay"
            )
    return tuple(lines)


def _sizes(graph: Graph) -> dict[tuple[str, int], tuple[int, int]]:
    """The smallest and the largest payload of each operation and number of ranks."""
    nodes = graph.nodes
    moving = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
    moving = moving[(nodes.bytes[moving] > 0) & (nodes.message[moving] >= 0)]
    of, num_bytes = nodes.message[moving], nodes.bytes[moving]
    order = np.lexsort((num_bytes, of))
    first = np.flatnonzero(np.append(True, np.diff(of[order]) != 0)[: order.size])
    last = np.append(first[1:], order.size)[: first.size] - 1
    sizes: dict[tuple[str, int], tuple[int, int]] = {}
    ends = np.stack([of[order[first]], num_bytes[order[first]], num_bytes[order[last]]], 1)
    for number, smallest, largest in ends.tolist():
        message = graph.messages[number]
        least, most = sizes.get((message.op, message.num_ranks), (smallest, largest))
        sizes[message.op, message.num_ranks] = min(least, smallest), max(most, largest)
    return sizes


def _cost(graph: Graph, timeline: Timeline, transfers: Ints, tables: list[LinkCost]) -> LinkCost:
    """The curve of transfers of one shape: the line through all, and the sizes that moved alone.

    Args:
        tables: curves that were measured elsewhere: the one that fits best is corrected instead of the line.
    """
    moved = _moved_meanwhile(graph, timeline, transfers)
    took = graph.nodes.duration[transfers].astype(np.float64)
    line = fit_line(moved, took)
    payload = graph.nodes.bytes[transfers].astype(np.float64)
    alone = moved <= ALONE * payload
    sizes, times = medians(payload[alone], took[alone], ENOUGH)
    if tables:
        seen = (sizes, times) if sizes.size else medians(moved, took)
        return corrected(min(tables, key=lambda table: table.off(*seen)), *seen)
    return line if sizes.size < MIN_SIZES else line.with_knots(sizes, times)


def unknown_latencies(graph: Graph) -> tuple[str, ...]:
    """A line for each operation and group whose latency the transfers do not show."""
    return tuple(
        f"{op} in {group or 'a group without a name'}: sizes are too similar to show latency, "
        "which is taken to be 0"
        for (op, group), line in fit_costs(graph).items()
        if line.bandwidth_only
    )


def messages_by_kind(graph: Graph) -> dict[CollectiveKind, list[int]]:
    """Operations and groups, each with the messages that are of it."""
    messages: dict[CollectiveKind, list[int]] = {}
    for number, message in enumerate(graph.messages):
        messages.setdefault((message.op, message.group), []).append(number)
    return messages


def why_no_cost(graph: Graph, kind: CollectiveKind) -> str:
    """Why `fit_costs` has no curve of a kind of communication."""
    of_kind = np.isin(graph.nodes.message, messages_by_kind(graph)[kind])
    if np.count_nonzero(_of_known_size(graph) & of_kind) < ENOUGH:
        lacking = np.count_nonzero(of_kind) < ENOUGH
        what = "record more steps (`--window-steps`)" if lacking else "`dpro record` notes sizes of all calls"
        return f"too few transfers of known size to fit what {kind[0]} costs: {what}"
    return (
        f"too few transfers of which other ranks are recorded to fit what {kind[0]} costs: what the recorded "
        "ones take may be waiting for ranks that are missing"
    )


def _of_known_size(graph: Graph) -> Bools:
    """[N] the transfers whose bytes and time are known."""
    nodes = graph.nodes
    sized: Bools = (nodes.kind == NodeKind.TRANSFER) & (nodes.bytes > 0) & (nodes.duration > 0)
    return sized


def _moved_meanwhile(graph: Graph, timeline: Timeline, transfers: Ints) -> Floats:
    """[T] bytes that moved on its rank while each transfer ran; those at work at a time share it evenly."""
    moved = np.empty(transfers.size)
    rank, window = graph.nodes.rank[transfers], graph.nodes.window[transfers]
    place = np.unique(np.stack([rank, window]), axis=1, return_inverse=True)[1]
    for here in np.unique(place):
        together = np.flatnonzero(place == here)
        nodes = transfers[together]
        start, end = timeline.start[nodes].astype(np.float64), timeline.end[nodes].astype(np.float64)
        moments, running = _levels(start, end, np.ones(nodes.size))
        share = _integral(moments, 1 / np.maximum(running, 1))  # of the link's time, for each that runs
        start, end = np.interp(start, moments, share), np.interp(end, moments, share)
        # Of a transfer far from all others, as one at an unknown time, the share may be lost to rounding.
        moments, rate = _levels(start, end, graph.nodes.bytes[nodes] / np.maximum(end - start, 1.0))
        total = _integral(moments, rate)
        moved[together] = np.interp(end, moments, total) - np.interp(start, moments, total)
    return moved


def _levels(start: Floats, end: Floats, height: Floats) -> tuple[Floats, Floats]:
    """Times at which something starts or ends, and the sum of the heights of what runs from each on."""
    moments, change = np.concatenate([start, end]), np.concatenate([height, -height])
    order = np.argsort(moments, kind="stable")
    return moments[order], np.cumsum(change[order])


def _integral(moments: Floats, level: Floats) -> Floats:
    """The integral of a step function from the first of its times to each."""
    return np.append(0.0, np.cumsum(level[:-1] * np.diff(moments)))


# By a table alone.

SISTERS_DIFFER = 0.1  # of two devices whose link is taken for one, median over what both were measured at
HALVES = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
LOOSE = 0.2  # a kind of stand-in that misses by more, in logarithm, one time in five is none
UNTRIED = 0.5  # a stand-in of a kind that the table itself cannot try is off by so much, in logarithm
MIN_GROWTH = 2.0  # times the time, for twice the hosts: at least this is thought possible


@dataclass(frozen=True)
class Estimate:
    """What collectives take.

    Attributes:
        time_ns: [T] ns; None where only the interval is known.
        low_ns, high_ns: [T] interval that 90% of measurements should be in.
        how: from what it was predicted.
    """

    time_ns: Floats | None
    low_ns: Floats
    high_ns: Floats
    how: str


def estimate(table: NetworkTable, group: CurveGroup, num_bytes: Floats) -> Estimate:
    """What collectives of a group take.

    Args:
        num_bytes: [T] payloads.

    Raises:
        Unanswerable: the table does not show it; the message says what is missing.
    """
    if group in table.curves:
        return _estimated(table, table.curves[group], num_bytes, "measured")
    if group.hosts > 1:
        return _on_more_hosts(table, group, num_bytes)
    if table.links.get(group.device) != NVLINK:
        raise Unanswerable(
            f"{group.op} of {group.num_ranks} ranks on {group.device or 'this device'} was not measured, and "
            "no switch is known to join its GPUs: measure it"
        )
    for kind, stand_in in STAND_INS.items():
        curve = stand_in(table, group)
        if curve is not None:
            if _spread(table, kind, group.library, 0.8) > LOOSE:
                continue
            spread = _spread(table, kind, group.library, HOLDS)
            predicted = _estimated(table, curve, num_bytes, kind)
            time_ns = curve.time_ns(num_bytes)
            off = np.exp(np.hypot(np.log(predicted.high_ns / time_ns), spread))
            return Estimate(time_ns, time_ns / off, time_ns * off, kind)
    raise Unanswerable(
        f"nothing like {group.op} of {group.num_ranks} ranks on {group.device or 'this device'} was measured"
    )


def _estimated(table: NetworkTable, curve: LinkCost, num_bytes: Floats, how: str) -> Estimate:
    """Times by a curve, refused far beyond its sizes."""
    sizes, times = curve.knots
    if num_bytes.size and (num_bytes.max() > FAR * sizes[-1] or num_bytes.min() < sizes[0] / FAR):
        raise Unanswerable(
            f"only {sizes[0]:.0f} to {sizes[-1]:.0f} bytes were measured, and {num_bytes.min():.0f} to "
            f"{num_bytes.max():.0f} are asked for"
        )
    predicted = curve.time_ns(num_bytes)
    rate = growth(sizes, left_out(sizes, times, curve.line_ns(sizes)))
    off = np.exp(table.times_scale * scale(sizes, np.nan_to_num(rate, nan=UNTRIED), num_bytes))
    return Estimate(predicted, predicted / off, predicted * off, how)


# Stand-ins.


def _other_version(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """The same group with the nearest version of the library."""
    return _nearest_version(table, group._replace(version=""), group.version, {group})


def _sister(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """The same group on a device whose link is the same."""
    for device in _sisters(table, group):
        curve = _nearest_version(table, group._replace(device=device), group.version)
        if curve is not None:
            return curve
    return None


def _other_half(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """The other half of an all-reduce on the same ranks."""
    if group.op not in HALVES:
        return None
    return _nearest_version(table, group._replace(op=HALVES[group.op]), group.version)


def _other_size(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """A group of another number of ranks, times the median ratio that others show between the two."""
    near = sorted(
        {
            other.num_ranks
            for other in table.curves
            if other._replace(num_ranks=0, version="") == group._replace(num_ranks=0, version="")
        }
        - {group.num_ranks},
        key=lambda ranks: (abs(np.log(ranks / group.num_ranks)), -ranks),
    )
    for ranks in near:
        here = _nearest_version(table, group._replace(num_ranks=ranks), group.version)
        if here is None:
            continue
        sizes, times = here.knots
        ratios = list(_ratios(table, group, ranks, sizes))
        if ratios:
            return fit_curve(sizes, times * np.exp(np.median(ratios, axis=0)))
    return None


def _ratios(table: NetworkTable, group: CurveGroup, ranks: int, sizes: Floats) -> Iterator[Floats]:
    """How much longer groups take with this one's ranks than with others', in logarithm.

    By the other half of an all-reduce on the same device, else by the same operation on other devices.
    """
    same = (group.library, 1)
    others = [
        other for other in table.curves if (other.library, other.hosts) == same and other.num_ranks == ranks
    ]
    nearby = [other for other in others if other.op == group.op and other.device != group.device]
    nearby = [other for other in nearby if table.links.get(other.device) == NVLINK]
    half = [other for other in others if other.device == group.device and other.op == HALVES.get(group.op)]
    for nearest in half or nearby:
        target = nearest._replace(num_ranks=group.num_ranks)
        if target in table.curves and target != group:
            yield np.log(table.curves[target].time_ns(sizes) / table.curves[nearest].time_ns(sizes))


def _nearest_version(
    table: NetworkTable, group: CurveGroup, version: str, but: set[CurveGroup] | None = None
) -> LinkCost | None:
    """The curve of a group with the version that is nearest to one; None where there is none."""
    groups = [
        other
        for other in table.curves
        if other._replace(version="") == group._replace(version="") and other not in (but or ())
    ]
    if not groups:
        return None
    return table.curves[min(groups, key=lambda near: (_apart(near.version, version), near.version))]


def _apart(one: str, other: str) -> tuple[float, ...]:
    """How far two versions are apart, part by part."""
    numbers = [map(whole_number, text.split(".")) for text in (one, other)]
    parts = [[number for number in version if number >= 0] for version in numbers]
    longest = max(map(len, parts))
    first, second = (part + [0] * (longest - len(part)) for part in parts)
    return tuple(float(abs(a - b)) for a, b in zip(first, second))


def _sisters(table: NetworkTable, group: CurveGroup) -> list[str]:
    """Devices whose curves equal this one's, the nearest first; the group's own curves do not count."""
    groups_here = [
        curve_here
        for curve_here in table.curves
        if (curve_here.device, curve_here.hosts) == (group.device, 1)
        and curve_here._replace(version="") != group._replace(version="")
    ]
    near = {}
    for device, link in table.links.items():
        if device != group.device and link == NVLINK:
            apart = [
                difference
                for curve_here in groups_here
                if (difference := _difference(table, curve_here, device)) is not None
            ]
            if apart and np.median(apart) <= SISTERS_DIFFER:
                near[device] = float(np.median(apart))
    return sorted(near, key=lambda device: near[device])


@cache
def _difference(table: NetworkTable, group: CurveGroup, device: str) -> float | None:
    """How far the curve of a group is from that on another device, in logarithm; None without one."""
    theirs = _nearest_version(table, group._replace(device=device), group.version)
    if theirs is None:
        return None
    sizes, times = table.curves[group].knots
    return float(np.median(np.abs(np.log(theirs.time_ns(sizes) / times))))


STAND_INS: dict[str, Callable[[NetworkTable, CurveGroup], LinkCost | None]] = {
    "another version of the library": _other_version,
    "a GPU with the same link": _sister,
    "the other half of an all-reduce": _other_half,
    "another number of ranks": _other_size,
}


@cache
def _spread(table: NetworkTable, kind: str, library: str, share: float) -> float:
    """By how much a kind of stand-in misses groups that the table has, in logarithm.

    The quantile, and a little more where few groups show it, as for a further group that is like them
    (Vovk et al., Algorithmic Learning in a Random World (2005)).
    """
    missed = []
    for group, curve in table.curves.items():
        if group.hosts > 1 or group.library != library or table.links.get(group.device) != NVLINK:
            continue
        predicted = STAND_INS[kind](table, group)
        if predicted is not None:
            sizes, times = curve.knots
            missed.append(np.abs(np.log(predicted.time_ns(sizes) / times)))
    if not missed:
        return UNTRIED
    return float(np.quantile(np.concatenate(missed), min(share * (1 + 1 / len(missed)), 1.0)))


# More hosts.


def _on_more_hosts(table: NetworkTable, group: CurveGroup, num_bytes: Floats) -> Estimate:
    """An interval for more hosts than were measured.

    At the least they take what the most hosts measured take; at the most, for each doubling, the largest
    growth that any doubling measured shows, and no less than `MIN_GROWTH`.
    """
    per_host = group.num_ranks / group.hosts
    fewer = sorted(
        (other.hosts, other)
        for other in table.curves
        if other._replace(num_ranks=0, hosts=0) == group._replace(num_ranks=0, hosts=0)
        and other.num_ranks / other.hosts == per_host
        and 1 < other.hosts < group.hosts
    )
    if not fewer:
        raise Unanswerable(f"{group.op} between hosts was not measured")
    most = fewer[-1][1]
    predicted = _estimated(table, table.curves[most], num_bytes, "")
    doublings = np.log2(group.hosts / most.hosts)
    grew = [MIN_GROWTH]
    for (hosts, one), (more, other) in pairwise(fewer):
        ratio = table.curves[other].time_ns(num_bytes) / table.curves[one].time_ns(num_bytes)
        grew.append(float(ratio.max()) ** (1 / np.log2(more / hosts)))
    how = f"from {most.hosts} hosts: no less, and at most x{max(grew):.1f} for each doubling"
    return Estimate(None, predicted.low_ns, predicted.high_ns * max(grew) ** doublings, how)


# By the algorithm.

RING, TREE, HALVING = "ring", "tree", "halving"
FLAT = (RING, TREE, HALVING)
ONE_WAY = ("all_gather", "reduce_scatter")  # an all-reduce is one of each, one after the other


@dataclass(frozen=True)
class Cost:
    """Of one collective: `messages` * alpha + `share` * bytes * beta."""

    messages: float
    share: float


@dataclass(frozen=True)
class LinkModel:
    """What a message costs on a link, ns, and a byte of each of some payloads, [T] ns, or of any."""

    alpha: float
    beta: Floats | float


def cost(op: str, algorithm: str, num_ranks: int) -> Cost:
    """What an operation of this many ranks costs.

    Args:
        algorithm: one of `FLAT`.

    Raises:
        Unanswerable: there is no formula for it.
    """
    if num_ranks < 2:
        return Cost(0.0, 0.0)
    share, rounds = (num_ranks - 1) / num_ranks, float(ceil(log2(num_ranks)))
    one_way = {RING: Cost(num_ranks - 1.0, share), HALVING: Cost(rounds, share)}
    if op in ONE_WAY and algorithm in one_way:
        return one_way[algorithm]
    if op == "all_to_all":  # pairwise, whatever runs the others
        return Cost(num_ranks - 1.0, share)
    if op == "all_reduce" and algorithm in FLAT:
        half = one_way.get(algorithm, Cost(rounds, 1.0))
        return Cost(2 * half.messages, 2 * half.share)
    raise Unanswerable(f"there is no formula for {op} by {algorithm}")


def link_of(curve: LinkCost, spent: Cost, num_bytes: Floats) -> LinkModel:
    """The link on which collectives of this cost take what their curve says.

    Args:
        num_bytes: [T] payloads above 0.
    """
    beta = curve.moving_ns(num_bytes) / num_bytes / spent.share
    return LinkModel(curve.latency_ns / spent.messages, beta)


def time_ns(spent: Cost, link: LinkModel, num_bytes: Floats) -> Floats:
    """[T] ns for payloads.

    Args:
        num_bytes: [T] payloads.
    """
    return spent.messages * link.alpha + spent.share * link.beta * num_bytes


def two_level_ns(
    op: str, hosts: int, per_host: int, outside: LinkModel, inside: LinkModel, num_bytes: Floats
) -> Floats:
    """[T] ns of a collective that runs within hosts first, then between them; each ring by ring.

    Each rank of a host takes its share of the payload to its counterparts: the host's one port moves all
    shares.

    Args:
        num_bytes: [T] payloads.

    Raises:
        Unanswerable: there is no formula for it.
    """
    if op not in (*ONE_WAY, "all_reduce"):
        raise Unanswerable(f"there is no formula for {op} in two levels")
    within, between = cost(op, RING, per_host), cost(op, RING, hosts)
    return time_ns(within, inside, num_bytes) + time_ns(between, outside, num_bytes)
