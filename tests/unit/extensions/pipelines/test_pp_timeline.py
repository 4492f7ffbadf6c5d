"""Pipeline timelines: small files made here, and real ones against plain reading."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.errors import InputError
from dpro.extensions.pipelines.pp_timeline import is_pp_timeline, read_pp_timeline
from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform

Events = list[dict[str, Any]]


def write(path: Path, content: Any) -> Path:
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def table(trace: RankTrace, name: str) -> pl.DataFrame:
    return conform(TABLES[name], trace.frames[name])


def work(name: str, start: int, end: int, micro_batch: int = 0, chunk: int = 0, stage: int = 1) -> Events:
    facts = {"microbatch": micro_batch, "model_chunk": chunk, "pp_rank": stage}
    return [{"name": name, "ph": "B", "rel_ts": start}, {"name": name, "ph": "E", "rel_ts": end} | facts]


def iteration(inside: Events, length: int, wall: int, pause: int = 0) -> Events:
    begin = {"name": "iteration", "ph": "B", "pad_before": pause}
    end = {"name": "iteration", "ph": "E", "rel_ts": length, "duration_wall": wall, "duration_cuda": length}
    return [begin, *inside, end]


def all_ranks(name: str, phase: str, ts: float, stage: int, **facts: int) -> dict[str, Any]:
    return {"name": name, "ph": phase, "ts": ts, "pid": stage, "tid": 0, "args": {"iteration": 10} | facts}


def test_a_begin_and_its_end_are_one_span(tmp_path):
    path = write(tmp_path / "a.json", iteration(work("forward", 10, 25, micro_batch=3, chunk=2), 100, 110))
    (trace,) = read_pp_timeline(path)
    span = table(trace, "spans").row(0, named=True)
    assert (span["kind"], span["name"], span["start_ns"], span["duration_ns"]) == (
        "kernel",
        "forward",
        10,
        15,
    )
    assert (span["micro_batch"], span["model_chunk"], span["device"], span["stream"]) == (3, 2, 0, 0)
    assert (trace.rank, table(trace, "workers")["pp"][0]) == (1, 1)


def test_iterations_follow_each_other_on_the_wall_clock(tmp_path):
    events = iteration(work("forward", 10, 25), 100, 110) + iteration(work("forward", 10, 25), 100, 120, 7)
    (trace,) = read_pp_timeline(write(tmp_path / "rank1.json", events))
    assert table(trace, "spans")["start_ns"].to_list() == [10, 110 + 7 + 10]
    steps = table(trace, "steps").select("step", "start_ns", "duration_ns").rows()
    assert steps == [(0, 0, 110), (1, 117, 120)]


def test_a_begin_without_an_end_is_counted(tmp_path):
    events = iteration([*work("forward", 10, 25), {"name": "backward", "ph": "B", "rel_ts": 30}], 100, 110)
    (trace,) = read_pp_timeline(write(tmp_path / "rank1.json", events))
    assert table(trace, "spans")["name"].to_list() == ["forward"]
    assert trace.skipped == {"events without an end": 1}


def test_one_file_of_all_ranks_is_in_microseconds(tmp_path):
    events = []
    for stage in (0, 1):
        facts = {"microbatch": 0, "model_chunk": 0, "pp_rank": stage}
        events += [
            all_ranks("iteration begin", "i", stage, stage),
            all_ranks("forward", "B", 10 + stage, stage),
            all_ranks("forward", "E", 20 + stage, stage, **facts),
            all_ranks("reduce", "i", 30, stage),
            all_ranks("iteration end", "i", 50, stage),
        ]
    first, second = read_pp_timeline(write(tmp_path / "all.json.gz", events))
    assert [first.rank, second.rank, first.world_size] == [0, 1, 2]
    assert table(second, "spans").select("start_ns", "duration_ns").rows() == [(11_000, 10_000)]
    steps = table(second, "steps").select("step", "start_ns", "duration_ns", "window").rows()
    assert steps == [(10, 1_000, 49_000, 0)]
    assert first.skipped == {"instants": 2}
    assert table(second, "workers").select("rank", "pp", "world_size").rows() == [(1, 1, 2)]


def test_communication_has_streams_of_its_own_and_its_peer(tmp_path):
    write(tmp_path / "config.json", {"pp_size": 4, "world_size": 4})
    inside = [
        *work("forward-recv", 1, 2, stage=0),
        *work("forward", 2, 10, stage=0),
        *work("forward-send", 10, 12, stage=0),
        *work("backward-recv-forward-send", 12, 14, stage=0),
        *work("allreduce", 20, 30, stage=0),
    ]
    (trace,) = read_pp_timeline(write(tmp_path / "rank0.json", iteration(inside, 100, 100)))
    spans = table(trace, "spans")
    assert spans.filter(pl.col("stream") == 0)["name"].to_list() == ["forward"]
    assert spans["stream"].n_unique() == 5
    rows = table(trace, "collectives").select("op", "peer").rows()
    assert rows == [("recv", 3), ("send", 1), ("send_recv", -1), ("all_reduce", -1)]


def primus(forward: list[float], backward: list[float], total: float) -> dict[str, Any]:
    times: dict[str, Any] = {"total": total, "memory": 1.5}
    for name, begins in (("fwd", forward), ("bwd", backward)):
        times |= {f"{name}_start": begins, f"{name}_end": [begin + 1.0 for begin in begins]}
    return times


def test_lists_of_times_are_in_milliseconds_by_micro_batch(tmp_path):
    path = write(tmp_path / "pp_rank_2.json", {"3": primus([0.5, 2.5], [4.0, 6.0], 8.0)})
    (trace,) = read_pp_timeline(path)
    spans = table(trace, "spans")
    assert spans.select("name", "micro_batch", "start_ns", "duration_ns").rows() == [
        ("forward", 0, 500_000, 1_000_000),
        ("forward", 1, 2_500_000, 1_000_000),
        ("backward", 0, 4_000_000, 1_000_000),
        ("backward", 1, 6_000_000, 1_000_000),
    ]
    assert (trace.rank, table(trace, "steps")["step"].to_list()) == (2, [3])
    assert table(trace, "workers")["pp"][0] == 2


def test_an_iteration_begins_when_the_slowest_rank_has_ended_the_one_before(tmp_path):
    slow = write(tmp_path / "pp_rank_0.json", {str(n): primus([1.0], [3.0], 10.0) for n in (1, 2)})
    fast = write(tmp_path / "pp_rank_1.json", {str(n): primus([2.0], [3.0], 6.0) for n in (1, 2)})
    write(tmp_path / "result.json", {"1": {"total": 99.0}})  # of something else
    for path in (slow, fast):
        (trace,) = read_pp_timeline(path)
        assert table(trace, "steps")["start_ns"].to_list() == [0, 10_000_000]
        assert table(trace, "steps")["duration_ns"].to_list() == [10_000_000, 10_000_000]


def test_with_virtual_stages_the_micro_batch_of_a_list_is_unknown(tmp_path):
    write(tmp_path / "config.json", {"pp_size": 2, "world_size": 4, "vp_size": 2})
    (trace,) = read_pp_timeline(write(tmp_path / "pp_rank_0.json", {"1": primus([0.5], [4.0], 8.0)}))
    assert table(trace, "spans")["micro_batch"].to_list() == [-1, -1]
    assert trace.world_size == 2
    assert len(trace.warnings) == 2  # that, and ranks that share a stage


def test_without_rank_or_name_the_caller_decides(tmp_path):
    path = write(tmp_path / "times.json", {"1": primus([0.5], [4.0], 8.0)})
    assert read_pp_timeline(path)[0].rank == -1
    (trace,) = read_pp_timeline(path, rank=3)
    assert (trace.rank, table(trace, "spans")["rank"].unique().to_list()) == (3, [3])


def test_timelines_are_known_by_their_content():
    assert is_pp_timeline(json.dumps(iteration(work("forward", 1, 2), 3, 3), indent=1).encode())
    assert is_pp_timeline(json.dumps([all_ranks("forward", "E", 1, 0, microbatch=0)]).encode())
    assert is_pp_timeline(json.dumps({"1": primus([0.5], [4.0], 8.0)}).encode())
    assert not is_pp_timeline(b'{"traceEvents": [{"ph": "X", "name": "iteration", "ts": 1, "dur": 2}]}')
    assert not is_pp_timeline(b'[{"ph": "X", "name": "forward", "args": {"model_chunk": 0, "mb_id": 0}}]')


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        read_pp_timeline(path)
    assert len(str(refused.value).splitlines()) == 1
    assert str(path) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "content", [iteration(work("forward", 1, 2), 3, 3), {"1": primus([0.5], [4.0], 8.0)}]
)
def test_a_file_cut_short_is_refused(tmp_path, content):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(content)[:-9])
    assert "cut short" in refusal(path)


def test_a_list_without_all_its_ends_is_refused(tmp_path):
    times = primus([0.5, 2.0], [4.0], 8.0) | {"fwd_end": [1.0]}
    assert "iteration 1 has unequal numbers of starts and ends" in refusal(
        write(tmp_path / "rank0.json", {"1": times})
    )


def test_iterations_without_a_number_are_refused(tmp_path):
    assert "unnumbered" in refusal(write(tmp_path / "rank0.json", {"first": primus([0.5], [4.0], 8.0)}))


def test_work_that_ends_before_it_begins_is_counted(tmp_path):
    times = primus([0.5, 3.0], [4.0], 8.0) | {"fwd_end": [1.0, 2.0]}
    (trace,) = read_pp_timeline(write(tmp_path / "rank0.json", {"1": times}))
    assert table(trace, "spans").select("name", "micro_batch").rows() == [("forward", 0), ("backward", 0)]
    assert trace.skipped == {"work that ends before it begins": 1}


def test_columns_of_another_type_are_refused(tmp_path):
    times = primus([0.5], [4.0], 8.0) | {"fwd_end": "soon"}
    assert "not a pipeline timeline" in refusal(write(tmp_path / "rank0.json", {"1": times}))


@pytest.mark.parametrize("content", [[], iteration([], 3, 3), {}])
def test_a_timeline_without_work_is_refused(tmp_path, content):
    assert "no forward or backward" in refusal(write(tmp_path / "rank0.json", content))


def test_stages_without_a_common_clock_are_refused(tmp_path):
    events = iteration(work("forward", 1, 2, stage=0) + work("forward", 3, 4, stage=1), 5, 5)
    assert "a file of each" in refusal(write(tmp_path / "all.json", events))


def real(traces: Path, pattern: str) -> list[tuple[Any, list[RankTrace]]]:
    files = sorted((traces / "pp_timeline").glob(pattern))
    return [(json.loads(gzip.decompress(path.read_bytes())), read_pp_timeline(path)) for path in files]


def test_real_files_of_one_rank_each(traces):
    begins = []
    for rank, (events, (trace,)) in enumerate(real(traces, "megatronapp_pp4/*.json.gz")):
        spans, steps = table(trace, "spans"), table(trace, "steps")
        assert (trace.rank, table(trace, "workers")["pp"][0]) == (rank, rank)
        ends = [event for event in events if event["ph"] == "E"]
        counted = Counter(event["name"] for event in ends)
        assert dict(spans.group_by("name").len().rows()) == {n: counted[n] for n in ("forward", "backward")}
        assert steps.height == counted["iteration"] == 20
        expected = Counter((e["name"], e["microbatch"], e["model_chunk"]) for e in ends if "microbatch" in e)
        assert Counter(spans.select("name", "micro_batch", "model_chunk").rows()) == expected
        assert spans["duration_ns"].sum() == sum(
            (1 if event["ph"] == "E" else -1) * event["rel_ts"]
            for event in events
            if event["name"] in ("forward", "backward")
        )
        begins.append(steps["start_ns"])
    # Laid out rank by rank, iterations still begin together.
    apart = pl.DataFrame({str(rank): begin for rank, begin in enumerate(begins)})
    assert (apart.max_horizontal() - apart.min_horizontal()).max() < 200_000


def test_a_real_file_of_all_ranks(traces):
    ((events, ranks),) = real(traces, "megatronapp_pp4_agg_iter10.json.gz")
    assert [trace.rank for trace in ranks] == [0, 1, 2, 3]
    for trace in ranks:
        mine = [e for e in events if e["pid"] == trace.rank and e["name"] in ("forward", "backward")]
        spans = table(trace, "spans")
        assert spans.height == len(mine) / 2
        total = sum((1 if e["ph"] == "E" else -1) * e["ts"] for e in mine)
        assert spans["duration_ns"].sum() == round(total * 1000)
        (step,) = table(trace, "steps").rows(named=True)
        marks = {e["name"]: e["ts"] for e in events if e["pid"] == trace.rank and e["ph"] == "i"}
        assert (step["step"], step["start_ns"]) == (10, marks["iteration begin"] * 1000)
        assert step["duration_ns"] == (marks["iteration end"] - marks["iteration begin"]) * 1000


def test_real_lists_of_times(traces):
    read = real(traces, "primus_pp8/pp_rank_*.json.gz")
    slowest = [max(times[number]["total"] for times, _ in read) for number in read[0][0]]
    for rank, (times, (trace,)) in enumerate(read):
        spans, steps = table(trace, "spans"), table(trace, "steps")
        assert (trace.rank, trace.world_size) == (rank, 8)
        assert (spans.height, steps.height) == (20 * 2 * 16, 20)
        total = sum(
            sum(each[f"{name}_end"]) - sum(each[f"{name}_start"])
            for each in times.values()
            for name in ("fwd", "bwd")
        )
        assert spans["duration_ns"].sum() == pytest.approx(total * 1e6, abs=1000)
        begins = [round(sum(slowest[:number]) * 1e6) for number in range(20)]
        assert (steps["start_ns"] - pl.Series(begins)).abs().max() < 20


def test_real_work_of_a_stage_does_not_overlap(traces):
    for _, ranks in real(traces, "**/*rank*.json.gz"):
        for trace in ranks:
            spans = table(trace, "spans")
            gap = spans["start_ns"] - (spans["start_ns"] + spans["duration_ns"]).shift(1)
            assert gap.min() >= 0


def test_broken_utf8_is_one_line(tmp_path):
    path = tmp_path / "rank0.json"
    path.write_bytes(b'[{"name": "\xff", "ph": "B", "microbatch": 1}]')
    with pytest.raises(InputError, match=r"rank0\.json: not a pipeline timeline"):
        read_pp_timeline(path)
