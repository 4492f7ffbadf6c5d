"""Start a job under the recorder, and know whether the recording of a run is over.

In: a command and a run directory. Out: the command, running in this very process, so that its output,
signals and exit code are its own, and a sidecar process that turns what the recorder writes into tables.

While a run is recorded it holds, for each launcher (one per node, or one per rank under `srun`):

    .recording/LAUNCH.json   the marker: locked by the sidecar for as long as it lives
    .raw/LAUNCH/             what the recorder writes; only the user who records may enter it

What gets the recorder into the job is `inject/` beside this module, on its `PYTHONPATH`, and behind it, for
containers that dpro is not in, the copy that `portable.py` makes where nobody else can change it.
Both go when the tables are whole. A marker that nobody locks is a sidecar that was killed (a container
that ended with the job, say): its recording can be finished by whoever reads the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn
from urllib.parse import quote, unquote_to_bytes

from dpro.collectors import inspector
from dpro.collectors.inside.environment import MASK, masked_command
from dpro.collectors.ownership import PRIVATE, keep_others_out
from dpro.collectors.portable import COPY, INJECT, write_copy
from dpro.collectors.processes import Process, close_descriptors, start_ticks
from dpro.errors import DproError, InputError, UsageError
from dpro.folders import opened, refuse_link

MARKERS = ".recording"
RAW = ".raw"
TIMING = "TORCH_NCCL_ENABLE_TIMING"
_NAME = re.compile(r"\w[\w.-]*")  # of a launch
_SHARED = re.compile(r"\.?(control|wanted|windows-\w*)\.[\w.-]*")  # what the processes of all launches share
_LAUNCH = f"{INJECT}/launch="  # see `inject/_dpro_autoload.py`


class CommandNotFound(DproError):
    """The command to record does not exist; the exit code is a shell's."""

    exit_code = 127


class CommandNotRunnable(DproError):
    """The command to record exists but cannot be run; the exit code is a shell's."""

    exit_code = 126


@dataclass(frozen=True)
class RecordOptions:
    """What to record.

    Attributes:
        windows: whether there are deep windows at all.
        window_steps: steps of a deep window.
        every: steps from one deep window to the next; None for as many as it takes to keep to the budget.
        budget: the share of the job's time that windows may cost then.
        skip: steps before the first one.
        shapes: whether windows have the input shapes of operators.
        stacks: whether windows have Python calls.
        modules: whether windows have the modules that operators belong to.
        memory: whether windows have every allocation.
        execution_trace: whether windows have what operators need from each other.
        telemetry_period_s: time from one sample of the node to the next; 0 for none.
        nccl_inspector: the profiler plug-in that NCCL is to load; empty for none.
        nccl_timing: whether PyTorch measures how long each of NCCL's collectives runs.
        mask_command: whether only the first word of the command is kept.
        step: the function, as `module:name`, whose returns end steps; empty if optimizers tell.
        apply: changes to make to the job: the `edit` as the user wrote it, the `family` of `inside/apply`
            that makes it, and what that takes as `arguments`.
    """

    windows: bool = True
    window_steps: int = 2
    every: int | None = None
    budget: float = 0.01
    skip: int = 5
    shapes: bool = False
    stacks: bool = False
    modules: bool = False
    memory: bool = False
    execution_trace: bool = False
    mask_command: bool = False
    step: str = ""
    telemetry_period_s: float = 1.0
    nccl_inspector: str = ""
    nccl_timing: bool = False
    apply: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Launch:
    """One launcher's part of a recording.

    Attributes:
        run: the run directory.
        name: unique among the launchers of the run.
    """

    run: Path
    name: str

    @property
    def raw(self) -> Path:
        """The folder the recorder writes to."""
        return self.run / RAW / self.name

    @property
    def marker(self) -> Path:
        """The file whose lock says that the sidecar lives."""
        return self.run / MARKERS / f"{self.name}.json"

    @property
    def inject(self) -> str:
        """The name on `PYTHONPATH` by which the recorder in the job finds this launch."""
        return _LAUNCH + quote(os.fsencode(self.raw), safe="")

    def facts(self) -> dict[str, Any]:
        """What the launcher knew: host, pid and start of the job, and its command.

        Raises:
            FileNotFoundError: the recording is over.
            InputError: the marker is no launcher's.
        """
        with _opened_marker(self.marker) as marker:
            try:
                facts: dict[str, Any] = json.loads(marker.read())
                if _is_a_launchers(facts):
                    return facts
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                pass
        raise InputError(
            f"{self.marker}: is not what a launcher writes; remove it, and read the run as it is"
        )

    def remove_raw(self) -> None:
        """Delete what the recorder wrote: its tables are whole.

        Raises:
            InputError: `.raw` is a link.
        """
        with suppress(FileNotFoundError), opened(self.raw.parent) as raw:
            shutil.rmtree(self.name, ignore_errors=True, dir_fd=raw)
            with suppress(OSError):
                left = os.listdir(raw)
                if all(map(_SHARED.fullmatch, left)):  # this was the last launcher's
                    for name in left:
                        os.unlink(name, dir_fd=raw)
                self.raw.parent.rmdir()

    def remove_marker(self) -> None:
        """Say that the recording is over.

        Raises:
            InputError: `.recording` is a link.
        """
        with suppress(FileNotFoundError), opened(self.marker.parent) as markers:
            with suppress(FileNotFoundError):
                os.unlink(self.marker.name, dir_fd=markers)
            with suppress(OSError):
                self.marker.parent.rmdir()


