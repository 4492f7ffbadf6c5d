"""Errors of queries in one line: the wrong word, and the valid ones in its place.

Takes an error of DuckDB, the query, and the tables of its run; returns a line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dpro.errors import first_line
from dpro.schema import TABLES
from dpro.words import suggest

_KIND = re.compile(r"^[A-Z][\w ]* Error: ")
_COLUMN = re.compile(r'(?i)(?:referenced column|does not have a column named|^column) "(.+?)"')
_TABLE = re.compile(r'(?:Table with name|Referenced table) "?([^\s"]+)"? (?:does not exist|not found)')
_FUNCTION = re.compile(r"Function with name (\S+) does not exist")
_SYNTAX = re.compile(r'syntax error at or near "(.+?)"')


def tables_in(sql: str) -> list[str]:
    """Return the tables whose names occur as words in a query, even if not as tables."""
    words = {*re.findall(r"\w+", sql.lower())}
    return [name for name in TABLES if name in words]


def in_words(error: Exception, sql: str, there: Sequence[str]) -> str:
    """Word DuckDB's error as one line.

    Args:
        there: tables of the run that have rows.
    """
    line = _KIND.sub("", first_line(error))
    if (wrong := _COLUMN.search(line)) and "GROUP BY" not in line:
        tables = tables_in(sql)
        columns = [column for name in tables for column in TABLES[name].columns]
        has = "; ".join(f"{name} has {', '.join(TABLES[name].columns)}" for name in tables)
        quoted = " (strings take single quotes)" if f'"{wrong[1]}"' in sql else ""
        return f"no column {wrong[1]!r}{quoted or suggest(wrong[1], columns)}; {has or _tables(there)}"
    if wrong := _TABLE.search(line):
        return f"no table {wrong[1]!r}{suggest(wrong[1], there)}; {_tables(there)}"
    if wrong := _FUNCTION.search(line):
        meant = re.search(r'Did you mean "(.+?)"', str(error))
        return f"no function {wrong[1]!r}" + (f" (did you mean {meant[1]!r}?)" if meant else "")
    if wrong := _SYNTAX.search(line):
        quote = '; the column window is written "window"' * bool(re.search(r'(?i)(?<!")\bwindow\b(?!")', sql))
        return f"not SQL: {wrong[1]!r}{quote}"
    return line


def _tables(there: Sequence[str]) -> str:
    return f"the tables are {', '.join(there)}"
