"""The function in which a late host takes longer is named, with the job's own function that calls it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.observations import observe
from dpro.detect.stragglers.code import with_code
from dpro.replay.construction.graph_builder import build_graph
from dpro.schema import SPANS
from dpro.store import Run, open_run, write_part
from tests.unit.detect.jobs import MS, equal_work, found_in_graph, slower, write_job

LATE = observe("longer-work", "rank 1 takes {longer_ns} more", longer_ns=20.0 * MS, last_step=59)


def sleeping(folder: Path, called: str, caller: str, rank: int = 1) -> Run:
    """A job whose rank 1 takes 20 ms longer between its input and its operators, and what it does there."""
    run = open_run(write_job(folder, slower(equal_work(2), "gap", 1, plus=20)))
    spans = run.table(SPANS).filter(rank=rank)
    inputs = spans.filter(pl.col("name").str.contains("DataLoader"))
    rows = [
        row | {"span_id": row["span_id"] + 10**6 * (depth + 1), "kind": "python", "name": name}
        | {"start_ns": row["start_ns"] + row["duration_ns"] + depth, "duration_ns": 20 * MS - 2 * depth}
        for row in inputs.to_dicts()
        for depth, name in enumerate((caller, called))
    ]  # fmt: skip
    write_part(folder, SPANS, f"rank{rank:05d}", pl.concat([spans, pl.DataFrame(rows, spans.schema)]))
    return open_run(folder)


def by_calls(run: Run, cost_ms: float = 20.0) -> Finding:
    late = Finding("slow.host", "rank", "1", (1,), 0.5, 0.9, cost_ms * MS, (LATE,), "host code that waits")
    (finding,) = with_code([late], Baseline(build_graph(run).graph))
    return finding


@pytest.mark.parametrize(
    ("called", "caller", "place", "words"),
    [
        ("<built-in function sleep>", "/job/train.py(12): fit", ("sleep", 12), "sleep (train.py:12)"),
        ("<built-in function sleep>", "/job/train.py(12): <module>", ("sleep", 0), "sleep (train.py)"),
        ("threading.py(327): wait", "/job/train.py(12): fit", ("wait", 12), "wait (train.py:12)"),
        ("/job/train.py(30): load", "/job/train.py(12): fit", ("load", 30), "load (train.py:30)"),
    ],
)
def test_a_function_is_named_with_the_place_in_the_job_that_calls_it(tmp_path, called, caller, place, words):
    run = sleeping(tmp_path / "run", called, caller)
    (in_windows,) = found_in_graph(build_graph(run).graph)
    from_calls = by_calls(run)
    name, line = place
    assert in_windows.place == from_calls.place == CodeLocation(name, "/job/train.py", line)
    assert in_windows.evidence[0].endswith(f"in host code outside any operator: {words}")
    assert from_calls.evidence[-1].endswith(f"in host code outside any operator: {words}")


def test_methods_of_objects_at_other_addresses_are_one_function(tmp_path):
    acquire = "<built-in method acquire of _thread.lock object at 0x7f0e2c559180>"
    assert by_calls(sleeping(tmp_path, acquire, "/job/train.py(12): fit")).place == CodeLocation(
        "_thread.lock.acquire", "/job/train.py", 12
    )


def test_without_stacks_the_finding_says_how_to_record_them(tmp_path):
    run = open_run(write_job(tmp_path, slower(equal_work(2), "gap", 1, plus=20)))
    finding = by_calls(run)
    assert finding.place is None
    assert finding.evidence[-1].endswith("; record with `dpro record --stacks` to name it")


def test_windows_that_do_not_show_the_excess_name_nothing(tmp_path):
    run = sleeping(tmp_path, "<built-in function sleep>", "/job/train.py(12): fit")
    assert by_calls(run, cost_ms=200.0).observations == (LATE,)
    assert by_calls(open_run(write_job(tmp_path / "even", equal_work(2)))).observations == (LATE,)
