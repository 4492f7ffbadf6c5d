"""Requests to a job that is being recorded: deep windows, stacks, and a copy of the recording so far.

Reads the run directory of a running job and returns the answers of its ranks. Requests are a file in the run
folder that every process of the job checks once a second; answers are files, too, so all of this works
wherever the folder is visible.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import UNSET, UnsetType

from dpro.collectors.convert.recorded import RecordedProcess, attempts, of_training, processes
from dpro.collectors.inside import tracebacks
from dpro.collectors.inside.files import REQUESTED, STACKS, STACKS_BY
from dpro.collectors.inside.kernel import is_alive
from dpro.collectors.inside.threads import is_started_here
from dpro.collectors.launch.processes import environment_of
from dpro.collectors.launch.recording import MARKERS, RAW, Launch, ensure_mine, launch_on, launches
from dpro.collectors.liveness import is_running
from dpro.documents import Document, DocumentPart
from dpro.errors import InputError, UsageError
from dpro.folders import locked, written_whole
from dpro.schema import TABLES
from dpro.store import MANIFEST, part_files
from dpro.words import from_json, ranks_in_words

LOOK_S = 0.1
NATIVE_S = 20.0  # timeout of py-spy for one process: it reads the symbols of all its libraries
SIGNAL_S = 2.0  # timeout of the C signal handler
_TRIES = 5
KEPT_REQUESTS = 8  # latest requests in the file: processes that check once a second see all of them
_NUMBERS = count()  # numbers the requests of this process

Answer = dict[str, Any]


@dataclass(frozen=True)
class Answers:
    """The answers of the ranks of a job to one request.

    Attributes:
        given: answer by rank.
        silent: ranks that did not answer in time.
    """

    given: dict[int, Answer]
    silent: list[int]


def run_of(pid: int) -> Path | None:
    """Return the run directory that a process is recorded into; None where it is not recorded.

    Raises:
        InputError: there is no such process, or it belongs to another user.
    """
    launch = launch_on(environment_of(pid).get("PYTHONPATH", ""))
    return launch.run if launch else None


def training_processes(run: Path) -> list[RecordedProcess]:
    """Return the processes of the latest attempt that are being recorded now, ordered by rank.

    Raises:
        InputError: the run is not being recorded, or no process trains yet.
    """
    live = [launch for launch in launches(run) if is_running(launch)]
    if not live:
        raise InputError(f"{run}: is not being recorded now" if run.exists() else f"{run}: no such run")
    ensure_mine([run / RAW], within=False)
    trying = attempts(of_training([process for launch in live for process in processes(launch)]))
    recorded = [process for process in (trying[-1] if trying else []) if is_alive(process.facts) is not False]
    if not recorded:
        raise InputError(f"{run}: none of its processes trains yet; try again in a moment")
    return recorded


class SentRequest:
    """A request sent to all processes of a job."""

    def __init__(self, run: Path, kind: str, **facts: Any) -> None:
        """Send a request to all processes of a job.

        Args:
            kind: `window` (with `steps`; `within_budget` for automatic requests), `off`, `on`, `read_stacks`.

        Raises:
            InputError: the run is not being recorded.
            OSError: the request cannot be written.
        """
        self._asked = training_processes(run)
        self._given: dict[int, Answer] = {}
        self._name = f"{time.time_ns()}-{os.getpid()}-{next(_NUMBERS)}"
        _send(run / RAW, {"id": self._name, "kind": kind, **facts})

    def answers(self) -> Answers:
        """Read the answers that have arrived so far."""
        for process in self._asked:
            if process.rank not in self._given:
                with suppress(FileNotFoundError):
                    reply = (process.folder / f"reply-{self._name}.json").read_bytes()
                    self._given[process.rank] = from_json(reply)
        silent = [process.rank for process in self._asked if process.rank not in self._given]
        return Answers(dict(self._given), silent)

    def is_over(self) -> bool:
        """Return whether no more answers will come: each process has answered or ended."""
        silent = [process for process in self._asked if process.rank not in self._given]
        return not any(is_alive(process.facts) is not False for process in silent)


def _send(raw: Path, request: dict[str, Any]) -> None:
    """Append a request to the file that processes check; several within a second are all seen."""
    with ExitStack() as stack:
        with suppress(OSError):  # the file system may not support locks
            stack.enter_context(locked(raw))
        latest = []
        with suppress(OSError, ValueError):
            latest = from_json((raw / REQUESTED).read_bytes())
        with written_whole(raw, REQUESTED) as control:
            control.write(json.dumps([*latest, request][-KEPT_REQUESTS:]).encode())


def ask(run: Path, kind: str, timeout_s: float, done: Callable[[Answers], bool], **facts: Any) -> Answers:
    """Send a request to all processes of a job and wait for the answers.

    Args:
        kind: see `SentRequest`.
        timeout_s: how long to wait; answers that arrived by then are returned.
        done: whether the answers so far are enough.

    Raises:
        InputError: the run is not being recorded.
    """
    sent = SentRequest(run, kind, **facts)
    deadline = time.monotonic() + timeout_s
    while True:
        answers = sent.answers()
        if not answers.silent or done(answers) or sent.is_over() or time.monotonic() > deadline:
            return answers
        time.sleep(LOOK_S)


def outcome_in_words(answers: Answers) -> str:
    """Word the outcome of a requested window as one line."""
    if not answers.given:
        return "no deep window was recorded, since no rank answered"
    given = answers.given[min(answers.given)]
    if "paid_in_s" in given:
        postponed_s = max(given["paid_in_s"], 1.0)
        return f"a deep window is postponed for {postponed_s:,.0f} s, since {given['why_not']}"
    if given["why_not"]:
        return f"no deep window was recorded, since {given['why_not']}"
    first, end = given["steps"]
    words = f"steps {first} to {end - 1} were recorded in depth, as window {given['window']}"
    lacking = {rank for rank, answer in answers.given.items() if answer["why_not"]} | {*answers.silent}
    return f"{words}, but not on {ranks_in_words(lacking)}" if lacking else words


def read_stacks(run: Path, timeout_s: float) -> Answers:
    """Return the stacks of all threads of all ranks.

    Ranks on this host whose interpreter is blocked by a call in C are asked by a signal.

    Raises:
        InputError: the run is not being recorded.
    """
    answers = ask(run, "stacks", timeout_s, lambda _: False)
    given = dict(answers.given)
    for process in training_processes(run):
        if process.rank in answers.silent and process.facts["host"] == socket.gethostname():
            text = _stacks_by_signal(process)
            if text:
                given[process.rank] = {
                    "rank": process.rank, "by_signal": True, "threads": parse_stacks(text)
                }  # fmt: skip
    return Answers(given, [rank for rank in answers.silent if rank not in given])


def with_native_stacks(answers: Answers, run: Path) -> Answers:
    """Replace the stacks of ranks on this host by py-spy's, which include C calls and child processes.

    py-spy pauses each process briefly. Ranks on other hosts, and those py-spy cannot read, keep their stacks.

    Raises:
        InputError: py-spy is not installed, or reads no rank.
    """
    command = shutil.which("py-spy")
    if command is None:
        raise InputError("--native: py-spy is not on PATH; `pip install py-spy`")
    given, why = dict(answers.given), "no rank of the job runs on this host"
    for process in training_processes(run):
        if process.facts["host"] != socket.gethostname():
            continue
        threads: list[dict[str, Any]] = []
        for pid in with_descendants(int(process.facts["pid"])):
            try:
                threads += _native_threads(command, pid, is_child=pid != int(process.facts["pid"]))
            except InputError as error:
                why = why if threads else str(error)  # a child process may not be Python
        if threads:
            given[process.rank] = {"rank": process.rank, "native": True, "threads": threads}
    if not any("native" in answer for answer in given.values()):
        raise InputError(f"--native: {why}")
    return Answers(given, [rank for rank in answers.silent if rank not in given])


def with_descendants(pid: int) -> list[int]:
    """Return a process id followed by those of its live descendants."""
    pids = [pid]
    for parent in pids:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, children.read_text().split())
    return pids


def _native_threads(command: str, pid: int, *, is_child: bool) -> list[dict[str, Any]]:
    """Return the threads of a process as py-spy reads them, without the recorder's.

    Raises:
        InputError: py-spy cannot read the process.
    """
    asked = [command, "dump", "--json", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=NATIVE_S, check=True)
        threads = json.loads(done.stdout)
        read: list[dict[str, Any]] = [
            {
                "name": ("child process, " if is_child else "") + (thread["thread_name"] or "thread"),
                "frames": [
                    {"file": frame["filename"], "line": frame["line"], "function": frame["name"]}
                    for frame in thread["frames"]
                    if not frame["name"].startswith("0x")  # an address without a symbol
                ],
            }
            for thread in threads
        ]
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines() or ["no reason given"]
        raise InputError(f"py-spy cannot read process {pid}: {said[-1]}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise InputError(f"py-spy cannot read process {pid}: {error}") from error
    return [thread for thread in read if not is_started_here(thread["frames"])]


def parse_stacks(text: str) -> list[dict[str, Any]]:
    """Parse `faulthandler` output into threads, without the current thread and the recorder's."""
    return [
        {"name": f"thread {stack.ident:#x}", "frames": stack.frames}
        for stack in tracebacks.parse(text)
        if not stack.is_current and not is_started_here(stack.frames)
    ]


