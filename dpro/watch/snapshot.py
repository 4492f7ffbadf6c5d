"""What a job's processes say last of calls that communicate: what a search for a hang needs, in memory.

In: the folders they write to, and their latest records. Out: `Records`, as of a run. A dump that has not
changed is not read again; no file is written, and the ranks of groups, which are long lists in large jobs,
are kept once for each process and not with each call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.collectors.convert.calls import BACKENDS, with_group_ranks
from dpro.collectors.convert.stall import message_rows, with_told_ranks
from dpro.detect.hang.records import Records, make_records
from dpro.errors import InputError
from dpro.ingest.flight_recorder import read_calls
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, conform
from dpro.watch.tail import Tail, heartbeats_of, steps_of, workers_of

_NO_RANKS = pl.lit([], dtype=COLLECTIVES.dtypes["group_ranks"])


@dataclass(frozen=True)
class _Said:
    """What one dump says: calls without the ranks of their groups where `groups` tells them, and groups."""

    stamp: tuple[int, int]
    place: int  # of the backend
    calls: pl.DataFrame
    groups: pl.DataFrame


class Snapshot:
    """The latest dumps of a job's processes, each read once."""

    def __init__(self) -> None:
        """None is read yet."""
        self._said: dict[Path, _Said] = {}
        self._saved_ns: dict[Path, int] = {}
        self._before: dict[Path, int] = {}

    def read(self, tails: Sequence[Tail]) -> None:
        """Read dumps that are new."""
        before, self._said, self._saved_ns = self._said, {}, {}
        for tail in tails:
            for backend, path in latest_dumps(tail.process.folder).items():
                with suppress(OSError, InputError, pl.exceptions.PolarsError):
                    status = path.stat()
                    stamp = (
                        status.st_ino,
                        status.st_size,
                    )  # the time alone says that nothing changed until then
                    known = before.get(path)
                    if known is None or known.stamp != stamp:
                        known = self._read(tail, backend, path, stamp)
                    self._said[path] = known
                    self._saved_ns[path] = max(status.st_mtime_ns, _checked_ns(tail.process.folder))

    def begin(self) -> None:
        """Processes are asked now: what they have saved so far is no answer."""
        self._before = self._saved_ns

    def answered(self) -> set[Path]:
        """Folders of the processes that have saved their calls since they were asked."""
        return {path.parent for path, at_ns in self._saved_ns.items() if self._before.get(path) != at_ns}

    def records(self, tails: Sequence[Tail]) -> Records:
        """What the latest dumps and records tell.

        Args:
            tails: the processes; their dumps have been read.
        """
        messages = [message_rows(t.process.folder, t.process.rank) for t in tails if _has_messages(t)]
        groups = self._groups()
        calls = pl.concat([self._calls(), *(conform(COLLECTIVES, each) for each in messages)])
        return make_records(
            _with_ambiguous(calls, groups),
            groups,
            workers_of(tails),
            steps_of(tails),
            heartbeats_of(tails),
            max((int(tail.process.facts["world_size"]) for tail in tails), default=0),
        )

    def _read(self, tail: Tail, backend: str, path: Path, stamp: tuple[int, int]) -> _Said:
        frames = read_calls(path, rank=tail.process.rank).frames
        calls = frames[COLLECTIVES.name]
        groups = frames.get(PROCESS_GROUPS.name, PROCESS_GROUPS.empty())
        if not (groups["group_ranks"].list.len() > 0).all():
            groups = with_told_ranks(conform(PROCESS_GROUPS, groups), tail.process.folder)
        told = groups.filter(pl.col("group_ranks").list.len() > 0)["group"]
        if calls["group"].unique().is_in(told.implode()).all():
            calls = calls.drop("group_ranks", strict=False)
        else:
            calls = with_group_ranks(conform(COLLECTIVES, calls), tail.process.folder / "groups.json")
        return _Said(stamp, BACKENDS.index(backend), calls, groups)

    def _calls(self) -> pl.DataFrame:
        held = [said for said in self._said.values() if said.calls.height]
        if not held:
            return COLLECTIVES.empty()
        rows = pl.concat([said.calls for said in held], how="diagonal_relaxed")
        place = np.repeat([said.place for said in held], [said.calls.height for said in held])
        return conform(COLLECTIVES, rows.with_columns(collective_id=pl.col("collective_id") * 2 + place))

    def _groups(self) -> pl.DataFrame:
        held = [(said, self._saved_ns[path]) for path, said in self._said.items() if said.groups.height]
        if not held:
            return PROCESS_GROUPS.empty()
        rows = pl.concat([said.groups for said, _ in held], how="diagonal_relaxed")
        saved_ns = np.repeat([at_ns for _, at_ns in held], [said.groups.height for said, _ in held])
        return conform(PROCESS_GROUPS, rows.with_columns(saved_ns=pl.Series(saved_ns)))


def latest_dumps(folder: Path) -> dict[str, Path]:
    """The latest dump of each backend of a process that PyTorch wrote, by backend."""
    found: dict[str, tuple[int, Path]] = {}
    with suppress(OSError), os.scandir(folder) as files:
        for file in files:
            what, _, rest = file.name.partition("-")
            if what not in ("flight", "calls") or not rest.endswith((".json", ".pickle")):
                continue
            backend = rest.partition(".")[0].partition("-")[0]
            with suppress(OSError):  # converted meanwhile
                dump = file.stat().st_mtime_ns, Path(file.path)
                found[backend] = max(found.get(backend, dump), dump)
    return {backend: found[backend][1] for backend in BACKENDS if backend in found}


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
