"""Flight recorder dumps: every version, what its fields trap one into, damage, and real ones."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.ingest.flight_recorder import is_dump, read_dump
from dpro.ingest.reading.files import read_head
from dpro.ingest.trace import RankTrace
from dpro.schema import COLLECTIVES, TABLES, conform

GROUPS = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
    "7": {"name": "7", "desc": "PIPELINE", "ranks": "[1, 3]"},
}
GATHER = {
    "record_id": 5,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 12,
    "p2p_seq_id": 0,
    "profiling_name": "nccl:_all_gather_base",
    "time_created_ns": 1000,
    "input_sizes": [[2, 3]],
    "input_dtypes": ["BFloat16"],
    "output_sizes": [[8, 3]],
    "output_dtypes": ["BFloat16"],
    "state": "completed",
    "time_discovered_started_ns": 2000,
    "time_discovered_completed_ns": 5000,
    "retired": True,
    "is_p2p": False,
}
SEND = GATHER | {
    "record_id": 6,
    "pg_id": 1,
    "process_group": ("7", "PIPELINE"),
    "p2p_seq_id": 4,
    "profiling_name": "nccl:send 0->1",
    "output_sizes": [[2, 3]],
    "state": "scheduled",
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "retired": False,
    "is_p2p": True,
}
DUMP = {"version": "2.9", "pg_config": GROUPS, "nccl_version": "2.27.3", "entries": [GATHER, SEND]}


def write(path: Path, dump: Any, encoding: str) -> Path:
    """A dump as PyTorch writes it: C++ pickles it with protocol 2, or writes JSON with sorted keys."""
    if encoding == "json":
        # JSON has no null times: PyTorch writes 0.
        entries = [
            {key: 0 if value is None else value for key, value in entry.items()}
            for entry in dump.get("entries", [])
        ]
        document = {**dump, **({"entries": entries} if entries else {})}
        if not entries:
            document.pop("entries", None)  # an empty list of entries is not written
        path.write_text(json.dumps(document, sort_keys=True))
    else:
        path.write_bytes(pickle.dumps(dump, protocol=2))
    return path


@pytest.fixture(params=["pickle", "json"])
def encoding(request) -> str:
    return request.param


@pytest.fixture
def dump(encoding, tmp_path) -> Path:
    return write(tmp_path / "nccl_trace_rank_1", DUMP, encoding)


def rows_of(trace: RankTrace) -> list[dict[str, Any]]:
    """All rows as they would be stored, by their ids."""
    return conform(COLLECTIVES, trace.frames["collectives"]).sort("collective_id").rows(named=True)


def row_of(entry: dict[str, Any], tmp_path: Path, *, rank: int = 1, **facts: Any) -> dict[str, Any]:
    """The row of a dump's only entry."""
    path = write(tmp_path / f"_dump_{rank}", DUMP | facts | {"entries": [entry]}, "pickle")
    (row,) = rows_of(read_dump(path))
    return row


def test_each_entry_is_one_row(dump):
    trace = read_dump(dump)
    gather, send = rows_of(trace)
    assert (trace.rank, trace.world_size, trace.versions) == (1, 4, {"nccl": "2.27.3"})
    assert (gather["op"], gather["sequence"], gather["collective_id"]) == ("all_gather", 12, 5)
    assert (gather["group"], gather["group_ranks"]) == ("0 default_pg", "0-3")
    assert (gather["bytes_in"], gather["bytes_out"], gather["dtype"]) == (12, 48, "bfloat16")
    assert (gather["enqueued_ns"], gather["start_ns"], gather["duration_ns"]) == (1000, -1, -1)
    assert (send["op"], send["sequence"], send["start_ns"], send["duration_ns"]) == ("send", 4, -1, -1)
    assert {gather["window"], send["window"]} == {-1}
    assert (gather["state"], send["state"]) == ("completed", "scheduled")


