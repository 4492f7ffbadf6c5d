"""Documents of `dpro query --json`."""

from __future__ import annotations

from dpro.documents import Document, DocumentPart

Value = str | int | float | bool | None


class QueryDocument(Document, frozen=True, kw_only=True):
    """The result of a query.

    Attributes:
        columns: names of the columns, in order.
        rows: list of values of each row.
        is_cut: whether there are more rows.
    """

    columns: list[str]
    rows: list[list[Value]]
    is_cut: bool


class TableDocument(DocumentPart, frozen=True):
    """A table of a run.

    Attributes:
        name: name of the table in queries.
        rows: number of rows.
        columns: names of the columns; docs/schema.md describes them.
    """

    name: str
    rows: int
    columns: list[str]


class TablesDocument(Document, frozen=True, kw_only=True):
    """The tables of a run that have rows.

    Attributes:
        tables: the tables, in the order of docs/schema.md.
    """

    tables: list[TableDocument]
