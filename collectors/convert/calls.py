"""Collective calls and messages of a process, and where the process stalled.

Reads the flight recorder dumps that a process has left so far, `stall.json` and `messagesNNNN.json`. Returns
entries to join with windows and, once no window needs them any more, writes them as parts of `collectives`,
each call once; also returns rows of messages, which the flight recorder leaves out, rows of `process_groups`,
and the stack of the main thread. A dump is read once and kept as Parquet, about thirty times smaller, until
all its entries are in a part. Repeating the conversion after a crash gives the same parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpro.collectors.convert.recorded import saved
from dpro.collectors.inside.files import STALL
from dpro.folders import written_whole
from dpro.members import members_text
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, RECORDER, conform
from dpro.schema.members import with_texts
from dpro.store import part_files, write_part

BACKENDS = ("fr", "nccl")  # ids of entries are even for the first backend, odd for the second
LOST = "collective calls lost between dumps of the flight recorder"
_STATE = "calls.json"


def keep_dumps(folder: Path, read: Callable[[Path], Mapping[str, pl.DataFrame]]) -> None:
    """Read the dumps that have arrived since the last call and keep their rows as Parquet."""
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
    """Return when the latest dump was written, ns since 1970; -1 without dumps."""
    return max((path.stat().st_mtime_ns for path in folder.glob("flight-*.*")), default=-1)


def entries(folder: Path) -> pl.DataFrame:
    """Return the entries that are in no part yet, each in its latest state, ordered by id."""
    frames = [frame for path in _kept(folder) if (frame := with_texts(pl.read_parquet(path))).height]
    if not frames:
        return COLLECTIVES.empty()
    rows = without_evicted_states(pl.concat(frames, how="vertical")).sort("collective_id", "saved_ns")
    rows = rows.unique("collective_id", keep="last", maintain_order=True).drop("saved_ns")
    passed, _ = _state(folder)
    return with_group_ranks(rows.filter(~_is_below_bound(passed)), folder)


def latest_stall(folder: Path, since_ns: int) -> pl.DataFrame:
    """Return the entries as saved in the last stall of the process; none if a step ended after it."""
    paths = [path for path in _kept(folder) if path.stem.endswith(f"-{STALL}")]
    frames = [with_texts(pl.read_parquet(path)) for path in paths if path.stat().st_mtime_ns > since_ns]
    return pl.concat([frame for frame in frames if frame.height] or [COLLECTIVES.empty()], how="diagonal")


def write_calls(
    run: Path, part: str, folder: Path, until_ns: int | None, stalls: pl.DataFrame | None = None
) -> None:
    """Write the entries that ran in no window, and delete dumps without further entries.

    Args:
        part: prefix of the part names of the process.
        until_ns: entries enqueued from then on are left for later windows, as are those in each backend's
            latest dump, whose state may still change; None after the process has ended.
        stalls: the calls in which a failed process was stalled, from `latest_stall`.
    """
    waiting = entries(folder)
    if stalls is not None and stalls.height:
        waiting = with_stalled_states(waiting, stalls)
    passed, lost = _state(folder)
    bounds = [_bound(folder, waiting, number, passed[number], until_ns) for number in range(len(BACKENDS))]
    if bounds == passed:
        return
    ready = waiting.filter(_is_below_bound(bounds))
    lost += sum(bound - start for bound, start in zip(bounds, passed)) // 2 - ready.height
    met = pl.col("collective_id") >= min(passed)
    frames = [
        pl.scan_parquet(path).select("collective_id").filter(met).collect()
        for path in part_files(run, COLLECTIVES, f"{part}-batch-")
    ]
    seen = pl.concat(frames) if frames else pl.DataFrame(schema={"collective_id": pl.Int64})
    outside = ready.join(seen, on="collective_id", how="anti", maintain_order="left")
    outside = outside.with_columns(window=pl.lit(-1, pl.Int32))
    write_part(run, COLLECTIVES, f"{part}-calls-{sum(passed):015d}", outside)
    with written_whole(folder, _STATE) as file:
        file.write(json.dumps({"passed": bounds, "lost": lost}).encode())
    for path in _kept(folder):
        if pl.read_parquet(path, columns=["collective_id"]).filter(~_is_below_bound(bounds)).is_empty():
            path.unlink()


def lost_calls(folder: Path) -> dict[str, int]:
    """Return the number of calls missing from all dumps, by reason; counts only up to the written parts."""
    _, lost = _state(folder)
    return {LOST: lost} if lost else {}


def _kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("flight-*.parquet"))


def _bound(folder: Path, waiting: pl.DataFrame, number: int, passed: int, until_ns: int | None) -> int:
    """Return the id at which the entries of one backend that must still wait begin."""
    of_backend = waiting.filter(pl.col("collective_id") % 2 == number)
    if until_ns is None:
        last = of_backend["collective_id"].max()
        return passed if last is None else int(str(last)) + 2
    dumps = [path for path in _kept(folder) if path.name.startswith(f"flight-{BACKENDS[number]}-")]
    if not dumps or of_backend.is_empty():
        return passed
    latest = pl.read_parquet(max(dumps, key=lambda path: path.stat().st_mtime_ns), columns=["collective_id"])
    wanted = of_backend.filter(pl.col("enqueued_ns") >= until_ns)["collective_id"]
    firsts = [first for first in (latest["collective_id"].min(), wanted.min()) if first is not None]
    return max(passed, min((int(str(first)) for first in firsts), default=passed))


def _is_below_bound(bounds: list[int]) -> pl.Expr:
    """Match the entries with ids below the bound of their backend."""
    identifier = pl.col("collective_id")
    return pl.when(identifier % 2 == 0).then(identifier < bounds[0]).otherwise(identifier < bounds[1])


def _state(folder: Path) -> tuple[list[int], int]:
    """Return the first id in no part, per backend, and how many earlier entries were lost."""
    path = folder / _STATE
    if not path.is_file():
        return [0, 1], 0
    state = json.loads(path.read_text())
    return state["passed"], state["lost"]


# Calls of a stalled process, and the messages of windows. A call that was open during a stall stays
# unfinished if no later call followed in its group: the call failed when the process ended, which dumps do
# not distinguish from finished.

MESSAGE_IDS = 1 << 61  # first id of messages: those of the flight recorder and of windows are below
_WINDOW_IDS = 1 << 32  # ids of messages in window w begin at MESSAGE_IDS + (w + 1) * this
NEVER_NS = (1 << 63) - 1


def stall_of(folder: Path) -> Mapping[str, Any]:
    """Return the report of the latest stall, written when no step had ended for long; empty without one."""
    stall: Mapping[str, Any] = saved(folder / "stall.json", {})
    return stall


def stack_of(folder: Path, since_ns: int = -1) -> str:
    """Return where a process was when it stalled, innermost call first; empty where it did not.

    Args:
        folder: the folder of the process.
        since_ns: earlier stalls do not count.
    """
    stall = stall_of(folder)
    return "\n".join(stall.get("stack", [])) if stall.get("saved_ns", since_ns) >= since_ns else ""


def message_rows(folder: Path, rank: int, stalled_ns: int = NEVER_NS) -> pl.DataFrame:
    """Return the latest gloo messages of each pair of ranks, and all that were not delivered.

    Args:
        stalled_ns: the later of the last step's end and the last collective's start. A message whose handle
            was released during the stall counts as delivered if it was enqueued before then.
    """
    stall = stall_of(folder)
    messages = [
        message | {"state": "scheduled" if message["enqueued_ns"] >= stalled_ns else "completed"}
        if message.get("state") == "closed"
        else message
        for message in stall.get("messages", [])
    ]
    return _rows(messages, stall.get("groups", {}), rank, MESSAGE_IDS)


def as_delivered(messages: pl.DataFrame) -> pl.DataFrame:
    """Mark all rows of `message_rows` as completed, for a process that ended without error."""
    return messages.with_columns(state=pl.lit("completed"))


def messages_in_window(path: Path, rank: int, window: int) -> pl.DataFrame:
    """Return all gloo messages that began in a window, in order; none where there is no such file.

    Args:
        path: `messagesNNNN.json`.
    """
    content = saved(path, [])
    if isinstance(content, list):  # written by an earlier version
        content = {"groups": {}, "messages": content}
    rows = _rows(content["messages"], content["groups"], rank, MESSAGE_IDS + (window + 1) * _WINDOW_IDS)
    return conform(COLLECTIVES, rows)


def _rows(
    messages: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[int]], rank: int, first_id: int
) -> pl.DataFrame:
    rows = []
    for number, message in enumerate(messages):
        peer, size = message["peer"], message["bytes"]
        ranks = message.get("ranks") or groups.get(message["group"], ())  # per message in earlier versions
        sends = message["op"] == "send"
        rows.append(
            {
                "collective_id": first_id + number,
                "rank": rank,
                "window": -1,
                "op": message["op"],
                "group": message["group"],
                "group_ranks": members_text(ranks),
                "sequence": message["sequence"],
                "bytes_in": size if sends else 0,
                "bytes_out": 0 if sends else size,
                "dtype": message["dtype"],
                "peer": ranks[peer] if 0 <= peer < len(ranks) else -1,
                "enqueued_ns": message["enqueued_ns"],
                "source": RECORDER,
                "state": message.get("state", ""),
            }
        )
    schema = {name: dtype for name, dtype in COLLECTIVES.dtypes.items() if rows and name in rows[0]}
    return pl.DataFrame(rows, schema=schema, orient="row") if rows else COLLECTIVES.empty()


def keep_groups(folder: Path, backend: str, said: pl.DataFrame | None) -> None:
    """Save the process groups of a dump, if it is the latest of its backend.

    Args:
        said: rows of `process_groups` in the dump, all with its `saved_ns`; None or no rows change nothing.
    """
    path = folder / f"said-{backend}.parquet"
    if said is None or said.is_empty():
        return
    said = conform(PROCESS_GROUPS, said)
    if not path.is_file() or pl.read_parquet(path)["saved_ns"][0] <= said["saved_ns"][0]:
        said.write_parquet(path)


def process_groups(folder: Path, rank: int) -> pl.DataFrame:
    """Return the groups in the latest dumps, with their ranks filled in where the dumps lack them."""
    frames = [with_texts(pl.read_parquet(path)) for path in sorted(folder.glob("said-*.parquet"))]
    if not frames:
        return PROCESS_GROUPS.empty()
    return with_known_ranks(pl.concat(frames), folder).with_columns(rank=pl.lit(rank, pl.Int32))


def with_known_ranks(said: pl.DataFrame, folder: Path) -> pl.DataFrame:
    """Add the ranks that the process itself recorded to rows of `process_groups`, and its last check time."""
    path = folder / "checked"
    checked_ns = int(path.read_text()) if path.is_file() else -1
    saved_ns = pl.max_horizontal("saved_ns", pl.lit(checked_ns))
    return with_group_ranks(said, folder).with_columns(saved_ns=saved_ns)


def with_group_ranks(rows: pl.DataFrame, folder: Path) -> pl.DataFrame:
    """Fill `group_ranks` that a dump lacks from the groups that the process itself recorded.

    Args:
        rows: with `group`, whose first word is a name, and `group_ranks`.
    """
    named: Mapping[str, list[int]] = saved(folder / "groups.json", {})
    texts = {name: members_text(ranks) for name, ranks in named.items()}
    name = pl.col("group").str.split(" ").list.first()
    recorded = name.replace_strict(texts, default="", return_dtype=pl.String)
    return rows.with_columns(
        group_ranks=pl.when(pl.col("group_ranks") != "").then("group_ranks").otherwise(recorded)
    )


def with_stalled_states(entries: pl.DataFrame, stalls: pl.DataFrame) -> pl.DataFrame:
    """Keep the calls unfinished in which a failed process was stalled.

    Args:
        entries: rows of `collectives`, each in its latest state.
        stalls: rows of `collectives` as saved in the last stall, after which no step ended.

    Returns:
        The entries; those unfinished in the stall keep that state, unless their group made later calls.
    """
    latest = pl.col("collective_id").max()
    calls = entries.group_by("group").agg(last=latest)
    calls = calls.join(stalls.group_by("group").agg(last_stalled=latest), on="group")
    stuck = stalls.filter(pl.col("state").is_in(["scheduled", "started"]))
    stuck = stuck.join(calls, on="group").filter(pl.col("last") <= pl.col("last_stalled"))
    joined = entries.join(
        stuck.select("collective_id", stuck="state"), on="collective_id", how="left", maintain_order="left"
    )
    return joined.with_columns(state=pl.coalesce("stuck", "state")).drop("stuck")


def without_evicted_states(entries: pl.DataFrame) -> pl.DataFrame:
    """Clear the state of calls that were unfinished in an earlier dump and are evicted from the latest.

    Args:
        entries: rows of `collectives` with `saved_ns`; even ids belong to one backend, odd ids to the other.
    """
    backend = pl.col("collective_id") % 2
    latest = entries.filter(pl.col("saved_ns") == pl.col("saved_ns").max().over(backend))
    first = latest.group_by(backend=backend).agg(first=pl.col("collective_id").min())
    joined = entries.with_columns(backend=backend).join(first, on="backend", how="left")
    lost = (pl.col("collective_id") < pl.col("first")) & (pl.col("state") != "completed")
    state = pl.when(lost).then(pl.lit("")).otherwise("state")
    return joined.with_columns(state=state).drop("backend", "first")
