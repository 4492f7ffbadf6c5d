"""The timeline's rows, times and figure, and what is told of one span."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from dpro.cli.run.dashboard import load
from dpro.dashboards import spans
from dpro.dashboards.app import make_app
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.segments import KINDS
from dpro.dashboards.timeline import extent_info, row_info, timeline_figure, timeline_info
from dpro.replay.graph import EdgeKind, NodeKind
from tests.builders import TinyRun, gpu_job

EVIL = "<img src=x onerror=alert(1)>"


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
    assert [label for label in labels if "stream 7" in label] == ["rank 0 stream 7", "rank 1 stream 7"]
    assert row_info(loaded.tracks, parse_link("?ranks=1")).labels[1].startswith("rank 1")
    both = row_info(loaded.tracks, parse_link("?show=both&ranks=0"))
    assert {"rank 0 stream 7", "rank 0 stream 7 (replayed)"} <= set(both.labels)
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
    assert "wait for others in it" in {trace.name for trace in figure.data}


def _ask(loaded, rows, name: str, rank: int) -> dict:
    """What the figure tells where a span of that name is."""
    nodes, graph = loaded.timeline.graph.nodes, loaded.timeline.graph
    fits = (nodes.name == graph.names.index(name)) & (nodes.rank == rank) & (nodes.kind != NodeKind.ARRIVE)
    node = int(np.flatnonzero(fits)[0])
    place = int(np.flatnonzero(loaded.tracks.node == node)[-1])
    x = (loaded.tracks.start[place] + loaded.tracks.end[place]) / 2e6
    for height in rows.height:
        told = spans.at(loaded.timeline, loaded.tracks, rows.tracks, rows.height, x=x, y=height, near=0)
        if told and told["node"] == node:
            return told
    raise AssertionError(name)


def test_what_is_told_of_a_span_is_what_was_recorded(loaded):
    _, rows, _, _ = _drawn(loaded)
    facts = dict(_ask(loaded, rows, "softmax", 1)["facts"])
    assert facts["where"] == "rank 1, stream 7"
    assert facts["kind"] == "kernel"
    assert facts["step"] == "0"
    assert spans.at(loaded.timeline, loaded.tracks, rows.tracks, rows.height, x=1, y=99, near=1) is None
    assert spans.at(loaded.timeline, loaded.tracks, [], [], x=1, y=0, near=1) is None


def test_a_collective_says_how_long_it_waited_and_for_whom(loaded):
    timeline = loaded.timeline
    nodes = timeline.graph.nodes
    first = int(np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.rank == 0))[0])
    waited = dict(spans.fact_info(timeline, first))["waited"]
    assert waited.startswith("3")  # rank 1's softmax takes 300 us longer, give or take the noise
    cause, why = spans.cause_of(timeline, first)
    assert (int(nodes.rank[cause]), why) == (1, EdgeKind.RENDEZVOUS)
    arrive = int(np.flatnonzero((nodes.kind == NodeKind.ARRIVE) & (nodes.rank == 0))[0])
    assert spans.fact_info(timeline, arrive) == spans.fact_info(timeline, first)


def test_an_arrow_leads_from_what_was_waited_for(loaded):
    _, rows, _, _ = _drawn(loaded)
    timeline, nodes = loaded.timeline, loaded.timeline.graph.nodes
    adam = int(np.flatnonzero(nodes.name == timeline.graph.names.index("adam"))[0])
    x, y = spans.flow(timeline, loaded.tracks, rows.tracks, rows.height, adam)
    assert x[0] <= x[1]
    assert set(y) <= set(rows.height)
    assert spans.flow(timeline, loaded.tracks, rows.tracks, rows.height, -1) == ([], [])
    assert spans.chosen_node(parse_link("?node=99999999"), timeline.graph) == -1
    assert spans.chosen_node(parse_link("?node=x"), timeline.graph) == -1


def test_a_browser_gets_the_figure_in_less_than_a_megabyte_and_facts_on_request(loaded):
    client = make_app(loaded).server.test_client()
    outputs = [("timeline-figure", "figure"), ("timeline-figure", "style"), ("timeline-note", "children")]
    body = {
        "output": ".." + "...".join(".".join(each) for each in outputs) + "..",
        "outputs": [{"id": name, "property": prop} for name, prop in outputs],
        "inputs": [{"id": "url", "property": "search", "value": "?view=timeline"}],
        "changedPropIds": ["url.search"],
    }
    answer = client.post("/_dash-update-component", json=body, headers={"Host": "localhost"})
    assert len(answer.data) < 1_000_000
    figure = json.loads(answer.data)["response"]["timeline-figure"]["figure"]
    coded = figure["data"][0]["x"]
    assert np.frombuffer(base64.b64decode(coded["bdata"]), coded["dtype"]).size % 3 == 0
    for query in ("?view=timeline&x=nan&y=1&near=1", "?view=timeline&x=inf&y=1&near=1", "?x=1", "?steps=q"):
        got = client.get("/span" + query, headers={"Host": "localhost"})
        assert (got.status_code, got.json) == (200, None)


def test_a_name_that_looks_like_html_reaches_the_page_as_text(tmp_path):
    run = TinyRun()
    for step in range(3):
        run.call(1000 * step, 1000 * step + 5, step)
        run.kernel(EVIL, 1000 * step + 10, 1000 * step + 900, step)
        run.step(step, 1000 * step, 1000 * step + 990)
    evil = load(run.write(tmp_path))
    _, rows, _, _ = _drawn(evil)
    assert dict(_ask(evil, rows, EVIL, 0)["facts"])["name"] == EVIL
    answer = make_app(evil).server.test_client().get("/span?x=1", headers={"Host": "localhost"})
    assert answer.mimetype == "application/json"
