"""Readers and writers of the JSON files on the network in a run directory.

`paths.json` has the paths of connections, as planned or as found by probes. Connections between two ports are
numbered from 0; a path is a list of links between switches, as `dpro topology` writes them (`leaf0 > spine3`,
with `#1` appended for the second of several parallel cables). `channels.json` has the rings and trees of
groups of ranks, as printed by NCCL: a ring visits each rank of its group once, and a tree has one root.
Files are checked when read, and written atomically.
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
    """The content of such a file."""

    @property
    def version(self) -> int:
        """Version of the format."""


_File = TypeVar("_File", bound=Versioned)


def read_versioned(path: Path, of: type[_File]) -> _File:
    """Return the content of a file.

    Raises:
        InputError: the file cannot be read, or is invalid or of another version.
    """
    try:
        held = msgspec.json.decode(read_small(path), type=of)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: {first_line(error)}") from error
    if held.version != VERSION:
        raise InputError(f"{path}: version {held.version} is not known: this is version {VERSION}")
    return held


def as_json(held: Versioned) -> str:
    """Return content as the text of its file."""
    return msgspec.json.format(msgspec.json.encode(held), indent=1).decode() + "\n"


def write_versioned(held: Versioned, path: Path) -> None:
    """Write content to a file atomically.

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
    """The path of a connection, or of a probe.

    Attributes:
        begin, end: ports of hosts, such as node001:nic0. In the file: from, to.
        links: links between switches, in order.
        connection: number of the connection among those between these ports.
        source_port: source port that makes routers choose this path; None where unknown.
    """

    begin: str
    end: str
    links: list[str]
    connection: int = 0
    source_port: int | None = None


class PathsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `paths.json`.

    Attributes:
        version: version of the format.
        paths: the entries.
    """

    version: int = VERSION
    paths: list[PathEntry] = []


def read_paths(path: Path) -> list[PathEntry]:
    """Return the paths in a file.

    Raises:
        InputError: the file cannot be read, or is invalid.
    """
    return read_versioned(path, PathsFile).paths


def write_paths(entries: Sequence[PathEntry], path: Path) -> None:
    """Write paths to a file atomically.

    Raises:
        InputError: the file cannot be written.
    """
    write_versioned(PathsFile(paths=list(entries)), path)


CHANNELS = "channels.json"  # in a run


class GroupChannels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The channels of a group of ranks; each channel carries an equal part of the bytes.

    Attributes:
        ranks: ranks of the group, in ascending order.
        rings: by channel, the ranks in the order of its ring; empty where unknown.
        trees: by channel, the parent of each of `ranks`, -1 for the root; empty where unknown.
    """

    ranks: list[int]
    rings: list[list[int]] = []
    trees: list[list[int]] = []

    def wrong(self) -> str:
        """Return what is invalid, in words; empty if nothing is."""
        if len(self.ranks) < 2 or self.ranks != sorted(set(self.ranks)) or self.ranks[0] < 0:
            return "ranks: two or more, each once, in ascending order"
        for number, ring in enumerate(self.rings):
            if sorted(ring) != self.ranks:
                return f"rings[{number}]: does not have each rank of the group once"
        for number, parents in enumerate(self.trees):
            if len(parents) != len(self.ranks) or not _is_tree(dict(zip(self.ranks, parents))):
                return f"trees[{number}]: the parents of its ranks do not form a tree"
        return ""


def _is_tree(parent_of: dict[int, int]) -> bool:
    """Return whether all ranks reach one root."""
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
    """Content of `channels.json`.

    Attributes:
        version: version of the format.
        groups: groups of ranks, each once.
    """

    version: int = VERSION
    groups: list[GroupChannels] = []


def read_channels(path: Path) -> list[GroupChannels]:
    """Return the groups in a file, with their channels.

    Raises:
        InputError: the file cannot be read or is invalid, or a ring or tree is impossible.
    """
    groups = read_versioned(path, ChannelsFile).groups
    for number, group in enumerate(groups):
        if wrong := group.wrong():
            raise InputError(f"{path}: groups[{number}]: {wrong}")
    return groups


def write_channels(groups: Sequence[GroupChannels], path: Path) -> None:
    """Write channels to a file atomically.

    Raises:
        InputError: the file cannot be written.
    """
    write_versioned(ChannelsFile(groups=list(groups)), path)
