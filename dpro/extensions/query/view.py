"""Query: a box for SQL over the tables of the run, what they hold, and the rows that answer.

In: the query of the link. Out: a table. Whoever sees the page sees these tables anyway; a query reads nothing
else, and one runs at a time.
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
    """The rows that answer the query of a link; the latest are kept.

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
    """The tables with rows; each unfolds to its columns."""
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
    """How many rows answer, and how many of them the page and the files have."""
    if is_cut:
        return f"the first {SHOWN:,} rows; the first {MAX_ROWS:,} as CSV; there are more"
    if rows > SHOWN:
        return f"the first {SHOWN:,} of {rows:,} rows; all as CSV"
    return counted(rows, "row")


def _first_number(rows: pl.DataFrame) -> int:
    """The first of the columns of numbers at the end."""
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
