"""One check of a stage: its inputs, and how it reports its results, line by line.

A check runs in its own process and may start others. Its results are on disk at every moment, so that a check
that is ended at its limit, or whose process hangs or dies in the driver, loses only the line that it was
working on. Only the standard library is used here: a check decides for itself whether it needs torch.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_stages.processes import marked, run_to_limit

from dpro.folders import written_whole

STAGES = Path(__file__).resolve().parent
ROOT = STAGES.parents[1]
JOBS = STAGES / "jobs"
DPRO = [sys.executable, "-m", "dpro"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node"]
PATIENCE = 3  # factor on all limits in a rehearsal, which shares a busy machine with others
TAIL = 2000  # characters of a process's output that are kept
LARGEST_TAR = 15_000_000  # bytes
TO_KEEP_S = 8.0  # left, below which no more runs are kept
MAX_TARS = 3  # of a stage; runs that do not fit are left out, with a line that says so


@dataclass(frozen=True)
class Check:
    """A question to the machine.

    Attributes:
        stage: that it is part of.
        name: of the check, unique within the stage.
        asks: the question, in one line.
        run: answers it.
        limit_s: after which it is ended.
    """

    stage: str
    name: str
    asks: str
    run: Callable[[Bench], None]
    limit_s: float = 60.0

    @property
    def full_name(self) -> str:
        """Stage and name."""
        return f"{self.stage}.{self.name}"


@dataclass(frozen=True)
class EndedProcess:
    """A process that has ended.

    Attributes:
        code: its exit code; negative for a signal, None where it was ended at its limit.
        stdout, stderr: its output.
        wall_s: how long it took.
    """

    code: int | None
    stdout: str
    stderr: str
    wall_s: float

    def ensure(self) -> EndedProcess:
        """Return this process, or raise if it failed.

        Raises:
            RuntimeError: it failed; the message has the end of its output.
        """
        if self.code != 0:
            how = "did not end within its limit" if self.code is None else f"ended with {self.code}"
            raise RuntimeError(f"a process {how}:\n{self.stdout[-TAIL:]}\n{self.stderr[-TAIL:]}")
        return self

    def last_json(self) -> dict[str, Any]:
        """Return the last line of stdout that is a JSON object.

        Raises:
            RuntimeError: there is none.
        """
        for line in reversed(self.stdout.splitlines()):
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"no JSON in:\n{self.stdout[-TAIL:]}\n{self.stderr[-TAIL:]}")


@dataclass
class Bench:
    """The tools of a check: processes, files, and lines of results.

    Attributes:
        results: the file of its lines.
        folder: for its runs and other files.
        runs: the folder where recorded runs are kept, in archives.
        dry: whether this is a rehearsal on the CPU: small sizes, nothing measured.
        deadline: on the monotonic clock, when it is ended.
        lines: its results, by name.
        unkept: runs that it has recorded and that are in no archive yet.
    """

    results: Path
    folder: Path
    runs: Path
    dry: bool
    deadline: float
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    unkept: list[Path] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds until the check is ended."""
        return self.deadline - time.monotonic()

    @property
    def device(self) -> str:
        """The device that jobs train on."""
        return "cpu" if self.dry else "cuda"

    def say(
        self, name: str, /, *, n: int = 1, bar: str = "", holds: bool | None = None, **figures: object
    ) -> None:
        """Write a line of results, replacing the one of that name.

        Args:
            name: of what was measured.
            n: number of measurements.
            bar: that it is compared with, in words; empty for a mere fact.
            holds: whether the bar holds; unknown in a rehearsal, unless the line is that of an error.
            figures: by name with unit.
        """
        if self.dry and "error" not in figures:
            holds = None
        self.lines[name] = {"n": n, "figures": _plain(figures), "bar": bar, "holds": holds}
        write_json(self.results, {"lines": self.lines})

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do a part of the check; if it fails, its line has the error, and the check goes on."""
        try:
            work()
        except Exception as error:
            self.say(name, holds=False, error=f"{type(error).__name__}: {error}"[-TAIL:])

    def run(
        self, command: Sequence[object], limit_s: float = 120.0, variables: Mapping[str, object] | None = None
    ) -> EndedProcess:
        """Run a process to its end, or to its limit, which is not beyond the check's own.

        Args:
            command: the words of it.
            limit_s: after which it and its process group are killed.
            variables: added to its environment.
        """
        begun = time.monotonic()
        limit_s = max(min(limit_s * (PATIENCE if self.dry else 1), self.left_s - 3), 1.0)
        out, err = self.folder / "stdout.txt", self.folder / "stderr.txt"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            environment = marked(job_environment(variables))
            code = run_to_limit(command, limit_s, environment, self.folder, stdout, stderr)
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
        return EndedProcess(code, *texts, time.monotonic() - begun)

    def dpro(
        self, *words: object, limit_s: float = 120.0, variables: Mapping[str, object] | None = None
    ) -> EndedProcess:
        """Run a command of dpro."""
        return self.run([*DPRO, *words], limit_s, variables)

    def record(
        self,
        name: str,
        command: Sequence[object],
        options: Sequence[object] = (),
        limit_s: float = 120.0,
        variables: Mapping[str, object] | None = None,
    ) -> tuple[Path, EndedProcess]:
        """Record a job into a new folder; commands that read the run wait until it is complete.

        Args:
            name: of the folder, made unique by a number.
            command: the job.
            options: of `dpro record`.
            limit_s: for the job.
            variables: added to its environment.
        """
        run = next(path for path in self._names(name) if not path.exists())
        self.unkept.append(run)
        done = self.dpro("record", "-o", run, *options, "--", *command, limit_s=limit_s, variables=variables)
        return run, done

    def _names(self, name: str) -> Iterator[Path]:
        yield self.folder / name
        yield from (self.folder / f"{name}-{number}" for number in itertools.count(2))

    def ask(self, command: str, run: Path, *options: object, limit_s: float = 120.0) -> dict[str, Any]:
        """Run a command of dpro on a run, and return its JSON.

        Raises:
            RuntimeError: the command failed or printed no JSON.
        """
        done = self.dpro(command, run, "--json", *options, limit_s=limit_s)
        if done.code not in (0, 1):  # 1: `diagnose` has findings
            done.ensure()
        return done.last_json()

    def keep_rest(self) -> None:
        """Keep all runs that are not kept yet, as long as there is time; add a line on the others."""
        while self.unkept and self.left_s > TO_KEEP_S:
            self.keep(self.unkept[0])
        if self.unkept:
            self.say("not kept, for lack of time", n=len(self.unkept), runs=self.unkept)

    def keep(self, run: Path) -> None:
        """Keep a recorded run in the first archive of the stage with room for it; if none has, add a line."""
        self.unkept = [each for each in self.unkept if each != run]
        if not run.is_dir():  # it was not begun
            return
        self.dpro("info", run)  # waits until the tables are written, which is after the job's end
        stage, _, check = self.results.stem.partition("-")
        parcel = self.folder / "parcel.tar"
        with tarfile.open(parcel, "w") as archive:
            archive.add(run, arcname=f"{check}/{run.relative_to(self.folder)}")
        for number in range(1, MAX_TARS + 1):
            path = self.runs / f"runs-{stage}-{number}.tar"
            before = path.stat().st_size if path.exists() else 0
            if before + parcel.stat().st_size <= LARGEST_TAR:
                _append(path, parcel)
                return
        self.say(f"{run.name} not kept", archive_bytes=parcel.stat().st_size)

    def job(self, script: str, *arguments: object) -> list[str]:
        """Return the command of a job on one rank."""
        return [sys.executable, str(JOBS / script), "--device", self.device, *map(str, arguments)]

    def few(self, usual: int, dry: int) -> int:
        """Return the usual size, or that of a rehearsal."""
        return dry if self.dry else usual


def _append(path: Path, parcel: Path) -> None:
    """Add the files of one archive to another, which is complete at every moment."""
    with (
        written_whole(path.parent.resolve(), path.name) as whole,
        tarfile.open(fileobj=whole, mode="w") as target,
    ):
        for source in (path, parcel):
            if not source.exists():
                continue
            with tarfile.open(source) as archive:
                for member in archive:
                    target.addfile(member, archive.extractfile(member) if member.isfile() else None)


def job_environment(variables: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return the environment of jobs: this checkout, without variables of a launcher around this process."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment | {name: str(value) for name, value in (variables or {}).items()}


def write_json(path: Path, document: object) -> None:
    """Write a file completely or not at all."""
    with written_whole(path.parent.resolve(), path.name) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())


def supports(option: str, command: str = "record") -> bool:
    """Return whether a command of dpro has an option."""
    done = subprocess.run(
        [*DPRO, command, "--help"], env=job_environment(), capture_output=True, text=True, timeout=60
    )
    return option in done.stdout


def _plain(figures: Mapping[str, object]) -> dict[str, object]:
    """Convert figures to JSON: six digits of floats, None for infinities and NaN, the end of long texts."""
    return {name: _plain_value(value) for name, value in figures.items()}


def _plain_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain_value(each) for name, each in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, str):
        return value[-TAIL:]
    if isinstance(value, Iterable):
        return [_plain_value(each) for each in value]
    return value if value is None or isinstance(value, int) else str(value)
