"""PyTorch's flight recorder: every collective call of each process group.

Reads the rings of the latest calls, which PyTorch keeps. Writes `flight-BACKEND-NNNN.*`, dumps that overlap
so that no call is lost between them, and `groups.json` with the ranks of each process group, which gloo's
dumps lack. A thread of ours dumps whenever half of a ring may be new. Collectives within a CUDA graph are
recorded neither at its capture nor at its replays. An observer outside the job touches `wanted.json` beside
the folders of the launches: then `calls-BACKEND.*` get the calls since the last request but one, and all that
are unfinished.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import captures
from ..files import LAST, SHOWN, STALL, WANTED, stamp_of
from ..patching import wrap
from ..recorder import Recorder
from ..threads import Bell, Monitor, Thread, allocate_lock, get_ident, main_thread_ident
from ..torch_internals import (
    backends_of,
    calls_of,
    dump_of,
    group_names,
    group_ranks,
    handler_of,
    has_context,
)
from . import coverage

STALL_S = 5.0  # after this long without a step the calls are saved: the job may hang
SHORTEST_S, LONGEST_S = 0.02, 1.0  # between two looks at the progress of the ring
LATEST = 300  # calls shown at least for a stalled job, and at the first request
WAITING = 64  # unconverted dumps, beyond which the latest replaces the one before


class RingProgress(NamedTuple):
    """The progress of a ring at a dump.

    Attributes:
        at_s: time of the dump, on the monotonic clock.
        enqueued: calls as the groups count them; some sends and receives may be missing.
        last: number of the last call in the dump; -1 for none.
        rate: calls per second since the previous dump.
        calls_per_count: calls in the dump for each counted call since the previous dump; at least 1.
        digest: of the dump.
    """

    at_s: float
    enqueued: int
    last: int
    rate: float
    calls_per_count: float
    digest: int


class Flight:
    """The flight recorder's dumps of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._half = max((coverage.entries() or coverage.DEFAULT) // 2, 1)
        self._wanted = recorder.launch.parent / WANTED
        self.dumps = RingDumper(recorder)
        self.on_fork()

    def on_fork(self) -> None:
        """Start without groups in a forked child."""
        self.dumps.groups.forget()
        self._rings: list[Ring] = []
        self._levels: dict[str, RingProgress] = {}
        self._overdue: set[str] = set()  # rings that could not be dumped when they were due
        self._looks: dict[str, tuple[float, int]] = {}  # time and counted calls of the latest look
        self._pause_s = SHORTEST_S
        self._counts: dict[str, int] = {}
        self._groups: dict[str, list[int]] = {}
        self._shown = stamp_of(self._wanted)
        self._shown_to: dict[str, tuple[int, int]] = {}  # last calls at the latest two requests
        self._said: dict[str, int] = {}
        self._stalled_s = STALL_S
        self._is_complete = False
        self._lock = allocate_lock()
        self._has_lock = False
        self._wake = Bell()
        self._thread: Thread | None = None

    def before_fork(self) -> None:
        """Keep other threads from dumping during a fork; stop waiting for them after `STALL_S`."""
        self._has_lock = self._lock.acquire(True, STALL_S)

    def after_fork(self) -> None:
        """Let the threads of the parent dump again."""
        if self._has_lock:
            self._lock.release()

    def on_open(self) -> None:
        """Start the thread that dumps the rings, once there is a process group."""
        if self._thread is None and dist.is_initialized():
            with self._lock:
                # PyTorch reads the size of a ring from the environment at its first use.
                if not self._rings:
                    start = RingProgress(time.monotonic(), 0, -1, 0.0, 1.0, 0)
                    self._rings = rings()
                    self._levels = {ring.name: start for ring in self._rings}
            self._thread = Thread(self._drain, self._wake)

    def on_window(self, _name: str) -> None:
        """Dump the calls of a deep window that was saved."""
        self._wake.ring()

    def on_second(self) -> None:
        """Save the calls of a stalled job at growing intervals; show them if an observer asks."""
        stamp = stamp_of(self._wanted)
        if stamp != self._shown:
            self._shown = stamp
            self.show()
        still_s = time.monotonic() - self._recorder.last_step_s
        if still_s < STALL_S:
            self._stalled_s = STALL_S
        elif still_s > self._stalled_s and self.save(STALL):
            self._stalled_s *= 2

    def on_end(self) -> None:
        """End the thread, which must not be in PyTorch at the interpreter's exit, and save what is new."""
        thread, self._thread = self._thread, None
        wake, self._wake = self._wake, Bell()
        wake.ring()
        self._is_complete = thread is None or thread.join(STALL_S)
        if self._is_complete:
            self.save(must=True)

    def on_exit(self) -> None:
        """Mark the dumps as complete: no call follows those that were saved."""
        if self._is_complete and self._recorder.folder is not None:
            self._recorder.write_file(LAST, b"")

    def save(self, name: str = "", must: bool = False) -> bool:
        """Dump the rings.

        Args:
            must: whether this is the last occasion.

        Returns:
            Whether all could be dumped.
        """
        with self._lock:
            left = self._save(self._rings, name, must)
            # A dump with nothing new is not written; the time shows that nothing changed until now.
            if not left:
                self._recorder.write_file("checked", str(time.time_ns()).encode())
        return not left

    def show(self) -> None:
        """Dump the rings for an observer, without effect on the dumps that become part of the run.

        Only new calls are written, since a job may have a thousand ranks.
        """
        still = time.monotonic() - self._recorder.last_step_s >= STALL_S
        with self._lock:
            self._save_groups()
            for ring in self._rings:
                content = self.dumps.dump(ring, must=False)
                if content is None:
                    continue
                last = last_record(content)
                before, latest = self._shown_to.get(ring.name, (last - LATEST, last - LATEST))
                self._shown_to[ring.name] = latest, last
                since = min(before, last - LATEST) if still else before
                with suppress(OSError):  # on a full disk only the observer misses something
                    self._show(f"{SHOWN}{ring.name}.json", shorten_dump(content, since))

    def _show(self, name: str, content: bytes) -> None:
        """Write a dump for an observer; if it equals the previous one, update only the time of the file.

        Raises:
            OSError: it cannot be written.
        """
        folder, said = self._recorder.folder, hash(content)
        if folder is not None and self._said.get(name) == said and (folder / name).exists():
            now_ns = time.time_ns()
            os.utime(folder / name, ns=(now_ns, now_ns))
            return
        self._recorder.write_file(name, content)
        self._said[name] = said

    def _drain(self, wake: Bell) -> None:
        while self._wake is wake:  # else this thread was abandoned, and another may have started
            asked = wake.wait(self._pause_s)
            if self._wake is wake:
                self._recorder.call(self._look, asked)

    def _look(self, asked: bool) -> None:
        """Dump the rings that may be half new, and look again before a quarter may be."""
        with self._lock:
            enqueued = self._enqueued()
            full = [ring for ring in self._rings if self._is_half_new(ring, enqueued[ring.name])]
            wanted = [ring for ring in self._rings if ring not in full and (asked or self._is_wanted(ring))]
            self._save(full, must=True)
            self._overdue = self._save(wanted)
            rate = max((self._rate(ring, enqueued[ring.name]) for ring in self._rings), default=0.0)
        pause_s = min(self._half / 2 / max(rate, 1.0), 2 * self._pause_s, LONGEST_S)
        self._pause_s = max(pause_s, SHORTEST_S)

    def _enqueued(self) -> dict[str, int]:
        """Return the calls of each ring so far, without touching a ring or a GPU; gloo's omits messages."""
        counts = self.dumps.groups.count()
        counts[NCCL] += self._recorder.num_messages
        return counts

    def _is_half_new(self, ring: Ring, enqueued: int) -> bool:
        level = self._levels[ring.name]
        since_s = time.monotonic() - level.at_s
        # Messages sent by C++ code are counted by the dumps alone.
        return max((enqueued - level.enqueued) * level.calls_per_count, level.rate * since_s) >= self._half

    def _is_wanted(self, ring: Ring) -> bool:
        since_s = time.monotonic() - self._levels[ring.name].at_s
        return ring.name in self._overdue or since_s > self._recorder.calls_saved_each_s

    def _rate(self, ring: Ring, enqueued: int) -> float:
        """Return calls per second: since the previous dump, or as counted since the latest look, if more."""
        now_s = time.monotonic()
        before_s, before = self._looks.get(ring.name, (now_s, enqueued))
        self._looks[ring.name] = now_s, enqueued
        level = self._levels[ring.name]
        return max(
            level.rate, level.calls_per_count * (enqueued - before) / max(now_s - before_s, SHORTEST_S)
        )

    def _save(self, rings: list[Ring], name: str = "", must: bool = False) -> set[str]:
        """Dump some rings; return the names of those left for later."""
        if rings:
            self._save_groups()
        return {ring.name for ring in rings if not self._save_ring(ring, name, must)}

    def _save_groups(self) -> None:
        groups = self._groups | groups_of_process()  # destroyed groups stay known
        if groups != self._groups:
            self._groups = groups
            self._recorder.write_file("groups.json", json.dumps(groups).encode())

    def _save_ring(self, ring: Ring, name: str, must: bool) -> bool:
        now_s, enqueued = time.monotonic(), self._enqueued()[ring.name]
        content = self.dumps.dump(ring, must)
        if content is None:
            return False
        before, last, digest = self._levels[ring.name], last_record(content), hash(content)
        if digest != before.digest:
            name = f"flight-{ring.name}-{name or self._next(ring)}{ring.suffix}"
            self._recorder.write_file(name, content)
        new = max(last - before.last, 0)
        rate = new / max(now_s - before.at_s, SHORTEST_S)
        calls_per_count = max(new / max(enqueued - before.enqueued, 1), 1.0)
        self._levels[ring.name] = RingProgress(now_s, enqueued, last, rate, calls_per_count, digest)
        return True

    def _next(self, ring: Ring) -> str:
        """Return the number of a ring's next dump; that of the latest while many dumps wait."""
        folder = self._recorder.folder
        assert folder is not None
        if len(list(folder.glob(f"flight-*{ring.suffix}"))) < WAITING:
            self._counts[ring.name] = self._counts.get(ring.name, 0) + 1
        return f"{self._counts[ring.name]:06d}"


