"""What a recording says to people on the job's stderr: where it is, and why nothing was recorded.

Says at most one line before the job and one after it; that a run is ready is said on a terminal only.
stdout is the job's alone.
"""

from __future__ import annotations

import os
import select
import shlex
import stat
import sys
from contextlib import suppress
from pathlib import Path


def print_run(run: Path) -> None:
    """Print where the run is and the next command."""
    if sys.stderr is None:
        return
    with suppress(OSError):  # the folder may be gone or the terminal closed; the job starts anyway
        name = _name_from_here(run)
        line = f"dpro: recording into {name}; once the job has ended: dpro {name}"
        print(line, file=sys.stderr, flush=True)


def _name_from_here(run: Path) -> Path:
    here = Path.cwd()
    return run.relative_to(here) if run.is_relative_to(here) else run


class LastWord:
    """A way to say one line on the job's stderr once the job has ended.

    A pipe must be released once something is recorded, because its reader waits until all have closed it. A
    terminal is never kept open, but opened again at the end, if its shell still has it.
    """

    def __init__(self, run: Path, quiet: bool = False) -> None:
        """Keep stderr; with `quiet`, or where it is closed, nothing will be said.

        Args:
            run: named as seen from the current folder, which the process beside the job leaves.
        """
        self.descriptor = -1
        self._run = run
        self._terminal: tuple[str, int] | None = None
        if quiet or sys.stderr is None:
            return
        with suppress(OSError):
            self._run = _name_from_here(run)
            if os.isatty(2):
                self._terminal = os.ttyname(2), os.getsid(0)
            else:
                self.descriptor = os.dup(2)

    def release(self) -> None:
        """Close stderr, unless it is a file, which no reader waits for."""
        if self.descriptor >= 0 and not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()

    def say_recorded(self) -> None:
        """Print where the run is and the next command, on a terminal: a log has them in its first line."""
        if self._terminal is not None:
            self.say(f"recorded into {self._run}; next: dpro {shlex.quote(str(self._run))}")

    def say(self, line: str) -> None:
        """Print a line if it can be done without waiting; nothing can be said after it."""
        with suppress(OSError, ValueError, LookupError):
            if self._terminal is not None:
                self._open(*self._terminal)
            if self.descriptor >= 0 and select.select([], [self.descriptor], [], 0)[1]:
                os.write(self.descriptor, f"dpro: {line}\n".encode(errors="backslashreplace"))
        self._terminal = None
        self.close()

    def _open(self, terminal: str, session: int) -> None:
        """Open a terminal if its shell still has it."""
        of_shell = Path(f"/proc/{session}/stat").read_text().rpartition(")")[2].split()[4]
        if int(of_shell) == os.stat(terminal).st_rdev:
            self.descriptor = os.open(terminal, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)

    def close(self) -> None:
        """Close stderr: nothing can be said any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
