"""Compiled loops that read Kineto events from text into rows, without a Python object per event.

Takes the text of a list of events, followed by `PADDING`, at whose zeros each loop stops. Fills a row of
numbers for each event that is read, and a table of strings, numbered in the order of their first occurrence.

Keys are predicted: after each text between two values, the one that followed last time is compared first,
eight bytes at a time. Lists (`Input Dims`) are looked up by their text, and parsed only when new.

A function named `..._end` returns the index after the item that begins at an index, or `ODD`: not JSON, or
JSON of an unusual form, which is left to the typed decoder. `FULL` means that a table has no room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.compiled import inlined
from dpro.ingest.kineto.events import PADDING

# Text as words of eight bytes: ends of blanks, strings and digits, and the value of digits.

ODD = -1  # instead of an index: not JSON, or JSON of an unusual form

NONE, _ONE, _SEVEN, _EIGHT, _THIRTY_TWO, _FIFTY_SIX = map(np.uint64, (0, 1, 7, 8, 32, 56))
_ONES, HIGHS, _LOWS = map(np.uint64, (0x0101010101010101, 0x8080808080808080, 0x7F7F7F7F7F7F7F7F))
_QUOTES, _BACKSLASHES, _SPACES, CLOSE_LISTS = (_ONES * np.uint64(byte) for byte in b'"\\ ]')
_COUNTING = np.uint64(0x0001020304050607)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: 2^64 over the golden ratio

QUOTE, _BACKSLASH = b'"\\'
_SPACE, _TAB, _NEWLINE, _RETURN = b" \t\n\r"
_B, _F, _N, _R, _SLASH, _T = b"bfnr/t"


@inlined
def word_at(text: Any, index: int) -> Any:
    """Load eight bytes as one word."""
    first = np.uint64(index)
    word = np.uint64(text[first])
    for offset in range(1, 8):
        word |= np.uint64(text[first + np.uint64(offset)]) << (_EIGHT * np.uint64(offset))
    return word


@inlined
def first_byte(marks: Any) -> Any:
    """Return the index of the first byte that is not 0, in a word whose bytes are 0 or 128."""
    return np.int64((((marks & (~marks + _ONE)) >> _SEVEN) * _COUNTING) >> _FIFTY_SIX)


@inlined
def zeros(word: Any) -> Any:
    """Return 128 in each byte that is 0, up to the first; later bytes may be wrong."""
    return (word - _ONES) & ~word & HIGHS


@inlined
def blank_end(text: Any, index: int) -> int:
    """Return the index after blanks."""
    if text[index] > _SPACE:
        return index
    while True:
        other = word_at(text, index) ^ _SPACES
        if other == 0:
            index += 8
            continue
        index += first_byte((((other & _LOWS) + _LOWS) | other) & HIGHS)
        if text[index] not in (_NEWLINE, _RETURN, _TAB):
            return index
        index += 1


@inlined
def closing_quote(text: Any, index: int, refused: Any) -> int:
    """Return the index of the closing quote of the string at `index`; `ODD` for unusual bytes or escapes.

    Args:
        refused: a word of the bits that no byte may have: `HIGHS`, or `NONE` where text may be non-ASCII.
    """
    while True:
        word = word_at(text, index)
        below_blank = (word - _SPACES) & ~word & HIGHS
        marks = zeros(word ^ _QUOTES) | zeros(word ^ _BACKSLASHES) | below_blank | (word & refused)
        if marks == 0:
            index += 8
            continue
        index += first_byte(marks)
        if text[index] == QUOTE:
            return index
        if text[index] != _BACKSLASH or text[index + 1] not in (
            QUOTE,
            _BACKSLASH,
            _SLASH,
            _N,
            _T,
            _B,
            _F,
            _R,
        ):
            return ODD
        index += 2


@inlined
def digits_end(text: Any, index: int) -> int:
    """Return the index after digits."""
    while _ZERO <= text[index] <= _NINE:
        index += 1
    return index


@inlined
def digits_value(text: Any, index: int, end: int) -> Any:
    """Return the value of digits."""
    value = 0
    for place in range(index, end):
        value = value * 10 + (np.int64(text[place]) - _ZERO)  # type: ignore[assignment]
    return value


@inlined
def string_word(text: Any, index: int, left: int) -> Any:
    """Return the next word of a string, with zeros after its last byte."""
    word = word_at(text, index)
    return word if left >= 8 else word & ((_ONE << (_EIGHT * np.uint64(left))) - _ONE)


@inlined
def hash_of(text: Any, index: int, size: int) -> Any:
    """Return the hash of a string."""
    mixed = np.uint64(size)
    for offset in range(0, size, 8):
        mixed = (mixed ^ string_word(text, index + offset, size - offset)) * _FACTOR
        mixed ^= mixed >> _THIRTY_TWO
    return np.int64(mixed)


FULL, REFUSED = ODD - 1, ODD - 2  # instead of an index or row; REFUSED: a list of an unusual form

# Columns of a row; most are also the fields of keys.
START, DURATION, PID, TID, DEVICE, STREAM, BYTES, CORRELATION, EXTERNAL_ID, EXTERNAL_ID_2021 = range(10)
SEQUENCE_NUMBER, FORWARD_THREAD, DEVICE_TYPE, DEVICE_ID, ALLOCATED, RESERVED = range(10, 16)
CATEGORY, NAME, SHAPES, SHAPES_2020, PHASE, BEGIN, END, COLUMNS = range(16, 24)
ARGUMENTS, PASSED_OVER = COLUMNS, COLUMNS + 1  # fields of other keys
STRINGS, POOLED, EVENTS, MARKED = range(4)  # counts of strings, words in the pool, events, marked rows
# Columns of a string: hash, size in bytes, first word in the pool. For a key with its punctuation: the code
# of the one that followed last time, and the code of the key alone; for the text of a value: that it is JSON.
# For categories and names, bits: a row is marked where its category has a bit that its name lacks.
HASH, SIZE, PLACE, NEXT, KEY, ASKS, PLAIN, STRING_COLUMNS = range(8)
_IS_JSON = 1

MISSING_NS = -(1 << 62)  # as in `dpro.ingest.kineto.events`
MISSING_DURATION_NS = -1000
TEXT = -(1 << 61)  # minus a code: a number written as a string; plain numbers are above
_MAX_DIGITS = 18
_EXPONENT, _SIGNS = tuple(b"eE"), tuple(b"+-")
_MAX_SIZE = 200  # bytes of a skipped number; the typed decoder refuses much longer ones
_MAX_DECIMALS, _MAX_US = 3, (1 << 53) - 1  # of microseconds; no valid time has more
_MAX_DEPTH = 64  # nesting of lists
_MAX_LISTS = 1 << 16  # strings in the table; beyond, skipped lists are not stored but parsed each time
_NS_PER_US = 1000

_COMMA, _MINUS, _POINT, _ZERO, _NINE, _COLON = b",-.09:"
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"
_LITERALS = (b"\xff\xff\xff\xff", b"true", b"null", b"fals")
_HALF, _TRUE, _NULL, _FALS = (np.uint64(int.from_bytes(text, "little")) for text in _LITERALS)
(_LAST_OF_FALSE,) = b"e"
_SPAN, _BEGIN_MARK, _END_MARK, _METADATA, _INSTANT = b"XBEMi"  # phases that are read
_PADDING_SIZE = len(PADDING)


@inlined
def _whole_end(text: Any, index: int) -> int:
    """Return the index after the whole part of a number; `ODD` for a leading zero."""
    if text[index] == _MINUS:
        index += 1
    end = digits_end(text, index)
    return ODD if end == index or (text[index] == _ZERO and end > index + 1) else end


@inlined
def _number_end(text: Any, index: int) -> int:
    """Return the index after a skipped number, with or without exponent."""
    end = _whole_end(text, index)
    if end != ODD and text[end] == _POINT:
        begin = end + 1
        end = digits_end(text, begin)
        if end == begin:
            return ODD
    if end != ODD and text[end] in _EXPONENT:
        begin = end + 2 if text[end + 1] in _SIGNS else end + 1
        end = digits_end(text, begin)
        if end == begin or end > begin + 2:
            return ODD
    return ODD if end - index > _MAX_SIZE else end


@inlined
def _scalar_end(text: Any, index: int) -> int:
    byte = text[index]
    if byte == QUOTE:
        closing = closing_quote(text, index + 1, HIGHS)
        return ODD if closing == ODD else closing + 1
    if byte == _MINUS or _ZERO <= byte <= _NINE:
        return _number_end(text, index)
    word = word_at(text, index) & _HALF
    if word in (_TRUE, _NULL):
        return index + 4
    return index + 5 if word == _FALS and text[index + 4] == _LAST_OF_FALSE else ODD


@inlined
def _value_end(text: Any, index: int) -> int:
    """Return the index after a scalar, or a list of scalars and lists; an object is `ODD`."""
    depth = 0
    while True:
        if text[index] == _OPEN_LIST:
            depth += 1
            index = blank_end(text, index + 1)
            if text[index] != _CLOSE_LIST:
                if depth > _MAX_DEPTH:
                    return ODD
                continue
        else:
            index = _scalar_end(text, index)
            if index == ODD or depth == 0:
                return index
            index = blank_end(text, index)
        while text[index] == _CLOSE_LIST:
            depth -= 1
            if depth == 0:
                return index + 1
            index = blank_end(text, index + 1)
        if text[index] != _COMMA:
            return ODD
        index = blank_end(text, index + 1)


@inlined
def _likely_list_end(text: Any, index: int) -> int:
    """Return the index after the likely end of a list in an object: a key or the object's end follows."""
    while True:
        word = word_at(text, index)
        marks = zeros(word ^ CLOSE_LISTS) | zeros(word)
        if marks == 0:
            index += 8
            continue
        index += first_byte(marks)
        if text[index] == 0:
            return index
        index += 1
        after = blank_end(text, index)
        if text[after] == _CLOSE_OBJECT:
            return index
        if text[after] == _COMMA and text[blank_end(text, after + 1)] == QUOTE:
            return index


