"""Progress of a command: the current stage, and how much of it is done.

Takes names of stages and numbers of parts; returns functions that report progress. Displays nothing itself: a
command sets the display with `set_display`, and threads and processes that it starts have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import count

Progress = Callable[[int, int], None]  # parts done, and parts in total
Show = Callable[[str], AbstractContextManager[Progress]]
_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)


def ignore(*_: int) -> None:
    """Discard progress."""


def set_display(show: Show) -> None:
    """Set the display of this thread's stages from now on.

    Args:
        show: context that displays a stage's name while entered, in place of enclosing stages.
    """
    _SHOW.set(show)


@contextmanager
def stage(name: str) -> Iterator[Progress]:
    """Name the work inside the block; yield a function to call with the parts done and in total."""
    show = _SHOW.get()
    if show is None:
        yield ignore
        return
    with show(name) as report:
        yield report


def progress_counter(total: int, report: Progress) -> Callable[[], None]:
    """Return a function that reports one more part as done.

    Args:
        report: called with the number of parts done, first 0, and `total`.
    """
    numbers = count(1)
    report(0, total)
    return lambda: report(next(numbers), total)
