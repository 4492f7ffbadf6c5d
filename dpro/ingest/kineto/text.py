"""The text of a Kineto trace: where one event ends and the next begins, and how to mend what is not JSON.

In: bytes of a trace, or a part of them. Out: places and pieces of text. It does not interpret the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST_EVENT_BYTES = 1 << 20  # what does not end by then is damaged
LONGEST_BOUNDARY_BYTES = 1 << 11  # separates two events, with the beginning of the next

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
# Between two events; the key nearly always distinguishes them from objects in a list within an event.
_BOUNDARY = re.compile(rb'\}\s*+,\s*+(?=\{\s*+"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"\s*+:)')
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRUCTURE = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_NOT_JSON = re.compile(
    _STRING
    + rb"|-?\b(?:inf|Infinity|nan|NaN|N/A|None|undefined)\b|,(?=[\s,]*+[}\]])|[\x00-\x08\x0b\x0c\x0e-\x1f]",
    re.DOTALL,
)
_CONTROL = re.compile(rb"[\x00-\x1f]")


class JsonObjects(NamedTuple):
    """Whole objects found in a text.

    Attributes:
        texts: one each.
        end: where the last one ends, or the list that holds them.
        closed: whether that list ends there.
    """

    texts: list[bytes]
    end: int
    closed: bool


def find_start(text: bytes | bytearray, searched: int = 0) -> int:
    """Where the list of events begins, behind its bracket; -1 where it does not (yet).

    Args:
        searched: number of bytes that were searched before.
    """
    if text[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return text.index(b"[") + 1
    found = _START.search(text, max(0, searched - 64))
    return found.end() if found else -1


def last_boundary(text: bytes) -> tuple[int, int] | None:
    """Where the last event that is surely whole ends, and the one after it begins; None where none is."""
    window = LONGEST_BOUNDARY_BYTES
    while True:
        boundaries = list(_BOUNDARY.finditer(text, max(0, len(text) - window)))
        if boundaries:
            return boundaries[-1].start() + 1, boundaries[-1].end()
        if window >= len(text):
            return None
        window *= 8


def next_boundary(text: bytes, position: int) -> int:
    """Where the next event begins, -1 where none does.

    Args:
        position: where to begin.
    """
    found = _BOUNDARY.search(text, position)
    return found.end() if found else -1


def split(text: bytes, position: int = 0) -> JsonObjects:
    """The objects of a list one by one, up to one that does not end.

    Args:
        position: where to begin.
    """
    texts: list[bytes] = []
    depth, begin, end = 0, position, position
    for found in _STRUCTURE.finditer(text, position):
        mark = text[found.start()]
        if mark in b"{[":
            if not depth:
                begin = found.start()
            depth += 1
        elif mark in b"}]" and depth:
            depth -= 1
            if not depth:
                end = found.end()
                texts.append(text[begin:end])
        elif mark == ord("]") and not re.match(rb"\s*,\s*\{", text[found.end() : found.end() + 256]):
            return JsonObjects(texts, found.end(), closed=True)
        if depth and found.end() - begin > LONGEST_EVENT_BYTES:
            break
    return JsonObjects(texts, end, closed=False)


def mended(text: bytes) -> bytes:
    """The text without what some profilers write and JSON forbids.

    Bare inf, nan and N/A become null, control characters in strings blanks, bytes that are not UTF-8 the mark
    for such; commas that nothing follows are left out.
    """
    valid = text.decode("utf-8", errors="replace").encode()
    return _NOT_JSON.sub(_mend, valid)


def _mend(found: re.Match[bytes]) -> bytes:
    text = found[0]
    if text.startswith(b'"'):
        return _CONTROL.sub(b" ", text)
    return b" " if text == b"," or text < b" " else b"null"
