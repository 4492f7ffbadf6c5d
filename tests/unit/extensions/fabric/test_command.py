"""`dpro topology`: made, checked, brought in, and attached to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro.store import Manifest, write_manifest
from dpro.topology.file import FILE, read
from dpro.topology.kept import PathEntry, read_paths, write_paths
from tests.commands import dpro
from tests.fabrics import crossing_pairs, crossing_ring, on_cable

MADE = ("--fat-tree", "3", "--gpus", "2", "--nics", "1", "--switch-ports", "4")


def test_a_made_fabric_is_written_checked_and_summed_up(tmp_path: Path) -> None:
    file = tmp_path / FILE
    made = dpro("topology", *MADE, "-o", file)
    assert (made.returncode, made.stderr) == (0, "")
    assert "3 with 6 GPUs and 3 ports" in made.stdout
    assert "4 equally short paths from leaf to leaf" in made.stdout
    assert dpro("topology", file).stdout == made.stdout


def test_a_topology_is_put_into_a_run_and_hosts_that_it_lacks_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_manifest(run, Manifest(world_size=2, ranks=[0, 1], hosts=["node1.cluster.local", "login"]))
    found = dpro("topology", *MADE, "--attach", run, "--json")
    document = json.loads(found.stdout)
    assert document["missing_hosts"] == ["login"]
    assert [tier["switches"] for tier in document["tiers"]] == [2, 1]
    assert len(read(run / FILE).hosts) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give one of"),
        (("--fat-tree", "3", "--rail-optimised", "3"), "give one of"),
        (("--slurm", "{conf}"), "give --gbit"),
        (("--slurm", "{conf}", "--gbit", "100", "--inside", "{conf}"), "no XML"),
        ((*MADE, "--attach", "{folder}"), "not a run directory"),
        (("--fat-tree", "3", "--oversubscription", "100"), "leaves no port"),
        (("--fat-tree", "3", "--oversubscription", "nan"), "'--oversubscription': nan is not a number"),
        (("--fat-tree", "3", "--gbit", "nan"), "'--gbit': nan is not a number"),
        (("--fat-tree", "3", "--gbit", "1e308"), "not in the range"),
        (("--fat-tree", "3", "--oversubscription", "1e308"), "not in the range"),
        (("--fat-tree", "99999999999"), "not in the range"),
        (("{folder}",), "has no topology: add one with `dpro topology FILE --attach"),
    ],
)
def test_what_cannot_be_described_is_refused_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    conf = tmp_path / "topology.conf"
    conf.write_text("SwitchName=a Nodes=n[1-2]\n")
    given = [each.format(conf=conf, folder=tmp_path) for each in arguments]
    found = dpro("topology", *given)
    assert found.returncode in (1, 2)
    assert says in found.stderr
    assert found.stdout == ""


def test_slurms_hosts_get_the_inside_that_is_given(tmp_path: Path) -> None:
    conf = tmp_path / "topology.conf"
    conf.write_text("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n3\nSwitchName=c Switches=a,b\n")
    found = dpro("topology", "--slurm", conf, "--gbit", "200", "--gpus", "4", "--nics", "2", "--json")
    document = json.loads(found.stdout)
    assert (document["hosts"], document["gpus"], document["ports"]) == (3, 12, 6)
    assert [tier["gbit_down"] for tier in document["tiers"]] == [1200.0, 400.0]


def test_hosts_without_switches_are_summed_up(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_text('version = 1\n[[hosts]]\nnames = "a,b"\nnics = 1\n')
    found = dpro("topology", file)
    assert (found.returncode, found.stderr) == (0, "")
    assert "2 with 16 GPUs and 2 ports" in found.stdout


@pytest.fixture
def collided(tmp_path: Path) -> Path:
    """Two pairs that reduce over one cable at the same time, 1 ms of each step longer than alone."""
    crossing_pairs(tmp_path / "run", 2000)
    write_paths(on_cable((0, 0)), tmp_path / "known.json")
    return tmp_path / "run"


def test_connections_that_meet_are_named_with_the_link_and_the_cost(collided: Path) -> None:
    found = dpro("topology", collided, "--paths", collided.with_name("known.json"), "--json")
    traffic = json.loads(found.stdout)["traffic"]
    assert (traffic["connections"], traffic["unknown"]) == (4, 0)
    assert traffic["saved_ms"] == pytest.approx(1.0, abs=0.01)
    first, *_ = traffic["collisions"]
    assert {each["link"] for each in traffic["collisions"]} == {
        "leaf0 > spine0 #0", "leaf1 > spine0 #0", "spine0 > leaf0 #0", "spine0 > leaf1 #0",
    }  # fmt: skip
    assert first["cost_ms"] == pytest.approx(1.0, abs=0.01)
    assert first["together_ms"] == pytest.approx(2.0, abs=0.01)
    assert sorted(each["source"] for each in first["connections"]) in (
        ["node0:nic0", "node1:nic0"],
        ["node2:nic0", "node3:nic0"],
    )
    assert traffic["busiest"][0]["bytes_per_step"] == 2_000_000
    assert traffic["busiest"][0]["load_while_busy"] == pytest.approx(1.0, abs=0.01)
    shown = dpro("topology", collided).stdout
    assert "collide   on leaf0 > spine0 #0: node0:nic0 to node2:nic0, node1:nic0 to node3:nic0" in shown


def test_a_plan_is_written_loaded_and_leaves_nothing_that_meets(collided: Path) -> None:
    plan = collided.with_name("plan.json")
    probes = [PathEntry(*at) for at in _PROBED]
    write_paths(probes, collided.with_name("probes.json"))
    made = dpro("topology", collided, "--plan", plan, "--probes", collided.with_name("probes.json"))
    assert made.returncode == 0
    assert "the paths of 0 are known" in made.stdout
    entries = {(each.begin, each.end): each for each in read_paths(plan)}
    assert len(entries) == 4
    ways = {tuple(each.links) for each in entries.values()}
    assert len(ways) == 4  # both ways, over two cables
    of_node0 = entries["node0:nic0", "node2:nic0"]
    assert of_node0.source_port == {0: 50_001, 1: 50_002}[int(of_node0.links[0][-1])]
    assert entries["node1:nic0", "node3:nic0"].source_port is None
    loaded = dpro("topology", collided, "--paths", plan, "--json")
    assert json.loads(loaded.stdout)["traffic"]["collisions"] == []


def test_paths_are_kept_with_a_run_while_its_job_runs(collided: Path, monkeypatch) -> None:
    """Its traffic can only be read when the job has ended."""
    monkeypatch.setattr("dpro.collectors.launch.recording.launches", lambda _: ["a launch"])
    monkeypatch.setattr("dpro.collectors.liveness.is_running", lambda _: True)
    kept = dpro("topology", collided, "--paths", collided.with_name("known.json"), "--json")
    assert (kept.returncode, json.loads(kept.stdout)["traffic"]) == (0, None)
    assert read_paths(collided / "paths.json") == on_cable((0, 0))


_PROBED = [
    ("node0:nic0", "node2:nic0", [f"leaf0 > spine0 #{at}", f"spine0 > leaf1 #{at}"], 0, 50_001 + at)
    for at in (0, 1)
]


def test_rings_of_nccls_log_are_kept_and_said(tmp_path: Path) -> None:
    """A ring over four hosts, of which only what member 0 printed is there."""
    run, log = tmp_path / "run", tmp_path / "job.log"
    crossing_ring(run)
    assumed = dpro("topology", run).stdout
    assert (
        "rings     of 1 groups of ranks: one ring for each port, or two trees of hosts, are assumed"
        in assumed
    )
    begins = "node0:1:2 [0] NCCL INFO "
    log.write_text(
        f"{begins}Channel 00/01 :    0   2   3   1\n{begins}comm 0x1 rank 0 nranks 4 x - Init COMPLETE"
    )
    found = dpro("topology", run, "--nccl-log", log)
    assert (found.returncode, found.stderr) == (0, "")
    assert "rings     of 1 of 1 groups of ranks from NCCL's log" in found.stdout
    traffic = json.loads(dpro("topology", run, "--json").stdout)["traffic"]
    assert (traffic["groups"], traffic["groups_recorded"]) == (1, 1)
    assert [each["link"] for each in traffic["busiest"] if each["bytes_per_step"]]


def test_a_log_of_another_job_is_refused(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    crossing_ring(run)
    begins = "node0:1:2 [0] NCCL INFO "
    log.write_text(
        f"{begins}Channel 00/01 :    0   1   2\n{begins}comm 0x1 rank 0 nranks 3 x - Init COMPLETE"
    )
    found = dpro("topology", run, "--nccl-log", log)
    assert (found.returncode, found.stdout) == (1, "")
    assert "no communicator of the log matches the run with all its rings: 1 have ranks" in found.stderr
    assert not (run / "channels.json").exists()


def test_a_plan_of_a_file_is_refused(tmp_path: Path) -> None:
    dpro("topology", *MADE, "-o", tmp_path / FILE)
    found = dpro("topology", tmp_path / FILE, "--plan", tmp_path / "plan.json")
    assert (found.returncode, found.stdout) == (2, "")
    assert "dpro topology RUN --plan plan.json" in found.stderr
