"""What flows load by hashes that are not known: the same flows under many seeds.

In: flows and next hops. Out: their load by each seed, in the order of how slow it makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro.replay.fabric.connections import known_paths
from dpro.replay.fabric.fairness import max_min_rates
from dpro.replay.fabric.flows import Flows, Load, loaded
from dpro.replay.fabric.routes import Routes, hashed
from dpro.topology.paths import PathEntry

SEEDS = 40


def hashed_loads(flows: Flows, routes: Routes, known: Sequence[PathEntry] = ()) -> list[Load]:
    """The load by the hash of each seed: first the one under which all communications at once are fastest.

    Args:
        known: paths that no hash decides.

    Raises:
        Unanswerable: no path leads from a port to another, or a known one is none.
    """

    paths = known_paths(flows, routes, known)
    seeds = SEEDS if paths.missing.size or not known else 1
    loads = [loaded(flows, routes, paths.choice(hashed(flows.key, seed))) for seed in range(seeds)]

    def slowness(load: Load) -> float:
        return float((1 / np.maximum(max_min_rates(load, routes.network.gbps), 1e-12)).sum())

    return sorted(loads, key=slowness)


def quantile(loads: Sequence[Load], share: float) -> Load:
    """The load at a share of the seeds.

    Args:
        loads: in order.
        share: 0 for the first, 1 for the last.
    """
    return loads[round(share * (len(loads) - 1))]
