"""How much smaller condensed graphs are, whether they replay exactly, and what ten thousand ranks take.

python benchmarks/condense.py [--traces FOLDER] [--ranks N] [--nodes N] [--json]

FOLDER is a run directory or what `dpro import` takes; without it, the shared traces of several ranks. Each
graph is condensed as it is and under edits of the network, of one rank and of all, and compared with a replay
of the whole graph. With `--ranks` the ranks of the first are then copied, with offsets and noise, each
repeated until it has about `--nodes` nodes: a copy joins every collective of its original. Only one copy is
in memory at a time. A replay of the whole would need more memory than most machines have, so each copy is
replayed by itself, with the starts of its transfers given: if it arrives when its skeleton does, the joined
skeletons start as the whole would. Each source is also built, condensed and judged rank by rank, as
commands do with large runs: what that takes per node, and what a rank exchanges. Seconds are of one core.
`--json` prints one object: check → {n, figures, bar, holds}.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it also runs as a script

from benchmarks import as_program
from benchmarks.speed.copies import Original, copied, originals
from dpro.opening import open_path
from dpro.replay.condense import Cut, Skeletons, cut_by_rank, joined_graph, skeletons_of
from dpro.replay.construction import graph_builder
from dpro.replay.engine import grouped, longest_path, topological_order
from dpro.replay.fidelity.by_rank import fit_of_rank
from dpro.replay.graph import Graph
from dpro.replay.sharded import (
    build_rank,
    condense_rank,
    join_skeletons,
    match_run,
    of_collectives,
    pool,
    rendezvous_of,
)
from dpro.replay.timeline import rank_step_times, replay, step_ends

TRACES = Path(os.environ.get("DPRO_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
ENOUGH_PER_MEMBER, LARGE_RATIO, SMALL_RATIO = 200, 80, 0.3
EDGES_PER_NODE, NS_PER_NODE, BUILD_NS_PER_NODE = 2.2, 100, 700
# Bars for 10,240 ranks of 100,000 nodes.
CONDENSE_S, JOIN_S, REPLAY_S, PEAK_GIB, ALL_NODES = 120, 10, 0.2, 4, 10_240 * 100_000
Check = dict[str, Any]


def condense(graph: Graph) -> tuple[Graph, np.ndarray]:
    """Return the condensed graph, and for each of its nodes the node of the whole graph, or -1."""
    cut = cut_by_rank(graph)
    return joined_graph(graph, cut, skeletons_of(graph, cut))


def differing(graph: Graph, condensed: Graph, node: np.ndarray) -> int:
    """Count kept nodes whose start differs from the whole graph's, plus tables of step times that differ."""
    whole, small = replay(graph), replay(condensed)
    real = node >= 0
    wrong = int((small.start[real] != whole.start[node[real]]).sum())
    for steps in (step_ends, rank_step_times):
        one = steps(graph, whole.start, whole.end)
        other = steps(condensed, small.start, small.end)
        wrong += 0 if one.equals(other) else 1
    return wrong


def edited(graph: Graph, cut: Cut, seed: int) -> Iterator[tuple[str, Graph]]:
    """Yield the graph with durations of transfers, of a rank, and of all ranks scaled by 0 to 10."""
    draw = np.random.default_rng(seed)
    ranks = cut.ranks[cut.ranks >= 0]
    chosen = {
        "network": cut.free,
        "one rank": graph.nodes.rank == draw.choice(ranks),
        "all ranks": np.ones(graph.num_nodes, np.bool_),
    }
    for name, which in chosen.items():
        factor = np.where(which, draw.uniform(0, 10, graph.num_nodes), 1.0)
        yield name, graph.with_durations((graph.nodes.duration * factor).astype(np.int64))


def cpu_seconds(action: Any, rounds: int = 3) -> float:
    """Return the smallest CPU time of several rounds, after one that compiles."""
    action()
    best = np.inf
    for _ in range(rounds):
        begin = time.process_time()
        action()
        best = min(best, time.process_time() - begin)
    return float(best)


