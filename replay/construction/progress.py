"""How far a graph has been built, for whoever waits for it.

In: how many parts there are. Out: a function that counts one more as done. Nothing is shown here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

Progress = Callable[[int, int], None]  # what is done, and of how much


def ignore(*_: int) -> None:
    """Leave it unseen."""


def counted(total: int, report: Progress) -> Callable[[], None]:
    """Return a function that reports one more part as done.

    Args:
        report: called with how many are done, and how many there are.
    """
    numbers = count(1)
    report(0, total)
    return lambda: report(next(numbers), total)