# What each version added or renamed, as far as dpro takes it.
VERSIONS = {
    "2.4": {},
    "2.5": {"thread_name": "python", "thread_id": "139"},
    "2.7": {"nccl_version": "2.21.5"},
    "2.9": {"nccl_version": "2.27.3"},
    "2.10": {"comm_lib_version": "2.27.7"},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_dumps_of_every_version_give_the_same(version, encoding, tmp_path):
    added = VERSIONS[version]
    of_dump = {name: value for name, value in added.items() if name.endswith("version")}
    of_entry = {name: value for name, value in added.items() if name not in of_dump}
    entries = [entry | of_entry | {"duration_ms": 1.25} for entry in (GATHER, SEND)]
    document = {"version": version, "pg_config": GROUPS, "pg_status": {}, **of_dump, "entries": entries}
    path = write(tmp_path / "trace_rank3.bin", document, encoding)
    trace = read_dump(path)
    assert is_dump(read_head(path))
    assert (trace.rank, trace.versions) == (3, {"nccl": next(iter(of_dump.values()))} if of_dump else {})
    assert [(row["op"], row["duration_ns"]) for row in rows_of(trace)] == [
        ("all_gather", 1_250_000),
        ("send", 1_250_000),
    ]


def test_the_library_of_another_backend_is_not_called_nccl(tmp_path):
    entry = GATHER | {"profiling_name": "xccl:all_reduce"}
    path = write(
        tmp_path / "_dump_0", {"pg_config": {}, "comm_lib_version": "2021.1", "entries": [entry]}, "json"
    )
    assert read_dump(path).versions == {"communication library": "2021.1"}


def test_entries_of_the_first_versions_name_their_group_alone_and_count_everything_together(tmp_path):
    entry = {
        "record_id": 1,
        "pg_name": "0",
        "seq_id": 9,
        "profiling_name": "nccl:send 1->2",
        "state": "started",
    }
    row = row_of(entry, tmp_path)
    assert (row["group"], row["group_ranks"], row["sequence"]) == ("0", "0-3", 9)
    assert (row["peer"], row["bytes_in"], row["dtype"], row["enqueued_ns"]) == (2, -1, "", -1)


def test_a_dump_of_active_entries_only_may_have_none(encoding, tmp_path):
    path = write(tmp_path / "_dump_2", DUMP | {"entries": [], "pg_status": {}}, encoding)
    trace = read_dump(path)
    assert is_dump(path.read_bytes())
    assert (trace.rank, trace.world_size, trace.frames["collectives"].height) == (2, 4, 0)


def test_entries_that_do_not_all_hold_the_same_are_read_as_each_would_be_alone(tmp_path):
    whole = GATHER | {"duration_ms": 1.5}
    lacking = [{key: value for key, value in whole.items() if key != left} for left in whole]
    entries = [entry | {"record_id": number} for number, entry in enumerate([whole, *lacking, GATHER])]
    together = read_dump(write(tmp_path / "rank_1", DUMP | {"entries": entries}, "pickle"))
    assert rows_of(together) == [row_of(entry, tmp_path) for entry in entries]


def test_when_a_watchdog_looked_is_no_measurement(tmp_path):
    polled = row_of(GATHER, tmp_path)
    measured = row_of(GATHER | {"duration_ms": 0.5}, tmp_path)
    assert (polled["start_ns"], polled["duration_ns"]) == (-1, -1)
    assert (measured["start_ns"], measured["duration_ns"]) == (-1, 500_000)


def test_a_time_that_json_writes_as_zero_is_unknown(tmp_path):
    assert row_of(GATHER | {"time_created_ns": 0}, tmp_path)["enqueued_ns"] == -1


@pytest.mark.parametrize(
    ("name", "state", "retired", "expected"),
    [
        ("gloo:all_reduce", "scheduled", True, "completed"),  # gloo never moves an entry on
        ("gloo:all_reduce", "scheduled", False, "scheduled"),
        ("nccl:all_reduce", "scheduled", True, "scheduled"),  # retired when it was aborted
        ("nccl:all_reduce", "started", False, "started"),
        ("nccl:all_reduce", "exploded", False, ""),
        ("nccl:all_reduce", None, False, ""),
    ],
)
def test_state_is_how_far_an_entry_got(tmp_path, name, state, retired, expected):
    entry = GATHER | {"profiling_name": name, "state": state, "retired": retired}
    assert row_of(entry, tmp_path)["state"] == expected


def test_groups_are_joined_by_name_since_their_ids_differ_between_ranks(tmp_path):
    of_one = row_of(GATHER | {"pg_id": 1}, tmp_path, rank=1)
    of_two = row_of(GATHER | {"pg_id": 4}, tmp_path, rank=2)
    assert of_one["group"] == of_two["group"] == "0 default_pg"
    assert of_one["group_ranks"] == of_two["group_ranks"] == "0-3"


def test_a_group_of_unknown_ranks_stays_unknown(tmp_path):
    entry = GATHER | {"profiling_name": "gloo:all_reduce", "process_group": ("1", "undefined")}
    path = write(
        tmp_path / "_dump_0",
        {"pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}, "entries": [entry]},
        "json",
    )
    trace = read_dump(path)
    (row,) = rows_of(trace)
    assert (row["group"], row["group_ranks"], trace.world_size) == ("1", "", -1)


@pytest.mark.parametrize(
    ("ranks", "rank", "name", "peer"),
    [
        ("[1, 3]", 1, "nccl:send 0->1", 3),
        ("[1, 3]", 3, "nccl:recv 1<-0", 1),
        ("[0, 8]", 0, "nccl:send 0->1", 8),
        ("[0, 2, 4]", 0, "nccl:send 0->2", 4),  # 2 is a rank of the job and a place in the group
        ("[0, 1, 2, 3]", 3, "nccl:recv 3<-0", 0),
        ("[4, 5]", 4, "nccl:send 4->5", 5),  # numbered across the job
        ("[]", 4, "nccl:send 0->1", 1),
    ],
)
def test_a_peer_numbered_within_the_group_becomes_a_global_rank(tmp_path, ranks, rank, name, peer):
    groups = {"7": {"name": "7", "desc": "PIPELINE", "ranks": ranks}}
    assert row_of(SEND | {"profiling_name": name}, tmp_path, rank=rank, pg_config=groups)["peer"] == peer


def test_a_send_gets_nothing(dump):
    send = rows_of(read_dump(dump))[1]
    assert (send["peer"], send["bytes_in"], send["bytes_out"]) == (3, 12, 0)


def test_a_dump_is_known_by_its_content(dump):
    assert is_dump(dump.read_bytes())
    assert not is_dump(b'{"traceEvents": [], "distributedInfo": {"pg_config": []}}')
    assert not is_dump(b'{"schema": "1.0.1", "nodes": []}')


def test_a_full_dump_is_known_though_its_groups_come_late(tmp_path):
    entries = [GATHER | {"record_id": number} for number in range(2000)]
    path = write(tmp_path / "_dump_0", DUMP | {"entries": entries}, "json")
    head = read_head(path)
    assert b"pg_config" not in head
    assert is_dump(head)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("_dump_12", 12),
        ("nccl_trace_rank_3", 3),
        ("rank7_1758581237.pickle", 7),
        ("trace4.json", 4),
        ("dump.json", -1),
    ],
)
def test_the_name_states_the_rank(tmp_path, name, rank):
    assert read_dump(write(tmp_path / name, DUMP, "json")).rank == rank
    assert read_dump(tmp_path / name, rank=5).rank == 5


