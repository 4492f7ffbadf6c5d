"""Entries of a flight recorder, which are calls, as rows of `collectives`.

In: the entries of one dump, as plain values. Out: one row per entry. A ring holds thousands of calls of a few
kinds: what is the same in all calls of a kind is worked out once. Files, groups and versions are the business
of `flight_recorder`.
"""

from __future__ import annotations

import marshal
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import polars as pl

from dpro.classify import operation
from dpro.ingest.dtypes import dtype_bytes, dtype_name
from dpro.ingest.peers import directed_bytes, global_peer
from dpro.ingest.values import int32, int64, mapping, rounded, sequence, text
from dpro.schema import COLLECTIVES
from dpro.units import NS_PER_MS

SOURCE = "flight recorder"
Entry: TypeAlias = Mapping[str, Any]

_COALESCED = re.compile(r":\w*coalesced$")  # the end of a coalesced call
_STATES = ("scheduled", "started", "completed")
# What the kind of a call follows from. The first dumps had the group's name alone, older ones `pg_name`.
_TELLING = (
    "profiling_name", "process_group", "pg_name", "is_p2p",
    "input_sizes", "input_dtypes", "output_sizes", "output_dtypes",
)  # fmt: skip


def rows_of(
    entries: Sequence[Entry],
    groups: Mapping[str, list[int]],
    rank: int,
    stand_ins: Mapping[Call, Entry],
) -> pl.DataFrame:
    """Calls as rows of `collectives`.

    Args:
        entries: the calls.
        groups: global ranks of each process group by name.
        rank: whose calls they are.
        stand_ins: as `coalesced_calls` gives them.
    """
    if not entries:
        return COLLECTIVES.empty()
    numbers: dict[bytes, int] = {}
    examples: list[Entry] = []
    of_kind = []
    for entry in entries:
        number = numbers.setdefault(_telling(entry), len(examples))
        if number == len(examples):
            examples.append(entry)
        of_kind.append(number)
    kinds = [_kind(example, groups, rank) for example in examples]
    whole = {name: COLLECTIVES.dtypes.get(name, pl.Boolean) for name in kinds[0]}
    rows = pl.DataFrame(kinds, schema=whole, orient="row")[of_kind]
    states = _states(entries, rows["retires"].to_list(), stand_ins)
    created = _whole_numbers([entry.get("time_created_ns") for entry in entries])
    return rows.drop("retires", "is_p2p").with_columns(
        collective_id=pl.Series(_whole_numbers([entry.get("record_id") for entry in entries])),
        rank=pl.lit(rank, pl.Int32),
        window=pl.lit(-1, pl.Int32),
        sequence=pl.Series(_sequences(entries, rows["is_p2p"].to_numpy())),
        enqueued_ns=pl.Series(np.where(created == 0, -1, created)),  # JSON writes an unknown time as 0
        start_ns=pl.lit(-1, pl.Int64),
        duration_ns=pl.Series(_durations([entry.get("duration_ms") for entry in entries])),
        state=pl.Series(states, dtype=pl.String),
        source=pl.lit(SOURCE),
    )


def _telling(entry: Entry) -> bytes:
    """All that the kind of a call follows from, as something that can be looked up.

    What a value has several times over is written once, so it cannot grow. Equal values may be different
    bytes: then there are more kinds than need be.
    """
    try:
        return marshal.dumps([entry.get(name) for name in _TELLING])
    except ValueError:  # no dump has such values, unless it is damaged
        return str(id(entry)).encode()


def _kind(entry: Entry, groups: Mapping[str, list[int]], rank: int) -> dict[str, Any]:
    """What all calls of a kind share: columns of `collectives`, `is_p2p`, whether `retires` tells ends."""
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
        "op": op,
        "group": label(group, description),
        "group_ranks": ranks,
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "dtype": dtype_name(text(dtypes[0])),
        "peer": _peer(name, rank, ranks),
        "is_p2p": bool(entry.get("is_p2p", op in ("send", "recv"))),
        "retires": name.startswith("gloo:"),
    }


