"""Start of a job under the recorder.

Takes a command and a run directory. Becomes the command, so that output, signals and exit code are the
command's own, and forks a sidecar process that turns the recorder's files into tables. `recording` describes
the run meanwhile.

The folder `inject/` on the job's `PYTHONPATH` loads the recorder; behind it, for containers without dpro, is
the copy that `recording` makes where no other user can change it.
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
from dpro.collectors.inside.kernel import host_clock, process_identity
from dpro.collectors.launch.notices import LastWord, print_run
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

TIMING = "TORCH_NCCL_ENABLE_TIMING"
TEARDOWN = "TEARDOWN_CUPTI"  # where 1, Kineto detaches CUPTI at the end of each session


class CommandNotFound(DproError):
    """The command to record does not exist; exit code 127, as from a shell."""

    exit_code = 127


class CommandNotRunnable(DproError):
    """The command to record exists but cannot be run; exit code 126, as from a shell."""

    exit_code = 126


@dataclass(frozen=True)
class RecordOptions:
    """Options of a recording.

    Attributes:
        on_request: whether deep windows are recorded only when requested while the job runs.
        every: steps from one deep window to the next; None to choose them to keep to the budget.
        budget: share of the job's time that windows may cost then, 0 to 1.
        skip: steps before the first window.
        shapes: whether windows include the input shapes of operators.
        stacks: whether windows include Python calls.
        modules: whether windows include the modules that operators belong to.
        memory: whether windows include every allocation.
        execution_trace: whether windows include data dependencies between operators.
        keep_windows: number of windows kept after the job has ended; None for all.
        keep: which windows are kept, `latest` or `slow`.
        telemetry_period_s: time between samples of the node; 0 for no samples.
        nccl_timing: whether PyTorch measures the run time of each NCCL collective.
        watch_loss: whether losses and gradient norms of each step are recorded.
        mask_command: whether only the first word of the command is kept.
        step: function, as `module:name`, whose returns end steps; empty if optimizers do.
        ray: whether Ray workers are recorded, too.
        detach: whether CUPTI is detached after deep windows, where that is known to be safe.
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
    nccl_timing: bool = False
    watch_loss: bool = False
    ray: bool = False
    detach: bool = False


@dataclass
class Request:
    """A command to record with its options; extensions may add to it before it starts.

    Attributes:
        extra: settings of extensions for the recorder, as JSON, beside the options.
        probes: modules that the recorder loads in the job beside its own, by name.
        environment: variables that are set for the job.
        prepare: called with the launch and the job's environment before it starts; they return more
            variables.
        beside: called first in the sidecar, while it still has the terminal, to start processes that need it.
        run_instead: runs the command and returns its exit code, in place of this process becoming the
            command.
        quiet: whether nothing is said on the job's stderr about the recording.
    """

    command: Sequence[str]
    options: RecordOptions
    extra: dict[str, Any] = field(default_factory=dict)
    probes: dict[str, str] = field(default_factory=lambda: places("probes"))
    environment: dict[str, str] = field(default_factory=dict)
    prepare: list[Callable[[Launch, Mapping[str, str]], Mapping[str, str]]] = field(default_factory=list)
    beside: list[Callable[[Launch], None]] = field(default_factory=list)
    run_instead: Callable[[Launch, Mapping[str, str]], int] | None = None
    quiet: bool = False

    def document(self) -> dict[str, Any]:
        """Return the options and settings for the manifest."""
        return asdict(self.options) | self.extra


Sidecar = Callable[[Launch, LaunchedProcess, LastWord], None]


