"""Whether the search of `dpro whatif` finds the best pair of changes, and how long it takes.

python -m benchmarks.search [RUN …] [--data FOLDER] [--spans N] [--json]

In each run every pair of compatible candidates is replayed, and the best of these is compared with the best
that the search found, both by a plain replay. Without a RUN, all runs that the folder of real traces has are
searched. Times are user CPU seconds of the whole process, the median of three searches after a first one:
with POLARS_MAX_THREADS=1 these are the seconds of an idle machine. The last check searches a run of this many
spans (0: none): the largest of the runs, repeated at later times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import TRACES, as_program
from benchmarks.speed.answer import repeated
from dpro.analysis.analysis import Analysis
from dpro.cli.analysis import analyse, open_quietly
from dpro.errors import Unanswerable
from dpro.replay.graph import GraphError
from dpro.replay.timeline import changed_step_times, replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts, facts_of
from dpro.replay.whatif.predict import Prediction
from dpro.replay.whatif.search import bounds_of, can_combine, candidates, explore, in_order

RUNS = (
    "multirank/torchrec_v100_2r_kjt",
    "multirank/torchrec_v100_4r_a2a_ar",
    "multirank/param_dlrm_v100_8r",
    "multirank/nanogpt_h100_8r_rs_ag",
    "nccl_meta/mi300x_ddp_rank0of8.json.gz",
    "straggler_parquet/trace-ST.parquet",
)
WITHIN_PCT, SECONDS, NODES = 0.5, 2.0, 248_000  # bars: of the best, and of a search of this many nodes
SPANS, SECONDS_OF_SPANS = 1_000_000, 10.0  # bar: of a search of this many spans
ROUNDS = 3


def speedup(facts: RunFacts, edits: Sequence[Edit]) -> float:
    """Return the speed-up of throughput by a plain replay; 0 where an edit leaves another nothing to change.

    Args:
        facts: of the run.
        edits: in order.
    """
    changed, samples = facts.graph, 1.0
    try:
        for edit in edits:
            samples *= edit.samples(changed)
            changed = edit.apply(changed)
    except (Unanswerable, GraphError):
        return 0.0
    timeline = replay(changed)
    steps = changed_step_times(facts.baseline, changed, timeline.end)
    mean = float(np.maximum(steps["duration_ns"].to_numpy(), 0).mean())
    return facts.base_ns / mean * samples if mean else float("inf")


def measure(source: Path) -> dict[str, Any]:
    """Compare the search of a run with all pairs, and time it."""
    analysis = analyse(str(source))
    seconds, found = timed(analysis, ROUNDS)  # before the pairs, whose memory would slow it down
    graph = analysis.built.predictive
    facts = facts_of(graph, analysis.baseline, analysis.suspects)
    bounds, _ = bounds_of(facts, candidates(facts)[0])
    advice = [edit for edit in bounds if edit.is_advice]
    pairs = [(one,) for one in advice] + [
        tuple(in_order(pair)) for pair in combinations(advice, 2) if can_combine(pair[1], [pair[0]])
    ]
    best = max(((speedup(facts, pair), pair) for pair in pairs), key=lambda each: each[0])
    mine = max((speedup(facts, each.edits) for each in found if each.is_advice), default=1.0)
    return {
        "run": source.name,
        "nodes": graph.num_nodes,
        "sets": len(pairs),
        "best": [str(edit) for edit in best[1]],
        "best_speedup": best[0],
        "found_speedup": mine,
        "short_pct": max(100 * (best[0] / mine - 1), 0.0),
        "seconds": seconds,
    }


def timed(analysis: Analysis, rounds: int) -> tuple[float, list[Prediction]]:
    """Time searches; return the median user CPU seconds, without the first one, and the predictions found.

    Args:
        analysis: of the run.
        rounds: how many.
    """
    graph, trust, baseline = analysis.built.predictive, analysis.trust, analysis.baseline
    spent, found, known = list[float](), list[Prediction](), dict(graph.facts)
    for _ in range(1 + rounds):
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        fresh = dataclasses.replace(graph, facts=dict(known))  # without results of an earlier search
        found = explore(fresh, trust, suspects=analysis.suspects, baseline=baseline).predictions
        spent.append(resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun)
    return statistics.median(spent[1:]), found


def of_spans(source: Path, spans: int) -> dict[str, Any]:
    """Time a search of a run that is repeated until it has this many spans.

    Args:
        source: the run.
        spans: at least.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = repeated(open_quietly(source), spans, Path(folder) / "run")
        analysis = analyse(str(run.path))
        seconds, _ = timed(analysis, 1)
        return {"run": source.name, "nodes": analysis.built.predictive.num_nodes, "seconds": seconds}


def check_of_spans(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Make the check of many spans."""
    bar, holds = {"seconds": SECONDS_OF_SPANS}, row["seconds"] <= SECONDS_OF_SPANS
    return {"seconds of many spans": {"n": 1, "figures": row, "bar": bar, "holds": bool(holds)}}


def checks(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compute the checks: {n, figures, bar, holds}."""
    short = max(row["short_pct"] for row in results)
    scaled = max(row["seconds"] * NODES / max(row["nodes"], NODES) for row in results)
    return {
        "best of all pairs": {
            "n": len(results),
            "figures": {"short_pct": short, "runs": results},
            "bar": {"short_pct": WITHIN_PCT},
            "holds": bool(short <= WITHIN_PCT),
        },
        "seconds": {
            "n": len(results),
            "figures": {"seconds": scaled},
            "bar": {"seconds": SECONDS},
            "holds": bool(scaled <= SECONDS),
        },
    }


def main() -> int:
    """Measure runs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--data", type=Path, default=TRACES)
    parser.add_argument("--spans", type=int, default=SPANS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sources = options.runs or [options.data / name for name in RUNS if (options.data / name).exists()]
    if not sources:
        parser.error(f"no runs given, and none in {options.data}")
    results = []
    for source in sources:
        results.append(measure(source))
        row = results[-1]
        print(
            f"{row['run']}: found x{row['found_speedup']:.3f}, best of {row['sets']} "
            f"x{row['best_speedup']:.3f} ({' + '.join(row['best'])}); {row['nodes']:,} nodes, "
            f"{row['seconds']:.2f} s",
            file=sys.stderr,
        )
    found = checks(results)
    if options.spans:
        largest = max(zip(results, sources), key=lambda pair: int(pair[0]["nodes"]))[1]
        found |= check_of_spans(of_spans(largest, options.spans))
    if options.json:
        print(json.dumps(found))
    return int(not all(check["holds"] for check in found.values()))


if __name__ == "__main__":
    as_program(main)
