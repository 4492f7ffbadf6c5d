"""Messages of gloo, and the calls in which a process is stalled.

Reads sends and receives on CPU tensors, which gloo's flight recorder omits. Writes `messagesNNNN.json`, the
messages of a deep window; and `stall.json`, while no step ends: the latest message of each pair, all that are
not delivered, and the stack of the main thread. A process that fails saves it once more, unless it did since
its last step: the call that fails at the end is not the one that it waited for.
"""

from __future__ import annotations

import functools
import json
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from ..patching import patch
from ..recorder import Recorder
from ..threads import main_thread_ident
from ..torch_internals import group_names, group_ranks, internal, is_profiling
from ..tracebacks import OURS, stacks
from ..unseen import bytes_of, device_of, dtype_of, parts_of
from .flight import STALL_S

PENDING = 256  # messages that are remembered until they are delivered; the oldest are forgotten
MAX_MESSAGES = 65536  # messages of a window that are kept


class Stalls:
    """The messages of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """Start without messages in a forked child."""
        self._pending: deque[tuple[Any, dict[str, Any]]] = deque(maxlen=PENDING)
        self._in_window: deque[dict[str, Any]] = deque(maxlen=MAX_MESSAGES)
        self._latest: dict[tuple[str, str, int], tuple[Any, dict[str, Any]]] = {}
        self._counts: dict[tuple[str, str, int], int] = {}
        self._saved_s = 0.0
        self._open: set[tuple[str, str, int, int]] = set()  # messages that were open at the previous save

    def on_message(self, op: str, group: Any, work: Any, tensors: Any, peer: int) -> None:
        """Record a message that was begun; on a GPU, only count it."""
        tensor = parts_of(tensors)[0]
        device = device_of(tensor)
        if device is None or device.type != "cpu":
            self._recorder.num_messages += 1
            return
        if work is None:
            return
        key = (op, group.group_name, peer)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        message = {
            "op": op,
            "group": group.group_name,
            "peer": peer,
            "sequence": count,
            "bytes": bytes_of(tensor),
            "dtype": dtype_of(tensor),
            "enqueued_ns": time.time_ns(),
        }
        self._latest[key] = entry = (weakref.ref(work), message)  # keeps no object of the job alive
        self._pending.append(entry)
        if is_profiling():
            self._in_window.append(message)

    def on_coalesced(self) -> None:
        """Count a coalesced message: the flight recorder has an entry for that, too."""
        self._recorder.num_messages += 1

    def on_window(self, name: str) -> None:
        """Save the messages of a deep window that was saved."""
        messages, self._in_window = self._in_window, deque(maxlen=MAX_MESSAGES)
        if messages:
            saved = {"groups": _groups_of(messages), "messages": list(messages)}
            path = f"{name.replace('window', 'messages')}.json"
            self._recorder.write_file(path, json.dumps(saved).encode())

    def on_second(self) -> None:
        """Save while no step ends, except while the process ends, which changes the open messages."""
        if self._recorder.ending:
            return
        now_s = time.monotonic()
        if min(now_s - self._recorder.last_step_s, now_s - self._saved_s) > STALL_S:
            self.save()
            self._saved_s = now_s

    def on_end(self) -> None:
        """Save before a failing process ends, unless its stall was saved already."""
        if self._recorder.ending == "exception" and self._saved_s <= self._recorder.last_step_s:
            self.save()

    def save(self) -> None:
        """Write the latest messages, those not delivered, and the main thread's stack.

        A waiting thread holds the message's handle: a message without a handle was delivered, or has failed.
        Its state is `closed` if it was open at the previous save, else `completed`.
        """
        pending = [
            message | {"state": "scheduled"} for work, message in tuple(self._pending) if _is_open(work)
        ]
        waiting = {_name_of(message) for message in pending}
        latest = [
            message | {"state": "closed" if _name_of(message) in self._open else "completed"}
            for _, message in tuple(self._latest.values())
            if _name_of(message) not in waiting
        ]
        self._open = waiting | {_name_of(message) for message in latest if message["state"] == "closed"}
        stall = {
            "saved_ns": time.time_ns(),
            "groups": _groups_of([*latest, *pending]),
            "messages": [*latest, *pending],
            "stack": _main_stack(),
        }
        self._recorder.write_file("stall.json", json.dumps(stall).encode())


def _name_of(message: dict[str, Any]) -> tuple[str, str, int, int]:
    return message["op"], message["group"], message["peer"], message["sequence"]


def _is_open(work: Any) -> bool:
    """Return whether the message's handle still exists and is not completed."""
    held = work()
    return held is not None and not held.is_completed()


def _groups_of(messages: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the global ranks of the groups of some messages, in the order of each group."""
    used = {message["group"] for message in messages}
    return {
        name: sorted(places, key=places.__getitem__)
        for group, name in group_names().items()
        if name in used and (places := group_ranks(group))
    }


def _main_stack() -> list[str]:
    """Return the calls of the main thread without ours, innermost first: `file:line function`."""
    main = main_thread_ident()
    frames = next((stack.frames for stack in stacks() if stack.ident == main), [])
    calls = [f"{frame['file']}:{frame['line']} {frame['function']}" for frame in frames]
    return [call for call in calls if not call.startswith(OURS)]


def install(recorder: Recorder) -> None:
    """Remember messages, and save them and the stack while the process is stalled."""
    stalls = Stalls(recorder)
    recorder.listen("window", stalls.on_window)
    recorder.listen("second", stalls.on_second)
    recorder.listen("end", stalls.on_end)
    recorder.listen("fork", stalls.on_fork)
    if dist.is_available():
        for op in ("send", "recv"):
            _patch(recorder, stalls, op)
        if internal("torch.distributed.ProcessGroup._end_coalescing") is not None:
            patch(dist.ProcessGroup, "_end_coalescing", before=lambda *_: recorder.call(stalls.on_coalesced))


def _patch(recorder: Recorder, stalls: Stalls, op: str) -> None:
    """Record each message; the group's return value is passed on unchanged."""
    owner = dist.ProcessGroup
    original = getattr(owner, op)

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        if len(args) > 1:
            recorder.call(stalls.on_message, op, self, work, args[0], args[1])
        return work

    functools.update_wrapper(patched, original, updated=())
    setattr(owner, op, patched)
