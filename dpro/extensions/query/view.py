"""Dashboard view "Query": an input for SQL, the tables of the run with their columns, and the result.

Takes the query of the link; returns a table. A query can read only the tables, which every user of the page
may see anyway, and one runs at a time.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import Input, State, dcc, html

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, in_browser, large_table, message, view
from dpro.errors import needs_extra
from dpro.extensions.query.ask import EXAMPLES, MAX_ROWS, QueryRows, ask, tables_of, value_in_words
from dpro.schema import TABLES
from dpro.words import counted

NAME = "query"
KEY = "sql"  # parameter of the link
SHOWN = 1000  # rows on the page


def answer_of(loaded: Loaded, link: Link) -> QueryRows:
    """Return the result of a link's query; the latest result is kept.

    Raises:
        DproError: the query is refused, or fails.
    """
    sql = link.options.get(KEY, "").strip()
    if not sql:
        return QueryRows(pl.DataFrame(), False)
    with needs_extra("query"):
        return loaded.once("query", lambda: ask(loaded.run, sql), inputs=sql)


def _form(loaded: Loaded, link: Link) -> Any:
    there = {*tables_of(loaded.run), *(["gpus"] if loaded.run.manifest.gpus else [])}
    examples = [
        dcc.Link(words, href=link.with_options(sql=sql), className="choice")
        for words, (sql, tables) in EXAMPLES.items()
        if all(name in there for name in tables)
    ]
    return [
        dcc.Textarea(
            id="sql", value=link.options.get(KEY, ""), rows=6, placeholder="SELECT … FROM spans",
        ),
        html.Div([html.Button("run", id="run-query", title="Ctrl+Enter"), *examples], className="choices"),
    ]  # fmt: skip


def _tables(loaded: Loaded, _link: Link) -> Any:
    """Return the tables with rows, each of which unfolds to its columns."""
    return [
        html.Details(
            [
                html.Summary(f"{name}: {counted(rows, 'row')}", title=TABLES[name].doc),
                html.Dl(
                    [
                        cell
                        for column, declared in TABLES[name].columns.items()
                        for cell in (html.Dt(html.Code(column)), html.Dd(declared.doc))
                    ]
                ),
            ]
        )
        for name, rows in tables_of(loaded.run).items()
    ]


def _rows(loaded: Loaded, link: Link) -> Any:
    answer = answer_of(loaded, link)
    rows = answer.rows
    if not rows.width:
        return message("Type a query, or click an example. One SELECT reads the tables of this run.")
    if rows.is_empty():
        return message("No row answers the query.")
    cells = [[value_in_words(value) for value in row] for row in rows.head(SHOWN).iter_rows()]
    return [
        html.P(_extent(rows.height, answer.is_cut), className="note"),
        large_table(rows.columns, cells, _first_number(rows)),
        csv_link(NAME, "rows", link),
    ]


def _extent(rows: int, is_cut: bool) -> str:
    """Word the number of rows in the result, on the page and in the files."""
    if is_cut:
        return f"the first {SHOWN:,} rows; the first {MAX_ROWS:,} as CSV; there are more"
    if rows > SHOWN:
        return f"the first {SHOWN:,} of {rows:,} rows; all as CSV"
    return counted(rows, "row")


def _first_number(rows: pl.DataFrame) -> int:
    """Return the index of the first of the trailing columns of numbers."""
    kinds = [dtype.is_numeric() for dtype in rows.dtypes]
    return len(kinds) - next((n for n, numeric in enumerate(reversed(kinds)) if not numeric), len(kinds))


VIEW = view(
    NAME,
    "Query",
    needs.anything,
    Panel("SQL", "query-form", "reading the tables", _form),
    Panel("Tables", "query-tables", "reading the tables", _tables),
    Panel("Rows", "query-rows", "running the query", _rows, wide=True),
    tables={"rows": lambda loaded, link: answer_of(loaded, link).rows},
    register=lambda app, _runs: in_browser(
        app, "query", Input("run-query", "n_clicks"), State("sql", "value")
    ),
)
