"""Collectives, waits and steps of one process, from its spans.

Takes spans of a profiler that records kernels, calls of the runtime and ranges as programs name them (NVTX,
roctx, TraceMe); returns rows of `collectives`, `syncs` and `steps`. Reads no file.
"""

from __future__ import annotations

import polars as pl

from dpro.classify import classify, is_communication, operation
from dpro.ingest.derived import find_steps as find_marked_steps
from dpro.ingest.derived import guess_steps, sync_calls, with_enclosing_span, with_launch
from dpro.schema import SYNCS

# Suffixes of `torch.autograd.profiler.emit_nvtx` on operator names, each where known:
# `, seq = 41, op_id = 990, sizes = [[2, 3]], input_op_ids = [(989,0)]`.
EMITTED = r", (?:seq|op_id) = \d.*$|, sizes = \[.*$"
# Operators that torch.profiler calls annotations.
ANNOTATION = r"^(Optimizer\.|ProfilerStep#|nccl:|gloo:|FSDP::|DistributedDataParallel|enumerate\(DataLoader)"


# Communication: rows of `collectives` from communication kernels.

_COLUMNS = (
    *("collective_id", "window", "op", "group", "peer", "bytes_in", "bytes_out", "enqueued_ns"),
    *("start_ns", "duration_ns", "span_id", "launch_span_id", "source"),
)
# Field of the payload of NCCL's ranges.
_SIZE = r'"Message size[^"]*"\s*:\s*"?(\d+)'


def read_collectives(spans: pl.DataFrame) -> pl.DataFrame:
    """Return one row per communication kernel of one process.

    Args:
        spans: its spans, with `span_id`.
    """
    kernels = spans.filter(pl.col("kind") == "kernel")
    names = [name for name in kernels["name"].unique() if is_communication(name)]
    kernels = kernels.filter(pl.col("name").is_in(names))
    ran = with_launch(kernels.select("span_id", "name", "start_ns", "duration_ns", "correlation"), spans)
    issues = _issues(spans)
    ranges = spans.filter(pl.col("kind") == "annotation").with_columns(position="span_id")
    ran = with_enclosing_span(ran, ranges.filter(pl.col("name").str.starts_with("nccl:")), "range")
    ran = with_enclosing_span(ran, issues.rename({"span_id": "position"}), "issue")
    of_issue = issues.select("op", "group", "bytes_in", "bytes_out", "peer", issue_position="span_id")
    ran = ran.join(of_issue, on="issue_position", how="left")
    # With several kernels for one group of calls, the bytes of each are unknown.
    shared = pl.col("issue_position").is_not_null() & (pl.len().over("issue_position") > 1)
    moved = (
        pl.when(shared).then(-1).otherwise(name).fill_null(-1).alias(name)
        for name in ("bytes_in", "bytes_out", "peer")
    )
    ops = {name: operation(name) for name in ran["range_name"].drop_nulls().unique()}
    by_name = {name: classify(name).op or name for name in names}
    ranged = pl.col("range_name").replace_strict(ops, default="", return_dtype=pl.String)
    issued = [pl.when(op != "").then(op) for op in (ranged, pl.col("op"))]
    return (
        ran.sort("start_ns", "span_id")
        .with_columns(
            *moved,
            op=pl.coalesce(*issued, pl.col("name").replace_strict(by_name, return_dtype=pl.String)),
            group=pl.col("group").fill_null(""),
            collective_id=pl.int_range(pl.len()),
            enqueued_ns=pl.col("launch_ns").fill_null(-1),
            launch_span_id=pl.col("launch_span_id").fill_null(-1),
            window=pl.lit(0),
            source=pl.lit("nsys kernel"),
        )
        .select(_COLUMNS)
    )


