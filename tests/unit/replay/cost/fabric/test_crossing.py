"""How likely a flow crosses a link, worked out by hand on two leaves and two spines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dpro.errors import Unanswerable
from dpro.replay.cost.fabric.connections import crossings, hops_of
from dpro.replay.cost.fabric.flows import flows_of
from dpro.replay.cost.fabric.network import Fabric, fabric_of, routes_of
from dpro.topology.file import HostEntry, LinkEntry, SwitchEntry, TopologyFile
from dpro.topology.kept import PathEntry


def _fabric() -> Fabric:
    topology = TopologyFile(
        hosts=[HostEntry("h[0-3]", gpus=1, nics=1)],
        switches=[SwitchEntry("l[0-1]"), SwitchEntry("s[0-1]", "spine")],
        links=[
            LinkEntry("h[0-1]:nic0", "l0"),
            LinkEntry("h[2-3]:nic0", "l1"),
            LinkEntry("l[0-1]", "s[0-1]"),
        ],
    )
    return fabric_of(topology)


def _crossed(fabric: Fabric, begin: int, end: int, known: Sequence[PathEntry] = ()) -> dict[str, float]:
    flows = flows_of(fabric, [[fabric.gpus[begin][0], fabric.gpus[end][0]]], ["send"])
    row = crossings(flows, routes_of(fabric), known).toarray()[0]
    return {fabric.link_name(link): float(row[link]) for link in np.flatnonzero(row)}


def test_a_path_that_is_not_known_is_one_of_the_shortest() -> None:
    assert _crossed(_fabric(), 0, 3) == {
        "h0:nic0 > l0": 1.0,
        "l0 > s0": 0.5,
        "l0 > s1": 0.5,
        "s0 > l1": 0.5,
        "s1 > l1": 0.5,
        "l1 > h3:nic0": 1.0,
    }
    assert _crossed(_fabric(), 0, 1) == {"h0:nic0 > l0": 1.0, "l0 > h1:nic0": 1.0}


def _via(spine: str) -> PathEntry:
    return PathEntry("h0:nic0", "h3:nic0", [f"l0 > {spine}", f"{spine} > l1"])


def test_a_path_that_is_known_is_the_only_one() -> None:
    known = [_via("s1")]
    assert _crossed(_fabric(), 0, 3, known) == {
        "h0:nic0 > l0": 1.0,
        "l0 > s1": 1.0,
        "s1 > l1": 1.0,
        "l1 > h3:nic0": 1.0,
    }
    assert _crossed(_fabric(), 3, 0, known)["l1 > s0"] == 0.5  # of the way back nothing is said


def test_several_known_paths_of_a_pair_are_each_as_likely() -> None:
    known = [_via(spine) for spine in ("s0", "s1", "s1")]
    assert _crossed(_fabric(), 0, 3, known)["l0 > s1"] == pytest.approx(2 / 3)


def test_a_path_over_a_link_that_is_not_there_is_refused() -> None:
    with pytest.raises(Unanswerable, match="no link 'l0 > s7'"):
        _crossed(_fabric(), 0, 3, [_via("s7")])


def test_hops_are_counted_from_port_to_port() -> None:
    fabric = _fabric()
    members = [[fabric.gpus[0][0], fabric.gpus[other][0]] for other in (1, 2)]
    flows = flows_of(fabric, members, ["send", "send"])
    assert hops_of(crossings(flows, routes_of(fabric))).tolist() == [2, 4]
