"""The option of `dpro record` that stores a description of the fabric with the run.

Reads a file that `dpro topology` wrote, and copies it into the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dpro.collectors.launch.recording import Launch
    from dpro.collectors.launch.start import Request
    from dpro.topology.file import TopologyFile

OPTIONS = (
    click.Option(
        ["--topology"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Description of the job's fabric, from `dpro topology`; it is stored in the run.",
    ),
)


def keep_topology(request: Request, given: Mapping[str, Any]) -> None:
    """Have the recording store the topology that the option names, if any.

    Raises:
        InputError: the file cannot be read.
    """
    if given["topology"] is not None:
        from dpro.topology.file import read

        request.beside.append(partial(_write, read(given["topology"])))


def _write(topology: TopologyFile, recording: Launch) -> None:
    """Write the topology into the run; several launchers of a run write identical files."""
    from dpro.topology.file import FILE, write

    write(topology, recording.run / FILE)
