"""`paths.json`: which path connections take, as a plan lays it down or as probes found it.

In: a file. Out: its entries. Connections between two ports are numbered from 0; a path is named by its links
between switches, as `dpro topology` writes them (`leaf0 > spine3`, and `#1` behind it for the second of
cables side by side).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dpro.topology.versioned import VERSION, read_versioned, write_versioned

FILE = "paths.json"  # in a run


class PathEntry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"begin": "from", "end": "to"}
):
    """The path of a connection, or one that a probe took.

    Attributes:
        begin, end: ports of hosts, as node001:nic0. In the file: from, to.
        links: between switches, in order.
        connection: its number among those between these ports.
        source_port: by which routers send it there; None where it is not known.
    """

    begin: str
    end: str
    links: list[str]
    connection: int = 0
    source_port: int | None = None


class PathsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths.

    Attributes:
        version: of the format.
        paths: the entries.
    """

    version: int = VERSION
    paths: list[PathEntry] = []


def read_paths(path: Path) -> list[PathEntry]:
    """The entries of a file.

    Raises:
        InputError: it cannot be read, or is no such file.
    """
    return read_versioned(path, PathsFile).paths


def write_paths(entries: Sequence[PathEntry], path: Path) -> None:
    """Write paths to a file, whole or not at all.

    Args:
        entries: the paths.

    Raises:
        InputError: the file cannot be written.
    """
    write_versioned(PathsFile(paths=list(entries)), path)
