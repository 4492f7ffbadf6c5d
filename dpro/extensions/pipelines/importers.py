"""Formats of pipeline operations and the bytes that identify them; a reader is imported when needed."""

from dpro.ingest.formats import Format, FormatEvidence

OPLEVEL = Format(
    "op-level parquet",
    "dpro.extensions.pipelines.oplevel",
    "read_oplevel",
    (b"PAR1",),
    "is_oplevel",
    evidence=FormatEvidence.SIGNATURE,
)
TIMELINE = Format(
    "pipeline timeline",
    "dpro.extensions.pipelines.pp_timeline",
    "read_pp_timeline",
    (b"fwd_start", b"microbatch", b"pad_before"),
    "is_pp_timeline",
    evidence=FormatEvidence.KEYS,
)
