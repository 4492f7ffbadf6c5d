"""Calls of one group that differ between its ranks, and the rank whose call differs from earlier ones.

Takes `Records` and unfinished operations; returns `Mismatch`es, and what earlier calls show about one. Calls
of one group and number differ if their operation, size or element type does; only the first such place of
each group counts. Does not compare what may differ between ranks, such as the sizes of an all-to-all or a
gather.
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dpro.detect.hang.operations import Operation
from dpro.detect.hang.records import UNFINISHED, Records
from dpro.detect.observations import Observation, observe

_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
# Uneven parts are legal here, as long as the operation finishes.
_MAY_BE_UNEVEN = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Mismatch:
    """Calls of one group and number that differ.

    Attributes:
        key: the group's name and ranks.
        sequence: number within the group; of a message, within the pair; -1 where unknown.
        calls: each rank's call, in words, by rank.
        minority: ranks that differ from more than half of the ranks; all ranks without such a majority.
        skipped: number of calls that the minority left out, if that explains all later differences; -1 if
            it does not, or that is not known.
        usual: the call of all ranks at this place in earlier rounds, in words; empty where rounds do not
            decide.
        lost: ranks that a library ended there, whose last calls are not recorded.
    """

    group: str
    key: str
    sequence: int
    calls: Mapping[int, str]
    minority: tuple[int, ...]
    skipped: int = -1
    usual: str = ""
    lost: tuple[int, ...] = ()


def find_mismatches(records: Records) -> list[Mismatch]:
    """Return the first place at which each group's ranks differ, in order of the groups' keys."""
    calls = records.calls.filter(~pl.col("p2p") & (pl.col("sequence") >= 0))
    compared = _first_parts(calls.join(_uneven_places(calls), on=["key", "sequence"]))
    size = pl.when(pl.col("op").is_in(_SAME_SIZE))
    compared = compared.with_columns(
        size_in=size.then("bytes_in").otherwise(-1),
        size_out=size.then("bytes_out").otherwise(-1),
        open=pl.col("state").is_in(UNFINISHED),
    )
    differ = [_differs("op", ""), _differs("dtype", "")]
    uneven = pl.any_horizontal(_differs("size_in", -1), _differs("size_out", -1))
    legal = pl.col("op").first().is_in(_MAY_BE_UNEVEN) & ~pl.col("open").any()
    places = (
        compared.group_by("key", "sequence")
        .agg(bad=pl.any_horizontal(*differ) | (uneven & ~legal))
        .filter("bad")
        .group_by("key")
        .agg(pl.col("sequence").min())
    )
    rows = compared.join(places, on=["key", "sequence"]).sort("key", "rank")
    mismatches = []
    for (key,), part in rows.group_by("key", maintain_order=True):
        whole = list(part.iter_rows(named=True))
        words = {
            row["rank"]: describe(row["op"], row["bytes_in"], row["bytes_out"], row["dtype"]) for row in whole
        }
        minority = _minority({row["rank"]: _signature(row) for row in whole})
        sequence = int(part["sequence"][0])
        skipped = _skipped(_first_parts(calls.filter(pl.col("key") == str(key))), sequence, minority)
        mismatches.append(Mismatch(part["group"][0], str(key), sequence, words, minority, skipped))
    return mismatches


def _first_parts(calls: pl.DataFrame) -> pl.DataFrame:
    """Return one call per rank and number: the first part of a coalesced call."""
    return calls.sort("order").unique(["key", "sequence", "rank"], keep="first", maintain_order=True)


def _uneven_places(calls: pl.DataFrame) -> pl.DataFrame:
    """Return `key`, `sequence` of places with any difference: a cheap first filter of millions of calls."""
    size = pl.when(pl.col("op").is_in(_SAME_SIZE))
    compared = calls.select(
        "key",
        "sequence",
        pl.col("op", "dtype").cast(pl.Categorical).to_physical(),
        size_in=size.then("bytes_in").otherwise(-1),
        size_out=size.then("bytes_out").otherwise(-1),
    )
    same = [pl.col(name).min() == pl.col(name).max() for name in ("op", "dtype", "size_in", "size_out")]
    equal = compared.group_by("key", "sequence").agg(equal=pl.all_horizontal(same))
    return equal.filter(~pl.col("equal")).select("key", "sequence")


def _differs(name: str, unknown: str | int) -> pl.Expr:
    values = pl.col(name).filter(pl.col(name) != pl.lit(unknown))
    return values.n_unique() > 1


def _signature(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a call that must be equal on all ranks."""
    sizes = (row["bytes_in"], row["bytes_out"]) if row["op"] in _SAME_SIZE else ()
    return (row["op"], row["dtype"], *sizes)


def describe(op: str, bytes_in: int, bytes_out: int, dtype: str) -> str:
    """Return a call in words: `all_gather of 40 to 160 bytes of float32`.

    Args:
        bytes_in, bytes_out: sizes; -1 unknown.
        dtype: type of the elements; empty if unknown.
    """
    sizes = [f"{size:,}" for size in dict.fromkeys((bytes_in, bytes_out)) if size >= 0]
    size = f" of {' to '.join(sizes)} bytes" if sizes else ""
    return op + size + (f" of {dtype}" if dtype else "")


