"""Dumps of the flight recorder that PyTorch would leave behind of a simulated job that hangs."""

from __future__ import annotations

import json
import os
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reference.hanging_jobs import run_job
from tests.reference.hanging_model import Job, Work

_START_NS = 1_758_581_000_000_000_000
_STUCK_NS = 200_000_000_000  # how long after the last progress dumps are taken


@dataclass(frozen=True)
class Dumping:
    """How the dumps of one job are taken.

    Attributes:
        version: of the format.
        as_json: JSON, else a pickle.
        active_only: only what is not finished.
        ring: number of entries that are kept.
        timing: whether starts are noticed.
        early: ranks whose dump was taken too early, with the moment.
        stamped: whether files keep the time they were written at.
    """

    version: str
    as_json: bool
    active_only: bool
    ring: int
    timing: bool
    early: dict[int, float]
    stamped: bool


def choose_dumping(rng: random.Random, job: Job) -> Dumping:
    """Some way to take the dumps of a job."""
    version = rng.choice(["2.4", "2.5", "2.7", "2.9", "2.10"])
    early: dict[int, float] = {}
    if rng.random() < 0.2:
        rank = rng.randrange(job.num_ranks)
        early[rank] = job.last * rng.uniform(0.2, 0.9)
    active = not job.gloo and version >= "2.9" and rng.random() < 0.4
    ring = rng.choice([100, 400, 2000])
    return Dumping(version, rng.random() < 0.3, active, ring, rng.random() < 0.3, early, rng.random() < 0.5)


def write_dumps(
    rng: random.Random,
    job: Job,
    dumping: Dumping,
    folder: Path,
    *,
    missing: tuple[int, ...] = (),
    moment: float | None = None,
) -> None:
    """Write the dump of each rank as PyTorch would.

    Args:
        rng: chance in clocks and delays.
        job: what was run.
        dumping: how dumps are taken.
        folder: where to.
        missing: ranks whose dump is lost.
        moment: when dumps are taken; long after the last progress where not given.
    """
    for rank in range(job.num_ranks):
        delay = rng.uniform(0, 3e8) if moment is None else rng.uniform(0, 2e8)
        taken = dumping.early.get(rank, (job.last + _STUCK_NS if moment is None else moment) + delay)
        skew = rng.gauss(0, 2e6)
        if rank in missing:
            continue
        document = _document(job, rank, dumping, taken, skew)
        path = folder / f"nccl_trace_rank_{rank}"
        text = json.dumps(document, default=str).encode() if dumping.as_json else pickle.dumps(document, 2)
        path.write_bytes(text)
        if dumping.stamped:
            stamp = _START_NS + int(taken)
            os.utime(path, ns=(stamp, stamp))


def _document(job: Job, rank: int, dumping: Dumping, taken: float, skew: float) -> dict[str, Any]:
    seen = [work for work in job.works[rank] if work.enqueued <= taken]
    if job.gloo:
        seen = [work for work in seen if not work.p2p]
    own = [group for group in job.groups if rank in group.ranks]
    ids = {group.name: 2 * number if rank % 2 else number for number, group in enumerate(own)}
    entries = _entries(seen, ids, dumping, taken, skew, job.gloo)
    entries = entries[-dumping.ring :]
    if dumping.active_only:
        entries = [entry for entry in entries if entry["state"] != "completed"]
    status = {}
    for group in own:
        works = [work for work in seen if work.group is group]
        done = [work.sequence for work in works if work.completed <= taken]
        status[str(ids[group.name])] = {
            "last_enqueued_collective": works[-1].sequence if works else -1,
            "last_started_collective": -1,
            "last_completed_collective": done[-1] if done else -1,
        }
    used = [group for group in own if any(work.group is group for work in seen)]
    config = {g.name: {"name": g.name, "desc": g.description, "ranks": str(list(g.ranks))} for g in used}
    if job.gloo:
        config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    document = {"version": dumping.version, "pg_config": config, "entries": entries}
    if dumping.version >= "2.5" or dumping.version == "2.10":
        document["pg_status"] = {
            n: facts for n, facts in status.items() if facts["last_enqueued_collective"] >= 0
        }
    return document


def _entries(
    works: list[Work], ids: dict[str, int], dumping: Dumping, taken: float, skew: float, gloo: bool
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for work in works:
        single = work.batch < 0
        entries.append(_entry(work, len(entries), ids, dumping, taken, skew, gloo, single))
        if not single:  # each batch of messages here holds one
            end = _entry(work, len(entries), ids, dumping, taken, skew, gloo, True)
            entries.append(end | {"profiling_name": "nccl:coalesced", "input_sizes": [], "output_sizes": []})
    return entries


def _entry(
    work: Work, record: int, ids: dict[str, int], dumping: Dumping, taken: float, skew: float,
    gloo: bool, kept_up: bool,
) -> dict[str, Any]:  # fmt: skip
    ended, began = work.completed <= taken and kept_up, work.started <= taken and dumping.timing and kept_up
    state = "scheduled" if gloo else "completed" if ended else "started" if began else "scheduled"
    none = 0 if dumping.as_json else None
    members = work.group.ranks
    name = work.op
    if work.p2p:
        arrow = "->" if work.op == "send" else "<-"
        name = f"{work.op} {members.index(work.rank)}{arrow}{members.index(work.peer)}"
    group: Any = (work.group.name, work.group.description)
    sizes = (
        [] if work.op == "barrier" else [[work.numel[0]]],
        [] if work.op == "barrier" else [[work.numel[1]]],
    )
    return {
        "record_id": record,
        "pg_id": ids[work.group.name],
        "process_group": list(group) if dumping.as_json else group,
        "collective_seq_id": work.collectives if work.p2p else work.sequence,
        "p2p_seq_id": work.sequence if work.p2p else 0,
        "op_id": work.sequence,
        "profiling_name": f"{'gloo' if gloo else 'nccl'}:{name}",
        "time_created_ns": _START_NS + int(work.enqueued + skew),
        "input_sizes": sizes[0],
        "input_dtypes": [work.dtype] * len(sizes[0]),
        "output_sizes": sizes[1],
        "output_dtypes": [work.dtype] * len(sizes[1]),
        "state": state,
        "time_discovered_started_ns": _START_NS + int(work.started) if began else none,
        "time_discovered_completed_ns": _START_NS + int(work.completed) if ended and not gloo else none,
        "retired": ended,
        "timeout_ms": 180000,
        "is_p2p": work.p2p,
    }


def dumps_of_a_stuck_host(folder: Path) -> Path:
    """Write the dumps of a job of pipelines in which one rank's host is stuck, and return their folder."""
    folder.mkdir(exist_ok=True)
    chance = random.Random(11)
    dumping = Dumping(
        "2.9", as_json=False, active_only=False, ring=2000, timing=False, early={}, stamped=False
    )
    write_dumps(chance, run_job(chance, "tp_pp", 8, "host"), dumping, folder, missing=())
    return folder
