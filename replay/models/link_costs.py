"""What communication costs: a curve of time over bytes, from a graph's own transfers.

In: a replayed graph. Out: one `LinkCost` per operation and process group: time = latency + bytes / bandwidth
(Hockney, Parallel Computing 20 (1994); collectives: Thakur et al., IJHPCA 19 (2005)), corrected at the sizes
that were seen often (`curves.py`). Groups of one shape have one curve. Where the graph has a measured network
table, that of its curves which fits best is moved to the run's own times instead. A curve describes what was
seen, on the job's own network. What an algorithm would cost that did not run is not predicted here.

Transfers of one group that run side by side on a rank share its link: what a transfer had to wait for is all
the bytes that moved while it ran, its own and others'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpro.arrays import MAD_TO_SIGMA, Bools, Floats, Ints
from dpro.replay.graph import EdgeKind, Graph, Message, NodeKind
from dpro.replay.kept import kept
from dpro.replay.models.curves import FAR, Between, medians, through
from dpro.replay.timeline import Timeline, replayed
from dpro.units import format_bytes

CollectiveKind = tuple[str, str]  # operation and group

ENOUGH = 4  # transfers that a line is fitted to, and that make a size of a curve
MIN_SIZES = 3  # with fewer there is only the line
ALONE = 1.05  # of its own bytes: a transfer during which more moved on its link was not alone
SIZES_VARY = 2.0  # largest over smallest size from which latency can be separated from bandwidth
MAX_SAMPLES = 4000
BEYOND = 1.1  # times a size that was seen: larger ones, and smaller ones, are said
ROUNDS = 25
STANDARD_ERRORS = 2.0
MIN_RESIDUAL = 1e-4  # of the time, in weights: smaller residuals count as this


@dataclass(frozen=True)
class LinkCost:
    """The cost of one kind of communication.

    Attributes:
        latency_ns: time that does not depend on bytes.
        ns_per_byte: time per byte of payload.
        latency_error_ns, ns_per_byte_error: half of the 95% interval of each.
        num_samples: transfers that it was fitted to.
        misfit: median distance of a transfer from the line, as a share of its time.
        bandwidth_only: sizes vary too little to show latency, which is taken to be 0.
        sizes: bytes that were seen often, ascending, and
        times: the median ns of each; empty where there is only the line.
    """

    latency_ns: float
    ns_per_byte: float
    latency_error_ns: float
    ns_per_byte_error: float
    num_samples: int
    misfit: float
    bandwidth_only: bool
    sizes: tuple[float, ...] = ()
    times: tuple[float, ...] = ()

    def line_ns(self, num_bytes: Floats | Ints | float) -> Floats:
        """ns by the line alone, for payloads of this many bytes, one or many."""
        return self.latency_ns + self.ns_per_byte * np.asarray(num_bytes, np.float64)

    def time_ns(self, num_bytes: Floats | Ints | float) -> Floats:
        """ns for payloads of this many bytes, one or many."""
        line = self.line_ns(num_bytes)
        if not self.sizes:
            return line
        return self._through(np.maximum(np.asarray(num_bytes, np.float64), 1), line)

    @cached_property
    def _through(self) -> Between:
        sizes, times = self.knots
        return through(sizes, times, self.line_ns(sizes))

    def moving_ns(self, num_bytes: Floats | Ints | float) -> Floats:
        """The part of the time that depends on bytes, for payloads of this many bytes, one or many."""
        return np.maximum(self.time_ns(num_bytes) - self.latency_ns, 0)

    @property
    def knots(self) -> tuple[Floats, Floats]:
        """Sizes (bytes) and times (ns) that the curve goes through."""
        return np.array(self.sizes), np.array(self.times)

    @property
    def gbps(self) -> float:
        """Payload per time, 1e9 bytes per second; infinite where bytes cost nothing."""
        return 1 / self.ns_per_byte if self.ns_per_byte else float("inf")


def fit_costs(graph: Graph) -> dict[CollectiveKind, LinkCost]:
    """A curve for each operation and group with enough transfers of known size."""
    nodes, edges = graph.nodes, graph.edges
    columns = (*nodes.columns, edges.source, edges.lag, edges.kind, graph.messages, graph.network)
    records = {"LinkCost": LinkCost}
    return kept(graph, "link-costs", columns, lambda: _fit_costs(graph, replayed(graph)), records)


def _fit_costs(graph: Graph, timeline: Timeline) -> dict[CollectiveKind, LinkCost]:
    usable = _usable(graph)
    pools: dict[tuple[object, ...], list[CollectiveKind]] = {}
    by_kind = messages_by_kind(graph)
    for kind, messages in by_kind.items():
        pools.setdefault(_shape(graph, kind, messages), []).append(kind)
    costs: dict[CollectiveKind, LinkCost] = {}
    for kinds in pools.values():
        messages = [message for kind in kinds for message in by_kind[kind]]
        mine = usable[np.isin(graph.nodes.message[usable], messages)]
        if mine.size >= ENOUGH:
            message = graph.messages[messages[0]]
            tables = list(_tables(graph, message.op, message.num_ranks).values())
            costs |= dict.fromkeys(kinds, _cost(graph, timeline, mine, tables))
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
        (_misfit(curve, *seen), hosts, curve, other)
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
    before, after = (_sizes(each) for each in (graph, changed))
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
    found: dict[tuple[str, int], tuple[int, int]] = {}
    ends = np.stack([of[order[first]], num_bytes[order[first]], num_bytes[order[last]]], 1)
    for number, smallest, largest in ends.tolist():
        message = graph.messages[number]
        least, most = found.get((message.op, message.num_ranks), (smallest, largest))
        found[message.op, message.num_ranks] = min(least, smallest), max(most, largest)
    return found


def _cost(graph: Graph, timeline: Timeline, transfers: Ints, tables: list[LinkCost]) -> LinkCost:
    """The curve of transfers of one shape: the line through all, and the sizes that moved alone.

    Args:
        tables: curves that were measured elsewhere: the one that fits best is corrected instead of the line.
    """
    moved = _moved_meanwhile(graph, timeline, transfers)
    took = graph.nodes.duration[transfers].astype(np.float64)
    line = fit_line(moved, took)
    own = graph.nodes.bytes[transfers].astype(np.float64)
    alone = moved <= ALONE * own
    sizes, times = medians(own[alone], took[alone], ENOUGH)
    if tables:
        seen = (sizes, times) if sizes.size else medians(moved, took)
        return corrected(min(tables, key=lambda table: _misfit(table, *seen)), *seen)
    return line if sizes.size < MIN_SIZES else _with_knots(line, sizes, times)


def _with_knots(line: LinkCost, sizes: Floats, times: Floats) -> LinkCost:
    return replace(line, sizes=tuple(sizes.tolist()), times=tuple(times.tolist()))


def _misfit(curve: LinkCost, sizes: Floats, times: Floats) -> float:
    """How far times are from a curve, in logarithm, in the middle."""
    return float(np.median(np.abs(np.log(times / curve.time_ns(sizes)))))


def corrected(curve: LinkCost, sizes: Floats, times: Floats) -> LinkCost:
    """A measured curve, moved to where the run's own times are.

    At the run's sizes it has the run's times; between two of them its distance from the measured curve, in
    logarithm, changes evenly, and beyond them it stays.

    Args:
        sizes: [K] bytes, ascending, each once.
        times: [K] ns of the run.
    """
    off = np.log(times / curve.time_ns(sizes))
    every = np.union1d(curve.knots[0], sizes)
    moved = curve.time_ns(every) * np.exp(np.interp(np.log(every), np.log(sizes), off))
    return replace(fit_curve(every, moved), num_samples=sizes.size)


def fit_curve(sizes: Floats, times: Floats) -> LinkCost:
    """The curve through measured times.

    Args:
        sizes: [K] bytes, ascending, each once.
        times: [K] ns.
    """
    return _with_knots(fit_line(sizes, times), sizes, times)


def unknown_latencies(graph: Graph) -> tuple[str, ...]:
    """A line for each operation and group whose latency the transfers do not show."""
    return tuple(
        f"{op} in {group or 'unnamed group'}: sizes are too similar to show latency, which is taken to be 0"
        for (op, group), line in fit_costs(graph).items()
        if line.bandwidth_only
    )


def messages_by_kind(graph: Graph) -> dict[CollectiveKind, list[int]]:
    """Operations and groups, each with the messages that are of it."""
    found: dict[CollectiveKind, list[int]] = {}
    for number, message in enumerate(graph.messages):
        found.setdefault((message.op, message.group), []).append(number)
    return found


def why_no_cost(graph: Graph, kind: CollectiveKind) -> str:
    """Why `fit_costs` has no curve of a kind of communication.

    Args:
        kind: one that is not in the curves.
    """
    mine = np.isin(graph.nodes.message, messages_by_kind(graph)[kind])
    if np.count_nonzero(_of_known_size(graph) & mine) < ENOUGH:
        return f"too few transfers of known size to fit what {kind[0]} costs"
    return (
        f"too few transfers of which other ranks are recorded to fit what {kind[0]} costs: what the recorded "
        "ones take may be waiting for ranks that are missing"
    )


def _usable(graph: Graph) -> Ints:
    """Transfers of known size; those whose peers are recorded, for the time of others is waiting, too."""
    edges = graph.edges
    met = np.zeros(graph.num_nodes, np.bool_)
    met[edges.target[edges.kind == EdgeKind.RENDEZVOUS]] = True
    return np.flatnonzero(_of_known_size(graph) & met)


def _of_known_size(graph: Graph) -> Bools:
    """[N] the transfers whose bytes and time are known."""
    nodes = graph.nodes
    known: Bools = (nodes.kind == NodeKind.TRANSFER) & (nodes.bytes > 0) & (nodes.duration > 0)
    return known


def _moved_meanwhile(graph: Graph, timeline: Timeline, transfers: Ints) -> Floats:
    """[T] bytes that moved on its rank while each transfer ran; those at work at a time share it evenly."""
    moved = np.empty(transfers.size)
    rank, window = graph.nodes.rank[transfers], graph.nodes.window[transfers]
    place = np.unique(np.stack([rank, window]), axis=1, return_inverse=True)[1]
    for here in np.unique(place):
        mine = np.flatnonzero(place == here)
        nodes = transfers[mine]
        start, end = timeline.start[nodes].astype(np.float64), timeline.end[nodes].astype(np.float64)
        at, running = _levels(start, end, np.ones(nodes.size))
        share = _integral(at, 1 / np.maximum(running, 1))  # of the link's time, for each that runs
        start, end = np.interp(start, at, share), np.interp(end, at, share)
        at, rate = _levels(start, end, graph.nodes.bytes[nodes] / (end - start))
        total = _integral(at, rate)
        moved[mine] = np.interp(end, at, total) - np.interp(start, at, total)
    return moved


def _levels(start: Floats, end: Floats, height: Floats) -> tuple[Floats, Floats]:
    """Times at which something starts or ends, and the sum of the heights of what runs from each on."""
    at, change = np.concatenate([start, end]), np.concatenate([height, -height])
    order = np.argsort(at, kind="stable")
    return at[order], np.cumsum(change[order])


def _integral(at: Floats, level: Floats) -> Floats:
    """The integral of a step function from the first of its times to each."""
    return np.append(0.0, np.cumsum(level[:-1] * np.diff(at)))


def fit_line(num_bytes: Floats, time_ns: Floats) -> LinkCost:
    """The line with the least sum of relative distances |time - line| / time; neither part is negative.

    Least absolute deviations by reweighted least squares (Schlossmacher, JASA 68 (1973)): an outlier counts
    as far as it is out, not squared, and small messages count as much as large ones. The intervals are those
    of the weighted fit with its deviation taken from the median distance.

    Args:
        num_bytes: [T] above 0.
        time_ns: [T] above 0.
    """
    if num_bytes.size > MAX_SAMPLES:
        kept = np.linspace(0, num_bytes.size - 1, MAX_SAMPLES).astype(np.int64)
        num_bytes, time_ns = num_bytes[kept], time_ns[kept]
    vary = float(np.max(num_bytes)) >= SIZES_VARY * float(np.min(num_bytes))
    latency, slope = (
        _least_distances(num_bytes, time_ns) if vary else (0.0, _through_origin(num_bytes, time_ns))
    )
    if latency < 0:
        latency, slope = 0.0, _through_origin(num_bytes, time_ns)
    elif slope < 0:
        latency, slope = float(np.median(time_ns)), 0.0
    distance = np.abs(latency + slope * num_bytes - time_ns) / time_ns
    misfit = float(np.median(distance))
    latency_error, slope_error = _errors(num_bytes, time_ns, MAD_TO_SIGMA * misfit, vary)
    return LinkCost(latency, slope, latency_error, slope_error, time_ns.size, misfit, not vary)


def _least_distances(x: Floats, y: Floats) -> tuple[float, float]:
    """Intercept and slope of the line with the least absolute relative deviations."""
    one, other = 1 / y, x / y  # the line through them should be 1 everywhere
    weight: Floats = np.ones_like(x)
    intercept = slope = 0.0
    for _ in range(ROUNDS):
        intercept, slope = _least_squares(one * weight, other * weight, weight)
        distance = np.abs(intercept * one + slope * other - 1)
        weight = 1 / np.sqrt(np.maximum(distance, MIN_RESIDUAL))
    return intercept, slope


def _least_squares(one: Floats, other: Floats, target: Floats) -> tuple[float, float]:
    """The factors of two columns whose sum comes nearest to a third, by Gram and Schmidt."""
    length = float(one @ one)
    shared = float(one @ other) / length
    rest = other - shared * one
    factor = float(rest @ target) / float(rest @ rest)
    return float(one @ target) / length - shared * factor, factor


def _through_origin(x: Floats, y: Floats) -> float:
    """The slope without a latency: the median of y / x, each weighted by how much a slope moves it, x / y."""
    order = np.argsort(y / x)
    weight = np.cumsum((x / y)[order])
    return float((y / x)[order][np.searchsorted(weight, weight[-1] / 2)])


def _errors(x: Floats, y: Floats, deviation: float, with_latency: bool) -> tuple[float, float]:
    """Half the intervals of latency and slope."""
    if not with_latency:
        return 0.0, STANDARD_ERRORS * deviation / float(np.sqrt(((x / y) ** 2).sum()))
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    design /= (unit := np.linalg.norm(design, axis=0))
    spread = deviation * np.sqrt(np.diag(np.linalg.pinv(design.T @ design))) / unit
    return STANDARD_ERRORS * float(spread[0]), STANDARD_ERRORS * float(spread[1])
