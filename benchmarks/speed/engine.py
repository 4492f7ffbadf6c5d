"""How fast the replay engine is, beside a slow readable twin and networkx in the same run.

python -m benchmarks.speed.engine [--json] [--scenarios 8] [--only 8x100k]   (--only small: the peers alone)

Synthetic graphs shaped like training: every rank has a CPU thread that launches kernels on a compute stream,
and every hundred spans a collective that all ranks enter on a communication stream; it waits for the kernel
before it and delays the one after it. One core. The twin and networkx replay a smaller graph of this shape,
since they would take minutes on the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro.replay import engine
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, make_graph

Array = npt.NDArray[np.int64]
SHAPES = {"8x100k": (8, 100_000), "64x100k": (64, 100_000), "1024x10k": (1024, 10_000)}
SMALL = (8, 2_000)
BLOCK = 100  # spans from one collective to the next: half of them CPU, half on the GPU
CALLS = BLOCK // 2
WIDTH = BLOCK + 1  # nodes of a block: its spans, and the arrival at the collective
ROUNDS = 5


class Places(NamedTuple):
    """Nodes by kind: a block of a rank is CPU calls, kernels, and the arrival and transfer of a collective.

    Attributes:
        cpu: [ranks * blocks, 50] calls.
        kernel: [ranks * blocks, 49] kernels.
        arrive: [ranks * blocks] arrivals at the collective.
        transfer: [ranks * blocks] transfers.
        rendezvous: [ranks * blocks] the rendezvous of each block, after all nodes of ranks.
    """

    cpu: Array
    kernel: Array
    arrive: Array
    transfer: Array
    rendezvous: Array


def training_graph(num_ranks: int, spans: int) -> Graph:
    """Make a graph shaped like training, with one rendezvous per block for all ranks.

    Args:
        num_ranks: number of ranks.
        spans: spans per rank.
    """
    blocks = spans // BLOCK
    of_rank = blocks * WIDTH
    first = (np.arange(num_ranks)[:, None] * of_rank + np.arange(blocks) * WIDTH).ravel()  # [ranks * blocks]
    places = Places(
        cpu=first[:, None] + np.arange(CALLS),
        kernel=first[:, None] + CALLS + np.arange(CALLS - 1),
        arrive=first + WIDTH - 2,
        transfer=first + WIDTH - 1,
        rendezvous=num_ranks * of_rank + np.tile(np.arange(blocks), num_ranks),
    )
    nodes = training_nodes(places, num_ranks, blocks)
    return make_graph(nodes, training_edges(places, num_ranks, blocks), ("synthetic",), (), 0)


def training_edges(places: Places, num_ranks: int, blocks: int) -> Edges:
    """Make the edges: CPU call i launches kernel i, the last one the collective; the next block waits for it.

    Args:
        places: of the nodes.
        num_ranks: number of ranks.
        blocks: blocks per rank.
    """
    cpu, kernel, arrive, transfer, rendezvous = places
    lanes_of_rank = cpu.reshape(num_ranks, -1), kernel.reshape(num_ranks, -1), transfer.reshape(num_ranks, -1)
    along = [(lane[:, :-1].ravel(), lane[:, 1:].ravel()) for lane in lanes_of_rank]
    after = transfer.reshape(num_ranks, -1)[:, :-1].ravel()  # the next block's first kernel needs its result
    pairs = [
        (along[0], EdgeKind.THREAD),
        (along[1], EdgeKind.STREAM),
        (along[2], EdgeKind.STREAM),
        ((cpu[:, : CALLS - 1].ravel(), kernel.ravel()), EdgeKind.LAUNCH),
        ((cpu[:, -1], arrive), EdgeKind.LAUNCH),
        ((kernel[:, -1], arrive), EdgeKind.EVENT),
        ((arrive, rendezvous), EdgeKind.RENDEZVOUS),
        ((rendezvous, transfer), EdgeKind.RENDEZVOUS),
        ((after, kernel.reshape(num_ranks, blocks, CALLS - 1)[:, 1:, 0].ravel()), EdgeKind.EVENT),
    ]
    source = np.concatenate([pair[0] for pair, _ in pairs])
    target = np.concatenate([pair[1] for pair, _ in pairs])
    kind = np.concatenate([np.full(pair[0].size, kind, np.int64) for pair, kind in pairs])
    lag = np.where(kind == EdgeKind.LAUNCH, 2_000, 0)
    return Edges(source, target, lag, kind, np.zeros(source.size, bool))


def training_nodes(places: Places, num_ranks: int, blocks: int) -> Nodes:
    """Make nodes of random durations.

    Args:
        places: of the nodes.
        num_ranks: number of ranks.
        blocks: blocks per rank.
    """
    of_rank = blocks * WIDTH
    num_nodes = num_ranks * of_rank + blocks
    kind = np.full(num_nodes, NodeKind.RENDEZVOUS, np.int64)
    duration = np.zeros(num_nodes, np.int64)
    random = np.random.default_rng(0)
    for nodes, what, longest in (
        (places.cpu, NodeKind.CPU, 8_000),
        (places.kernel, NodeKind.KERNEL, 20_000),
        (places.transfer, NodeKind.TRANSFER, 50_000),
    ):
        kind[nodes] = what
        duration[nodes] = random.integers(1_000, longest, nodes.shape)
    kind[places.arrive] = NodeKind.ARRIVE
    # Start times without any waiting: only the order matters.
    measured = np.zeros(num_nodes, np.int64)
    measured[: num_ranks * of_rank] = np.tile(np.arange(of_rank) * 5_000, num_ranks)
    measured[num_ranks * of_rank :] = (np.arange(blocks) + 1) * WIDTH * 5_000 - 1
    none, nothing = np.full(num_nodes, -1, np.int64), np.zeros(num_nodes, np.int64)
    return Nodes(
        kind=kind, duration=duration, earliest=nothing, anchored=np.zeros(num_nodes, bool), rank=none,
        window=nothing, step=nothing, lane=none, name=nothing, around=none, span=none, collective=none,
        bytes=none, message=none, phase=nothing, measured_start=measured, measured_end=measured + duration,
    )  # fmt: skip


def seconds(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median wall time of an action, after one that does not count."""
    action()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def of_graph(graph: Graph, scenarios: int) -> dict[str, float]:
    """Measure the speed of one replay, and of a batch."""
    nodes, edges = graph.nodes, graph.edges
    alone = seconds(
        lambda: engine.longest_path(nodes.duration, nodes.earliest, graph.indptr, edges.source, edges.lag)
    )
    durations = np.repeat(nodes.duration[:, None], scenarios, axis=1)
    batch = seconds(
        lambda: engine.longest_path_batch(durations, nodes.earliest, graph.indptr, edges.source, edges.lag)
    )
    return {
        "nodes": graph.num_nodes,
        "edges": edges.source.size,
        "replay_s": alone,
        "million_edges_per_s": edges.source.size / alone / 1e6,
        "million_node_scenarios_per_s": graph.num_nodes * scenarios / batch / 1e6,
    }


