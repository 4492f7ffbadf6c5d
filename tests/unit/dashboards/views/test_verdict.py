"""The first view's data and figure, without a browser."""

from __future__ import annotations

import dataclasses
import json
import re

import plotly.graph_objects as go
import polars as pl
import pytest
from dash import html
from plotly.utils import PlotlyJSONEncoder

from dpro.analysis.answers.whatif import search_once
from dpro.analysis.step_time import step_names_in_words
from dpro.analysis.summary import finding_info, gain_info, health_info, run_info, trust_info
from dpro.dashboards.account import advice_info, healing_in_words
from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.views.breakdown import VIEW as BREAKDOWN
from dpro.dashboards.views.breakdown import part_info
from dpro.dashboards.views.heatmap import heat_info
from dpro.dashboards.views.verdict import (
    POINTS,
    VIEW,
    step_figure,
    step_info,
)
from dpro.replay.fidelity.accuracy import criterion
from dpro.schema import STEPS, conform
from dpro.store import open_run
from dpro.units import format_duration
from dpro.verdict.verdict import explain
from dpro.verdict.words import limit_of_run, times
from tests.builders import TinyRun, cpu_job


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Loaded:
    return load(cpu_job().write(tmp_path_factory.mktemp("slow")))


@pytest.fixture(scope="module")
def even(tmp_path_factory) -> Loaded:
    return load(cpu_job(extra=0).write(tmp_path_factory.mktemp("even")))


def _steps(rows: list[tuple[int, int, int, int]]) -> pl.DataFrame:
    names = ["rank", "step", "window", "duration_ns"]
    return conform(STEPS, pl.DataFrame(rows, schema=names, orient="row").with_columns(start_ns=0))


def test_steps_are_summed_up_over_the_selected_ranks():
    steps = _steps([(0, 0, -1, 1_000_000), (1, 0, -1, 3_000_000), (0, 1, 2, 5_000_000)])
    assert step_info(steps, Link()).rows() == [(0, 2.0, 1.0, 3.0, False), (1, 5.0, 5.0, 5.0, True)]
    assert step_info(steps, parse_link("?ranks=1")).rows() == [(0, 3.0, 3.0, 3.0, False)]
    assert step_info(steps, parse_link("?steps=7")).height == 0


def test_more_steps_than_can_be_shown_keep_their_extremes():
    steps = _steps([(0, step, -1, 9 if step == 7777 else 5) for step in range(10 * POINTS)])
    shown = step_info(steps, Link())
    assert shown.height <= POINTS
    assert shown["most_ms"].max() == 9e-6


def test_steps_of_a_gpu_that_did_not_time_them_are_as_long_as_in_the_breakdown(tmp_path):
    run = TinyRun()
    for step in range(3):  # the host enqueues 300 us of work in 100 us
        run.call(100 * step, 100 * step + 5, step)
        run.kernel("gemm", 10 + 300 * step, 310 + 300 * step, step)
        run.step(step, 100 * step, 100 * step + 100)
    loaded = load(run.write(tmp_path))
    parts = part_info(loaded.breakdown, "step", Link())
    assert parts["duration_ms"][1] == pytest.approx(0.3)
    assert step_info(loaded.timed_steps, Link())["median_ms"].to_list() == parts["duration_ms"].to_list()
    assert heat_info(loaded)["value_ms"].to_list() == parts["duration_ms"].to_list()
    assert "as in Breakdown" in str(VIEW.sections["verdict-run"](loaded, Link()))
    basis = str(BREAKDOWN.sections["breakdown-rank"](loaded, Link()))
    assert "Steps 0-2 (3 of 3 recorded), without recording's cost, as in `dpro report`" in basis


def test_advice_beside_what_was_found_does_not_send_the_reader_there(slow):
    heal = advice_info(slow, explain(slow)).filter(edit="heal:rank=1")
    assert heal["how"].to_list() == [""]
    assert "What was found, in Verdict" not in str(VIEW.sections["verdict-advice"](slow, Link()))


def test_a_finding_links_to_its_spans_in_the_timeline_or_not_at_all(repository):
    shown = {
        name: str(
            VIEW.sections["verdict-findings"](load(open_run(repository / "sample_traces" / name)), Link())
        )
        for name in ("slow_rank", "slow_input")
    }
    assert "view=timeline&find=%5E%28enumerate" in shown["slow_rank"]
    assert "view=timeline" not in shown["slow_input"]


