"""Of all deep windows of a recording some stay, the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from dpro.collectors.convert.retention import LATEST, SLOW, keep_windows
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS
from dpro.store import Manifest, open_run, write_manifest, write_part
from dpro.timed import disturbed

# The time of the steps of windows 0 to 3, at steps 2, 4, 6, 8; the second rank is the slow one in window 1.
TIMES = {0: [100, 120, 110, 130], 1: [100, 300, 110, 130]}


@pytest.fixture
def run(tmp_path) -> Path:
    for rank, times in TIMES.items():
        steps = [
            {"rank": rank, "step": step, "window": -1, "start_ns": 1000 * step, "duration_ns": 90}
            for step in range(1, 10)
        ]
        for window, time in enumerate(times):
            steps[2 * window + 1] |= {"window": window, "duration_ns": time}
        write_part(tmp_path, STEPS, f"rank{rank}", pl.DataFrame(steps))
        for first in (0, 2):  # two windows a batch
            part = f"rank{rank}-batch-window000{first}"
            rows = [{"rank": rank, "window": window, "span_id": window, "start_ns": 2000 * (window + 1),
                     "duration_ns": 50} for window in (first, first + 1)]  # fmt: skip
            write_part(tmp_path, SPANS, part, pl.DataFrame(rows))
            calls = [{"rank": rank, "window": row["window"], "collective_id": row["span_id"]} for row in rows]
            write_part(tmp_path, COLLECTIVES, part, pl.DataFrame(calls))
            samples = [{"rank": rank, "counter": "memory_allocated_bytes", "time_ns": row["start_ns"] + 1,
                        "value": row["window"]} for row in rows]  # fmt: skip
            write_part(tmp_path, COUNTERS, part, pl.DataFrame(samples))
        always = pl.DataFrame({"rank": [rank], "window": [-1], "collective_id": [99]})
        write_part(tmp_path, COLLECTIVES, f"rank{rank}-calls-1", always)
        write_part(tmp_path, COUNTERS, f"rank{rank}", pl.DataFrame({"rank": [rank], "time_ns": [5]}))
    write_manifest(tmp_path, Manifest(world_size=2, ranks=[0, 1]))
    return tmp_path


@pytest.mark.parametrize(
    ("most", "which", "kept"),
    [(1, LATEST, [3]), (2, LATEST, [2, 3]), (1, SLOW, [1]), (2, SLOW, [1, 3]), (4, SLOW, [0, 1, 2, 3]),
     (9, LATEST, [0, 1, 2, 3])],
)  # fmt: skip
def test_as_many_windows_stay_as_asked_for_and_all_that_is_not_of_windows(run, most, which, kept):
    before = open_run(run).table(STEPS)
    keep_windows(run, most, which)
    keep_windows(run, most, which)  # again: nothing more goes
    opened = open_run(run)
    for rank in (0, 1):
        assert opened.table(SPANS).filter(rank=rank)["window"].to_list() == kept
        assert opened.table(COLLECTIVES).filter(rank=rank)["window"].sort().to_list() == [-1, *kept]
        counters = opened.table(COUNTERS).filter(rank=rank)
        assert counters.filter(counter="memory_allocated_bytes")["value"].sort().to_list() == kept
        assert counters.height == len(kept) + 1
        steps = opened.table(STEPS).filter(rank=rank)
        assert steps.filter(pl.col("window") >= 0)["window"].to_list() == kept
    after = opened.table(STEPS)
    assert after.drop("window", "beside").equals(before.drop("window", "beside"))
    assert after.select(disturbed(after)).equals(before.select(disturbed(before)))


def test_a_run_without_windows_or_steps_stays_as_it_is(tmp_path):
    keep_windows(tmp_path, 1, SLOW)
    write_part(tmp_path, STEPS, "rank0", pl.DataFrame({"rank": [0], "step": [1], "window": [-1]}))
    before = (tmp_path / "steps" / "rank0.parquet").read_bytes()
    keep_windows(tmp_path, 1, SLOW)
    assert (tmp_path / "steps" / "rank0.parquet").read_bytes() == before
