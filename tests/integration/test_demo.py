"""The demo and the sample runs that ship: what a new user sees first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest
from click.testing import CliRunner

from dpro._version import __version__
from dpro.analysis.analysis import Analysis
from dpro.cli import cli
from dpro.cli.demo import typical_step_ns
from dpro.schema import SPANS, STEPS
from dpro.store import open_run

pytestmark = pytest.mark.usefixtures("searched_once")

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
RUNS = ("healthy", "slow_rank", "slow_input")


def findings(run: Path) -> list[dict]:
    done = CliRunner().invoke(cli, ["diagnose", str(run), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)["findings"]


def waited_for_data_ms(run: Path, rank: int) -> float:
    """How long a rank typically waited for a batch, by PyTorch's own marks around it."""
    spans = open_run(run).table(SPANS, ["rank", "name", "duration_ns"])
    waits = spans.filter((pl.col("rank") == rank) & pl.col("name").str.contains("DataLoader"))
    return float(waits["duration_ns"].median()) / 1e6


@pytest.mark.parametrize("name", RUNS)
def test_a_sample_run_is_small_and_whole(name):
    run = open_run(SAMPLES / name)
    assert run.manifest.created_by == f"dpro record {__version__}"  # each release runs `make samples`
    assert sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file()) < 1_000_000
    assert run.manifest.ranks == [0, 1]
    assert run.manifest.warnings == []
    assert run.manifest.command[:3] == ["torchrun", "--nproc-per-node", "2"]
    assert run.rows()["spans"] > 10_000
    assert typical_step_ns(run) > 0
    assert set(run.table(STEPS)["window"]) == {-1, 0, 1, 2}


@pytest.mark.slow
def test_the_healthy_sample_has_no_finding():
    assert findings(SAMPLES / "healthy") == []


def test_the_sample_with_a_slow_rank_names_it_and_the_input():
    (finding,) = findings(SAMPLES / "slow_rank")
    assert (finding["class"], finding["component"]) == ("slow.host", {"kind": "rank", "id": "1"})
    assert finding["cost_ms_per_step"] == pytest.approx(48, rel=0.1)  # 8 samples of 6 ms each
    assert "DataLoader" in finding["evidence"][0]


@pytest.mark.slow
def test_the_sample_with_slow_input_blames_the_input_and_no_rank():
    (finding,) = findings(SAMPLES / "slow_input")
    assert (finding["class"], finding["component"]["kind"]) == ("slow.host", "job")
    assert finding["cost_ms_per_step"] == pytest.approx(32, rel=0.1)  # 8 samples of 4 ms each
    assert finding["ranks"] == [0, 1]


class Demo(NamedTuple):
    """What one demo printed, and where its runs are."""

    shown: dict
    stderr: str
    folder: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("demo") / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "dpro", "demo", "-o", str(folder), "--json"],
        env={**os.environ, "PYTHONPATH": str(SAMPLES.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return Demo(json.loads(done.stdout), done.stderr, folder)


def of_ranks(demo: Demo) -> list[dict]:
    """Findings about ranks; a machine that others use may be one as well."""
    return [each for each in demo.shown["diagnose"]["findings"] if each["component"]["kind"] == "rank"]


def test_the_demo_explains_what_it_recorded_and_checks_itself(monkeypatch, tmp_path):
    monkeypatch.setattr("dpro.cli.demo._record", lambda run, *arguments: SAMPLES / run.name)
    words = ["demo", "-o", str(tmp_path / "demo")]
    shown = json.loads(CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False).stdout)
    (finding,) = shown["diagnose"]["findings"]
    assert (finding["class"], finding["component"]) == ("slow.host", {"kind": "rank", "id": "1"})
    faulty, healthy = (typical_step_ns(open_run(SAMPLES / name)) for name in ("slow_rank", "healthy"))
    assert shown["really_saved_ms"] == pytest.approx((faulty - healthy) / 1e6)
    assert shown["explain"]["faulty_ranks"] == [1]
    printed = CliRunner().invoke(cli, words, catch_exceptions=False, color=True).stdout
    assert "\x1b" not in printed  # what click styles is escaped on its way to a terminal
    saved_ms = f"{shown['really_saved_ms']:.1f}"
    assert f"recorded without the fault, the same job really takes {saved_ms} ms less" in printed


@pytest.mark.slow
def test_the_demo_records_explains_and_checks_itself(demo):
    first = of_ranks(demo)[0]
    assert (first["class"], first["component"]) == ("slow.host", {"kind": "rank", "id": "1"})
    assert waited_for_data_ms(demo.folder / "slow_rank", 1) >= 48  # 8 samples of 6 ms each
    # What two separate runs differ by on a busy machine proves nothing, but it must be what they differ by.
    faulty, healthy = (typical_step_ns(open_run(demo.folder / name)) for name in ("slow_rank", "healthy"))
    assert demo.shown["really_saved_ms"] == pytest.approx((faulty - healthy) / 1e6)
    assert 1 in demo.shown["explain"]["faulty_ranks"]
    assert "dpro record" in demo.stderr
    assert "Traceback" not in demo.stderr


@pytest.mark.slow  # two cores that others use, too, make steps vary by more than the fault costs
def test_the_demo_states_the_cost_of_the_fault_and_ranks_its_remedy_first(demo):
    run = demo.folder / "slow_rank"
    waited_ms = [waited_for_data_ms(run, rank) for rank in (0, 1)]
    cost_ms = of_ranks(demo)[0]["cost_ms_per_step"]
    pace = Analysis(open_run(run)).trust.pace  # of all steps, where those in windows were unlike them
    assert cost_ms == pytest.approx((waited_ms[1] - waited_ms[0]) * pace, rel=0.25)
    advised = [advice["kind"] for advice in demo.shown["explain"]["advice"]]
    assert {"heal", "input"} & set(advised[:2])  # before them, more cores on a busy machine


def test_the_demo_without_torch_says_so_and_explains_a_run_that_ships(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(cli, ["demo"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("PyTorch is not installed")
    for part in (
        "What was recorded",
        "What is wrong",
        "slow host work: rank 1",
        "LIMIT",
        "TRY",
        "Look further",
    ):
        assert part in done.stdout
    assert "Checked:" not in done.stdout
    assert f"diagnose {SAMPLES / 'slow_rank'}" in done.stdout.replace(
        str(SAMPLES.parent / "dpro"), str(SAMPLES.parent)
    )
