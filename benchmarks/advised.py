"""Whether the first advice of `dpro explain`, followed in the script, gains what it predicts.

python -m benchmarks.advised [--only WHAT …] [--rounds 3] [--load N] [--list] [--json]

Each job (`recording/advised_job.py`) is limited by one thing. It is recorded once as it is. Then it runs in
turns without dpro, as it is and as a person has changed it; the gain is the median ratio of the rounds. A job
is judged if dpro gives the advice that was followed. With `--load N`, N busy processes run beside it.
`--json` prints one object: check → {n, figures, bar, holds}. Launch-bound jobs need a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import load
from benchmarks.recording import ENVIRONMENT, cable, job, record_window
from dpro.cli.analysis import analyse
from dpro.verdict.verdict import explain

# Limit of the job -> the advice that was followed in the script.
DONE = {
    "input": "input",
    "optimizer": "optimizer",
    "communication": "compression",
    "uneven": "balance-input",
    "crowded": "cores",
}
LINK_MBIT = {"communication": 200}
SKIP, WINDOW_STEPS, STEPS = 8, 16, 40
BAR_PCT = 85.0
NEXT_TO_NOTHING = 1.03  # speed-up below which a gain has no sign


def command_of(what: str, *options: str) -> list[str]:
    """Return the command of a job, over its link."""
    rate = LINK_MBIT.get(what)
    over = cable(rate) if rate else ()
    return job("advised_job.py", [what, "--steps", STEPS, *options], over=over)


def step_s(what: str, folder: Path, done: bool) -> float:
    """Measure the mean step without dpro, in seconds; a mean, since steps differ.

    Raises:
        RuntimeError: the job failed; with the end of its output.
    """
    out = folder / "times.json"
    command = command_of(what, "--out", str(out), *(["--done"] if done else []))
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        raise RuntimeError(f"{what} ended with {ended.returncode}: {ended.stderr[-3000:]}")
    return mean(sorted(json.loads(out.read_text())[SKIP:])[:-2])  # without the two longest


def measure(what: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Compare the advice for a job with the gain from following it.

    Args:
        rounds: of both sides, whose order alternates.
        folder: for the recording.
    """
    record_window(folder / "run", command_of(what), SKIP, WINDOW_STEPS)
    verdict = explain(analyse(str(folder / "run")))
    ratios = []
    for number in range(rounds):
        sides = {done: step_s(what, folder, done) for done in ((False, True), (True, False))[number % 2]}
        ratios.append(sides[False] / sides[True])
    gain = median(ratios)
    advised = next((advice for advice in verdict.advice if advice.kind == DONE[what]), None)
    low, high = (advised.gain_low, advised.gain_high) if advised else (None, None)
    return {
        "job": what,
        "limit": verdict.limit.kind if verdict.limit else "",
        "advice": [advice.kind for advice in verdict.advice],
        "low": low,
        "high": high,
        "gain": gain,
        "ratios": ratios,
        "holds": low is not None and high is not None and low <= gain <= high,
        "sign": advised is None or gain > 1 or gain > 1 / NEXT_TO_NOTHING,
    }


def checks(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute each check: number of jobs, percentage, bar, and whether it holds."""
    advised = [row for row in rows if row["low"] is not None]
    shares = {
        "advised": (len(rows), 100 * len(advised) / max(len(rows), 1), BAR_PCT),
        "gains": (len(advised), 100 * sum(row["holds"] for row in advised) / max(len(advised), 1), BAR_PCT),
        "signs": (len(advised), 100 * sum(row["sign"] for row in advised) / max(len(advised), 1), 100.0),
    }
    return {
        name: {"n": count, "pct": round(pct, 1), "bar": bar, "holds": pct >= bar}
        for name, (count, pct, bar) in shares.items()
    }


def main() -> None:
    """Measure all jobs and print the checks."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", choices=DONE, default=list(DONE))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--load", type=int, default=0)
    options.add_argument("--list", action="store_true", help="print each job, too")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    rows = []
    with load(chosen.load):
        for what in chosen.only:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(what, chosen.rounds, Path(folder)))
            if chosen.list:
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = checks(rows)
    print(json.dumps(result if chosen.json else {"jobs": rows, **result}, indent=None if chosen.json else 1))


if __name__ == "__main__":
    main()
