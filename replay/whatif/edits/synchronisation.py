"""Edits of when ranks exchange: FSDP's parameters earlier; gradients rarely, after backward, or a step late.

FSDP2 records ranges around its all-gathers and the copies of their results. Prefetched, each all-gather is
called after the copy of an earlier one, separately in forward and backward passes, and awaited where its own
result is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools
from dpro.errors import Unanswerable
from dpro.replay.gradient_buckets import NOT_THERE, framework_of, no_overlap_setting, repeated_reduction_spans
from dpro.replay.gradient_passes import Launches, Pass
from dpro.replay.graph import CPU_KINDS, EdgeKind, Graph, NodeKind, computed_once
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.gradients import ReductionEdit
from dpro.replay.whatif.edits.selected_work import without
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.reductions import (
    STEP,
    GradientReductions,
    Reduction,
    next_of_rank,
    plain_reductions,
    with_reductions,
)
from dpro.replay.whatif.graph_ops.scope import with_descendants
from dpro.replay.whatif.graph_ops.selected import fitting

GATHER, COPY_OUT = "FSDP::all_gather", "FSDP::all_gather_copy_out"
BACKWARD = ("FSDP::pre_backward", "FSDP::backward_prefetch", "FSDP::post_backward")
PASS = ["rank", "window", "step", "backward"]


@dataclass(frozen=True)
class Prefetch(Edit):
    """All-gathers of FSDP are issued earlier, and awaited only where their result is used."""

    name = "prefetch"
    of_torch = True
    summary = "gather FSDP parameters some layers earlier"
    example = "prefetch:ahead=1"
    needs = "a job with FSDP2, with its ranges, recorded by torch.profiler and dpro"
    assumes = (
        "memory suffices for this many more layers, a rank's transfers share its link, and copy times "
        "stay unchanged"
    )
    source = (
        "FSDP (Zhao et al., VLDB 2023), forward and backward prefetching: the order of calls, and the "
        "waits of copies; collectives of a group run in call order"
    )
    proof = "1 and 2 layers ahead, FSDP2 on gloo"
    effort = "line"
    ahead: int = key("number of all-gathers by which each is issued earlier", 1, least=0)
    only: str = key("only in this pass; default: both", "", choices=("forward", "backward"))
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        return [cls(1), cls(2)]

    def bound(self, facts: RunFacts) -> float:
        return facts.idle_without_communication

    def apply(self, graph: Graph) -> Graph:
        """Issue each all-gather where an earlier one of its pass was; workers run them in call order."""
        gathers = gathers_of(graph)
        if self.only:
            gathers = gathers.filter(pl.col("backward") == (self.only == "backward"))
        moved = gathers.with_columns(
            by=pl.min_horizontal(pl.int_range(pl.len()).over(PASS), self.ahead),
        ).with_columns(
            earlier=pl.col("arrive").gather(pl.int_range(pl.len()) - pl.col("by")),
            behind=pl.col("done").gather(pl.int_range(pl.len()) - pl.col("by")),
        )
        moved = moved.filter(pl.col("by") > 0)
        if moved.is_empty():
            return graph
        draft = GraphEditor(graph)
        _issue_earlier(draft, moved)
        _await_at_copies(draft, moved)
        _order_workers(draft, moved)
        return draft.finish()

    def describe(self) -> str:
        where = f" in {self.only}" if self.only else ""
        return f"parameters gathered {self.ahead} layers earlier{where}"

    def how(self) -> str:
        calls = [
            f"set_modules_to_{direction}_prefetch"
            for direction in ("forward", "backward")
            if self.only in ("", direction)
        ]
        return f"{' and '.join(calls)} of each FSDP module, with the next {self.ahead + 1} modules"


def gathers_of(graph: Graph) -> pl.DataFrame:
    """Return FSDP's all-gathers in the order of their calls on each rank.

    Returns:
        `arrive`, `transfer` (nodes), `called` (ns, of the call), `copied` and `done` (the first and last node
        of the thread that copy the result out), and `PASS`.

    Raises:
        Unanswerable: there are none.
    """
    nodes, launches = graph.nodes, Launches(graph)
    gathers = _within(graph, f"{GATHER} ")[launches.source] & (nodes.step[launches.source] >= 0)
    source, arrive = launches.source[gathers], launches.arrive[gathers]
    if arrive.size == 0:
        raise Unanswerable(f"the run has no all-gather within a range {GATHER}, as FSDP2 records them")
    frame = pl.DataFrame(
        {
            "arrive": arrive,
            "transfer": launches.transfer[gathers],
            "called": nodes.measured_start[source],
            "layer": [graph.names[i].removeprefix(GATHER) for i in nodes.around[source].tolist()],
            "rank": nodes.rank[source],
            "window": nodes.window[source],
            "step": nodes.step[source],
        }
    )
    begins = _nodes_within(graph, BACKWARD).group_by(PASS[:3]).agg(begins=pl.col("at").min())
    return (
        frame.join(begins, on=PASS[:3], how="left")
        .with_columns(backward=(pl.col("called") >= pl.col("begins")).fill_null(False))
        .drop("begins")
        .join(_copies(graph, frame), on="arrive")
        .sort(*PASS, "called", "arrive")
    )


def _copies(graph: Graph, gathers: pl.DataFrame) -> pl.DataFrame:
    """Return the first and last node that copy each all-gather's result out: `arrive`, `copied`, `done`."""
    place = ["rank", "window", "layer"]
    copying = _nodes_within(graph, (f"{COPY_OUT} ",)).with_columns(
        layer=pl.col("around").str.strip_prefix(COPY_OUT)
    )
    return (
        copying.sort("at", "node")
        .join_asof(
            gathers.select(*place, "arrive", "called").sort("called"),
            left_on="at",
            right_on="called",
            by=place,
            strategy="backward",
            check_sortedness=False,
        )
        .drop_nulls("arrive")
        .group_by("arrive", maintain_order=True)
        .agg(copied=pl.col("node").first(), done=pl.col("node").last())
    )


