"""Imports in parallel, on executors and in shards: the same bytes as one process makes, or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import pytest

from dpro.errors import InputError, UsageError
from dpro.ingest import assembly, shards, staging
from dpro.ingest.importer import import_sources
from dpro.ingest.shards import Shard, WaitingImport, import_shard, parse_shard
from dpro.store import Manifest, open_run
from tests.jobs import PATIENCE_S, wait_until
from tests.slow_reader import install_slow_reader, kill_the_reader_of_the_third_file
from tests.traces import cpu_op, write, write_rank

RANKS = 5


@pytest.fixture
def source(tmp_path) -> Path:
    """Ranks of a job, one of which is damaged, and one whose rank nothing states."""
    for rank in range(RANKS):
        write_rank(tmp_path / "in", rank, RANKS + 2)
    damaged = write_rank(tmp_path / "in", RANKS, RANKS + 2)
    damaged.write_bytes(damaged.read_bytes()[:80])
    write(tmp_path / "in" / "nameless.json", [cpu_op("a", 1, 2)])
    return tmp_path / "in"


@pytest.fixture
def expected(source, tmp_path) -> dict[str, str]:
    """Digests of the run that one process makes."""
    import_sources([source], tmp_path / "expected", jobs=1)
    return digests(tmp_path / "expected")


def digests(run: Path) -> dict[str, str]:
    """sha256 of every file of a run."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_processes_make_the_same_bytes_as_one(source, expected, tmp_path):
    import_sources([source], tmp_path / "out" / "run", jobs=3)
    assert digests(tmp_path / "out" / "run") == expected
    assert {"manifest.json", "spans/rank00000.parquet", "spans/rank00005.parquet"} <= expected.keys()
    assert _left_in(tmp_path / "out") == ["run"]


@pytest.mark.slow
def test_any_executor_makes_the_same_bytes(source, expected, tmp_path):
    with ThreadPoolExecutor(3) as executor:
        import_sources([source], tmp_path / "threads", executor=executor)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        import_sources([source], tmp_path / "processes", executor=executor)
    assert digests(tmp_path / "threads") == digests(tmp_path / "processes") == expected


@pytest.mark.slow
def test_dask_makes_the_same_bytes(source, expected, tmp_path):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    cluster = distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        local_directory=str(tmp_path / "dask"),
    )
    with cluster, distributed.Client(cluster) as client:
        import_sources([source], tmp_path / "run", executor=client.get_executor())
    assert digests(tmp_path / "run") == expected


@pytest.mark.slow
def test_nothing_is_lost_with_a_worker_of_dask(source, expected, tmp_path, monkeypatch, repository):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    log = install_slow_reader(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{repository}")  # for the workers alone
    cluster = distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        local_directory=str(tmp_path / "dask"),
    )
    with cluster, distributed.Client(cluster) as client:
        killer = Thread(target=kill_the_reader_of_the_third_file, args=(log,), daemon=True)
        killer.start()
        import_sources([source], tmp_path / "run", executor=client.get_executor())
        killer.join()
    assert digests(tmp_path / "run") == expected
    started = [line.split()[0] for line in log.read_text().splitlines()]
    assert started.count(started[2]) == 2  # what the worker was reading when it died was read again


def test_progress_is_reported_in_bytes(source, tmp_path):
    reported: list[tuple[int, int]] = []
    import_sources([source], tmp_path / "run", progress=lambda done, total: reported.append((done, total)))
    size = sum(path.stat().st_size for path in source.iterdir())
    assert reported[-1] == (size, size)
    assert len(reported) == 1 + RANKS + 2  # nothing first, then each file


# ---- shards


def _shards(source: Path, run: Path, count: int, order: list[int]) -> list[Manifest | WaitingImport]:
    return [import_shard([source], run, Shard(index, count)) for index in order]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 0, 2]])
def test_shards_in_any_order_make_the_same_bytes(order, source, expected, tmp_path):
    *before, last = _shards(source, tmp_path / "out" / "run", 3, order)
    assert isinstance(last, Manifest)
    assert all(isinstance(outcome, WaitingImport) for outcome in before)
    assert digests(tmp_path / "out" / "run") == expected
    assert _left_in(tmp_path / "out") == ["run"]


def test_more_shards_than_files_are_no_harm(source, expected, tmp_path):
    _shards(source, tmp_path / "run", 12, list(range(12)))
    assert digests(tmp_path / "run") == expected


