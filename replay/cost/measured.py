"""Tables that a user measured, in files: read, with what is wrong about one said in a line.

In: a Parquet or CSV file, and which of its columns are numbers and which are names. Out: these columns, as
numbers and as text. Which of them there must be, and what they mean, their readers decide.
"""

from __future__ import annotations

from collections.abc import Collection
from io import BytesIO
from pathlib import Path

import polars as pl

from dpro.errors import InputError, first_line
from dpro.limits import MAX_WHOLE_BYTES, read_small
from dpro.panics import panics_as


def read_measured(path: Path, numbers: Collection[str], names: Collection[str]) -> pl.DataFrame:
    """The columns of a file that are asked for, as far as it has them.

    Args:
        path: of the file, Parquet unless it ends in `.csv`.
        numbers: columns that become floats; null where there is nothing.
        names: columns that become text.

    Raises:
        InputError: it cannot be read, or a column holds something else; the message says which.
    """
    frame = _read(path)
    return frame.select(
        *(_numbers(frame[name], path) for name in numbers if name in frame.columns),
        *(_names(frame[name], path) for name in names if name in frame.columns),
    )


def _read(path: Path) -> pl.DataFrame:
    def unreadable(why: str) -> InputError:
        return InputError(f"{path}: is no readable Parquet or CSV table ({why})")

    content = BytesIO(read_small(path, MAX_WHOLE_BYTES))
    try:
        with panics_as(unreadable):
            if path.suffix == ".csv":
                return pl.read_csv(content, infer_schema_length=None)
            return pl.read_parquet(content)
    except pl.exceptions.PolarsError as error:
        raise unreadable(first_line(error)) from error


def _numbers(column: pl.Series, path: Path) -> pl.Series:
    if column.dtype in (pl.String, pl.Categorical):
        text = column.cast(pl.String)
        numbers = text.str.strip_chars().cast(pl.Float64, strict=False)
        wrong = text.filter(numbers.is_null() & (text.fill_null("") != ""))
        if wrong.len():
            raise InputError(f"{path}: column {column.name} holds {wrong[0][:40]!r}, which is no number")
        return numbers
    if not (column.dtype.is_numeric() or column.dtype == pl.Null):
        raise InputError(f"{path}: column {column.name} holds no numbers but {column.dtype}")
    return column.cast(pl.Float64)


def _names(column: pl.Series, path: Path) -> pl.Series:
    kind = column.dtype
    if not (kind in (pl.String, pl.Categorical, pl.Enum, pl.Null) or kind.is_numeric()):
        raise InputError(f"{path}: column {column.name} holds no names but {kind}")
    return column.cast(pl.String)
