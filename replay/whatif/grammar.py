"""How edits are written: `heal:rank=1`, `network:bandwidth=2`, `scale:name="a, b",factor=0.5`.

In: what the user typed, and the keys there are. Out: values by key, as text; or one line that names the
nearest thing that exists. What an edit means, and what its values may be, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from shlex import shlex
from typing import Any, Generic, TypeVar

from dpro.errors import UsageError

Changed = TypeVar("Changed")
Values = Mapping[str, Any]  # numbers, and text of the keys that are words


@dataclass(frozen=True)
class KnownChange(Generic[Changed]):
    """One kind of change to something that is no graph: a server, the recovery of a job.

    Attributes:
        apply: the change.
        keys: that it takes, each with what it is when it is not given; None for those that must be.
        example: how it is written.
        doc: what it is, and what it assumes.
        source: of the idea; empty where it has none.
        words: keys whose values are text.
    """

    apply: Callable[[Changed, Values], Changed]
    keys: Mapping[str, float | None]
    example: str
    doc: str
    source: str = ""
    words: Collection[str] = ()


def apply_change(
    before: Changed,
    text: str,
    known: Mapping[str, KnownChange[Changed]],
    number: Callable[[str, str, str], float],
) -> Changed:
    """Apply a change that is written like an edit.

    Args:
        known: changes by name.
        number: makes a value of the name of a change, a key and its text, and raises if it is none; not asked
            for words.

    Raises:
        UsageError: there is no such change, or its values are none.
    """
    name, rest = split_edit(text)
    if name not in known:
        raise UsageError(f"no change {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    change = known[name]
    values: dict[str, Any] = {key: usual for key, usual in change.keys.items() if usual is not None}
    for key, value in values_of(name, rest, list(change.keys), change.example).items():
        values[key] = value if key in change.words else number(name, key, value)
    lacking = [key for key in change.keys if key not in values]
    if lacking:
        raise UsageError(f"{name} needs {' and '.join(lacking)}, as in {change.example}")
    return change.apply(before, values)


def split_edit(text: str) -> tuple[str, str]:
    """The name of an edit, and its keys with their values."""
    name, _, rest = text.strip().partition(":")
    return name, rest


def values_of(name: str, rest: str, keys: Collection[str], example: str) -> dict[str, str]:
    """The values that an edit's text gives to its keys.

    Args:
        rest: what follows it: `a=1,b="x, y"`; commas in quotes do not count.
        keys: what may be given.

    Raises:
        UsageError: a key that there is not (with the nearest one), twice or without a value; an open quote.
    """
    values: dict[str, str] = {}
    for item in _items(rest, name):
        key, equals, value = item.partition("=")
        if key not in keys:
            takes = f"it takes {', '.join(keys)}, as in {example}" if keys else "it takes none"
            raise UsageError(f"{name}: no key {key!r}{nearest(key, keys)}; {takes}")
        if key in values:
            raise UsageError(f"{name}: {key} is given twice")
        if not equals or not value:
            raise UsageError(f"{name}: {key} needs a value, as in {example}")
        values[key] = value
    return values


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)` with what comes nearest to a word; empty where nothing does."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _items(text: str, name: str) -> list[str]:
    """`a=1,b="x, y"` at its commas; those in quotes do not count."""
    lexer = shlex(text, posix=True)
    lexer.whitespace, lexer.quotes, lexer.escape, lexer.commenters = ",", '"', "", ""
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError as error:
        raise UsageError(f"{name}: a quote is not closed in {text!r}") from error
