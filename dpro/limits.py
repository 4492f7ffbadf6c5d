"""How much a file may ask for: every bound on what is read from files of others, with its reason.

In: nothing. Out: numbers, and what holds files and graphs to them. A small file must not take a machine's
memory or an hour; a large one that is what it should be must be read: bounds are ratios to what is on disk,
or far above what any job writes.
"""

from __future__ import annotations

import os
import resource
import stat
from contextlib import suppress
from pathlib import Path

from dpro.errors import InputError, Unanswerable, first_line
from dpro.units import format_bytes

# Text of traces shrinks 10- to 60-fold, the same step over and over some 100-fold; what is made to swell,
# 1,000-fold and more.
MAX_EXPANSION = 400
MIN_BOMB_BYTES = 64 << 20  # content up to this is never too much for its file
# Bytes of the objects that JSON is decoded to, to those on disk: many small ones take 10 times their text.
MAX_DECODED_EXPANSION = 2000
MIN_DECODED_BYTES = 512 << 20
BYTES_PER_VALUE = 64  # of a small list, the most wasteful value
MAX_REPETITION = 64  # bytes of a pickle's values written out, to those that write what is shared once
MAX_BLANK_BYTES = 64 << 20  # in a row: zeros of a file that was never written, or blanks
MAX_WHOLE_BYTES = (
    4 << 30
)  # of a file whose format is read as a whole; Kineto's, which is not, has no such bound
MAX_FACTS_BYTES = 64 << 20  # before or behind the events of a trace
MAX_MEMBERS = 200_000  # of an archive; there are jobs of 100,000 ranks
MAX_HEADER_BYTES = 1 << 20  # of one member: its name and what else is said of it
MAX_RANKS = 1 << 18  # twice the largest job; what is missing is listed
MAX_DIMENSIONS = 64  # of a tensor: PyTorch's own bound
MAX_NESTING = 64  # of what describes a host or a fabric
# Of a changed graph until it is replayed, with an edge for each node: 15 million nodes took 22 GB.
BYTES_PER_NODE = 1500
MAX_ROWS_PER_BYTE = 2  # of a table in Parquet; real ones have a tenth of one
MIN_ROWS = 1 << 20


def refuse_bomb(label: str, content_bytes: int, stored_bytes: int) -> None:
    """Hold the content of a file to a size that such a file can have.

    Raises:
        InputError: it is more than any trace holds in so few bytes.
    """
    if content_bytes > max(MIN_BOMB_BYTES, MAX_EXPANSION * stored_bytes):
        raise InputError(
            f"{label}: swells from {format_bytes(stored_bytes)} to more than {format_bytes(content_bytes)}, "
            f"over {MAX_EXPANSION} times, as no trace does; leave it out, or unpack it first if it is one"
        )


def read_small(path: Path, most_bytes: int = MAX_FACTS_BYTES) -> bytes:
    """All of a file that says something of a job; a trace is read piece by piece.

    Raises:
        InputError: it cannot be read, is a device, or has more.
    """
    try:
        with open(path, "rb", opener=without_waiting) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                raise InputError(f"{path}: is a device; give a file")
            most_bytes = min(most_bytes, max(status.st_size, MAX_FACTS_BYTES))  # room is made for all of it
            content = file.read(most_bytes + 1) if status.st_size <= most_bytes else None
    except (OSError, ValueError) as error:  # no file, or no name of one
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise InputError(f"{path}: cannot be read ({why})") from error
    if content is None or len(content) > most_bytes:
        raise InputError(f"{path}: is larger than {format_bytes(most_bytes)}, as no such file is")
    return content


def without_waiting(path: str, flags: int) -> int:
    """Open a file, as `opener`: a pipe without a process at its other end is empty, or cannot be written.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def refuse_large_graph(num_nodes: int) -> None:
    """Hold a graph that is to be made to what fits into memory.

    Raises:
        Unanswerable: it takes more than is left.
    """
    takes, left = num_nodes * BYTES_PER_NODE, memory_left()
    if takes > left:
        raise Unanswerable(
            f"the changed job has {num_nodes:,} nodes, which take some {format_bytes(takes)} of memory, and "
            f"{format_bytes(left)} are left: ask for fewer passes, chunks or micro-batches"
        )


def memory_left() -> int:
    """Bytes of memory that a process may still take: of the machine, its container, or its own limits."""
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
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{of}").read_text()) for of in ("max", "current"))
        left = min(left, limit - used)
    return max(left, 0)
