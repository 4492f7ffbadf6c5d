"""The requests of the timeline, without a browser."""

from __future__ import annotations

import json
import time

import numpy as np
import polars as pl
import pytest

from dpro.dashboards.app import make_app
from dpro.dashboards.command import load
from dpro.dashboards.links import Link
from dpro.dashboards.theme import SPAN_LOOKS
from dpro.dashboards.timeline.measured import BackgroundResult, make_replayed
from dpro.dashboards.timeline.routes import lane_info, parse_viewport
from dpro.dashboards.views.timeline import VIEW
from dpro.errors import UsageError
from dpro.replay.timeline import replay, step_ends
from dpro.store import open_run
from dpro.units import format_duration
from tests.builders import BACKWARD, TinyRun, gpu_job

HOST = {"Host": "localhost"}
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    made = load(gpu_job().write(tmp_path_factory.mktemp("run")))
    made.measured.all()
    return made


@pytest.fixture(scope="module")
def client(loaded):
    return make_app(loaded).server.test_client()


def _ask(client, path: str):
    return client.get(f"/timeline/{path}", headers=HOST)


def _view(client, **query) -> dict:
    """Decode a viewport as the page does."""
    text = "&".join(f"{name}={value}" for name, value in query.items())
    answer = _ask(client, f"view?{text}")
    assert answer.status_code == 200, answer.data
    size = int.from_bytes(answer.data[:4], "little")
    head, at, found = json.loads(answer.data[4 : 4 + size]), 4 + size, {}
    for name, dtype in head["arrays"]:
        found[name] = np.frombuffer(answer.data, dtype, head["count"], at)
        at += -(-found[name].nbytes // 4) * 4
    assert at == len(answer.data)
    return found | {"names": {int(code): text for code, text in head["names"].items()}}


def _all_rows(info: dict) -> str:
    ranks = [each for each in info["ranks"] if each["side"] == "m"]
    return ";".join(f"m{rank['rank']}.0-{rank['lanes'][-1][3]}" for rank in ranks)


def test_lanes_are_there_without_a_graph(loaded, client):
    info = _ask(client, "lanes").json
    assert info["complete"]
    assert info["spans"] == 2 * len(loaded.spans.filter(rank=0))
    assert [rank["rank"] for rank in info["ranks"]] == [0, 1]
    labels = [lane[0] for lane in info["ranks"][0]["lanes"]]
    assert labels[:2] == ["stream 20 (NCCL)", "stream 7 (compute)"]
    assert "main thread" in labels
    assert [step[1] for step in info["steps"]] == [0, 1, 2]
    assert info["replay"]["automatic"]
    assert info["ranks"][1]["late"] > info["ranks"][0]["late"]  # rank 1 comes last


def test_lanes_are_kept_whose_names_fit_an_expression_and_all_where_it_is_none(client):
    def kept(pattern):
        info = _ask(client, f"lanes?tracks={pattern}").json
        lanes = [(rank["rank"], lane[0], lane[-1]) for rank in info["ranks"] for lane in rank["lanes"] or ()]
        return {(rank, label) for rank, label, is_kept in lanes if is_kept}, len(lanes), info["unfiltered"]

    every, count, why = kept("")
    assert (len(every), why) == (count, "")
    assert kept("nccl")[0] == {(0, "stream 20 (NCCL)"), (1, "stream 20 (NCCL)")}
    assert kept("rank 1 (stream 7|main)")[0] == {(1, "stream 7 (compute)"), (1, "main thread")}
    assert kept("nothing")[0] == set()
    some, _, why = kept("(")
    assert some == every
    assert "is not a regular expression" in why


def test_ranks_that_are_not_read_yet_are_named_without_lanes(tmp_path):
    loading = load(gpu_job().write(tmp_path))
    loading.measured.ranks[1] = loading.measured._lanes(loading.measured.clocks, 1)
    ranks = lane_info(loading)["ranks"]
    assert [(each["rank"], bool(each["lanes"])) for each in ranks] == [(0, False), (1, True)]
    assert ranks[0]["late"] is not None


def test_a_viewport_has_every_span_where_there_is_room(loaded, client):
    info = _ask(client, "lanes").json
    seen = _view(client, begin=0, end=info["end"], px=8000, rows=_all_rows(info))
    parts = sum(lanes.all.start.size for lanes in loaded.measured.ranks.values())
    assert (seen["layer"] == 0).sum() <= parts
    assert seen["count"][seen["layer"] == 0].sum() == parts
    assert "softmax" in seen["names"].values()
    lanes = loaded.measured.ranks[0]
    first = _view(client, begin=0, end=info["end"], px=1000, rows="m0.0-1")
    ns = info["end"] / 1000
    assert first["x"][0] * ns == pytest.approx(lanes.all.start[0], abs=ns / 100)
    assert first["width"][0] * ns == pytest.approx(lanes.all.end[0] - lanes.all.start[0], abs=ns / 100)


def test_matches_are_a_layer_of_their_own(client):
    info = _ask(client, "lanes").json
    seen = _view(client, begin=0, end=info["end"], px=4000, rows=_all_rows(info), find="softmax")
    matches = seen["layer"] == 1
    assert matches.sum() == 6  # one in each of three steps of two ranks
    assert {seen["names"][code] for code in seen["name"][matches].tolist()} == {"softmax"}
    assert _ask(client, "find?find=softmax").json["count"] == 6
    found = _ask(client, "find?find=softmax&go=next").json
    assert (found["number"], found["place"]["name"]) == (1, "softmax")
    after = found["place"]
    second = _ask(client, f"find?find=softmax&go=next&rank={after['rank']}&item={after['item']}").json
    assert second["number"] == 2


def test_a_link_opens_at_the_longest_match_of_the_ranks_that_findings_name(loaded, client, monkeypatch):
    monkeypatch.setattr("dpro.dashboards.timeline.routes._at_fault", lambda _: [1])
    first = _ask(client, "find?find=.&go=first").json
    spans = loaded.measured.ranks[1].all
    place = first["place"]
    assert place["rank"] == 1
    assert place["end"] - place["start"] == int((spans.end - spans.start).max())
    monkeypatch.setattr("dpro.dashboards.timeline.routes._at_fault", lambda _: [])
    assert _ask(client, "find?find=.&go=first").json == _ask(client, "find?find=.&go=next").json


def test_an_area_is_totalled_by_name_and_by_lane(client):
    info = _ask(client, "lanes").json
    area = _ask(client, f"area?begin=0&end={info['end']}&rows={_all_rows(info)};m77.0-3").json
    softmax = next(row for row in area["names"] if row[0] == "softmax")
    found = _ask(client, "find?find=^softmax$").json
    assert softmax[1:3] == ["kernel", 6]
    assert softmax[3] / 1e6 == pytest.approx(found["ms"])
    assert [row[:2] for row in area["lanes"]][:2] == [[0, "stream 20 (NCCL)"], [0, "stream 7 (compute)"]]
    assert area["more"] == 0
    assert _ask(client, "area?begin=0&end=9&rows=m77.0-3").json["names"] == []
    assert _ask(client, "area?begin=9&end=0&rows=m0.0-1").status_code == 400


def test_counters_are_rows_of_a_viewport_and_of_an_area(tmp_path):
    run = gpu_job()
    for at, watts in [(0, 300.0), (200, 500.0)]:
        sample = {"rank": 0, "host": "a", "counter": "power_w", "time_ns": 1000 * at, "value": watts}
        run.rows["counters"].append(sample | {"device": ""})
    asked = make_app(counted := load(run.write(tmp_path))).server.test_client()
    counted.measured.all()
    info = _ask(asked, "lanes").json
    assert info["counters"] == [[0, "power", "W", 500.0, "m", True]]
    size = int.from_bytes(
        (view := _ask(asked, "view?begin=0&end=400000&px=100&rows=c0.0-1").data)[:4], "little"
    )
    head = json.loads(view[4 : 4 + size])
    assert head["counters"] == {"0": [[0, 200_000], [300, 500]]}
    assert head["count"] == 0
    area = _ask(asked, "area?begin=100000&end=300000&rows=m0.0-2;c0.0-1").json
    assert area["counters"] == [[0, "power", "W", 400.0, 300.0, 500.0]]
    assert len(area["lanes"]) == 1


def test_a_collective_says_how_long_it_waited_and_for_which_rank(client, loaded):
    members = loaded.measured.clocks.members.sort("start_ns")
    early = members.filter(pl.col("rank") == 0).row(0, named=True)
    known = _ask(client, f"span?rank=0&id={early['span_id']}").json
    facts = dict(known["facts"])
    assert facts["waited"].endswith("for rank 1, which arrived last")
    assert facts["kind"] == "transfer of a collective"
    (arrow,) = [each for each in known["arrows"] if each["place"]["rank"] == 1]
    assert not arrow["out"]
    last = _ask(client, f"span?rank=1&id={arrow['place']['id']}").json
    assert dict(last["facts"])["waited"] == "arrived last"
    assert [each["place"]["id"] for each in last["arrows"] if each["place"]["rank"] == 0] == [
        early["span_id"]
    ]


def test_a_kernel_names_the_call_that_launched_it_and_what_is_around_that(client, loaded):
    kernel = loaded.spans.filter(pl.col("name") == "softmax", pl.col("rank") == 0).row(0, named=True)
    known = _ask(client, f"span?rank=0&id={kernel['span_id']}").json
    launch = next(each for each in known["arrows"] if each["why"] == "launched it")
    assert launch["place"]["name"] == "cudaLaunchKernel"
    assert known["stack"][0] == "cudaLaunchKernel"
    call = _ask(client, f"span?rank=0&id={launch['place']['id']}").json
    assert kernel["span_id"] in [each["place"]["id"] for each in call["arrows"] if each["out"]]


def test_a_backward_operator_is_linked_with_the_operator_that_asked_for_it_alone(tmp_path):
    run, ids = TinyRun(), {}
    for at, name in enumerate(("aten::view", "aten::item", "aten::mm")):  # one number: the last made the node
        ids[name] = run.op(name, 100 * at, 100 * at + 90, sequence_number=5)
    ids["aten::sum"] = run.op("aten::sum", 300, 390, sequence_number=6)
    for at, name in enumerate(("SumBackward", "MmBackward")):
        more = {"tid": BACKWARD, "sequence_number": 6 - at, "forward_thread": 1}
        ids[name] = run.op(name, 500 + 100 * at, 590 + 100 * at, **more)
    ids["no_grad"] = run.op("no_grad", 800, 890, sequence_number=7)
    linked = load(run.write(tmp_path))
    linked.measured.all()
    asked = make_app(linked).server.test_client()
    arrows = {}
    for name, ident in ids.items():
        found = _ask(asked, f"span?rank=0&id={ident}").json["arrows"]
        arrows[name] = [(each["place"]["name"], each["out"]) for each in found]
    assert arrows == {
        "aten::view": [], "aten::item": [], "aten::mm": [("MmBackward", True)],
        "aten::sum": [("SumBackward", True)], "SumBackward": [("aten::sum", False)],
        "MmBackward": [("aten::mm", False)], "no_grad": [],
    }  # fmt: skip


def test_what_is_around_a_span_is_not_what_it_waited_for(tmp_path):
    run = TinyRun()
    spans = (("outer", 0, 90), ("inner", 20, 60), ("next", 90, 99))
    ids = [run.op(name, begin, end) for name, begin, end in spans]
    run.step(0, 0, 100)
    nested = load(run.write(tmp_path))
    asked, deadline = make_app(nested).server.test_client(), time.monotonic() + 60
    while _ask(asked, "lanes?replay=1").json["replay"]["state"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    inner, outer = (_ask(asked, f"span?rank=0&id={ident}").json["arrows"] for ident in (ids[1], ids[0]))
    assert inner == []
    assert [each["place"]["name"] for each in outer] == ["next"]


def test_a_replay_that_ends_meanwhile_is_ready_only_with_its_lanes(loaded, monkeypatch):
    asked = []

    class Later:
        why = ""

        @property
        def state(self) -> str:
            asked.append("state")
            return "working"

        @property
        def value(self) -> None:
            asked.append("value")

    monkeypatch.setattr(type(loaded), "replay_lanes", Later())
    assert lane_info(loaded)["replay"]["state"] == "working"
    assert asked[0] == "state"


def test_the_note_on_the_replayed_path_states_what_recording_cost_apart_from_errors(loaded, monkeypatch):
    graph = loaded.built.predictive
    as_it_runs = replay(graph.with_durations(graph.nodes.duration // 2))  # as if half were due to recording
    of_path = make_replayed(as_it_runs, loaded.measured).offsets[0]
    monkeypatch.setattr(type(loaded), "timeline", as_it_runs)
    monkeypatch.setattr(type(loaded), "replay_lanes", BackgroundResult(loaded.replay_lanes._make))
    loaded.replay_lanes._work()
    note = lane_info(loaded)["replay"]["note"]
    assert note.startswith("The replay leaves out what recording cost")
    before, _, after = note.partition("; with that cost, ")
    assert format_duration(-of_path[0]) in before
    assert format_duration(-of_path[0]) not in after
    assert after


def test_a_replay_of_several_windows_has_one_lane_per_name_and_its_own_path_and_steps(repository):
    windowed = load(open_run(repository / "sample_traces" / "slow_rank"))
    windowed.measured.all()
    windowed.replay_lanes._work()
    replayed = windowed.replay_lanes.value
    for rank, lanes in replayed.ranks.items():
        labels = [lane.label for lane in lanes.lanes]
        assert len(labels) == len(set(labels))
        assert set(labels) <= {lane.label for lane in windowed.measured.ranks[rank].lanes}
    timeline, info = replayed.timeline, lane_info(windowed)
    shift = timeline.graph.origin_ns - windowed.measured.clocks.origin_ns
    path = replayed.replayed_path
    assert (path.all.end == timeline.end[path.ident] + shift).all()
    assert {each["rank"] for each in info["ranks"] if each["rank"] < 0} == {-1, -2}
    ends = step_ends(timeline.graph, timeline.start, timeline.end)["finish_ns"] + shift
    assert [round(each[3] * 1e6) for each in info["replay"]["steps"]] == ends.to_list()
    assert len(info["steps"]) == len(info["replay"]["steps"])


def test_the_replay_comes_later_with_the_critical_path_and_causes(client, loaded):
    deadline = time.monotonic() + 60
    while (info := _ask(client, "lanes?replay=1").json)["replay"]["state"] != "ready":
        assert info["replay"]["state"] == "working", info
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {rank["side"] for rank in info["ranks"]} == {"m", "r"}
    path = next(rank for rank in info["ranks"] if rank["rank"] == -1)
    assert path["lanes"][0][0] == "critical path"
    seen = _view(client, begin=0, end=info["end"], px=4000, rows=f"{_all_rows(info)};r-1.0-1;r1.0-1")
    assert (seen["layer"] == 2).any()
    replayed = loaded.replay_lanes.value
    lanes, timeline = replayed.ranks[1], replayed.timeline
    shift = timeline.graph.origin_ns - loaded.measured.clocks.origin_ns
    own = timeline.graph.nodes.rank[lanes.ident] == 1
    assert own.all()
    assert {lane.label for lane in lanes.lanes} == {lane.label for lane in loaded.measured.ranks[1].lanes}
    kernels = lanes.all.kind == 4
    assert (lanes.all.end[kernels] == timeline.end[lanes.ident[kernels]] + shift).all()
    node = _ask(client, "span?side=r&rank=-1&item=0").json
    assert any(each["why"] == "the same span, as measured" for each in node["arrows"])
    adam = loaded.spans.filter(pl.col("name") == "adam", pl.col("rank") == 0).row(0, named=True)
    arrows = _ask(client, f"span?rank=0&id={adam['span_id']}").json["arrows"]
    assert any(not each["out"] for each in arrows)


@pytest.mark.parametrize(
    "path",
    [
        "view?begin=0&end=0&px=100&rows=m0.0-1", "view?begin=0&end=9&px=0&rows=m0.0-1", "view?begin=x",
        "view?begin=0&end=9&px=10&rows=q0.0-1", "view?begin=0&end=9&px=10&rows=m0.0-999999",
        "view?begin=0&end=1e9&px=10&rows=m0.0-1", "find", "span?rank=x&id=1", "span?rank=0",
    ],
)  # fmt: skip
def test_requests_that_make_no_sense_are_refused_in_words(client, path):
    answer = _ask(client, path)
    assert answer.status_code == 400
    assert answer.json["error"]


def test_an_expression_that_is_still_being_typed_is_answered_in_words_and_dims_nothing(client):
    assert "not a regular expression" in _ask(client, "find?find=(").json["error"]
    assert (_view(client, begin=0, end=9000, px=10, rows="m0.0-1", find="(")["layer"] != 1).all()


@pytest.mark.parametrize("path", ["span?rank=99&id=1", "span?rank=0&id=999999", "span?rank=0&item=-4"])
def test_a_span_that_does_not_exist_is_null(client, path):
    assert (_ask(client, path).status_code, _ask(client, path).json) == (200, None)


def test_a_viewport_is_read_from_its_query():
    view = parse_viewport({"begin": "-5", "end": "10", "px": "7", "rows": "m0.1-3;r-1.0-1"})
    assert view == (-5, 10, 7, [("m", 0, 1), ("m", 0, 2), ("r", -1, 0)])
    with pytest.raises(UsageError):
        parse_viewport({"begin": "0", "end": "10", "px": "7", "rows": ";".join(["m0.0-800"] * 2)})


def test_rows_of_ranks_that_do_not_exist_are_empty(client):
    assert _view(client, begin=0, end=9, px=10, rows="m77.0-4;m0.90-91")["x"].size == 0


def test_a_run_without_spans_and_one_with_names_like_html(tmp_path):
    empty = load(TinyRun().write(tmp_path / "empty"))
    empty.measured.all()
    info = _ask(make_app(empty).server.test_client(), "lanes").json
    assert (info["spans"], info["ranks"], info["complete"]) == (0, [], True)
    run = TinyRun()
    run.kernel(EVIL, 10, 900)
    evil = load(run.write(tmp_path / "evil"))
    evil.measured.all()
    answer = _ask(make_app(evil).server.test_client(), "span?rank=0&id=1")
    assert answer.mimetype == "application/json"
    assert answer.json["place"]["name"] == EVIL


def test_what_is_shown_can_be_had_as_a_table(client, loaded):
    answer = client.get("/csv/timeline/segments?view=timeline&steps=1", headers=HOST)
    assert answer.status_code == 200
    header, *lines = answer.text.strip().splitlines()
    assert header == "rank,lane,row,kind,name,start_ms,end_ms,spans,busy_ms"
    assert any("softmax" in line for line in lines)
    step = loaded.measured.clocks.steps.filter(step=1).row(0, named=True)
    assert all(float(line.split(",")[-4]) <= step["end_ms"] for line in lines)


def test_the_legend_has_only_kinds_that_occur(loaded, tmp_path):
    assert loaded.measured.clocks.kinds == {"cpu", "runtime", "kernel", "transfer", "wait"}
    on_cpu = TinyRun()
    on_cpu.op("aten::mm", 0, 10)
    on_cpu.step(0, 0, 10)
    cpu_run = load(on_cpu.write(tmp_path))
    shown = json.dumps(
        VIEW.sections["timeline-legend"](cpu_run, Link()), default=lambda part: part.to_plotly_json()
    )
    assert "operator" in shown
    assert "kernel" not in shown
    assert "copy" not in shown


def test_the_tip_the_panel_the_area_the_legend_and_the_table_have_one_word_for_a_kind(client, loaded):
    legend = {words for _, words in SPAN_LOOKS.values()}
    info = _ask(client, "lanes").json
    area = _ask(client, f"area?begin=0&end={info['end']}&rows={_all_rows(info)}").json
    table = pl.read_csv(client.get("/csv/timeline/segments?view=timeline", headers=HOST).data)
    panel = set()
    for rank, lanes in loaded.measured.ranks.items():
        for item in range(lanes.name.size):
            panel.add(dict(_ask(client, f"span?rank={rank}&item={item}").json["facts"])["kind"])
    assert panel == set(table["kind"]) == {row[1] for row in area["names"]}
    assert panel == {
        "kernel",
        "GPU runtime call",
        "operator",
        "transfer of a collective",
        "wait in a collective",
    }
    assert panel < set(info["words"]) == legend


def test_the_axis_begins_with_the_first_span_that_is_drawn(tmp_path):
    run = gpu_job()
    run.span("overhead", "the profiler starts", -9_000_000, -8_999_000)
    late = load(run.write(tmp_path))
    late.measured.all()
    assert min(int(lanes.all.start.min()) for lanes in late.measured.ranks.values()) == 0
    assert lane_info(late)["steps"][0][2] == 0
