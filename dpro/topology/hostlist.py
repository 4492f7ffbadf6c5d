"""Lists of names as cluster tools write them: `node[001-003,7]` is four names, `rack[1-2]node[1-4]` eight.

Converts a text to its names, in order, and back. Ranges keep leading zeros; brackets do not nest. Slurm calls
this a hostlist expression (see the manual of `scontrol show hostnames`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby, product
from math import prod

from dpro.errors import UsageError
from dpro.words import shortened

MAX_NAMES = 1_000_000  # of one list
MAX_TEXT = 64 << 20  # characters of all names of a list
SHOWN = 60  # characters of an invalid list that a message repeats
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"^(\d{1,18})(?:-(\d{1,18}))?$")
_NUMBERED = re.compile(r"^(.*?)(\d{1,18})$", re.DOTALL)


def expand(text: str) -> list[str]:
    """Return the names of a list, in order; commas outside brackets separate lists.

    Raises:
        UsageError: brackets do not match, a range is invalid, or there are too many or too long names.
    """
    expanded: list[str] = []
    characters = 0
    for part in _lists(text):
        pieces = _PART.split(part)  # text, ranges, text, ranges, …, text
        choices = [_numbers(piece, part) if number % 2 else [piece] for number, piece in enumerate(pieces)]
        count = prod(map(len, choices))
        _refuse_many(part, count, count * sum(max(map(len, choice)) for choice in choices))
        names = ["".join(parts) for parts in product(*choices)]
        expanded += names
        characters += sum(map(len, names))
        _refuse_many(text, len(expanded), characters)
    return expanded


def _refuse_many(text: str, count: int, characters: int = 0) -> None:
    if count > MAX_NAMES or characters > MAX_TEXT:
        names = f"{count:,} names, of at most {MAX_NAMES:,}" if count > MAX_NAMES else "names are too long"
        raise UsageError(f"{_shown(text)}: {names}")


def _lists(text: str) -> list[str]:
    """Split a text at the commas outside brackets."""
    lists, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise UsageError(f"{_shown(text)}: brackets do not match")
        if character == "," and not depth:
            lists.append(text[begin:place])
            begin = place + 1
    if depth:
        raise UsageError(f"{_shown(text)}: brackets do not match")
    return [part.strip() for part in (*lists, text[begin:]) if part.strip()]


def _shown(text: str) -> str:
    return repr(shortened(text, SHOWN))


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.match(part.strip())
        if not match:
            raise UsageError(
                f"{_shown(text)}: {_shown(part.strip())} is neither a number nor a range such as 1-8"
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UsageError(f"{_shown(text)}: {_shown(part.strip())} ends before it begins")
        _refuse_many(text, len(numbers) + int(last) - int(first) + 1)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def fold(names: Iterable[str]) -> str:
    """Return a list that `expand` turns into these names, in order, with consecutive numbers as ranges."""
    parts: list[str] = []
    for (prefix, width), group in groupby(names, _stem):
        members = list(group)
        if width < 0:
            parts += members
            continue
        numbers = [int(name[len(prefix) :]) for name in members]
        runs: list[tuple[int, int]] = []
        for number in numbers:
            if runs and number == runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        texts = [_range(run, width) for run in runs]
        alone = len(numbers) == 1
        parts.append(prefix + (texts[0] if alone else f"[{','.join(texts)}]"))
    return ",".join(parts)


def _stem(name: str) -> tuple[str, int]:
    """Split a name into prefix and number; return the prefix and the count of digits, -1 without a number."""
    match = _NUMBERED.match(name)
    return (match[1], len(match[2])) if match else (name, -1)


def _range(run: tuple[int, int], width: int) -> str:
    first, last = (str(number).zfill(width) for number in run)
    return first if first == last else f"{first}-{last}"
