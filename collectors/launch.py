"""Start a job under the recorder, and know whether the recording of a run is over.

In: a command and a run directory. Out: the command, running in this very process, so that its output,
signals and exit code are its own, and a sidecar process that turns what the recorder writes into tables.

While a run is recorded it holds, for each launcher (one per node, or one per rank under `srun`):

    .recording/LAUNCH.json   the marker: locked by the sidecar for as long as it lives
    .raw/LAUNCH/             what the recorder writes, and the folder that gets it into the job

Both go when the tables are whole. A marker that nobody locks is a sidecar that was killed (a container
that ended with the job, say): its recording can be finished by whoever reads the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from dpro.collectors import inspector
from dpro.collectors.inside.environment import MASK, masked_command
from dpro.collectors.processes import Process, close_descriptors, start_ticks
from dpro.errors import DproError, InputError, UsageError

MARKERS = ".recording"
RAW = ".raw"
ENTRY_MODULE = "_dpro_autoload"
ALIAS = "_dpro_inside_the_job"  # what the job's processes know the recorder as

_ENTRY = '''"""Loads the dpro recorder into processes that import torch; made by `dpro record`."""


def load():
    try:
        import importlib.util, sys

        spec = importlib.util.spec_from_file_location("{alias}", {package!a} + "/__init__.py")
        sys.modules["{alias}"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["{alias}"])
        from {alias}.hooks import install

        install({launch!a})
    except Exception as error:
        try:
            with open({log!a}, "a") as log:
                log.write("the recorder could not be loaded: " + repr(error) + "\\n")
        except Exception:
            pass
'''


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
        mask_command: whether only the first word of the command is kept.
        step: the function, as `module:name`, whose returns end steps; empty if optimizers tell.
        apply: changes to make to the job: the `edit` as the user wrote it, the `family` of `inside/apply`
            that makes it, and what that takes as `arguments`.
    """

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
    def inject(self) -> Path:
        """The folder on `PYTHONPATH` that gets the recorder into the job."""
        return self.raw / "inject"

    def facts(self) -> dict[str, object]:
        """What the launcher knew: host, pid and start of the job, and its command.

        Raises:
            FileNotFoundError: the recording is over.
        """
        facts: dict[str, object] = json.loads(self.marker.read_text(encoding="utf-8"))
        return facts

    def remove_raw(self) -> None:
        """Delete what the recorder wrote: its tables are whole."""
        shutil.rmtree(self.raw, ignore_errors=True)
        with suppress(OSError):
            if not any(path.is_dir() for path in self.raw.parent.iterdir()):  # this was the last launcher's
                for left in self.raw.parent.glob("*.json"):
                    left.unlink()
            self.raw.parent.rmdir()

    def remove_marker(self) -> None:
        """Say that the recording is over."""
        self.marker.unlink(missing_ok=True)
        with suppress(OSError):
            self.marker.parent.rmdir()


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
        UsageError: the run directory holds something else.
    """
    if shutil.which(command[0]) is None:
        raise CommandNotFound(f"{command[0]}: command not found")
    run = run.resolve()
    if os.pathsep in str(run):
        raise UsageError(
            f"{run}: the job could not find the recorder there, since {os.pathsep!r} parts PYTHONPATH"
        )
    _claim(run)
    # Containers may share a name and have the same pids.
    mine = Launch(run, f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}")
    marker = _prepare(mine, command, options)
    _fork_sidecar(mine, marker, sidecar, beside)
    _become(command, _environment(mine, options))


def _claim(run: Path) -> None:
    """Make the run directory, or join the launchers that record into it now; refuse anything else."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        occupied = any(path.name not in (MARKERS, RAW) for path in run.iterdir())
    except OSError as error:
        raise UsageError(f"{run}: cannot record there ({error.strerror})") from error
    others = launches(run)
    if (occupied or others) and not any(is_locked(each) for each in others) and not _is_of_this_job(run):
        raise UsageError(f"{run}: exists and is not empty; name another folder with -o, or remove it")


def _is_of_this_job(run: Path) -> bool:
    """Whether a launcher of the same Slurm step was here, and has ended before this one began."""
    mine = {name: os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")}
    with suppress(OSError, ValueError, KeyError):
        theirs = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["environment"]
        return bool(mine["SLURM_STEP_ID"]) and all(theirs.get(name) == value for name, value in mine.items())
    return False


def _prepare(mine: Launch, command: Sequence[str], options: RecordOptions) -> IO[str]:
    """Write what the recorder and readers need to know; the marker comes back open and locked."""
    mine.marker.parent.mkdir(exist_ok=True)
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
    metadata = mine.inject / "dpro_recorder-0.dist-info"
    metadata.mkdir(parents=True)
    (mine.raw / "config.json").write_text(json.dumps(asdict(options) | {"pid": os.getpid()}))
    if options.nccl_inspector:
        (mine.raw / inspector.LOGS).mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dpro-recorder\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\ndpro_recorder = {ENTRY_MODULE}:load\n")
    package = Path(__file__).resolve().with_name("inside")
    entry = _ENTRY.format(
        alias=ALIAS, package=str(package), launch=str(mine.raw), log=str(mine.raw / "log.txt")
    )
    (mine.inject / f"{ENTRY_MODULE}.py").write_text(entry)
    return marker


def _environment(mine: Launch, options: RecordOptions) -> dict[str, str]:
    """The job's environment: torch finds the recorder, and Kineto does not talk on stderr."""
    environment = dict(os.environ)
    paths = [str(mine.inject), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    if options.nccl_inspector:
        logs = mine.raw / inspector.LOGS
        environment |= inspector.variables(options.nccl_inspector, logs, environment)
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
    """The recordings of a run that are not over."""
    try:
        names = sorted(os.listdir(run / MARKERS))
    except (FileNotFoundError, NotADirectoryError):  # over, perhaps only just now
        return []
    return [Launch(run, name.removesuffix(".json")) for name in names if name.endswith(".json")]


def is_locked(recording: Launch) -> bool:
    """Whether the sidecar of a recording lives."""
    try:
        with recording.marker.open("rb") as marker:
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
    with suppress(OSError, ValueError):
        begun = time.strftime("%H:%M:%S", time.localtime(recording.marker.stat().st_mtime))
        ranks = len(list(recording.raw.glob("*/facts.json")))
        pid = recording.facts()["pid"]
        return f" (since {begun}, pid {pid}, {ranks or 'no'} rank{'s' * (ranks != 1)} so far)"
    return ""


def _slow(run: str | os.PathLike[str], recording: Launch) -> str:
    with suppress(OSError, ValueError):
        host = recording.facts()["host"]
        if host != socket.gethostname():
            return (
                f"{run}: still being recorded on {host}, or about to be whole; read it when the job has ended"
            )
    return f"{run}: its tables are still being written; try again in a minute"


def job_lives(recording: Launch) -> bool:
    """Whether the job itself still runs, as far as can be seen from this host."""
    with suppress(FileNotFoundError, ValueError):
        facts = recording.facts()
        here = facts["host"] == socket.gethostname()
        return here and start_ticks(int(str(facts["pid"]))) == facts["start_ticks"]
    return False
