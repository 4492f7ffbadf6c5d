"""Twins: two real recorded jobs that differ in one change. From each, the other's step is predicted.

python -m benchmarks.accuracy.twins [--only NAME …] [--rounds 3] [--runs FOLDER] [--json]

This tests the graph, since the replay of an unchanged trace can be right for wrong reasons. Each job is
`cpu_job.py` under `dpro record`; the two jobs of a pair take turns. The graph of one job gets exactly the
change that leads to the other, through an edit of `dpro whatif` or a few lines here; the replayed mean step
(of the middle half) is compared with the recorded one of the other job in the same round. Next to the error
(median of the rounds) is the difference between recordings of one job. Pairs over a limited link need root.
As root, the jobs also run before all other programs of the machine, which then matter less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.recording import cable, cpu_job, record_window
from dpro.opening import ensure_finished
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import Trust, assess
from dpro.replay.graph import EdgeKind, Graph, NodeKind, Nodes, make_graph
from dpro.replay.timeline import changed_step_times, measured_step_times, replay, step_ends
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run

SKIP, WINDOW_STEPS, AFTERWARDS = 8, 16, 3
MS, US = 1_000_000, 1_000
BAR_PCT = 10.0  # of an error, on a shared machine

Change = Callable[[Graph], Graph]


# Changes.


def edit(*texts: str) -> Change:
    """Make a change of edits as `dpro whatif --edit` takes them, applied one after the other."""

    def apply(graph: Graph) -> Graph:
        for text in texts:
            graph = parse_edit(text).apply(graph)
        return graph

    return apply


def longer(added_ms: float, *names: str, rank: int | None = None) -> Change:
    """Make a change that lengthens each span of these names by a time, or shortens it, down to 0."""

    def apply(graph: Graph) -> Graph:
        duration = graph.nodes.duration.copy()
        for name in names:
            for nodes in spans_of(graph, NodeSelection(name=name, rank=rank)):
                longest = nodes[np.argmax(duration[nodes])]
                duration[longest] = max(duration[longest] + round(added_ms * MS), 0)
        return graph.with_durations(duration)

    return apply


def spans_of(graph: Graph, selection: NodeSelection) -> list[np.ndarray]:
    """Return the selected nodes, one array per span."""
    nodes = np.flatnonzero(selection.mask(graph))
    assert nodes.size, f"nothing in the run fits {selection}"
    key = np.stack([graph.nodes.span[nodes], graph.nodes.window[nodes], graph.nodes.rank[nodes]])
    order = np.lexsort(key)
    return np.split(nodes[order], np.flatnonzero((np.diff(key[:, order]) != 0).any(axis=0)) + 1)


def met_after(name: str, transfer_us: float) -> Change:
    """Make a change that lets all ranks meet after a span in each step, and then move data for a while."""

    def apply(graph: Graph) -> Graph:
        nodes, edges = graph.nodes, graph.edges
        called = np.array([span[-1] for span in spans_of(graph, NodeSelection(name=name))])
        called = called[nodes.step[called] >= 0]
        place = np.stack([nodes.window[called], nodes.step[called]])
        _, first, meeting = np.unique(place, axis=1, return_index=True, return_inverse=True)
        number = np.full(graph.num_nodes, -1)
        number[called] = graph.num_nodes + meeting.ravel()
        follows = (number[edges.source] >= 0) & (edges.kind == EdgeKind.THREAD)
        new = dataclasses.replace(_taken(nodes, called[first]), rank=np.full(first.size, -1))
        new = dataclasses.replace(
            new,
            kind=np.full(first.size, NodeKind.RENDEZVOUS),
            duration=np.full(first.size, round(transfer_us * US)),
        )
        columns = {name: np.append(getattr(nodes, name), getattr(new, name)) for name in vars(nodes)}
        count = called.size + int(follows.sum())
        more = {
            "source": np.append(called, number[edges.source[follows]]),
            "target": np.append(number[called], edges.target[follows]),
            "lag": np.zeros(count, np.int64),
            "kind": np.full(count, EdgeKind.RENDEZVOUS),
            "inferred": np.zeros(count, np.bool_),
        }
        joined = {name: np.append(getattr(edges, name), column) for name, column in more.items()}
        return make_graph(
            Nodes(**columns), dataclasses.replace(edges, **joined), graph.names, graph.lanes, graph.origin_ns
        ).with_job_of(graph)

    return apply


def _taken(nodes: Nodes, which: np.ndarray) -> Nodes:
    return Nodes(**{f.name: getattr(nodes, f.name)[which] for f in dataclasses.fields(Nodes)})


def without_collectives_in(within: str) -> Change:
    """Make a change that removes collectives called within an annotation: no rank waits, no data moves."""

    def apply(graph: Graph) -> Graph:
        nodes, edges = graph.nodes, graph.edges
        call = NodeSelection(within=within).mask(graph)
        launched = edges.target[(edges.kind == EdgeKind.LAUNCH) & call[edges.source]]
        gone = np.isin(nodes.collective, nodes.collective[launched])
        assert launched.size, f"no collective is called within {within}"
        meets = edges.kind == EdgeKind.RENDEZVOUS
        return graph.with_durations(np.where(gone, 0, nodes.duration)).without_edges(
            meets & (gone[edges.source] | gone[edges.target])
        )

    return apply


# Pairs.


@dataclass(frozen=True)
class Twin:
    """Two jobs, and the change of the graph from each to the other.

    Attributes:
        name: what differs.
        job: arguments of `cpu_job.py` that both have.
        before, after: additional arguments of each.
        forward, backward: the change of the graph.
        ranks: how many.
        link: rates of the link, Mbit/s, before and after; 0 is the loopback device.
        works: whether the ranks compute on the cores they share, so that noise is several per cent.
    """

    name: str
    job: str
    before: str
    after: str
    forward: Change
    backward: Change
    ranks: int = 2
    link: tuple[int, int] = (0, 0)
    works: bool = False


SLEEP = ("Sleep", "SleepBackward")
TWINS = [
    Twin(
        "straggler healed (DDP)", "ddp", "--slow-rank 1 --slow-ms 30", "",
        edit("heal:rank=1"), longer(30, "Late", rank=1),
    ),
    Twin(
        "slower input (DDP)", "ddp", "", "--input-ms 25",
        longer(25, "enumerate(DataLoader)*"), edit("hide-input"),
    ),
    Twin(
        "slower input hidden behind a straggler (DDP)", "ddp --slow-rank 0 --slow-ms 20", "", "--input-ms 10",
        longer(10, "enumerate(DataLoader)*"), longer(-10, "enumerate(DataLoader)*"),
    ),
    Twin(
        "slower optimizer (DDP)", "ddp", "--update-ms 10", "--update-ms 30",
        longer(20, "Optimizer.step*"), longer(-20, "Optimizer.step*"),
    ),
    Twin(
        "layers twice as fast (DDP)", "ddp --layers 6", "--layer-ms 10", "--layer-ms 5",
        edit("scale:name=Sleep,factor=0.5", "scale:name=SleepBackward,factor=0.5"),
        edit("scale:name=Sleep,factor=2", "scale:name=SleepBackward,factor=2"),
    ),
    Twin(
        "added all-reduce of the loss (uneven work, DDP)", "uneven", "", "--average-loss",
        met_after("log", 200), without_collectives_in("log"),
    ),
    Twin(
        "straggler healed (FSDP2)", "fsdp", "--slow-rank 1 --slow-ms 30", "",
        edit("heal:rank=1"), longer(30, "Late", rank=1),
    ),
    Twin(
        "straggler healed (tensor parallel)", "tp", "--slow-rank 0 --slow-ms 30", "",
        edit("heal:rank=0"), longer(30, "Late", rank=0),
    ),
    Twin(
        "one stage faster (pipeline)", "pipeline --layers 3", "--slow-rank 1 --slow-ms 10", "",
        longer(-10, "Late", rank=1), longer(10, "Late", rank=1),
    ),
    Twin(
        "layers twice as slow (pipeline)", "pipeline --layers 3", "--layer-ms 3", "--layer-ms 6",
        longer(3, *SLEEP), longer(-3, *SLEEP),
    ),
    Twin(
        "straggler healed (DDP, 4 ranks)", "ddp", "--slow-rank 2 --slow-ms 30", "",
        edit("heal:rank=2"), longer(30, "Late", rank=2), ranks=4,
    ),
    Twin(
        "faster link (DDP)", "ddp --width 512", "", "",
        edit("network:bandwidth=2.5"), edit("network:bandwidth=0.4"), link=(200, 500),
    ),
    Twin(
        "layers twice as fast (DDP, 500 Mbit/s, 1 MB buckets)", "ddp --layers 6 --width 512 --bucket-mb 1",
        "--layer-ms 12", "--layer-ms 6", longer(-6, *SLEEP), longer(6, *SLEEP), link=(500, 500),
    ),
    Twin(
        "buckets of 1 MB instead of 25 (DDP, 500 Mbit/s)", "ddp --layers 6 --width 512", "", "--bucket-mb 1",
        edit("bucket:mb=1"), edit("bucket:mb=25"), link=(500, 500),
    ),
    Twin(
        "twice the products (DDP, computing)", "ddp --layer-ms 0", "--products 60", "--products 120",
        edit("scale:name=aten::mm,factor=2"), edit("scale:name=aten::mm,factor=0.5"), works=True,
    ),
]  # fmt: skip


# Recording, predicting, comparing.


@dataclass(frozen=True)
class Job:
    """A recorded job: its graph, its measured typical step, and how well it replays."""

    graph: Graph
    measured_ms: float
    trust: Trust


def record(folder: Path, twin: Twin, arguments: str, rate_mbit: int) -> None:
    """Record one job with one deep window."""
    steps = ["--steps", str(SKIP + WINDOW_STEPS + AFTERWARDS)]
    first = [] if os.geteuid() else ["--first"]
    job = [*twin.job.split(), *arguments.split(), *steps, *first]
    command = cpu_job(job, twin.ranks, cable(rate_mbit) if rate_mbit else ())
    record_window(folder, command, SKIP, WINDOW_STEPS)


@cache
def read(folder: Path) -> Job:
    """Build the graph of a recorded job and measure its step."""
    ensure_finished(folder)
    run = open_run(folder)
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    return Job(built.graph, typical_ms(measured_step_times(built.graph)), trust)


def typical_ms(steps: pl.DataFrame) -> float:
    """Return the mean of the steps without the extreme quarters, which vary most on a busy machine, in ms."""
    lasted = np.sort(steps["duration_ns"].to_numpy())
    quarter = lasted.size // 4
    return float(lasted[quarter : lasted.size - quarter].mean()) / MS


def predicted_ms(job: Job, *changes: Change) -> float:
    """Return the typical step of the changed job, counted as `dpro whatif` does."""
    timeline = replay(job.graph)
    baseline = step_ends(job.graph, timeline.start, timeline.end)
    changed = job.graph
    for change in changes:
        changed = with_shared_links(changed, change(changed))
    timeline = replay(changed)
    return typical_ms(changed_step_times(baseline, changed, timeline.end))


def folders(runs: Path, twin: Twin, rounds: int) -> list[tuple[Path, Path]]:
    """Return the folders of both jobs, for each round."""
    place = runs / "".join(letter if letter.isalnum() else "-" for letter in twin.name)
    return [(place / f"{number}-before", place / f"{number}-after") for number in range(rounds)]


def record_all(runs: Path, twins: list[Twin], rounds: int) -> None:
    """Record what is missing, the two jobs of each pair in turns."""
    for number in range(rounds):
        for twin in twins:
            before, after = folders(runs, twin, rounds)[number]
            jobs = [(before, twin.before, twin.link[0]), (after, twin.after, twin.link[1])]
            for folder, arguments, rate_mbit in jobs if number % 2 == 0 else jobs[::-1]:
                if not (folder / "manifest.json").exists():
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    record(folder, twin, arguments, rate_mbit)
            print(f"round {number + 1} of {rounds}: {twin.name}", file=sys.stderr)


def compare(runs: Path, twin: Twin, rounds: int) -> dict[str, object]:
    """Return recorded and predicted means of a pair and their errors in percent, median of the rounds."""
    pairs = [(read(before), read(after)) for before, after in folders(runs, twin, rounds)]
    befores, afters = zip(*pairs)
    forward = [predicted_ms(before, twin.forward) for before, _ in pairs]
    backward = [predicted_ms(after, twin.backward) for _, after in pairs]
    return {
        "twin": twin.name,
        "ranks": twin.ranks,
        "before_ms": statistics.median(job.measured_ms for job in befores),
        "after_ms": statistics.median(job.measured_ms for job in afters),
        "predicted_after_ms": statistics.median(forward),
        "predicted_before_ms": statistics.median(backward),
        "forward_error_pct": error_pct(forward, [job.measured_ms for job in afters]),
        "backward_error_pct": error_pct(backward, [job.measured_ms for job in befores]),
        "same_job_pct": max(spread_pct(befores), spread_pct(afters)),
        "replay_error_pct": max(job.trust.error_pct for pair in pairs for job in pair),
        "computes_on_shared_cores": twin.works,
    }


def error_pct(predicted: list[float], measured: list[float]) -> float:
    """Return the median over the rounds of the prediction's error, in percent."""
    return statistics.median(100 * (mine / real - 1) for mine, real in zip(predicted, measured))


