"""Bounds on what is read from untrusted files, each with its reason, and the checks that enforce them.

A small file must not cost all memory or an hour, and every valid large file must be read: bounds are ratios
to the size on disk, or far above what any job writes. Checks raise; nothing is truncated.
"""

from __future__ import annotations

import os
import resource
import stat
from contextlib import suppress
from pathlib import Path

from dpro.errors import InputError, Unanswerable, first_line
from dpro.units import format_bytes

# Traces compress 10- to 60-fold, one step repeated over and over about 100-fold; decompression bombs compress
# 1,000-fold and more.
MAX_EXPANSION = 400
MIN_BOMB_BYTES = 64 << 20  # content up to this size is always accepted
# Bytes of the objects decoded from JSON, over bytes on disk: many small objects take 10 times their text.
MAX_DECODED_EXPANSION = 2000
MIN_DECODED_BYTES = 512 << 20
BYTES_PER_VALUE = 64  # of a small list, the most wasteful value
MAX_REPETITION = 64  # size of a pickle with shared values written out each time, over its size with sharing
MAX_BLANK_BYTES = 64 << 20  # consecutive zeros (a file that was never filled) or blanks
MAX_WHOLE_BYTES = (
    4 << 30
)  # of a file that is read into memory at once; Kineto traces are streamed, without this bound
MAX_FACTS_BYTES = 64 << 20  # of the metadata before or behind the events of a trace
MAX_MEMBERS = 200_000  # of an archive; there are jobs of 100,000 ranks
MAX_HEADER_BYTES = 1 << 20  # of the header of one archive member: its name and attributes
MAX_RANKS = 1 << 18  # twice the largest job; missing ranks are listed one by one
MAX_DIMENSIONS = 64  # of a tensor: PyTorch's own bound
MAX_NESTING = 64  # of descriptions of a host or a fabric
# Bytes to change and replay a graph with one edge per node: 15 million nodes took 22 GB.
BYTES_PER_NODE = 1500
MAX_ROWS_PER_BYTE = 2  # of a Parquet table; real ones have 0.1
MIN_ROWS = 1 << 20


def refuse_bomb(label: str, content_bytes: int, stored_bytes: int) -> None:
    """Raise if a file decompresses to more than `MAX_EXPANSION` times its size, as no trace does.

    Raises:
        InputError: the content is larger than that, and larger than `MIN_BOMB_BYTES`.
    """
    if content_bytes > max(MIN_BOMB_BYTES, MAX_EXPANSION * stored_bytes):
        raise InputError(
            f"{label}: expands from {format_bytes(stored_bytes)} to more than {format_bytes(content_bytes)}, "
            f"over {MAX_EXPANSION} times, as no trace does; leave it out, or unpack it first if it is one"
        )


def read_small(path: Path, most_bytes: int = MAX_FACTS_BYTES) -> bytes:
    """Return the content of a file of metadata; traces are streamed instead.

    Raises:
        InputError: the file cannot be read, is a device, or is too large.
    """
    try:
        with open(path, "rb", opener=without_waiting) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                raise InputError(f"{path}: is a device; give a file")
            most_bytes = min(most_bytes, max(status.st_size, MAX_FACTS_BYTES))  # `read` allocates this much
            content = file.read(most_bytes + 1) if status.st_size <= most_bytes else None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise InputError(f"{path}: cannot be read ({why})") from error
    if content is None or len(content) > most_bytes:
        raise InputError(f"{path}: is larger than {format_bytes(most_bytes)}, as no such file is")
    return content


def without_waiting(path: str, flags: int) -> int:
    """Open a file as an `opener` of `open`, without blocking on a pipe whose other end is not open.

    Such a pipe is empty when read; opening it for writing fails.

    Raises:
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def refuse_large_graph(num_nodes: int) -> None:
    """Raise if a graph that is to be built does not fit into memory.

    Raises:
        Unanswerable: the graph needs more memory than is left.
    """
    takes, left = num_nodes * BYTES_PER_NODE, memory_left()
    if takes > left:
        raise Unanswerable(
            f"the changed job has {num_nodes:,} nodes, which take some {format_bytes(takes)} of memory, and "
            f"{format_bytes(left)} are left: ask for fewer passes, chunks or micro-batches"
        )


def memory_left() -> int:
    """Return how many bytes this process can still allocate: of the machine, its cgroup, and its ulimits."""
    left = MAX_WHOLE_BYTES
    with suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        left = int(lines["MemAvailable"].split()[0]) << 10
    with suppress(OSError, ValueError, LookupError):  # `ulimit -d` and `ulimit -v`
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        for of, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            limit, _ = resource.getrlimit(of)
            if limit != resource.RLIM_INFINITY:
                left = min(left, limit - (int(lines[name].split()[0]) << 10))
    with suppress(OSError, ValueError):  # not in a cgroup, or one without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{of}").read_text()) for of in ("max", "current"))
        left = min(left, limit - used)
    return max(left, 0)
