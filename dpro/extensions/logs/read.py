"""Extracts evidence of how a job ended from its logs: exceptions, exits, timed-out calls, machines' reports.

Takes lines of logs; returns tables `workers`, `process_groups` and `collectives`, `Report`s of kernels,
network cards and schedulers, and the creation times of NCCL's communicators. A line that is not understood is
not evidence. Evidence about a rank comes only from lines that state the rank, or a process whose rank a
launcher states. A traceback counts as the end of a rank only if the rank is seen to have ended, or if
PyTorch's hook for uncaught exceptions wrote it.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import polars as pl

from dpro.extensions.logs.files import ERROR_FILE
from dpro.extensions.logs.lines import ErrorFile, LogLine, RawLine, read_error_files, read_lines, time_of
from dpro.limits import MAX_RANKS
from dpro.members import members_text
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, TABLES, WORKERS, conform
from dpro.schema.members import GROUP_RANKS
from dpro.store import Manifest
from dpro.table import Table
from dpro.units import DATED_NS, NS_PER_MS, NS_PER_S

SOURCE = "job log"  # of rows in tables
MEMORY, GPU, NETWORK, NODE, TIME, PREEMPTED, ASKED = (
    "memory", "gpu", "network", "node", "time", "preempted", "asked",
)  # fmt: skip
ENDS = (TIME, PREEMPTED, NODE, ASKED)  # kinds of reports that the job was ended from outside


class Report(NamedTuple):
    """A report of a machine or a scheduler about a job or one of its processes.

    Attributes:
        kind: one of the kinds above.
        host, pid, rank: subject of the report; empty or -1 unless stated.
        what: in words, such as `XID 79 of GPU 0000:c1:00`.
        number: of an XID; else -1.
    """

    kind: str
    time_ns: int
    host: str
    what: str
    pid: int = -1
    rank: int = -1
    number: int = -1


@dataclass
class LoggedEnd:
    """The end of one rank as logs show it; -1 and empty where they do not."""

    rank: int
    local: int = -1
    host: str = ""
    pid: int = -1
    exit_code: int = -1
    exit_signal: int = -1
    ended_ns: int = -1
    error: str = ""
    failed_ns: int = -1
    timed_out: bool = False  # NCCL's watchdog ended it


@dataclass
class _Traceback:
    """A traceback whose lines are being read.

    Attributes:
        ended: the rank that it is known to have ended; -1 unless stated.
        calls: outermost first.
    """

    ended: int = -1
    calls: list[str] = field(default_factory=list)
    is_of_launcher: bool = False


class _Raised(NamedTuple):
    """An exception in a log.

    Attributes:
        uncaught: whether PyTorch's hook wrote it, judged by its form.
    """

    line: LogLine
    error: str
    time_ns: int
    uncaught: bool


class _TimedOut(NamedTuple):
    rank: int
    sequence: int
    op: str
    numel: int
    enqueued_ns: int
    time_ns: int


class CommunicatorInit(NamedTuple):
    """The creation of one communicator on one GPU, as NCCL reports it.

    Attributes:
        gpu: host, pid and number of the GPU; empty unless stated.
        stated: rank of the process in the job, as a launcher states it; else -1.
        rank, ranks: rank of the GPU in the communicator, and its number of ranks.
        total_s: total time, s.
        parts_s: NCCL's parts of the time, s; empty where the line is broken.
    """

    gpu: str
    stated: int
    rank: int
    ranks: int
    total_s: float
    parts_s: Mapping[str, float]


@dataclass(frozen=True)
class JobLogs:
    """Evidence in the logs of a job.

    Attributes:
        frames: all tables; `workers`, `process_groups` and `collectives` may have rows.
        manifest: size of the job, and ranks that are named.
        reports: in order of the lines.
        inits: creations of NCCL's communicators, in order of the lines.
        num_made: communicators that NCCL reported as created, on all ranks, with or without a time.
        num_lines: number of lines read.
        cut: a sentence for each file that is readable only at its beginning.
    """

    frames: Mapping[str, pl.DataFrame]
    manifest: Manifest
    reports: Sequence[Report]
    inits: Sequence[CommunicatorInit]
    num_made: int
    num_lines: int
    cut: Sequence[str] = ()


_FRAME = re.compile(r'\s*File "(.+)", line (\d+), in (.+)$')
_BEGINS, _ORIGINAL = "Traceback (most recent call last):", "Original Traceback"
_RAISED = re.compile(
    r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Abort\w*|Killed))(?::\s?(.*))?$"
)
_OUTERMOST = re.compile(r" (<module>|_run_module_as_main|_bootstrap)$")  # of an exception that nothing caught
_LAUNCHER = re.compile(r"/torch/distributed/(run|launcher|elastic)|/bin/(torchrun|accelerate|deepspeed)\b")
_WATCHDOG = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?"
    r".*?ran for (?P<ran_ms>\d+) milliseconds"
)
_WORK = re.compile(
    r"\[(?:PG (?:ID (?P<id>\d+) PG GUID (?P<guid>\d+)(?:\((?P<name>\w+)\))?|(?P<old>\d+)) )?"
    r"Rank (?P<rank>\d+)\] .*?work: (?P<work>\d+), last enqueued NCCL work: (?P<enqueued>\d+), "
    r"last completed NCCL work: (?P<completed>\d+)"
)
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_ELASTIC = re.compile(r"^\s*(time|host|rank|exitcode|traceback)\s+: (.*)$")
_RANK_OF = re.compile(r"(\d+) \(local_rank: (\d+)\)")
_EXIT_OF = re.compile(r"(-?\d+) +\(pid: (\d+)\)")
LIVED_NS = 60 * NS_PER_S  # an exception did not end a rank that still writes this much later
_RANK = re.compile(r"\[rank(\d+)\]:")
_NRANKS = re.compile(r"\bnranks (\d+)\b|\bworld[_ ]size[=: ]+(\d+)\b", re.IGNORECASE)
_MADE = " - Init COMPLETE"
_INIT = re.compile(  # 2.22 without the function and `alloc`; two decimals: a line may be cut off by another
    r"(?:(?P<process>[\w.-]+:\d+):\d+ (?P<gpu>\[\d+\]) )?NCCL INFO Init timings(?: - \w+)?: "
    r"rank (?P<rank>\d+) nranks (?P<ranks>\d+) total (?P<total>\d+\.\d\d)\b"
    r"(?: \((?P<parts>(?:\w+ -?\d+\.\d\d(?:, )?)+)\))?"
)
_OOM_KILL = re.compile(r"[Oo]ut of memory: Kill(?:ed)? process (\d+)")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([\da-fA-F:.]+)\): (\d+)(?:, pid='?(\d+)'?)?")
_CANCELLED = re.compile(r"\*\*\* (?:JOB|STEP) \S+ (?:ON (\S+) )?CANCELLED AT (\S+)(?: DUE TO ([A-Z ]+))?")
_TASKS = re.compile(r"srun: error: (\S+): tasks? ([\d,\-\[\]]+): (.+)$")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_OOM_STEP = re.compile(r"Detected \d+ oom[_-]kill event")
_PEER = re.compile(
    r"NET/\w+ ?: Got completion from peer (?P<completion>[\d.a-f:]+?)<\d+>"
    r".*?(?:error|status)[ =](?P<status>\d+)"
    r"|Call to (?:recv|send) (?:from|to) (?P<call>\S+?)<\d+> failed ?: (?P<why>[\w ]+)"
)
_POD = re.compile(r"\bOOMKilled\b|Reason:\s+(Evicted|Preempt\w*|NodeLost|DeadlineExceeded)\b")
_KEEP_ALIVE = re.compile(r"The node '([\w.-]+?)_\d+_\d+' has failed to send a keep-alive heartbeat")
_ASKED = re.compile(r"Received (\d+) death signal, shutting down workers|got signal: (\d+)$")
_OP = re.compile(
    r"_?(ALLREDUCE|ALLGATHER|REDUCE_SCATTER|ALLTOALL|BROADCAST|REDUCE|GATHER|SCATTER|BARRIER)(_\w+)?"
)
_WORDS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_TASK_SIGNALS = {"Killed": 9, "Segmentation fault": 11, "Aborted": 6, "Terminated": 15, "Bus error": 7}
_DEFAULT_GROUP = "0 default_pg"
_APART_NS = NS_PER_MS  # assumed between lines before the first that has a time
_INTEREST = (  # a line without any of these, in lower case, is not parsed
    "traceback", "watchdog", "nccl work", "exitcode", "local_rank", "error", "exception", "interrupt", "exit",
    "nranks", "world", "kill", "xid", "cancelled", "oom", "net/", "call to ", "reason:", "keep-alive",
    "death signal", "got signal", " : ",
)  # fmt: skip
SKIPPED = 200  # lines before one of interest that are searched for the latest time


def read_logs(paths: list[Path]) -> JobLogs:
    """Read logs of one job.

    Raises:
        InputError: a file cannot be read.
    """
    reader = _Reader()
    kept = [path for path in paths if path.name == ERROR_FILE]
    logs = [path for path in paths if path.name != ERROR_FILE]
    for error in read_error_files(kept):
        # Logs may be in local time, so times of error files are used only without logs.
        reader.take_error_file(error, -1 if logs else error.time_ns)
    cut: list[str] = []
    for line in read_lines(logs, cut):
        reader.take(line)
    return replace(reader.finish(), cut=cut)


class _Reader:
    """Collects evidence line by line."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.ends: dict[int, LoggedEnd] = {}
        self.reports: list[Report] = []
        self.inits: list[CommunicatorInit] = []
        self.num_made = 0
        self.world_size = 0
        self._last_ns = -1  # of the latest line with a time
        self._first: tuple[int, int] | None = None  # time and number of the first
        self._open: dict[tuple[int, ...], _Traceback] = {}
        self._block: dict[int, dict[str, str]] = {}  # of elastic's summary, by file
        self._locals: list[tuple[LogLine, int, int, int]] = []  # line, exit code, local rank, pid
        self._errors: list[_Raised] = []
        self._last_of: dict[int, int] = {}  # rank: when it last wrote
        self._timed_out: list[_TimedOut] = []
        self._works: dict[tuple[int, int], tuple[str, int, int]] = {}  # rank, work: group, …
        self._is_elastic = False
        self._skipped: deque[RawLine] = deque(maxlen=SKIPPED)
        self._writers: set[str] = set()  # ranks that wrote anything, as text
        self._tasks: dict[int, LoggedEnd] = {}  # of srun

    def take(self, raw: RawLine) -> None:
        """Collect the evidence of a line."""
        self.num_lines += 1
        if mark := _RANK.match(raw.text):
            self._writers.add(mark[1])
        small = raw.text.lower()
        is_of_interest = any(word in small for word in _INTEREST)
        if not (is_of_interest or self._errors or self._open):
            self._skipped.append(raw)
            return
        self._note_skipped()
        line = raw.parse()
        self._note_time(line, self.num_lines)
        if line.writer in self._open and self._continues(line):
            return
        if not is_of_interest:
            return
        if _BEGINS in line.text:
            # PyTorch appends the traceback of a DataLoader worker to that of the rank it ended.
            outer = self._errors[-1] if self._errors and _ORIGINAL in line.text else None
            is_same = outer is not None and outer.uncaught and outer.line.writer == line.writer
            self._open[line.writer] = _Traceback(line.rank if is_same else -1)
            return
        for take in (self._take_nccl, self._take_elastic, self._take_machine, self._take_scheduler):
            if take(line):
                return
        if size := _NRANKS.search(line.text):
            stated = int(size[1] or size[2])
            self.world_size = max(self.world_size, stated if stated <= MAX_RANKS else 0)

    def _note_skipped(self) -> None:
        """Record the latest time among the lines skipped since the last one of interest."""
        for back, raw in enumerate(reversed(self._skipped), start=1):
            line = raw.parse()
            if line.time_ns >= 0:
                self._note_time(line, self.num_lines - back)
                break
        self._skipped.clear()

    def _note_time(self, line: LogLine, number: int) -> None:
        if line.time_ns >= 0:
            self._first = self._first or (line.time_ns, number)
            self._last_ns = line.time_ns
            if line.rank >= 0:
                self._last_of[line.rank] = line.time_ns

    def _end(self, rank: int) -> LoggedEnd:
        return self.ends.setdefault(rank, LoggedEnd(rank))

    def _when(self, line: LogLine) -> int:
        """Return the time of a line, or the latest before it; without any, its number."""
        known_ns = line.time_ns if line.time_ns >= 0 else self._last_ns
        return known_ns if known_ns >= 0 else self.num_lines

    # Exceptions.

    def _continues(self, line: LogLine) -> bool:
        """Continue a traceback with a line; return False where the line is not part of it."""
        traceback, text = self._open[line.writer], line.text
        if frame := _FRAME.match(text):
            traceback.calls.append(f"{frame[1]}:{frame[2]} {frame[3]}")
            traceback.is_of_launcher |= bool(_LAUNCHER.search(frame[1]))
            return True
        if not text.strip() or text[0] in " \t" or text.startswith(_BEGINS):
            return _BEGINS not in text
        del self._open[line.writer]
        raised = _RAISED.match(text)
        if raised and traceback.calls and not traceback.is_of_launcher:
            error = _error_of(raised, traceback.calls)
            stated = line if traceback.ended < 0 else line._replace(rank=traceback.ended)
            is_whole = traceback.ended >= 0 or bool(_OUTERMOST.search(traceback.calls[0]))
            uncaught = stated.rank >= 0 and is_whole
            self._errors.append(_Raised(stated, error, self._when(line), uncaught))
        return raised is not None

    def take_error_file(self, error: ErrorFile, time_ns: int) -> None:
        """Collect the exception that ended a process from torchrun's error file."""
        lines = error.stack.splitlines()
        frames = [frame for line in lines if (frame := _FRAME.match(line))]
        calls = [f"{frame[1]}:{frame[2]} {frame[3]}" for frame in frames if not _LAUNCHER.search(frame[1])]
        raised = next((said for line in reversed(lines) if (said := _RAISED.match(line))), None)
        if raised is not None:
            line = LogLine(-1, -1, error.local, -1, -1, "", time_ns, raised[0])
            self._errors.append(_Raised(line, _error_of(raised, calls), time_ns, uncaught=True))

    # NCCL's watchdog, and its communicators.

    def _take_nccl(self, line: LogLine) -> bool:
        if said := _WATCHDOG.search(line.text):
            rank = line.rank if line.rank >= 0 else int(said["rank"])
            when = self._when(line)
            call = _TimedOut(
                rank, int(said["sequence"]), _op_of(said["op"]),
                int(said["numel"] or -1), when - int(said["ran_ms"]) * int(NS_PER_MS), when,
            )  # fmt: skip
            self._timed_out.append(call)
            self._end(rank).timed_out = True
            return True
        if said := _WORK.search(line.text):
            rank = line.rank if line.rank >= 0 else int(said["rank"])
            is_default = said["name"] == "default_pg" or (said["id"] or said["old"] or "0") == "0"
            group = _DEFAULT_GROUP if is_default else said["guid"] or ""  # else of each rank's own numbering
            work = group, int(said["enqueued"]), int(said["completed"])
            self._works.setdefault((rank, int(said["work"])), work)
            return True
        self.num_made += line.text.count(_MADE)
        for said in _INIT.finditer(line.text):  # processes that write at once tear their lines
            parts = (part.rpartition(" ") for part in (said["parts"] or "").split(", ") if part)
            seconds = {name: float(took) for name, _, took in parts}
            gpu = f"{said['process']} {said['gpu']}" if said["gpu"] else ""
            of = gpu, line.rank, int(said["rank"]), int(said["ranks"])
            self.inits.append(CommunicatorInit(*of, float(said["total"]), seconds))
        return False

    # PyTorch's elastic agent.

    def _take_elastic(self, line: LogLine) -> bool:
        if said := _FAILED.search(line.text):
            self._is_elastic = True
            self._locals.append((line, int(said[1]), int(said[2]), int(said[3])))
            return True
        if said := _ELASTIC.match(line.text):
            block = self._block.setdefault(line.source, {})
            if said[1] == "time":
                block.clear()
            block[said[1]] = said[2].strip()
            if said[1] == "exitcode":
                self._take_block(block, line)
            if (
                said[1] == "traceback"
                and _BEGINS in said[2]
                and (of := _RANK_OF.match(block.get("rank", "")))
            ):
                self._open[line.writer] = _Traceback(int(of[1]))
            return True
        if said := _ASKED.search(line.text):
            number = int(said[1] or said[2])
            name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
            self.reports.append(Report(ASKED, self._when(line), line.host, f"{name} to its launcher"))
            return True
        if said := _KEEP_ALIVE.search(line.text):
            report = Report(NODE, self._when(line), said[1], f"node {said[1]} stopped answering")
            if not any(one.kind == NODE and one.host == said[1] for one in self.reports):
                self.reports.append(report)
            return True
        return False

    def _take_block(self, block: Mapping[str, str], line: LogLine) -> None:
        rank, code = _RANK_OF.match(block.get("rank", "")), _EXIT_OF.match(block["exitcode"])
        if rank is None or code is None:
            return
        self._is_elastic = True
        end = self._end(int(rank[1]))
        if end.exit_code > 0 or end.exit_signal > 0:
            return  # the end in the first start is the cause of later ones
        stated = time_of(block.get("time", ""), 1970)
        end.local, end.host, end.pid = int(rank[2]), block.get("host", ""), int(code[2])
        _set_exit(end, int(code[1]), stated if stated >= 0 else self._when(line))

    # Kernels and network cards.

    def _take_machine(self, line: LogLine) -> bool:
        when = self._when(line)
        if said := _OOM_KILL.search(line.text):
            what = "the kernel killed the process: host memory ran out"
            self.reports.append(Report(MEMORY, when, line.host, what, pid=int(said[1])))
        elif said := _XID.search(line.text):
            pid = int(said[3]) if said[3] else -1
            what = f"XID {said[2]} of GPU {said[1]}"
            self.reports.append(Report(GPU, when, line.host, what, pid=pid, number=int(said[2])))
        elif said := _PEER.search(line.text):
            peer = said["completion"] or said["call"]
            why = f"completion with status {said['status']}" if said["completion"] else said["why"].strip()
            self.reports.append(Report(NETWORK, when, line.host, f"NCCL, peer {peer}: {why}", rank=line.rank))
        else:
            return False
        return True

    # Schedulers.

    def _take_scheduler(self, line: LogLine) -> bool:
        when, text = self._when(line), line.text
        if said := _CANCELLED.search(text):
            why = (said[3] or "").strip()
            kind = (
                TIME if "TIME" in why else PREEMPTED if "PREEMPT" in why else NODE if "NODE" in why else ASKED
            )
            self.reports.append(
                Report(kind, when, said[1] or "", f"Slurm: {why.lower() or 'it was cancelled'}")
            )
        elif said := _TASKS.search(text):
            self._take_tasks(said[1], said[2], said[3], when)
        elif _OOM_STEP.search(text):
            what = "Slurm: a process was killed, memory of the step ran out"
            self.reports.append(Report(MEMORY, when, line.host, what))
        elif said := _POD.search(text):
            why = said[1] or "OOMKilled"
            kinds = {"OOMKilled": MEMORY, "NodeLost": NODE, "DeadlineExceeded": TIME}
            self.reports.append(Report(kinds.get(why, PREEMPTED), when, line.host, f"Kubernetes: {why}"))
        else:
            return False
        return True

    def _take_tasks(self, host: str, tasks: str, how: str, when: int) -> None:
        if how.startswith("Out Of Memory"):
            self.reports.append(Report(MEMORY, when, host, f"Slurm: tasks {tasks} ran out of memory"))
        code = _EXITED.search(how)
        number = next((number for words, number in _TASK_SIGNALS.items() if how.startswith(words)), 0)
        numbers: list[int] = []
        for part in tasks.strip("[]").split(","):
            first, _, last = part.partition("-")
            if first.isdigit() and (not last or last.isdigit()):
                numbers += range(int(first), min(int(last or first), int(first) + 100_000) + 1)
        for task in numbers:
            end = LoggedEnd(task, host=host)
            _set_exit(end, int(code[1]) if code else -number, when)
            if end.exit_code > 0 or end.exit_signal > 0:
                self._tasks.setdefault(task, end)

    # Evidence of all lines together.

    def finish(self) -> JobLogs:
        """Build tables from all evidence."""
        if not self._is_elastic:  # else tasks are launchers
            for task, end in self._tasks.items():
                placed = self.ends.setdefault(task, end)
                if placed.exit_code < 0 and placed.exit_signal < 0:
                    placed.exit_code, placed.exit_signal, placed.ended_ns = (
                        end.exit_code, end.exit_signal, end.ended_ns,
                    )  # fmt: skip
        self._place_locals()
        self._place_errors()
        self.ends = {rank: end for rank, end in self.ends.items() if rank < MAX_RANKS}
        ranks = {**self.ends}
        wrote = [int(rank) for rank in self._writers if len(rank) < 7]
        self.world_size = max([self.world_size, *(rank + 1 for rank in [*ranks, *wrote] if rank < MAX_RANKS)])
        self._place_reports()
        for end in ranks.values():
            end.ended_ns, end.failed_ns = self._dated(end.ended_ns), self._dated(end.failed_ns)
        frames = {
            WORKERS.name: _workers(list(ranks.values())),
            **_calls(self._timed_out, self._works, self.world_size),
        }
        tables = {name: conform(table, frames.get(name, table.empty())) for name, table in TABLES.items()}
        manifest = Manifest(world_size=self.world_size, ranks=sorted(ranks))
        return JobLogs(tables, manifest, self.reports, self.inits, self.num_made, self.num_lines)

    def _dated(self, when: int) -> int:
        """Date an event before the first line that has a time to just before that line; keep other times."""
        if self._first is None or not 0 <= when < DATED_NS:
            return when
        first_ns, number = self._first
        return first_ns - (number - when) * int(_APART_NS)

    def _place_locals(self) -> None:
        """Assign exits by local rank: on one host these are ranks of the job."""
        for line, code, local, pid in self._locals:
            if any(end.pid == pid for end in self.ends.values()):
                continue
            if self._has_one_host():
                end = self._end(local)
                end.local, end.pid = local, pid
                _set_exit(end, code, self._when(line))

    def _has_one_host(self) -> bool:
        """Return whether local ranks are ranks of the job, in all known cases."""
        return all(end.local in (-1, end.rank) for end in self.ends.values())

    def _place_errors(self) -> None:
        """Assign exceptions by rank, process, or to the only rank that failed; caught ones are left out."""
        by_pid = {end.pid: end for end in self.ends.values() if end.pid > 0}
        by_local = {end.local: end for end in self.ends.values() if end.local >= 0}
        failed = [end for end in self.ends.values() if end.exit_code > 0]
        texts = {raised.error.partition("\n")[0] for raised in self._errors if raised.line.rank < 0}
        for line, error, when, uncaught in self._errors:
            lived_on = self._last_of.get(line.rank, when) - when > LIVED_NS
            end = self.ends.get(line.rank) or by_pid.get(line.pid) or by_local.get(line.local)
            end = end or self.ends.get(line.task)
            if end is None and line.source < 0 and self._has_one_host():
                end = self._end(line.local)
                end.local = line.local
            if end is None and line.rank >= 0 and uncaught and not lived_on:
                end = self._end(line.rank)
            elif end is None and line.rank < 0 and len(failed) == 1 and len(texts) == 1:
                (end,) = failed
            if end is not None and (end.exit_code > 0 or (uncaught and not lived_on and end.exit_code < 0)):
                end.error, end.failed_ns = error, when if when >= 0 else end.ended_ns

    def _place_reports(self) -> None:
        """Assign reports to ranks by the processes that they name."""
        by_pid = {end.pid: end for end in self.ends.values() if end.pid > 0}
        self.reports = [
            report._replace(
                time_ns=self._dated(report.time_ns),
                rank=by_pid[report.pid].rank if report.pid in by_pid else report.rank,
            )
            for report in self.reports
        ]


