"""The hook: a command that runs when a policy stops a job, restarts it, replaces a host, or changes paths.

Takes notices, and the hosts of ranks; starts a process per finding, with the finding as JSON on its standard
input, and writes a line about each to `findings/hook.jsonl` of the run: that it ran and how it ended, or why
it did not. A separate thread runs the commands, so that the watcher never waits. No host is replaced for a
finding that leaves open which one is at fault.
"""

from __future__ import annotations

import os
import queue
import signal
import sqlite3
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from msgspec.structs import asdict

from dpro.detect.findings import Finding
from dpro.detect.findings_log import FOLDER, Notice, WatchDocument, watch_document
from dpro.documents import DocumentPart, encode
from dpro.extensions.history.database import allow_command, culprit_of, run_name
from dpro.extensions.watch.policy import Action, Policy, PolicyDecision, Rule, class_of, decide
from dpro.units import NS_PER_S

LOG = "hook.jsonl"
RAN, DRY_RUN, SKIPPED, FAILED = "ran", "dry run", "skipped", "failed"
COMMAND = "DPRO_COMMAND"  # the command, in its own environment
MAX_S = 1800.0  # time limit of a command, after which it is killed
KEPT = 2000  # bytes kept of a command's output


class HookDocument(WatchDocument, frozen=True, kw_only=True):
    """A finding on which the hook acts, as the command of `--on-finding` gets it.

    Attributes:
        action: `stop`, `restart`, `replace` or `reroute`; empty where nothing is done.
        host: the host at fault; empty where the finding names none.
        part: the cable (`leaf0 - spine1`), link (`leaf0 > spine1`) or switch at fault; empty where the
            finding names none.
        hosts: all hosts of the job.
    """

    action: str
    host: str
    part: str
    hosts: list[str]


class HookLine(DocumentPart, frozen=True, kw_only=True):
    """A line in the log of the hook.

    Attributes:
        time_ns: when it was decided.
        number: number of the finding.
        class: such as `slow.nic`, or how the job ended, such as `ended.signal`.
        action: `stop`, `restart`, `replace` or `reroute`; empty where nothing is done.
        host: the host that the finding names; empty where it names none.
        what: `ran`, `dry run`, `skipped` or `failed`.
        why: why it was skipped, or how it failed.
        seconds: duration of the command.
        exit_code: of the command; null where it did not run, or was killed.
        output: the end of the command's output.
    """

    time_ns: int
    number: int
    class_: str = msgspec.field(name="class")
    action: str
    host: str
    what: str
    why: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    output: str = ""


