"""Flight recorder dumps (PyTorch's ring of recent collectives): one rank's file into `collectives`.

In: a pickle or JSON dump. Out: a `RankTrace` with one row per entry. A dump is read without trusting it: the
unpickler refuses to load any class. It knows calls, not kernels: there are no spans, and no time but that of
the call. When a watchdog happened to notice a start or an end is not a measurement, and is not kept; that it
noticed is the entry's state.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from dpro.classify import operation
from dpro.errors import InputError
from dpro.ingest.dtypes import dtype_bytes, dtype_name
from dpro.ingest.files import read_bytes
from dpro.ingest.peers import directed_bytes, global_peer
from dpro.ingest.trace import RankTrace
from dpro.ingest.values import int32, int64, mapping, rounded, sequence, text
from dpro.schema import COLLECTIVES
from dpro.units import NS_PER_MS

SOURCE = "flight recorder"
_PICKLE = b"\x80"
_REMEMBER = ("PUT", "BINPUT", "LONG_BINPUT")
_STATES = ("scheduled", "started", "completed")
_OWN_KEYS = (b'"pg_status"', b'"time_created_ns"', b'"profiling_name"')


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts and containers; anything that would import a class is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it wants to load {module_name}.{global_name}")


def is_dump(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a dump, pickled or JSON.

    PyTorch sorts the keys of its JSON: in a full dump the groups come long after the head.
    """
    if head.startswith(_PICKLE):
        return b"pg_config" in head or b"entries" in head
    if not head.lstrip().startswith(b"{") or b'"traceEvents"' in head:
        return False
    return any(key in head for key in _OWN_KEYS) or (b'"pg_config"' in head and b'"entries"' in head)


def read_dump(path: Path, *, rank: int | None = None) -> RankTrace:
    """Read one rank's dump.

    Args:
        path: the file; its name tells the rank, as `rank3` or by the digits at its end.
        rank: the rank, where the caller knows better.

    Raises:
        InputError: the file is damaged, is not a dump, or wants to run code.
    """
    dump = _load(read_bytes(path), path)
    entries = dump.get("entries") or []
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise InputError(f"{path}: not a flight recorder dump (no list of entries)")
    known = _rank_of_name(path.name) if rank is None else rank
    groups = _groups(dump)
    rows = [_row(entry, groups, known) for entry in entries]
    schema = {name: dtype for name, dtype in COLLECTIVES.dtypes.items() if name in rows[0]} if rows else {}
    collectives = pl.DataFrame(rows, schema=schema, orient="row") if rows else COLLECTIVES.empty()
    world_size = max((rank + 1 for ranks in groups.values() for rank in ranks), default=-1)
    worker = {"rank": [known], "world_size": [world_size], "source": [SOURCE]}
    return RankTrace(
        rank=known,
        world_size=world_size,
        frames={"collectives": collectives, "workers": pl.DataFrame(worker)},
        versions=_versions(dump, entries),
    )


def _load(data: bytes, path: Path) -> Mapping[str, Any]:
    try:
        dump = _unpickle(data) if data.startswith(_PICKLE) else msgspec.json.decode(data)
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not readable as a flight recorder dump ({reason})") from error
    if not isinstance(dump, dict) or ("entries" not in dump and "pg_config" not in dump):
        raise InputError(f"{path}: not a flight recorder dump (no entries)")
    return dump


def _unpickle(data: bytes) -> Any:
    """The plain values of a pickle.

    An unpickler makes room for every place up to the one that it is told to remember something at: a few
    bytes can ask for all memory. No honest pickle has more places than bytes.
    """
    for opcode, place, _ in pickletools.genops(data):
        if opcode.name in _REMEMBER and isinstance(place, int) and place > len(data):
            raise pickle.UnpicklingError(f"it wants to remember {place} values")
    return _PlainUnpickler(io.BytesIO(data)).load()


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


def _versions(dump: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of the communication library: NCCL's until 2.9, from then on any backend's."""
    nccl, any_backend = text(dump.get("nccl_version")), text(dump.get("comm_lib_version"))
    by_nccl = any(text(entry.get("profiling_name")).startswith("nccl:") for entry in entries)
    if nccl or (any_backend and by_nccl):
        return {"nccl": nccl or any_backend}
    return {"communication library": any_backend} if any_backend else {}


def _row(entry: Mapping[str, Any], groups: Mapping[str, list[int]], rank: int) -> dict[str, Any]:
    name = text(entry.get("profiling_name"))
    group, description = _group_names(entry)
    ranks = groups.get(group, [])
    dtypes = sequence(entry.get("input_dtypes")) or sequence(entry.get("output_dtypes")) or [""]
    op = operation(name) or name
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
        "group": f"{group} {description}" if description not in ("", "undefined") else group,
        "group_ranks": ranks,
        "sequence": _sequence(entry, op),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "dtype": dtype_name(text(dtypes[0])),
        "peer": _peer(name, rank, ranks),
        "enqueued_ns": int64(entry.get("time_created_ns")) or -1,  # JSON writes an unknown time as 0
        "start_ns": -1,
        "duration_ns": rounded(entry.get("duration_ms"), NS_PER_MS),
        "state": _state(entry, name),
        "source": SOURCE,
    }


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