def launch(run: Path, request: Request, sidecar: Sidecar) -> NoReturn:
    """Become the command, recorded into a run directory.

    Args:
        run: the run directory; it may exist if it is empty, or if another launcher records into it now.
        sidecar: called in a separate process beside the job, with the job to watch, and what can be said
            on its stderr at its end.

    Raises:
        CommandNotFound: there is no such command.
        CommandNotRunnable: the command cannot be executed.
        UsageError: the run directory has other content, belongs to another user, or records another job.
    """
    command = request.command
    if shutil.which(command[0]) is None:
        raise CommandNotFound(f"{command[0]}: command not found")
    refuse_undecodable(run)
    # Occupy closed standard streams until the job starts, so that no file of dpro gets their number.
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(descriptor)
    run = claim(run_of_this_start(run.resolve()))
    # Containers may share a name and have the same pids.
    host = re.sub(r"[^\w.-]|^[^\w]", "_", socket.gethostname())
    recording = Launch(run, f"{host}-{os.getpid()}-{os.urandom(3).hex()}")
    with _recordable(run), locked(run):  # launchers may start at the same time
        refuse_other_jobs(run, command)
        is_first = not launches(run)
        make_raw(recording)
        marker = prepare(recording, request)
        environment = job_environment(recording, request.options) | request.environment
        for prepared in request.prepare:
            environment |= prepared(recording, environment)
    _fork_sidecar(recording, marker, sidecar, request)
    # Hundreds of launchers may share one log, but not a terminal.
    if not request.quiet and (is_first or os.isatty(2)):
        print_run(run)
    if request.options.ray:
        environment |= ray_variables(os.environ, environment)
    if request.run_instead is not None:
        sys.exit(request.run_instead(recording, environment))
    _become(command, environment)


def run_of_this_start(run: Path) -> Path:
    """Return the run to record into: beside `run` if that contains an earlier start of the same Slurm job.

    The script of a requeued job names the same `run` again, which would be refused as not empty. All
    launchers of a start get the same result.
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
    """Return the recorded environment of the job in a run; empty where there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return dict(json.loads((run / "manifest.json").read_text(encoding="utf-8"))["environment"])
    return {}


def claim(run: Path) -> Path:
    """Make the run directory, or join the launchers that record into it now; refuse anything else.

    Raises:
        UsageError: the run directory has other content, or cannot be used.
    """
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
    """Turn an OSError in a run directory into one line that names it."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{run}: cannot record there ({error.strerror})") from error


def refuse_other_jobs(run: Path, command: Sequence[str]) -> None:
    """Raise if a launcher that records into a run now belongs to another job than this one.

    Raises:
        UsageError: one does.
    """
    here = launcher_identity(command, os.environ)
    for other in filter(is_locked, launches(run)):
        with suppress(FileNotFoundError, LookupError, TypeError):  # it is ending, or of another version
            why = job_difference(here, other.facts()["job"])
            if why:
                raise UsageError(
                    f"{run}: another job is being recorded there ({one_line(why)}); name another folder "
                    "with -o"
                )


def _is_of_this_job(run: Path) -> bool:
    """Return whether an earlier launcher of the same Slurm step recorded into a run and has ended."""
    ids = {name: os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")}
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":  # as in a shell that runs one job after another
        return False
    theirs = _environment_of(run)
    return bool(ids["SLURM_STEP_ID"]) and all(theirs.get(name) == value for name, value in ids.items())


def make_raw(recording: Launch) -> None:
    """Make the folder of a launch, which only this user may enter."""
    while True:
        keep_others_out(recording.run, recording.raw.parent)
        with suppress(FileNotFoundError):  # another launcher, as the last to end, removed the parent just now
            return recording.raw.mkdir(PRIVATE)


def prepare(recording: Launch, request: Request) -> IO[bytes]:
    """Write the settings for the recorder and the marker for readers; return the marker, open and locked."""
    command, options, document = request.command, request.options, request.document()
    recording.marker.parent.mkdir(0o755, exist_ok=True)
    facts = {"host": socket.gethostname(), **process_identity(os.getpid()), "launched_ns": time.time_ns()}
    facts |= {"job": launcher_identity(command, os.environ)}
    shown = (
        [*command[:1], *([MASK] if command[1:] else [])] if options.mask_command else masked_command(command)
    )
    with written_whole(recording.marker.parent, recording.marker.name) as file:
        lock(file)  # before it gets its name, so that no reader finds it unlocked
        file.write(json.dumps(facts | {"command": shown, "options": document}).encode())
        marker = os.fdopen(os.dup(file.fileno()), "rb")
    probes = {name: _file_of_probe(module) for name, module in request.probes.items()}
    write_copy(recording.raw, probes)
    config = document | {"pid": os.getpid(), "probes": probes}
    (recording.raw / "config.json").write_text(json.dumps(config))
    return marker


def _file_of_probe(module: str) -> str:
    """Return the path of a probe's module, of a package that of its `__init__.py`.

    Raises:
        InputError: there is no such module.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise InputError(f"{module}: there is no such module to load in the job")
    return os.path.abspath(spec.origin)


