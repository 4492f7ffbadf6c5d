"""Reports of NCCL's RAS on a job (`ncclras -f json`): its processes, and the problems of each.

Reads one report on all communicators. Returns a row of `workers` per rank; rows of `counters`: ranks that do
not answer or are considered dead, and the number of calls per rank, operation and communicator; and warnings:
ranks that do not answer, failed or were aborted, and communicators whose ranks differ in calls of an
operation. It has no times but that of the file, and no collectives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from dpro.errors import InputError
from dpro.ingest.reading.files import read_bytes
from dpro.ingest.reading.values import int32, int64, mapping, sequence, text
from dpro.ingest.trace import RankTrace
from dpro.words import first_few

SOURCE = "NCCL RAS"
_MAX_NAMED = 8
_IN_PROGRESS = 7  # ncclInProgress
_SILENT, _DEAD = "does not answer", "is considered dead"
_COUNTED = {_SILENT: "ras_unresponsive", _DEAD: "ras_considered_dead"}
# NCCL 2.28 leaves out the comma after the last number of a missing rank.
_NO_COMMA = re.compile(rb'([\d"el])(\s*\n\s*)("[^"\n]*"\s*:)')


@dataclass(frozen=True)
class _Member:
    """A rank of one communicator: its number there, its process and GPU, and its state."""

    rank: int
    host: str
    pid: int
    gpu: int
    state: str
    counts: Mapping[str, int]

    @property
    def where(self) -> tuple[str, int, int]:
        """Identity of the worker in every communicator: host, pid and GPU."""
        return self.host, self.pid, self.gpu


@dataclass(frozen=True)
class _Communicator:
    name: str
    size: int
    members: list[_Member]


def is_ras_report(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a RAS report, also after lines `OK`."""
    begins = re.match(rb"(?:\s*OK\s*\n)*\s*\{", head) is not None
    return begins and b'"communicators"' in head and (b'"communicators_count"' in head or b'"hash"' in head)


def read_ras_report(path: Path, *, rank: int | None = None) -> list[RankTrace]:
    """Read a report.

    Args:
        rank: the rank to read it as, where it describes a single one.

    Returns:
        A trace per rank of the largest communicator, which is assumed to be the whole job. Warnings on
        communicators are with the first trace.

    Raises:
        InputError: the file is damaged, is not a report, or has no rank.
    """
    document = _decode(read_bytes(path), path)
    communicators = [_communicator(entry) for entry in map(mapping, sequence(document.get("communicators")))]
    whole = max(communicators, key=lambda communicator: communicator.size, default=None)
    if whole is None or not whole.members:
        raise InputError(f"{path}: a RAS report without a rank; ask again while the job has communicators")
    members = {member.rank: member for member in whole.members if member.rank >= 0}
    if rank is not None and len(members) == 1:
        members = {rank: next(iter(members.values()))}
    version = text(document.get("nccl_version"))
    states = _states(communicators)
    counts = _counters(communicators, path.stat().st_mtime_ns)
    traces = [
        _trace(
            number, member, whole.size, states.get(member.where, []), counts.get(member.where, []), version
        )
        for number, member in sorted(members.items())
    ]
    if not traces:
        raise InputError(f"{path}: a RAS report without a rank; ask again while the job has communicators")
    traces[0].warnings.extend(line for communicator in communicators for line in _mismatches(communicator))
    elsewhere = {m.where for c in communicators for m in c.members} - {m.where for m in members.values()}
    if elsewhere:
        traces[0].skipped["workers that are not in the largest communicator"] = len(elsewhere)
    return traces


def _decode(data: bytes, path: Path) -> Mapping[str, Any]:
    content = data[max(data.find(b"{"), 0) :]
    wanted = "give the output of `ncclras -f json`"
    try:
        try:
            document = msgspec.json.decode(content)
        except msgspec.DecodeError:
            document = msgspec.json.decode(_NO_COMMA.sub(rb"\1,\2\3", content))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not readable as a RAS report ({error}); {wanted}") from error
    if not isinstance(document, dict) or not isinstance(document.get("communicators"), list):
        raise InputError(f"{path}: not a RAS report (no communicators); {wanted}")
    return document


