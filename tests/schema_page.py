"""The page of the tables, `docs/schema.md`, generated from their declarations: `make schema` writes it.

In: `dpro.schema.TABLES`. Out: one Markdown table per table of a run, in the order of the declarations.
"""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl

from dpro.schema import TABLES
from dpro.table import Column, Table

HEAD = """---
search:
  boost: 0.1
---

# Tables of a run

A run directory holds one folder per table, with one or more Parquet parts per rank. `dpro.schema` declares
every column, and `make schema` generates this page from it. [In notebooks](notebook.md) the tables are polars
frames.

Times are integer nanoseconds on the clock of the host that recorded them, and are never rewritten: how far
clocks are apart is in `clock_samples`. Ids are integers, and -1 means none. Intervals are half open. The
default is the value of rows whose source does not have the column.

The manifest says the version of the format (`format_version`). Every dpro reads the runs that releases before
it wrote; a sample of each version is kept in `tests/formats`. Tables and columns that it does not know are
left out. A run of a later version is refused, with the dpro that it needs.
"""
UNITS = {"ns", "bytes"}  # parts of names; what has none of them is a number, an id or a count


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *map(section, TABLES.values())])


def section(table: Table) -> str:
    """Return the section of one table."""
    order = ", ".join(f"`{name}`" for name in table.sort_by)
    rows = [
        f"| `{name}` | {type_of(column)} | {unit_of(name)} | {default_of(column)} | {_escaped(column.doc)} |"
        for name, column in table.columns.items()
    ]
    head = ["| column | type | unit | default | meaning |", "|---|---|---|---|---|"]
    return "\n".join([f"## {table.name}\n", f"{table.doc} Sorted by {order}.\n", *head, *rows, ""])


def type_of(column: Column) -> str:
    """Return the type of a column as people write it."""
    if isinstance(column.dtype, pl.Enum):
        return "one of " + ", ".join(f"`{value}`" for value in column.dtype.categories)
    return _type_name(column.dtype)


def _type_name(dtype: object) -> str:
    if isinstance(dtype, pl.List):
        return f"list of {_type_name(dtype.inner)}"
    return str(dtype).lower()


def unit_of(name: str) -> str:
    """Return the unit that a column's name states; it is empty where there is none."""
    return next((word for word in name.split("_") if word in UNITS), "")


def default_of(column: Column) -> str:
    """Return the default of a column: a number, a text, or empty for the empty text and list."""
    return "" if column.default in (None, "") else f"`{column.default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