def _is_a_launchers(facts: dict[str, Any]) -> bool:
    """Whether the facts of a marker are of the types that a launcher writes.

    Raises:
        LookupError, TypeError, AttributeError: they are not.
    """
    host, pid, ticks = facts["host"], facts["pid"], facts["start_ticks"]
    changes = facts.get("options", {}).get("apply", [])
    return (
        isinstance(host, str)
        and "/" not in host
        and type(pid) is type(ticks) is int
        and isinstance(facts.get("command", []), list)
        and all(isinstance(change["edit"], str) for change in changes)
    )


def launch_on(python_path: bytes) -> Launch | None:
    """The launch that a process is recorded by, from its `PYTHONPATH`; None for none."""
    for entry in python_path.split(os.fsencode(os.pathsep)):
        if entry.startswith(os.fsencode(_LAUNCH)):
            raw = Path(os.fsdecode(unquote_to_bytes(entry.removeprefix(os.fsencode(_LAUNCH)))))
            return Launch(raw.parents[1], raw.name)
    return None


def launch(
    run: Path,
    command: Sequence[str],
    options: RecordOptions,
    sidecar: Callable[[Launch, Process], None],
    beside: Callable[[Launch], None] | None = None,
) -> NoReturn:
    """Become the command, recorded into a run directory.

    Args:
        run: the run directory; it may exist if it is empty, or if another launcher records into it now.
        command: the command and its arguments.
        options: what to record in depth.
        sidecar: called in a process of its own beside the job, with the job to watch.
        beside: called in that process first, while it still has the terminal: starts what shall have it, too.

    Raises:
        CommandNotFound: there is no such command.
        CommandNotRunnable: the command cannot be executed.
        UsageError: the run directory holds something else, or is somebody else's.
    """
    if shutil.which(command[0]) is None:
        raise CommandNotFound(f"{command[0]}: command not found")
    run = run.resolve()
    _claim(run)
    # Containers may share a name and have the same pids.
    host = re.sub(r"[^\w.-]|^[^\w]", "_", socket.gethostname())
    mine = Launch(run, f"{host}-{os.getpid()}-{os.urandom(3).hex()}")
    _make_raw(mine)
    marker = _prepare(mine, command, options)
    _fork_sidecar(mine, marker, sidecar, beside)
    _become(command, _environment(mine, options))


