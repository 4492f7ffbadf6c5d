"""`dpro query`: the tables of a run, and SQL over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import open_or_import, run_argument
from dpro.cli.output import console, json_option, print_json
from dpro.errors import needs_extra

if TYPE_CHECKING:
    from polars import DataFrame

    from dpro.store import Run

SHOWN = 50  # rows in a terminal


@click.command()
@run_argument
@click.argument("sql", default="", metavar="[SQL]")
@json_option
def query(run: str, sql: str, as_json: bool) -> None:
    """Query the tables of a run with SQL.

    \b
    dpro query RUN                                   its tables and their columns
    dpro query RUN "SELECT rank, max(duration_ns) FROM steps GROUP BY rank"
    dpro query RUN "SELECT * FROM counters" --json   up to 100,000 rows

    SQL is that of DuckDB: one SELECT, which can read the tables of the run and nothing else, for 20 s. Times
    are ns; https://duckdb.org/docs/sql/introduction describes the language, docs/schema.md the tables.
    """
    opened = open_or_import(run)
    if not sql:
        _list_tables(opened, as_json)
        return
    from dpro.extensions.query.ask import MAX_ROWS, ask, plain_value
    from dpro.extensions.query.document import QueryDocument

    with needs_extra("query"):
        answer = ask(opened, sql, MAX_ROWS if as_json else SHOWN)
    if as_json:
        rows = [[plain_value(value) for value in row] for row in answer.rows.iter_rows()]
        print_json(QueryDocument(columns=answer.rows.columns, rows=rows, is_cut=answer.is_cut))
        return
    out = console()
    _print_rows(answer.rows)
    if answer.is_cut:
        out.print(f"more than {SHOWN} rows: --json has up to {MAX_ROWS:,}; LIMIT and ORDER BY choose")


def _print_rows(rows: DataFrame) -> None:
    """Print rows as a table; if it is wider than the terminal, row by row with one column per line."""
    from rich.table import Table

    from dpro.extensions.query.ask import value_in_words

    out, cells = console(), [[value_in_words(value) for value in row] for row in rows.iter_rows()]
    widths = [max(map(len, column)) for column in zip(rows.columns, *cells, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > out.width:
        for number, row in enumerate(cells):
            lines = [f"{name}: {value}" for name, value in zip(rows.columns, row, strict=True)]
            out.print("\n".join(["", *lines] if number else lines))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, dtype in rows.schema.items():
        table.add_column(name, justify="right" if dtype.is_numeric() else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    out.print(table)


def _list_tables(run: Run, as_json: bool) -> None:
    """Print the tables that have rows, with their columns."""
    from dpro.extensions.query.ask import tables_of
    from dpro.extensions.query.document import TableDocument, TablesDocument
    from dpro.schema import TABLES

    tables = tables_of(run)
    if as_json:
        listed = [TableDocument(name, rows, list(TABLES[name].columns)) for name, rows in tables.items()]
        print_json(TablesDocument(tables=listed))
        return
    out = console()
    for name, rows in tables.items():
        out.print(f"{name}  {rows:,} rows  {', '.join(TABLES[name].columns)}")
