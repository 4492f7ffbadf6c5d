"""Reads lines of logs: the rank that wrote a line, the time, and its text without the prefixes of launchers.

Takes paths of text files, compressed or not, and of torchrun's error files; returns `LogLine`s, in the order
of each file, and `ErrorFile`s. A rank is -1 unless the line or the name of its file states it. Times without
a zone count as UTC, since only their differences matter.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from dpro.errors import InputError
from dpro.ingest.reading.files import Source
from dpro.units import NS_PER_S
from dpro.words import counted, from_json

MAX_LINE = 20_000  # characters; the rest of a longer line is left out
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Prefixes that launchers put before a line, in any order; group `rank`, `local` or `task` is the writer.
_MARKS = (
    re.compile(r"\[rank(?P<rank>\d+)\]:\s?"),  # PyTorch
    re.compile(r"\[default(?P<local>\d+)\]:\s?"),  # torchrun --tee
    re.compile(r"(?P<host>[A-Za-z][\w.-]*):\s(?=\[(?:rank|default|20\d\d-))"),  # pdsh
    re.compile(r"\[\d+,(?P<rank>\d+)\]<std(?:err|out)>:\s?"),  # mpirun --tag-output
    re.compile(r"(?P<task>\d{1,5}):\s(?=\S)"),  # srun --label
    re.compile(r"\[pod/(?P<host>[\w.-]+)(?:/[\w.-]+)?\]\s?"),  # kubectl logs --prefix
    re.compile(r"\(\w+ pid=(?P<pid>\d+)(?:, ip=(?P<host>[\d.]+))?\)\s?"),  # Ray
    # kubectl logs --timestamps
    re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)\s(?=\S)"),
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<host>[\w.-]+) (?=kernel|slurm|systemd)"),  # syslog
)
_OF_NAME = (  # names of files: by torchrun --log-dir, and as users choose them
    re.compile(r"attempt_\d+/(?P<local>\d+)/std(?:out|err)\.log$"),
    re.compile(r"(?:^|[/._-])rank[._-]?(?P<rank>\d+)(?=\D[^/]*$|$)"),
)
_OF_ERROR_FILE = re.compile(r"attempt_(?P<start>\d+)/(?P<local>\d+)/error\.json$")
_DATE_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_SYSLOG = re.compile(r"^([A-Z][a-z]{2}) ([ \d]\d) (\d\d):(\d\d):(\d\d) ")
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_NEAR = 90  # first characters of a line, which may have its time


class LogLine(NamedTuple):
    """A line of a log.

    Attributes:
        source: number of the file.
        rank: global rank of the writer, -1 unless stated.
        local: rank of the writer within its host, -1 unless stated.
        task: srun's task: a rank, or a launcher of ranks; -1 unless stated.
        pid: of the writer, -1 unless stated.
        host: empty unless stated.
        time_ns: ns since 1970; -1 unless stated.
        text: the line without prefixes.
    """

    source: int
    rank: int
    local: int
    task: int
    pid: int
    host: str
    time_ns: int
    text: str

    @property
    def writer(self) -> tuple[int, ...]:
        """Identifies a writer, whose lines are in order, interleaved with those of others."""
        return (self.source, self.rank, self.local, self.task, self.pid)


class RawLine(NamedTuple):
    """A line as it is in a file; most are never parsed.

    Attributes:
        stated: facts about the writer in the name of the file.
        year: year of the file, since some times have none.
    """

    source: int
    text: str
    stated: dict[str, str]
    year: int

    def parse(self) -> LogLine:
        """Parse the line, removing the prefixes of launchers."""
        text = _ESCAPES.sub("", self.text.rstrip("\r\n")).rpartition("\r")[2]  # latest state of progress bars
        when, marks = time_of(text[:_NEAR], self.year), dict(self.stated)
        for _ in _MARKS:
            mark = next((match for pattern in _MARKS if (match := pattern.match(text))), None)
            if mark is None:
                break
            marks |= {name: value for name, value in mark.groupdict().items() if value}
            text = text[mark.end() :]
        rank, local, task, pid = (int(marks.get(name, -1)) for name in ("rank", "local", "task", "pid"))
        return LogLine(self.source, rank, local, task, pid, marks.get("host", ""), when, text)


def read_lines(paths: list[Path], cut: list[str]) -> Iterator[RawLine]:
    """Yield the lines of all files, one file after the other.

    Args:
        cut: receives a sentence for each compressed file that is readable only at its beginning.

    Raises:
        InputError: a file cannot be read.
    """
    for number, path in enumerate(paths):
        stated, num_lines = _stated_by_name(path), 0
        try:
            year = datetime.fromtimestamp(path.stat().st_mtime, UTC).year
            with Source(str(path), path).open() as content:
                text = io.TextIOWrapper(content, encoding="utf-8", errors="replace", newline="\n")
                while line := text.readline(MAX_LINE):
                    num_lines += 1
                    yield RawLine(number, line, stated, year)
        except EOFError as error:
            lines = counted(num_lines, "line")
            cut.append(f"what follows in {path}: {error}, after {lines} that are read; copy it again")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


class ErrorFile(NamedTuple):
    """The exception that ended a process, as torchrun stored it.

    Attributes:
        start: number of the job's start, from 0.
        local: rank within the host.
        stack: the traceback, which ends with the exception.
        time_ns: ns since 1970, to 1 s.
    """

    start: int
    local: int
    stack: str
    time_ns: int


def read_error_files(paths: list[Path]) -> list[ErrorFile]:
    """Read the error files whose paths name a process: for each local rank, that of its first start with one.

    Folders of two hosts have equal local ranks; files of such ranks are left out.

    Raises:
        InputError: a file cannot be read, or is damaged.
    """
    of_rank: dict[int, list[tuple[str, ErrorFile]]] = {}
    for path in paths:
        if said := _OF_ERROR_FILE.search(path.as_posix()):
            start, local = int(said["start"]), int(said["local"])
            try:
                kept = from_json(path.read_text(encoding="utf-8", errors="replace"))["message"]["extraInfo"]
                error = ErrorFile(start, local, kept["py_callstack"], int(kept["timestamp"]) * NS_PER_S)
            except (LookupError, TypeError, ValueError) as damage:
                raise InputError(f"{path}: no error file of torchrun, or a damaged one") from damage
            except OSError as trouble:
                raise InputError(f"{path}: cannot be read ({trouble.strerror or trouble})") from trouble
            of_rank.setdefault(local, []).append((path.as_posix()[: said.start()], error))
    return [
        min(error for _, error in errors)
        for errors in of_rank.values()
        if len({folder for folder, _ in errors}) == 1
    ]


def _stated_by_name(path: Path) -> dict[str, str]:
    for pattern in _OF_NAME:
        if said := pattern.search(path.as_posix()):
            return {name: value for name, value in said.groupdict().items() if value}
    return {}


def time_of(text: str, year: int) -> int:
    """Return when a line was written, in ns; -1 where it has no time."""
    try:
        if said := _DATE_TIME.search(text):
            *date, fraction = said.groups()
            return _in_ns([int(part) for part in date], fraction or "0")
        if said := _GLOG.search(text):
            *date, fraction = said.groups()
            return _in_ns([year, *(int(part) for part in date)], fraction)
        if (said := _SYSLOG.search(text)) and said[1] in _MONTHS:
            return _in_ns([year, 1 + _MONTHS.index(said[1]), *(int(part) for part in said.groups()[1:])], "0")
    except ValueError:  # no such date
        pass
    return -1


def _in_ns(date: list[int], fraction: str) -> int:
    year, month, day, hour, minute, second = date
    whole = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    return int(whole.timestamp()) * NS_PER_S + int(fraction.ljust(9, "0"))