def _op_of(name: str) -> str:
    """Return NCCL's operation in PyTorch's words: `_ALLGATHER_BASE` is `all_gather`."""
    said = _OP.fullmatch(name)
    plain = (said[1] if said else name).strip("_").lower()
    return _WORDS.get(plain, plain)


def _error_of(raised: re.Match[str], calls: Sequence[str]) -> str:
    """Return an exception in the format of table `workers`: its message, then the calls, innermost first."""
    name = raised[1].rpartition(".")[2]
    return "\n".join([f"{name}: {raised[2]}" if raised[2] else name, *reversed(calls)])


def _set_exit(end: LoggedEnd, code: int, when: int) -> None:
    end.exit_code, end.exit_signal = (code, -1) if code >= 0 else (-1, -code)
    if code > 128 and code - 128 in {*signal.Signals}:  # a shell's encoding of a signal
        end.exit_code, end.exit_signal = -1, code - 128
    end.ended_ns = when


def _workers(ends: Iterable[LoggedEnd]) -> pl.DataFrame:
    """Return table `workers`, without causes for ranks that NCCL's watchdog ended."""
    rows = []
    for end in ends:
        aborted = end.timed_out and end.exit_signal == signal.SIGABRT
        row = {"rank": end.rank, "local_rank": end.local, "host": end.host, "pid": end.pid, "source": SOURCE}
        row |= {
            "gpu_name": "GPU" if end.timed_out else "",
            "ended_ns": end.ended_ns,
            "exit_code": end.exit_code,
        }
        row |= {"exit_signal": -1 if aborted else end.exit_signal}
        row |= (
            {"error": "", "failed_ns": -1}
            if end.timed_out
            else {"error": end.error, "failed_ns": end.failed_ns}
        )
        rows.append(row)
    return _frame(WORKERS, rows)


