"""The process that samples: what it samples, when it ends, and what it leaves behind."""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from dpro.collectors.convert.tables import convert_samples
from dpro.collectors.launch.recording import Launch
from dpro.collectors.telemetry import sampler
from dpro.collectors.telemetry.sampler import Election, LocalProcesses, forget_elections
from dpro.collectors.telemetry.samples import (
    SampleWriter,
    TelemetrySample,
    read_samples,
    sample_files,
)
from dpro.schema import COUNTERS
from dpro.store import Run

HOST = socket.gethostname()
FAST_S = 0.02


def launched(run: Path, name: str = "a", period_s: float = FAST_S) -> Launch:
    launch = Launch(run, name)
    launch.raw.mkdir(parents=True)
    (launch.raw / "config.json").write_text(json.dumps({"telemetry_period_s": period_s}))
    return launch


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def sampled(launch: Launch) -> list[TelemetrySample]:
    return [sample for path in sample_files(launch.raw) for sample in read_samples(path)[1]]


def of_the_node(launch: Launch) -> list[TelemetrySample]:
    return [sample for sample in sampled(launch) if "telemetry_cpu_s" in sample.values]


def log(launch: Launch) -> str:
    path = launch.raw / "log.txt"
    return path.read_text() if path.is_file() else ""


@pytest.fixture
def job(tmp_path):
    """A process that says, as the recorder does, that it records."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def announce(launch: Launch, rank: int) -> subprocess.Popen:
        folder = launch.raw / f"{HOST}-{process.pid}"
        folder.mkdir(exist_ok=True)
        (folder / "facts.json").write_text(json.dumps({"rank": rank}))
        return process

    yield announce
    process.kill()
    process.wait()


def test_the_node_and_its_processes_are_sampled_until_the_end(tmp_path, job):
    launch = launched(tmp_path)
    process = job(launch, 3)
    running = sampler.start(launch)
    wait_until(lambda: len(of_the_node(launch)) > 3)
    running.stop()
    (path,) = sample_files(launch.raw, whole=True)
    host, samples = read_samples(path)
    assert host == HOST
    of_rank = [sample for sample in samples if sample.rank == 3]
    assert of_rank[0].values["memory_bytes"] > 0
    assert {"cpu_user_s", "memory_available_bytes", "disk_free_bytes"} <= of_the_node(launch)[0].values.keys()
    assert log(launch) == ""
    assert {path.name for path in launch.raw.parent.iterdir()} == {launch.name}
    assert process.poll() is None


def test_a_sample_that_is_late_is_not_waited_for():
    end, lifeline = os.pipe()
    poll = select.poll()
    poll.register(end)
    assert not sampler.is_over(poll, time.monotonic() - 5)
    os.close(lifeline)
    assert sampler.is_over(poll, time.monotonic() + 60)
    os.close(end)


def test_no_period_is_no_sampler(tmp_path):
    assert sampler.start(launched(tmp_path, period_s=0)) is None


def test_the_sampler_ends_with_a_sidecar_that_is_killed(tmp_path):
    launch = launched(tmp_path)
    sidecar = os.fork()
    if sidecar == 0:
        sampler.start(launch)
        time.sleep(60)
    wait_until(lambda: len(of_the_node(launch)) > 1)
    os.kill(sidecar, signal.SIGKILL)
    os.waitpid(sidecar, 0)
    wait_until(lambda: sample_files(launch.raw, whole=True))
    assert len(of_the_node(launch)) > 1


def test_the_sampler_does_not_hold_what_its_parent_has_open(tmp_path):
    launch = launched(tmp_path)
    with (tmp_path / "marker").open("w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        running = sampler.start(launch)
        wait_until(lambda: of_the_node(launch))
    with (tmp_path / "marker").open() as marker:
        fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
    running.stop()


def test_one_of_several_samples_the_node_and_another_takes_over(tmp_path):
    first, second = launched(tmp_path, "a"), launched(tmp_path, "b")
    one = sampler.start(first)
    wait_until(lambda: len(of_the_node(first)) > 2)
    other = sampler.start(second)
    time.sleep(5 * FAST_S)
    assert of_the_node(second) == []
    one.stop()
    wait_until(lambda: of_the_node(second))
    other.stop()
    assert {path.name for path in first.raw.parent.iterdir()} == {"a", "b"}


def test_a_sampler_that_is_killed_leaves_a_lock_that_goes_with_the_run(tmp_path):
    folder = tmp_path / ".raw"
    folder.mkdir()
    held = Election(folder / f"one{sampler.LOCK}")
    assert held.try_to_win()
    (folder / f"other{sampler.LOCK}").touch()
    forget_elections(folder)
    assert [path.name for path in folder.iterdir()] == [f"one{sampler.LOCK}"]
    held.withdraw()
    assert list(folder.iterdir()) == []


def test_only_one_is_elected_at_a_time(tmp_path):
    one, other = Election(tmp_path / "lock"), Election(tmp_path / "lock")
    assert one.try_to_win()
    assert not other.try_to_win()
    one.withdraw()
    assert other.try_to_win()
    assert other.is_won


def test_a_full_disk_ends_telemetry_and_nothing_else(tmp_path, monkeypatch):
    def full(self, samples):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SampleWriter, "append", full)
    launch = launched(tmp_path)
    running = sampler.start(launch)
    wait_until(lambda: log(launch))
    running.stop()
    assert log(launch) == f"{HOST}: telemetry ended: No space left on device\n"


def test_a_source_that_fails_is_left_out_from_then_on(tmp_path, monkeypatch):
    def broken():
        raise ValueError("odd")

    monkeypatch.setattr(sampler, "read_node", broken)
    launch = launched(tmp_path)
    running = sampler.start(launch)
    wait_until(lambda: sampled(launch))
    time.sleep(5 * FAST_S)
    running.stop()
    assert log(launch) == f"{HOST}: telemetry continues without the node: ValueError: odd\n"
    assert any(sample.device for sample in sampled(launch))


def test_a_driver_that_hangs_keeps_nothing_from_being_sampled_or_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "sample_gpus", lambda *arguments: time.sleep(600))
    launch = launched(tmp_path)
    running = sampler.start(launch)
    wait_until(lambda: len(of_the_node(launch)) > 3)
    running.stop()
    assert sample_files(launch.raw, whole=True)
    assert log(launch) == ""


def test_a_sampler_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "END_S", 0.1)
    monkeypatch.setattr(sampler, "sample_until_ended", lambda *arguments: time.sleep(600))
    launch = launched(tmp_path)
    sampler.start(launch).stop()
    assert "did not exit and was killed" in log(launch)


def test_a_process_may_get_another_rank_and_end(tmp_path, job):
    launch = launched(tmp_path)
    process = job(launch, 0)
    processes = LocalProcesses(launch.raw, HOST)
    assert [sample.rank for sample in processes.read(True)] == [0]
    job(launch, 5)
    os.utime(launch.raw / f"{HOST}-{process.pid}" / "facts.json", ns=(1, 1))
    assert [sample.rank for sample in processes.read(True)] == [5]
    process.kill()
    process.wait()
    assert processes.read(True) == []


def test_samples_become_rows_of_counters_once(tmp_path):
    launch = launched(tmp_path)
    writer = SampleWriter(launch.raw, "node1")
    writer.append(
        [TelemetrySample(7, -1, "8c5", {"power_w": 300.5}), TelemetrySample(8, 2, "", {"threads": 9})]
    )
    for _ in range(2):  # as after a crash between the two steps
        (path,) = sample_files(launch.raw)
        content = path.read_bytes()
        convert_samples(launch)
        assert sample_files(launch.raw) == []
        path.write_bytes(content)
    rows = pl.concat([pl.read_parquet(part) for part in (tmp_path / "counters").iterdir()])
    assert rows.select("rank", "host", "device", "counter", "time_ns", "value").rows() == [
        (2, "node1", "", "threads", 8, 9.0),
        (-1, "node1", "8c5", "power_w", 7, 300.5),
    ]


def test_only_whole_files_are_converted_while_the_job_runs(tmp_path):
    launch = launched(tmp_path)
    writer = SampleWriter(launch.raw, "node1")
    writer.append([TelemetrySample(7, -1, "", {"load": 1})])
    convert_samples(launch, whole=True)
    assert not (tmp_path / "counters").exists()
    writer.close()
    convert_samples(launch, whole=True)
    assert Run(tmp_path, None).table(COUNTERS).height == 1


def test_a_file_in_which_nothing_is_whole_gives_no_rows(tmp_path):
    launch = launched(tmp_path)
    (launch.raw / "telemetry-00000.z.open").write_bytes(b"")
    convert_samples(launch)
    assert not (tmp_path / "counters").exists()
    assert sample_files(launch.raw) == []
