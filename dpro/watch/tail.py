"""What one process of a job has recorded since the last look.

In: its folder, which it writes to. Out: its latest records and calls, in memory and bounded. Nothing is read
twice but dumps of the flight recorder, which overlap; of them only entries that are new are kept.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from dpro.collectors.calls import BACKENDS, with_group_ranks
from dpro.collectors.convert import Process, frames_of
from dpro.collectors.inside import records
from dpro.errors import InputError
from dpro.ingest.flight_recorder import read_dump
from dpro.schema import COLLECTIVES, conform

RECENT = 8000  # records that are remembered: some 2,000 steps
RARE = (records.ANCHOR, records.PEER)  # are wanted from the beginning on
CALLS = 4000  # that are remembered
DUMPS = ("flight-*.json", "flight-*.pickle", "flight-*.parquet", "calls-*.json", "calls-*.pickle")
_RECORD = struct.Struct("<5q")
BLOCK = 1000 * _RECORD.size  # that are read at a time


class Tail:
    """The latest of one process.

    Attributes:
        process: whose.
        num_updates: signs of steps' ends so far: the job moves while they grow.
        last_update_ns: when the latest was, on that host's clock; -1 before the first.
        collectives: rows of that table, the latest calls.
    """

    def __init__(self, process: Process) -> None:
        """Nothing is read yet."""
        self.process = process
        self.num_updates = 0
        self.last_update_ns = -1
        self.collectives = COLLECTIVES.empty()
        self._offset, self._hole = 0, -1
        self._rare: list[records.Record] = []
        self._recent: deque[records.Record] = deque(maxlen=RECENT)
        self._stamps: dict[Path, int] = {}
        self._last = dict.fromkeys(BACKENDS, -1)

    @property
    def recorded(self) -> list[records.Record]:
        """Its latest records, and the rare ones from the beginning on."""
        return [*self._rare, *self._recent]

    def read_records(self) -> bool:
        """Read on in its records; whether there were any."""
        new = list(self._new_records())
        for record in new:
            (self._rare if record.kind in RARE else self._recent).append(record)
            if record.kind == records.UPDATE:
                self.num_updates += 1
                self.last_update_ns = record.c
        return bool(new)

    def read_calls(self) -> bool:
        """Read the entries of its dumps that are new; whether there were any."""
        found = [frame for path in self._new_dumps() if (frame := self._entries(path)).height]
        if found:
            self.collectives = pl.concat([self.collectives, *found]).tail(CALLS)
        return bool(found)

    def frames(self) -> Mapping[str, pl.DataFrame]:
        """Its latest `steps`, `counters` and `clock_samples`, and its row of `workers`."""
        return frames_of(self.process, self.recorded, None)

    def _new_records(self) -> Iterator[records.Record]:
        """Records up to the first place that nobody has written yet.

        Threads write side by side: a place that is still empty while later ones are not is waited for once.
        """
        with suppress(OSError), (self.process.folder / "records.bin").open("rb") as file:
            file.seek(self._offset)
            while found := _written(file.read(BLOCK)):
                for each in found:
                    if not each.kind and self._hole != self._offset:
                        self._hole = self._offset
                        return
                    self._offset += _RECORD.size
                    if each.kind:
                        yield each
                file.seek(self._offset)

    def _new_dumps(self) -> list[Path]:
        """Dumps that were not there at the last look, oldest first."""
        stamps: dict[Path, int] = {}
        for pattern in DUMPS:
            for path in self.process.folder.glob(pattern):
                with suppress(OSError):  # converted meanwhile
                    stamps[path] = path.stat().st_mtime_ns
        new = [path for path, stamp in stamps.items() if self._stamps.get(path) != stamp]
        self._stamps = stamps
        return sorted(new, key=lambda path: stamps[path])

    def _entries(self, path: Path) -> pl.DataFrame:
        """New entries of one dump, numbered as the tables number them; none where it is damaged or gone."""
        backend = path.stem.split("-")[1]
        place, last = BACKENDS.index(backend), self._last[backend]
        try:
            frame = self._frame(path, last, place)
        except (OSError, InputError, pl.exceptions.PolarsError):
            return COLLECTIVES.empty()
        new = frame.filter(pl.col("collective_id") // 2 > last)
        self._last[backend] = max(last, int(_largest(new["collective_id"]) // 2)) if new.height else last
        return with_group_ranks(new, self.process.folder / "groups.json")

    def _frame(self, path: Path, last: int, place: int) -> pl.DataFrame:
        if path.suffix == ".parquet":  # was converted before this look
            return pl.read_parquet(path).select(COLLECTIVES.columns)
        dump = read_dump(path, rank=self.process.rank, after=last).frames[COLLECTIVES.name]
        return conform(COLLECTIVES, dump).with_columns(pl.col("collective_id") * 2 + place)


def _written(content: bytes) -> list[records.Record]:
    """Records up to the last that is written; none where all are empty."""
    whole = len(content) - len(content) % _RECORD.size
    found = [records.Record(*values) for values in _RECORD.iter_unpack(content[:whole])]
    return found[: max((place for place, each in enumerate(found, 1) if each.kind), default=0)]


def _largest(numbers: pl.Series) -> Any:
    return numbers.max()
