"""dpro: record a distributed training job, replay it, find what is slow and what would help.

    import dpro
    run = dpro.open("RUN")
    run.verdict, run.diagnose(), run.whatif("heal:rank=1"), run.plot.breakdown()

Importing this package loads the standard library only; functions import what they need when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro._version import __version__

if TYPE_CHECKING:
    import os

    from dpro.notebook import OpenedRun

__all__ = ["__version__", "open"]


def open(run: str | os.PathLike[str]) -> OpenedRun:
    """Open a run, for notebooks and scripts.

    Raises:
        InputError: the path does not exist, contains neither a run nor a trace, or is still being recorded.
    """
    from dpro.notebook import open_run

    return open_run(run)
