"""Nsight Systems exports, by the tables that they hold: `reader` is where to begin."""

from dpro.ingest.nsys.reader import is_nsys, read_nsys

__all__ = ["is_nsys", "read_nsys"]
