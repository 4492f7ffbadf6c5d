"""PyTorch's flight recorder: every collective call, as the process group knows it.

In: the occasions on which it is worth a dump. Out: `flight-BACKEND-OCCASION.pickle`, and `groups.json` with
the ranks of each process group, which gloo's dumps do not tell.
"""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from .recorder import Recorder

STALL_S = 5.0  # after this long without a step the flight recorder is saved: the job may hang


class Flight:
    """The flight recorder's dumps of one process."""

    def __init__(self, recorder: Recorder) -> None:
        """Nothing is dumped yet."""
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """This is a forked child: it has no groups yet."""
        self._groups: dict[str, list[int]] = {}
        self._saved_s = 0.0

    def on_window(self, name: str) -> None:
        """A deep window was saved: its collectives are in the flight recorder, too."""
        self.save(name)

    def on_second(self) -> None:
        """Save it while nothing moves."""
        now_s = time.monotonic()
        if min(now_s - self._recorder.last_step_s, now_s - self._saved_s) > STALL_S:
            self.save("stall")
            self._saved_s = now_s

    def on_end(self) -> None:
        """Save the latest."""
        self.save("end")

    def save(self, occasion: str) -> None:
        """Save the flight recorders: gloo and the like share one, NCCL has its own."""
        if not dist.is_available():
            return
        self._groups |= _groups()  # destroyed groups stay known
        self._recorder.write_file("groups.json", json.dumps(self._groups).encode())
        c10d = torch._C._distributed_c10d
        for backend in ("fr", "nccl"):
            dump = getattr(c10d, f"_dump_{backend}_trace", None)
            if dump is not None:
                name = f"flight-{backend}-{occasion}.pickle"
                self._recorder.write_file(name, dump(includeStackTraces=False))


def install(recorder: Recorder) -> None:
    """Save the flight recorder."""
    flight = Flight(recorder)
    recorder.listen("window", flight.on_window)
    recorder.listen("second", flight.on_second)
    recorder.listen("end", flight.on_end)
    recorder.listen("fork", flight.on_fork)


def _groups() -> dict[str, list[int]]:
    """Global ranks of each process group by name; gloo's flight recorder does not tell them."""
    world = dist.distributed_c10d._world
    return {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}
