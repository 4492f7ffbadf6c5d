"""`dpro whatif --network-table`: a measured table shows what a run of one size of message cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import TinyRun
from tests.commands import dpro


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that reduce 1 MB in 1.02 ms, four times a step."""
    made = TinyRun()
    for rank in (0, 1):
        for step in range(3):
            at = 10_000.0 * step
            for number in range(4):
                begin = at + 2500 * number
                facts = {"group_ranks": "0,1", "bytes_in": 10**6, "bytes_out": 10**6}
                made.gloo(
                    (begin, begin + 10), (begin + 20, begin + 1040), rank, sequence=4 * step + number, **facts
                )
                made.op("wait", begin + 1040, begin + 2490, rank)
            made.step(step, at, at + 10_000, rank)
    folder = tmp_path_factory.mktemp("whatif") / "run"
    made.build(folder)
    return folder


def _notes(done) -> list[str]:
    assert done.returncode == 0, done.stderr
    (prediction,) = json.loads(done.stdout)["predictions"]
    return prediction["notes"]


def test_a_table_shows_the_latency_that_the_run_does_not(run, tmp_path):
    rows = [f"all_reduce,2,{2**power},{20 + 2**power / 1e3}" for power in range(10, 25)]
    (tmp_path / "t.csv").write_text("\n".join(["op,gpus,message_bytes,latency_us", *rows]))
    edit = ("--edit", "network:bandwidth=2", "--json")
    assert any("too similar to show latency" in note for note in _notes(dpro("whatif", run, *edit)))
    assert _notes(dpro("whatif", run, *edit, "--network-table", tmp_path / "t.csv")) == []


def test_a_table_without_a_needed_column_is_refused_in_one_line(run, tmp_path):
    (tmp_path / "t.csv").write_text("op,gpus,message_bytes\nall_reduce,2,1024\n")
    done = dpro("whatif", run, "--edit", "no-comm", "--network-table", tmp_path / "t.csv")
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert "no column time_ns or" in done.stderr
