"""Cost of communication, fitted to the run's own transfers or taken from a measured table.

`fit_costs` fits a curve for each operation and group of a replayed graph. Groups of one shape share a curve;
where the graph has a measured network table, the best-fitting curve of the table is corrected to the run's
own times instead. Transfers of one group that overlap on a rank share its link: a transfer waits for all
bytes that moved while it ran, its own and others'.

`estimate` predicts collectives of any group from a table alone, with an interval, or raises the reason why it
cannot. For a group without a curve it uses the first stand-in that the table has: another version of the
library; another GPU whose curves equal this one's wherever both were measured; the other half of an
all-reduce (an all-gather for a reduce-scatter); another number of ranks, times the ratio between the two
numbers in other operations or on other GPUs. The error of each kind of stand-in is measured on the table
itself, by predicting its groups from each other. Stand-ins are limited to groups within a host whose GPUs a
switch joins: behind PCIe the paths between pairs of GPUs differ, and `estimate` refuses. On more hosts than
were measured it returns only an interval.

`cost` is the cost of an algorithm that did not run: sequential messages, and a share of the bytes on a link.
The latency of a fitted curve is messages * alpha, and its part that depends on bytes share * beta(bytes) *
bytes, of the algorithm that ran; alpha and beta then predict another algorithm or number of ranks. Ring and
halving (recursive halving and doubling): Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005). Tree, for
all-reduces: two binary trees at once (Sanders, Speck and Traeff, Parallel Computing 35, 2009), pipelined in
pieces, as in NCCL. Two levels: reduce-scatter within hosts, all-reduce between them, all-gather within (Cho
et al., BlueConnect, MLSys 2019), with one port per host.
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
    MAX_EXTRAPOLATION,
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
from dpro.replay.kept import kept_as
from dpro.replay.timeline import Timeline, replayed
from dpro.units import format_bytes
from dpro.words import whole_number

CollectiveKind = tuple[str, str]  # operation and group

MIN_TRANSFERS = 4  # transfers needed to fit a line, or for a size to be a knot of a curve
MIN_SIZES = 3  # with fewer, the curve is only the line
MAX_ALONE_RATIO = 1.05  # times its own bytes: a transfer during which more moved on its link was not alone
BEYOND_FACTOR = 1.1  # times the sizes of the run: payloads beyond are reported


@kept_as("link-costs", {"LinkCost": LinkCost})
def fit_costs(graph: Graph) -> dict[CollectiveKind, LinkCost]:
    """Fit a curve for each operation and group with enough transfers of known size."""
    # Transfers of unknown size or without recorded peers are left out: their time includes waiting.
    edges, timeline = graph.edges, replayed(graph)
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
        if transfers.size >= MIN_TRANSFERS:
            message = graph.messages[messages[0]]
            tables = list(_tables(graph, message.op, message.num_ranks).values())
            costs |= dict.fromkeys(kinds, _cost(graph, timeline, transfers, tables))
    return {kind: costs[kind] for kind in by_kind if kind in costs}


def _shape(graph: Graph, kind: CollectiveKind, messages: list[int]) -> tuple[object, ...]:
    """Return the key under which groups pool their transfers: operation, size, and distance between ranks.

    A group with unrecorded or unevenly spaced ranks is a key by itself.
    """
    nodes = graph.nodes
    ranks = np.unique(nodes.rank[np.isin(nodes.message, messages)])
    apart = np.unique(np.diff(ranks))
    size = graph.messages[messages[0]].num_ranks
    if ranks.size != size or apart.size != 1:
        return kind
    return kind[0], size, int(apart[0])


def _tables(graph: Graph, op: str, num_ranks: int, protocol: str = "") -> dict[tuple[object, ...], LinkCost]:
    """Return the curves of the graph's network table for an operation among this many ranks.

    Keys are device, library, version and hosts. Without `protocol`, the library chose it by itself.
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
    """Return [T] the factor on times among other ranks or with another protocol, by the table.

    Of the table's software and devices with both curves, the one nearest to the run's own times decides, and
    of its numbers of hosts the fewest.

    Args:
        num_ranks: of the changed collectives.
        num_bytes: [T] payloads above 0.
        time_ns: [T] recorded times.
        protocols: that ran, and instead; empty where the library chooses.

    Returns:
        None where the table lacks either curve, or sizes near enough.
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
        if same == software and _covers(curve, seen[0]) and _covers(other, seen[0])
    ]
    if not pairs:
        return None
    _, _, curve, other = min(pairs, key=lambda pair: pair[:2])
    return other.time_ns(num_bytes) / curve.time_ns(num_bytes)


def _covers(curve: LinkCost, num_bytes: Floats) -> bool:
    """Return whether all payloads are within `MAX_EXTRAPOLATION` times the sizes of a curve."""
    sizes, _ = curve.knots
    return bool(
        num_bytes.min() >= sizes[0] / MAX_EXTRAPOLATION and num_bytes.max() <= sizes[-1] * MAX_EXTRAPOLATION
    )


def beyond_sizes(graph: Graph, changed: Graph) -> tuple[str, ...]:
    """Word a line for each operation whose changed payloads are outside the range of sizes in the run."""
    one, other = graph.nodes, changed.nodes
    if one.bytes is other.bytes and one.message is other.message:
        return ()
    before, after = (_sizes(graph_of) for graph_of in (graph, changed))
    lines = []
    for (op, ranks), (least, most) in after.items():
        seen = before.get((op, ranks))
        if seen is None or _tables(graph, op, ranks):
            continue
        if least < seen[0] / BEYOND_FACTOR or most > seen[1] * BEYOND_FACTOR:
            sizes, recorded = (
                " to ".join(dict.fromkeys(map(format_bytes, ends))) for ends in ((least, most), seen)
            )
            lines.append(
                f"{op} of {sizes}: the run has {recorded}, beyond which latency and bandwidth are assumed "
                "constant"
            )
    return tuple(lines)


def _sizes(graph: Graph) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the smallest and the largest payload, in bytes, of each operation and number of ranks."""
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
    """Fit the curve of transfers of one shape: a line through all, with knots at the sizes that moved alone.

    Args:
        tables: measured curves; where there are any, the best-fitting one is corrected instead of the line.
    """
    moved = _moved_meanwhile(graph, timeline, transfers)
    took = graph.nodes.duration[transfers].astype(np.float64)
    line = fit_line(moved, took)
    payload = graph.nodes.bytes[transfers].astype(np.float64)
    alone = moved <= MAX_ALONE_RATIO * payload
    sizes, times = medians(payload[alone], took[alone], MIN_TRANSFERS)
    if tables:
        seen = (sizes, times) if sizes.size else medians(moved, took)
        return corrected(min(tables, key=lambda table: table.off(*seen)), *seen)
    return line if sizes.size < MIN_SIZES else line.with_knots(sizes, times)


