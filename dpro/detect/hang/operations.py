"""Unfinished operations: which ranks called them, finished them, or did not call.

Takes `Records`; returns `Operation`s. A collective is one operation of its group; a send and its receive,
matched in order, are one, too. Does not infer that a rank missed a call from the lack of a record alone: its
dump may be missing, older than the operation, or clipped. Such ranks are unknown rather than absent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import polars as pl

from dpro.detect.hang.records import SYNCHRONISING, UNFINISHED, Records
from dpro.units import NS_PER_S

MAX_CLOCK_SKEW_NS = NS_PER_S  # between hosts


@dataclass(frozen=True)
class OperationCall:
    """One rank's call: its order among the rank's calls, what it moves, its state."""

    rank: int
    order: int
    op: str
    bytes: int
    dtype: str
    enqueued_ns: int
    state: str


@dataclass(frozen=True)
class Operation:
    """A collective, or a message between two ranks, that at least one rank has begun and not finished.

    Attributes:
        key: the group's name and ranks.
        sequence: number within the group; of a message, within the pair; -1 unknown.
        members: all ranks that take part, in order.
        unfinished: calls that were made and are not finished, by rank.
        absent: ranks that are known not to have called.
        came: ranks that have called and may or may not have finished.
        unknown: ranks that may or may not have called.
        pair: sender and receiver of a message.
    """

    group: str
    key: str
    sequence: int
    op: str
    members: tuple[int, ...]
    unfinished: dict[int, OperationCall]
    finished: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    came: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()
    pair: tuple[int, int] | None = None

    @property
    def since_ns(self) -> int:
        """When the last of the waiting ranks called, in ns; -1 unknown."""
        return max((call.enqueued_ns for call in self.unfinished.values()), default=-1)


@dataclass(frozen=True)
class Knowledge:
    """Which dumps are up to date, and how far each rank had come.

    Attributes:
        current: ranks whose dump shows their last calls.
        outdated: ranks that went on after their dump was saved.
        issued: last collective that was called, by rank and group.
        done: last collective that finished, by rank and group.
    """

    current: frozenset[int]
    outdated: frozenset[int]
    issued: dict[tuple[int, str], int] = field(default_factory=dict)
    done: dict[tuple[int, str], int] = field(default_factory=dict)


def derive_knowledge(records: Records) -> Knowledge:
    """Derive how far each rank had come, and which dumps are older than their peers' calls show."""
    calls = records.calls.filter(~pl.col("p2p"))
    rows = calls.group_by("rank", "key").agg(
        issued=pl.col("sequence").max(),
        done=pl.col("sequence").filter(pl.col("state") == "completed").max(),
    )
    reports = _with_status(rows, records)
    # A synchronising call that one rank of a group has finished proves that all its ranks have made it.
    finished = calls.filter((pl.col("state") == "completed") & pl.col("op").is_in(SYNCHRONISING))
    reached = pl.concat([finished.select("key", proven="sequence"), reports.select("key", proven="said")])
    proven = reached.group_by("key").agg(pl.col("proven").max()).join(records.members, on="key")
    dumped = records.ranks.filter("dumped")
    outdated = _outdated(calls, reports, proven, dumped)
    issued = {(rank, key): seq for rank, key, seq in reports.select("rank", "key", "issued").iter_rows()}
    for rank, key, sequence in proven.select("rank", "key", "proven").iter_rows():
        issued[rank, key] = max(issued.get((rank, key), -1), sequence)
    done = {(rank, key): seq for rank, key, seq in reports.select("rank", "key", "done").iter_rows()}
    return Knowledge(frozenset(dumped["rank"].to_list()) - outdated, outdated, issued, done)


def _outdated(
    calls: pl.DataFrame, reports: pl.DataFrame, proven: pl.DataFrame, dumped: pl.DataFrame
) -> frozenset[int]:
    """Return the ranks that went on after their dump was saved.

    They must have made calls that the dump lacks; or must have finished one of several calls that the dump
    shows as unfinished; or a step of theirs, or a call of a peer, is later than the dump.

    Args:
        proven: `rank`, `key`, `proven`: the last call that all ranks must have made.
        dumped: `ranks` of the records with a dump.
    """
    behind = (
        proven.join(dumped.select("rank"), on="rank")
        .join(reports, on=["rank", "key"], how="left")
        .filter(pl.col("issued").fill_null(-1) < pl.col("proven"))
    )
    passed = (
        calls.filter(pl.col("state").is_in(UNFINISHED) & pl.col("op").is_in(SYNCHRONISING))
        .join(proven, on=["rank", "key"])
        .filter(pl.col("sequence") <= pl.col("proven"))
        .group_by("rank", "key")
        .agg(number=pl.col("sequence").n_unique())
        .filter(pl.col("number") > 1)
    )
    latest = calls["enqueued_ns"].max() if calls.height else -1
    dated = dumped.filter(pl.col("saved_ns") >= 0)
    early = dated.filter(
        (pl.col("last_step_ns") > pl.col("saved_ns")) | (pl.col("saved_ns") + MAX_CLOCK_SKEW_NS < latest)
    )
    return frozenset(rank for ranks in (behind, passed, early) for rank in ranks["rank"])


