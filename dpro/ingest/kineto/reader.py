"""Kineto traces (torch.profiler): one rank's file into spans, collectives, syncs, steps and a worker.

In: a `.json` file, compressed or not, of any PyTorch since 2020, of a job on NVIDIA, AMD or CPU. Out: a
`RankTrace`. It reads one file; the importer decides which files make a run. Flow arrows and counter
events are not read: the arrows repeat what correlation and sequence numbers say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from dpro.errors import InputError
from dpro.ingest.derived.iterations import find_iterations, model_calls
from dpro.ingest.derived.steps import guess_steps
from dpro.ingest.kineto.collectives import gpu_collectives
from dpro.ingest.kineto.columns import Columns
from dpro.ingest.kineto.events import NO_ARGS, EventReader, TraceFacts
from dpro.ingest.kineto.gloo import gloo_collectives
from dpro.ingest.kineto.marks import Marks
from dpro.ingest.kineto.memory import Memory
from dpro.ingest.kineto.messages import Groups, whole
from dpro.ingest.kineto.numbers import LAST_NS
from dpro.ingest.kineto.scan.choice import scanner_of
from dpro.ingest.kineto.syncs import read_syncs
from dpro.ingest.reading.files import Source, rank_of_name
from dpro.ingest.reading.peers import ranks_of
from dpro.ingest.reading.values import int32
from dpro.ingest.trace import RankTrace

SOURCE = "kineto"
_NO_TOTALS = "memory events without totals"
_KEPT_BYTES = (1 << 25) - (1 << 12)  # with what comes before a block, below that limit


def read_trace(path: Path | Source, *, rank: int | None = None, window: int = 0) -> RankTrace:
    """Read one rank's trace, a damaged one as far as it can be read.

    Args:
        path: the file; its name gives the rank where its content does not.
        rank: the rank, where the caller knows better.
        window: number given to all rows, where one rank has several files.

    Raises:
        InputError: the file is not a trace, or no span can be read from it.
    """
    source = path if isinstance(path, Source) else Source(str(path), path)
    _keep_freed_memory()
    columns, marks, memory = Columns(), Marks(), Memory()
    scanner = scanner_of(source, columns, memory)
    reader = EventReader(source, scanner.take if scanner else None)
    for events in reader.chunks():
        whole_spans = [event for event in events if event.phase == "X"]
        if scanner and events:
            scanner.flush()
        columns.add(whole_spans)
        if len(whole_spans) < len(events):
            marks.add(events)
            memory.add(events)
    if scanner:
        scanner.flush()
    skipped = _add_marked(columns, marks) + Counter({_NO_TOTALS: memory.without_total})
    facts, distributed = reader.facts, _distributed(reader.facts)
    spans, sync_events = columns.frames(_base_ns(facts))
    if spans.is_empty():
        raise InputError(f"{source.label}: {_why_empty(reader)}")
    known, warnings = _known_rank(distributed, marks, source) if rank is None else (rank, [])
    frames = _tables(spans, sync_events, columns, facts, known)
    counters = memory.rows(_base_ns(facts)).with_columns(host=pl.lit(_text(facts.host)))
    gpu = _gpu_name(facts, spans)
    damage = _damage(reader, source)
    return RankTrace(
        rank=known,
        world_size=int32(distributed.get("world_size")),
        frames={name: _stamped(name, frame, known, window) for name, frame in frames.items()}
        | ({"counters": _of_rank(counters, known)} if counters.height else {}),
        host=_text(facts.host),
        gpus=[gpu] if gpu else [],
        versions=_versions(facts, distributed),
        skipped=dict(sorted((columns.lost + skipped + _losses(reader)).items())),
        warnings=warnings + damage,
    )


def _keep_freed_memory() -> None:
    """Have the C library keep what one chunk frees for the next: requesting it again took 10% of the time.

    glibc hands blocks back to the system that are larger than any which it has seen freed, 32 MB at most.
    """
    bytes(_KEPT_BYTES)  # never touched, so that it takes address space alone


def _known_rank(distributed: dict[str, Any], marks: Marks, source: Source) -> tuple[int, list[str]]:
    """The rank by distributedInfo, else by metadata events, else by the file's name; and warnings."""
    rank = int32(distributed.get("rank"))
    if rank >= 0:
        return rank, []
    if marks.rank >= 0:
        return marks.rank, [
            f"{source.name}: no distributedInfo; rank {marks.rank} by its {marks.rank_source}"
        ]
    return rank_of_name(source.name), []


def _base_ns(facts: TraceFacts) -> int:
    """What is added to every time, ns; 0 where none is recorded, or none that a clock can show."""
    base_ns = whole(facts.base_ns, default=0)
    return base_ns if abs(base_ns) < LAST_NS else 0


def _distributed(facts: TraceFacts) -> dict[str, Any]:
    return facts.distributed if isinstance(facts.distributed, dict) else {}


