"""Changes to the job that `dpro try` requests from `dpro record`.

Takes a hidden option; extends the request to the recorder. The code in `inside/` makes the changes; the
recorder loads it in the job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dpro.collectors.launch.start import Request


def _changes(_context: click.Context, _option: click.Parameter, value: str) -> tuple[dict[str, Any], ...]:
    """Return changes to the job: `edit` as the user wrote it, `family`, and the family's `arguments`."""
    return tuple(json.loads(value))


OPTIONS = (click.Option(["--apply"], callback=_changes, default="[]", hidden=True),)


def change_job(request: Request, given: Mapping[str, Any]) -> None:
    """Request the given changes to the job."""
    request.extra |= {"apply": given["apply"]}
    if not given["apply"]:
        return
    request.probes = {"apply": "dpro.extensions.trial.inside", **request.probes}
    for change in given["apply"]:
        if change["family"] == "environment":
            variable = change["arguments"]
            request.environment[variable["name"]] = variable["value"]
