"""The formats that dpro can import, recognised by content, and their importers.

Takes the first bytes of a file; returns its importer, or the reason why it is passed over. A new format is
one entry here, or an importer of an extension.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from dpro.ingest.reading.files import Source
from dpro.ingest.trace import RankTrace
from dpro.plugins import load, places

KINETO = "kineto"
EXECUTION_TRACE = "execution trace"
FLIGHT_RECORDER = "flight recorder"
NCCL_RAS = "NCCL RAS"
REQUEST_LOGS = "logs of requests"
SNAPSHOTS = "snapshots of PyTorch's allocator"


class Importer(Protocol):
    """A format: its name, how a file of it is recognised, and how it is read."""

    @property
    def name(self) -> str:
        """Name of the format in manifests and warnings."""

    def matches(self, head: bytes) -> bool:
        """Return whether a file that begins with `head` (decompressed) is of the format."""

    def read(self, path: Path, *, rank: int | None = None) -> RankTrace | list[RankTrace]:
        """Read the file.

        Raises:
            InputError: the file cannot be read in this format.
        """


@dataclass(frozen=True)
class Format:
    """A built-in importer, whose module is loaded when a file needs it.

    Attributes:
        reader: function in the module that reads a file.
        hints: a head without any of them is not of the format; avoids loading the module.
        test: function in the module that decides by the head, where the hints alone do not.
        streams: the reader accepts a member of an archive, without a separate file.
    """

    name: str
    module: str
    reader: str
    hints: tuple[bytes, ...]
    test: str = ""
    streams: bool = False

    def matches(self, head: bytes) -> bool:
        """Return whether a file that begins with `head` is of the format."""
        if not any(hint in head for hint in self.hints):
            return False
        return not self.test or bool(self._function(self.test)(head))

    def read(self, path: Path | Source, *, rank: int | None = None) -> RankTrace | list[RankTrace]:
        """Read a file with the format's reader.

        Raises:
            InputError: the file cannot be read in this format.
        """
        return cast("RankTrace | list[RankTrace]", self._function(self.reader)(path, rank=rank))

    def _function(self, name: str) -> Callable[..., Any]:
        return cast(Callable[..., Any], getattr(import_module(self.module), name))


def _has_key(head: bytes, *keys: str) -> bool:
    """Return whether the head is JSON with one of the keys."""
    pattern = rb'"(?:' + "|".join(keys).encode() + rb')"\s*:'
    return head.lstrip()[:1] in (b"{", b"[") and re.search(pattern, head) is not None


class _Kineto(Format):
    """Any JSON with trace events that no other format claims."""

    def matches(self, head: bytes) -> bool:
        return _has_key(head, "traceEvents", "schemaVersion", "deviceProperties", "ph")


# The first match wins.
FORMATS: tuple[Importer, ...] = (
    Format("nsys", "dpro.ingest.nsys", "read_nsys", (b"SQLite format 3\0",), "is_nsys"),
    Format("op-level parquet", "dpro.ingest.oplevel", "read_oplevel", (b"PAR1",), "is_oplevel"),
    Format(
        FLIGHT_RECORDER,
        "dpro.ingest.flight_recorder",
        "read_dump",
        (b"pg_config", b"pg_status", b"entries"),
        "is_dump",
    ),
    Format(
        "NCCL Inspector",
        "dpro.ingest.nccl_inspector",
        "read_inspector_log",
        (b"coll_perf", b"p2p_perf", b"dump_stats", b"proxy_trace"),
        "is_inspector_log",
    ),
    Format(NCCL_RAS, "dpro.ingest.nccl_ras", "read_ras_report", (b"communicators",), "is_ras_report"),
    Format(
        EXECUTION_TRACE,
        "dpro.ingest.execution_trace",
        "read_execution_trace",
        (b"ctrl_deps", b"rf_id"),
        "is_execution_trace",
    ),
    Format(
        "pipeline timeline",
        "dpro.ingest.pp_timeline",
        "read_pp_timeline",
        (b"fwd_start", b"microbatch", b"pad_before"),
        "is_pp_timeline",
    ),
)
# Tried after those of extensions, since they match on little evidence.
FALLBACK_FORMATS: tuple[Importer, ...] = (
    Format("Perfetto", "dpro.ingest.perfetto", "read_perfetto", (b"\n",), "is_perfetto"),
    _Kineto(KINETO, "dpro.ingest.kineto", "read_trace", (), streams=True),
)
# Files that are recognised but are not traces, by the name under which they are counted.
_NOT_TRACES: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("empty or damaged files", lambda head: not head),
    ("timelines drawn from an analysis", lambda head: _is_drawn(head)),
    ("SQLite databases that are not traces", lambda head: head.startswith(b"SQLite format 3\0")),
    (REQUEST_LOGS, lambda head: is_request_log(head)),
    (SNAPSHOTS, lambda head: head[:1] == b"\x80" and b"total_size" in head[:400] and b"device" in head[:400]),
    ("JSON files that are not traces", lambda head: head.lstrip()[:1] in (b"{", b"[")),
)


@dataclass(frozen=True)
class Registry:
    """All importers in the order in which they are tried; one warning per plug-in that cannot be used."""

    importers: tuple[Importer, ...]
    warnings: tuple[str, ...] = ()

    def find(self, head: bytes) -> Importer | None:
        """Return the importer of a file by its first bytes (decompressed); None where none matches."""
        if _is_drawn(head):
            return None
        return next((importer for importer in self.importers if _matches(importer, head)), None)

    def named(self, name: str) -> Importer:
        """Return the importer with a name that `find` returned, perhaps in another process."""
        return next(importer for importer in self.importers if importer.name == name)


@cache
def registry() -> Registry:
    """Return built-in formats and those of extensions; a broken importer becomes a warning."""
    importers: dict[str, Importer] = {importer.name: importer for importer in FORMATS}
    last = {importer.name: importer for importer in FALLBACK_FORMATS}
    warnings = []
    for label, place in places("importers").items():
        try:
            plugin = load(place)
            plugin = plugin() if isinstance(plugin, type) else plugin
            lacks = [name for name in ("matches", "read") if not callable(getattr(plugin, name, None))]
            name = getattr(plugin, "name", "")
            if not isinstance(name, str) or not name:
                lacks.insert(0, "name")
            missing = f"it has no {', '.join(lacks)}" if lacks else ""
        except Exception as error:  # a plug-in may raise anything
            missing = f"{type(error).__name__}: {error}"
        if not missing and name in importers | last:
            missing = f"there is a format of the name {name!r} already"
        if missing:
            warnings.append(f"importer {label} ({place}) cannot be used: {missing}")
        else:
            importers[name] = plugin
    return Registry((*importers.values(), *last.values()), tuple(warnings))


def _matches(importer: Importer, head: bytes) -> bool:
    """Return whether an importer matches; one that raises an error does not."""
    try:
        return importer.matches(head)
    except Exception:
        return False


def _is_drawn(head: bytes) -> bool:
    """Return whether a file is a drawing of operation-level traces, or of an XLA profile."""
    if b'"metadata":{"highres-ticks":true}' in head[:200]:
        return True
    keys = (b'"model_chunk"', b'"mb_id"', b'"seq_id"')
    return head.lstrip()[:1] == b"[" and all(key in head for key in keys)


def is_request_log(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a log of a server's requests."""
    from dpro.ingest.requests import is_log

    return is_log(head)


def why_passed_over(head: bytes) -> str:
    """Return the name under which a file of an unknown format is counted."""
    return next((reason for reason, matches in _NOT_TRACES if matches(head)), "files that are not traces")
