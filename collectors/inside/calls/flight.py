"""PyTorch's flight recorder: every collective call of each process group.

In: the ring of the latest calls, which PyTorch keeps. Out: `flight-BACKEND-NNNN.*`, dumps that overlap so
that no call is lost between them, and `groups.json` with the ranks of each process group, which gloo's dumps
lack. A thread of ours dumps whenever half of the ring may be new. Collectives within a CUDA graph
are recorded neither when the graph is captured nor when it is replayed. An observer outside the job touches
`wanted.json` beside the folders of the launches: then `calls-BACKEND.*` have what came since the last request
but one, and all that is unfinished.
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
SHORTEST_S, LONGEST_S = 0.02, 1.0  # between two looks at how far the ring has got
LATEST = 300  # calls that are shown at least of a stalled job, and at the first request
WAITING = 64  # dumps that are not converted yet: from then on the latest replaces the one before


class RingProgress(NamedTuple):
    """How far a ring had got at a dump.

    Attributes:
        at_s: when, on the monotonic clock.
        enqueued: calls as the groups count them; some sends and receives may be missing.
        last: number of the last call in the dump, -1 where there is none.
        rate: calls a second since the dump before.
        calls_per_count: calls in the dump for each that was counted since the dump before, 1 at least.
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
        """This is a forked child: it has no groups yet."""
        self.dumps.groups.forget()
        self._rings: list[Ring] = []
        self._levels: dict[str, RingProgress] = {}
        self._owed: set[str] = set()  # rings that were to be dumped, and could not be
        self._looks: dict[str, tuple[float, int]] = {}  # when, and the calls that the counters showed
        self._pause_s = SHORTEST_S
        self._counts: dict[str, int] = {}
        self._groups: dict[str, list[int]] = {}
        self._shown = stamp_of(self._wanted)
        self._shown_to: dict[str, tuple[int, int]] = {}  # the last calls at the latest two requests
        self._said: dict[str, int] = {}
        self._stalled_s = STALL_S
        self._whole = False
        self._lock = allocate_lock()
        self._held = False
        self._wake = Bell()
        self._thread: Thread | None = None

    def before_fork(self) -> None:
        """Keep other threads from dumping during a fork; give up waiting for them after a while."""
        self._held = self._lock.acquire(True, STALL_S)

    def after_fork(self) -> None:
        """Let the threads of the parent dump again."""
        if self._held:
            self._lock.release()

    def on_open(self) -> None:
        """Start the thread that dumps the rings, once there is a process group."""
        if self._thread is None and dist.is_initialized():
            with self._lock:
                # Rings read their sizes from the environment as they are first asked for.
                if not self._rings:
                    start = RingProgress(time.monotonic(), 0, -1, 0.0, 1.0, 0)
                    self._rings = rings()
                    self._levels = {ring.name: start for ring in self._rings}
            self._thread = Thread(self._drain, self._wake)

    def on_window(self, _name: str) -> None:
        """A deep window was saved: its collectives are in the flight recorder, too."""
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
        """Save the latest; the thread must not be within PyTorch when the interpreter goes."""
        thread, self._thread = self._thread, None
        wake, self._wake = self._wake, Bell()
        wake.ring()
        self._whole = thread is None or thread.join(STALL_S)
        if self._whole:
            self.save(must=True)

    def on_exit(self) -> None:
        """Note that the dumps are complete: no call follows those that were saved."""
        if self._whole and self._recorder.folder is not None:
            self._recorder.write_file(LAST, b"")

    def save(self, name: str = "", must: bool = False) -> bool:
        """Dump the rings.

        Args:
            must: whether no other occasion follows.

        Returns:
            Whether all could be dumped.
        """
        with self._lock:
            left = self._save(self._rings, name, must)
            # A dump that says nothing new is not written: that nothing changed until now is worth knowing.
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
                    self._show(f"{SHOWN}{ring.name}.json", shortened(content, since))

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
        while self._wake is wake:  # else this thread has been given up, and another may have been started
            asked = wake.wait(self._pause_s)
            if self._wake is wake:
                self._recorder.call(self._look, asked)

    def _look(self, asked: bool) -> None:
        """Dump the rings of which half may be new, and look again before a quarter may be."""
        with self._lock:
            enqueued = self._enqueued()
            full = [ring for ring in self._rings if self._is_half_new(ring, enqueued[ring.name])]
            wanted = [ring for ring in self._rings if ring not in full and (asked or self._is_wanted(ring))]
            self._save(full, must=True)
            self._owed = self._save(wanted)
            rate = max((self._rate(ring, enqueued[ring.name]) for ring in self._rings), default=0.0)
        pause_s = min(self._half / 2 / max(rate, 1.0), 2 * self._pause_s, LONGEST_S)
        self._pause_s = max(pause_s, SHORTEST_S)

    def _enqueued(self) -> dict[str, int]:
        """Calls of each ring so far, without touching a ring or a GPU. Gloo's ring leaves out messages."""
        counts = self.dumps.groups.count()
        counts[NCCL] += self._recorder.num_messages
        return counts

    def _is_half_new(self, ring: Ring, enqueued: int) -> bool:
        level = self._levels[ring.name]
        since_s = time.monotonic() - level.at_s
        # Messages that C++ code sends are counted by the dumps alone.
        return max((enqueued - level.enqueued) * level.calls_per_count, level.rate * since_s) >= self._half

    def _is_wanted(self, ring: Ring) -> bool:
        since_s = time.monotonic() - self._levels[ring.name].at_s
        return ring.name in self._owed or since_s > self._recorder.calls_saved_each_s

    def _rate(self, ring: Ring, enqueued: int) -> float:
        """Calls a second: from the latest dumps, or as the groups count since the latest look."""
        now_s = time.monotonic()
        before_s, before = self._looks.get(ring.name, (now_s, enqueued))
        self._looks[ring.name] = now_s, enqueued
        level = self._levels[ring.name]
        return max(
            level.rate, level.calls_per_count * (enqueued - before) / max(now_s - before_s, SHORTEST_S)
        )

    def _save(self, rings: list[Ring], name: str = "", must: bool = False) -> set[str]:
        """Dump some rings; returns the names of those that have to be left for later."""
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
        """The number of a ring's next dump."""
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
    """Global ranks of each process group by name; gloo's flight recorder lacks them."""
    return {name: sorted(group_ranks(group)) for group, name in group_names().items()}


