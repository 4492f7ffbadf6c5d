"""Thousands of damaged and hostile inputs: each is read, or refused in one line, and takes little.

python -m tests.fuzz.test_fuzz format 17     # make one input again, and see what is said of it
DPRO_FUZZ=10 make test-slow                  # ten times as many, other ones
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

import pytest

from dpro.processes import num_cores
from dpro.words import shortened
from tests.fuzz.cases import KINDS, commands_of
from tests.fuzz.pool import Worker

NUMBERS = {
    **{"format": 2000, "run": 300, "recording": 120, "topology": 100, "bomb": 140},
    **{"model": 300, "edit": 800, "requests": 250, "fabric": 300, "special": 200, "others": 60},
    "removal": 300,
}


class Fuzzer:
    """Inputs, each in a folder of its own, and workers that read them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = local()
        self.workers: list[Worker] = []

    def faults(self, case: tuple[str, int]) -> list[str]:
        """What is wrong with how an input is read."""
        kind, number = case
        folder = self._folder / f"{kind}{number}"
        folder.mkdir()
        found = []
        commands = commands_of(kind, number, folder)
        worker = self._worker(folder)
        for arguments in commands:
            if arguments[0] in ("info", "report") and not os.path.lexists(arguments[1]):
                continue  # there was nothing to import
            outcome = worker.run(arguments)
            if outcome.fault:
                found.append(f"{kind} {number}: {typed(arguments)}: {outcome.fault}")
        if worker not in self.workers:
            worker.close()
        shutil.rmtree(folder, ignore_errors=True)  # only root may look into all of it
        return found

    def _worker(self, folder: Path) -> Worker:
        """The worker of this thread; one of its own for an input that has a cache."""
        if (folder / "cache").exists():
            return Worker(folder)
        if not hasattr(self._own, "worker"):
            self._own.worker = Worker(self._folder)
            self.workers.append(self._own.worker)
        return self._own.worker


def typed(arguments: list[str]) -> str:
    """A command as a shell takes it; of long words the beginning."""
    words = [shortened(word, 200).encode(errors="backslashreplace").decode() for word in arguments]
    return shlex.join(["dpro", *words])


@pytest.fixture
def fuzzer(tmp_path):
    made = Fuzzer(tmp_path)
    yield made
    for worker in made.workers:
        worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_input_is_read_or_refused_in_one_line(fuzzer, kind):
    rounds = int(os.environ.get("DPRO_FUZZ", "1"))
    count = NUMBERS[kind]
    cases = [(kind, number) for number in range((rounds > 1) * count, rounds * count)]
    with ThreadPoolExecutor(num_cores()) as pool:
        faults = [fault for found in pool.map(fuzzer.faults, cases) for fault in found]
    assert faults == [], "\n\n".join(faults)


def main() -> None:
    """Make one input, keep it, and print what is said of it."""
    kind, number = sys.argv[1], int(sys.argv[2])
    folder = Path(tempfile.mkdtemp(prefix=f"dpro-fuzz-{kind}-{number}-"))
    case = folder / "case"
    case.mkdir()
    commands = commands_of(kind, number, case)
    worker = Worker(case if (case / "cache").exists() else folder)
    for arguments in commands:
        print("$", typed(arguments))
        outcome = worker.run(arguments)
        print(
            outcome.output, outcome.fault or "well", f"{outcome.peak_bytes >> 20} MiB {outcome.cpu_s:.1f} s"
        )
    worker.close()


if __name__ == "__main__":
    main()
