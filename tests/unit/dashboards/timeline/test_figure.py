"""The timeline as a figure: its rows, times and traces."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.dashboards.command import load
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.timeline.figure import (
    drawn_timeline,
    extent_info,
    row_info,
    timeline_figure,
    timeline_info,
)
from dpro.dashboards.timeline.lanes import KINDS
from tests.builders import gpu_job


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(gpu_job().write(tmp_path_factory.mktemp("run")))


def _drawn(loaded, query: str = ""):
    link = parse_link(query)
    rows = row_info(loaded.tracks, link)
    extent = extent_info(loaded.step_extents, link, (0, 10))
    return link, rows, extent, timeline_info(loaded.tracks, rows, *extent)


def test_rows_go_from_the_critical_path_through_the_ranks(loaded):
    labels = row_info(loaded.tracks, Link()).labels
    assert labels[0] == "critical path"
    assert [label for label in labels if "stream 7 (compute)" in label] == [
        "rank 0 stream 7 (compute)",
        "rank 1 stream 7 (compute)",
    ]
    assert row_info(loaded.tracks, parse_link("?ranks=1")).labels[1].startswith("rank 1")
    both = row_info(loaded.tracks, parse_link("?show=both&ranks=0"))
    assert {"rank 0 stream 7 (compute)", "rank 0 stream 7 (compute) (replayed)"} <= set(both.labels)
    assert both.height == sorted(both.height, reverse=True)


def test_the_time_that_is_seen_is_that_of_the_link_or_of_its_steps(loaded):
    steps = loaded.step_extents
    assert extent_info(steps, parse_link("?time=1~2"), (0, 1)) == (1.0, 2.0)
    begin, end = extent_info(steps, parse_link("?steps=1"), (0, 1))
    (step,) = steps.filter(step=1).to_dicts()
    assert begin < step["begin_ms"] < step["end_ms"] < end
    assert end - begin < 1.05 * (step["end_ms"] - step["begin_ms"])
    assert extent_info(steps.clear(), Link(), (0, 2_000_000)) == (-0.02, 2.02)


def test_the_figure_has_a_trace_per_kind_with_gaps_between_its_segments(loaded):
    link, rows, extent, drawn = _drawn(loaded)
    figure = timeline_figure(rows, drawn, loaded.step_extents, extent, link)
    kernels = next(trace for trace in figure.data if trace.name == "kernel")
    x = np.asarray(kernels.x).reshape(-1, 3)
    assert np.isnan(x[:, 2]).all()
    assert (x[:, 1] > x[:, 0]).all()
    assert len(x) == (drawn[0].kind == KINDS.index("kernel")).sum()
    assert {trace.type for trace in figure.data} == {"scattergl"}
    assert [note.text for note in figure.layout.annotations] == ["step 0", "step 1", "step 2"]
    assert figure.layout.xaxis.title.text == "ms since the first span"
    assert "wait in a collective" in {trace.name for trace in figure.data}


def test_the_time_of_a_figure_without_steps_is_that_of_its_tracks(loaded):
    figure = drawn_timeline(loaded.tracks, loaded.step_extents, parse_link("?ranks=0"))
    assert all("rank 1" not in text for text in figure.layout.yaxis.ticktext)
