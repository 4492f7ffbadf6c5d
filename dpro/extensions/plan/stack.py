"""Finds the layers of a rank in a step: how many there are, and the time of one of them.

Takes the replay of a run, and a rank; returns a `Stack`. First it sorts the work of the rank
(`WorkSequence`): on a GPU that of its busiest stream; on a CPU that of its threads, without waits, which the
graph leaves out. Matrix products, convolutions and attention are products: they have a token, equal for equal
operators with equal shapes. A layer is the stretch of products that repeats, equally often forward and
backward; it lasts from its first product to that of the next layer, so it includes what runs between
products. Outside of layers are the output layer and the loss, between forward and backward of a micro-batch,
and the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.classify import classify
from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.roofline import MATMULS
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.timeline import Timeline
from dpro.schema import SPANS

PRODUCT_KERNELS = ("gemm", "attention", "convolution")
ATTENTION = r"(?i)flash|attention|attn|fmha|sdpa"


class WorkSequence(NamedTuple):
    """The work of a rank in steps, in order of steps and starts, each [N].

    Attributes:
        node: number in the graph.
        step: number of the step.
        start: replayed start, ns.
        ns: duration, ns.
        token: of the first work of each product; equal for equal products; -1 for all other work.
        product: whether it belongs to a product.
        backward: whether a backward pass called it.
        host: whether it is time of the host outside of operators, which does not depend on sizes.
    """

    node: Ints
    step: Ints
    start: Ints
    ns: Ints
    token: Ints
    product: Bools
    backward: Bools
    host: Bools

    def part(self, rows: Ints | Bools) -> WorkSequence:
        """Select some rows."""
        return WorkSequence._make(column[rows] for column in self)


def works_on_gpu(graph: Graph) -> bool:
    """Return whether the graph has GPU kernels."""
    return bool((graph.nodes.kind == NodeKind.KERNEL).any())


def work_of(timeline: Timeline, rank: int) -> tuple[WorkSequence, list[str]]:
    """Return the work of a rank, and the product of each token: operator and shapes, or kernel.

    Raises:
        Unanswerable: the run did not record which operators are backward.
    """
    graph = timeline.graph
    nodes = graph.nodes
    chosen = (nodes.rank == rank) & (nodes.step >= 0)
    if works_on_gpu(graph):
        chosen &= np.isin(nodes.kind, GPU_KINDS)
        lanes, spent = nodes.lane[chosen], nodes.duration[chosen]
        if lanes.size:
            chosen &= nodes.lane == int(np.argmax(np.bincount(lanes, spent)))
    else:
        chosen &= np.isin(nodes.kind, CPU_KINDS)
    work_nodes = np.flatnonzero(chosen)
    work_nodes = work_nodes[np.lexsort([work_nodes, timeline.start[work_nodes], nodes.step[work_nodes]])]
    called = _products_of_work(graph, rank, work_nodes)
    if not called["backward"].any():
        raise Unanswerable(
            "which operators are backward is not recorded: layers are found by their forward and backward"
        )
    text, operator = called["text"], called["operator"].to_numpy()
    product = (text != "").to_numpy()
    first = product & ~_is_repeated(operator)
    kinds, number = np.unique(text.to_numpy().astype(str), return_inverse=True)
    work = WorkSequence(
        work_nodes,
        nodes.step[work_nodes],
        timeline.start[work_nodes],
        nodes.duration[work_nodes],
        np.where(first, number, -1),
        product,
        called["backward"].to_numpy(),
        np.isin(nodes.kind[work_nodes], (NodeKind.HOST, NodeKind.GAP)),
    )
    return work, kinds.tolist()


def _is_repeated(operator: Ints) -> Bools:
    """Return [N] whether the operator occurred before."""
    _, first = np.unique(operator, return_index=True)
    again = np.ones(operator.size, np.bool_)
    again[first] = False
    return again


def _products_of_work(graph: Graph, rank: int, kernels: Ints) -> pl.DataFrame:
    """Return `text` of each work's product (empty: none), its `operator` (number) and `backward`."""
    assert graph.run is not None
    columns = [
        "span_id",
        "rank",
        "kind",
        "name",
        "shapes",
        "start_ns",
        "duration_ns",
        "tid",
        "forward_thread",
    ]
    spans = graph.run.table(SPANS, columns).filter(pl.col("rank") == rank)
    # [N] the node that launched each node, or the node itself.
    edges = graph.edges
    source = np.arange(graph.num_nodes)
    launch = edges.kind == EdgeKind.LAUNCH
    source[edges.target[launch]] = edges.source[launch]
    launcher: Ints = source[kernels]
    launched_in = graph.nodes.span[launcher]
    calls = pl.DataFrame({"row": np.arange(kernels.size), "span_id": launched_in})
    calls = calls.join(spans.select("span_id", "tid", "start_ns"), on="span_id").sort("start_ns")
    operators = spans.filter(pl.col("kind") == "cpu_op")
    back = _inside(calls, operators.filter(pl.col("forward_thread") > 0))
    is_product = pl.col("name").is_in(list(MATMULS)) | pl.col("name").str.contains(ATTENTION)
    ordered = operators.filter(is_product).sort(
        "tid", "start_ns", "duration_ns", descending=[False, False, True]
    )
    following = pl.col("start_ns").shift(-1).over("tid")
    end = pl.col("start_ns") + pl.col("duration_ns")
    made = _inside(calls, ordered.filter((following >= end).fill_null(True)))
    named = made.select("row", "operator", text=pl.col("name") + pl.col("shapes"))
    rows = (
        pl.DataFrame({"row": np.arange(kernels.size)})
        .join(named, on="row", how="left", maintain_order="left")
        .with_columns(
            pl.col("text").fill_null(""),
            pl.col("operator").fill_null(-2 - pl.col("row")),
            backward=pl.col("row").is_in(back["row"].implode()),
        )
    )
    return _by_kernels(graph, kernels, rows) if works_on_gpu(graph) else rows


