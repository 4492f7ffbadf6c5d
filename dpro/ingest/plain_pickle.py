"""Pickles of numbers, texts and containers, read without trusting them.

In: bytes. Out: the values; nothing that would import a class, and nothing that would take all memory.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_REMEMBER = ("PUT", "BINPUT", "LONG_BINPUT")
# What pickles of plain values are nearly made of: opcodes with an argument of fixed size or none, the most
# frequent ones first. A place to remember a value at is one of them if it is below a million, for which there
# is room in any case.
_BARE = rb"[]()}.012Nadelstu\x81\x85-\x89\x8f-\x91\x94]"
_WITH_ARGUMENT = (
    rb"[\x80Khq].",
    rb"r..[\x00-\x0f]\x00",
    rb"M..",
    rb"\x8a(?:\x08.{8}|\x04.{4}|\x03.{3}|\x05.{5}|\x06.{6}|\x07.{7}|\x02..|\x01.|\x00)",
    rb"[Jj]....",
    rb"[G\x95].{8}",
)
_HARMLESS = re.compile(
    b"(?:" + b"|".join(each + _BARE + b"*+" for each in _WITH_ARGUMENT) + b"|" + _BARE + b"++)*+", re.DOTALL
)
_TEXTS = {ord("U"): 1, ord("X"): 4, 0x8C: 1, 0x8D: 8}  # opcodes of texts, with the bytes of their length


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts and containers; anything that would import a class is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it wants to load {module_name}.{global_name}")


def loads(data: bytes) -> Any:
    """The plain values of a pickle.

    An unpickler makes room for every place up to the one that it is told to remember something at: a few
    bytes can ask for all memory. No honest pickle has more places than bytes.

    Raises:
        Exception: whatever a damaged pickle makes the unpickler raise.
    """
    if not _is_harmless(data):
        for opcode, place, _ in pickletools.genops(data):
            if opcode.name in _REMEMBER and isinstance(place, int) and place > len(data):
                raise pickle.UnpicklingError(f"it wants to remember {place} values")
    # From a file that lets it look ahead the unpickler reads blocks, from another a few bytes at a time.
    unpickler = _PlainUnpickler(io.BufferedReader(io.BytesIO(data)))
    with without_collection():
        return unpickler.load()


@contextmanager
def without_collection() -> Iterator[None]:
    """Let garbage lie: to look for it whenever so many containers were made takes longer than they do.

    Best left when the values are gone: the first look afterwards goes through all that were made.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _is_harmless(data: bytes) -> bool:
    """Whether there are only opcodes that ask for little memory: a quick look at what is nearly always so."""
    place = 0
    while place < len(data):
        match = _HARMLESS.match(data, place)
        place = match.end() if match else place
        if place >= len(data):
            return True
        length_bytes = _TEXTS.get(data[place])
        if length_bytes is None:
            return False
        start = place + 1 + length_bytes
        place = start + int.from_bytes(data[place + 1 : start], "little")
    return True
