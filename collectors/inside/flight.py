"""PyTorch's flight recorder: every collective call, as the process groups know it.

In: the ring of the latest calls, which PyTorch keeps. Out: `flight-BACKEND-NNNN.*`, dumps that overlap so
that no call is lost between them, and `groups.json` with the ranks of each process group, which gloo's dumps
do not tell. A thread of ours dumps whenever half of the ring may be new. Who watches from outside touches
`wanted.json` beside the folders of the launches: then `calls-BACKEND.*` have what came since the last request
but one, and all that is unfinished.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .names import LAST, SHOWN, STALL, WANTED
from .recorder import Recorder

STALL_S = 5.0  # after this long without a step the calls are saved: the job may hang
IDLE_S = 60.0  # calls are saved at least so often, so that a kill loses little
SHORTEST_S, LONGEST_S = 0.02, 1.0  # between two looks at how far the ring has got
RING = 2000  # what PyTorch remembers unless told otherwise
LATEST = 300  # calls that are shown at least of a job that does not move, and the first time
WAITING = 64  # dumps that nobody has converted yet: from then on the latest takes the place of the one before
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORD = '"record_id":'
_ENTRIES, _UNFINISHED = b'"entries":[', b'"retired":false'


class Ring(NamedTuple):
    """One backend's ring of calls.

    Attributes:
        name: what its dumps are called: gloo and the like share one, NCCL has its own.
        suffix: of its dumps.
        dump: all it remembers.
        enqueued: how many collectives have been called; sends and receives may be missing.
    """

    name: str
    suffix: str
    dump: Callable[[], bytes]
    enqueued: Callable[[], int]


class Level(NamedTuple):
    """How far a ring had got at a dump.

    Attributes:
        at_s: when, on the monotonic clock.
        enqueued: calls as its counters tell.
        last: number of the last call in the dump, -1 where not told.
        rate: calls a second since the dump before.
        digest: of the dump.
    """

    at_s: float
    enqueued: int
    last: int
    rate: float
    digest: int


class Flight:
    """The flight recorder's dumps of one process."""

    def __init__(self, recorder: Recorder) -> None:
        """Nothing is dumped yet."""
        self._recorder = recorder
        self._half = _ring_size() // 2
        self._wanted = recorder.launch.parent / WANTED
        self.on_fork()

    def on_fork(self) -> None:
        """This is a forked child: it has no groups yet."""
        self._rings = _rings()
        start = Level(time.monotonic(), 0, -1, 0.0, 0)
        self._levels = {ring.name: start for ring in self._rings}
        self._looks: dict[str, tuple[float, int]] = {}  # when, and the calls that the counters told
        self._pause_s = SHORTEST_S
        self._counts: dict[str, int] = {}
        self._groups: dict[str, list[int]] = {}
        self._shown = stamp_of(self._wanted)
        self._told: dict[str, tuple[int, int]] = {}  # the last call at the last request but one, and the last
        self._said: dict[str, int] = {}
        self._stalled_s = STALL_S
        self._whole = False
        self._lock = threading.Lock()
        self._held = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def before_fork(self) -> None:
        """Keep other threads from dumping, as far as they let us."""
        self._held = self._lock.acquire(timeout=STALL_S)

    def after_fork(self) -> None:
        """This is the parent: go on."""
        if self._held:
            self._lock.release()

    def on_open(self) -> None:
        """There is a process group: a thread looks after the ring."""
        if self._thread is None and dist.is_initialized():
            self._thread = threading.Thread(target=self._drain, name="dpro-flight", daemon=True)
            self._thread.start()

    def on_step(self, _step: int) -> None:
        """A step has ended, perhaps the first since a process group was made anew."""
        if self._thread is None:
            self.on_open()

    def on_window(self, _name: str) -> None:
        """A deep window was saved: its collectives are in the flight recorder, too."""
        self._wake.set()

    def on_second(self) -> None:
        """Save the calls of a job that does not move, ever more rarely; show them if asked to."""
        stamp = stamp_of(self._wanted)
        if stamp != self._shown:
            self._shown = stamp
            self.show()
        still_s = time.monotonic() - self._recorder.last_step_s
        if still_s < STALL_S:
            self._stalled_s = STALL_S
        elif still_s > self._stalled_s:
            self._stalled_s *= 2
            self.save(STALL)

    def on_end(self) -> None:
        """Save the latest; the thread must not be within PyTorch when the interpreter goes."""
        thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join(timeout=STALL_S)
        self._whole = thread is None or not thread.is_alive()
        if self._whole:
            self.save()

    def on_exit(self) -> None:
        """The interpreter goes: no call comes after those that were saved."""
        if self._whole and self._recorder.folder is not None:
            self._recorder.write_file(LAST, b"")

    def save(self, name: str = "") -> None:
        """Dump the rings.

        Args:
            name: of the dumps, which then replace the ones before of that name.
        """
        with self._lock:
            self._save(self._rings, name)
            # A dump that says nothing new is not written: that nothing changed until now is worth knowing.
            self._recorder.write_file("checked", str(time.time_ns()).encode())

    def show(self) -> None:
        """Dump the rings for who watches; what is dumped for the record, and when, does not change by it.

        There may be a thousand of us: only what is new is written.
        """
        still = time.monotonic() - self._recorder.last_step_s >= STALL_S
        with self._lock:
            self._save_groups()
            for ring in self._rings:
                content = ring.dump()
                last = last_record(content)
                before, latest = self._told.get(ring.name, (last - LATEST, last - LATEST))
                self._told[ring.name] = latest, last
                since = min(before, last - LATEST) if still else before
                with suppress(OSError):  # on a full disk only who watches misses something
                    self._show(f"{SHOWN}{ring.name}{ring.suffix}", shortened(content, since))

    def _show(self, name: str, content: bytes) -> None:
        """Write a dump for who watches; where it says what the one before said, only when that was.

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
            self._save([ring for ring in self._rings if asked or self._is_due(ring)])
            rate = max(self._rate(ring) for ring in self._rings)
        pause_s = min(self._half / 2 / max(rate, 1.0), 2 * self._pause_s, LONGEST_S)
        self._pause_s = max(pause_s, SHORTEST_S)

    def _is_due(self, ring: Ring) -> bool:
        level = self._levels[ring.name]
        since_s = time.monotonic() - level.at_s
        new = max(ring.enqueued() - level.enqueued, level.rate * since_s)  # counters miss sends and receives
        return new >= self._half or since_s > IDLE_S

    def _rate(self, ring: Ring) -> float:
        """Calls a second: as the latest dumps told, or as the counters say since the latest look."""
        now_s, enqueued = time.monotonic(), ring.enqueued()
        before_s, before = self._looks.get(ring.name, (now_s, enqueued))
        self._looks[ring.name] = now_s, enqueued
        return max(self._levels[ring.name].rate, (enqueued - before) / max(now_s - before_s, SHORTEST_S))

    def _save(self, rings: list[Ring], name: str = "") -> None:
        if rings:
            self._save_groups()
        for ring in rings:
            self._save_ring(ring, name)

    def _save_groups(self) -> None:
        groups = self._groups | _groups()  # destroyed groups stay known
        if groups != self._groups:
            self._groups = groups
            self._recorder.write_file("groups.json", json.dumps(groups).encode())

    def _save_ring(self, ring: Ring, name: str) -> None:
        now_s, enqueued, before = time.monotonic(), ring.enqueued(), self._levels[ring.name]
        content = ring.dump()
        last, digest = last_record(content), hash(content)
        if digest != before.digest:
            name = f"flight-{ring.name}-{name or self._next(ring)}{ring.suffix}"
            self._recorder.write_file(name, content)
        new = last - before.last if last >= 0 else enqueued - before.enqueued
        rate = new / max(now_s - before.at_s, SHORTEST_S)
        self._levels[ring.name] = Level(now_s, enqueued, last, rate, digest)

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


def stamp_of(path: Path) -> tuple[int, int]:
    """Changes when a file is made or replaced."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