def _with_status(called: pl.DataFrame, records: Records) -> pl.DataFrame:
    """Add what ranks reported about groups as a whole, where these reports count collectives only.

    Some libraries count messages together with collectives: a group's reports are ignored where they disagree
    with its calls, or where it has messages.

    Args:
        called: `rank`, `key`, `issued`, `done`, from the calls.

    Returns:
        `rank`, `key`, `said`, `issued`, `done`: the last sequence numbers reported as completed, called, and
        finished; -1 for none.
    """
    joined = records.status.join(called, on=["rank", "key"], how="full", coalesce=True)
    agrees = (
        pl.col("issued").is_null() | pl.col("enqueued").is_null() | (pl.col("issued") == pl.col("enqueued"))
    )
    mixed = records.calls.filter("p2p").select("key").unique()
    good = joined.group_by("key").agg(good=agrees.all()).filter("good").join(mixed, on="key", how="anti")
    reported = joined.join(good, on="key", how="left").with_columns(
        pl.when("good").then(name).alias(name) for name in ("enqueued", "completed")
    )
    return reported.select(
        "rank",
        "key",
        said=pl.col("completed").fill_null(-1),
        issued=pl.max_horizontal("issued", "enqueued").fill_null(-1),
        done=pl.max_horizontal("done", "completed").fill_null(-1),
    )


def unfinished_operations(records: Records, knowledge: Knowledge) -> list[Operation]:
    """Return all operations that a rank with a current dump has begun and not finished, in a stable order."""
    return [*_collectives(records, knowledge), *_messages(records, knowledge)]


def _collectives(records: Records, knowledge: Knowledge) -> Iterator[Operation]:
    calls = records.calls.filter(~pl.col("p2p") & pl.col("rank").is_in(list(knowledge.current)))
    open_ = calls.filter(pl.col("state").is_in(UNFINISHED)).select("key", "sequence").unique()
    rows = calls.join(open_, on=["key", "sequence"]).sort("key", "sequence", "rank")
    members = dict(
        records.members.join(open_.select("key").unique(), on="key")
        .sort("key", "rank")
        .group_by("key", maintain_order=True)
        .agg("rank")
        .iter_rows()
    )
    saved = _saved_ns(records)
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows.iter_rows(named=True):
        groups[row["key"], row["sequence"]].append(row)
    for (key, sequence), group in groups.items():
        yield _collective(group, members.get(key, []), knowledge, saved, key, sequence)


def _collective(
    rows: Sequence[dict[str, Any]],
    members: Sequence[int],
    knowledge: Knowledge,
    saved: dict[int, int],
    key: str,
    sequence: int,
) -> Operation:
    unfinished = {row["rank"]: _call(row) for row in rows if row["state"] in UNFINISHED}
    finished = {row["rank"] for row in rows if row["state"] not in UNFINISHED}
    began_ns = min(call.enqueued_ns for call in unfinished.values())
    absent: set[int] = set()
    came: set[int] = set()
    unknown: set[int] = set()
    for rank in members:
        if rank in unfinished or rank in finished:
            continue
        if knowledge.issued.get((rank, key), -1) >= sequence:
            # A current dump may have dropped the call, or contain unfinished calls only.
            (finished if rank in knowledge.current else came).add(rank)
        elif rank in knowledge.current and not _was_saved_before(saved.get(rank, -1), began_ns):
            absent.add(rank)
        else:
            unknown.add(rank)
    first = next(iter(unfinished.values()))
    return Operation(
        rows[0]["group"],
        key,
        sequence,
        first.op,
        tuple(members),
        unfinished,
        frozenset(finished),
        frozenset(absent),
        frozenset(came),
        frozenset(unknown),
    )


def _was_saved_before(saved_ns: int, began_ns: int) -> bool:
    """Return whether a dump was saved before peers began an operation: its rank may have called later."""
    return 0 <= saved_ns < began_ns