def unknown_latencies(graph: Graph) -> tuple[str, ...]:
    """Word a line for each operation and group whose transfers do not show latency."""
    return tuple(
        f"{op} in {group or 'a group without a name'}: sizes are too similar to show latency, "
        "which is assumed to be 0"
        for (op, group), line in fit_costs(graph).items()
        if line.bandwidth_only
    )


def messages_by_kind(graph: Graph) -> dict[CollectiveKind, list[int]]:
    """Return the numbers of the messages of each operation and group."""
    messages: dict[CollectiveKind, list[int]] = {}
    for number, message in enumerate(graph.messages):
        messages.setdefault((message.op, message.group), []).append(number)
    return messages


def why_no_cost(graph: Graph, kind: CollectiveKind) -> str:
    """Return the reason why `fit_costs` has no curve of a kind of communication."""
    of_kind = np.isin(graph.nodes.message, messages_by_kind(graph)[kind])
    if np.count_nonzero(_of_known_size(graph) & of_kind) < MIN_TRANSFERS:
        lacking = np.count_nonzero(of_kind) < MIN_TRANSFERS
        what = (
            "record more steps (`--window-steps`)"
            if lacking
            else "`dpro record` records the sizes of all calls"
        )
        return f"too few transfers of known size to fit the cost of {kind[0]}: {what}"
    return (
        f"too few transfers with recorded peers to fit the cost of {kind[0]}: the times of the recorded "
        "ones may include waits for missing ranks"
    )


def _of_known_size(graph: Graph) -> Bools:
    """Return [N] a mask of the transfers whose bytes and time are known."""
    nodes = graph.nodes
    sized: Bools = (nodes.kind == NodeKind.TRANSFER) & (nodes.bytes > 0) & (nodes.duration > 0)
    return sized


def _moved_meanwhile(graph: Graph, timeline: Timeline, transfers: Ints) -> Floats:
    """Return [T] bytes moved on a transfer's rank while it ran; concurrent ones share the link evenly."""
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
        # The span of a transfer far from all others, such as one at an unknown time, may vanish by rounding.
        moments, rate = _levels(start, end, graph.nodes.bytes[nodes] / np.maximum(end - start, 1.0))
        total = _integral(moments, rate)
        moved[together] = np.interp(end, moments, total) - np.interp(start, moments, total)
    return moved


def _levels(start: Floats, end: Floats, height: Floats) -> tuple[Floats, Floats]:
    """Return the sorted times at which intervals start or end, and the sum of running heights after each."""
    moments, change = np.concatenate([start, end]), np.concatenate([height, -height])
    order = np.argsort(moments, kind="stable")
    return moments[order], np.cumsum(change[order])


