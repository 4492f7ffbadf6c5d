"""Flight recorder dumps (PyTorch's ring of recent collectives): one rank's file into `collectives`.

In: a pickle or JSON dump. Out: a `RankTrace` with one row per entry. A dump is read without trusting it: the
unpickler refuses to load any class. It knows calls, not kernels: there are no spans, and times are as the
watchdog discovered them.
"""

from __future__ import annotations

import io
import math
import pickle
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
from dpro.schema import COLLECTIVES
from dpro.units import NS_PER_MS

SOURCE = "flight recorder"
_PICKLE = b"\x80"


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts and containers; anything that would import a class is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it wants to load {module_name}.{global_name}")


def is_dump(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a dump, pickled or JSON."""
    if head.startswith(_PICKLE):
        return b"pg_config" in head or b"entries" in head
    is_object = head.lstrip().startswith(b"{") and b'"traceEvents"' not in head
    return is_object and (b'"pg_status"' in head or (b'"pg_config"' in head and b'"entries"' in head))


def read_dump(path: Path, *, rank: int | None = None) -> RankTrace:
    """Read one rank's dump.

    Args:
        path: the file; the digits at the end of its name are the rank.
        rank: the rank, where the caller knows better.

    Raises:
        InputError: the file is damaged, is not a dump, or wants to run code.
    """
    dump = _load(read_bytes(path), path)
    entries = dump.get("entries") or []
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise InputError(f"{path}: not a flight recorder dump (no list of entries)")
    known = _rank_of_name(path) if rank is None else rank
    groups = _groups(dump)
    rows = [_row(entry, groups, known) for entry in entries]
    schema = {name: dtype for name, dtype in COLLECTIVES.dtypes.items() if name in rows[0]} if rows else {}
    collectives = pl.DataFrame(rows, schema=schema, orient="row") if rows else COLLECTIVES.empty()
    world_size = max((rank + 1 for ranks in groups.values() for rank in ranks), default=-1)
    worker = {"rank": [known], "world_size": [world_size], "source": [SOURCE]}
    nccl = dump.get("nccl_version")
    return RankTrace(
        rank=known,
        world_size=world_size,
        frames={"collectives": collectives, "workers": pl.DataFrame(worker)},
        versions={"nccl": str(nccl)} if nccl else {},
        warnings=[] if known >= 0 else [f"{path.name}: neither the dump nor its name tells the rank"],
    )


def _load(data: bytes, path: Path) -> dict[str, Any]:
    try:
        pickled = data.startswith(_PICKLE)
        dump = _PlainUnpickler(io.BytesIO(data)).load() if pickled else msgspec.json.decode(data)
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{path}: not readable as a flight recorder dump ({error})") from error
    if not isinstance(dump, dict) or ("entries" not in dump and "pg_config" not in dump):
        raise InputError(f"{path}: not a flight recorder dump (no entries)")
    return dump


def _rank_of_name(path: Path) -> int:
    found = re.search(r"(\d+)(?:\.\w+)*$", path.name)
    return int(found[1]) if found else -1


def _groups(dump: Mapping[str, Any]) -> dict[str, list[int]]:
    """Global ranks of each process group by name."""
    configs = dump.get("pg_config")
    groups = {}
    for name, config in configs.items() if isinstance(configs, dict) else ():
        ranks = config.get("ranks") if isinstance(config, dict) else None
        groups[str(name)] = [int(rank) for rank in re.findall(r"\d+", str(ranks))]
    return groups


def _row(entry: Mapping[str, Any], groups: Mapping[str, list[int]], rank: int) -> dict[str, Any]:
    name = str(entry.get("profiling_name", ""))
    group, description = _group_names(entry)
    ranks = groups.get(group, [])
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or [""]
    started = entry.get("time_discovered_started_ns") or -1
    op = operation(name) or name
    bytes_in, bytes_out = directed_bytes(
        op,
        _total_bytes(entry.get("input_sizes"), entry.get("input_dtypes")),
        _total_bytes(entry.get("output_sizes"), entry.get("output_dtypes")),
    )
    return {
        "collective_id": entry.get("record_id", -1),
        "rank": rank,
        "window": -1,
        "op": op,
        "group": f"{group} {description}" if description not in ("", "undefined") else group,
        "group_ranks": ranks,
        "sequence": entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", -1),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "dtype": dtype_name(str(dtypes[0])),
        "peer": _peer(name, rank, ranks),
        "enqueued_ns": entry.get("time_created_ns", -1),
        "start_ns": started,
        "duration_ns": _duration_ns(entry, started),
        "source": SOURCE,
    }


def _group_names(entry: Mapping[str, Any]) -> tuple[str, str]:
    names = entry.get("process_group")
    if isinstance(names, list | tuple) and names:
        return str(names[0]), str(names[1]) if len(names) > 1 else ""
    return str(entry.get("pg_name", "")), ""


def _total_bytes(sizes: Any, dtypes: Any) -> int:
    """Bytes of all tensors together, -1 where a size or an element type is not known."""
    try:
        widths = [dtype_bytes(dtype) for dtype in dtypes]
        counts = [math.prod(size) for size in sizes]
    except TypeError:
        return -1
    if not counts or len(widths) != len(counts) or min(widths) < 0:
        return -1
    return sum(width * count for width, count in zip(widths, counts, strict=True))


def _peer(name: str, rank: int, ranks: Sequence[int]) -> int:
    """The other rank in `send 0->1` or `recv 1<-0`, as a global rank; -1 for a collective."""
    found = re.search(r"(\d+)\s*(?:->|<-)\s*(\d+)", name)
    return global_peer(int(found[1]), int(found[2]), rank, ranks) if found else -1


def _duration_ns(entry: Mapping[str, Any], started: int) -> int:
    """As measured where timing was on, else between the watchdog's discoveries; -1 where no end is known."""
    if entry.get("duration_ms") is not None:
        return round(float(entry["duration_ms"]) * NS_PER_MS)
    completed = entry.get("time_discovered_completed_ns")
    return int(completed) - started if completed and started >= 0 else -1
