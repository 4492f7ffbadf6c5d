"""Edits of selected work: faster or slower, of another duration, or removed; also of a whole rank."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable, UsageError
from dpro.members import members_of
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind, is_one_of
from dpro.replay.mesh import (
    MIN_ACTIVATION_BYTES,
    MIN_ACTIVATIONS,
    Mesh,
    axis_of_group,
    mesh_of_run,
    places_along,
    sums_of_passes,
)
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.balance import computes
from dpro.replay.whatif.edits.heal import RanksAt
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import MAX_TIMES, key
from dpro.replay.whatif.graph_ops.scope import calls_only_for, with_descendants
from dpro.replay.whatif.graph_ops.selected import NodeSelection, absence_reason, ranks_at, selection_of
from dpro.replay.whatif.rankwise import OF_TRANSFERS, RankChanges, RankwiseEdit
from dpro.schema import COLLECTIVES, SPANS
from dpro.store import Run
from dpro.units import NS_PER_MS, NS_PER_US, format_duration


@dataclass(frozen=True)
class Scale(RankwiseEdit):
    """Multiply the time of selected work by a factor."""

    name = "scale"
    summary = "scale the duration of selected work"
    example = "scale:name=aten::mm,factor=0.5"
    needs = "work that matches the selection"
    assumes = "nothing else changes"
    source = "duration * factor"
    proof = "layers twice as fast, gloo; a sleep, 4 V100"
    is_advice = False
    effort = "code"
    selection: NodeSelection
    factor: float = key("multiple of its recorded duration", 0.5, least=0)
    doubt: float = 0.05

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return edits that halve the operations with most of the critical path."""
        return [cls(selection_of(name, kind)) for name, kind in facts.largest_ops]

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(self.selection.mask(facts.graph)) * max(1 - self.factor, 0.0)

    def apply(self, graph: Graph) -> Graph:
        """Scale durations, rounded to whole nanoseconds."""
        return graph.with_durations(scaled(graph, self.selection.chosen(graph), self.factor))

    def within_ranks(self) -> RankChanges | None:
        return _changes(self.selection)

    def describe(self) -> str:
        return f"{self.selection.describe()} takes {self.factor:.0%} of its time"

    def how(self) -> str:
        if self.factor > 1:
            return "not a remedy: shows the cost of slower work"
        return "use a faster implementation of the selected work"


@dataclass(frozen=True)
class Remove(RankwiseEdit):
    """Remove selected work: its time, its calls, launches for it alone, and waits in its collectives.

    If kinds of work are selected, only those are removed, not the work that they call.
    """

    name = "remove"
    summary = "remove selected work, and everything it calls and launches"
    example = "remove:name=*dropout*"
    needs = "work that matches the selection"
    assumes = "nothing else depends on its result"
    source = "zero duration for the work and for calls that launch nothing else; no rendezvous"
    is_advice = False
    effort = "code"
    selection: NodeSelection
    doubt: float = 0.05

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the edit that removes the host code outside operators with most of the critical path."""
        return [cls(selection_of(name, NodeKind.HOST)) for name in facts.largest_host_code]

    def bound(self, facts: RunFacts) -> float:
        mask = self.selection.mask(facts.graph)
        if not self.selection.kind:
            mask = with_descendants(facts.graph, mask)
        if (mask & facts.communication).any():
            return facts.idle(mask | facts.communication | calls_only_for(facts.graph, mask))
        gone = mask | calls_only_for(facts.graph, mask)
        return facts.on_path(gone, gone[facts.graph.edges.target])

    def apply(self, graph: Graph) -> Graph:
        """Return the graph without the work; nodes stay, so that the order around them does."""
        mask = self.selection.chosen(graph)
        return without(graph, mask if self.selection.kind else with_descendants(graph, mask))

    def within_ranks(self) -> RankChanges | None:
        return _changes_in_ranks(self.selection)

    def describe(self) -> str:
        return f"{self.selection.describe()} is removed"

    def how(self) -> str:
        return "remove the work from the model or the loop"


@dataclass(frozen=True)
class Replace(RankwiseEdit):
    """Give each selected span another length."""

    name = "replace"
    summary = "set the duration of selected spans"
    example = "replace:name=*softmax*,us=12.5"
    needs = "work that matches the selection"
    assumes = "the replacement was measured on this hardware, and nothing else changes"
    source = "the given duration"
    is_advice = False
    effort = "code"
    selection: NodeSelection
    us: float = key(
        "duration of each span, without its children, in microseconds", least=0, most=MAX_TIMES * MAX_TIMES
    )
    doubt: float = 0.05

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the edit that sets the operation with most of the critical path to its median duration."""
        edits = []
        for name, kind in facts.largest_ops[:1]:
            selection = selection_of(name, kind)
            usual = np.median(facts.graph.nodes.duration[selection.mask(facts.graph)])
            edits.append(cls(selection, us=float(usual) / NS_PER_US))
        return edits

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(self.selection.mask(facts.graph))

    def apply(self, graph: Graph) -> Graph:
        """Scale the nodes of each span so that together they take the given time."""
        mask = self.selection.chosen(graph)
        return graph.with_durations(durations_per_span(graph, mask, self.us * NS_PER_US))

    def within_ranks(self) -> RankChanges | None:
        return _changes(self.selection)

    def describe(self) -> str:
        return f"{self.selection.describe()} takes {format_duration(self.us * NS_PER_US)} each time"

    def how(self) -> str:
        return "use the other implementation, whose duration was measured separately"


