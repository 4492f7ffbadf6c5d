"""What a command does at the moment, and how far it is, for whoever waits for it.

In: names of stages, and how many parts each has. Out: a function that counts one more as done. Nothing is
shown here: a command says how (`shown_by`), and threads and processes that it starts show nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import count

Progress = Callable[[int, int], None]  # what is done, and of how much
Show = Callable[[str], AbstractContextManager[Progress]]
_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)


def ignore(*_: int) -> None:
    """Leave it unseen."""


def shown_by(show: Show) -> None:
    """From now on the stages of this thread are shown.

    Args:
        show: shows a name while it is entered, in place of those that are entered already.
    """
    _SHOW.set(show)


@contextmanager
def stage(name: str) -> Iterator[Progress]:
    """What is done inside has a name; call what is yielded with what is done, and of how much."""
    show = _SHOW.get()
    if show is None:
        yield ignore
        return
    with show(name) as report:
        yield report


def counted(total: int, report: Progress) -> Callable[[], None]:
    """Return a function that reports one more part as done.

    Args:
        report: called with how many are done, and how many there are.
    """
    numbers = count(1)
    report(0, total)
    return lambda: report(next(numbers), total)
