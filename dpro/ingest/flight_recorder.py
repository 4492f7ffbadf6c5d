"""Flight recorder dumps (PyTorch's ring of recent collectives): the file of one rank converted to tables.

Reads a pickle or JSON dump; returns a `RankTrace` with one row of `collectives` per entry, and one row of
`process_groups` per group. A dump is not trusted: the unpickler refuses to load any class. A dump has calls,
not kernels, so there are no spans and no times but that of the call. The time at which a watchdog noticed a
start or an end is not a measurement, and is not kept; the entry's state shows that it noticed.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import compress, repeat
from operator import contains, is_, itemgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import polars as pl

from dpro.classify import operation
from dpro.errors import InputError
from dpro.ingest.reading import plain_pickle
from dpro.ingest.reading.files import read_bytes
from dpro.ingest.reading.values import (
    directed_bytes,
    dtype_bytes,
    dtype_name,
    elements,
    global_peer,
    int32,
    int64,
    mapping,
    ranks_in,
    ranks_of,
    rounded,
    sequence,
    text,
)
from dpro.ingest.trace import RankTrace
from dpro.members import members_text
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, WORKERS
from dpro.units import NS_PER_MS

_PICKLE = b"\x80"
_OWN_KEYS = (b'"pg_status"', b'"time_created_ns"', b'"profiling_name"')


def is_dump(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a dump, pickled or JSON.

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
        InputError: the file is damaged, is not a dump, or would run code.
    """
    with plain_pickle.without_collection():
        trace, calls = _read(path, rank, after)
    frames = {COLLECTIVES.name: calls, **trace.frames}
    return replace(trace, frames=frames)


def _read(path: Path, rank: int | None, after: int) -> tuple[RankTrace, pl.DataFrame]:
    """Read a dump; return a trace without calls, and the calls."""
    data = read_bytes(path)
    try:
        dump = plain_pickle.loads(data) if data.startswith(_PICKLE) else msgspec.json.decode(data)
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not readable as a flight recorder dump ({reason})") from error
    if not isinstance(dump, dict) or ("entries" not in dump and "pg_config" not in dump):
        raise InputError(f"{path}: not a flight recorder dump (no entries)")
    entries = dump.get("entries") or []
    if not isinstance(entries, list | tuple) or not set(map(type, entries)) <= {dict}:
        raise InputError(f"{path}: not a flight recorder dump (no list of entries)")
    own_rank = _rank_of_name(path.name) if rank is None else rank
    # Groups are identified by name, since the ids in entries differ between ranks.
    groups = {}
    for name, config in mapping(dump.get("pg_config")).items():
        listed = mapping(config).get("ranks")
        groups[text(name)] = ranks_in(listed) if isinstance(listed, str) else ranks_of(sequence(listed))
    stand_ins = coalesced_calls(entries, mapping(dump.get("pg_status")))
    new = entries if after < 0 else [entry for entry in entries if int64(entry.get("record_id")) > after]
    calls = calls_of(new, groups, own_rank, stand_ins)
    said = _group_rows(dump, entries, groups, own_rank, path.stat().st_mtime_ns)
    world_size = max((max(ranks) + 1 for ranks in groups.values() if ranks), default=-1)
    worker = {"rank": [own_rank], "world_size": [world_size], "source": [SOURCE]}
    frames = {PROCESS_GROUPS.name: said, WORKERS.name: pl.DataFrame(worker)}
    return RankTrace(own_rank, world_size, frames, versions=_versions(dump, entries)), calls


def _rank_of_name(name: str) -> int:
    match = re.search(r"rank[-_ ]?(\d+)", name, re.IGNORECASE) or re.search(r"(\d+)(?:\.\w+)*$", name)
    return int32(match[1]) if match else -1


def _group_rows(
    dump: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[int]],
    rank: int,
    saved_ns: int,
) -> pl.DataFrame:
    """Return rows of `process_groups`; without any group, one empty row with the time of saving."""
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
    """Return name and description of groups, by the process's own ids, which are the keys of the status.

    Entries have both. A process makes its groups in the order of their names, where those are numbers: with
    as many names as ids, they pair up in order, unless an entry contradicts.
    """
    numbered = zip(column(entries, "pg_id"), entries, strict=True)
    latest = {number: entry for number, entry in numbered if isinstance(number, int | str)}
    named = {identifier(number): group_names(entry) for number, entry in latest.items()}
    if len(described) != len(numbers) or not all(name.isdecimal() for name in (*described, *numbers)):
        return named
    paired = dict(zip(sorted(numbers, key=int), sorted(described, key=int), strict=True))
    if any(paired.get(number, name) != name for number, (name, _) in named.items()):
        return named
    return {number: (name, described[name]) for number, name in paired.items()}


