"""How fast flows are that share links: max-min fairness by progressive filling.

In: the links of each flow, and what links carry. Out: rates. All flows grow evenly until a link is full;
those that cross it stay, the others grow on (Bertsekas and Gallager, Data Networks, 2nd edition, section
6.5.2). A flow that crosses a link several times (a ring whose neighbours share a cable) takes that many
shares of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.replay.engine import compiled

FULL = 1e-9  # share of a link's capacity below which nothing is left


@compiled
def _fill(indptr: Any, links: Any, capacity: Any, rate: Any) -> None:
    num_flows = indptr.size - 1
    left = capacity.copy()
    growing = np.zeros(capacity.size)  # crossings of each link by flows that still grow
    for at in range(links.size):
        growing[links[at]] += 1.0
    remaining = num_flows
    level = 0.0
    while remaining > 0:
        step = np.inf
        for link in range(capacity.size):
            if growing[link] > 0:
                step = min(step, left[link] / growing[link])
        if step == np.inf:  # what is left crosses no link at all
            rate[rate < 0] = np.inf
            return
        level += step
        for link in range(capacity.size):
            left[link] -= step * growing[link]
        for flow in range(num_flows):
            if rate[flow] >= 0:
                continue
            for at in range(indptr[flow], indptr[flow + 1]):
                if left[links[at]] <= FULL * capacity[links[at]]:
                    rate[flow] = level
                    remaining -= 1
                    break
            if rate[flow] >= 0:  # its share of other links is free for the next round
                for at in range(indptr[flow], indptr[flow + 1]):
                    growing[links[at]] -= 1.0


def max_min_rates(flows: tuple[Ints, Ints], capacity: Floats) -> Floats:
    """[F] rate of each flow, in units of the capacity.

    Args:
        flows: indptr [F + 1] and links: flow i crosses links[indptr[i]:indptr[i + 1]].
        capacity: [L] of each link, more than 0.
    """
    indptr, links = flows
    rate = np.full(indptr.size - 1, -1.0)
    _fill(indptr, links, capacity, rate)
    return rate
