"""How long commands take beside programs that never wait.

python -m benchmarks.speed.loaded [RUN] [--load N] [--rounds N] [--json]

RUN is a run directory, or traces. Each command runs quietly and beside N processes `while True: pass`, in
turn, with its graph and the machine code of loops in the cache. `fair` is the wall time of one of these
processes per second of its CPU time meanwhile: what a program of one thread gets under the machine's whole
load. `share` is the CPU time that the command got per second, relative to that: below 1 it waited for more
than its turn.
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
from pathlib import Path

from benchmarks import TRACES, as_program, load
from dpro.cli.analysis import open_quietly

DEFAULT = TRACES / "multirank" / "nanogpt_h100_8r_rs_ag"
COMMANDS = ("explain", "diagnose", "whatif", "report")
BAR = 6.0  # times as long as quietly, beside a load of 8 on two cores


def mean_cpu_s(processes: list[int]) -> float:
    """Return the mean CPU time of some processes so far."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") / len(processes)


def seconds(arguments: list[str], cache: str) -> tuple[float, float]:
    """Run this Python once; return wall and CPU seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"DPRO_CACHE": cache}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(verb: str, run: Path, count: int, rounds: int, cache: str) -> dict[str, float]:
    """Time one command, quietly and beside a load."""
    words = ["-m", "dpro", verb, str(run), "--json"]
    seconds(words, cache)
    quiet, loaded, fair = [], [], []
    for _ in range(rounds):
        quiet.append(seconds(words, cache))
        with load(count) as others:
            before = mean_cpu_s(others)
            loaded.append(seconds(words, cache))
            fair.append(loaded[-1][0] / (mean_cpu_s(others) - before))
    wall_s, cpu_s = (statistics.median(each) for each in zip(*quiet))
    loaded_wall_s, loaded_cpu_s = (statistics.median(each) for each in zip(*loaded))
    return {
        "quiet_s": wall_s,
        "quiet_cpu_s": cpu_s,
        "loaded_s": loaded_wall_s,
        "loaded_cpu_s": loaded_cpu_s,
        "ratio": loaded_wall_s / wall_s,
        "fair": statistics.median(fair),
        "share": statistics.median(each * cpu / wall for (wall, cpu), each in zip(loaded, fair)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--load", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=COMMANDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run, load_of_others = open_quietly(options.run).path, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as cache:
        results = {
            verb: measured(verb, run, options.load, options.rounds, cache)
            for verb in options.only or COMMANDS
        }
    if options.json:
        print(
            json.dumps({"load": options.load, "load_before": load_of_others, "bar": BAR, "commands": results})
        )
        return
    for verb, values in results.items():
        print(f"{verb:10}", "  ".join(f"{key} {value:.2f}" for key, value in values.items()))


if __name__ == "__main__":
    as_program(main)
