"""Cost of predicting one edit on a run whose graph is loaded, in CPU time.

python -m benchmarks.speed.edits RUN [--rounds 5] [--edit EDIT …]

Without --edit, the example of every edit; those that the run cannot answer are timed until they are refused.
Each is predicted three times from the graph as a command loads it. *New*: no command has asked this run for
it yet, so facts that depend on the run alone are computed, and written beside the saved graph. *First*: as in
the next command, which reads these facts but knows nothing else. *Again*: from the same graph object, as in a
notebook. Printed are the smallest of all rounds, and then the median. Loading the graph itself is not
counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import as_program
from dpro.analysis.graphs import graph_of
from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable
from dpro.replay.whatif.predict import baseline_steps, predict
from dpro.replay.whatif.registry import all_kinds, parse_edit


def main() -> None:
    """Predict each edit several times with a new cache, and print the smallest and the median time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--edit", nargs="+", default=[kind.example for kind in all_kinds()])
    options = parser.parse_args()
    run = open_quietly(options.run)
    with tempfile.TemporaryDirectory(prefix="edits-") as cache:
        os.environ["DPRO_CACHE"] = cache
        graph_of(run)  # fills the cache, from which commands load the graph
        built, trust = graph_of(run)
        graph = built.predictive
        baseline, known = baseline_steps(graph), dict(graph.facts)
        print(f"{graph.num_nodes} nodes, {graph.edges.source.size} edges")
        for text in options.edit:
            edit, new, first, again, said = parse_edit(text), *(list[float]() for _ in range(3)), ""
            for _ in range(options.rounds):
                for facts in (Path(cache) / "graphs").glob("*.fact"):
                    facts.unlink()
                fresh = dataclasses.replace(graph, facts=dict(known))
                later = dataclasses.replace(graph, facts=dict(known))
                for asked, spent in ((fresh, new), (later, first), (later, again)):
                    begun = time.process_time()
                    try:
                        predict(asked, baseline, [edit], trust)
                    except Unanswerable as error:
                        said = f"refused: {error}"
                    spent.append(1e3 * (time.process_time() - begun))
            times = " ".join(f"{min(each):6.0f} ({median(each):3.0f})" for each in (new, first, again))
            print(f"{times}  {text}  {said[:80]}", flush=True)


if __name__ == "__main__":
    as_program(main)
