"""The demo and the sample runs that ship: what a new user sees first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from dpro.cli import cli
from dpro.cli.demo import typical_step_ns
from dpro.schema import SPANS, STEPS
from dpro.store import open_run

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
    assert sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file()) < 1_000_000
    assert run.manifest.ranks == [0, 1]
    assert run.manifest.warnings == []
    assert run.manifest.command[:3] == ["torchrun", "--nproc-per-node", "2"]
    assert run.rows()["spans"] > 10_000
    assert typical_step_ns(run) > 0
    assert set(run.table(STEPS)["window"]) == {-1, 0, 1, 2}


def test_the_healthy_sample_has_no_finding():
    assert findings(SAMPLES / "healthy") == []


def test_the_sample_with_a_slow_rank_names_it_and_the_input():
    (finding,) = findings(SAMPLES / "slow_rank")
    assert (finding["class"], finding["component"]) == ("slow.host", {"kind": "rank", "id": "1"})
    assert finding["cost_ms_per_step"] == pytest.approx(48, rel=0.1)  # 8 samples of 6 ms each
    assert "DataLoader" in finding["evidence"][0]


def test_the_sample_with_slow_input_blames_the_input_and_no_rank():
    (finding,) = findings(SAMPLES / "slow_input")
    assert (finding["class"], finding["component"]["kind"]) == ("slow.host", "job")
    assert finding["cost_ms_per_step"] == pytest.approx(32, rel=0.1)  # 8 samples of 4 ms each
    assert finding["ranks"] == [0, 1]


def test_the_demo_records_explains_and_checks_itself(tmp_path):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "dpro", "demo", "-o", str(tmp_path / "demo"), "--json"],
        env={**os.environ, "PYTHONPATH": str(SAMPLES.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    first = shown["diagnose"]["findings"][0]
    assert (first["class"], first["component"]) == ("slow.host", {"kind": "rank", "id": "1"})
    waited_ms = [waited_for_data_ms(tmp_path / "demo" / "slow_rank", rank) for rank in (0, 1)]
    assert waited_ms[1] >= 48  # 8 samples of 6 ms each; longer where others use the processors
    assert first["cost_ms_per_step"] == pytest.approx(waited_ms[1] - waited_ms[0], rel=0.25)
    # What two separate runs differ by on a busy machine proves nothing, but it must be what they differ by.
    faulty, healthy = (
        typical_step_ns(open_run(tmp_path / "demo" / name)) for name in ("slow_rank", "healthy")
    )
    assert shown["really_saved_ms"] == pytest.approx((faulty - healthy) / 1e6)
    alone = [prediction["edits"][0] for prediction in shown["predictions"] if len(prediction["edits"]) == 1]
    assert alone
    assert set(alone[:2]) <= {"heal:rank=1", "hide-input"}
    assert "dpro record" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_without_torch_says_so_and_explains_a_run_that_ships(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(cli, ["demo"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("PyTorch is not installed here")
    for part in ("What was recorded", "What is wrong", "rank 1 costs", "What would help", "Look further"):
        assert part in done.stdout
    assert "Checked:" not in done.stdout
    assert f"diagnose {SAMPLES / 'slow_rank'}" in done.stdout.replace(
        str(SAMPLES.parent / "dpro"), str(SAMPLES.parent)
    )
