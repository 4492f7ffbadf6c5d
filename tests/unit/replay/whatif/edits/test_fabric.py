"""Paths and cables of a fabric: hand-computed collisions, what they cost, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.registry import parse_edit
from dpro.topology.fabrics import fat_tree
from dpro.topology.file import FILE, write
from tests.builders import US
from tests.fabrics import SIZE, crossing_pairs


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Graph:
    """As fast as a cable is: nothing met."""
    return crossing_pairs(tmp_path_factory.mktemp("alone") / "run")


@pytest.fixture(scope="module")
def collided(tmp_path_factory) -> Graph:
    """Half as fast: both pairs may have shared a cable."""
    return crossing_pairs(tmp_path_factory.mktemp("collided") / "run", 2000)


def _lasts_us(graph: Graph, edit: str) -> set[int]:
    nodes = parse_edit(edit).apply(graph).nodes
    return {round(each) for each in (nodes.duration[nodes.kind == NodeKind.TRANSFER] / US).tolist()}


def test_flows_that_meet_by_hash_take_twice_as_long(alone):
    """Four links that both pairs may share, two cables each: fifteen of sixteen seeds collide somewhere."""
    assert _lasts_us(alone, "ecmp") == {2000}
    best, worst = (
        {round(each) for each in (graph.nodes.duration[graph.nodes.kind == NodeKind.TRANSFER] / US).tolist()}
        for graph in parse_edit("ecmp").bounds(alone)
    )
    assert best <= {1000, 2000}
    assert worst == {2000}
    assert any("carries 2 groups of ranks" in note for note in parse_edit("ecmp").notes(alone))


def test_planned_paths_separate_what_collided(collided):
    assert _lasts_us(collided, "paths") == {1000}
    assert parse_edit("paths").notes(collided) == ()


def test_what_was_as_fast_as_its_cables_gains_nothing(alone):
    """Paths on which it would have been slower cannot be those that it took."""
    assert _lasts_us(alone, "paths") == {1000}
    assert _lasts_us(alone, "spray:headroom=0") == {1000}


def test_spraying_costs_its_headroom(collided):
    assert _lasts_us(collided, "spray:headroom=0") == {1000}
    # Each pair has half of both cables, of which a fifth is lost: 0.8 of a cable.
    assert _lasts_us(collided, "spray:headroom=0.2") == {1250}


def test_a_failed_cable_leaves_one_for_both(alone):
    for then in ("hash", "plan", "spray"):
        assert _lasts_us(alone, f"fail:link=leaf0/spine0,then={then}") == {2000}


def test_fewer_cables_between_switches_carry_less(alone):
    assert _lasts_us(alone, "oversubscription:ratio=1") == {1000}
    assert _lasts_us(alone, "oversubscription:ratio=3") == {3000}


def test_the_gain_of_planning_reaches_from_a_lucky_hash_to_an_unlucky_one(collided):
    """Where nothing met, cables were not what made transfers slow."""
    lucky, unlucky = (
        {round(each) for each in (graph.nodes.duration[graph.nodes.kind == NodeKind.TRANSFER] / US).tolist()}
        for graph in parse_edit("paths").bounds(collided)
    )
    assert lucky <= {1000, 2000}
    assert unlucky == {1000}


def test_a_run_without_a_topology_is_refused(alone, tmp_path):
    run = dataclasses.replace(alone.run, path=tmp_path)
    with pytest.raises(Unanswerable, match="dpro topology FILE --attach RUN"):
        parse_edit("ecmp").apply(dataclasses.replace(alone, run=run, known={}))


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (dataclasses.replace(SIZE, hosts=2), "host node2, of rank 2, is not in the run's topology"),
        (dataclasses.replace(SIZE, gbit=1), "moved 1 GB/s, and the cables of the topology carry 0.125"),
        (dataclasses.replace(SIZE, gpus=0), "node0 has 0 GPUs by the topology"),
    ],
)
def test_a_topology_that_is_not_the_jobs_is_refused(tmp_path, size, says):
    graph = crossing_pairs(tmp_path / "run")
    write(fat_tree(size), tmp_path / "run" / FILE)
    with pytest.raises(Unanswerable, match=says):
        parse_edit("oversubscription:ratio=2").apply(dataclasses.replace(graph, known={}))


@pytest.mark.parametrize(
    ("link", "error", "says"),
    [
        ("leaf0", UsageError, "name both ends"),
        ("leaf0/spine9", Unanswerable, "no switch and no port 'spine9'"),
        ("leaf0/leaf1", Unanswerable, "no cable of the topology joins leaf0 and leaf1"),
        ("node0:nic0/leaf0", Unanswerable, "node0:nic0 has no cable that works"),
    ],
)
def test_a_cable_that_cannot_fail_is_refused(alone, link, error, says):
    with pytest.raises(error, match=says):
        parse_edit(f"fail:link={link}").apply(alone)


def test_paths_that_stay_change_no_nanosecond(alone):
    same = parse_edit("oversubscription:ratio=1").apply(alone)
    assert np.array_equal(same.nodes.duration, alone.nodes.duration)
