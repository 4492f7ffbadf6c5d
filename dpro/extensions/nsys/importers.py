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
# What nsys-jax keeps of a report: ranges of operations, without kernels and calls.
_OF_JAX = (
    *("thread-metadata.parquet", "system-metadata.parquet", "device-metadata.parquet"),
    *("nvtx_gpu_proj_trace/trace.parquet", "nvtx_gpu_proj_trace/files.parquet", ".nsys-analysis"),
)


def name_report(path: Path, _head: bytes) -> PassedOver | None:
    """Name a report that has to be exported before dpro can read it, or its parts; None for other files."""
    if path.as_posix().endswith(_OF_JAX):
        export = "`nsys export --type sqlite FILE.nsys-rep`, then `dpro FILE.sqlite`"
        advice = f"of nsys-jax, dpro reads the report: {export}"
        return PassedOver("tables of nsys-jax without kernels", advice)
    if path.suffix not in REPORTS and not path.name.startswith(TABLES):
        return None
    advice = "`nsys export --type sqlite FILE.nsys-rep` writes what dpro reads of them"
    return PassedOver("reports of Nsight Systems", advice)
