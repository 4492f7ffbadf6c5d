"""The compiled loops that read Kineto events from text into rows: no Python object is made of an event.

In: the text of a list of events, with `PADDING` behind it, at whose zeros each loop stops. Out: a row of
numbers for each event that is read, and a table of strings, numbered in the order of their first occurrence.

Keys are predicted: after each text between two values the one that followed last time is compared first,
eight bytes at a time. Lists (`Input Dims`) are looked up by their text, and parsed only when new.

A function named `..._end` returns the place behind what begins at a place, or `ODD`: not JSON, or JSON of an
unusual form, which the typed decoder is given. `FULL` says that a table has no room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.compiled import inlined
from dpro.ingest.kineto.events import PADDING

# Text as words, eight bytes at a time: where blanks, strings and digits end, and what digits are worth.

ODD = -1  # instead of a place: not JSON, or JSON of an unusual form

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
    """Eight bytes, by one load."""
    first = np.uint64(index)
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
def blank_end(text: Any, index: int) -> int:
    """Where blanks end."""
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
    """Where the string ends whose first byte is at a place; its escapes are of one letter.

    Args:
        refused: a word of the bits that no byte may have: `HIGHS`, or `NONE` where not all need be ASCII.
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
    """Where digits end."""
    while _ZERO <= text[index] <= _NINE:
        index += 1
    return index


@inlined
def digits_value(text: Any, index: int, end: int) -> Any:
    """What digits are worth."""
    value = 0
    for place in range(index, end):
        value = value * 10 + (np.int64(text[place]) - _ZERO)  # type: ignore[assignment]
    return value


@inlined
def string_word(text: Any, index: int, left: int) -> Any:
    """The next word of a string, zeros behind its last byte."""
    word = word_at(text, index)
    return word if left >= 8 else word & ((_ONE << (_EIGHT * np.uint64(left))) - _ONE)


@inlined
def hash_of(text: Any, index: int, size: int) -> Any:
    """The hash of a string."""
    mixed = np.uint64(size)
    for offset in range(0, size, 8):
        mixed = (mixed ^ string_word(text, index + offset, size - offset)) * _FACTOR
        mixed ^= mixed >> _THIRTY_TWO
    return np.int64(mixed)


FULL, REFUSED = ODD - 1, ODD - 2  # instead of a place or row; refused is a list that is not of the usual form

# Columns of a row. Keys of events and of their arguments stand for most of them.
START, DURATION, PID, TID, DEVICE, STREAM, BYTES, CORRELATION, EXTERNAL_ID, EXTERNAL_ID_2021 = range(10)
SEQUENCE_NUMBER, FORWARD_THREAD, DEVICE_TYPE, DEVICE_ID, ALLOCATED, RESERVED = range(10, 16)
CATEGORY, NAME, SHAPES, SHAPES_2020, PHASE, BEGIN, END, COLUMNS = range(16, 24)
ARGUMENTS, PASSED_OVER = COLUMNS, COLUMNS + 1  # what other keys stand for
STRINGS, POOLED, EVENTS, MARKED = range(4)  # counts: of strings, words in their pool, events, marked rows
# Columns of a string: its hash, its bytes, its first word in the pool. Of a key with what surrounds it: which
# of these came next the last time, and the code of the key alone; of the text of a value, that it is JSON.
# Of a category and of a name bits: a row is marked where its category asks for one that its name lacks.
HASH, SIZE, PLACE, NEXT, KEY, ASKS, PLAIN, STRING_COLUMNS = range(8)
_IS_JSON = 1

MISSING_NS = -(1 << 62)  # as `kineto.numbers`
MISSING_DURATION_NS = -1000
TEXT = -(1 << 61)  # minus its code: a number that is written as a string; of digits there are fewer
_MAX_DIGITS = 18
_EXPONENT, _SIGNS = tuple(b"eE"), tuple(b"+-")
_MAX_SIZE = 200  # of a number that is passed over: a much larger one is none for the typed decoder
_MAX_DECIMALS, _MAX_US = 3, (1 << 53) - 1  # of microseconds: no clock shows more
_MAX_DEPTH = 64  # of lists in lists
_MAX_LISTS = 1 << 16  # strings, beyond which lists that are passed over are read again each time
_NS_PER_US = 1000

_COMMA, _MINUS, _POINT, _ZERO, _NINE, _COLON = b",-.09:"
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"
_LITERALS = (b"\xff\xff\xff\xff", b"true", b"null", b"fals")
_HALF, _TRUE, _NULL, _FALS = (np.uint64(int.from_bytes(text, "little")) for text in _LITERALS)
(_LAST_OF_FALSE,) = b"e"
_SPAN, _BEGIN_MARK, _END_MARK, _METADATA, _INSTANT = b"XBEMi"  # phases of events that are read
_PADDING_SIZE = len(PADDING)


@inlined
def _whole_end(text: Any, index: int) -> int:
    """Behind the whole part of a number, which has no needless zero."""
    if text[index] == _MINUS:
        index += 1
    end = digits_end(text, index)
    return ODD if end == index or (text[index] == _ZERO and end > index + 1) else end


@inlined
def _number_end(text: Any, index: int) -> int:
    """Behind a number that is passed over, with an exponent or without."""
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
    """Behind a scalar, or a list of such and of lists; an object is odd."""
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
    """Behind the bracket that likely closes a list in an object: a key follows, or the end of the object."""
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
    """Microseconds with at most three decimals in ns, and the place behind."""
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
    """The code of a string. Where it is new: the next code, or `FULL`; `ODD` where it is not to be added.

    Open addressing: a string is in the slot that its hash says, or in the first one behind that was free.
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
    """The code of the string that begins with a quote at a place, and the place behind."""
    closing = closing_quote(text, index + 1, refused) if text[index] == QUOTE else ODD
    if closing == ODD:
        return ODD, ODD
    code = _code(text, index + 1, closing, True, table)
    return code, FULL if code == FULL else closing + 1


@inlined
def _whole_number(text: Any, index: int, table: Any) -> tuple[int, int]:
    """A whole number, or `TEXT` minus the code of the string that stands for it; and the place behind."""
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
    """The code of the JSON text of a value, and the place behind.

    Most lists occur again and again: one that is in the table already is JSON, and need not be read again.
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
    """Behind a value, which is put into its column."""
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
    """Behind a comma or brace with the key and the colon that follow, where a value begins; and its code.

    The code is that of all this text, blanks included. `last` is the code of what stood before.
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
    """Behind an event, which is put into a row."""
    _, strings, pool, _ = table
    in_arguments, had_arguments, opener, last = 0, False, _OPEN_OBJECT, 0
    while True:
        # Mostly the key that followed the last one before follows again, with the same blanks.
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
                if had_arguments or text[index] != _OPEN_OBJECT:  # of several the last would count
                    return ODD
                # Which arguments an event has, its category says.
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
        text: the list, from its bracket to its bracket, and `PADDING`.
        rows: `[COLUMNS, R]`.
        marked: `[R]` becomes the rows of which more than the columns may be kept.
        keys: `[2, K]` what a string stands for, by its code, as a key of an event or of its arguments.
        table: of strings: `[S]` codes or -1, where S is a power of two; `[C, STRING_COLUMNS]` strings by
            code, the empty one first; their bytes, as words; and `[4]` counts, of which events and marked
            rows are added to.

    Returns:
        The row behind the last one; or `REFUSED`; or `FULL`, after which the list has to be read again.
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