def _saved_ns(records: Records) -> dict[int, int]:
    return dict(records.ranks.select("rank", "saved_ns").iter_rows())


def _call(row: dict[str, Any]) -> OperationCall:
    sent = row["bytes_out"] if row["op"] == "recv" else row["bytes_in"]
    return OperationCall(
        row["rank"], row["order"], row["op"], sent, row["dtype"], row["enqueued_ns"], row["state"]
    )


def _messages(records: Records, knowledge: Knowledge) -> Iterator[Operation]:
    """Match sends and receives in order, per pair and group.

    Where both ranks' calls are known from the first on, the n-th send meets the n-th receive. Elsewhere the
    oldest unfinished send meets the oldest unfinished receive, since a pair's messages finish in order.
    """
    calls = records.calls.filter(pl.col("p2p") & pl.col("rank").is_in(list(knowledge.current)))
    sends = pl.col("op") == "send"
    calls = calls.with_columns(
        source=pl.when(sends).then("rank").otherwise("peer"),
        target=pl.when(sends).then("peer").otherwise("rank"),
    )
    pair = ["key", "source", "target"]
    open_ = calls.filter(pl.col("state").is_in(UNFINISHED)).select(pair).unique()
    rows = calls.join(open_, on=pair).sort(*pair, "order")
    whole = dict(records.ranks.select("rank", "whole").iter_rows())
    saved = _saved_ns(records)
    pairs: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows.iter_rows(named=True):
        pairs[row["key"], row["source"], row["target"]].append(row)
    for (key, source, target), calls_of_pair in pairs.items():
        sides = [[row for row in calls_of_pair if row["op"] == op] for op in ("send", "recv")]
        numbered = all(row["counted"] for row in calls_of_pair) or bool(
            whole.get(source) and whole.get(target)
        )
        match = _numbered_messages if numbered else _trailing_messages
        for number, send, recv in match(*sides):
            yield _message(key, (source, target), number, (send, recv), knowledge, saved)


_Row = dict[str, Any]
_FINISHED: _Row = {}


def _numbered_messages(
    sends: Sequence[_Row], recvs: Sequence[_Row]
) -> Iterator[tuple[int, _Row | None, _Row | None]]:
    """Pair the n-th send with the n-th receive where one is unfinished; the other may be `_FINISHED`."""
    # Numbers count the messages of the pair, from 1.
    sides = [
        {row["sequence"] if row["counted"] else n: row for n, row in enumerate(rows, 1)}
        for rows in (sends, recvs)
    ]
    last = [max(side, default=0) for side in sides]
    numbers = {n for side in sides for n, row in side.items() if row["state"] in UNFINISHED}
    for number in sorted(numbers):
        ends: list[_Row | None] = []
        for side, end in zip(sides, last, strict=True):
            row = side.get(number)
            gone = row is None and number <= end
            done = gone or (row is not None and row["state"] not in UNFINISHED)
            ends.append(_FINISHED if done else row)
        yield number, ends[0], ends[1]


def _trailing_messages(
    sends: Sequence[_Row], recvs: Sequence[_Row]
) -> Iterator[tuple[int, _Row | None, _Row | None]]:
    """Pair unfinished sends with unfinished receives, from the oldest on."""
    sides = [[row for row in rows if row["state"] in UNFINISHED] for rows in (sends, recvs)]
    for send, recv in zip_longest(*sides):
        yield -1, send, recv


def _message(
    key: str,
    pair: tuple[int, int],
    number: int,
    sides: tuple[_Row | None, _Row | None],
    knowledge: Knowledge,
    saved: dict[int, int],
) -> Operation:
    unfinished = {rank: _call(row) for rank, row in zip(pair, sides, strict=True) if row}
    began_ns = min(call.enqueued_ns for call in unfinished.values())
    finished, absent, unknown = set(), set(), set()
    for rank, row in zip(pair, sides, strict=True):
        if row:
            continue
        if row is _FINISHED:
            finished.add(rank)
        elif rank in knowledge.current and not _was_saved_before(saved.get(rank, -1), began_ns):
            absent.add(rank)
        else:
            unknown.add(rank)
    return Operation(
        key.partition("|")[0],
        key,
        number,
        "send" if pair[0] in unfinished and pair[1] not in unfinished else "recv",
        tuple(sorted(pair)),
        unfinished,
        frozenset(finished),
        frozenset(absent),
        unknown=frozenset(unknown),
        pair=pair,
    )
