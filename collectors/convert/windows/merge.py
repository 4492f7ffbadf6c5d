"""One row per collective: what a deep window saw of it, and what the flight recorder knew.

In: the collectives of a window (when they ran, on what) and the entries of the flight recorders (group,
sequence number, bytes, when the call was made). Out: the window's rows with both, and the entries that no
window saw. The two meet in time: an entry is made inside the call that issues the work.
"""

from __future__ import annotations

import polars as pl

from dpro.schema.members import num_members

SLACK_NS = 50_000  # an entry may seem this much later than the end of its call
LAUNCH_NS = 100_000_000  # the longest from an entry to the launch of its kernel
KERNEL = "kineto kernel"  # source of window rows that stand for a GPU kernel
# What gloo runs as something else, by the name under which its flight recorder knows it.
_GLOO_RUNS_AS = {"reduce_scatter": "all_reduce"}
_MESSAGES = ("send", "recv")
_FACTS = ("group", "group_ranks", "sequence", "bytes_in", "bytes_out", "dtype", "peer", "state")


def merge_window(collectives: pl.DataFrame, spans: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
    """The window's collectives with what the flight recorder knew of them.

    Args:
        entries: flight recorder entries of the rank, with their final `collective_id`.

    Returns:
        The rows; one that met an entry has its `collective_id`, the others keep theirs.
    """
    if collectives.is_empty() or entries.is_empty():
        return collectives
    met = pl.concat([_met_by_calls(collectives, spans, entries), _met_by_kernels(collectives, entries)])
    met = met.unique("entry", keep="first", maintain_order=True).unique(
        "row", keep="first", maintain_order=True
    )
    known = entries.select(
        pl.col("collective_id").alias("entry"), *(pl.col(n).alias(f"{n}_fr") for n in ("op", *_FACTS))
    )
    joined = (
        collectives.rename({"collective_id": "row"})
        .join(met, on="row", how="left", maintain_order="left")
        .join(known, on="entry", how="left", maintain_order="left")
    )
    # A reduce-scatter that was run as an all-reduce of all that it was given brings a part of it.
    part = pl.col("bytes_out_fr") // num_members("group_ranks_fr").clip(lower_bound=1)
    same = pl.col("op") == pl.col("op_fr")
    joined = joined.with_columns(bytes_out_fr=pl.when(same).then("bytes_out_fr").otherwise(part))
    facts = [pl.coalesce(_known(f"{name}_fr", entries.schema[name]), name).alias(name) for name in _FACTS]
    merged = joined.with_columns(*facts, collective_id=pl.coalesce("entry", "row"))
    return merged.select(collectives.columns)


def _known(name: str, dtype: pl.DataType) -> pl.Expr:
    """The column, null where it says unknown."""
    column = pl.col(name)
    return pl.when(column != "" if dtype == pl.String else column >= 0).then(column)


def _met_by_calls(collectives: pl.DataFrame, spans: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
    """Entries made during the CPU call that issued the work, as for gloo: pairs of `row` and `entry`."""
    calls = (
        collectives.filter((pl.col("source") != KERNEL) & (pl.col("launch_span_id") >= 0))
        .join(
            spans.select(launch_span_id="span_id", begin="start_ns", length="duration_ns"),
            on="launch_span_id",
        )
        .select("op", "begin", row="collective_id", end=pl.col("begin") + pl.col("length") + SLACK_NS)
    )
    other = calls.filter(pl.col("op").is_in(list(_GLOO_RUNS_AS))).with_columns(
        pl.col("op").replace(_GLOO_RUNS_AS)
    )
    calls = pl.concat([calls, other]).sort("begin", "row")
    made = entries.select("op", "enqueued_ns", entry="collective_id").sort("enqueued_ns", "entry")
    pairs = made.join_asof(calls, left_on="enqueued_ns", right_on="begin", by="op", check_sortedness=False)
    # Messages are noted once their call has returned, by the thread that made it: until the next one at most.
    inside = (pl.col("enqueued_ns") <= pl.col("end")) | pl.col("op").is_in(_MESSAGES)
    return pairs.filter(inside).drop_nulls("row").sort("entry").select("row", "entry")


def _met_by_kernels(collectives: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
    """The last entry before the launch of each kernel, as for NCCL: pairs of `row` and `entry`.

    Of messages that one kernel carries, the last is the last entry, the one before it that before, and so on.
    """
    launched = (
        collectives.filter((pl.col("source") == KERNEL) & (pl.col("enqueued_ns") >= 0))
        .select("op", launched="enqueued_ns", row="collective_id")
        .sort("launched", "row")
        .with_columns(
            after=pl.len().over("op", "launched") - 1 - pl.int_range(pl.len()).over("op", "launched")
        )
    )
    made = entries.select("op", "enqueued_ns", entry="collective_id").sort("enqueued_ns", "entry")
    made = made.with_columns(place=pl.int_range(pl.len()).over("op"))
    latest = launched.join_asof(
        made.drop("entry"),
        left_on="launched",
        right_on="enqueued_ns",
        by="op",
        tolerance=LAUNCH_NS,
        check_sortedness=False,
    ).drop_nulls("place")
    wanted = latest.select("op", "row", place=pl.col("place") - pl.col("after").cast(pl.Int64))
    return wanted.join(made, on=["op", "place"], maintain_order="left").select("row", "entry")