def job_environment(recording: Launch, options: RecordOptions) -> dict[str, str]:
    """Return the job's environment, in which torch finds the recorder and Kineto is silent on stderr."""
    environment = dict(os.environ)
    copy = recording.raw / COPY
    copied = str(copy) if copy.is_dir() else ""
    paths = [str(INJECT), recording.inject, copied, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    if options.nccl_timing:
        environment[TIMING] = "1"
    if options.detach:
        environment[TEARDOWN] = "0"  # has to be there to be changed in place
    return environment


def _fork_sidecar(recording: Launch, marker: IO[bytes], sidecar: Sidecar, request: Request) -> None:
    """Start the sidecar, orphaned and in its own session, so that neither `wait` nor Ctrl-C affects it."""
    job = LaunchedProcess(os.getpid())
    last_word = LastWord(recording.run, request.quiet)  # of this session, which has the terminal
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        last_word.close()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        for start in request.beside:
            with suppress(OSError):
                start(recording)
        _detach(recording, keep={marker.fileno(), job.descriptor, last_word.descriptor})
        sidecar(recording, job, last_word)
    finally:
        os._exit(0)


def _detach(recording: Launch, keep: set[int]) -> None:
    """Close the terminal, pipes and working folder, since other processes wait until they are closed."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(recording.raw / "sidecar.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    close_descriptors(keep)


def _become(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where closed
        stream.flush()
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise CommandNotRunnable(f"{command[0]}: {error.strerror}") from error
    # The recorder's entries may make PYTHONPATH exceed the limit of 128 KiB per variable.
    if sys.stderr is not None:
        what = f"the environment has no room for the recorder: {command[0]} is not recorded"
        print(f"dpro: {what}", file=sys.stderr, flush=True)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise CommandNotRunnable(f"{command[0]}: {error.strerror}") from error


# Whether two launchers that record into one run start parts of one job.

# Variables with one value in all launchers of a job; an allocation may run several jobs.
_ALLOCATIONS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID")
_JOBS = ("SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MASTER_ADDR", "MASTER_PORT",
         "TORCHELASTIC_RUN_ID")  # fmt: skip
# Variables and options (`--node-rank 1`, `--machine_rank=1`) that differ between launchers of a job.
_RANK_VARIABLES = (
    "RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
)
_RANK_OPTION = re.compile(r"-{1,2}[\w-]*(rank|node[-_]id|local[-_]addr)[\w-]*(=.*)?", re.IGNORECASE)
_RENDEZVOUS_OPTION = re.compile(r"--rdzv[-_](id|endpoint)\b.*")  # torchrun assigns node ranks itself


def launcher_identity(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts by which launchers are compared, as JSON."""
    # Options that give the position of a command in the job go to `places`, the others to `words`.
    words: list[str] = []
    places: dict[str, str] = {}
    option = ""
    for word in masked_command(command):
        place = _RANK_OPTION.fullmatch(word)
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
        "places": {name: environment[name] for name in _RANK_VARIABLES if environment.get(name)} | places,
        "command": words,
    }


def job_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Word why two launchers at the same time are of different jobs; empty where nothing shows it."""
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
    meets = meets or any(map(_RENDEZVOUS_OPTION.fullmatch, ours["command"]))
    if ours["host"] == theirs["host"] and not ours["places"] and not meets:
        return "it is the same command on the same host"
    return ""
