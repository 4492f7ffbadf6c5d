"""The latest calls of all processes of a job, as far as late ranks can be inferred from them.

In: what processes dump of their flight recorders for a watcher. Out: one table of numbers for the whole
job. Of a call only what it was, in which group, and when is kept. Reading costs most here, so dumps are
decoded into the few fields that are used, and no call is read twice except where dumps overlap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from dpro.classify import operation
from dpro.collectors.convert.calls import BACKENDS
from dpro.collectors.convert.stall import with_group_ranks
from dpro.collectors.inside.names import SHOWN
from dpro.detect.stragglers.own_time import MESSAGES, calls_of
from dpro.errors import InputError
from dpro.ingest.flight_recorder import read_dump
from dpro.ingest.flight_recorder.entries import label
from dpro.members import count_of, members_text
from dpro.schema import COLLECTIVES, conform
from dpro.schema.members import with_texts
from dpro.watch.tail import ProcessTail
from dpro.words import from_json

MIN_STEPS = 3  # number of steps whose calls hold a whole step of all ranks
SUFFIXES = (".json", ".pickle")
SCHEMA = {
    "rank": pl.Int32,
    "key": pl.String,
    "sequence": pl.Int64,
    "op": pl.String,
    "size": pl.Int64,
    "enqueued_ns": pl.Int64,
}
_NONE = -1  # the kind of a call from which nothing is inferred


class _Entry(msgspec.Struct):
    record_id: int = -1
    profiling_name: str = ""
    process_group: tuple[str, ...] = ()
    collective_seq_id: int = -1
    is_p2p: bool = False
    time_created_ns: int = 0


class _Config(msgspec.Struct):
    ranks: str = ""


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []
    pg_config: dict[str, _Config] = {}


_decode = msgspec.json.Decoder(_Dump, strict=False).decode


class CallKind(NamedTuple):
    """What calls have in common: the operation, the group (a short name), its ranks' number, -1 unknown."""

    op: str
    key: str
    size: int


class _Known:
    """How far one process's calls have been read."""

    def __init__(self) -> None:
        self.stamps: dict[str, tuple[int, int]] = {}
        self.last = dict.fromkeys(BACKENDS, -1)
        self.kinds: dict[tuple[str, tuple[str, ...]], int] = {}
        self.groups: dict[str, str] = {}


