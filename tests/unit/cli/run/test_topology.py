"""`dpro topology`: made, checked, brought in, and attached to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro.store import Manifest, write_manifest
from dpro.topology.file import FILE, read
from tests.commands import dpro

MADE = ("--fat-tree", "3", "--gpus", "2", "--nics", "1", "--switch-ports", "4")


def test_a_made_fabric_is_written_checked_and_summed_up(tmp_path: Path) -> None:
    file = tmp_path / FILE
    made = dpro("topology", *MADE, "-o", file)
    assert (made.returncode, made.stderr) == (0, "")
    assert "3 with 6 GPUs and 3 ports" in made.stdout
    assert "4 equally short ones from leaf to leaf" in made.stdout
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
        (("--fat-tree", "3", "--oversubscription", "nan"), "leaves no port"),
        (("--fat-tree", "3", "--gbit", "nan"), "speeds numbers of more than 0"),
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