def _minority(signatures: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks whose call differs from that of more than half; all ranks without such a majority."""
    (most, count), *_ = Counter(signatures.values()).most_common()
    if 2 * count <= len(signatures):
        return tuple(sorted(signatures))
    return tuple(sorted(rank for rank, what in signatures.items() if what != most))


def _skipped(calls: pl.DataFrame, sequence: int, minority: Sequence[int]) -> int:
    """Return how many calls, up to 3, the minority left out, if that explains its later calls; else -1."""
    others = calls.filter(~pl.col("rank").is_in(list(minority)) & (pl.col("sequence") >= sequence))
    calls_of_minority = calls.filter(pl.col("rank").is_in(list(minority)) & (pl.col("sequence") >= sequence))
    if others.is_empty() or calls_of_minority.is_empty():
        return -1
    by_number = [
        {row[0]: row[1:] for row in part.select("sequence", "op", "bytes_in", "dtype").iter_rows()}
        for part in (others, calls_of_minority)
    ]
    theirs, ours = by_number
    for count in range(1, 4):
        compared = [(ours[n], theirs[n + count]) for n in ours if n + count in theirs]
        if compared and all(call == other for call, other in compared):
            return count
    return -1


def odd_calls(operations: Sequence[Operation], records: Records) -> tuple[int, ...]:
    """Return the ranks whose unfinished collective is of a kind that their group has never completed.

    Returns:
        These ranks, if others wait in collectives that their group has completed before; else none.
    """
    odd: set[int] = set()
    usual: set[int] = set()
    for operation in operations:
        if operation.pair:
            continue
        earlier = records.calls.filter((pl.col("key") == operation.key) & (pl.col("state") == "completed"))
        kinds = set(earlier.select("op", "dtype", "bytes_in").iter_rows())
        for rank, call in operation.unfinished.items():
            new = call.op in _SAME_SIZE and kinds and (call.op, call.dtype, call.bytes) not in kinds
            (odd if new else usual).add(rank)
    return tuple(sorted(odd)) if usual - odd else ()


# Calls that are unlike those of earlier rounds. When a member receives more than it expects, gloo ends its
# process at once, and its last call is not recorded. A training loop repeats its calls: the rank that
# departs from them is at fault; if no rank with known calls does, a rank that was ended is.

ROUNDS = 3  # equal rounds before a call that differs counts
MAX_PERIOD = 2000  # calls per round
IN_A_CALL = "torch/distributed/"  # in the paths of a stack, shows that a thread is within a call
Call = tuple[Any, ...]


def unlike_before(records: Records) -> list[Mismatch]:
    """Return mismatches of groups in which a library ended a member and a rank departs from earlier rounds.

    A group has none if its calls never repeated, or if all its known ranks depart equally.
    """
    aborted = records.ranks.filter(pl.col("exit_signal") == int(signal.SIGABRT))
    calls = records.calls.filter(~pl.col("p2p") & (pl.col("sequence") >= 0))
    groups = records.members.join(aborted.select("rank"), on="rank", how="semi")["key"].unique().sort()
    mismatches = (
        _find_departure(key, _first_parts(calls.filter(pl.col("key") == key)), aborted, records)
        for key in groups
    )
    return list(filter(None, mismatches))


def _find_departure(
    key: str, calls: pl.DataFrame, aborted: pl.DataFrame, records: Records
) -> Mismatch | None:
    members = set(records.members.filter(pl.col("key") == key)["rank"].to_list())
    gone = members & set(aborted["rank"].to_list())
    others = members - gone
    rows = {rank: list(calls.filter(pl.col("rank") == rank).iter_rows(named=True)) for rank in others}
    rounds = {rank: _round_of(rows[rank]) for rank in others}
    if not others or not all(rounds.values()):
        return None
    departures = {rank: place for rank, (place, _) in rounds.items() if place >= 0}  # type: ignore[misc]
    last = {rank: rows[rank][departures.get(rank, -1)] for rank in others}
    group = calls["group"][0]
    if not departures:
        # One rank ended within a call, and all others called as in earlier rounds.
        stacks = dict(
            records.ranks.filter(pl.col("rank").is_in(sorted(gone))).select("rank", "stack").iter_rows()
        )
        within = tuple(
            rank for rank in sorted(gone) if IN_A_CALL in "".join(stacks.get(rank, "").splitlines()[:4])
        )
        if len(within) != 1:
            return None
        latest = max(last.values(), key=lambda row: row["sequence"])
        called = {rank: _in_words(row) for rank, row in sorted(last.items())}
        return Mismatch(group, key, latest["sequence"], called, within, -1, _in_words(latest), within)
    if len({_signature(last[rank]) for rank in departures}) == 1 and len(departures) == len(others) > 1:
        return None  # all departed in one way, as at the end of an epoch
    first = min(departures, key=lambda rank: last[rank]["sequence"])
    place, period = rounds[first]  # type: ignore[misc]
    usual = rows[first][place - period]
    left_out = [
        count
        for count in range(1, min(4, period))
        if _signature(rows[first][place - period + count]) == _signature(last[first])
    ]
    words = {first: _in_words(last[first])}
    minority = tuple(sorted(departures))
    return Mismatch(
        group, key, last[first]["sequence"], words, minority, next(iter(left_out), -1), _in_words(usual),
        tuple(sorted(gone)),
    )  # fmt: skip


def _in_words(row: Mapping[str, Any]) -> str:
    return describe(row["op"], row["bytes_in"], row["bytes_out"], row["dtype"])


def _round_of(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return where a rank's calls depart from their rounds, and the calls per round; None without rounds.

    Args:
        rows: calls of a rank in one group, by number. Only those since the last gap count, and at most half
            of these may come before the rounds: a job begins with other calls.

    Returns:
        The index of the first call that differs, which is in the last round, or -1 for none; and the period.
    """
    numbers = [row["sequence"] for row in rows]
    gaps = [place for place in range(1, len(rows)) if numbers[place] != numbers[place - 1] + 1]
    begin = gaps[-1] if gaps else 0
    names: dict[Call, int] = {}
    calls = np.array([names.setdefault(_signature(row), len(names)) for row in rows[begin:]], np.int64)
    departs = None
    for period in range(1, min(len(calls) // ROUNDS, MAX_PERIOD) + 1):
        differs = np.flatnonzero(calls[period:] != calls[:-period]) + period
        early, late = np.split(differs, [np.searchsorted(differs, len(calls) - period)])
        regular = int(early[-1]) + 1 - period if early.size else 0
        end = int(late[0]) if late.size else len(calls)
        if 2 * regular > len(calls) or end - regular < ROUNDS * period:
            continue
        if not late.size:
            return -1, period
        departs = departs or (begin + end, period)
    return departs


def message_mismatches(operations: Sequence[Operation]) -> list[Mismatch]:
    """Return the messages that both ranks of a pair wait in, where sizes or element types differ."""
    mismatches = []
    for operation in operations:
        if operation.pair is None or len(operation.unfinished) < 2:
            continue
        words = {
            rank: describe(c.op, c.bytes, c.bytes, c.dtype)
            for rank, c in sorted(operation.unfinished.items())
        }
        calls = list(operation.unfinished.values())
        sizes = {call.bytes for call in calls if call.bytes >= 0}
        dtypes = {call.dtype for call in calls if call.dtype}
        if len(sizes) > 1 or len(dtypes) > 1:
            ranks = tuple(sorted(words))
            mismatches.append(Mismatch(operation.group, operation.key, operation.sequence, words, ranks))
    return mismatches


def unlike_earlier(mismatch: Mismatch, records: Records) -> tuple[tuple[int, ...], list[Observation]]:
    """Return the ranks whose call is unlike the earlier ones of their group, and the evidence.

    A call is unlike them if no rank had made such a call, or if a recurring call came too soon.
    """
    calls = records.calls.filter(~pl.col("p2p"), key=mismatch.key)
    calls = _first_parts(calls.filter(pl.col("sequence").is_between(0, mismatch.sequence))).sort("sequence")
    of_call: dict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(mismatch.calls.items()):
        of_call[call].append(rank)
    rows = {call: list(calls.filter(rank=ranks[0]).iter_rows(named=True)) for call, ranks in of_call.items()}
    if any(not of_one or _in_words(of_one[-1]) != call for call, of_one in rows.items()):
        return (), []  # messages, or a dump without earlier calls
    before = {_signature(row) for of_one in rows.values() for row in of_one[:-1]}
    departing, seen = [], []
    for call, ranks in of_call.items():
        if before and _signature(rows[call][-1]) not in before:
            seen.append(observe("never-before", "no rank had called {call} in this group before", call=call))
            departing += ranks
        elif rounds := _rounds_short(rows[call]):
            sentence = (
                "{ranks} called {call} after {rounds} rounds of other calls, the time before after "
                "{rounds_before}: the loop ended {short} short"
            )
            short = {"rounds": rounds[0], "rounds_before": rounds[1], "short": rounds[1] - rounds[0]}
            seen.append(observe("came-early", sentence, ranks=ranks, call=call, **short))
            departing += ranks
    return tuple(sorted(departing)) if len(departing) < len(mismatch.calls) else (), seen


def _rounds_short(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return the rounds before a rank's last call of a kind and before the previous one; None unless fewer.

    Args:
        rows: calls of a rank in one group, by number.
    """
    numbers = [row["sequence"] for row in rows if _signature(row) == _signature(rows[-1])]
    if len(numbers) < 3:
        return None
    first, latest, now = numbers[-3:]
    repeated = _round_of([row for row in rows if latest < row["sequence"] < now])
    between = now - latest - 1, latest - first - 1
    if not repeated or repeated[0] >= 0 or between[0] >= between[1] or any(n % repeated[1] for n in between):
        return None
    return between[0] // repeated[1], between[1] // repeated[1]
