"""Which of the requested changes were made to a job.

In: what its processes wrote, also while it runs. Out: per rank and change the places where it was made, and
the reasons why it was not. A process that reported nothing of a change has not made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from dpro.collectors.convert.recorded import RecordedProcess, processes
from dpro.collectors.launch.recording import Launch
from dpro.store import AppliedChange
from dpro.words import from_json

SILENT = "it ended before it could report whether that was done"


def applied(process: RecordedProcess, options: Mapping[str, Any]) -> list[AppliedChange]:
    """Return what a process that has ended reported of each requested change.

    Returns:
        A record for each; a change has either been applied or refused.
    """
    said = {change.edit: change for change in _said(process)}
    found = []
    for change in options.get("apply", []):
        mine = said.get(change["edit"], AppliedChange(change["edit"], process.rank, [], []))
        found.append(mine if mine.applied or mine.refused else replace(mine, refused=[SILENT]))
    return found


def refused_so_far(launch: Launch) -> Iterator[str]:
    """Yield why changes could not be made so far in a running job: `rank 0: bucket:mb=1: …`."""
    for process in processes(launch):
        for change in _said(process):
            for reason in change.refused:
                yield f"rank {process.rank}: {change.edit}: {reason}"


def _said(process: RecordedProcess) -> list[AppliedChange]:
    with suppress(OSError, ValueError, TypeError):
        said = from_json((process.folder / "applied.json").read_bytes())
        return msgspec.convert([{**each, "rank": process.rank} for each in said], list[AppliedChange])
    return []
