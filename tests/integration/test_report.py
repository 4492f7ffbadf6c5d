"""`dpro report` on a synthetic run, and on real traces against an independent reading of their files."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS
from dpro.store import Manifest, write_manifest, write_part
from tests.commands import dpro
from tests.pipelines import Job, written

MS = 1_000_000


def _report(*arguments: str | Path, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    return dpro("report", *arguments, cache=cache)


def _report_json(*arguments: str | Path, cache: Path | None = None) -> dict[str, Any]:
    done = _report(*arguments, "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks on CPUs, one step of 10 ms: 6 ms of addmm, and an all-reduce that rank 1 joins late; rank 0
    is known to have waited 1.5 ms for its data."""
    folder = tmp_path / "run"
    for rank, started in enumerate([2, 5]):
        lane = {"rank": rank, "pid": 1, "window": 0}
        comm = {"start_ns": started * MS, "duration_ns": (8 - started) * MS}
        op = {
            **lane,
            "span_id": 1,
            "kind": "cpu_op",
            "name": "addmm",
            "tid": 1,
            "start_ns": 0,
            "duration_ns": 6 * MS,
        }
        gloo = {**lane, **comm, "span_id": 2, "kind": "annotation", "name": "gloo:all_reduce", "tid": 2}
        member = {**comm, "rank": rank, "window": 0, "collective_id": 1, "op": "all_reduce", "group": "0"}
        member |= {"group_ranks": "0,1", "sequence": 1, "bytes_in": 3000, "span_id": 2}
        step = {"rank": rank, "step": 7, "window": 0, "start_ns": 0, "duration_ns": 10 * MS}
        for table, rows in ((SPANS, [op, gloo]), (COLLECTIVES, [member]), (STEPS, [step])):
            write_part(folder, table, f"rank{rank:05d}", pl.DataFrame(rows))
    waited = {"rank": 0, "counter": "step_data_wait_ns", "time_ns": 0, "value": 1.5 * MS}
    write_part(folder, COUNTERS, "rank00000", pl.DataFrame([waited]))
    write_manifest(folder, Manifest(world_size=2, ranks=[0, 1]))
    return folder


def test_json_holds_steps_kernels_and_collectives_in_milliseconds(run, tmp_path):
    document = _report_json(run, cache=tmp_path)
    shared = {
        "duration_ms": 10.0,
        "compute_ms": 6.0,
        "copy_ms": 0.0,
        "exposed_comm_ms": 2.0,
        "exposed_wait_ms": 0.0,
        "exposed_transfer_ms": 2.0,
        "host_bound_ms": 2.0,
        "idle_ms": 0.0,
        "gc_ms": None,
    }
    assert document["steps"] == [
        # Rank 0 is in the all-reduce at 2-8 ms, rank 1, which comes last, at 5-8: 6-8 is transfer.
        {"step": 7, "rank": 0, "overlapped_comm_ms": 4.0, "data_wait_ms": 1.5, **shared},
        {"step": 7, "rank": 1, "overlapped_comm_ms": 1.0, "data_wait_ms": None, **shared},
    ]
    waiting, unknown = document["host"]
    assert (waiting["rank"], waiting["steps"], waiting["data_wait_ms"], waiting["cpu_ms"]) == (
        0,
        1,
        1.5,
        None,
    )
    assert (unknown["rank"], unknown["data_wait_ms"]) == (1, None)
    assert document["kernels"] == [{"name": "addmm", "count": 2, "total_ms": 12.0}]
    (collective,) = document["collectives"]
    # The late rank needs 3 ms to move 3000 bytes, so the other waits for 3 of its 6.
    assert collective == {
        "op": "all_reduce",
        "bytes": 3000,
        "hosts": None,  # no workers were written
        "count": 2,
        "total_ms": 9.0,
        "matched": 2,
        "wait_ms": 3.0,
        "transfer_ms": 6.0,
        "busbw_gbps": pytest.approx(1e-3),
    }


