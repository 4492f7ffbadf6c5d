"""The format of execution traces and the bytes that identify it; its reader is imported when needed."""

from __future__ import annotations

from dpro.ingest.formats import KINETO, Format, FormatEvidence
from dpro.ingest.trace import RankTrace


class _ExecutionTrace(Format):
    """Adds dependencies to the Kineto trace of the same process."""

    completes = KINETO

    def combine(self, whole: RankTrace, addition: RankTrace) -> RankTrace:
        """Return the Kineto trace with the dependencies of the execution trace."""
        from dpro.extensions.chakra.reader import combine

        return combine(whole, addition)

    def refuse_alone(self, trace: RankTrace, path: str) -> None:
        """Raise if there is no Kineto trace and the execution trace has no times.

        Raises:
            InputError: it has none.
        """
        from dpro.extensions.chakra.reader import refuse_alone

        refuse_alone(trace, path)


EXECUTION_TRACE = _ExecutionTrace(
    "execution trace",
    "dpro.extensions.chakra.reader",
    "read_execution_trace",
    (b"ctrl_deps", b"rf_id"),
    "is_execution_trace",
    evidence=FormatEvidence.KEYS,
)
