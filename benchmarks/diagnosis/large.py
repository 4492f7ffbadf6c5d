"""How long `dpro diagnose` takes for a recording of many ranks with deep windows.

python -m benchmarks.diagnosis.large [--ranks 64 256] [--layout tp_pp] [--fault compute] [--rounds 2]

The jobs are those of `tests/reference/training_jobs.py`: thirty steps, with two deep windows of two steps.
The command is measured from start to verdict with an empty cache: seconds on the clock and of CPU time (best
of the rounds).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.diagnosis.dumps import measure
from dpro.store import open_run
from tests.reference.training_jobs import FAULTS, LAYOUTS, Job, run_job
from tests.reference.training_records import Recording, write_run

STEPS, WINDOWS, SEVERITY, SEED = 30, ((5, 2), (17, 2)), 1.5, 7


def main() -> None:
    """Write runs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--layout", choices=LAYOUTS, default="tp_pp")
    parser.add_argument("--fault", choices=FAULTS, default="compute")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for size in options.ranks:
        job = Job(
            options.layout, size, STEPS, True, "5%", SEED, windows=WINDOWS,
            fault=options.fault, severity=SEVERITY, victim=size // 3,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            run = write_run(Path(place) / "run", job, run_job(job), Recording("compared", seed=SEED))
            rows = open_run(run).rows()
            # Built graphs are cached, so each round begins with an empty cache.
            rounds = [measure(run, Path(place) / f"cache{n}") for n in range(options.rounds)]
        took, busy = (min(each[at] for each in rounds) for at in (0, 1))
        facts = {
            "ranks": size, "spans": rows["spans"], "calls": rows["collectives"],
            "seconds": round(took, 2), "processor_seconds": round(busy, 2), "said": rounds[0][2],
        }  # fmt: skip
        print(
            json.dumps(facts) if options.json else ", ".join(f"{key} {value}" for key, value in facts.items())
        )


if __name__ == "__main__":
    main()
