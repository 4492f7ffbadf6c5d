"""Contents of each gradient reduction: recorded where the framework reports them, else inferred.

Takes a graph and its run, from any profiler; returns the passes that edits change, as of a recorded DDP job.

DeepSpeed fills a buffer with gradients and reduces it before a gradient that no longer fits; table `buckets`
records the contents of each buffer. The reductions of a pass are the recorded buffers in order: each is
reduced within the hook of the gradient that follows it, and the last one after backward. Where DeepSpeed
reduces only after backward (ZeRO 1 without overlap), gradients count as ready then, in buffer order.

Otherwise a gradient reduction is an all-reduce or reduce-scatter called in a step after its first backward
operator starts, and of a kind that the forward pass does not call: those reduce activations or statistics.
Of several groups of a rank, the one that moves most bytes counts. A reduction contains the gradients that
autograd accumulated on the calling thread since the previous reduction, or only the last of them where their
shapes account for all bytes moved. Without any, as when the optimizer calls the reduction, it counts as one
gradient. Sizes follow from shapes, or from recorded buckets that match in number and bytes. Else the bytes of
a reduction are divided evenly, which leaves open when they are ready; `with_other_sizes` gives both extremes.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.classify import REDUCTIONS
from dpro.errors import Unanswerable
from dpro.replay.alignment.match import group_label
from dpro.replay.gradient_passes import (
    ACCUMULATE,
    Launches,
    Parameters,
    Pass,
    calls_of,
    in_order,
    parameters_of,
    passes_at,
    passes_of,
)
from dpro.replay.graph import Graph, computed_once
from dpro.replay.kept import kept_as
from dpro.schema import BUCKETS, COLLECTIVES, SPANS, STEPS
from dpro.store import Run

EVALUATE = "autograd::engine::evaluate_function: "
SIZED = ("torch::autograd::AccumulateGrad", "torch::distributed::reducer::mul_out")
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
UPDATE = "Optimizer.step#"  # torch's prefix for the range of an update
FILLING = r"distributed\S*::reducer::|ddp\.reducer::|^FSDP::post_backward_reduce"
TINY_BYTES = 64  # an all-reduce after backward up to this size is a norm, a loss or a flag
MIN_SHARE = 0.1  # share of a group's bytes in forward from which it reduces activations
PADDING = 0.05  # share of padding that a reduction may add to its gradients
PLACE = ["rank", "window", "tid"]
AUTOGRAD = ["sequence_number", "forward_thread"]
NO_BACKWARD = (
    "the run does not show a backward pass: it holds no autograd spans; record with torch.profiler or "
    "`dpro record`"
)


def inferred_passes(graph: Graph) -> list[Pass]:
    """Return the inferred backward passes that reduce gradients, of all ranks, in order of time on each.

    Raises:
        Unanswerable: the run shows no backward pass, or none that reduces gradients.
    """
    if graph.run is None:
        raise Unanswerable(NO_BACKWARD)
    calls, moments = _moments(graph)
    kinds = set(calls.select("op", "group").iter_rows())
    launches = Launches(graph, kinds)
    issued = calls_of(graph)
    reduced = []
    for _, of_thread in moments.group_by(PLACE, maintain_order=True):
        of_thread = of_thread.sort("start_ns")
        passes = [
            (int(of_step["first"][0]), _inferred_parameters(of_step))
            for of_step in of_thread.with_row_index("first").partition_by("step", maintain_order=True)
        ]
        reduced += passes_at(graph, launches, issued, of_thread, partial(given_passes, passes))
    if not reduced:
        raise Unanswerable("no backward pass in the run reduces gradients in whole steps")
    return in_order(reduced)


def given_passes(passes: list[tuple[int, Parameters]], step: Ints) -> list[tuple[int, Parameters]]:
    """Return `passes` unchanged; a `split` for `passes_at` that ignores the steps of nodes."""
    return passes


def gradient_calls(run: Run) -> pl.DataFrame:
    """Return the calls that reduce gradients, in order on each thread.

    Returns:
        `PLACE`, `step`, `op`, `group`, `bytes` (-1 where unknown), `dtype`, `at` (start of the launch, ns),
        `launch_span_id`, `span_id`, `start_ns` and `end_ns` of the call, and `since` (start of the last
        forward operator before it, ns).

    Raises:
        Unanswerable: the run shows no backward pass, or no reduction of gradients.
    """
    calls = _reductions(run)
    spans = run.table(SPANS, [*PLACE, "kind", "name", "start_ns", "duration_ns", *AUTOGRAD])
    spans = spans.filter(pl.col("kind") == "cpu_op")
    backward = spans.filter((pl.col("forward_thread") > 0) | pl.col("name").str.starts_with(EVALUATE))
    if backward.is_empty():
        raise Unanswerable(NO_BACKWARD)
    backward = _in_steps(run, backward.rename({"start_ns": "at"}))
    turns = backward.group_by("rank", "step").agg(
        turn=pl.col("at").min(), over=(pl.col("at") + pl.col("duration_ns")).max()
    )
    calls = calls.join(turns, on=["rank", "step"])
    kind = ["op", "group", "bytes"]
    early = calls.filter(pl.col("at") < pl.col("turn"))
    calls = calls.filter(pl.col("at") >= pl.col("turn")).join(early, on=kind, how="anti")
    if calls["group"].n_unique() > 1:
        # Groups with a large share of their bytes in forward reduce activations.
        both = pl.concat([early.with_columns(early=True), calls.with_columns(early=False)])
        num_bytes = pl.col("bytes").clip(0)
        share = num_bytes.filter("early").sum() / num_bytes.sum().clip(1)
        of_activations = both.group_by("group").agg(share=share).filter(pl.col("share") >= MIN_SHARE)["group"]
        calls = calls.filter(~pl.col("group").is_in(of_activations.to_list()))
    behind = (pl.col("at") > pl.col("over")) & (pl.col("op") == "all_reduce")
    calls = calls.filter(~(behind & pl.col("bytes").is_between(0, TINY_BYTES)))
    if calls.is_empty():
        raise Unanswerable("the run has no gradient reduction during or after a backward pass")
    kind = ["rank", "op", "group"]
    most = calls.group_by(kind).agg(pl.col("bytes").clip(0).sum(), pl.len())
    most = most.sort("bytes", "len", *kind, descending=[True, True, False, False, False])
    calls = calls.join(most.unique("rank", keep="first", maintain_order=True).select(kind), on=kind)
    return _with_last_forward(calls, spans).sort(*PLACE, "at")


def repeated_reduction_spans(run: Run) -> pl.DataFrame:
    """Return `rank`, `span_id` of reductions that a later backward pass of the same update repeats.

    Includes the spans that fill and empty their buckets. A pass is the backward operators between two forward
    ones, and the calls from its first operator on. Passes of one update that reduce the same bytes in the
    same order reduce the same gradients, unless as many modules have buckets of these bytes.

    Raises:
        Unanswerable: there are no reductions of gradients.
    """
    columns = [*PLACE, "span_id", "kind", "name", "start_ns", "duration_ns", *AUTOGRAD]
    spans = run.table(SPANS, columns).with_columns(at="start_ns").sort("at")
    updates = spans.filter(pl.col("name").str.starts_with(UPDATE))
    updates = updates.select("rank", "window", "at", update=pl.int_range(pl.len()).over("rank", "window"))
    calls, by = gradient_calls(run).sort("at").drop("since"), ["rank", "window"]
    calls = calls.join_asof(updates, on="at", by=by, check_sortedness=False)
    backward = spans.filter((pl.col("forward_thread") > 0) | pl.col("name").str.starts_with(EVALUATE))
    calls = calls.join_asof(backward.select(*by, "at", begun="at"), on="at", by=by, check_sortedness=False)
    calls = _with_last_forward(calls.with_columns(at="begun"), spans.drop("at"))
    of_pass = [*by, "step", "since", pl.col("update").fill_null(-1)]
    passes = calls.group_by(of_pass).agg(pl.struct("op", "group", "bytes").alias("calls"))
    later = (pl.len() - 1 - pl.int_range(pl.len())).over([*by, "step", "update", "calls"], order_by="since")
    passes = passes.with_columns(vain=later >= _modules(run, passes["calls"].to_list())).sort("since")
    fills = spans.filter((pl.col("kind") != "gpu_annotation") & pl.col("name").str.contains(FILLING))
    fills = fills.join_asof(passes, left_on="at", right_on="since", by=by, check_sortedness=False)
    called = calls.join(passes, on=[*by, "since"]).select("rank", "vain", span_id="launch_span_id")
    both = pl.concat([called, fills.select("rank", "vain", "span_id")])
    return both.filter("vain").select("rank", "span_id").unique().sort("rank", "span_id")


def _modules(run: Run, passes: list[list[dict[str, int]]]) -> pl.Series:
    """Return [passes] the number of modules whose buckets have the bytes of each pass; at least 1."""
    buckets = run.table(BUCKETS, ["rank", "module", "bucket", "bytes"])
    buckets = buckets.filter(pl.col("rank") == pl.col("rank").min())
    sizes = buckets.group_by("module").agg(pl.col("bytes").sort())["bytes"].to_list()
    reduces = [sorted(call["bytes"] for call in calls) for calls in passes]
    return pl.Series([max(sizes.count(num_bytes), 1) for num_bytes in reduces], dtype=pl.Int64)


def _reductions(run: Run) -> pl.DataFrame:
    """Return all reductions launched in a whole step, with the span that called each."""
    rows = run.table(COLLECTIVES).filter(
        pl.col("op").is_in(REDUCTIONS) & (pl.col("window") >= 0) & (pl.col("launch_span_id") >= 0)
    )
    spans = run.table(SPANS, ["rank", "window", "tid", "span_id", "name", "start_ns", "duration_ns"])
    launched = spans.select("rank", "window", "tid", "span_id", at="start_ns", lasts="duration_ns")
    rows = rows.select("rank", "window", "op", "dtype", "launch_span_id", group=group_label(),
                       bytes=pl.max_horizontal("bytes_in", "bytes_out"))  # fmt: skip
    rows = rows.join(
        launched, left_on=["rank", "window", "launch_span_id"], right_on=["rank", "window", "span_id"]
    )
    called = spans.filter(pl.col("name").str.starts_with("c10d::")).select(
        *PLACE, "start_ns", "span_id", end_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    rows = _with_last_event(rows, called)
    inside = pl.col("end_ns") >= pl.col("at")
    rows = rows.with_columns(
        start_ns=pl.when(inside).then("start_ns").otherwise("at"),
        span_id=pl.when(inside).then("span_id").otherwise("launch_span_id"),
        end_ns=pl.when(inside).then("end_ns").otherwise(pl.col("at") + pl.col("lasts")),
    )
    return _in_steps(run, rows)


def _with_last_event(rows: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Join to each row the last event of its thread that began no later than `at`."""
    return rows.sort("at").join_asof(
        events.sort("start_ns"), left_on="at", right_on="start_ns", by=PLACE, strategy="backward",
        check_sortedness=False, coalesce=False,
    )  # fmt: skip


