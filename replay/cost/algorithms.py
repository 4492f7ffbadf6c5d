"""What collectives cost by the algorithm that runs them: messages one after the other, and bytes on a link.

In: an operation, an algorithm, a number of ranks. Out: `Cost`, in which a message costs alpha and a byte of
the payload beta. Of a fitted curve (`curves.py`) the latency is messages * alpha, and what depends on
bytes share * beta(bytes) * bytes, of the algorithm that ran, so that it predicts what another one, or another
number of ranks, would cost.

Ring and halving (recursive halving and doubling): Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005). Tree, for
all-reduces: two binary trees at once (Sanders, Speck and Traeff, Parallel Computing 35, 2009), as NCCL does
it, in a pipeline of pieces. In two levels: reduce-scatter within hosts, all-reduce between them, all-gather
within (Cho et al., BlueConnect, MLSys 2019), with one port per host.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from dpro.arrays import Floats
from dpro.errors import Unanswerable
from dpro.replay.cost.curves import LinkCost

RING, TREE, HALVING = "ring", "tree", "halving"
FLAT = (RING, TREE, HALVING)
ONE_WAY = ("all_gather", "reduce_scatter")  # an all-reduce is one of each, one after the other


@dataclass(frozen=True)
class Cost:
    """Of one collective: `messages` * alpha + `share` * bytes * beta."""

    messages: float
    share: float


@dataclass(frozen=True)
class LinkModel:
    """What a message costs on a link, ns, and a byte of each of some payloads, [T] ns, or of any."""

    alpha: float
    beta: Floats | float


def cost(op: str, algorithm: str, num_ranks: int) -> Cost:
    """What an operation of this many ranks costs.

    Args:
        op: as in the `collectives` table.
        algorithm: one of `FLAT`.

    Raises:
        Unanswerable: there is no formula for it.
    """
    if num_ranks < 2:
        return Cost(0.0, 0.0)
    share, rounds = (num_ranks - 1) / num_ranks, float(ceil(log2(num_ranks)))
    one_way = {RING: Cost(num_ranks - 1.0, share), HALVING: Cost(rounds, share)}
    if op in ONE_WAY and algorithm in one_way:
        return one_way[algorithm]
    if op == "all_to_all":  # pairwise, whatever runs the others
        return Cost(num_ranks - 1.0, share)
    if op == "all_reduce" and algorithm in FLAT:
        half = one_way.get(algorithm, Cost(rounds, 1.0))
        return Cost(2 * half.messages, 2 * half.share)
    raise Unanswerable(f"there is no formula for {op} by {algorithm}")


def link_of(curve: LinkCost, spent: Cost, num_bytes: Floats) -> LinkModel:
    """The link on which collectives of this cost take what their curve says.

    Args:
        num_bytes: [T] payloads above 0.
    """
    beta = curve.moving_ns(num_bytes) / num_bytes / spent.share
    return LinkModel(curve.latency_ns / spent.messages, beta)


def time_ns(spent: Cost, link: LinkModel, num_bytes: Floats) -> Floats:
    """[T] ns for payloads.

    Args:
        num_bytes: [T] payloads.
    """
    return spent.messages * link.alpha + spent.share * link.beta * num_bytes


def two_level_ns(
    op: str, hosts: int, per_host: int, outside: LinkModel, inside: LinkModel, num_bytes: Floats
) -> Floats:
    """[T] ns of a collective that runs within hosts first, then between them; each ring by ring.

    Each rank of a host takes its share of the payload to its counterparts: the host's one port moves all
    shares.

    Args:
        op: as in the `collectives` table.
        num_bytes: [T] payloads.

    Raises:
        Unanswerable: there is no formula for it.
    """
    if op not in (*ONE_WAY, "all_reduce"):
        raise Unanswerable(f"there is no formula for {op} in two levels")
    within, between = cost(op, RING, per_host), cost(op, RING, hosts)
    return time_ns(within, inside, num_bytes) + time_ns(between, outside, num_bytes)
