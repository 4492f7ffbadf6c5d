"""The heatmap of steps × ranks, and the breakdown of steps."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.theme import colour, time_unit
from dpro.dashboards.views import collectives
from dpro.dashboards.views.breakdown import PARTS, UNMARKED, part_figure, part_info
from dpro.dashboards.views.heatmap import COLUMNS, VIEW, first_metric, heat_figure, heat_info, metrics_of
from dpro.store import open_run
from tests.builders import cpu_job, gpu_job
from tests.jobs import ROOT


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(gpu_job().write(tmp_path_factory.mktemp("run")))


def test_only_what_was_measured_can_be_chosen(loaded):
    assert set(metrics_of(loaded)) == {"step", "compute", "exposed", "wait", "transfer", "host", "idle"}


def test_a_value_per_rank_and_step_becomes_a_cell(loaded):
    values = heat_info(loaded, "exposed")
    assert values.select("rank", "step").rows() == [(rank, step) for rank in (0, 1) for step in (0, 1, 2)]
    figure = heat_figure(values, "exposed communication", parse_link("?steps=1-2&ranks=0"))
    (heat,) = figure.data
    cells = values["value_ms"].to_numpy().reshape(2, 3)
    scale, _ = time_unit(cells.max())
    assert np.allclose(np.asarray(heat.customdata)[:, :, 0].astype(float), cells / scale)
    assert np.allclose(np.asarray(heat.z), (cells - np.min(cells, axis=0)) / scale)  # of two ranks
    assert (figure.layout.xaxis.ticktext[0], figure.layout.yaxis.title.text) == ("step 0", "rank")
    (outline,) = figure.layout.shapes
    assert (outline.x0, outline.x1, outline.y0, outline.y1) == (0.5, 2.5, -0.5, 0.5)


def test_the_first_metric_is_that_of_the_fault_until_another_is_chosen(tmp_path):
    loaded = load(open_run(ROOT / "sample_traces" / "slow_rank"))  # the input of rank 1 is slow
    assert first_metric(loaded, metrics_of(loaded)) == "data"
    chosen, *_ = VIEW.sections["heatmap-values"](loaded, Link(view="heatmap"))
    marked = {link.children: link.href for link in chosen.children if "chosen" in link.className}
    assert marked == {"waiting for data": "?view=heatmap"}
    chosen, *_ = VIEW.sections["heatmap-values"](loaded, parse_link("?view=heatmap&metric=step"))
    assert [link.children for link in chosen.children if "chosen" in link.className] == ["step time"]
    healthy = load(cpu_job(num_steps=12, extra=0).write(tmp_path / "healthy"))
    assert first_metric(healthy, metrics_of(healthy)) == "step"


def test_ranks_that_differ_by_noise_look_the_same():
    values = pl.DataFrame({"rank": [0, 1], "step": [5, 5], "value_ms": [100.0, 100.2]})
    (heat,) = heat_figure(values, "step time", Link()).data
    assert (heat.zmin, heat.zmax) == pytest.approx((0, 5005))  # us: 5% of the step


def test_small_deviations_from_long_steps_have_a_unit_of_their_own():
    values = pl.DataFrame({"rank": [0, 1], "step": [5, 5], "value_ms": [71_000.0, 71_004.0]})
    (heat,) = heat_figure(values, "step time", Link()).data
    assert heat.colorbar.title.text == "ms from the faster rank"
    assert heat.z.ravel().tolist() == pytest.approx([0, 4])
    assert "71" in f"{heat.customdata[0][0][0]:.0f}"  # s


def test_of_two_ranks_the_slow_one_alone_has_a_colour_and_of_three_the_median_has_none():
    values = pl.DataFrame({"rank": [0, 1], "step": [5, 5], "value_ms": [100.0, 150.0]})
    (heat,) = heat_figure(values, "step time", Link()).data
    assert heat.z.ravel().tolist() == [0, 50]
    assert (heat.zmin, heat.colorscale[0][1]) == (0, colour("line", "light"))
    values = pl.DataFrame({"rank": [0, 1, 2], "step": 5, "value_ms": [100.0, 101.0, 150.0]})
    (heat,) = heat_figure(values, "step time", Link()).data
    assert heat.z.ravel().tolist() == [-1, 0, 49]
    assert heat.zmin == -heat.zmax


def test_steps_that_were_recorded_in_depth_are_marked():
    steps = [1, 2, 3, 4]
    values = pl.DataFrame({"rank": 0, "step": steps, "value_ms": [1.0, 2.0, 3.0, 4.0]})
    _, marks = heat_figure(values, "step time", Link(), deep=[2, 3, 9]).data
    assert (marks.name, list(marks.x)) == ("recorded in depth", [1, 2])


def test_collectives_by_size_are_those_of_the_selected_steps(loaded):
    of_step = collectives.VIEW.tables["sizes"](loaded, parse_link("?view=collectives&steps=1"))
    assert of_step["count"].sum() * 3 == loaded.sizes["count"].sum()
    assert collectives.VIEW.tables["sizes"](loaded, Link()).equals(loaded.sizes)
    nothing = str(collectives.VIEW.sections["collectives-sizes"](loaded, parse_link("?steps=77")))
    assert "No collective of this selection was recorded in depth." in nothing


def test_a_bar_is_labelled_with_a_plain_number():
    parts = {"compute_ms": 1195.73, "idle_ms": 800.0, "duration_ms": 1995.73}
    frame = pl.DataFrame({"rank": [0], **{name: [parts.get(name, 0.0)] for name in (*PARTS, "duration_ms")}})
    figure = part_figure(frame, "rank", "light")
    assert [bar.text[0] for bar in figure.data] == ["1.2 s, 60%", "800 ms, 40%"]
    assert [each.text for each in figure.layout.annotations] == ["2"]  # the axis has the unit


def _bars(names, by):
    parts = {"compute_ms": 20.0, "duration_ms": 20.0}
    columns = {name: [parts.get(name, 0.0)] * len(names) for name in (*PARTS, "duration_ms")}
    return part_figure(pl.DataFrame({by: names, **columns}), by, "light")


def test_a_window_without_marked_steps_is_named_so():
    assert list(_bars([-1], "step").data[0].x) == [UNMARKED]
    assert list(_bars([7], "step").data[0].x) == ["7"]


def test_the_lengths_of_bars_are_level_and_of_more_than_a_phone_has_room_for_left_out():
    level, many = (_bars(list(range(count)), "rank").layout.annotations for count in (9, 10))
    assert [(each.text, each.textangle) for each in level] == [("20", None)] * 9
    assert not many


def test_steps_that_all_ranks_take_as_long_are_coloured_by_their_length():
    values = pl.DataFrame({"rank": [0, 1, 0, 1], "step": [5, 5, 6, 6], "value_ms": [20.0, 20.0, 30.0, 30.0]})
    (heat,) = heat_figure(values, "step time", Link()).data
    assert np.asarray(heat.z).tolist() == [[20, 30], [20, 30]]
    assert heat.colorbar.title.text == "ms"
    assert (heat.zmin, heat.zmax) == (0, 30)


def test_steps_that_were_not_recorded_take_no_room_and_one_slow_step_of_many_shows():
    steps = [*range(0, 5000), *range(9000, 12_000)]
    values = pl.DataFrame({"rank": 0, "step": steps, "value_ms": [1.0] * len(steps)})
    values = values.with_columns(value_ms=pl.when(pl.col("step") == 9999).then(7.0).otherwise("value_ms"))
    (heat,) = heat_figure(values, "step time", Link()).data
    cells = np.asarray(heat.z)
    assert cells.shape[1] <= COLUMNS + 1
    assert np.nanmax(cells) == 7
    assert not np.isnan(cells).any()
    assert (heat.zmin, heat.zmax) == (0, 2)  # the colours are spent on what is common


@pytest.mark.parametrize("by", ["rank", "step"])
def test_the_parts_add_up_to_the_step(loaded, by):
    parts = part_info(loaded.breakdown, by, Link())
    total = parts.select(pl.sum_horizontal(list(PARTS))).to_series()
    assert np.allclose(total, parts["duration_ms"])
    figure = part_figure(parts, by, "light")
    scale, _ = time_unit(parts["duration_ms"].max())
    assert np.allclose(np.sum([bar.y for bar in figure.data], axis=0) * scale, parts["duration_ms"])
    assert figure.layout.barmode == "stack"


def test_the_parts_are_of_what_is_selected(loaded):
    assert part_info(loaded.breakdown, "step", parse_link("?steps=1&ranks=0"))["step"].to_list() == [1]
    assert part_info(loaded.breakdown, "rank", parse_link("?ranks=9")).is_empty()


@pytest.mark.parametrize(
    ("largest_ms", "unit"),
    [
        (0, (0.001, "us")),
        (0.4, (0.001, "us")),
        (1, (1, "ms")),
        (999, (1, "ms")),
        (1340, (1000, "s")),
        (120_000, (60_000, "min")),
        (7_200_000, (3_600_000, "h")),
    ],
)
def test_an_axis_of_times_has_the_unit_that_suits_its_largest(largest_ms, unit):
    assert time_unit(largest_ms) == unit


def test_bars_have_their_values_and_shares_inside_and_their_totals_above(loaded):
    parts = part_info(loaded.breakdown, "rank", Link())
    figure = part_figure(parts, "rank", "light")
    assert any("%" in text for bar in figure.data for text in bar.text)
    assert [total.x for total in figure.layout.annotations] == list(range(parts.height))
