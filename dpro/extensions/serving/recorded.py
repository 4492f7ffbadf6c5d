"""Requests of logs in a recording whose engine was not recorded itself.

Reads the logs that `dpro record --requests` names; writes rows of `requests` beside the recorded tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.launch.recording import Launch
from dpro.errors import DproError
from dpro.extensions.serving.requests import RequestLog, read_requests
from dpro.schema import REQUESTS
from dpro.store import part_files, write_part

FIRST_DATE_NS = 10**17  # 1973: smaller times are relative to the start of a log


def add_logged_requests(launch: Launch, _processes: Sequence[RecordedProcess]) -> dict[str, Any]:
    """Add the requests of the logs that the user named to the run of a launch.

    Returns:
        Entries for the manifest: `warnings`, `skipped`.

    Raises:
        OSError: the table cannot be written; a later attempt may succeed.
    """
    facts = launch.facts()
    paths = [Path(path) for path in facts.get("options", {}).get("requests", ())]
    if not paths:
        return {}
    try:
        return add_logged(launch.run, read_requests(paths), int(facts.get("launched_ns", -1)))
    except (DproError, ValueError) as error:
        return {"warnings": [f"no requests of a log were added: {error}"]}


def add_logged(run: Path, log: RequestLog, launched_ns: int) -> dict[str, Any]:
    """Add logged requests to a run whose engine was not recorded; an engine's own records are more complete.

    Args:
        log: the parsed logs.
        launched_ns: requests that ended before then are not added.

    Returns:
        Entries for the manifest: `warnings`, `skipped`.

    Raises:
        OSError: the table cannot be written.
    """
    said: dict[str, Any] = {"warnings": list(log.warnings), "skipped": [dict(log.skipped)]}
    if any(pl.scan_parquet(part).head(1).collect().height for part in part_files(run, REQUESTS)):
        why = f"{log.requests.height} requests of logs were not added: the engine's own were recorded"
        return said | {"warnings": [*said["warnings"], why]}
    last = pl.max_horizontal("arrival_ns", "end_ns")
    in_job = log.requests.filter((last >= launched_ns) | (last < FIRST_DATE_NS))
    earlier = log.requests.height - in_job.height
    if earlier:
        said["skipped"].append({"requests that ended before the job began": earlier})
    numbered = in_job.with_columns(request=pl.int_range(pl.len(), dtype=pl.Int64))
    if numbered.height:
        write_part(run, REQUESTS, "log-00000", numbered)
    return said