def _nodes_within(graph: Graph, prefixes: tuple[str, ...]) -> pl.DataFrame:
    """Return CPU nodes in ranges with such names: `node`, `around`, `at` (ns), `rank`, `window`, `step`."""
    nodes = graph.nodes
    fits = np.isin(nodes.kind, CPU_KINDS)
    fits &= np.any([_within(graph, prefix) for prefix in prefixes], axis=0)
    inside = np.flatnonzero(fits)
    names = pl.Series(graph.names, dtype=pl.String)
    columns = {name: getattr(nodes, name)[inside] for name in ("rank", "window", "step")}
    placed = {
        "node": inside,
        "around": names.gather(nodes.around[inside]),
        "at": nodes.measured_start[inside],
    }
    return pl.DataFrame({**placed, **columns})


def _within(graph: Graph, prefix: str) -> NDArray[np.bool_]:
    """Return [N] whether a node is in a range with a prefix."""
    fits = np.append(fitting(graph.names, f"{prefix}*"), False)  # the last entry: nodes in no range have -1
    return np.asarray(fits[graph.nodes.around])


def _issue_earlier(draft: GraphEditor, moved: pl.DataFrame) -> None:
    """Call all-gathers after the copies of earlier ones; on the GPU they need what the earlier ones did."""
    graph, edges = draft.graph, draft.graph.edges
    for arrive, earlier, behind in moved.select("arrive", "earlier", "behind").iter_rows():
        for edge in range(graph.indptr[arrive], graph.indptr[arrive + 1]):
            if edges.kind[edge] == EdgeKind.LAUNCH:
                draft.link(behind, arrive, EdgeKind.LAUNCH, int(edges.lag[edge]))
            draft.cut[edge] |= edges.kind[edge] in (EdgeKind.LAUNCH, EdgeKind.EVENT)
        for edge in range(graph.indptr[earlier], graph.indptr[earlier + 1]):
            if edges.kind[edge] == EdgeKind.EVENT:
                draft.link(int(edges.source[edge]), arrive, EdgeKind.EVENT, int(edges.lag[edge]))


def _await_at_copies(draft: GraphEditor, moved: pl.DataFrame) -> None:
    """Make threads wait for an all-gather where they copy its result, not where they call it."""
    edges = draft.graph.edges
    waits = np.flatnonzero(
        (edges.kind == EdgeKind.SYNC) & np.isin(edges.source, moved["transfer"].to_numpy())
    )
    copied = dict(moved.select("transfer", "copied").iter_rows())
    for edge in waits.tolist():
        draft.cut[edge] = True
        source = int(edges.source[edge])
        draft.link(source, int(copied[source]), EdgeKind.SYNC, int(edges.lag[edge]))


