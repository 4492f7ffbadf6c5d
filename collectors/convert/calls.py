"""Every call that a process's flight recorder knows, once: from overlapping dumps to rows.

In: the dumps a process has left so far. Out: entries for windows to be joined with and, once no window can
want them any more, parts of `collectives`. A dump is read once and kept as Parquet, which is some thirty
times smaller, until all its entries are in a part. Doing it again after a crash gives the same parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl

from dpro.collectors.convert.stall import (
    keep_groups,
    with_group_ranks,
    with_stalled_states,
    without_evicted_states,
)
from dpro.collectors.inside.names import STALL
from dpro.folders import written_whole
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, conform
from dpro.schema.members import with_texts
from dpro.store import part_files, write_part

BACKENDS = ("fr", "nccl")  # their entries are numbered apart: ids of the one are even, of the other odd
LOST = "collective calls lost between dumps of the flight recorder"
_STATE = "calls.json"


def keep_dumps(folder: Path, read: Callable[[Path], Mapping[str, pl.DataFrame]]) -> None:
    """Read the dumps that have come since.

    Args:
        folder: where the process writes.
    """
    for dump in sorted([*folder.glob("flight-*.json"), *folder.glob("flight-*.pickle")]):
        status = dump.stat()
        _, backend, _ = dump.stem.split("-")
        identifier = pl.col("collective_id") * 2 + BACKENDS.index(backend)
        tables = read(dump)
        keep_groups(folder, backend, tables.get(PROCESS_GROUPS.name))
        rows = conform(COLLECTIVES, tables[COLLECTIVES.name]).with_columns(
            collective_id=identifier, saved_ns=pl.lit(status.st_mtime_ns)
        )
        with written_whole(folder, f"{dump.stem}.parquet", time_ns=status.st_mtime_ns) as file:
            rows.write_parquet(file)
        dump.unlink()


def latest_dump_ns(folder: Path) -> int:
    """When the latest dump was made; -1 where there is none."""
    return max((path.stat().st_mtime_ns for path in folder.glob("flight-*.*")), default=-1)


def entries(folder: Path) -> pl.DataFrame:
    """Each entry that is in no part yet, as it was last seen, in the order of the ids."""
    frames = [frame for path in _kept(folder) if (frame := with_texts(pl.read_parquet(path))).height]
    if not frames:
        return COLLECTIVES.empty()
    found = without_evicted_states(pl.concat(frames, how="vertical")).sort("collective_id", "saved_ns")
    found = found.unique("collective_id", keep="last", maintain_order=True).drop("saved_ns")
    passed, _ = _state(folder)
    return with_group_ranks(found.filter(~_below(passed)), folder)


def latest_stall(folder: Path, since_ns: int) -> pl.DataFrame:
    """Return the entries as saved in the last stall of the process; none if a step ended after it.

    Args:
        folder: where the process writes.
    """
    paths = [path for path in _kept(folder) if path.stem.endswith(f"-{STALL}")]
    frames = [with_texts(pl.read_parquet(path)) for path in paths if path.stat().st_mtime_ns > since_ns]
    return pl.concat([frame for frame in frames if frame.height] or [COLLECTIVES.empty()], how="diagonal")


def write_calls(
    run: Path, part: str, folder: Path, until_ns: int | None, stalls: pl.DataFrame | None = None
) -> None:
    """Write the entries that no window saw run, and forget their dumps.

    Args:
        part: beginning of the names of the process's parts.
        folder: where the process writes.
        until_ns: entries from then on are left for windows to come, as are those of each latest dump, whose
            state may still change; None where nothing comes any more.
        stalls: the calls in which a process that failed was stalled, as from `latest_stall`.
    """
    waiting = entries(folder)
    if stalls is not None and stalls.height:
        waiting = with_stalled_states(waiting, stalls)
    passed, lost = _state(folder)
    bounds = [_bound(folder, waiting, number, passed[number], until_ns) for number in range(len(BACKENDS))]
    if bounds == passed:
        return
    ready = waiting.filter(_below(bounds))
    lost += sum(bound - start for bound, start in zip(bounds, passed)) // 2 - ready.height
    seen = _seen_in_windows(run, part, min(passed))
    outside = ready.join(seen, on="collective_id", how="anti", maintain_order="left")
    outside = outside.with_columns(window=pl.lit(-1, pl.Int32))
    write_part(run, COLLECTIVES, f"{part}-calls-{sum(passed):015d}", outside)
    _write_state(folder, bounds, lost)
    for path in _kept(folder):
        if pl.read_parquet(path, columns=["collective_id"]).filter(~_below(bounds)).is_empty():
            path.unlink()


def lost_calls(folder: Path) -> dict[str, int]:
    """How many calls no dump has, by reason, as far as parts are written."""
    _, lost = _state(folder)
    return {LOST: lost} if lost else {}


def _kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("flight-*.parquet"))


def _bound(folder: Path, waiting: pl.DataFrame, number: int, passed: int, until_ns: int | None) -> int:
    """The id from which on entries of one backend have to wait."""
    mine = waiting.filter(pl.col("collective_id") % 2 == number)
    if until_ns is None:
        last = mine["collective_id"].max()
        return passed if last is None else int(str(last)) + 2
    dumps = [path for path in _kept(folder) if path.name.startswith(f"flight-{BACKENDS[number]}-")]
    if not dumps or mine.is_empty():
        return passed
    latest = pl.read_parquet(max(dumps, key=lambda path: path.stat().st_mtime_ns), columns=["collective_id"])
    wanted = mine.filter(pl.col("enqueued_ns") >= until_ns)["collective_id"]
    firsts = [first for first in (latest["collective_id"].min(), wanted.min()) if first is not None]
    return max(passed, min((int(str(first)) for first in firsts), default=passed))


def _below(bounds: list[int]) -> pl.Expr:
    """Whether an entry comes before the bound of its backend."""
    identifier = pl.col("collective_id")
    return pl.when(identifier % 2 == 0).then(identifier < bounds[0]).otherwise(identifier < bounds[1])


def _seen_in_windows(run: Path, part: str, least: int) -> pl.DataFrame:
    """Ids of the entries that windows have met."""
    frames = [
        pl.scan_parquet(path).select("collective_id").filter(pl.col("collective_id") >= least).collect()
        for path in part_files(run, COLLECTIVES, f"{part}-batch-")
    ]
    return pl.concat(frames) if frames else pl.DataFrame(schema={"collective_id": pl.Int64})


def _state(folder: Path) -> tuple[list[int], int]:
    """The ids from which on entries are in no part, by backend, and how many before them were lost."""
    path = folder / _STATE
    if not path.is_file():
        return [0, 1], 0
    state = json.loads(path.read_text())
    return state["passed"], state["lost"]


def _write_state(folder: Path, passed: list[int], lost: int) -> None:
    with written_whole(folder, _STATE) as file:
        file.write(json.dumps({"passed": passed, "lost": lost}).encode())
