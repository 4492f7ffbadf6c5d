"""The format of exports of Nsight Systems and the bytes that identify it; other reports are only named."""

from __future__ import annotations

from pathlib import Path

from dpro.ingest.formats import Format, FormatEvidence, PassedOver

NSYS = Format(
    "nsys",
    "dpro.extensions.nsys.reader",
    "read_nsys",
    (b"SQLite format 3\0",),
    "is_nsys",
    evidence=FormatEvidence.SIGNATURE,
)
REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
TABLES = ("CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "OSRT_API")  # prefixes in Nsight's Parquet folders


def name_report(path: Path, _head: bytes) -> PassedOver | None:
    """Name a report that has to be exported before dpro can read it; None for other files."""
    if path.suffix not in REPORTS and not path.name.startswith(TABLES):
        return None
    advice = "`nsys export --type sqlite FILE.nsys-rep` writes what dpro reads of them"
    return PassedOver("reports of Nsight Systems", advice)