def _communicator(entry: Mapping[str, Any]) -> _Communicator:
    listed = [*sequence(entry.get("ranks")), *sequence(entry.get("missing_ranks"))]
    members = [_member(mapping(member)) for member in listed]
    return _Communicator(text(entry.get("hash")), max(int32(entry.get("size")), 0), members)


def _member(entry: Mapping[str, Any]) -> _Member:
    nvml = int32(entry.get("nvml_dev"))  # unlike cuda_dev, unique on a host
    counts = mapping(entry.get("collective_counts"))
    return _Member(
        rank=int32(entry.get("rank")),
        host=text(entry.get("host")),
        pid=int64(entry.get("pid")),
        gpu=nvml if nvml >= 0 else int32(entry.get("cuda_dev")),
        state=_state({**entry, **mapping(entry.get("status"))}),
        counts={text(op): int64(count) for op, count in counts.items()},
    )


def _state(status: Mapping[str, Any]) -> str:
    """Word what is wrong with a rank; empty for nothing. A rank missing from RAS has its own status."""
    if status.get("considered_dead") is True:
        return _DEAD
    if status.get("unresponsive") is True:
        return _SILENT
    if "unresponsive" in status:
        return "answers, but does not know the communicator"
    if status.get("abort_flag") is True:
        return "was aborted"
    for name in ("init_state", "async_error"):
        code = int64(status.get(name, 0))
        if code not in (0, _IN_PROGRESS):
            return f"has an error ({name} {code})"
    if int64(status.get("init_state", 0)) == _IN_PROGRESS:
        return "is still initialising"
    return ""


def _states(communicators: Sequence[_Communicator]) -> dict[tuple[str, int, int], list[str]]:
    """Word what is wrong with each worker, each problem once with its communicators."""
    by_worker: dict[tuple[str, int, int], dict[str, list[str]]] = {}
    for communicator in communicators:
        for member in communicator.members:
            if member.state:
                by_worker.setdefault(member.where, {}).setdefault(member.state, []).append(communicator.name)
    return {
        where: [f"{state} (communicator {first_few(names, _MAX_NAMED)})" for state, names in states.items()]
        for where, states in by_worker.items()
    }


_Where = tuple[str, int, int]


def _counters(communicators: Sequence[_Communicator], time_ns: int) -> dict[_Where, list[dict[str, Any]]]:
    """Return rows of `counters` of each worker, without its rank."""
    rows: dict[_Where, list[dict[str, Any]]] = {}
    for communicator in communicators:
        for member in communicator.members:
            values = {f"ras_calls {op}": float(count) for op, count in member.counts.items() if count >= 0}
            values |= {_COUNTED[member.state]: 1.0} if member.state in _COUNTED else {}
            of_all = {"host": member.host, "device": communicator.name, "time_ns": time_ns}
            rows.setdefault(member.where, []).extend(
                of_all | {"counter": name, "value": value} for name, value in values.items()
            )
    return rows


def _trace(
    rank: int,
    member: _Member,
    world_size: int,
    states: list[str],
    counts: list[dict[str, Any]],
    version: str,
) -> RankTrace:
    worker = {
        "rank": rank,
        "local_rank": member.gpu,
        "world_size": world_size,
        "host": member.host,
        "pid": member.pid,
        "source": SOURCE,
    }
    where = f"{member.host} pid {member.pid}"
    return RankTrace(
        rank=rank,
        world_size=world_size,
        frames={
            "workers": pl.DataFrame([worker]),
            **({"counters": pl.DataFrame([{"rank": rank, **row} for row in counts])} if counts else {}),
        },
        host=member.host,
        versions={"nccl": version} if version else {},
        warnings=[f"RAS: rank {rank} ({where}) {state}" for state in states],
    )


def _mismatches(communicator: _Communicator) -> list[str]:
    """Word one line per operation that ranks have called a different number of times."""
    lines = []
    for op in sorted({op for member in communicator.members for op in member.counts}):
        ranks: dict[int, list[int]] = {}
        for member in communicator.members:
            if op in member.counts:
                ranks.setdefault(member.counts[op], []).append(member.rank)
        if len(ranks) > 1:
            counts = "; ".join(
                f"{count} by {first_few(sorted(ranks[count]), _MAX_NAMED)}" for count in sorted(ranks)
            )
            lines.append(f"RAS: communicator {communicator.name}: ranks differ in calls of {op}: {counts}")
    return lines
