"""Whether a trace is scanned by compiled loops: where that saves more than loading them takes.

In: a source. Out: a scanner, or None: then every event is decoded, with the same result. A process that reads
many traces loads the loops once, when it has seen as much JSON as they are worth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro.ingest.kineto.columns import Columns, Memory
from dpro.ingest.reading.files import Source

if TYPE_CHECKING:
    from dpro.ingest.kineto.scan.scanner import Scanner

# Scanning saves 2.4 ms of CPU time per MB of JSON; loading numba and the loops takes 0.43 s.
MIN_BYTES = 256 << 20
MIN_FILE_BYTES = 2 << 20  # of each file: to begin a scan takes 1 ms
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_MIN_EXPANSION = 4  # of a compressed trace; usual are 10 to 20
seen_bytes = 0  # of JSON in the traces that this process was asked about


def scanner_of(source: Source, columns: Columns, memory: Memory) -> Scanner | None:
    """A scanner for a trace, None where it is not worth the while."""
    global seen_bytes
    of_file = text_bytes(source)
    seen_bytes += of_file
    if of_file < MIN_FILE_BYTES or seen_bytes < MIN_BYTES:
        return None
    from dpro.compiled import can_compile

    if not can_compile():
        return None
    from dpro.ingest.kineto.scan.scanner import Scanner

    return Scanner(columns, memory)


def text_bytes(source: Source) -> int:
    """About how many bytes of JSON a file holds; 0 where that is not known, as of a member of an archive.

    Args:
        source: compressed or not.
    """
    if source.member:
        return 0
    try:
        with source.path.open("rb") as file:
            start, stored = file.read(4), source.path.stat().st_size
            if start == _ZSTD:
                return _MIN_EXPANSION * stored
            if not start.startswith(_GZIP) or stored < 8:
                return stored
            file.seek(-4, 2)  # ISIZE of RFC 1952: the length of the content, modulo 2^32
            return max(int.from_bytes(file.read(4), "little"), _MIN_EXPANSION * stored)
    except OSError:
        return 0
