"""When the last member of each collective had arrived: what separates waiting from transfer.

In: tables `collectives` and `spans`. Out: frames in integer ns, each rank's times on its own clock. All
members move data together, so the transfer is the shortest duration among them, and what a member spent
before it is wait. Durations are compared, never times of different ranks: no clock has to be known. A
collective is split only where all members of its group were matched.
"""

from __future__ import annotations

import polars as pl

from dpro.replay.alignment.match import match_collectives


def matched_members(collectives: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Find the members of each collective that ran, and what of their time was transfer.

    Args:
        collectives: table `collectives`.
        spans: table `spans`, for the stream that a collective ran on.

    Returns:
        The rows of `dpro.replay.alignment.match.Matching` with `complete` (all members are here) and
        `transfer_ns` (null where they are not).
    """
    rows = match_collectives(collectives, spans).rows
    size = pl.max_horizontal("expected", pl.col("group_ranks").list.len().cast(pl.Int64), 2)
    transfer = pl.col("duration_ns").min().over("instance")
    rows = rows.with_columns(complete=pl.col("members") >= size)
    return rows.with_columns(transfer_ns=pl.when("complete").then(transfer))


def ready_times(collectives: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Find until when each span of communication waited for other ranks.

    Args:
        collectives: table `collectives`.
        spans: table `spans`.

    Returns:
        `rank`, `span_id`, `ready_ns` (on the rank's own clock; null where not known), one row per span that
        ran a collective. A span that ran several collectives at once is ready when the last of them is.
    """
    rows = matched_members(collectives, spans)
    alone = pl.col("group_ranks").list.len() == 1  # a group of one rank waits for no other
    transfer = pl.when(alone).then("duration_ns").otherwise("transfer_ns")
    ready = pl.col("start_ns") + pl.col("duration_ns") - transfer
    last = pl.when(ready.is_null().any()).then(None).otherwise(ready.max())
    return rows.group_by("rank", "span_id").agg(ready_ns=last)
