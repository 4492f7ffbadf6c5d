"""What reads the files of PyTorch and NCCL for the recorder: handed in, since importers are not its concern.

In: nothing. Out: the types of the readers, and of what they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import polars as pl


class ReadTrace(Protocol):
    """What a reader returns; see `dpro.ingest.trace.RankTrace`."""

    frames: dict[str, pl.DataFrame]
    versions: dict[str, str]
    skipped: dict[str, int]
    warnings: list[str]


class TraceReader(Protocol):
    """Reads one window of one rank, as `dpro.ingest.kineto.read_trace`."""

    def __call__(self, path: Path, *, rank: int | None = None, window: int = 0) -> Any:
        """Read a Kineto file."""


class DumpReader(Protocol):
    """Reads one dump of one rank, as `dpro.ingest.flight_recorder.read_dump`."""

    def __call__(self, path: Path, *, rank: int | None = None) -> Any:
        """Read a flight recorder dump."""


class LogReader(Protocol):
    """Reads one log of NCCL's Inspector, as `dpro.ingest.nccl_inspector.read_inspector_log`."""

    def __call__(self, path: Path) -> Sequence[Any]:
        """Read a log: a trace per process."""


class ExecutionReader(Protocol):
    """Adds to a window what an execution trace of the same steps knows."""

    def __call__(self, trace: Any, path: Path, *, rank: int) -> Any:
        """Read an execution trace."""


class RequestsReader(Protocol):
    """Reads logs of a server's requests, as `dpro.ingest.requests.read_requests`."""

    def __call__(self, paths: Sequence[Path]) -> Any:
        """Read logs: rows of `requests`, what was left out, and warnings."""


@dataclass(frozen=True)
class Readers:
    """How to read what PyTorch and NCCL wrote; handed in: importers are none of the recorder's business."""

    trace: TraceReader
    dump: DumpReader
    log: LogReader
    execution: ExecutionReader
    requests: RequestsReader