class _Bomb:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda bomb: {"entries": [bomb]},
        lambda bomb: {"pg_config": {"0": bomb}, "entries": []},
        lambda bomb: bomb,
        lambda bomb: {"entries": [{"input_sizes": [[bomb]]}]},
    ],
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_dump_that_wants_to_run_code_is_refused(tmp_path, wrapped, protocol):
    path = tmp_path / "_dump_0"
    path.write_bytes(b"\x80\x02" * (protocol < 2) + pickle.dumps(wrapped(_Bomb(tmp_path / "boom")), protocol))
    with pytest.raises(InputError, match=r"_dump_0.*mkdir"):
        read_dump(path)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cbuiltins\neval\n(S'1/0'\ntR.",
        b"\x80\x02(i__main__\nBomb\n.",
        b"\x80\x02P0\n.",  # a persistent id
        b"\x80\x04\x82\x01.",  # an extension code
        b"\x80\x02}r\xff\xff\xff\x7f.",  # room for 2 billion values
        b"\x80\x02}p2147483647\n.",
    ],
)
def test_other_ways_to_do_harm_are_refused_too(tmp_path, content):
    path = tmp_path / "_dump_0"
    path.write_bytes(content)
    with pytest.raises(InputError, match="_dump_0"):
        read_dump(path)