def _calls(
    timed_out: Sequence[_TimedOut], works: Mapping[tuple[int, int], tuple[str, int, int]], world_size: int
) -> dict[str, pl.DataFrame]:
    """Return tables of calls that timed out, and of each rank's progress in its groups.

    Numbers of groups that each rank counts by itself may mean different groups: calls in such groups count
    only if all calls that timed out are equal.
    """
    all_ranks = members_text(range(world_size))
    calls, groups = [], []
    same = len({(one.sequence, one.op, one.numel) for one in timed_out}) == 1
    for number, one in enumerate(timed_out):
        if one.rank >= world_size:
            continue
        group, enqueued, completed = works.get((one.rank, one.sequence), ("", -1, -1))
        if not group and not same:
            continue
        group = group or "NCCL"
        row = {"rank": one.rank, "group": group, "source": SOURCE}
        row[GROUP_RANKS] = all_ranks if group in (_DEFAULT_GROUP, "NCCL") else ""
        call = {"collective_id": number, "op": one.op, "sequence": one.sequence, "state": "scheduled"}
        calls.append(row | call | {"enqueued_ns": one.enqueued_ns})
        come = {"enqueued": max(enqueued, one.sequence), "completed": max(completed, one.sequence - 1)}
        groups.append(row | come | {"saved_ns": one.time_ns})
    return {COLLECTIVES.name: _frame(COLLECTIVES, calls), PROCESS_GROUPS.name: _frame(PROCESS_GROUPS, groups)}


def _frame(table: Table, rows: Sequence[Mapping[str, object]]) -> pl.DataFrame:
    names = rows[0] if rows else ()
    return (
        pl.DataFrame(rows, schema={name: table.columns[name].dtype for name in names})
        if rows
        else table.empty()
    )
