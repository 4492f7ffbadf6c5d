"""Execution traces of PyTorch and Chakra, linked to their Kineto twin: `reader` is where to begin."""

from dpro.ingest.execution_trace.reader import combine, is_execution_trace, read_execution_trace, refuse_alone

__all__ = ["combine", "is_execution_trace", "read_execution_trace", "refuse_alone"]