def _order_workers(draft: GraphEditor, moved: pl.DataFrame) -> None:
    """Order the communication on each worker or stream by its calls."""
    nodes, edges = draft.graph.nodes, draft.graph.edges
    arrives = (nodes.kind == NodeKind.ARRIVE) & np.isin(nodes.rank, moved["rank"].to_numpy())
    moves = arrives[edges.source] & (nodes.kind[edges.target] == NodeKind.TRANSFER)
    transfer = dict(zip(edges.source[moves].tolist(), edges.target[moves].tolist()))
    launch = (edges.kind == EdgeKind.LAUNCH) & arrives[edges.target]
    called = dict(zip(edges.target[launch].tolist(), nodes.measured_start[edges.source[launch]].tolist()))
    begins = {
        arrive: int(nodes.measured_end[node]) for arrive, node in moved.select("arrive", "behind").iter_rows()
    }
    issued = called | begins
    queued = (edges.kind == EdgeKind.STREAM) & (nodes.kind[edges.source] == NodeKind.TRANSFER)
    queued &= arrives[edges.target] & (nodes.lane[edges.source] == nodes.lane[edges.target])
    draft.cut |= queued
    lag = dict(zip(edges.target[queued].tolist(), edges.lag[queued].tolist()))
    in_order = sorted(
        (int(nodes.lane[node]), int(nodes.window[node]), issued[node], called[node], node)
        for node in transfer
        if node in called
    )
    for before, after in pairwise(in_order):
        if before[:2] == after[:2]:
            draft.link(transfer[before[-1]], after[-1], EdgeKind.STREAM, lag.get(after[-1], 0))


AVERAGING_PASSES = 3.0  # flatten, divide, copy back


@dataclass(frozen=True)
class LocalUpdates(ReductionEdit):
    """Ranks train by themselves and average their parameters every k steps (local SGD)."""

    name = "local-updates"
    of_torch = True
    summary = "train ranks independently, and average parameters every k steps"
    example = "local-updates:every=4"
    needs = "gradient reductions and autograd spans, recorded by torch.profiler and dpro"
    assumes = "all parameters are averaged at once after the update, and ranks do not drift apart in between"
    source = (
        "post-local SGD (Lin et al., ICLR 2020) as in PyTorch's PeriodicModelAverager: 1/k of an "
        "averaging in each step, which is exact for the mean step; with overlap, CO2 (Sun et al., ICLR "
        "2024)"
    )
    proof = "every 4 steps, gloo"
    effort = "code"
    training = "ranks drift apart between averages, which may reduce sample efficiency"
    every: int = key("steps between averages", 4, least=1)
    overlap: str = key("yes: train on while parameters are averaged", "", choices=("yes",))
    doubt: float = 0.15

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        return [cls(4), cls(16), cls(4, "yes")]

    def changed(self, reductions: GradientReductions) -> Graph:
        """Remove the reductions from backward, and add 1/k of one of all parameters at each step's end."""
        if reductions.is_scattered or reductions.parameters.is_update_sharded:
            by = "reduce_scatter" if reductions.is_scattered else "ZeRO"
            raise Unanswerable(
                f"ranks hold shards of the optimizer's state ({by}): none can update all parameters by itself"
            )
        if self.every == 1:
            return reductions.graph
        lane = reductions.graph.nodes.lane
        last = {
            (backward.rank, backward.window, backward.step, int(lane[backward.ready[0]])): number
            for number, backward in enumerate(reductions.passes)
        }
        at_end = set(last.values())
        return with_reductions(
            reductions,
            [
                [self._averaging(reductions, backward)] if number in at_end else []
                for number, backward in enumerate(reductions.passes)
            ],
            ends_step=not self.overlap,
        )

    def is_proven(self, graph: Graph) -> bool:
        """Return whether steps wait for the averages: no other job was recorded before and after."""
        return not self.overlap and super().is_proven(graph)

    def _averaging(self, reductions: GradientReductions, backward: Pass) -> Reduction:
        last = backward.parameters.num_bytes.size - 1
        size = reductions.bytes_of(backward, 0, last)
        copying = AVERAGING_PASSES * reductions.copy_ns_per_byte * size
        return Reduction(
            0,
            last,
            size,
            float(reductions.line.moving_ns(size)) / self.every,
            reductions.line.latency_ns / self.every,
            (reductions.call_ns + copying) / self.every,
            STEP,
        )

    def describe(self) -> str:
        beside = ", overlapping the steps" if self.overlap else ""
        return f"parameters averaged every {self.every} steps, instead of gradients every step{beside}"

    def how(self) -> str:
        if self.overlap:
            return (
                f"all-reduce a copy of the parameters with async_op=True every {self.every} steps, and apply "
                "the average as an outer step once it is complete, as CO2 does; check accuracy"
            )
        return (
            "post_localSGD_hook without gradient all-reduce, and PostLocalSGDOptimizer(optimizer, "
            f"PeriodicModelAverager(period={self.every})); check accuracy"
        )


