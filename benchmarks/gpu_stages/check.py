"""One check of a stage: what it is given, and how it says what it found, line by line.

A check runs in a process of its own and may start others. What it has said so far is on disk at every moment,
so that a check which is ended at its limit, or whose process the driver takes with it, loses nothing but the
line it was at. Only the standard library is used here: a check decides for itself whether it needs torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
PATIENCE = 3  # times as long may all take in a rehearsal, which shares a busy machine with others
TAIL = 2000  # characters of what a process wrote that are kept
LARGEST_TAR = 15_000_000  # bytes
MAX_TARS = 3  # of a stage; what has no room in them is left out, and said to be


@dataclass(frozen=True)
class Check:
    """A question to the machine.

    Attributes:
        stage: that it is part of.
        name: of it, unique within the stage.
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
        stdout, stderr: what it wrote.
        wall_s: how long it took.
    """

    code: int | None
    stdout: str
    stderr: str
    wall_s: float

    def ensure(self) -> EndedProcess:
        """Nothing, unless it failed.

        Raises:
            RuntimeError: it did; the message has the end of what it wrote.
        """
        if self.code != 0:
            how = "did not end within its limit" if self.code is None else f"ended with {self.code}"
            raise RuntimeError(f"a process {how}:\n{self.stdout[-TAIL:]}\n{self.stderr[-TAIL:]}")
        return self

    def last_json(self) -> dict[str, Any]:
        """The last line of stdout that is a JSON object.

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
    """What a check works with.

    Attributes:
        results: the file of its lines.
        folder: of its own, for runs and other files.
        runs: the folder where recorded runs are kept, in archives.
        dry: whether this is a rehearsal on the CPU: small sizes, nothing measured.
        deadline: on the monotonic clock, when it is ended.
        lines: said so far, by name.
    """

    results: Path
    folder: Path
    runs: Path
    dry: bool
    deadline: float
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds until it is ended."""
        return self.deadline - time.monotonic()

    @property
    def device(self) -> str:
        """What jobs are to train on."""
        return "cpu" if self.dry else "cuda"

    def say(
        self, name: str, /, *, n: int = 1, bar: str = "", holds: bool | None = None, **figures: object
    ) -> None:
        """Write a line down, in place of the one of that name.

        Args:
            name: of what was measured.
            n: how many times it was.
            bar: what it is held against, in words; empty where it is a fact and no more.
            holds: whether it does; unknown in a rehearsal, unless the line is that of an error.
            figures: by name with unit.
        """
        if self.dry and "error" not in figures:
            holds = None
        self.lines[name] = {"n": n, "figures": _plain(figures), "bar": bar, "holds": holds}
        write_json(self.results, {"lines": self.lines})

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do a part of the check; where it fails, that is its line, and the check goes on."""
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
            limit_s: after which it and what it started are ended.
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
        """Record a job into a folder of its own; commands that read the run wait until it is whole.

        Args:
            name: of the folder.
            command: the job.
            options: of `dpro record`.
            limit_s: for the job.
            variables: added to its environment.
        """
        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        done = self.dpro("record", "-o", run, *options, "--", *command, limit_s=limit_s, variables=variables)
        return run, done

    def ask(self, command: str, run: Path, *options: object, limit_s: float = 120.0) -> dict[str, Any]:
        """What a command of dpro says of a run, as JSON.

        Raises:
            RuntimeError: it says nothing.
        """
        done = self.dpro(command, run, "--json", *options, limit_s=limit_s)
        if done.code not in (0, 1):  # 1: `diagnose` has findings
            done.ensure()
        return done.last_json()

    def keep(self, run: Path) -> None:
        """Put a recorded run away, in an archive of the stage that has room for it, or say that none has."""
        self.dpro("info", run)  # waits until the tables are written, which is after the job's end
        stage, _, check = self.results.stem.partition("-")
        parcel = self.folder / "parcel.tar"
        with tarfile.open(parcel, "w") as archive:
            archive.add(run, arcname=f"{check}/{run.name}")
        for number in range(1, MAX_TARS + 1):
            path = self.runs / f"runs-{stage}-{number}.tar"
            before = path.stat().st_size if path.exists() else 0
            if before + parcel.stat().st_size <= LARGEST_TAR:
                _append(path, parcel)
                return
        self.say(f"{run.name} not kept", archive_bytes=parcel.stat().st_size)

    def job(self, script: str, *arguments: object) -> list[str]:
        """The command of a job on one rank."""
        return [sys.executable, str(JOBS / script), "--device", self.device, *map(str, arguments)]

    def few(self, usual: int, dry: int) -> int:
        """A size: the usual one, or that of a rehearsal."""
        return dry if self.dry else usual


def _append(path: Path, parcel: Path) -> None:
    """Add the files of one archive to another, which is whole at every moment."""
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
    """The environment of jobs: this checkout, and none of a launcher around us."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment | {name: str(value) for name, value in (variables or {}).items()}


def write_json(path: Path, document: object) -> None:
    """Write a file whole or not at all."""
    with written_whole(path.parent.resolve(), path.name) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())


def supports(option: str, command: str = "record") -> bool:
    """Whether a command of dpro knows an option."""
    done = subprocess.run(
        [*DPRO, command, "--help"], env=job_environment(), capture_output=True, text=True, timeout=60
    )
    return option in done.stdout


def _plain(figures: Mapping[str, object]) -> dict[str, object]:
    """Figures as JSON: short floats, no infinities, texts that end."""
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
