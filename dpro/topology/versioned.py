"""The JSON files that a run keeps of its network: read, and written whole.

In: a file, and what it holds. Out: that, checked for its types and its version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from dpro.errors import InputError, first_line
from dpro.folders import written_whole
from dpro.limits import read_small

VERSION = 1


class Versioned(Protocol):
    """What such a file holds."""

    @property
    def version(self) -> int:
        """Of the format."""


_File = TypeVar("_File", bound=Versioned)


def read_versioned(path: Path, of: type[_File]) -> _File:
    """What a file holds.

    Raises:
        InputError: it cannot be read, or is no such file.
    """
    try:
        found = msgspec.json.decode(read_small(path), type=of)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: {first_line(error)}") from error
    if found.version != VERSION:
        raise InputError(f"{path}: version {found.version} is not known: this is version {VERSION}")
    return found


def as_json(held: Versioned) -> str:
    """What is in a file that holds something."""
    return msgspec.json.format(msgspec.json.encode(held), indent=1).decode() + "\n"


def write_versioned(held: Versioned, path: Path) -> None:
    """Write a file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        with written_whole(path.parent, path.name) as file:
            file.write(as_json(held).encode())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
