"""Contribution of each kind of edge: graphs are replayed without one kind at a time.

python -m benchmarks.accuracy.edges [RUN …] [--twins FOLDER] [--json]

RUN is anything that `dpro replay` takes. Its replayed starts are compared with the measured ones, with all
edges and without each kind (median and 95th percentile of the absolute errors of starts that are not
anchored). FOLDER has recordings made by `twins --runs FOLDER`; each pair also gets the larger error of the
two predictions, forward and backward. Step times are not compared: they can come out better without true
edges.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import as_program
from benchmarks.accuracy.twins import TWINS, Job, Twin, folders, predicted_ms, read
from dpro.cli.analysis import analyse
from dpro.replay.fidelity.accuracy import counted, has_gpu_work, judged_starts, start_errors
from dpro.replay.graph import EdgeKind, Graph
from dpro.replay.timeline import replay

US = 1_000
# THREAD edges stay, since a graph without them has no order; only condensed graphs have PATH edges.
KINDS = [None, *(kind for kind in EdgeKind if kind not in (EdgeKind.THREAD, EdgeKind.PATH))]
Row = dict[str, object]


def without(kind: EdgeKind | None) -> Callable[[Graph], Graph]:
    """Make a function that removes a kind of edge from a graph; None removes nothing."""
    return lambda graph: graph if kind is None else graph.without_edges(graph.edges.kind == kind)


def start_errors_us(graph: Graph, kind: EdgeKind | None) -> tuple[float, float]:
    """Return the median and 95th percentile of the errors of replayed starts, in us."""
    timeline = replay(without(kind)(graph))
    errors = start_errors(counted(judged_starts(timeline, has_gpu_work(graph))))
    return errors[50] / US, errors[95] / US


def of_run(name: str, graph: Graph) -> Iterator[Row]:
    """Yield a row per kind of edge of the graph."""
    for kind in KINDS:
        count = int((graph.edges.kind == kind).sum()) if kind is not None else graph.edges.kind.size
        if count:
            p50, p95 = start_errors_us(graph, kind)
            yield {"run": name, "without": label(kind), "edges": count, "p50_us": p50, "p95_us": p95}


def label(kind: EdgeKind | None) -> str:
    """Return the kind as a word."""
    return "nothing" if kind is None else kind.name.lower()


def of_twin(twin: Twin, pairs: list[tuple[Job, Job]]) -> Iterator[Row]:
    """Yield a row per kind of edge: errors of starts before the change, and the larger prediction error."""
    for row, kind in zip(of_run(twin.name, pairs[0][0].graph), present(pairs[0][0].graph)):
        forward = [
            predicted_ms(before, twin.forward, without(kind)) / after.measured_ms for before, after in pairs
        ]
        backward = [
            predicted_ms(after, twin.backward, without(kind)) / before.measured_ms for before, after in pairs
        ]
        errors = [100 * (statistics.median(ratios) - 1) for ratios in (forward, backward)]
        yield row | {"twin_error_pct": max(errors, key=abs)}


def present(graph: Graph) -> list[EdgeKind | None]:
    """Return None and the kinds of edges of a graph."""
    return [kind for kind in KINDS if kind is None or (graph.edges.kind == kind).any()]


def recorded(runs: Path, twin: Twin) -> list[tuple[Job, Job]]:
    """Read the recorded rounds of a pair."""
    place = folders(runs, twin, 1)[0][0].parent
    rounds = min(len([*place.glob(f"*-{which}/manifest.json")]) for which in ("before", "after"))
    return [(read(before), read(after)) for before, after in folders(runs, twin, rounds)]


def rows(runs: list[str], twins: Path | None) -> Iterator[Row]:
    """Yield all rows, run after run."""
    for run in runs:
        print(run, file=sys.stderr)
        yield from of_run(Path(run).name, analyse(run).built.graph)
    for twin in TWINS if twins else ():
        print(twin.name, file=sys.stderr)
        if pairs := recorded(twins, twin):
            yield from of_twin(twin, pairs)


def table(found: list[Row]) -> Iterator[str]:
    """Yield the rows as a table for people."""
    yield f"{'run':56} {'without':12} {'edges':>8} {'start error p50 / p95 us':>26} {'twin error':>10}"
    for row in found:
        twin = f"{row['twin_error_pct']:+9.1f}%" if "twin_error_pct" in row else ""
        starts = f"{row['p50_us']:12,.0f} /{row['p95_us']:12,.0f}"
        yield f"{row['run']:56} {row['without']:12} {row['edges']:8,} {starts} {twin}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--twins", type=Path, metavar="FOLDER", help="recordings of `twins`")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = list(rows(options.runs, options.twins))
    print(json.dumps(found, indent=1) if options.json else "\n".join(table(found)))


if __name__ == "__main__":
    as_program(main)
