"""Errors of GPUs with hangs of a job that runs, and what of a hang is kept in the run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpro.collectors.attach import Answers
from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.launch.recording import MARKERS, RAW
from dpro.collectors.telemetry.samples import SampleWriter, TelemetrySample
from dpro.detect.findings import Finding
from dpro.detect.observations import observe
from dpro.errors import InputError
from dpro.extensions.watch.evidence import keep_hang, open_log, why_silent, with_gpu_errors
from dpro.extensions.watch.job import ProcessTail

STUCK = Finding("hang.device", "rank", "1", (1,), 1.0, 0.9, 0.0, (observe("test", "it hangs"),))
NOW = 1_700_000_000 * 10**9


def launched(run: Path, name: str, host: str) -> Path:
    """A recording that goes on, on a host; the folder that its sampler writes to."""
    raw = run / RAW / name
    raw.mkdir(parents=True)
    (run / MARKERS).mkdir(exist_ok=True)
    (run / MARKERS / f"{name}.json").write_text(json.dumps({"host": host, "pid": 1, "start_ticks": 1}))
    return raw


def process(run: Path, rank: int, host: str) -> ProcessTail:
    folder = run / RAW / "a" / f"{host}-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"rank": rank, "host": host, "pid": rank, "local_rank": 0, "world_size": 2, "started_ns": NOW}
    return ProcessTail(
        RecordedProcess(folder, facts | {"gpu_uuid": f"GPU-g{rank}", "gpu_name": "H100", "clock": ""})
    )


@pytest.fixture
def run(tmp_path) -> Path:
    for name, host, gpu, xid in (("a", "n0", "g0", 95), ("b", "n1", "g1", 79)):
        writer = SampleWriter(launched(tmp_path, name, host), host)
        writer.append(
            [
                TelemetrySample(NOW, -1, gpu, {"sampling_us": 80}),
                TelemetrySample(NOW, -1, "g7", {"sampling_us": 80}),
            ]
        )
        writer.append([TelemetrySample(NOW + 5, -1, gpu, {"xid": xid}, is_event=True)])
        writer.append([TelemetrySample(NOW + 5, -1, "g7", {"xid": 31}, is_event=True)])  # another job's
    return tmp_path


def test_an_alert_about_a_hang_quotes_the_error_of_the_gpu(run):
    tails = [process(run, 0, "n0"), process(run, 1, "n1")]
    (found,) = with_gpu_errors([STUCK], run, tails)
    assert found.evidence[0] == "it hangs"
    (line,) = found.evidence[1:]
    assert line.startswith("the GPU of rank 1 (g1 on n1): XID 79 at ")


def test_what_cannot_be_read_leaves_the_finding_as_it_is(run):
    tails = [process(run, 1, "n1")]
    (path,) = (run / RAW / "b").glob("telemetry-*")
    path.write_bytes(b"damaged")
    assert with_gpu_errors([STUCK], run, tails) == [STUCK]
    assert with_gpu_errors([], run, tails) == []


@pytest.fixture
def started() -> Iterator[Callable[[str], RecordedProcess]]:
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> RecordedProcess:
        running.append(subprocess.Popen([sys.executable, "-c", code]))
        return RecordedProcess(Path(), {"rank": 0, "host": socket.gethostname(), "pid": running[-1].pid})

    yield start
    for each in running:
        each.kill()
        each.wait()


def test_why_a_process_does_not_answer_is_what_the_kernel_knows_of_it(started):
    stopped = started("import time; time.sleep(100)")
    os.kill(stopped.facts["pid"], signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while why_silent(stopped) != "it is stopped (SIGSTOP)":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ended = started("")
    while "has ended" not in why_silent(ended):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "runs on elsewhere" in why_silent(
        RecordedProcess(Path(), {"rank": 0, "host": "elsewhere", "pid": 1})
    )


def test_dumps_and_stacks_of_a_hang_are_kept_and_name_the_ranks_that_do_not_answer(tmp_path, monkeypatch):
    answers = Answers({0: {"rank": 0, "threads": []}}, [1])
    monkeypatch.setattr("dpro.extensions.watch.evidence.read_stacks", lambda *_: answers)
    tails = [process(tmp_path, 0, "n0"), process(tmp_path, 1, "n1")]
    (tails[0].process.folder / "flight-fr-000001.json").write_text("{}")
    kept = tmp_path / "findings" / "hang-1"
    keep_hang(tmp_path, kept, tails)
    assert [path.name for path in (kept / "dumps").iterdir()] == ["fr-rank00000.json"]
    document = json.loads((kept / "stacks.json").read_text())
    assert (document["ranks"], document["silent_ranks"]) == ([{"rank": 0, "threads": []}], [1])
    assert "it runs on n1" in document["why_silent"]["1"]


def test_a_log_is_not_opened_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "findings").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="symbolic link"):
        open_log(run)
    assert list((tmp_path / "elsewhere").iterdir()) == []