class CallTable:
    """The calls of a job.

    Attributes:
        frame: columns of `SCHEMA`, times on each host's own clock.
        messages: whether ranks also send messages, which calls of collectives do not show.
    """

    def __init__(self) -> None:
        """None is read yet."""
        self.frame = pl.DataFrame(schema=SCHEMA)
        self.messages = False
        self._known: dict[Path, _Known] = {}
        self._kinds: dict[CallKind, int] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._ranks: dict[str, str] = {}

    def read(self, tails: Iterable[ProcessTail]) -> bool:
        """Read what is new; return whether there was any call."""
        parts: list[tuple[int, np.ndarray]] = []
        others: list[pl.DataFrame] = []
        for tail in tails:
            known = self._known.setdefault(tail.process.folder, _Known())
            for backend in BACKENDS:
                path = _new_dump(tail, known, backend)
                for each in [] if path is None else [*_earlier_dumps(path, backend, tail, known), path]:
                    try:
                        parts.append((tail.process.rank, self._numbers(each, backend, tail, known)))
                    except (OSError, msgspec.DecodeError):
                        others.append(self._read_any(each, backend, tail, known))
        new = [each for each in (self._framed(parts), *others) if each.height]
        if new:
            self.frame = pl.concat([self.frame, *new])
        return bool(new)

    def forget_before(self, since: pl.DataFrame) -> None:
        """Keep only what each rank called from some time on.

        Args:
            since: `rank` and `since_ns`, on its own clock; calls of other ranks are forgotten.
        """
        kept = self.frame.join(since, on="rank").filter(pl.col("enqueued_ns") >= pl.col("since_ns"))
        self.frame = kept.drop("since_ns")

    def _numbers(self, path: Path, backend: str, tail: ProcessTail, known: _Known) -> np.ndarray:
        """Return [N, 3] int64: kind, sequence and time (ns) of new calls.

        Raises:
            msgspec.DecodeError: it is no JSON, or not as usual.
        """
        if path.suffix != ".json":
            raise msgspec.DecodeError("a pickle")
        dump, last = _decode(path.read_bytes()), known.last[backend]
        rows = []
        for entry in dump.entries:
            if entry.record_id <= last:
                continue
            named = entry.profiling_name, entry.process_group
            kind = known.kinds.get(named)
            if kind is None:
                kind = known.kinds[named] = self._kind(named, dump.pg_config, tail, known)
            if kind != _NONE and not entry.is_p2p and entry.time_created_ns > 0:
                rows.append((kind, entry.collective_seq_id, entry.time_created_ns))
        if dump.entries:
            known.last[backend] = max(last, dump.entries[-1].record_id)
        return np.array(rows, np.int64).reshape(-1, 3)

    def _kind(
        self,
        named: tuple[str, tuple[str, ...]],
        config: Mapping[str, _Config],
        tail: ProcessTail,
        known: _Known,
    ) -> int:
        """Return the number of a kind of call; `_NONE` where it shows no late ranks."""
        name, group = named
        op = operation(name) or name
        if op in MESSAGES:
            self.messages = True
        if op in MESSAGES or not group or not group[0]:
            return _NONE
        ranks = self._ranks_of(group[0], config, tail, known)
        size = count_of(ranks)
        if size == 1:
            return _NONE
        key = self._key(label(group[0], group[1] if len(group) > 1 else ""), ranks)
        return self._number(CallKind(op, key, size or -1))

    def _ranks_of(self, group: str, config: Mapping[str, _Config], tail: ProcessTail, known: _Known) -> str:
        """Return the ranks of a group as text, from the dump, or from the process's own file; else none."""
        listed = config[group].ranks if group in config else ""
        if listed:
            if listed not in self._ranks:
                digits = listed.strip("[]").replace(",", " ").split()
                self._ranks[listed] = members_text(sorted(int(each) for each in digits if each.isdigit()))
            return self._ranks[listed]
        if group not in known.groups:
            with suppress(OSError, ValueError):
                named = from_json((tail.process.folder / "groups.json").read_bytes())
                known.groups = {name: members_text(sorted(ranks)) for name, ranks in named.items()}
        return known.groups.get(group, "")

    def _key(self, group: str, ranks: str) -> str:
        """Return a short name of a group."""
        return self._keys.setdefault((group, ranks), f"{len(self._keys)}")

    def _number(self, kind: CallKind) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))

    def _framed(self, parts: list[tuple[int, np.ndarray]]) -> pl.DataFrame:
        """Return the calls of several processes as a table; the parts of a call are one."""
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return pl.DataFrame(schema=SCHEMA)
        rows = np.concatenate([part for _, part in parts])
        kinds = pl.DataFrame(list(self._kinds), schema=["op", "key", "size"], orient="row")
        frame = pl.DataFrame(
            {
                "rank": np.repeat([rank for rank, _ in parts], [len(part) for _, part in parts]),
                "sequence": rows[:, 1],
                "enqueued_ns": rows[:, 2],
            }
        ).with_columns(kinds[rows[:, 0]])
        frame = frame.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
        return frame.sort("enqueued_ns").unique(["rank", "key", "sequence"], keep="first")

    def _read_any(self, path: Path, backend: str, tail: ProcessTail, known: _Known) -> pl.DataFrame:
        """Return the new calls of any dump that can be read; none of one that is damaged or gone."""
        place, last = BACKENDS.index(backend), known.last[backend]
        try:
            if path.suffix == ".parquet":  # was converted before this look
                frame = with_texts(pl.read_parquet(path)).select(COLLECTIVES.columns)
            else:
                dump = read_dump(path, rank=tail.process.rank, after=last).frames[COLLECTIVES.name]
                frame = conform(COLLECTIVES, dump).with_columns(pl.col("collective_id") * 2 + place)
        except (OSError, InputError, pl.exceptions.PolarsError):
            return pl.DataFrame(schema=SCHEMA)
        new = frame.filter(pl.col("collective_id") // 2 > last)
        if new.is_empty():
            return pl.DataFrame(schema=SCHEMA)
        known.last[backend] = max(last, _largest(new["collective_id"]) // 2)
        new = with_group_ranks(new, tail.process.folder)
        self.messages = self.messages or bool(new["op"].is_in(MESSAGES).any())
        return self._of_table(new)

    def _of_table(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return rows of `collectives` with the columns of `SCHEMA`."""
        calls = calls_of(rows)
        names = {key: self._key(*key.rsplit("|", 1)) for key in calls["key"].unique()}
        short = pl.col("key").replace_strict(names, return_dtype=pl.String)
        return calls.with_columns(key=short).select(
            pl.col({"enqueued_ns": "time_ns"}.get(name, name)).cast(dtype).alias(name)
            for name, dtype in SCHEMA.items()
        )


def _new_dump(tail: ProcessTail, known: _Known, backend: str) -> Path | None:
    """Return the dump that a process made for a watcher, if it is new."""
    folder = str(tail.process.folder)
    for suffix in SUFFIXES:
        name = f"{folder}/{SHOWN}{backend}{suffix}"
        with suppress(OSError):
            status = os.stat(name)
            stamp = status.st_mtime_ns, status.st_ino
            is_new = known.stamps.get(name) != stamp
            known.stamps[name] = stamp
            return Path(name) if is_new else None
    return None


def _earlier_dumps(path: Path, backend: str, tail: ProcessTail, known: _Known) -> list[Path]:
    """Return dumps that were made for the record and begin before the one for a watcher, oldest first.

    A process that calls so often that its ring holds no whole step saves it again and again. These dumps are
    read only where they are needed, and only as many as hold a few steps.
    """
    with suppress(OSError, msgspec.DecodeError, IndexError):
        shown = _decode(path.read_bytes()).entries if path.suffix == ".json" else []
        wanted_ns = MIN_STEPS * int(tail.steps[-1, 2])
        if shown[0].record_id <= known.last[backend] + 1:
            return []
        if shown[-1].time_created_ns - shown[0].time_created_ns >= wanted_ns:
            return []
        found = {each: each.stat().st_mtime_ns for each in tail.process.folder.glob(f"flight-{backend}-*.*")}
        since_ns = shown[0].time_created_ns - wanted_ns
        wanted = [each for each in found if found[each] >= since_ns and ".tmp" not in each.name]
        return sorted(wanted, key=lambda each: found[each])
    return []


def _largest(numbers: pl.Series) -> Any:
    return numbers.max()
