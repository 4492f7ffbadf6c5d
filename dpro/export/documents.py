"""What was written, for programs."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from dpro.documents import Document, DocumentPart
from dpro.selection import SelectionDocument


class FileDocument(DocumentPart, frozen=True):
    """A file that was written.

    Attributes:
        format: chrome or perfetto.
        path: where it is.
    """

    format: str
    path: str


class PathOffset(DocumentPart, frozen=True):
    """By how much the critical path lies elsewhere in the replay than as measured.

    Attributes:
        earliest_ms: the least, negative where it is earlier.
        latest_ms: the most.
    """

    earliest_ms: float
    latest_ms: float


class ExportDocument(Document, frozen=True, kw_only=True):
    """Timelines that were written.

    Attributes:
        run: as it was named.
        slices: in each file.
        arrows: likewise.
        files: that were written.
        critical_path_replayed_later: by how much.
        selection: the steps and ranks that were written; absent where all were.
    """

    run: str
    slices: int
    arrows: int
    files: list[FileDocument]
    critical_path_replayed_later: PathOffset
    selection: SelectionDocument | UnsetType = UNSET
