"""The account as a picture: its frames by hand, and figures that hold what the frames say."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.account import Account, Gain, StepEntry
from dpro.dashboards.account import (
    BARS,
    OPEN,
    STEP,
    WIDTH,
    advice_info,
    bars_in_words,
    entry_figure,
    entry_info,
    parts_of_gain,
    picture_figure,
    scale_of,
)
from dpro.dashboards.command import load
from dpro.dashboards.figures import Figures
from dpro.dashboards.links import Link
from dpro.dashboards.theme import THEMES, colour
from dpro.dashboards.views import verdict
from dpro.dashboards.views.verdict import VIEW
from dpro.detect.words import describe
from dpro.errors import Unanswerable
from dpro.verdict.advice import Advice
from dpro.verdict.ledger import ORDER
from dpro.verdict.verdict import Explanation, explain
from dpro.verdict.words import paragraphs_of, shares_of
from tests.builders import TinyRun, cpu_job


def entry(cause: str, ms: float, *ranks: int) -> StepEntry:
    return StepEntry(cause, list(ranks), ms, f"evidence of {cause}")


STEP_OF_TEN = Account(
    step_ms=10.0,
    entries=[
        entry("rank", 2.0, 1), entry("imbalance", 1.0), entry("host", 1.0), entry("compute", 5.0),
        entry("unexplained", 1.0),
    ],
    limit="imbalance",
)  # fmt: skip


def test_a_waterfall_goes_from_the_step_to_what_devices_have_to_do():
    rows = entry_info(STEP_OF_TEN).select("name", "ms", "share", "left_ms", "of_limit").rows()
    assert rows == [
        ("uneven ranks: rank 1", 2.0, 0.2, 8.0, True),
        ("uneven ranks", 1.0, 0.1, 7.0, False),
        ("the host", 1.0, 0.1, 6.0, False),
        ("unexplained", 1.0, 0.1, 5.0, False),
        ("compute", 5.0, 0.5, 0.0, False),
    ]


def test_without_work_of_devices_it_ends_with_what_remains_and_without_entries_it_is_empty():
    of_host = Account(entries=[entry("host", 3.0), entry("unexplained", 1.0)])
    assert entry_info(of_host).select("name", "left_ms").rows() == [("the host", 1.0), ("unexplained", 0.0)]
    assert not entry_info(of_host)["of_limit"].any()
    assert entry_info(Account()).is_empty()


def test_an_entry_has_the_words_of_the_limit_of_its_name():
    frame = entry_info(Account(entries=[entry(cause, 1.0) for cause in ORDER]))
    names = dict(frame.select("cause", "name").iter_rows())
    assert names["input"] == "the input"
    assert names["memory-copies"] == "copies between host and device"
    assert names["collection"] == "garbage collection"
    assert names["no-core"] == "no core"
    assert len({*names.values()}) == len(ORDER)


@pytest.mark.parametrize("theme", THEMES)
def test_the_figure_has_a_bar_for_each_entry_and_marks_the_limit(theme):
    figure = entry_figure(entry_info(STEP_OF_TEN), theme)
    (bars,) = figure.data
    assert list(bars.x) == [10.0, 2.0, 1.0, 1.0, 1.0, 5.0]
    assert list(bars.base) == [0.0, 8.0, 7.0, 6.0, 5.0, 0.0]
    labels = figure.layout.yaxis.ticktext
    assert labels[0] == STEP
    assert ["LIMIT" in label for label in labels] == [False, True, False, False, False, False]
    assert all("uneven ranks" in label for label in labels[1:3])
    assert bars.text[1] == "<b>2 ms  20%</b>"
    assert list(bars.marker.color)[-1] == colour("compute", theme)
    assert figure.layout.xaxis.range == (0, 10.0)
    assert entry_figure(entry_info(STEP_OF_TEN), theme, longest_ms=40.0).layout.xaxis.range == (0, 40.0)


def test_an_entry_of_no_time_is_in_the_frame_and_not_drawn():
    frame = entry_info(
        Account(entries=[entry("host", 1e-9), entry("unexplained", 0.0), entry("compute", 2.0)])
    )
    assert frame["ms"].to_list() == [1e-9, 0.0, 2.0]
    assert list(entry_figure(frame, "light").data[0].x) == pytest.approx([2.0, 2.0])


def gains(*ends: tuple[float | None, float | None, float | None]) -> pl.DataFrame:
    names = ("low", "middle", "high")
    return pl.DataFrame(ends, schema=dict.fromkeys(names, pl.Float64), orient="row")


def test_all_gains_are_on_one_scale_that_has_one_and_room_for_those_without_an_end():
    assert scale_of(gains((1.2, 1.4, 1.5), (1.1, None, 2.0))) == (1.0, 2.0)
    assert scale_of(gains((0.5, 1.0, 1.5))) == (0.5, 1.5)
    assert scale_of(gains((1.2, 1.4, None), (1.0, 1.0, 3.0))) == (1.0, 3.0 + 2 * OPEN)
    assert scale_of(gains((1.5, None, 1000.0))) == (1.0, 1.5 + 0.5 * OPEN)
    assert scale_of(gains((None, None, None))) == pytest.approx((1.0, 1.1))


def test_a_gain_is_a_bar_from_one_to_its_middle_with_its_interval_on_it():
    row = {"low": 1.25, "middle": 1.5, "high": 2.0}
    bar, interval, *ends = parts_of_gain(row, (1.0, 3.0))
    assert bar[:2] == (1.0, 1.5)
    assert interval[:2] == (1.25, 2.0)
    assert [sum(end[:2]) / 2 for end in ends] == pytest.approx([1.25, 2.0])
    slower, _, *_ = parts_of_gain({"low": 0.5, "middle": 0.8, "high": 1.1}, (0.5, 3.0))
    assert slower[:2] == (0.8, 1.0)
    assert slower[3] == "bad"


def test_an_interval_without_an_end_reaches_the_end_of_the_scale_and_has_no_mark_there():
    for high in (None, 50.0):
        interval, *ends = parts_of_gain({"low": 1.5, "middle": None, "high": high}, (1.0, 3.0))
        assert interval[:2] == (1.5, 3.0)
        assert len(ends) == 1
    assert list(parts_of_gain({"low": None, "middle": None, "high": None}, (1.0, 3.0))) == []


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return load(cpu_job().write(tmp_path_factory.mktemp("slow")))


def test_what_to_try_has_the_gains_of_the_account(slow):
    explanation = explain(slow)
    rows = advice_info(slow, explanation)
    assert rows["label"].to_list()[: len(explanation.advice)] == [
        str(number + 1) for number in range(len(explanation.advice))
    ]
    of_edits = {
        row["edit"]: Gain(row["low"], row["middle"], row["high"])
        for row in rows.iter_rows(named=True)
        if row["edit"]
    }
    assert of_edits
    assert of_edits == explanation.account.gains
    has_how = {row["edit"] for row in rows.iter_rows(named=True) if row["how"]}
    assert {edit for edit in of_edits if not edit.startswith("heal")} <= has_how


def test_reports_and_notebooks_draw_the_same_bars(slow, tmp_path):
    drawn = entry_figure(entry_info(explain(slow).account), "light").data[0]
    (bars,) = Figures(slow).account().data
    assert (list(bars.x), list(bars.base)) == (list(drawn.x), list(drawn.base))
    run = TinyRun()
    for step in range(3):
        run.step(step, 100 * step, 100 * step + 90)
    with pytest.raises(Unanswerable, match="no deep window"):
        Figures(load(run.write(tmp_path))).account()


def test_a_gain_of_more_samples_says_so_on_its_card(slow, monkeypatch):
    fill = VIEW.sections["verdict-advice"]
    assert "the samples" not in str(fill(slow, Link()))
    doubled = advice_info(slow, explain(slow)).with_columns(samples=pl.lit(2.0))
    monkeypatch.setattr(verdict, "advice_info", lambda *_: doubled)
    assert "for x2 the samples" in str(fill(slow, Link()))


def words_of(figure) -> str:
    """What the texts of a picture say, without breaks of lines."""
    return " ".join(" ".join(trace.text) for trace in figure.data if trace.type == "scatter").replace(
        "&gt;", ">"
    )


def test_the_picture_says_what_the_verdict_says_and_nothing_lies_outside(slow):
    explanation = explain(slow)
    advice = advice_info(slow, explanation)
    figure = picture_figure(explanation, entry_info(explanation.account), advice, "dark")
    for _, text in paragraphs_of(explanation):
        assert text in words_of(figure)
    assert describe(slow.verdict[0][0]).title.partition(": ")[2] in words_of(figure)
    texts = next(trace for trace in figure.data if trace.type == "scatter")
    assert figure.layout.width == WIDTH
    assert all(0 < x < WIDTH for x in texts.x)
    assert all(0 < y < figure.layout.height for y in texts.y)
    assert all(0 <= shape.x0 <= shape.x1 <= WIDTH for shape in figure.layout.shapes if shape.xref == "x2")


def test_the_page_and_the_picture_say_what_bars_count_and_that_shares_of_a_rank_are_another_account(slow):
    explanation = explain(slow)
    said = bars_in_words(explanation)
    assert said.startswith("Each bar is what removing its cause saves once those above it are gone")
    assert shares_of(explanation)
    assert said.endswith(f"on average: {', '.join(shares_of(explanation))}.")
    entries = entry_info(explanation.account)
    assert said in words_of(picture_figure(explanation, entries, advice_info(slow, explanation), "dark"))
    assert said in str(VIEW.sections["verdict-short"](slow, Link()))
    unknown = Explanation(run="r", job="j", fault="none.", faulty_ranks=[])
    assert bars_in_words(unknown) == BARS


def test_names_in_the_picture_are_text_and_what_is_not_known_leaves_no_frame():
    advice = [Advice("record-more", "record <b>more</b>", None, None, "a setting")]
    explanation = Explanation(
        run="<i>", job="<i>job</i>", fault="a <b>fault</b>.", faulty_ranks=[], advice=advice
    )
    figure = picture_figure(explanation, entry_info(Account()), advice_info(None, explanation), "light")
    (texts,) = figure.data
    said = " ".join(texts.text)
    assert "&lt;b&gt;fault&lt;/b&gt;" in said
    assert "<i>" not in said
    assert "x1.0" not in said
    assert not figure.layout.shapes
