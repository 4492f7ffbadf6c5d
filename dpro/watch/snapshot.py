"""What a job's processes say last of calls that communicate: what a search for a hang needs, in memory.

In: the folders they write to, and their latest records. Out: `Records`, as of a run. A dump that has not
changed is not read again; no file is written, and the ranks of groups, which are long lists in large jobs,
are kept once for each process and not with each call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dpro.collectors.calls import BACKENDS, with_group_ranks
from dpro.collectors.convert import Readers
from dpro.collectors.stall import message_rows, with_told_ranks
from dpro.detect.hang.records import Records, make_records
from dpro.errors import InputError
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, Table, conform
from dpro.watch.tail import Tail, clock_samples_of, steps_of, workers_of

_NO_RANKS = pl.lit([], dtype=COLLECTIVES.dtypes["group_ranks"])


@dataclass(frozen=True)
class _Said:
    """What one dump says: calls without the ranks of their groups where `groups` tells them, and groups."""

    stamp: tuple[int, int]
    calls: pl.DataFrame
    groups: pl.DataFrame


class Snapshot:
    """The latest dumps of a job's processes, each read once."""

    def __init__(self, readers: Readers) -> None:
        """None is read yet.

        Args:
            readers: how to read what PyTorch wrote.
        """
        self._readers = readers
        self._said: dict[Path, _Said] = {}

    def read(self, tails: Sequence[Tail]) -> int:
        """Read dumps that are new; how many there were."""
        before = {path: said.stamp for path, said in self._said.items()}
        found: dict[Path, _Said] = {}
        num_new = 0
        for tail in tails:
            for backend, path in latest_dumps(tail.process.folder).items():
                with suppress(OSError, InputError, pl.exceptions.PolarsError):
                    status = path.stat()
                    stamp = (
                        status.st_ino,
                        status.st_size,
                    )  # the time alone says that nothing changed until then
                    if before.get(path) != stamp:
                        self._said[path] = self._read(tail, backend, path, stamp)
                        num_new += 1
                    checked_ns = _checked_ns(tail.process.folder)
                    found[path] = _saved_at(self._said[path], max(status.st_mtime_ns, checked_ns))
        self._said = found
        return num_new

    def records(self, tails: Sequence[Tail]) -> Records:
        """What the latest dumps and records tell.

        Args:
            tails: the processes; their dumps have been read.
        """
        said = list(self._said.values())
        messages = [message_rows(t.process.folder, t.process.rank) for t in tails if _has_messages(t)]
        groups = _all(PROCESS_GROUPS, [each.groups for each in said])
        calls = _all(COLLECTIVES, [*(each.calls for each in said), *messages])
        return make_records(
            _with_ambiguous(calls, groups),
            groups,
            workers_of(tails),
            steps_of(tails),
            clock_samples_of(tails),
            max((int(tail.process.facts["world_size"]) for tail in tails), default=0),
        )

    def _read(self, tail: Tail, backend: str, path: Path, stamp: tuple[int, int]) -> _Said:
        dump = self._readers.dump(path, rank=tail.process.rank).frames
        identifier = pl.col("collective_id") * 2 + BACKENDS.index(backend)
        calls = conform(COLLECTIVES, dump[COLLECTIVES.name]).with_columns(collective_id=identifier)
        groups = conform(PROCESS_GROUPS, dump.get(PROCESS_GROUPS.name, PROCESS_GROUPS.empty()))
        groups = with_told_ranks(groups, tail.process.folder).with_columns(
            rank=pl.lit(tail.process.rank, pl.Int32)
        )
        told = groups.filter(pl.col("group_ranks").list.len() > 0)["group"]
        if calls["group"].is_in(told.implode()).all():
            return _Said(stamp, calls.with_columns(group_ranks=_NO_RANKS), groups)
        return _Said(stamp, with_group_ranks(calls, tail.process.folder / "groups.json"), groups)


def latest_dumps(folder: Path) -> dict[str, Path]:
    """The latest dump of each backend of a process that PyTorch wrote, by backend."""
    found = {}
    for backend in BACKENDS:
        dumps = [*folder.glob(f"flight-{backend}-*.*"), *folder.glob(f"calls-{backend}.*")]
        times = {}
        for dump in dumps:
            with suppress(OSError):  # converted meanwhile
                if dump.suffix in (".json", ".pickle"):
                    times[dump] = dump.stat().st_mtime_ns
        if times:
            found[backend] = max(times, key=lambda dump: times[dump])
    return found


def _saved_at(said: _Said, saved_ns: int) -> _Said:
    return _Said(said.stamp, said.calls, said.groups.with_columns(saved_ns=pl.lit(saved_ns, pl.Int64)))


def _checked_ns(folder: Path) -> int:
    """When a process last saw that nothing had changed since its dump; -1 for never."""
    with suppress(OSError, ValueError):
        return int((folder / "checked").read_text())
    return -1


def _has_messages(tail: Tail) -> bool:
    with suppress(OSError, ValueError):
        stall: Mapping[str, object] = json.loads((tail.process.folder / "stall.json").read_bytes())
        return bool(stall.get("messages"))
    return False


def _all(table: Table, frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    held = [conform(table, each) for each in frames if each.height]
    return pl.concat(held) if held else table.empty()


def _with_ambiguous(calls: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Add the ranks of groups whose name alone does not tell them: several have it."""
    told = groups.filter(pl.col("group_ranks").list.len() > 0)
    sorts = told.unique(["group", "group_ranks"])["group"]
    several = sorts.filter(sorts.is_duplicated()).unique()
    if several.is_empty():
        return calls
    known = told.filter(pl.col("group").is_in(several.implode()))
    known = known.select("rank", "group", told="group_ranks").unique(["rank", "group"], keep="last")
    joined = calls.join(known, on=["rank", "group"], how="left", maintain_order="left")
    given = pl.when(pl.col("group_ranks").list.len() > 0).then("group_ranks").otherwise(pl.col("told"))
    return joined.with_columns(group_ranks=given.fill_null(_NO_RANKS)).drop("told")
