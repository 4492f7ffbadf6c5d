"""Ranks in rows and columns of their coordinates, and what colours them."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.dashboards import needs
from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.views.layout import VIEW, layout_figure, place_info, value_info
from dpro.detect.findings import Finding
from dpro.replay.mesh import Axis, Mesh
from dpro.store import open_run
from dpro.verdict.verdict import explain
from tests.builders import cpu_job
from tests.jobs import ROOT


@pytest.fixture
def grid() -> Mesh:
    """Eight ranks: two data-parallel replicas of two stages of two ranks each; of rank 7 nothing is known."""
    places = {rank: (rank // 4, rank // 2 % 2, rank % 2) for rank in range(7)} | {7: (-1, -1, -1)}
    return Mesh(8, (Axis("dp", 2), Axis("pp", 2), Axis("tp", 2)), places, "mesh")


def test_the_inner_axes_go_across_and_the_outer_ones_down(grid):
    places = place_info(grid)
    assert places["rank"].to_list() == list(range(7))
    assert places["row"].to_list() == [0, 0, 0, 0, 1, 1, 1]
    assert places["column"].to_list() == [0, 1, 2, 3, 0, 1, 2]
    assert places.row(6)[3:] == ("dp 1", "pp 1, tp 0")
    line = place_info(Mesh(2, (Axis("", 2),), {0: (0,), 1: (1,)}))
    assert line.select("row", "column", "row_name", "column_name").rows() == [
        (0, 0, "", "axis 0"),
        (0, 1, "", "axis 1"),
    ]


def test_a_rank_is_coloured_by_its_wait_by_its_own_time_or_by_what_was_found_of_it():
    times = {"rank": [0, 1], "duration_ns": [10e6] * 2, "exposed_wait_ns": [4e6, 0.0]}
    rest = ("exposed_comm_ns", "compute_ns", "copy_ns", "exposed_transfer_ns", "host_bound_ns", "idle_ns")
    parts = pl.DataFrame(times | {name: [0.0, 0.0] for name in (*rest, "overlapped_comm_ns")})
    assert sorted(value_info(parts, (), "wait").rows()) == [(0, 4.0), (1, 0.0)]
    assert sorted(value_info(parts, (), "own").rows()) == [(0, 6.0), (1, 10.0)]
    found = [
        Finding("slow.compute", "rank", "1", (1,), 0.5, 1.0, 3_000_000, ()),
        Finding("slow.host", "rank", "1", (1,), 0.5, 1.0, 1_000_000, ()),
    ]
    assert value_info(None, found, "finding").rows() == [(1, 4.0)]


def test_a_cell_without_a_value_is_empty_and_the_selected_rank_outlined(grid):
    values = pl.DataFrame({"rank": [0, 5], "value_ms": [1.0, 2.0]})
    figure = layout_figure(place_info(grid), values, "own time", Link(ranks=(5,)))
    heat, bare, named = figure.data
    assert np.isnan(heat.z).sum() == 6
    assert list(bare.text) == ["1", "2", "3", "4", "6"]  # in the page's ink: it has no colour below it
    assert figure.layout.meta["ranks"] == [[0, 1, 2, 3], [4, 5, 6, -1]]
    assert list(named.text) == ["0", "5"]
    assert heat.customdata[1][1] == "rank 5 (dp 1, pp 0, tp 1): 2.000 ms"
    (outline,) = figure.layout.shapes
    assert (outline.x0, outline.y0) == (0.5, 0.5)
    assert list(figure.layout.xaxis.ticktext) == ["pp 0, tp 0", "pp 0, tp 1", "pp 1, tp 0", "pp 1, tp 1"]


def test_the_rank_that_waits_least_is_the_brightest_and_numbers_can_be_read(grid):
    values = pl.DataFrame({"rank": range(7), "value_ms": [float(rank) for rank in range(7)]})
    heat, _, named = layout_figure(place_info(grid), values, "waiting", Link(), least=True).data
    brightest, darkest = (
        sum(int(heat.colorscale[end][1][at : at + 2], 16) for at in (1, 3, 5)) for end in (0, -1)
    )
    assert brightest > darkest
    assert named.textfont.color[0] == "#000000"
    assert named.textfont.color[6] == "#fffffd"


def test_of_ranks_at_fault_in_a_hang_no_amount_is_said(grid):
    values = pl.DataFrame({"rank": [5], "value_ms": [3.7e10]})
    heat = layout_figure(place_info(grid), values, "cost of findings", Link(), at_fault=True).data[0]
    assert heat.customdata[1][1] == "rank 5 (dp 1, pp 0, tp 1): at fault"
    assert not heat.showscale


def test_values_that_are_all_zero_have_a_scale_that_begins_there(grid):
    values = pl.DataFrame({"rank": range(7), "value_ms": [0.0] * 7})
    heat = layout_figure(place_info(grid), values, "waiting", Link()).data[0]
    assert (heat.zmin, heat.zmax, *heat.colorbar.tickvals) == (0, 1, 0, 0.5, 1)


def test_the_view_names_the_layout_and_says_where_none_is_known(tmp_path):
    unknown = load(cpu_job().write(tmp_path / "unknown"))
    assert VIEW.missing(unknown, Link()) == needs.NO_LAYOUT
    job = cpu_job(num_ranks=4)
    for rank in range(4):
        job.worker(rank, "n1", dp=rank // 2, tp=rank % 2)
    loaded = load(job.write(tmp_path / "known"))
    assert not VIEW.missing(loaded, Link())
    (words, *_) = VIEW.sections["layout-ranks"](loaded, Link())
    assert words.children == "4 ranks = dp 2 x tp 2"
    table = VIEW.tables["ranks"](loaded, parse_link("?view=layout&metric=own"))
    assert table.columns == ["rank", "row_name", "column_name", "value_ms"]
    assert table["value_ms"].null_count() == 0


def test_own_time_is_part_of_the_usual_step():
    loaded = load(open_run(ROOT / "sample_traces" / "slow_rank"))
    own = VIEW.tables["ranks"](loaded, Link())["value_ms"].to_list()
    assert len(own) == 2
    assert 0 < min(own) <= max(own) <= explain(loaded).account.step_ms * 1.001
