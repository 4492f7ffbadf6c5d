"""Escaping of names from traces for figures and CSV files.

Plotly interprets a subset of HTML in its texts: a kernel called `<b>` would turn text bold, and a name could
contain a link. Text of the page itself needs no escaping, since it is never parsed as HTML.
"""

from __future__ import annotations

from collections.abc import Iterable

from dpro.words import shortened

LONGEST = 90  # characters of a name that a figure shows
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # first characters of a formula in spreadsheets
_SPACE = ("\t", "\r", "\n")  # leading ones, which spreadsheets ignore


def plain(name: object) -> str:
    """Escape a name so that a figure shows it literally."""
    return shortened(str(name), LONGEST).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def plain_all(names: Iterable[object]) -> list[str]:
    """Apply `plain` to each name."""
    return [plain(name) for name in names]


def in_cell(text: str) -> str:
    """Escape a name in a CSV file so that no spreadsheet evaluates it as a formula."""
    return f"'{text}" if text.lstrip().startswith(_FORMULA) or text.startswith(_SPACE) else text
