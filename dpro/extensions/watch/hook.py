"""The hook: a command that is run when a finding names a host that could be taken out of the job.

In: notices, and where ranks run. Out: a process per finding, which gets it as JSON on its standard input, and
a line in `findings/hook.jsonl` of the run about each: that it was run and how it ended, or why it was not. A
thread of its own runs it, so that the watcher never waits. A finding that leaves open which host is at fault
is never acted on.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import sqlite3
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from dpro.detect.findings_log import FOLDER, Notice, WatchDocument, watch_document
from dpro.documents import DocumentPart, encode
from dpro.errors import UsageError
from dpro.extensions.history.database import allow_command, culprit_of, run_name
from dpro.units import NS_PER_S

LOG = "hook.jsonl"
# Of findings that may name a host; all others blame the work or the program.
CLASSES = (
    "slow.compute", "slow.host", "slow.nic", "slow.link", "slow.fabric",
    "hang.host", "hang.device", "hang.rank", "hang.comm", "dead.rank",
)  # fmt: skip
RAN, DRY_RUN, SKIPPED, FAILED = "ran", "dry run", "skipped", "failed"
COMMAND = "DPRO_COMMAND"  # the command, in its own environment
MAX_S = 1800.0  # that a command may take; then it is ended
KEPT = 2000  # bytes of what it says
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LIMIT = re.compile(r"(\d+)/(\d*)([smhd])")


class HookLimit(NamedTuple):
    """How often a command may be run."""

    most: int
    window_s: int


class HookDocument(WatchDocument, frozen=True, kw_only=True):
    """A finding that names a host, as the command of `--on-finding` gets it.

    Attributes:
        host: that is at fault.
        hosts: of the job.
    """

    host: str
    hosts: list[str]


class HookLine(DocumentPart, frozen=True, kw_only=True):
    """A line of the log of the hook.

    Attributes:
        time_ns: when it was decided.
        number: of the finding.
        class: such as `slow.nic`.
        host: that the finding names; empty where it names none.
        what: `ran`, `dry run`, `skipped` or `failed`.
        why: why it was skipped, or how it failed.
        seconds: that the command took.
        exit_code: of the command; null where it was not run, or was ended.
        output: the end of what it said.
    """

    time_ns: int
    number: int
    class_: str = msgspec.field(name="class")
    host: str
    what: str
    why: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    output: str = ""


@dataclass(frozen=True)
class HookRules:
    """When a command is run.

    Attributes:
        command: for the shell.
        limit: how often, by all watchers of this user together.
        dry_run: whether it is only said that it would be.
    """

    command: str
    classes: tuple[str, ...]
    min_confidence: float
    limit: HookLimit
    dry_run: bool = False


def parse_limit(text: str) -> HookLimit:
    """Read `2/1h`, `1/30m`, `1/d`.

    Raises:
        UsageError: it is none.
    """
    match = _LIMIT.fullmatch(text)
    if not match or int(match[2] or 1) == 0:
        raise UsageError(f"--at-most {text}: give a number and a time, as 1/1h or 3/d (s, m, h, d)")
    return HookLimit(int(match[1]), int(match[2] or 1) * _SECONDS[match[3]])


def parse_classes(text: str) -> tuple[str, ...]:
    """Read `slow.nic,dead.rank`.

    Raises:
        UsageError: one of them is no class of findings that may name a host.
    """
    classes = tuple(word.strip() for word in text.split(","))
    for class_ in classes:
        if class_ not in CLASSES:
            raise UsageError(f"--classes: {class_!r} is not one of {', '.join(CLASSES)}")
    return classes


@dataclass
class Hook:
    """Runs a command for findings, one at a time.

    Attributes:
        say: is given a sentence about what was done.
    """

    run: Path
    rules: HookRules
    say: Callable[[str], None]
    _waiting: queue.Queue[HookDocument] = field(default_factory=queue.Queue)
    _allowed: deque[float] = field(default_factory=deque)  # where there is no history: when it was run

    def __post_init__(self) -> None:
        """Start the thread that runs commands.

        On Linux it keeps the priority that this thread has now, and so do its commands.
        """
        threading.Thread(target=self._work, name="hook", daemon=True).start()

    def offer(self, notice: Notice, hosts: Mapping[int, str]) -> None:
        """Run the command for a finding that begins, or note why not."""
        if notice.why:
            return
        finding, rules = notice.finding, self.rules
        culprit = culprit_of(finding, hosts)
        why = culprit.why_not
        if not why and finding.class_ not in rules.classes:
            why = f"{finding.class_} is not among --classes"
        if not why and finding.confidence < rules.min_confidence:
            why = f"its confidence is {finding.confidence:.2f}, below {rules.min_confidence:.2f}"
        if not why and not rules.dry_run and not self._may_run(culprit.host):
            why = f"the command was run {rules.limit.most} times in the last {rules.limit.window_s} s already"
        document = HookDocument(
            **asdict(watch_document(self.run.resolve(), notice)),
            host=culprit.host,
            hosts=sorted(set(hosts.values())),
        )
        if why:
            self._note(document, SKIPPED, why)
        elif rules.dry_run:
            self._note(document, DRY_RUN)
        else:
            self._waiting.put(document)

    def close(self) -> None:
        """Wait for commands that were begun: it may be one of them that ended the job."""
        self._waiting.join()

    def _may_run(self, host: str) -> bool:
        """Whether the command was run less often than it may be, by any watcher; it counts as run then."""
        limit = self.rules.limit
        since_ns = time.time_ns() - limit.window_s * NS_PER_S
        try:
            return allow_command(self.rules.command, run_name(self.run), host, limit.most, since_ns)
        except (OSError, sqlite3.Error):  # no history: this watcher counts for itself
            now = time.monotonic()
            while self._allowed and self._allowed[0] < now - limit.window_s:
                self._allowed.popleft()
            if len(self._allowed) >= limit.most:
                return False
            self._allowed.append(now)
            return True

    def _work(self) -> None:
        while True:
            document = self._waiting.get()
            try:
                self._run(document)
            except Exception as error:  # whatever happens to one, the next one is run
                self._note(document, FAILED, str(error))
            finally:
                self._waiting.task_done()

    def _run(self, document: HookDocument) -> None:
        begin_s = time.monotonic()
        with (
            TemporaryFile() as given,
            TemporaryFile() as said,
        ):  # a job that it starts keeps what it says open
            given.write(encode(document).encode())
            given.seek(0)
            # The list of processes shows the shell's words, and the command may have a token in it.
            process = subprocess.Popen(
                f'eval "${COMMAND}"', shell=True, stdin=given, stdout=said, stderr=subprocess.STDOUT,
                start_new_session=True, env=os.environ | variables(document) | {COMMAND: self.rules.command},
            )  # fmt: skip
            try:
                exit_code: int | None = process.wait(MAX_S)
                why = f"exit code {exit_code}" if exit_code else ""
            except subprocess.TimeoutExpired:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                exit_code, why = None, f"did not end in {MAX_S:.0f} s"
            said.seek(max(said.seek(0, os.SEEK_END) - KEPT, 0))
            output = said.read().decode(errors="replace")
        seconds = round(time.monotonic() - begin_s, 1)
        self._note(document, FAILED if why else RAN, why, seconds=seconds, exit_code=exit_code, output=output)

    def _note(self, document: HookDocument, what: str, why: str = "", **more: object) -> None:
        """Say and log what was done."""
        line = HookLine(
            time_ns=time.time_ns(), number=document.number, class_=document.class_, host=document.host,
            what=what, why=why, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        about = f"{document.class_} on {line.host}" if line.host else document.class_
        self.say(f"--on-finding: {what}: {about}{f': {why}' if why else ''}")
        with suppress(OSError), (self.run / FOLDER / LOG).open("a", encoding="ascii") as log:
            log.write(encode(line) + "\n")


def variables(document: HookDocument) -> dict[str, str]:
    """What the command finds in its environment: `DPRO_HOST` and others."""
    return {
        "DPRO_HOST": document.host,
        "DPRO_HOSTS": ",".join(document.hosts),
        "DPRO_RANKS": ",".join(map(str, document.ranks)),
        "DPRO_CLASS": document.class_,
        "DPRO_CONFIDENCE": f"{document.confidence or 0:.3f}",
        "DPRO_RUN": document.run,
    }
