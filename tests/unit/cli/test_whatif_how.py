"""What `dpro whatif` says beside its list: how to make the first change, and that the job hung."""

from __future__ import annotations

import json
from types import SimpleNamespace

from dpro.cli import whatif
from dpro.verdict.advice import Advice
from tests.commands import dpro
from tests.jobs import ROOT


def change(text: str, note: str = "") -> SimpleNamespace:
    return SimpleNamespace(edits=[text], notes=[note] if note else [], training=[], how=lambda: f"do {text}")


def said(monkeypatch, capsys, how_to_try, changes) -> list[str]:
    monkeypatch.setattr(whatif, "hooks_of", lambda _: (how_to_try,))
    whatif._print_how(changes, None)
    return capsys.readouterr().out.splitlines()


def test_the_first_that_is_listed_is_explained(monkeypatch, capsys):
    changes = [change("workers:count=1", "a note"), change("cuda-graph")]
    assert said(monkeypatch, capsys, lambda *_: "", changes) == [
        "  - a note",
        "How to make the first change: do workers:count=1",
    ]
    assert said(monkeypatch, capsys, lambda *_: "", []) == []


def test_the_first_that_can_be_tried_is_offered_to_be_measured(monkeypatch, capsys):
    def how_to_try(predictions, run):
        (text,) = predictions[0].edits
        return "" if text.startswith("heal") else f"try {text}"

    rank, workers, graphs = map(change, ("heal:rank=1", "workers:count=1", "cuda-graph"))
    assert said(monkeypatch, capsys, how_to_try, [rank, workers, graphs])[-1] == (
        "To measure one of them: try workers:count=1"
    )
    assert said(monkeypatch, capsys, how_to_try, [graphs, workers])[-1] == "To measure it: try cuda-graph"
    assert len(said(monkeypatch, capsys, how_to_try, [rank])) == 1


def test_a_change_of_the_training_is_measured_only_where_no_other_can_be(monkeypatch, capsys):
    def how_to_try(predictions, run):
        (text,) = predictions[0].edits
        return "" if text.startswith("heal") else f"try {text}"

    rank, accumulate, bucket = map(change, ("heal:rank=1", "accumulate:steps=2", "bucket:mb=100"))
    accumulate.training.append("larger batches")
    assert said(monkeypatch, capsys, how_to_try, [rank, accumulate, bucket])[-1].endswith("try bucket:mb=100")
    assert said(monkeypatch, capsys, how_to_try, [rank, accumulate])[-1].endswith("try accumulate:steps=2")


def test_the_advice_that_no_edit_predicts_is_named_by_its_number():
    tries = [
        Advice("cores", "more cores, or fewer workers (a wait)", 1.0, 4.7, "a setting"),
        Advice("compression", "bf16", 1.5, 2.1, "a line of code", edit="compress:to=bf16"),
        Advice("overlap", "overlap x with compute: by hand", 1.1, 1.5, "new code"),
    ]
    assert whatif.unpredicted_in_words(tries) == (
        "No edit predicts TRY 1 (more cores, or fewer workers (a wait)), 3 (overlap x with compute: by hand)."
    )
    assert whatif.unpredicted_in_words(tries[1:2]) == ""


def test_of_a_job_that_hung_it_says_first_what_gains_are_of():
    hung = ROOT / "sample_traces" / "h200_hang"
    lines = dpro("whatif", hung, "--edit", "bucket:mb=100").stdout.splitlines()
    assert lines[0].startswith("The job hung at step 31")
    assert lines[1].startswith("The job hung: these predictions are for the steps before that")
    assert lines[2].startswith("Predictions from this run")


def test_of_a_job_that_hung_no_change_is_predicted_unasked():
    hung = ROOT / "sample_traces" / "h200_hang"
    said = dpro("whatif", hung).stdout
    assert said.index("TRY    1 find the kernel that the GPU of rank 1") < said.index("End the hang first")
    assert "x1." not in said
    assert "--edit '" not in said
    assert json.loads(dpro("whatif", hung, "--json").stdout)["predictions"] == []


def test_a_rank_that_is_healed_and_costs_only_pauses_is_said_to():
    slow = ROOT / "sample_traces" / "h200_slow_host"
    said = dpro("whatif", slow, "--edit", "heal:rank=1").stdout
    assert "  - usual steps only: the 4.25 ms a step that rank 1 costs are in pauses" in said
    healthy = dpro("whatif", ROOT / "sample_traces" / "slow_rank", "--edit", "heal:rank=1").stdout
    assert "usual steps only" not in healthy