@pytest.mark.slow
def test_shards_at_the_same_time_make_the_same_bytes(source, expected, tmp_path):
    command = [sys.executable, "-m", "dpro", "import", source, "-o", tmp_path / "out" / "run", "--json"]
    running = [
        subprocess.Popen([*command, "--shard", f"{index}/4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for index in range(1, 5)
    ]
    for process in running:
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
    assert digests(tmp_path / "out" / "run") == expected
    assert _left_in(tmp_path / "out") == ["run"]


def test_until_the_last_shard_is_in_there_is_no_run(source, tmp_path):
    (waiting,) = _shards(source, tmp_path / "run", 3, [1])
    assert isinstance(waiting, WaitingImport)
    assert waiting.missing == [0, 2]
    assert not (tmp_path / "run").exists()


def test_the_command_says_which_shards_are_still_out(source, tmp_path):
    command = [sys.executable, "-m", "dpro", "import", source, "-o", tmp_path / "run", "--shard", "1/3"]
    document = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    assert document["missing_shards"] == [0, 2]
    assert document["complete"] is False
    said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert "2 shards are missing: 0, 2" in said


def test_a_shard_that_failed_is_run_again_and_reads_only_what_is_missing(
    source, expected, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    _shards(source, run, 2, [1])
    real, reads = staging.read_task, []

    def read(importer, task):
        reads.append(task.source.name)
        if len(reads) == 3:
            raise KeyboardInterrupt
        return real(importer, task)

    monkeypatch.setattr(staging, "read_task", read)
    with pytest.raises(KeyboardInterrupt):
        _shards(source, run, 2, [0])
    assert not run.exists()
    _shards(source, run, 2, [0])
    assert len(reads) == 3 + 2  # the one that was interrupted, and what came after it
    assert digests(run) == expected


def test_a_file_that_was_repaired_is_read_when_its_shard_is_run_again(source, tmp_path):
    _shards(source, tmp_path / "run", 2, [1])
    write_rank(source, RANKS, RANKS + 2)
    _shards(source, tmp_path / "run", 2, [1, 0])
    assert RANKS in open_run(tmp_path / "run").manifest.ranks


@pytest.mark.parametrize("where", ["read_notes", "_place_parts", "_manifest", "write_manifest"])
def test_a_crash_while_the_run_is_put_together_is_mended_by_any_shard(
    where, source, expected, tmp_path, monkeypatch
):
    run = tmp_path / "out" / "run"
    _shards(source, run, 2, [0])

    def crash(*arguments: object) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(assembly, where, crash)
        with pytest.raises(SystemExit):
            _shards(source, run, 2, [1])
    assert not run.exists()
    _shards(source, run, 2, [0])
    assert digests(run) == expected
    assert _left_in(tmp_path / "out") == ["run"]


def test_a_crash_after_the_run_is_whole_leaves_a_run(source, expected, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def whole_and_then_killed(*arguments: object, **options: object) -> None:
        assembly.assemble(*arguments, **options)
        raise SystemExit("killed")

    monkeypatch.setattr(shards, "assemble", whole_and_then_killed)
    with pytest.raises(SystemExit):
        _shards(source, run, 1, [0])
    assert digests(run) == expected


def test_a_shard_that_is_overtaken_by_the_last_one_finds_the_run(source, expected, tmp_path, monkeypatch):
    run, real = tmp_path / "run", shards.stage_part

    def overtaken(traces, staging, shard, *more):
        real(traces, staging, shard, *more)
        monkeypatch.setattr(shards, "stage_part", real)
        assert isinstance(import_shard([source], run, Shard(1, 2)), Manifest)

    monkeypatch.setattr(shards, "stage_part", overtaken)
    assert isinstance(import_shard([source], run, Shard(0, 2)), Manifest)
    assert digests(run) == expected


def test_shards_of_different_files_or_numbers_are_refused(source, tmp_path):
    _shards(source, tmp_path / "run", 2, [0])
    with pytest.raises(UsageError, match="started as 2 shards of 7 files"):
        _shards(source, tmp_path / "run", 3, [1])
    write_rank(source, 9)
    with pytest.raises(UsageError, match="same sources"):
        _shards(source, tmp_path / "run", 2, [1])


def test_a_run_among_its_own_sources_is_no_source(source, expected, tmp_path):
    _shards(source, source / "run", 2, [0, 1])
    manifest = open_run(source / "run").manifest
    assert manifest.ranks == [0, 1, 2, 3, 4, RANKS]
    assert manifest.skipped == {}


@pytest.mark.parametrize("text", ["3", "3/2", "-1/2", "1/0", "a/b", "1/2/3", "", "1/" + "9" * 5000])
def test_a_shard_that_does_not_exist_is_refused(text):
    with pytest.raises(UsageError, match="write it as i/n"):
        parse_shard(text)


def test_arrays_may_count_from_0_or_from_1():
    assert [parse_shard(f"{index}/3").index for index in (0, 1, 2)] == [0, 1, 2]
    assert sorted(parse_shard(f"{index}/3").index for index in (1, 2, 3)) == [0, 1, 2]


# ---- failures


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_leaves_nothing(jobs, traces, tmp_path):
    sources = [traces / "perf", traces / "multirank" / "nanogpt_h100_8r_rs_ag"]
    command = [sys.executable, "-m", "dpro", "import", *sources, "-o", tmp_path / "run", "--jobs", jobs]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: list(tmp_path.glob(".run.*/files/*")), "no file was read")
    os.kill(process.pid, signal.SIGINT)  # the parent alone, as `kill` does; a terminal signals them all
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "write_part", full)
    with pytest.raises(InputError, match=r"run: cannot be written \(No space left on device\)"):
        import_sources([source], tmp_path / "out" / "run")
    assert list((tmp_path / "out").iterdir()) == []
