"""How long the network of a large job takes: next hops, flows, hashes, a plan, and fair rates over time.

python -m benchmarks.speed.fabric [--hosts N] [--json]

A fat tree of N hosts with 8 GPUs and 8 ports each, and a step of a job on it: all-reduces within hosts, rings
over all hosts for each port, and all-to-alls of 16 hosts each. Paths and loads are computed for each kind of
communication, rates for each single one; next hops also for ten times as many hosts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.extensions.fabric.planning import plan_connection_paths
from dpro.replay.cost.fabric.connections import ends_of, hashed_loads
from dpro.replay.cost.fabric.flows import Flows, flows_of, repeated
from dpro.replay.cost.fabric.network import Fabric, fabric_of, routes_of

IN_HOST, RINGS, EXCHANGES = 40, 24, 6  # occurrences of each kind in a step
GROUP = 16  # hosts of an all-to-all
STEP_NS = 1e9


def step_of(fabric: Fabric, hosts: int) -> tuple[Flows, np.ndarray]:
    """Make the flows of each kind, and the kind of each communication of a step.

    Args:
        fabric: of these hosts.
        hosts: how many.
    """
    within = [list(own) for own in fabric.gpus]
    rings = [[own[at] for own in fabric.gpus] for at in range(8)]
    groups = [fabric.gpus[first : first + GROUP] for first in range(0, hosts, GROUP)]
    exchanges = [[own[at] for own in group] for at in range(8) for group in groups if len(group) > 1]
    ops = ["all_reduce"] * (len(within) + len(rings)) + ["all_to_all"] * len(exchanges)
    times = [IN_HOST] * len(within) + [RINGS] * len(rings) + [EXCHANGES] * len(exchanges)
    return flows_of(fabric, [*within, *rings, *exchanges], ops), np.repeat(np.arange(len(ops)), times)


def measured(hosts: int) -> dict[str, Any]:
    """Measure the seconds of each part.

    Args:
        hosts: how many.
    """
    found: dict[str, Any] = {"hosts": hosts, "gpus": 8 * hosts}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        found[f"{name}_s"] = round(time.perf_counter() - begin, 3)
        return result

    routes_of(fabric_of(fat_tree(FabricSize(2))))  # compiles loops
    many = fabric_of(fat_tree(FabricSize(10 * hosts)))
    timed("routes_of_ten_times", lambda: routes_of(many))
    fabric = fabric_of(fat_tree(FabricSize(hosts)))
    routes = timed("routes", lambda: routes_of(fabric))
    flows, kind = timed("flows", lambda: step_of(fabric, hosts))
    loads = timed("hashes", lambda: hashed_loads(flows, routes))
    timed("plan", lambda: plan_connection_paths(flows, routes, fabric.gbps))
    draw = np.random.default_rng(0)
    begin, work = draw.uniform(0, STEP_NS, kind.size), draw.uniform(1e6, 5e7, kind.size)
    load = repeated(loads[len(loads) // 2], kind)
    ends_of(begin[:2], work[:2], repeated(loads[0], kind[:2]), fabric.gbps)  # compiles loops
    timed("rates", lambda: ends_of(begin, work, load, fabric.gbps))
    found["communications"] = int(kind.size)
    found["flows"] = int(np.bincount(flows.of, minlength=flows.count)[kind].sum())
    return found


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measured(arguments.hosts)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<20} {value}")


if __name__ == "__main__":
    main()
