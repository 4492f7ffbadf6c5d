"""How a small script of a kind shows itself to its user, run plain and recorded. `odd_kinds` has the scripts.

In: a script, and whether it is recorded. Out: how it ended, what it printed, what it left in its folder. What
differs from run to run (process ids, addresses, times, ports) is replaced before it is compared.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.jobs import MODEL, RECORD, TWO_RANKS, environment, imports, wait_until

WINDOWS = ("--every", "3", "--window-steps", "1", "--skip", "2")  # the recorder at work in every third step
PATIENCE_S = 150  # a job that takes longer hangs
GRACE_S = 20  # for a process that the job left behind

# What scripts begin with, unless they are `bare`: the tiny model, and what prints results.
HEAD = (
    imports("atexit", "hashlib", "os", "random", "signal", "threading", "time")
    + "random.seed(1)\ntorch.manual_seed(1)\n"
    + MODEL
    + '''
started = os.getpid()

def say(*words):
    print(*words, flush=True)

def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]

def state():
    """What training led to, and whether anybody else drew random numbers."""
    weights = [p.detach().tolist() for p in model.parameters()]
    drawn = [torch.get_rng_state().tolist()]
    if os.getpid() == started:  # Python seeds it again in each child
        drawn.append(random.getstate())
    say("weights", digest(weights), "random", digest(drawn))

def train(steps=9):
    for _ in range(steps):
        train_step()
    state()

def handlers():
    """What Python says of each signal."""
    found = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {number: str(getattr(handler, "__name__", handler)) for number, handler in found.items()}

def status(*names):
    """What the kernel says of this process."""
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: lines[name].strip() for name in names}
'''
)


@dataclass(frozen=True)
class OddJob:
    """One kind of job.

    Attributes:
        body: the script, behind `HEAD`; all of it where the job is `bare`.
        start: the words before the script; None for this Python, or two of them with `ranks`.
        arguments: of the script.
        how: `file`, or another way in which Python gets the script: `-c`, `-m`, `stdin`, `zip`.
        needs: modules without which it cannot run.
        signals: sent to the process, each when it has made the file `ready`, `ready1` and so on.
        to_group: whether they are sent to all processes of the job, as a terminal does.
        steps: that the recording has at least.
        lines: that the recorder may have in its log: trouble that the job has made for it.
        terminal: whether it has one.
        noisy: whether its stderr is that of others, which say times and ports: only its last line counts.
        variables: of its environment.
        is_quick: whether it is in the sample that the default suite runs.
        as_root: whether only root can run it.
        through: words before the whole command; `{PLACE}` in them is the folder of the run.
        shows_frames: whether it prints tracebacks or stacks itself, in which calls of the recorder may stand.
        run_name: of the run directory.
        then: what a shell does in its folder when it has ended.
        says: what `dpro record` says on stderr before the job starts.
    """

    kind: str
    body: str
    bare: bool = False
    start: tuple[str, ...] | None = None
    arguments: tuple[str, ...] = ()
    how: str = "file"
    ranks: int = 0
    modules: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    signals: tuple[int, ...] = ()
    to_group: bool = False
    steps: int = 1
    lines: int = 0
    options: tuple[str, ...] = WINDOWS
    terminal: bool = False
    noisy: bool = False
    through: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    is_quick: bool = False
    as_root: bool = False
    shows_frames: bool = False
    run_name: str = "run"
    says: str = ""
    then: str = ""

    def lacks(self) -> str:
        """Why it cannot run here; empty where it can."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}"
        return "needs root" if self.as_root and os.geteuid() else ""

    def command(self, folder: Path) -> list[str]:
        """Write the script into a folder, and return the command that runs it there."""
        body = textwrap.dedent(self.body)
        text = body if self.bare else imports(*self.modules) + HEAD + body
        (folder / "job.py").write_text(text)
        if self.start is not None:
            return [*self.start, *self.arguments]
        if self.ranks:
            return [*TWO_RANKS[:2], str(self.ranks), "job.py", *self.arguments]
        words = {
            "file": ["job.py"],
            "-c": ["-c", text],
            "-m": ["-m", "job"],
            "stdin": ["-"],
            "zip": ["job.pyz"],
        }
        if self.how == "zip":
            (folder / "inner").mkdir()
            (folder / "job.py").rename(folder / "inner" / "__main__.py")
            subprocess.run([sys.executable, "-m", "zipapp", "inner", "-o", "job.pyz"], cwd=folder, check=True)
        return [sys.executable, *words[self.how], *self.arguments]


@dataclass(frozen=True)
class Outcome:
    """What shows of a job.

    Attributes:
        code: how it ended: its exit code, or minus a signal.
        files: that it left in its folder, and a digest of each.
    """

    code: int | str
    stdout: str
    stderr: str
    files: tuple[tuple[str, str], ...]


