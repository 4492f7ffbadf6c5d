"""Kineto traces (torch.profiler): one rank's file into spans, collectives, syncs, steps and a worker.

In: a `.json` or `.json.gz` file of any PyTorch since 2020, of a job on NVIDIA, AMD or CPU. Out: a
`RankTrace`. It reads one file; which files make a run is the importer's business. Flow arrows, memory and
counter events are not read: the arrows repeat what correlation and sequence numbers say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from dpro.errors import InputError
from dpro.ingest.files import read_bytes
from dpro.ingest.kineto_collectives import gpu_collectives
from dpro.ingest.kineto_columns import SYNC, columns
from dpro.ingest.kineto_gloo import gloo_collectives
from dpro.ingest.kineto_json import NO_ARGS, Facts, decode
from dpro.ingest.kineto_messages import Groups, whole
from dpro.ingest.kineto_syncs import read_syncs
from dpro.ingest.steps import find_steps
from dpro.ingest.trace import RankTrace

SOURCE = "kineto"


def read_trace(path: Path, *, rank: int | None = None, window: int = 0) -> RankTrace:
    """Read one rank's trace.

    Args:
        path: the file; its name is asked for the rank where its content does not tell.
        rank: the rank, where the caller knows better.
        window: number given to all rows, where one rank has several files.

    Raises:
        InputError: the file is damaged, is not a trace, or holds no span.
    """
    facts, events, malformed = decode(read_bytes(path), path)
    rows, skipped = columns(events, whole(facts.base_ns, default=0))
    if malformed:
        skipped["malformed events"] = malformed
    spans = rows.filter(pl.col("kind") != SYNC).with_row_index("span_id").cast({"span_id": pl.Int64})
    if spans.is_empty():
        raise InputError(f"{path}: no operator, runtime call or kernel in it; record it with torch.profiler")
    distributed = facts.distributed if isinstance(facts.distributed, dict) else {}
    known = _known_rank(distributed, path) if rank is None else rank
    args = [event.args or NO_ARGS for event in events]
    groups = _groups(distributed)
    collectives = pl.concat(
        [read(spans, args, groups, known) for read in (gpu_collectives, gloo_collectives)]
    )
    frames = {
        "spans": spans.drop("position"),
        "collectives": collectives.with_row_index("collective_id"),
        "syncs": read_syncs(spans, rows.filter(pl.col("kind") == SYNC), args),
        "steps": find_steps(spans),
        "workers": _worker(spans, facts, distributed),
    }
    gpu = _gpu_name(facts, spans)
    return RankTrace(
        rank=known,
        world_size=whole(distributed.get("world_size")),
        frames={name: _stamped(name, frame, known, window) for name, frame in frames.items()},
        host=_text(facts.host),
        gpus=[gpu] if gpu else [],
        versions=_versions(facts, distributed),
        skipped=skipped,
        warnings=[] if known >= 0 else [f"{path.name}: neither the trace nor its name tells the rank"],
    )


def rank_of_name(name: str) -> int:
    """The rank that a file's name tells (`rank3`, `rank-3`, `worker3`), -1 where it does not."""
    found = re.search(r"(?:rank|worker)[-_ ]?(\d+)", name, re.IGNORECASE)
    return int(found[1]) if found else -1


def _known_rank(distributed: dict[str, Any], path: Path) -> int:
    rank = whole(distributed.get("rank"))
    return rank if rank >= 0 else rank_of_name(path.name)


def _groups(distributed: dict[str, Any]) -> Groups:
    """Ranks of each process group by name; a list that is itself abbreviated is left out."""
    groups = {}
    configs = distributed.get("pg_config")
    for config in configs if isinstance(configs, list) else []:
        ranks = config.get("ranks") if isinstance(config, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            groups[str(config.get("pg_name"))] = ranks
    return groups


def _worker(spans: pl.DataFrame, facts: Facts, distributed: dict[str, Any]) -> pl.DataFrame:
    pids = spans.filter(pl.col("pid") >= 0)["pid"].mode().sort()
    ends = spans["start_ns"] + spans["duration_ns"]
    return pl.DataFrame(
        {
            "world_size": [whole(distributed.get("world_size"))],
            "host": [_text(facts.host)],
            "pid": [pids[0] if pids.len() else -1],
            "gpu_name": [_gpu_name(facts, spans)],
            "started_ns": [spans["start_ns"].min()],
            "ended_ns": [ends.max()],
            "source": [SOURCE],
        }
    )


def _gpu_name(facts: Facts, spans: pl.DataFrame) -> str:
    """Model of the device that ran most of the rank's kernels; the trace lists all devices of the host."""
    used = spans.filter(pl.col("kind") == "kernel")["device"].mode().sort()
    devices = facts.devices if isinstance(facts.devices, list) else []
    for device in devices:
        if used.len() and isinstance(device, dict) and device.get("id") == used[0]:
            return _text(device.get("name"))
    return ""


def _versions(facts: Facts, distributed: dict[str, Any]) -> dict[str, str]:
    versions = {
        "cuda_runtime": facts.cuda_runtime,
        "cuda_driver": facts.cuda_driver,
        "hip_runtime": facts.hip_runtime,
        "nccl": distributed.get("nccl_version"),
    }
    return {name: str(version) for name, version in versions.items() if version}


def _stamped(name: str, frame: pl.DataFrame, rank: int, window: int) -> pl.DataFrame:
    stamped = frame.with_columns(rank=pl.lit(rank, dtype=pl.Int32))
    return stamped if name == "workers" else stamped.with_columns(window=pl.lit(window, dtype=pl.Int32))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
