"""A user's history: which findings named which host, and which commands were run for them.

Reads and writes rows in `$DPRO_HISTORY`, or `$XDG_STATE_HOME/dpro/history.sqlite`
(`~/.local/state/dpro/history.sqlite`). `DPRO_HISTORY=off` turns it off. Several processes may write at once.
Rows that cannot be read or written are left out: no command fails because of its history. A finding of a run
is one row, however often the run is diagnosed. Rows are kept for a year.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import field
from msgspec.structs import astuple

from dpro.detect.findings import Finding, class_in_words
from dpro.detect.observations import Observation, observe
from dpro.documents import Document, DocumentPart
from dpro.errors import DproError
from dpro.units import NS_PER_S
from dpro.words import ordinal

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
        run: the run directory at that time.
    """

    host: str
    class_: str = field(name="class")
    confidence: float
    time_ns: int
    run: str  # stored as `run_name` returns it


class HistoryDocument(Document, frozen=True, kw_only=True):
    """Findings of earlier runs that named a host.

    Attributes:
        path: path of the history; null where it is turned off.
        findings: the findings, oldest first.
        cleared: number of findings removed by `--clear`.
    """

    path: str | None
    findings: list[Remembered]
    cleared: int


def history_path() -> Path | None:
    """Return the path of the history; None where it is turned off or there is no home directory."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return None if chosen.lower() in OFF else Path(chosen)
    state = os.environ.get("XDG_STATE_HOME", "")
    with suppress(RuntimeError):
        base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        return base / "dpro" / "history.sqlite"
    return None


def run_name(run: Path) -> str:
    """Return a name of a run that a later recording at the same path does not share."""
    try:
        return f"{run.resolve()}#{run.stat().st_ino}"
    except OSError:
        return str(run)


@contextmanager
def _open_history() -> Iterator[sqlite3.Connection]:
    """Open the history in a transaction, which is rolled back if the block fails.

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
    """Store findings; a finding stored before keeps its earliest time and its highest confidence."""
    insert = (
        f"INSERT INTO findings ({_COLUMNS}) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "confidence = max(confidence, excluded.confidence), time_ns = min(time_ns, excluded.time_ns)"
    )
    with suppress(OSError, sqlite3.Error), _open_history() as database:
        database.execute("DELETE FROM findings WHERE time_ns < ?", (time.time_ns() - KEPT_NS,))
        database.executemany(insert, map(astuple, rows))


def remembered(host: str = "") -> list[Remembered]:
    """Return the findings about a host, or about all, oldest first; empty where they cannot be read.

    Args:
        host: its name; empty for all.
    """
    query = f"SELECT {_COLUMNS} FROM findings WHERE ? IN ('', host) ORDER BY time_ns, host"
    with suppress(OSError, sqlite3.Error), _open_history() as database:
        return [Remembered(*row) for row in database.execute(query, (host,))]
    return []


def forget(host: str = "") -> int:
    """Remove the findings about a host, or about all, and return their number.

    Args:
        host: its name; empty for all, which also clears the record of commands.

    Raises:
        DproError: the history cannot be written.
    """
    try:
        with _open_history() as database:
            if not host:
                database.execute("DELETE FROM commands")
            return database.execute("DELETE FROM findings WHERE ? IN ('', host)", (host,)).rowcount
    except (OSError, sqlite3.Error) as error:
        raise DproError(f"{history_path() or 'history'}: cannot be changed: {error}") from error


def allow_command(command: str, run: str, host: str, most: int, since_ns: int) -> bool:
    """Return whether a command, run fewer than `most` times since `since_ns`, may run; if so, record it.

    Args:
        run: as `run_name` returns it.

    Raises:
        OSError: the history cannot be opened, or is turned off.
        sqlite3.Error: it cannot be read or written.
    """
    with _open_history() as database:
        database.execute("BEGIN IMMEDIATE")  # serialises watchers between the count and the insert
        query = "SELECT count(*) FROM commands WHERE command = ? AND time_ns >= ?"
        ((number,),) = database.execute(query, (command, since_ns))
        if number < most:
            database.execute("INSERT INTO commands VALUES (?, ?, ?, ?)", (command, run, host, time.time_ns()))
        return bool(number < most)


