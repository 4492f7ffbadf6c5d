"""What a refused edit or plan asks for answers it: an option of `dpro record`, or a topology."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.topology.file import write
from tests.commands import dpro
from tests.jobs import TRAIN, TWO_RANKS, record

pytest.importorskip("torch")
OPTION = re.compile(r"record (?:with )?`?(--[a-z-]+(?: \d+)?)")
ORDERED = "priority:mb=1"
BY_OPTION = {"plan": "--shapes", "recompute": "--modules", "batch": "--memory", ORDERED: "--window-steps 2"}
BY_TOPOLOGY = ["paths", "spray", "place", "ecmp", "fail", "oversubscription", "beside"]


def refusals(run: Path) -> dict[str, str]:
    """Reasons by edit: of those that are tried unasked, and of the one that would order reductions."""
    searched, asked = dpro("whatif", run, "--json"), dpro("whatif", run, "--edit", ORDERED, "--json")
    refused = [row for done in (searched, asked) for row in json.loads(done.stdout)["refused"]]
    return {row["edit"]: row["reason"] for row in refused}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Refusals of a job that is recorded with as little as can be, and then with what they ask for."""
    folder = tmp_path_factory.mktemp("refused")
    job = [*TWO_RANKS, str(TRAIN), "--steps", "40"]
    record(folder, job, "--every", "10", "--window-steps", "1")
    before = refusals(folder / "run") | {"plan": dpro("plan", folder / "run", "--gpus", "4").stderr}
    options = {option for edit in BY_OPTION for option in OPTION.findall(before.get(edit, ""))}
    (folder / "run").rename(folder / "plain")
    record(folder, job, "--every", "10", *" ".join(sorted(options)).split())
    after = refusals(folder / "run")
    plan = dpro("plan", folder / "run", "--gpus", "4", "--json")
    return before, after | ({"plan": plan.stderr} if plan.returncode else {}), plan


@pytest.mark.slow
@pytest.mark.parametrize(("edit", "option"), BY_OPTION.items())
def test_recorded_with_the_option_that_its_refusal_names_an_edit_is_answered(asked, edit, option):
    before, after, _ = asked
    assert option in before[edit]
    assert edit not in after


@pytest.mark.slow
def test_plan_of_ranks_on_cpus_says_that_they_share_no_cores(asked):
    assumed = json.loads(asked[-1].stdout)["assumed"]
    assert any("CPU cores of its own" in line for line in assumed)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("trace", "hosts"), [("torchrec_v100_4r_a2a_ar", [0, 0, 1, 1]), ("param_dlrm_v100_8r", [0, 1] * 4)]
)
def test_edits_of_the_fabric_are_answered_once_a_topology_is_attached(traces, tmp_path, trace, hosts):
    run = tmp_path / "run"
    assert dpro("import", traces / "multirank" / trace, "-o", run).returncode == 0
    before = refusals(run)
    assert all("dpro topology FILE --attach RUN" in before[edit] for edit in BY_TOPOLOGY)
    write(fat_tree(FabricSize(2)), tmp_path / "fabric.toml")
    rows = [f"{rank},node{host}" for rank, host in enumerate(hosts)]
    (tmp_path / "hosts.csv").write_text("\n".join(["rank,host", *rows, ""]))
    attached = dpro("topology", tmp_path / "fabric.toml", "--attach", run, "--hosts", tmp_path / "hosts.csv")
    assert attached.returncode == 0, attached.stderr
    assert not set(BY_TOPOLOGY) & set(refusals(run))
