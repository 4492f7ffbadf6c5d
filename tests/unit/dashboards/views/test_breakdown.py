"""Figures of the breakdown."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import mean_steps
from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.theme import THEMES, ink_on, least_width
from dpro.dashboards.views.breakdown import PARTS, VIEW, part_figure, with_legend
from dpro.selection import Selection
from dpro.store import open_run
from tests.builders import TinyRun


def job_with_a_pause(folder) -> Analysis:
    """Eight steps of 300 us of GPU work each, but for step 5, in which the host stops for 5 ms."""
    run, begin = TinyRun(), 0
    for step in range(8):
        last = 5300 if step == 5 else 300
        run.call(begin, begin + 5, step)
        run.kernel("gemm", begin + 10, begin + 290, step)
        run.op("log", begin + 20, begin + last)
        run.step(step, begin, begin + last)
        begin += last
    return load(run.write(folder))


def test_unusual_steps_are_shown_only_if_they_are_selected_or_all_are_asked_for_as_recorded(tmp_path):
    loaded = job_with_a_pause(tmp_path)

    def shown(query: str, by: str = "step"):
        return VIEW.tables[f"by_{by}"](loaded, parse_link(query))

    assert 5 not in shown("")["step"]
    assert shown("", "rank")["duration_ms"][0] < 0.4
    assert shown("?steps=4-5")["step"].to_list() == [4, 5]
    assert shown("?shown=recorded")["step"].to_list() == list(range(8))
    assert shown("?shown=recorded", "rank")["duration_ms"][0] == pytest.approx((7 * 0.3 + 5.3) / 8, rel=0.1)
    said = [str(VIEW.sections["breakdown-rank"](loaded, parse_link(query))) for query in ("", "?steps=4-5")]
    assert "(7 of 8 recorded), without recording's cost" in said[0]
    assert "Steps 4-5 (2 of 8 recorded), as recorded" in said[1]


def test_bars_are_the_rows_of_the_report(repository):
    loaded = load(open_run(repository / "sample_traces" / "h200_gpt"))
    bars, rows = VIEW.tables["by_rank"](loaded, Link()), mean_steps(loaded.usual_breakdown, "rank")
    for part in ("host_bound", "duration"):
        assert bars[f"{part}_ms"].to_list() == pytest.approx((rows[f"{part}_ns"] / 1e6).to_list())


def test_the_steps_of_a_replay_that_does_not_fit_are_as_recorded(tmp_path):
    loaded = job_with_a_pause(tmp_path)
    built, trust = loaded.graph_and_trust
    loaded.values["graph_and_trust"] = built, dataclasses.replace(trust, answerable=False)
    assert loaded.usual_breakdown.equals(loaded.breakdown)
    assert not loaded.breakdown_of(Selection())[1]
    assert "the replay does not fit the trace." in str(VIEW.sections["breakdown-rank"](loaded, Link()))


@pytest.mark.parametrize("theme", THEMES)
def test_values_inside_bars_have_the_ink_with_most_contrast(theme):
    parts = pl.DataFrame({"rank": [0], "duration_ms": [float(len(PARTS))]} | {name: [1.0] for name in PARTS})
    figure = part_figure(parts, "rank", theme)
    inks = [ink_on(name.removesuffix("_ms"), theme) for name in PARTS]
    assert [bar.insidetextfont.color for bar in figure.data] == inks
    assert not least_width(figure)  # it shrinks with the page, which has the legend beside it
    assert least_width(with_legend(figure)) > 500  # inside, the legend leaves room for the bars