@pytest.mark.parametrize(
    "content",
    [b"\x80\x02garbage", b"{", b"[1]", b'{"entries": [3]}', b'{"entries": "all"}', b"{}", b"\x80\x02N."],
)
def test_a_damaged_dump_is_one_line(tmp_path, content):
    path = tmp_path / "_dump_0"
    path.write_bytes(content)
    with pytest.raises(InputError, match="_dump_0") as refusal:
        read_dump(path)
    assert "\n" not in str(refusal.value)


def test_a_dump_that_is_cut_short_is_one_line(dump):
    dump.write_bytes(dump.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"nccl_trace_rank_1: not readable as a flight recorder dump"):
        read_dump(dump)


@pytest.mark.parametrize("where", ["pg_id", "input_sizes"])
def test_a_dump_that_would_grow_without_end_as_text_is_refused(tmp_path, where):
    """Lists that hold each other twice are small in a pickle, and endless when they are written out."""
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested, nested]
    with pytest.raises(InputError, match=r"_dump_1.*repeats values excessively"):
        row_of(GATHER | {where: nested}, tmp_path)


def test_sizes_that_no_tensor_has_are_unknown(tmp_path):
    for sizes in ([[2] * 1_000_000], [[1 << 62] * 60], [[-4]], [[True]], [["4"]], [4]):
        row = row_of(GATHER | {"input_sizes": sizes, "output_sizes": sizes}, tmp_path)
        assert (row["bytes_in"], row["bytes_out"]) == (-1, -1)


def test_ranks_may_be_a_list(tmp_path):
    assert row_of(GATHER, tmp_path, pg_config={"0": {"ranks": [0, 1]}})["group_ranks"] == "0,1"


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=3), st.none()), max_size=3),
    st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=4), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def is_trace_or_refusal(path: Path) -> None:
    try:
        trace = read_dump(path)
    except InputError:
        return
    for name, frame in trace.frames.items():
        conform(TABLES[name], frame)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entry=st.dictionaries(st.sampled_from([*GATHER, "duration_ms", "pg_name"]), ODD, max_size=4),
    facts=st.dictionaries(st.sampled_from([*DUMP, "comm_lib_version"]), ODD, max_size=2),
    ranks=ODD,
)
def test_odd_values_give_a_trace_or_a_refusal(tmp_path, entry, facts, ranks):
    config = {"0": {"ranks": ranks}, **GROUPS}
    document = DUMP | {"pg_config": config, "entries": [GATHER | entry, SEND | entry]} | facts
    path = tmp_path / "_dump_0"
    path.write_bytes(pickle.dumps(document))
    is_trace_or_refusal(path)
    path.write_text(json.dumps(document))
    is_trace_or_refusal(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    encoded=st.sampled_from([pickle.dumps(DUMP, protocol=2), json.dumps(DUMP).encode()]),
    at=st.floats(0, 1),
    cut=st.integers(0, 20),
    put=st.binary(max_size=20),
)
def test_mangled_bytes_give_a_trace_or_a_refusal(tmp_path, encoded, at, cut, put):
    place = int(at * len(encoded))
    path = tmp_path / "_dump_0"
    path.write_bytes(encoded[:place] + put + encoded[place + cut :])
    is_trace_or_refusal(path)


def test_a_group_whose_name_no_text_can_hold_is_read(tmp_path):
    row = row_of(GATHER, tmp_path, pg_config={"\ud800": {"desc": "\ud800", "ranks": [0, 1 << 40]}})
    assert row["op"] == "all_gather"
