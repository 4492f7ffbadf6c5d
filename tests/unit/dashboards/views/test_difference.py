"""Two runs compared in the browser: the data and the figures, without one."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from plotly.utils import PlotlyJSONEncoder

from dpro.cli import cli
from dpro.dashboards.command import load, offered_runs
from dpro.dashboards.links import Link
from dpro.dashboards.views.difference import (
    OTHERS,
    UNEXPLAINED,
    VIEW,
    difference_figure,
    difference_info,
    rank_figure,
)
from dpro.errors import UsageError
from dpro.replay.difference import Contributor, DifferenceDocument
from tests.builders import cpu_job


@pytest.fixture(scope="module")
def slower(tmp_path_factory):
    """A job compared with the same one without its late rank."""
    before = cpu_job(extra=0).write(tmp_path_factory.mktemp("before"))
    after = cpu_job().write(tmp_path_factory.mktemp("after"))
    return offered_runs([str(after.path)], str(before.path)).opened.loaded


@pytest.fixture(scope="module")
def before(slower):
    (name,) = (each.name for each in slower.others.__self__.offers() if each.name.startswith("before"))
    return name


def test_contributions_add_up_to_the_difference(slower, before):
    found = slower.difference_from(slower.others(before))
    table = difference_info(found)
    assert found.b_ms > found.a_ms
    assert table["delta_ms"].sum() == pytest.approx(found.delta_ms)
    assert table["delta_ms"][0] > 0
    figure = difference_figure(table, "light")
    bars = figure.data[0]
    assert figure.layout.xaxis.title.text == "us per step more than in the other run"
    assert list(bars.x)[-1] == pytest.approx(table["delta_ms"].sum() * 1000)
    assert bars.measure == ("relative",) * table.height + ("total",)


def test_the_summary_says_what_the_command_says(repository):
    runs = [str(repository / "sample_traces" / name) for name in ("healthy", "slow_rank")]
    loaded = offered_runs([runs[1]], runs[0]).opened.loaded
    (other,) = (each.name for each in loaded.others.__self__.offers() if each.name.startswith("healthy"))
    summary = VIEW.sections["difference-summary"](loaded, Link(view="difference", against=other))
    shown = json.dumps(summary, cls=PlotlyJSONEncoder)
    said = CliRunner().invoke(cli, ["diff", *runs]).stdout.splitlines()
    step, commands, _, typical, in_depth = said[:5]  # the ranks have a figure of their own
    for words in (commands, typical, in_depth.removesuffix(", of which"), step.partition(": ")[2]):
        assert words in shown
    assert commands == "B also has `--slow-rank 1 --slow-ms 6`"


def test_what_contributes_little_is_one_bar_and_nothing_is_lost():
    little = [Contributor(f"op{n}", "operator", 1e-5, 5e-5, 6e-5) for n in range(40)]
    large = [Contributor(f"kernel{n}", "kernel", 0.03 - n / 1e6, 1e-6, 0.030001) for n in range(20)]
    found = DifferenceDocument(
        a="A", b="B", a_ms=1.0, b_ms=1.7, delta_ms=0.7, contributors=[*large, *little],
        unexplained_ms=0.09941, by_rank={}, doubts=[],
    )  # fmt: skip
    table = difference_info(found)
    assert table.height == 17
    assert table["name"].to_list()[-2:] == [f"45 {OTHERS}", UNEXPLAINED]
    assert table["delta_ms"].sum() == pytest.approx(0.59981 + 0.0004 + 0.09941, abs=1e-6)
    assert table["before_ms"].to_list()[-2:] == [None, None]


def test_bars_too_short_to_be_seen_beside_the_largest_are_counted_in_one():
    sizes = (0.5, 0.02, 0.009, 0.008)
    parts = [Contributor(f"op{n}", "operator", ms, 0.0, ms) for n, ms in enumerate(sizes)]
    found = DifferenceDocument(
        a="A", b="B", a_ms=1.0, b_ms=1.6, delta_ms=0.6, contributors=parts,
        unexplained_ms=0.063, by_rank={}, doubts=[],
    )  # fmt: skip
    assert difference_info(found)["name"].to_list() == ["op0", "op1", f"2 {OTHERS}", UNEXPLAINED]


def test_runs_that_are_the_same_differ_by_nothing(slower):
    table = difference_info(slower.difference_from(load(slower.run)))
    assert table["delta_ms"].to_list() == [0.0]
    assert difference_figure(table, "dark").data[0].x == (0.0, 0.0)


def test_the_rank_that_became_slow_stands_out(slower, before):
    bars = rank_figure(slower.difference_from(slower.others(before)).by_rank, "light").data[0]
    assert max(zip(bars.y, bars.x))[1] == "1"


def test_every_part_fills_with_another_run_and_says_how_to_name_one_without(slower, before):
    for fill in VIEW.sections.values():
        assert fill(slower, Link(view="difference", against=before))
        with pytest.raises(UsageError, match="--against OTHER"):
            fill(load(slower.run), Link(view="difference"))


def test_a_run_to_compare_with_that_does_not_exist_is_an_error(slower, tmp_path):
    arguments = ["dashboard", str(slower.run.path), "--against", str(tmp_path / "none"), "--no-browser"]
    done = CliRunner().invoke(cli, arguments)
    assert "no such file or folder" in str(done.exception or done.output)
