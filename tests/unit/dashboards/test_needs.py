"""Each view says in one sentence why it shows nothing of a run, and never an empty figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import polars as pl
import pytest

from dpro.dashboards.app import VIEWS, make_app
from dpro.dashboards.command import load
from dpro.dashboards.links import Link
from dpro.dashboards.needs import untimed_steps
from dpro.dashboards.views import heatmap, verdict
from dpro.dashboards.views.over_time import timed_run
from dpro.ingest.importer import import_sources
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS, conform
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from tests.builders import TinyRun, cpu_job
from tests.reference.hanging_dumps import dumps_of_a_stuck_host
from tests.unit.dashboards.test_app import ask, dimmed, navigate


def without_windows(folder) -> Run:
    rows = pl.DataFrame({"rank": [0, 0], "step": [0, 1], "start_ns": [0, 5], "duration_ns": [5, 6]})
    write_part(folder, STEPS, "rank0", conform(STEPS, rows.with_columns(window=-1)))
    write_manifest(folder, Manifest(world_size=1, ranks=[0]))
    return open_run(folder)


def without(table: str):
    def make(folder) -> Run:
        run = cpu_job()
        for row in run.rows[COLLECTIVES.name]:
            row["group"] = "0 default_pg"
        run.rows.pop(table, None)
        return run.write(folder)

    return make


def without_call_states(folder) -> Run:
    return cpu_job().write(folder)  # its calls name no group, as in some traces of profilers


def one_gpu(folder) -> Run:
    run = TinyRun()
    for step in range(3):
        run.call(1000 * step, 1000 * step + 5, step)
        run.kernel("gemm", 1000 * step + 10, 1000 * step + 900, step)
        run.step(step, 1000 * step, 1000 * step + 990)
    return run.write(folder)


def empty_run(folder) -> Run:
    write_manifest(folder, Manifest(world_size=1, ranks=[0]))
    return open_run(folder)


def dumps(folder) -> Run:
    import_sources([dumps_of_a_stuck_host(folder)], folder / "run")
    return open_run(folder / "run")


RUNS = {
    "without deep windows": without_windows,
    "without steps": without(STEPS.name),
    "without collectives": without(COLLECTIVES.name),
    "without telemetry, CPU only": without(COUNTERS.name),
    "without states of calls": without_call_states,
    "only steps": without(SPANS.name),
    "one GPU": one_gpu,
    "dumps": dumps,
    "nothing": empty_run,
}


@pytest.fixture(scope="module", params=RUNS)
def app(request, tmp_path_factory):
    return make_app(load(RUNS[request.param](tmp_path_factory.mktemp("run"))))


def parts(content: Any) -> Iterator[dict[str, Any]]:
    """All components within some content."""
    if isinstance(content, list):
        for each in content:
            yield from parts(each)
    elif isinstance(content, dict):
        if "props" in content:
            yield content
        yield from parts(content.get("props", content).get("children"))


def said_by(content: Any) -> str:
    """The text of a component, commands between backticks."""
    if isinstance(content, list):
        return "".join(map(said_by, content))
    if isinstance(content, str):
        return content
    said = said_by(content["props"]["children"])
    return f"`{said}`" if content["type"] == "Code" else said


def is_drawn(figure: dict[str, Any]) -> bool:
    """Whether anything of a figure can be seen."""
    values = [trace.get(axis) for trace in figure["data"] for axis in "xyz"]
    texts = [each["bdata"] if isinstance(each, dict) else each for each in values]
    return any(texts)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_a_view_shows_something_or_says_why_not(app, view):
    page = navigate(app, f"?view={view.name}")
    if view.title in dimmed(page):
        sentences = [each for each in parts(page["content"]["children"]) if each["type"] == "P"]
        (said,) = (said_by(each) for each in sentences)
        assert len(said) > 30
        assert said[:1].isupper()
        assert said.endswith((".", "`"))
        return
    for name, query in product(view.sections, ("", "&steps=900,902", "&ranks=77", "&steps=1,3&ranks=0")):
        content = json.loads(ask(app, name, f"?view={view.name}{query}"))["response"][name]["children"]
        assert content
        assert "defect" not in json.dumps(content)
        graphs = [
            each["props"] for each in parts(content) if each["type"] == "Graph" and each["props"]["figure"]
        ]
        assert all(is_drawn(each["figure"]) for each in graphs), name
        tables = [
            json.loads(each["props"]["data-tree"]) for each in parts(content) if each["type"] == "Table"
        ]
        assert all(body for table in tables for tag, _, body in table if tag == "tbody"), name


def test_a_matrix_is_offered_until_the_graph_shows_that_no_two_ranks_met(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        for step in range(2):
            run.call(1000 * step, 1000 * step + 5, step, rank=rank)
            run.nccl(1000 * step + 10, 1000 * step + 500, step, rank, group=f"{rank}")
            run.step(step, 1000 * step, 1000 * step + 990, rank=rank)
    loaded = load(run.write(tmp_path))
    app = make_app(loaded)
    assert "Matrix" not in dimmed(navigate(app, ""))
    assert loaded.built.graph.num_nodes
    page = navigate(app, "?view=matrix")
    assert "Matrix" in dimmed(page)
    assert "could not be matched" in json.dumps(page["content"])


def test_what_views_need_is_said_of_the_run_that_lacks_it(tmp_path):
    said = {}
    for name, make in RUNS.items():
        page = navigate(make_app(load(make(tmp_path / name))), "")
        said[name] = dimmed(page)
    of_windows = ["Timeline", "Kernels", "What if"]
    assert not set(said["without telemetry, CPU only"]) - {
        "Telemetry",
        "Hang",
        "Difference",
        "Runs",
        "Layout",
        "Plan",
        "Pipeline",
        "Fabric",
        "Goodput",
        "Serving",
    }
    assert {"Steps × ranks"} <= set(said["without steps"])
    assert {*of_windows, "Breakdown"} <= set(said["without deep windows"])
    assert {"Matrix", "Collectives", "Hang"} <= set(said["one GPU"])
    assert "Matrix" in said["without collectives"]
    assert "Hang" in said["without states of calls"]
    assert "Hang" not in said["dumps"]
    assert "Collectives" not in said["without states of calls"]
    assert {*of_windows, "Steps × ranks", "Collectives"} <= set(said["dumps"])
    assert "Verdict" in said["nothing"]
    assert len(said["nothing"]) == len(VIEWS)


def test_steps_without_a_time_are_named_where_steps_are_drawn(repository):
    hung = load(open_run(repository / "sample_traces" / "h200_hang"))
    said = "Not drawn: steps 1, 26-30, which no GPU timed."
    assert untimed_steps(hung.timed_steps) == said
    assert said in str(verdict.VIEW.sections["verdict-run"](hung, Link()))
    assert said in str(heatmap.VIEW.sections["heatmap-values"](hung, Link(options={"metric": "step"})))
    slow = load(open_run(repository / "sample_traces" / "slow_rank"))
    assert untimed_steps(slow.timed_steps) == ""
    assert timed_run(slow.run.path).steps == slow.steps["step"].n_unique() == 59  # in Runs as in Verdict
