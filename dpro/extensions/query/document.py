"""What `dpro query --json` answers with."""

from __future__ import annotations

from dpro.documents import Document, DocumentPart

Value = str | int | float | bool | None


class QueryDocument(Document, frozen=True, kw_only=True):
    """Rows that answer a query.

    Attributes:
        columns: their names, in order.
        rows: a list of values for each row.
        is_cut: whether there are more rows.
    """

    columns: list[str]
    rows: list[list[Value]]
    is_cut: bool


class TableDocument(DocumentPart, frozen=True):
    """A table of a run.

    Attributes:
        name: in queries.
        rows: how many.
        columns: their names; docs/schema.md says what they hold.
    """

    name: str
    rows: int
    columns: list[str]


class TablesDocument(Document, frozen=True, kw_only=True):
    """The tables of a run that have rows.

    Attributes:
        tables: in the order of docs/schema.md.
    """

    tables: list[TableDocument]
