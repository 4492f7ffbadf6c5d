"""`channels.json`: the rings and trees that groups of ranks communicate along, as NCCL printed them.

In: a file. Out: its groups, checked: a ring passes each rank of its group once, and a tree has one root.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dpro.errors import InputError
from dpro.topology.versioned import VERSION, read_versioned, write_versioned

FILE = "channels.json"  # in a run


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
        for at, ring in enumerate(self.rings):
            if sorted(ring) != self.ranks:
                return f"rings[{at}]: does not have each rank of the group once"
        for at, parents in enumerate(self.trees):
            if len(parents) != len(self.ranks) or not _is_tree(dict(zip(self.ranks, parents))):
                return f"trees[{at}]: the parents of its ranks make no tree"
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
    for at, group in enumerate(groups):
        if wrong := group.wrong():
            raise InputError(f"{path}: groups[{at}]: {wrong}")
    return groups


def write_channels(groups: Sequence[GroupChannels], path: Path) -> None:
    """Write channels to a file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_versioned(ChannelsFile(groups=list(groups)), path)
