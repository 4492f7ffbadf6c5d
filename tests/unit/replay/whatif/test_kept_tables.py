"""What predictions of one graph share."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import once
from dpro.replay.whatif.graph_ops.scope import descendants_of
from dpro.replay.whatif.job import with_kept_tables
from dpro.schema import SPANS
from dpro.store import Run, open_run, write_part
from tests.builders import cpu_job


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tables that are read."""
    tables, table = list[str](), Run.table

    def counted(self, of, columns=None):
        tables.append(of.name)
        return table(self, of, columns)

    monkeypatch.setattr(Run, "table", counted)  # those that are kept do not come here
    return tables


def test_the_next_prediction_begins_with_what_the_last_one_found_out(tmp_path, read):
    graph = build_graph(cpu_job().write(tmp_path / "run")).graph
    first = with_kept_tables(graph)
    first.run.table(SPANS)
    once(first, "some fact", lambda graph: graph.num_nodes)
    read.clear()
    second = with_kept_tables(graph)
    second.run.table(SPANS)
    assert read == []
    assert once(second, "some fact", lambda _: -1) == graph.num_nodes


def test_a_column_is_read_once_in_whatever_company(tmp_path, read):
    run = with_kept_tables(build_graph(cpu_job().write(tmp_path / "run")).graph).run
    first, second = run.table(SPANS, ["rank", "name"]), run.table(SPANS, ["name", "start_ns", "rank"])
    read.clear()
    assert run.table(SPANS, ["start_ns", "rank"]).equals(second.select("start_ns", "rank"))
    assert first.equals(second.select("rank", "name"))
    assert read == []


def test_a_table_that_was_written_again_is_read_again(tmp_path, read):
    run = cpu_job().write(tmp_path / "run")
    graph = build_graph(run).graph
    before = with_kept_tables(graph).run.table(SPANS)
    added = run.table(SPANS).head(1).with_columns(span_id=pl.lit(10_000, pl.Int64))
    write_part(run.path, SPANS, "more", added)
    read.clear()
    after = with_kept_tables(graph).run.table(SPANS)
    assert after.height == before.height + 1
    assert SPANS.name in read


def test_what_follows_from_a_table_that_was_written_again_is_found_again(tmp_path):
    run = cpu_job().write(tmp_path / "run")
    graph, spans = build_graph(run).graph, run.table(SPANS)
    name = spans.filter(pl.col("kind") == "cpu_op")["name"][0]
    before = descendants_of(graph, name)
    for part in run.parts(SPANS):
        part.unlink()
    write_part(run.path, SPANS, "again", spans.with_columns(name=pl.lit(name)))
    after = descendants_of(dataclasses.replace(graph, run=open_run(run.path)), name)
    assert after.sum() > before.sum() > 0