def _by_kernels(graph: Graph, kernels: Ints, rows: pl.DataFrame) -> pl.DataFrame:
    """Limit products to kernels that multiply, including those that no operator launched."""
    multiplies = np.array([classify(name).kind in PRODUCT_KERNELS for name in graph.names], np.bool_)
    names = pl.Series(graph.names, dtype=pl.String).gather(graph.nodes.name[kernels])
    is_product = pl.Series(multiplies[graph.nodes.name[kernels]])
    named = pl.when(pl.col("text") == "").then(names).otherwise(pl.col("text"))
    return rows.with_columns(text=pl.when(is_product).then(named).otherwise(pl.lit("")))


def _inside(calls: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Return the calls within operators, with `name`, `shapes` and `operator` of the innermost one."""
    # Backward operators nest, so the outer one ends later.
    until = (pl.col("start_ns") + pl.col("duration_ns")).cum_max().over("tid")
    ordered = operators.sort("start_ns").select(
        "tid", "start_ns", "name", "shapes", operator="span_id", until=until
    )
    return calls.join_asof(
        ordered, on="start_ns", by="tid", strategy="backward", check_sortedness=False
    ).filter(pl.col("start_ns") < pl.col("until"))


# Layers.

NO_STACK = "no stack of equal layers was found: {}; layouts need models that repeat one layer"
HOST_BOUND = 1.1
MIN_PRODUCT_NS = 1_000.0  # what a product counts of which the cost of recording left less
MIN_SHARE = 0.25  # of the time of a pass's products that must be in its layers


class PassTime(NamedTuple):
    """Microseconds of one pass over one layer, or of work outside of layers.

    Attributes:
        product: of matrix products and attention.
        other: of all other operators.
        host: of the host, independent of sizes.
        sent: of collectives that began meanwhile.
        whole: from its beginning to that of the next layer.
    """

    product: float
    other: float
    host: float
    sent: float
    whole: float

    @property
    def work(self) -> float:
        """Microseconds without communication."""
        return self.product + self.other + self.host


NOTHING = PassTime(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Stack:
    """The layers of one rank.

    Attributes:
        layers: their number.
        micro_batches: per step.
        forward, backward: of one layer and micro-batch.
        head: between forward and backward of a micro-batch, without the layers.
        optimizer_us: work of a step after the last backward.
        products: of one layer, forward, in order, as operators with shapes or as kernels.
        outside: the other products of forward passes.
    """

    layers: int
    micro_batches: int
    forward: PassTime
    backward: PassTime
    head: PassTime
    optimizer_us: float
    products: tuple[str, ...]
    outside: tuple[str, ...]


class _Found(NamedTuple):
    """Layers in one pass of a step: [K] rows at which they begin, and whether another one follows at once."""

    begins: Ints
    follows: Bools


def stack_of(timeline: Timeline, rank: int, micro_batches: int = 0) -> Stack:
    """Find the layers of a rank.

    Args:
        micro_batches: per step, where the run's messages show it; 0 where it follows from the layers.

    Raises:
        Unanswerable: no stretch of products repeats equally often forward and backward.
    """
    work, names = work_of(timeline, rank)
    steps = np.unique(work.step)
    parts = [work.part(work.step == step) for step in steps.tolist()]
    second = int(steps[min(1, steps.size - 1)])
    attention = [token for token, name in enumerate(names) if re.search(ATTENTION, name)]
    patterns = [_pattern(work, second, backward, attention) for backward in (False, True)]
    passes = [[_find_layers(part, patterns[way], bool(way)) for way in (0, 1)] for part in parts]
    counts = Counter((ways[0].begins.size, ways[1].begins.size) for ways in passes)
    (ahead, back), _ = counts.most_common(1)[0]
    if ahead != back:
        raise Unanswerable(NO_STACK.format(f"{ahead} stretches repeat forward and {back} backward"))
    whole = [
        (part, ways)
        for part, ways in zip(parts, passes)
        if ways[0].begins.size == ways[1].begins.size == ahead
    ]
    count = micro_batches or int((~whole[0][1][0].follows).sum())
    if ahead % count:
        raise Unanswerable(NO_STACK.format(f"{ahead} of them do not divide into {count} micro-batches"))
    sent = _sent(timeline, rank)
    layers = ahead // count
    times = [_times([(part, ways[way]) for part, ways in whole], sent) for way in (0, 1)]
    heads = [head for part, ways in whole for head in _heads(part, ways, times[0], layers, sent)]
    outside = _outside(whole[0][0], whole[0][1][0], patterns[0].size)
    return Stack(
        layers,
        count,
        times[0],
        times[1],
        _median(heads),
        float(np.median([_optimizer_us(part) for part, _ in whole])),
        tuple(names[token] for token in patterns[0].tolist()),
        tuple(names[token] for token in outside),
    )


def _tokens(part: WorkSequence, backward: bool) -> tuple[Ints, Floats]:
    """Return [T] rows of the products of a pass, and [T] their durations, ns."""
    heads = np.flatnonzero(part.token >= 0)
    if not heads.size:
        return heads, np.zeros(0)
    took = np.add.reduceat(np.where(part.product, part.ns, 0), heads).astype(np.float64)
    of_pass = part.backward[heads] == backward
    return heads[of_pass], took[of_pass]


def _pattern(work: WorkSequence, step: int, backward: bool, attention: list[int]) -> Ints:
    """Return the tokens of one layer in a step, found with each product weighted by its undisturbed duration.

    That is the lower quartile over all steps: a product of microseconds may wait milliseconds for its core,
    on a busy machine in most steps.

    Raises:
        Unanswerable: no stretch repeats, or those that do have too small a share of the products.
    """
    rows, took = _tokens(work, backward)
    products = pl.DataFrame({"token": work.token[rows], "took": took})
    quartile = pl.col("took").quantile(0.25, "lower").over("token").clip(lower_bound=MIN_PRODUCT_NS)
    undisturbed = products.select(quartile)["took"].to_numpy()
    of_step = work.step[rows] == step
    tokens, weight = work.token[rows][of_step], undisturbed[of_step]
    pattern = find_pattern(tokens, weight, attention)
    way = "backward" if backward else "forward"
    if not pattern.size:
        raise Unanswerable(NO_STACK.format(f"its products repeat in no stretch, {way}"))
    begins = occurrences(tokens, pattern)
    covered = sum(float(weight[begin : begin + pattern.size].sum()) for begin in begins.tolist())
    if covered < MIN_SHARE * weight.sum():
        share = covered / max(float(weight.sum()), 1.0)
        raise Unanswerable(NO_STACK.format(f"what repeats {way} is {share:.0%} of its products"))
    return pattern


def _find_layers(part: WorkSequence, pattern: Ints, backward: bool) -> _Found:
    rows, _ = _tokens(part, backward)
    places = occurrences(part.token[rows], pattern)
    begins = rows[places]
    follows = np.zeros(places.size, np.bool_)
    if places.size > 1:
        others = np.flatnonzero((part.token >= 0) & (part.backward != backward))
        between = np.searchsorted(others, begins[1:]) - np.searchsorted(others, begins[:-1])
        follows[:-1] = (np.diff(places) == pattern.size) & (between == 0)
    return _Found(begins, follows)


def _sent(timeline: Timeline, rank: int) -> tuple[Ints, Floats]:
    """Return when collectives of a rank begin to move data, in order, and their durations, ns."""
    nodes = timeline.graph.nodes
    transfers = np.flatnonzero((nodes.rank == rank) & (nodes.kind == NodeKind.TRANSFER) & (nodes.step >= 0))
    transfers = (
        transfers[[not _is_message(timeline.graph, int(node)) for node in transfers]]
        if transfers.size
        else transfers
    )
    order = np.argsort(timeline.start[transfers], kind="stable")
    return timeline.start[transfers][order], nodes.duration[transfers][order].astype(np.float64)


def _is_message(graph: Graph, node: int) -> bool:
    number = int(graph.nodes.message[node])
    return number >= 0 and graph.messages[number].op in ("send", "recv", "send_recv")


def _time(part: WorkSequence, begin: int, end: int, sent: tuple[Ints, Floats]) -> PassTime:
    """Return the time between two rows of a step."""
    ns, product, host = (column[begin:end] for column in (part.ns, part.product, part.host))
    start = int(part.start[begin])
    stop = int(part.start[end]) if end < part.start.size else int(part.start[-1] + part.ns[-1])
    first, last = np.searchsorted(sent[0], [start, stop])
    other = ~product & ~host
    return PassTime(
        float(ns[product].sum()) / 1e3,
        float(ns[other].sum()) / 1e3,
        float(ns[host].sum()) / 1e3,
        float(sent[1][first:last].sum()) / 1e3,
        (stop - start) / 1e3,
    )


def _times(passes: list[tuple[WorkSequence, _Found]], sent: tuple[Ints, Floats]) -> PassTime:
    """Return the typical layer of a pass: from layers followed by another, else up to the other pass."""
    times = [
        _time(part, int(layered.begins[layer]), int(layered.begins[layer + 1]), sent)
        for part, layered in passes
        for layer in np.flatnonzero(layered.follows).tolist()
    ]
    if not times:
        for part, layered in passes:
            for begin in layered.begins.tolist():
                turn = np.flatnonzero(part.backward[begin:] != part.backward[begin])
                end = begin + int(turn[0]) if turn.size else part.ns.size
                times.append(_time(part, begin, end, sent))
    return _median(times)


def _median(times: list[PassTime]) -> PassTime:
    if not times:
        return NOTHING
    return PassTime(*(float(np.median(column)) for column in zip(*times)))


def _heads(
    part: WorkSequence, ways: list[_Found], layer: PassTime, layers: int, sent: tuple[Ints, Floats]
) -> list[PassTime]:
    """Return the time from each micro-batch's first layer to the next backward, without the layers."""
    begins = ways[0].begins[::layers]
    heads = []
    for begin in begins.tolist():
        after = ways[1].begins[ways[1].begins > begin]
        between = ways[0].begins[
            (ways[0].begins > begin) & (ways[0].begins < (after[0] if after.size else 0))
        ]
        if not after.size or between.size != layers - 1:
            continue  # another micro-batch's forward comes first
        whole = _time(part, begin, _end_of_head(part, begin, int(after[0])), sent)
        heads.append(PassTime(*(max(pass_us - layers * its, 0.0) for pass_us, its in zip(whole, layer))))
    return heads


def _end_of_head(part: WorkSequence, begin: int, end: int) -> int:
    """Return the row after the products of loss and output layer, where the backward of a layer begins."""
    back = begin + np.flatnonzero(part.backward[begin:end])
    if not back.size:
        return end
    products = back[part.product[back]]
    return int(products[-1]) + 1 if products.size else int(back[0])


def _outside(part: WorkSequence, layers: _Found, period: int) -> list[int]:
    """Return the tokens of forward products outside of layers, each once."""
    rows, _ = _tokens(part, False)
    first = np.searchsorted(rows, layers.begins)
    inside = np.zeros(rows.size, np.bool_)
    for begin in first.tolist():
        inside[begin : begin + period] = True
    return list(dict.fromkeys(part.token[rows[~inside]].tolist()))


def _optimizer_us(part: WorkSequence) -> float:
    """Return microseconds of work after the last backward."""
    last = np.flatnonzero(part.backward)
    return float(part.ns[int(last[-1]) + 1 :].sum()) / 1e3 if last.size else 0.0


def is_host_bound(timed: PassTime) -> bool:
    """Return whether the GPU was idle for a tenth of the layer, so that the host determines its time."""
    return timed.whole > HOST_BOUND * (timed.work + timed.sent)


# Repeating stretches of a sequence: the layers of a model among the products of a step.

MAX_PERIOD = 1000  # tokens of a layer
NEARLY = 0.9  # of the weight that the best period covers: the shortest period that covers this much wins
INNER = 0.5  # of a pattern's weight: an inner repetition of less is only a part of a layer


def find_pattern(tokens: Ints, weight: Floats, needed: Collection[int] = ()) -> Ints:
    """Return the tokens of one layer; empty where nothing repeats.

    Args:
        tokens: [N] in order.
        weight: [N] of each.
        needed: tokens of which each layer has one, if the pattern has any (attention: two equal adjacent
            matrices are not layers).
    """
    begin, period, _ = _best(tokens, weight)
    if not period:
        return tokens[:0]
    pattern, weights = tokens[begin : begin + period], weight[begin : begin + period]
    while period > 1:
        begin, period, covered = _best(pattern, weights)
        inner = pattern[begin : begin + period]
        if not period or covered < INNER * weights.sum():
            break
        if np.isin(pattern, list(needed)).any() and not np.isin(inner, list(needed)).any():
            break
        pattern, weights = inner, weights[begin : begin + period]
    return pattern


def occurrences(tokens: Ints, pattern: Ints) -> Ints:
    """Return the non-overlapping positions of a pattern.

    Args:
        tokens: [N] in order.
        pattern: [P] at least one.
    """
    if tokens.size < pattern.size:
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, pattern.size)
    begins, free = [], 0
    for begin in np.flatnonzero((windows == pattern).all(1)).tolist():
        if begin >= free:
            begins.append(begin)
            free = begin + pattern.size
    return np.array(begins, np.int64)


def _best(tokens: Ints, weight: Floats) -> tuple[int, int, float]:
    """Return where the best repetition begins, its period (0 for none), and the weight that it covers."""
    total = np.concatenate([[0.0], np.cumsum(weight)])
    best: list[tuple[float, int, int]] = []
    for period in range(1, min(tokens.size // 2, MAX_PERIOD) + 1):
        begin, count = _longest(tokens[period:] == tokens[:-period], period, total)
        if count > 1:
            best.append((float(total[begin + count * period] - total[begin]), period, begin))
    if not best:
        return 0, 0, 0.0
    most = max(covered for covered, _, _ in best)
    covered, period, begin = next(candidate for candidate in best if candidate[0] >= NEARLY * most)
    return begin, period, covered


def _longest(equal: Bools, period: int, total: Floats) -> tuple[int, int]:
    """Return where the heaviest repetition of a period begins, and how often it repeats."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    begins, lengths = edges[::2], edges[1::2] - edges[::2]
    counts = lengths // period + 1
    enough = counts > 1
    if not enough.any():
        return 0, 0
    begins, counts = begins[enough], counts[enough]
    best = int(np.argmax(total[begins + counts * period] - total[begins]))
    return int(begins[best]), int(counts[best])