def test_text_has_a_line_per_rank_and_says_that_there_were_no_gpus(run, tmp_path):
    done = _report(run, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no GPU work" in done.stdout
    assert "addmm" in done.stdout
    assert "60.0%" in done.stdout
    assert "Host activity" in done.stdout
    assert "15.0%" in done.stdout


def test_a_pipeline_has_the_bubble_of_each_stage(tmp_path):
    rows = Job(num_stages=2, num_batches=3, message=0.0).run()
    run = written(rows, tmp_path / "job").path
    stages = _report_json(run, cache=tmp_path)["pipeline"]
    assert [(row["stage"], row["ranks"], row["steps"]) for row in stages] == [(0, 2, 1), (1, 2, 1)]
    assert [row["bubble_share"] for row in stages] == pytest.approx([0.25, 0.25], abs=1e-4)
    assert [row["bubble_ms"] for row in stages] == pytest.approx([30, 30], abs=0.01)
    text = _report(run, cache=tmp_path).stdout
    assert "How long each stage of the pipeline is idle" in text
    assert "25.0%" in text


def test_a_run_without_spans_is_one_line_and_exit_code_one(tmp_path):
    write_manifest(tmp_path / "run", Manifest(world_size=1, ranks=[0]))
    done = _report(tmp_path / "run", cache=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no spans" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_top_must_be_positive(run, tmp_path):
    assert _report(run, "--top", "0", cache=tmp_path).returncode == 2


def _busy_between(events: list[dict[str, Any]], start: float, end: float) -> float:
    """Time with at least one event running, by walking from one end point to the next."""
    inside = [(max(e["ts"], start), min(e["ts"] + e["dur"], end)) for e in events]
    points = sorted({point for pair in inside if pair[0] < pair[1] for point in pair})
    running = [(a, b) for a, b in itertools.pairwise(points) if any(s <= a and b <= t for s, t in inside)]
    return sum(b - a for a, b in running)


def _ends(events: list[dict[str, Any]], work: list[dict[str, Any]], moments: list[float]) -> list[float]:
    """When the work has ended that was launched before each moment; not before the first that is recorded.

    Unless that began when it was launched: later it waited for what was launched before.
    """
    calls = {e["args"].get("correlation"): e for e in events if e.get("cat", "").lower() == "cuda_runtime"}
    ran = [(calls[e["args"]["correlation"]], e) for e in work if e["args"].get("correlation") in calls]
    call, first = min(ran, key=lambda pair: pair[1]["ts"])
    floor = first["ts"] if first["ts"] - call["ts"] - call["dur"] > 50 else 0
    return [
        max(floor, moment, *(e["ts"] + e["dur"] for call, e in ran if call["ts"] < moment))
        for moment in moments
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("job", ["param_dlrm_v100_8r", "torchrec_v100_4r_sleep1s_rank2"])
def test_compute_and_communication_agree_with_a_plain_reading_of_the_file(job, traces, tmp_path):
    folder = traces / "multirank" / job
    source = tmp_path / "traces"
    source.mkdir()
    for trace in folder.glob("rank*.json.gz"):
        (source / trace.name).symlink_to(trace)
    steps = _report_json(source, cache=tmp_path / "cache")["steps"]
    with gzip.open(next(folder.glob("rank1.*"))) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    work = [e for e in events if e.get("cat", "").lower() in ("kernel", "gpu_memcpy", "gpu_memset")]
    comm = [e for e in work if e["name"].startswith("nccl")]
    compute = [e for e in work if not e["name"].startswith("nccl") and e["cat"].lower() == "kernel"]
    marks = [e for e in events if e["name"].startswith("ProfilerStep#") and e["cat"] != "gpu_user_annotation"]
    assert sorted(s["step"] for s in steps if s["rank"] == 1) == sorted(int(e["name"][13:]) for e in marks)
    for mark in marks:
        (found,) = [s for s in steps if s["rank"] == 1 and s["step"] == int(mark["name"][13:])]
        interval = tuple(_ends(events, work, [mark["ts"], mark["ts"] + mark["dur"]]))
        total_comm = found["exposed_comm_ms"] + found["overlapped_comm_ms"]
        assert found["compute_ms"] == pytest.approx(_busy_between(compute, *interval) / 1000, rel=1e-3)
        assert total_comm == pytest.approx(_busy_between(comm, *interval) / 1000, rel=1e-3)
        assert found["duration_ms"] == pytest.approx((interval[1] - interval[0]) / 1000, rel=1e-3)


def test_the_rank_that_slept_is_host_bound_and_the_others_wait_for_it(traces):
    steps = _report_json(traces / "multirank" / "torchrec_v100_4r_sleep1s_rank2")["steps"]
    frame = pl.DataFrame(steps).group_by("rank").mean().sort("rank")
    slept, others = frame.filter(pl.col("rank") == 2), frame.filter(pl.col("rank") != 2)
    assert slept["host_bound_ms"].item() > 10 * others["host_bound_ms"].max()
    assert others["exposed_comm_ms"].min() > 10 * slept["exposed_comm_ms"].item()
    assert others["exposed_wait_ms"].min() > 10 * slept["exposed_wait_ms"].item()
    assert others["exposed_wait_ms"].min() > 10 * others["exposed_transfer_ms"].max()
