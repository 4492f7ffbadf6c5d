"""Overlapping dumps of the flight recorder become one row per call, also while more are to come."""

import json
import os

import polars as pl
import pytest

from dpro.collectors.convert import calls
from dpro.ingest.flight_recorder import read_dump
from dpro.schema import COLLECTIVES
from dpro.store import write_part

PART = "rank00000-7"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "process").mkdir()
    return tmp_path / "process"


def dump(folder, name, ids, made_s, retired=True, backend="fr"):
    """A dump as PyTorch writes it: call `n` was made at `n + 1` µs."""
    entries = [
        {
            "record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1,
            "profiling_name": "gloo:all_reduce", "time_created_ns": (number + 1) * 1000, "input_sizes": [[4]],
            "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"],
            "state": "scheduled", "retired": retired, "is_p2p": False,
        }
        for number in ids
    ]  # fmt: skip
    path = folder / f"flight-{backend}-{name}.json"
    path.write_text(json.dumps({"version": "2.10", "pg_config": {}, "entries": entries}))
    os.utime(path, (made_s, made_s))


def write(run, folder, until_ns=None):
    calls.keep_dumps(folder, lambda path: read_dump(path, rank=0).frames)
    calls.write_calls(run, PART, folder, until_ns)


def written(run):
    parts = sorted((run / "collectives").glob("*-calls-*.parquet"))
    return pl.concat([pl.read_parquet(part) for part in parts]) if parts else COLLECTIVES.empty()


END = 1 << 62


def test_calls_of_overlapping_dumps_are_rows_once(tmp_path, folder):
    dump(folder, "000001", range(0, 20), 100)
    dump(folder, "000002", range(10, 30), 101)
    write(tmp_path, folder)
    assert written(tmp_path)["sequence"].to_list() == list(range(1, 31))
    assert calls.lost_calls(folder) == {}


def test_state_is_the_one_seen_last_and_unknown_if_it_was_overwritten_unfinished(tmp_path, folder):
    dump(folder, "000001", range(0, 20), 100, retired=False)
    dump(folder, "000002", range(10, 30), 101)
    write(tmp_path, folder)
    assert written(tmp_path)["state"].to_list() == [""] * 10 + ["completed"] * 20


def test_calls_between_dumps_that_do_not_overlap_are_counted_as_lost(tmp_path, folder):
    dump(folder, "000001", range(5, 20), 100)
    dump(folder, "000002", range(27, 30), 101)
    write(tmp_path, folder)
    assert written(tmp_path).height == 18
    assert calls.lost_calls(folder) == {calls.LOST: 12}


def test_calls_of_the_latest_dump_wait_while_the_job_runs(tmp_path, folder):
    dump(folder, "000001", range(0, 20), 100)
    dump(folder, "000002", range(10, 30), 101, retired=False)
    write(tmp_path, folder, END)
    assert written(tmp_path)["sequence"].to_list() == list(range(1, 11))
    dump(folder, "000003", range(20, 40), 102)
    write(tmp_path, folder, END)
    write(tmp_path, folder)
    assert written(tmp_path)["sequence"].to_list() == list(range(1, 41))
    assert set(written(tmp_path)["state"]) == {"", "completed"}
    assert written(tmp_path)["state"].to_list()[20:] == ["completed"] * 20


def test_dumps_are_forgotten_once_all_their_calls_are_rows(tmp_path, folder):
    for number in range(1, 9):
        dump(folder, f"{number:06d}", range(10 * number, 10 * number + 20), 100 + number)
    write(tmp_path, folder, END)
    assert [path.name for path in sorted(folder.glob("flight-*"))] == [
        "flight-fr-000007.parquet", "flight-fr-000008.parquet"
    ]  # fmt: skip


def test_calls_of_a_window_that_is_open_wait_for_it(tmp_path, folder):
    dump(folder, "000001", range(0, 20), 100)
    dump(folder, "000002", range(20, 30), 101)
    write(tmp_path, folder, 7_000)
    assert written(tmp_path)["enqueued_ns"].to_list() == [number * 1000 for number in range(1, 7)]


def test_calls_that_a_window_has_met_are_no_rows_of_their_own(tmp_path, folder):
    dump(folder, "000001", range(0, 20), 100)
    met = pl.DataFrame({"collective_id": [2 * 3, 2 * 4], "rank": [0, 0], "window": [0, 0]})
    write_part(tmp_path, COLLECTIVES, f"{PART}-batch-window0000", met.with_columns(group_ranks=pl.lit("")))
    write(tmp_path, folder)
    assert written(tmp_path)["sequence"].to_list() == [1, 2, 3, *range(6, 21)]
    assert calls.lost_calls(folder) == {}


def test_two_recorders_number_their_calls_apart(tmp_path, folder):
    dump(folder, "000001", range(0, 5), 100)
    dump(folder, "000001", range(0, 7), 100, backend="nccl")
    write(tmp_path, folder)
    assert written(tmp_path)["collective_id"].sort().to_list() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13]


def test_writing_again_after_a_crash_gives_the_same_part(tmp_path, folder):
    dump(folder, "000001", range(0, 20), 100)
    dump(folder, "000002", range(15, 30), 101)
    calls.keep_dumps(folder, lambda path: read_dump(path, rank=0).frames)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    calls.write_calls(tmp_path, PART, folder, END)
    for path in folder.iterdir():  # the part is there, but is not noted yet
        path.unlink()
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    write(tmp_path, folder)
    assert written(tmp_path)["sequence"].to_list() == list(range(1, 31))
