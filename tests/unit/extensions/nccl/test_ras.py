"""Reports of NCCL's RAS."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.extensions.nccl.ras import is_ras_report, read_ras_report
from dpro.ingest.reading.files import read_head
from dpro.schema import TABLES, WORKERS, conform

WELL = {
    "init_state": 0,
    "async_error": 0,
    "finalize_called": False,
    "destroy_flag": False,
    "abort_flag": False,
}


def member(rank: int, *, gpu: int | None = None, calls: int = 11, **status: Any) -> dict[str, Any]:
    """A rank that answered."""
    gpu = rank if gpu is None else gpu
    return {
        "rank": rank,
        "host": "172.16.64.1",
        "pid": 1000 + gpu,
        "cuda_dev": 0,
        "nvml_dev": gpu,
        "status": WELL | status,
        "collective_counts": {"Broadcast": 1, "AllReduce": calls},
    }


def missing(rank: int, *, unresponsive: bool = True, dead: bool = False) -> dict[str, Any]:
    """A rank that did not answer."""
    entry = member(rank)
    del entry["collective_counts"]
    return entry | {"status": {"unresponsive": unresponsive, "considered_dead": dead}}


def communicator(
    *ranks: dict[str, Any], absent: tuple[Any, ...] = (), name: str = "0xae94"
) -> dict[str, Any]:
    return {
        "hash": name,
        "secondary_hash": "0xb7e7:0xb824",
        "size": len(ranks) + len(absent),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(absent),
        "ranks": list(ranks),
        **({"missing_ranks": list(absent)} if absent else {}),
    }


def report(path: Path, *communicators: dict[str, Any], before: str = "") -> Path:
    document = {
        "nccl_version": "2.29.1",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2025-12-19 13:06:53",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }
    path.write_text(before + json.dumps(document, indent=2))
    return path


def warnings_of(path: Path) -> list[str]:
    return [warning for trace in read_ras_report(path) for warning in trace.warnings]


def test_each_rank_is_a_worker(tmp_path):
    path = report(tmp_path / "ras.json", communicator(member(0), member(1, gpu=5)))
    traces = read_ras_report(path)
    assert is_ras_report(read_head(path))
    assert [(trace.rank, trace.world_size, trace.host) for trace in traces] == [
        (0, 2, "172.16.64.1"),
        (1, 2, "172.16.64.1"),
    ]
    worker = conform(WORKERS, traces[1].frames["workers"]).row(0, named=True)
    assert (worker["rank"], worker["local_rank"], worker["pid"]) == (1, 5, 1005)
    assert (worker["host"], worker["world_size"], worker["source"]) == ("172.16.64.1", 2, "NCCL RAS")
    assert traces[0].versions == {"nccl": "2.29.1"}
    assert warnings_of(path) == []


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (missing(1), "does not answer"),
        (missing(1, dead=True), "is considered dead"),
        (missing(1, unresponsive=False), "answers, but does not know the communicator"),
        (member(1, abort_flag=True), "was aborted"),
        (member(1, async_error=2), r"has an error \(async_error 2\)"),
        (member(1, init_state=7), "is still initialising"),
        (member(1, init_state=3), r"has an error \(init_state 3\)"),
        (missing(1) | {"status": {}, "considered_dead": True}, "is considered dead"),
    ],
)
def test_a_rank_in_trouble_is_a_warning(tmp_path, entry, expected):
    is_missing = "collective_counts" not in entry
    ranks, absent = ((member(0),), (entry,)) if is_missing else ((member(0), entry), ())
    path = report(tmp_path / "ras.json", communicator(*ranks, absent=absent))
    (warning,) = warnings_of(path)
    assert warning.startswith("RAS: rank 1 (172.16.64.1 pid 1001) ")
    assert re.search(expected, warning)
    assert [trace.rank for trace in read_ras_report(path)] == [0, 1]


def test_ranks_that_called_an_operation_a_different_number_of_times_are_a_warning(tmp_path):
    path = report(tmp_path / "ras.json", communicator(member(0), member(1), member(2, calls=10)))
    assert warnings_of(path) == [
        "RAS: communicator 0xae94: ranks differ in calls of AllReduce: 10 by 2; 11 by 0, 1"
    ]


def test_trouble_in_a_smaller_communicator_is_reported_of_the_global_rank(tmp_path):
    world = communicator(*(member(rank) for rank in range(4)), name="0xworld")
    pair = communicator(member(0, gpu=2), absent=(missing(1) | {"pid": 1003, "nvml_dev": 3},), name="0xpair")
    assert warnings_of(report(tmp_path / "ras.json", pair, world)) == [
        "RAS: rank 3 (172.16.64.1 pid 1003) does not answer (communicator 0xpair)"
    ]


def test_trouble_in_many_communicators_is_one_warning(tmp_path):
    both = [communicator(member(0), absent=(missing(1),), name=name) for name in ("0xa", "0xb")]
    (warning,) = warnings_of(report(tmp_path / "ras.json", *both))
    assert warning.endswith("does not answer (communicator 0xa, 0xb)")


def test_workers_outside_the_largest_communicator_are_counted(tmp_path):
    world = communicator(member(0), member(1), name="0xworld")
    other = communicator(member(0, gpu=7), name="0xother")
    assert read_ras_report(report(tmp_path / "ras.json", world, other))[0].skipped == {
        "workers that are not in the largest communicator": 1
    }


def test_the_answers_of_the_server_may_stand_before_the_report(tmp_path):
    path = report(tmp_path / "ras.txt", communicator(member(0)), before="OK\nOK\n")
    assert is_ras_report(read_head(path))
    assert len(read_ras_report(path)) == 1


def test_a_comma_that_nccl_2_28_left_out_is_put_back(tmp_path):
    path = report(tmp_path / "ras.json", communicator(member(0), absent=(missing(1, dead=True),)))
    broken = path.read_text().replace('"nvml_dev": 1,\n', '"nvml_dev": 1\n')
    assert broken != path.read_text()
    path.write_text(broken)
    (warning,) = warnings_of(path)
    assert "considered dead" in warning


def test_gpus_without_nvml_numbers_are_numbered_by_cuda(tmp_path):
    entry = member(0) | {"cuda_dev": 4}
    del entry["nvml_dev"]
    (trace,) = read_ras_report(report(tmp_path / "ras.json", communicator(entry)))
    assert trace.frames["workers"]["local_rank"].to_list() == [4]


def test_the_caller_may_know_the_rank_of_a_single_worker_better(tmp_path):
    (trace,) = read_ras_report(report(tmp_path / "ras.json", communicator(member(0))), rank=6)
    assert trace.rank == 6


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"communicators": [', "not readable as a RAS report"),
        ("[]", "not a RAS report"),
        ('{"communicators": 3}', "not a RAS report"),
        ('{"communicators": []}', "without a rank"),
        ('{"communicators": [{"size": 2, "ranks": [{"host": "a"}]}]}', "without a rank"),
        ('{"communicators": [3, null, {"ranks": "all"}]}', "without a rank"),
        ("OK\nJob summary\n", "not readable as a RAS report"),
    ],
)
def test_what_is_no_report_is_one_line(tmp_path, content, reason):
    path = tmp_path / "ras.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"ras\.json: .*{reason}") as refusal:
        read_ras_report(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("head", [b'{"traceEvents": []}', b'{"coll_perf": {}}', b"OK\nJob summary", b""])
def test_other_files_are_not_reports(head):
    assert not is_ras_report(head)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entry=st.dictionaries(st.sampled_from([*member(0), *WELL]), ODD, max_size=4),
    facts=st.dictionaries(st.sampled_from([*communicator()]), ODD, max_size=2),
    cut=st.integers(0, 1500),
    put=st.binary(max_size=4),
)
def test_mangled_reports_give_traces_or_a_refusal(tmp_path, entry, facts, cut, put):
    odd = member(1) | entry | {"status": WELL | entry}
    path = report(tmp_path / "ras.json", communicator(member(0), odd) | facts, communicator(member(0)))
    content = path.read_bytes()
    path.write_bytes(content[:cut] + put + content[cut + len(put) :])
    try:
        traces = read_ras_report(path)
    except InputError:
        return
    for trace in traces:
        for name, frame in trace.frames.items():
            conform(TABLES[name], frame)
