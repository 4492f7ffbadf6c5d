"""A reader of traces that is slow, and notes what it reads, so that a test can kill a worker that reads."""

from __future__ import annotations

from pathlib import Path


def install_slow_reader(site: Path, who: str = "os.getppid()", library: str = "os") -> Path:
    """Make Kineto's own reader slow for processes that start with this folder on their path.

    Args:
        site: the folder; it is made.
        who: expression that a process notes beside its number.
        library: what the expression needs.

    Returns:
        The file where they note what they read, their number, and who they are.
    """
    site.mkdir()
    log = site / "log"
    (site / "sitecustomize.py").write_text(
        "import os, time\n"
        "import dpro.ingest.formats as formats\n"
        "real = formats.Format.read\n"
        "def read(self, path, *, rank=None):\n"
        f"    import {library}\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        f"        file.write(f'{{path.name}} {{os.getpid()}} {{{who}}}\\n')\n"
        "    time.sleep(1)\n"
        "    return real(self, path, rank=rank)\n"
        "formats.Format.read = read\n",
        encoding="utf-8",
    )
    return log