def _whole_numbers(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[N] `int64` of each value."""
    if set(map(type, values)) == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            pass
    return np.array([int64(value) for value in values], np.int64)


def _durations(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[N] ns of measured ms; -1 where none was measured, as is the rule."""
    if all(value is None for value in values):
        return np.full(len(values), -1, np.int64)
    return np.array([rounded(value, NS_PER_MS) for value in values], np.int64)


def _sequences(
    entries: Sequence[Entry], is_p2p: np.ndarray[Any, np.dtype[np.bool_]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[N] numbers of calls. Messages have a count of their own; dumps before 2.1 had one for everything."""
    counts = ("collective_seq_id", "p2p_seq_id")
    return np.where(
        is_p2p, *(_whole_numbers([e.get(name, e.get("seq_id")) for e in entries]) for name in counts[::-1])
    )


def _states(entries: Sequence[Entry], retires: Sequence[bool], stand_ins: Mapping[Call, Entry]) -> list[str]:
    """How far each entry got.

    Gloo never moves an entry on from `scheduled` but retires it when its work has ended. NCCL also retires
    entries that were aborted, so there only the state itself counts.
    """
    told = [stand_ins.get(call_of(entry), entry) for entry in entries] if stand_ins else entries
    found = [
        "completed" if retiring and entry.get("retired") is True else entry.get("state")
        for entry, retiring in zip(told, retires, strict=True)
    ]
    return [state if isinstance(state, str) and state in _STATES else "" for state in found]


def group_names(entry: Entry) -> tuple[str, str]:
    """Name and description of an entry's group."""
    recorded = entry.get("process_group", entry.get("pg_name"))
    names = [text(name) for name in sequence(recorded)] or [text(recorded)]
    return names[0], names[1] if len(names) > 1 else ""


def label(group: str, description: str) -> str:
    """What a group is called in the tables."""
    return f"{group} {description}" if description not in ("", "undefined") else group


Call: TypeAlias = tuple[str, bool, int]


def call_of(entry: Entry) -> Call:
    """What the parts of one coalesced call have in common."""
    is_p2p = entry.get("is_p2p") is True
    number = int64(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    return text(str(entry.get("pg_id"))), is_p2p, number


def coalesced_calls(entries: Sequence[Entry], status: Mapping[str, Any]) -> dict[Call, Entry]:
    """What stands for the parts of each coalesced call: they are not kept up to date, the end of it is.

    A dump of active entries only leaves out the end when it is finished, but not the parts. Then several
    parts of one number tell it, or that the group as a whole is further.
    """
    finished = {"state": "completed", "retired": True}
    messages = [entry for entry in entries if entry.get("is_p2p") is True]
    counts = Counter(map(call_of, messages))
    last = {text(str(entry.get("pg_id"))): entry for entry in messages}
    done = {group: _messages_done(mapping(status.get(group)), entry) for group, entry in last.items()}
    told = {call: finished for call, count in counts.items() if count > 1 or call[2] <= done[call[0]]}
    names = {name for entry in entries if isinstance(name := entry.get("profiling_name"), str)}
    ending = {name for name in names if _COALESCED.search(name)}
    ends = (entry for entry in entries if ending and text(entry.get("profiling_name")) in ending)
    return told | {call_of(entry): entry for entry in ends}


def _messages_done(status: Mapping[str, Any], last: Entry) -> int:
    """Number of a group's last finished message; -1 where its status may be about collectives.

    Both are counted, and the status does not tell which it means: it is about messages if the last call was
    one, and what is finished is further than collectives ever came.
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
    """Bytes of all tensors together, -1 where a size or an element type is not known."""
    try:
        widths = [dtype_bytes(text(dtype)) for dtype in dtypes]
        counts = [math.prod(size) for size in sizes]
        known = bool(counts) and len(widths) == len(counts) and min(widths) >= 0
        return int64(sum(map(math.prod, zip(widths, counts, strict=True)))) if known else -1
    except (TypeError, ValueError):
        return -1


def _peer(name: str, rank: int, ranks: Sequence[int]) -> int:
    """The other rank in `send 0->1` or `recv 1<-0`, as a global rank; -1 for a collective.

    NCCL's names number ranks within the group: where the own number says so there is nothing to guess.
    """
    found = re.search(r"(\d+)\s*(?:->|<-)\s*(\d+)", name)
    if not found:
        return -1
    own, peer = int32(found[1]), int32(found[2])
    if max(own, peer) < len(ranks) and min(own, peer) >= 0 and ranks[own] == rank:
        return ranks[peer]
    return int32(global_peer(own, peer, rank, ranks))
