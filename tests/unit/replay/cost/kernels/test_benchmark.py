"""The benchmark runs as it is documented, on tables as small as they may be."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import polars as pl
import pytest

from dpro.replay.cost.kernels.formula import PRIOR, DeviceTable, device_named, formula_us, sizes_of
from dpro.replay.cost.kernels.operations import attention, matmuls
from dpro.replay.cost.kernels.roofline import GPUS

KEYS = {"n", "median_pct", "p90_pct", "bar", "holds"}


def _table(device: str, backend: str, columns: range, factor: float) -> pl.DataFrame:
    grid = np.meshgrid(2 ** np.arange(5, 13), 1024 * np.array(columns), [2048, 8192])
    m, n, k = (each.ravel() for each in grid)
    us = formula_us(PRIOR, sizes_of(matmuls("bf16", m, n, k)), GPUS[device_named(device)], "bf16")
    us = us * factor * np.exp(np.random.default_rng(m.size).normal(0, 0.02, m.size))
    return pl.DataFrame({"m": m, "n": n, "k": k, "latency_us": us}).with_columns(
        device=pl.lit(device), backend=pl.lit(backend), kernel=pl.lit("any"), dtype=pl.lit("bfloat16")
    )


@pytest.mark.slow
def test_the_benchmark_learns_from_one_folder_and_tries_the_shapes_and_devices_of_another(
    tmp_path, repository
):
    known = ("a100_sxm", "h100_sxm", "l40s")
    for folder, columns, devices in (
        ("train", range(1, 9), known),
        ("data", range(9, 13), (*known, "b200_sxm")),
    ):
        (tmp_path / folder).mkdir()
        tables = [
            _table(device, backend, columns, factor)
            for device in devices
            for backend, factor in (("one", 1.0), ("other", 1.1))
        ]
        pl.concat(tables).write_parquet(tmp_path / folder / "gemm.parquet")
    command = [sys.executable, "benchmarks/devices.py", "--json"]
    folders = ["--train", str(tmp_path / "train"), "--data", str(tmp_path / "data")]
    done = subprocess.run([*command, *folders], cwd=repository, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert all(found[check].keys() >= KEYS for check in found), done.stderr
    assert found["matmul unseen shape"]["n"] == 6 * 8 * 4 * 2
    for check in ("matmul unseen shape", "measured on another device, with tables"):
        assert found[check]["holds"], (check, found[check])
    sheet = found["bf16 never measured, sheet"]
    assert sheet["median_pct"] < 10, sheet
    assert {name.partition(" ")[0] for name in sheet["by"]} == {"B200"}


def test_shapes_are_learned_from_tables_of_their_own_kind(repository):
    """Prefill and decode of one library have one name."""
    from benchmarks.device_checks.operators import _known_pairs

    prefill, decode = (
        DeviceTable(
            "H100",
            "one",
            kind,
            "bf16",
            pl.DataFrame({"batch_size": sizes}),
            attention("bf16", sizes, 64, 0, 8, 8, 64),
            np.ones(3),
        )
        for kind, sizes in (("prefill", [1, 2, 3]), ("decode", [4, 5, 6]))
    )
    new = dataclasses.replace(prefill, shapes=pl.DataFrame({"batch_size": [3, 4, 5]}))
    ((known, tried),) = _known_pairs([prefill, decode], [new], same=False)
    assert known.kind == "prefill"
    assert tried.shapes["batch_size"].to_list() == [4, 5]


GOLDEN = "job,configuration,platform,device,step_ms,experts,etp\n"


@pytest.mark.parametrize("made", [{}, {"megatron_golden.csv": GOLDEN}])
def test_folders_without_tables_leave_every_check_undecided_and_say_why(made, tmp_path, repository):
    from benchmarks.device_checks import jobs, models, operators

    for name, text in made.items():
        (tmp_path / name).write_text(text)
    found = {
        **models.whole_models(tmp_path, tmp_path),
        **jobs.small_jobs(tmp_path, tmp_path),
        **models.traced_model(tmp_path),
        **operators.unseen_shapes([], [], False, (4, 14), "matmul"),
        **operators.other_device([], []),
        **operators.never_measured([], [], False, "bf16", ((12, 30), (6.5, 20))),
    }
    assert len(found) == 4 + 2 + 1 + 4 + 2 + 4
    for check, figures in found.items():
        assert (figures["n"], figures["holds"]) == (0, None), check
        assert figures["note"], check


def test_jobs_on_a_machine_that_no_other_job_is_known_on_are_said_from_the_sheets(tmp_path):
    """One job computes all of the time, one almost never: the host's part stays."""
    from benchmarks.device_checks import jobs

    peaks = [GPUS[jobs.SOURCES[name]].tflops["bf16"] for name in ("H100", "GB200")]
    tokens, layers = 32 * 1024, 24
    computing_ms = 72 * layers * tokens * 4096**2 / (peaks[0] * 1e9)
    shared = {"micro_batch": 4, "global_batch": 32, "seq_len": 1024, "layers": layers, "experts": None}
    rows = [
        shared
        | {"job": job, "configuration": 0, "platform": f"dev_dgx_{device.lower()}", "device": device}
        | {"hidden": hidden, "gpus_from_recipe": 1, "step_ms": ms, "etp": None, "tp": 1, "pp": 1, "cp": 1}
        for job, hidden, took in (
            ("gpt/busy", 4096, (computing_ms, computing_ms)),
            ("gpt/waits", 8, (90.0, 100.0)),
        )
        for device, ms in zip(("H100", "GB200"), took)
    ]
    jobs_file = pl.DataFrame(rows)
    for folder, mine in (("train", jobs_file.filter(device="H100")), ("data", jobs_file)):
        (tmp_path / folder).mkdir()
        mine.write_csv(tmp_path / folder / jobs.FILE)
    tried = jobs._pair(
        *(jobs._jobs(tmp_path / each) for each in ("train", "data")), "H100", "GB200", same=False
    )
    assert tried is not None
    assert not tried.learned
    assert tried.predicted == pytest.approx([computing_ms * peaks[0] / peaks[1], 90.0], rel=1e-3)
    assert tried.least[1] == pytest.approx(90.0 * peaks[0] / peaks[1])
    assert (tried.least < tried.predicted).all()
    assert (tried.predicted < tried.most).all()
    found = jobs.small_jobs(tmp_path / "train", tmp_path / "data")
    assert found["small jobs, interval"]["n"] == 2
    assert "H100 -> GB200 from the sheets" in found["small jobs, A100 -> H100 -> GB200"]["note"]


def test_models_that_were_only_measured_in_inference_are_read(tmp_path):
    """`inf` alone in a column is a mode, no number."""
    from benchmarks.device_checks import models

    (tmp_path / models.MODELS).write_text(
        "device,model,mode,seq_len,batch,option,layers,e2e_ms\nTesla P4,gpt2_large,inf,1024,4,,36,100.0\n"
    )
    assert models._plain(tmp_path)["mode"].to_list() == ["inf"]
