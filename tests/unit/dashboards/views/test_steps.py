"""Steps × ranks, and where the time of steps went."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.cli.run.dashboard import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.views.breakdown import PARTS, part_figure, part_info
from dpro.dashboards.views.heatmap import COLUMNS, heat_figure, heat_info, metrics_of
from tests.builders import gpu_job


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
    assert np.asarray(heat.z).tolist() == values["value_ms"].to_numpy().reshape(2, 3).tolist()
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("step", "rank")
    (outline,) = figure.layout.shapes
    assert (outline.x0, outline.x1, outline.y0, outline.y1) == (0.5, 2.5, -0.5, 0.5)


def test_gaps_stay_empty_and_one_slow_step_of_many_shows():
    steps = [*range(0, 5000), *range(9000, 12_000)]
    values = pl.DataFrame({"rank": 0, "step": steps, "value_ms": [1.0] * len(steps)})
    values = values.with_columns(value_ms=pl.when(pl.col("step") == 9999).then(7.0).otherwise("value_ms"))
    (heat,) = heat_figure(values, "step time", Link()).data
    cells = np.asarray(heat.z)
    assert cells.shape[1] <= COLUMNS + 1
    assert np.nanmax(cells) == 7
    assert np.isnan(cells[0, cells.shape[1] // 2])
    assert heat.zmax == 2  # the colours are spent on what is common


@pytest.mark.parametrize("by", ["rank", "step"])
def test_the_parts_add_up_to_the_step(loaded, by):
    parts = part_info(loaded.breakdown, by, Link())
    total = parts.select(pl.sum_horizontal(list(PARTS))).to_series()
    assert np.allclose(total, parts["duration_ms"])
    figure = part_figure(parts, by, "light")
    assert np.allclose(np.sum([bar.y for bar in figure.data], axis=0), parts["duration_ms"])
    assert figure.layout.barmode == "stack"


def test_the_parts_are_of_what_is_selected(loaded):
    assert part_info(loaded.breakdown, "step", parse_link("?steps=1&ranks=0"))["step"].to_list() == [1]
    assert part_info(loaded.breakdown, "rank", parse_link("?ranks=9")).is_empty()
