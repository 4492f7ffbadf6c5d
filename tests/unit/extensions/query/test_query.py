"""Queries in SQL: they answer from the run's tables, and reach nothing else."""

from __future__ import annotations

import json
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import polars as pl
import pytest

from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.errors import UsageError
from dpro.extensions.query.ask import EXAMPLES, _process, ask, tables_of
from dpro.extensions.query.view import SHOWN, VIEW
from dpro.schema import SPANS, STEPS, TABLES
from tests.builders import gpu_job
from tests.commands import dpro

SECRET = "not to be read"
secrets = pl.DataFrame({"secret": [SECRET]})  # a variable of this module: no query sees it


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return gpu_job().write(tmp_path_factory.mktemp("run"))


def test_a_query_answers_from_the_tables_as_the_run_has_them(run):
    rows = ask(run, "SELECT rank, step, duration_ns FROM steps ORDER BY rank, step").rows
    assert rows.rows() == run.table(STEPS).sort("rank", "step").select("rank", "step", "duration_ns").rows()
    kernels = ask(run, "SELECT count(*) AS n FROM SPANS WHERE kind = 'kernel'").rows
    assert kernels["n"].to_list() == [(run.table(SPANS)["kind"] == "kernel").sum()]
    assert ask(run, "SELECT * FROM counters -- none in this run").rows.is_empty()
    assert ask(run, "WITH of AS (FROM steps) SELECT max(step) FROM of;").rows.item() == 2


def test_rows_beyond_the_most_are_left_out_and_that_is_said(run):
    assert not ask(run, "FROM range(10)", most=10).is_cut
    answer = ask(run, "FROM range(100000000000)", most=10)
    assert (answer.rows.height, answer.is_cut) == (10, True)


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('{}')",
        "SELECT * FROM (SELECT * FROM read_text('{}'))",
        "WITH a AS (SELECT * FROM read_blob('{}')) SELECT * FROM a",
        "SELECT (SELECT content FROM read_text('{}'))",
        "SELECT * FROM read_parquet('{}')",
        "SELECT * FROM read_json_auto('{}')",
        "FROM '{}'",
        'FROM "{}"',
        "SELECT * FROM glob('{}')",
        "SELECT * FROM sniff_csv('{}')",
        "SELECT * FROM query('FROM read_text(''{}'')')",
        "SELECT * FROM query_table('{}')",
        "SELECT getenv('HOME')",
        "SELECT * FROM secrets",
        "FROM run",
        "SELECT 1; FROM read_text('{}')",
        "COPY (SELECT 1) TO '{}'",
        "COPY steps FROM '{}'",
        "CREATE TABLE mine AS FROM read_text('{}')",
        "CREATE VIEW steps AS FROM read_text('{}')",
        "ATTACH '{}' AS other",
        "EXPORT DATABASE '{}'",
        "IMPORT DATABASE '{}'",
        "INSTALL httpfs",
        "LOAD '{}'",
        "SET enable_external_access = true",
        "PRAGMA enable_external_access = true",
        "RESET enable_external_access",
        "CALL pragma_version()",
        "DELETE FROM steps",
        "DROP VIEW steps",
        "VACUUM",
        "",
        "SELEC 1",
    ],
)
def test_nothing_but_the_tables_can_be_read_and_nothing_written(run, tmp_path, sql):
    file = tmp_path / "secret.txt"
    file.write_text(SECRET)
    with pytest.raises(UsageError) as refused:
        ask(run, sql.format(file))
    said = str(refused.value)
    assert SECRET not in said
    assert "\n" not in said
    assert [each.name for each in tmp_path.iterdir()] == ["secret.txt"]
    assert file.read_text() == SECRET
    assert ask(run, "SELECT count(*) AS n FROM steps").rows["n"].item()  # and the next one is answered


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        (
            "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t",
            "more than",
        ),
        ("SELECT string_agg(repeat('x', 1000000), '') FROM range(10000)", "of memory"),
        ("SELECT repeat('x', 2000000000)", "of memory"),
        ("SELECT length(repeat('x', 4000000000))", "of memory"),
        ("SELECT sum(length(regexp_replace(repeat('ab', 40000000), '(a|b)+?(a|b)', 'c', 'g')))", "more than"),
    ],
)
def test_what_takes_too_long_or_too_much_memory_is_stopped(run, sql, why):
    with pytest.raises(UsageError, match=why):
        ask(run, sql, patience_s=1.0 if why == "more than" else 20.0)
    assert ask(run, "SELECT count(*) AS n FROM steps").rows["n"].item()  # and the next one is answered


def test_a_process_that_dies_for_want_of_memory_is_said_and_replaced(run, monkeypatch):
    class Died:
        def submit(self, *_):
            raise BrokenProcessPool

    monkeypatch.setattr("dpro.extensions.query.ask.process_pool", lambda _: Died())
    _process.cache_clear()
    with pytest.raises(UsageError, match="of memory"):
        ask(run, "SELECT 1")
    monkeypatch.undo()
    assert ask(run, "SELECT 1 AS n").rows.item() == 1


