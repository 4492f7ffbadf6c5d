"""What `dpro history` answers."""

from __future__ import annotations

from msgspec import field

from dpro.documents import Document, DocumentPart


class RememberedDocument(DocumentPart, frozen=True):
    """A finding of an earlier run that named a host.

    Attributes:
        host: its name.
        class: such as `slow.nic`.
        confidence: 0 to 1.
        time_ns: when it was found.
        run: the run directory, as it was then.
    """

    host: str
    class_: str = field(name="class")
    confidence: float
    time_ns: int
    run: str


class HistoryDocument(Document, frozen=True, kw_only=True):
    """Findings of earlier runs that named a host.

    Attributes:
        path: of the history; null where it is turned off.
        findings: the oldest first.
        cleared: how many were removed by `--clear`.
    """

    path: str | None
    findings: list[RememberedDocument]
    cleared: int