@inlined
def _nanoseconds(text: Any, index: int) -> tuple[int, int]:
    """Convert microseconds with at most three decimals to ns; also return the index after them."""
    end = _whole_end(text, index)
    if end == ODD or end - index > _MAX_DIGITS or text[index] == _MINUS:
        return 0, ODD
    us, ns = digits_value(text, index, end), 0
    if us >= _MAX_US:
        return 0, ODD
    if text[end] == _POINT:
        begin = end + 1
        end = digits_end(text, begin)
        if end == begin or end - begin > _MAX_DECIMALS:
            return 0, ODD
        ns = digits_value(text, begin, end)
        for _ in range(_MAX_DECIMALS - (end - begin)):
            ns *= 10
    return us * _NS_PER_US + ns, end


@inlined
def _is_string(text: Any, index: int, size: int, pool: Any, place: int) -> bool:
    for offset in range(0, size, 8):
        if pool[place + (offset >> 3)] != string_word(text, index + offset, size - offset):
            return False
    return True


@inlined
def _code(text: Any, index: int, end: int, adds: bool, table: Any) -> Any:
    """Return the code of a string: if new, the next code, or `FULL`; `ODD` where it is not to be added.

    Open addressing: a string is in the slot of its hash, or in the first later one that was free.
    """
    slots, strings, pool, counts = table
    size = end - index
    hashed = hash_of(text, index, size)
    slot = hashed & (slots.size - 1)
    while slots[slot] >= 0:
        code = slots[slot]
        like = strings[code, HASH] == hashed and strings[code, SIZE] == size
        if like and _is_string(text, index, size, pool, strings[code, PLACE]):
            return code
        slot = (slot + 1) & (slots.size - 1)
    if not adds:
        return ODD
    code, place = counts[STRINGS], counts[POOLED]
    if code == strings.shape[0] or place + (size + 7 >> 3) > pool.size:
        return FULL
    for offset in range(0, size, 8):
        pool[place + (offset >> 3)] = string_word(text, index + offset, size - offset)
    strings[code, HASH], strings[code, SIZE], strings[code, PLACE] = hashed, size, place
    slots[slot] = code
    counts[STRINGS], counts[POOLED] = code + 1, place + (size + 7 >> 3)
    return code


