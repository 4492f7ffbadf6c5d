"""Formats of NCCL's own tools and the bytes that identify them; a reader is imported when a file needs it."""

from dpro.ingest.formats import NCCL_RAS, Format, FormatEvidence

INSPECTOR = Format(
    "NCCL Inspector",
    "dpro.extensions.nccl.inspector",
    "read_inspector_log",
    (b"coll_perf", b"p2p_perf", b"dump_stats", b"proxy_trace"),
    "is_inspector_log",
    evidence=FormatEvidence.KEYS,
)
RAS = Format(
    NCCL_RAS,
    "dpro.extensions.nccl.ras",
    "read_ras_report",
    (b"communicators",),
    "is_ras_report",
    evidence=FormatEvidence.KEYS,
)
