"""Flight recorder dumps (PyTorch's ring of recent collectives): one rank's file into tables.

In: a pickle or JSON dump. Out: a `RankTrace` with one row of `collectives` per entry, and one row of
`process_groups` per group. A dump is read without trusting it: the unpickler refuses to load any class. It
knows calls, not kernels: there are no spans, and no time but that of the call. When a watchdog happened to
notice a start or an end is not a measurement, and is not kept; that it noticed is the entry's state.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import polars as pl

from dpro.classify import operation
from dpro.errors import InputError
from dpro.ingest import plain_pickle
from dpro.ingest.dtypes import dtype_bytes, dtype_name
from dpro.ingest.files import read_bytes
from dpro.ingest.peers import directed_bytes, global_peer
from dpro.ingest.trace import RankTrace
from dpro.ingest.values import int32, int64, mapping, rounded, sequence, text
from dpro.schema import COLLECTIVES, PROCESS_GROUPS
from dpro.units import NS_PER_MS

SOURCE = "flight recorder"
_PICKLE = b"\x80"
_COALESCED = re.compile(r":\w*coalesced$")  # the end of a coalesced call
_STATES = ("scheduled", "started", "completed")
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
        path: the file; its name tells the rank, as `rank3` or by the digits at its end.
        rank: the rank, where the caller knows better.
        after: entries numbered up to this are left out.

    Raises:
        InputError: the file is damaged, is not a dump, or wants to run code.
    """
    dump = _load(read_bytes(path), path)
    entries = dump.get("entries") or []
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise InputError(f"{path}: not a flight recorder dump (no list of entries)")
    known = _rank_of_name(path.name) if rank is None else rank
    groups = _groups(dump)
    whole = _coalesced(entries, mapping(dump.get("pg_status")))
    new = entries if after < 0 else [entry for entry in entries if int64(entry.get("record_id")) > after]
    rows = [_row(entry, groups, known, whole) for entry in new]
    collectives = _frame(rows, groups)
    said = _group_rows(dump, entries, groups, known, path.stat().st_mtime_ns)
    world_size = max((rank + 1 for ranks in groups.values() for rank in ranks), default=-1)
    worker = {"rank": [known], "world_size": [world_size], "source": [SOURCE]}
    return RankTrace(
        rank=known,
        world_size=world_size,
        frames={"collectives": collectives, "process_groups": said, "workers": pl.DataFrame(worker)},
        versions=_versions(dump, entries),
    )


def _frame(rows: Sequence[dict[str, Any]], groups: Mapping[str, list[int]]) -> pl.DataFrame:
    """Rows of `collectives`; the ranks of a group, which are many, are told once and joined."""
    if not rows:
        return COLLECTIVES.empty()
    columns = {
        name: pl.Series(name, [row[name] for row in rows], dtype=COLLECTIVES.dtypes[name])
        for name in rows[0]
        if name in COLLECTIVES.dtypes
    }
    names = [row["name_of_group"] for row in rows]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    ranks = pl.Series([groups.get(name, []) for name in places], dtype=COLLECTIVES.dtypes["group_ranks"])
    told = ranks.gather([places[name] for name in names])
    return pl.DataFrame(columns).with_columns(group_ranks=told)


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


def _groups(dump: Mapping[str, Any]) -> dict[str, list[int]]:
    """Global ranks of each process group by name; the ids that entries also carry differ between ranks."""
    groups = {}
    for name, config in mapping(dump.get("pg_config")).items():
        listed = mapping(config).get("ranks")  # a text such as "[0, 1]"
        ranks = [int32(rank) for rank in re.findall(r"\d+", text(listed)) or sequence(listed)]
        groups[text(name)] = ranks if all(rank >= 0 for rank in ranks) else []
    return groups