def outcome(job: OddJob, folder: Path, place: Path, run: Path | None) -> Outcome:
    """Run a job in a new folder, and say what shows of it.

    Args:
        place: a folder beside that of the job.
        run: within it, where the job is recorded; None for a plain one.
    """
    folder.mkdir(parents=True)
    command = job.command(folder)
    if run is not None:
        command = [*RECORD, "-o", str(run), *job.options, "--", *command]
    before = set(folder.rglob("*"))
    variables = environment(**dict(job.variables))
    variables["PYTHONPATH"] = f"{folder}{os.pathsep}{variables['PYTHONPATH']}"
    if "LONG_PATH" in variables:
        variables["PYTHONPATH"] += os.pathsep + "x" * (
            int(variables["LONG_PATH"]) - len(variables["PYTHONPATH"])
        )
    through = [word.replace("{PLACE}", str(place)) for word in job.through]
    given = (folder / "job.py").open("rb") if job.how == "stdin" else subprocess.DEVNULL
    code, stdout, stderr = _run(job, [*through, *command], folder, variables, given)
    if job.then:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(job.then, shell=True, cwd=folder, env=variables | {"PATH": path}, check=False)
    files = tuple((str(path.relative_to(folder)), _digest(path, folder)) for path in _left(folder, before))
    if run is not None and job.says and stderr.startswith(job.says):
        stderr = stderr.partition("\n")[2]
    words = stdout, (stderr.strip().rpartition("\n")[2] if job.noisy else stderr)
    stdout, stderr = (normalised(_without_ours(text) if job.shows_frames else text, folder) for text in words)
    shutil.rmtree(folder, ignore_errors=True)  # the next has the same path
    return Outcome(code, stdout, stderr, files)


def _run(
    job: OddJob, command: list[str], folder: Path, variables: dict[str, str | bytes], given: object
) -> tuple[int | str, str, str]:
    out, err = subprocess.PIPE, subprocess.PIPE
    master = -1
    if job.terminal:
        master, slave = pty.openpty()
        given = out = err = slave
    process = subprocess.Popen(
        command, cwd=folder, env=variables, stdin=given, stdout=out, stderr=err, start_new_session=True
    )
    try:
        for index, number in enumerate(job.signals):
            ready = folder / f"ready{index or ''}"
            wait_until(
                lambda ready=ready: ready.exists() or process.poll() is not None, "never ready", PATIENCE_S
            )
            if process.poll() is None:
                (os.killpg if job.to_group else os.kill)(process.pid, number)
        if job.terminal:
            os.close(slave)
            # The one line that a person at a terminal is shown before the job starts is no output of it.
            stdout, stderr = b"".join(_read(master)), b""
            process.wait(PATIENCE_S)
        else:
            stdout, stderr = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        stdout, stderr = process.communicate()
        return "hung", stdout.decode(errors="replace"), stderr.decode(errors="replace")
    return process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace")


def _read(master: int) -> Iterator[bytes]:
    """What comes from a terminal until its last writer is gone."""
    with suppress(OSError):
        while content := os.read(master, 1 << 16):
            yield content
    os.close(master)


def _left(folder: Path, before: set[Path]) -> list[Path]:
    """Files that a job has left; a process of its that goes on may still write `late`."""
    deadline = time.monotonic() + GRACE_S
    while (folder / "waits").exists() and not (folder / "late").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(
        path for path in folder.rglob("*") if path not in before and "__pycache__" not in path.parts
    )


def _digest(path: Path, folder: Path) -> str:
    if not path.is_file() or path.name == ".metadata":  # which has an identifier drawn for each save
        return "exists"
    content = path.read_bytes()
    if path.suffix == ".txt" or path.name == "late":
        return normalised(content.decode(errors="replace"), folder)
    return "some" if path.suffix in (".html", ".json") else _hash(content)  # with times


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


_CHANGING = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0x…"),
    (re.compile(r"\b(pid|PID|process|Process|thread)([ :=(]+)\d+"), r"\1\2…"),
    (re.compile(r"<string>|<stdin>"), "<script>"),
    (re.compile(r"\b([IWE])\d{4} [\d:.]+ +\d+ "), r"\1 "),  # how torch logs
)


_OUR_FRAME = re.compile(r' *File "[^"]*/(?:collectors|extensions/\w+)/inside/[^"]*", line .*\n(?:    .*\n)*')


def _without_ours(text: str) -> str:
    """A traceback without calls of the recorder."""
    return _OUR_FRAME.sub("", text)


def normalised(text: str, folder: Path) -> str:
    """A text without what differs from run to run."""
    text = text.replace(str(folder), "FOLDER")
    for pattern, instead in _CHANGING:
        text = pattern.sub(instead, text)
    return text


JOBS: list[OddJob] = []


def job(kind: str, body: str, **how: object) -> None:
    """Add a kind."""
    JOBS.append(OddJob(kind, body, **how))  # type: ignore[arg-type]
