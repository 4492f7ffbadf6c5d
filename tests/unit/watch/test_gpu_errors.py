"""Errors of GPUs beside hangs of a job that runs, from the files that its sampler appends to."""

import json
from pathlib import Path

import pytest

from dpro.collectors.convert import Process
from dpro.collectors.launch import MARKERS, RAW
from dpro.collectors.telemetry.samples import Sample, SampleWriter
from dpro.detect.findings import Finding
from dpro.watch.gpu_errors import with_gpu_errors
from dpro.watch.tail import Tail

STUCK = Finding("hang.device", "rank", "1", (1,), 1.0, 0.9, 0.0, ("it hangs",))
NOW = 1_700_000_000 * 10**9


def launched(run: Path, name: str, host: str) -> Path:
    """A recording that goes on, on a host; the folder that its sampler writes to."""
    raw = run / RAW / name
    raw.mkdir(parents=True)
    (run / MARKERS).mkdir(exist_ok=True)
    (run / MARKERS / f"{name}.json").write_text(json.dumps({"host": host, "pid": 1, "start_ticks": 1}))
    return raw


def process(run: Path, rank: int, host: str) -> Tail:
    folder = run / RAW / "a" / f"{host}-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"rank": rank, "host": host, "pid": rank, "local_rank": 0, "world_size": 2, "started_ns": NOW}
    return Tail(Process(folder, facts | {"gpu_uuid": f"GPU-g{rank}", "gpu_name": "H100", "clock": ""}))


@pytest.fixture
def run(tmp_path) -> Path:
    for name, host, gpu, xid in (("a", "n0", "g0", 95), ("b", "n1", "g1", 79)):
        writer = SampleWriter(launched(tmp_path, name, host), host)
        writer.append([Sample(NOW, -1, gpu, {"sampling_us": 80}), Sample(NOW, -1, "g7", {"sampling_us": 80})])
        writer.append([Sample(NOW + 5, -1, gpu, {"xid": xid}, is_event=True)])
        writer.append([Sample(NOW + 5, -1, "g7", {"xid": 31}, is_event=True)])  # another job's
    return tmp_path


def test_an_alert_about_a_hang_quotes_the_error_of_the_gpu(run):
    tails = [process(run, 0, "n0"), process(run, 1, "n1")]
    (told,) = with_gpu_errors([STUCK], run, tails)
    assert told.evidence[0] == "it hangs"
    (line,) = told.evidence[1:]
    assert line.startswith("the GPU of rank 1 (g1 on n1): XID 79 at ")


def test_what_cannot_be_read_leaves_the_finding_as_it_is(run):
    tails = [process(run, 1, "n1")]
    (path,) = (run / RAW / "b").glob("telemetry-*")
    path.write_bytes(b"damaged")
    assert with_gpu_errors([STUCK], run, tails) == [STUCK]
    assert with_gpu_errors([], run, tails) == []
