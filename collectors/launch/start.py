"""Start a job under the recorder.

In: a command and a run directory. Out: the command, running in this very process, so that its output,
signals and exit code are its own, and a sidecar process that turns what the recorder writes into tables.
`recording` says what a run holds meanwhile.

What gets the recorder into the job is the folder `inject/`, on its `PYTHONPATH`, and behind it, for
containers that dpro is not in, the copy that `recording` makes where no other user can change it.
"""

from __future__ import annotations

import errno
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
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NoReturn

from dpro.collectors.inside.environment import MASK, masked_command
from dpro.collectors.inside.kernel import host_clock, name_of
from dpro.collectors.launch.processes import LaunchedProcess, close_descriptors
from dpro.collectors.launch.ray_jobs import ray_variables
from dpro.collectors.launch.recording import (
    COPY,
    INJECT,
    MARKERS,
    PRIVATE,
    RAW,
    Launch,
    is_locked,
    keep_others_out,
    launches,
    write_copy,
)
from dpro.errors import DproError, InputError, UsageError
from dpro.folders import lock, locked, refuse_undecodable, written_whole
from dpro.plugins import places
from dpro.words import one_line

INSIDE = "dpro.collectors.inside."
TIMING = "TORCH_NCCL_ENABLE_TIMING"


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
        on_request: whether there are only those deep windows that are asked for while the job runs.
        every: steps from one deep window to the next; None for as many as it takes to keep to the budget.
        budget: the share of the job's time that windows may cost then.
        skip: steps before the first one.
        shapes: whether windows have the input shapes of operators.
        stacks: whether windows have Python calls.
        modules: whether windows have the modules that operators belong to.
        memory: whether windows have every allocation.
        execution_trace: whether windows have what operators need from each other.
        keep_windows: how many stay when the job has ended; None for all.
        keep: which, `latest` or `slow`.
        telemetry_period_s: time from one sample of the node to the next; 0 for none.
        nccl_inspector: the profiler plug-in that NCCL is to load; empty for none.
        nccl_timing: whether PyTorch measures how long each of NCCL's collectives runs.
        watch_loss: whether losses and norms of gradients are recorded, of each step.
        mask_command: whether only the first word of the command is kept.
        requests: logs of a server's requests, which it or its client writes while it is recorded.
        step: the function, as `module:name`, whose returns end steps; empty if optimizers do.
        ray: whether workers of Ray are recorded, too.
    """

    windows: bool = True
    on_request: bool = False
    window_steps: int = 2
    every: int | None = None
    budget: float = 0.01
    skip: int = 5
    shapes: bool = False
    stacks: bool = False
    modules: bool = False
    memory: bool = False
    execution_trace: bool = False
    keep_windows: int | None = None
    keep: str = "latest"
    mask_command: bool = False
    step: str = ""
    telemetry_period_s: float = 1.0
    nccl_inspector: str = ""
    nccl_timing: bool = False
    watch_loss: bool = False
    requests: tuple[str, ...] = ()
    ray: bool = False


@dataclass
class Request:
    """A command to record, and how; extensions may add to it before it starts.

    Attributes:
        extra: what extensions ask of the recorder, as JSON, beside the options.
        probes: modules that the recorder loads in the job, by name, beside its own.
        environment: variables that are set for the job.
        beside: called in the sidecar first, while it still has the terminal: starts what shall have it, too.
        run_instead: runs the command, and returns its exit code, in place of this process becoming it.
    """

    command: Sequence[str]
    options: RecordOptions
    extra: dict[str, Any] = field(default_factory=dict)
    probes: dict[str, str] = field(default_factory=lambda: places("probes"))
    environment: dict[str, str] = field(default_factory=dict)
    beside: list[Callable[[Launch], None]] = field(default_factory=list)
    run_instead: Callable[[Launch, Mapping[str, str]], int] | None = None

    def document(self) -> dict[str, Any]:
        """What was asked for, as the manifest has it."""
        return asdict(self.options) | self.extra


def launch(run: Path, request: Request, sidecar: Callable[[Launch, LaunchedProcess], None]) -> NoReturn:
    """Become the command, recorded into a run directory.

    Args:
        run: the run directory; it may exist if it is empty, or if another launcher records into it now.
        sidecar: called in a process of its own beside the job, with the job to watch.

    Raises:
        CommandNotFound: there is no such command.
        CommandNotRunnable: the command cannot be executed.
        UsageError: the run directory holds something else, is another user's, or another job records into it.
    """
    command = request.command
    if shutil.which(command[0]) is None:
        raise CommandNotFound(f"{command[0]}: command not found")
    refuse_undecodable(run)
    # No file of ours gets the number of a standard stream that is closed; the job starts without it, too.
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(descriptor)
    run = claim(of_this_start(run.resolve()))
    # Containers may share a name and have the same pids.
    host = re.sub(r"[^\w.-]|^[^\w]", "_", socket.gethostname())
    recording = Launch(run, f"{host}-{os.getpid()}-{os.urandom(3).hex()}")
    with _recordable(run), locked(run):  # of launchers that begin together one is the first
        refuse_other_jobs(run, command)
        make_raw(recording)
        marker = prepare(recording, request)
    _fork_sidecar(recording, marker, sidecar, request.beside)
    say_where(run)
    environment = job_environment(recording, request.options) | request.environment
    if request.options.ray:
        environment |= ray_variables(os.environ, environment)
    if request.run_instead is not None:
        sys.exit(request.run_instead(recording, environment))
    _become(command, environment)


def say_where(run: Path) -> None:
    """Name the run, and what to do with it, on a terminal: what goes into a file is the job's alone."""
    if sys.stderr is None or not sys.stderr.isatty():
        return
    with suppress(OSError):  # a folder that is gone, a terminal that is closed: the job starts all the same
        here = Path.cwd()
        name = run.relative_to(here) if run.is_relative_to(here) else run
        line = f"dpro: recording into {name}; once the job has ended: dpro {name}"
        print(line, file=sys.stderr, flush=True)


