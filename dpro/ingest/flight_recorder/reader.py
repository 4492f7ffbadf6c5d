"""Flight recorder dumps (PyTorch's ring of recent collectives): one rank's file into tables.

In: a pickle or JSON dump. Out: a `RankTrace` with one row of `collectives` per entry, and one row of
`process_groups` per group. A dump is read without trusting it: the unpickler refuses to load any class. It
knows calls, not kernels: there are no spans, and no time but that of the call. When a watchdog happened to
notice a start or an end is not a measurement, and is not kept; that it noticed is in the entry's state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from dpro.errors import InputError
from dpro.ingest.flight_recorder.entries import (
    SOURCE,
    calls_of,
    coalesced_calls,
    column,
    group_names,
    identifier,
    label,
)
from dpro.ingest.reading import plain_pickle
from dpro.ingest.reading.files import read_bytes
from dpro.ingest.reading.peers import ranks_in, ranks_of
from dpro.ingest.reading.values import int32, int64, mapping, sequence, text
from dpro.ingest.trace import RankTrace
from dpro.members import members_text
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, WORKERS

_PICKLE = b"\x80"
_OWN_KEYS = (b'"pg_status"', b'"time_created_ns"', b'"profiling_name"')


def is_dump(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a dump, pickled or JSON.

    PyTorch sorts the keys of its JSON: in a full dump the groups come long after the head.
    """
    if head.startswith(_PICKLE):
        return b"pg_config" in head or b"entries" in head
    if not head.lstrip().startswith(b"{") or b'"traceEvents"' in head:
        return False
    return any(key in head for key in _OWN_KEYS) or (b'"pg_config"' in head and b'"entries"' in head)


def read_dump(path: Path, *, rank: int | None = None, after: int = -1) -> RankTrace:
    """Read one rank's dump.

    Args:
        path: the file; its name states the rank, as `rank3` or by the digits at its end.
        rank: the rank, where the caller knows better.
        after: entries numbered up to this are left out.

    Raises:
        InputError: the file is damaged, is not a dump, or wants to run code.
    """
    with plain_pickle.without_collection():
        trace, calls = _read(path, rank, after)
    frames = {COLLECTIVES.name: calls, **trace.frames}
    return replace(trace, frames=frames)


def _read(path: Path, rank: int | None, after: int) -> tuple[RankTrace, pl.DataFrame]:
    """Read a dump: all but its calls, and its calls."""
    dump = _load(read_bytes(path), path)
    entries = dump.get("entries") or []
    if not isinstance(entries, list | tuple) or not set(map(type, entries)) <= {dict}:
        raise InputError(f"{path}: not a flight recorder dump (no list of entries)")
    known = _rank_of_name(path.name) if rank is None else rank
    groups = _groups(dump)
    stand_ins = coalesced_calls(entries, mapping(dump.get("pg_status")))
    new = entries if after < 0 else [entry for entry in entries if int64(entry.get("record_id")) > after]
    calls = calls_of(new, groups, known, stand_ins)
    said = _group_rows(dump, entries, groups, known, path.stat().st_mtime_ns)
    world_size = max((max(ranks) + 1 for ranks in groups.values() if ranks), default=-1)
    worker = {"rank": [known], "world_size": [world_size], "source": [SOURCE]}
    frames = {PROCESS_GROUPS.name: said, WORKERS.name: pl.DataFrame(worker)}
    return RankTrace(known, world_size, frames, versions=_versions(dump, entries)), calls


def _load(data: bytes, path: Path) -> Mapping[str, Any]:
    try:
        dump = plain_pickle.loads(data) if data.startswith(_PICKLE) else msgspec.json.decode(data)
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not readable as a flight recorder dump ({reason})") from error
    if not isinstance(dump, dict) or ("entries" not in dump and "pg_config" not in dump):
        raise InputError(f"{path}: not a flight recorder dump (no entries)")
    return dump


def _rank_of_name(name: str) -> int:
    found = re.search(r"rank[-_ ]?(\d+)", name, re.IGNORECASE) or re.search(r"(\d+)(?:\.\w+)*$", name)
    return int32(found[1]) if found else -1


def _groups(dump: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Global ranks of each process group by name; the ids that entries also carry differ between ranks."""
    groups = {}
    for name, config in mapping(dump.get("pg_config")).items():
        listed = mapping(config).get("ranks")
        groups[text(name)] = ranks_in(listed) if isinstance(listed, str) else ranks_of(sequence(listed))
    return groups


def _group_rows(
    dump: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[int]],
    rank: int,
    saved_ns: int,
) -> pl.DataFrame:
    """What the dump says of each group as a whole; one row, for when it was saved, where it knows none."""
    described = {
        text(name): text(mapping(config).get("desc"))
        for name, config in mapping(dump.get("pg_config")).items()
    }
    status = {identifier(number): mapping(facts) for number, facts in mapping(dump.get("pg_status")).items()}
    names = _names_of_ids(entries, described, list(status))
    unnamed = [number for number in status if number not in names]
    rows = [
        {
            "rank": rank,
            "group": label(name, description),
            "group_ranks": members_text(groups.get(name, ())),
            "enqueued": int64(facts.get("last_enqueued_collective", -1)),
            "completed": int64(facts.get("last_completed_collective", -1)),
            "saved_ns": saved_ns,
            "source": SOURCE,
        }
        for name, description, facts in [
            *((name, description, status.get(number, {})) for number, (name, description) in names.items()),
            *(("", "", status[number]) for number in unnamed),
            *((name, described[name], {}) for name in described if name not in dict(names.values())),
        ]
    ] or [{"rank": rank, "group": "", "group_ranks": "", "saved_ns": saved_ns, "source": SOURCE}]
    return pl.DataFrame(rows, schema={name: PROCESS_GROUPS.dtypes[name] for name in rows[0]}, orient="row")


def _names_of_ids(
    entries: Sequence[Mapping[str, Any]], described: Mapping[str, str], numbers: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Name and description of the groups by the process's own ids, which are the keys of the status.

    Entries have both. A process makes its groups in the order of their names, where those are numbers: if
    there are as many names as ids, they pair up in order, unless an entry knows better.
    """
    found = zip(column(entries, "pg_id"), entries, strict=True)
    latest = {number: entry for number, entry in found if isinstance(number, int | str)}
    named = {identifier(number): group_names(entry) for number, entry in latest.items()}
    if len(described) != len(numbers) or not all(each.isdecimal() for each in (*described, *numbers)):
        return named
    paired = dict(zip(sorted(numbers, key=int), sorted(described, key=int), strict=True))
    if any(paired.get(number, name) != name for number, (name, _) in named.items()):
        return named
    return {number: (name, described[name]) for number, name in paired.items()}


def _versions(dump: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of the communication library: NCCL's until 2.9, from then on any backend's."""
    nccl, any_backend = text(dump.get("nccl_version")), text(dump.get("comm_lib_version"))
    by_nccl = any(text(entry.get("profiling_name")).startswith("nccl:") for entry in entries)
    if nccl or (any_backend and by_nccl):
        return {"nccl": nccl or any_backend}
    return {"communication library": any_backend} if any_backend else {}
