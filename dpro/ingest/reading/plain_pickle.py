"""Pickles of numbers, texts and containers, read without trusting them.

Takes bytes; returns the values. Refuses anything that would import a class or take all memory.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

from dpro.limits import MAX_REPETITION

# Most opcodes in pickles of plain values, by the bytes of their argument. Opcodes that drop or duplicate a
# value, or memoise a tuple, are not included: so each tuple is in one place, and a key takes no longer to
# look up than to read. Three are harmless only with some arguments: `h` reads the memo, `r` writes it, and
# `\x8a` is a number with its length in bytes.
FIXED = {0: b"]}(.Nadelsu\x88\x89\x94)", 2: b"M", 1: b"\x80Kq", 4: b"Jj", 8: b"G\x95"}
_BARE, *_WITH_ARGUMENT = (b"[%b]" % re.escape(opcodes) + b"." * size for size, opcodes in FIXED.items())
_LONGS = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in (8, 4, 3, 5, 6, 7, 2, 1, 0))
_OPCODES = (
    rb"h.(?:h.\x86(?![pqr\x94]))?+",  # also two, and a pair of both that is not memoised
    rb"r..[\x00-\x0f]\x00",  # memo index below a million, which always fits into memory
    *_WITH_ARGUMENT,
    rb"\x8a(?:" + _LONGS + b")",
    _BARE,
)
_HARMLESS = re.compile(b"(?:%b)*+" % b"|".join(b"%b%b*+" % (opcode, _BARE) for opcode in _OPCODES), re.DOTALL)
TEXTS = {ord("U"): 1, ord("X"): 4, 0x8C: 1, 0x8D: 8}  # opcodes of texts, with the bytes of their length
_SMALL_TUPLE = re.compile(rb"[\x85-\x87](?![pqr\x94])")  # of one to three values, not memoised
MAX_SMALL_TUPLES = 64  # more could be deeply nested
MAX_MEMO = 1 << 20  # memo indices, as in the expression above
# Bytes of pickles after which a process loads the compiled loop: loading takes 0.43 s, as much as it then
# saves.
_LOOP_WORTH_BYTES = 52 << 20
_KEYS = (str, bytes, int, bool, float, type(None))
_MAX_KEY_BITS = 64  # of a number, since hashing reads all of its bits
_MIN_COUNTED_BYTES = 1 << 23  # values may always take this much when written out
_PLAIN = (
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MARK", "STOP", "POP", "POP_MARK", "DUP"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
    *(
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    ),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "PROTO", "FRAME", "MEMOIZE"),
    *("GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT"),
    *("GLOBAL", "STACK_GLOBAL"),  # refused, with the name of what they load
)
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]  # about 30 times slower than the one in C


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, texts and containers, which refuses to import any class."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it wants to load {module_name}.{global_name}")


class _CarefulUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Unpickler limited to the opcodes of plain values, and to keys that are cheap to hash."""

    dispatch: ClassVar[dict[int, Any]] = {
        ord(opcode.code): _PythonUnpickler.dispatch[ord(opcode.code)]
        for opcode in pickletools.opcodes
        if opcode.name in _PLAIN
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it wants to load {module_name}.{global_name}")

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(_with_plain_keys(items))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1].update(_with_plain_keys([key, value]))

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(_with_plain_keys(items))

    dispatch |= {ord("d"): load_dict, ord("s"): load_setitem, ord("u"): load_setitems}


def _with_plain_keys(items: list[Any]) -> dict[Any, Any]:
    """Return alternating keys and values as a dictionary.

    Raises:
        pickle.UnpicklingError: a key is not a text or number.
    """
    for key in items[::2]:
        if type(key) not in _KEYS or (isinstance(key, int) and key.bit_length() > _MAX_KEY_BITS):
            raise pickle.UnpicklingError(f"a key of a dictionary is a {type(key).__name__}")
    return dict(zip(items[::2], items[1::2], strict=True))


def loads(data: bytes) -> Any:
    """Return the plain values of a pickle.

    Pickles can request far more memory than their size: a memo of a billion values, keys that are tuples of
    tuples of the same tuple. A pickle that may contain such is read by an unpickler that checks each key, and
    whose memo grows with the values.

    Raises:
        Exception: any error that a damaged pickle makes the unpickler raise.
    """
    # From a file that supports `peek` the unpickler reads blocks, from others a few bytes at a time.
    file = io.BufferedReader(io.BytesIO(data))
    with without_collection():
        value = _PlainUnpickler(file).load() if is_harmless(data) else _CarefulUnpickler(file).load()
        # Refuse a value that is far larger when shared parts are written out in each place.
        written = pickle.Pickler(_Counter(max(_MIN_COUNTED_BYTES, MAX_REPETITION * len(data))), protocol=4)
        written.fast = True  # nothing is memoised
        written.dump(value)
        return value


class _Counter(io.RawIOBase):
    """A file that keeps nothing, and raises once more than a number of bytes are written."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def write(self, data: Any, /) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise pickle.UnpicklingError("it repeats values excessively")
        return len(data)


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause garbage collection, which takes longer than decoding many containers.

    Should end after the values are freed: the first collection afterwards visits all that were made.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def is_harmless(data: bytes) -> bool:
    """Return whether all opcodes are harmless, which is nearly always so: a quick check."""
    global _checked_bytes
    _checked_bytes += len(data)
    loop = _loop() if _checked_bytes > _LOOP_WORTH_BYTES else None
    return loop(data) if loop else is_harmless_by_expression(data)


_checked_bytes = 0  # bytes checked by this process


@cache
def _loop() -> Callable[[bytes], bool] | None:
    """Return the compiled loop; None where numba is not installed."""
    from dpro.compiled import can_compile

    if not can_compile():
        return None
    from dpro.ingest.reading.opcodes import are_harmless

    return are_harmless


def is_harmless_by_expression(data: bytes) -> bool:
    """Return whether all opcodes are harmless, by a regular expression that matches all opcodes but texts."""
    place, tuples = 0, 0
    while place < len(data):
        match = _HARMLESS.match(data, place)
        place = match.end() if match else place
        if place >= len(data):
            return True
        length_bytes = TEXTS.get(data[place])
        if length_bytes is None:
            tuples += 1
            if tuples > MAX_SMALL_TUPLES or not _SMALL_TUPLE.match(data, place):
                return False
            place += 1
            continue
        start = place + 1 + length_bytes
        place = start + int.from_bytes(data[place + 1 : start], "little")
    return True