# Observations about a host that is found at fault again.

DAY_NS = 86_400 * NS_PER_S
MIN_CONFIDENCE = 0.5  # of stored findings
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def with_history(
    findings: Iterable[Finding], hosts: Mapping[int, str], run: Path, time_ns: int
) -> list[Finding]:
    """Store findings that name a host; return all findings, with observations about earlier ones."""
    name, with_lines, rows = run_name(run), [], []
    for finding in findings:
        host = culprit_of(finding, hosts).host
        if host and finding.confidence >= MIN_CONFIDENCE:
            row = Remembered(host, finding.class_, finding.confidence, time_ns, name)
            rows.append(row)
            recurring = recurrence(row, remembered(host))
            finding = finding.observing(recurring) if recurring is not None else finding
        with_lines.append(finding)
    if rows:
        remember(rows)
    return with_lines


def recurrence(now: Remembered, before: Iterable[Remembered]) -> Observation | None:
    """Return an observation that counts earlier findings about a host; None where there are none."""
    earlier = [row for row in before if row.run != now.run and row.time_ns < now.time_ns]
    if not earlier:
        return None
    of_class = Counter(row.class_ for row in earlier)
    number = of_class.pop(now.class_, 0) + 1
    nth = _ORDINALS[number] if number < len(_ORDINALS) else ordinal(number)
    days = _days(now.time_ns - min(row.time_ns for row in earlier))
    more = ", ".join(f"{count} of {class_in_words(class_)}" for class_, count in sorted(of_class.items()))
    recurring = observe(
        "finding-again", f"host {{host}}: {nth} finding of {{finding}} in {days}",
        host=now.host, finding=class_in_words(now.class_), times=number, findings_before=len(earlier),
    )  # fmt: skip
    return recurring.then(", after {others}", others=more) if more else recurring


def _days(ns: int) -> str:
    days = -(-ns // DAY_NS)
    return "a day" if days <= 1 else f"{days} days"


# The host that a finding blames. Findings that name one of several parts, and those that blame the work or
# the program, name no host.

BLAMELESS = ("hang.mismatch", "imbalance.", "pauses", "slow.regression", "memory.", "jitter")
OF_RANKS = ("rank", "ranks", "nic", "sender", "receiver", "link")


class Culprit(NamedTuple):
    """A host, or why there is none.

    Attributes:
        host: its name; empty where the finding names no single one.
        why_not: why it names none; empty where it does.
    """

    host: str
    why_not: str = ""


def culprit_of(finding: Finding, hosts: Mapping[int, str]) -> Culprit:
    """Return the host that a finding is about, or why it names none."""
    if finding.class_.startswith(BLAMELESS):
        return Culprit("", f"{class_in_words(finding.class_)}: no part of a host is at fault")
    if len(set(hosts.values())) < 2:
        return Culprit("", "the job runs on one host")
    kind = finding.component_kind
    if kind == "one of":
        return Culprit("", f"ambiguous: one of {finding.component_id}")
    if kind == "host" and finding.component_id in hosts.values():
        return Culprit(finding.component_id)
    if kind not in OF_RANKS:
        return Culprit("", f"it is about {kind} {finding.component_id}, not about one host")
    ranks = finding.ranks if kind in ("rank", "ranks") else finding.part_ranks
    if not ranks:  # leaf1 > node3:nic0
        return Culprit("", f"it is about {kind} {finding.component_id}, which is not a rank")
    named = {hosts.get(rank, "") for rank in ranks}
    if len(named) == 1 and "" not in named:
        return Culprit(named.pop())
    return Culprit("", f"ambiguous: {kind} {finding.component_id} is on {len(named)} hosts")
