"""How often hangs injected into real jobs are named right.

python -m benchmarks.diagnosis.hang_jobs [--repeats N]

Jobs are `tests/hanging.py` on gloo: four ranks, two pipelines of two stages with data parallelism, or data
parallelism alone. Each repeat injects each fault into another rank. Right means the class and exactly the
rank (both ranks where two receive from each other), and no other finding.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.diagnosis.report import table, wilson
from tests.hang_jobs import diagnosed

CLASSES = {
    "sleep": "hang.host", "stop": "hang.host", "gil": "hang.host", "die": "dead.rank",
    "skip": "hang.mismatch", "order": "hang.mismatch", "size": "hang.mismatch", "dtype": "hang.mismatch",
    "deadlock": "hang.mismatch", "leave": "hang.mismatch", "exit": "hang.mismatch", "raise": "dead.rank",
}  # fmt: skip
# Gloo ends a process that receives more than it expects: the rank is gone, and the job does not hang.
ABORTED = ("size", "dtype")
RANKS = 4
LAYOUTS = {"pipelines": [], "data parallel": ["--flat"]}


def cases(repeats: int) -> Iterator[tuple[str, str, int]]:
    """Yield layout, fault and rank; each repeat uses other ranks than the one before."""
    for repeat in range(repeats):
        for number, layout in enumerate(LAYOUTS):
            for place, fault in enumerate(CLASSES):
                if fault != "deadlock" or layout == "pipelines":
                    yield layout, fault, (2 + repeat + number + place) % RANKS


def judged(layout: str, fault: str, rank: int) -> tuple[str, str]:
    """Run a job; return `right`, `silent`, `wrong` or `failed`, and its findings or error."""
    ranks = sorted({rank, rank ^ 1}) if fault == "deadlock" else [rank]
    with tempfile.TemporaryDirectory() as folder:
        try:
            document = diagnosed(Path(folder), fault, "--rank", str(rank), *LAYOUTS[layout], num_ranks=RANKS)
        except AssertionError as error:
            return "failed", str(error)[-300:]
    hangs = [each for each in document["findings"] if each["class"].startswith(("hang.", "dead."))]
    said = [(each["class"], each["ranks"], round(each["confidence"], 2)) for each in hangs]
    if not said:
        return "silent", ""
    fits = {CLASSES[fault], "dead.rank"} if fault in ABORTED else {CLASSES[fault]}
    (class_, named, _), *others = said
    return "right" if class_ in fits and named == ranks and not others else "wrong", str(said)


def main() -> None:
    """Run the jobs, one at a time, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    verdicts: dict[str, list[str]] = {}
    for layout, fault, rank in cases(options.repeats):
        verdict, said = judged(layout, fault, rank)
        verdicts.setdefault(fault, []).append(verdict)
        print(f"{layout}, {fault}, rank {rank}: {verdict} {said} (load {os.getloadavg()[0]:.0f})", flush=True)
    verdicts["all"] = [each for found in verdicts.values() for each in found]
    rest = ["wrong", "silent", "failed"]
    rows = [
        [fault, wilson(found.count("right"), len(found)), *map(found.count, rest)]
        for fault, found in verdicts.items()
    ]
    print(table(["really injected", "right rank and class", *rest], rows))


if __name__ == "__main__":
    main()
