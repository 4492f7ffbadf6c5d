"""Logs of NCCL's Inspector."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.extensions.nccl.inspector import is_inspector_log, read_inspector_log
from dpro.ingest.reading.files import read_head
from dpro.schema import COLLECTIVES, TABLES, conform

Line = dict[str, Any]


def whose(
    rank: int = 2,
    num_ranks: int = 8,
    group: str = "0xabc",
    *,
    pid: int = 100,
    version: str = "v4.0",
    **header: Any,
) -> Line:
    """The part of a line that says whose it is."""
    return {
        "header": {"id": group, "rank": rank, "n_ranks": num_ranks, "nnodes": 1, **header},
        "metadata": {
            "inspector_output_format_version": version,
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": 1_748_030_377_748_202,
            "hostname": "node0",
            "pid": pid,
        },
    }


def coll(op: str = "AllReduce", sn: int = 7, size: int = 1024, us: Any = 250, **more: Any) -> Line:
    """A measured collective."""
    return {
        "coll_perf": {
            "coll": op,
            "coll_sn": sn,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": us,
            "coll_algobw_gbs": 1.5,
            "coll_busbw_gbs": 2.5,
            **more,
        }
    }


def p2p(op: str, peer: int, sn: int = 3) -> Line:
    """A measured send or receive."""
    facts = {"p2p": op, "p2p_sn": sn, "p2p_peer": peer, "p2p_msg_size_bytes": 64, "p2p_exec_time_us": 10}
    return {"p2p_perf": {**facts, "p2p_timing_source": "kernel_gpu"}}


def log(path: Path, *lines: Line | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, separators=(",", ":")) for line in lines]
    content = "".join(f"{text}\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rows_of(path: Path, **kwargs: Any) -> list[dict[str, Any]]:
    """All rows of a log of one rank as they would be stored, by their ids."""
    (trace,) = read_inspector_log(path, **kwargs)
    return conform(COLLECTIVES, trace.frames["collectives"]).sort("collective_id").rows(named=True)


def test_a_line_is_a_collective_with_its_measured_duration(tmp_path):
    path = log(tmp_path / "node0-pid100.log", whose() | coll())
    (trace,) = read_inspector_log(path)
    (row,) = rows_of(path)
    assert is_inspector_log(read_head(path))
    assert (trace.rank, trace.world_size, trace.host) == (2, 8, "node0")
    assert trace.versions == {"NCCL Inspector format": "v4.0"}
    assert trace.frames["workers"].row(0, named=True) == {
        "rank": 2,
        "world_size": 8,
        "host": "node0",
        "pid": 100,
        "source": "NCCL Inspector",
    }
    assert (row["op"], row["group"], row["sequence"]) == ("all_reduce", "0xabc", 7)
    assert (row["bytes_in"], row["bytes_out"], row["duration_ns"]) == (1024, 1024, 250_000)
    assert (row["start_ns"], row["enqueued_ns"], row["window"]) == (-1, -1, -1)
    assert row["source"] == "NCCL Inspector"


def test_what_follows_a_dump_marker_is_of_its_communicator(tmp_path):
    path = log(
        tmp_path / "log",
        whose(2, 8, "0xworld", version="v4.4", comm_name="unknown") | {"dump_stats": {"coll_records": 2}},
        coll(sn=1, coll_algo="RING", coll_proto="LL128", coll_timing_source="kernel_gpu"),
        coll(sn=2, coll_algo="unknown", coll_proto="unknown", coll_timing_source="kernel_cpu"),
        whose(0, 2, "0xpair", version="v4.4", comm_name="tp") | {"dump_stats": {"coll_records": 1}},
        coll(sn=9),
        p2p("Send", 1),
    )
    rows = rows_of(path)
    assert [(row["group"], row["sequence"], row["rank"]) for row in rows] == [
        ("0xworld", 1, 2),
        ("0xworld", 2, 2),
        ("0xpair tp", 9, 2),
        ("0xpair tp", 3, 2),
    ]
    assert [(row["algorithm"], row["protocol"]) for row in rows[:2]] == [("RING", "LL128"), ("", "")]


@pytest.mark.parametrize("version", ["v4.0", "v4.1", "v5.0"])
def test_formats_that_repeat_the_communicator_in_each_line_give_the_same(tmp_path, version):
    lines = [whose(version=version) | coll(sn=1), whose(1, 2, "0xpair", version=version) | coll(sn=5)]
    assert [(row["group"], row["sequence"]) for row in rows_of(log(tmp_path / "log", *lines))] == [
        ("0xabc", 1),
        ("0xpair", 5),
    ]


def test_a_line_may_say_whose_it_is_without_parts(tmp_path):
    flat = {"id": "0xabc", "rank": 3, "n_ranks": 8, "nnodes": 1, "pid": 5, "hostname": "worker"}
    (trace,) = read_inspector_log(log(tmp_path / "log", flat | coll(us=61974.5)))
    assert (trace.rank, trace.host) == (3, "worker")
    assert trace.frames["collectives"]["duration_ns"].to_list() == [61_974_500]


@pytest.mark.parametrize(
    ("op", "named", "bytes_in", "bytes_out"),
    [
        ("AllReduce", "all_reduce", 1024, 1024),
        ("AllGather", "all_gather", 1024, 8192),
        ("ReduceScatter", "reduce_scatter", 8192, 1024),
        ("AlltoAll", "all_to_all", 8192, 8192),
        ("Broadcast", "broadcast", 1024, 1024),
        ("Reduce", "reduce", 1024, -1),
        ("Scatter", "scatter", -1, 1024),
        ("Gather", "gather", 1024, -1),
        ("Novelty", "Novelty", 1024, 1024),
    ],
)
def test_bytes_are_those_of_this_rank(tmp_path, op, named, bytes_in, bytes_out):
    (row,) = rows_of(log(tmp_path / "log", whose() | coll(op)))
    assert (row["op"], row["bytes_in"], row["bytes_out"]) == (named, bytes_in, bytes_out)


def test_sends_and_receives_have_a_direction_and_a_peer(tmp_path):
    send, receive = rows_of(log(tmp_path / "log", whose() | p2p("Send", 5), whose() | p2p("Recv", 1)))
    assert (send["op"], send["peer"], send["bytes_in"], send["bytes_out"]) == ("send", 5, 64, 0)
    assert (receive["op"], receive["peer"], receive["bytes_in"], receive["bytes_out"]) == ("recv", 1, 0, 64)


def test_a_peer_in_a_smaller_communicator_is_unknown(tmp_path):
    rows = rows_of(log(tmp_path / "log", whose() | coll(), whose(0, 2, "0xpair") | p2p("Send", 1)))
    assert rows[1]["peer"] == -1


def test_verbose_logs_show_when_calls_and_kernels_began(tmp_path):
    channels = [{"channel_id": 0, "kernel_start_ts": 1_181}, {"channel_id": 1, "kernel_start_ts": 1_180}]
    never = [{"channel_id": 0, "kernel_start_ts": 0}]
    path = log(
        tmp_path / "log",
        whose()
        | coll(event_trace_ts={"coll_start_ts": 1_059, "coll_stop_ts": 1_064, "kernel_events": channels}),
        whose() | coll(event_trace_ts={"coll_start_ts": 1_059, "kernel_events": never}),
    )
    seen, unseen = rows_of(path)
    assert (seen["enqueued_ns"], seen["start_ns"]) == (1_059_000, 1_180_000)
    assert (unseen["enqueued_ns"], unseen["start_ns"]) == (1_059_000, -1)


def test_a_time_that_begins_with_the_call_is_no_duration(tmp_path):
    (row,) = rows_of(log(tmp_path / "log", whose() | coll(coll_timing_source="collective_cpu")))
    assert row["duration_ns"] == -1


def test_the_rank_is_the_one_in_the_largest_communicator(tmp_path):
    path = log(tmp_path / "log", whose(0, 2, "0xpair") | coll(), whose(5, 8, "0xworld") | coll())
    (trace,) = read_inspector_log(path)
    assert (trace.rank, trace.world_size) == (5, 8)
    assert trace.frames["collectives"]["rank"].to_list() == [5, 5]


def test_the_caller_may_know_the_rank_better(tmp_path):
    (row,) = rows_of(log(tmp_path / "log", whose(0, 2) | coll()), rank=6)
    assert row["rank"] == 6


def test_joined_logs_are_distinguished_by_process(tmp_path):
    path = log(
        tmp_path / "log", whose(0, pid=1) | coll(), whose(1, pid=2) | coll(), whose(0, 2, "p", pid=2) | coll()
    )
    traces = read_inspector_log(path)
    assert [(trace.rank, trace.frames["collectives"].height) for trace in traces] == [(0, 1), (1, 2)]


def test_a_process_of_several_gpus_is_several_ranks(tmp_path):
    path = log(tmp_path / "log", whose(0) | coll(), whose(1) | coll(), whose(0, 2, "0xpair") | coll())
    traces = read_inspector_log(path)
    assert [trace.rank for trace in traces] == [0, 1]
    assert traces[0].skipped == {"records of a process with several ranks": 1}


def test_what_is_not_taken_is_counted(tmp_path):
    path = log(
        tmp_path / "log",
        coll(),  # before anything says whose
        whose() | {"dump_stats": {"coll_dropped_since_last_dump": 3, "p2p_dropped_since_last_dump": 2}},
        coll(),
        {"proxy_trace": {"record_type": "proxy_op", "rank": 0}},
        whose(9, 8) | {"dump_stats": {}},  # no such place
        coll(),
        "[1, 2]",
        '{"coll_perf": {"coll": "AllRe',
    )
    (trace,) = read_inspector_log(path)
    assert trace.frames["collectives"].height == 1
    assert trace.skipped == {
        "records without a communicator": 2,
        "collectives that the Inspector dropped": 5,
        "records of NCCL's proxy that are not sends": 1,
        "malformed lines": 2,
    }


def test_unknown_keys_are_passed_over(tmp_path):
    path = log(tmp_path / "log.gz", whose(mood="good") | coll(graphCaptured=True) | {"weather": {"sun": 1}})
    assert is_inspector_log(read_head(path))
    assert len(rows_of(path)) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"coll_perf": {"coll"\n', "1 malformed lines"),
        (b'{"coll_perf": {"coll": "AllReduce"}}\n', "1 records without a communicator"),
        (b"\n\n", "no lines"),
        (b"\x00\xff\xfe\n", "1 malformed lines"),
    ],
)
def test_a_log_without_a_record_is_refused(tmp_path, content, reason):
    path = tmp_path / "node0-pid1.log"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"node0-pid1\.log: no collective .*{reason}"):
        read_inspector_log(path)


@pytest.mark.parametrize(
    "head", [b'{"traceEvents": []}', b'{"communicators": []}', b"\x80\x02coll_perf", b"coll_perf", b""]
)
def test_other_files_are_not_logs(head):
    assert not is_inspector_log(head)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
KEYS = st.sampled_from([*whose()["header"], *whose()["metadata"], "dump_stats", "comm_name"])
FACTS = st.sampled_from([*coll()["coll_perf"], *p2p("Send", 1)["p2p_perf"], "event_trace_ts", "coll_algo"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(KEYS, ODD, max_size=3),
    facts=st.dictionaries(FACTS, ODD, max_size=4),
    parts=st.dictionaries(
        st.sampled_from(["header", "metadata", "coll_perf", "dump_stats"]), ODD, max_size=1
    ),
    cut=st.integers(0, 400),
    put=st.binary(max_size=5),
)
def test_mangled_logs_give_traces_or_a_refusal(tmp_path, header, facts, parts, cut, put):
    odd = whose() | {"coll_perf": coll()["coll_perf"] | facts, "p2p_perf": p2p("Recv", 0)["p2p_perf"] | facts}
    odd["header"] = odd["header"] | header
    lines = [json.dumps(line) for line in (odd | parts, odd, whose() | coll())]
    content = "\n".join(lines).encode()
    path = tmp_path / "log"
    path.write_bytes(content[:cut] + put + content[cut + len(put) :])
    try:
        traces = read_inspector_log(path)
    except InputError:
        return
    for trace in traces:
        for name, frame in trace.frames.items():
            conform(TABLES[name], frame)
