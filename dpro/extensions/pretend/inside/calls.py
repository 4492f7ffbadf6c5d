"""Each collective call of a pretended rank: its group, its size, its time, and when its result was asked for.

Takes calls as they are answered. Writes `pretendedNNNN.json`, those of a deep window, and `pretended.json`,
the latest others. Times are by the host's clock, as in windows.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from _dpro_inside_the_job.files import PRETENDED
from _dpro_inside_the_job.recorder import Recorder
from _dpro_inside_the_job.torch_internals import group_names, group_ranks, is_profiling

MAX_CALLS = 65536  # calls kept of a window, and outside windows


class Members(NamedTuple):
    """A process group.

    Attributes:
        ranks: global ranks of its members, in its own order.
    """

    name: str
    ranks: Sequence[int]


class Calls:
    """The collective calls of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._groups: dict[str, Members] = {}
        self._used: dict[str, Sequence[int]] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._in_window: deque[dict[str, Any]] = deque(maxlen=MAX_CALLS)
        self._others: deque[dict[str, Any]] = deque(maxlen=MAX_CALLS)

    def members(self, group: Any) -> Members:
        """Return the members of a process group."""
        name = group.group_name
        if name not in self._groups:
            for other, its_name in group_names().items():
                places = group_ranks(other)
                ranks = sorted(places, key=lambda rank: places[rank])
                self._groups[its_name] = Members(its_name, ranks)
        return self._groups.get(name) or Members(name, range(group.size()))

    def begin(
        self, op: str, of: Members, given: Sequence[Any], got: Sequence[Any], peer: int
    ) -> dict[str, Any]:
        """Record that a call has begun.

        Args:
            peer: the other global rank of a message; -1 for none.

        Returns:
            The call; its end and when it was asked for are filled in later.
        """
        key = (of.name, op, str(peer)) if op in ("send", "recv") else (of.name,)
        self._counts[key] += 1
        self._used[of.name] = of.ranks
        first = next(iter([*given, *got]), None)
        call = {
            "op": op,
            "group": of.name,
            "sequence": self._counts[key],
            "bytes_in": 0 if op == "recv" else sum(tensor.nbytes for tensor in given),
            "bytes_out": 0 if op == "send" else sum(tensor.nbytes for tensor in got),
            "dtype": "" if first is None else str(first.dtype).removeprefix("torch."),
            "peer": peer,
            "begun_ns": time.time_ns(),
            "ended_ns": -1,
            "asked_ns": -1,
            "future": False,
        }
        (self._in_window if is_profiling() else self._others).append(call)
        return call

    def on_window(self, name: str) -> None:
        """Save the calls of a deep window that was saved."""
        calls, self._in_window = self._in_window, deque(maxlen=MAX_CALLS)
        self._save(f"{name.replace('window', PRETENDED)}.json", calls)

    def save(self) -> None:
        """Save the calls outside windows."""
        if self._recorder.folder is not None:
            self._save(f"{PRETENDED}.json", self._others)

    def _save(self, name: str, calls: deque[dict[str, Any]]) -> None:
        used = {call["group"]: list(self._used[call["group"]]) for call in calls}
        self._recorder.write_file(name, json.dumps({"groups": used, "calls": list(calls)}).encode())