@dataclass(frozen=True)
class ReduceLast(Edit):
    """Gradients of an update are added up in each rank, and reduced in its last backward pass only."""

    name = "reduce-last"
    of_torch = True
    summary = "reduce gradients only in the last backward pass of each update"
    example = "reduce-last"
    needs = "several backward passes in an update, which reduce the same gradients, with autograd spans"
    assumes = "passes that reduce the same bytes are of one model, and memory holds its whole gradients"
    source = "ours: the graph without the reductions of earlier passes"
    of_training = True
    effort = "line"
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        redundant_reductions(facts.graph)
        return [cls()]

    def bound(self, facts: RunFacts) -> float:
        return facts.idle_without_communication

    def apply(self, graph: Graph) -> Graph:
        """Remove the reductions of all passes but the last, and their calls."""
        return without(graph, redundant_reductions(graph))

    def describe(self) -> str:
        return "gradients reduced once in each update"

    def how(self) -> str:
        return "model.no_sync() around all but the last pass of an update (FSDP2: set_requires_gradient_sync)"


@computed_once
def _spans_in_vain(graph: Graph) -> pl.DataFrame:
    assert graph.run is not None
    return repeated_reduction_spans(graph.run)


def redundant_reductions(graph: Graph) -> Bools:
    """Return [N] a mask of reductions of gradients that are reduced again before use, with their descendants.

    Raises:
        Unanswerable: there are none.
    """
    if graph.run is None:
        raise Unanswerable("which gradients a rank reduces is not known of a condensed run")

    nodes, spans = graph.nodes, _spans_in_vain(graph)
    if spans.is_empty():
        raise Unanswerable("gradients are reduced once in each update")
    of_nodes = pl.DataFrame({"rank": nodes.rank, "span_id": nodes.span}).with_row_index("node")
    vain, launches = np.zeros(graph.num_nodes, np.bool_), Launches(graph)
    vain[
        of_nodes.join(spans.cast({"rank": of_nodes.schema["rank"]}), on=["rank", "span_id"])[
            "node"
        ].to_numpy()
    ] = True
    vain[launches.transfer[vain[launches.source]]] = True
    return with_descendants(graph, vain)


@dataclass(frozen=True)
class Overlap(ReductionEdit):
    """Gradients are reduced after backward, or during the next step."""

    name = "overlap"
    of_torch = True
    summary = "reduce gradients after backward (off), or during the next step (full)"
    example = "overlap:mode=full"
    needs = "gradient reductions and autograd spans, recorded by torch.profiler and dpro"
    assumes = "with full overlap, the update can use the gradients of the step before"
    source = "ours; full overlap uses gradients one step old, as in Pipe-SGD (Li et al., NeurIPS 2018)"
    proof = "after backward and a step late, gloo"
    effort = "code"
    training = "gradients are one step old, which may reduce sample efficiency"
    mode: str = key("off: after backward; full: during the next step", choices=("off", "full"))
    doubt: float = 0.15

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        return [cls("full"), cls("off")]

    def changed(self, reductions: GradientReductions) -> Graph:
        """Call all reductions after the last gradient, or wait for them one pass later."""
        wanted = self.wanted(reductions)
        return with_reductions(reductions, wanted, next_of_rank(reductions) if self.mode == "full" else None)

    def wanted(self, reductions: GradientReductions) -> Sequence[Sequence[Reduction]]:
        plain = [plain_reductions(reductions, backward, backward.closes) for backward in reductions.passes]
        if self.mode == "full":
            return plain
        return [[replace(bucket, called_after=buckets[-1].last) for bucket in buckets] for buckets in plain]

    def describe(self) -> str:
        return (
            "gradients reduced after backward" if self.mode == "off" else "gradients awaited one step later"
        )

    def setting(self, reductions: GradientReductions) -> str:
        return no_overlap_setting(framework_of(reductions.graph.run)) if self.mode == "off" else NOT_THERE

    def how(self) -> str:
        if self.mode == "off":
            return "not a remedy: shows the gain of overlap; DDP with one bucket for all gradients does this"
        return "use an optimizer that applies gradients one step late; check accuracy"
