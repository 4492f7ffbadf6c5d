"""Which spans a change acts on, so that the timeline marks them.

In: a graph, and the graph of the changed job. Out: an expression that the timeline's search takes, the ranks
whose spans these are, and how much of the change they hold. Where work is added or taken away, or what is
changed has no name of its own, nothing can be marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dpro.dashboards.timeline.search import LONGEST, literally
from dpro.replay.graph import Graph

NEARLY_ALL = (
    0.9  # of the time of the spans of a name that is of changed ones, for the name to mark the change
)
MIN_SHARE, ENOUGH = 0.5, 0.95  # of the change: what names have to hold, and from where on no more are needed
LITTLE = 0.01  # of the change: ranks that have less of it are not shown
MIN_LETTERS = (40, 4)  # letters of a name that is shortened: as many as there is room for


class ChangedSpans(NamedTuple):
    """What the timeline marks of a change.

    Attributes:
        find: an expression for the names of the spans.
        ranks: that have the change; empty where all do.
        share: of the changed time, that these spans hold.
    """

    find: str
    ranks: tuple[int, ...]
    share: float


def changed_spans(before: Graph, after: Graph) -> ChangedSpans | None:
    """The spans whose time differs between two graphs; None where names do not distinguish them."""
    if not after.has_nodes_of(before):
        return None
    nodes = before.nodes
    of_spans = (nodes.span >= 0) & (nodes.step >= 0)
    rank, name, duration = nodes.rank[of_spans], nodes.name[of_spans], nodes.duration[of_spans]
    delta = np.abs(after.nodes.duration - nodes.duration)[of_spans]
    whole_ns = float(delta.sum())
    if not whole_ns:
        return None
    ranks = np.flatnonzero(np.bincount(rank, delta) >= LITTLE * whole_ns).tolist()
    if ranks != before.ranks:
        shown = np.isin(rank, ranks)
        name, duration, delta = name[shown], duration[shown], delta[shown]
    changed_ns, total_ns = np.bincount(name, duration * (delta > 0)), np.bincount(name, duration)
    by_name = np.bincount(name, delta)
    order = sorted(np.flatnonzero(total_ns), key=lambda name: (-by_name[name], name))
    shares = {
        before.names[name]: (by_name[name] / whole_ns, bool(changed_ns[name] >= NEARLY_ALL * total_ns[name]))
        for name in order
    }
    for least in MIN_LETTERS:
        beginnings = _beginnings(shares, least)
        held = sum(share for text, (share, _) in shares.items() if text.startswith(tuple(beginnings)))
        if held >= MIN_SHARE:
            return ChangedSpans(_expression(beginnings), tuple(ranks) if ranks != before.ranks else (), held)
    return None


def _beginnings(shares: Mapping[str, tuple[float, bool]], least: int) -> list[str]:
    """The shortest beginnings of names that only marked names have, as many as are needed and have room.

    Args:
        shares: of the change, by name, and whether it marks the change; the largest first.
        least: letters of each.
    """
    others = [text for text, (_, marks) in shares.items() if not marks]
    chosen: list[str] = []
    held = 0.0
    for text, (share, marks) in shares.items():
        if held >= ENOUGH or not share:
            break
        if text.startswith(tuple(chosen)):
            held += share
            continue
        alone = (text[:end] for end in range(min(least, len(text)), len(text) + 1))
        shortest = next((part for part in alone if not any(other.startswith(part) for other in others)), "")
        if marks and shortest and len(_expression([*chosen, shortest])) <= LONGEST:
            chosen.append(shortest)
            held += share
    return chosen


def _expression(beginnings: Sequence[str]) -> str:
    return f"^({'|'.join(map(literally, beginnings))})"
