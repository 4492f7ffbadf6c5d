"""`dpro whatif --device-table`: what products take on a device, of a table or of a run there."""

from __future__ import annotations

import json

from tests.commands import dpro
from tests.unit.replay.whatif.edits.gpu.test_device import JOB
from tests.unit.replay.whatif.edits.gpu.test_precision import matmuls


def test_a_table_that_is_none_is_refused_in_one_line(tmp_path):
    matmuls(JOB).build(tmp_path / "r")
    (tmp_path / "t.csv").write_text("device,dtype,m,n,k\n")
    done = dpro("whatif", tmp_path / "r", "--edit", "device:to=H200", "--device-table", tmp_path / "t.csv")
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert "no column latency_us" in done.stderr


def test_a_folder_without_a_table_or_a_run_is_refused_before_anything_of_it_is_read(tmp_path):
    matmuls(JOB).build(tmp_path / "r")
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "rank0.json").write_text('{"traceEvents": []}')
    done = dpro("whatif", tmp_path / "r", "--edit", "device:to=H200", "--device-table", folder)
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert f"{folder}: neither a run nor a folder with gemm.parquet" in done.stderr


def test_a_run_without_shapes_is_refused_as_a_table(tmp_path):
    for name in ("r", "other"):
        matmuls(JOB, shaped=False).build(tmp_path / name)
    done = dpro("whatif", tmp_path / "r", "--edit", "device:to=H200", "--device-table", tmp_path / "other")
    assert done.returncode != 0
    assert "is not known" in done.stderr


def test_tables_reach_the_edit(tmp_path, monkeypatch):
    from dpro.replay.whatif.edits import device

    seen = []

    def sources_of(products, *devices):
        seen.append(products.height)
        return device.Sources()

    monkeypatch.setattr(device, "sources_of", sources_of)
    monkeypatch.setattr(device, "common_model", lambda names: "H100")
    matmuls(JOB).build(tmp_path / "r")
    rows = [f"H200,bf16,4096,4096,{64 * size},{size}" for size in range(1, 31)]
    (tmp_path / "t.csv").write_text("\n".join(["device,dtype,m,n,k,latency_us", *rows]))
    edit = ("--edit", "device:to=H200", "--json", "--device-table", tmp_path / "t.csv")
    done = dpro("whatif", tmp_path / "r", *edit)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["predictions"]
    assert set(seen) == {30}
