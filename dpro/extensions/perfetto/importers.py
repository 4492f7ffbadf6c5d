"""Perfetto's format and the bytes that identify it; its reader is imported when needed."""

from dpro.ingest.formats import Format, FormatEvidence

PERFETTO = Format(
    "Perfetto", "dpro.extensions.perfetto.reader", "read_perfetto", (b"\n",), "is_perfetto",
    evidence=FormatEvidence.STRUCTURE,
)  # fmt: skip
