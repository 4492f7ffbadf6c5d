"""Ranks on other hosts, and other jobs on the same cables: hand-computed, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dpro.errors import DproError
from dpro.extensions.fabric.fabrics import fat_tree
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.registry import parse_edit
from dpro.topology.file import FILE, write
from dpro.topology.kept import PATHS, PathEntry, write_paths
from tests.fabrics import SIZE, crossing_pairs, crossing_ring, on_cable, reducing
from tests.unit.extensions.fabric.edits.test_paths_over import _lasts_us

UP, DOWN = ["leaf0 > spine0 #0", "spine0 > leaf1 #0"], ["leaf1 > spine0 #0", "spine0 > leaf0 #0"]


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> Graph:
    """A ring that crosses the spine four times, all over one cable: half as fast as it could be."""
    folder = tmp_path_factory.mktemp("ring") / "run"
    graph = crossing_ring(folder, 3000)
    ends = [(0, 2, UP), (2, 1, DOWN), (1, 3, UP), (3, 0, DOWN)]
    write_paths([PathEntry(f"node{a}:nic0", f"node{b}:nic0", links) for a, b, links in ends], folder / PATHS)
    return dataclasses.replace(graph, facts={})


def test_ranks_whose_neighbours_are_near_meet_nowhere(ring):
    """In order the ring crosses once each way; only two orders are as good, and turned around the same."""
    assert _lasts_us(ring, "place") == {1500}
    assert _lasts_us(ring, "place:hosts=node0/node1/node2/node3") == {1500}
    (note,) = parse_edit("place").notes(ring)
    assert note.startswith("hosts by their first rank: node")


def test_ranks_that_stay_change_nothing(ring):
    same = "place:hosts=node0/node2/node1/node3"
    assert _lasts_us(ring, same) == {3000}
    assert "no order of hosts" in parse_edit(same).notes(ring)[0]


def test_a_bad_order_costs_what_a_good_one_gains(tmp_path):
    """With planned paths it meets nowhere; by hash most seeds have it meet itself."""
    graph = crossing_ring(tmp_path / "run", hosts=(0, 1, 2, 3))
    for then, lasts in (("plan", {1500}), ("spray", {1500}), ("hash", {3000})):
        assert _lasts_us(graph, f"place:hosts=node0/node2/node1/node3,then={then}") == lasts


def test_another_job_takes_half_of_the_port_that_it_shares(tmp_path):
    """Its ring is over the hosts of the first pair; the second shares cables only, which have room."""
    graph = crossing_pairs(tmp_path / "run")
    write_paths(on_cable((0, 1)), tmp_path / "run" / PATHS)
    known = dataclasses.replace(graph, facts={})
    assert _lasts_us(known, 'beside:hosts="node0,node2",then=spray') == {1000, 2000}
    # Two of three rings share a cable, wherever a plan puts them; the port is shared all the same.
    assert _lasts_us(known, 'beside:hosts="node0,node2",then=plan') in ({1000, 2000}, {2000})


def test_each_other_job_takes_its_share(tmp_path):
    graph = crossing_pairs(tmp_path / "run")
    assert _lasts_us(graph, 'beside:hosts="node0,node2/node2,node0",then=spray') == {1000, 3000}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ("place:hosts=node0/node1", "name 4 hosts, each once"),
        ("place:hosts=node0/node1/node2/node2", "name 4 hosts, each once"),
        ("place:hosts=node0/node1/node2/login", "no host 'login'"),
        ("beside:hosts=node9,then=hash", "no host 'node9'"),
        ("beside:hosts=node1", "a job on one host"),
        ("beside:hosts=node[1-", "brackets do not match"),
    ],
)
def test_hosts_that_are_not_there_are_refused(ring, edit, says):
    with pytest.raises(DproError, match=says):
        parse_edit(edit).apply(ring)


def beside(folder: Path, hosts: tuple[int, ...], lasts_us: float) -> str:
    """An edit: beside a job of two ranks that reduce 1 MB in each step of 10 ms.

    Args:
        folder: of its run.
        hosts: of its ranks.
        lasts_us: of each reduction; cables allow 1,000 us.
    """
    reducing(folder, ([0, 1],), hosts, lasts_us, 3)
    return f"beside:run={folder},then=spray"


def transfers_us(graph: Graph) -> set[int]:
    """How long transfers take."""
    nodes = graph.nodes
    return {round(each) for each in (nodes.duration[nodes.kind == NodeKind.TRANSFER] / 1000).tolist()}


def test_a_recorded_job_costs_something_only_where_its_step_communicates_at_the_same_time(tmp_path):
    """It is on the ports of the first pair for 1 ms of 10: of eight phases one meets, each has half then."""
    graph = crossing_pairs(tmp_path / "run")
    edit = parse_edit(beside(tmp_path / "other", (0, 2), 1000))
    assert transfers_us(edit.apply(graph)) == {1000}
    best, worst = edit.bounds(graph)
    assert transfers_us(best) == {1000}
    assert transfers_us(worst) == {1000, 2000}
    (pace, gpus) = edit.notes(graph)
    assert "takes 10 ms" in pace
    assert "both compute on node0:gpu0, node2:gpu0" in gpus


def test_a_recorded_job_that_sends_nearly_always_costs_what_it_takes_of_the_port(tmp_path):
    """For 8 of 10 ms at an eighth of the rate: 1 MB moves at 7/8 of the port, in 1,143 us."""
    graph = crossing_pairs(tmp_path / "run")
    edit = parse_edit(beside(tmp_path / "other", (0, 2), 8000))
    assert transfers_us(edit.apply(graph)) == {1000, 1143}


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ((2, 9), "host node9, of rank 1, is not in the run's topology"),
        ((2, 3), "no cable is on a path of both runs"),
        ((2, 2), "ranks 0 and 1 are both on node2:gpu0"),
    ],
)
def test_a_recorded_job_elsewhere_is_refused(tmp_path, hosts, says):
    graph = reducing(tmp_path / "run", ([0, 1],), (0, 1), 1000, 3)
    edit = beside(tmp_path / "other", hosts, 1000)
    with pytest.raises(DproError, match=says):
        parse_edit(edit).apply(graph)


def test_a_recorded_job_whose_hosts_are_cabled_to_other_switches_is_refused(tmp_path):
    graph = crossing_pairs(tmp_path / "run")
    edit = beside(tmp_path / "other", (0, 2), 1000)
    write(fat_tree(dataclasses.replace(SIZE, ports=16)), tmp_path / "other" / FILE)  # all on one leaf
    with pytest.raises(DproError, match="node2:nic0 is cabled to leaf0 there, and to leaf1 here"):
        parse_edit(edit).apply(graph)


@pytest.mark.parametrize("edit", ["beside", "beside:run=x,hosts=node[0-1]", "beside:run=/nowhere"])
def test_a_neighbour_that_is_not_named_or_not_there_is_refused(tmp_path, edit):
    graph = crossing_pairs(tmp_path / "run")
    with pytest.raises(DproError, match=r"give hosts=|not both|nowhere"):
        parse_edit(edit).apply(graph)