@inlined
def _string(text: Any, index: int, refused: Any, table: Any) -> tuple[int, int]:
    """Return the code of the string that begins with a quote at `index`, and the index after it."""
    closing = closing_quote(text, index + 1, refused) if text[index] == QUOTE else ODD
    if closing == ODD:
        return ODD, ODD
    code = _code(text, index + 1, closing, True, table)
    return code, FULL if code == FULL else closing + 1


@inlined
def _whole_number(text: Any, index: int, table: Any) -> tuple[int, int]:
    """Return a whole number, or `TEXT` minus the code of a string; and the index after it."""
    if text[index] == QUOTE:
        code, end = _string(text, index, HIGHS, table)
        return TEXT - code, end
    end = _whole_end(text, index)
    if end == ODD or end - index > _MAX_DIGITS:
        return -1, ODD
    if text[index] == _MINUS:
        return -digits_value(text, index + 1, end), end
    return digits_value(text, index, end), end


@inlined
def _text_of_value(text: Any, index: int, is_kept: bool, table: Any) -> tuple[int, int]:
    """Return the code of the JSON text of a value, and the index after it.

    Most lists recur: one that is in the table already is JSON, and is not parsed again.
    """
    code = ODD
    if text[index] == _OPEN_LIST:
        end = _likely_list_end(text, index)
        code = _code(text, index, end, False, table)
    if code == ODD or table[1][code, KEY] != _IS_JSON:  # a name may look like a list
        end = _value_end(text, index)
        if end != ODD and (is_kept or table[3][STRINGS] < _MAX_LISTS):
            code = _code(text, index, end, True, table)
            if code == FULL:
                return FULL, FULL
            table[1][code, KEY] = _IS_JSON
    return code, end


