"""Communication in a Nsight Systems export: rows of `collectives` from communication kernels.

In: one process's spans. Out: one row per communication kernel: what it does, from PyTorch's and NCCL's own
NVTX ranges around its launch, else from its name; sizes and peers only where the payload of NCCL's ranges was
exported (`nsys export --include-json=true`). Matching the ranks with each other is left to `dpro.replay`.
"""

from __future__ import annotations

import polars as pl

from dpro.classify import classify, is_communication, operation
from dpro.ingest.derived.launches import enclosed, launched

_COLUMNS = (
    *("collective_id", "window", "op", "group", "peer", "bytes_in", "bytes_out", "enqueued_ns"),
    *("start_ns", "duration_ns", "span_id", "launch_span_id", "source"),
)
_NCCL = r"^nccl[A-Z]"
# As NCCL names the fields of the payload of its ranges.
_SIZE = r'"Message size[^"]*"\s*:\s*"?(\d+)'
_PEER = r'"Peer rank"\s*:\s*"?(\d+)'
_COMMUNICATOR = r'"NCCL communicator ID"\s*:\s*"?(\w+)'


def read_collectives(spans: pl.DataFrame) -> pl.DataFrame:
    """One row per communication kernel of one process.

    Args:
        spans: its spans, with `span_id`.
    """
    kernels = spans.filter(pl.col("kind") == "kernel")
    names = [name for name in kernels["name"].unique() if is_communication(name)]
    kernels = kernels.filter(pl.col("name").is_in(names))
    ran = launched(kernels.select("span_id", "name", "start_ns", "duration_ns", "correlation"), spans)
    issues = _issues(spans)
    ranges = spans.filter(pl.col("kind") == "annotation").with_columns(position="span_id")
    ran = enclosed(ran, ranges.filter(pl.col("name").str.starts_with("nccl:")), "range")
    ran = enclosed(ran, issues.rename({"span_id": "position"}), "issue")
    of_issue = issues.select("op", "group", "bytes_in", "bytes_out", "peer", issue_position="span_id")
    ran = ran.join(of_issue, on="issue_position", how="left")
    # Several kernels of one group of calls: which of them moved what is not known.
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
    """NCCL's ranges in which work is launched: a call of its own, or the end of the group it is in.

    Returns:
        `span_id`, `tid`, `start_ns`, `duration_ns`, `name` of the range, and of the calls it launches `op`
        (empty where they differ), `group`, `bytes_in`, `bytes_out` and `peer`.
    """
    nccl = (
        spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.contains(_NCCL))
        .sort("tid", "start_ns", "span_id")
        .select("span_id", "tid", "start_ns", "duration_ns", "name", "payload")
    )
    ops = {name: operation(name.removeprefix("nccl")) for name in nccl["name"].unique()}
    opened, closed = pl.col("name") == "ncclGroupStart", pl.col("name") == "ncclGroupEnd"
    level = (opened.cast(pl.Int64) - closed.cast(pl.Int64)).cum_sum().over("tid")
    # The window may open inside a group: what is closed but was never opened does not count.
    depth = level - pl.min_horizontal(level.cum_min().over("tid"), 0)
    nccl = nccl.with_columns(
        op=pl.col("name").replace_strict(ops, default="", return_dtype=pl.String), depth=depth
    ).with_columns(ends=pl.when(closed & (pl.col("depth") == 0)).then("span_id"))
    calls = nccl.with_columns(
        issue=pl.when(pl.col("depth") == 0)
        .then("span_id")
        .otherwise(pl.col("ends").backward_fill().over("tid")),
        size=pl.col("payload").str.extract(_SIZE).cast(pl.Int64, strict=False),
        peer=pl.col("payload").str.extract(_PEER).cast(pl.Int64, strict=False),
        communicator=pl.col("payload").str.extract(_COMMUNICATOR),
    ).filter(pl.col("op") != "")
    return nccl.select("span_id", "tid", "start_ns", "duration_ns", "name").join(
        _together(calls), left_on="span_id", right_on="issue"
    )


def _together(calls: pl.DataFrame) -> pl.DataFrame:
    """What the calls of each group do together.

    NCCL states of an all-gather what a rank puts in, of a reduce-scatter what it gets.
    """
    op, size = pl.col("op"), pl.col("size")
    both = ~op.is_in(["send", "recv", "all_gather", "reduce_scatter"])
    puts = pl.when(op.is_in(["send", "all_gather"]) | both).then(size).when(op == "recv").then(0)
    gets = pl.when(op.is_in(["recv", "reduce_scatter"]) | both).then(size).when(op == "send").then(0)
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
