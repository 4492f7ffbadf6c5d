"""Execution traces of deep windows: the option that records them, and what they add to a window.

The recorder writes one beside the Kineto trace of each window.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dpro.ingest.trace import RankTrace

OPTIONS = (
    click.Option(
        ["--execution-trace/--no-execution-trace"],
        default=False,
        show_default=True,
        help="Record data dependencies between operators.",
    ),
)


def add_dependencies(trace: RankTrace, window: Path) -> RankTrace:
    """Return the trace of a window with the dependencies in the execution trace beside it, if there is one.

    Raises:
        InputError: the execution trace is damaged.
    """
    path = window.with_name(window.name.replace("window", "trace"))
    if not path.exists():
        return trace
    from dpro.extensions.chakra.reader import combine, read_execution_trace

    return combine(trace, read_execution_trace(path, rank=trace.rank))
