"""Text as words, eight bytes at a time: where blanks, strings and digits end, and what digits are worth.

In: a place in a text that has zeros behind it, at which each loop stops. Out: another place, or a number. A
word is eight bytes of text as one number, the first byte its lowest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.compiled import inlined

ODD = -1  # instead of a place: not JSON, or JSON of an unusual form

NONE, _ONE, _SEVEN, _EIGHT, _THIRTY_TWO, _FIFTY_SIX = map(np.uint64, (0, 1, 7, 8, 32, 56))
_ONES, HIGHS, _LOWS = map(np.uint64, (0x0101010101010101, 0x8080808080808080, 0x7F7F7F7F7F7F7F7F))
_QUOTES, _BACKSLASHES, _SPACES, CLOSE_LISTS = (_ONES * np.uint64(byte) for byte in b'"\\ ]')
_COUNTING = np.uint64(0x0001020304050607)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: 2^64 over the golden ratio

QUOTE, _BACKSLASH, _ZERO, _NINE = b'"\\09'
_SPACE, _TAB, _NEWLINE, _RETURN = b" \t\n\r"
_B, _F, _N, _R, _SLASH, _T = b"bfnr/t"


@inlined
def word_at(text: Any, at: int) -> Any:
    """Eight bytes, by one load.

    Args:
        text: bytes, with zeros behind them.
    """
    first = np.uint64(at)
    word = np.uint64(text[first])
    for offset in range(1, 8):
        word |= np.uint64(text[first + np.uint64(offset)]) << (_EIGHT * np.uint64(offset))
    return word


@inlined
def first_byte(marks: Any) -> Any:
    """Of a word whose bytes are 0 or 128, which byte is the first that is not 0."""
    return np.int64((((marks & (~marks + _ONE)) >> _SEVEN) * _COUNTING) >> _FIFTY_SIX)


@inlined
def zeros(word: Any) -> Any:
    """128 in each byte that is 0, up to the first one; what is above it may be wrong."""
    return (word - _ONES) & ~word & HIGHS


@inlined
def blank_end(text: Any, at: int) -> int:
    """Where blanks end.

    Args:
        text: bytes, with zeros behind them.
    """
    if text[at] > _SPACE:
        return at
    while True:
        other = word_at(text, at) ^ _SPACES
        if other == 0:
            at += 8
            continue
        at += first_byte((((other & _LOWS) + _LOWS) | other) & HIGHS)
        if text[at] not in (_NEWLINE, _RETURN, _TAB):
            return at
        at += 1


@inlined
def closing_quote(text: Any, at: int, refused: Any) -> int:
    """Where the string ends whose first byte is at a place; its escapes are of one letter.

    Args:
        text: bytes, with zeros behind them.
        refused: a word of the bits that no byte may have: `HIGHS`, or `NONE` where not all need be ASCII.
    """
    while True:
        word = word_at(text, at)
        below_blank = (word - _SPACES) & ~word & HIGHS
        marks = zeros(word ^ _QUOTES) | zeros(word ^ _BACKSLASHES) | below_blank | (word & refused)
        if marks == 0:
            at += 8
            continue
        at += first_byte(marks)
        if text[at] == QUOTE:
            return at
        if text[at] != _BACKSLASH or text[at + 1] not in (QUOTE, _BACKSLASH, _SLASH, _N, _T, _B, _F, _R):
            return ODD
        at += 2


@inlined
def digits_end(text: Any, at: int) -> int:
    """Where digits end.

    Args:
        text: bytes, with zeros behind them.
    """
    while _ZERO <= text[at] <= _NINE:
        at += 1
    return at


@inlined
def digits_value(text: Any, at: int, end: int) -> Any:
    """What digits are worth.

    Args:
        text: bytes, with zeros behind them.
        at: where they begin.
        end: where they end.
    """
    value = 0
    for place in range(at, end):
        value = value * 10 + (np.int64(text[place]) - _ZERO)  # type: ignore[assignment]
    return value


@inlined
def string_word(text: Any, at: int, left: int) -> Any:
    """The next word of a string, zeros behind its last byte.

    Args:
        text: bytes, with zeros behind them.
        left: bytes of the string from there.
    """
    word = word_at(text, at)
    return word if left >= 8 else word & ((_ONE << (_EIGHT * np.uint64(left))) - _ONE)


@inlined
def hash_of(text: Any, at: int, size: int) -> Any:
    """The hash of a string.

    Args:
        text: bytes, with zeros behind them.
        at: where it begins.
        size: its bytes.
    """
    mixed = np.uint64(size)
    for offset in range(0, size, 8):
        mixed = (mixed ^ string_word(text, at + offset, size - offset)) * _FACTOR
        mixed ^= mixed >> _THIRTY_TWO
    return np.int64(mixed)