@inlined
def _put_end(text: Any, index: int, field: int, rows: Any, row: int, table: Any) -> int:
    """Store a value in its column; return the index after it."""
    if field <= DURATION:
        rows[field, row], end = _nanoseconds(text, index)
    elif field < CATEGORY:
        rows[field, row], end = _whole_number(text, index, table)
    elif field <= NAME:
        rows[field, row], end = _string(text, index, NONE if field == NAME else HIGHS, table)
    elif field < PHASE or (field == PASSED_OVER and text[index] == _OPEN_LIST):
        code, end = _text_of_value(text, index, field < PHASE, table)
        if field < PHASE:
            rows[field, row] = code
    else:
        end = _value_end(text, index)
        if field == PHASE:
            rows[PHASE, row] = text[index + 1]
            return end if text[index] == QUOTE and end == index + 3 else ODD
    return end


@inlined
def _key_end(text: Any, index: int, last: int, table: Any) -> tuple[int, int]:
    """Read a comma or brace, a key and a colon; return the index of the value and the code of this text.

    The text includes blanks. `last` is the code of the previous such text.
    """
    begin = index
    key, index = _string(text, blank_end(text, index + 1), HIGHS, table)
    if index < 0:
        return index, ODD
    index = blank_end(text, index)
    if text[index] != _COLON:
        return ODD, ODD
    index = blank_end(text, index + 1)
    code = _code(text, begin, index, True, table)
    if code == FULL:
        return FULL, FULL
    strings = table[1]
    strings[code, KEY] = key
    strings[last, NEXT] = code
    return index, code