def of_this_start(run: Path) -> Path:
    """Where a start of a job is recorded: beside RUN where an earlier start of the same job is in it.

    A job that Slurm requeues would else end at once, as its script names the same RUN again. All launchers of
    a start find the same.
    """
    job, start = (os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
    if start == "0" or not start.isdecimal():
        return run
    recorded = [_environment_of(run)]
    for other in launches(run):
        with suppress(OSError, InputError, LookupError, TypeError):
            recorded.append(other.facts()["job"]["ids"])
    starts = {ids.get("SLURM_RESTART_COUNT", "0") for ids in recorded if ids.get("SLURM_JOB_ID") == job}
    return run.with_name(f"{run.name}-restart{start}") if starts - {start} else run


def _environment_of(run: Path) -> Mapping[str, str]:
    """The settings of a job that was recorded into a run; empty where none was."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return dict(json.loads((run / "manifest.json").read_text(encoding="utf-8"))["environment"])
    return {}


def claim(run: Path) -> Path:
    """Make the run directory, or join the launchers that record into it now; refuse anything else."""
    with _recordable(run):
        run.mkdir(parents=True, exist_ok=True)
        occupied = any(path.name not in (MARKERS, RAW) for path in run.iterdir())
        others = launches(run)
        if (occupied or others) and not any(map(is_locked, others)) and not _is_of_this_job(run):
            raise UsageError(f"{run}: exists and is not empty; name another folder with -o, or remove it")
        keep_others_out(run, run / RAW)
    return run


@contextmanager
def _recordable(run: Path) -> Iterator[None]:
    """What goes wrong in a run directory before the job begins, in one line that names it."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{run}: cannot record there ({error.strerror})") from error


def refuse_other_jobs(run: Path, command: Sequence[str]) -> None:
    """Hold the launchers that record into a run now to be of this one's job.

    Raises:
        UsageError: one cannot be.
    """
    here = part(command, os.environ)
    for other in filter(is_locked, launches(run)):
        with suppress(FileNotFoundError, LookupError, TypeError):  # it ends, or is of another version
            why = difference(here, other.facts()["job"])
            if why:
                raise UsageError(
                    f"{run}: another job is being recorded there ({one_line(why)}); name another folder "
                    "with -o"
                )


