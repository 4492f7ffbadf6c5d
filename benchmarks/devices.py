"""How well `dpro.replay.cost.kernels` predicts times of operations, models and jobs on devices.

    python benchmarks/devices.py [--train FOLDER] [--data FOLDER] [--json]
    python benchmarks/devices.py --fit FILE [--train FOLDER]

`--train` is the folder of measured tables that may be learned from, `--data` that of those tried; each
defaults to the other, and both to `DPRO_REALITY`. With one folder, shapes and devices are left out inside it.
A check without data has n 0, holds null, and a note that says why. Prints a line per check, or with `--json`
check -> {n, median_pct, p90_pct, bar, holds}. `--fit` writes the numbers that ship instead
(`replay/cost/kernels/coefficients.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the checks are beside this file, and it runs as a script

from benchmarks import TRACES  # noqa: E402
from benchmarks.device_checks import jobs, models, operators, shipped  # noqa: E402
from benchmarks.device_checks.tables import read_tables, unknown_devices  # noqa: E402
from dpro.replay.cost.kernels.formula import DeviceTable  # noqa: E402

REALITY = Path(os.environ.get("DPRO_REALITY", REPOSITORY.parent / "shared" / "reality"))
MAX_ROWS = 9000  # of one table, so that a run ends in minutes

Checks = dict[str, dict[str, Any]]


def checks(train: Path, data: Path) -> Iterator[tuple[str, Callable[[], Checks]]]:
    """Yield each group of checks by name, with the function that runs it."""
    same = train.resolve() == data.resolve()

    def tables(kind: str, dtype: str, most: int = MAX_ROWS) -> tuple[list[DeviceTable], list[DeviceTable]]:
        mine = [each for each in read_tables(train, [kind], most) if each.dtype == dtype]
        return mine, mine if same else [
            each for each in read_tables(data, [kind], most) if each.dtype == dtype
        ]

    def attention() -> tuple[list[DeviceTable], list[DeviceTable]]:
        both = [tables(kind, "bf16", MAX_ROWS // 2) for kind in ("prefill", "decode")]
        return [each for pair in both for each in pair[0]], [each for pair in both for each in pair[1]]

    yield "matmul", lambda: operators.unseen_shapes(*tables("matmul", "bf16"), same, (4, 14), "matmul")
    yield "other device", lambda: operators.other_device(*tables("matmul", "bf16"))
    yield (
        "new device",
        lambda: operators.never_measured(*tables("matmul", "bf16"), same, "bf16", ((12, 30), (6.5, 20))),
    )
    yield "fp8", lambda: operators.never_measured(*tables("matmul", "fp8"), same, "fp8", (None, None))
    yield "attention", lambda: operators.unseen_shapes(*attention(), same, (4, 17), "attention")
    yield "models", lambda: models.whole_models(train, data)
    yield "jobs", lambda: jobs.small_jobs(train, data)
    yield "traces", lambda: models.traced_model(TRACES)


def main() -> int:
    """Run the checks; return 1 if one of them does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, help="tables that may be learned from")
    parser.add_argument("--data", type=Path, help="tables that are tried")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="write the numbers that ship")
    parser.add_argument("--only", help="comma-separated names of groups of checks")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    train = asked.train or asked.data or REALITY
    data = asked.data or train
    for folder in (train, data):
        if not folder.is_dir():
            parser.error(f"no folder {folder}: name one with --train and --data")
    if asked.fit:
        shipped.write(asked.fit, read_tables(train, most=4000))
        return 0
    if unknown := unknown_devices(data):
        print(f"without a data sheet, left out: {', '.join(unknown)}", file=sys.stderr)
    found: Checks = {}
    for name, run in checks(train, data):
        if asked.only and name not in asked.only.split(","):
            continue
        begun = time.monotonic()
        for check, figures in run().items():
            found[check] = figures
            print(_line(check, figures), file=sys.stderr if asked.json else sys.stdout, flush=True)
        print(f"  {name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    if asked.json:
        print(json.dumps(found, indent=1))
    return int(any(figures["holds"] is False for figures in found.values()))


def _line(check: str, figures: dict[str, Any]) -> str:
    held = "".join(f"  {key[:-4]} {figures[key]}%" for key in ("held_pct", "right_pct") if figures.get(key))
    verdict = {True: "holds", False: "MISSED", None: ""}[figures["holds"]]
    return (
        f"{check:58} n {figures['n']:>7}  median {figures['median_pct']}  p90 {figures['p90_pct']}"
        f"{held}  bar {figures['bar']}  {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
