"""Paths and cables of a fabric: hand-computed collisions, what they cost, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.extensions.fabric.fabrics import fat_tree
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.registry import parse_edit
from dpro.topology.file import FILE, write
from dpro.topology.kept import PATHS, PathEntry, write_paths
from tests.builders import US
from tests.fabrics import SIZE, crossing_pairs, crossing_ring, on_cable


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


def _with_paths(graph: Graph, folder, cables) -> Graph:
    """The same run, whose paths are known."""
    shutil.copytree(graph.run.path, folder)
    write_paths(on_cable(cables), folder / PATHS)
    run = dataclasses.replace(graph.run, path=folder)
    return dataclasses.replace(graph, run=run, facts={})


def test_known_paths_need_no_hash(collided, alone, tmp_path):
    """Both pairs on one cable: planning halves what they take; apart there is nothing to gain."""
    one = _with_paths(collided, tmp_path / "one", (0, 0))
    assert _lasts_us(one, "paths") == {1000}
    for graph in parse_edit("paths").bounds(one):
        assert np.array_equal(graph.nodes.duration, parse_edit("paths").apply(one).nodes.duration)
    apart = _with_paths(alone, tmp_path / "apart", (0, 1))
    assert _lasts_us(apart, "paths") == {1000}


def test_paths_of_a_file_are_predicted(alone, tmp_path):
    apart = _with_paths(alone, tmp_path / "apart", (0, 1))
    write_paths(on_cable((1, 1)), tmp_path / "one.json")
    assert _lasts_us(apart, f"paths:file={tmp_path / 'one.json'}") == {2000}
    write_paths(on_cable((1, 0)), tmp_path / "swapped.json")
    assert _lasts_us(apart, f"paths:file={tmp_path / 'swapped.json'}") == {1000}


def test_split_flows_are_as_fast_as_sprayed_ones(collided):
    for edit in ("paths:split=yes", "spray:headroom=0"):
        assert _lasts_us(collided, edit) == {1000}


@pytest.mark.parametrize(
    ("links", "says"),
    [
        (["leaf0 > spine7"], "has no link 'leaf0 > spine7'"),
        (["leaf1 > spine0"], "'leaf1 > spine0' is on no shortest path"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(alone, tmp_path, links, says):
    write_paths([PathEntry("node0:nic0", "node2:nic0", links)], tmp_path / "wrong.json")
    with pytest.raises(Unanswerable, match=says):
        parse_edit(f"paths:file={tmp_path / 'wrong.json'}").apply(alone)
    with pytest.raises(Unanswerable, match="No such file"):
        parse_edit(f"paths:file={tmp_path / 'missing.json'}").apply(alone)


def test_a_cable_at_part_of_its_rate_slows_those_on_it(alone, tmp_path):
    """The pair on it takes four times as long, the other one as long as before."""
    apart = _with_paths(alone, tmp_path / "apart", (0, 1))
    assert _lasts_us(apart, "fail:link=leaf0/spine0,left=0.25") == {1000, 4000}


def test_what_headers_take_is_lost_on_other_paths_too(tmp_path):
    """Both reach 94% of half a cable; apart they reach 94% of a whole one."""
    graph = crossing_pairs(tmp_path / "run", 2000 / 0.94)
    write_paths(on_cable((0, 0)), tmp_path / "run" / PATHS)
    assert _lasts_us(dataclasses.replace(graph, facts={}), "paths") == {round(1000 / 0.94)}


def test_what_something_else_limits_gains_nothing(tmp_path):
    """At half of what they could have had on one cable, cables were not the limit."""
    graph = crossing_pairs(tmp_path / "run", 4000)
    write_paths(on_cable((0, 0)), tmp_path / "run" / PATHS)
    assert _lasts_us(dataclasses.replace(graph, facts={}), "paths") == {4000}


def test_a_ring_as_fast_as_it_can_be_is_not_taken_for_another_jobs(tmp_path):
    """It meets itself under most seeds: then it would take twice as long."""
    graph = crossing_ring(tmp_path / "run")
    assert _lasts_us(graph, "paths") == {1500}
    assert _lasts_us(graph, "ecmp") == {3000}


def test_a_ring_that_meets_itself_gains_what_it_lost(tmp_path):
    """At 94% of what it then could reach, so that headers are all that it lost besides."""
    graph = crossing_ring(tmp_path / "run", 3000 / 0.94)
    links = {
        "leaf0": ["leaf0 > spine0 #0", "spine0 > leaf1 #0"],
        "leaf1": ["leaf1 > spine0 #0", "spine0 > leaf0 #0"],
    }
    ring = [(0, 2, "leaf0"), (2, 1, "leaf1"), (1, 3, "leaf0"), (3, 0, "leaf1")]
    known = [PathEntry(f"node{one}:nic0", f"node{other}:nic0", links[leaf]) for one, other, leaf in ring]
    write_paths(known, tmp_path / "run" / PATHS)
    assert _lasts_us(dataclasses.replace(graph, facts={}), "paths") == {round(1500 / 0.94)}


def test_a_run_without_a_topology_is_refused(alone, tmp_path):
    run = dataclasses.replace(alone.run, path=tmp_path)
    with pytest.raises(Unanswerable, match="dpro topology FILE --attach RUN"):
        parse_edit("ecmp").apply(dataclasses.replace(alone, run=run, facts={}))


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
        parse_edit("oversubscription:ratio=2").apply(dataclasses.replace(graph, facts={}))


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
