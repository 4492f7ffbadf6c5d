"""Fixed-size records in a file: whatever was flushed survives a SIGKILL of the writer.

Takes a kind and up to four integers per record; reads them back in the order written. The file is not mapped
into memory: a full disk is an error here, and a file that a user truncates does no harm, where a mapped one
would end the job by SIGBUS. Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .files import OwnDescriptor
from .threads import allocate_lock

# Kinds, with what their four values are (0 where unused).
UPDATE = 1  # optimizer, its updates so far, end of the step, start of the next (they differ by our own work)
ANCHOR = 2  # optimizer that counts from now on, steps less its updates, first step, index in stepping.SOURCES
CLOCK = 3  # CLOCK_REALTIME, CLOCK_MONOTONIC_RAW
WINDOW = 4  # index of a deep window that was saved, its start, its end, when it had been saved
ENDING = 5  # when the process announced its end, its exit code, the signal; -1 for the one it is not
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
BEGUN = 15  # a DataLoader began again: when, how long that took, its workers, whether they persist
OPENED = 16  # index of a deep window that has begun, its start, the steps before it
DROPPED = 17  # index of a deep window that was opened and is not kept, when that was known
MISSED = 18  # index of a deep window that was not opened, the steps before it, why: one of MISSED_*
GPU_STEP = 19  # a step that its device timed: when the host began and ended it, ns by events of the device
CUT = 22  # index of a deep window of a GPU, start and end of its steps, whether all their GPU work was seen
# When gradients of a number were asked for, or their norm was returned; the number's bits; its index in
# LOSS_KINDS; whether a GradScaler skips updates of gradients that are not finite.
LOSS = 23
OPERATION = 24  # of a pipeline: start, end, place of its chunk << 32 | micro-batch, index in OPERATIONS
ENGINE = 25  # an iteration of a server's engine: start, end, tokens of prompts, tokens that follow prompts
BATCH = 26  # per iteration, too: start, its requests, tokens of context, requests that waited (-1: unknown)
KV_CACHE = 27  # also: start, requests that waited for blocks of the KV cache, requests that lost theirs
CHILDREN = 28  # at the end of a step: time, CPU time of programs that were waited for, bytes written to disks
# Automatic windows stop, or resume: steps before, ns that all windows have cost, of how many, and by how many
# millionths steps take longer than before the first window, or took longer while windows were stopped.
STOPPED, RESUMED = 29, 30
# In steps at whose beginning clocks are read: start and end of a backward pass, and the recorder's time at
# both; and, of its start or end on the device: when the host began the step, when it came there, and ns
# between the device's events of these.
PASS, PASS_ON_GPU = 31, 32
DETACHED = 33  # CUPTI, after a window: steps before, ns that took, whether it had not ended by then

LOSS_KINDS = ("loss", "grad_norm")
MISSED_OCCUPIED, MISSED_LATE, MISSED_UNPREPARED, MISSED_STUCK = range(4)

RECORD = struct.Struct("<5q")
SIZE = RECORD.size
FLUSH_NS = 10_000_000  # a step that ends sooner after a flush makes none: a flush costs 10 us
RESERVED = 1 << 20  # bytes that are reserved at once: steps are recorded also while others fill the disk
pack = RECORD.pack  # returns a record's bytes from its four values and its kind
MAX_WAITING = 1024  # records that wait for a flush; beyond these each write flushes


class Record(NamedTuple):
    """One record: four values whose meaning the kind defines."""

    a: int
    b: int
    c: int
    d: int
    kind: int


class RecordWriter:
    """An appender of records to a file; several threads may call it, and a handler that interrupts it.

    Attributes:
        add: appends what `pack` returns, in C, for what every step writes; nothing is flushed.
    """

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            OSError: it cannot be created, or the disk is full.
        """
        self._path = path
        self._file = OwnDescriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._waiting: deque[bytes] = deque()
        self.add = self._waiting.append
        self._unwritten = bytearray()  # taken by the flush that runs
        self._size = self._reserved = 0  # bytes of the file, and those that it has blocks for
        self._flushing = allocate_lock()
        self._reserve()

    def write(self, kind: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        """Append one record, which is in the file after the next flush.

        Args:
            a, b, c, d: int64; times in ns.

        Raises:
            OSError: from `flush`, where many records wait.
        """
        self._waiting.append(RECORD.pack(a, b, c, d, kind))
        if len(self._waiting) > MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write all waiting records to the file; where another flush runs, that one or the next writes them.

        Raises:
            OSError: the disk is full, the file may not grow, or the job has closed it and it is gone.
        """
        if not self._flushing.acquire(False):  # never waited for: a handler may have interrupted it
            return
        try:
            while self._waiting or self._unwritten:
                self._unwritten += b"".join([self._waiting.popleft() for _ in range(len(self._waiting))])
                written = self._written()
                self._size += written
                del self._unwritten[:written]
        finally:
            self._flushing.release()

    def _reserve(self) -> None:
        self._file.reserve(self._size, RESERVED)
        self._reserved = self._size + RESERVED

    def _written(self) -> int:
        if self._size + len(self._unwritten) > self._reserved:
            self._reserve()
        try:
            return self._file.write(self._unwritten, self._size)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
        self._file = self._file.reopened(self._path)
        return self._file.write(self._unwritten, self._size)


def read_records(path: Path) -> list[Record]:
    """Return all records of a file, in the order written; none where the file is missing."""
    content = path.read_bytes() if path.is_file() else b""
    return [Record(*values) for values in unpacked(content)]


def packed(record: Record) -> bytes:
    """Return one record as it is in a file."""
    return pack(*record)


def unpacked(content: bytes | bytearray) -> Iterator[tuple[int, int, int, int, int]]:
    """Iterate over the values of the whole records; a torn last one is left out."""
    return RECORD.iter_unpack(memoryview(content)[: len(content) // SIZE * SIZE])