def building_seconds(source: Path) -> tuple[Graph, float, float]:
    """Build a source; return its graph, and CPU seconds of its ranks' shares and of all: least of three."""
    run, spent = open_path(source), [0.0]

    def timed(function: Any) -> Any:
        def measured(*arguments: Any) -> Any:
            begin = time.process_time()
            made = function(*arguments)
            spent[0] += time.process_time() - begin
            if isinstance(made, graph_builder.RankGraph):
                return dataclasses.replace(made, nodes=timed(made.nodes))
            return made

        return measured

    graph_builder.build_graph(run)
    parts = ("make_rank_view", "build_rank_graph")
    before = {name: getattr(graph_builder, name) for name in parts}
    try:
        for name, function in before.items():
            setattr(graph_builder, name, timed(function))
        rounds = []
        for _ in range(3):
            spent[0], begin = 0.0, time.process_time()
            graph = graph_builder.build_graph(run).graph
            rounds.append((spent[0], time.process_time() - begin))
        return graph, min(own for own, _ in rounds), min(whole for _, whole in rounds)
    finally:
        for name, function in before.items():
            setattr(graph_builder, name, function)


def figures_of(source: Path, seed: int) -> dict[str, Any]:
    """Measure a source: sizes, seconds, and how much differs."""
    graph, build_s, all_s = building_seconds(source)
    small, node = condense(graph)
    cut = cut_by_rank(graph)
    shared = int(cut.free.sum())
    wrong = {"unchanged": differing(graph, small, node)}
    for name, changed in edited(graph, cut, seed):
        if name == "network":  # durations of transfers may change without condensing again
            lasts = np.where(node >= 0, changed.nodes.duration[node], 0)
            wrong[name] = differing(changed, small.with_durations(lasts), node)
        else:
            wrong[name] = differing(changed, *condense(changed))
    return {
        "trace": source.name,
        "nodes": graph.num_nodes,
        "condensed": small.num_nodes,
        "ratio": round(graph.num_nodes / small.num_nodes, 1),
        "per_member": round(graph.num_nodes / shared, 1) if shared else None,
        "edges_per_node": round(small.edges.source.size / small.num_nodes, 2),
        "condense_ns": round(cpu_seconds(lambda: condense(graph)) / graph.num_nodes * 1e9, 1),
        "build_rank_ns": round(build_s / graph.num_nodes * 1e9),
        "build_ns": round(all_s / graph.num_nodes * 1e9),
        "replay_us": round(cpu_seconds(lambda: replay(graph)) * 1e6),
        "condensed_replay_us": round(cpu_seconds(lambda: replay(small)) * 1e6),
        "differing": wrong,
        "by_rank": by_rank(source),
    }


