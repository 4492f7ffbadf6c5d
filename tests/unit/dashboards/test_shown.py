"""A run that is still being recorded: later states replace earlier ones, and the browser polls for them."""

from __future__ import annotations

import json

import pytest

from dpro.cli.runs import is_live
from dpro.dashboards.app import make_app
from dpro.dashboards.command import copies, load
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded, RecordingCopy
from dpro.dashboards.runs import ShownRun
from dpro.dashboards.views.verdict import VIEW
from dpro.detect.findings import Finding
from dpro.detect.findings_log import BEGINS, FindingsLog, Notice, time_of_day
from dpro.detect.observations import observe
from dpro.errors import InputError
from dpro.schema import STEPS
from tests.builders import cpu_job

HOST = {"Host": "localhost"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return cpu_job().write(tmp_path_factory.mktemp("run"))


def refreshed(app, known, search=""):
    body = {
        "output": "..live.children...tick.disabled..",
        "outputs": [
            {"id": "live", "property": "children"},
            {"id": "tick", "property": "disabled"},
        ],
        "inputs": [{"id": "tick", "property": "n_intervals", "value": 3}],
        "state": [
            {"id": "url", "property": "search", "value": search},
            {"id": "version", "property": "data", "value": known},
        ],
        "changedPropIds": ["tick.n_intervals"],
    }
    answer = app.server.test_client().post("/_dash-update-component", json=body, headers=HOST)
    response, version = answer.json["response"], answer.json.get("sideUpdate", {}).get("version", {})
    return version.get("data"), response["live"]["children"], response["tick"]["disabled"]


def layout_and_wires(app):
    client = app.server.test_client()
    return [client.get(f"/_dash-{what}", headers=HOST).text for what in ("layout", "dependencies")]


def test_the_browser_asks_again_only_while_a_run_is_recorded(run):
    still, live = make_app(Loaded(run)), make_app(ShownRun(Loaded(run), iter(())))
    for text in layout_and_wires(still):
        assert "n_intervals" not in text
        assert '"version"' not in text
    layout, wires = layout_and_wires(live)
    assert '"interval"' in layout
    sections = [each for each in json.loads(wires) if each["output"] == "verdict-run.children"]
    assert [each["id"] for each in sections[0]["inputs"]] == ["link", "version"]
    assert [each["id"] for each in sections[0]["state"]] == ["url"]


def test_a_later_state_is_shown_once_it_is_there_and_the_last_one_ends_it(run):
    first, second, last = (Loaded(run) for _ in range(3))
    arrivals = []

    def later():
        for state in (second, last):
            arrivals.append((shown.loaded, shown.version, shown.lives))
            yield state

    shown = ShownRun(first, later())
    app = make_app(shown)
    assert refreshed(app, None) == (None, "recording", False)
    shown.follow()
    assert arrivals == [(first, 0, True), (second, 1, True)]
    assert shown.loaded is last
    assert refreshed(app, 1) == (2, "recorded", True)
    assert refreshed(app, 2) == (None, "recorded", True)


def test_a_run_that_cannot_be_opened_at_last_leaves_its_latest_copy(run, caplog):
    first, copy = Loaded(run), Loaded(run)

    def later():
        yield copy
        raise InputError("run: its tables cannot be written")

    shown = ShownRun(first, later())
    shown.follow()
    assert (shown.loaded, shown.version, shown.lives) == (copy, 1, False)
    assert "its tables cannot be written" in caplog.text


def test_sections_and_tables_are_of_the_latest_state(run, tmp_path_factory):
    shown = ShownRun(
        Loaded(run), iter([Loaded(cpu_job(num_steps=2).write(tmp_path_factory.mktemp("later")))])
    )
    client = make_app(shown).server.test_client()
    before = client.get("/csv/verdict/steps", headers=HOST).text
    shown.follow()
    assert client.get("/csv/verdict/steps", headers=HOST).text != before


def test_a_run_whose_job_is_over_has_one_state_and_is_not_live(run):
    assert not is_live(run.path)
    (state,) = copies(run.path)
    assert state == run


def test_a_finding_that_the_next_copy_does_not_show_is_withdrawn_with_time_and_reason(run):
    fill = VIEW.sections["verdict-findings"]
    states = [Loaded(run) for _ in range(4)]
    slow = Finding("slow.host", "rank", "1", (1,), 0.5, 0.9, 5e6, (observe("late", "evidence"),))
    for state, found in zip(states, ([slow], [], [], [slow])):
        state.values["verdict_on_hangs"] = found, []
        state.opened_ns = 10**18
    shown = ShownRun(states[0], iter(states[1:]))
    assert "withdrawn" not in str(fill(shown.loaded, Link()))
    shown.follow()
    step = run.table(STEPS)["step"].max()
    line = (
        f"slow host work: rank 1: withdrawn at {time_of_day(10**18)} because the steps up to {step} no longer"
    )
    assert line in str(fill(states[1], Link()))
    assert line in str(fill(states[2], Link()))
    assert "withdrawn" not in str(fill(states[3], Link()))  # found again


def test_copies_whose_findings_no_reader_asked_for_withdraw_nothing_and_lose_nothing(run):
    first, skipped, last = (Loaded(run) for _ in range(3))
    slow = Finding("slow.host", "rank", "1", (1,), 0.5, 0.9, 5e6, (observe("late", "evidence"),))
    first.values["verdict_on_hangs"], last.values["verdict_on_hangs"] = ([slow], []), ([], ["too few steps"])
    ShownRun(first, iter([skipped, last])).follow()
    assert not skipped.values
    (gone,) = last.withdrawn()
    assert (gone.finding, gone.why) == (slow, "it cannot be checked now: too few steps")


def test_a_refusal_of_a_selection_is_asked_for_again_with_each_copy(run):
    _, wires = layout_and_wires(make_app(ShownRun(Loaded(run), iter(()))))
    (refusal,) = [each for each in json.loads(wires) if "outside.children" in each["output"]]
    assert [each["id"] for each in refusal["inputs"]] == ["url", "version"]


def test_the_graph_of_a_passing_state_gets_no_place_in_the_cache(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path))
    monkeypatch.setattr("dpro.analysis.graphs.WORTH_SAVING", 0)
    passing = load(run, kind=RecordingCopy)
    assert passing.built.graph.num_nodes > 0
    assert not list(tmp_path.iterdir())
    assert load(run).built.graph.num_nodes == passing.built.graph.num_nodes
    assert list(tmp_path.rglob("*.npz"))


def test_the_first_view_lists_findings_reported_while_the_job_ran(tmp_path):
    run = cpu_job().write(tmp_path)
    finding = Finding("slow.host", "rank", "1", (1,), 0.2, 0.9, 5e6, (observe("late", "evidence"),))
    FindingsLog(tmp_path).write(Notice(BEGINS, 1, 10**18, 7, finding))
    section = str(VIEW.sections["verdict-findings"](load(run), Link()))
    assert "while it ran" in section
    assert "step 7: slow host work: rank 1" in section
