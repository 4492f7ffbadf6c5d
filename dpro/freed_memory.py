"""Memory that was freed is kept for the next arrays, or given back to the system.

In: nothing. Out: the setting and the state of this process's allocator. A graph's columns are some megabytes
each, and a prediction makes tens of them for a moment. By default glibc hands such memory back when it is
freed: each new array is then of pages that the system clears one by one, which takes longer than most of the
arithmetic.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of glibc's `mallopt`
KEPT_BYTES = 256 << 20  # of freed memory; what is freed beyond goes back
LARGEST_BYTES = 32 << 20  # of an array for which memory is kept: more than that glibc refuses


def keep_freed_memory() -> None:
    """Keep up to `KEPT_BYTES` of freed memory; nothing changes where the C library is not glibc."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(MMAP_THRESHOLD, LARGEST_BYTES)


def give_back_freed_memory() -> None:
    """Give back all freed memory, also what lies between arrays that are kept."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