def _issues(spans: pl.DataFrame) -> pl.DataFrame:
    """Return NCCL's ranges in which work is launched: a single call, or the end of the group it is in.

    Returns:
        `span_id`, `tid`, `start_ns`, `duration_ns`, `name` of the range, and of the calls it launches `op`
        (empty where they differ), `group`, `bytes_in`, `bytes_out` and `peer`.
    """
    nccl = (
        spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.contains(r"^nccl[A-Z]"))
        .sort("tid", "start_ns", "span_id")
        .select("span_id", "tid", "start_ns", "duration_ns", "name", "payload")
    )
    ops = {name: operation(name.removeprefix("nccl")) for name in nccl["name"].unique()}
    opened, closed = pl.col("name") == "ncclGroupStart", pl.col("name") == "ncclGroupEnd"
    level = (opened.cast(pl.Int64) - closed.cast(pl.Int64)).cum_sum().over("tid")
    # The window may begin inside a group: ends without a start do not count.
    depth = level - pl.min_horizontal(level.cum_min().over("tid"), 0)
    nccl = nccl.with_columns(
        op=pl.col("name").replace_strict(ops, default="", return_dtype=pl.String), depth=depth
    ).with_columns(ends=pl.when(closed & (pl.col("depth") == 0)).then("span_id"))
    calls = nccl.with_columns(
        issue=pl.when(pl.col("depth") == 0)
        .then("span_id")
        .otherwise(pl.col("ends").backward_fill().over("tid")),
        size=pl.col("payload").str.extract(_SIZE).cast(pl.Int64, strict=False),
        peer=pl.col("payload").str.extract(r'"Peer rank"\s*:\s*"?(\d+)').cast(pl.Int64, strict=False),
        communicator=pl.col("payload").str.extract(r'"NCCL communicator ID"\s*:\s*"?(\w+)'),
    ).filter(pl.col("op") != "")
    return nccl.select("span_id", "tid", "start_ns", "duration_ns", "name").join(
        _combine_calls(calls), left_on="span_id", right_on="issue"
    )


def _combine_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Combine the calls of each group into one row.

    NCCL states the input of a rank for an all-gather, its output for a reduce-scatter.
    """
    op, size = pl.col("op"), pl.col("size")
    both_ways = ~op.is_in(["send", "recv", "all_gather", "reduce_scatter"])
    puts = pl.when(op.is_in(["send", "all_gather"]) | both_ways).then(size).when(op == "recv").then(0)
    gets = pl.when(op.is_in(["recv", "reduce_scatter"]) | both_ways).then(size).when(op == "send").then(0)
    distinct = op.unique().sort()
    exchanged = (distinct.len() == 2) & op.is_in(["send", "recv"]).all()
    return calls.group_by("issue").agg(
        pl.when(op.n_unique() == 1)
        .then(op.first())
        .when(exchanged)
        .then(pl.lit("send_recv"))
        .otherwise(pl.lit(""))
        .alias("op"),
        group=pl.when(pl.col("communicator").n_unique() == 1).then(pl.col("communicator").first()),
        bytes_in=pl.when(puts.is_not_null().all()).then(puts.sum()),
        bytes_out=pl.when(gets.is_not_null().all()).then(gets.sum()),
        peer=pl.when(pl.col("peer").n_unique() == 1).then(pl.col("peer").first()),
    )


# Training steps from NVTX ranges.

_STEP_SCHEMA = {"step": pl.Int64, "start_ns": pl.Int64, "duration_ns": pl.Int64, "source": pl.String}
_STEP_COLUMNS = tuple(_STEP_SCHEMA)
_COUNTED = r"(?i)^(.*(?:step|iter|iteration|batch)[^\d]{0,3})(\d+)[^\w]*$"
# Ranges of libraries repeat within a step.
_LIBRARY = r"^(nccl|cub::|thrust::|gloo|FSDP::|DistributedDataParallel|Optimizer\.|enumerate\()"
_LIBRARY_DOMAINS = ("NCCL", "CCCL")
# A CUDA graph that was traced as one piece of work, with its number.
WHOLE_GRAPH = "CUDA graph {}"
_WHOLE_GRAPH = r"^CUDA graph -?\d+$"
GRAPH_LAUNCHES = "CUDA graph launches"
_MIN_LAUNCHES = 4
_MIN_PACE = 0.5  # of the time that graphs take: launches that are made faster fill a queue


def find_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the steps of one process.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `tid`, `domain`, `sequence_number` and
            `forward_thread`, and the columns for `guess_steps`.
    """
    ranges = spans.filter(
        (pl.col("kind") == "annotation")
        & ~pl.col("name").str.contains(_LIBRARY)
        & ~pl.col("domain").str.to_uppercase().is_in(_LIBRARY_DOMAINS)
        & (pl.col("duration_ns") > 0)
    ).with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    for steps in (_counted(ranges), find_marked_steps(spans)):
        if steps.height:
            return steps
    before = pl.col("end_ns").cum_max().shift(1).over("tid")
    top = ranges.sort("start_ns", "end_ns", descending=[False, True]).filter(
        before.is_null() | (pl.col("start_ns") >= before)
    )
    repeated = _repeated(top)
    for steps in (repeated.filter(_share_kernels(repeated, spans)), _busiest_phase(top, spans)):
        if steps.height:
            return steps
    guessed = guess_steps(spans)
    return guessed if guessed.height else _between_graphs(spans)