def _is_of_this_job(run: Path) -> bool:
    """Whether another launcher of the same Slurm step was here, and has ended before this one began."""
    ids = {name: os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")}
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":  # as of a shell, in which one job follows another
        return False
    theirs = _environment_of(run)
    return bool(ids["SLURM_STEP_ID"]) and all(theirs.get(name) == value for name, value in ids.items())


def make_raw(recording: Launch) -> None:
    """Make the folder of a launch, which only this user may enter."""
    while True:
        keep_others_out(recording.run, recording.raw.parent)
        with suppress(
            FileNotFoundError
        ):  # another launcher, which thought itself the last, removed it just now
            return recording.raw.mkdir(PRIVATE)


def prepare(recording: Launch, request: Request) -> IO[bytes]:
    """Write what the recorder and readers need to know; the marker comes back open and locked."""
    command, options, document = request.command, request.options, request.document()
    recording.marker.parent.mkdir(0o755, exist_ok=True)
    facts = {"host": socket.gethostname(), **name_of(os.getpid()), "launched_ns": time.time_ns()}
    facts |= {"job": part(command, os.environ)}
    shown = (
        [*command[:1], *([MASK] if command[1:] else [])] if options.mask_command else masked_command(command)
    )
    with written_whole(recording.marker.parent, recording.marker.name) as file:
        lock(file)  # before it has its name: no reader ever finds it unlocked
        file.write(json.dumps(facts | {"command": shown, "options": document}).encode())
        marker = os.fdopen(os.dup(file.fileno()), "rb")
    write_copy(recording.raw)
    probes = {name: _where_inside(place) for name, place in request.probes.items()}
    config = document | {"pid": os.getpid(), "probes": probes}
    (recording.raw / "config.json").write_text(json.dumps(config))
    if options.nccl_inspector:
        (recording.raw / INSPECTOR_LOGS).mkdir()
    return marker


def _where_inside(probe: str) -> str:
    """Where the job finds a probe: the name of a module of the recorder, or the path of another's file."""
    if probe.startswith(INSIDE):
        return probe.removeprefix(INSIDE)
    spec = find_spec(probe)
    if spec is None or spec.origin is None:
        raise InputError(f"{probe}: there is no such module to load in the job")
    return os.path.abspath(spec.origin)


def job_environment(recording: Launch, options: RecordOptions) -> dict[str, str]:
    """The job's environment: torch finds the recorder, and Kineto does not talk on stderr."""
    environment = dict(os.environ)
    copy = recording.raw / COPY
    copied = str(copy) if copy.is_dir() else ""
    paths = [str(INJECT), recording.inject, copied, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    if options.nccl_inspector:
        logs = recording.raw / INSPECTOR_LOGS
        environment |= inspector_variables(options.nccl_inspector, logs, environment)
    if options.nccl_timing:
        environment[TIMING] = "1"
    return environment


def _fork_sidecar(
    recording: Launch,
    marker: IO[bytes],
    sidecar: Callable[[Launch, LaunchedProcess], None],
    beside: Sequence[Callable[[Launch], None]],
) -> None:
    """Start the sidecar, orphaned and in its own session: neither `wait` nor Ctrl-C reaches it."""
    job = LaunchedProcess(os.getpid())
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        for start in beside:
            with suppress(OSError):
                start(recording)
        _detach(recording, keep={marker.fileno(), job.descriptor})
        sidecar(recording, job)
    finally:
        os._exit(0)


def _detach(recording: Launch, keep: set[int]) -> None:
    """Release the terminal, every pipe and the folder: other processes wait until all are closed."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(recording.raw / "sidecar.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    close_descriptors(keep)


def _become(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a job may be started without them
        stream.flush()
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise CommandNotRunnable(f"{command[0]}: {error.strerror}") from error
    # What the recorder adds to PYTHONPATH may be too much: one variable has at most 128 KiB.
    if sys.stderr is not None:
        what = f"the environment has no room for the recorder: {command[0]} is not recorded"
        print(f"dpro: {what}", file=sys.stderr, flush=True)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise CommandNotRunnable(f"{command[0]}: {error.strerror}") from error


# Whether two launchers that record into one run start parts of one job.

# What all launchers of a job share. The first ones are of a whole allocation, in which several jobs may run.
_ALLOCATIONS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID")
_JOBS = ("SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MASTER_ADDR", "MASTER_PORT",
         "TORCHELASTIC_RUN_ID")  # fmt: skip
# What differs between them, as variables and as options of a command (`--node-rank 1`, `--machine_rank=1`).
_PLACES = ("RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_PLACE = re.compile(r"-{1,2}[\w-]*(rank|node[-_]id|local[-_]addr)[\w-]*(=.*)?", re.IGNORECASE)
_MEETING = re.compile(r"--rdzv[-_](id|endpoint)\b.*")  # of torchrun, which finds the places itself


def part(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """What a launcher is to be compared by, as JSON."""
    # Options that say where in a job a command is are `places`, the others `words`.
    words: list[str] = []
    places: dict[str, str] = {}
    option = ""
    for word in masked_command(command):
        place = _PLACE.fullmatch(word)
        if option:
            places[option], option = word, ""
        elif place and place[2]:
            places[word.partition("=")[0]] = place[2][1:]
        elif place:
            option = word
        else:
            words.append(word)
    return {
        "host": [socket.gethostname(), host_clock()],
        "ids": {name: environment[name] for name in (*_ALLOCATIONS, *_JOBS) if environment.get(name)},
        "places": {name: environment[name] for name in _PLACES if environment.get(name)} | places,
        "command": words,
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Why two launchers that run at the same time are not of one job; empty where they may be."""
    shared = [name for name in ours["ids"] if name in theirs["ids"]]
    for name in shared:
        if ours["ids"][name] != theirs["ids"][name]:
            return f"its {name} is {theirs['ids'][name]}, and here it is {ours['ids'][name]}"
    if ours["places"] and ours["places"] == theirs["places"]:
        place = ", ".join(f"{name} {value}" for name, value in ours["places"].items())
        return f"it has the same {place}"
    meets = any(name in _JOBS for name in shared)
    if ours["command"] != theirs["command"] and not meets:
        return f"its command is {' '.join(theirs['command'])}"
    meets = meets or any(map(_MEETING.fullmatch, ours["command"]))
    if ours["host"] == theirs["host"] and not ours["places"] and not meets:
        return "it is the same command on the same host"
    return ""


# NCCL's Inspector, a profiler plug-in that comes with the sources of NCCL 2.28 and later.

INSPECTOR_LOGS = "nccl"  # the folder of its logs, in that of the launch
INSPECTOR_PLUGIN = "NCCL_PROFILER_PLUGIN"
_INSPECTOR_FOLDER = "NCCL_INSPECTOR_DUMP_DIR"


def check_plugin(plugin: str, given: Mapping[str, str]) -> str:
    """Return the value of the variable that names the plug-in to NCCL.

    Args:
        plugin: the path of a library, or a name by which NCCL finds one: `inspector` is
            libnccl-profiler-inspector.so on the library path of the job.

    Raises:
        UsageError: there is no such library, or the job has a plug-in or a folder of its own.
    """
    for name in (INSPECTOR_PLUGIN, _INSPECTOR_FOLDER):
        if name in given:
            raise UsageError(f"--nccl-inspector: {name} is set already; unset it, or leave the option out")
    if "/" not in plugin and not plugin.endswith(".so"):
        return plugin
    if not Path(plugin).is_file():
        raise UsageError(f"--nccl-inspector {plugin}: no such file")
    return str(Path(plugin).resolve())


def inspector_variables(plugin: str, logs: Path, given: Mapping[str, str]) -> dict[str, str]:
    """What makes NCCL load the Inspector, and it write; how often and how much is the user's say."""
    wanted = {
        INSPECTOR_PLUGIN: plugin,
        "NCCL_INSPECTOR_ENABLE": "1",
        _INSPECTOR_FOLDER: str(logs),
        "NCCL_INSPECTOR_DUMP_VERBOSE": "1",  # otherwise its lines lack times
        # The first versions keep only the latest collective of each communicator between two dumps.
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
    }
    return {name: value for name, value in wanted.items() if name not in given}
