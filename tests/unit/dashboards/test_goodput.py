"""The view of a job's life."""

from __future__ import annotations

import pytest

from dpro.dashboards import needs
from dpro.dashboards.goodput.view import (
    KINDS,
    VIEW,
    class_figure,
    class_info,
    life_figure,
    life_info,
)
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.goodput.account import CLASSES
from tests.builders import gpu_job
from tests.lives import WrittenAttempt, job


@pytest.fixture
def loaded(tmp_path):
    first = WrittenAttempt(begin=0)
    last = first.trained(10)
    first.checkpoint("save", 4 + 3.01, 0.0, "/c")
    second = WrittenAttempt(begin=last + 10)
    second.checkpoint("load", second.begin + 3.5, 0.0, "/c")
    second.ended(second.trained(8))
    return Loaded(job(tmp_path / "run", [first.ended(last, code=1), second]))


def test_steps_in_a_row_are_one_bar(loaded):
    rows = life_info(loaded, Link(ranks=(0,)))
    trained = rows.filter(rows["class"].is_in(["productive", "repeated"]))
    assert trained.select("attempt", "class", "first_step", "last_step", "lasts_ms").rows() == [
        (0, "productive", 0, 9, 10_000.0),
        (1, "repeated", 3, 9, 7_000.0),
        (1, "productive", 10, 10, 1_000.0),
    ]
    assert rows["rank"].unique().to_list() == [0]
    ends = rows["begin_ms"] + rows["lasts_ms"]
    assert rows["begin_ms"][1:].to_list() == pytest.approx(ends[:-1].to_list())


def test_each_class_is_drawn(loaded):
    assert set(KINDS) == set(CLASSES)
    figure = life_figure(life_info(loaded, Link()), "light")
    assert {bar.name for bar in figure.data} == {"training", "done again", "start", "down"}
    assert list(figure.layout.yaxis.categoryarray) == ["rank 1", "rank 0"]


def test_shares_of_classes_are_those_of_the_selected_ranks(loaded):
    classes = class_info(loaded, Link(ranks=(1,)))
    assert classes["share"].sum() == pytest.approx(1)
    (bar,) = class_figure(classes, "dark").data
    assert list(bar.x) == sorted(bar.x, reverse=True)


def test_sections_fill_for_any_selection(loaded):
    assert not needs.moments(loaded, Link())
    for fill in VIEW.sections.values():
        for link in (Link(), Link(ranks=(77,)), Link(ranks=(0,))):
            assert fill(loaded, link)


def test_end_that_is_not_recorded_is_unknown(tmp_path):
    attempt = WrittenAttempt(begin=0)
    attempt.trained(5)
    filled = VIEW.sections["goodput-attempts"](Loaded(attempt.written(tmp_path / "run")), Link())
    assert "unknown" in str(filled)
    assert "not well" not in str(filled)


def test_imported_run_says_what_is_missing(tmp_path):
    assert "was not recorded" in needs.moments(Loaded(gpu_job().write(tmp_path / "run")), Link())
