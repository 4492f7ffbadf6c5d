"""Edits as text: `heal:rank=1`, `network:bandwidth=2`, `scale:name=aten::mm,factor=0.5`.

In: what the user typed. Out: an edit, or one line that names the nearest thing that exists.
"""

from __future__ import annotations

from shlex import shlex

from dpro.errors import UsageError
from dpro.replay.whatif.edit import Edit, keys_of, make, nearest
from dpro.replay.whatif.registry import EDITS


def parse_edit(text: str) -> Edit:
    """Make an edit from its text.

    Raises:
        UsageError: no such edit or key (with the nearest one), or a value that is not what it should be.
    """
    name, _, rest = text.strip().partition(":")
    if name not in EDITS:
        raise UsageError(f"no edit {name!r}{nearest(name, EDITS)}; there are {', '.join(EDITS)}")
    cls = EDITS[name]
    keys = keys_of(cls)
    values: dict[str, str] = {}
    for item in _items(rest, name):
        key, equals, value = item.partition("=")
        if key not in keys:
            takes = f"it takes {', '.join(keys)}, as in {cls.example}" if keys else "it takes none"
            raise UsageError(f"{name}: no key {key!r}{nearest(key, keys)}; {takes}")
        if key in values:
            raise UsageError(f"{name}: {key} is given twice")
        if not equals or not value:
            raise UsageError(f"{name}: {key} needs a value, as in {cls.example}")
        values[key] = value
    edit = make(cls, values, name)
    assert isinstance(edit, Edit)
    return edit


def _items(text: str, name: str) -> list[str]:
    """`a=1,b="x, y"` at its commas; those in quotes do not count."""
    lexer = shlex(text, posix=True)
    lexer.whitespace, lexer.quotes, lexer.escape, lexer.commenters = ",", '"', "", ""
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError as error:
        raise UsageError(f"{name}: a quote is not closed in {text!r}") from error
