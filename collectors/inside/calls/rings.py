"""PyTorch's rings of calls: which there are, how to dump them, how far they have got.

In: the flight recorder of each backend. Out: dumps as PyTorch writes them, and counts of calls that are read
from the groups themselves. A dump of NCCL's asks the GPU about unfinished calls and reads lists of groups
without a lock. So it is made only by a thread that works with the job's own GPU, while nothing is captured
and no group is being made.
"""

from __future__ import annotations

import functools
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import captures
from ..recorder import Recorder
from ..torch_internals import backends_of, calls_of, dump_of, group_names, handler_of, has_context

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
        suffix: of its dumps.
        dump: all it remembers.
    """

    name: str
    suffix: str
    dump: Callable[[], bytes]


def rings() -> list[Ring]:
    """The rings that this PyTorch has."""
    found = []
    for name in (OTHERS, NCCL):
        pickled = dump_of(name)
        if pickled is not None:
            found.append(_ring(name, pickled))
    return found


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
        """No group is known yet."""
        self.forget()

    def forget(self) -> None:
        """This is a forked child: it has no groups yet, and locks are its own."""
        self._counts: dict[tuple[str, str], int] = {}  # by ring and group; destroyed ones stay counted
        self._made_s: dict[tuple[str, str], float] = {}
        self._making = 0
        self._since_s = 0.0
        self._changed = threading.Condition()
        self._busy = 0

    def count(self) -> dict[str, int]:
        """Collectives called so far, by ring: numbers of the process's own, for which no GPU is asked."""
        for key, number in _sequences().items():
            self._made_s.setdefault(key, time.monotonic())
            self._counts[key] = max(number, self._counts.get(key, 0))
        found = {NCCL: 0, OTHERS: 0}
        for (ring, _), number in self._counts.items():
            found[ring] += number
        return found

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
                    self._changed.notify_all()

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
    found = {}
    for group, name in group_names().items():
        for backend in backends_of(group):
            number = calls_of(backend)
            if number is not None:
                found[_BACKENDS.get(type(backend).__name__, OTHERS), name] = number
    return found


def watch_groups(recorder: Recorder, groups: Groups) -> None:
    """Have it known while groups are made.

    Args:
        recorder: its `call` keeps what fails in `groups` from the job.
        groups: is called before and after each group is made.
    """
    from torch.distributed import device_mesh, distributed_c10d

    def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            recorder.call(groups.on_making)
            try:
                return original(*args, **kwargs)
            finally:
                recorder.call(groups.on_made)

        return watched

    for name in _MAKERS:
        original = getattr(distributed_c10d, name, None)
        if original is not None:
            watched = _watched(original)
            for module in (distributed_c10d, dist, device_mesh):
                if getattr(module, name, None) is original:
                    setattr(module, name, watched)


class JobDevice:
    """The GPU that the job's own threads use, for those of ours that ask it something."""

    def __init__(self, recorder: Recorder) -> None:
        """It is not known yet."""
        self._recorder = recorder

    @contextmanager
    def used(self) -> Iterator[bool]:
        """Have this thread work with the job's GPU for a while.

        Yields:
            Whether there is one. A thread that asks without makes itself a context on the first GPU of the
            node, half a gigabyte of which the rank there is short.
        """
        training = self._recorder.training_thread or threading.main_thread().ident
        if not torch.cuda.is_initialized() or threading.get_ident() == training:
            yield torch.cuda.is_initialized()
            return
        device = self._recorder.device
        known = device is not None and device.type == "cuda" and device.index is not None
        devices = [device.index] if known else range(torch.cuda.device_count())
        # Parameters lie on the device that is known, even where its context cannot be asked for.
        in_use = [each for each in devices if (known if (has := has_context(each)) is None else has)]
        if not in_use:
            yield False
            return
        with torch.cuda.device(in_use[0]):
            yield True


class RingDumper:
    """Dumps of rings, made only while they do no harm."""

    def __init__(self, recorder: Recorder) -> None:
        """No group is known yet."""
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
            with self.device.used() as known:
                return ring.dump() if known else None


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
        return _shortened_pickle(dump, last)
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


def _shortened_pickle(dump: bytes, last: int) -> bytes:
    document = _unpickled(dump)
    entries = document.get("entries", ())
    kept = (n for n, each in enumerate(entries) if each["record_id"] > last or not each.get("retired"))
    first = next(kept, max(len(entries) - 1, 0))
    return json.dumps({**document, "entries": list(entries[first:])}).encode()


def _unpickled(dump: bytes) -> dict[str, Any]:
    """What PyTorch just wrote."""
    document: dict[str, Any] = pickle.loads(dump) if dump else {}
    return document
