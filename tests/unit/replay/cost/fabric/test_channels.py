"""Flows along the rings and trees that were recorded: hops and shares worked out by hand."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.members import members_text
from dpro.replay.cost.fabric.flows import Channels, Flows, flows_of
from dpro.replay.cost.fabric.network import fabric_of
from dpro.replay.cost.fabric.placement import INSPECTOR, LOG, channels_of_run, groups_of_log, placed
from dpro.schema import COLLECTIVES, SENDS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from dpro.topology.kept import CHANNELS, GroupChannels, write_channels
from dpro.topology.nccl_log import LoggedCommunicator
from tests.fabrics import crossing_ring

FABRIC = fabric_of(fat_tree(FabricSize(2, gpus=2, nics=2, ports=16)))
GPUS = [gpu for own in FABRIC.gpus for gpu in own]


def named(flows: Flows) -> list[tuple[str, str, float]]:
    """Both ends of flows, and their shares."""
    ends = zip(flows.begin.tolist(), flows.end.tolist(), flows.share.tolist())
    return sorted((FABRIC.names[begin], FABRIC.names[end], share) for begin, end, share in ends)


def test_each_recorded_ring_has_an_equal_part_from_the_ports_of_its_gpus() -> None:
    """Members 0 and 1 on node0, 2 and 3 on node1; the rings leave node0 by 1 > 2 and by 0 > 3."""
    rings = (((0, 1), (1, 2), (2, 3), (3, 0)), ((1, 0), (0, 3), (3, 2), (2, 1)))
    flows = flows_of(FABRIC, [GPUS], ["all_gather"], channels=[Channels(rings)])
    assert named(flows) == [
        ("node0:gpu0", "node0:gpu1", 0.5),
        ("node0:gpu1", "node0:gpu0", 0.5),
        ("node0:nic0", "node1:nic1", 0.5),
        ("node0:nic1", "node1:nic0", 0.5),
        ("node1:gpu0", "node1:gpu1", 0.5),
        ("node1:gpu1", "node1:gpu0", 0.5),
        ("node1:nic0", "node0:nic1", 0.5),
        ("node1:nic1", "node0:nic0", 0.5),
    ]


def test_along_recorded_trees_parents_and_children_send_both_ways() -> None:
    """Of four members each sends 4 / 6 of what the busiest of a ring does; two trees have half of it each."""
    trees = (((1, 0), (2, 0), (3, 2)), ((0, 1), (1, 3), (2, 3)))
    flows = flows_of(FABRIC, [GPUS], ["all_reduce"], ["TREE"], [Channels((), trees)])
    assert flows.share == pytest.approx([1 / 3] * 12)
    across = [(one, other) for one, other, _ in named(flows) if "nic" in one]
    assert across == [
        ("node0:nic0", "node1:nic0"), ("node0:nic1", "node1:nic1"),
        ("node1:nic0", "node0:nic0"), ("node1:nic1", "node0:nic1"),
    ]  # fmt: skip


def test_rings_of_which_only_hops_between_hosts_are_known_have_a_chain_inside() -> None:
    flows = flows_of(FABRIC, [GPUS], ["all_reduce"], channels=[Channels((((1, 2), (3, 0)),))])
    assert named(flows) == [
        ("node0:gpu0", "node0:gpu1", 1.0),
        ("node0:nic1", "node1:nic0", 1.0),
        ("node1:gpu0", "node1:gpu1", 1.0),
        ("node1:nic1", "node0:nic0", 1.0),
    ]


def test_an_all_to_all_keeps_a_flow_for_each_pair_whatever_was_recorded() -> None:
    rings = (((0, 1), (1, 2), (2, 3), (3, 0)),)
    flows = flows_of(FABRIC, [GPUS], ["all_to_all"], channels=[Channels(rings)])
    assert len(named(flows)) == 12


def test_a_run_takes_the_rings_that_it_keeps(tmp_path: Path) -> None:
    """By ranks 0 to 3 the ring crosses the spine four times; by the recorded one, two times."""
    graph = crossing_ring(tmp_path)  # ranks 0 and 2 are on node0 and node1, 1 and 3 on node2 and node3
    write_channels([GroupChannels([0, 1, 2, 3], [[0, 2, 3, 1]])], tmp_path / CHANNELS)
    at = placed(graph)
    assert at.communications.channels_from == LOG
    assert set(_across(at.flows)) == {(0, 1), (1, 3), (3, 2), (2, 0)}


def _across(flows: Flows) -> list[tuple[int, int]]:
    """Hosts of both ends of flows, of hosts with a GPU and a port."""
    ends = zip(flows.begin.tolist(), flows.end.tolist())
    return [(begin // 2, end // 2) for begin, end in ends]


def run_of(folder: Path, groups: list[list[int]], sends: pl.DataFrame | None = None) -> Run:
    """Four ranks on two hosts, and a call of each group.

    Args:
        folder: of the run.
        groups: of ranks.
        sends: of NCCL's proxies.
    """
    workers = [
        {"rank": rank, "host": f"node{rank // 2}.cluster", "pid": 100 + rank, "local_rank": rank % 2}
        for rank in range(4)
    ]
    calls = [
        {
            "rank": rank,
            "op": "all_reduce",
            "group": f"g{at}",
            "group_ranks": members_text(ranks),
            "sequence": 1,
        }
        for at, ranks in enumerate(groups)
        for rank in ranks
    ]
    for at, call in enumerate(calls):
        call["collective_id"] = at
    write_part(folder, COLLECTIVES, "all", pl.DataFrame(calls))
    write_part(folder, WORKERS, "all", pl.DataFrame(workers))
    if sends is not None:
        write_part(folder, SENDS, "all", sends)
    write_manifest(folder, Manifest(world_size=4, ranks=[0, 1, 2, 3]))
    return open_run(folder)


def logged(size: int, places: dict[int, int], ring: tuple[int, ...]) -> LoggedCommunicator:
    """A communicator of which some members printed something.

    Args:
        size: its members.
        places: by member, its rank: its process is known.
        ring: the order of its members.
    """
    return LoggedCommunicator(
        size, {member: (f"node{rank // 2}", 100 + rank) for member, rank in places.items()}, (ring,), ()
    )


def test_members_are_ranks_by_their_processes_or_where_one_group_fits(tmp_path: Path) -> None:
    run = run_of(tmp_path, [[0, 2], [1, 3]])
    found = groups_of_log(
        run,
        [
            logged(4, {0: 0}, (0, 2, 1, 3)),  # all ranks of the job: members are numbered as these
            logged(2, {0: 3, 1: 1}, (0, 1)),  # both processes known, in whatever order
            logged(2, {0: 0}, (0, 1)),  # member 0 is rank 0: the group is 0, 2
        ],
    )
    assert found.groups == [
        GroupChannels([0, 1, 2, 3], [[0, 2, 1, 3]]),
        GroupChannels([1, 3], [[3, 1]]),
        GroupChannels([0, 2], [[0, 2]]),
    ]
    assert found[1:] == (0, 0, 0)


def test_what_does_not_fit_or_differs_is_left_out_and_counted(tmp_path: Path) -> None:
    run = run_of(tmp_path, [[0, 2], [0, 1]])
    found = groups_of_log(
        run,
        [
            logged(2, {0: 0}, (0, 1)),  # two groups begin with rank 0
            logged(3, {}, (0, 1, 2)),  # no group has three
            LoggedCommunicator(4, {}, (), ()),
            logged(4, {}, (0, 1, 2, 3)),
            logged(4, {}, (0, 2, 1, 3)),
        ],
    )
    assert found == ([], 2, 1, 1)


def test_what_proxies_sent_says_where_rings_cross(tmp_path: Path) -> None:
    """Channel 0 crosses by 1 > 2 and 3 > 0, channel 1 by 0 > 3 and 2 > 1."""
    hops = [(0, 1, 2), (0, 3, 0), (1, 0, 3), (1, 2, 1)]
    sends = pl.DataFrame(
        [
            {
                "rank": rank, "member": rank, "peer_member": to, "group": "g0", "sequence": 1,
                "channel": channel,
                "operation": 1, "time_ns": 5, "steps": 1, "bytes": 10, "wire_ns": 7, "source": "x",
            }
            for channel, rank, to in hops
        ],
        schema_overrides={"rank": pl.Int32, "member": pl.Int32, "peer_member": pl.Int32, "channel": pl.Int32},
    )  # fmt: skip
    found = channels_of_run(run_of(tmp_path, [[0, 1, 2, 3]], sends))
    assert found.source == INSPECTOR
    assert found.of == {(0, 1, 2, 3): Channels((((1, 2), (3, 0)), ((0, 3), (2, 1))))}
