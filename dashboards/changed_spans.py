"""Spans that an edit changes, for the timeline to mark.

Takes the graph before and after the edit; returns an expression for the timeline's search, the ranks with
these spans, and their share of the change. Marks nothing if the edit adds or removes work, or if names do not
distinguish the changed spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dpro.dashboards.timeline.search import LONGEST, literally
from dpro.replay.graph import Graph

NEARLY_ALL = 0.9  # share of a name's time in changed spans, from which the name marks the change
# Shares of the change: the least that names must cover, and enough to add no more names.
MIN_SHARE, ENOUGH = 0.5, 0.8
LITTLE = 0.01  # share of the change: ranks with less are left out
MIN_LETTERS = (40, 4)  # least letters of a shortened name: the second is tried if the first marks too little


class ChangedSpans(NamedTuple):
    """Search for the spans that an edit changes.

    Attributes:
        find: an expression for the names of the spans.
        ranks: ranks with changed spans; empty if all ranks have some.
        share: share of the changed time that is in these spans.
    """

    find: str
    ranks: tuple[int, ...]
    share: float


def changed_spans(before: Graph, after: Graph) -> ChangedSpans | None:
    """Return the spans whose time differs between two graphs; None if names do not distinguish them."""
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
        beginnings = _shortest_prefixes(shares, least)
        held = sum(share for text, (share, _) in shares.items() if text.startswith(tuple(beginnings)))
        if held >= MIN_SHARE:
            return ChangedSpans(_expression(beginnings), tuple(ranks) if ranks != before.ranks else (), held)
    return None


def _shortest_prefixes(shares: Mapping[str, tuple[float, bool]], least: int) -> list[str]:
    """Return the shortest beginnings that only names marking the change have, up to the expression's limit.

    Args:
        shares: share of the change, and whether the name marks it, by name; the largest first.
        least: least number of letters of each beginning.
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
