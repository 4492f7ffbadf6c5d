"""Rings and trees of groups of ranks, where NCCL's log or its Inspector recorded them.

In: a run, perhaps communicators of NCCL's log. Out: `Channels` by the ranks of a group. NCCL numbers the
members of a communicator itself: which ranks of the job they are is known by their hosts and processes, or
where only one group of the run fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import polars as pl

from dpro.members import members_of
from dpro.replay.fabric.flows import MESSAGES, PAIRWISE, TREE, Channels, Hop
from dpro.schema import COLLECTIVES, SENDS, WORKERS
from dpro.store import Run
from dpro.topology.channels import FILE, GroupChannels, read_channels
from dpro.topology.nccl_log import LoggedCommunicator

LOG = "NCCL's log"
INSPECTOR = "what NCCL's proxies sent"
Ranks = tuple[int, ...]  # of a group, in ascending order


class RecordedChannels(NamedTuple):
    """Channels of the groups of a run.

    Attributes:
        of: by the ranks of a group.
        source: where they were recorded, in words; empty where none were.
    """

    of: Mapping[Ranks, Channels]
    source: str


class PlacedGroups(NamedTuple):
    """Communicators of a log as groups of ranks.

    Attributes:
        groups: with their channels.
        unknown: how many communicators have ranks that are not known.
        incomplete: of how many the log lacks members, so that neither rings nor trees are known.
        differing: of how many groups several communicators have other rings or trees than the others.
    """

    groups: list[GroupChannels]
    unknown: int
    incomplete: int
    differing: int


def channels_of_run(run: Run | None) -> RecordedChannels:
    """The recorded channels of a run's groups: as NCCL's log has them, else as its proxies sent.

    Raises:
        InputError: the file that the run keeps is wrong.
    """
    if run is None:
        return RecordedChannels({}, "")
    if (run.path / FILE).is_file():
        groups = read_channels(run.path / FILE)
        return RecordedChannels({tuple(each.ranks): _hops(each) for each in groups}, LOG if groups else "")
    sent = _sent_along(run)
    return RecordedChannels(sent, INSPECTOR if sent else "")


def _hops(group: GroupChannels) -> Channels:
    place = {rank: at for at, rank in enumerate(group.ranks)}
    rings = tuple(
        tuple((place[one], place[other]) for one, other in zip(ring, [*ring[1:], ring[0]]))
        for ring in group.rings
    )
    trees = tuple(
        tuple((at, place[up]) for at, up in enumerate(parents) if up >= 0) for parents in group.trees
    )
    return Channels(rings, trees)


def _sent_along(run: Run) -> dict[Ranks, Channels]:
    """By group, between which members the proxies of NCCL sent on each channel: hops between hosts alone."""
    sends = run.table(SENDS)
    if not sends.height:
        return {}
    call = ["rank", "group", "sequence"]
    calls = run.table(COLLECTIVES, [*call, "op", "algorithm"])
    ranks: dict[str, Ranks] = {
        group: tuple(sorted(ranks))
        for group, ranks in calls.group_by("group").agg(pl.col("rank").unique()).iter_rows()
    }
    places = sends.select("group", to="rank", peer_member="member").unique()
    places = places.unique(["group", "peer_member"], keep="none")
    chained = ~pl.col("op").is_in([*PAIRWISE, *MESSAGES])
    hops = (
        sends.join(places, on=["group", "peer_member"])
        .join(calls.filter(chained).unique(call, keep="none"), on=call)
        .select("group", "channel", "rank", "to", tree=pl.col("algorithm") == TREE)
        .unique()
        .sort("group", "tree", "channel", "rank", "to")
    )
    found: dict[tuple[Ranks, bool], dict[int, list[Hop]]] = defaultdict(lambda: defaultdict(list))
    for group, channel, rank, to, tree in hops.iter_rows():
        of = ranks[group]
        if tree and rank > to:
            continue  # an edge of a tree is used both ways
        if rank in of and to in of:
            found[of, tree][channel].append((of.index(rank), of.index(to)))
    return {
        of: Channels(*(tuple(map(tuple, found.get((of, tree), {}).values())) for tree in (False, True)))
        for of in {key for key, _ in found}
    }


def groups_of_log(run: Run, communicators: Sequence[LoggedCommunicator]) -> PlacedGroups:
    """Communicators of a log as groups of a run's ranks."""
    workers = run.table(WORKERS).select("host", "pid", "rank")
    rank_of = {(_short(host), pid): rank for host, pid, rank in workers.iter_rows() if host and pid}
    texts = run.table(COLLECTIVES, ["group_ranks"])["group_ranks"].unique()
    known = [members_of(each) for each in texts.sort() if each]
    groups: dict[Ranks, list[GroupChannels]] = {}
    unknown = incomplete = 0
    for each in communicators:
        if not each.rings and not each.trees:
            incomplete += 1
            continue
        seen = {
            member: rank_of[_short(host), pid]
            for member, (host, pid) in each.places.items()
            if (_short(host), pid) in rank_of
        }
        members = _members(each.size, seen, known, run.manifest.world_size)
        if members is None:
            unknown += 1
            continue
        groups.setdefault(tuple(sorted(members)), []).append(_of_ranks(each, members))
    agreed = [found[0] for found in groups.values() if all(other == found[0] for other in found)]
    right = [group for group in agreed if not group.wrong()]
    return PlacedGroups(right, unknown, incomplete + len(agreed) - len(right), len(groups) - len(agreed))


def _short(host: str) -> str:
    return host.partition(".")[0]


def _members(
    size: int, seen: Mapping[int, int], groups: Sequence[Ranks], world_size: int | None
) -> Ranks | None:
    """The rank of each member: all seen, else the one group of this size that fits those that are."""
    if len(seen) == size and len(set(seen.values())) == size:
        return tuple(seen[member] for member in range(size))
    whole = [tuple(range(size))] if size == world_size else []
    fits = {
        group
        for group in (*groups, *whole)
        if len(group) == size and all(group[member] == rank for member, rank in seen.items())
    }
    return fits.pop() if len(fits) == 1 else None


def _of_ranks(each: LoggedCommunicator, members: Ranks) -> GroupChannels:
    """The channels of a communicator by the ranks of the job."""
    ranks = sorted(members)
    member_of = {rank: member for member, rank in enumerate(members)}
    trees = [
        [members[tree[member_of[rank]]] if tree[member_of[rank]] >= 0 else -1 for rank in ranks]
        for tree in each.trees
        if all(-1 <= up < each.size for up in tree)
    ]
    return GroupChannels(ranks, [[members[at] for at in ring] for ring in each.rings], trees)
