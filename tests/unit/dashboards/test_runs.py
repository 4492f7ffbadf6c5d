"""Several runs of one page: which are offered, which stay open, and that a link opens no other."""

from __future__ import annotations

import gc
import json
import re
import threading
from weakref import ref

import pytest

from dpro.cli.runs import latest_in, runs_in
from dpro.dashboards import command as dashboard
from dpro.dashboards import runs as module
from dpro.dashboards.app import make_app
from dpro.dashboards.command import load, names_of, offered_runs
from dpro.dashboards.runs import KEPT, OfferedRun, Runs, ShownRun
from dpro.errors import DproError, InputError, Unanswerable, UsageError
from tests.builders import cpu_job
from tests.unit.dashboards.test_app import HOST, ask, navigate
from tests.unit.dashboards.test_shown import refreshed


def options(page, name: str) -> list[dict]:
    """What a choice offers."""
    labels = [each["props"]["children"] for each in page["runs"]["children"]]
    (select,) = [each["props"] for _, each in labels if each["props"]["id"] == name]
    return [each["props"] for each in select["children"]]


def test_runs_beside_the_opened_one_are_offered_with_reasons_and_links_are_not(several):
    assert [each.name for each in several.offers()] == ["after", "before", "broken"]
    assert "not a run manifest" in several.offers()[2].why
    page = navigate(make_app(several), "?view=kernels")
    run, against = options(page, "pick-run"), options(page, "pick-against")
    assert [(each["value"], each["selected"], each["disabled"]) for each in run] == [
        ("", True, False), ("before", False, False), ("broken", False, True),
    ]  # fmt: skip
    assert run[2]["children"].startswith("broken (manifest.json: not a run manifest")
    assert [each["value"] for each in against] == ["", "before", "broken"]
    (pick,) = [each["props"]["children"][1]["props"] for each in page["runs"]["children"][:1]]
    assert pick["data-opened"] == "after"  # a copied link names it
    named = navigate(make_app(several), "?view=kernels&run=after")
    assert [each["selected"] for each in options(named, "pick-run")] == [True, False, False]
    assert page["run"] == {"children": "after", "title": several.opened.loaded.run.label}


@pytest.mark.parametrize(
    "name", ["link", "notes", "elsewhere", "../elsewhere", "/etc", "before/../before", "."]
)
def test_a_link_opens_no_run_that_is_not_offered(several, name):
    app = make_app(several)
    assert "is offered here" in ask(app, "verdict-run", f"?run={name}")
    assert "is offered here" in ask(app, "verdict-short", f"?against={name}")
    assert "is offered here" in json.dumps(navigate(app, f"?run={name}")["content"])
    client = app.server.test_client()
    for path in ("/csv/verdict/steps", "/timeline/lanes", "/timeline/find"):
        answer = client.get(f"{path}?find=x&run={name}", headers=HOST)
        assert answer.status_code == 400
        assert "is offered here" in answer.text


def test_a_damaged_run_is_refused_with_its_reason(several):
    assert "not a run manifest" in ask(make_app(several), "verdict-run", "?run=broken")


def test_sections_tables_and_timeline_are_of_the_run_that_the_link_names(several):
    app = make_app(several)
    client = app.server.test_client()
    tables = [
        client.get(f"/csv/verdict/steps?run={name}", headers=HOST).text for name in ("", "after", "before")
    ]
    assert tables[0] == tables[1] != tables[2]
    ends = [
        client.get(f"/timeline/lanes?run={name}", headers=HOST).json["end"]
        for name in ("", "after", "before")
    ]
    assert ends[0] == ends[1] != ends[2]
    assert navigate(app, "?run=before")["run"]["children"] == "before"


def test_a_second_run_is_drawn_beside_the_first(several):
    app = make_app(several)
    alone, both = (ask(app, "verdict-short", f"?against={name}") for name in ("", "before"))
    assert alone.count("The usual step takes") == 1
    assert both.count("The usual step takes") == 2
    ranges = re.findall(r'"range": ?\[0, ?([\d.]+)\], ?"visible"', both.replace("\\", ""))
    assert len(ranges) >= 2
    assert len({*ranges[:2]}) == 1  # one scale
    assert "median of the other run" in ask(app, "verdict-run", "?against=before")
    assert "breakdown-rank-other" in ask(app, "breakdown-rank", "?view=breakdown&against=before")
    assert "breakdown-rank-other" not in ask(app, "breakdown-rank", "?view=breakdown")
    assert "difference" in ask(app, "difference-summary", "?view=difference&against=before")
    assert "choose another run" in ask(app, "difference-summary", "?view=difference")


def test_few_runs_stay_open_and_a_closed_one_is_opened_again(tmp_path):
    run = cpu_job().write(tmp_path / "run")
    opened = []

    def show(each):
        opened.append(each.name)
        return ShownRun(load(run))

    offers = [OfferedRun(name, str(tmp_path / name)) for name in "abcd"]
    runs = Runs(ShownRun(load(run)), "a", lambda: offers, show)
    first = runs.loaded("b")
    assert runs.loaded("b") is first
    assert runs.loaded("a") is runs.loaded("")
    assert [runs.loaded(name).others("b") is first for name in "c"] == [True]
    runs.loaded("d")
    assert len(runs._open) == KEPT
    runs.loaded("c")
    assert opened == ["b", "c", "d", "c"] or KEPT > 2
    assert runs.loaded("b") is not first


