"""Rank × rank: slow senders, receivers and links stand out, and the waits of each rank add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import polars as pl
import pytest

from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.theme import least_width
from dpro.dashboards.views.collectives import arrivals, last_info
from dpro.dashboards.views.matrix import (
    METRICS,
    PANELS,
    VIEW,
    late_info,
    pair_figure,
    pair_info,
    slow_in_words,
    square_figure,
)
from dpro.store import open_run
from tests.builders import cpu_job
from tests.unit.detect.jobs import equal_work, graph_of
from tests.unit.detect.network.test_pairs import transfers


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """Four ranks on as many hosts, in pairs; the link between 1 and 2 takes twice as long."""
    rounds = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    changes = {"groups": rounds, "transfer": 10.0, "links": {(1, 2): 2.0}, "hosts": ["a", "b", "c", "d"]}
    folder = tmp_path_factory.mktemp("linked")
    graph_of(folder, replace(equal_work(4, 6, 3), **changes))
    return load(open_run(folder))


def outlined(figure):
    return [(each.x0, each.x1, each.y0, each.y1) for each in figure.layout.shapes]


def test_a_slow_sender_is_a_row_and_a_slow_receiver_a_column():
    slow = transfers(permutations(range(5), 2), lambda a, b: (3 if a == 1 else 1) * (2 if b == 4 else 1))
    pairs = pair_info(slow, {}, Link())
    figure = pair_figure(pairs, "ratio", "light")
    assert outlined(figure) == [(-0.5, 4.5, 0.5, 1.5), (3.5, 4.5, -0.5, 4.5)]
    assert figure.data[0].z[1][4] == pytest.approx(6, rel=0.01)
    assert np.isnan(figure.data[0].z[2][2])
    assert slow_in_words(pairs) == [
        "rank 1 sends 3.00 times as long as expected, with all its peers",
        "rank 4 receives 2.00 times as long as expected, with all its peers",
    ]


def test_a_slow_link_is_a_cell_and_nothing_is_outlined_where_all_are_equal():
    pairs = pair_info(
        transfers(permutations(range(4), 2), lambda a, b: 4.0 if (a, b) == (2, 1) else 1.0), {}, Link()
    )
    assert outlined(pair_figure(pairs, "time", "dark")) == [(0.5, 1.5, 1.5, 2.5)]
    same = pair_info(transfers(permutations(range(4), 2), lambda a, b: 1.0), {}, Link())
    assert outlined(pair_figure(same, "ratio", "dark")) == []
    assert slow_in_words(same) == []


def test_pairs_are_those_of_selected_ranks_and_steps():
    moved = transfers(permutations(range(4), 2), lambda a, b: 1.0)
    assert pair_info(moved, {}, parse_link("?ranks=0-2")).height == 6
    assert pair_info(moved, {}, parse_link("?steps=1-2"))["count"].to_list() == [2] * 12
    assert pair_info(moved, {}, parse_link("?steps=99")).is_empty()


def test_the_bandwidth_of_a_pair_is_bytes_over_time():
    pairs = pair_info(transfers([(0, 1), (1, 0)], lambda a, b: 1.0, base_ns=2e6, size=4_000_000), {}, Link())
    assert pairs["payload_gbps"].to_list() == pytest.approx([2.0, 2.0], rel=0.01)
    assert pairs["transfer_ms"].to_list() == pytest.approx([2, 2], rel=0.01)


def test_where_nothing_can_be_expected_of_a_pair_its_time_is_shown(tmp_path):
    graph_of(tmp_path, equal_work(2, 6, 2))
    filled = PANELS["Transfers, rank × rank"](
        load(open_run(tmp_path)), parse_link("?view=matrix&metric=ratio")
    )
    assert [each.children for each in filled[0].children] == ["time of a transfer", "bandwidth"]
    assert np.isfinite(filled[1].children.figure.data[0].z[0][1])
    assert "there are fewer" in str(filled[3])


def test_hosts_are_compared_like_ranks(linked):
    filled = PANELS["Transfers, host × host"](linked, Link(view="matrix"))
    figure = filled[0].children.figure
    assert list(figure.layout.xaxis.ticktext) == ["a", "b", "c", "d"]
    assert figure.data[0].z[1][2] == pytest.approx(2, rel=0.02)


def test_waits_for_each_rank_add_up_to_what_each_rank_waited(linked):
    came = arrivals(linked, Link())
    late = late_info(came)
    waited = dict(late.group_by("rank").agg(pl.col("waited_ms").sum()).iter_rows())
    for row in last_info(came).iter_rows(named=True):
        assert waited.get(row["rank"], 0.0) == pytest.approx(row["waited_ms"])
    assert not (late["rank"] == late["last"]).any()
    assert late_info(arrivals(linked, parse_link("?ranks=0")))["rank"].unique().to_list() in ([0], [])


def test_equal_times_have_one_colour_and_the_scale_begins_at_zero():
    for metric in ("time", "speed"):
        (heat,) = square_figure([(0, 1, 2.0), (1, 0, 2.0)], [0, 1], METRICS[metric], "light").data
        assert (heat.zmin, heat.zmax) == (0, 2)  # plotly heeds both or none


def test_names_of_hosts_are_never_markup():
    figure = square_figure([("<b>a</b>", "<i>", 1.0)], ["<b>a</b>", "<i>"], METRICS["time"], "light")
    assert list(figure.layout.xaxis.ticktext) == ["&lt;b&gt;a&lt;/b&gt;", "&lt;i&gt;"]
    assert figure.data[0].customdata[0][1] == "&lt;b&gt;a&lt;/b&gt; → &lt;i&gt;"


def test_small_values_in_cells_take_no_more_room_than_large_ones():
    one = [(0, 1, 3120.0), (1, 0, 0.042)]  # ms, shown in seconds
    figure = square_figure(one, [0, 1], METRICS["time"], "light")
    assert figure.data[0].texttemplate == "%{z:,.2~f}"  # 3.12 and 0, where 0.000042 would be tiny
    assert square_figure([(0, 1, 0.0)], [0, 1], METRICS["time"], "light").data[0].texttemplate == "%{z:,.1~f}"


def test_numbers_in_cells_stay_readable_on_a_narrow_page():
    eight, many = (square_figure([(0, 1, 1.0)], range(each), METRICS["time"], "light") for each in (8, 17))
    assert least_width(eight) > 390  # the page scrolls
    assert not many.data[0].texttemplate
    assert not least_width(many)


def _titles(filled):
    return [
        each.children[0].children for part in filled for each in part.children if part.className == "grid"
    ]


def test_what_cannot_be_shown_has_no_panel_and_one_sentence(linked, tmp_path):
    fill = VIEW.sections["matrix-panels"]
    assert _titles(fill(linked, Link(view="matrix"))) == list(PANELS)
    filled = fill(load(cpu_job().write(tmp_path)), Link(view="matrix"))
    assert _titles(filled) == ["Waiting in collectives, rank × rank"]
    assert [each.className for each in filled] == ["grid", "panel wide"]
    assert str(filled[1]).count("No two ranks of this selection exchange data") == 1
    (nothing,) = fill(linked, parse_link("?view=matrix&steps=99"))
    assert "No two ranks" in str(nothing)
    assert "No rank waits" in str(nothing)
