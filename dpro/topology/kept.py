"""The JSON files that a run keeps of its network: read and checked, and written whole.

`paths.json` has the path that connections take, as a plan lays it down or as probes found it. Connections
between two ports are numbered from 0; a path is named by its links between switches, as `dpro topology`
writes them (`leaf0 > spine3`, and `#1` behind it for the second of cables side by side). `channels.json` has
the rings and trees that groups of ranks communicate along, as NCCL printed them: a ring passes each rank of
its group once, and a tree has one root.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        held = msgspec.json.decode(read_small(path), type=of)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: {first_line(error)}") from error
    if held.version != VERSION:
        raise InputError(f"{path}: version {held.version} is not known: this is version {VERSION}")
    return held


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


PATHS = "paths.json"  # in a run


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

    Raises:
        InputError: the file cannot be written.
    """
    write_versioned(PathsFile(paths=list(entries)), path)


CHANNELS = "channels.json"  # in a run


class GroupChannels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The channels of a group of ranks; each has an equal part of the bytes.

    Attributes:
        ranks: of the group, in ascending order.
        rings: by channel, the ranks in the order of its ring; none where that is not known.
        trees: by channel, the parent of each of `ranks`, -1 of the root; none where that is not known.
    """

    ranks: list[int]
    rings: list[list[int]] = []
    trees: list[list[int]] = []

    def wrong(self) -> str:
        """What of it cannot be, in words; empty where nothing is."""
        if len(self.ranks) < 2 or self.ranks != sorted(set(self.ranks)) or self.ranks[0] < 0:
            return "ranks: two or more, each once, in ascending order"
        for number, ring in enumerate(self.rings):
            if sorted(ring) != self.ranks:
                return f"rings[{number}]: does not have each rank of the group once"
        for number, parents in enumerate(self.trees):
            if len(parents) != len(self.ranks) or not _is_tree(dict(zip(self.ranks, parents))):
                return f"trees[{number}]: the parents of its ranks make no tree"
        return ""


def _is_tree(parent_of: dict[int, int]) -> bool:
    """Whether all ranks reach one root."""
    roots = [rank for rank, up in parent_of.items() if up == -1]
    if len(roots) != 1 or not set(parent_of.values()) <= {*parent_of, -1}:
        return False
    reach = {roots[0]}
    for rank in parent_of:
        way: list[int] = []
        while rank not in reach and rank not in way:
            way.append(rank)
            rank = parent_of[rank]
        if rank not in reach:
            return False
        reach.update(way)
    return True


class ChannelsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Channels of groups.

    Attributes:
        version: of the format.
        groups: of ranks, each once.
    """

    version: int = VERSION
    groups: list[GroupChannels] = []


def read_channels(path: Path) -> list[GroupChannels]:
    """The groups of a file.

    Raises:
        InputError: it cannot be read, or is no such file, or a ring or tree cannot be.
    """
    groups = read_versioned(path, ChannelsFile).groups
    for number, group in enumerate(groups):
        if wrong := group.wrong():
            raise InputError(f"{path}: groups[{number}]: {wrong}")
    return groups


def write_channels(groups: Sequence[GroupChannels], path: Path) -> None:
    """Write channels to a file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_versioned(ChannelsFile(groups=list(groups)), path)