def _integral(moments: Floats, level: Floats) -> Floats:
    """Return the integral of a step function from its first time to each of its times."""
    return np.append(0.0, np.cumsum(level[:-1] * np.diff(moments)))


# By a table alone.

MAX_SISTER_DIFFERENCE = 0.1  # in logarithm: devices whose curves differ less, by the median, have equal links
OTHER_HALF = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
MAX_SPREAD = 0.2  # a kind of stand-in whose error is larger, in logarithm, one time in five is not used
UNTRIED_SPREAD = 0.5  # assumed error, in logarithm, of a kind that cannot be tried on the table itself
MIN_GROWTH = 2.0  # factor on the time per doubling of hosts: at least this much is thought possible


@dataclass(frozen=True)
class Estimate:
    """Predicted times of collectives.

    Attributes:
        time_ns: [T] ns; None where only the interval is known.
        low_ns, high_ns: [T] interval meant to contain 90% of measurements.
        how: source of the prediction.
    """

    time_ns: Floats | None
    low_ns: Floats
    high_ns: Floats
    how: str


def estimate(table: NetworkTable, group: CurveGroup, num_bytes: Floats) -> Estimate:
    """Estimate the times of collectives of a group.

    Args:
        num_bytes: [T] payloads.

    Raises:
        Unanswerable: the table does not show it; the message names what is missing.
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
            if _spread(table, kind, group.library, 0.8) > MAX_SPREAD:
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
    """Return times by a curve; raise if payloads are far beyond its sizes."""
    sizes, times = curve.knots
    if num_bytes.size and (
        num_bytes.max() > MAX_EXTRAPOLATION * sizes[-1] or num_bytes.min() < sizes[0] / MAX_EXTRAPOLATION
    ):
        raise Unanswerable(
            f"only {sizes[0]:.0f} to {sizes[-1]:.0f} bytes were measured, and {num_bytes.min():.0f} to "
            f"{num_bytes.max():.0f} are requested"
        )
    predicted = curve.time_ns(num_bytes)
    rate = growth(sizes, left_out(sizes, times, curve.line_ns(sizes)))
    off = np.exp(table.times_scale * scale(sizes, np.nan_to_num(rate, nan=UNTRIED_SPREAD), num_bytes))
    return Estimate(predicted, predicted / off, predicted * off, how)


# Stand-ins.


def _other_version(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """Return the curve of the group with the nearest other version of the library."""
    return _nearest_version(table, group._replace(version=""), group.version, {group})


def _by_sister(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """Return the curve of the group on the nearest device with an equal link, judged by other groups."""
    groups_here = [
        curve_here
        for curve_here in table.curves
        if (curve_here.device, curve_here.hosts) == (group.device, 1)
        and curve_here._replace(version="") != group._replace(version="")
    ]
    near = {}
    for device, link in table.links.items():
        if device != group.device and link == NVLINK:
            differences = [_difference(table, curve_here, device) for curve_here in groups_here]
            apart = [difference for difference in differences if difference is not None]
            if apart and np.median(apart) <= MAX_SISTER_DIFFERENCE:
                near[device] = float(np.median(apart))
    for device in sorted(near, key=lambda device: near[device]):
        curve = _nearest_version(table, group._replace(device=device), group.version)
        if curve is not None:
            return curve
    return None


def _other_half(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """Return the curve of the other half of an all-reduce on the same ranks."""
    if group.op not in OTHER_HALF:
        return None
    return _nearest_version(table, group._replace(op=OTHER_HALF[group.op]), group.version)


def _other_size(table: NetworkTable, group: CurveGroup) -> LinkCost | None:
    """Return the curve of another number of ranks, times the median ratio of other groups between the two."""
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
    """Yield log ratios of times among this group's ranks to those among `ranks`, at each of `sizes`.

    Taken from the other half of an all-reduce on the same device, else from the operation on other devices.
    """
    same = (group.library, 1)
    others = [
        other for other in table.curves if (other.library, other.hosts) == same and other.num_ranks == ranks
    ]
    nearby = [other for other in others if other.op == group.op and other.device != group.device]
    nearby = [other for other in nearby if table.links.get(other.device) == NVLINK]
    half = [
        other for other in others if other.device == group.device and other.op == OTHER_HALF.get(group.op)
    ]
    for nearest in half or nearby:
        target = nearest._replace(num_ranks=group.num_ranks)
        if target in table.curves and target != group:
            yield np.log(table.curves[target].time_ns(sizes) / table.curves[nearest].time_ns(sizes))


def _nearest_version(
    table: NetworkTable, group: CurveGroup, version: str, but: set[CurveGroup] | None = None
) -> LinkCost | None:
    """Return the curve of a group whose library version is nearest to `version`; None without any."""
    groups = [
        other
        for other in table.curves
        if other._replace(version="") == group._replace(version="") and other not in (but or ())
    ]
    if not groups:
        return None
    return table.curves[
        min(groups, key=lambda near: (_version_distance(near.version, version), near.version))
    ]


def _version_distance(one: str, other: str) -> tuple[float, ...]:
    """Return the distance between two versions, part by part."""
    numbers = [map(whole_number, text.split(".")) for text in (one, other)]
    parts = [[number for number in version if number >= 0] for version in numbers]
    longest = max(map(len, parts))
    first, second = (part + [0] * (longest - len(part)) for part in parts)
    return tuple(float(abs(a - b)) for a, b in zip(first, second))


@cache
def _difference(table: NetworkTable, group: CurveGroup, device: str) -> float | None:
    """Return the median log distance of a group's curve from that on `device`; None without one."""
    theirs = _nearest_version(table, group._replace(device=device), group.version)
    if theirs is None:
        return None
    sizes, times = table.curves[group].knots
    return float(np.median(np.abs(np.log(theirs.time_ns(sizes) / times))))


