"""Wait and transfer: the two parts of the time of each member of a collective.

Takes matched collectives and the alignment of their clocks; returns the rows with both parts. Graph, tables
and views all split by these functions, so that they agree.
"""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from dpro.members import members_of
from dpro.replay.alignment.align import Alignment
from dpro.replay.alignment.match import POINT_TO_POINT
from dpro.schema.members import GROUP_RANKS, num_members, of_each_text


def wait_and_transfer(matched: pl.DataFrame) -> pl.DataFrame:
    """Split each member's time in a collective into wait and transfer.

    All members move data once the last has arrived: a member's transfer is its own end minus the latest start
    in the group (Lin et al., OSDI 2025, section 3.2).

    A message of CPU tensors lasts in the trace until its caller asks for it, so its transfer is the shorter
    one of its two sides.

    Args:
        matched: rows of `Matching`, on the aligned clock.

    Returns:
        The rows with `rendezvous_ns` (aligned), `transfer_ns` and `is_message`.
    """
    transfer = (pl.col("start_ns") + pl.col("duration_ns") - pl.col("rendezvous_ns")).clip(lower_bound=0)
    is_message = pl.col("op").is_in(POINT_TO_POINT) & (pl.col("device") < 0)
    rows = matched.with_columns(
        rendezvous_ns=pl.col("start_ns").max().over("instance"), is_message=is_message.fill_null(False)
    )
    shortest = transfer.min().over("instance")
    return rows.with_columns(transfer_ns=pl.when("is_message").then(shortest).otherwise(transfer))


def without_transfers(matched: pl.DataFrame) -> pl.DataFrame:
    """Return what `wait_and_transfer` would, for pretended collectives: no waits, and no transfers.

    Args:
        matched: rows of `Matching`.
    """
    return matched.with_columns(
        rendezvous_ns=pl.col("start_ns"), is_message=pl.lit(False), transfer_ns=pl.lit(0, pl.Int64)
    )


def may_meet(missing: Collection[int]) -> pl.Expr:
    """Return an expression: whether ranks without a record take part in the collective of a row, or may.

    Any of them may belong to a group whose ranks are not known; a message is between a rank and its peer.

    Args:
        missing: the ranks without a record.
    """
    if not missing:
        return pl.lit(False)
    absent = {*missing}
    of_group = of_each_text(
        GROUP_RANKS, lambda text: not text or not absent.isdisjoint(members_of(text)), pl.Boolean()
    )
    is_message = pl.col("peer") >= 0
    return pl.when(is_message).then(pl.col("peer").is_in(sorted(absent))).otherwise(of_group.fill_null(True))


def split_members(
    matched: pl.DataFrame, alignment: Alignment | None = None, missing: Collection[int] = ()
) -> pl.DataFrame:
    """Return the members of each collective with `wait_ns` and `transfer_ns`, which add up to `duration_ns`.

    Args:
        matched: rows of `Matching`, each on its rank's own clock.
        alignment: None if the members did not run at the same time, as pretended ranks, or if only their
            durations are known: the transfer is then the shortest duration among them.
        missing: ranks of the job without a record.

    Returns:
        The rows in their order with `complete`, whether all members have rows, and both parts, null where
        they do not: a member without a record may have come last.
    """
    are_here = pl.col("members") >= pl.max_horizontal("expected", num_members(), 2)
    rows = matched.with_columns(complete=are_here & ~may_meet(missing))
    shortest = pl.col("duration_ns").min().over("instance")
    if alignment is None:
        transfer = rows.select(shortest).to_series()
    else:
        transfer = wait_and_transfer(alignment.aligned(matched))["transfer_ns"]
    rows = rows.with_columns(pl.min_horizontal(transfer, "duration_ns").alias("transfer_ns"))
    parts = rows.with_columns(wait_ns=pl.col("duration_ns") - pl.col("transfer_ns"))
    return parts.with_columns(pl.when("complete").then(pl.col("wait_ns", "transfer_ns")))
