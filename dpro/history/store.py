"""The history of a user: which findings named which host, and which commands were run for them.

In: rows. Out: rows, from `$DPRO_HISTORY`, or `$XDG_STATE_HOME/dpro/history.sqlite`
(`~/.local/state/dpro/history.sqlite`). `DPRO_HISTORY=off` turns it off. Several processes may write at once.
What cannot be read or written is left out: no command fails for its history. A finding of a run is one row,
however often the run is looked at. Rows are kept for a year.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from msgspec import field
from msgspec.structs import astuple

from dpro.documents import Document, DocumentPart
from dpro.errors import DproError
from dpro.units import NS_PER_S

VARIABLE = "DPRO_HISTORY"
OFF = ("", "off", "0")
BUSY_S = 2.0  # for another process to finish
KEPT_NS = 365 * 86_400 * NS_PER_S
_PRIVATE = 0o700
_COLUMNS = "host, class, confidence, time_ns, run"
_TABLES = """
CREATE TABLE IF NOT EXISTS findings (
    run TEXT, host TEXT, class TEXT, confidence REAL, time_ns INTEGER, PRIMARY KEY (run, host, class)
);
CREATE TABLE IF NOT EXISTS commands (command TEXT, run TEXT, host TEXT, time_ns INTEGER);
"""


class Remembered(DocumentPart, frozen=True):
    """A finding of an earlier run that named a host.

    Attributes:
        host: its name.
        class: such as `slow.nic`.
        confidence: 0 to 1.
        time_ns: when it was found.
        run: the run directory, as it was then.
    """

    host: str
    class_: str = field(name="class")
    confidence: float
    time_ns: int
    run: str  # kept as `run_name` gives it


class HistoryDocument(Document, frozen=True, kw_only=True):
    """Findings of earlier runs that named a host.

    Attributes:
        path: of the history; null where it is turned off.
        findings: the oldest first.
        cleared: how many were removed by `--clear`.
    """

    path: str | None
    findings: list[Remembered]
    cleared: int


def history_path() -> Path | None:
    """Return where the history is; None where it is turned off, or there is no home to keep it in."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return None if chosen.lower() in OFF else Path(chosen)
    state = os.environ.get("XDG_STATE_HOME", "")
    with suppress(RuntimeError):
        base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        return base / "dpro" / "history.sqlite"
    return None


def run_name(run: Path) -> str:
    """Return a name of a run that another recording in its place does not have."""
    try:
        return f"{run.resolve()}#{run.stat().st_ino}"
    except OSError:
        return str(run)


@contextmanager
def _opened() -> Iterator[sqlite3.Connection]:
    """Open the history; a transaction, which is taken back if the block fails.

    Raises:
        OSError: it cannot be opened, or is turned off.
        sqlite3.Error: it cannot be read or written.
    """
    path = history_path()
    if path is None:
        raise FileNotFoundError(f"{VARIABLE} turns the history off")
    path.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=BUSY_S)) as database:
        database.executescript(_TABLES)
        with database:
            yield database


def remember(rows: Sequence[Remembered]) -> None:
    """Keep findings; one that is there keeps its time, and its higher confidence."""
    insert = (
        f"INSERT INTO findings ({_COLUMNS}) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "confidence = max(confidence, excluded.confidence), time_ns = min(time_ns, excluded.time_ns)"
    )
    with suppress(OSError, sqlite3.Error), _opened() as database:
        database.execute("DELETE FROM findings WHERE time_ns < ?", (time.time_ns() - KEPT_NS,))
        database.executemany(insert, map(astuple, rows))


def remembered(host: str = "") -> list[Remembered]:
    """Return the findings about a host, or about all, the oldest first; none where they cannot be read.

    Args:
        host: its name; empty for all.
    """
    query = f"SELECT {_COLUMNS} FROM findings WHERE ? IN ('', host) ORDER BY time_ns, host"
    with suppress(OSError, sqlite3.Error), _opened() as database:
        return [Remembered(*row) for row in database.execute(query, (host,))]
    return []


def forget(host: str = "") -> int:
    """Remove the findings about a host, or about all; return how many there were.

    Args:
        host: its name; empty for all.

    Raises:
        DproError: the history cannot be written.
    """
    try:
        with _opened() as database:
            if not host:
                database.execute("DELETE FROM commands")
            return database.execute("DELETE FROM findings WHERE ? IN ('', host)", (host,)).rowcount
    except (OSError, sqlite3.Error) as error:
        raise DproError(f"{history_path() or 'history'}: cannot be changed: {error}") from error


def allow_command(command: str, run: str, host: str, most: int, since_ns: int) -> bool:
    """Note that a command is run for a finding, unless that has been often enough; return whether it may be.

    Args:
        run: as `run_name` gives it.

    Raises:
        OSError: the history cannot be opened, or is turned off.
        sqlite3.Error: it cannot be read or written.
    """
    with _opened() as database:
        database.execute("BEGIN IMMEDIATE")  # of two watchers one asks after the other
        query = "SELECT count(*) FROM commands WHERE command = ? AND time_ns >= ?"
        ((number,),) = database.execute(query, (command, since_ns))
        if number < most:
            database.execute("INSERT INTO commands VALUES (?, ?, ?, ?)", (command, run, host, time.time_ns()))
        return bool(number < most)