def test_the_notes_of_the_diagnosis_are_below_what_was_found(slow, monkeypatch):
    monkeypatch.setattr(type(slow), "notes", lambda *_: ["each rank waits for rank 1"])
    assert "each rank waits for rank 1" in str(VIEW.sections["verdict-findings"](slow, Link()))


def test_a_card_gives_the_interval_of_its_gain_once_as_the_terminal_does(slow):
    (row, *_), cards = (
        advice_info(slow, explain(slow)).to_dicts(),
        VIEW.sections["verdict-advice"](slow, Link()),
    )
    interval = times(row["low"], row["high"])
    texts = re.findall(r"Span\(children='([^']*)'|P\(children='([^']*)'", str(cards))
    assert sum(interval in text for pair in texts for text in pair) == 1


def test_the_picture_to_save_says_how_far_to_trust_it_and_the_copied_link_where_it_opens(slow):
    short = str(VIEW.sections["verdict-short"](slow, Link()))
    assert slow.trust.verdict.split(".")[0] in short
    assert "for this browser, while dpro runs" in short


def test_two_changes_together_are_a_link_to_their_prediction(repository):
    loaded = load(open_run(repository / "sample_traces" / "h200_gpt"))
    shown = str(VIEW.sections["verdict-advice"](loaded, Link()))
    assert "1 and 2 together" in shown
    assert "--edit" not in shown.partition("1 and 2 together")[2].partition(")]")[0]
    assert "view=whatif&edit=cuda-graph%0Acompile" in shown


def test_a_hang_is_stated_once_in_each_panel_and_no_trust_in_predictions_is_given(repository):
    hung = load(open_run(repository / "sample_traces" / "h200_hang"))
    short, findings, trust = (
        str(VIEW.sections[f"verdict-{name}"](hung, Link())) for name in ("short", "findings", "trust")
    )
    assert "The job hung at step 31" in short
    assert "Where its step goes is not known" not in short
    assert "The job hung at step 31" not in findings
    assert findings.count("a kernel on its GPU, launched before all_reduce #125, never ends") == 1
    assert "confidence 0.90 of 1." in trust
    assert "Predictions" not in trust


def test_the_spans_of_a_slow_rank_are_marked_beside_those_of_its_peers(slow):
    advice = str(VIEW.sections["verdict-advice"](slow, Link()))
    (address,) = re.findall(r"mark its spans in the timeline', href='([^']*)'", advice)
    assert parse_link(address).options["find"]
    assert parse_link(address).ranks == ()


def test_the_figure_of_the_steps_has_their_numbers(slow):
    steps = step_info(slow.steps, Link())
    figure = step_figure(steps, "dark")
    assert isinstance(figure, go.Figure)
    line = next(trace for trace in figure.data if trace.name == "median of the ranks")
    assert list(line.y) == steps["median_ms"].to_list()
    assert figure.layout.yaxis.title.text == "step time, ms"


def test_a_slow_rank_is_the_first_thing_that_is_said(slow):
    state, sentence = health_info(*slow.verdict, slow.trust)
    assert state == "bad"
    assert sentence.startswith("slow host work: rank 1 (the input pipeline) costs")
    table = finding_info(slow.verdict[0])
    assert table.row(0, named=True)["ranks"] == [1]
    assert table["cost_ms_per_step"][0] > 0


def test_saving_about_as_much_as_a_rank_costs_is_one_number(slow):
    finding = slow.verdict[0][0]
    costs_more = dataclasses.replace(finding, cost_ns=1.01 * finding.cost_ns)
    for one in (finding, costs_more):
        assert f"Fixing it saves {format_duration(one.cost_ns)} of the" in healing_in_words(slow, one)


