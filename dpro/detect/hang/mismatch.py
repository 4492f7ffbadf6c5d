"""Ranks whose call differs from that of their peers in operation, size or element type, at the same place.

In: `Records`. Out: the first such place of each group, and the ranks in the minority. What may differ between
ranks (the sizes of an all-to-all, of a gather) is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from dpro.detect.hang.operations import Operation
from dpro.detect.hang.records import UNFINISHED, Records

_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
# Uneven parts are legal here, as long as the operation finishes.
_MAY_BE_UNEVEN = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Mismatch:
    """Calls of one group and number that differ.

    Attributes:
        key: the group's name and ranks.
        sequence: number within the group; of a message among those of the pair, -1 where unknown.
        calls: what each rank called, in words, by rank.
        minority: ranks that differ from more than half of the ranks; all ranks without such a majority.
        skipped: number of calls that the minority left out, if that explains all later differences; -1 if
            it does not, or that is not known.
    """

    group: str
    key: str
    sequence: int
    calls: Mapping[int, str]
    minority: tuple[int, ...]
    skipped: int = -1


def find_mismatches(records: Records) -> list[Mismatch]:
    """Return the first place at which each group's ranks differ, in order of the groups' names."""
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
    """Return `key` and `sequence` of all places where anything compared differs: few of perhaps millions."""
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
    """Return what must be the same on all ranks."""
    sizes = (row["bytes_in"], row["bytes_out"]) if row["op"] in _SAME_SIZE else ()
    return (row["op"], row["dtype"], *sizes)


def describe(op: str, bytes_in: int, bytes_out: int, dtype: str) -> str:
    """Return a call in words: `all_gather of 40 to 160 bytes of float32`.

    Args:
        bytes_in, bytes_out: sizes, -1 unknown.
        dtype: type of the elements, empty if unknown.
    """
    sizes = [f"{size:,}" for size in dict.fromkeys((bytes_in, bytes_out)) if size >= 0]
    size = f" of {' to '.join(sizes)} bytes" if sizes else ""
    return op + size + (f" of {dtype}" if dtype else "")


def _minority(signatures: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks whose call is not that of more than half; all ranks where no call has that majority."""
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
        Those ranks if others wait in collectives that their group has called before; none otherwise.
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