def test_a_process_that_was_killed_between_two_queries_is_replaced(run):
    ask(run, "SELECT 1")
    broken = _process()
    for child in broken._processes.values():
        child.kill()
    while not broken._broken:
        time.sleep(0.01)
    assert ask(run, "SELECT 1 AS n").rows.item() == 1


STEP_COLUMNS = f"; steps has {', '.join(STEPS.columns)}"


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        (
            "SELECT duration_n FROM steps",
            f"no column 'duration_n' (did you mean 'duration_ns'?){STEP_COLUMNS}",
        ),
        ("SELECT s.zzz FROM steps s", f"no column 'zzz'{STEP_COLUMNS}"),
        ("SELECT * EXCLUDE (zzz) FROM steps", f"no column 'zzz'{STEP_COLUMNS}"),
        (
            'SELECT * FROM steps WHERE rank = "one"',
            f"no column 'one' (strings take single quotes){STEP_COLUMNS}",
        ),
        ("FROM span", "no table 'span' (did you mean 'spans'?); the tables are spans, collectives, "),
        ("SELECT x.rank FROM steps", "no table 'x'; the tables are spans, "),
        ("SELECT zzz", "no column 'zzz'; the tables are spans, "),
        ("SELECT maxx(rank) FROM steps", "no function 'maxx' (did you mean 'max'?)"),
        ("SELEC 1", "not SQL: 'SELEC'"),
        ("SELECT 'a'::int", "Could not convert string 'a' to INT32"),
    ],
)
def test_a_mistake_is_a_line_with_the_wrong_word_and_what_may_stand_there(run, sql, said):
    with pytest.raises(UsageError) as refused:
        ask(run, sql)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("words", EXAMPLES)
def test_each_example_is_answered(run, words):
    sql, tables = EXAMPLES[words]
    assert set(tables) <= {*TABLES, "gpus"}
    assert not ask(run, sql).rows.is_empty() or "collective" in words


def test_the_command_lists_tables_and_answers_as_a_table_or_as_json(run):
    listed = dpro("query", run.path).stdout
    assert f"steps  {tables_of(run)['steps']:,} rows  rank, step" in listed
    assert "counters" not in listed  # without rows
    shown = dpro("query", run.path, "SELECT rank, count(*) AS n FROM steps GROUP BY rank ORDER BY rank")
    assert [line.split() for line in shown.stdout.splitlines()] == [["rank", "n"], ["0", "3"], ["1", "3"]]
    document = json.loads(dpro("query", run.path, "SELECT [1, 2] AS a, NULL AS b", "--json").stdout)
    assert (document["columns"], document["is_cut"]) == (["a", "b"], False)
    assert document["rows"] == [["[1, 2]", None]]
    refused = dpro("query", run.path, "DROP TABLE steps")
    assert refused.returncode == 2
    assert refused.stderr == "dpro: only a single SELECT is allowed\n"


def test_rows_that_are_wider_than_the_screen_are_shown_one_after_the_other(run):
    sql = "SELECT repeat('x', 30) AS a, rank, repeat('y', {}) AS b, NULL AS c FROM steps LIMIT 2"
    narrow = dpro("query", run.path, sql.format(39)).stdout.splitlines()
    assert [line.split() for line in narrow] == [["a", "rank", "b", "c"], *[["x" * 30, "0", "y" * 39]] * 2]
    record = ["a: " + "x" * 30, "rank: 0", "b: " + "y" * 60, "c: "]
    assert dpro("query", run.path, sql.format(60)).stdout.splitlines() == [*record, "", *record]


def test_the_page_offers_what_the_run_can_answer_and_shows_rows_or_why_not(run):
    loaded = Loaded(run)
    form = str(VIEW.sections["query-form"](loaded, Link(view="query")))
    assert "operators by time" in form
    assert "kernels by time" not in form  # it names no GPU
    gpus = replace(run, manifest=replace(run.manifest, gpus=["NVIDIA H100 80GB HBM3"]))
    assert "kernels by time" in str(VIEW.sections["query-form"](Loaded(gpus), Link()))
    assert "spans:" in str(VIEW.sections["query-tables"](loaded, Link()))
    link = parse_link("?view=query&sql=SELECT+name,+duration_ns+FROM+spans")
    rows = VIEW.tables["rows"](loaded, link)
    assert rows.height == run.num_rows(SPANS) <= SHOWN
    assert f"{rows.height:,} rows" in str(VIEW.sections["query-rows"](loaded, link))
    link = parse_link("?view=query&sql=SELECT+i+FROM+range(76806)+t(i)")
    shown = str(VIEW.sections["query-rows"](loaded, link))
    assert "the first 1,000 of 76,806 rows; all as CSV" in shown
    assert '["999"]]' in shown
    assert len(shown) < 20_000  # one text: a component for each cell freezes the page
    assert VIEW.tables["rows"](loaded, link).height == 76_806
    one = parse_link("?view=query&sql=SELECT+1")
    assert "'1 row'" in str(VIEW.sections["query-rows"](loaded, one))
    assert "Type a query" in str(VIEW.sections["query-rows"](loaded, Link(view="query")))
    with pytest.raises(UsageError, match="single SELECT"):
        VIEW.sections["query-rows"](loaded, parse_link("?view=query&sql=DROP+TABLE+spans"))
