"""Cost of recording a server: CPU time recorded and not, in turns, with all requests there at once.

    python -m benchmarks.serving_server.cost --python PYTHON [--rounds N] [--json]

In: a Python that has transformers. Out: the median over rounds of CPU seconds recorded over those unrecorded
while the server answers, all threads of its process together; with `--json` as the other benchmarks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = Path(__file__).with_name("server.py")
LOAD = ["--rate", "1000", "--requests", "150", "--prompt", "64", "--output", "48", "--max-batch", "16"]
BAR = 0.01


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="one that has transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            run = Path(folder) / f"run{number}"
            recorded = [sys.executable, "-m", "dpro", "record", "--no-windows", "-o", str(run), "--"]
            order = [[], recorded] if number % 2 else [recorded, []]
            took = {bool(before): seconds([*before, args.python, str(SERVER), *LOAD]) for before in order}
            ratios.append(took[True] / took[False])
    cost = statistics.median(ratios) - 1
    figures = {"cost": cost, "ratios": ratios}
    check = {"n": len(ratios), "figures": figures, "bar": BAR, "holds": cost <= BAR}
    if args.json:
        print(json.dumps({"recording a server": check}))
    else:
        print(f"recording costs {cost:.2%} of CPU time (of {len(ratios)}: {[f'{r:.3f}' for r in ratios]})")


def seconds(command: list[str]) -> float:
    """Run the server, and return its CPU seconds for all requests."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return float(json.loads(done.stdout)["cpu_seconds"])


if __name__ == "__main__":
    main()
