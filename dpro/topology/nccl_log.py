"""Parser of the rings and trees of communicators that NCCL prints under `NCCL_DEBUG=INFO`.

Takes the log of a job, or the files of `NCCL_DEBUG_FILE`, with any other lines among them; returns one
`LoggedCommunicator` each. The lines are those of NCCL's `init.cc` and `graph/rings.cc`, 2.5 to 2.28: member 0
prints the order of each ring (`Channel 00/08 :  0 1 2 3`, cut off after 28 ranks), and each member prints its
neighbours (`Ring 00 : 3 -> 0 -> 1`, with `NCCL_DEBUG_SUBSYS=INIT,GRAPH`) and its position in trees
(`Trees [0] 1/-1/-1->0->3`: children, itself, parent). They come between `rank R nranks N … Init START` (since
2.17) and `Init COMPLETE` of the same thread. The network ports of rings are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dpro.errors import InputError

MAX_CHANNELS = 256  # more than any version of NCCL has
MAX_MEMBERS = 1_000_000
MAX_LINE = 1 << 20  # characters; longer lines are read in pieces
_LINE = re.compile(r"(?<![^\s:\[\]])([^\s:\[\]]+):(\d{1,9}):(\d{1,9}) \[-?\d{1,9}\] NCCL INFO (.*)")
_INIT = re.compile(
    r"comm (0x[0-9a-f]+) rank (\d{1,9}) nranks (\d{1,9}) .{0,300}?"
    r"(?:commId (0x[0-9a-f]+) )?- Init (START|COMPLETE)"
)
_ORDER = re.compile(r"Channel (\d{1,9})/(\d{1,9}) :((?:\s+\d{1,9})+)\s*$")
_NEIGHBOURS = re.compile(r"Ring (\d{1,9}) : (\d{1,9}) -> (\d{1,9}) -> (\d{1,9})\s*$")
_TREE = re.compile(r"\[(\d{1,9})\] -?\d{1,9}/-?\d{1,9}/-?\d{1,9}->(\d{1,9})->(-?\d{1,9})")


@dataclass(frozen=True)
class LoggedCommunicator:
    """A communicator, as logged by NCCL.

    Attributes:
        size: number of members.
        places: host and process id of each member in the log.
        rings: by channel, the members in the order of its ring; empty if the log is incomplete.
        trees: by channel, the parent of each member, -1 for the root; empty if the log is incomplete.
    """

    size: int
    places: dict[int, tuple[str, int]]
    rings: tuple[tuple[int, ...], ...]
    trees: tuple[tuple[int, ...], ...]


@dataclass
class _Part:
    """The lines of one member on one communicator.

    Attributes:
        key: identity of the communicator, equal for all members.
        orders: by channel, the members in the order of its ring.
        after: by channel, the next member of its ring.
        parent: by channel, the parent in its tree, -1 for the root.
    """

    host: str
    pid: int
    key: str = ""
    member: int = -1
    size: int = 0
    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    after: dict[int, int] = field(default_factory=dict)
    parent: dict[int, int] = field(default_factory=dict)
    channels: int = 0


def read_nccl_logs(paths: Sequence[Path]) -> list[LoggedCommunicator]:
    """Return the communicators in logs, in order of appearance.

    Args:
        paths: files, or folders of files.

    Raises:
        InputError: a file cannot be read, or no file has rings or trees.
    """
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    parts: dict[str, dict[int, _Part]] = {}
    for file in files:
        if not file.is_file():
            continue
        try:
            with file.open(encoding="utf-8", errors="replace") as content:
                for part in _parts(iter(partial(content.readline, MAX_LINE), "")):
                    parts.setdefault(part.key, {})[part.member] = part
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from error
    joined = [_joined(list(members.values())) for members in parts.values()]
    if not any(communicator.rings or communicator.trees for communicator in joined):
        names = ", ".join(map(str, paths))
        raise InputError(
            f"{names}: no rings or trees of NCCL's: set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,GRAPH, "
            "and give what all ranks print"
        )
    return joined


def _parts(lines: Iterable[str]) -> Iterator[_Part]:
    """Yield the part of each member of each communicator, also the incomplete ones of a truncated log."""
    open_: dict[tuple[str, int, int], _Part] = {}
    for line in lines:
        if "NCCL INFO" not in line or not (matched := _LINE.search(line)):
            continue
        thread = matched[1], int(matched[2]), int(matched[3])
        said = matched[4]
        if init := _INIT.search(said):
            if init[5] == "START" and thread in open_:
                yield from _if_identified(open_.pop(thread))
            part = open_.setdefault(thread, _Part(*thread[:2]))
            part.key = init[4] or f"{thread[0]}:{thread[1]}:{init[1]}"
            part.member, part.size = int(init[2]), int(init[3])
            if init[5] == "COMPLETE":
                yield from _if_identified(open_.pop(thread))
        elif said.startswith(("Channel", "Ring", "Trees")):
            part = open_.setdefault(thread, _Part(*thread[:2]))
            if order := _ORDER.match(said):
                part.orders[int(order[1])] = tuple(map(int, order[3].split()))
                part.channels = max(part.channels, int(order[2]))
            elif ring := _NEIGHBOURS.match(said):
                part.after[int(ring[1])] = int(ring[4])
            elif said.startswith("Trees"):
                part.parent.update({int(channel): int(up) for channel, _, up in _TREE.findall(said)})
    for part in open_.values():
        yield from _if_identified(part)


def _if_identified(part: _Part) -> Iterator[_Part]:
    """Yield the part if its member and the size of its communicator are known and plausible."""
    if 0 <= part.member < part.size <= MAX_MEMBERS and part.size > 1:
        yield part


def _joined(parts: list[_Part]) -> LoggedCommunicator:
    size = parts[0].size
    parts = [part for part in parts if part.size == size]
    places = {part.member: (part.host, part.pid) for part in parts}
    orders = {channel: order for part in parts for channel, order in part.orders.items()}
    after = {
        channel: {part.member: part.after[channel] for part in parts if channel in part.after}
        for channel in {channel for part in parts for channel in part.after}
    }
    channels = min(
        max(*(part.channels for part in parts), *(1 + channel for channel in after), 0), MAX_CHANNELS
    )
    rings = []
    for channel in range(channels):
        order = orders.get(channel, ())
        rings.append(order if len(order) == size else _ring_order(after.get(channel, {}), size))
    whole = bool(rings) and all(sorted(ring) == list(range(size)) for ring in rings)
    return LoggedCommunicator(size, places, tuple(rings) if whole else (), _trees(parts, size))


def _ring_order(after: dict[int, int], size: int) -> tuple[int, ...]:
    """Return the order of a ring from each member's successor, starting at member 0."""
    order: list[int] = []
    rank = 0
    while rank in after and len(order) < size:
        order.append(rank)
        rank = after[rank]
    return tuple(order)


def _trees(parts: list[_Part], size: int) -> tuple[tuple[int, ...], ...]:
    """Return by channel the parent of each member; empty unless every member printed all channels."""
    by_member = {part.member: part.parent for part in parts}
    channels = set(by_member.get(0, {}))
    complete = channels and all(set(by_member.get(member, ())) == channels for member in range(size))
    if not complete:
        return ()
    return tuple(tuple(by_member[member][channel] for member in range(size)) for channel in sorted(channels))
