"""The formats that dpro can import, recognised by content, and their importers.

Takes the first bytes of a file; returns its importer, or the reason why it is passed over. PyTorch's own
files are read by the core, all other formats by extensions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from dpro.ingest.reading.files import Source
from dpro.ingest.trace import RankTrace
from dpro.plugins import hooks_of, load, places

KINETO = "kineto"
FLIGHT_RECORDER = "flight recorder"
NCCL_RAS = "NCCL RAS"  # of an extension; a report may be beside the dumps of a job


class FormatEvidence(IntEnum):
    """What the first bytes say about a format; the importers that ask for most are tried first.

    Among importers with equal evidence, the core's come first, then those of extensions by name.
    """

    SIGNATURE = auto()  # the signature of a file type, and what only one tool puts into it
    KEYS = auto()  # keys that only this format has
    UNSTATED = auto()  # importers that do not state it
    STRUCTURE = auto()  # a structure that files of other formats may have, too
    COMMON = auto()  # keys that many formats have


class Importer(Protocol):
    """A format: its name, how a file of it is recognised, and how it is read.

    An attribute `evidence`, of type `FormatEvidence`, says when it is tried; it may be missing.
    """

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


class Addition(Importer, Protocol):
    """A format whose files add to a trace that another format has of the same process."""

    @property
    def completes(self) -> str:
        """Name of the other format."""

    def combine(self, whole: RankTrace, addition: RankTrace) -> RankTrace:
        """Return a trace of the other format with what the file adds."""

    def refuse_alone(self, trace: RankTrace, path: str) -> None:
        """Raise if a file without such a trace beside it is of no use.

        Raises:
            InputError: it is not.
        """


@dataclass(frozen=True)
class Format:
    """An importer whose module is loaded when a file needs it.

    Attributes:
        reader: function in the module that reads a file.
        hints: a head without any of them is not of the format; avoids loading the module.
        test: function in the module that decides by the head, where the hints alone do not.
        streams: the reader accepts a member of an archive, without a separate file.
        evidence: when it is tried.
    """

    name: str
    module: str
    reader: str
    hints: tuple[bytes, ...]
    test: str = ""
    streams: bool = False
    evidence: FormatEvidence = FormatEvidence.UNSTATED

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


FORMATS: tuple[Importer, ...] = (
    Format(
        FLIGHT_RECORDER,
        "dpro.ingest.flight_recorder",
        "read_dump",
        (b"pg_config", b"pg_status", b"entries"),
        "is_dump",
        evidence=FormatEvidence.KEYS,
    ),
    _Kineto(KINETO, "dpro.ingest.kineto", "read_trace", (), streams=True, evidence=FormatEvidence.COMMON),
)
_SQLITE = b"SQLite format 3\0"
# Its columns are at its end, so what the first bytes match, an extension may know better by the file's name.
PARQUET = b"PAR1"
# Files that are recognised but are not traces, by the name under which they are counted.
_NOT_TRACES: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("empty or damaged files", lambda head: not head),
    ("timelines drawn from an analysis", lambda head: _is_drawn(head)),
    ("SQLite databases that are not traces", lambda head: head.startswith(_SQLITE)),
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
    """Return the core's formats and those of extensions; a broken importer becomes a warning."""
    importers: dict[str, Importer] = {importer.name: importer for importer in FORMATS}
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
        if not missing and name in importers:
            missing = f"there is a format of the name {name!r} already"
        if missing:
            warnings.append(f"importer {label} ({place}) cannot be used: {missing}")
        else:
            importers[name] = plugin
    ordered = sorted(
        importers.values(), key=lambda importer: getattr(importer, "evidence", FormatEvidence.UNSTATED)
    )
    return Registry(tuple(ordered), tuple(warnings))


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


def addition_to(other: str, name: str) -> Addition | None:
    """Return the format of a name if its files add to traces of another format, else None."""
    named = (importer for importer in registry().importers if importer.name == name)
    additions = (importer for importer in named if getattr(importer, "completes", "") == other)
    return cast("Addition | None", next(additions, None))


class PassedOver(NamedTuple):
    """Files that are not read: the name under which they are counted, and what to do with one."""

    reason: str
    advice: str = ""


def why_passed_over(path: Path, head: bytes) -> PassedOver:
    """Return what a file of an unknown format is, by its path (its name in an archive) and first bytes."""
    if not (_is_drawn(head) or head.startswith(_SQLITE)):
        of_extensions = (ask(path, head) for ask in hooks_of("passed_over"))
        if answer := next(filter(None, of_extensions), None):
            return cast(PassedOver, answer)
    reasons = (reason for reason, matches in _NOT_TRACES if matches(head))
    return PassedOver(next(reasons, "files that are not traces"))