@inlined
def _event_end(text: Any, index: int, rows: Any, row: int, keys: Any, table: Any) -> int:
    """Store an event in a row; return the index after it."""
    _, strings, pool, _ = table
    in_arguments, had_arguments, opener, last = 0, False, _OPEN_OBJECT, 0
    while True:
        # Usually the key that followed last time follows again, with the same blanks.
        code = strings[last, NEXT]
        size = strings[code, SIZE]
        if text[index] != opener:
            return ODD
        if size and _is_string(text, index, size, pool, strings[code, PLACE]):
            index += size
        elif opener == _OPEN_OBJECT and text[blank_end(text, index + 1)] == _CLOSE_OBJECT:
            index, code = blank_end(text, index + 1), ODD
        else:
            index, code = _key_end(text, index, last, table)
            if index < 0:
                return index
        opener = _COMMA
        if code != ODD:
            last, key = code, strings[code, KEY]
            field = keys[in_arguments, key] if key < keys.shape[1] else PASSED_OVER
            if field == ARGUMENTS:
                if had_arguments or text[index] != _OPEN_OBJECT:  # in JSON, the last of several counts
                    return ODD
                # The arguments of an event are predicted from its category.
                in_arguments, had_arguments, opener = 1, True, _OPEN_OBJECT
                last = rows[CATEGORY, row]
                continue
            index = _put_end(text, index, field, rows, row, table)
            if index < 0:
                return index
        index = blank_end(text, index)
        while text[index] == _CLOSE_OBJECT:
            if not in_arguments:
                return index + 1
            in_arguments = 0
            index = blank_end(text, index + 1)


@inlined
def scan(text: Any, first: int, rows: Any, marked: Any, keys: Any, table: Any) -> int:
    """Read a list of events into rows.

    Args:
        text: the list, from bracket to bracket, and `PADDING`.
        rows: [COLUMNS, R].
        marked: [R] receives the rows of which more than the columns may be kept.
        keys: [2, K] field of a string, by its code, as a key of an event or of its arguments.
        table: of strings: [S] codes or -1, where S is a power of two; [C, STRING_COLUMNS] strings by code,
            the empty one first; their bytes, as words; and [4] counts, of which events and marked rows are
            increased.

    Returns:
        The row after the last one; or `REFUSED`; or `FULL`, after which the list must be read again.
    """
    _, strings, _, counts = table
    row, index = first, blank_end(text, 1)
    while text[index] == _OPEN_OBJECT:
        if row == rows.shape[1]:
            return FULL
        for column in range(BEGIN):
            rows[column, row] = -1 if column < CATEGORY else 0
        rows[START, row], rows[DURATION, row] = MISSING_NS, MISSING_DURATION_NS
        end = _event_end(text, index, rows, row, keys, table)
        if end < 0:
            return FULL if end == FULL else REFUSED
        rows[BEGIN, row], rows[END, row] = index, end
        counts[EVENTS] += 1
        phase = rows[PHASE, row]
        if phase in (_SPAN, _INSTANT, _BEGIN_MARK, _END_MARK, _METADATA):
            lacks = strings[rows[CATEGORY, row], ASKS] & ~strings[rows[NAME, row], PLAIN]
            if lacks or phase not in (_SPAN, _INSTANT):
                marked[counts[MARKED]] = row
                counts[MARKED] += 1
            row += 1
        index = blank_end(text, end)
        if text[index] == _COMMA:
            index = blank_end(text, index + 1)
            if text[index] != _OPEN_OBJECT:
                return REFUSED
        elif text[index] != _CLOSE_LIST:
            return REFUSED
    return row if text[index] == _CLOSE_LIST and index + 1 == text.size - _PADDING_SIZE else REFUSED
