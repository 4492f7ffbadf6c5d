"""The application's requests and responses, without a browser."""

from __future__ import annotations

import html
import json
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from io import BytesIO
from typing import Any

import polars as pl
import pytest
from dash import dcc
from dash import html as components

from dpro.dashboards import app as pages
from dpro.dashboards import server
from dpro.dashboards.app import VIEWS, in_csv, make_app, notes_on_selection, view_of
from dpro.dashboards.command import load
from dpro.dashboards.guard import MAX_BODY_BYTES, cookie_of, hash_of
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import MAX_ROWS, table, with_code, write_by_script
from dpro.dashboards.runs import ShownRun
from dpro.errors import UsageError
from dpro.ingest.importer import import_sources
from dpro.schema import STEPS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from tests.builders import cpu_job
from tests.reference.hanging_dumps import dumps_of_a_stuck_host

HOST = {"Host": "localhost"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Loaded:
    return load(cpu_job().write(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def app(loaded):
    return make_app(loaded)


@pytest.fixture(scope="module")
def stepless(tmp_path_factory):
    """A recording without deep windows."""
    folder = tmp_path_factory.mktemp("stepless")
    rows = pl.DataFrame({"rank": [0, 0], "step": [0, 1], "start_ns": [0, 5], "duration_ns": [5, 6]})
    write_part(folder, STEPS, "rank0", conform(STEPS, rows.with_columns(window=-1)))
    write_manifest(folder, Manifest(world_size=1, ranks=[0]))
    return make_app(load(open_run(folder)))


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """Dumps of the flight recorder of a job that hangs: calls and no other data."""
    folder = dumps_of_a_stuck_host(tmp_path_factory.mktemp("hung"))
    import_sources([folder], folder / "run")
    return make_app(load(open_run(folder / "run")))


def ask(app, name: str, query: str) -> str:
    """Return the content of a section for a link, as text."""
    body = {
        "output": f"{name}.children",
        "outputs": {"id": name, "property": "children"},
        **{
            wires: [each | {"value": query} for each in app.callback_map[f"{name}.children"][wires]]
            for wires in ("inputs", "state")
        },
        "changedPropIds": ["link.data"],
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


def test_dumps_of_a_job_that_hangs_have_the_verdict_of_diagnose(hung):
    for name in ("verdict-findings", "hang-verdict"):
        assert "its host code has not reached" in ask(hung, name, f"?view={name.partition('-')[0]}")


def test_the_first_page_of_a_hang_says_who_hangs_how_sure_that_is_and_why_nothing_has_a_gain(hung):
    short = ask(hung, "verdict-short", "?view=verdict")
    assert "The job is stuck. Rank " in short
    assert "its host code has not reached" in short
    assert "confidence 0." in ask(hung, "verdict-trust", "?view=verdict")
    advice = ask(hung, "verdict-advice", "?view=verdict")
    assert "the job hung, and has no step to shorten" in advice
    assert "cannot model" not in advice


def navigate(app, query: str, shown: Any = None, changed: str = "url.search") -> dict[str, Any]:
    """What the page consists of for a link: the navigation, and the content of the view."""
    (output,) = (each for each in app.callback_map if "nav.children" in each)
    names = [dict(zip(("id", "property"), each.split("."))) for each in output.strip(".").split("...")]
    body = {
        "output": output,
        "outputs": names,
        "inputs": [each | {"value": query} for each in app.callback_map[output]["inputs"]],
        "state": [
            each | {"value": shown if each["id"] == "shown" else ""}
            for each in app.callback_map[output]["state"]
        ],
        "changedPropIds": [changed],
    }
    answer = app.server.test_client().post("/_dash-update-component", json=body, headers=HOST)
    return answer.json["response"]


def dimmed(page) -> list[str]:
    """The views that the menu lists, since the run has no data for them."""
    return [inside[-1] for _, _, inside in in_menu(page)]


def written(component) -> list[Any]:
    """What the page's script writes into a component."""
    return json.loads(component["props"]["data-tree"])


def in_menu(page) -> list[Any]:
    """The links in the menu, each of which has its reason."""
    listed = written(page["more"]["children"][1]) if page["more"]["children"] else []
    assert all(why for _, _, why in listed[1::2])
    return [link for _, _, (link,) in listed[::2]]


def tabs(page) -> list[str]:
    return [inside[-1] for _, _, inside in written(page["nav"]["children"])]


def test_a_link_without_a_view_shows_the_hang_of_a_job_that_hangs_and_else_the_verdict(app, hung):
    assert navigate(hung, "")["title"]["children"] == "Hang"
    assert "its host code has not reached" in ask(hung, "hang-verdict", "")
    assert navigate(hung, "?view=verdict")["title"]["children"] == "Verdict"
    assert navigate(app, "")["title"]["children"] == "Verdict"
    (_, first, _), *_ = written(navigate(hung, "")["nav"]["children"])
    assert first["href"] == "?view=verdict"


def test_views_without_anything_to_show_are_in_the_menu_and_say_one_sentence(app, stepless, loaded):
    page = navigate(stepless, "?view=telemetry")
    assert dimmed(page) == [
        "Breakdown", "Timeline", "Collectives", "Matrix", "Kernels", "What if", "Telemetry", "Hang",
        "Difference", "Layout", "Pipeline", "Runs", "Fabric", "Goodput", "Plan", "Serving",
    ]  # fmt: skip
    assert tabs(page) == ["Verdict", "Steps × ranks", "Query"]
    assert page["shown"]["data"]["view"] == "telemetry"
    content = page["content"]["children"]["props"]
    assert content["className"] == "panel wide"
    assert json.dumps(content).count("No telemetry was sampled") == 1
    without = [
        "Telemetry",
        "Hang",
        "Difference",
        "Layout",
        "Pipeline",
        "Runs",
        "Fabric",
        "Goodput",
        "Plan",
        "Serving",
    ]
    assert dimmed(navigate(app, "")) == without
    recorded = navigate(make_app(ShownRun(loaded, iter(()))), "?view=telemetry")
    assert dimmed(recorded) == []
    assert tabs(recorded) == [view.title for view in VIEWS]


def test_a_view_that_was_asked_for_as_the_run_changed_is_shown(loaded):
    app = make_app(ShownRun(loaded, iter(())))
    shown = navigate(app, "?view=kernels")["shown"]["data"]
    assert navigate(app, "?view=kernels", shown, "version.data").keys() == {"outside"}
    assert "whatif-form" in json.dumps(navigate(app, "?view=whatif", shown, "version.data")["content"])


def test_a_selection_leaves_all_that_surrounds_the_view_as_it_is(app):
    shown = navigate(app, "?view=kernels")["shown"]["data"]
    assert navigate(app, "?steps=1&view=kernels", shown).keys() == {"steps", "title", "outside"}
    other = navigate(app, "?view=verdict", shown)
    assert other.keys() == {"content", "shown", "title", "outside"}
    assert navigate(app, "", other["shown"]["data"]).keys() == other.keys()  # sections begin again


def test_a_section_of_another_view_is_left_alone(app):
    for view in VIEWS[1:]:
        assert ask(app, next(iter(view.sections)), "?view=verdict") == ""


def test_a_link_that_makes_no_sense_is_answered_in_words(app):
    assert "are invalid" in ask(app, "verdict-run", "?steps=abc")
    with pytest.raises(UsageError, match="no view 'nowhere'"):
        view_of(Link(view="nowhere"))


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_every_table_downloads_as_csv_and_parquet(several, view):
    client = make_app(several).server.test_client()
    # They need a GPU, a topology, a query: `test_roofline`, `test_fabric` and `test_query` have them.
    for name in view.tables.keys() - {"roofline", "cables", "rows"}:
        answer = client.get(f"/csv/{view.name}/{name}?ranks=0&against=before", headers=HOST)
        assert answer.mimetype == "text/csv", answer.text
        columns = answer.text.splitlines()[0].split(",")
        assert len(columns) > 1
        answer = client.get(f"/parquet/{view.name}/{name}?ranks=0&against=before", headers=HOST)
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
    texts = pl.DataFrame(
        {"lists": [["=a", "b"]], "odd": [" \t@b"], "kind": pl.Series(["-c"], dtype=pl.Categorical)}
    )
    assert in_csv(texts) == "lists,odd,kind\n'=a b,' \t@b,'-c\n"
    assert in_csv(pl.DataFrame({"x": [-1.5], "y": [True]})) == "x,y\n-1.5,true\n"


def test_the_first_page_waits_for_nothing(loaded):
    fresh = load(loaded.run)
    page = make_app(fresh).server.test_client().get("/_dash-layout", headers=HOST)
    assert page.status_code == 200
    assert fresh.values == {}


def test_a_token_is_new_each_time_and_in_the_address_alone(loaded):
    token = server.new_token()
    assert len(token) >= 32
    assert token != server.new_token()
    listening, address = server.listen(loaded, "127.0.0.1", 0, token)
    try:
        assert address == f"http://127.0.0.1:{listening.server_port}/?token={token}"
        with pytest.raises(UsageError, match="--port"):
            server.listen(loaded, "127.0.0.1", listening.server_port, None)
    finally:
        listening.server_close()


def test_a_connection_too_many_waits_until_another_is_closed(loaded, monkeypatch):
    """Else a server without descriptors left prints a traceback for each, and asks for the next at once."""
    monkeypatch.setattr(server, "most_at_once", lambda: 2)
    listening, _ = server.listen(loaded, "127.0.0.1", 0, None)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        silent = [socket.create_connection(listening.server_address) for _ in range(2)]
        for connection in silent:
            connection.sendall(b"GET /_reload-hash HTTP/1.1\r\n")
        with socket.create_connection(listening.server_address) as waiting:
            waiting.sendall(b"GET /_dash-layout HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            waiting.settimeout(0.3)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
            silent[0].close()
            waiting.settimeout(60)
            assert waiting.recv(12) == b"HTTP/1.1 200"
        silent[1].close()
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def test_fewer_connections_are_answered_where_a_process_may_have_few_descriptors():
    asked = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))\n"
        "from dpro.dashboards.server import most_at_once\n"
        "print(most_at_once(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["80", "256", "256"]


def test_a_browser_is_led_in_by_a_file_that_only_its_user_can_read():
    with server.way_in("http://127.0.0.1:1/?token=a&b") as file:
        assert file.stat().st_mode & 0o777 == 0o600
        assert "url=http://127.0.0.1:1/?token=a&amp;b" in file.read_text()
    assert not file.exists()


@pytest.mark.parametrize(
    "path",
    [
        "/", "/anything", "/_dash-layout", "/_dash-dependencies", "/assets/dpro.js", "/assets/dpro.css",
        "/_dash-component-suites/dash/deps/react@18.3.1.min.js", "/csv/kernels/kernels", "/span",
        "/_favicon.ico", "/_reload-hash",
    ],
)  # fmt: skip
def test_without_the_token_nothing_is_answered(loaded, path):
    client = make_app(loaded, "a-token").server.test_client()
    for answer in (client.get(path), client.post(path), client.get(f"{path}?token=wrong"), client.head(path)):
        assert answer.status_code == 403
    assert client.post("/_dash-update-component", data="x" * (MAX_BODY_BYTES + 1)).status_code == 403


@pytest.mark.parametrize("path", ["/a%0d%0aSet-Cookie:%20x=y", "//other.example/", "/%ff%00"])
def test_the_token_is_exchanged_at_any_path_of_this_host_alone(loaded, path):
    answer = make_app(loaded, "a-token").server.test_client().get(f"{path}?token=a-token")
    assert answer.status_code == 302
    place = answer.headers["Location"]
    assert place.isprintable()
    assert place.startswith("/")
    assert not place.startswith("//")
    assert [cookie.split("=")[0] for cookie in answer.headers.getlist("Set-Cookie")] == [cookie_of("a-token")]


CALLBACKS = "/_dash-update-component"
WHOLE = {
    "output": "verdict-run.children",
    "outputs": {"id": "verdict-run", "property": "children"},
    "inputs": [{"id": "link", "property": "data"}],
    "state": [{"id": "url", "property": "search", "value": "?view=verdict"}],
    "changedPropIds": ["link.data"],
}
URL = {"id": "url", "property": "search"}


@pytest.mark.parametrize(
    "changed",
    [
        {"output": None}, {"output": []}, {"output": "nothing.children"}, {"output": ""}, {"output": "...."},
        {"outputs": None}, {"outputs": []}, {"outputs": [1]}, {"outputs": URL},
        {"outputs": [WHOLE["outputs"]] * 2}, {"inputs": None}, {"inputs": []}, {"inputs": {}},
        {"inputs": [None]}, {"inputs": [[URL]]}, {"state": [URL | {"value": 5}]},
        {"state": [URL | {"value": ["?"]}]},
        {"state": [URL | {"id": {"a": 1}}]}, {"state": [URL] * 2}, {"state": 5}, {"inputs": [URL]},
        {"changedPropIds": 5}, {"changedPropIds": [[]]}, {"changedPropIds": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_callback_that_no_page_sends_is_a_bad_request(app, caplog, changed):
    answer = app.server.test_client().post(CALLBACKS, json=WHOLE | changed, headers=HOST)
    assert answer.status_code == 400
    assert caplog.text == ""


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b"[" * 100_000, b"1" * 100_000, b'{"output": NaN}'],
)
def test_a_body_that_is_no_callback_at_all_is_a_bad_request(app, caplog, body):
    client = app.server.test_client()
    answer = client.post(CALLBACKS, data=body, headers=HOST, content_type="application/json")
    assert answer.status_code == 400
    assert client.post(CALLBACKS, data=body, headers=HOST).status_code == 415
    assert caplog.text == ""


def test_a_body_that_is_too_long_is_refused_unread(app):
    long = json.dumps(WHOLE | {"more": "x" * MAX_BODY_BYTES})
    client = app.server.test_client()
    assert client.post(CALLBACKS, data=long, headers=HOST, content_type="application/json").status_code == 413
    assert client.post(CALLBACKS, json=WHOLE, headers=HOST).status_code == 200


ODD = (
    "steps=" + "9" * 5000,
    "ranks=99999999999999999999",
    "steps=5-3",
    "ranks=0--1",
    "time=nan~1",
    "node=" + "1" * 5000,
)


@pytest.mark.parametrize(
    "query", [*ODD, "ranks=\xff", "by=%00&sort=x&filter=(", "edit=%0A%0A:", "theme=</script>"]
)
def test_links_that_make_no_sense_are_no_defects(app, caplog, query):
    client = app.server.test_client()
    navigate = next(output for output in app.callback_map if "nav.children" in output)
    parts = [dict(zip(("id", "property"), each.split("."))) for each in navigate.strip(".").split("...")]
    search, state = URL | {"value": f"?view=kernels&{query}"}, app.callback_map[navigate]["state"]
    body = {"output": navigate, "outputs": parts, "inputs": [search], "state": state}
    assert client.post(CALLBACKS, json=body, headers=HOST).status_code == 200
    for view in VIEWS:
        for name in view.tables.keys() - {"roofline"}:
            assert client.get(f"/csv/{view.name}/{name}?{query}", headers=HOST).status_code in (200, 400)
    assert client.get(f"/span?{query}&x=1e400&y=nan&near=-1", headers=HOST).status_code == 200
    assert client.get("/_dash-component-suites/nothing/x.js", headers=HOST).status_code == 404
    assert caplog.text == ""


def test_the_path_of_a_run_is_text_wherever_it_is_shown(tmp_path):
    evil = "</title><script>alert(1)<script>{%config%}\x1b"
    run = cpu_job().write(tmp_path / "run")
    app = make_app(load(replace(run, source=tmp_path / evil)))
    page = app.server.test_client().get("/", headers=HOST).text
    title = page[page.index("<title>") + 7 : page.index("</title>")]
    assert html.unescape(title).endswith("</title><script>alert(1)<script>{%config%}\\x1b")
    assert page.count("<title>") == page.count("</title>") == 1
    assert "alert(1)<" not in page


def test_all_scripts_within_the_page_are_known_by_their_hash(app):
    answer = app.server.test_client().get("/", headers=HOST)
    within = re.findall(
        r"<script(?![^>]*src=)(?![^>]*application/json)[^>]*>(.*?)</script>", answer.text, re.DOTALL
    )
    assert len(within) == 2
    for script in within:
        assert hash_of(script) in answer.headers["Content-Security-Policy"]
    assert not re.search(r"<[^>]*\son\w+=", answer.text)


def test_a_link_keeps_the_selection_from_view_to_view(app):
    assert parse_link(Link(ranks=(1,), steps=((0, 2),)).query(view="timeline")).ranks == (1,)


def test_a_selection_that_the_run_does_not_have_is_answered(loaded):
    assert "No selected rank was recorded" in notes_on_selection(loaded, Link(ranks=(900,)))
    assert "No selected step was recorded" in notes_on_selection(loaded, Link(steps=((900, 901),)))
    assert notes_on_selection(loaded, Link(steps=((1, 1), (900, 901)), ranks=(0, 900))) == ""


def test_selected_steps_that_were_not_recorded_in_depth_are_named_with_those_that_were(repository):
    run = load(open_run(repository / "sample_traces" / "slow_rank"))
    were = "not recorded in depth; 5-7, 30-32, 55-57 were."
    assert notes_on_selection(run, Link(steps=((10, 20),))) == f"Steps 10-20 were {were}"
    assert notes_on_selection(run, Link(steps=((8, 8),))) == f"Step 8 was {were}"
    assert notes_on_selection(run, Link(steps=((7, 20),))) == ""


def test_a_table_has_as_many_rows_as_a_browser_can_bear_and_says_how_many_it_leaves_out():
    body = table(["name", "count"], [[f"kernel {number}", number] for number in range(1000)]).children[1]
    assert len(body.children) == MAX_ROWS + 1
    assert body.children[-1].children.children == f"{1000 - MAX_ROWS} more: the CSV has them"


def test_what_texts_have_between_backticks_is_shown_as_code():
    text = components.Li("see `dmesg | grep -i xid`, and the other")
    single, typed = components.P("a ` b"), components.Pre("`as it is`")
    shown = with_code(components.Div([text, single, typed, "`dpro try` measures it"]))
    said, alone, kept, command, rest = shown.children
    assert [part if isinstance(part, str) else part.children for part in said.children] == [
        "see ",
        "dmesg | grep -i xid",
        ", and the other",
    ]
    assert isinstance(said.children[1], components.Code)
    assert (alone.children, kept.children) == ("a ` b", "`as it is`")
    assert (command.children, rest) == ("dpro try", " measures it")
    assert with_code(shown) is shown


def test_what_has_no_identity_is_one_component_whose_parts_the_script_writes_as_text():
    cell = dcc.Link("<b>", href="?view=kernels", className="name")
    made = write_by_script([table(["name", "n"], [[cell, 3]]), components.P("plain")])
    assert [part.children for part in made] == [None, "plain"]
    _, [_, _, [row]] = json.loads(getattr(made[0], "data-tree"))
    link = ["a", {"href": "?view=kernels", "className": "name"}, ["<b>"]]
    assert row == ["tr", {}, [["td", {"className": ""}, [link]], ["td", {"className": "number"}, ["3"]]]]


def test_what_has_an_identity_or_is_a_figure_stays_a_component_and_what_is_beside_it_does_not():
    button = components.Button("predict", id="predict")
    rest = components.P([components.B("a"), ["b", [components.I("c")]], None])
    made = write_by_script(components.Div([button, dcc.Graph(figure={}), rest]))
    assert made.children[0] is button
    assert isinstance(made.children[1], dcc.Graph)
    written = [["b", {}, ["a"]], "b", ["i", {}, ["c"]]]
    assert json.loads(getattr(made.children[2], "data-tree")) == written


@pytest.mark.parametrize("bring", [-5, 3])
def test_extensions_may_bring_any_number_of_views(bring, monkeypatch):
    views = pages.VIEWS[:bring] if bring < 0 else (*pages.VIEWS, *pages.VIEWS[-1:] * bring)
    monkeypatch.setattr(pages, "VIEWS", views)
    links, others = pages._navigation({view.name: "" for view in views})
    assert len(links.children) == len(views)
    keys = [getattr(link, "data-press", "") for link in links.children]
    assert keys[:9] == list("123456789")
    assert keys[19:] == [""] * max(len(views) - 19, 0)
    assert not others
    assert len(pages._help()[-1].children) == min(len(views), 19)
