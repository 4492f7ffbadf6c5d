"""Which spans lie in which, what they launch and what backward they ask for, against the definition."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.whatif.graph_ops.scope import COLUMNS, Nesting, nesting_of, nodes_of, rows_of
from dpro.schema import SPANS
from tests.builders import TinyRun, tiny_graph

CPU_KINDS = ["cpu_op", "runtime", "annotation", "python"]


@st.composite
def spans(draw: st.DrawFn) -> pl.DataFrame:
    rows = []
    for number in range(draw(st.integers(0, 24))):
        kind = draw(st.sampled_from([*CPU_KINDS, "kernel", "memcpy", "overhead"]))
        launches = kind in ("runtime", "kernel", "memcpy")
        rows.append(
            {
                "span_id": number,
                "rank": draw(st.sampled_from([0, 7])),
                "window": draw(st.integers(-1, 1)),
                "tid": draw(st.sampled_from([3, 10**12])),
                "kind": kind,
                "name": "n",
                "start_ns": draw(st.integers(0, 30)) + 10**15,
                "duration_ns": draw(st.integers(0, 12)),
                "correlation": draw(st.sampled_from([-1, 0, 1, 2**40])) if launches else -1,
                "sequence_number": draw(st.sampled_from([-1, 0, 1, 2**50])) if kind == "cpu_op" else -1,
                "forward_thread": draw(st.integers(-1, 1)),
            }
        )
    return pl.DataFrame(rows, {name: SPANS.dtypes[name] for name in COLUMNS})


def of(frame: pl.DataFrame) -> Nesting:
    run = SimpleNamespace(table=lambda _, columns: frame.select(columns))
    return nesting_of(replace(tiny_graph([1], []), run=run))


def slowly_inside(rows: list[dict], chosen: set[int]) -> set[int]:
    """The definition, one span after the other."""

    def same(one: dict, other: dict, *names: str) -> bool:
        return all(one[name] == other[name] for name in ("rank", "window", *names))

    def covers(outer: dict, row: dict) -> bool:
        return outer["start_ns"] <= row["start_ns"] < outer["start_ns"] + outer["duration_ns"]

    outers = [rows[at] for at in chosen]
    found = {
        at
        for at, row in enumerate(rows)
        if row["kind"] in CPU_KINDS and any(same(row, each, "tid") and covers(each, row) for each in outers)
    }
    calls = [rows[at] for at in found if rows[at]["kind"] == "runtime" and rows[at]["correlation"] >= 0]
    return found | {
        at
        for at, row in enumerate(rows)
        if row["kind"] in ("kernel", "memcpy") and any(same(row, call, "correlation") for call in calls)
    }


def slowly_with_backward(rows: list[dict], chosen: set[int]) -> set[int]:
    forward = slowly_inside(rows, chosen)
    askers: dict[tuple, int] = {}
    numbered = [at for at, row in enumerate(rows) if row["kind"] == "cpu_op" and row["sequence_number"] >= 0]
    for at in sorted(numbered, key=lambda at: (rows[at]["start_ns"], rows[at]["span_id"])):
        if rows[at]["forward_thread"] <= 0:
            askers[_asked(rows[at])] = at
    backward = [at for at in numbered if rows[at]["forward_thread"] > 0]
    late = {at for at in backward if askers.get(_asked(rows[at]), -1) in forward}
    return forward | slowly_inside(rows, late)


def _asked(row: dict) -> tuple:
    return row["rank"], row["window"], row["sequence_number"]


@settings(max_examples=150, deadline=None)
@given(spans(), st.data())
def test_spans_inside_and_their_backward_are_those_of_the_definition(frame: pl.DataFrame, data):
    rows = frame.to_dicts()
    chosen = data.draw(st.sets(st.integers(0, len(rows) - 1)) if rows else st.just(set()))
    nesting, mask = of(frame), np.isin(np.arange(len(rows)), list(chosen))
    assert set(np.flatnonzero(nesting.inside(mask)).tolist()) == slowly_inside(rows, chosen)
    assert set(np.flatnonzero(nesting.with_backward(mask)).tolist()) == slowly_with_backward(rows, chosen)


def test_nodes_of_a_call_are_its_own_and_those_of_the_collective_that_it_calls(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 100, rank)
        run.step(1, 100, 200, rank)
        for begin in (10, 110):
            run.op("aten::mm", begin, begin + 5, rank)
            run.gloo((begin + 10, begin + 12), (begin + 15, begin + 30), rank)
            run.op("aten::add", begin + 40, begin + 45, rank)
    graph = build_graph(run.write(tmp_path / "run")).graph
    spans = nesting_of(graph).spans
    is_call = (spans["name"] == "c10d::allreduce_").to_numpy()
    names = {graph.names[name] for name in graph.nodes.name[nodes_of(graph, is_call)]}
    assert names == {"c10d::allreduce_", "gloo:all_reduce"}
    rows, known = rows_of(graph), graph.nodes.span >= 0
    assert (rows[~known] == -1).all()
    assert (spans["span_id"].to_numpy()[rows[known]] == graph.nodes.span[known]).all()
    assert (spans["rank"].to_numpy()[rows[known]] == graph.nodes.rank[known]).all()
