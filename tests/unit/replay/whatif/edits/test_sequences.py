"""Sequences evened out by the tokens that ranks were handed, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.whatif.edits.balance import handed
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.predict import apply_all
from dpro.replay.whatif.registry import parse_edit
from tests.builders import TinyRun
from tests.edits import changed, steps_us

USUAL, FIXED = 1000, 200.0  # tokens; us of a step that do not grow with them
MOVES = 100.0
SLOW = 1.5


def handed_job(
    more: tuple[int, ...] = (0, 300, 600), *, power: float = 1.0, slow: float = 1.0, counted: bool = True
) -> TinyRun:
    """Two ranks, of which each in turn has more tokens and the other as many less; then they reduce."""
    run, begin = TinyRun(), 0.0
    for step in range(12):
        tokens = [USUAL + more[step % len(more)] * (1 if (step + rank) % 2 else -1) for rank in range(2)]
        works = [
            (FIXED + USUAL * (each / USUAL) ** power) * times for each, times in zip(tokens, (1.0, slow))
        ]
        moved = begin + max(works) + 20 + MOVES
        for rank, (each, work) in enumerate(zip(tokens, works)):
            ready = begin + work
            run.op("aten::mm", begin, ready, rank)
            run.gloo((ready, ready + 10), (ready + 20, moved), rank, sequence=step)
            run.mark("wait", ready + 10, moved, rank)
            run.op("update", moved, moved + 1, rank)
            run.step(step, begin, moved + 1, rank)
            if counted:
                run.counter("step_input_elements", begin, each, rank)
        begin = moved + 1
    return run


def built(folder: Path, run: TinyRun) -> Graph:
    return run.build(folder / "run").graph


def test_each_rank_has_the_mean_of_the_tokens_of_its_step(tmp_path):
    graph = built(tmp_path, handed_job())
    steps = steps_us(graph, "balance:over=sequences")
    assert steps[3:9] == pytest.approx([FIXED + USUAL + 20 + MOVES + 1] * 6, rel=0.01)
    assert steps_us(graph)[5] - steps[5] == pytest.approx(600, rel=0.02)


def test_what_grows_with_the_square_of_the_tokens_is_seen(tmp_path):
    graph = built(tmp_path, handed_job(power=2.0))
    known = handed(graph)
    assert known.power == 2
    assert known.share == pytest.approx(USUAL / (USUAL + FIXED), abs=0.03)
    steps = steps_us(graph, "balance:over=sequences")
    assert steps[3:9] == pytest.approx([FIXED + USUAL + 20 + MOVES + 1] * 6, rel=0.02)


def test_a_rank_that_is_slow_by_itself_stays_slow(tmp_path):
    steps = steps_us(built(tmp_path, handed_job(slow=SLOW)), "balance:over=sequences")
    assert steps[3:9] == pytest.approx([SLOW * (FIXED + USUAL) + 20 + MOVES + 1] * 6, rel=0.01)


def test_the_notes_say_over_how_many_ranks_the_longest_sequences_would_be_cut(tmp_path):
    notes = apply_all(built(tmp_path, handed_job()), [parse_edit("balance:over=sequences")]).notes
    assert "a rank has up to 1.60 times the mean" in notes[0]
    assert "cut over 2 ranks" in notes[1]


def test_only_sequences_are_tried_on_a_job_without_whole_operations(tmp_path):
    graph = built(tmp_path, handed_job())
    edit = parse_edit("balance:over=sequences")
    assert [str(each) for each in edit.candidates(facts_of(graph))] == ["balance:over=sequences"]
    assert edit.is_proven(graph)
    saved = steps_us(graph).sum() - steps_us(graph, str(edit)).sum()
    assert edit.bound(facts_of(graph)) / 1000 * 12 >= saved


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (handed_job((0,)), "equal numbers of elements in every step: nothing is uneven"),
        (handed_job(power=0.0), "does not follow the number of elements"),
        (handed_job(counted=False), "does not consist of whole operations"),
    ],
)
def test_without_uneven_tokens_that_work_follows_it_is_refused(tmp_path, run, reason):
    with pytest.raises(Unanswerable, match=reason):
        changed(built(tmp_path, run), "balance:over=sequences")
