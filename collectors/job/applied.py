"""Which of the requested changes were made to a job.

In: what its processes wrote, also while it runs. Out: per rank and change the places where it was made, and
the reasons why it was not. A process that reported nothing of a change has not made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from dpro.collectors.convert.recorded import RecordedProcess, processes
from dpro.collectors.launch.recording import Launch

SILENT = "it ended before it could report whether that was done"


def applied(process: RecordedProcess, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a process that has ended reported of each requested change.

    Args:
        process: the process.
        options: what the recorder was asked for.

    Returns:
        `edit`, `rank`, `applied` and `refused` for each; a change has either been applied or refused.
    """
    said = {change["edit"]: change for change in _said(process)}
    found = []
    for change in options.get("apply", []):
        mine = said.get(change["edit"], {"applied": [], "refused": []})
        refused = mine["refused"] or ([] if mine["applied"] else [SILENT])
        found.append({"edit": change["edit"], "rank": process.rank, **mine, "refused": refused})
    return found


def refused_so_far(launch: Launch) -> Iterator[str]:
    """Yield why changes could not be made so far in a running job: `rank 0: bucket:mb=1: …`."""
    for process in processes(launch):
        for change in _said(process):
            for reason in change["refused"]:
                yield f"rank {process.rank}: {change['edit']}: {reason}"


def _said(process: RecordedProcess) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError, TypeError, KeyError):
        said: list[dict[str, Any]] = json.loads((process.folder / "applied.json").read_text(encoding="utf-8"))
        if all(isinstance(each[name], list) for each in said for name in ("applied", "refused")):
            return [each for each in said if isinstance(each["edit"], str)]
    return []
