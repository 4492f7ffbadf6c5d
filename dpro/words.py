"""Text that has to be short: long names are cut, long lists name the first."""

from __future__ import annotations

from collections.abc import Sequence

_MORE = "…"


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters; what is cut off is marked: `ncclDevKernel_AllRed…`."""
    return text if len(text) <= most else text[: most - 1] + _MORE


def few(items: Sequence[object], most: int) -> str:
    """The first so many of a list, and whether there are more: `0, 3, 5 …`."""
    return ", ".join(map(str, items[:most])) + (f" {_MORE}" if len(items) > most else "")