@dataclass
class Hook:
    """Runs a command for findings, one at a time.

    Attributes:
        say: called with a sentence about each action.
    """

    run: Path
    policy: Policy
    say: Callable[[str], None]
    _waiting: queue.Queue[HookDocument] = field(default_factory=queue.Queue)
    _acted: dict[str, deque[float]] = field(default_factory=dict)  # times of commands, if there is no history
    _attempt: int = -1  # attempt of the job that the command last ran for

    def __post_init__(self) -> None:
        """Start the thread that runs commands.

        On Linux, the thread and its commands keep the priority that this thread has now.
        """
        threading.Thread(target=self._work, name="hook", daemon=True).start()

    def offer(self, notice: Notice, hosts: Mapping[int, str], attempt: int = 0) -> None:
        """Run the command for a finding that begins, or log why not.

        Args:
            attempt: how many times the job has begun again.
        """
        if notice.why:
            return
        finding, policy = notice.finding, self.policy
        culprit, part = culprit_of(finding, hosts), part_of(finding)
        if policy.once and attempt == self._attempt:
            decision = PolicyDecision(None, "the command was run for this start of the job already")
        else:
            may_act = partial(self._may_act, culprit.host)
            class_ = class_of(finding) if policy.once else finding.class_
            blamed = f"{finding.component_kind} {finding.component_id}"
            no_part = "" if part else f"{class_}: {blamed} is no cable or switch of the topology"
            lacks = {Action.REPLACE: culprit.why_not, Action.REROUTE: no_part}
            decision = decide(policy, class_, finding.confidence, lacks, may_act)
        document = HookDocument(
            **asdict(watch_document(self.run.resolve(), notice)),
            action=decision.action or "",
            host=culprit.host,
            part=part,
            hosts=sorted(set(hosts.values())),
        )
        if decision.action is None:
            self._note(document, SKIPPED, decision.why)
        elif policy.dry_run:
            self._note(document, DRY_RUN)
        else:
            if decision.action is not Action.REROUTE:  # the job runs on
                self._attempt = attempt
            self._waiting.put(document)

    def close(self) -> None:
        """Wait for all queued commands: one of them may have ended the job."""
        self._waiting.join()

    def _may_act(self, host: str, rule: Rule) -> bool:
        """Return whether a rule has a try left, counting all watchers; if so, take it."""
        what, limit = f"{self.policy.tries_of}{rule.name}", rule.limit
        since_ns = time.time_ns() - limit.window_s * NS_PER_S
        try:
            return allow_command(what, run_name(self.run), host, limit.most, since_ns)
        except (OSError, sqlite3.Error):  # without a history, this watcher counts its own
            now, acted = time.monotonic(), self._acted.setdefault(what, deque())
            while acted and acted[0] < now - limit.window_s:
                acted.popleft()
            if len(acted) >= limit.most:
                return False
            acted.append(now)
            return True

    def _work(self) -> None:
        while True:
            document = self._waiting.get()
            try:
                self._run(document)
            except Exception as error:  # a failure must not stop later commands
                self._note(document, FAILED, str(error))
            finally:
                self._waiting.task_done()

    def _run(self, document: HookDocument) -> None:
        begin_s = time.monotonic()
        with (
            TemporaryFile() as given,
            TemporaryFile() as said,
        ):  # a job started by the command keeps its output open
            given.write(encode(document).encode())
            given.seek(0)
            # The process list shows the shell's words, and the command may contain a token.
            process = subprocess.Popen(
                f'eval "${COMMAND}"', shell=True, stdin=given, stdout=said, stderr=subprocess.STDOUT,
                start_new_session=True, env=os.environ | variables(document) | {COMMAND: self.policy.command},
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
        """Report and log what was done."""
        line = HookLine(
            time_ns=time.time_ns(), number=document.number, class_=document.class_, action=document.action,
            host=document.host, what=what, why=why, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        where = line.host or document.part
        about = f"{document.class_} on {where}" if where else document.class_
        about = f"{line.action}, {about}" if line.action and self.policy.once else about
        self.say(f"--on-finding: {what}: {about}{f': {why}' if why else ''}")
        with suppress(OSError), (self.run / FOLDER / LOG).open("a", encoding="ascii") as log:
            log.write(encode(line) + "\n")


def part_of(finding: Finding) -> str:
    """Return the cable, link or switch of the topology that a finding names; empty if it names none.

    Links between two ranks (`0 - 1`) are no part of a topology, and a port has no other way.
    """
    kind, name = finding.component_kind, finding.component_id
    is_part = kind in ("cable", "switch") or (kind == "link" and " > " in name)
    return name if is_part and ":" not in name else ""


def variables(document: HookDocument) -> dict[str, str]:
    """Return the environment variables of the command: `DPRO_HOST` and others."""
    return {
        "DPRO_ACTION": document.action,
        "DPRO_HOST": document.host,
        "DPRO_PART": document.part,
        "DPRO_HOSTS": ",".join(document.hosts),
        "DPRO_RANKS": ",".join(map(str, document.ranks)),
        "DPRO_CLASS": document.class_,
        "DPRO_CONFIDENCE": f"{document.confidence or 0:.3f}",
        "DPRO_RUN": document.run,
    }