def spread_pct(jobs: tuple[Job, ...]) -> float:
    """Return the median difference between any two recordings of one job, in percent; NaN for one."""
    differences = [100 * abs(a.measured_ms / b.measured_ms - 1) for a, b in combinations(jobs, 2)]
    return statistics.median(differences) if differences else float("nan")


def rows(results: list[dict[str, object]]) -> Iterator[str]:
    """Yield the results as a table for people."""
    yield f"{'':52} {'before':>8} {'after':>8} {'forward':>8} {'backward':>8} {'same job':>8} {'replay':>7}"
    for result in results:
        times = f"{result['before_ms']:5.1f} ms {result['after_ms']:5.1f} ms"
        errors = f"{result['forward_error_pct']:+7.1f}% {result['backward_error_pct']:+7.1f}%"
        others = f"{result['same_job_pct']:7.1f}% {result['replay_error_pct']:6.2f}%"
        yield f"{result['twin']:52} {times} {errors} {others}"


def check(results: list[dict[str, object]]) -> dict[str, object]:
    """Check whether all predictions are within the bar: {n, figures, bar, holds}."""
    errors = [
        abs(float(str(result[name])))
        for result in results
        for name in ("forward_error_pct", "backward_error_pct")
    ]
    figures = {"worst_error_pct": max(errors, default=0.0), "twins": results}
    return {
        "n": len(errors),
        "figures": figures,
        "bar": BAR_PCT,
        "holds": max(errors, default=0.0) <= BAR_PCT,
    }


def chosen(only: list[str]) -> list[Twin]:
    """Return the pairs whose names contain one of the words; those over a limited link only as root."""
    fitting = [twin for twin in TWINS if not only or any(word in twin.name for word in only)]
    if os.geteuid():
        fitting = [twin for twin in fitting if not any(twin.link)]
    return fitting


def main() -> None:
    """Record, predict, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="pairs whose names have one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="where recordings are kept and looked for")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        twins = chosen(options.only)
        if not twins:
            parser.error("--only leaves no pair; there are " + ", ".join(twin.name for twin in TWINS))
        record_all(runs, twins, options.rounds)
        results = [compare(runs, twin, options.rounds) for twin in twins]
    print(json.dumps({"twins": check(results)}, indent=1) if options.json else "\n".join(rows(results)))


if __name__ == "__main__":
    main()