def test_what_was_found_does_not_say_again_what_is_said_in_short_and_of_the_replay(slow, even, monkeypatch):
    fill = VIEW.sections["verdict-findings"]

    def said(loaded: Loaded) -> str:
        return json.dumps(html.Div(fill(loaded, Link())), cls=PlotlyJSONEncoder)

    assert "rank 1" in said(slow)
    assert "slow host work: rank 1 (the input pipeline)" in said(slow)
    assert health_info(*slow.verdict, slow.trust)[1] not in said(slow)
    assert limit_of_run(slow) not in said(slow)
    monkeypatch.setattr(Loaded, "verdict", ([], [*even.trust.doubts, "one rank is missing"]))
    assert not any(doubt in said(even) for doubt in even.trust.doubts)
    assert "not known: " in said(even)
    assert "one rank is missing" in said(even)
    monkeypatch.setattr(Loaded, "verdict", ([], []))
    monkeypatch.setattr("dpro.dashboards.views.verdict.limit_of_run", lambda _: "")
    assert "Healthy: " in said(even)
    monkeypatch.setattr("dpro.dashboards.views.verdict.limit_of_run", lambda _: "the host")
    assert "Healthy: " not in said(even)
    assert "no slow rank or component found." in said(even)
    monkeypatch.setattr(Loaded, "trust", dataclasses.replace(even.trust, answerable=False))
    assert "Not diagnosed: " in said(even)


def test_nothing_is_said_to_be_healthy_that_could_not_have_shown_otherwise(even):
    trust = even.trust
    assert health_info([], [], trust)[0] == "good"
    assert health_info([], ["one rank is missing"], trust)[0] == "unknown"
    assert health_info([], [], dataclasses.replace(trust, answerable=False))[0] == "unknown"


def test_advice_that_is_rated_poor_gives_the_figure_it_is_rated_by(slow, monkeypatch):
    fill, trust = VIEW.sections["verdict-advice"], slow.trust
    assert "Do not rely" not in str(fill(slow, Link()))
    noise = criterion("noise of steps", 72.6, 10.0, 50.0)
    monkeypatch.setattr(Loaded, "trust", dataclasses.replace(trust, figures=(noise, *trust.figures)))
    said = str(fill(slow, Link()))
    assert "Do not rely on these: step times vary: changes below 72.6% of a step cannot be detected." in said
    unfit = dataclasses.replace(trust, answerable=False, reasons=("launches are missing",))
    monkeypatch.setattr(Loaded, "trust", unfit)
    assert "Do not rely on these: launches are missing." in str(fill(slow, Link()))


def test_what_helps_comes_with_its_interval_and_what_it_rests_on_proven_first(slow):
    table = gain_info(search_once(slow).predictions)
    blocks = table["block"].unique(maintain_order=True).to_list()
    assert blocks == [block for block in ("proven", "unproven", "bound") if block in blocks]
    assert all(rows["predicted_ms"].is_sorted() for _, rows in table.group_by("block", maintain_order=True))
    assert (table["low_ms"] <= table["predicted_ms"]).all()
    assert (table["high_ms"] >= table["predicted_ms"]).all()
    assert gain_info([]).schema == table.schema
    assert finding_info([]).schema == finding_info(slow.verdict[0]).schema


def test_the_fit_and_the_run_are_described_in_words(slow):
    assert dict(trust_info(slow.trust))["GPU time in known kernels"] == "no kernels"
    described = dict(run_info(slow.run.manifest, slow.steps))
    assert described["ranks"] == "3 of 3"
    assert described["step time"].startswith("typical step ")
    said = ["2 of 5 ranks are missing: 3, 4", "clocks differ"]
    some = dataclasses.replace(slow.run.manifest, world_size=5, warnings=said)
    lines = run_info(some, slow.steps)
    assert [text for name, text in lines if name == "warning"] == ["clocks differ"]
    assert dict(lines)["ranks"] == "3 of 5, missing 3, 4"
    assert dict(run_info(slow.run.manifest, slow.steps.clear()))["step time"] == "no step was timed"


def test_each_name_of_a_step_time_is_defined_where_it_stands(slow, even):
    said = str(VIEW.sections["verdict-run"](slow, Link()))
    assert "Typical step: median of the steps in deep windows, pauses left out." in said
    assert "Usual step: mean of these steps without the cost of recording" in said
    steps = _steps([(0, step, -1, 5_000_000) for step in range(9)])
    assert step_names_in_words(steps) == (
        "Typical step: median of the steps outside deep windows, pauses left out. Mean step with pauses: "
        "their total time over their number, pauses included. Usual step: mean of the steps in deep windows "
        "without the cost of recording; costs and gains refer to it."
    )
    assert not step_names_in_words(steps.clear())


def test_every_table_of_the_view_can_be_made(slow):
    for make in VIEW.tables.values():
        assert make(slow, Link()).height > 0
