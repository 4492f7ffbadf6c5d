"""What viewers are shown: the slices themselves, and the same slices read back from each format."""

import gzip
import json
import resource
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dpro.analysis.answers.replay import replay_document
from dpro.cli.analysis import analyse
from dpro.detect.findings import Finding
from dpro.detect.observations import observe
from dpro.errors import UsageError
from dpro.extensions.export.command import drawing_of
from dpro.extensions.export.drawing import ARGUMENTS, MAX_TEXT, Arrow, arguments_of, drawing, in_ranges
from dpro.extensions.export.formats import write_chrome, write_perfetto
from dpro.replay.graph import NodeKind
from dpro.replay.timeline import replay, step_ends
from dpro.schema import BUCKETS, COUNTERS, WORKERS
from dpro.timelines.counters import QUANTITIES, quantity_of, readable_unit, sampled_counters, within
from dpro.timelines.slices import (
    CRITICAL,
    CRITICAL_REPLAYED,
    FINDINGS,
    PATHS,
    path_in,
    path_note,
    path_offsets,
    slices,
)
from tests.builders import BACKWARD, TinyRun, cpu_job, gpu_job, tiny_graph
from tests.commands import dpro
from tests.ddp import ddp_job
from tests.pipelines import Job, written

S = 1_000_000_000
AUTOGRAD = "autograd::engine::evaluate_function: "
JOBS = {"cpu": cpu_job, "gpu": gpu_job}