def install(recorder: Recorder) -> None:
    """Save the flight recorder."""
    if not dist.is_available():
        return
    flight = Flight(recorder)
    watch_groups(recorder, flight.dumps.groups)
    recorder.listen("open", flight.on_open)
    recorder.listen("group", flight.on_open)
    recorder.listen("window", flight.on_window)
    recorder.listen("second", flight.on_second)
    recorder.listen("end", flight.on_end)
    recorder.listen("exit", flight.on_exit)
    # A child must not inherit PyTorch's lock on a ring from a thread of ours that it does not have.
    os.register_at_fork(
        before=lambda: recorder.call(flight.before_fork),
        after_in_parent=lambda: recorder.call(flight.after_fork),
        after_in_child=lambda: recorder.call(flight.on_fork),
    )


def groups_of_process() -> dict[str, list[int]]:
    """Return the global ranks of each process group by name, which gloo's flight recorder lacks."""
    return {name: sorted(group_ranks(group)) for group, name in group_names().items()}


# PyTorch's rings of calls: which exist, how to dump them, and their progress.

NCCL, OTHERS = "nccl", "fr"  # rings: gloo and other backends share one
SETTLED_S = 5.0  # a group that stays unused for this long is not waited for
WAIT_S = 1.0  # the longest that our work delays a new group
_BACKENDS = {"ProcessGroupNCCL": NCCL, "ProcessGroupGloo": OTHERS}
_MAKERS = ("_new_process_group_helper", "split_group", "shrink_group")
_RECORD = '"record_id":'
_ENTRIES, _UNFINISHED = b'"entries":[', b'"retired":false'


