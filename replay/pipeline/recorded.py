"""Whole operations of a recorded pipeline-parallel job, from its table `operations`.

Takes an opened run; in an imported trace, ranges show operations, or messages and backward passes do. Returns
`Operations`, as `dpro.replay.pipeline.operations` does for runs that consist of them. They are of steps that
no deep window slows down, and for which every rank has all operations. The steps are laid out one after the
other, each from when the last rank begins it until the last has ended it.

The time of an operation is that of its kernels where there are GPUs, in deep windows, else that of the thread
between its input and its output. Where a thread called a data-parallel reduction within it, as DDP does in
the last backward, the operation ends with the last such call, and the rest is the reduction, which waits for
other ranks. All later work of a rank in the step is one operation, `optimizer`.

In deep windows of GPU jobs operations are those of the device, since a host runs ahead of its GPU: an
operation is from the first to the last kernel launched within it, except communication, and a step of a rank
ends with the last kernel launched in it. In traces not recorded by dpro, operations are the ranges in
PyTorch's profiler: `torch.distributed.pipelining` marks each action of a schedule, such as `PP:3B0` (stage 3
of the model, backward, micro-batch 0), and GPipe each `Forward 0` and `Backward 0`. A range may begin with
waiting for a message, so an operation is from the first operator in it that does not communicate to the last.

Bubbles, in which stages wait for each other, are measured between the first forward of a step on any stage
and its last backward on any. Other work in a step (gathering parameters, reducing gradients, the optimizer)
is not part of the pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from dpro.classify import is_communication
from dpro.members import members_of
from dpro.replay.alignment.align import Alignment, align
from dpro.replay.alignment.match import POINT_TO_POINT, match_collectives
from dpro.replay.graph import MeshPosition
from dpro.replay.intervals import covered, union
from dpro.replay.pipeline.operations import (
    INPUTS_NAME,
    MESSAGE,
    WEIGHTS_NAMES,
    Operations,
    Role,
    consists_of_operations,
    placed_in_steps,
    read_operations,
    recorded_links,
)
from dpro.replay.steps import step_series, undisturbed
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, GPU_WORK_KINDS, OPERATIONS, SPANS, STEPS, WORKERS
from dpro.schema.members import of_each_text
from dpro.selection import ALL, Selection
from dpro.store import Run
from dpro.table import complete
from dpro.timed import with_times

# Operations by ranges.

RANGE = r"^(?:PP:\d+[FBIW]\d+|(?:Forward|Backward) \d+)$"
BOTH = r"^PP:\((\d+)F(\d+);(\d+)([BI])(\d+)\)OVERLAP_F_B$"
KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
BACKWARD_OP = "autograd::engine::evaluate_function"
RANGES = "ranges of torch.distributed.pipelining"
RANGE_COLUMNS = ["rank", "window", "kind", "name", "start_ns", "duration_ns"]
OF_RANGE = ["rank", "window", "range"]


def has_ranges(run: Run) -> bool:
    """Return whether the spans of the run's first part contain ranges of a pipeline schedule."""
    parts = run.parts(SPANS)
    if not parts:
        return False
    first = run.read(SPANS, parts[:1], ["kind", "name"])
    ranges = first.filter((pl.col("kind") == "annotation") & pl.col("name").str.contains(f"{RANGE}|{BOTH}"))
    return not ranges.is_empty()


def operations_by_ranges(run: Run) -> pl.DataFrame:
    """Return rows of `operations` from ranges; those outside the steps of their rank are in step -1."""
    spans = run.table(SPANS, RANGE_COLUMNS).with_columns(end=pl.col("start_ns") + pl.col("duration_ns"))
    ranges = spans.filter(pl.col("kind") == "annotation").drop("kind")
    operators = spans.filter((pl.col("kind") == "cpu_op") & ~pl.col("name").str.contains(MESSAGE))
    operations = pl.concat([_single_ranges(ranges, operators), _overlapped_ranges(ranges, operators)])
    return placed_in_steps(run, operations, RANGES)