# PyTorch's rings of calls: which there are, how to dump them, how far they have got.

NCCL, OTHERS = "nccl", "fr"  # rings: gloo and the like share one
SETTLED_S = 5.0  # a group that was not used for this long after it was made is not waited for
WAIT_S = 1.0  # a group is made after this long, whatever we still do
_BACKENDS = {"ProcessGroupNCCL": NCCL, "ProcessGroupGloo": OTHERS}
_MAKERS = ("_new_process_group_helper", "split_group", "shrink_group")
_RECORD = '"record_id":'
_ENTRIES, _UNFINISHED = b'"entries":[', b'"retired":false'


class Ring(NamedTuple):
    """One ring of calls.

    Attributes:
        name: what its dumps are called.
    """

    name: str
    suffix: str
    dump: Callable[[], bytes]


def rings() -> list[Ring]:
    """The rings that this PyTorch has."""
    present = []
    for name in (OTHERS, NCCL):
        pickled = dump_of(name)
        if pickled is not None:
            present.append(_ring(name, pickled))
    return present


def _ring(name: str, pickled: Callable[..., bytes]) -> Ring:
    """A ring that is dumped by PyTorch's handler for its own monitoring, which lets other threads run.

    NCCL's handlers can be called over a socket only, where a thread of PyTorch's asks the GPU that does not
    know which one. Of what is left a pickle holds Python's lock half as long as JSON does.
    """
    by_handler = handler_of(f"{name}_trace_json")
    with suppress(Exception):
        if by_handler is not None and by_handler().startswith(b"{"):
            return Ring(name, ".json", by_handler)
    return Ring(name, ".pickle", functools.partial(pickled, includeStackTraces=False))


