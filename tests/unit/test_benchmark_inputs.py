"""Benchmarks on other data than theirs: small, empty, not there."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import as_program, goodput
from benchmarks.campaigns.design import DESIGNS, SHORT
from benchmarks.serving_checks import logs
from dpro.errors import InputError


@pytest.mark.parametrize(
    "error", [InputError("x: no trace found"), FileNotFoundError(2, "No such file", "x")]
)
def test_what_is_wrong_with_the_input_is_one_line(error, monkeypatch, capsys):
    def fails() -> int:
        raise error

    monkeypatch.setattr(sys, "argv", ["/a/condense.py"])
    with pytest.raises(SystemExit, match=r"^condense.py: .*x.*$"):
        as_program(fails)


@pytest.mark.parametrize(
    ("designs", "whole_s", "predicted"),
    [
        ([DESIGNS[1]], 9.0, 0),  # nothing to predict it from
        ([SHORT, DESIGNS[1]], 0.0, 0),  # it did nothing that a prediction could be held to
        ([SHORT, DESIGNS[1]], 9.0, 1),
    ],
)
def test_few_campaigns_are_judged_as_far_as_they_go(designs, whole_s, predicted, tmp_path, monkeypatch):
    assert not DESIGNS[1].in_background
    monkeypatch.setattr(goodput, "life", lambda _: None)
    monkeypatch.setattr(goodput, "account_errors", lambda *_: {"productive": 0.0, "checkpoint": 0.0})
    progress = SimpleNamespace(whole_s=whole_s, wall_s=10.0)
    monkeypatch.setattr(goodput, "logged_progress", lambda _: progress)
    monkeypatch.setattr(goodput, "predicted", lambda *_: np.array([0.9, 0.9]))
    made = [SimpleNamespace(design=each, folder=tmp_path) for each in designs]
    checks = goodput.judged(made)
    assert checks["account, productive"]["n"] == len(designs)
    assert checks["predicted from another campaign"]["n"] == predicted


def test_table_whose_first_rows_look_like_integers_is_read(tmp_path, monkeypatch):
    head = "device,model,arrival_s,scheduled_s,first_token_s,last_token_s,input_tokens,output_tokens"
    rows = [f"d,m,{second},{second},{second},{second},1,1" for second in range(200)]
    (tmp_path / "serving_vllm_requests.csv").write_text("\n".join([head, *rows, "d,m,200.5,201,202,203,1,1"]))
    (tmp_path / "serving_vllm_runs.csv").write_text("device,model\nd,m")
    monkeypatch.setattr(logs, "_tried", lambda requests, _: (requests["arrival_ns"].to_numpy(), []))
    [(name, arrivals, held)] = logs.second_halves(tmp_path)
    assert (name, arrivals.size, arrivals[-1], held) == ("m on d", 201, 200_500_000_000, [])
