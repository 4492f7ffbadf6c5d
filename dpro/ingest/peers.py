"""Which global rank the other side of a send or receive is.

In: what the source says, which may number ranks within the group or across the job (PyTorch does both). Out: the
global rank.
"""

from __future__ import annotations

from collections.abc import Sequence


def global_peer(own: int, peer: int, rank: int, ranks: Sequence[int]) -> int:
    """The peer as a global rank.

    Args:
        own: this side's number as recorded, -1 unknown.
        peer: the other side's number as recorded, -1 unknown.
        rank: this side's global rank, -1 unknown.
        ranks: global ranks of the group, in order; empty unknown.

    Returns:
        The global rank; the number as recorded where the group is not known.
    """
    if peer < 0 or not ranks:
        return peer
    if peer in ranks and own in (rank, -1):
        return peer
    return ranks[peer] if peer < len(ranks) else peer
