"""What viewers are shown: the slices themselves, and the same slices read back from each format."""

import gzip
import json
from itertools import pairwise

import polars as pl
import pytest

from dpro.cli.analysis import analyse
from dpro.cli.export import drawn
from dpro.cli.replay import replay_document
from dpro.detect.findings import Finding
from dpro.errors import UsageError
from dpro.export.chrome import write_chrome
from dpro.export.perfetto import write_perfetto
from dpro.export.slices import CRITICAL, FINDINGS, slices
from dpro.replay.graph import NodeKind
from dpro.replay.timeline import replay, step_ends
from tests.builders import cpu_job, gpu_job, tiny_graph
from tests.pipelines import Job, written

JOBS = {"cpu": cpu_job, "gpu": gpu_job}


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
    finding = Finding("slow.host", "rank", "1", (1,), 0.2, 0.9, 3e6, ("late",))
    rows = slices(timeline, [finding])
    marks = rows.filter(pl.col("group") == FINDINGS)
    graph = timeline.graph
    ends = step_ends(graph, graph.nodes.measured_start, graph.nodes.measured_end)
    assert marks["name"].unique().to_list() == ["slow.host: rank 1 costs 3 ms per step"]
    assert marks["step"].to_list() == ends["step"].to_list()
    assert (marks["end_ns"] - graph.origin_ns).to_list() == ends["finish_ns"].to_list()
    assert rows["group"].unique(maintain_order=True).to_list()[:2] == [FINDINGS, CRITICAL]
    assert rows.filter(pl.col("group") != FINDINGS).equals(slices(timeline))


def test_critical_path_is_a_group_of_its_own_that_ends_with_the_run(timeline):
    path = slices(timeline).filter(pl.col("group") == CRITICAL)
    assert path["critical"].all()
    assert path["end_ns"].max() == timeline.end.max() + timeline.graph.origin_ns


def test_slices_tell_how_much_longer_their_work_may_take_at_no_cost(timeline, tmp_path):
    rows = slices(timeline)
    assert (rows["slack_ns"] >= 0).all()
    assert (rows.filter("critical")["slack_ns"] == 0).all()
    assert (rows["slack_ns"] > 0).any()
    write_chrome(rows, tmp_path / "run.json")
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
    write_chrome(rows, tmp_path / "run.json.gz")
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
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    rows = slices(timeline)
    write_perfetto(rows, tmp_path / "run.pftrace")
    trace = Trace.FromString((tmp_path / "run.pftrace").read_bytes())
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
    assert read == rows.select("group", "track", "name", "start_ns", "end_ns").rows()


def test_arrows_in_perfetto_follow_the_critical_path_across_lanes(timeline, tmp_path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    rows = slices(timeline)
    write_perfetto(rows, tmp_path / "run.pftrace")
    trace = Trace.FromString((tmp_path / "run.pftrace").read_bytes())
    touched: dict[int, list[int]] = {}
    for packet in trace.packet:
        node = next((a.int_value for a in packet.track_event.debug_annotations if a.name == "node"), None)
        for arrow in packet.track_event.flow_ids:
            touched.setdefault(arrow, []).append(node)
    path = rows.filter(pl.col("group") == CRITICAL).sort("start_ns", "end_ns")["node"].to_list()
    linked = {frozenset(nodes) for nodes in touched.values() if len(nodes) == 2}
    assert linked == {frozenset(pair) for pair in pairwise(path)}


def test_names_of_the_trace_stay_literal_in_json(tmp_path):
    graph = tiny_graph([3], [], names=['a "quoted" {brace} \\ é\n'], measured_end=[3])
    write_chrome(slices(replay(graph)), tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    assert {e["name"] for e in document["traceEvents"] if e["ph"] == "X"} == {'a "quoted" {brace} \\ é\n'}


def test_command_writes_what_it_was_asked_for(repository, tmp_path, capsys):
    from dpro.cli import cli

    run = str(repository / "sample_traces" / "slow_rank")
    chrome, perfetto = tmp_path / "run.json", tmp_path / "run.pftrace"
    cli(
        ["export", run, "--chrome", str(chrome), "--perfetto", str(perfetto), "--json"], standalone_mode=False
    )
    document = json.loads(capsys.readouterr().out)
    assert [each["format"] for each in document["files"]] == ["chrome", "perfetto"]
    events = json.loads(chrome.read_text())["traceEvents"]
    assert sum(each["ph"] == "X" for each in events) == document["slices"]
    assert perfetto.stat().st_size > 0
    with pytest.raises(UsageError, match="--perfetto FILE"):
        cli(["export", run], standalone_mode=False)
    with pytest.raises(UsageError, match="cannot be written"):
        cli(["export", run, "--chrome", str(tmp_path / "no" / "run.json")], standalone_mode=False)


def test_delays_that_only_look_like_late_launches_are_not_drawn_as_what_decides(tmp_path):
    # One update of one step begins 40 ms later than the others do: it waited for what nobody recorded.
    rows = Job(num_steps=3, late=0.5).run()
    update = next(row for row in rows if row["optype"] == "optimizer" and row["step"] == 1)
    update["start_ts"] += 0.04
    analysis = analyse(str(written(rows, tmp_path).path))
    path = drawn(analysis).filter(pl.col("group") == CRITICAL)
    delays = path.filter(pl.col("kind") == "delay")
    assert (delays["end_ns"] - delays["start_ns"]).max() == 500_000
    whole = slices(analysis.replayed).filter((pl.col("group") == CRITICAL) & (pl.col("kind") == "delay"))
    assert (whole["end_ns"] - whole["start_ns"]).max() == 40_500_000
    decided = sum(row["ms"] for row in replay_document(analysis)["critical_path"])
    assert (path["end_ns"] - path["start_ns"]).sum() / 1e6 == pytest.approx(decided)
