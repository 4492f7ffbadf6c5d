"""Declarations of tables: columns with types, and the order of rows.

Takes frames; returns them with the columns, types and order of a declaration. The tables themselves are
declared in `dpro.schema`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import polars as pl

from dpro.errors import InternalError, first_line

# With its first array, Polars imports NumPy and looks up its version from Rust, where Ctrl-C becomes a panic.
pl.Series([0]).to_numpy()

MAX_SHOWN = 60  # characters of an invalid text that a message repeats
_COLUMN_ERRORS = (pl.exceptions.SchemaError, pl.exceptions.ColumnNotFoundError, pl.exceptions.DuplicateError)
NAN = float("nan")  # default of measured values for which -1 would be valid


def why_unreadable(error: Exception) -> str:
    """Return why a file is not readable as Parquet, in a few words; libraries name bytes of the format."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, _COLUMN_ERRORS):
        return first_line(error)
    return "it is damaged or cut short"


class SchemaError(InternalError):
    """A frame that does not fit its declaration, a defect of dpro; the message names columns or bad rows."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        doc: one sentence.
        default: value where a source lacks the column; None means an empty list.
        of_lists: converts the lists that sources and runs of older formats have to values of the column.
        is_value: returns whether a text is valid in the column; None if every text is.
    """

    dtype: pl.DataType | type[pl.DataType]
    doc: str
    default: object = -1
    of_lists: Callable[[pl.Series], pl.Series] | None = None
    is_value: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class Table:
    """One table: the name of its folder, the meaning of a row, its columns in order, and its sort columns."""

    name: str
    doc: str
    columns: Mapping[str, Column]
    sort_by: tuple[str, ...]

    @property
    def dtypes(self) -> dict[str, pl.DataType | type[pl.DataType]]:
        """The declared type of each column, in order."""
        return {name: column.dtype for name, column in self.columns.items()}

    def empty(self) -> pl.DataFrame:
        """Return the table without rows."""
        return pl.DataFrame(schema=self.dtypes)


def complete(table: Table, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with all declared columns in their types; missing ones get their defaults.

    Args:
        frame: some of the declared columns; a frame without columns has no rows.

    Raises:
        SchemaError: a column is not declared, or a value does not fit its type.
    """
    if not frame.width:
        return table.empty()
    have = typed(table, frame)
    if have.columns == list(table.columns):
        return have
    return have.select(
        pl.col(name) if name in have.columns else _default(column).alias(name)
        for name, column in table.columns.items()
    )


def _default(column: Column) -> pl.Expr:
    return pl.lit([] if column.default is None else column.default, dtype=column.dtype)


def typed(table: Table, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with its columns in their declared types.

    Args:
        frame: some of the declared columns.

    Raises:
        SchemaError: a column is not declared, and so would be lost, or a value does not fit its type.
    """
    unknown = [name for name in frame.columns if name not in table.columns]
    if unknown:
        raise SchemaError(f"table {table.name}: undeclared columns {', '.join(unknown)}")
    other = [name for name, dtype in frame.schema.items() if dtype != table.columns[name].dtype]
    if not other:
        return frame
    try:
        cast = frame.with_columns(_cast(table.columns[name], frame[name]) for name in other)
    except pl.exceptions.PolarsError as error:
        raise SchemaError(f"table {table.name}: {first_line(error)}") from error
    for name in other:
        if cast.schema[name] != table.columns[name].dtype:  # Polars casts only the fields of a struct
            raise SchemaError(f"table {table.name}: {name} is {frame.schema[name]}")
    return cast


def _cast(column: Column, values: pl.Series) -> pl.Series:
    """Return the values in the column's type, converting lists where the column declares how."""
    if column.of_lists is not None and isinstance(values.dtype, pl.List):
        return column.of_lists(values)
    return values.cast(column.dtype)


def conform(table: Table, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with exactly the declared columns, types and row order.

    Raises:
        SchemaError: the frame has an undeclared column, a value that does not fit its type, a null, a text
            that is invalid in its column, or a negative duration other than -1; the message names the column
            and the first bad row.
    """
    conformed = complete(table, frame)
    _refuse_nulls(table, conformed)
    _refuse_invalid_texts(table, conformed)
    if "duration_ns" in table.columns:
        negative = conformed["duration_ns"] < -1
        if negative.any():
            bad = conformed.filter(negative)
            raise SchemaError(f"table {table.name}: negative duration in {bad.row(0, named=True)}")
    if _is_sorted(conformed, table.sort_by):
        return conformed  # sorting copies the whole table
    return conformed.sort(table.sort_by, maintain_order=True)


def _refuse_invalid_texts(table: Table, frame: pl.DataFrame) -> None:
    """Raise if a text is invalid in its column; check distinct texts, which are few even in long tables."""
    for name, column in table.columns.items():
        if column.is_value is None:
            continue
        for text in frame[name].unique(maintain_order=True).to_list():
            if not column.is_value(text):
                raise SchemaError(f"table {table.name}: {name} is {text[:MAX_SHOWN]!r}; {column.doc}")


def _is_sorted(frame: pl.DataFrame, by: tuple[str, ...]) -> bool:
    """Return whether the rows are sorted by these columns, ascending, the first one most significant."""
    num_pairs = max(frame.height - 1, 0)
    in_order = pl.Series([True]).new_from_index(0, num_pairs)
    for name in reversed(by):  # by series, since starting the query engine takes longer for most tables
        before, after = frame[name].head(num_pairs), frame[name].tail(num_pairs)
        in_order = (before < after) | ((before == after) & in_order)
    return bool(in_order.all())


def _refuse_nulls(table: Table, frame: pl.DataFrame) -> None:
    nulls = {name: count for name, count in frame.null_count().row(0, named=True).items() if count}
    for name in nulls:
        row = frame.filter(pl.col(name).is_null()).row(0, named=True)
        raise SchemaError(f"table {table.name}: {nulls[name]} nulls in {name}, the first in {row}")