def _group_rows(
    dump: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    groups: Mapping[str, list[int]],
    rank: int,
    saved_ns: int,
) -> pl.DataFrame:
    """What the dump says of each group as a whole; one row, for when it was saved, where it knows none."""
    described = {
        name: text(mapping(config).get("desc")) for name, config in mapping(dump.get("pg_config")).items()
    }
    status = {str(number): mapping(facts) for number, facts in mapping(dump.get("pg_status")).items()}
    names = _names_of_ids(entries, described, list(status))
    unnamed = [number for number in status if number not in names]
    rows = [
        {
            "rank": rank,
            "group": _label(name, description),
            "group_ranks": groups.get(name, []),
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
    ] or [{"rank": rank, "group": "", "group_ranks": [], "saved_ns": saved_ns, "source": SOURCE}]
    return pl.DataFrame(rows, schema={name: PROCESS_GROUPS.dtypes[name] for name in rows[0]}, orient="row")


def _names_of_ids(
    entries: Sequence[Mapping[str, Any]], described: Mapping[str, str], numbers: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Name and description of the groups by the process's own ids, which is all that the status goes by.

    Entries have both. A process makes its groups in the order of their names, where those are numbers: if
    there are as many names as ids, they pair up in order, unless an entry knows better.
    """
    told = {text(str(entry.get("pg_id"))): _group_names(entry) for entry in entries if "pg_id" in entry}
    if len(described) != len(numbers) or not all(each.isdecimal() for each in (*described, *numbers)):
        return told
    paired = dict(zip(sorted(numbers, key=int), sorted(described, key=int), strict=True))
    if any(paired.get(number, name) != name for number, (name, _) in told.items()):
        return told
    return {number: (name, described[name]) for number, name in paired.items()}


def _versions(dump: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of the communication library: NCCL's until 2.9, from then on any backend's."""
    nccl, any_backend = text(dump.get("nccl_version")), text(dump.get("comm_lib_version"))
    by_nccl = any(text(entry.get("profiling_name")).startswith("nccl:") for entry in entries)
    if nccl or (any_backend and by_nccl):
        return {"nccl": nccl or any_backend}
    return {"communication library": any_backend} if any_backend else {}


def _row(
    entry: Mapping[str, Any],
    groups: Mapping[str, list[int]],
    rank: int,
    coalesced: Mapping[_Call, Mapping[str, Any]],
) -> dict[str, Any]:
    name = text(entry.get("profiling_name"))
    group, description = _group_names(entry)
    ranks = groups.get(group, [])
    dtypes = sequence(entry.get("input_dtypes")) or sequence(entry.get("output_dtypes")) or [""]
    op = _op_of(name)
    bytes_in, bytes_out = directed_bytes(
        op,
        _total_bytes(entry.get("input_sizes"), entry.get("input_dtypes")),
        _total_bytes(entry.get("output_sizes"), entry.get("output_dtypes")),
    )
    return {
        "collective_id": int64(entry.get("record_id")),
        "rank": rank,
        "window": -1,
        "op": op,
        "group": _label(group, description),
        "name_of_group": group,
        "sequence": _sequence(entry, op),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "dtype": dtype_name(text(dtypes[0])),
        "peer": _peer(name, rank, ranks),
        "enqueued_ns": int64(entry.get("time_created_ns")) or -1,  # JSON writes an unknown time as 0
        "start_ns": -1,
        "duration_ns": rounded(entry.get("duration_ms"), NS_PER_MS),
        "state": _state(coalesced.get(_call(entry), entry), name),
        "source": SOURCE,
    }


def _label(group: str, description: str) -> str:
    return f"{group} {description}" if description not in ("", "undefined") else group


_Call: TypeAlias = tuple[str, bool, int]


def _call(entry: Mapping[str, Any]) -> _Call:
    """What the parts of one coalesced call have in common."""
    is_p2p = entry.get("is_p2p") is True
    number = int64(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    return text(str(entry.get("pg_id"))), is_p2p, number


def _coalesced(
    entries: Sequence[Mapping[str, Any]], status: Mapping[str, Any]
) -> dict[_Call, Mapping[str, Any]]:
    """What stands for the parts of each coalesced call: they are not kept up to date, the end of it is.

    A dump of active entries only leaves out the end when it is finished, but not the parts. Then several
    parts of one number tell it, or that the group as a whole is further.
    """
    finished = {"state": "completed", "retired": True}
    messages = [entry for entry in entries if entry.get("is_p2p") is True]
    counts = Counter(map(_call, messages))
    last = {text(str(entry.get("pg_id"))): entry for entry in messages}
    done = {group: _messages_done(mapping(status.get(group)), entry) for group, entry in last.items()}
    told = {call: finished for call, count in counts.items() if count > 1 or call[2] <= done[call[0]]}
    ends = {_call(entry): entry for entry in entries if _COALESCED.search(text(entry.get("profiling_name")))}
    return told | ends


def _messages_done(status: Mapping[str, Any], last: Mapping[str, Any]) -> int:
    """Number of a group's last finished message; -1 where its status may be about collectives.

    Both are counted, and the status does not tell which it means: it is about messages if the last call was
    one, and what is finished is further than collectives ever came.
    """
    enqueued, completed = (
        int64(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "completed")
    )
    collectives, messages = (int64(last.get(f"{what}_seq_id", -1)) for what in ("collective", "p2p"))
    return completed if enqueued == messages and collectives < completed <= enqueued else -1


def _group_names(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Name and description; the first dumps had the name alone, older ones `pg_name`."""
    recorded = entry.get("process_group", entry.get("pg_name"))
    names = [text(name) for name in sequence(recorded)] or [text(recorded)]
    return names[0], names[1] if len(names) > 1 else ""


def _sequence(entry: Mapping[str, Any], op: str) -> int:
    """Sends and receives have a count of their own; dumps before 2.1 had one count for everything."""
    is_p2p = entry.get("is_p2p", op in ("send", "recv"))
    return int64(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id", entry.get("seq_id")))


def _state(entry: Mapping[str, Any], name: str) -> str:
    """How far an entry got.

    Gloo never moves an entry on from `scheduled` but retires it when its work has ended. NCCL also retires
    entries that were aborted, so there only the state itself counts.
    """
    state = text(entry.get("state"))
    if name.startswith("gloo:") and entry.get("retired") is True:
        return "completed"
    return state if state in _STATES else ""


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
