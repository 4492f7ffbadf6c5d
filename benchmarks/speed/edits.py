"""What predicting one edit costs on a run whose graph is at hand, CPU time.

python -m benchmarks.speed.edits RUN [--rounds 5] [--edit EDIT …]

Without --edit, the example of each edit there is; those that the run cannot answer are timed until they are
refused. Each is predicted of a graph of which no edit knows anything yet, and again of the same graph: the
least of all rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

from dpro.cli.runs import open_quietly
from dpro.errors import Unanswerable
from dpro.freed_memory import keep_freed_memory
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.timeline import replay
from dpro.replay.whatif.predict import baseline_steps, predict
from dpro.replay.whatif.registry import all_kinds, parse_edit


def main() -> None:
    """Build the graph once, predict each edit some times, and print the least of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--edit", nargs="+", default=[edit.example for edit in all_kinds()])
    options = parser.parse_args()
    keep_freed_memory()  # as whoever asks for a graph does (dpro/analysis/graphs.py)
    run = open_quietly(options.run)
    built = build_graph(run)
    graph, trust = built.predictive, assess(built, replay(built.graph), run.manifest)
    baseline, known = baseline_steps(graph), dict(graph.known)
    print(f"{graph.num_nodes} nodes, {graph.edges.source.size} edges")
    for text in options.edit:
        edit, first, again, said = parse_edit(text), list[float](), list[float](), ""
        for _ in range(options.rounds):
            fresh = dataclasses.replace(graph, known=dict(known))
            for spent in (first, again):
                begun = time.process_time()
                try:
                    predict(fresh, baseline, [edit], trust)
                except Unanswerable as error:
                    said = f"refused: {error}"
                spent.append(1e3 * (time.process_time() - begun))
        print(f"{min(first):8.0f} ms, again {min(again):4.0f} ms  {text}  {said[:80]}")


if __name__ == "__main__":
    main()
