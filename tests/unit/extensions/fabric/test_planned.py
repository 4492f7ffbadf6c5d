"""Plans without what is avoided, and the rules by which switches follow them: on two leaves, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.extensions.fabric.planned import PathRule, as_text, avoided, plan_of
from dpro.replay.cost.fabric.network import fabric_of
from dpro.replay.graph import Graph
from dpro.topology.file import FILE, read
from dpro.topology.kept import GroupChannels, write_channels
from tests.commands import dpro
from tests.fabrics import crossing_pairs, crossing_ring


@pytest.fixture
def pairs(tmp_path: Path) -> Graph:
    """Ranks 0 and 2, and 1 and 3: two cables lead from each leaf to the spine, #0 and #1."""
    return crossing_pairs(tmp_path / "run")


def ways(graph: Graph, *avoid: str) -> set[str]:
    """The last character of each link of the plan from leaf0 to the spine."""
    entries = plan_of(graph, avoid=avoid).entries
    return {entry.links[0] for entry in entries if entry.begin in ("node0:nic0", "node1:nic0")}


def test_a_plan_uses_both_cables_and_without_one_the_other(pairs: Graph) -> None:
    assert ways(pairs) == {"leaf0 > spine0 #0", "leaf0 > spine0 #1"}
    assert ways(pairs, "leaf0 - spine0 #0") == {"leaf0 > spine0 #1"}
    assert ways(pairs, "leaf0 > spine0 #1") == {"leaf0 > spine0 #0"}


def test_one_way_of_a_cable_is_avoided_without_the_other(pairs: Graph) -> None:
    back = [entry.links[1] for entry in plan_of(pairs, avoid=["leaf0 > spine0 #0"]).entries[2:]]
    assert sorted(back) == ["spine0 > leaf0 #0", "spine0 > leaf0 #1"]
    back = [entry.links[1] for entry in plan_of(pairs, avoid=["leaf0 - spine0 #0"]).entries[2:]]
    assert back == ["spine0 > leaf0 #1", "spine0 > leaf0 #1"]


def test_what_is_left_of_a_cable_is_used_for_what_it_is_worth(pairs: Graph) -> None:
    """Two flows on the whole cable fill it twice; one on 0.6 of a cable fills that 1.7 times, on 0.4, 2.5."""
    assert ways(pairs, "leaf0 - spine0 #0=0.6") == {"leaf0 > spine0 #0", "leaf0 > spine0 #1"}
    assert ways(pairs, "leaf0 - spine0 #0=0.4") == {"leaf0 > spine0 #1"}


def test_without_any_way_that_is_left_nothing_is_planned(pairs: Graph) -> None:
    for avoid in (["spine0"], ["leaf0 - spine0 #0", "leaf0 - spine0 #1"]):
        with pytest.raises(Unanswerable, match="no path"):
            plan_of(pairs, avoid=avoid)


def test_a_switch_is_avoided_with_all_its_links_both_ways(tmp_path: Path) -> None:
    crossing_pairs(tmp_path / "run")
    fabric = fabric_of(read(tmp_path / "run" / FILE))
    failed, gbps = avoided(fabric, ["spine0"])
    assert sorted(map(fabric.link_name, failed.tolist())) == sorted(
        f"{one} > {other} #{at}"
        for leaf in ("leaf0", "leaf1")
        for one, other in ((leaf, "spine0"), ("spine0", leaf))
        for at in (0, 1)
    )
    assert np.count_nonzero(gbps != fabric.gbps) == 8


@pytest.mark.parametrize(
    ("avoid", "says"),
    [
        ("leaf9 - spine0", "no such cable, link or switch"),
        ("node0:nic0", "a port has no other way"),
        ("leaf0 - spine0 #0=1.5", "from 0 to below 1"),
        ("leaf0 - spine0 #0=nan", "from 0 to below 1"),
        ("leaf0 - spine0 #0=half", "from 0 to below 1"),
    ],
)
def test_what_cannot_be_avoided_is_refused(pairs: Graph, avoid: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_of(pairs, avoid=[avoid])


def test_rules_name_each_switch_that_would_choose_itself(pairs: Graph) -> None:
    """The leaf chooses among two cables up, the spine among two down, the other leaf has one way left."""
    plan = plan_of(pairs, avoid=["leaf0 - spine0 #0", "leaf1 - spine0 #1"], with_rules=True)
    ends = (("node0:nic0", "node2:nic0"), ("node1:nic0", "node3:nic0"))
    assert plan.rules == sorted(
        [PathRule("leaf0", *pair, "spine0 #1") for pair in ends]
        + [PathRule("spine0", *pair, "leaf1 #0") for pair in ends]
        + [PathRule("leaf1", *pair[::-1], "spine0 #0") for pair in ends]
        + [PathRule("spine0", *pair[::-1], "leaf0 #1") for pair in ends]
    )
    about, first, *_ = as_text(plan.rules).splitlines()
    assert about.startswith("# SWITCH, FROM, TO, NEXT")
    assert first == "leaf0\tnode0:nic0\tnode2:nic0\tspine0 #1"


def test_with_rules_connections_between_two_ports_share_a_path(tmp_path: Path) -> None:
    """Two channels of one communicator: source ports could part them, addresses cannot."""
    graph = crossing_ring(tmp_path / "run")
    assert graph.run is not None
    ring = [0, 1, 2, 3]
    write_channels([GroupChannels(ring, rings=[ring, ring])], graph.run.path / "channels.json")
    graph = crossing_ring(tmp_path / "run")
    apart, together = plan_of(graph), plan_of(graph, with_rules=True)
    assert {entry.connection for entry in apart.entries} == {0, 1}
    by_ports: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for entry in together.entries:
        by_ports.setdefault((entry.begin, entry.end), set()).add(tuple(entry.links))
    assert len(together.entries) == len(apart.entries)
    assert all(len(paths) == 1 for paths in by_ports.values())
    assert any(
        one.links != other.links
        for one in apart.entries
        for other in apart.entries
        if (one.begin, one.end) == (other.begin, other.end)
    )


def test_the_command_writes_plan_and_rules(pairs: Graph, tmp_path: Path) -> None:
    out = ("--plan", tmp_path / "plan.json", "--rules", tmp_path / "rules")
    found = dpro("topology", tmp_path / "run", *out, "--avoid", "leaf0 - spine0 #0")
    assert (found.returncode, found.stderr) == (0, "")
    rules = (tmp_path / "rules").read_text().splitlines()
    assert {line.split("\t")[3] for line in rules if line.startswith("leaf0")} == {"spine0 #1"}
    alone = dpro("topology", tmp_path / "run", "--rules", tmp_path / "rules")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "need --plan" in alone.stderr