def _rings() -> list[Ring]:
    """The rings that this PyTorch has."""
    found = []
    for name in ("fr", "nccl"):
        pickled = getattr(torch._C._distributed_c10d, f"_dump_{name}_trace", None)
        if pickled is not None:
            dump, suffix = _dump_of(name, pickled)
            found.append(Ring(name, suffix, dump, functools.partial(_enqueued, pickled)))
    return found


def _dump_of(name: str, pickled: Callable[..., bytes]) -> tuple[Callable[[], bytes], str]:
    """How to dump a ring: by PyTorch's handler for its own monitoring, which lets other threads run."""
    by_handler = _handler(f"{name}_trace_json")
    with suppress(Exception):
        if by_handler is not None and by_handler().startswith(b"{"):
            return by_handler, ".json"
    return lambda: pickled(includeStackTraces=False), ".pickle"


def _handler(name: str) -> Callable[[], bytes] | None:
    c10d = torch._C._distributed_c10d
    if name not in getattr(c10d, "_get_handler_names", list)():
        return None

    class Answer(c10d._Response):  # type: ignore[misc, name-defined]
        def set_content(self, content: str, _type: str) -> None:
            self.content = content

        def set_status(self, _status: int) -> None:
            pass

    def dump() -> bytes:
        answer = Answer()
        c10d._get_handler(name)(c10d._Request(), answer)
        return bytes(answer.content.encode())

    return dump


def _enqueued(pickled: Callable[..., bytes]) -> int:
    """Collectives called so far, of all groups together."""
    status = pickle.loads(
        pickled(includeCollectives=False, includeStackTraces=False)
    )  # what PyTorch just wrote
    counts = [group.get("last_enqueued_collective", 0) for group in status.get("pg_status", {}).values()]
    return sum(count for count in counts if count > 0)


def last_record(dump: bytes) -> int:
    """The number of the last call in a dump; -1 where there is none, or it is not told as text."""
    place = dump.rfind(_RECORD.encode())
    digits = dump[place + len(_RECORD) : place + len(_RECORD) + 20].split(b",")[0].split(b"}")[0]
    return int(digits) if place >= 0 and digits.strip().isdigit() else -1


def shortened(dump: bytes, last: int) -> bytes:
    """A dump in JSON without the calls up to a number, but the last one and those from an unfinished one on.

    It is cut as text: reading 2,000 calls would hold up the job's own threads for some 20 ms.
    """
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


def _ring_size() -> int:
    sizes = [os.environ.get(name, "") for name in _SIZES]
    return next((int(size) for size in sizes if size.isdigit() and int(size) > 1), RING)


def _groups() -> dict[str, list[int]]:
    """Global ranks of each process group by name; gloo's flight recorder does not tell them."""
    world: Any = dist.distributed_c10d._world
    return {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}