class Groups:
    """The process groups as they count their calls, and whether one is being made."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """This is a forked child: it has no groups yet, and locks are its own."""
        self._counts: dict[tuple[str, str], int] = {}  # by ring and group; destroyed ones stay counted
        self._made_s: dict[tuple[str, str], float] = {}
        self._making = 0
        self._since_s = 0.0
        self._changed = Monitor()
        self._busy = 0

    def count(self) -> dict[str, int]:
        """Collectives called so far, by ring: numbers of the process's own, for which no GPU is asked."""
        for key, number in _sequences().items():
            self._made_s.setdefault(key, time.monotonic())
            self._counts[key] = max(number, self._counts.get(key, 0))
        totals = {NCCL: 0, OTHERS: 0}
        for (ring, _), number in self._counts.items():
            totals[ring] += number
        return totals

    def is_settled(self, ring: str) -> bool:
        """Whether each group of a ring, as of the latest count, has been used or was left so for long."""
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
            Whether none is being made, or one for so long that the job hangs there: its calls are wanted, and
            who waits for other ranks changes no list.
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
        """Called before a group is made or destroyed."""
        with self._changed:
            self._making += 1
            self._since_s = time.monotonic()
            self._changed.wait_for(lambda: not self._busy, WAIT_S)

    def on_made(self) -> None:
        """It is, or it could not be."""
        with self._changed:
            self._making -= 1


def _sequences() -> dict[tuple[str, str], int]:
    """Collectives called so far by ring and name of the group; a backend that does not count is left out."""
    counts = {}
    for group, name in group_names().items():
        for backend in backends_of(group):
            number = calls_of(backend)
            if number is not None:
                counts[_BACKENDS.get(type(backend).__name__, OTHERS), name] = number
    return counts


def watch_groups(recorder: Recorder, groups: Groups) -> None:
    """Have it known while groups are made."""
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
    """The GPU that the job's own threads use, for those of ours that ask it something."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def used(self) -> Iterator[bool]:
        """Have this thread work with the job's GPU for a while.

        Yields:
            Whether there is one. A thread that asks without makes itself a context on the first GPU of the
            node, half a gigabyte of which the rank there is short.
        """
        training = self._recorder.training_thread or main_thread_ident()
        if not torch.cuda.is_initialized() or get_ident() == training:
            yield torch.cuda.is_initialized()
            return
        device = self._recorder.device
        is_named = device is not None and device.type == "cuda" and device.index is not None
        devices = [device.index] if is_named else range(torch.cuda.device_count())
        # Parameters lie on the device that is known, even where its context cannot be asked for.
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
        """All that a ring remembers.

        Args:
            must: whether calls may be lost where it is left for later.

        Returns:
            None where it has to be left for later.
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
    """The number of the last call in a dump; -1 where there is none.

    JSON is searched as text: reading 2,000 calls would hold up the job's own threads for some 20 ms.
    """
    if not dump.startswith(b"{"):
        entries = _unpickled(dump).get("entries")
        return int(entries[-1]["record_id"]) if entries else -1
    place = dump.rfind(_RECORD.encode())
    digits = dump[place + len(_RECORD) : place + len(_RECORD) + 20].split(b",")[0].split(b"}")[0]
    return int(digits) if place >= 0 and digits.strip().isdigit() else -1


def shortened(dump: bytes, last: int) -> bytes:
    """A dump as JSON without the calls up to a number, but the last one and those from an unfinished one on.

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
    """What PyTorch just wrote."""
    document: dict[str, Any] = pickle.loads(dump) if dump else {}
    return document
