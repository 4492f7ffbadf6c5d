"""`dpro plan`, as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro.extensions.plan import schedules
from dpro.extensions.plan.command import SCHEDULES
from tests.commands import dpro

CONFIG = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_layouts_are_ranked_in_one_object(config: str) -> None:
    done = dpro("plan", "--model", config, "--gpus", "16", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["calibrated"] is False
    assert "not calibrated" in document["trust"]
    assert [line.split(":")[0] for line in document["assumed"]] == [
        "sequences of 4096 tokens",
        "a batch of 64 sequences",
    ]
    first = document["layouts"][0]
    assert (
        first["tokens_per_s_per_gpu_low"] < first["tokens_per_s_per_gpu"] < first["tokens_per_s_per_gpu_high"]
    )
    assert first["dp"] * first["tp"] * first["pp"] * first["cp"] == 16
    rates = [row["tokens_per_s_per_gpu"] for row in document["layouts"]]
    assert rates == sorted(rates, reverse=True)
    assert all(row["why"] for row in document["unfitting"])


def test_schedules_are_ranked_as_asked(config: str) -> None:
    asked = ("plan", "--model", config, "--gpus", "16", "--keep", "pp=4", "--json", "--top", "200")
    found = {
        words: {row["schedule"] for row in json.loads(dpro(*asked, *words).stdout)["layouts"]}
        for words in ((), ("--schedule", "zbv"), ("--schedule", "all"))
    }
    assert list(found.values()) == [{"1f1b", "interleaved"}, {"zbv"}, set(SCHEDULES)]
    assert set(SCHEDULES) == set(schedules.SCHEDULES)


def test_a_measured_step_narrows_the_intervals(config: str) -> None:
    asked = ("plan", "--model", config, "--gpus", "16", "--keep", "tp=2", "--json", "--top", "1")
    plain = json.loads(dpro(*asked).stdout)["layouts"][0]
    row = f"dp={plain['dp']},tp=2,pp={plain['pp']},micro_batch={plain['micro_batch']}"
    more = f",vpp={plain['vpp']},zero={plain['zero']},recompute={plain['recompute']}"
    done = json.loads(dpro(*asked, "--calibrate", f"{row}{more}:{plain['step_ms']:.0f}ms").stdout)
    assert done["calibrated"]
    known = done["layouts"][0]
    assert known["high_ms"] / known["low_ms"] < 0.9 * plain["high_ms"] / plain["low_ms"]
    assert known["step_ms"] == pytest.approx(plain["step_ms"], rel=0.01)


def test_people_get_a_table_and_what_was_assumed(config: str) -> None:
    done = dpro("plan", "--model", config, "--gpus", "8", "--memory", "20", "--global-batch", "32")
    assert done.returncode == 0, done.stderr
    assert "Not calibrated" in done.stdout
    assert "those that do not fit" in done.stdout
    assert "assumed: sequences of 4096 tokens" in done.stdout
    assert "tokens/s/GPU" in done.stdout


def test_where_nothing_fits_the_plan_says_what_comes_nearest(config: str) -> None:
    asked = ("plan", "--model", config, "--gpus", "2", "--memory", "2")
    document = json.loads(dpro(*asked, "--json").stdout)
    assert document["num_fitting"] == 0
    assert not document["layouts"]
    needed = [row["memory_gb"] for row in document["unfitting"]]
    assert needed == sorted(needed)
    assert "none fits" in dpro(*asked).stdout


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--keep", "tp"), "give the value"),
        (("--keep", "zp=3"), "not part of a layout"),
        (("--keep", "tp=3"), "no layout of 8 GPUs"),
        (("--keep", "tp=0"), "tp is from 1"),
        (("--keep", "zero=9"), "zero is from 0 to 3"),
        (("--keep", "recompute=some"), "recompute is one of none, selective, full"),
        (("--calibrate", "dp=8,recompute=9:5ms"), "recompute is from 0 to 2"),
        (("--memory", "nan"), "'--memory': nan is not a number"),
        (("--device", "Z9000"), "no data sheet"),
        (("--device", "A100", "--precision", "fp8"), "does not multiply"),
        (("--calibrate", "dp=8"), "give a layout and its step"),
        (("--calibrate", "dp=8,micro_batch=3:100ms"), "do not divide"),
        (("--calibrate", "dp=4:100ms"), "its axes make 4 of 8 GPUs"),
        (("--calibrate", "pp=1000000:100ms"), "16 layers do not make 1000000 stages"),
        (("--calibrate", "dp=2,pp=4,vpp=7:100ms"), "16 layers do not make 28 stages"),
        (("--calibrate", "dp=8,vpp=2:100ms"), "only pipeline stages have chunks"),
        (("--calibrate", "dp=4,tp=2,ep=2:100ms"), "the model has no experts"),
        (("--keep", "ep=2"), "no layout of 8 GPUs"),
        (("--calibrate", "dp=8:0ms"), "positive"),
    ],
)
def test_what_cannot_be_planned_is_one_line_that_says_why(
    config: str, more: tuple[str, str], word: str
) -> None:
    done = dpro("plan", "--model", config, "--gpus", "8", *more)
    assert done.returncode == 2
    assert word in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--keep", "zp"), "--keep zp: there are dp"),
        (("--keep", "zp=3"), "not part of a layout"),
        (("--calibrate", "dp=8"), "give a layout and its step"),
    ],
)
def test_what_is_asked_is_read_before_the_run(more: tuple[str, str], word: str, tmp_path: Path) -> None:
    done = dpro("plan", tmp_path / "none", *more)
    assert done.returncode == 2
    assert word in done.stderr


def test_a_configuration_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = dpro("plan", "--model", tmp_path / "none.json", "--gpus", "8")
    assert done.returncode == 1
    assert "cannot be read" in done.stderr
