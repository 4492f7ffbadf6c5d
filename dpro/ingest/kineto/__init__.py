"""Kineto traces (torch.profiler), read in chunks, damaged ones in part; start with `reader`."""

from dpro.ingest.kineto.reader import read_trace

__all__ = ["read_trace"]
