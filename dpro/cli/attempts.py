"""The runs of one job, as a user names them: one run, several, or a folder of them; also one that still runs.

In: paths. Out: opened runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dpro.cli.output import warn
from dpro.errors import InputError
from dpro.remote import is_url

if TYPE_CHECKING:
    from dpro.store import Run


def runs_of(given: Sequence[str]) -> list[str]:
    """The runs that are named, those of folders one by one.

    What a folder holds that cannot be opened is said, and left out: a start that left nothing costs no other.

    Args:
        given: runs, traces, URLs, or folders of runs.

    Raises:
        InputError: of a folder no run can be opened.
    """
    from dpro.cli.run.offered import runs_in, why_not

    found: list[str] = []
    for path in given:
        inside = [] if is_url(path) else runs_in(Path(path))
        broken = {run: why for run in inside if (why := why_not(run))}
        if inside and len(broken) == len(inside):
            raise InputError(f"{path}: none of its runs can be opened; {inside[0]}: {broken[inside[0]]}")
        for run, why in broken.items():
            warn(f"{run}: left out: {why}")
        found += [str(run) for run in inside if run not in broken] if inside else [path]
    return found


def opened(path: str, until: ExitStack) -> Run:
    """Open a run; of one that is being recorded, what some of its ranks have recorded so far.

    Raises:
        InputError: as `dpro.opening.open_path`.
    """
    from dpro.cli.run.live import is_live
    from dpro.cli.runs import open_quietly

    if is_url(path) or not is_live(Path(path)):
        return open_quietly(path)
    from dpro.watch.life import run_so_far

    run = until.enter_context(run_so_far(Path(path)))
    of = f"{len(run.manifest.ranks)} of {run.manifest.world_size} ranks"
    warn(f"{path} is still being recorded: this is the account so far, of {of}, without what stragglers cost")
    return run
