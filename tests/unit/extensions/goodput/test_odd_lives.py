"""Whatever attempts lack, and however clocks jump: the classes add up, and what is odd is said."""

from __future__ import annotations

import json

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.documents import encode
from dpro.extensions.goodput.document import goodput_document, in_words
from dpro.extensions.goodput.life import life_of
from tests.lives import WrittenAttempt, job, ns

ODD = ("nothing", "no starts", "no workers", "no steps", "end unknown", "killed", "set back", "set forward")
attempts = st.lists(
    st.tuples(
        st.integers(0, 8),  # steps
        st.floats(0.5, 20),  # until it begins
        st.integers(1, 3),  # ranks
        st.sampled_from(ODD),
        st.floats(0.5, 30),  # by how much a clock is set
        st.integers(0, 6),  # step after which it saves, if it has it
    ),
    min_size=1,
    max_size=5,
)


def odd(attempt: WrittenAttempt, what: str, by_s: float) -> None:
    """Take from an attempt what it does not have."""
    if what == "no starts":
        attempt.starts.clear()
    elif what == "no workers":
        attempt.workers.clear()
    elif what == "no steps":
        attempt.steps.clear()
    elif what == "end unknown":
        attempt.workers = [row | {"exit_code": -1, "exit_signal": -1} for row in attempt.workers]
    elif what.startswith("set"):
        jump = ns(by_s if what == "set forward" else -by_s)
        half = len(attempt.steps) // 2
        for row in attempt.steps[half:]:
            row["start_ns"] = max(row["start_ns"] + jump, 0)


def written(plan) -> list[WrittenAttempt]:
    now, found = 1.0, []
    for number, (steps, gap, ranks, what, by_s, save_at) in enumerate(plan):
        attempt = WrittenAttempt(now + gap, ranks)
        now = attempt.trained(steps)
        if save_at < steps:
            attempt.checkpoint("save", attempt.begin + 5.001 + save_at, 0.1, f"/c{number}")
        if number:
            attempt.checkpoint("load", attempt.begin + 3.5, 0.1, f"/c{number - 1}")
        attempt.killed(now, others=0.5) if what == "killed" else attempt.ended(now, code=number % 2)
        odd(attempt, what, by_s)
        found.append(attempt)
    return found


def check(folder, plan) -> None:
    life = life_of([job(folder, written(plan))])
    document = goodput_document(life, ["run"])
    by_rank = life.pieces.group_by("rank").agg(pl.col("duration_ns").sum(), pl.col("start_ns").min())
    assert by_rank["duration_ns"].n_unique() <= 1
    assert (life.pieces["duration_ns"] > 0).all()
    for _, rank in life.pieces.group_by("rank"):
        ends = rank["start_ns"] + rank["duration_ns"]
        assert rank["start_ns"][1:].to_list() == ends[:-1].to_list()
    if document.classes:
        assert sum(each.share for each in document.classes) == pytest.approx(1)
        assert sum(each.rank_hours for each in document.classes) == pytest.approx(document.rank_hours)
    assert 0 <= document.goodput <= document.ettr <= 1 + 1e-9
    assert len(document.attempts) == len(plan)
    assert all(0 <= each.repeated <= each.steps and each.lost >= 0 for each in document.attempts)
    assert document.steps == sum(each.steps - each.repeated for each in document.attempts)
    assert all(each.cause for each in document.attempts)
    assert in_words(document).endswith(".")
    json.loads(encode(document))


@settings(max_examples=3, deadline=None)
@given(attempts)
def test_classes_of_any_odd_life_add_up(tmp_path_factory, plan):
    check(tmp_path_factory.mktemp("job"), plan)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(attempts)
def test_classes_of_many_odd_lives_add_up(tmp_path_factory, plan):
    check(tmp_path_factory.mktemp("job"), plan)