def _tables(
    spans: pl.DataFrame,
    sync_events: pl.DataFrame,
    columns: Columns,
    facts: TraceFacts,
    rank: int,
) -> dict[str, pl.DataFrame]:
    """All tables, without the columns that are equal in every row."""
    distributed = _distributed(facts)
    groups = _groups(distributed)
    spans = spans.with_columns(span_id=pl.int_range(pl.len()))
    others = _others(spans, columns.names)
    details = [*columns.details, NO_ARGS]  # position -1 is of no details
    collectives = pl.concat(
        [read(others, details, groups, rank) for read in (gpu_collectives, gloo_collectives)]
    )
    return {
        "spans": spans.drop("position"),
        "collectives": collectives.with_row_index("collective_id"),
        "syncs": read_syncs(others, sync_events, details),
        "steps": guess_steps(spans),
        "iterations": find_iterations(others),
        "workers": _worker(spans, facts, distributed),
    }


def _others(spans: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Spans that more is derived from: of Python calls, which are often the most, only some."""
    is_other = pl.col("kind") != "python"
    calls = model_calls(names)
    return spans.filter(is_other | pl.col("name").is_in(calls) if calls else is_other)


def _add_marked(columns: Columns, marks: Marks) -> Counter[str]:
    """Add the spans between begin and end marks; the count of marks without the other."""
    spans, unmatched = marks.spans()
    columns.add(spans)
    return Counter({"begin or end without the other": unmatched} if unmatched else {})


def _losses(reader: EventReader) -> Counter[str]:
    losses = Counter({"malformed events": reader.malformed, "truncated tail": int(bool(reader.truncated))})
    return +losses


def _damage(reader: EventReader, source: Source) -> list[str]:
    """One line on what a damaged file lacks and how much of it was read."""
    if not reader.truncated and not reader.malformed:
        return []
    what = [reader.truncated] if reader.truncated else []
    what += [f"{reader.malformed} malformed events"] if reader.malformed else []
    lost = "; its time base is lost too" if reader.truncated and reader.facts.base_ns is None else ""
    return [f"{source.name}: damaged ({', '.join(what)}); read as far as it goes, {reader.read} events{lost}"]


def _why_empty(reader: EventReader) -> str:
    if reader.truncated:
        return f"{reader.truncated} before the first span could be read; copy or record it again"
    if not reader.read:
        return "a trace without events; record it again, with profiled work in the window"
    return "no operator, runtime call or kernel in it; record it with torch.profiler"


def _groups(distributed: dict[str, Any]) -> Groups:
    """Ranks of each process group by name; a list that is itself abbreviated is left out."""
    groups = {}
    configs = distributed.get("pg_config")
    for config in configs if isinstance(configs, list) else []:
        ranks = config.get("ranks") if isinstance(config, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            groups[str(config.get("pg_name"))] = ranks_of(ranks)
    return groups


def _worker(spans: pl.DataFrame, facts: TraceFacts, distributed: dict[str, Any]) -> pl.DataFrame:
    pids = spans.select("pid").filter(pl.col("pid") >= 0)["pid"].mode().sort()
    return pl.DataFrame(
        {
            "world_size": [int32(distributed.get("world_size"))],
            "host": [_text(facts.host)],
            "pid": [pids[0] if pids.len() else -1],
            "gpu_name": [_gpu_name(facts, spans)],
            "started_ns": [spans["start_ns"].min()],
            "ended_ns": [spans.select(pl.col("start_ns") + pl.col("duration_ns")).max().item()],
            "source": [SOURCE],
        }
    )


def _gpu_name(facts: TraceFacts, spans: pl.DataFrame) -> str:
    """Model of the device that ran most of the rank's kernels; the trace lists all devices of the host."""
    used = spans.select("kind", "device").filter(pl.col("kind") == "kernel")["device"].mode().sort()
    devices = facts.devices if isinstance(facts.devices, list) else []
    for device in devices:
        if used.len() and isinstance(device, dict) and device.get("id") == used[0]:
            return _text(device.get("name"))
    return ""


def _versions(facts: TraceFacts, distributed: dict[str, Any]) -> dict[str, str]:
    versions = {
        "cuda_runtime": facts.cuda_runtime,
        "cuda_driver": facts.cuda_driver,
        "hip_runtime": facts.hip_runtime,
        "nccl": distributed.get("nccl_version"),
    }
    return {name: str(version) for name, version in versions.items() if version}


def _of_rank(frame: pl.DataFrame, rank: int) -> pl.DataFrame:
    return frame.with_columns(rank=pl.lit(rank, dtype=pl.Int32))


def _stamped(name: str, frame: pl.DataFrame, rank: int, window: int) -> pl.DataFrame:
    stamped = _of_rank(frame, rank)
    return (
        stamped
        if name in ("workers", "iterations")
        else stamped.with_columns(window=pl.lit(window, dtype=pl.Int32))
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