def by_rank(source: Path) -> dict[str, Any]:
    """Measure a source rank by rank, and count tables of step times that differ from the whole graph's."""
    run, spent = open_path(source), dict[str, float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with adding(spent, "match_run"):
            matched = match_run(run)
        own = [matched.of(rank) for rank in matched.ranks]
        with adding(spent, "build"):
            facts = [build_rank(run, each, folder) for each in own]
        with adding(spent, "pool"):
            pooled = pool(facts)
        known = [pooled.of(rank) for rank in matched.ranks]
        with adding(spent, "condense"):
            skeletons = [condense_rank(folder, each) for each in known]
        with adding(spent, "join"):
            joined = join_skeletons(skeletons, matched, pooled, run)
        with adding(spent, "replay"):
            small = replay(joined.graph)
        rendezvous = rendezvous_of(small)
        met = [of_collectives(rendezvous, each.instance) for each in skeletons]
        with adding(spent, "judge"):
            judged = [fit_of_rank(folder, *each, True) for each in zip(known, met)]
        shares = sum(file.stat().st_size for file in folder.iterdir())
    graph = graph_builder.build_graph(run).graph
    whole, num_ranks = replay(graph), len(own)
    wrong = sum(
        not steps(graph, whole.start, whole.end).equals(steps(joined.graph, small.start, small.end))
        for steps in (step_ends, rank_step_times)
    )
    sent = {"asked": own, "facts": facts, "lags": known, "skeleton": skeletons, "judged": judged}
    kb = {what: round(len(pickle.dumps(each)) / num_ranks / 1e3, 1) for what, each in sent.items()}
    return {
        "condensed": joined.graph.num_nodes,
        "edges_per_node": round(joined.graph.edges.source.size / joined.graph.num_nodes, 2),
        "differing": wrong,
        "ns_per_node": {what: round(each / graph.num_nodes * 1e9) for what, each in spent.items()},
        "kb_per_rank": kb | {"share": round(shares / num_ranks / 1e3)},
    }


def checks_of(rows: Sequence[dict[str, Any]]) -> dict[str, Check]:
    """Compute the checks over all sources."""
    return {
        "exact": {
            "n": len(rows),
            "figures": {row["trace"]: row["differing"] for row in rows},
            "bar": "0 starts and steps that differ",
            "holds": not any(any(row["differing"].values()) for row in rows),
        },
        "exact by rank": {
            "n": len(rows),
            "figures": {row["trace"]: row["by_rank"] for row in rows},
            "bar": "0 steps that differ",
            "holds": not any(row["by_rank"]["differing"] for row in rows),
        },
        "nodes": _check(rows, "ratio", f">= {LARGE_RATIO} from {ENOUGH_PER_MEMBER} nodes per member on, "
                        f"else {SMALL_RATIO} x that", _small_enough),
        "edges": _check(rows, "edges_per_node", f"<= {EDGES_PER_NODE}",
                        lambda row: row["edges_per_node"] <= EDGES_PER_NODE),
        "condensing": _check(rows, "condense_ns", f"<= {NS_PER_NODE} ns per node",
                             lambda row: row["condense_ns"] <= NS_PER_NODE),
        "building a rank": _check(rows, "build_rank_ns", f"<= {BUILD_NS_PER_NODE} ns per node",
                                  lambda row: row["build_rank_ns"] <= BUILD_NS_PER_NODE),
        "building": _check(rows, "build_ns", f"<= {BUILD_NS_PER_NODE} ns per node",
                           lambda row: row["build_ns"] <= BUILD_NS_PER_NODE),
    }  # fmt: skip


def _check(rows: Sequence[dict[str, Any]], figure: str, bar: str, holds: Any) -> Check:
    missed = [row["trace"] for row in rows if not holds(row)]
    return {
        "n": len(rows),
        "figures": {row["trace"]: row[figure] for row in rows} | ({"missed": missed} if missed else {}),
        "bar": bar,
        "holds": not missed,
    }


def _small_enough(row: dict[str, Any]) -> bool:
    """Return whether a graph is condensed enough; without shared collectives there is no bar."""
    per_member = row["per_member"]
    if per_member is None:
        return True
    return bool(
        row["ratio"] >= (LARGE_RATIO if per_member >= ENOUGH_PER_MEMBER else SMALL_RATIO * per_member)
    )


@contextlib.contextmanager
def adding(spent: dict[str, float], what: str) -> Iterator[None]:
    """Add the CPU seconds of the block to the entry `what`."""
    begin = time.process_time()
    yield
    spent[what] = spent.get(what, 0.0) + time.process_time() - begin


JoinedGraph = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def join(
    skeletons: Sequence[Skeletons], met: Sequence[tuple[np.ndarray, np.ndarray]], shared: int
) -> JoinedGraph:
    """Join skeletons by a rendezvous per collective; return arrays for `longest_path`, and nodes' places."""
    first = np.cumsum([0, *(each.node.size for each in skeletons)])
    total = int(first[-1]) + shared
    collective = np.concatenate([members for members, _ in met])
    arrives = np.concatenate([arrives for _, arrives in met])
    arrive, transfer = np.flatnonzero(arrives), np.flatnonzero((collective >= 0) & ~arrives)
    rendezvous = first[-1] + collective
    source = np.concatenate(
        [*(each.source + at for each, at in zip(skeletons, first)), arrive, rendezvous[transfer]]
    )
    entering = np.concatenate([np.diff(each.indptr) for each in skeletons])
    target = np.concatenate([np.repeat(np.arange(first[-1]), entering), rendezvous[arrive], transfer])
    lag = np.zeros(source.size, np.int64)
    lag[: int(entering.sum())] = np.concatenate([each.lag[:, 0] for each in skeletons])
    order, _ = topological_order(total, source, target, np.arange(total))
    place = np.empty(total, np.int64)
    place[order] = np.arange(total)
    indptr, by_target = grouped(place[target], total)
    none = np.zeros(shared, np.int64)
    duration, earliest = (
        np.concatenate([*(getattr(each, name)[:, 0] for each in skeletons), none])[order]
        for name in ("duration", "earliest")
    )
    return duration, earliest, indptr, place[source[by_target]], lag[by_target], place


def copies(graph: Graph, num_ranks: int, nodes_per_rank: int) -> dict[str, Check]:
    """Condense, join and replay copies of a graph's ranks."""
    ranks, shared = originals(graph, nodes_per_rank)
    skeletons_of(ranks[0].graph, ranks[0].cut)
    spent: dict[str, float] = {}
    skeletons, met, num_nodes = [], [], 0
    none = np.empty(0, np.int64)
    for rank in range(num_ranks):
        original = ranks[rank % len(ranks)]
        copy = copied(original.graph, rank)
        with adding(spent, "condense"):
            skeleton = skeletons_of(copy, original.cut)
        skeletons.append(dataclasses.replace(skeleton, rank=none, window=none, step=none))
        real = skeleton.node >= 0
        met.append(
            (np.where(real, original.members[skeleton.node], -1), real & original.arrives[skeleton.node])
        )
        num_nodes += copy.num_nodes
    with adding(spent, "join"):
        duration, earliest, indptr, source, lag, place = join(skeletons, met, shared)
    longest_path(duration[:1], earliest[:1], indptr[:2], source, lag)
    with adding(spent, "replay"):
        start, _, _ = longest_path(duration, earliest, indptr, source, lag)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    wrong = differing_inside(ranks, skeletons, start[place])
    share = num_nodes / ALL_NODES
    sizes = {"ranks": num_ranks, "nodes": num_nodes, "condensed": duration.size, "edges": source.size}
    bars = {"condense": CONDENSE_S * share, "join": JOIN_S, "replay": REPLAY_S}
    found = {
        f"copies: {what}": {
            "n": num_ranks,
            "figures": {"cpu_s": round(spent[what], 3)},
            "bar": f"<= {bar:.3g} s",
            "holds": spent[what] <= bar,
        }
        for what, bar in bars.items()
    }
    found["copies: exact"] = {
        "n": num_ranks, "figures": {**sizes, "differing": wrong}, "bar": 0, "holds": wrong == 0,
    }  # fmt: skip
    found["copies: memory"] = {
        "n": num_ranks, "figures": {"peak_gib": round(peak, 2)}, "bar": f"<= {PEAK_GIB} GiB",
        "holds": peak <= PEAK_GIB,
    }  # fmt: skip
    return found


def differing_inside(ranks: Sequence[Original], skeletons: Sequence[Skeletons], start: np.ndarray) -> int:
    """Count kept nodes that start at another time when each copy is replayed by itself, transfers given."""
    wrong, first = 0, 0
    for rank, skeleton in enumerate(skeletons):
        original = ranks[rank % len(ranks)]
        copy = copied(original.graph, rank)
        kept = start[first : first + skeleton.node.size][skeleton.node >= 0]
        first += skeleton.node.size
        node = skeleton.node[skeleton.node >= 0]
        nodes, edges = copy.nodes, copy.edges
        earliest = nodes.earliest.copy()
        given = (original.members[node] >= 0) & ~original.arrives[node]
        earliest[node[given]] = kept[given]
        alone, _, _ = longest_path(nodes.duration, earliest, copy.indptr, edges.source, edges.lag)
        wrong += int((alone[node] != kept).sum())
    return wrong


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="a run directory, or what `dpro import` takes")
    parser.add_argument("--ranks", type=int, default=0, help="how many copies")
    parser.add_argument("--nodes", type=int, default=0, help="nodes of each copy, about; as many as it has")
    parser.add_argument("--seed", type=int, default=0, help="of the edits")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = TRACES / "multirank"
    sources = (
        [arguments.traces] if arguments.traces else sorted(path for path in folder.iterdir() if path.is_dir())
    )
    rows = [figures_of(source, arguments.seed) for source in sources]
    found = checks_of(rows)
    if arguments.ranks:
        graph = graph_builder.build_graph(open_path(sources[0])).graph
        found |= copies(graph, arguments.ranks, arguments.nodes)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    for check, row in found.items():
        word = "holds" if row["holds"] else "MISSED"
        print(f"{check:<18} n {row['n']:>6}  {row['figures']}  {row['bar']}  {word}")


if __name__ == "__main__":
    as_program(main)
