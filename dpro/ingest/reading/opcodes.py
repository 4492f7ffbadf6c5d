"""Check of the opcodes of large pickles by a compiled loop, in a quarter of the time of a regular expression.

Takes the bytes of a pickle; returns whether all its opcodes are harmless. Importing this module loads numba,
which takes time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.compiled import compiled
from dpro.ingest.reading.plain_pickle import FIXED, MAX_MEMO, MAX_SMALL_TUPLES, TEXTS

# Argument of an opcode: its number of bytes, or a text with this number of bytes for its length.
_UNKNOWN, _TEXT = -1, 16
_FORMS = np.full(256, _UNKNOWN, np.int64)
for _size, _opcodes in (*FIXED.items(), (0, b"\x85\x86\x87"), (1, b"h\x8a"), (4, b"r")):
    _FORMS[list(_opcodes)] = _size
for _opcode, _size in TEXTS.items():
    _FORMS[_opcode] = _TEXT + _size
_GET, _PUT, _LONG_PUT, _LONG, _TUPLE_1, _TUPLE_2, _TUPLE_3 = b"hqr\x8a\x85\x86\x87"
_TEXT_PUT, _MEMOIZE = b"p\x94"
_MAX_LONG_BYTES = 8


def are_harmless(data: bytes) -> bool:
    """Return whether all opcodes are harmless, as defined in `plain_pickle`."""
    return bool(_are_harmless(np.frombuffer(data, np.uint8), _FORMS, MAX_MEMO, MAX_SMALL_TUPLES))


@compiled
def _are_harmless(data: Any, forms: Any, max_memo: int, max_tuples: int) -> int:
    """Return 1 where all opcodes are harmless, else 0.

    Args:
        data: [N] uint8.
        forms: [256] form of each opcode's argument.
        max_memo: exclusive limit of memo indices.
        max_tuples: maximum number of small tuples.
    """
    place, tuples, taken = 0, 0, 0
    while place < data.size:
        opcode = data[place]
        form = forms[opcode]
        behind = place + 1 + form % _TEXT
        if form == _UNKNOWN or behind > data.size:
            return 0
        number = 0
        for digit in range(behind - 1, place, -1):
            number = number << 8 | data[digit]
        if opcode == _LONG_PUT and number >= max_memo:
            return 0
        if opcode == _LONG or form >= _TEXT:
            if opcode == _LONG and number > _MAX_LONG_BYTES:
                return 0
            if number < 0 or number > data.size - behind:
                return int(form >= _TEXT)  # the text is truncated; the unpickler will raise
            behind += number
        if _TUPLE_1 <= opcode <= _TUPLE_3:
            tuples += opcode != _TUPLE_2 or taken < 2
            follows = data[behind] if behind < data.size else 0
            if tuples > max_tuples or follows in (_TEXT_PUT, _PUT, _LONG_PUT, _MEMOIZE):
                return 0
        taken = taken + 1 if opcode == _GET else 0
        place = behind
    return 1