class Ring(NamedTuple):
    """One ring of calls.

    Attributes:
        name: in the names of its dumps.
    """

    name: str
    suffix: str
    dump: Callable[[], bytes]


def rings() -> list[Ring]:
    """Return the rings that this PyTorch has."""
    present = []
    for name in (OTHERS, NCCL):
        pickled = dump_of(name)
        if pickled is not None:
            present.append(_ring(name, pickled))
    return present


def _ring(name: str, pickled: Callable[..., bytes]) -> Ring:
    """Return a ring that is dumped, where possible, by PyTorch's handler for its own monitoring.

    The handler lets other threads run. NCCL's handlers can only be called over a socket, where a thread of
    PyTorch's asks the GPU without knowing which one. Otherwise a pickle holds Python's lock half as long as
    JSON does.
    """
    by_handler = handler_of(f"{name}_trace_json")
    with suppress(Exception):
        if by_handler is not None and by_handler().startswith(b"{"):
            return Ring(name, ".json", by_handler)
    return Ring(name, ".pickle", functools.partial(pickled, includeStackTraces=False))


class Groups:
    """The calls that process groups count, and whether a group is being made."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start without groups, and with new locks, in a forked child."""
        self._counts: dict[tuple[str, str], int] = {}  # by ring and group; destroyed ones stay counted
        self._made_s: dict[tuple[str, str], float] = {}
        self._making = 0
        self._since_s = 0.0
        self._changed = Monitor()
        self._busy = 0

    def count(self) -> dict[str, int]:
        """Return the collectives called so far, by ring, from counters of the process: no GPU is asked."""
        for key, number in _sequences().items():
            self._made_s.setdefault(key, time.monotonic())
            self._counts[key] = max(number, self._counts.get(key, 0))
        totals = {NCCL: 0, OTHERS: 0}
        for (ring, _), number in self._counts.items():
            totals[ring] += number
        return totals

    def is_settled(self, ring: str) -> bool:
        """Return whether each group of a ring was used by the latest count, or unused for `SETTLED_S`."""
        now_s = time.monotonic()
        return all(
            number or now_s - self._made_s[key] > SETTLED_S
            for key, number in self._counts.items()
            if key[0] == ring
        )

    @contextmanager
    def kept(self) -> Iterator[bool]:
        """Keep groups from being made, for at most `WAIT_S`.

        Yields:
            Whether no group is being made, or one for so long that the job hangs there: then its calls are
            wanted, and a thread that waits for other ranks changes no list.
        """
        with self._changed:
            free = not self._making or time.monotonic() - self._since_s > SETTLED_S
            self._busy += free
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._busy -= 1

    def on_making(self) -> None:
        """Register a group that is about to be made, and wait while another thread dumps."""
        with self._changed:
            self._making += 1
            self._since_s = time.monotonic()
            self._changed.wait_for(lambda: not self._busy, WAIT_S)

    def on_made(self) -> None:
        """Unregister a group that was made, or could not be."""
        with self._changed:
            self._making -= 1