def _share_kernels(steps: pl.DataFrame, spans: pl.DataFrame) -> bool:
    """Return whether steps repeat their work: most kernel time in them is of kernels that run in several.

    A library that compiles gives its ranges one name, but does other work in each.
    """
    bounds = steps.select("start_ns", "step", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    kernels = spans.filter(pl.col("kind") == "kernel").select("start_ns", "name", "duration_ns")
    placed = kernels.sort("start_ns").join_asof(bounds.sort("start_ns"), on="start_ns")
    inside = placed.filter(pl.col("start_ns") < pl.col("end_ns"))
    times = inside.group_by("name").agg(pl.col("step").n_unique(), pl.col("duration_ns").sum())
    return 2 * times.filter(pl.col("step") > 1)["duration_ns"].sum() >= times["duration_ns"].sum()


def whole_graphs(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans of CUDA graphs that were traced as one piece of work."""
    return spans.filter((pl.col("kind") == "kernel") & pl.col("name").str.contains(_WHOLE_GRAPH))


def _between_graphs(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the steps from each launch of a CUDA graph to its next, of the graph with the most time.

    None unless graphs traced whole take most of the kernel time, and their launches keep pace with them.
    """
    graphs = whole_graphs(spans)
    kernels_ns = spans.filter(pl.col("kind") == "kernel")["duration_ns"].sum()
    if 2 * graphs["duration_ns"].sum() <= kernels_ns:
        return pl.DataFrame(schema=_STEP_SCHEMA)
    totals = graphs.group_by("name").agg(pl.col("duration_ns").sum())
    longest = totals.sort(["duration_ns", "name"], descending=[True, False]).head(1)
    launched = with_launch(graphs.join(longest, on="name", how="semi"), spans).drop_nulls("launch_ns")
    ran, calls = (launched[name].sort() for name in ("start_ns", "launch_ns"))
    if calls.len() < _MIN_LAUNCHES or calls[-1] - calls[0] < _MIN_PACE * (ran[-1] - ran[0]):
        return pl.DataFrame(schema=_STEP_SCHEMA)
    bounds = pl.DataFrame({"start_ns": calls[:-1], "duration_ns": calls.diff()[1:]})
    return bounds.with_row_index("step").select(
        pl.col("step").cast(pl.Int64), "start_ns", "duration_ns", source=pl.lit(GRAPH_LAUNCHES)
    )


def _counted(ranges: pl.DataFrame) -> pl.DataFrame:
    """Return the outermost ranges with numbered names; of several series, the one with the most time."""
    series = ["tid", "prefix"]
    counted = (
        ranges.with_columns(
            prefix=pl.col("name").str.extract(_COUNTED, 1),
            step=pl.col("name").str.extract(_COUNTED, 2).cast(pl.Int64, strict=False),
        )
        .drop_nulls("step")
        .sort("start_ns", maintain_order=True)
    )
    # A number that recurs counts something within a step; steps do not overlap.
    apart = (pl.col("start_ns") >= pl.col("end_ns").shift(1).over(series)).fill_null(True)
    candidates = (
        counted.with_columns(apart=apart)
        .group_by(series)
        .agg(
            total=pl.col("duration_ns").sum(),
            sound=pl.col("step").is_unique().all() & pl.col("apart").all(),
        )
    )
    best = (
        candidates.filter("sound").sort(["total", "prefix", "tid"], descending=[True, False, False]).head(1)
    )
    steps = counted.join(best, on=series, how="semi").with_columns(source=pl.format("NVTX {}N", "prefix"))
    return steps.select(_STEP_COLUMNS).sort("step")


def _busiest_phase(top: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the phase that occurs once (set-up, warm-up, measured loop) and has most of the kernel time.

    Args:
        top: ranges at the top level of threads.
    """
    phases = top.sort("start_ns")
    kernels = spans.filter(pl.col("kind") == "kernel").select("start_ns", busy="duration_ns").sort("start_ns")
    placed = kernels.join_asof(phases.select("start_ns", begin="start_ns", end="end_ns"), on="start_ns")
    busy = placed.filter(pl.col("start_ns") < pl.col("end")).group_by("begin").agg(pl.col("busy").sum())
    longest = busy.filter(pl.col("busy") > kernels["busy"].sum() / 2)
    chosen = phases.join(longest, left_on="start_ns", right_on="begin", how="semi").head(1)
    return _cycles(chosen.with_columns(nth=pl.lit(0, pl.Int64)))


def _repeated(top: pl.DataFrame) -> pl.DataFrame:
    """Return the repeating ranges at the top level of a thread that take the most time.

    Ranges that occur equally often, one after the other (forward, backward, optimizer), form a step together.

    Args:
        top: ranges at the top level of threads.
    """
    named = top.with_columns(
        count=pl.len().over("tid", "name"), nth=pl.int_range(pl.len()).over("tid", "name")
    )
    repeated = named.filter(pl.col("count") > 1)
    totals = repeated.group_by("tid", "name", "count").agg(total=pl.col("duration_ns").sum())
    longest = totals.sort(["total", "name", "tid"], descending=[True, False, False]).head(1)
    alone = repeated.join(longest, on=["tid", "name"], how="semi")
    together = _cycles(repeated.join(longest, on=["tid", "count"], how="semi"))
    if (together["start_ns"] >= together["start_ns"].shift(1) + together["duration_ns"].shift(1)).all():
        return together
    return _cycles(alone)


def _cycles(ranges: pl.DataFrame) -> pl.DataFrame:
    """Combine the n-th range of each name, in order."""
    first, last = pl.col("start_ns").min(), pl.col("end_ns").max()
    cycles = ranges.group_by("nth").agg(
        start_ns=first,
        duration_ns=last - first,
        source=pl.lit("NVTX ") + pl.col("name").sort_by("start_ns").str.join(", "),
    )
    return cycles.rename({"nth": "step"}).select(_STEP_COLUMNS).sort("step")


# Synchronisation: the calls that waited, and the streams or events they waited for.

_SYNC_COLUMNS = [name for name in SYNCS.columns if name != "rank"]


def read_syncs(spans: pl.DataFrame, synchronised: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `syncs` of one process.

    Args:
        spans: its spans, with `span_id`.
        synchronised, recorded: its synchronisations and recorded events, with `process`, `correlation`,
            `device`, `stream`, `event_id`; the first also with `start_ns`, `duration_ns`.
    """
    calls = spans.filter(pl.col("kind") == "runtime").select(
        "name", "span_id", "correlation", "start_ns", "duration_ns"
    )
    named = sync_calls(calls)
    details = pl.concat([synchronised.drop("start_ns", "duration_ns"), recorded]).unique(
        "correlation", keep="first", maintain_order=True
    )
    by_call = named.join(details.drop("process"), on="correlation", how="left", maintain_order="left")
    # Queries wait for nothing, though they are recorded as synchronisations.
    asked = calls.filter(pl.col("name").str.contains(r"^(cuda|cu|hip)(Event|Stream)Query"))
    made = pl.concat([named.select("correlation"), asked.select("correlation")])
    uncalled = synchronised.join(made, on="correlation", how="anti").with_columns(
        kind=_kind_by_content(), span_id=pl.lit(-1, pl.Int64)
    )
    rows = _with_records(_with_device(pl.concat([by_call, uncalled], how="diagonal"), spans))
    rows = rows.with_columns(window=pl.lit(0), duration_ns=pl.col("duration_ns").clip(lower_bound=-1))
    return rows.with_columns(pl.col(pl.Int64).fill_null(-1)).select(_SYNC_COLUMNS)


def _with_device(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Set the device of a stream to where its work ran: some versions record a wrong one (always 0)."""
    ran = spans.filter(pl.col("stream") >= 0).select("stream", ran_on="device").unique()
    alone = ran.unique("stream", keep="none")
    placed = rows.join(alone, on="stream", how="left", maintain_order="left")
    return placed.with_columns(device=pl.coalesce("ran_on", "device")).drop("ran_on")


def _kind_by_content() -> pl.Expr:
    """Return the kind of a synchronisation, from the stream and event that it names."""
    event, stream = pl.col("event_id") >= 0, pl.col("stream") >= 0
    return (
        pl.when(event & stream)
        .then(pl.lit("stream_wait_event"))
        .when(event)
        .then(pl.lit("event_sync"))
        .when(stream)
        .then(pl.lit("stream_sync"))
        .otherwise(pl.lit("device_sync"))
    )


def _with_records(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the last record of an event before each wait for it."""
    records = rows.filter((pl.col("kind") == "event_record") & (pl.col("event_id") >= 0)).select(
        "event_id", "start_ns", record_stream="stream", record_correlation="correlation"
    )
    waits = pl.col("kind").is_in(["stream_wait_event", "event_sync"])
    recorded = rows.sort("start_ns", "span_id").join_asof(
        records.sort("start_ns"), on="start_ns", by="event_id", check_sortedness=False
    )
    return recorded.with_columns(
        pl.when(waits & (pl.col("event_id") >= 0)).then(name).otherwise(-1).alias(name)
        for name in ("record_stream", "record_correlation")
    )
