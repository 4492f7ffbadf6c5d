"""Edits from their text.

In: what the user typed. Out: an edit, or one line that names the nearest thing that exists.
"""

from __future__ import annotations

from dpro.errors import UsageError
from dpro.replay.whatif.edit import Edit, keys_of, make
from dpro.replay.whatif.grammar import nearest, split_edit, values_of
from dpro.replay.whatif.registry import EDITS


def parse_edit(text: str) -> Edit:
    """Make an edit from its text.

    Raises:
        UsageError: no such edit or key (with the nearest one), or a value that is not what it should be.
    """
    name, rest = split_edit(text)
    if name not in EDITS:
        raise UsageError(f"no edit {name!r}{nearest(name, EDITS)}; there are {', '.join(EDITS)}")
    cls = EDITS[name]
    edit = make(cls, values_of(name, rest, keys_of(cls), cls.example), name)
    assert isinstance(edit, Edit)
    return edit