def copy_run(run: Path, to: Path, finish: Callable[[Launch], None]) -> None:
    """Copy a recording as it is now and finish the copy as a run; the recording goes on.

    Raises:
        InputError: the run is not being recorded, or changes faster than it can be copied.
        UsageError: `to` exists and is not empty, or cannot be written.
    """
    training_processes(run)
    try:
        to.mkdir(parents=True, exist_ok=True)
        if any(to.iterdir()):
            raise UsageError(f"{to}: exists and is not empty; name another folder with -o, or remove it")
        with TemporaryDirectory(dir=to, prefix=".copy-") as made:
            copied = Path(made) / "run"
            _copy_while_it_changes(run, copied)
            for launch in launches(copied):
                finish(launch)
            for path in sorted(copied.iterdir(), key=lambda path: path.name == MANIFEST):  # manifest last
                path.rename(to / path.name)
    except OSError as error:
        raise UsageError(f"{to}: cannot be written ({error.strerror or error})") from error


def _copy_while_it_changes(run: Path, to: Path) -> None:
    for _ in range(_TRIES):
        before = _parts(run)
        shutil.rmtree(to, ignore_errors=True)
        with suppress(OSError, shutil.Error):  # files come and go
            to.mkdir()
            unfinished = shutil.ignore_patterns("*.tmp*")
            for folder in (MARKERS, RAW):
                shutil.copytree(run / folder, to / folder, symlinks=True, ignore=unfinished)
            for part in before:
                copied = to / part.relative_to(run)
                copied.parent.mkdir(exist_ok=True)
                shutil.copy2(part, copied)
            if _parts(run) == before:
                return
    raise InputError(f"{run}: changes while it is copied; try again")