def _changes(selection: NodeSelection) -> RankChanges | None:
    """Return how selected work changes: in ranks, or only in transfers if nothing else can fit."""
    return OF_TRANSFERS if selection.of_transfers and not selection.module else _changes_in_ranks(selection)


def _changes_in_ranks(selection: NodeSelection) -> RankChanges | None:
    """Return how selected work of ranks changes; None with an axis, which calls of all ranks determine."""
    return None if selection.axis else RankChanges(selection.ranks)


def scaled(graph: Graph, mask: Bools, factor: float | NDArray[np.float64]) -> Ints:
    """Return [N] durations, with those of masked nodes multiplied by a factor, common or one for each.

    Args:
        mask: [N] nodes.
    """
    duration = graph.nodes.duration.copy()
    duration[mask] = np.rint(duration[mask] * factor).astype(np.int64)
    return duration


def durations_per_span(graph: Graph, mask: Bools, span_ns: float) -> Ints:
    """Return [N] durations that scale the masked nodes of each span to take `span_ns` together.

    Args:
        mask: [N] nodes.
    """
    nodes = graph.nodes
    duration = nodes.duration.copy()
    picked = np.flatnonzero(mask)
    if picked.size == 0:
        return duration
    alone = np.where(nodes.span[picked] >= 0, -1, picked)
    keys = np.stack([nodes.rank[picked], nodes.window[picked], nodes.span[picked], alone])
    _, span_of = np.unique(keys, axis=1, return_inverse=True)
    span_of = span_of.reshape(-1)
    order = np.argsort(span_of, kind="stable")
    total = np.bincount(span_of, duration[picked])
    weight = np.where(total[span_of] > 0, duration[picked], 1)[order]  # a span of no length is divided evenly
    weight_of_span = np.bincount(span_of[order], weight)[span_of[order]]
    first = np.append(True, np.diff(span_of[order]) != 0)
    summed = np.cumsum(weight)
    summed -= (summed - weight)[first][np.cumsum(first) - 1]
    # Rounding the ends of pieces, not their lengths, keeps the sum exact.
    ends = np.rint(summed * (span_ns / weight_of_span)).astype(np.int64)
    duration[picked[order]] = np.where(first, ends, np.diff(ends, prepend=0))
    return duration


def without(graph: Graph, mask: Bools) -> Graph:
    """Return the graph without the masked work, as in `Remove`.

    Args:
        mask: [N] the work.
    """
    gone, unmet = removed_parts(graph, mask)
    duration, lag = times_without(graph, gone)
    return graph.with_durations(duration).with_lags(lag).without_edges(unmet)


def removed_parts(graph: Graph, mask: Bools) -> tuple[Bools, Bools]:
    """Return [N] a mask of nodes that take no time, and [E] of edges that disappear, without some work.

    Args:
        graph: the graph, whose durations and lags do not matter.
        mask: [N] the work.
    """
    # Arrivals at collectives whose transfers are masked go, too.
    nodes = graph.nodes
    member = nodes.collective * (int(nodes.rank.max(initial=0)) + 2) + nodes.rank
    moved = mask & (nodes.kind == NodeKind.TRANSFER)
    arriving: Bools = (nodes.kind == NodeKind.ARRIVE) & np.isin(member, member[moved])
    edges, mask = graph.edges, mask | arriving
    unmet = (edges.kind == EdgeKind.RENDEZVOUS) & (mask[edges.source] | mask[edges.target])
    return mask | calls_only_for(graph, mask), unmet


