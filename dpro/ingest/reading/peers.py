"""Sends and receives as the tables state them, from what sources state.

In: ranks that may be numbered within the group or across the job (PyTorch does both), and sizes given for
both directions. Out: global ranks, and bytes only in the direction they go.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

from dpro.ingest.reading.values import int32
from dpro.members import members_text
from dpro.schema.members import GROUP_RANKS

Array = np.ndarray[Any, np.dtype[np.int64]]


def ranks_of(listed: Sequence[Any]) -> Sequence[int]:
    """The ranks of a group as recorded, numbers or texts; none where one of them is no rank."""
    ranks = tuple(map(int32, listed))
    return ranks if min(ranks, default=0) >= 0 else ()


@lru_cache(maxsize=64)
def ranks_in(listed: str) -> Sequence[int]:
    """The ranks in a text such as "[0, 1]", which is the same in all calls of a group."""
    return ranks_of(re.findall(r"\d+", listed))


def of_each_call(ranks: Sequence[Sequence[int]], of_call: Array) -> pl.Series:
    """The ranks of the group of each call, as text.

    Args:
        of_call: [N] which of them each call is of.
    """
    return pl.Series(GROUP_RANKS, list(map(members_text, ranks)), pl.String)[of_call]


def global_peer(own: int, peer: int, rank: int, ranks: Sequence[int]) -> int:
    """The other side as a global rank.

    Args:
        own: this side's number as recorded, -1 where only the peer is.
        peer: the other side's number as recorded, -1 unknown.
        rank: this side's global rank.
        ranks: global ranks of the group, in order; empty unknown.

    Returns:
        The global rank; the number as recorded where the group is not known.
    """
    if peer < 0 or not ranks:
        return peer
    within_group = (own >= 0 and own != rank) or peer not in ranks or peer == rank
    return ranks[peer] if within_group and peer < len(ranks) else peer


def directed_bytes(op: str, bytes_in: int, bytes_out: int) -> tuple[int, int]:
    """Bytes in and out of an operation: a send gets nothing, and a receive puts nothing in.

    Args:
        bytes_in: as the source states them, -1 unknown.
        bytes_out: as the source states them, -1 unknown.
    """
    if op == "send":
        return bytes_in, 0 if bytes_in >= 0 else -1
    if op == "recv":
        return 0 if bytes_out >= 0 else -1, bytes_out
    return bytes_in, bytes_out
