"""Keep a sample of the current format of run directories: once, when a release is the first to write it.

python -m tests.formats.keep

It goes into `tests/formats/N`: `job`, a recording of two ranks; `rows`, a run with a row of every table; and
`read.json`, what is read of both. Later versions are held to read the same. A sample is never made again:
it is what runs of users are.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl

from dpro.opening import open_path
from dpro.schema import TABLES
from dpro.store import FORMAT_VERSION, Manifest, open_run, write_manifest, write_part
from dpro.table import Table

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = Path(__file__).parent
RECORD = ("--skip", "4", "--every", "50", "--window-steps", "1")
JOB = ("torchrun", "--nproc-per-node", "2", "sample_traces/train.py", "--steps", "16")


def totals(rows: pl.DataFrame) -> dict[str, Any]:
    """The number of rows, and the sum of each column; of what is no number, of its characters."""
    sums = {column.name: _sum(column) for column in rows}
    return {"rows": rows.height, **sums}


def _sum(column: pl.Series) -> float:
    if column.dtype.is_float():
        return math.fsum(column)
    return sum(column if column.dtype.is_integer() else map(len, map(str, column)))


def _row(table: Table) -> pl.DataFrame:
    """A row of which no two numbers are equal."""
    values = {name: _value(name, at, dtype) for at, (name, dtype) in enumerate(table.dtypes.items(), 2)}
    return pl.DataFrame([pl.Series(name, [value], table.dtypes[name]) for name, value in values.items()])


def _value(name: str, number: int, dtype: Any) -> Any:
    if isinstance(dtype, pl.Enum):
        return dtype.categories[-1]
    if name == "group_ranks" and dtype == pl.String:
        return f"0-{number}"
    if dtype == pl.Boolean:
        return True
    if dtype == pl.List:
        return [_value(name, number, dtype.inner)]
    if dtype == pl.String:
        return f"text {number}"
    return number + 0.5 if dtype.is_float() else number


def main() -> int:
    """Make the sample, unless there is one."""
    sample = SAMPLES / str(FORMAT_VERSION)
    if sample.exists():
        print(f"{sample} exists, and is kept as it is", file=sys.stderr)
        return 1
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "dpro", "record", "-o", sample / "job", *RECORD, "--", *JOB],
        check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
    )  # fmt: skip
    job = open_path(sample / "job")
    for table in TABLES.values():
        write_part(sample / "rows", table, "rank00000", _row(table))
    write_manifest(sample / "rows", Manifest(world_size=1, ranks=[0], created_by="a test"))
    run = open_run(sample / "rows")
    read = {
        "rows": {name: run.table(table).row(0, named=True) for name, table in TABLES.items()},
        "job": {name: totals(job.table(table)) for name, table in TABLES.items()},
    }
    (sample / "read.json").write_text(json.dumps(read, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
