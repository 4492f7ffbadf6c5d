"""Whether the first advice of `dpro explain`, done in the script, gains what it says.

python -m benchmarks.advised [--only WHAT …] [--rounds 3] [--load N] [--list] [--json]

Each job (`recording/advised_job.py`) is limited by one thing. It is recorded once as it is. Then it runs in
turns without dpro, as it is and as a person has changed it; the gain is the median ratio of the rounds. A job
is judged if the advice that was done is among ours. With `--load N`, N processes compute beside. `--json`
prints one object: check → {n, figures, bar, holds}. Launch-bound jobs need a GPU.
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

# What limits the job -> the advice that was done in the script.
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
NEXT_TO_NOTHING = 1.03  # gains below have no sign


def command_of(what: str, *options: str) -> list[str]:
    """The command of a job, over its link."""
    rate = LINK_MBIT.get(what)
    over = cable(rate) if rate else ()
    return job("advised_job.py", [what, "--steps", STEPS, *options], over=over)


def step_s(what: str, folder: Path, done: bool) -> float:
    """How long a step takes without dpro, by its mean: not each is like the next.

    Raises:
        RuntimeError: the job failed; with what it printed last.
    """
    out = folder / "times.json"
    command = command_of(what, "--out", str(out), *(["--done"] if done else []))
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        raise RuntimeError(f"{what} ended with {ended.returncode}: {ended.stderr[-3000:]}")
    return mean(sorted(json.loads(out.read_text())[SKIP:])[:-2])  # but for the two longest


def measure(what: str, rounds: int, folder: Path) -> dict[str, Any]:
    """What is advised for a job, and what doing it gains.

    Args:
        rounds: of both, in turns that change places.
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
    """By check: how many, the figures, the bar, and whether it holds."""
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
    """Measure all, and print what holds."""
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