def times_without(graph: Graph, gone: Bools) -> tuple[Ints, Ints]:
    """Return [N] durations and [E] lags of a graph without some of its nodes.

    Args:
        gone: [N] nodes, as from `removed_parts`.
    """
    lag = graph.edges.lag
    return (
        np.where(gone, 0, graph.nodes.duration),
        np.where(gone[graph.edges.target], np.minimum(lag, 0), lag),
    )


@dataclass(frozen=True)
class Slow(RankwiseEdit):
    """A rank, all ranks of a host, or a stage work longer: by a factor, by a time in each step, or both."""

    name = "slow"
    summary = "turn a rank, host or stage into a straggler"
    example = "slow:rank=2,factor=1.3"
    needs = "the given ranks in the run"
    assumes = "all its work slows down equally, and the network stays as fast"
    source = "duration * factor for CPU and GPU work; ms added at the beginning of each step"
    proof = "a rank that sleeps: DDP, FSDP2 and tensor parallelism on gloo; 4 V100"
    is_advice = False
    effort = "none"
    place: RanksAt
    factor: float | None = key("multiple of the duration of its CPU and GPU work", None, least=0)
    ms: float | None = key("delay at the beginning of each step, in ms", None, least=0)
    doubt: float = 0.1

    def __post_init__(self) -> None:
        """Raise unless exactly one of rank, host and stage is given, with a factor or ms."""
        super().__post_init__()
        self.place.require_one(self.name)
        if self.factor is None and self.ms is None:
            raise UsageError(f"slow needs factor= or ms=, as in {self.example}")

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the edit that slows the rank with most of the critical path by a tenth."""
        return [cls(RanksAt(rank), factor=1.1) for rank in facts.deciding_ranks[:1]]

    def bound(self, facts: RunFacts) -> float:
        faster = max(1 - (1.0 if self.factor is None else self.factor), 0.0)
        return facts.on_path(np.isin(facts.graph.nodes.kind, (*CPU_KINDS, *GPU_KINDS))) * faster

    def apply(self, graph: Graph) -> Graph:
        """Scale the ranks' work, and lengthen the first work of each step."""
        ranks = self.place.ranks(graph)
        works = np.isin(graph.nodes.rank, ranks) & is_one_of(graph.nodes.kind, (*CPU_KINDS, *GPU_KINDS))
        duration = scaled(graph, works, 1.0 if self.factor is None else self.factor)
        duration[first_work(graph, ranks)] += round((self.ms or 0.0) * NS_PER_MS)
        return graph.with_durations(duration)

    def within_ranks(self) -> RankChanges | None:
        return RankChanges(self.place.ranks)

    def describe(self) -> str:
        by = [f"takes {self.factor:g} times as long"] if self.factor is not None else []
        by += [f"loses {self.ms:g} ms per step"] if self.ms is not None else []
        return f"{self.place.describe()} {' and '.join(by)}"

    def how(self) -> str:
        return "not a remedy: shows the cost of such a straggler"


def first_work(graph: Graph, ranks: list[int]) -> Ints:
    """Return the nodes that begin the steps of these ranks: on their main threads, else on their GPUs."""
    nodes = graph.nodes
    main = np.array([what in ("main thread", "compute") for _, what in graph.lanes] + [False], np.bool_)
    works = is_one_of(nodes.kind, (*CPU_KINDS, *GPU_KINDS)) & (nodes.step >= 0) & np.isin(nodes.rank, ranks)
    on_main = np.flatnonzero(works & main[nodes.lane])
    rows = pl.DataFrame(
        {name: getattr(nodes, name)[on_main] for name in ("rank", "window", "step", "measured_start")}
    ).with_columns(node=pl.Series(on_main))
    first = rows.sort("measured_start", "node").unique(["rank", "window", "step"], keep="first")
    return first["node"].sort().to_numpy()


