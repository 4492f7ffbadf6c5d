"""How long the command takes to start, beside a bare Python in the same run.

python -m benchmarks.speed.startup [--json]

Commands alternate with `python -c pass`, so that a slow spell of the machine affects both; compare machines
by the ratio of the medians.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

ROUNDS = 15
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import dpro": ["-c", "import dpro"],
    "dpro --help": ["-m", "dpro", "--help"],
    "dpro diagnose --help": ["-m", "dpro", "diagnose", "--help"],
}


def seconds(arguments: list[str]) -> float:
    """Return the wall time of one run of this Python."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    medians = {name: statistics.median(each) for name, each in times.items()}
    bare = medians["python -c pass"]
    rows = {
        name: {"median_s": round(median, 4), "ratio": round(median / bare, 2)}
        for name, median in medians.items()
    }
    if "--json" in sys.argv[1:]:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:22} {row['median_s']:.3f} s   x{row['ratio']:.2f}")


if __name__ == "__main__":
    main()
