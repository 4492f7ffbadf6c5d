"""The user's own profilers: our windows give way to them.

In: profilers as they are prepared, start and end. Out: whether one is there. A schedule's warm-up prepares a
profiler some steps before it starts: PyTorch reports none as active meanwhile, but ends the process if that
one starts while another runs, or after another has run, which undoes preparations.
"""

from __future__ import annotations

import weakref

from torch.autograd.profiler import profile

from ..torch_internals import is_profiling, prepare_profiler

FORGOTTEN = 500  # steps after which a profiler that was prepared and has not started counts as abandoned


class UserProfilers:
    """The profilers of the user, from when they are prepared until they end or are deleted."""

    def __init__(self) -> None:
        """Start without profilers."""
        self._prepared: weakref.WeakKeyDictionary[profile, int] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakSet[profile] = weakref.WeakSet()
        self._undone: weakref.WeakSet[profile] = weakref.WeakSet()

    def prepare(self, profiler: profile, step: int) -> None:
        """Note a profiler that will be prepared now.

        Args:
            profiler: the user's profiler.
        """
        self._prepared[profiler] = step
        self._undone.discard(profiler)

    def end(self, profiler: profile) -> None:
        """Forget a profiler that will stop now."""
        self._prepared.pop(profiler, None)
        self._running.discard(profiler)

    def end_all(self) -> None:
        """Forget the running profilers: Kineto was stopped without calling them."""
        self._running.clear()

    def are_there(self, step: int) -> bool:
        """Whether one runs, or is prepared and not abandoned, when `step` steps have ended."""
        prepared = any(step - since < FORGOTTEN for since in self._prepared.values())
        return prepared or bool(self._running) or is_profiling()

    def override(self) -> None:
        """Note that all prepared profilers lose their preparation: a window will be opened now."""
        self._undone.update(self._prepared)

    def start(self, profiler: profile) -> None:
        """Note a profiler that starts now while no other runs; prepare it again if a window undid that."""
        if profiler in self._undone:
            prepare_profiler(profiler)
        self._prepared.pop(profiler, None)
        self._running.add(profiler)
