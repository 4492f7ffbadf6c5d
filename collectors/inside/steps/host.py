"""What the host does to a training process: garbage collection, CPU time, waiting for a core.

Takes the ends of steps, and collections. Writes per step a record of all totals that the recorder counts, one
more where a DataLoader returns batches, two more where the clocks of the process are read, as `sampling`
decides; and one for each long collection. Long work of ours between two steps is measured: it counts for
neither.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial

from .. import records
from ..files import OwnDescriptor
from ..recorder import Recorder
from ..threads import get_ident, get_native_id
from . import data

LONG_NS = 1_000_000
BLOCK_BYTES = 512  # the kernel's unit of what a process wrote
MAX_COLLECTIONS = 4096  # collections kept from one step to the next
CLOCK_OF_THREAD = 6  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED of Linux


class HostFacts:
    """The host facts of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begun_ns, self._ended_ns = timed_collections()
        # Counts how long the thread was ready to run and had no core.
        self._schedstat: OwnDescriptor | None = None
        self.on_fork()

    def on_fork(self) -> None:
        """Start with no thread and no totals in a forked child: its threads are others."""
        self._close_schedstat()
        self._thread = self._native = 0  # whose CPU time is measured
        self._clock = 0
        self._read_at = -1  # the latest step at whose end clocks were read
        self._collected_ns = 0

    def on_resume(self, step: int) -> None:
        """Read all again after the calls for a step, whose time belongs to no step."""
        writer = self._recorder.records
        if writer is not None and self._read_at != step:
            # Nothing was read before that work, which must not count for the steps before.
            now_ns = time.time_ns()
            writer.write(records.CPU, now_ns, -1, -1, -1)
            writer.write(records.CHILDREN, now_ns, -1, -1)
        self.on_sample(step)
        self.on_step(step)

    def on_step(self, _step: int) -> None:
        """Record the totals up to the step that ends now."""
        recorder = self._recorder
        writer = recorder.records
        if writer is None:
            return
        if self._ended_ns:
            self._add_collections(writer)
        now_ns, waited_ns, elements = time.time_ns(), recorder.data_wait_ns, recorder.input_elements
        if waited_ns >= 0 and not recorder.works(data.__name__):
            waited_ns = elements = -1
        writer.add(records.pack(now_ns, recorder.num_backward, self._collected_ns, waited_ns, records.WORK))
        if elements >= 0:
            writer.add(records.pack(now_ns, elements, 0, 0, records.INPUT))

    def on_sample(self, step: int) -> None:
        """Record the clocks of the process and of its training thread, and what the kernel counts."""
        writer = self._recorder.records
        if writer is None:
            return
        self._read_at = step
        here = get_ident()
        thread = self._recorder.training_thread or here
        # A thread that begins after another has ended may get its number, though not that of the kernel.
        if thread != self._thread or (thread == here and get_native_id() != self._native):
            self._follow(thread)
        now_ns = time.time_ns()
        queued_ns = -1
        if self._schedstat is not None:
            queued_ns = int(self._schedstat.read(64).split()[1])
            writer.write(records.CHILDREN, now_ns, *_children_and_writes())
        thread_ns = time.clock_gettime_ns(self._clock)
        writer.write(records.CPU, now_ns, time.process_time_ns(), thread_ns, queued_ns)

    def _close_schedstat(self) -> None:
        if self._schedstat is not None:
            self._schedstat.close()
        self._schedstat = None

    def _add_collections(self, writer: records.RecordWriter) -> None:
        """Add up the collections since the last step, and record the long ones."""
        while self._ended_ns:
            ended_ns = self._ended_ns.popleft()
            if self._begun_ns[0] > ended_ns:  # its start made room for later ones
                continue
            begun_ns = self._begun_ns.popleft()
            self._collected_ns += ended_ns - begun_ns
            if ended_ns - begun_ns >= LONG_NS:
                writer.write(records.COLLECTED, begun_ns, ended_ns - begun_ns)

    def _follow(self, thread: int) -> None:
        """Measure another thread from now on.

        Raises:
            OSError: there is no such thread.
        """
        if thread == get_ident():
            native: int | None = get_native_id()  # `threading` lists that of the parent after a fork
        else:
            native = {listed.ident: listed.native_id for listed in threading.enumerate()}.get(thread)
        if native is None:
            raise OSError("the training thread has ended")
        # As `time.pthread_getcpuclockid` makes it, which reads freed memory where the thread has just ended.
        self._clock = (~native << 3) | CLOCK_OF_THREAD
        self._close_schedstat()
        self._thread, self._native = thread, native
        with suppress(OSError):  # a kernel without scheduler statistics
            self._schedstat = OwnDescriptor(f"/proc/self/task/{native}/schedstat", os.O_RDONLY)


def install(recorder: Recorder) -> None:
    """Record what the host does."""
    host = HostFacts(recorder)
    recorder.listen("sample", host.on_sample)
    recorder.listen("step", host.on_step)
    recorder.listen("resume", host.on_resume)
    recorder.listen("fork", host.on_fork)


def _children_and_writes() -> tuple[int, int]:
    """Return the CPU time of programs that were waited for, in ns, and the bytes written to disks."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_oublock
    return int(1e9 * (children.ru_utime + children.ru_stime)), BLOCK_BYTES * blocks


def timed_collections() -> tuple[deque[int], deque[int]]:
    """Return the start and the end of each garbage collection from now on, both in ns.

    Python that runs within a collection lets other threads run wherever the job allocates, and an exception
    that a signal handler raises there is lost. So none does: `gc.callbacks` gets `getattr` of an object whose
    `start` and `stop` have getters made of functions in C. The latest are kept.
    """
    begun_ns: deque[int] = deque(maxlen=MAX_COLLECTIONS)
    ended_ns: deque[int] = deque(maxlen=MAX_COLLECTIONS)
    noting = {
        phase: property(partial(next, map(times_ns.append, iter(time.time_ns, None))))
        for phase, times_ns in (("start", begun_ns), ("stop", ended_ns))
    }
    clocks = type("CollectionClocks", (), noting)()
    gc.callbacks.append(partial(getattr, clocks))
    return begun_ns, ended_ns
