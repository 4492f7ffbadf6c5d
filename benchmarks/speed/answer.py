"""How long it takes from an imported run to an answer: the first time, again, and for what an edit changes.

python -m benchmarks.speed.answer [RUN] [--spans N] [--rounds N] [--json]

RUN is a run directory, or traces. Its tables are repeated at later times until they have N spans, as if the
job had gone on in the same window; collectives that a rank is missing from are left out, since in the middle
of a window none is missing. Commands run in new processes and are timed as a whole, once with an empty cache
and once with the cache of that run; `start` is what every command spends before it reads anything: Python,
the libraries, and the first call of a compiled loop. CPU time counts user and system, of all threads.
Python's compiled modules exist, as after an installation by pip, and so does the machine code of loops. A
search is made of the run as it is, one edit of the repeated one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks import TRACES, as_program
from dpro.analysis.graphs import fingerprint, graph_of
from dpro.cli.analysis import open_quietly
from dpro.replay.alignment.match import match_collectives
from dpro.replay.fidelity.saved import load
from dpro.replay.whatif.edits.communication import Network
from dpro.replay.whatif.predict import baseline_steps, predict
from dpro.replay.whatif.search import explore
from dpro.schema import COLLECTIVES, SPANS, STEPS, TABLES
from dpro.store import Run, open_run, write_manifest, write_part

DEFAULT = TRACES / "multirank" / "nanogpt_h100_8r_rs_ag"
# Columns of one sequence of numbers, which continues from copy to copy.
SEQUENCES = (
    ("span_id", "launch_span_id", "source_span_id", "target_span_id"),
    ("correlation", "record_correlation"),
    ("external_id",),
    ("sequence_number",),
    ("collective_id",),
    ("sequence",),
    ("step",),
)
TIMES = ("start_ns", "enqueued_ns")
MAX_PAUSE_NS = 50_000_000  # between two copies: steps of real jobs are not evenly spaced
START = """
import numpy, polars, click, rich.console
import dpro.replay.fidelity.accuracy, dpro.replay.whatif.predict
from dpro.replay.engine import longest_path
nothing = numpy.zeros(1, numpy.int64)
longest_path(nothing, nothing, numpy.zeros(2, numpy.int64), nothing[:0], nothing[:0])
"""
EDIT = Network(bandwidth=2.0)


def repeated(run: Run, spans: int, folder: Path) -> Run:
    """Write a run that repeats the tables of `run`, one copy after the other.

    Args:
        run: the run.
        spans: smallest number of spans.
        folder: where to write it.
    """
    tables = {name: run.table(table) for name, table in TABLES.items()}
    rows = match_collectives(tables[COLLECTIVES.name], tables[SPANS.name]).rows
    whole = rows.filter(pl.col("members") >= pl.col("expected"))
    tables[COLLECTIVES.name] = tables[COLLECTIVES.name].join(
        whole, on=["rank", "collective_id"], how="semi", maintain_order="left"
    )
    own = tables[SPANS.name]
    lasts = int((own["start_ns"] + own["duration_ns"]).max() - own["start_ns"].min())
    copies = -(-spans // own.height)
    pauses = np.random.default_rng(0).integers(0, MAX_PAUSE_NS, copies)
    later = np.append(0, np.cumsum(lasts + pauses))
    steps = {name: size for names in SEQUENCES for name, size in _sizes(names, tables).items()}
    for name, table in tables.items():
        if table.is_empty():
            continue
        again = name in (SPANS.name, COLLECTIVES.name, STEPS.name, "syncs", "dependencies")
        parts = [
            table.with_columns(
                *(_moved(column, copy * size) for column, size in steps.items() if column in table.columns),
                *(_moved(column, int(later[copy])) for column in TIMES if column in table.columns),
            )
            for copy in range(copies if again else 1)
        ]
        for (rank,), part in pl.concat(parts).group_by("rank", maintain_order=True):
            write_part(folder, TABLES[name], f"rank{rank:05}", part)
    write_manifest(folder, run.manifest)
    return open_run(folder)


def _sizes(names: tuple[str, ...], tables: dict[str, pl.DataFrame]) -> dict[str, int]:
    """Return the length of a sequence of numbers, for each column that counts in it."""
    most = [
        int(table[name].max() or 0)
        for table in tables.values()
        for name in names
        if name in table.columns and table.height
    ]
    return dict.fromkeys(names, max(most, default=0) + 1)


def _moved(column: str, by: int) -> pl.Expr:
    return pl.when(pl.col(column) >= 0).then(pl.col(column) + by).otherwise(column).alias(column)


def command(arguments: list[str], cache: Path) -> tuple[float, float]:
    """Run this Python once; return wall and CPU seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"DPRO_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(run: Run, rounds: int) -> dict[str, dict[str, float]]:
    """Time each command with an empty cache, and again with the filled one; all in turn."""
    answers = {"replay": ["replay"], "one edit": ["whatif", "--edit", str(EDIT)]}
    times: dict[str, list[tuple[float, float]]] = {}
    command(["-m", "dpro", "replay", str(run.path), "--json"], run.path.parent)  # compiles loops
    for _ in range(rounds):
        for name, (verb, *options) in answers.items():
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    words = ["-m", "dpro", verb, str(run.path), *options, "--json"]
                    times.setdefault(f"{name}, {state}", []).append(command(words, Path(cache)))
        times.setdefault("start", []).append(command(["-c", START], Path(cache)))
    return {name: _summary(pairs) for name, pairs in times.items()}


def _summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*pairs)
    medians = {"wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu)}
    return medians | {"least_wall_s": min(wall), "least_cpu_s": min(cpu)}


def seconds(action: Callable[[], object], rounds: int) -> float:
    """Return the median CPU time of an action, after one that does not count."""
    action()
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        action()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def inside(run: Run, as_it_is: Run, rounds: int, cache: Path) -> dict[str, float]:
    """Measure the parts of commands in one process, in CPU seconds."""
    os.environ["DPRO_CACHE"] = str(cache)
    built, trust = graph_of(run)
    file = cache / "graphs" / f"{fingerprint(run)}.npz"
    baseline = baseline_steps(built.predictive)
    small, small_trust = graph_of(as_it_is)
    return {
        "nodes": built.graph.num_nodes,
        "edges": built.graph.edges.source.size,
        "saved_mb": file.stat().st_size / 1e6,
        "fingerprint_s": seconds(lambda: fingerprint(run), rounds),
        "load_s": seconds(lambda: load(file, run), rounds),
        "one_edit_s": seconds(lambda: predict(built.predictive, baseline, [EDIT], trust), rounds),
        "spans_searched": as_it_is.rows()[SPANS.name],
        "search_s": seconds(lambda: explore(small.predictive, small_trust), rounds),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        as_it_is = open_quietly(options.run)
        run = repeated(as_it_is, options.spans, Path(folder) / "run")
        cache = Path(folder) / "cache"
        results = {
            "spans": run.rows()[SPANS.name],
            "ranks": len(run.manifest.ranks),
            "commands": commands(run, options.rounds),
            "inside": inside(run, as_it_is, options.rounds, cache),
        }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{results['spans']:,} spans of {results['ranks']} ranks")
    for name, values in results["commands"].items():
        print(f"{name:20}", "  ".join(f"{key} {value:.2f}" for key, value in values.items()))
    print(f"{'inside':20}", "  ".join(f"{key} {value:.4g}" for key, value in results["inside"].items()))


if __name__ == "__main__":
    as_program(main)
