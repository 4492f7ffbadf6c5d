"""SQL over the tables of a run, sandboxed: a query can read nothing else and change nothing.

Takes a run, and one SELECT from anyone who may see the run; returns a frame with a limited number of rows.
DuckDB runs the query in memory, on one thread, in a separate process with bounded memory and time. It opens
no file, loads no extension, and sees no variable and no table but the run's; these settings are locked. Only
tables named in the query are read.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from dpro.errors import UsageError
from dpro.extensions.query.mistakes import in_words, tables_in
from dpro.processes import process_pool
from dpro.schema import TABLES
from dpro.store import Run

MAX_ROWS = 100_000  # of an answer
PATIENCE_S = 20.0
KILLED_AFTER_S = 1.0  # after `PATIENCE_S`, for functions that ignore DuckDB's interrupt
MEMORY_BYTES = 2 << 30  # of a query: DuckDB's `memory_limit` below, and memory that DuckDB does not count
SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",  # never spill to disk
    "memory_limit": "1GB",  # in addition to the tables themselves
    "threads": "1",
    "lock_configuration": "true",
}
TOO_LARGE = f"the query needs more than {SETTINGS['memory_limit']} of memory: ask for less"
_ONE_AT_A_TIME = threading.Lock()


class QueryRows(NamedTuple):
    """The result of a query.

    Attributes:
        rows: rows, at most the requested number.
        is_cut: whether there are more rows.
    """

    rows: pl.DataFrame
    is_cut: bool


def ask(run: Run, sql: str, most: int = MAX_ROWS, patience_s: float = PATIENCE_S) -> QueryRows:
    """Answer one SELECT from the tables of a run; one query runs at a time.

    Raises:
        UsageError: the query is not a single SELECT, is invalid, or takes too long or too much memory.
        InputError: a table cannot be read.
        ImportError: DuckDB is not installed.
    """
    import duckdb  # noqa: F401  raises here if missing; the worker process needs it

    with _ONE_AT_A_TIME:
        began = time.monotonic()
        try:
            return _submitted(run, sql, most, patience_s).result()
        except BrokenProcessPool as error:
            _process.cache_clear()
            raise UsageError(
                _too_long(patience_s) if time.monotonic() - began > patience_s else TOO_LARGE
            ) from error


def _submitted(run: Run, sql: str, most: int, patience_s: float) -> Future[QueryRows]:
    """Submit a query to the worker process, replacing one that has died since the last query."""
    try:
        return _process().submit(_answer, run, sql, most, patience_s)
    except BrokenProcessPool:
        _process.cache_clear()
        return _process().submit(_answer, run, sql, most, patience_s)


@cache
def _process() -> ProcessPoolExecutor:
    """Return the worker process that runs queries, one after another; a query that does not end kills it."""
    return process_pool(1)


def _answer(run: Run, sql: str, most: int, patience_s: float) -> QueryRows:
    """Run a query in the worker process; a query that DuckDB cannot interrupt ends the process.

    Raises:
        UsageError: the query is not a single SELECT, is invalid, or takes too long or too much memory.
        InputError: a table cannot be read.
    """
    import duckdb

    with duckdb.connect(":memory:", config=SETTINGS) as database, _in_words(run, sql, patience_s):
        statements = database.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise UsageError("only a single SELECT is allowed")
        named = tables_in(sql)
        for name, table in TABLES.items():
            there = run.table(table) if name in named else table.empty()
            database.register(name, there.to_arrow())
        stop = threading.Timer(patience_s, database.interrupt)
        with _bounded(patience_s + KILLED_AFTER_S):
            stop.start()
            try:
                rows = database.sql(sql).limit(most + 1).pl()
            finally:
                stop.cancel()
    return QueryRows(rows.head(most), rows.height > most)


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Limit this process inside the block: killed after `seconds`, at most `MEMORY_BYTES` more memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    wanted = mapped + MEMORY_BYTES
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == -1 else min(wanted, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _in_words(run: Run, sql: str, patience_s: float) -> Iterator[None]:
    """Turn DuckDB's errors inside into one line.

    Raises:
        UsageError: the query failed.
    """
    import duckdb

    try:
        yield
    except duckdb.InterruptException as error:
        raise UsageError(_too_long(patience_s)) from error
    except (duckdb.OutOfMemoryException, MemoryError) as error:
        raise UsageError(TOO_LARGE) from error
    except duckdb.Error as error:
        raise UsageError(in_words(error, sql, list(tables_of(run)))) from error


def _too_long(patience_s: float) -> str:
    return f"the query took more than {patience_s:g} s: ask for less"


def tables_of(run: Run) -> dict[str, int]:
    """Return the number of rows of each table that has any."""
    return {name: rows for name, rows in run.rows().items() if rows}


EXAMPLES = {  # title -> query, and the tables that it needs; "gpus" where it needs GPUs
    "kernels by time": (
        "SELECT name, count(*) AS calls, sum(duration_ns) / 1e6 AS total_ms,\n"
        "max(duration_ns) / 1e3 AS longest_us\n"
        "FROM spans WHERE kind = 'kernel' GROUP BY name ORDER BY total_ms DESC LIMIT 20",
        ("spans", "gpus"),
    ),
    "operators by time": (
        "SELECT name, count(*) AS calls, sum(duration_ns) / 1e6 AS total_ms\n"
        "FROM spans WHERE kind = 'cpu_op' GROUP BY name ORDER BY total_ms DESC LIMIT 20",
        ("spans",),
    ),
    "bytes by collective": (
        'SELECT op, "group", count(*) AS calls, sum(bytes_in) / 1e6 AS megabytes\n'
        'FROM collectives WHERE bytes_in > 0 GROUP BY op, "group" ORDER BY megabytes DESC',
        ("collectives",),
    ),
    "slowest step of each rank": (
        "SELECT rank, arg_max(step, duration_ns) AS step, max(duration_ns) / 1e6 AS ms\n"
        "FROM steps WHERE step >= 0 GROUP BY rank ORDER BY rank",
        ("steps",),
    ),
    "launches before each kernel": (
        "SELECT k.name, count(*) AS launches, avg(k.start_ns - r.start_ns) / 1e3 AS us_from_launch\n"
        'FROM spans k JOIN spans r USING (rank, "window", correlation)\n'
        "WHERE k.kind = 'kernel' AND r.kind = 'runtime' AND correlation >= 0\n"
        "GROUP BY k.name ORDER BY us_from_launch DESC LIMIT 20",
        ("spans", "gpus"),
    ),
}


def plain_value(value: Any) -> Any:
    """Return a value of an answer as a JSON value; as text if JSON has no such type."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def value_in_words(value: object) -> str:
    """Return a value of an answer as text for people; empty for null."""
    return "" if value is None else f"{value:,.6g}" if isinstance(value, float) else str(value)
