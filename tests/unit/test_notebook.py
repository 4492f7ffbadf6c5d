"""A run in a notebook: what `dpro.open` gives."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import plotly.graph_objects as go
import polars as pl
import pytest

import dpro
from dpro.analysis.answers.whatif import what_if
from dpro.cli.analysis import analyse
from dpro.errors import InputError, MissingExtra, Unanswerable, UsageError
from dpro.markup import table
from dpro.notebook import OpenedRun
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import BUCKETS
from dpro.selection import parse_selection
from tests.builders import cpu_job
from tests.missing import take_away
from tests.traces import write_rank


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return cpu_job().write(tmp_path_factory.mktemp("run")).path


@pytest.fixture(scope="module")
def run(path) -> OpenedRun:
    return dpro.open(path)


def test_a_run_has_few_names_and_they_are_the_users(run):
    names = {name for name in dir(run) if not name.startswith("_")}
    assert len(names) <= 20
    assert {"verdict", "diagnose", "whatif", "steps", "spans", "sql", "plot"} <= names
    assert all(getattr(type(run), name).__doc__ for name in names)


def test_tables_are_asked_in_sql(run):
    rows = run.sql("SELECT rank, COUNT(*) AS n FROM Steps GROUP BY rank ORDER BY rank")
    assert rows.rows() == [(rank, 4) for rank in range(3)]
    joined = run.sql("select s.step from steps s join spans p on s.rank = p.rank where p.name = 'aten::mm'")
    assert joined.height > 0
    for query in ("select nothing from steps", "select 1 from nowhere", "no query"):
        with pytest.raises(UsageError, match="tables are spans"):
            run.sql(query)


def test_a_run_has_its_tables_graph_replay_and_findings(run):
    assert run.spans.height == run.table("spans").height > 0
    assert run.table("buckets").schema == BUCKETS.dtypes
    assert run.timeline.graph is run.graph
    assert run.diagnose()["component"].to_list() == ["rank 1"]
    assert run.verdict.faulty_ranks == [1]
    assert run.not_known == []
    assert "3 ranks" in repr(run).splitlines()[0]
    assert "FAULT  rank 1" in repr(run)


def test_run_graph_trust_and_predictions_show_themselves_as_tables(run):
    shown = {
        "FAULT  rank 1": run,
        "nodes on 3 ranks": run.graph,
        "error of replayed steps": run.trust,
        "heal:rank=1": run.predict("heal:rank=1"),
    }
    for text, shows in shown.items():
        html = shows._repr_html_()
        assert "<table" in html
        assert text in html


def test_names_of_a_run_are_text_and_nothing_else():
    html = table("<script>1</script>", [("a\x1b[31m", "<b>&\n")])
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "<b>" not in html
    assert "\x1b" not in html


def test_predictions_are_those_of_the_command(run, path):
    predictions = what_if(analyse(str(path))).document.predictions
    frame = run.whatif()
    assert frame["edit"].str.split("\n").to_list() == [each.edits for each in predictions]
    assert frame["predicted_ms"].to_list() == [each.predicted_ms for each in predictions]
    healed = run.whatif("heal:rank=1").row(0, named=True)
    assert healed["predicted_ms"] == run.predict("heal:rank=1").predicted_ns / 1e6
    assert healed["speedup"] > 1


def test_steps_and_ranks_are_selected_as_by_the_commands(run, path):
    some = run.select(steps="1", ranks="0,2")
    assert some.breakdown.select("step", "rank").rows() == [(1, 0), (1, 2)]
    healed = run.whatif("heal:rank=1", steps="1-2").row(0, named=True)
    analysis, edits = analyse(str(path)), [parse_edit("heal:rank=1")]
    found = what_if(analysis, edits, selection=parse_selection("1-2")).document
    assert healed["predicted_ms"] == found.predictions[0].predicted_ms
    searched = what_if(analysis, selection=parse_selection("1")).document
    assert run.whatif(steps="1")["predicted_ms"].to_list() == [
        each.predicted_ms for each in searched.predictions
    ]
    with pytest.raises(UsageError, match="selects nothing"):
        run.select(steps="77")
    with pytest.raises(UsageError, match="selects nothing"):
        run.predict("heal:rank=1", steps="77")


def test_a_folder_of_traces_opens_like_a_run(tmp_path):
    for rank in range(2):
        write_rank(tmp_path / "in", rank)
    imported = dpro.open(tmp_path / "in")
    assert imported.spans["rank"].unique().sort().to_list() == [0, 1]


@pytest.mark.parametrize(
    "name",
    [
        "steps",
        "heatmap",
        "breakdown",
        "timeline",
        "collectives",
        "waiting",
        "whatif",
        "critical_path",
        "life",
    ],
)
def test_every_figure_has_something_in_it(run, name):
    if name == "collectives":  # no size is known there
        with pytest.raises(Unanswerable, match="nothing to draw"):
            run.plot.collectives()
        return
    arguments = ["heal:rank=1"] if name in ("whatif", "critical_path") else []
    figure = getattr(run.plot, name)(*arguments, theme="dark")
    assert isinstance(figure, go.Figure)
    assert len(figure.data) > 0


def test_figures_are_of_what_is_selected(run):
    bars = run.plot.breakdown(ranks=[2, 0])
    assert list(bars.data[0].x) == ["0", "2"]
    assert list(run.plot.breakdown("step", steps=(1, 2)).data[0].x) == ["1", "2"]
    with pytest.raises(Unanswerable, match="of this selection"):
        run.plot.steps(steps=77)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: run.table("nothing"), "there are spans"),
        (lambda run: run.plot.steps(theme="pink"), "there are light, dark"),
        (lambda run: run.plot.heatmap("mood"), "there are step"),
        (lambda run: run.plot.breakdown("moon"), "by rank, or by step"),
        (lambda run: run.whatif("heal:rnk=1"), "rank"),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(run, ask, said):
    with pytest.raises(UsageError, match=said):
        ask(run)


def test_a_path_that_is_nothing_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        dpro.open(tmp_path / "nowhere")


def test_without_plotly_all_but_the_figures_is_there(path, monkeypatch):
    take_away(monkeypatch, "plotly", "dpro.dashboards")
    again = dpro.open(path)
    assert isinstance(again.diagnose(), pl.DataFrame)
    with pytest.raises(MissingExtra, match=r"dpro-toolkit\[dashboard\]"):
        _ = again.plot


def test_a_test_that_takes_plotly_away_leaves_later_ones_the_modules_they_had():
    view = import_module("dpro.dashboards.views.verdict")
    with pytest.MonkeyPatch.context() as patch:
        take_away(patch, "plotly", "dpro.dashboards")
        with pytest.raises(ImportError):
            import_module("dpro.dashboards.views.verdict")
    assert sys.modules["dpro.dashboards.views.verdict"] is view
    assert sys.modules["dpro.dashboards"].views.verdict is dpro.dashboards.views.verdict is view
