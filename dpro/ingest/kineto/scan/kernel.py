"""The compiled loops that read Kineto events from text into rows: no Python object is made of an event.

In: the text of a list of events, with `PADDING` behind it, at whose zeros each loop stops. Out: a row of
numbers for each event that is read, and a table of strings. `docs/scanner.md` shows it at work.

A function named `..._end` returns the place behind what begins at a place, or `ODD`: not JSON, or JSON of an
unusual form, which the typed decoder is given. `FULL` says that a table has no room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.compiled import inlined
from dpro.ingest.kineto.events import PADDING

ODD, FULL, REFUSED = -1, -2, -3  # instead of a place or row; refused is a list that is not of the usual form

# Columns of a row. Keys of events and of their arguments stand for most of them.
START, DURATION, PID, TID, DEVICE, STREAM, BYTES, CORRELATION, EXTERNAL_ID, EXTERNAL_ID_2021 = range(10)
SEQUENCE_NUMBER, FORWARD_THREAD, DEVICE_TYPE, DEVICE_ID, ALLOCATED, RESERVED = range(10, 16)
CATEGORY, NAME, SHAPES, SHAPES_2020, PHASE, BEGIN, END, COLUMNS = range(16, 24)
ARGUMENTS, PASSED_OVER = COLUMNS, COLUMNS + 1  # what other keys stand for
STRINGS, POOLED, EVENTS = range(3)  # what is counted: strings, words in their pool, events
# Columns of a string: its hash, its bytes, its first word in the pool. Of a key with what surrounds it: which
# of these came next the last time, and the code of the key alone; of the text of a value, that it is JSON.
HASH, SIZE, PLACE, NEXT, KEY = range(5)
_IS_JSON = 1

MISSING_NS = -(1 << 62)  # as `kineto.numbers`
MISSING_DURATION_NS = -1000
TEXT = -(1 << 61)  # minus its code: a number that is written as a string; of digits there are fewer
_MAX_DIGITS = 18
_MAX_SIZE = 256  # of a number that is passed over: a much larger one is none for the typed decoder
_MAX_DECIMALS, _MAX_US = 3, (1 << 53) - 1  # of microseconds: no clock shows more
_MAX_DEPTH = 64  # of lists in lists
_MAX_LISTS = 1 << 16  # strings, beyond which lists that are passed over are read again each time
_NS_PER_US = 1000

_QUOTE, _COMMA, _MINUS, _POINT, _ZERO, _NINE, _COLON, _BACKSLASH = b'",-.09:\\'
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"
_SPACE, _TAB, _NEWLINE, _RETURN = b" \t\n\r"
_B, _E, _F, _N, _R, _SLASH, _T = b"befnr/t"
_SPAN, _BEGIN_MARK, _END_MARK, _METADATA, _INSTANT = b"XBEMi"  # phases of events that are read
_PADDING_SIZE = len(PADDING)

# A word is eight bytes of text as one number, the first byte its lowest.
_WORD = np.uint64
_NONE, _ONE, _SEVEN, _EIGHT, _SHIFT, _TOP = (_WORD(number) for number in (0, 1, 7, 8, 32, 56))
_ONES, _HIGHS, _LOWS = _WORD(0x0101010101010101), _WORD(0x8080808080808080), _WORD(0x7F7F7F7F7F7F7F7F)
_QUOTES, _BACKSLASHES, _SPACES, _CLOSE_LISTS = (_ONES * _WORD(byte) for byte in b'"\\ ]')
_LITERALS = (b"\xff\xff\xff\xff", b"true", b"null", b"fals")
_HALF, _TRUE, _NULL, _FALS = (_WORD(int.from_bytes(text, "little")) for text in _LITERALS)
_COUNTING = _WORD(0x0001020304050607)
_FACTOR = _WORD(0x9E3779B97F4A7C15)  # Fibonacci hashing: 2^64 over the golden ratio


@inlined
def _word(text: Any, at: int) -> Any:
    """Eight bytes, by one load."""
    first = _WORD(at)
    word = _WORD(text[first])
    for offset in range(1, 8):
        word |= _WORD(text[first + _WORD(offset)]) << (_EIGHT * _WORD(offset))
    return word


@inlined
def _first_byte(marks: Any) -> Any:
    """Of a word whose bytes are 0 or 128, which byte is the first that is not 0."""
    return np.int64((((marks & (~marks + _ONE)) >> _SEVEN) * _COUNTING) >> _TOP)


@inlined
def _zeros(word: Any) -> Any:
    """128 in each byte that is 0, up to the first one; what is above it may be wrong."""
    return (word - _ONES) & ~word & _HIGHS


@inlined
def _blank_end(text: Any, at: int) -> int:
    if text[at] > _SPACE:
        return at
    while True:
        other = _word(text, at) ^ _SPACES
        if other == 0:
            at += 8
            continue
        at += _first_byte((((other & _LOWS) + _LOWS) | other) & _HIGHS)
        if text[at] not in (_NEWLINE, _RETURN, _TAB):
            return at
        at += 1


@inlined
def _closing_quote(text: Any, at: int, refused: Any) -> int:
    """Where the string ends whose first byte is at a place; its escapes are of one letter.

    `refused` is a word of the bits that no byte may have: `_HIGHS`, or `_NONE` where not all need be ASCII.
    """
    while True:
        word = _word(text, at)
        below_blank = (word - _SPACES) & ~word & _HIGHS
        marks = _zeros(word ^ _QUOTES) | _zeros(word ^ _BACKSLASHES) | below_blank | (word & refused)
        if marks == 0:
            at += 8
            continue
        at += _first_byte(marks)
        if text[at] == _QUOTE:
            return at
        if text[at] != _BACKSLASH or text[at + 1] not in (_QUOTE, _BACKSLASH, _SLASH, _N, _T, _B, _F, _R):
            return ODD
        at += 2


@inlined
def _digits_end(text: Any, at: int) -> int:
    while _ZERO <= text[at] <= _NINE:
        at += 1
    return at


@inlined
def _whole_end(text: Any, at: int) -> int:
    """Behind the whole part of a number, which has no needless zero."""
    if text[at] == _MINUS:
        at += 1
    end = _digits_end(text, at)
    return ODD if end == at or (text[at] == _ZERO and end > at + 1) else end


@inlined
def _number_end(text: Any, at: int) -> int:
    """Behind a number without exponent."""
    end = _whole_end(text, at)
    if end != ODD and text[end] == _POINT:
        begin = end + 1
        end = _digits_end(text, begin)
        if end == begin:
            return ODD
    return ODD if end - at > _MAX_SIZE else end


@inlined
def _scalar_end(text: Any, at: int) -> int:
    byte = text[at]
    if byte == _QUOTE:
        closing = _closing_quote(text, at + 1, _HIGHS)
        return ODD if closing == ODD else closing + 1
    if byte == _MINUS or _ZERO <= byte <= _NINE:
        return _number_end(text, at)
    word = _word(text, at) & _HALF
    if word in (_TRUE, _NULL):
        return at + 4
    return at + 5 if word == _FALS and text[at + 4] == _E else ODD


@inlined
def _value_end(text: Any, at: int) -> int:
    """Behind a scalar, or a list of such and of lists; an object is odd."""
    depth = 0
    while True:
        if text[at] == _OPEN_LIST:
            depth += 1
            at = _blank_end(text, at + 1)
            if text[at] != _CLOSE_LIST:
                if depth > _MAX_DEPTH:
                    return ODD
                continue
        else:
            at = _scalar_end(text, at)
            if at == ODD or depth == 0:
                return at
            at = _blank_end(text, at)
        while text[at] == _CLOSE_LIST:
            depth -= 1
            if depth == 0:
                return at + 1
            at = _blank_end(text, at + 1)
        if text[at] != _COMMA:
            return ODD
        at = _blank_end(text, at + 1)


@inlined
def _likely_list_end(text: Any, at: int) -> int:
    """Behind the bracket that likely closes a list in an object: a key follows, or the end of the object."""
    while True:
        word = _word(text, at)
        marks = _zeros(word ^ _CLOSE_LISTS) | _zeros(word)
        if marks == 0:
            at += 8
            continue
        at += _first_byte(marks)
        if text[at] == 0:
            return at
        at += 1
        after = _blank_end(text, at)
        if text[after] == _CLOSE_OBJECT:
            return at
        if text[after] == _COMMA and text[_blank_end(text, after + 1)] == _QUOTE:
            return at


@inlined
def _digits_value(text: Any, at: int, end: int) -> Any:
    value = 0
    for place in range(at, end):
        value = value * 10 + (np.int64(text[place]) - _ZERO)  # type: ignore[assignment]
    return value


@inlined
def _nanoseconds(text: Any, at: int) -> tuple[int, int]:
    """Microseconds with at most three decimals in ns, and the place behind."""
    end = _whole_end(text, at)
    if end == ODD or end - at > _MAX_DIGITS or text[at] == _MINUS:
        return 0, ODD
    us, ns = _digits_value(text, at, end), 0
    if us >= _MAX_US:
        return 0, ODD
    if text[end] == _POINT:
        begin = end + 1
        end = _digits_end(text, begin)
        if end == begin or end - begin > _MAX_DECIMALS:
            return 0, ODD
        ns = _digits_value(text, begin, end)
        for _ in range(_MAX_DECIMALS - (end - begin)):
            ns *= 10
    return us * _NS_PER_US + ns, end


@inlined
def _string_word(text: Any, at: int, left: int) -> Any:
    """The next word of a string of which some bytes are left, zeros behind them."""
    word = _word(text, at)
    return word if left >= 8 else word & ((_ONE << (_EIGHT * _WORD(left))) - _ONE)


@inlined
def _is_string(text: Any, at: int, size: int, pool: Any, place: int) -> bool:
    for offset in range(0, size, 8):
        if pool[place + (offset >> 3)] != _string_word(text, at + offset, size - offset):
            return False
    return True


@inlined
def _code(text: Any, at: int, end: int, adds: bool, table: Any) -> Any:
    """The code of a string. Where it is new: the next code, or `FULL`; `ODD` where it is not to be added.

    Open addressing: a string is in the slot that its hash says, or in the first one behind that was free.
    """
    slots, strings, pool, counts = table
    size = end - at
    mixed = _WORD(size)
    for offset in range(0, size, 8):
        mixed = (mixed ^ _string_word(text, at + offset, size - offset)) * _FACTOR
        mixed ^= mixed >> _SHIFT
    hashed = np.int64(mixed)
    slot = hashed & (slots.size - 1)
    while slots[slot] >= 0:
        code = slots[slot]
        like = strings[code, HASH] == hashed and strings[code, SIZE] == size
        if like and _is_string(text, at, size, pool, strings[code, PLACE]):
            return code
        slot = (slot + 1) & (slots.size - 1)
    if not adds:
        return ODD
    code, place = counts[STRINGS], counts[POOLED]
    if code == strings.shape[0] or place + (size + 7 >> 3) > pool.size:
        return FULL
    for offset in range(0, size, 8):
        pool[place + (offset >> 3)] = _string_word(text, at + offset, size - offset)
    strings[code, HASH], strings[code, SIZE], strings[code, PLACE] = hashed, size, place
    slots[slot] = code
    counts[STRINGS], counts[POOLED] = code + 1, place + (size + 7 >> 3)
    return code


@inlined
def _string(text: Any, at: int, refused: Any, table: Any) -> tuple[int, int]:
    """The code of the string that begins with a quote at a place, and the place behind."""
    closing = _closing_quote(text, at + 1, refused) if text[at] == _QUOTE else ODD
    if closing == ODD:
        return ODD, ODD
    code = _code(text, at + 1, closing, True, table)
    return code, FULL if code == FULL else closing + 1


@inlined
def _whole_number(text: Any, at: int, table: Any) -> tuple[int, int]:
    """A whole number, or `TEXT` minus the code of the string that stands for it; and the place behind."""
    if text[at] == _QUOTE:
        code, end = _string(text, at, _HIGHS, table)
        return TEXT - code, end
    end = _whole_end(text, at)
    if end == ODD or end - at > _MAX_DIGITS:
        return -1, ODD
    if text[at] == _MINUS:
        return -_digits_value(text, at + 1, end), end
    return _digits_value(text, at, end), end


@inlined
def _text_of_value(text: Any, at: int, is_kept: bool, table: Any) -> tuple[int, int]:
    """The code of the JSON text of a value, and the place behind.

    Most lists occur again and again: one that is in the table already is JSON, and need not be read again.
    """
    code = ODD
    if text[at] == _OPEN_LIST:
        end = _likely_list_end(text, at)
        code = _code(text, at, end, False, table)
    if code == ODD or table[1][code, KEY] != _IS_JSON:  # a name may look like a list
        end = _value_end(text, at)
        if end != ODD and (is_kept or table[3][STRINGS] < _MAX_LISTS):
            code = _code(text, at, end, True, table)
            if code == FULL:
                return FULL, FULL
            table[1][code, KEY] = _IS_JSON
    return code, end


@inlined
def _put_end(text: Any, at: int, field: int, rows: Any, row: int, table: Any) -> int:
    """Behind a value, which is put into its column."""
    if field <= DURATION:
        rows[row, field], end = _nanoseconds(text, at)
    elif field < CATEGORY:
        rows[row, field], end = _whole_number(text, at, table)
    elif field <= NAME:
        rows[row, field], end = _string(text, at, _NONE if field == NAME else _HIGHS, table)
    elif field < PHASE or (field == PASSED_OVER and text[at] == _OPEN_LIST):
        code, end = _text_of_value(text, at, field < PHASE, table)
        if field < PHASE:
            rows[row, field] = code
    else:
        end = _value_end(text, at)
        if field == PHASE:
            rows[row, PHASE] = text[at + 1]
            return end if text[at] == _QUOTE and end == at + 3 else ODD
    return end


@inlined
def _key_end(text: Any, at: int, last: int, table: Any) -> tuple[int, int]:
    """Behind a comma or brace with the key and the colon that follow, where a value begins; and its code.

    The code is that of all this text, blanks included. `last` is the code of what stood before.
    """
    begin = at
    key, at = _string(text, _blank_end(text, at + 1), _HIGHS, table)
    if at < 0:
        return at, ODD
    at = _blank_end(text, at)
    if text[at] != _COLON:
        return ODD, ODD
    at = _blank_end(text, at + 1)
    code = _code(text, begin, at, True, table)
    if code == FULL:
        return FULL, FULL
    strings = table[1]
    strings[code, KEY] = key
    strings[last, NEXT] = code
    return at, code


@inlined
def _event_end(text: Any, at: int, rows: Any, row: int, keys: Any, table: Any) -> int:
    """Behind an event, which is put into a row."""
    _, strings, pool, _ = table
    in_arguments, had_arguments, opener, last = 0, False, _OPEN_OBJECT, 0
    while True:
        # Mostly the key that followed the last one before follows again, with the same blanks.
        code = strings[last, NEXT]
        size = strings[code, SIZE]
        if text[at] != opener:
            return ODD
        if size and _is_string(text, at, size, pool, strings[code, PLACE]):
            at += size
        elif opener == _OPEN_OBJECT and text[_blank_end(text, at + 1)] == _CLOSE_OBJECT:
            at, code = _blank_end(text, at + 1), ODD
        else:
            at, code = _key_end(text, at, last, table)
            if at < 0:
                return at
        opener = _COMMA
        if code != ODD:
            last, key = code, strings[code, KEY]
            field = keys[in_arguments, key] if key < keys.shape[1] else PASSED_OVER
            if field == ARGUMENTS:
                if had_arguments or text[at] != _OPEN_OBJECT:  # of several the last would count
                    return ODD
                # Which arguments an event has, its category says.
                in_arguments, had_arguments, opener = 1, True, _OPEN_OBJECT
                last = rows[row, CATEGORY]
                continue
            at = _put_end(text, at, field, rows, row, table)
            if at < 0:
                return at
        at = _blank_end(text, at)
        while text[at] == _CLOSE_OBJECT:
            if not in_arguments:
                return at + 1
            in_arguments = 0
            at = _blank_end(text, at + 1)


@inlined
def scan(text: Any, first: int, rows: Any, keys: Any, table: Any) -> int:
    """Read a list of events into rows.

    Args:
        text: the list, from its bracket to its bracket, and `PADDING`.
        first: the row to begin with.
        rows: `[R, COLUMNS]`.
        keys: `[2, K]` what a string stands for, by its code, as a key of an event or of its arguments.
        table: of strings: `[S]` codes or -1, where S is a power of two; `[C, 5]` strings by code, the
            empty one first; their bytes, as words; and `[3]` counts of strings, words, and events.

    Returns:
        The row behind the last one; or `REFUSED`; or `FULL`, after which the list has to be read again.
    """
    row, at = first, _blank_end(text, 1)
    while text[at] == _OPEN_OBJECT:
        if row == rows.shape[0]:
            return FULL
        for column in range(BEGIN):
            rows[row, column] = -1 if column < CATEGORY else 0
        rows[row, START], rows[row, DURATION] = MISSING_NS, MISSING_DURATION_NS
        end = _event_end(text, at, rows, row, keys, table)
        if end < 0:
            return FULL if end == FULL else REFUSED
        rows[row, BEGIN], rows[row, END] = at, end
        table[3][EVENTS] += 1
        if rows[row, PHASE] in (_SPAN, _BEGIN_MARK, _END_MARK, _METADATA, _INSTANT):
            row += 1
        at = _blank_end(text, end)
        if text[at] == _COMMA:
            at = _blank_end(text, at + 1)
            if text[at] != _OPEN_OBJECT:
                return REFUSED
        elif text[at] != _CLOSE_LIST:
            return REFUSED
    return row if text[at] == _CLOSE_LIST and at + 1 == text.size - _PADDING_SIZE else REFUSED
