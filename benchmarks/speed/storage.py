"""How much disk each kind of record takes: bytes a step, a window, an hour; and of an hour of a GPU.

python -m benchmarks.speed.storage [--steps 1000] [--step-s 1.0] [--json]

The sample job of two ranks is recorded once for each kind. An hour of a GPU is computed from the bytes of a
step and of a window, for steps of `--step-s` with a window of two steps every 100 of them, since this job's
own steps take milliseconds. Figures are of a rank; those of telemetry are of its host. The spans of a window
depend on the job's operators, so the bytes of one span are also given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpro.opening import open_path
from dpro.schema import SPANS, STEPS
from dpro.store import Run

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
EVERY = 100  # steps from one window to the next
BAR = 1024  # bytes a step and rank, always on
# Options that add to the records of windows.
KINDS = {
    "windows": [],
    "with shapes": ["--shapes"],
    "with modules": ["--modules"],
    "with stacks": ["--stacks"],
    "with memory": ["--memory"],
    "with an execution trace": ["--execution-trace"],
}


def recorded(folder: Path, steps: int, *options: str) -> Run:
    """Record a run of the sample job."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    job = [*launcher, str(ROOT / "sample_traces" / "train.py"), "--steps", str(steps)]
    record = [sys.executable, "-m", "dpro", "record", "-o", str(folder), *options, "--", *job]
    subprocess.run(record, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return open_path(folder)


def sizes(run: Run) -> dict[str, int]:
    """Return the bytes of the parts of a run: `windows`, `telemetry`, and what is recorded `always`."""
    found = {"windows": 0, "telemetry": 0, "always": 0}
    for part in run.path.glob("*/*.parquet"):
        kind = "telemetry" if part.name.startswith("telemetry") else "always"
        found["windows" if "-window" in part.name else kind] += part.stat().st_size
    return found


def main() -> None:
    """Record and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    steps_per_hour = 3600 / options.step_s
    rows: dict[str, dict[str, Any]] = {}

    def row(name: str, n: int, holds: bool | None, **figures: float) -> None:
        bar = f"{BAR} bytes a step" if holds is not None else "none"
        rounded = {key: round(value, 1) for key, value in figures.items()}
        rows[name] = {"n": n, "figures": rounded, "bar": bar, "holds": holds}

    with TemporaryDirectory() as place:
        plain = recorded(Path(place) / "always", options.steps, "--no-windows")
        steps = plain.table(STEPS)
        per_step = sizes(plain)["always"] / steps.height
        seconds = (steps["start_ns"].max() - steps["start_ns"].min()) / 1e9  # type: ignore[operator]
        hourly = per_step * steps_per_hour
        row(
            "steps and calls, always",
            steps.height,
            per_step <= BAR,
            bytes_per_step=per_step,
            bytes_per_gpu_hour=hourly,
        )
        hourly = sizes(plain)["telemetry"] / seconds * 3600
        row("telemetry of a host, once a second", round(seconds), None, bytes_per_gpu_hour=hourly)
        for name, more in KINDS.items():
            run = recorded(Path(place) / name.replace(" ", "-"), options.steps, "--every", str(EVERY), *more)
            windows, spans = run.table(SPANS, ["window"])["window"].n_unique(), run.num_rows(SPANS)
            per_window = sizes(run)["windows"] / windows / RANKS
            row(
                name, windows, None, bytes_per_window=per_window, spans_per_window=spans / windows / RANKS,
                bytes_per_span=sizes(run)["windows"] / spans,
                bytes_per_gpu_hour=per_window * steps_per_hour / EVERY,
            )  # fmt: skip
    if options.as_json:
        print(json.dumps(rows, indent=1))
        return
    for name, found in rows.items():
        figures = "  ".join(f"{key} {value:,}" for key, value in found["figures"].items())
        print(f"{name:36} n {found['n']:<6} {figures}")


if __name__ == "__main__":
    main()
