"""Hand-written Kineto traces for tests: one function per sort of event, times in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def event(cat: str, name: str, ts: Any, dur: Any, *, pid: Any = 10, tid: Any = 11, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def cpu_op(name: str, ts: Any, dur: Any, **more: Any) -> Event:
    return event("cpu_op", name, ts, dur, **more)


def annotation(name: str, ts: Any, dur: Any, **more: Any) -> Event:
    return event("user_annotation", name, ts, dur, **more)


def launch(ts: Any, dur: Any, correlation: int, name: str = "cudaLaunchKernel", **more: Any) -> Event:
    return event("cuda_runtime", name, ts, dur, correlation=correlation, **more)


def kernel(name: str, ts: Any, dur: Any, correlation: int = 1, stream: int = 7, **args: Any) -> Event:
    where = {"device": 0, "stream": stream, "correlation": correlation}
    return event("kernel", name, ts, dur, pid=0, tid=stream, **where, **args)


def write(path: Path, events: list[Any], **facts: Any) -> Path:
    text = json.dumps({"schemaVersion": 1, **facts, "traceEvents": events}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def write_rank(folder: Path, rank: int, world_size: int = 2) -> Path:
    """A rank with one operator, one kernel and one all-reduce."""
    events = [
        cpu_op("aten::mm", 10, 30),
        launch(15, 5, 1),
        kernel("gemm_kernel", 25, 10, 1),
        annotation("nccl:all_reduce", 50, 20),
        launch(55, 5, 2),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 65, 40, 2, stream=20),
    ]
    distributed = {"rank": rank, "world_size": world_size, "backend": "nccl"}
    return write(folder / f"rank{rank}.json.gz", events, distributedInfo=distributed, host_name="node0")


def write_dump(folder: Path, rank: int) -> Path:
    """A flight recorder's dump of one of two ranks, with one all-reduce."""
    call = {
        "record_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 5,
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[2]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "is_p2p": False,
    }
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    dump = {"version": "2.9", "pg_config": groups, "nccl_version": "2.27.3", "entries": [call]}
    path = folder / f"_dump_{rank}"
    path.write_text(json.dumps(dump), encoding="utf-8")
    return path
