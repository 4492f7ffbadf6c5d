"""Ranks by their numbers, or grouped by an axis of the layout, in heatmap, matrix and timeline."""

from __future__ import annotations

from itertools import permutations

import plotly.graph_objects as go
import polars as pl
import pytest

from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.page import RankOrder, draw_groups, order_choice, order_of
from dpro.dashboards.timeline.routes import lane_info
from dpro.dashboards.views.heatmap import VIEW, heat_figure
from dpro.dashboards.views.matrix import pair_figure, pair_info
from tests.builders import cpu_job
from tests.unit.detect.network.test_pairs import transfers

BY_TP = RankOrder("tp", {0: 0, 1: 1, 2: 0, 3: 1})


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Four ranks: two replicas of two tensor-parallel ranks."""
    job = cpu_job(num_ranks=4)
    for rank in range(4):
        job.worker(rank, "n1", dp=rank // 2, tp=rank % 2)
    return load(job.write(tmp_path_factory.mktemp("runs") / "grid"))


def test_ranks_are_sorted_by_place_then_number_and_unknown_places_come_first():
    order = RankOrder("tp", {0: 1, 1: 0, 2: 1, 3: 0})
    assert order.ordered(range(5)) == [4, 1, 3, 0, 2]
    assert [order.label(rank) for rank in (4, 3)] == ["tp ?: 4", "tp 0: 3"]
    assert RankOrder().ordered([2, 0, 1]) == [0, 1, 2]
    assert RankOrder().label(2) == "2"


def test_a_line_separates_groups_and_none_is_drawn_without_an_axis():
    figure = go.Figure()
    draw_groups(figure, [0, 1], RankOrder(), "light", "xy")
    assert not figure.layout.shapes
    draw_groups(figure, [0, 2, 1, 3], BY_TP, "light", "xy")
    assert [(each.x0, each.x1, each.y0, each.y1) for each in figure.layout.shapes] == [
        (0, 1, 1.5, 1.5),
        (1.5, 1.5, 0, 1),
    ]


def test_rows_of_the_heatmap_keep_their_values_where_they_are_grouped():
    values = pl.DataFrame({"rank": [0, 1, 2, 3], "step": [5] * 4, "value_ms": [10.0, 11.0, 12.0, 13.0]})
    figure = heat_figure(values, "step time", Link(ranks=(1,)), BY_TP)
    (heat,) = figure.data
    assert [cell[0][0] for cell in heat.customdata] == [10, 12, 11, 13]
    assert figure.layout.meta["ranks"] == [0, 2, 1, 3]
    assert list(figure.layout.yaxis.ticktext) == ["tp 0: 0", "tp 0: 2", "tp 1: 1", "tp 1: 3"]
    outline = next(each for each in figure.layout.shapes if each.type == "rect")
    assert (outline.y0, outline.y1) == (1.5, 2.5)


def test_rows_and_columns_of_the_matrix_are_grouped_and_what_is_slow_moves_with_them():
    slow = transfers(permutations(range(4), 2), lambda a, b: 4.0 if (a, b) == (2, 1) else 1.0)
    figure = pair_figure(pair_info(slow, {}, Link()), "time", "light", BY_TP)
    assert list(figure.layout.xaxis.ticktext) == ["tp 0: 0", "tp 0: 2", "tp 1: 1", "tp 1: 3"]
    (cell,) = [each for each in figure.layout.shapes if each.type == "rect"]
    assert (cell.x0, cell.y0) == (1.5, 0.5)  # rank 1 is the third column, rank 2 the second row


def test_the_order_is_in_the_address_and_an_unknown_one_is_by_number(grid):
    (shown,) = order_choice(grid, parse_link("?view=heatmap&order=tp"))
    chosen = {each.children: each.className for each in shown.children}
    assert chosen == {"by rank": "choice", "grouped by dp": "choice", "grouped by tp": "choice chosen"}
    assert shown.children[1].href == "?view=heatmap&order=dp"
    assert order_of(grid, parse_link("?view=heatmap&order=tp")) == BY_TP
    assert order_of(grid, parse_link("?view=heatmap&order=toString")) == RankOrder()
    drawn = VIEW.sections["heatmap-values"](grid, parse_link("?view=heatmap&order=tp"))
    assert drawn[2].children.figure.layout.meta["ranks"] == [0, 2, 1, 3]


def test_the_timeline_has_the_same_places(grid):
    grid.measured.all()
    places = {each["rank"]: each["place"] for each in lane_info(grid)["ranks"]}
    assert places == {rank: {"dp": rank // 2, "tp": rank % 2} for rank in range(4)}


def test_a_run_without_a_layout_has_no_choice(tmp_path):
    assert order_choice(load(cpu_job().write(tmp_path / "run")), Link()) == []