def test_a_run_that_takes_long_to_open_is_answered_and_goes_on_opening(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    run, go_on = cpu_job().write(tmp_path / "run"), threading.Event()

    def show(_each):
        go_on.wait(60)
        return ShownRun(load(run))

    runs = Runs(ShownRun(load(run)), "a", lambda: [OfferedRun("a", ""), OfferedRun("b", "")], show)
    with pytest.raises(Unanswerable, match="still being opened"):
        runs.loaded("b")
    app = make_app(runs)
    assert "still being opened" in json.dumps(navigate(app, "?run=b")["content"])
    assert refreshed(app, 0, "?run=b") == (-1, "", False)
    assert refreshed(app, -1, "?run=b") == (None, "", False)
    go_on.set()
    monkeypatch.setattr(module, "PATIENCE_S", 60)
    assert runs.loaded("b").run == run
    assert refreshed(app, -1, "?run=b") == (0, "", True)
    assert "still being opened" not in json.dumps(navigate(app, "?run=b")["content"])


def test_a_run_that_could_not_be_opened_is_tried_again(tmp_path):
    run, failures = cpu_job().write(tmp_path / "run"), [InputError("damaged")]

    def show(_each):
        if failures:
            raise failures.pop()
        return ShownRun(load(run))

    runs = Runs(ShownRun(load(run)), "a", lambda: [OfferedRun("a", ""), OfferedRun("b", "")], show)
    with pytest.raises(InputError, match="damaged"):
        runs.loaded("b")
    assert runs.loaded("b").run == run


def test_a_closed_run_is_followed_no_longer(tmp_path):
    run = cpu_job().write(tmp_path / "run")
    shown = ShownRun(load(run), iter([load(run), load(run)]))
    shown.leave()
    shown.follow()
    assert (shown.version, shown.lives) == (0, False)


def test_a_folder_of_runs_shows_the_latest_and_offers_all(folder):
    runs = offered_runs([str(folder)])
    assert runs.name in ("after", "before")
    assert sorted(each.name for each in runs.offers()) == ["after", "before", "broken"]
    assert latest_in(folder / "after") is None
    assert [each.name for each in runs_in(folder)] == ["after", "before", "broken"]


def test_a_run_to_compare_with_is_in_the_first_link_and_one_given_twice_is_refused(folder):
    runs = offered_runs([str(folder / "after")], str(folder / "before"))
    assert runs.against == "before"
    assert module.first_link(runs) == "?against=before"
    assert names_of(["x/run", "y/run", "z"]) == {"x/run": "x/run", "y/run": "y/run", "z": "z"}
    with pytest.raises(UsageError, match="twice"):
        offered_runs([str(folder / "after")] * 2)
    with pytest.raises(DproError, match="not a run manifest"):
        offered_runs([str(folder / "after"), str(folder / "broken")])


def test_a_run_that_is_being_recorded_is_offered_as_such_and_the_page_then_polls(folder, monkeypatch):
    monkeypatch.setattr(dashboard, "is_live", lambda path: path.name == "broken")
    runs = offered_runs([str(folder / "after")])
    app = make_app(runs)
    (live,) = [each for each in options(navigate(app, ""), "pick-run") if each["value"] == "broken"]
    assert (live["children"], live["disabled"]) == ("broken (being recorded)", False)
    layout = app.server.test_client().get("/_dash-layout", headers=HOST).text
    assert '"n_intervals"' not in layout
    assert '"disabled":true' in layout.replace(" ", "")  # nothing of what is shown is being recorded


def test_a_closed_run_is_let_go(tmp_path):
    run = cpu_job().write(tmp_path / "run")
    offers = [OfferedRun(name, "") for name in "abcd"]
    runs = Runs(ShownRun(load(run)), "a", lambda: offers, lambda _each: ShownRun(load(run)))
    closed = runs.loaded("b")
    assert not closed.breakdown.is_empty()
    runs.loaded("a").difference_from(closed)
    known = ref(closed)
    del closed
    for name in "cdc":
        runs.loaded(name)
    gc.collect()
    assert known() is None


def test_a_chosen_run_that_is_being_recorded_shows_its_latest_copy(tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    done, first = cpu_job().write(folder / "done"), cpu_job(num_steps=2).write(tmp_path / "first")
    last = cpu_job(num_steps=3).write(tmp_path / "last")
    (folder / "live" / ".recording").mkdir(parents=True)
    (folder / "live" / "manifest.json").write_text("{")
    go_on = threading.Event()

    def copies(_path):
        yield first
        go_on.wait(60)
        yield last

    monkeypatch.setattr(dashboard, "copies", copies)
    monkeypatch.setattr(dashboard, "is_live", lambda path: path.name == "live")
    runs = offered_runs([str(done.path)])
    app = make_app(runs)
    assert [(each.name, each.lives, each.why) for each in runs.offers()] == [
        ("done", False, ""), ("live", True, ""),
    ]  # fmt: skip
    assert runs.loaded("live").steps["step"].n_unique() == 2
    assert refreshed(app, 0, "?run=live") == (None, "recording", False)
    assert refreshed(app, 0, "?against=live") == (None, "", False)
    go_on.set()
    shown = runs.shown("live")
    while shown.lives:
        threading.Event().wait(0.01)
    assert runs.loaded("live").steps["step"].n_unique() == 3
    assert refreshed(app, 0, "?run=live") == (1, "recorded", True)
    assert refreshed(app, 1, "") == (0, "", True)
