"""PyTorch's flight recorder: every collective call of each process group.

In: the ring of the latest calls, which PyTorch keeps. Out: `flight-BACKEND-NNNN.*`, dumps that overlap so
that no call is lost between them, and `groups.json` with the ranks of each process group, which gloo's dumps
lack. A thread of ours dumps whenever half of the ring may be new. Collectives within a CUDA graph
are recorded neither when the graph is captured nor when it is replayed. An observer outside the job touches
`wanted.json` beside the folders of the launches: then `calls-BACKEND.*` have what came since the last request
but one, and all that is unfinished.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from ..files import stamp_of
from ..names import LAST, SHOWN, STALL, WANTED
from ..recorder import Recorder
from ..torch_internals import group_names, group_ranks
from . import coverage
from .rings import NCCL, Ring, RingDumper, last_record, rings, shortened, watch_groups

STALL_S = 5.0  # after this long without a step the calls are saved: the job may hang
IDLE_S = 60.0  # calls are saved at least so often, so that a kill loses little
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
        each: calls in the dump for each that was counted since the dump before, 1 at least.
        digest: of the dump.
    """

    at_s: float
    enqueued: int
    last: int
    rate: float
    each: float
    digest: int


class Flight:
    """The flight recorder's dumps of one process."""

    def __init__(self, recorder: Recorder) -> None:
        """Nothing is dumped yet."""
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
        self._lock = threading.Lock()
        self._held = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def before_fork(self) -> None:
        """Keep other threads from dumping during a fork; give up waiting for them after a while."""
        self._held = self._lock.acquire(timeout=STALL_S)

    def after_fork(self) -> None:
        """Let the threads of the parent dump again."""
        if self._held:
            self._lock.release()

    def on_open(self) -> None:
        """Start the thread that dumps the rings, once there is a process group."""
        if self._thread is None and dist.is_initialized():
            with self._lock:
                self._begin()
            self._thread = threading.Thread(target=self._drain, name="dpro-flight", daemon=True)
            self._thread.start()

    def _begin(self) -> None:
        """Find the rings, which read their sizes from the environment as they are first asked for."""
        if not self._rings:
            start = RingProgress(time.monotonic(), 0, -1, 0.0, 1.0, 0)
            self._rings = rings()
            self._levels = {ring.name: start for ring in self._rings}

    def on_step(self, _step: int) -> None:
        """Begin to watch the rings, if this is the first step since a process group was made."""
        if self._thread is None:
            self.on_open()

    def on_window(self, _name: str) -> None:
        """A deep window was saved: its collectives are in the flight recorder, too."""
        self._wake.set()

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
        self._wake.set()
        if thread is not None:
            thread.join(timeout=STALL_S)
        self._whole = thread is None or not thread.is_alive()
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

    def _drain(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            self._wake.wait(self._pause_s)
            asked = self._wake.is_set()
            self._wake.clear()
            if self._thread is me:
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
        found = self.dumps.groups.count()
        found[NCCL] += self._recorder.num_messages
        return found

    def _is_half_new(self, ring: Ring, enqueued: int) -> bool:
        level = self._levels[ring.name]
        since_s = time.monotonic() - level.at_s
        # Messages that C++ code sends are counted by the dumps alone.
        return max((enqueued - level.enqueued) * level.each, level.rate * since_s) >= self._half

    def _is_wanted(self, ring: Ring) -> bool:
        return ring.name in self._owed or time.monotonic() - self._levels[ring.name].at_s > IDLE_S

    def _rate(self, ring: Ring, enqueued: int) -> float:
        """Calls a second: from the latest dumps, or as the groups count since the latest look."""
        now_s = time.monotonic()
        before_s, before = self._looks.get(ring.name, (now_s, enqueued))
        self._looks[ring.name] = now_s, enqueued
        level = self._levels[ring.name]
        return max(level.rate, level.each * (enqueued - before) / max(now_s - before_s, SHORTEST_S))

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
        each = max(new / max(enqueued - before.enqueued, 1), 1.0)
        self._levels[ring.name] = RingProgress(now_s, enqueued, last, rate, each, digest)
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
    recorder.listen("step", flight.on_step)
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
