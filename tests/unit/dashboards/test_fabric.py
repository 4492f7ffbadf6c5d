"""The view of the fabric: what cables carry, by the paths that are chosen, and which connections meet."""

from __future__ import annotations

import pytest

from dpro.dashboards.app import make_app
from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.extensions.fabric.view import VIEW, cable_info, fabric_figure, no_fabric, node_info
from dpro.replay.cost.fabric.connections import Usage
from dpro.replay.cost.fabric.network import fabric_of
from dpro.store import open_run
from dpro.topology.kept import PATHS, write_paths
from tests.builders import cpu_job
from tests.fabrics import crossing_pairs, on_cable
from tests.unit.dashboards.test_app import HOST


@pytest.fixture(scope="module")
def collided(tmp_path_factory) -> Loaded:
    """Two pairs that reduce 1 MB each over one of two cables, 2 ms of each step."""
    folder = tmp_path_factory.mktemp("collided") / "run"
    crossing_pairs(folder, 2000)
    write_paths(on_cable((0, 0)), folder / PATHS)
    return load(open_run(folder))


def _text(component: object) -> str:
    return str(component)


def test_hosts_are_below_their_leaves_and_those_below_spines() -> None:
    fabric = fabric_of(fat_tree(FabricSize(4, gpus=1, nics=1, ports=4)))
    nodes = node_info(fabric, {1: [4, 5]})
    tiers = {tier: own["name"].to_list() for (tier,), own in nodes.group_by("tier", maintain_order=True)}
    assert tiers == {0: ["node0", "node1", "node2", "node3"], 1: ["leaf0", "leaf1"], 2: ["spine0"]}
    assert nodes.filter(name="node1").select("at", "ranks").row(0) == (0.375, "4, 5")


def test_a_line_has_the_load_of_its_fullest_link_and_the_bytes_of_all() -> None:
    """Ports of one host, and cables side by side, are one line; each link carries 1 GB/s here."""
    fabric = fabric_of(fat_tree(FabricSize(2, gpus=2, nics=2, ports=4, gbit=8)))
    sent, busy = (fabric.gbps * 0 for _ in range(2))
    up = fabric.links_from[fabric.node_of["leaf0"], fabric.node_of["spine0"]]
    sent[up[0]], busy[up[0]] = 30.0, 60.0
    sent[up[1]], busy[up[1]] = 10.0, 10.0
    cables = cable_info(fabric, Usage(sent, busy), 100.0, 2, {up[0]: ["a → b"], up[1]: ["a → b", "c → d"]})
    top = cables.row(-1, named=True)
    assert (top["name"], top["load"], top["busy"], top["bytes"]) == ("leaf0 > spine0 #0", 0.3, 0.5, 20.0)
    assert top["connections"] == "a → b<br>c → d"
    assert cables.height == 4  # two hosts, two leaves


def test_planned_paths_take_half_of_the_load_of_a_cable(collided: Loaded) -> None:
    table = VIEW.tables["cables"]
    now, planned, even = (
        table(collided, parse_link(f"?view=fabric&paths={each}")).row(-1, named=True)
        for each in ("now", "plan", "spray")
    )
    assert now["name"].startswith(("leaf", "spine"))
    assert planned["load"] == pytest.approx(now["load"] / 2)
    assert even["load"] == pytest.approx(now["load"] / 2)
    assert "node0:nic0 → node2:nic0" in now["connections"]
    assert even["connections"] == ""


def test_what_cables_carry_downloads_as_csv(collided: Loaded) -> None:
    client = make_app(collided).server.test_client()
    answer = client.get("/csv/fabric/cables?paths=plan", headers=HOST)
    assert answer.text.splitlines()[0] == "lower,upper,name,load,busy,bytes,connections"


def test_the_figure_has_a_mark_for_each_cable_and_each_node(collided: Loaded) -> None:
    drawn = VIEW.sections["fabric-cables"](collided, Link(view="fabric"))
    assert "Shares of a cable's capacity in its fuller direction" in _text(drawn)
    fabric = fabric_of(fat_tree(FabricSize(4, gpus=1, nics=1, ports=4)))
    cables = VIEW.tables["cables"](collided, Link(view="fabric"))
    figure = fabric_figure(node_info(fabric, {}), cables, "load", "light")
    *_, middles, nodes = figure.data
    assert (len(middles.x), len(nodes.x)) == (6, 7)  # four hosts and two leaves have a cable up
    assert middles.customdata[-1].startswith(cables["name"][-1])


def test_connections_that_meet_are_listed_with_their_cost(collided: Loaded) -> None:
    said = _text(VIEW.sections["fabric-collisions"](collided, Link(view="fabric")))
    assert "leaf0 > spine0 #0" in said
    assert "node0:nic0 → node2:nic0, node1:nic0 → node3:nic0" in said
    assert "Planned paths would save 1.00 ms" in said


def test_paths_that_are_not_known_are_said_to_be_so(tmp_path) -> None:
    crossing_pairs(tmp_path / "run", 2000)
    loaded = load(open_run(tmp_path / "run"))
    assert "paths of 4 connections are not known" in _text(
        VIEW.sections["fabric-cables"](loaded, Link(view="fabric"))
    )
    assert "An unknown hash decides the paths." in _text(
        VIEW.sections["fabric-collisions"](loaded, Link(view="fabric"))
    )


def test_a_run_without_a_topology_says_how_to_give_it_one(tmp_path) -> None:
    loaded = load(cpu_job().write(tmp_path / "run"))
    assert "dpro topology FILE --attach RUN" in no_fabric(loaded, Link())
