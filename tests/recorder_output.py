"""Real GPU traces as the recorder would have left them: its files, for `collectors.convert` to read.

In: Kineto traces of torch.profiler, one per rank. Out: the folder of a launch, with `facts.json`,
`records.bin`, a window, and dumps of NCCL's flight recorder that overlap. What torch.profiler adds of its own
is taken out: marks of steps, and who the rank is.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpro.collectors.inside import records
from dpro.collectors.launch.recording import Launch

Event = dict[str, Any]
HOST, STEP = "node0", "ProfilerStep#"
EARLIER = 40  # calls before the window, which the ring still holds
# What NCCL's flight recorder calls what `record_param_comms` has other names for.
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "_all_gather_base"}


class Call(NamedTuple):
    """One call of a collective, as it is seen on the thread that made it: times in ns."""

    name: str
    start_ns: int
    facts: Mapping[str, Any]


def as_recorded(run: Path, traces: Sequence[Path], ring: int = 60) -> Launch:
    """Write what the recorder would have written of a job, which is over.

    Args:
        run: the run directory to be.
        traces: one file per rank, in the order of the ranks.
        ring: how many calls the flight recorder remembers.
    """
    launch = Launch(run, "host-1")
    launch.raw.mkdir(parents=True)
    launch.marker.parent.mkdir(exist_ok=True)
    facts = {"host": HOST, "pid": 1, "start_ticks": 1, "command": ["train"], "options": {}}
    launch.marker.write_text(json.dumps(facts))
    for rank, path in enumerate(traces):
        text = path.read_bytes()
        trace = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
        _write_rank(launch.raw / f"{HOST}-{100 + rank}", rank, trace, ring)
    return launch


def _write_rank(folder: Path, rank: int, trace: dict[str, Any], ring: int) -> None:
    folder.mkdir()
    distributed = trace.pop("distributedInfo", {})
    size = int(distributed.get("world_size", 1))
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    events = trace["traceEvents"]
    marks = [event for event in events if _is_mark(event) and event["cat"] != "gpu_user_annotation"]
    steps = sorted(_bounds(event, base_ns) for event in marks)
    calls = list(_calls(events, base_ns))
    facts = {
        "rank": rank, "world_size": size, "local_rank": rank, "host": HOST, "pid": 100 + rank,
        "started_ns": steps[0][0] - 10**9, "attempt": "", "environment": {}, "clock": HOST,
        "versions": {"torch": "2.13.0"}, "gpu_name": trace.get("deviceProperties", [{}])[0].get("name", ""),
        "gpu_uuid": f"GPU-{rank}",
    }  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts))
    _write_records(folder, steps)
    ranks = {"0": list(range(size))}
    (folder / "groups.json").write_text(json.dumps(ranks))
    whole = _entries(calls, steps[0][0])
    for number, last in enumerate(range(ring // 2, len(whole) + ring // 2, ring // 2), start=1):
        dump = _dump(whole[:last][-ring:], size)
        path = folder / f"flight-nccl-{number:06d}.pickle"
        path.write_bytes(dump)
        saved_ns = steps[-1][1] + number * 10**6  # after the window, as the last ones at least are
        os.utime(path, ns=(saved_ns, saved_ns))
    trace["traceEvents"] = [event for event in events if not _is_mark(event)]
    (folder / "window0000.json").write_text(json.dumps(trace))


def _is_mark(event: Event) -> bool:
    return str(event.get("name", "")).startswith(STEP)


def _bounds(event: Event, base_ns: int) -> tuple[int, int]:
    start_ns = base_ns + round(event["ts"] * 1000)
    return start_ns, start_ns + round(event["dur"] * 1000)


class FlushedWriter(records.RecordWriter):
    """Whose records are in the file at once."""

    def write(self, *record: int) -> None:
        super().write(*record)
        self.flush()


def _write_records(folder: Path, steps: Sequence[tuple[int, int]]) -> None:
    """Ends of steps, the one before the first among them, and the window around all."""
    begun_ns, ended_ns = steps[0][0], steps[-1][1]
    writer = FlushedWriter(folder / "records.bin")
    writer.write(records.UPDATE, 0, 1, begun_ns, begun_ns)
    writer.write(records.OPENED, 0, begun_ns, 1)
    for number, (_, end_ns) in enumerate(steps, start=2):
        following_ns = next((start for start, _ in steps if start >= end_ns), end_ns)
        writer.write(records.UPDATE, 0, number, end_ns, following_ns)
    writer.write(records.WINDOW, 0, begun_ns, ended_ns, ended_ns)


def _calls(events: Sequence[Event], base_ns: int) -> Iterator[Call]:
    """Calls in the order in which they were made, each at the moment it was entered into the ring."""
    calls = [event for event in events if event.get("name") == "record_param_comms" and "ts" in event]
    ranges = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("nccl:")
    ]
    for event in sorted(ranges, key=lambda event: event["ts"]):
        around = [
            each
            for each in calls
            if each["tid"] == event["tid"] and each["ts"] <= event["ts"] <= each["ts"] + each["dur"]
        ]
        facts = around[0].get("args", {}) if around else {}
        yield Call(event["name"], base_ns + round(event["ts"] * 1000), facts)


def _entries(calls: Sequence[Call], begun_ns: int) -> list[dict[str, Any]]:
    """Entries of the ring: earlier calls, then those of the window, numbered in one go."""
    earlier = [Call("nccl:barrier", begun_ns - (EARLIER - n) * 10**6, {}) for n in range(EARLIER)]
    found: list[dict[str, Any]] = []
    numbers: Counter[str] = Counter()
    for call in [*earlier, *calls]:
        numbers["0"] += 1
        sent, got = (call.facts.get(f"{way} msg nelems") for way in ("In", "Out"))
        dtype = [call.facts["dtype"]] if "dtype" in call.facts else []
        found.append({
            "record_id": len(found), "pg_id": 0, "process_group": ("0", "default_pg"), "thread_id": "1",
            "thread_name": "python", "collective_seq_id": numbers["0"], "p2p_seq_id": 0,
            "op_id": numbers["0"], "profiling_name": call.name, "time_created_ns": call.start_ns,
            "input_sizes": [[sent]] if sent else [], "input_dtypes": dtype if sent else [],
            "output_sizes": [[got]] if got else [], "output_dtypes": dtype if got else [],
            "state": "completed", "time_discovered_started_ns": None, "retired": True,
            "time_discovered_completed_ns": call.start_ns + 10**8, "timeout_ms": 600000, "is_p2p": False,
        })  # fmt: skip
    return found


def _dump(entries: Sequence[dict[str, Any]], size: int) -> bytes:
    """A dump as PyTorch pickles it."""
    last = entries[-1]["collective_seq_id"] if entries else -1
    status = {"last_enqueued_collective": last, "last_started_collective": last}
    return pickle.dumps(
        {
            "version": "2.10", "comm_lib_version": "2.28.9",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(size)))}},
            "pg_status": {"0": status | {"last_completed_collective": last}}, "entries": list(entries),
        },
        protocol=2,
    )  # fmt: skip
