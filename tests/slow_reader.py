"""A reader of traces that notes what it reads, and stays in its third file until its process is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VICTIM = 2  # which note is that of the process that is killed

READER = """\
import os, time
import dpro.ingest.formats as formats
real = formats.Format.read

def read(self, path, *, rank=None):
    import {library}
    with open({log!r}, "a") as file:
        file.write(f"{{path.name}} {{os.getpid()}} {{{who}}}\\n")
    with open({log!r}) as file:
        notes = [line.split() for line in file]
    while len(notes) > {victim} and notes[{victim}][:2] == [path.name, str(os.getpid())]:
        time.sleep(0.1)  # it is killed here
    return real(self, path, rank=rank)

formats.Format.read = read
"""


def install_slow_reader(site: Path, who: str = "os.getppid()", library: str = "os") -> Path:
    """Replace Kineto's own reader for processes that start with this folder on their path.

    Args:
        site: the folder; it is made.
        who: expression that a process notes beside its number.
        library: what the expression needs.

    Returns:
        The file where they note what they read, their number, and who they are.
    """
    site.mkdir()
    log = site / "log"
    code = READER.format(library=library, log=str(log), who=who, victim=VICTIM)
    (site / "sitecustomize.py").write_text(code, encoding="utf-8")
    return log


def kill_the_reader_of_the_third_file(log: Path) -> str:
    """Kill a process while it reads, however long the workers take to start.

    Args:
        log: what `install_slow_reader` returned.

    Returns:
        Who it was.
    """
    while not log.exists() or log.read_text().count("\n") <= VICTIM:
        time.sleep(0.02)
    _, pid, who = log.read_text().splitlines()[VICTIM].split()
    os.kill(int(pid), signal.SIGKILL)
    return who
