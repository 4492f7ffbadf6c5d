"""What `dpro whatif` says beside its list: how to make the first change, and that the job hung."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from dpro.cli import whatif
from dpro.verdict.advice import Advice
from tests.commands import dpro
from tests.jobs import ROOT


def change(text: str, note: str = "", **more) -> SimpleNamespace:
    fields = {"edits": [text], "notes": [note] if note else [], "training": []}
    fields |= {"is_advice": True, "effect": "faster"}
    return SimpleNamespace(how=lambda: f"do {text}", **fields | more)


def advice(text: str = "", do: str = "", gain: float | None = 1.1) -> Advice:
    return Advice("kind", do, gain, gain and 2.0, "a setting", "it is possible", edit=text)


def measuring(monkeypatch, shown, sure=None) -> str:
    def how_to_try(predictions, run):
        (text,) = predictions[0].edits
        return "" if text.startswith("heal") else f"try {text}"

    monkeypatch.setattr(whatif, "hooks_of", lambda _: (how_to_try,))
    return whatif.measuring_in_words(shown if sure is None else sure, shown, None)


def test_the_first_that_is_listed_is_explained():
    changes = [change("workers:count=1", "a note"), change("cuda-graph")]
    assert whatif.how_in_words(changes, [], explained=True) == [
        "  - a note",
        "How to make the first change: do workers:count=1",
    ]
    assert (
        whatif.how_in_words(changes[:1], [], explained=True)[-1]
        == "How to make the change: do workers:count=1"
    )
    assert whatif.how_in_words([], [], explained=True) == []


def test_below_the_verdict_try_1_is_explained_and_no_other():
    changes, tries = [change("workers:count=1"), change("cuda-graph")], [advice("workers:count=1"), advice()]
    assert whatif.how_in_words(changes, tries, explained=True) == ["How to do TRY 1: do workers:count=1"]
    assert whatif.how_in_words(changes[1:], [advice(), advice("cuda-graph")], explained=True) == []


@pytest.mark.parametrize("explained", [True, False])
def test_how_to_end_a_fault_is_what_its_finding_says(explained):
    healed = change("heal:rank=1", is_advice=False)
    tries = [advice("heal:rank=1", "remove the sleep in step()")]
    (line,) = whatif.how_in_words([healed], tries, explained)
    assert line.endswith(": remove the sleep in step() (assumes that it is possible)")


def test_the_first_that_can_be_tried_is_offered_to_be_measured(monkeypatch):
    rank, workers, graphs = map(change, ("heal:rank=1", "workers:count=1", "cuda-graph"))
    assert measuring(monkeypatch, [rank, workers, graphs]) == "To measure one of them: try workers:count=1"
    assert measuring(monkeypatch, [graphs, workers]) == "To measure it: try cuda-graph"
    assert measuring(monkeypatch, [rank]) == ""


def test_what_may_gain_nothing_is_not_offered_to_be_measured(monkeypatch):
    workers, graphs = map(change, ("workers:count=1", "cuda-graph"))
    assert measuring(monkeypatch, [workers, graphs], sure=[graphs]).endswith("one of them: try cuda-graph")
    assert measuring(monkeypatch, [workers, graphs], sure=[]) == ""


def test_a_change_of_the_training_is_measured_only_where_no_other_can_be(monkeypatch):
    rank, accumulate, bucket = map(change, ("heal:rank=1", "accumulate:steps=2", "bucket:mb=100"))
    accumulate.training.append("larger batches")
    assert measuring(monkeypatch, [rank, accumulate, bucket]).endswith("try bucket:mb=100")
    assert measuring(monkeypatch, [rank, accumulate]).endswith("try accumulate:steps=2")


def test_advice_whose_gain_no_edit_predicts_is_named_by_its_number():
    tries = [advice(), advice("compress:to=bf16"), advice(), advice(gain=None)]
    assert whatif.unpredicted_in_words(tries) == (
        "The gains of TRY 1 and 3 are estimated from the run; no single edit predicts them."
    )
    assert whatif.unpredicted_in_words(tries[:2]) == (
        "The gain of TRY 1 is estimated from the run; no single edit predicts it."
    )
    assert whatif.unpredicted_in_words(tries[1:2]) == ""


def test_within_a_group_the_largest_gain_comes_first_and_changes_of_the_training_apart():
    def row(gain: float, training: str = "", **more) -> SimpleNamespace:
        return change(str(gain), speedup=gain, training=[training] if training else [], **more)

    rows = [row(1.1), row(2.8, "more samples"), row(2.5), row(3.0, effect="unclear"), row(1.2)]
    tried = row(1.05)
    placed = sorted([*rows, tried], key=lambda row: whatif._place_of(row, True, [tried]))
    assert [row.speedup for row in placed] == [1.05, 2.5, 1.2, 1.1, 2.8, 3.0]
    assert len({whatif._place_of(row, True, [tried])[:2] for row in placed}) == 4


def test_without_any_change_there_is_no_list(capsys):
    whatif._print_blocks([], True, [])
    assert capsys.readouterr().out == ""


def test_of_a_job_that_hung_it_says_first_what_gains_are_of():
    hung = ROOT / "sample_traces" / "h200_hang"
    lines = dpro("whatif", hung, "--edit", "bucket:mb=100").stdout.splitlines()
    assert lines[0].startswith("The job hung at step 31")
    assert lines[1].startswith("The job hung: these predictions are for the steps before that")
    assert lines[2].startswith("Predictions from this run")


def test_of_a_job_that_hung_no_change_is_predicted_unasked():
    hung = ROOT / "sample_traces" / "h200_hang"
    said = " ".join(dpro("whatif", hung).stdout.split())
    assert said.index("see what the GPU of rank 1 still runs") < said.index("End the hang first")
    assert "x1." not in said
    assert "--edit '" not in said
    assert json.loads(dpro("whatif", hung, "--json").stdout)["predictions"] == []


def test_a_rank_that_is_healed_and_costs_only_pauses_is_said_to():
    slow = ROOT / "sample_traces" / "h200_slow_host"
    said = dpro("whatif", slow, "--edit", "heal:rank=1").stdout
    assert "  - usual steps only: the 4.25 ms a step that rank 1 costs are in pauses" in said
    healthy = dpro("whatif", ROOT / "sample_traces" / "slow_rank", "--edit", "heal:rank=1").stdout
    assert "usual steps only" not in healthy
