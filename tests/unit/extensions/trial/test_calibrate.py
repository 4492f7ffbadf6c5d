"""Intervals as what was tried widens them, in `dpro whatif`, too."""

import json

import pytest
from click.testing import CliRunner

from dpro.cli import cli
from dpro.extensions.trial.calibrate import calibrated
from dpro.extensions.trial.ledger import LedgerEntry, Ratio, append
from dpro.replay.whatif.predict import Prediction
from dpro.replay.whatif.registry import parse_edit

WORKERS = "workers:count=2"
ENDS = {"low": "_low", "middle": "", "high": "_high"}


def tries(kind, *measured):
    return [
        LedgerEntry(kind, [], Ratio(0.5, 0.4, 0.6), Ratio(each, 0, 9), 0.0, 1.0, 3, 9, 1, "")
        for each in measured
    ]


def prediction(*edits, low=90.0, high=110.0):
    return Prediction(tuple(map(parse_edit, edits)), 100.0, 2.0, low, high)


def test_an_interval_is_widened_by_the_errors_of_its_kind_and_says_so():
    shown = calibrated(prediction(WORKERS), tries("workers:count", 0.5, 0.55, 0.6))
    assert shown.predicted_ns == 100.0
    assert (shown.low_ns, shown.high_ns) == (pytest.approx(100 / 1.2), pytest.approx(120))
    assert "widened by 3 tries of workers:count" in shown.widened
    assert "20%" in shown.widened


@pytest.mark.parametrize(
    ("edits", "entries"),
    [
        ([WORKERS], tries("workers:count", 0.9, 0.9)),  # too few
        ([WORKERS], tries("bucket:mb", 0.9, 0.9, 0.9)),  # of another kind
        (["heal:rank=0"], tries("", 0.9, 0.9, 0.9)),  # of none
        ([WORKERS, "heal:rank=0"], tries("workers:count", 0.9, 0.9, 0.9)),  # together with one of none
        ([WORKERS], tries("workers:count", 0.51, 0.5, 0.49)),  # within what the replay says
    ],
)
def test_an_interval_stays_where_the_ledger_knows_nothing_worse(edits, entries):
    found = calibrated(prediction(*edits), entries)
    assert not found.widened
    assert (found.low_ns, found.high_ns) == (prediction(*edits).low_ns, prediction(*edits).high_ns)


def test_what_was_tried_and_held_is_proven():
    assert not prediction(WORKERS).proven
    assert calibrated(prediction(WORKERS), tries("workers:count", 0.51)).proven
    assert not calibrated(prediction(WORKERS), tries("workers:count", 0.9)).proven


@pytest.mark.slow
def test_predictions_of_the_command_are_widened_by_the_ledger(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    command = ["whatif", str(repository / "sample_traces" / "slow_input"), "--edit", WORKERS]

    def asked():
        return json.loads(CliRunner().invoke(cli, [*command, "--json"], catch_exceptions=False).stdout)

    before = asked()
    for entry in tries("workers:count", 0.5, 0.8, 0.9):
        append(entry)
    after = asked()
    [plain], [wider] = before["predictions"], after["predictions"]
    assert before["widened"] == []
    assert after["widened"] == [
        f"{WORKERS}: interval widened by 3 tries of workers:count, where predictions were off by up to 80%"
    ]
    assert wider["predicted_ms"] == plain["predicted_ms"]
    assert wider["high"] == pytest.approx(1.8 * plain["predicted_ms"])
    text = CliRunner().invoke(cli, command, catch_exceptions=False).stdout
    assert "widened by 3 tries" in text
    assert f"dpro try {WORKERS} -- COMMAND" in text


@pytest.mark.slow
def test_advice_gains_what_the_command_predicts_of_what_was_tried(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run = str(repository / "sample_traces" / "slow_input")

    def asked(*arguments):
        return json.loads(CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False).stdout)

    plain = asked("explain", run)
    for entry in tries("workers:count", 0.5, 0.8, 0.9):
        append(entry)
    wider = asked("explain", run)["account"]["gains"]["workers:count=1"]
    (prediction,) = asked("whatif", run, "--edit", "workers:count=1")["predictions"]
    assert wider == {end: prediction[f"speedup{name}"] for end, name in ENDS.items()}
    assert wider["low"] < plain["account"]["gains"]["workers:count=1"]["low"]
