"""Commands in a pool of processes that live on, each command held to what it may take.

In: arguments of `dpro`. Out: what is wrong with how it went, in one line, or nothing.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs import ROOT, environment

Commands = list[list[str]]  # arguments of each

MAX_BYTES = 1 << 30
MAX_CPU_S = 20.0
MAX_WALL_S = 180.0  # of a command that waits: for a pipe, say; much is for a busy machine
_COMMANDS_EACH = 300  # of one process: what it keeps in memory grows
_NOT_ANSWERED = ("not answered: ", '{"schema_version": ')  # how an answer ends in which all is refused
_UNWANTED = ("Traceback (most recent call last)", "internal error", "panicked at", "Exception ignored")


@dataclass(frozen=True)
class Outcome:
    """How a command went: its exit code, what it printed, what it took."""

    code: int | None
    output: str
    peak_bytes: int = 0
    cpu_s: float = 0.0

    @property
    def fault(self) -> str:
        """What is wrong with it; empty for nothing."""
        if self.code is None:
            return f"an exception went through: {self.output[-1500:]}"
        if self.code not in (0, 1, 2):
            return f"ended with {self.code}: {self.output[-1500:]}"
        if found := [word for word in _UNWANTED if word in self.output]:
            return f"{found[0]}: {self.output[-1500:]}"
        said = [line for line in self.output.splitlines() if not line.startswith("dpro: warning: ")]
        is_answer = said[-1:] and said[-1].startswith(_NOT_ANSWERED)
        if self.code and not is_answer and (len(said) != 1 or not said[0].startswith("dpro: ")):
            return f"failed in other than one line: {self.output[-1500:]}"
        if self.peak_bytes > MAX_BYTES:
            return f"took {self.peak_bytes >> 20} MiB"
        if self.cpu_s > MAX_CPU_S:
            return f"took {self.cpu_s:.1f} s"
        return ""


class Worker:
    """One process, started when there is something to do, and again when it has died."""

    def __init__(self, folder: Path) -> None:
        self._out = folder / f"{threading.get_ident()}.txt"
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._done = 0

    def run(self, arguments: list[str]) -> Outcome:
        """Run a command."""
        process = self._alive()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"arguments": arguments, "out": str(self._out)}) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], MAX_WALL_S)[0]:
            self.close()
            return Outcome(-9, f"took more than {MAX_WALL_S:.0f} s: {self._said()}")
        answer = process.stdout.readline()
        if not answer:
            code = process.wait()
            self.close()
            return Outcome(code, self._said())
        result: dict[str, Any] = json.loads(answer)
        return Outcome(output=self._said(), **result)

    def _said(self) -> str:
        return self._out.read_text(errors="backslashreplace") if self._out.exists() else ""

    def _alive(self) -> subprocess.Popen[str]:
        self._done += 1
        if self._process and self._done % _COMMANDS_EACH == 0:
            self.close()
        if self._process is None:
            places = {"DPRO_CACHE": self._folder / "cache", "TMPDIR": tempfile.gettempdir()}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker"],
                cwd=ROOT,
                env=environment(POLARS_MAX_THREADS=2, COLUMNS=400, **places),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
