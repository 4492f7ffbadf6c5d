"""Names from traces, made safe to be shown in figures.

Figures read a small HTML in their texts: a kernel called `<b>` would be bold, and a link would be one. Text
of the page itself needs none of this, since it is never parsed.
"""

from __future__ import annotations

from collections.abc import Iterable

from dpro.words import shortened

LONGEST = 90  # characters of a name that a figure shows
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # how one begins, for spreadsheets
_SPACE = ("\t", "\r", "\n")  # they skip it


def plain(name: object) -> str:
    """A name that a figure shows letter by letter."""
    return shortened(str(name), LONGEST).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def plain_all(names: Iterable[object]) -> list[str]:
    """`plain` for each."""
    return [plain(name) for name in names]


def in_cell(text: str) -> str:
    """A name in a CSV file that no spreadsheet takes for a formula."""
    return f"'{text}" if text.lstrip().startswith(_FORMULA) or text.startswith(_SPACE) else text