def _claim(run: Path) -> None:
    """Make the run directory, or join the launchers that record into it now; refuse anything else."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        occupied = any(path.name not in (MARKERS, RAW) for path in run.iterdir())
        others = launches(run)
        if (occupied or others) and not any(map(is_locked, others)) and not _is_of_this_job(run):
            raise UsageError(f"{run}: exists and is not empty; name another folder with -o, or remove it")
        keep_others_out(run, run / RAW)
    except OSError as error:
        raise UsageError(f"{run}: cannot record there ({error.strerror})") from error


def _is_of_this_job(run: Path) -> bool:
    """Whether a launcher of the same Slurm step was here, and has ended before this one began."""
    mine = {name: os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")}
    with suppress(OSError, ValueError, KeyError):
        theirs = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["environment"]
        return bool(mine["SLURM_STEP_ID"]) and all(theirs.get(name) == value for name, value in mine.items())
    return False


def _make_raw(mine: Launch) -> None:
    """Make the folder of a launch, which only this user may enter."""
    while True:
        keep_others_out(mine.run, mine.raw.parent)
        with suppress(
            FileNotFoundError
        ):  # another launcher, which thought itself the last, removed it just now
            return mine.raw.mkdir(PRIVATE)


def _prepare(mine: Launch, command: Sequence[str], options: RecordOptions) -> IO[str]:
    """Write what the recorder and readers need to know; the marker comes back open and locked."""
    mine.marker.parent.mkdir(0o755, exist_ok=True)
    unnamed = mine.marker.with_suffix(".tmp")
    marker = unnamed.open("w", encoding="utf-8")
    fcntl.flock(marker, fcntl.LOCK_EX)
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    shown = (
        [*command[:1], *([MASK] if command[1:] else [])] if options.mask_command else masked_command(command)
    )
    json.dump(facts | {"command": shown, "options": asdict(options)}, marker)
    marker.flush()
    unnamed.rename(mine.marker)  # nobody ever sees it unlocked
    write_copy(mine.raw)
    (mine.raw / "config.json").write_text(json.dumps(asdict(options) | {"pid": os.getpid()}))
    if options.nccl_inspector:
        (mine.raw / inspector.LOGS).mkdir()
    return marker


def _environment(mine: Launch, options: RecordOptions) -> dict[str, str]:
    """The job's environment: torch finds the recorder, and Kineto does not talk on stderr."""
    environment = dict(os.environ)
    copy = mine.raw / COPY
    copied = str(copy) if copy.is_dir() else ""
    paths = [str(INJECT), mine.inject, copied, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    if options.nccl_inspector:
        logs = mine.raw / inspector.LOGS
        environment |= inspector.variables(options.nccl_inspector, logs, environment)
    if options.nccl_timing:
        environment[TIMING] = "1"
    wanted = (change["arguments"] for change in options.apply if change["family"] == "environment")
    return environment | {each["name"]: each["value"] for each in wanted}


def _fork_sidecar(
    mine: Launch,
    marker: IO[str],
    sidecar: Callable[[Launch, Process], None],
    beside: Callable[[Launch], None] | None,
) -> None:
    """Start the sidecar as nobody's child and in its own session: neither `wait` nor Ctrl-C reaches it."""
    job = Process(os.getpid())
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        if beside is not None:
            with suppress(OSError):
                beside(mine)
        _detach(mine, keep={marker.fileno(), job.descriptor})
        sidecar(mine, job)
    finally:
        os._exit(0)


def _detach(mine: Launch, keep: set[int]) -> None:
    """Let go of the terminal, of every pipe and of the folder: others wait until nobody has them open."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(mine.raw / "sidecar.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    close_descriptors(keep)


def _become(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise CommandNotRunnable(f"{command[0]}: {error.strerror}") from error


def launches(run: Path) -> list[Launch]:
    """The recordings of a run that are not over.

    Raises:
        InputError: its folders of them are links, or a marker has a name that no launch has.
    """
    refuse_link(run / MARKERS)
    refuse_link(run / RAW)
    try:
        names = sorted(os.listdir(run / MARKERS))
    except (FileNotFoundError, NotADirectoryError):  # over, perhaps only just now
        return []
    found = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    for name in found:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{run / MARKERS}: {f'{name}.json'!a} is no name that a recording has; remove it"
            )
    return [Launch(run, name) for name in found]


@contextmanager
def _opened_marker(path: Path) -> Iterator[IO[bytes]]:
    """A marker to read; neither a link nor a pipe is waited for or followed."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as marker:
        yield marker


def is_locked(recording: Launch) -> bool:
    """Whether the sidecar of a recording lives."""
    try:
        with _opened_marker(recording.marker) as marker:
            fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def wait_until_finished(run: str | os.PathLike[str], timeout_s: float = 60.0) -> list[Launch]:
    """Wait until the sidecars of a run whose job has ended have written its tables.

    Args:
        run: the run directory; anything else is finished.
        timeout_s: how long to wait at most.

    Returns:
        Recordings whose sidecar was killed: their tables are still to be made.

    Raises:
        InputError: the job still runs, or its sidecar takes longer than the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        open_ones = launches(Path(run).resolve())
        locked = [each for each in open_ones if is_locked(each)]
        if not locked:
            return [each for each in open_ones if each.marker.exists()]
        for each in locked:
            if job_lives(each):
                raise InputError(
                    f"{run}: still being recorded{_so_far(each)}; read it when the job has ended, "
                    f"or a copy of what there is now: dpro attach {run} -o COPY"
                )
        if time.monotonic() > deadline:
            raise InputError(_slow(run, locked[0]))
        time.sleep(0.05)


def _so_far(recording: Launch) -> str:
    """How far a recording is: ` (2 ranks so far, since 12:30, pid 7)`."""
    with suppress(OSError, InputError):
        begun = time.strftime("%H:%M:%S", time.localtime(recording.marker.stat().st_mtime))
        ranks = len(list(recording.raw.glob("*/facts.json")))
        pid = recording.facts()["pid"]
        return f" (since {begun}, pid {pid}, {ranks or 'no'} rank{'s' * (ranks != 1)} so far)"
    return ""


def _slow(run: str | os.PathLike[str], recording: Launch) -> str:
    with suppress(OSError, InputError):
        host = recording.facts()["host"]
        if host != socket.gethostname():
            return (
                f"{run}: still being recorded on {host}, or about to be whole; read it when the job has ended"
            )
    return f"{run}: its tables are still being written; try again in a minute"


def job_lives(recording: Launch) -> bool:
    """Whether the job itself still runs, as far as can be seen from this host."""
    with suppress(OSError, InputError):
        facts = recording.facts()
        here: bool = facts["host"] == socket.gethostname()
        return here and start_ticks(facts["pid"]) == facts["start_ticks"]
    return False
