"""Columns that have the ranks of groups as text (`dpro.members`), in frames.

In: such a column. Out: what follows from its texts, computed once for equal ones: they are few, and rows may
be millions. And texts of lists, which sources give, and tables had before.
"""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from dpro.members import count_of, members_of, members_text

GROUP_RANKS = "group_ranks"


def num_members(column: str = GROUP_RANKS) -> pl.Expr:
    """How many ranks the texts of a column say, Int64; 0 where none."""
    return of_each_text(column, count_of, pl.Int64())


def sorted_members(column: str = GROUP_RANKS) -> pl.Expr:
    """The texts of a column, with their ranks in ascending order."""
    return of_each_text(column, lambda text: members_text(sorted(members_of(text))), pl.String())


def of_each_text(column: str, function: Callable[[str], object], dtype: pl.DataType) -> pl.Expr:
    """A function of the texts of a column; null of null."""

    def computed(texts: pl.Series) -> pl.Series:
        distinct = texts.drop_nulls().unique()
        values = pl.Series("value", list(map(function, distinct.to_list())), dtype=dtype)
        return _looked_up(texts, distinct, values)

    return pl.col(column).map_batches(computed, return_dtype=dtype, is_elementwise=True)


def texts_of_lists(lists: pl.Series) -> pl.Series:
    """Return lists of ranks as texts; equal ones are looked at once.

    Raises:
        polars.exceptions.PolarsError: they are something else.
    """
    ranks = lists.cast(pl.List(pl.Int64))
    distinct = ranks.drop_nulls().unique()
    return _looked_up(
        ranks, distinct, pl.Series("value", list(map(members_text, distinct.to_list())), dtype=pl.String)
    )


def _looked_up(keys: pl.Series, distinct: pl.Series, values: pl.Series) -> pl.Series:
    """[N] the value of each key, null of null."""
    rows = (
        keys.alias("key")
        .to_frame()
        .join(pl.DataFrame({"key": distinct, "value": values}), on="key", how="left", maintain_order="left")
    )
    return rows["value"].alias(keys.name)


def with_texts(frame: pl.DataFrame) -> pl.DataFrame:
    """Return rows as they are now declared.

    Args:
        frame: with `group_ranks`, which are lists where an earlier version wrote the file.
    """
    ranks = frame[GROUP_RANKS]
    return frame.with_columns(texts_of_lists(ranks)) if isinstance(ranks.dtype, pl.List) else frame
