"""Expressions on columns with the ranks of groups as text (`dpro.members`).

Takes such a column; returns values computed once per distinct text, which are few among millions of rows.
Also converts the lists of ranks that sources and older tables have to texts.
"""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from dpro.members import count_of, members_of, members_text

GROUP_RANKS = "group_ranks"


def num_members(column: str = GROUP_RANKS) -> pl.Expr:
    """Return an expression: the number of ranks in each text of a column, Int64; 0 where there are none."""
    return of_each_text(column, count_of, pl.Int64())


def sorted_members(column: str = GROUP_RANKS) -> pl.Expr:
    """Return an expression: the texts of a column, with their ranks in ascending order."""
    return of_each_text(column, lambda text: members_text(sorted(members_of(text))), pl.String())


def of_each_text(column: str, function: Callable[[str], object], dtype: pl.DataType) -> pl.Expr:
    """Return an expression: a function of each text of a column, called once per text; null for null."""

    def computed(texts: pl.Series) -> pl.Series:
        distinct = texts.drop_nulls().unique()
        values = pl.Series("value", list(map(function, distinct.to_list())), dtype=dtype)
        return _looked_up(texts, distinct, values)

    return pl.col(column).map_batches(computed, return_dtype=dtype, is_elementwise=True)


def texts_of_lists(lists: pl.Series) -> pl.Series:
    """Convert lists of ranks to texts, each distinct list once.

    Raises:
        polars.exceptions.PolarsError: the values are not lists of ranks.
    """
    ranks = lists.cast(pl.List(pl.Int64))
    distinct = ranks.drop_nulls().unique()
    return _looked_up(
        ranks, distinct, pl.Series("value", list(map(members_text, distinct.to_list())), dtype=pl.String)
    )


def _looked_up(keys: pl.Series, distinct: pl.Series, values: pl.Series) -> pl.Series:
    """Return [N] values of the keys; null for null."""
    rows = (
        keys.alias("key")
        .to_frame()
        .join(pl.DataFrame({"key": distinct, "value": values}), on="key", how="left", maintain_order="left")
    )
    return rows["value"].alias(keys.name)


def with_texts(frame: pl.DataFrame) -> pl.DataFrame:
    """Convert column `group_ranks` to texts where an earlier version wrote lists."""
    ranks = frame[GROUP_RANKS]
    return frame.with_columns(texts_of_lists(ranks)) if isinstance(ranks.dtype, pl.List) else frame