def _in_steps(run: Run, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows whose `at` is in a step of their rank, with `step`."""
    steps = run.table(STEPS, ["rank", "step", "start_ns", "duration_ns"]).select(
        "rank", "step", begin="start_ns", over=pl.col("start_ns") + pl.col("duration_ns")
    )
    stepped = rows.sort("at").join_asof(
        steps.sort("begin"), left_on="at", right_on="begin", by="rank", strategy="backward",
        check_sortedness=False,
    )  # fmt: skip
    return stepped.filter(pl.col("at") < pl.col("over")).drop("begin", "over")


def _with_last_forward(calls: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Add `since`, the start of the last forward operator: gradients ready before it belong to another pass.

    Forward operators within backward ones recompute activations, and begin no pass.
    """
    forward = spans.filter((pl.col("sequence_number") >= 0) & (pl.col("forward_thread") <= 0))
    forward = forward.select(*PLACE, at="start_ns", since="start_ns")
    evaluated = spans.filter(pl.col("name").str.starts_with(EVALUATE)).select(
        *PLACE, "start_ns", ends=pl.col("start_ns") + pl.col("duration_ns")
    )
    inside = _with_last_event(forward, evaluated)
    forward = inside.filter((pl.col("ends") < pl.col("at")).fill_null(True)).select("rank", "window", "since")
    return calls.sort("at").join_asof(
        forward.sort("since"), left_on="at", right_on="since", by=["rank", "window"], strategy="backward",
        check_sortedness=False, coalesce=False,
    ).with_columns(pl.col("since").fill_null(-1))  # fmt: skip


@computed_once
def _moments(graph: Graph) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return `gradient_calls`, and the moments at which gradients are ready, for `passes_at`.

    Returns:
        Of the moments, one row per gradient: `PLACE`, `step`, `span_id`, `start_ns`, `end_ns`, `call` (number
        of the reduction), its `bytes` and `dtype`, `shape` of the gradient (JSON, null where unknown), and
        `size`: its recorded size, -1 where unknown.
    """
    run = graph.run
    assert run is not None
    reductions = gradient_calls(run)
    calls = reductions.with_row_index("call")
    spans = run.table(
        SPANS, ["rank", "window", "tid", "span_id", "name", "start_ns", "duration_ns", "shapes"]
    )
    ready = spans.filter(pl.col("name") == ACCUMULATE).with_columns(
        end_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    # The shape of a gradient is that of an operator within its accumulation.
    said = spans.filter(pl.col("name").is_in(SIZED) & (pl.col("shapes") != ""))
    said = said.select(*PLACE, "shapes", at="start_ns")
    shapes = _with_last_event(said, ready.select(*PLACE, "span_id", "start_ns", "end_ns"))
    shapes = shapes.filter(pl.col("at") < pl.col("end_ns"))
    shapes = shapes.group_by("rank", "span_id").agg(shape=pl.col("shapes").sort_by("at").first())
    ready = ready.drop("shapes", "name", "duration_ns").join(shapes, on=["rank", "span_id"], how="left")
    of_call = calls.select(*PLACE, "step", "call", "at", "since", "bytes", "dtype", call_end="end_ns")
    members = ready.sort("start_ns").join_asof(
        of_call.sort("at"), left_on="start_ns", right_on="at", by=PLACE, strategy="forward",
        check_sortedness=False, coalesce=False,
    ).filter(pl.col("start_ns") > pl.col("since"))  # fmt: skip
    members = members.filter(pl.col("start_ns") >= _first_that_fits(members))
    last = pl.col("start_ns") == pl.col("start_ns").max().over("call")
    members = members.with_columns(end_ns=pl.when(last).then("call_end").otherwise("end_ns"))
    alone = calls.join(members, on="call", how="anti")
    alone = alone.join(spans.select("rank", "span_id", "shapes"), on=["rank", "span_id"])
    moved = [_shape_of_bytes(*row) for row in alone.select("shapes", "bytes", "dtype").iter_rows()]
    alone = alone.with_columns(shape=pl.Series(moved, dtype=pl.String))
    columns = [*PLACE, "step", "span_id", "start_ns", "end_ns", "call", "bytes", "dtype", "shape"]
    moments = pl.concat([members.select(columns), alone.select(columns)]).sort(*PLACE, "start_ns")
    return reductions, _with_recorded(run, moments)


def _shape_of_bytes(text: str, num_bytes: int, dtype: str) -> str | None:
    """Return the input shape of a call that amounts to `num_bytes`, as JSON; None if no known shape does."""
    for shape in json.loads(text) if text else []:
        is_known = shape and all(isinstance(size, int) for size in shape)
        if is_known and math.prod(shape) * ITEM_BYTES.get(dtype, 0) == num_bytes:
            return json.dumps([shape])
    return None


def _first_that_fits(members: pl.DataFrame) -> pl.Series:
    """Return [M] the ns from which a reduction's last gradients account for all its bytes; 0 for none."""
    shapes = {text: _shape(text) for text in members["shape"].drop_nulls().unique()}
    elements = {text: -1 if shape is None else math.prod(shape) for text, shape in shapes.items()}
    item = pl.col("dtype").replace_strict(ITEM_BYTES, default=0, return_dtype=pl.Int64)
    num_bytes = pl.col("shape").replace_strict(elements, default=-1, return_dtype=pl.Int64) * item
    ordered = members.with_row_index("row").sort("start_ns", descending=True)
    are_known = (num_bytes > 0).cum_min().over("call")
    fits = are_known & (num_bytes.cum_sum().over("call") == pl.col("bytes"))
    first = pl.when(fits).then("start_ns").max().over("call").fill_null(0)
    return ordered.with_columns(first=first).sort("row")["first"]


def _with_recorded(run: Run, moments: pl.DataFrame) -> pl.DataFrame:
    """Add `size` to moments: the recorded size of each gradient, -1 where the job recorded no fitting bucket.

    A bucket fits a reduction with equal number of parameters and proportional bytes (a reduction may use
    another precision, and padding). Where several different buckets fit, none is used.
    """
    rows = run.table(BUCKETS).filter(pl.col("parameter_bytes").list.len() > 0)
    rows = rows.filter(pl.col("rank") == pl.col("rank").min())
    forward = pl.col("source").str.starts_with("FSDP")  # others list them in order of readiness
    rows = rows.with_columns(
        sizes=pl.when(forward).then(pl.col("parameter_bytes").list.reverse()).otherwise("parameter_bytes")
    )
    buckets = [
        (int(row[0]), [int(size) for size in row[1]]) for row in rows.select("bytes", "sizes").iter_rows()
    ]
    recorded: list[int] = []
    for _, of_call in groupby(moments.select("call", "bytes").iter_rows(), key=lambda row: row[0]):
        num_bytes, *others = [row[1] for row in of_call]
        count = 1 + len(others)
        sizes = {
            tuple(bucket)
            for total, bucket in buckets
            if len(bucket) == count and is_same_bucket(num_bytes, total)
        }
        recorded += sizes.pop() if len(sizes) == 1 else [-1] * count
    return moments.with_columns(size=pl.Series(recorded, dtype=pl.Int64))


def is_same_bucket(num_bytes: int, recorded: int) -> bool:
    """Return whether a reduction fits a bucket of `recorded` bytes, in the same or another element type."""
    return any(0 <= num_bytes / max(recorded * times, 1) - 1 <= PADDING for times in (0.25, 0.5, 1, 2))


def _inferred_parameters(moments: pl.DataFrame) -> Parameters:
    """Return the parameters that a pass reduces, from the moments of its gradients."""
    sizes: list[int] = []
    shapes: list[tuple[int, ...]] = []
    are_known = True
    calls: dict[int, list[_Moment]] = {}
    for call, *rest in moments.select("call", *_Moment._fields).iter_rows():
        calls.setdefault(call, []).append(_Moment(*rest))
    for of_call in calls.values():
        num_bytes = of_call[0].bytes
        weights = _known_sizes(of_call, num_bytes)
        are_known &= weights is not None
        given = weights or [1] * len(of_call)
        sizes += divided(max(num_bytes, len(of_call)), given)
        shapes += _shapes_of(of_call)
    complete = len(shapes) == len(sizes)
    return Parameters(np.array(sizes, np.int64), tuple(shapes) if complete else (), "", False, are_known)


class _Moment(NamedTuple):
    """One gradient: bytes and element type of its reduction, and its own shape and recorded size."""

    bytes: int
    dtype: str
    shape: str | None
    size: int


def _known_sizes(of_call: list[_Moment], num_bytes: int) -> list[int] | None:
    """Return the relative sizes of the gradients of one reduction; None where they are unknown."""
    if len(of_call) == 1:
        return [1]
    if all(moment.size >= 0 for moment in of_call):
        return [moment.size for moment in of_call]
    shapes = _shapes_of(of_call)
    elements = [math.prod(shape) for shape in shapes]
    item = ITEM_BYTES.get(of_call[0].dtype)
    if len(elements) < len(of_call) or item is None or num_bytes <= 0:
        return None
    return elements if 0 <= num_bytes / max(sum(elements) * item, 1) - 1 <= PADDING else None


def _shapes_of(of_call: list[_Moment]) -> list[tuple[int, ...]]:
    """Return the known shapes of gradients; unknown ones are left out."""
    read = [_shape(moment.shape) for moment in of_call if moment.shape is not None]
    return [shape for shape in read if shape is not None]


def _shape(text: str) -> tuple[int, ...] | None:
    """Return the shape of an operator's first input; None where that is not a tensor."""
    listed = json.loads(text)
    if not listed or not isinstance(listed[0], list) or not all(isinstance(size, int) for size in listed[0]):
        return None
    return tuple(listed[0])


def divided(total: int, parts: list[int]) -> list[int]:
    """Divide a total into integers in proportion to `parts`, with nothing left over.

    Args:
        parts: at least one above 0.
    """
    ends = np.rint(np.cumsum(parts, dtype=np.float64) * (total / sum(parts))).astype(np.int64)
    return [int(size) for size in np.diff(ends, prepend=0)]


def with_other_sizes(inferred: Pass, where: int) -> Pass:
    """Return a pass with its unknown sizes distributed as unevenly as possible.

    Args:
        where: 0 gives all bytes of each reduction to its first gradient, -1 to its last.
    """
    if inferred.parameters.are_sizes_known:
        return inferred
    sizes: Ints = np.ones_like(inferred.parameters.num_bytes)
    first = 0
    for last in inferred.closes.tolist():
        total = int(inferred.parameters.num_bytes[first : last + 1].sum())
        sizes[first if where == 0 else last] += max(total - (last + 1 - first), 0)
        first = last + 1
    return replace(inferred, parameters=replace(inferred.parameters, num_bytes=sizes))


SOURCE = "DeepSpeed"
AFTER_BACKWARD = "after backward"


@dataclass(frozen=True)
class Buffers:
    """The buffers that a DeepSpeed job reduces in each pass.

    Attributes:
        num_bytes: bytes of each buffer.
        sizes: bytes of the gradients in each buffer, in order.
        shapes: shapes of all gradients, in order.
        after_backward: whether reductions begin only after backward has ended.
        is_zero: whether at least the optimizer states are sharded over ranks.
    """

    num_bytes: list[int]
    sizes: list[list[int]]
    shapes: tuple[tuple[int, ...], ...]
    after_backward: bool
    is_zero: bool

    @property
    def num_gradients(self) -> int:
        """Number of gradients in a pass."""
        return sum(len(sizes) for sizes in self.sizes)


def buffered_passes(graph: Graph) -> list[Pass]:
    """Return the backward passes that reduce buffers of DeepSpeed, of all ranks, in order of time on each.

    Raises:
        Unanswerable: the run has no DeepSpeed buffers, or its calls do not fit them.
    """
    if graph.run is None:
        raise Unanswerable("the graph has no run")
    buffers, calls = buffers_of(graph.run), gradient_calls(graph.run)
    kinds = set(calls.select("op", "group").iter_rows())
    launches = Launches(graph, kinds)
    spans = graph.run.table(SPANS, [*PLACE, "span_id", "name", "start_ns", "duration_ns"])
    ready = spans.filter(pl.col("name") == ACCUMULATE).sort("start_ns")
    ready = ready.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    issued = calls_of(graph)
    passes: list[Pass] = []
    for place, of_thread in calls.group_by(PLACE, maintain_order=True):
        here = ready.filter(pl.all_horizontal(pl.col(name) == value for name, value in zip(PLACE, place)))
        turns = calls_by_pass(of_thread.sort("at"), buffers)
        moments = pl.concat([gradient_moments(turn, here, buffers) for turn in turns])
        moments = moments.with_columns(**dict(zip(PLACE, map(pl.lit, place))))
        given = [
            (number * buffers.num_gradients, _parameters(turn, buffers)) for number, turn in enumerate(turns)
        ]
        passes += passes_at(graph, launches, issued, moments, partial(given_passes, given))
    if not passes:
        raise Unanswerable("no backward pass in the run reduces gradients in whole steps")
    return in_order(passes)


def buffers_of(run: Run) -> Buffers:
    """Return the recorded DeepSpeed buffers of a run.

    Raises:
        Unanswerable: none are recorded, or separate ones for experts, whose reductions are in another group.
    """
    rows = run.table(BUCKETS).filter(pl.col("source").str.starts_with(SOURCE))
    if rows.is_empty():
        raise Unanswerable("the run does not record which gradients DeepSpeed reduces together")
    of_rank = rows.filter(pl.col("rank") == pl.col("rank").min()).sort("bucket")
    if of_rank["module"].n_unique() > 1:
        raise Unanswerable("DeepSpeed reduces experts or several models separately")
    shapes = tuple(tuple(shape) for listed in of_rank["shapes"].to_list() for shape in listed)
    sizes = [[int(size) for size in buffer] for buffer in of_rank["parameter_bytes"].to_list()]
    source = str(of_rank["source"][0])
    is_zero = source.startswith(f"{SOURCE} ZeRO")
    return Buffers(of_rank["bytes"].to_list(), sizes, shapes, source.endswith(AFTER_BACKWARD), is_zero)


def calls_by_pass(calls: pl.DataFrame, buffers: Buffers) -> list[pl.DataFrame]:
    """Split the calls of a thread into passes.

    Args:
        calls: rows of `gradient_calls`, in order.

    Raises:
        Unanswerable: the calls are not the recorded buffers in order.
    """
    count = len(buffers.num_bytes)
    turns = [
        of_step.slice(first, count)
        for of_step in calls.partition_by("step", maintain_order=True)
        for first in range(0, of_step.height, count)
    ]
    for turn in turns:
        moved = turn["bytes"].to_list()
        fits = [
            num_bytes < 0 or is_same_bucket(num_bytes, said)
            for num_bytes, said in zip(moved, buffers.num_bytes)
        ]
        if len(moved) != count or not all(fits):
            raise Unanswerable("the reductions do not match the recorded buffers of DeepSpeed")
    return turns


def gradient_moments(turn: pl.DataFrame, ready: pl.DataFrame, buffers: Buffers) -> pl.DataFrame:
    """Return [P] the moments at which the gradients of a pass are ready: `span_id`, `start_ns`, `end_ns`.

    Args:
        turn: the calls of the pass, in order.
        ready: accumulations of gradients on the thread, in order.

    Raises:
        Unanswerable: the gradients of the pass do not match the buffers.
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
    # A call is within the moment of its buffer's last gradient; the next moment begins after the call.
    early: Bools = begun < start[last]
    if early.any():
        raise Unanswerable("a buffer was reduced before all the gradients recorded in it were ready")
    end[last] = np.maximum(end[last], ended)
    behind = last[:-1] + 1
    start[behind] = np.maximum(start[behind], ended[:-1])
    end[behind] = np.maximum(end[behind], start[behind])
    return pl.DataFrame({"span_id": within["span_id"], "start_ns": start, "end_ns": end})


def _parameters(turn: pl.DataFrame, buffers: Buffers) -> Parameters:
    """Return what a pass reduces: recorded sizes, in the element type and with the padding of its calls."""
    sizes = [
        divided(moved, sizes) if moved > 0 else sizes
        for moved, sizes in zip(turn["bytes"].to_list(), buffers.sizes)
    ]
    whole = np.array([size for buffer in sizes for size in buffer], np.int64)
    return Parameters(whole, buffers.shapes, closes_before=True, is_update_sharded=buffers.is_zero)


# Passes of any framework.

RECORDS = {"Parameters": Parameters, "Pass": Pass}


def gradient_passes(graph: Graph) -> list[Pass]:
    """Return the backward passes that reduce gradients, of all ranks, in order of time on each.

    Raises:
        Unanswerable: gradients go through a communication hook, or no pass was found; the message says why.
    """
    return list(_gradient_passes(graph))


@kept_as("gradient-passes", RECORDS)
def _gradient_passes(graph: Graph) -> list[Pass]:
    rows = graph.run.table(BUCKETS) if graph.run is not None else BUCKETS.empty()
    hooks = rows.filter(pl.col("hook") != "")["hook"]
    if hooks.len():
        raise Unanswerable(f"gradients already go through a communication hook ({hooks[0]})")
    with suppress(Unanswerable):
        return passes_of(graph, parameters_of(graph.run))
    with suppress(Unanswerable):
        return buffered_passes(graph)
    return inferred_passes(graph)


NAMED_TYPES = {
    "float32": ("_f32", "_float(", "Sum_float"),
    "bfloat16": ("_bf16", "_bfloat16"),
    "float16": ("_f16", "_half"),
    "float64": ("_f64", "_double"),
}


def dtype_of(graph: Graph, transfer: int) -> str:
    """Return the element type of a transfer, from the run or its kernel's name; empty if neither says."""
    said = graph.messages[int(graph.nodes.message[transfer])].dtype
    if said:
        return said
    name = graph.names[int(graph.nodes.name[transfer])]
    dtypes = [dtype for dtype, marks in NAMED_TYPES.items() if any(mark in name for mark in marks)]
    return dtypes[0] if len(dtypes) == 1 else ""


# The framework that reduces the gradients of a run, and its settings for changing the reductions.

MEGATRON, DEEPSPEED, FSDP2 = "Megatron-core", "DeepSpeed", "FSDP2"
FRAMEWORKS = (MEGATRON, DEEPSPEED, FSDP2)
NOT_THERE = "it has no such setting"


def framework_of(run: Run | None) -> str:
    """Return one of `FRAMEWORKS`; empty for DDP, for several frameworks, or where the run does not say."""
    sources = set() if run is None else set(run.table(BUCKETS, ["source"])["source"].unique())
    frameworks = {name for name in FRAMEWORKS for source in sources if source.startswith(name)}
    return frameworks.pop() if len(frameworks) == 1 else ""


def bucket_size_setting(framework: str, elements: int) -> str:
    """Return the setting for buckets of `elements` elements.

    Args:
        framework: one of `FRAMEWORKS`.
    """
    return {
        MEGATRON: (
            f"DistributedDataParallelConfig(bucket_size={elements}, overlap_grad_reduce=True), which counts "
            "parameters; without overlap_grad_reduce there is one bucket"
        ),
        DEEPSPEED: f'"zero_optimization": {{"reduce_bucket_size": {elements}}}, which counts elements',
        FSDP2: f"fully_shard around groups of layers of about {elements} parameters: each is one reduction",
    }[framework]


def half_precision_setting(framework: str, dtype: str) -> str:
    """Return the setting for reductions in half precision.

    Args:
        framework: one of `FRAMEWORKS`.
        dtype: fp16 or bf16.
    """
    torch_dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[dtype]
    return {
        MEGATRON: "DistributedDataParallelConfig(grad_reduce_in_fp32=False), with parameters in that type",
        DEEPSPEED: f'"communication_data_type": "{dtype}"',
        FSDP2: f"fully_shard(…, mp_policy=MixedPrecisionPolicy(reduce_dtype={torch_dtype}))",
    }[framework]


def no_overlap_setting(framework: str) -> str:
    """Return the setting for reductions only after backward.

    Args:
        framework: one of `FRAMEWORKS`.
    """
    return {
        MEGATRON: "DistributedDataParallelConfig(overlap_grad_reduce=False)",
        DEEPSPEED: '"zero_optimization": {"overlap_comm": false}',
        FSDP2: NOT_THERE,
    }[framework]
