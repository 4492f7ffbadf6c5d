"""Options that name request logs of a server, for `dpro record` and `dpro import`.

Takes the values of the options; a log is read when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.errors import UsageError
from dpro.remote import is_url

if TYPE_CHECKING:
    from dpro.collectors.launch.start import Request
    from dpro.ingest.formats import PassedOver
    from dpro.store import Manifest

OF_RECORD = (
    click.Option(
        ["--requests"],
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False, resolve_path=True),
        help="Request log that the inference server or its client writes (JSON lines or CSV); "
        "can be repeated. Not needed for vLLM, SGLang and transformers, whose requests dpro records itself.",
    ),
)
OF_IMPORT = (
    click.Option(
        ["--requests"],
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Request log of an inference server (JSON lines or CSV), with or without traces; "
        "can be repeated.",
    ),
)


def note_logs(request: Request, given: Mapping[str, Any]) -> None:
    """Have the recording remember the logs that the option names."""
    request.extra["requests"] = list(map(str, given["requests"]))


def read_logs(output: str, given: Mapping[str, Any]) -> Callable[[Path], Manifest] | None:
    """Return what adds the logs that the option names to the imported run; None where it names none.

    Raises:
        UsageError: the run is to be in a store.
        InputError: a log cannot be read.
    """
    if not given["requests"]:
        return None
    if is_url(output):
        raise UsageError(f"{output}: --requests needs a local output folder; upload the run afterwards")
    from dpro.extensions.serving.requests import add_requests, read_requests

    return partial(add_requests, log=read_requests(given["requests"]))


def name_log(_path: Path, head: bytes) -> PassedOver | None:
    """Name a request log among files to import; None for other files."""
    from dpro.extensions.serving.requests import is_log
    from dpro.ingest.formats import PassedOver

    if not is_log(head):
        return None
    advice = "`dpro import --requests FILE -o RUN` reads a log of requests, with traces or alone"
    return PassedOver("logs of requests", advice)
