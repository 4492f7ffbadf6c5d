"""Folders of flight recorder dumps: which are read as they are, and which dump of a rank counts."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from dpro.ingest.dumps import read_dumps
from dpro.ingest.importer import import_sources
from dpro.schema import COLLECTIVES, PROCESS_GROUPS
from dpro.store import open_run

BEGIN = 1_700_000_000 * 10**9
S = 10**9


def dump(calls: int, rank: int, *, group: str = "0", state: str = "completed", since: int = BEGIN) -> bytes:
    """A dump of one rank of two that has called this many times, one a second; the last is in a state."""
    entries: list[dict[str, Any]] = [
        {
            "record_id": number,
            "pg_id": 0,
            "process_group": [group, "undefined"],
            "collective_seq_id": number + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": since + number * S,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[4]],
            "output_dtypes": ["Float"],
            "state": state if number == calls - 1 else "completed",
            "retired": False,
            "is_p2p": False,
        }
        for number in range(calls)
    ]
    config = {group: {"name": group, "desc": "undefined", "ranks": "[0, 1]"}}
    return pickle.dumps({"version": "2.9", "pg_config": config, "pg_status": {}, "entries": entries}, 2)


def write(folder: Path, **files: bytes) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        os.utime(folder / name, ns=(BEGIN + 100 * S, BEGIN + 100 * S))
    return folder


def calls_by_rank(frames: Any) -> dict[int, int]:
    return dict(sorted(frames[COLLECTIVES.name].group_by("rank").len().iter_rows()))


def test_dumps_are_read_without_making_a_run(tmp_path):
    dumps = read_dumps(write(tmp_path, rank_0=dump(3, 0), rank_1=dump(2, 1)))
    assert dumps is not None
    assert calls_by_rank(dumps.frames) == {0: 3, 1: 2}
    assert (dumps.manifest.world_size, dumps.manifest.ranks, dumps.manifest.warnings) == (2, [0, 1], [])


@pytest.mark.parametrize("empty", [0, 1])
def test_a_rank_without_a_call_takes_nothing_from_the_others(tmp_path, empty):
    """Its table has no rows, and other columns than theirs."""
    calls = [0 if rank == empty else 3 for rank in range(2)]
    dumps = read_dumps(write(tmp_path, rank_0=dump(calls[0], 0), rank_1=dump(calls[1], 1)))
    assert dumps is not None
    assert calls_by_rank(dumps.frames) == {1 - empty: 3}
    assert dumps.manifest.ranks == [0, 1]
    assert dumps.frames[COLLECTIVES.name]["algorithm"].to_list() == [""] * 3


def test_dumps_and_the_run_made_of_them_hold_the_same(tmp_path):
    folder = write(tmp_path / "dumps", rank_0=dump(3, 0), rank_1=dump(2, 1, state="scheduled"))
    dumps = read_dumps(folder)
    import_sources([folder], tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert dumps is not None
    for table in (COLLECTIVES, PROCESS_GROUPS):
        assert dumps.frames[table.name].equals(run.table(table))
    assert dumps.manifest.world_size == run.manifest.world_size


def test_calls_of_a_group_that_only_they_name_have_its_ranks(tmp_path):
    renamed = pickle.loads(dump(3, 0))
    renamed["entries"][0]["process_group"] = ["0", "as it was called before"]
    dumps = read_dumps(write(tmp_path, rank_0=pickle.dumps(renamed, 2), rank_1=dump(3, 1)))
    assert dumps is not None
    calls = dumps.frames[COLLECTIVES.name].sort("rank", "collective_id")
    assert calls["group_ranks"].to_list() == ["0,1"] * 6
    assert calls["group"].to_list() == ["0 as it was called before", *["0"] * 5]


@pytest.mark.parametrize("stranger", [b'{"traceEvents": [], "schemaVersion": 1}', b"a word"])
def test_folder_with_another_trace_is_imported(stranger, tmp_path):
    folder = write(tmp_path, rank_0=dump(1, 0), rank_1=dump(1, 1), other=stranger)
    assert (read_dumps(folder) is None) == stranger.startswith(b"{")


def test_dumps_that_do_not_state_their_rank_are_imported(tmp_path):
    assert read_dumps(write(tmp_path, first=dump(1, 0), second=dump(1, 1))) is None


def test_damaged_dump_is_one_line_and_a_missing_one_another(tmp_path):
    dumps = read_dumps(write(tmp_path, rank_0=dump(3, 0), rank_1=dump(3, 1)[:60]))
    assert dumps is not None
    damaged, missing = dumps.manifest.warnings
    assert damaged.startswith(f"left out: {tmp_path / 'rank_1'}: not readable")
    assert missing == "1 of 2 ranks is missing: 1"


def newest_of_two(folder: Path) -> Path:
    return write(
        folder, **{"a/rank_0": dump(5, 0), "b/rank_0": dump(3, 0, state="scheduled"), "a/rank_1": dump(5, 1)}
    )


def test_of_two_dumps_of_a_rank_the_newest_counts_and_one_line_says_so(tmp_path):
    dumps = read_dumps(newest_of_two(tmp_path))
    assert dumps is not None
    assert calls_by_rank(dumps.frames) == {0: 5, 1: 5}
    assert set(dumps.frames[COLLECTIVES.name]["state"]) == {"completed"}
    (line,) = dumps.manifest.warnings
    assert (
        line
        == f"rank 0: {tmp_path / 'a' / 'rank_0'} is used, which is newer than {tmp_path / 'b' / 'rank_0'}"
    )


def test_import_takes_the_newest_dump_of_a_rank_too(tmp_path):
    newest_of_two(tmp_path / "dumps")
    manifest = import_sources([tmp_path / "dumps"], tmp_path / "run")
    frames = {COLLECTIVES.name: open_run(tmp_path / "run").table(COLLECTIVES)}
    assert calls_by_rank(frames) == {0: 5, 1: 5}
    assert [line for line in manifest.warnings if "is newer than" in line] == manifest.warnings


@pytest.mark.parametrize("through_import", [False, True])
def test_dumps_of_a_rank_about_different_groups_are_taken_together(through_import, tmp_path):
    files = {"a/rank_0": dump(5, 0), "b/rank_0": dump(3, 0, group="7"), "a/rank_1": dump(5, 1)}
    folder = write(tmp_path / "dumps", **files)
    if through_import:
        import_sources([folder], tmp_path / "run")
        run = open_run(tmp_path / "run")
        frames = {table.name: run.table(table) for table in (COLLECTIVES, PROCESS_GROUPS)}
        assert not run.manifest.warnings
    else:
        dumps = read_dumps(folder)
        assert dumps is not None
        frames = dict(dumps.frames)
    assert calls_by_rank(frames) == {0: 8, 1: 5}
    assert set(frames[PROCESS_GROUPS.name].filter(rank=0)["group"]) == {"0", "7"}


def test_calls_come_in_order_of_ranks_and_of_one_rank_in_order_of_its_files(tmp_path):
    files = {"a10/rank_0": dump(1, 0), "a9/rank_0": dump(1, 0, group="7")}  # ids and times are the same
    files |= {f"rank_{rank}": dump(2, rank) for rank in (1, 2, 9, 10)}
    dumps = read_dumps(write(tmp_path, **files))
    assert dumps is not None
    calls = dumps.frames[COLLECTIVES.name]
    assert calls["rank"].to_list() == [0, 0, 1, 1, 2, 2, 9, 9, 10, 10]
    assert calls["group"].to_list()[:2] == ["0", "7"]


def test_report_of_ras_beside_dumps_is_said(tmp_path):
    status = {"init_state": 0, "async_error": 0, "abort_flag": False}
    well = {"rank": 0, "host": "a", "pid": 7, "cuda_dev": 0, "nvml_dev": 0, "status": status}
    gone = {"rank": 1, "host": "b", "pid": 8, "cuda_dev": 0, "nvml_dev": 0}
    gone |= {"status": {"unresponsive": True, "considered_dead": False}}
    world = {"hash": "0xab", "size": 2, "ranks": [well], "missing_ranks": [gone]}
    report = json.dumps({"nccl_version": "2.28.3", "communicators_count": 1, "communicators": [world]})
    dumps = read_dumps(write(tmp_path, rank_0=dump(3, 0), ras=report.encode()))
    assert dumps is not None
    assert dumps.manifest.missing_ranks == [1]
    assert "RAS: rank 1 (b pid 8) does not answer (communicator 0xab)" in dumps.manifest.warnings