@dataclass(frozen=True)
class Drop(Edit):
    """Leave a rank, or all ranks of a data-parallel replica, out of the job."""

    name = "drop"
    summary = "leave out a rank or replica, so that no other rank waits for it"
    example = "drop:rank=3"
    needs = "other ranks, and no model shard on the dropped ranks (tensor parallelism, FSDP, experts)"
    assumes = (
        "work and transfers of the other ranks stay unchanged, so that the batch shrinks by the dropped share"
    )
    source = "zero duration for the rank's work, and no edges to the rendezvous of other ranks"
    effort = "flag"
    training = "a smaller batch, which may need another learning rate"
    rank: int | None = key("rank number", None, least=0)
    dp: int | None = key("data-parallel replica, with all its stages", None, least=0)
    doubt: float = 0.1

    def __post_init__(self) -> None:
        """Raise unless exactly one of rank and dp is given."""
        super().__post_init__()
        if (self.rank is None) == (self.dp is None):
            raise UsageError(f"drop needs one of rank= and dp=, as in {self.example}")

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return edits that drop the ranks that findings name, else the most critical, or its replica."""
        ranks = list(facts.suspects) or facts.deciding_ranks[:1]
        if not ranks:
            raise Unanswerable("the run has no other rank")
        if facts.graph.places:
            return [cls(dp=dp) for dp in sorted({facts.graph.places[rank].dp for rank in ranks})]
        return [cls(rank) for rank in ranks]

    def bound(self, facts: RunFacts) -> float:
        gone = np.isin(facts.graph.nodes.rank, ranks_at(facts.graph, self.rank, dp=self.dp))
        left_ns = facts.base_ns - facts.idle(gone | facts.communication)
        return max(facts.base_ns - left_ns / self.samples(facts.graph), 0.0)

    def samples(self, graph: Graph) -> float:
        """Return the remaining share of the batch: the other replicas keep theirs."""
        replicas = {rank: place.dp for rank, place in graph.places.items()} or {
            rank: rank for rank in graph.ranks
        }
        ranks = max([len(replicas), *(message.num_ranks for message in graph.messages)])
        total = len(set(replicas.values())) if graph.places else ranks
        gone = {replicas[rank] for rank in ranks_at(graph, self.rank, dp=self.dp) if rank in replicas}
        return max(total - len(gone), 0) / max(total, 1) or 1.0

    def apply(self, graph: Graph) -> Graph:
        """Remove the ranks' time and their edges to others."""
        nodes, edges = graph.nodes, graph.edges
        ranks = ranks_at(graph, self.rank, dp=self.dp)
        gone, kept = np.isin(nodes.rank, ranks), (nodes.rank >= 0) & ~np.isin(nodes.rank, ranks)
        if not gone.any():
            raise Unanswerable(absence_reason(graph, self._what()))
        if not kept.any():
            raise Unanswerable("the run has no other rank")
        handed = gone[edges.source] & kept[edges.target] | kept[edges.source] & gone[edges.target]
        if handed.any():
            raise Unanswerable(
                f"{self._what()} passes data to others, which need it: drop a whole replica (dp=)"
            )
        needed = why_needed(graph, ranks)
        if needed:
            raise Unanswerable(f"{self._what()} cannot be left out: {needed}")
        duration, lag = times_without(graph, gone)
        changed = graph.with_durations(duration).with_lags(lag)
        earliest = np.where(gone, 0, nodes.earliest)
        earliest.setflags(write=False)
        free = dataclasses.replace(changed, nodes=dataclasses.replace(changed.nodes, earliest=earliest))
        meeting = edges.kind == EdgeKind.RENDEZVOUS
        return free.without_edges(meeting & gone[edges.source] | _ends_of_steps(graph, gone))

    def _what(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else f"data-parallel replica {self.dp}"

    def describe(self) -> str:
        return f"{self._what()} is left out"

    def how(self) -> str:
        return "start the job without it, with batch size or learning rate adjusted to the number of ranks"


def _ends_of_steps(graph: Graph, gone: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return [E] a mask of edges from the ranks to nodes that all ranks must reach, which delay none now."""
    edges = graph.edges
    shared = graph.nodes.kind == NodeKind.RENDEZVOUS
    ends: NDArray[np.bool_] = gone[edges.source] & shared[edges.target] & (edges.kind == EdgeKind.THREAD)
    return ends


# Ranks with a part of the model that the others need.

AXES = {"tp": "tensor-parallel", "pp": "pipeline", "cp": "context-parallel", "ep": "expert-parallel"}
NAMES_A_SHARD = re.compile(r"(?<![a-z])(tp|tensor|fsdp|shard|sharded)(?![a-z])")
ALSO_DATA = re.compile(r"data|(?<![a-z])dp(?![a-z])")
MIN_UNKNOWN_SUMS = 2  # of a forward pass: a single one is its loss
MIN_SHARE = 0.1  # of the bytes of all-reduces: less is metrics or statistics, not parameters or activations


def why_needed(graph: Graph, ranks: Collection[int]) -> str:
    """Return the reason why the others need these ranks; empty where nothing shows that they do."""
    if graph.run is None or _is_of_operations(graph):
        return ""
    calls, mesh = _calls_with_others(graph.run, ranks), mesh_of_run(graph.run)
    needed = _by_coordinates(mesh, ranks) or _by_names(calls) or _by_kind(calls)
    are_axes_named = mesh.axes and all(axis.name for axis in mesh.axes)
    return needed or ("" if are_axes_named or calls.is_empty() else _by_forward_sums(graph.run, ranks))


def _is_of_operations(graph: Graph) -> bool:
    try:
        return computes(graph).height > 0
    except Unanswerable:
        return False


def _by_coordinates(mesh: Mesh, ranks: Collection[int]) -> str:
    """Look for remaining ranks that differ from a removed one in one axis other than data parallelism."""
    for axis, words in AXES.items():
        places = places_along(mesh, axis)
        for rank in sorted(set(ranks) & set(places)):
            shares = (
                other for other in places if other not in ranks and _axis_between(mesh, rank, other) == axis
            )
            if next(shares, -1) >= 0:
                place = f"{words} rank {places[rank]} ({axis})"
                return f"rank {rank} is {place} of a model, and other ranks have the rest"
    return ""


def _axis_between(mesh: Mesh, rank: int, other: int) -> str:
    """Return the only axis, or overlay of axes, in which two ranks differ."""
    laid = (overlay.name for overlay in mesh.overlays for group in overlay.groups if {rank, other} <= group)
    return next(laid, "") or axis_of_group(mesh, (rank, other))


def _calls_with_others(run: Run, ranks: Collection[int]) -> pl.DataFrame:
    """Return collective calls of these ranks with others: `rank`, `window`, `op`, `group`, `bytes`, `at`."""
    columns = ["rank", "window", "op", "group", "group_ranks", "bytes_in", "bytes_out", "start_ns"]
    calls = run.table(COLLECTIVES, [*columns, "launch_span_id"]).filter(pl.col("rank").is_in(list(ranks)))
    alone = [text for text in calls["group_ranks"].unique() if text and set(members_of(text)) <= set(ranks)]
    with_others = ~pl.col("group_ranks").is_in(pl.Series(alone, dtype=pl.String).implode())
    calls = calls.filter(with_others) if run.manifest.world_size > 1 else calls.clear()
    launched = run.table(SPANS, ["rank", "span_id", "start_ns"]).rename({"start_ns": "called_ns"})
    return calls.join(
        launched, left_on=["rank", "launch_span_id"], right_on=["rank", "span_id"], how="left"
    ).select(
        "rank", "window", "op", "group",
        bytes=pl.max_horizontal("bytes_in", "bytes_out"),
        at=pl.coalesce("called_ns", "start_ns"),
    )  # fmt: skip


def _by_names(calls: pl.DataFrame) -> str:
    for group in calls["group"].unique().sort().to_list():
        name = group.lower()
        if NAMES_A_SHARD.search(name) and not ALSO_DATA.search(name):
            return f"its process group {group!r} holds parts of one model"
    return ""


def _by_kind(calls: pl.DataFrame) -> str:
    ops = set(calls["op"].to_list())
    if "all_to_all" in ops:
        return "it exchanges tokens or rows of tables with others (all_to_all): each holds its own part"
    if "reduce_scatter" in ops:
        return "gradients are scattered to it (reduce_scatter): it holds its own shard of the parameters"
    gathered = calls.filter(pl.col("op") == "all_gather")["bytes"]
    if gathered.len() and (gathered.min() < 0 or gathered.sum() >= MIN_SHARE * _reduced(calls)):  # type: ignore[operator]
        return "parameters are gathered from it (all_gather): it holds its own shard of them"
    return ""


def _by_forward_sums(run: Run, ranks: Collection[int]) -> str:
    """Look at the sums of forward passes with others, where groups or sizes do not show the axis."""
    sums = sums_of_passes(run)
    groups = [text for text in sums["group_ranks"].unique() if not text or set(members_of(text)) & set(ranks)]
    sums = sums.filter(pl.col("group_ranks").is_in(groups))
    forward, steps = sums.filter("is_forward"), max(sums["step"].n_unique(), 1)
    large = pl.col("bytes_in").filter(pl.col("bytes_in") >= MIN_ACTIVATION_BYTES).sum()
    if 0 < sums.select(large).item() * MIN_ACTIVATIONS <= forward.select(large).item():
        return "activations are summed with it in forward passes (all_reduce): it holds a part of each layer"
    unknown = forward.filter(pl.col("bytes_in") < 0).height
    if unknown >= MIN_UNKNOWN_SUMS * steps:
        what = "forward passes sum data of unknown size with it (all_reduce), perhaps activations"
        return f"{what}: if each rank has the whole model, give --layout dp={run.manifest.world_size}"
    return ""


def _reduced(calls: pl.DataFrame) -> float:
    return float(calls.filter((pl.col("op") == "all_reduce") & (pl.col("bytes") > 0))["bytes"].sum())