def _single_ranges(ranges: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Return operations with a separate range."""
    single = ranges.filter(pl.col("name").str.contains(RANGE)).with_columns(range="start_ns")
    name = pl.col("name")
    kind = pl.coalesce(name.str.extract(r"^PP:\d+([FBIW])\d+$"), name.str.extract(r"^(F|B)"))
    return (
        _extents(single, operators)
        .join(single.select(*OF_RANGE, "name"), on=OF_RANGE)
        .select(
            "rank",
            "start_ns",
            "end",
            place=name.str.extract(r"^PP:(\d+)").cast(pl.Int64),
            micro_batch=name.str.extract(r"(\d+)$").cast(pl.Int64),
            kind=kind.replace_strict(KINDS, return_dtype=pl.String),
        )
    )


def _overlapped_ranges(ranges: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Split ranges of a forward and a backward: the backward begins with the first operator of autograd."""
    overlapped = ranges.filter(pl.col("name").str.contains(BOTH)).with_columns(range="start_ns")
    is_backward = pl.col("name").str.starts_with(BACKWARD_OP)
    turned = _extents(overlapped, operators.filter(is_backward)).select(*OF_RANGE, turn="start_ns")
    parts = []
    for first, batch, letter, keep in ((1, 2, pl.lit("F"), "before"), (3, 5, _group(4), "after")):
        halves = overlapped.join(turned, on=OF_RANGE).with_columns(
            start_ns=pl.col("start_ns") if keep == "before" else pl.col("turn"),
            end=pl.col("turn") if keep == "before" else pl.col("end"),
        )
        named = overlapped.select(
            *OF_RANGE,
            place=_group(first).cast(pl.Int64),
            micro_batch=_group(batch).cast(pl.Int64),
            kind=letter.replace_strict(KINDS, return_dtype=pl.String),
        )
        parts.append(
            _extents(halves, operators)
            .join(named, on=OF_RANGE)
            .select("rank", "start_ns", "end", "place", "micro_batch", "kind")
        )
    return pl.concat(parts)


def _group(number: int) -> pl.Expr:
    return pl.col("name").str.extract(BOTH, number)


def _extents(ranges: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Return the extent of the operators within each range.

    Args:
        ranges: `rank`, `window`, `range` (its identity), `start_ns`, `end`; those of one rank do not overlap.

    Returns:
        `rank`, `window`, `range`, `start_ns`, `end`; no row for a range without operators.
    """
    bounds = ranges.select(*OF_RANGE, begin="start_ns", until="end").sort("begin")
    held = operators.sort("start_ns").join_asof(
        bounds, left_on="start_ns", right_on="begin", by=["rank", "window"], check_sortedness=False
    )
    held = held.filter(pl.col("start_ns") < pl.col("until"))
    return held.group_by(OF_RANGE).agg(pl.col("start_ns").min(), pl.min_horizontal("end", "until").max())


# Operations by the device.

LAUNCHED = ["rank", "window", "kind", "name", "start_ns", "duration_ns", "correlation"]
LAUNCH = ["rank", "window", "correlation"]


class OnDevice(NamedTuple):
    """The activity of devices.

    Attributes:
        table: rows of `operations`; without those that launched nothing but communication.
        steps: rows of `steps`.
        reductions: collectives other than messages: `rank`, `op`, `group`, `group_ranks`, `step`, `start_ns`,
            `duration_ns`.
    """

    table: pl.DataFrame
    steps: pl.DataFrame
    reductions: pl.DataFrame


def on_device(run: Run, table: pl.DataFrame) -> OnDevice:
    """Return operations, steps and reductions with the times of the device.

    Args:
        table: rows of `operations`, with times of the host.
    """
    launched = _launched(run.table(SPANS, LAUNCHED))
    hosts = run.table(STEPS).filter((pl.col("duration_ns") >= 0) & (pl.col("window") >= 0))
    launched = _within(launched, hosts.select("rank", "step", begin="start_ns", lasts="duration_ns"))
    numbered = table.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    computed = launched.filter(~pl.col("communicates")).drop("step")
    owned = _within(computed, numbered.select("rank", "row", begin="start_ns", lasts="duration_ns"))
    extents = owned.group_by("row").agg(pl.col("start_ns").min(), pl.col("end").max())
    times = numbered.drop("start_ns", "duration_ns").join(extents, on="row")
    on_gpu = times.with_columns(duration_ns=pl.col("end") - pl.col("start_ns")).drop("row", "end")
    return OnDevice(on_gpu.select(table.columns), _steps(launched), _reductions(run, launched))


def _launched(spans: pl.DataFrame) -> pl.DataFrame:
    """Return GPU work: `rank`, `window`, `start_ns`, `end`, `at` (its launch), `communicates`."""
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    calls = calls.select(*LAUNCH, at="start_ns").unique(LAUNCH, keep="first", maintain_order=True)
    work = spans.filter(pl.col("kind").cast(pl.String).is_in(GPU_WORK_KINDS) & (pl.col("duration_ns") >= 0))
    names = work["name"].unique().to_list()
    kinds = pl.DataFrame(
        {"name": names, "communicates": [is_communication(name) for name in names]},
        {"name": pl.String, "communicates": pl.Boolean},
    )
    return (
        work.join(calls, on=LAUNCH)
        .join(kinds, on="name")
        .select(
            "rank", "window", "start_ns", "at", "communicates", end=pl.col("start_ns") + pl.col("duration_ns")
        )
    )


def _within(launched: pl.DataFrame, hosts: pl.DataFrame) -> pl.DataFrame:
    """Return GPU work launched within intervals of its host, with the other columns of these."""
    joined = launched.sort("at").join_asof(
        hosts.sort("begin"), left_on="at", right_on="begin", by="rank", check_sortedness=False
    )
    return joined.filter(pl.col("at") < pl.col("begin") + pl.col("lasts")).drop("begin", "lasts")


def _steps(launched: pl.DataFrame) -> pl.DataFrame:
    """Return steps from the end of the previous one in the window, or from the first kernel."""
    by = ["rank", "window"]
    extents = launched.group_by(*by, "step").agg(first=pl.col("start_ns").min(), end=pl.col("end").max())
    ended = extents.sort(*by, "step").with_columns(
        start_ns=pl.coalesce(pl.col("end").shift(1).over(by), "first")
    )
    lasts = (pl.col("end") - pl.col("start_ns")).clip(lower_bound=0)
    return complete(STEPS, ended.select(*by, "step", "start_ns", duration_ns=lasts))


def _reductions(run: Run, launched: pl.DataFrame) -> pl.DataFrame:
    """Return collectives on the device, with the device's own step in which they began."""
    columns = ["rank", "window", "op", "group", "group_ranks", "start_ns", "duration_ns"]
    rows = run.table(COLLECTIVES, columns).filter(
        ~pl.col("op").is_in(POINT_TO_POINT) & (pl.col("window") >= 0) & (pl.col("duration_ns") >= 0)
    )
    begun = launched.filter("communicates").select("rank", "window", "start_ns", "step")
    return rows.join(begun.unique(["rank", "window", "start_ns"]), on=["rank", "window", "start_ns"])


# Operations as recorded.

MAX_STEPS = 32  # latest steps that are used, since a schedule repeats itself
WARM_UP = 2  # steps in which a job allocates and compiles
COMPUTE_STREAM, REDUCTION_STREAM = 0, 5
OPTIMIZER = "optimizer"
STEP = ["rank", "step"]
# Name and role of each kind of operation.
_NAMES = {
    "forward": ("forward", Role.FORWARD),
    "backward": ("backward", Role.BACKWARD),
    "backward_input": (INPUTS_NAME, Role.BACKWARD),
    "backward_weight": (WEIGHTS_NAMES[0], Role.WEIGHTS),
}


def operations_of(run: Run) -> Operations | None:
    """Return the operations of a run, whether it consists of them or also has other work, or None."""
    if has_operations(run):
        return read_recorded(run)
    return read_operations(run) if consists_of_operations(run.table(SPANS)) else None


def has_operations(run: Run) -> bool:
    """Return whether the run has operations beside other work: a table of them, or spans that show them.

    Those of pretended ranks do not count: their times are unrelated to those of other ranks.
    """
    if run.manifest.is_pretended:
        return False
    return bool(run.parts(OPERATIONS)) or has_ranges(run) or not operations_by_backwards(run).is_empty()


def read_recorded(run: Run) -> Operations:
    """Return the operations of a run with `has_operations`; empty where no step is complete on all ranks."""
    has_name = pl.col("kind").cast(pl.String).is_in(list(_NAMES))
    if run.parts(OPERATIONS):
        table = run.table(OPERATIONS)
    else:
        table = operations_by_ranges(run) if has_ranges(run) else operations_by_backwards(run)
    table = table.filter(has_name & (pl.col("step") >= 0) & (pl.col("duration_ns") >= 0))
    ranks = sorted(table["rank"].unique().to_list())
    # Align clocks by recorded comparisons only, since operations are not matched with collectives.
    nothing = match_collectives(COLLECTIVES.empty(), SPANS.empty()).rows
    alignment = align(nothing, [(rank, -1) for rank in ranks], run.table(WORKERS), run.table(CLOCK_SAMPLES))
    # Use the pipeline's own stages; data-parallel ranks without a coordinate are numbered on each stage.
    stages = table.group_by("rank").agg(pl.col("stage").max()).sort("stage", "rank")
    dp = run.table(WORKERS).filter(pl.col("dp") >= 0).group_by("rank").agg(pl.col("dp").first())
    order = pl.int_range(pl.len(), dtype=pl.Int64).over("stage")
    places_of = stages.with_columns(order=order).join(dp, on="rank", how="left").sort("rank")
    ordered = places_of.select("rank", pl.coalesce("dp", "order").cast(pl.Int64), "stage")
    places = {rank: MeshPosition(place, stage) for rank, place, stage in ordered.iter_rows()}
    device = on_device(run, table) if run.manifest.gpus else None
    table, recorded = (device.table, device.steps) if device else (table, run.table(STEPS))
    table, steps = alignment.aligned(_windowless(table)), alignment.aligned(_windowless(recorded))
    steps = _whole_steps(table, steps.filter(pl.col("rank").is_in(ranks)), recorded)
    # Leave out the very last step, which ends while ranks exit.
    if run.manifest.exit_status is not None and steps["step"].n_unique() > WARM_UP:
        steps = steps.filter(pl.col("step") < recorded["step"].max())
    rows = _computes(table, steps)
    if device:
        rows = pl.concat([rows, _on_streams(device.reductions, alignment, places, steps, rows)])
    else:
        rows = _with_reductions(rows, _calls(run, alignment, places))
    rows = _moved(pl.concat([rows, _optimizer_rows(rows, steps)], how="diagonal_relaxed"), steps)
    placed = pl.DataFrame([(rank, *place) for rank, place in places.items()], _PLACED, orient="row")
    rows = (
        rows.join(placed, on="rank")
        .sort("step", "rank", "start", "end")
        .with_columns(span_id=-2 - pl.int_range(pl.len(), dtype=pl.Int64))
        .select(*_COLUMNS)
    )
    extents = steps.group_by("step").agg(
        begin=(pl.col("begin") + pl.col("moved")).max(), finish=(pl.col("finish") + pl.col("moved")).max()
    )
    begins = steps.select(*STEP, begin=pl.col("begin") + pl.col("moved"))
    return Operations(rows, extents.sort("begin"), places, True, begins, recorded_links(run, places))


_PLACED = {"rank": pl.Int32, "dp": pl.Int64, "stage": pl.Int64}
_COLUMNS = (
    "rank", "dp", "stage", "step", "span_id", "name", "role", "direction", "start", "end", "stream", "chunk",
    "place", "micro_batch", "op", "group", "sequence", "peer",
)  # fmt: skip


def _windowless(frame: pl.DataFrame) -> pl.DataFrame:
    """Move rows outside windows, so that the clock of a rank's first window is used."""
    return frame.with_columns(window=pl.lit(-1, pl.Int32))


def _whole_steps(table: pl.DataFrame, aligned: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """Return the steps to be laid out: `rank`, `step`, `begin`, `finish` (ns) and their shift `moved` (ns).

    Args:
        table: rows of `operations`.
        aligned: rows of `steps` on one clock.
        recorded: rows of `steps` as recorded.
    """
    usual = undisturbed(with_times(recorded))
    series = step_series(recorded)
    paused = [] if series is None else series.steps[series.paused].tolist()
    steps = aligned.join(usual.select(*STEP), on=STEP, how="semi").filter(
        (pl.col("duration_ns") >= 0) & ~pl.col("step").is_in(paused)
    )
    counts = table.group_by(*STEP).len()
    mode = counts.group_by("rank").agg(usual=pl.col("len").mode().max())
    whole = counts.join(mode, on="rank").filter(pl.col("len") == pl.col("usual"))
    steps = steps.join(whole.select(*STEP), on=STEP, how="semi")
    num_ranks = table["rank"].n_unique()
    steps = steps.filter(pl.col("rank").n_unique().over("step") == num_ranks)
    late = steps.filter(pl.col("step") > WARM_UP)
    steps = late if late["step"].n_unique() > WARM_UP else steps
    latest = steps["step"].unique().sort().tail(MAX_STEPS).to_list()
    extents = (
        steps.filter(pl.col("step").is_in(latest))
        .select(*STEP, begin="start_ns", finish=pl.col("start_ns") + pl.col("duration_ns"))
        .sort("step", "rank")
    )
    of_job = extents.group_by("step").agg(pl.col("begin").max(), pl.col("finish").max()).sort("step")
    lasts = (pl.col("finish") - pl.col("begin")).clip(lower_bound=0)
    of_job = of_job.select("step", moved=lasts.cum_sum() - lasts - pl.col("begin"))
    return extents.join(of_job, on="step")


def _computes(table: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return forwards and backwards of the given steps, in order of time."""
    kind = pl.col("kind").cast(pl.String)
    names = {kind: name for kind, (name, _) in _NAMES.items()}
    roles = {kind: int(role) for kind, (_, role) in _NAMES.items()}
    directions = {kind: kind.split("_")[0] for kind in _NAMES}
    return (
        table.join(steps.select(*STEP), on=STEP, how="semi")
        .select(
            *(*STEP, "chunk", "place", "micro_batch"),
            name=kind.replace_strict(names, return_dtype=pl.String),
            role=kind.replace_strict(roles, return_dtype=pl.Int64),
            direction=kind.replace_strict(directions, return_dtype=pl.String),
            start="start_ns",
            end=pl.col("start_ns") + pl.col("duration_ns"),
            stream=pl.lit(COMPUTE_STREAM, pl.Int64),
            op=pl.lit(""),
            group=pl.lit(""),
            sequence=pl.lit(-1, pl.Int64),
            peer=pl.lit(-1, pl.Int32),
        )
        .sort(*STEP, "start", "end")
    )


def _calls(run: Run, alignment: Alignment, places: dict[int, MeshPosition]) -> pl.DataFrame:
    """Return collectives among the ranks of one stage: `rank`, `op`, `called`, `over` (ns, -1 unknown)."""
    columns = ["rank", "op", "group_ranks", "enqueued_ns", "start_ns", "duration_ns"]
    calls = run.table(COLLECTIVES, columns).filter(
        ~pl.col("op").is_in(POINT_TO_POINT) & _of_one_stage(places)
    )
    called = pl.when(pl.col("enqueued_ns") >= 0).then("enqueued_ns").otherwise("start_ns")
    over = pl.when(pl.col("duration_ns") >= 0).then(pl.col("start_ns") + pl.col("duration_ns"))
    ended = calls.with_columns(called=called, over=over.fill_null(-1)).filter(pl.col("called") >= 0)
    lasts = pl.when(pl.col("over") >= 0).then(pl.col("over") - pl.col("called")).otherwise(-1)
    moved = alignment.aligned(
        _windowless(ended.select("rank", "op", start_ns="called", duration_ns=lasts))
    ).sort("start_ns")
    over = pl.when(pl.col("duration_ns") >= 0).then(pl.col("start_ns") + pl.col("duration_ns"))
    return moved.select("rank", "op", called="start_ns", over=over.fill_null(-1))


def _with_reductions(rows: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Cut operations at their last call of a reduction, and add the reductions that follow.

    Args:
        calls: rows of `_calls`.
    """
    backward = rows.filter(pl.col("role") != Role.FORWARD).with_columns(at=pl.col("start"))
    within = (
        calls.join_asof(
            backward.select("rank", "start", "end", "at").sort("at"),
            left_on="called",
            right_on="at",
            by="rank",
            strategy="backward",
            check_sortedness=False,
        )
        .filter(pl.col("called") < pl.col("end"))
        .group_by("rank", "start")
        .agg(pl.col("called").max(), pl.col("over").max(), reduction=pl.col("op").last())
    )
    joined = rows.join(within, on=["rank", "start"], how="left", maintain_order="left")
    reduced = joined.filter(pl.col("called").is_not_null())
    reductions = reduced.with_columns(
        start="called",
        end=pl.max_horizontal("end", "over"),
        name="reduction",
        op="reduction",
        role=pl.lit(int(Role.REDUCE), pl.Int64),
        direction=pl.lit(None, pl.String),
        group=pl.format("chunk {}", "place"),
        chunk=pl.lit(-1, pl.Int64),
        micro_batch=pl.lit(-1, pl.Int64),
    )
    computes = joined.with_columns(end=pl.coalesce("called", "end"))
    return pl.concat([computes, reductions]).select(rows.columns).sort(*STEP, "start", "end")


def _on_streams(
    reductions: pl.DataFrame,
    alignment: Alignment,
    places: dict[int, MeshPosition],
    steps: pl.DataFrame,
    rows: pl.DataFrame,
) -> pl.DataFrame:
    """Return reductions among the ranks of one stage on a GPU, which run concurrently with its computes.

    Args:
        reductions: `OnDevice.reductions`.
        steps: rows of `_whole_steps`.
        rows: computes, for their columns.
    """
    of_stage = reductions.filter(_of_one_stage(places)).join(steps.select(*STEP), on=STEP, how="semi")
    moved = alignment.aligned(_windowless(of_stage))
    return moved.select(
        *(*STEP, "op", "group"),
        name="op",
        role=pl.lit(int(Role.REDUCE), pl.Int64),
        direction=pl.lit(None, pl.String),
        start="start_ns",
        end=pl.col("start_ns") + pl.col("duration_ns"),
        stream=pl.lit(REDUCTION_STREAM, pl.Int64),
        chunk=pl.lit(-1, pl.Int64),
        place=pl.lit(-1, pl.Int64),
        micro_batch=pl.lit(-1, pl.Int64),
        sequence=pl.lit(-1, pl.Int64),
        peer=pl.lit(-1, pl.Int32),
    ).select(rows.columns)


def _of_one_stage(places: dict[int, MeshPosition]) -> pl.Expr:
    """Return an expression for whether a group has several ranks, all of one stage."""
    stage = {rank: place.stage for rank, place in places.items()}

    def of_one(text: str) -> bool:
        ranks = members_of(text)
        return len(ranks) > 1 and len({stage.get(rank) for rank in ranks}) == 1 and ranks[0] in stage

    return of_each_text("group_ranks", of_one, pl.Boolean())


def _optimizer_rows(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the work of each rank in a step after the last of its other operations."""
    ended = rows.group_by(STEP).agg(start=pl.col("end").max())
    rest = ended.join(steps.select(*STEP, end="finish"), on=STEP).filter(pl.col("end") > pl.col("start"))
    return rest.select(
        *(*STEP, "start", "end"),
        name=pl.lit(OPTIMIZER),
        role=pl.lit(int(Role.WORK), pl.Int64),
        direction=pl.lit(None, pl.String),
        stream=pl.lit(COMPUTE_STREAM, pl.Int64),
        chunk=pl.lit(-1, pl.Int64),
        place=pl.lit(-1, pl.Int64),
        micro_batch=pl.lit(-1, pl.Int64),
        op=pl.lit(""),
        group=pl.lit(""),
        sequence=pl.lit(-1, pl.Int64),
        peer=pl.lit(-1, pl.Int32),
    )


def _moved(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Shift operations of steps so that steps follow each other."""
    placed = rows.join(steps.select(*STEP, "moved"), on=STEP, how="left")
    return placed.with_columns(pl.col("start", "end") + pl.col("moved")).drop("moved")


# Operations of a pipeline by its messages and its backward passes: traces whose schedule marks no ranges.

FUNCTION = "autograd::engine::evaluate_function"
SENT, RECEIVED = "c10d::send", "c10d::recv"
NO_FORWARD = r"^(?:Optimizer\.|enumerate\()"  # annotations of an optimizer, and of a data loader
SOURCE = "messages and backward passes"
COLUMNS = ["kind", "name", "rank", "window", "start_ns", "duration_ns", "sequence_number"]
PLACE = ["rank", "window"]
PASS = [*PLACE, "since"]  # `since`: the latest message or numbered operator before it
BATCH = [*PLACE, "batch"]


def operations_by_backwards(run: Run) -> pl.DataFrame:
    """Return rows of `operations` from messages and backward passes; empty unless they form a pipeline.

    Those outside the steps of their rank are in step -1.
    """
    parts = run.parts(SPANS)
    if not parts or not _may_pipeline(run.read(SPANS, parts[:1], ["kind", "name"])):
        return OPERATIONS.empty()
    spans = run.table(SPANS, COLUMNS).filter(pl.col("duration_ns") >= 0)
    spans = spans.with_columns(end=pl.col("start_ns") + pl.col("duration_ns"), number="sequence_number")
    spans = spans.sort("start_ns", "end")
    name = pl.col("name")
    called = spans.filter(pl.col("kind") == "cpu_op")
    messages = called.filter(name.str.starts_with(SENT) | name.str.starts_with(RECEIVED))
    functions = called.filter(name.str.starts_with(FUNCTION))
    # Operators within functions of autograd do not count, since these recompute activations.
    operators = called.filter(~name.str.contains(f"{MESSAGE}|^autograd::"))
    of_functions = functions.select(*PLACE, begin="start_ns", until="end")
    held = operators.join_asof(
        of_functions, left_on="start_ns", right_on="begin", by=PLACE, check_sortedness=False
    )
    operators = held.filter((pl.col("start_ns") >= pl.col("until")).fill_null(True)).drop("begin", "until")
    passes = _passes(functions, messages, operators)
    others = spans.filter((pl.col("kind") == "annotation") & name.str.contains(NO_FORWARD))
    starts = [events.select(*PLACE, "start_ns") for events in (messages, functions, run.table(STEPS))]
    bounds = pl.concat([*starts, others.select(*PLACE, start_ns="end")])
    operations = pl.concat([_backwards(passes), _forwards(passes, operators, bounds)])
    rows = _in_order(placed_in_steps(run, operations, SOURCE))
    return rows if _is_pipeline(run, rows, messages) else OPERATIONS.empty()


def _may_pipeline(spans: pl.DataFrame) -> bool:
    """Return whether a rank sends messages and computes gradients."""
    name = spans.filter(pl.col("kind") == "cpu_op")["name"]
    return bool(name.str.starts_with(SENT).any() and name.str.starts_with(FUNCTION).any())


def _passes(functions: pl.DataFrame, messages: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Return backward passes: `PLACE`, `start_ns`, `end`, `first` and `last` sequence number, and `batch`.

    Passes of one `batch` share sequence numbers, since they belong to one forward.
    """
    breaks = pl.concat(
        [events.select(*PLACE, "start_ns") for events in (messages, operators.filter(pl.col("number") >= 0))]
    )
    breaks = breaks.with_columns(since="start_ns").sort("start_ns")
    grouped = functions.join_asof(breaks, on="start_ns", by=PLACE, check_sortedness=False).group_by(PASS)
    numbered = pl.col("number").filter(pl.col("number") >= 0)
    passes = grouped.agg(
        pl.col("start_ns").min(), pl.col("end").max(), first=numbered.min(), last=numbered.max()
    ).drop_nulls("first")
    before = pl.col("last").cum_max().shift(1).over(PLACE)
    ordered = passes.sort(*PLACE, "first", "start_ns")
    return ordered.with_columns(batch=(pl.col("first") > before).fill_null(True).cum_sum().over(PLACE))


def _backwards(passes: pl.DataFrame) -> pl.DataFrame:
    """Return backward operations: the first pass of a batch, and a second one for weights."""
    nth = pl.int_range(pl.len()).over(BATCH)
    several = pl.len().over(BATCH) > 1
    kind = (
        pl.when(~several)
        .then(pl.lit("backward"))
        .when(pl.col("nth") == 0)
        .then(pl.lit("backward_input"))
        .otherwise(pl.lit("backward_weight"))
    )
    ordered = passes.sort("start_ns").with_columns(nth=nth)
    return ordered.select("rank", "start_ns", "end", micro_batch="batch", kind=kind).with_columns(_NO_PLACE)


_NO_PLACE = pl.lit(None, pl.Int64).alias("place")


def _forwards(passes: pl.DataFrame, operators: pl.DataFrame, bounds: pl.DataFrame) -> pl.DataFrame:
    """Return forward operations: the operators between the bounds around a batch's last numbered one.

    Args:
        passes: rows of `_passes`.
        bounds: `PLACE` and `start_ns` of events that no forward spans.
    """
    bounds = bounds.with_columns(since="start_ns").sort("start_ns")
    inside = operators.join_asof(bounds, on="start_ns", by=PLACE, check_sortedness=False)
    batches = passes.group_by(BATCH).agg(pl.col("first").min(), pl.col("last").max()).sort("first")
    owned = (
        inside.filter(pl.col("number") >= 0)
        .sort("number", "start_ns")
        .join_asof(batches, left_on="number", right_on="first", by=PLACE, check_sortedness=False)
    ).filter(pl.col("number") <= pl.col("last"))
    final = owned.group_by(BATCH).agg(pl.col("since").sort_by("number", "start_ns").last())
    extents = inside.group_by(PASS).agg(pl.col("start_ns").min(), pl.col("end").max())
    forwards = final.join(extents, on=PASS).unique(PASS, keep="first", maintain_order=True)
    named = forwards.select("rank", "start_ns", "end", micro_batch="batch", kind=pl.lit("forward"))
    return named.with_columns(_NO_PLACE)


def _in_order(rows: pl.DataFrame) -> pl.DataFrame:
    """Count micro-batches within each step; drop backwards whose forward is unknown."""
    step = ["rank", "step"]
    begun = rows.filter(pl.col("kind") == "forward").select(*step, "micro_batch", begin="start_ns")
    numbers = begun.select(*step, "micro_batch", number=pl.col("begin").rank("ordinal").over(step) - 1)
    joined = rows.join(numbers, on=[*step, "micro_batch"])
    numbered = joined.with_columns(micro_batch=pl.col("number").cast(rows.schema["micro_batch"]))
    return numbered.select(rows.columns).sort(OPERATIONS.sort_by)


def _is_pipeline(run: Run, rows: pl.DataFrame, messages: pl.DataFrame) -> bool:
    """Return whether, in every step, first stages compute before they receive, and others only after that.

    In addition, each stage has to send equally many messages for each micro-batch.
    """
    step = ["rank", "step"]
    rows = rows.filter(pl.col("step") >= 0)
    if rows["stage"].n_unique() < 2:
        return False
    of_step = rows.filter(pl.col("kind") == "forward").group_by(step)
    forwards = of_step.agg(pl.col("stage").first(), first=pl.col("start_ns").min(), batches=pl.len())
    begun = run.table(STEPS).select(*step, begin="start_ns").sort("begin")
    inside = messages.select("rank", "name", "start_ns").join_asof(
        begun, left_on="start_ns", right_on="begin", by="rank", check_sortedness=False
    )
    is_sent = pl.col("name").str.starts_with(SENT)
    before = ~is_sent & (pl.col("start_ns") < pl.col("first"))
    counts = (
        inside.join(forwards, on=step)
        .group_by(*step, "stage", "batches")
        .agg(sent=is_sent.sum(), received=before.sum())
    )
    first_sends = (pl.col("stage") == 0) == (pl.col("received") == 0)
    holds = first_sends & (pl.col("sent") > 0) & (pl.col("sent") % pl.col("batches") == 0)
    return counts.height == forwards.height and bool(counts.select(holds.all()).item())


SCHEMA: dict[str, type[pl.DataType]] = {
    "stage": pl.Int64,
    "ranks": pl.Int64,
    "steps": pl.Int64,
    "pipeline_ns": pl.Float64,
    "compute_ns": pl.Float64,
    "bubble_ns": pl.Float64,
    "bubble_share": pl.Float64,
}

COMPUTES = (Role.FORWARD, Role.BACKWARD, Role.WEIGHTS)


def pipeline_bubbles(run: Run, selection: Selection = ALL) -> pl.DataFrame:
    """Return the bubble of each stage: pipeline time in which a rank computes neither forward nor backward.

    With p stages, m micro-batches and even work it is (p - 1) / (m + p - 1) of the pipeline's time (Narayanan
    et al., SC 2021, section 2.2). It is averaged over steps and the ranks of a stage.

    Returns:
        One row per stage, columns as in `SCHEMA`; empty where the run has no operations, or its pipeline has
        only one stage.
    """
    operations = operations_of(run)
    if operations is None:
        return pl.DataFrame(schema=SCHEMA)
    rows = operations.rows.filter(pl.col("role").is_in([int(role) for role in COMPUTES]))
    if operations.num_stages < 2 or rows.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    extents = rows.group_by("step", "dp").agg(begin=pl.col("start").min(), finish=pl.col("end").max())
    parts = []
    for (_, stage), computes in (
        selection.keep(rows).join(extents, on=["step", "dp"]).group_by(["rank", "stage"], maintain_order=True)
    ):
        busy = union(computes["start"].to_numpy(), computes["end"].to_numpy())
        steps = computes.unique("step", maintain_order=True)
        begin, finish = steps["begin"].to_numpy(), steps["finish"].to_numpy()
        compute = covered(busy, begin, finish)
        parts.append(
            pl.DataFrame(
                {"stage": stage, "rank": computes["rank"][0], "pipeline": finish - begin, "compute": compute}
            )
        )
    if not parts:
        return pl.DataFrame(schema=SCHEMA)
    total = (
        pl.concat(parts)
        .group_by("stage")
        .agg(
            ranks=pl.col("rank").n_unique(),
            steps=pl.len() // pl.col("rank").n_unique(),
            pipeline_ns=pl.col("pipeline").mean(),
            compute_ns=pl.col("compute").mean(),
        )
    )
    bubble = pl.col("pipeline_ns") - pl.col("compute_ns")
    bubbles = total.with_columns(bubble_ns=bubble, bubble_share=bubble / pl.col("pipeline_ns"))
    return bubbles.select(*SCHEMA).cast(pl.Schema(SCHEMA)).sort("stage")
