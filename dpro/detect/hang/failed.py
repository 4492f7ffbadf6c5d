"""Calls that count as completed because they failed, which would hide what a job waited for.

In: `Records`. Out: the same with such calls unfinished. When a process is ended, or loses a peer, the calls
that it waits in fail, and PyTorch's flight recorder marks them completed. A collective that waits for all its
ranks cannot have completed while one of them never called it.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from dpro.detect.hang.deaths import lost_peer
from dpro.detect.hang.records import SYNCHRONISING, UNFINISHED, Records
from dpro.units import NS_PER_S

MIN_SILENT_NS = 4 * NS_PER_S  # a rank whose records lack a call for this long did not make it


def with_failed(records: Records) -> Records:
    """Mark calls that were completed by failing as unfinished.

    Returns:
        The records with these calls `scheduled`, and with `status` lowered to the last call that completed.
    """
    ranks = records.ranks
    bad = ranks.filter((pl.col("exit_code") > 0) | (pl.col("exit_signal") > 0) | (pl.col("failed_ns") > 0))
    if bad.is_empty():
        return records
    ended = records.calls.join(bad.select("rank"), on="rank", how="semi", maintain_order="left")
    failed = pl.concat([_never_made_by_all(ended, records), _last_before_loss(ended, records)]).unique()
    calls = records.calls.join(
        failed.with_columns(failed=True), on=["rank", "order"], how="left", maintain_order="left"
    ).with_columns(state=pl.when("failed").then(pl.lit("scheduled")).otherwise("state"))
    open_ = calls.filter(pl.col("state").is_in(UNFINISHED) & ~pl.col("p2p")).join(bad, on="rank", how="semi")
    first = open_.group_by("rank", "key").agg(first=pl.col("sequence").min())
    return replace(records, calls=calls.drop("failed"), status=_held_back(records.status, first))


def _never_made_by_all(ended: pl.DataFrame, records: Records) -> pl.DataFrame:
    """Return `rank`, `order` of completed collectives of ended ranks that another member did not call."""
    issued = _issued(records)
    last = records.members.join(
        records.ranks.filter("dumped").select("rank", "saved_ns", "final"), on="rank"
    ).join(issued, on=["rank", "key"], how="left")
    last = last.select("key", "saved_ns", "final", reached=pl.col("issued").fill_null(-1), member="rank")
    done = ended.filter((pl.col("state") == "completed") & pl.col("op").is_in(SYNCHRONISING) & ~pl.col("p2p"))
    furthest = last.group_by("key").agg(least=pl.col("reached").min())
    done = done.join(furthest, on="key").filter(pl.col("sequence") > pl.col("least"))
    latest = pl.col("enqueued_ns").max().over("rank", "key")
    pairs = (
        done.with_columns(latest=latest).join(last, on="key").filter(pl.col("reached") < pl.col("sequence"))
    )
    silent = (pl.col("saved_ns") >= pl.col("enqueued_ns") + MIN_SILENT_NS) & (
        pl.col("latest") <= pl.col("saved_ns")
    )
    return pairs.filter(pl.col("final") | silent).select("rank", "order")


def _last_before_loss(calls: pl.DataFrame, records: Records) -> pl.DataFrame:
    """Return `rank`, `order` of the last call of each rank that lost a peer, if a gone member lacks it."""
    lost = [rank for rank, error in records.ranks.select("rank", "error").iter_rows() if lost_peer(error)]
    ended = pl.col("exit_code").ge(0) | pl.col("exit_signal").gt(0)
    gone = records.ranks.filter(ended & ~pl.col("rank").is_in(lost)).select("rank")
    last = calls.filter(pl.col("rank").is_in(lost)).sort("rank", "order").unique("rank", keep="last")
    last = last.filter(pl.col("state") == "completed")
    reached = records.members.join(gone, on="rank").join(_issued(records), on=["rank", "key"], how="left")
    least = reached.group_by("key").agg(least=pl.col("issued").fill_null(-1).min())
    behind = last.filter(~pl.col("p2p")).join(least, on="key").filter(pl.col("least") < pl.col("sequence"))
    sends = records.calls.filter(pl.col("op") == "send")
    sent = sends.group_by("key", peer="rank", rank="peer").agg(sent=pl.col("sequence").max())
    messages = last.filter(pl.col("p2p") & (pl.col("op") == "recv"))
    messages = messages.join(gone.rename({"rank": "peer"}), on="peer")
    messages = messages.join(sent, on=["key", "peer", "rank"], how="left")
    unsent = messages.filter(pl.col("sent").fill_null(-1) < pl.col("sequence"))
    return pl.concat([each.select("rank", "order") for each in (behind, unsent)])


def _issued(records: Records) -> pl.DataFrame:
    """Return `rank`, `key`, `issued`: the last collective that each rank is known to have called."""
    calls = records.calls.filter(~pl.col("p2p")).select("rank", "key", issued="sequence")
    reported = records.status.select("rank", "key", issued="enqueued")
    return pl.concat([calls, reported]).group_by("rank", "key").agg(pl.col("issued").max())


def _held_back(status: pl.DataFrame, unfinished: pl.DataFrame) -> pl.DataFrame:
    """Lower what ranks reported as completed to the call before the first unfinished one.

    Args:
        status: as of `Records`.
        unfinished: `rank`, `key`, `first`: sequence number of that call.
    """
    joined = status.join(unfinished, on=["rank", "key"], how="left", maintain_order="left")
    return joined.with_columns(completed=pl.min_horizontal("completed", pl.col("first") - 1)).drop("first")