def _versions(dump: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the version of the communication library: NCCL's until PyTorch 2.9, any backend's since."""
    nccl, any_backend = text(dump.get("nccl_version")), text(dump.get("comm_lib_version"))
    by_nccl = any(text(entry.get("profiling_name")).startswith("nccl:") for entry in entries)
    if nccl or (any_backend and by_nccl):
        return {"nccl": nccl or any_backend}
    return {"communication library": any_backend} if any_backend else {}


# Entries of a flight recorder, each a call, as rows of `collectives`.

SOURCE = "flight recorder"
Entry: TypeAlias = Mapping[str, Any]
Result = TypeVar("Result")

_encoded = msgspec.msgpack.Encoder().encode  # plain values as bytes; equal values give equal bytes
_NOT_ENCODED = (TypeError, ValueError, OverflowError, RecursionError)  # from values of damaged dumps
_COALESCED = re.compile(r":\w*coalesced$")  # name of the end of a coalesced call
# Fields that determine the kind of a call. Older dumps have only the group's name, or `pg_name`.
_KEY_FIELDS = (
    "profiling_name", "process_group", "pg_name", "is_p2p",
    "input_sizes", "input_dtypes", "output_sizes", "output_dtypes",
)  # fmt: skip


def calls_of(
    entries: Sequence[Entry],
    groups: Mapping[str, Sequence[int]],
    rank: int,
    stand_ins: Mapping[Call, Entry],
) -> pl.DataFrame:
    """Return calls as rows of `collectives`.

    Args:
        groups: global ranks of each process group by name.
        stand_ins: the result of `coalesced_calls`.
    """
    if not entries:
        return COLLECTIVES.empty()
    keys = _all_keys(entries)
    first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
    places = sorted(first.values())
    numbers = {keys[place]: number for number, place in enumerate(places)}
    of_kind = np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))
    kinds = [_kind(entries[place], groups, rank) for place in places]
    names = [name for name in kinds[0] if name in COLLECTIVES.dtypes]
    shared = pl.DataFrame(
        [pl.Series(name, [kind[name] for kind in kinds], COLLECTIVES.dtypes[name]) for name in names]
    )
    is_p2p, retires = (np.array([kind[name] for kind in kinds])[of_kind] for name in ("is_p2p", "retires"))
    created = _whole_numbers(column(entries, "time_created_ns"))
    columns: dict[str, Sequence[Any] | np.ndarray[Any, Any]] = {
        "collective_id": _whole_numbers(column(entries, "record_id")),
        "sequence": _sequences(entries, is_p2p),
        "enqueued_ns": np.where(created == 0, -1, created),  # JSON writes an unknown time as 0
        "duration_ns": _durations(column(entries, "duration_ms")),
        "state": _states(entries, retires, stand_ins),
    }
    return shared[of_kind].hstack([pl.Series(name, values) for name, values in columns.items()])


def column(entries: Sequence[Entry], name: str) -> list[Any]:
    """Return a value of each entry, None where it has none; nearly always all entries have it or none."""
    try:
        return list(map(itemgetter(name), entries))
    except KeyError:
        return [entry.get(name) for entry in entries] if _any_has(entries, name) else [None] * len(entries)


def _any_has(entries: Sequence[Entry], name: str) -> bool:
    return any(map(contains, entries, repeat(name)))


def each_once(values: Sequence[Any], function: Callable[[Any], Result]) -> list[Result]:
    """Apply a function to each value, computing it once for equal values.

    Args:
        values: [N] of any type.

    Returns:
        [N] results.
    """
    if set(map(type, values)) in ({int}, {str}):  # others: no hash, or equal but distinct (1, True)
        results = {value: function(value) for value in set(values)}
        return list(map(results.__getitem__, values))
    return list(map(function, values))


def _all_keys(entries: Sequence[Entry]) -> list[bytes]:
    """Return `_key` of each entry, in a single pass where all entries have the same fields."""
    there = [name for name in _KEY_FIELDS if name in entries[0]]
    absent = [name for name in _KEY_FIELDS if name not in entries[0]]
    if len(there) > 1 and not any(_any_has(entries, name) for name in absent):
        with suppress(KeyError, *_NOT_ENCODED):
            return list(map(_encoded, map(itemgetter(*there), entries)))
    return [_key(entry) for entry in entries]


def _key(entry: Entry) -> bytes:
    """Return the fields that determine the kind of a call, as a dictionary key.

    Repeated parts of a value are written each time; the pickle reader has refused excessive repetition.
    """
    try:
        return _encoded([entry.get(name) for name in _KEY_FIELDS])
    except _NOT_ENCODED:
        return str(id(entry)).encode()


def _kind(entry: Entry, groups: Mapping[str, Sequence[int]], rank: int) -> dict[str, Any]:
    """Return what all calls of a kind share.

    Columns of `collectives`, `is_p2p`, and `retires`: whether a retired entry has ended.
    """
    name = text(entry.get("profiling_name"))
    group, description = group_names(entry)
    ranks = groups.get(group, [])
    dtypes = sequence(entry.get("input_dtypes")) or sequence(entry.get("output_dtypes")) or [""]
    op = _op_of(name)
    bytes_in, bytes_out = directed_bytes(
        op,
        _total_bytes(entry.get("input_sizes"), entry.get("input_dtypes")),
        _total_bytes(entry.get("output_sizes"), entry.get("output_dtypes")),
    )
    return {
        "rank": rank,
        "window": -1,
        "start_ns": -1,
        "source": SOURCE,
        "op": op,
        "group": label(group, description),
        "group_ranks": members_text(ranks),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "dtype": dtype_name(text(dtypes[0])),
        "peer": _peer(name, rank, ranks),
        "is_p2p": bool(entry.get("is_p2p", op in ("send", "recv"))),
        "retires": name.startswith("gloo:"),
    }


def _whole_numbers(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return [N] `int64` of each value."""
    if set(map(type, values)) == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            pass
    return np.array([int64(value) for value in values], np.int64)


def _durations(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Convert [N] ms to ns; -1 where not measured, which is usual."""
    if values.count(None) == len(values):
        return np.full(len(values), -1, np.int64)
    return np.array([rounded(value, NS_PER_MS) for value in values], np.int64)


def _sequences(
    entries: Sequence[Entry], is_p2p: np.ndarray[Any, np.dtype[np.bool_]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return [N] sequence numbers. Messages are counted separately, except in dumps before 2.1."""
    collectives = _whole_numbers(_numbers(entries, "collective_seq_id"))
    if not is_p2p.any():
        return collectives
    return np.where(is_p2p, _whole_numbers(_numbers(entries, "p2p_seq_id")), collectives)


def _numbers(entries: Sequence[Entry], name: str) -> list[Any]:
    try:
        return list(map(itemgetter(name), entries))
    except KeyError:
        return [entry.get(name, entry.get("seq_id")) for entry in entries]


def _states(
    entries: Sequence[Entry],
    retires: np.ndarray[Any, np.dtype[np.bool_]],
    stand_ins: Mapping[Call, Entry],
) -> list[str]:
    """Return how far each entry got.

    Gloo never moves an entry on from `scheduled` but retires it when its work has ended. NCCL also retires
    entries that were aborted, so there only the state itself counts.
    """
    sources = list(map(stand_ins.get, calls_by_name(entries), entries)) if stand_ins else entries
    states = each_once(column(sources, "state"), _state)
    if retires.any():
        ended = list(map(is_, column(sources, "retired"), repeat(True)))
        return ["completed" if over else state for over, state in zip(retires & ended, states, strict=True)]
    return states


def _state(recorded: Any) -> str:
    return recorded if isinstance(recorded, str) and recorded in ("scheduled", "started", "completed") else ""


def group_names(entry: Entry) -> tuple[str, str]:
    """Return name and description of an entry's group."""
    recorded = entry.get("process_group", entry.get("pg_name"))
    names = [text(name) for name in sequence(recorded)] or [text(recorded)]
    return names[0], names[1] if len(names) > 1 else ""


def label(group: str, description: str) -> str:
    """Return the name of a group in the tables.

    Args:
        description: the program's name for the group; empty or `undefined` where it gives none.
    """
    return f"{group} {description}" if description not in ("", "undefined") else group


Call: TypeAlias = tuple[str, bool, int]


def identifier(number: Any) -> str:
    """Return a process's own group number as text, as in JSON; empty for anything else."""
    return text(str(number)) if isinstance(number, int | str) else ""


def calls_by_name(entries: Sequence[Entry]) -> list[Call]:
    """Return the key that parts of one coalesced call share, per entry: group, direction and number."""
    groups = each_once(column(entries, "pg_id"), identifier)
    is_p2p = list(map(is_, column(entries, "is_p2p"), repeat(True)))
    numbers = _whole_numbers(column(entries, "collective_seq_id"))
    if any(is_p2p):
        numbers = np.where(is_p2p, _whole_numbers(column(entries, "p2p_seq_id")), numbers)
    return list(zip(groups, is_p2p, numbers.tolist(), strict=True))


def coalesced_calls(entries: Sequence[Entry], status: Mapping[str, Any]) -> dict[Call, Entry]:
    """Return, by coalesced call, the entry whose state applies to all its parts: only its end is updated.

    A dump of active entries leaves out only the end once it is finished, but not the parts. Then several
    parts of one number imply that the call is finished, as does a group that has got further.

    Args:
        status: status of each group, by the process's own number.
    """
    names = each_once(column(entries, "profiling_name"), _ends_coalesced)
    is_p2p = list(map(is_, column(entries, "is_p2p"), repeat(True)))
    finished = {"state": "completed", "retired": True}
    messages = list(compress(entries, is_p2p))
    calls = calls_by_name(messages)
    counts = Counter(calls)
    last = {call[0]: entry for call, entry in zip(calls, messages, strict=True)}
    done = {group: _messages_done(mapping(status.get(group)), entry) for group, entry in last.items()}
    inferred = {call: finished for call, count in counts.items() if count > 1 or call[2] <= done[call[0]]}
    ends = list(compress(entries, names))
    return inferred | dict(zip(calls_by_name(ends), ends, strict=True))


def _ends_coalesced(name: Any) -> bool:
    return isinstance(name, str) and _COALESCED.search(name) is not None


def _messages_done(status: Mapping[str, Any], last: Entry) -> int:
    """Return the number of a group's last finished message; -1 where its status may count collectives.

    Collectives and messages are both counted, and the status does not state which it means: it counts
    messages if the last call was one and the finished number exceeds that of all collectives.
    """
    enqueued, completed = (
        int64(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "completed")
    )
    collectives, messages = (int64(last.get(f"{what}_seq_id", -1)) for what in ("collective", "p2p"))
    return completed if enqueued == messages and collectives < completed <= enqueued else -1


@cache
def _op_of(name: str) -> str:
    return operation(name) or name


def _total_bytes(sizes: Any, dtypes: Any) -> int:
    """Return the bytes of all tensors together; -1 where a size or an element type is unknown."""
    widths = [dtype_bytes(text(dtype)) for dtype in sequence(dtypes)]
    counts = [elements(size) for size in sequence(sizes)]
    if not counts or len(widths) != len(counts) or min(*widths, *counts) < 0:
        return -1
    return int64(sum(map(operator.mul, widths, counts)))


def _peer(name: str, rank: int, ranks: Sequence[int]) -> int:
    """Return the other rank in `send 0->1` or `recv 1<-0`, as a global rank; -1 for a collective.

    NCCL's names number ranks within the group; where this rank's own number agrees, the peer is certain.
    """
    match = re.search(r"(\d+)\s*(?:->|<-)\s*(\d+)", name)
    if not match:
        return -1
    own_number, peer = int32(match[1]), int32(match[2])
    if max(own_number, peer) < len(ranks) and min(own_number, peer) >= 0 and ranks[own_number] == rank:
        return ranks[peer]
    return int32(global_peer(own_number, peer, rank, ranks))


# Selection among several flight recorder dumps of one rank.

Tables = Mapping[str, pl.DataFrame]


def newest(dumps: Sequence[Tables]) -> list[int]:
    """Return the indices of the dumps of one rank that count, newest first.

    Args:
        dumps: `collectives` and `process_groups` of each. The newer of two dumps has a later call or, with
            the same last call, was saved later.
    """
    order = sorted(range(len(dumps)), key=lambda place: (*_age(dumps[place]), -place), reverse=True)
    kept: list[int] = []
    covered: set[str] = set()
    for place in order:
        # A dump covers the groups in which the rank made calls, and those that it lists.
        dump = dumps[place]
        tables = [dump[table.name] for table in (COLLECTIVES, PROCESS_GROUPS) if table.name in dump]
        groups = {group for rows in tables for group in rows["group"].unique().to_list() if group}
        if not kept or (groups and not groups & covered):
            kept.append(place)
            covered |= groups
    return kept


def in_words(rank: int, kept: Sequence[str], left: Sequence[str]) -> str:
    """Word superseded dumps of a rank as one line."""
    return f"rank {rank}: {', '.join(kept)} is used, which is newer than {', '.join(left)}"


def _age(dump: Tables) -> tuple[int, int]:
    return _latest(dump, COLLECTIVES.name, "enqueued_ns"), _latest(dump, PROCESS_GROUPS.name, "saved_ns")


def _latest(dump: Tables, table: str, column: str) -> int:
    rows = dump.get(table)
    latest = rows[column].max() if rows is not None and column in rows.columns else None
    return int(latest) if isinstance(latest, int) else -1