def _sequences() -> dict[tuple[str, str], int]:
    """Return the collectives called so far by ring and group name, without backends that do not count."""
    counts = {}
    for group, name in group_names().items():
        for backend in backends_of(group):
            number = calls_of(backend)
            if number is not None:
                counts[_BACKENDS.get(type(backend).__name__, OTHERS), name] = number
    return counts


def watch_groups(recorder: Recorder, groups: Groups) -> None:
    """Report to `groups` when groups are made."""
    from torch.distributed import device_mesh, distributed_c10d

    def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            recorder.call(groups.on_making)
            try:
                return original(*args, **kwargs)
            finally:
                recorder.call(groups.on_made)

        return watched

    for name in _MAKERS:
        if hasattr(distributed_c10d, name):
            wrap(distributed_c10d, name, _watched, also=(dist, device_mesh))


class JobDevice:
    """The GPU that the job's own threads use, for threads of ours that query it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def used(self) -> Iterator[bool]:
        """Make this thread work with the job's GPU for a while.

        Yields:
            Whether there is one. A thread without it would make a context on the first GPU of the node, and
            take half a gigabyte from the rank there.
        """
        training = self._recorder.training_thread or main_thread_ident()
        if not torch.cuda.is_initialized() or get_ident() == training:
            yield torch.cuda.is_initialized()
            return
        device = self._recorder.device
        is_named = device is not None and device.type == "cuda" and device.index is not None
        devices = [device.index] if is_named else range(torch.cuda.device_count())
        # Parameters are on the known device, even where its context cannot be asked for.
        in_use = [index for index in devices if (is_named if (has := has_context(index)) is None else has)]
        if not in_use:
            yield False
            return
        with torch.cuda.device(in_use[0]):
            yield True


class RingDumper:
    """Dumps of rings, made only while they do no harm."""

    def __init__(self, recorder: Recorder) -> None:
        self.groups = Groups()
        self.device = JobDevice(recorder)

    def dump(self, ring: Ring, must: bool = True) -> bytes | None:
        """Return all that a ring remembers.

        Args:
            must: whether calls may be lost if the dump is left for later.

        Returns:
            None where it must be left for later.
        """
        if ring.name != NCCL:
            with self.groups.kept() as free:
                return ring.dump() if free else None
        if not (must or self.groups.is_settled(ring.name)):
            return None
        with self.groups.kept() as unchanged, captures.guard() as free:
            if not (unchanged and free):
                return None
            with self.device.used() as has_gpu:
                return ring.dump() if has_gpu else None


def last_record(dump: bytes) -> int:
    """Return the number of the last call in a dump; -1 where there is none.

    JSON is searched as text: parsing 2,000 calls would hold up the job's own threads for some 20 ms.
    """
    if not dump.startswith(b"{"):
        entries = _unpickled(dump).get("entries")
        return int(entries[-1]["record_id"]) if entries else -1
    place = dump.rfind(_RECORD.encode())
    digits = dump[place + len(_RECORD) : place + len(_RECORD) + 20].split(b",")[0].split(b"}")[0]
    return int(digits) if place >= 0 and digits.strip().isdigit() else -1


def shorten_dump(dump: bytes, last: int) -> bytes:
    """Return a dump as JSON from the first call that is unfinished or after `last` on, at least one.

    JSON is cut as text.

    Args:
        dump: of PyTorch's flight recorder, JSON or a pickle.
        last: `record_id` of the last call that was saved before.
    """
    if not dump.startswith(b"{"):
        document = _unpickled(dump)
        entries = document.get("entries", ())
        kept = (n for n, entry in enumerate(entries) if entry["record_id"] > last or not entry.get("retired"))
        oldest = next(kept, max(len(entries) - 1, 0))
        return json.dumps({**document, "entries": list(entries[oldest:])}).encode()
    begin = dump.find(_ENTRIES) + len(_ENTRIES)
    first = dump[begin : dump.find(b":", begin) + 1]  # how each entry begins: keys are sorted
    if begin < len(_ENTRIES) or not first.startswith(b"{"):
        return dump
    number = dump.find(f"{_RECORD}{min(last + 1, last_record(dump))},".encode(), begin)
    if number < 0:  # the ring has lost it, or never had it
        return dump
    unfinished = dump.find(_UNFINISHED, begin, number)
    cut = dump.rfind(first, begin, number if unfinished < 0 else unfinished)
    return dump[:begin] + dump[cut:] if cut >= 0 else dump


def _unpickled(dump: bytes) -> dict[str, Any]:
    """Load a pickle that PyTorch wrote in this process."""
    document: dict[str, Any] = pickle.loads(dump) if dump else {}
    return document
