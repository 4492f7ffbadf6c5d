"""Sends and receives as the tables state them, whatever way a source does.

In: ranks that may be numbered within the group or across the job (PyTorch does both), and sizes given for
both directions. Out: global ranks, and bytes only in the direction they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpro.ingest.values import int32


def ranks_of(listed: Sequence[Any]) -> Sequence[int]:
    """The ranks of a group as recorded, numbers or texts; none where one of them is no rank."""
    ranks = tuple(map(int32, listed))
    return ranks if min(ranks, default=0) >= 0 else ()


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
    """A send gets nothing and a receive puts nothing in; other operations are as they were."""
    if op == "send":
        return bytes_in, 0 if bytes_in >= 0 else -1
    if op == "recv":
        return 0 if bytes_out >= 0 else -1, bytes_out
    return bytes_in, bytes_out
