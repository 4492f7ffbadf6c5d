"""Rings and trees in NCCL's debug log: hand-written logs of four ranks on two hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dpro.errors import InputError
from dpro.topology.kept import GroupChannels, read_channels, write_channels
from dpro.topology.nccl_log import read_nccl_logs

RINGS = ((0, 1, 2, 3), (0, 1, 3, 2))
PARENTS = ((-1, 0, 0, 2), (2, 0, 3, -1))  # by channel, of each member


def printed(member: int, *, graph: bool = True, orders: bool = True, start: bool = True) -> Iterator[str]:
    """What a member prints.

    Args:
        member: of the communicator; two are on each host.
        graph: whether its neighbours are printed.
        orders: whether member 0 prints the order of rings.
        start: whether the version prints where the communicator begins, and its id.
    """
    begins = f"node{member // 2}:{100 + member}:7 [{member % 2}] NCCL INFO "
    whose = f"ncclCommInitRank comm 0x5{member} rank {member} nranks 4 cudaDev 0 busId 1000 "
    identity = "commId 0xabc " if start else ""
    if start:
        yield f"{begins}{whose}{identity}- Init START"
    if member == 0 and orders:
        for channel, ring in enumerate(RINGS):
            yield f"{begins}Channel {channel:02}/02 :    " + "   ".join(map(str, ring))
    for channel, ring in enumerate(RINGS) if graph else ():
        at = ring.index(member)
        yield f"{begins}Ring {channel:02} : {ring[at - 1]} -> {member} -> {ring[(at + 1) % 4]}"
    trees = (f"[{channel}] -1/-1/-1->{member}->{up[member]}" for channel, up in enumerate(PARENTS))
    yield f"{begins}Trees {' '.join(trees)}"
    yield f"{begins}Channel 00/0 : {member}[0] -> {(member + 1) % 4}[0] [send] via NET/IB/0/GDRDMA"
    yield f"{begins}{whose}{identity}- Init COMPLETE"


def log(folder: Path, lines: Sequence[str]) -> Path:
    """A log in which the lines stand, with others.

    Args:
        folder: where it is written.
        lines: of NCCL.
    """
    file = folder / "job.log"
    file.write_text("\n".join(["step 1 loss 3.2", *(f"[default0]:{line}" for line in lines), "done"]))
    return file


def test_rings_and_trees_of_all_members_are_read(tmp_path: Path) -> None:
    lines = [
        line for each in zip(*map(list, (printed(at, orders=False) for at in range(4)))) for line in each
    ]
    (found,) = read_nccl_logs([log(tmp_path, lines)])
    assert (found.size, found.rings, found.trees) == (4, RINGS, PARENTS)
    assert found.places[3] == ("node1", 103)


def test_the_order_that_member_0_prints_is_enough_for_rings(tmp_path: Path) -> None:
    """Without the lines of GRAPH, and of a version that prints no id: nothing joins the four members."""
    (found, *others) = read_nccl_logs([log(tmp_path, [*printed(0, graph=False, start=False)])])
    assert (found.rings, found.trees, others) == (RINGS, (), [])


def test_of_a_log_that_lacks_a_member_neither_is_known(tmp_path: Path) -> None:
    lines = [line for member in (0, 1, 2) for line in printed(member, orders=False)]
    with pytest.raises(InputError, match=r"no rings or trees of NCCL's: set NCCL_DEBUG=INFO"):
        read_nccl_logs([log(tmp_path, lines)])


def test_an_order_that_was_cut_off_is_completed_by_neighbours(tmp_path: Path) -> None:
    lines = [line for member in range(4) for line in printed(member)]
    cut = [line.removesuffix("   3   2").removesuffix("   2   3") for line in lines]
    (found,) = read_nccl_logs([log(tmp_path, cut)])
    assert found.rings == RINGS


def test_two_communicators_of_one_thread_are_distinguished(tmp_path: Path) -> None:
    second = [line.replace("0xabc", "0xdef").replace("nranks 4", "nranks 2") for line in printed(0)]
    found = read_nccl_logs([log(tmp_path, [*printed(0), *second])])
    assert [each.size for each in found] == [4, 2]
    assert (found[0].rings, found[1].rings) == (RINGS, ())  # an order of four is none of two


def test_numbers_that_cannot_be_are_no_communicator(tmp_path: Path) -> None:
    lines = [line.replace("rank 0 nranks 4", "rank 9 nranks 4") for line in printed(0)]
    with pytest.raises(InputError, match="no rings or trees"):
        read_nccl_logs(
            [log(tmp_path, [*lines, "x:1:1 [0] NCCL INFO Ring 00 : " + "9" * 5000 + " -> 1 -> 2"])]
        )


def test_channels_that_are_written_come_back(tmp_path: Path) -> None:
    groups = [GroupChannels([0, 2], [[2, 0]], [[-1, 0]])]
    write_channels(groups, tmp_path / "channels.json")
    assert read_channels(tmp_path / "channels.json") == groups


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (GroupChannels([1, 0]), "ranks: two or more, each once, in ascending order"),
        (GroupChannels([0, 1], [[0, 1], [0, 0]]), r"groups\[0\]: rings\[1\]: does not have each rank"),
        (
            GroupChannels([0, 1, 2], [], [[-1, 2, 1]]),
            r"trees\[0\]: the parents of its ranks do not form a tree",
        ),
        (GroupChannels([0, 1], [], [[-1, -1]]), r"trees\[0\]"),
        (GroupChannels([0, 1], [], [[-1, 5]]), r"trees\[0\]"),
    ],
)
def test_a_ring_or_tree_that_cannot_be_is_refused_with_its_place(
    tmp_path: Path, group: GroupChannels, says: str
) -> None:
    write_channels([group], tmp_path / "channels.json")
    with pytest.raises(InputError, match=says):
        read_channels(tmp_path / "channels.json")