STAND_INS: dict[str, Callable[[NetworkTable, CurveGroup], LinkCost | None]] = {
    "another version of the library": _other_version,
    "a GPU with the same link": _by_sister,
    "the other half of an all-reduce": _other_half,
    "another number of ranks": _other_size,
}


@cache
def _spread(table: NetworkTable, kind: str, library: str, share: float) -> float:
    """Return the quantile `share` of the errors, in logarithm, of a kind of stand-in on groups in the table.

    The quantile is raised where few groups show it, so that it holds for one further group like them
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
        return UNTRIED_SPREAD
    return float(np.quantile(np.concatenate(missed), min(share * (1 + 1 / len(missed)), 1.0)))


# More hosts.


def _on_more_hosts(table: NetworkTable, group: CurveGroup, num_bytes: Floats) -> Estimate:
    """Return an interval for more hosts than were measured.

    The lower end is the time on the most hosts measured; the upper end grows, per doubling of hosts, by the
    largest growth of any measured doubling, and at least by `MIN_GROWTH`.
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
ONE_WAY = ("all_gather", "reduce_scatter")  # an all-reduce is one of each in sequence


@dataclass(frozen=True)
class Cost:
    """Cost of one collective: `messages` * alpha + `share` * bytes * beta."""

    messages: float
    share: float


@dataclass(frozen=True)
class LinkModel:
    """Cost of a message on a link, in ns, and per byte, in ns: [T] for given payloads, or one for all."""

    alpha: float
    beta: Floats | float


def cost(op: str, algorithm: str, num_ranks: int) -> Cost:
    """Return the cost of an operation among this many ranks.

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
    if op == "all_to_all":  # pairwise, whichever algorithm the others use
        return Cost(num_ranks - 1.0, share)
    if op == "all_reduce" and algorithm in FLAT:
        half = one_way.get(algorithm, Cost(rounds, 1.0))
        return Cost(2 * half.messages, 2 * half.share)
    raise Unanswerable(f"there is no formula for {op} by {algorithm}")


def link_of(curve: LinkCost, spent: Cost, num_bytes: Floats) -> LinkModel:
    """Return the link on which collectives of this cost take the times of their curve.

    Args:
        num_bytes: [T] payloads above 0.
    """
    beta = curve.moving_ns(num_bytes) / num_bytes / spent.share
    return LinkModel(curve.latency_ns / spent.messages, beta)


def time_ns(spent: Cost, link: LinkModel, num_bytes: Floats) -> Floats:
    """Return [T] the time of collectives of this cost on a link, in ns.

    Args:
        num_bytes: [T] payloads.
    """
    return spent.messages * link.alpha + spent.share * link.beta * num_bytes


def two_level_ns(
    op: str, hosts: int, per_host: int, outside: LinkModel, inside: LinkModel, num_bytes: Floats
) -> Floats:
    """Return [T] ns of a collective that runs within hosts and between them, each as a ring.

    Each rank of a host exchanges its share of the payload with its counterparts; the host's one port moves
    all shares.

    Args:
        num_bytes: [T] payloads.

    Raises:
        Unanswerable: there is no formula for it.
    """
    if op not in (*ONE_WAY, "all_reduce"):
        raise Unanswerable(f"there is no formula for {op} in two levels")
    within, between = cost(op, RING, per_host), cost(op, RING, hosts)
    return time_ns(within, inside, num_bytes) + time_ns(between, outside, num_bytes)
