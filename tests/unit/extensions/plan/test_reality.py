"""The benchmark of layouts: its document, on tables made here and, where they are, on the published ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from benchmarks.reality_checks.checks import CHECKS
from benchmarks.reality_checks.tables import read, stalled
from tests.sources import ROOT

REALITY = Path(os.environ.get("DPRO_REALITY", ROOT.parent / "shared" / "reality"))
KEYS = {"n", "median_pct", "p90_pct", "order_pct", "interval_held_pct", "yardstick", "bar", "holds"}


def run(folder: Path, *more: str) -> dict[str, dict[str, object]]:
    """What the benchmark prints of a folder."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "reality.py"),
        "--data",
        str(folder),
        "--json",
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return found


def row(tp: int, dp: int, pp: int, micro_batch: int, step_ms: float) -> dict[str, object]:
    sizes = {"hidden": 1024, "heads": 16, "layers": 24, "seq_len": 1024, "gpus": 8, "global_batch": 32}
    return {**sizes, "tp": tp, "dp": dp, "pp": pp, "micro_batch": micro_batch, "step_ms": step_ms}


@pytest.mark.slow
def test_a_folder_with_one_table_has_figures_of_it_and_reasons_for_the_rest(tmp_path: Path) -> None:
    rows = [row(1, 8, 1, 2, 150.0), row(2, 4, 1, 2, 300.0), row(1, 4, 2, 2, 170.0)]
    pl.DataFrame(rows).write_csv(tmp_path / "vtrain_single_node.csv")
    found = run(tmp_path)
    assert list(found) == list(CHECKS)
    mine = found.pop("vtrain single node")
    assert set(mine) == KEYS
    assert mine["n"] == 6
    assert mine["holds"] in (True, False)
    assert {"nothing changes", "pipeline bubble alone"} < set(mine["yardstick"])  # type: ignore[call-overload]
    for other in found.values():
        assert other["n"] == 0
        assert other["holds"] is None
        assert "no " in str(other["reason"])


def test_a_column_that_no_row_of_a_table_has_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "any.csv").write_text("hidden,heads\n,16\n,32\n")
    table = read(tmp_path, "any")
    assert table is not None
    assert table["hidden"].fill_null(7).to_list() == [7, 7]
    assert read(tmp_path, "none") is None


def test_a_row_that_took_longer_than_more_work_did_is_stalled() -> None:
    def of(micro_batch: int, step_ms: float, nodes: int = 2) -> dict[str, object]:
        return {
            **{"model": "1B", "tp": 8, "pp": 2, "zero_stage": 1, "nodes": nodes, "micro_batches": 7},
            **{"micro_batch": micro_batch, "step_ms": step_ms, "tokens_per_s_per_gpu": 1e6 / step_ms},
        }

    frame = pl.DataFrame([of(1, 1000.0), of(2, 300.0), of(4, 310.0), of(4, 700.0, nodes=4)])
    assert stalled(frame).to_list() == [True, False, False, True]


@pytest.mark.slow
@pytest.mark.skipif(not REALITY.is_dir(), reason=f"no measured tables in {REALITY}")
def test_the_published_tables_have_figures_and_intervals() -> None:
    found = run(REALITY, "--check", "simumax", "mlperf larger cluster")
    for figures in found.values():
        assert set(figures) >= KEYS
        assert figures["n"]
        assert float(str(figures["interval_held_pct"])) >= 85
