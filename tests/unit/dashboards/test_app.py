"""The application as a browser asks it, without one."""

from __future__ import annotations

import json
from io import BytesIO

import polars as pl
import pytest

from dpro.cli.dashboard import load
from dpro.dashboards import serve
from dpro.dashboards.app import VIEWS, in_csv, make_app, view_of
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.errors import UsageError
from dpro.ingest.importer import import_sources
from dpro.schema import STEPS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from tests.builders import cpu_job
from tests.reference.hanging_jobs import dumps_of_a_stuck_host

HOST = {"Host": "localhost"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Loaded:
    run = cpu_job().write(tmp_path_factory.mktemp("run"))
    return load(run, run)


@pytest.fixture(scope="module")
def app(loaded):
    return make_app(loaded)


@pytest.fixture(scope="module")
def stepless(tmp_path_factory):
    """A recording of which no deep window was kept."""
    folder = tmp_path_factory.mktemp("stepless")
    rows = pl.DataFrame({"rank": [0, 0], "step": [0, 1], "start_ns": [0, 5], "duration_ns": [5, 6]})
    write_part(folder, STEPS, "rank0", conform(STEPS, rows.with_columns(window=-1)))
    write_manifest(folder, Manifest(world_size=1, ranks=[0]))
    return make_app(load(open_run(folder)))


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """Dumps of a flight recorder of a job that hangs: calls, and nothing else."""
    folder = dumps_of_a_stuck_host(tmp_path_factory.mktemp("hung"))
    import_sources([folder], folder / "run")
    return make_app(load(open_run(folder / "run")))


def ask(app, name: str, query: str) -> str:
    """What fills a section for a link, as text."""
    body = {
        "output": f"{name}.children",
        "outputs": {"id": name, "property": "children"},
        "inputs": [{"id": "url", "property": "search", "value": query}],
        "changedPropIds": ["url.search"],
    }
    answer = app.server.test_client().post("/_dash-update-component", json=body, headers=HOST)
    assert answer.status_code in (200, 204), answer.text
    return answer.text


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_every_section_of_every_view_fills_or_says_why_not(app, stepless, hung, view):
    for name in view.sections:
        for each in (app, stepless, hung):
            for query in ("", "&steps=1&ranks=0", "&steps=900", "&ranks=77", "&theme=dark"):
                text = ask(each, name, f"?view={view.name}{query}")
                assert "defect" not in text
                assert json.loads(text)["response"][name]["children"]


def test_dumps_of_a_job_that_hangs_are_told_as_diagnose_tells_them(hung):
    for name in ("verdict-findings", "hang-verdict"):
        assert "its host code is stuck" in ask(hung, name, f"?view={name.partition('-')[0]}")


def test_a_section_of_another_view_is_left_alone(app):
    for view in VIEWS[1:]:
        assert ask(app, next(iter(view.sections)), "?view=verdict") == ""


def test_a_link_that_makes_no_sense_is_answered_in_words(app):
    assert "not understood" in ask(app, "verdict-run", "?steps=abc")
    with pytest.raises(UsageError, match="no view 'nowhere'"):
        view_of(Link(view="nowhere"))


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_every_table_downloads_as_csv_and_parquet(app, view):
    client = app.server.test_client()
    for name in view.tables.keys() - {"roofline"}:  # needs a GPU: `test_roofline` has one
        answer = client.get(f"/csv/{view.name}/{name}?ranks=0", headers=HOST)
        assert answer.mimetype == "text/csv", answer.text
        columns = answer.text.splitlines()[0].split(",")
        assert len(columns) > 1
        answer = client.get(f"/parquet/{view.name}/{name}?ranks=0", headers=HOST)
        assert pl.read_parquet(BytesIO(answer.data)).columns == columns


@pytest.mark.parametrize(
    "path",
    [
        "/csv/verdict/nothing",
        "/parquet/verdict/nothing",
        "/exe/verdict/steps",
        "/csv/../manifest.json",
        "/csv/verdict/..%2f..%2fmanifest.json",
        "/assets/../app.py",
        "/assets/..%2fapp.py",
        "/manifest.json",
        "/_mcp",
    ],
)
def test_no_file_can_be_reached(app, path):
    answer = app.server.test_client().get(path, headers=HOST)
    assert answer.status_code == 404 or "dash-renderer" in answer.text  # the page itself, for any address
    assert "world_size" not in answer.text
    assert "make_app" not in answer.text


def test_lists_and_formulas_are_harmless_in_csv():
    frame = pl.DataFrame({"name": ["=1+1", None], "ranks": [[0, 2], []]})
    assert in_csv(frame) == 'name,ranks\n\'=1+1,0 2\n,""\n'


def test_the_first_page_waits_for_nothing(loaded):
    fresh = load(loaded.run)
    page = make_app(fresh).server.test_client().get("/_dash-layout", headers=HOST)
    assert page.status_code == 200
    assert fresh.known == {}


def test_another_machine_needs_a_token_that_is_new_each_time(loaded):
    addresses = []
    for _ in range(2):
        server, address = serve.listen(loaded, "0.0.0.0", 0)
        server.server_close()
        addresses.append(address.partition("?token=")[2])
    assert all(len(token) >= 32 for token in addresses)
    assert addresses[0] != addresses[1]
    server, address = serve.listen(loaded, "127.0.0.1", 0)
    try:
        assert "token" not in address
        with pytest.raises(UsageError, match="--port"):
            serve.listen(loaded, "127.0.0.1", server.server_port)
    finally:
        server.server_close()


def test_a_link_keeps_the_selection_from_view_to_view(app):
    assert parse_link(Link(ranks=(1,), steps=(0, 2)).query(view="timeline")).ranks == (1,)
