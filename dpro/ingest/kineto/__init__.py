"""Kineto traces (torch.profiler), read in chunks as far as they go: `reader` is where to begin."""

from dpro.ingest.kineto.reader import read_trace

__all__ = ["read_trace"]
