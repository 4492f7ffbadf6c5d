"""How long pairs of ranks take to move data between them, against other pairs that do the same.

In: transfers, as `transfers.py` takes them from a graph. Out: one row per pair that talks: what its transfers
take, what they would take if it were like the other pairs, and how much of the difference is the sender's,
the receiver's and the link's own. Groups of more than two ranks show no single pair and are left out. Which
part is at fault is decided by `transfers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Floats, Ints
from dpro.detect.network.traffic import KEYS, LIKE, MESSAGE
from dpro.detect.network.transfers import MIN_GROUPS

MIN_PAIRS = 3  # of a rank: with fewer, what it adds cannot be separated from the others and the pair
MAX_ROUNDS = 30
SETTLED = 1e-9  # of a logarithm: effects that change less have converged

SCHEMA = {
    "source": pl.Int64,  # rank that sends; of a group of two the lower one
    "target": pl.Int64,  # rank that receives
    "directed": pl.Boolean,  # messages are; a group of two ranks moves data both ways
    "source_host": pl.String,  # empty where unknown
    "target_host": pl.String,
    "count": pl.Int64,  # transfers
    "bytes": pl.Int64,  # of all of them; -1 where not known
    "transfer_ns": pl.Float64,  # what one typically takes, without waiting; of several sizes the mean
    "expected_ns": pl.Float64,  # the same if the pair were like the others; null: fewer than three of a kind
    "ratio": pl.Float64,  # transfer_ns over expected_ns, of sizes that have both; null like that
    "sender": pl.Float64,  # times that the source adds to all its pairs; null: too few of them to say
    "receiver": pl.Float64,  # times that the target adds to all its pairs; null: too few of them to say
    "link": pl.Float64,  # times that are left to the pair itself; null where the ratio is
}
_EFFECTS = ("sender", "receiver")


def delay_matrix(transfers: pl.DataFrame, hosts: Mapping[int, str]) -> pl.DataFrame:
    """What each pair of ranks takes to move data, and what it would take if it were like the others.

    Comparable are pairs that do the same operation with as many bytes, and are both on one host or both on
    two. What is expected is what most of them take, once what slow ranks add to theirs is taken off.

    Args:
        transfers: as `dpro.detect.network.traffic.transfers_of` gives them.
        hosts: which host each rank is on, as far as known (`dpro.detect.network.traffic.host_of`).

    Returns:
        Columns of `SCHEMA`, one row for each pair and, of messages, direction, sorted by source and target.
        ratio = sender x receiver x link, where a null factor counts as 1.
    """
    kinds = _with_expected(_kinds_of_pairs(transfers.filter(pl.col("num_ranks") == 2)))
    if kinds.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    compared = pl.col("expected_ns").is_not_null()
    total = pl.col("transfer_ns", "expected_ns") * pl.col("count")
    matrix = (
        kinds.with_columns(total.name.prefix("all_"))
        .group_by("source", "target", "directed", *_EFFECTS)
        .agg(
            pl.col("count").sum(),
            bytes=pl.when((pl.col("bytes") >= 0).all()).then((pl.col("bytes") * pl.col("count")).sum()),
            transfer_ns=pl.col("all_transfer_ns").sum() / pl.col("count").sum(),
            expected_ns=pl.col("all_expected_ns").sum() / pl.col("count").filter(compared).sum(),
            ratio=pl.col("all_transfer_ns").filter(compared).sum() / pl.col("all_expected_ns").sum(),
        )
        .with_columns(pl.col("bytes").fill_null(-1), pl.col("expected_ns", "ratio").fill_nan(None))
        .with_columns(
            source_host=_host(pl.col("source"), hosts),
            target_host=_host(pl.col("target"), hosts),
            link=pl.col("ratio") / pl.col("sender").fill_null(1.0) / pl.col("receiver").fill_null(1.0),
        )
        .sort("source", "target", "directed")
    )
    return matrix.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())


def _host(rank: pl.Expr, hosts: Mapping[int, str]) -> pl.Expr:
    return rank.replace_strict(hosts, default="", return_dtype=pl.String)


def host_matrix(matrix: pl.DataFrame) -> pl.DataFrame:
    """The same between hosts: the median over the pairs of ranks that two hosts have.

    Args:
        matrix: as `delay_matrix` gives it.

    Returns:
        `source_host`, `target_host`, `num_pairs`, `count`, and the medians of `transfer_ns`, `expected_ns`
        and `ratio`. Pairs without a direction count both ways; those on unknown hosts are left out.
    """
    medians = {name: pl.col(name).median() for name in ("transfer_ns", "expected_ns", "ratio")}
    return (
        both_ways(matrix)
        .filter((pl.col("source_host") != "") & (pl.col("target_host") != ""))
        .group_by("source_host", "target_host")
        .agg(pl.col("count").sum(), num_pairs=pl.len().cast(pl.Int64), **medians)
        .select("source_host", "target_host", "num_pairs", "count", *medians)
        .sort("source_host", "target_host")
    )


def both_ways(matrix: pl.DataFrame) -> pl.DataFrame:
    """The matrix with each pair that has no direction in both of them: what is drawn as a square.

    Args:
        matrix: as `delay_matrix` gives it.
    """
    swapped = {"source": "target", "source_host": "target_host", "sender": "receiver"}
    swapped |= {other: one for one, other in swapped.items()}
    back = matrix.filter(~pl.col("directed")).select(
        pl.col(swapped.get(name, name)).alias(name) for name in matrix.columns
    )
    return pl.concat([matrix, back]).sort("source", "target", "directed")


def _kinds_of_pairs(transfers: pl.DataFrame) -> pl.DataFrame:
    """What each pair typically takes for each kind of transfer: `LIKE`, both ends, `transfer_ns`, `count`."""
    ends = pl.col("members").str.split(",").cast(pl.List(pl.Int64))
    return (
        transfers.group_by(KEYS)
        .agg(pl.col("transfer_ns").median(), count=pl.len().cast(pl.Int64))
        .with_columns(source=ends.list.get(0), target=ends.list.get(1), directed=pl.col("op") == MESSAGE)
        .sort(KEYS)
    )


def _with_expected(kinds: pl.DataFrame) -> pl.DataFrame:
    """The same with `expected_ns`, and what the ends add: within hosts and between them each for itself."""
    comparable = kinds.with_columns(
        enough=pl.len().over(LIKE) >= MIN_GROUPS, kind=pl.struct(LIKE).rank("dense")
    )
    parts = [
        _fitted(part) for _, part in comparable.filter("enough").group_by("num_hosts", maintain_order=True)
    ]
    unknown = pl.lit(None, pl.Float64)
    rest = comparable.filter(~pl.col("enough")).with_columns(
        expected_ns=unknown, sender=unknown, receiver=unknown
    )
    # What is known of the ends from some kinds holds for all of them: a pair is one row in the end.
    effects = (pl.col(name).drop_nulls().first().over("source", "target", "directed") for name in _EFFECTS)
    return pl.concat([*parts, rest], how="diagonal").with_columns(effects)


def _fitted(comparable: pl.DataFrame) -> pl.DataFrame:
    """Pairs, with what is expected of each kind and what the ends of each pair add."""
    one_way = comparable.select("kind", "source", "target", log=pl.col("transfer_ns").log())
    other_way = one_way.filter(~comparable["directed"]).rename({"source": "target", "target": "source"})
    cells = pl.concat([one_way, other_way.select(one_way.columns)])
    kind, source, target = (cells[name].cast(pl.Int64).to_numpy() for name in ("kind", "source", "target"))
    middle, sender, receiver = additive_effects(kind, source, target, cells["log"].to_numpy())
    forward = slice(comparable.height)
    return comparable.with_columns(
        pl.Series("expected_ns", np.exp(middle[kind[forward]])),
        pl.Series("sender", np.exp(sender[source[forward]])).fill_nan(None),
        pl.Series("receiver", np.exp(receiver[target[forward]])).fill_nan(None),
    )


def additive_effects(
    kind: Ints, source: Ints, target: Ints, log_time: Floats
) -> tuple[Floats, Floats, Floats]:
    """What each kind of transfer takes, and what each sender and receiver adds to all of its own.

    Median polish (Tukey, "Exploratory Data Analysis", 1977, chapter 11) with gaps: medians of kinds, of rows
    and of columns are taken off in turn, so slow cells move none, up to half of a row or a column. The
    typical rank adds nothing. Of an even number the lower median is taken: where half are slow, they are.

    Args:
        kind: [C] numbers, none negative.
        source: [C] ranks, none negative.
        target: [C] ranks.
        log_time: [C] logarithms.

    Returns:
        [S] of kinds, [R] of senders, [R] of receivers, logarithms; NaN for a rank with fewer than
        `MIN_PAIRS` others that way.
    """
    num_ranks = int(max(source.max(), target.max())) + 1
    directions = (source, target), (target, source)
    enough = [_partners(ends, others, num_ranks) >= MIN_PAIRS for ends, others in directions]
    middle = np.zeros(int(kind.max()) + 1)
    effects = np.zeros((2, num_ranks))
    left = log_time.copy()
    for _ in range(MAX_ROUNDS):
        moved = _take_off(left, kind, middle, np.ones(middle.size, np.bool_))
        for effect, is_known, ends in zip(effects, enough, (source, target)):
            moved = max(moved, _take_off(left, ends, effect, is_known))
            typical = float(np.quantile(effect[is_known], 0.5, method="lower")) if is_known.any() else 0.0
            effect[is_known] -= typical
            left += typical * is_known[ends]
        if moved < SETTLED:
            break
    sender, receiver = (np.where(is_known, effect, np.nan) for is_known, effect in zip(enough, effects))
    return middle, sender, receiver


def _partners(ends: Ints, others: Ints, num_ranks: int) -> Ints:
    """[R] with how many others each rank has transfers."""
    pairs = np.unique(ends * num_ranks + others)
    return np.bincount(pairs // num_ranks, minlength=num_ranks)


def _take_off(left: Floats, labels: Ints, effect: Floats, is_known: NDArray[np.bool_]) -> float:
    """Move the median of what is left of each label into its effect; how far the farthest was."""
    median = pl.col("left").quantile(0.5, "lower")
    medians = pl.DataFrame({"label": labels, "left": left}).group_by("label").agg(median)
    step = np.zeros(effect.size)
    step[medians["label"].to_numpy()] = medians["left"].to_numpy()
    step *= is_known
    effect += step
    left -= step[labels]
    return float(np.abs(step).max())
