"""Tuning of the C allocator: keep freed memory for the next arrays, or return it to the system.

A column of a graph has some megabytes, and a prediction allocates tens of them briefly. By default glibc
returns such memory when it is freed: the system then clears the pages of each new array one by one, which
takes longer than most of the arithmetic. Affects this process only.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameter numbers of glibc's `mallopt`
KEPT_BYTES = 256 << 20  # freed memory that is kept; more is returned to the system
LARGEST_BYTES = 32 << 20  # largest array whose memory is kept; glibc's own maximum


def keep_freed_memory() -> None:
    """Keep up to `KEPT_BYTES` of freed memory; do nothing where the C library is not glibc."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(MMAP_THRESHOLD, LARGEST_BYTES)


def give_back_freed_memory() -> None:
    """Return all freed memory to the system, including gaps between live arrays; needs glibc."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
