"""Fixed-size records in a memory-mapped file: whatever was written survives a SIGKILL of the writer.

In: a kind and up to four integers. Out: the same, read back in the order written. Writing costs no
system call. Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from .files import identity_of, is_still

# Kinds, with what their four values are (0 where unused). A kind of 0 is a slot that was never written.
UPDATE = 1  # optimizer, its updates so far, end of the step, start of the next (they differ by our own work)
ANCHOR = 2  # optimizer that counts from now on, steps less its updates, first step, index in stepping.SOURCES
CLOCK = 3  # CLOCK_REALTIME, CLOCK_MONOTONIC_RAW
WINDOW = 4  # index of a deep window that was saved, its start, its end, when it had been saved
ENDING = 5  # when the process said that it would end, its exit code, the signal; -1 for the one it is not
PEER = 6  # when, rank whose host's clock was compared, this clock minus that, round trip
CPU = 7  # at the end of a step: time, CPU time of the process and of its training thread, its wait for a core
WORK = (
    8  # at the end of a step: time, backward calls, ns of garbage collection, ns of waiting for data (or -1)
)
LOADED = 10  # a long wait for the DataLoader: its start, its duration, the worker (-1: the process itself)
COLLECTED = 11  # a long garbage collection: its start, its duration
INPUT = 12  # at the end of a step: time, elements of all batches that DataLoaders handed over
ASIDE = 13  # at the end of a step: time, ns of saving checkpoints, of work without gradients, of compiling
SAVED = 14  # a long save of the thread that trains: its start, its duration, its bytes (-1: unknown)
BEGUN = 15  # a DataLoader began anew: when, how long that took, its workers, whether they persist
OPENED = 16  # index of a deep window that has begun, its start, the steps before it
DROPPED = 17  # index of a deep window that was opened and is not kept, when that was known
MISSED = 18  # index of a deep window that was not opened, the steps before it, why: one of MISSED_*
GPU_STEP = 19  # a step that its device timed: when the host began and ended it, ns by events of the device
CUT = 22  # index of a deep window of a GPU, start and end of its steps, whether all their GPU work was seen
LOSS = 23  # when gradients of a number were asked for, and the bits of that number
OPERATION = 24  # of a pipeline: start, end, place of its chunk << 32 | micro-batch, index in OPERATIONS
ENGINE = 25  # an iteration of a server's engine: start, end, tokens of prompts, tokens that follow prompts
BATCH = 26  # the same: start, its requests, tokens of context, requests that waited (-1: unknown)
KV_CACHE = 27  # the same: start, requests that waited for blocks of the KV cache, requests that lost theirs
CHILDREN = 28  # at the end of a step: time, CPU time of programs that were waited for, bytes written to disks

MISSED_OCCUPIED, MISSED_LATE, MISSED_UNPREPARED = range(3)

RECORD = struct.Struct("<5q")  # the kind comes last, so that a torn record has none
SIZE = RECORD.size
_CHUNK = 15 << 16  # a whole number of records, and of pages wherever pages have at most 64 KiB


class Record(NamedTuple):
    """One record: four values whose meaning the kind defines."""

    a: int
    b: int
    c: int
    d: int
    kind: int


class RecordWriter:
    """Appends records to a file; safe to call from several threads.

    Only the part being written and the one before it are mapped, so that memory does not grow with the file.
    """

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            OSError: it cannot be created, or the disk is full.
        """
        self._path = path
        # A number, not a file object, whose end would close what the job may have under that number by then.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._identity = identity_of(self._descriptor)
        self._chunks: dict[int, mmap.mmap] = {}
        self._kept: list[mmap.mmap] = []  # each has a descriptor of its own that it would close
        self._growing = threading.Lock()
        self._slots = count()
        self._grow(0)

    def write(self, kind: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        """Append one record.

        Args:
            a, b, c, d: int64; times in ns.

        Raises:
            OSError: the file has to grow, and the disk is full, or the job has closed it and it is gone.
        """
        chunk, offset = divmod(next(self._slots) * RECORD.size, _CHUNK)
        mapped = self._chunks.get(chunk) or self._grow(chunk)
        RECORD.pack_into(mapped, offset, a, b, c, d, kind)

    def _grow(self, chunk: int) -> mmap.mmap:
        with self._growing:
            if chunk not in self._chunks:
                if not is_still(self._descriptor, self._identity):
                    self._reopen()
                # Blocks are taken now: in a sparse file a full disk would show as a SIGBUS in the job.
                os.posix_fallocate(self._descriptor, chunk * _CHUNK, _CHUNK)
                self._chunks[chunk] = mmap.mmap(self._descriptor, _CHUNK, offset=chunk * _CHUNK)
                self._chunks.pop(chunk - 2, None)
            return self._chunks[chunk]

    def _reopen(self) -> None:
        """The job has closed all descriptors: open the file anew.

        Raises:
            OSError: it is no longer there, or another one.
        """
        self._kept += self._chunks.values()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        if identity_of(self._descriptor) != self._identity:
            raise OSError(f"{self._path} is another file now")


def read_records(path: Path) -> list[Record]:
    """All records of a file, in the order written; none where the file is missing."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = len(content) - len(content) % RECORD.size
    return [Record(*values) for values in unpacked(content[:whole]) if values[-1]]


def packed(record: Record) -> bytes:
    """One record as it is in a file."""
    return RECORD.pack(*record)


def unpacked(content: bytes | bytearray) -> Iterator[tuple[int, int, int, int, int]]:
    """The values of whole records, including slots that were never written."""
    return RECORD.iter_unpack(content)