def _parts(run: Path) -> list[Path]:
    return sorted(path for table in TABLES.values() for path in part_files(run, table))


def _stacks_by_signal(process: RecordedProcess) -> str:
    """Return the output of the C signal handler; empty without a handler or if it writes nothing in time."""
    where: Mapping[str, int] = {}
    with suppress(OSError, ValueError):
        where = from_json((process.folder / STACKS_BY).read_bytes())
    written = process.folder / STACKS
    pid = int(process.facts["pid"])
    if not where or not _is_open_there(written, pid, where["descriptor"]):
        return ""
    before = written.stat().st_size
    if ctypes.CDLL(None).tgkill(pid, where["thread"], where["signal"]) != 0:
        return ""
    deadline, size = time.monotonic() + SIGNAL_S, -1
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        latest = written.stat().st_size
        if latest == size and latest > before:
            break
        size = latest
    with written.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def _is_open_there(path: Path, pid: int, descriptor: int) -> bool:
    """Return whether a process has a file open under a descriptor, which its C signal handler writes to."""
    with suppress(OSError):
        return path.samefile(f"/proc/{pid}/fd/{descriptor}")
    return False


# Typed documents of `dpro attach`.


class StackFrame(DocumentPart, frozen=True):
    """A call that has not returned.

    Attributes:
        file: file of the function.
        line: current line in the file.
        function: name of the function.
    """

    file: str
    line: int
    function: str


class ThreadStack(DocumentPart, frozen=True):
    """A thread of a process.

    Attributes:
        name: name of the thread.
        frames: its calls, innermost first.
    """

    name: str
    frames: list[StackFrame]


class RankStacks(DocumentPart, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Stacks of the threads of a rank.

    Attributes:
        rank: the rank.
        by_signal: true where a signal handler in C replied, since a call in C held the interpreter; else
            absent.
        native: true where py-spy read them, with C calls and child processes; else absent.
        threads: its threads, without those of the recorder.
    """

    rank: int
    by_signal: bool | UnsetType = UNSET
    native: bool | UnsetType = UNSET
    threads: list[ThreadStack]


class RankWindow(DocumentPart, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Outcome of a requested deep window on one rank.

    Attributes:
        rank: the rank.
        window: number of the window; absent where the job records none.
        steps: its first step, and the step after its last; absent where the job records none.
        why_not: why it was not recorded; empty where it was.
    """

    rank: int
    window: int | UnsetType = UNSET
    steps: tuple[int, int] | UnsetType = UNSET
    why_not: str


class AttachDocument(Document, frozen=True, kw_only=True):
    """A copy of what a running job has recorded so far.

    Attributes:
        run: the run directory of the job.
        copy: the run made from the recording so far; absent where none was requested.
    """

    run: str
    copy: str | UnsetType = UNSET


class WindowDocument(AttachDocument, frozen=True, kw_only=True):
    """A deep window that was requested of a running job.

    Attributes:
        ranks: its outcome on each rank that replied.
        silent_ranks: ranks that did not reply in time.
        window: number of the window.
    """

    ranks: list[RankWindow]
    silent_ranks: list[int]
    window: int


class StacksDocument(AttachDocument, frozen=True, kw_only=True):
    """Stacks of all threads of a running job.

    Attributes:
        ranks: ranks that replied.
        silent_ranks: ranks that did not reply in time.
    """

    ranks: list[RankStacks]
    silent_ranks: list[int]


class SwitchDocument(AttachDocument, frozen=True, kw_only=True):
    """Deep windows of a running job, switched off or on.

    Attributes:
        from_step: first step to which the switch applies.
    """

    from_step: int