def peers(graph: Graph) -> dict[str, float]:
    """Measure edges per second of the engine, the tests' event-driven twin and networkx on a small graph."""
    import networkx

    from tests.reference.event_driven import simulate

    nodes, edges = graph.nodes, graph.edges
    triples = list(zip(edges.source.tolist(), edges.target.tolist(), edges.lag.tolist()))
    durations = nodes.duration.tolist()
    network = networkx.DiGraph()
    network.add_weighted_edges_from((s, t, durations[s] + lag) for s, t, lag in triples)
    actions: dict[str, Callable[[], object]] = {
        "engine": lambda: engine.longest_path(
            nodes.duration, nodes.earliest, graph.indptr, edges.source, edges.lag
        ),
        "twin": lambda: simulate(durations, nodes.earliest.tolist(), triples),
        "networkx": lambda: networkx.dag_longest_path_length(network),
    }
    return {f"{name}_million_edges_per_s": len(triples) / seconds(run) / 1e6 for name, run in actions.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scenarios", type=int, default=8)
    parser.add_argument("--only", choices=[*SHAPES, "small"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {
        name: of_graph(training_graph(*shape), options.scenarios)
        for name, shape in SHAPES.items()
        if options.only in (None, name)
    }
    results["small, beside peers"] = peers(training_graph(*SMALL))
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for name, values in results.items():
        print(f"{name:20}", "  ".join(f"{key} {value:.4g}" for key, value in values.items()))


if __name__ == "__main__":
    main()