def _trace(path: Path) -> Any:
    """A file of Perfetto's, read back."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    return Trace.FromString(gzip.decompress(path.read_bytes()))


@pytest.fixture(params=JOBS)
def timeline(request, tmp_path):
    return replay(JOBS[request.param]().build(tmp_path).graph)


def test_every_node_that_lasts_is_drawn_once_as_measured_and_once_as_replayed(timeline):
    nodes = timeline.graph.nodes
    drawn = slices(timeline).filter(~pl.col("name").str.starts_with("wait: "))
    for side, lasts in (
        ("measured", nodes.measured_end > nodes.measured_start),
        ("replayed", nodes.duration > 0),
    ):
        lasts = lasts & (nodes.kind != NodeKind.ARRIVE) & (nodes.kind != NodeKind.RENDEZVOUS)
        shown = drawn.filter(pl.col("group").str.ends_with(side))
        assert sorted(shown["node"]) == lasts.nonzero()[0].tolist()


def test_slices_of_a_track_never_overlap_and_come_in_order(timeline):
    for _, track in slices(timeline).group_by("group", "track", maintain_order=True):
        assert (track["end_ns"].shift(1).drop_nulls() <= track["start_ns"].tail(-1)).all()


def test_waiting_for_a_collective_lasts_from_arrival_to_transfer(tmp_path):
    # Rank 1 is 400 us late in each of 4 steps; give or take the noise of the job.
    rows = slices(replay(cpu_job().build(tmp_path).graph))
    waits = rows.filter((pl.col("kind") == "wait") & pl.col("group").str.ends_with("replayed"))
    by_rank = {rank: waits.filter(pl.col("rank") == rank) for rank in (0, 2)}
    for each in by_rank.values():
        assert each.height == 4
        assert (each["end_ns"] - each["start_ns"]).is_between(300_000, 520_000).all()
    assert waits.filter((pl.col("rank") == 1) & (pl.col("end_ns") - pl.col("start_ns") > 100_000)).is_empty()


def test_a_finding_marks_each_step_above_everything_else(timeline):
    finding = Finding("slow.host", "rank", "1", (1,), 0.2, 0.9, 3e6, (observe("late", "late"),))
    rows = slices(timeline, [finding])
    marks = rows.filter(pl.col("group") == FINDINGS)
    graph = timeline.graph
    ends = step_ends(graph, graph.nodes.measured_start, graph.nodes.measured_end)
    assert marks["name"].unique().to_list() == ["slow host work: rank 1 costs 3 ms per step"]
    assert marks["step"].to_list() == ends["step"].to_list()
    assert (marks["end_ns"] - graph.origin_ns).to_list() == ends["finish_ns"].to_list()
    assert rows["group"].unique(maintain_order=True).to_list()[:2] == [FINDINGS, CRITICAL]
    assert rows.filter(pl.col("group") != FINDINGS).equals(slices(timeline))


def test_critical_path_is_a_group_of_its_own_on_each_side_that_ends_with_the_run(timeline):
    rows, graph = slices(timeline), timeline.graph
    for side, end in (("measured", graph.nodes.measured_end), ("replayed", timeline.end)):
        path = rows.filter(pl.col("group") == PATHS[side])
        assert path["critical"].all()
        assert path["end_ns"].max() == end.max() + graph.origin_ns


def test_critical_path_is_drawn_where_the_lanes_of_its_side_have_its_spans():
    # The replay begins the second of two nodes 2 s before it was measured: as in a pipeline whose launches
    # came late for a reason that was not recorded.
    graph = tiny_graph(
        [3 * S, 4 * S], [(0, 1, 0)], measured_start=[0, 5 * S], measured_end=[3 * S, 9 * S], rank=[0, 0]
    )
    rows = slices(replay(graph))
    drawn = {
        group: list(zip(part["name"], part["start_ns"], part["end_ns"]))
        for (group,), part in rows.group_by("group", maintain_order=True)
    }
    assert drawn[CRITICAL] == [("0", 0, 3 * S), ("1", 5 * S, 9 * S)] == drawn["rank 0 measured"]
    assert drawn[CRITICAL_REPLAYED] == [("0", 0, 3 * S), ("1", 3 * S, 7 * S)] == drawn["rank 0 replayed"]
    assert rows.filter(pl.col("group") == CRITICAL)["later_ns"].to_list() == [0, -2 * S]
    offsets = path_offsets(replay(graph), path_in(rows), None)
    assert offsets == ((-2 * S, 0), None)
    assert "up to 2 s sooner than measured" in path_note(*offsets)
    assert "when it was measured" in path_note((0, 0))


def test_spans_that_are_sooner_since_the_cost_of_recording_is_left_out_are_said_to_be():
    # Two nodes in a row, of which recording made the first 2 s longer.
    recorded = tiny_graph(
        [3 * S, 4 * S], [(0, 1, 0)], measured_start=[0, 3 * S], measured_end=[3 * S, 7 * S], rank=[0, 0]
    )
    without = recorded.with_durations(np.array([S, 4 * S]))
    done = replay(without)
    path = path_in(slices(done))
    offsets = path_offsets(done, path, replay(recorded))
    assert offsets == ((-2 * S, 0), (0, 0))
    assert path_note(*offsets) == (
        "The replay leaves out what recording cost, which adds up over a window, and so begins spans of the "
        "critical path up to 2 s sooner than measured; with that cost, when they were measured to begin."
    )
    assert path_offsets(done, path, done)[1] is None  # the distance has another reason


def test_slices_say_how_much_longer_their_work_may_take_at_no_cost(timeline, tmp_path):
    rows = slices(timeline)
    assert (rows["slack_ns"] >= 0).all()
    assert (rows.filter("critical")["slack_ns"] == 0).all()
    assert (rows["slack_ns"] > 0).any()
    write_chrome(drawing(timeline), tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [each["args"]["slack_ns"] for each in events if each["ph"] == "X"] == rows["slack_ns"].to_list()


def test_work_that_runs_side_by_side_on_one_lane_takes_several_tracks():
    graph = tiny_graph(
        [30, 30, 5, 5], [], measured_start=[0, 10, 20, 30], measured_end=[30, 40, 25, 35], rank=[0] * 4
    )
    rows = slices(replay(graph)).filter(pl.col("group") == "rank 0 measured")
    placed = dict(zip(rows["name"], rows["track"]))
    assert placed == {
        "0": "main thread", "1": "main thread #2", "2": "main thread #3", "3": "main thread",
    }  # fmt: skip


def test_chrome_json_read_back_has_the_same_slices_to_the_nanosecond(timeline, tmp_path):
    rows = slices(timeline)
    write_chrome(drawing(timeline), tmp_path / "run.json.gz")
    document = json.loads(gzip.decompress((tmp_path / "run.json.gz").read_bytes()))
    origin = document["baseTimeNanoseconds"]
    events = document["traceEvents"]
    groups = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    read = [
        (groups[e["pid"]], tracks[e["tid"]], e["name"], origin + round(1e3 * e["ts"]), round(1e3 * e["dur"]))
        for e in events
        if e["ph"] == "X"
    ]
    duration = pl.col("end_ns") - pl.col("start_ns")
    assert read == rows.select("group", "track", "name", "start_ns", duration).rows()


def test_perfetto_file_read_back_has_the_same_slices_to_the_nanosecond(timeline, tmp_path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    rows = slices(timeline)
    write_perfetto(drawing(timeline), tmp_path / "run.pftrace")
    trace = _trace(tmp_path / "run.pftrace")
    names = {each.iid: each.name for packet in trace.packet for each in packet.interned_data.event_names}
    described = {
        p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")
    }
    read, open_on = [], {}
    for packet in trace.packet:
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_on, "one slice at a time on a track"
            open_on[event.track_uuid] = (names[event.name_iid], packet.timestamp)
        elif event.type == TrackEvent.TYPE_SLICE_END:
            name, start = open_on.pop(event.track_uuid)
            track = described[event.track_uuid]
            group = described[track.parent_uuid].process.process_name
            read.append((group, track.name, name, start, packet.timestamp))
    assert not open_on
    assert sorted(read) == sorted(rows.select("group", "track", "name", "start_ns", "end_ns").rows())
    assert [packet.timestamp for packet in trace.packet if packet.timestamp] == sorted(
        packet.timestamp for packet in trace.packet if packet.timestamp
    )


def test_a_perfetto_file_is_the_same_bytes_whenever_it_is_written(timeline, tmp_path, monkeypatch):
    write_perfetto(drawing(timeline), tmp_path / "first.pftrace")
    monkeypatch.setattr("time.time", lambda: 1e9)
    write_perfetto(drawing(timeline), tmp_path / "second.pftrace")
    assert (tmp_path / "first.pftrace").read_bytes() == (tmp_path / "second.pftrace").read_bytes()


def test_arrows_in_perfetto_follow_the_critical_path_across_lanes(timeline, tmp_path):
    rows = slices(timeline)
    write_perfetto(drawing(timeline), tmp_path / "run.pftrace")
    trace = _trace(tmp_path / "run.pftrace")
    touched: dict[int, list[int]] = {}
    for packet in trace.packet:
        node = next((a.int_value for a in packet.track_event.debug_annotations if a.name == "node"), None)
        for arrow in packet.track_event.flow_ids:
            touched.setdefault(arrow, []).append(node)
    path = rows.filter(pl.col("group") == CRITICAL_REPLAYED).sort("start_ns", "end_ns")["node"].to_list()
    linked = [tuple(nodes) for nodes in touched.values()]
    assert all(len(nodes) == 2 for nodes in linked)
    assert set(pairwise(path)) <= set(linked)
    assert len(linked) == drawing(timeline).arrows.height


SAMPLES = {
    "rank": [-1] * 4,
    "host": ["h"] * 4,
    "device": ["eth0"] * 4,
    "counter": ["tx_bytes"] * 3 + ["load_1m"],
    "time_ns": [0, 1 * S, 3 * S, 2 * S],
    "value": [0.0, 5.0, 25.0, 1.0],
}


def test_counters_are_drawn_from_the_last_value_before_the_first_slice_on_the_clock_of_the_timeline():
    counters = pl.DataFrame(SAMPLES, schema=COUNTERS.empty().schema)
    values = sampled_counters(counters, WORKERS.empty(), {"h": S})
    # 5 bytes/s in the first second, 10 in the next two; the host is 1 s ahead. `load_1m` never changed.
    assert values.select("counter", "time_ns", "value").rows() == [
        ("tx_bytes/s", -S, 5.0),
        ("tx_bytes/s", 0, 10.0),
    ]
    assert within(values, S // 2, S).select("time_ns", "value").rows() == [(S // 2, 10.0)]
    assert within(values, -2 * S, 0).select("time_ns", "value").rows() == [(-S, 5.0)]


def _with_unit(track):
    """The name as the other format writes it, which has no place for units."""
    label, _, series = track.name.partition(": ")
    unit = track.counter.unit_name
    return f"{label}, {unit}: {series}" if unit else track.name


def test_counters_of_the_schema_have_names_and_units_and_others_keep_theirs():
    assert quantity_of("sm_clock_mhz").title == "SM clock, MHz"
    assert quantity_of("tx_bytes") == ("sent", "B/s", "rate", 1.0)
    assert quantity_of("throttled_power_s") == ("clocks held down by the power cap", "% of time", "rate", 100)
    assert quantity_of("rx_odd_errors") == ("rx_odd_errors/s", "", "rate", 1.0)
    assert quantity_of("memory_odd_bytes") == ("memory_odd_bytes", "", "level", 1.0)
    assert readable_unit(999.0, "B/s") == (1.0, "B/s")
    assert readable_unit(1e6, "B/s") == (1e6, "MB/s")
    assert readable_unit(1e9, "bytes") == (1e9, "GB")
    assert readable_unit(1e12, "W") == (1.0, "W")


def test_names_of_counters_fit_the_figure_of_a_phone():
    assert not [each.title for each in QUANTITIES.values() if len(each.title) > 46]  # at 390 pixels


def test_both_formats_carry_the_counters_of_the_run(tmp_path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    analysis = analyse(str(files("dpro.sample_traces") / "slow_rank"))
    drawn = drawing(analysis.timeline, (), analysis.clocks[0])
    drawn = drawn._replace(
        rows=drawn.rows.sort("start_ns").head(20), arrows=drawn.arrows.clear()
    )  # to write fewer slices
    assert drawn.counters.height > 10
    write_perfetto(drawn, tmp_path / "run.pftrace")
    packets = _trace(tmp_path / "run.pftrace").packet
    named = {p.track_descriptor.uuid: p.track_descriptor for p in packets}
    tracks = {uuid: _with_unit(track) for uuid, track in named.items()}
    of_perfetto = sorted(
        (tracks[p.track_event.track_uuid], p.timestamp, p.track_event.double_counter_value)
        for p in packets
        if p.track_event.type == TrackEvent.TYPE_COUNTER
    )
    write_chrome(drawn, tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    of_chrome = sorted(
        (each["name"], document["baseTimeNanoseconds"] + round(1e3 * each["ts"]), each["args"]["value"])
        for each in document["traceEvents"]
        if each["ph"] == "C"
    )
    assert of_chrome == of_perfetto
    assert len(of_chrome) == drawn.counters.height


def test_names_of_the_trace_stay_literal_in_json(tmp_path):
    graph = tiny_graph([3], [], names=['a "quoted" {brace} \\ é\n'], measured_end=[3])
    write_chrome(drawing(replay(graph)), tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    assert {e["name"] for e in document["traceEvents"] if e["ph"] == "X"} == {'a "quoted" {brace} \\ é\n'}


def test_command_writes_what_it_was_asked_for(tmp_path, capsys):
    from dpro.cli import cli

    run = str(written(Job(num_steps=3).run(), tmp_path).path)
    chrome, perfetto = tmp_path / "run.json", tmp_path / "run.pftrace"
    cli(
        ["export", run, "--chrome", str(chrome), "--perfetto", str(perfetto), "--json"], standalone_mode=False
    )
    document = json.loads(capsys.readouterr().out)
    assert [each["format"] for each in document["files"]] == ["chrome", "perfetto"]
    events = json.loads(chrome.read_text())["traceEvents"]
    assert sum(each["ph"] == "X" for each in events) == document["slices"]
    assert perfetto.stat().st_size > 0
    with pytest.raises(UsageError, match="foo: its name does not say which format"):
        cli(["export", run, "-o", str(tmp_path / "x.foo")], standalone_mode=False)
    with pytest.raises(UsageError, match="with -o FILE"):
        cli(["export", run], standalone_mode=False)
    with pytest.raises(UsageError, match="cannot be written"):
        cli(["export", run, "--chrome", str(tmp_path / "no" / "run.json")], standalone_mode=False)


@pytest.mark.parametrize("form", ["chrome", "perfetto"])
def test_a_file_that_there_is_no_room_for_leaves_the_old_one(form, tmp_path):
    from dpro.cli import cli

    run = str(written(Job(num_steps=3).run(), tmp_path / "job").path)
    path = tmp_path / "kept" / "run"
    path.parent.mkdir()
    path.write_text("of yesterday")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UsageError, match=r"kept/run: cannot be written \(File too large\)"):
            cli(["export", run, f"--{form}", str(path)], standalone_mode=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.read_text() for each in path.parent.iterdir()] == ["of yesterday"]


def test_delays_that_only_look_like_late_launches_are_not_drawn_as_what_decides(tmp_path):
    # One update of one step begins 40 ms later than the others do: it waited for something unrecorded.
    rows = Job(num_steps=3, late=0.5).run()
    update = next(row for row in rows if row["optype"] == "optimizer" and row["step"] == 1)
    update["start_ts"] += 0.04
    analysis = analyse(str(written(rows, tmp_path).path))
    path = drawing_of(analysis).rows.filter(pl.col("group") == CRITICAL)
    delays = path.filter(pl.col("kind") == "delay")
    assert (delays["end_ns"] - delays["start_ns"]).max() == 500_000
    whole = slices(analysis.replayed).filter((pl.col("group") == CRITICAL) & (pl.col("kind") == "delay"))
    assert (whole["end_ns"] - whole["start_ns"]).max() == 40_500_000
    decided = sum(row.ms for row in replay_document(analysis).critical_path)
    assert (path["end_ns"] - path["start_ns"]).sum() / 1e6 == pytest.approx(decided)


def _ends(drawn, kind: Arrow, group: str = "measured") -> set[tuple[str, int, str, int]]:
    """Name and rank of both ends of each arrow of a kind."""
    name, rank, lane = (drawn.rows[column].to_list() for column in ("name", "rank", "group"))
    of_kind = drawn.arrows.filter(kind=kind.value)
    return {
        (name[source], rank[source], name[target], rank[target])
        for source, target in of_kind.select("source", "target").iter_rows()
        if lane[source].endswith(group)
    }


def test_arrows_lead_from_launches_to_work_and_from_the_last_member_of_a_collective_to_the_others(tmp_path):
    drawn = drawing(replay(gpu_job(num_ranks=3).build(tmp_path).graph))
    launched = _ends(drawn, Arrow.LAUNCH)
    assert ("cudaLaunchKernel", 2, "softmax", 2) in launched
    assert ("cudaLaunchKernel", 2, "ncclDevKernel", 2) in launched
    assert all(source == target for _, source, _, target in launched)
    # Rank 1 takes 300 us longer than the others in each step.
    meetings = _ends(drawn, Arrow.RENDEZVOUS)
    assert {(source, target) for _, source, _, target in meetings} == {(1, 0), (1, 2)}
    assert drawn.arrows.filter(kind=Arrow.RENDEZVOUS.value).height == 3 * 2


def test_an_arrow_leads_from_a_forward_operator_to_the_first_backward_operator_of_its_number(tmp_path):
    run = TinyRun()
    run.step(0, 0, 200)
    run.op("aten::linear", 0, 20, sequence_number=5, forward_thread=0)
    run.op("aten::addmm", 2, 18, sequence_number=5, forward_thread=0)
    run.op(f"{AUTOGRAD}AddmmBackward0", 100, 150, tid=BACKWARD, sequence_number=5, forward_thread=1)
    run.op("aten::mm", 110, 140, tid=BACKWARD, sequence_number=5, forward_thread=1)
    drawn = drawing(replay(run.build(tmp_path).graph))
    assert _ends(drawn, Arrow.GRADIENT) == {("aten::addmm", 0, f"{AUTOGRAD}AddmmBackward0", 0)}


def test_no_arrow_goes_backwards_and_where_clocks_put_the_effect_before_its_cause_there_is_none(tmp_path):
    run = TinyRun()
    run.step(0, 0, 100)
    run.op("aten::add", 0, 9)
    run.call(10, 14, 1)
    run.kernel("begins before its call", 8, 13, 1)
    run.call(20, 24, 2)
    run.kernel("ends before its call", 15, 19, 2)
    drawn = drawing(replay(run.build(tmp_path).graph))
    (arrow,) = drawn.arrows.filter(kind=Arrow.LAUNCH.value).to_dicts()
    assert drawn.rows["name"][arrow["target"]] == "begins before its call"
    assert arrow["leaves_ns"] == arrow["arrives_ns"] == 10_000


def test_flows_in_chrome_json_bind_to_slices_by_id_and_go_forwards(timeline, tmp_path):
    # The rules of the Trace Event Format for `s` and `f`: same category, name and id; a slice around each.
    write_chrome(drawing(timeline), tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    extents: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            lane = extents.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"]))
    flows: dict[tuple[str, str, int], list[dict]] = {}
    for event in events:
        if event["ph"] in "sf":
            flows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
            lane = extents[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] < end + 1e-6 for begin, end in lane)
    assert len(flows) == drawing(timeline).arrows.height > 0
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"]
    assert {name for _, name, _ in flows} <= {kind.value for kind in Arrow}


def test_slices_carry_what_is_known_of_their_spans_and_nothing_that_is_not(tmp_path):
    run = TinyRun()
    for rank in range(2):
        run.step(0, 0, 100, rank)
        run.op("aten::mm", 0, 30, rank, shapes="[[8, 4], [4, 2]]")
        run.call(30, 35, 1, rank)
        copied = run.kernel("Memcpy HtoD", 36, 40, 1, rank, kind="memcpy", bytes=4096)
        run.call(40, 45, 2, rank)
        run.nccl(
            50, 80, 2, rank, group="3", group_ranks="0,1", sequence=7, bytes_in=64, bytes_out=128,
            dtype="bfloat16", algorithm="RING",
        )  # fmt: skip
    assert copied > 0
    drawn = drawing(replay(run.build(tmp_path).graph))
    write_chrome(drawn, tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    said = {each["name"]: each["args"] for each in events if each["ph"] == "X"}
    known = {name: {key: args[key] for key in ARGUMENTS if key in args} for name, args in said.items()}
    assert known["aten::mm"] == {"shapes": "[[8, 4], [4, 2]]"}
    assert known["Memcpy HtoD"] == {"bytes": 4096}
    assert known["ncclDevKernel"] == {
        "bytes": 128, "dtype": "bfloat16", "op": "all_reduce", "process_group": "3", "group_ranks": "0, 1",
        "seq": 7, "algorithm": "RING",
    }  # fmt: skip


def test_perfetto_says_of_a_slice_what_chrome_json_says(timeline, tmp_path):
    drawn = drawing(timeline)
    write_chrome(drawn, tmp_path / "run.json")
    write_perfetto(drawn, tmp_path / "run.pftrace")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    of_chrome = [{k: e["args"][k] for k in ARGUMENTS if k in e["args"]} for e in events if e["ph"] == "X"]
    of_perfetto = [
        {a.name: a.string_value or a.int_value for a in packet.track_event.debug_annotations}
        for packet in _trace(tmp_path / "run.pftrace").packet
        if packet.track_event.debug_annotations
    ]
    chosen = [{k: each[k] for k in ARGUMENTS if k in each} for each in of_perfetto]
    assert sorted(map(str, chosen)) == sorted(map(str, of_chrome))
    assert any("process_group" in each or "op" in each for each in chosen)


def test_texts_of_arguments_stay_short_whatever_a_trace_holds(tmp_path):
    run = TinyRun()
    run.step(0, 0, 100)
    run.op("aten::cat", 0, 30, shapes=json.dumps([[1, 2]] * 5_000))
    row = arguments_of(run.build(tmp_path).graph).filter(pl.col("shapes").is_not_null())
    assert row["shapes"].str.len_chars().to_list() == [MAX_TEXT]
    assert row["shapes"][0].endswith("…")
    assert in_ranges(range(1024)) == "0-1023"
    assert in_ranges(range(0, 64, 8)) == "0-56 by 8"
    assert in_ranges([0, 1]) == "0, 1"
    assert len(in_ranges([n * n for n in range(500)])) == MAX_TEXT
    assert in_ranges([]) == ""


def test_arguments_and_arrows_keep_an_export_in_proportion_to_its_slices(timeline):
    drawn = drawing(timeline)
    assert drawn.arrows.height <= drawn.rows.height
    texts = [name for name, dtype in ARGUMENTS.items() if dtype == pl.String]
    longest = drawn.rows.select(pl.col(texts).str.len_chars().max()).row(0)
    assert all(length is None or length <= MAX_TEXT for length in longest)


@pytest.mark.parametrize(
    "source", ["DDP logging data", "Megatron-core buckets", "FSDP2 parameter groups", ""]
)
def test_reductions_say_which_bucket_they_are_whichever_framework_reduces(tmp_path, source):
    run = ddp_job(closes=(1, 2, 3))
    rows = run.rows[BUCKETS.name]
    for row in rows:
        row["source"] = source
    if not source:
        rows.clear()  # as in traces of other tools: inferred from autograd's spans and bytes
    known = arguments_of(run.build(tmp_path).graph).filter(pl.col("op") == "all_reduce")
    per_step = known.filter(pl.col("bucket").is_not_null())["bucket"].value_counts().sort("bucket").rows()
    ranks, steps, nodes = 2, 3, 2  # of each: its arrival and its transfer
    assert per_step == [(bucket, ranks * steps * nodes) for bucket in range(3)]


def test_a_span_of_unknown_time_is_at_the_begin_of_a_perfetto_file(tmp_path):
    run = TinyRun()
    run.op("at no known time", -0.001, 10)
    run.write(tmp_path / "run")
    done = dpro("export", tmp_path / "run", "--perfetto", tmp_path / "run.pftrace")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "form"), [("run.json", "chrome"), ("run.json.gz", "chrome"), ("run.pftrace", "perfetto")]
)
def test_the_name_of_a_file_says_its_form(tmp_path, name, form):
    run = cpu_job().write(tmp_path / "run")
    done = dpro("export", run.path, "-o", tmp_path / name, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == [{"format": form, "path": str(tmp_path / name)}]


def test_one_file_is_not_named_in_two_ways(tmp_path):
    done = dpro("export", tmp_path, "-o", tmp_path / "a.json", "--chrome", tmp_path / "b.json")
    assert (done.returncode, "-o excludes --perfetto and --chrome" in done.stderr) == (2, True)
