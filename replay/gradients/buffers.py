"""Backward passes of DeepSpeed: gradients fill a buffer, which is reduced before one that no longer fits.

In: a graph and its run, which says what was in each buffer (table `buckets`). Out: the same passes as of a
recorded DDP job. The reductions of a pass are the recorded buffers, one after the other; a buffer is reduced
within the hook of the gradient that comes after it, and the last one after backward. Where DeepSpeed reduces
after backward alone (ZeRO 1 without overlap), gradients are ready for it then, in the order of the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.replay.gradients.inferred import divided, given_passes, gradient_calls, is_same_bucket
from dpro.replay.gradients.passes import ACCUMULATE, Launches, Parameters, Pass, calls_of, passes_at
from dpro.replay.graph import Graph
from dpro.schema import BUCKETS, SPANS
from dpro.store import Run

SOURCE = "DeepSpeed"
AFTER_BACKWARD = "after backward"
PLACE = ["rank", "window", "tid"]


@dataclass(frozen=True)
class Buffers:
    """What a job reduces in each pass.

    Attributes:
        num_bytes: of each buffer.
        sizes: of the gradients in each, in order.
        shapes: of all gradients, in order.
        after_backward: whether no reduction begins before backward has ended.
        is_zero: whether ranks share out at least the states of the optimizer.
    """

    num_bytes: list[int]
    sizes: list[list[int]]
    shapes: tuple[tuple[int, ...], ...]
    after_backward: bool
    is_zero: bool

    @property
    def num_gradients(self) -> int:
        """Of a pass."""
        return sum(len(sizes) for sizes in self.sizes)


def buffered_passes(graph: Graph) -> list[Pass]:
    """Backward passes that reduce gradients, of all ranks, in order of time on each.

    Raises:
        Unanswerable: the run has no buffers of DeepSpeed, or what was seen does not fit them.
    """
    if graph.run is None:
        raise Unanswerable("the graph has no run")
    buffers, calls = buffers_of(graph.run), gradient_calls(graph.run)
    kinds = set(calls.select("op", "group").iter_rows())
    launches = Launches(graph, np.array([(message.op, message.group) in kinds for message in graph.messages]))
    spans = graph.run.table(SPANS, [*PLACE, "span_id", "name", "start_ns", "duration_ns"])
    ready = spans.filter(pl.col("name") == ACCUMULATE).sort("start_ns")
    ready = ready.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    issued = calls_of(graph)
    found: list[Pass] = []
    for place, of_thread in calls.group_by(PLACE, maintain_order=True):
        here = ready.filter(pl.all_horizontal(pl.col(name) == at for name, at in zip(PLACE, place)))
        turns = turns_of(of_thread.sort("at"), buffers)
        moments = pl.concat([gradient_moments(turn, here, buffers) for turn in turns])
        moments = moments.with_columns(**dict(zip(PLACE, map(pl.lit, place))))
        given = [
            (number * buffers.num_gradients, _parameters(turn, buffers)) for number, turn in enumerate(turns)
        ]
        found += passes_at(graph, launches, issued, moments, partial(given_passes, given))
    if not found:
        raise Unanswerable("no backward pass in the run reduces gradients in whole steps")
    return sorted(found, key=lambda each: (each.rank, each.window, each.step, int(each.ready[0])))


def buffers_of(run: Run) -> Buffers:
    """What the job said that it reduces in each pass.

    Raises:
        Unanswerable: nothing, or experts apart, whose reductions are in another group.
    """
    rows = run.table(BUCKETS).filter(pl.col("source").str.starts_with(SOURCE))
    if rows.is_empty():
        raise Unanswerable("the run does not say what DeepSpeed reduces together")
    of_rank = rows.filter(pl.col("rank") == pl.col("rank").min()).sort("bucket")
    if of_rank["module"].n_unique() > 1:
        raise Unanswerable("DeepSpeed reduces experts or several models apart")
    shapes = tuple(tuple(shape) for each in of_rank["shapes"].to_list() for shape in each)
    sizes = [[int(size) for size in each] for each in of_rank["parameter_bytes"].to_list()]
    source = str(of_rank["source"][0])
    is_zero = source.startswith(f"{SOURCE} ZeRO")
    return Buffers(of_rank["bytes"].to_list(), sizes, shapes, source.endswith(AFTER_BACKWARD), is_zero)


def turns_of(calls: pl.DataFrame, buffers: Buffers) -> list[pl.DataFrame]:
    """Calls of a thread, pass by pass.

    Args:
        calls: in order, as of `gradient_calls`.

    Raises:
        Unanswerable: they are not the recorded buffers, one after the other.
    """
    count = len(buffers.num_bytes)
    turns = [
        each.slice(first, count)
        for each in calls.partition_by("step", maintain_order=True)
        for first in range(0, each.height, count)
    ]
    for turn in turns:
        moved = turn["bytes"].to_list()
        fits = [
            num_bytes < 0 or is_same_bucket(num_bytes, said)
            for num_bytes, said in zip(moved, buffers.num_bytes)
        ]
        if len(moved) != count or not all(fits):
            raise Unanswerable("the reductions seen do not fit the buffers of DeepSpeed that were recorded")
    return turns


def gradient_moments(turn: pl.DataFrame, ready: pl.DataFrame, buffers: Buffers) -> pl.DataFrame:
    """[P] the moments at which the gradients of a pass are ready, in order: `span_id`, `start_ns`, `end_ns`.

    Args:
        turn: the calls of the pass, in order.
        ready: accumulations of gradients on the thread, in order.

    Raises:
        Unanswerable: the pass has other gradients than the buffers.
    """
    begun, ended = turn["start_ns"].to_numpy(), turn["end_ns"].to_numpy()
    last = np.cumsum([len(sizes) for sizes in buffers.sizes]) - 1
    since = turn["since"][0]
    within = ready.filter((pl.col("start_ns") > since) & (pl.col("start_ns") < int(begun[-1])))
    if buffers.after_backward:
        before = max([since, *within["end_ns"].to_list()])
        start = np.repeat(np.append(min(before, int(begun[0])), ended[:-1]), np.diff(last, prepend=-1))
        end = start.copy()
        start[last], end[last] = begun, ended
        span = np.repeat(turn["span_id"].to_numpy(), np.diff(last, prepend=-1))
        return pl.DataFrame({"span_id": span, "start_ns": start, "end_ns": end})
    if within.height != buffers.num_gradients:
        raise Unanswerable(f"a pass has {within.height} gradients, not the {buffers.num_gradients} recorded")
    start, end = within["start_ns"].to_numpy().copy(), within["end_ns"].to_numpy().copy()
    _fit(start, end, last, begun, ended)
    return pl.DataFrame({"span_id": within["span_id"], "start_ns": start, "end_ns": end})


def _fit(start: Ints, end: Ints, last: Ints, begun: Ints, ended: Ints) -> None:
    """Have each call lie in the moment of the last gradient of its buffer, and the next one begin behind it.

    Args:
        start, end: [P] ns, of the moments; changed in place.
        last: [B] the last gradient of each buffer.
        begun, ended: [B] ns, of its call.

    Raises:
        Unanswerable: a call came before its last gradient.
    """
    early: Bools = begun < start[last]
    if early.any():
        raise Unanswerable("a buffer was reduced before all the gradients recorded in it were ready")
    end[last] = np.maximum(end[last], ended)
    behind = last[:-1] + 1
    start[behind] = np.maximum(start[behind], ended[:-1])
    end[behind] = np.maximum(end[behind], start[behind])


def _parameters(turn: pl.DataFrame, buffers: Buffers) -> Parameters:
    """What a pass reduces: sizes as recorded, in the type and with the padding of the reductions."""
    sizes = [
        divided(moved, sizes) if moved > 0 else sizes
        for moved, sizes in zip(turn["bytes"].to_list(), buffers.sizes)
    ]
    whole = np.array([size for each in sizes for size in each], np.int64)
    return Parameters(whole, buffers.shapes, closes_before=True, is_update_shared_out=buffers.is_zero)
