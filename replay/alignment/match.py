"""Matching of rows of the `collectives` table that are one collective, seen from its members.

Takes the table; returns an instance id per row, and a report of unmatched orders. Clocks are not trusted:
where sequence numbers do not decide, the order of calls does. Of all shifts of one rank's order against
another's, the one with the most even differences of end times is used: all members of a collective end
together, so under the true pairing the differences are one constant (the clock offset) plus a little skew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints

POINT_TO_POINT = ("send", "recv")
# Each process numbers its messages to all peers: number 3 of one end can be number 5 of the other.
# Messages that were launched together do not record their peers either.
NUMBERED_APART = (*POINT_TO_POINT, "send_recv")
LANE = ("window", "rank", "device", "stream")
# Members of these have equal input bytes; those of an all_to_all or a gather need not.
SAME_SIZE_EVERYWHERE = ("all_reduce", "broadcast", "reduce")
# A shift is accepted if the spread of the next best one is at least this multiple, and a larger one where few
# pairs support it. Of windows of real jobs clipped at random to 3 to 20 collectives, 0.2% are then matched
# wrongly and a third refused; whole windows have 5 to 3,600.
CLEAR_RUNNER_UP = 3.0
CLEAR_RUNNER_UP_TIMES_PAIRS = 30.0
UNPLACED = np.iinfo(np.int64).min  # place in ranks whose order could not be matched
# With fewer pairs the spread shows nothing: two differences are easily even.
ENOUGH_PAIRS = 3
# With more shifts than this, as only long windows have, those are left out whose spread, at a sample of this
# many pairs, exceeds the smallest by more than this factor.
MANY_SHIFTS = 512
SAMPLED_PAIRS = 200
HOPELESS = 100.0
PAIRS_AT_ONCE = 1 << 18  # pairs of two ranks under several shifts, for which arrays take some 20 MB


@dataclass(frozen=True)
class Matching:
    """Instances of collectives across ranks.

    Attributes:
        rows: rows of the table that ran inside a window, plus `key` (their group), `instance` (equal on all
            members of one collective), `members` (number of rows found), `expected` (number of ranks that
            recorded the group) and `covering` (number of ranks whose records of the group extend over it; the
            windows of the others began later or ended earlier).
        refused: one line for each pair of ranks whose orders could not be matched.
    """

    rows: pl.DataFrame
    refused: tuple[str, ...]

    @property
    def share_on_all_ranks(self) -> float:
        """Share of collectives found on every rank, of those that all ranks' windows cover; 1 without any.

        0 where there are collectives, but the windows of all ranks cover none.
        """
        groups = self._instances()
        covered = groups.filter(pl.col("covering") >= pl.col("expected"))
        if covered.is_empty():
            return 0.0 if groups.height else 1.0
        return float((covered["members"] >= covered["expected"]).mean())  # type: ignore[arg-type]

    @property
    def share_outside(self) -> float:
        """Share of all recorded collectives that ran outside the window of some rank."""
        groups = self._instances()
        outside = (groups["covering"] < groups["expected"]).mean()
        return float(outside) if groups.height else 0.0  # type: ignore[arg-type]

    def _instances(self) -> pl.DataFrame:
        return self.rows.group_by("instance").agg(pl.col("members", "expected", "covering").first())


def match_collectives(collectives: pl.DataFrame, spans: pl.DataFrame) -> Matching:
    """Give all members of each collective that ran in a window the same instance number.

    Args:
        collectives: rows of the `collectives` table; those without a duration or window are left out.
        spans: the `spans` table, for the streams they ran on.

    Returns:
        The matching; a row without counterpart is a separate instance.
    """
    ran = collectives.filter((pl.col("window") >= 0) & (pl.col("duration_ns") >= 0)).sort(
        "window", "rank", "start_ns", "collective_id"
    )
    lanes = spans.select("rank", "span_id", "device", "stream")
    lanes = lanes.filter(pl.col("span_id").is_in(ran["span_id"].unique().implode()))  # a small share of all
    ran = ran.join(lanes, on=["rank", "span_id"], how="left", maintain_order="left")
    rows = ran.with_columns(_group_keys(ran))
    groups = rows.select("window", "key").unique(maintain_order=True).with_row_index("of")
    rows = rows.join(groups, on=["window", "key"], how="left", maintain_order="left").with_row_index("row")
    numbers = np.full(rows.height, -1, np.int64)
    numbered = rows.filter(_numbers_decide(rows))
    numbers[numbered["row"].to_numpy()] = _by_sequence(numbered)
    places = numbers.copy()
    refused: list[str] = []
    of = rows["of"].to_numpy().astype(np.int64)
    op = pl.col("op")
    columns = rows.select(
        rank="rank",
        op=op.replace({"recv": "send"}).rank("dense"),
        size="bytes_in",
        symmetric=op.is_in(SAME_SIZE_EVERYWHERE),
        end=pl.col("start_ns") + pl.col("duration_ns"),
        apart=op.is_in(NUMBERED_APART),
        on_gpu=pl.col("device").fill_null(-1) >= 0,
    )
    calls = _Calls._make(column.to_numpy() for column in columns)
    for group in _parts(of, np.flatnonzero(numbers < 0)):
        numbers[group], places[group], problems = _match_group(rows, calls, group)
        if problems:
            window, key = rows.select("window", "key").row(int(group[0]))
            refused += [
                f"window {window}, {f'group {key}' if key else 'a group without a name'}: {problem}"
                for problem in problems
            ]
    counts = np.zeros(groups.height, np.int64)
    np.maximum.at(counts, of, numbers + 1)
    rows = rows.select(
        *ran.columns,
        "key",
        instance=pl.Series(numbers + (np.cumsum(counts) - counts)[of], dtype=pl.Int64),
        expected=pl.col("rank").n_unique().over("of").cast(pl.Int64),
        covering=pl.Series(_covering(of, rows["rank"].to_numpy(), places), dtype=pl.Int64),
    )
    return Matching(rows.with_columns(members=pl.len().over("instance").cast(pl.Int64)), tuple(refused))


def group_label() -> pl.Expr:
    """Return the label that distinguishes process groups in `collectives`: name, and ranks where known."""
    named = pl.format("{}[{}]", "group", "group_ranks")
    return pl.when(pl.col("group_ranks") != "").then(named).otherwise("group")


def _group_keys(rows: pl.DataFrame) -> pl.Series:
    """Return the key of each row's group, equal on all its members.

    A kernel that does not name its group runs on a stream of one communicator, so it takes the name that
    other kernels of its lane have. Sends and receives are keyed by their ends, in order of direction.
    """
    group = group_label()
    given = pl.col("own").filter(pl.col("own") != "")
    one_name = given.n_unique().over(LANE) == 1
    of_lane = pl.when((pl.col("own") == "") & one_name).then(given.first().over(LANE)).otherwise("own")
    sends = pl.col("op") == "send"
    sender, receiver = (pl.when(is_rank).then("rank").otherwise("peer") for is_rank in (sends, ~sends))
    between = pl.col("op").is_in(POINT_TO_POINT) & (pl.col("peer") >= 0)
    key = pl.when(between).then(pl.format("{} {}->{}", "name", sender, receiver)).otherwise("name")
    return rows.with_columns(own=group).with_columns(name=of_lane).select(key=key)["key"]


def _numbers_decide(rows: pl.DataFrame) -> pl.Series:
    """Return [N] whether sequence numbers identify the collectives of each row's group `of`.

    Parts of one coalesced call share its number, so all ranks must have equally many.
    """
    apart = pl.col("op").is_in(NUMBERED_APART).any() & (pl.col("device").fill_null(-1) >= 0).any()
    calls = rows.group_by("of", "sequence", "rank").len()
    uneven = calls.group_by("of", "sequence").agg(pl.col("len").n_unique() > 1).filter("len")
    numbered = (pl.col("sequence").min() >= 0) & ~apart
    return rows.select(numbered.over("of") & ~pl.col("of").is_in(uneven["of"].unique().implode())).to_series()


def _by_sequence(rows: pl.DataFrame) -> Ints:
    """Return [N] instance numbers from 0 in each group `of`, by sequence and place in a coalesced call."""
    place = rows.select(pl.int_range(pl.len()).over("of", "rank", "sequence")).to_series().to_numpy()
    of, sequence = rows["of"].to_numpy(), rows["sequence"].to_numpy()
    order = np.lexsort((place, sequence, of))
    other_group = np.diff(of[order], prepend=of[order][:1]) != 0
    new = other_group | (np.diff(sequence[order], prepend=sequence[order][:1]) != 0)
    new |= np.diff(place[order], prepend=place[order][:1]) != 0
    total = np.cumsum(new)
    first = np.maximum.accumulate(np.where(other_group, total, 0))
    numbers = np.empty(order.size, np.int64)
    numbers[order] = total - first
    return numbers


class _Calls(NamedTuple):
    """Rows of the table as arrays [N]: for ten thousand groups, a frame each would take 15 s.

    Attributes:
        rank: rank of the row.
        op: a code of the operation, the same for both ends of a message.
        size: input bytes of the rank.
        symmetric: whether all members have equal input bytes.
        end: ns at which it ended.
        apart: whether it is one of `NUMBERED_APART`.
        on_gpu: whether a stream ran it.
    """

    rank: Ints
    op: Ints
    size: Ints
    symmetric: Bools
    end: Ints
    apart: Bools
    on_gpu: Bools


def _parts(of: Ints, rows: Ints) -> list[Ints]:
    """Split rows [N] by their value in `of`, each part in order."""
    rows = rows[np.argsort(of[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(of[rows])) + 1) if rows.size else []


def _match_group(rows: pl.DataFrame, calls: _Calls, of_group: Ints) -> tuple[Ints, Ints, list[str]]:
    """Return instance numbers, from 0, and places of one group's rows in one window, and the problems found.

    Only the recorder numbers messages of CPU tensors: by pair, equally at both ends. In traces these end when
    their caller asked for them, so their ends imply no order.

    Args:
        of_group: rows whose sequence numbers do not decide, or may not, since they are messages.
    """
    numbers, places, problems = _by_order(_Calls._make(column[of_group] for column in calls))
    if problems and calls.apart[of_group].any() and calls.on_gpu[of_group].any():
        part = rows[of_group]
        of_ranks = part.group_by("sequence", "rank").len()
        even = of_ranks.group_by("sequence").agg(pl.col("len").n_unique() == 1)["len"].all()
        seen_by_rank = [set(rows["sequence"]) for rows in part.partition_by("rank")]
        first, last = max(map(min, seen_by_rank)), min(map(max, seen_by_rank))
        # In the range that both ends recorded, their numbers must be the same.
        seen = [{number for number in numbers if first <= number <= last} for numbers in seen_by_rank]
        agreed = all(numbers == seen[0] for numbers in seen) and not (part["op"] == "send_recv").any()
        if even and (part["sequence"] >= 0).all() and agreed:
            numbers = places = _by_sequence(part)
            problems = []
    return numbers, places, problems


def _covering(of: Ints, ranks: Ints, places: Ints) -> Ints:
    """Return [N] the number of ranks whose records of the group reach back and forward to a row's place.

    Ranks without a place may have recorded anything, and count.

    Args:
        of: [N] the group of each row.
        ranks: [N] its rank.
        places: [N] its place in the order of the group, or `UNPLACED`.
    """
    placed = places != UNPLACED
    lowest, highest = places.min(where=placed, initial=0), places.max(where=placed, initial=0)
    # Put all groups on one axis, one behind the other: the groups before and after cancel out.
    on_axis = of * (highest - lowest + 1) + (places - lowest) * placed
    rows = pl.DataFrame({"of": of, "rank": ranks, "at": on_axis, "placed": placed})
    covered = (
        rows.filter("placed").group_by("of", "rank").agg(first=pl.col("at").min(), last=pl.col("at").max())
    )
    first, last = (np.sort(covered[name].to_numpy()) for name in ("first", "last"))
    within = np.searchsorted(first, on_axis, "right") - np.searchsorted(last, on_axis, "left")
    everywhere = rows.select(pl.col("rank").n_unique().over("of")).to_series().to_numpy()
    located = rows.select(pl.col("rank").filter("placed").n_unique().over("of")).to_series().to_numpy()
    covering: Ints = np.where(placed, within + everywhere - located, everywhere)
    return covering


def _by_order(calls: _Calls) -> tuple[Ints, Ints, list[str]]:
    """Return instance numbers by the order of calls on each rank.

    Returns:
        [N] the numbers; [N] places in the order of the rank with most rows, which continue before and after
        its own records; and the pairs of ranks that could not be matched.
    """
    ranks, ops, sizes, symmetric, ends, *_ = calls
    members = {int(ranks[part[0]]): part for part in _parts(ranks, np.arange(ranks.size))}
    reference = max(members, key=lambda rank: (members[rank].size, -rank))
    first = members[reference]
    numbers, places = np.full(ranks.size, -1, np.int64), np.full(ranks.size, UNPLACED)
    numbers[first] = places[first] = np.arange(first.size)
    beyond: dict[tuple[int, int, int], int] = {}  # collectives that the reference rank has not recorded
    problems = []
    fresh = first.size
    for rank, of_rank in members.items():
        if rank == reference:
            continue
        same = partial(_can_match, ops, sizes, symmetric, first, of_rank)
        shift, clear = best_shift(ends[first], ends[of_rank], same)
        if not clear:
            problems.append(f"the orders of ranks {reference} and {rank} cannot be matched")
            numbers[of_rank] = fresh + np.arange(of_rank.size)
            fresh += of_rank.size
            continue
        partner = places[of_rank] = np.arange(of_rank.size) + shift
        inside = (partner >= 0) & (partner < first.size)
        has_partner = inside.copy()
        has_partner[has_partner] = same(partner[has_partner], np.flatnonzero(has_partner))
        numbers[of_rank[has_partner]] = partner[has_partner]
        for row, place in zip(of_rank[~has_partner].tolist(), partner[~has_partner].tolist()):
            size = int(sizes[row]) if symmetric[row] else -1
            what = (place, int(ops[row]), size)
            its_number = beyond.setdefault(what, fresh) if not 0 <= place < first.size else fresh
            numbers[row] = its_number
            fresh += its_number == fresh
    return numbers, places, problems


def _can_match(ops: Ints, sizes: Ints, symmetric: Bools, a: Ints, b: Ints, i: Ints, j: Ints) -> Bools:
    """Return [K] whether rows a[i] and b[j] can be one collective: same op, and same size where required."""
    a, b = a[i], b[j]
    same_size = (sizes[a] == sizes[b]) | (sizes[a] < 0) | (sizes[b] < 0) | ~symmetric[a]
    same: Bools = (ops[a] == ops[b]) & same_size
    return same


def best_shift(ends_a: Ints, ends_b: Ints, same: Callable[[Ints, Ints], Bools]) -> tuple[int, bool]:
    """Return the shift of one rank's order against another's.

    Args:
        ends_a: [n] ns, ends on one rank, in its order.
        ends_b: [m] ns, ends on the other, on its own clock.
        same: returns whether entries i [K] of a and j [K] of b can be one collective.

    Returns:
        shift, so that entry j of b is entry j + shift of a, and whether it is clear: the spread
        (interquartile range) of the differences of the paired ends is the smallest by far. With too few
        entries to judge by spread, the orders are aligned at their ends, and clear if that is consistent.
    """
    n, m = ends_a.size, ends_b.size
    if min(n, m) < ENOUGH_PAIRS:
        j = np.arange(max(0, m - n), m)
        return n - m, bool(same(j + n - m, j).all())
    least = max(ENOUGH_PAIRS - 1, min(n, m) // 2)  # a single pair has no spread, and shows nothing
    shifts = np.arange(least - m, n - least + 1)
    if shifts.size > MANY_SHIFTS:  # a sample of their pairs shows which may be best or next best
        begin, end = np.maximum(0, -shifts), np.minimum(m, n - shifts)
        j = begin[:, None] + (end - begin - 1)[:, None] * np.arange(SAMPLED_PAIRS) // (SAMPLED_PAIRS - 1)
        differences = np.sort(ends_a[j + shifts[:, None]] - ends_b[j], axis=1)
        sampled = _spread(differences, np.full(shifts.size, SAMPLED_PAIRS))
        shifts = shifts[sampled <= HOPELESS * sampled.min()]
    at_once = max(PAIRS_AT_ONCE // m, 1)
    spreads: list[tuple[float, int, int]] = []
    for first in range(0, shifts.size, at_once):
        spreads += _spreads(ends_a, ends_b, shifts[first : first + at_once], same)
    if not spreads:
        return 0, False
    spread, pairs, shift = min(spreads)
    enough = max(CLEAR_RUNNER_UP, CLEAR_RUNNER_UP_TIMES_PAIRS / pairs) * spread
    unlike = all(other >= enough for other, _, another in spreads if another != shift)
    return shift, pairs >= ENOUGH_PAIRS and unlike


def _spreads(
    ends_a: Ints, ends_b: Ints, shifts: Ints, same: Callable[[Ints, Ints], Bools]
) -> list[tuple[float, int, int]]:
    """Return (spread, number of pairs, shift) of the shifts [S] under which nearly all pairs can match."""
    j = np.arange(ends_b.size) + np.zeros_like(shifts)[:, None]
    i = j + shifts[:, None]
    inside = (i >= 0) & (i < ends_a.size)
    equal = inside.copy()
    equal[inside] = same(i[inside], j[inside])
    pairs = equal.sum(axis=1)
    same_calls = pairs / inside.sum(axis=1) >= 0.9
    i, j, equal, pairs = i[same_calls], j[same_calls], equal[same_calls], pairs[same_calls]
    ends = ends_a[np.where(equal, i, 0)] - ends_b[j]
    differences = np.sort(np.where(equal, ends, np.iinfo(np.int64).max), axis=1)  # pairs come first
    spread = _spread(differences, pairs)
    return list(zip(spread.tolist(), pairs.tolist(), shifts[same_calls].tolist(), strict=True))


def _spread(differences: Ints, sizes: Ints) -> Floats:
    """Return [S] the interquartile range of the first `sizes` values of each sorted row [S, N], plus 1 ns."""
    return _quantile(differences, sizes, 0.75) - _quantile(differences, sizes, 0.25) + 1.0


def _quantile(values: Ints, sizes: Ints, share: float) -> Floats:
    """Return [S] a quantile of the first `sizes` values of each sorted row [S, N], as `np.quantile` does.

    A NumPy call for each shift takes 40 us, which was most of the time of matching by order.
    """
    place = share * (sizes - 1)
    below = place.astype(np.int64)
    rows, part = np.arange(sizes.size), place - below
    low = values[rows, below]
    step = values[rows, np.minimum(below + 1, sizes - 1)] - low
    quantile: Floats = np.where(part < 0.5, low + step * part, low + step - step * (1 - part))
    return quantile
