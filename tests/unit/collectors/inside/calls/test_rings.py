"""Rings of calls are counted without asking them, and dumped only while that harms nothing."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections import deque
from types import SimpleNamespace

import polars as pl
import pytest

pytest.importorskip("torch")

import torch

from dpro.collectors.convert import calls
from dpro.collectors.inside import captures
from dpro.collectors.inside.calls import flight
from dpro.collectors.inside.calls.flight import NCCL, OTHERS, Groups, Ring, RingDumper
from dpro.ingest.flight_recorder import read_dump
from tests.unit.collectors.convert.test_calls import written

RING = 200


class Clock:
    """Time as the flight recorder's thread sees it."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (flight, flight):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def gpu(monkeypatch):
    """A process whose training thread uses GPU 3; where each thread is by now."""
    at = {threading.get_ident(): 3}

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            at[threading.get_ident()] = self.device

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: at.get(threading.get_ident(), 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == 3, raising=False)
    return at


def in_thread(action):
    """What an action returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append((threading.get_ident(), action())))
    thread.start()
    thread.join(10)
    return found[0]


def recorder_of(folder=None):
    def write_file(name, content):
        (folder / name).write_bytes(content)

    return SimpleNamespace(
        training_thread=threading.get_ident(), device=None, num_messages=0, last_step_s=0.0, folder=folder,
        calls_saved_each_s=60.0,
        launch=folder / "launch" if folder else None, write_file=write_file,
        call=lambda action, *arguments: action(*arguments),
    )  # fmt: skip


def nccl_ring(dump=lambda: b"dump"):
    return Ring(NCCL, ".pickle", dump)


def test_a_thread_of_ours_dumps_nccl_with_the_gpu_of_the_training_thread(gpu):
    dumps = RingDumper(recorder_of())
    ring = nccl_ring(torch.cuda.current_device)
    assert in_thread(lambda: dumps.dump(ring))[1] == 3, "before a step: the only GPU this process uses"
    dumps.device._recorder.device = torch.device("cuda", 3)
    assert in_thread(lambda: dumps.dump(ring))[1] == 3
    dumps.device._recorder.device = torch.device("cuda", 5)
    assert in_thread(lambda: dumps.dump(ring))[1] is None, "it has no context there"
    assert dumps.dump(ring) == 3, "the training thread has it already"


def test_nccl_is_not_dumped_where_that_would_make_a_context(gpu, monkeypatch):
    dumps = RingDumper(recorder_of())
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: False)
    assert in_thread(lambda: dumps.dump(nccl_ring()))[1] is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert dumps.dump(nccl_ring()) is None
    assert dumps.dump(Ring(OTHERS, ".json", lambda: b"{}")) == b"{}", "no GPU is asked for these"


def test_nccl_is_not_dumped_while_a_graph_is_captured(gpu):
    dumps = RingDumper(recorder_of())
    graph = type("Graph", (), {})()
    captures.begin_capture(graph)
    try:
        assert in_thread(lambda: dumps.dump(nccl_ring()))[1] is None
    finally:
        captures.end_capture(graph)
    assert in_thread(lambda: dumps.dump(nccl_ring()))[1] == b"dump"


def test_no_ring_is_dumped_while_a_group_is_made_also_by_what_fails(gpu, monkeypatch):
    from torch.distributed import distributed_c10d

    dumps = RingDumper(recorder_of())
    other = Ring(OTHERS, ".json", lambda: b"{}")
    found = []

    def make(fails):
        found.append([in_thread(lambda ring=ring: dumps.dump(ring))[1] for ring in (nccl_ring(), other)])
        if fails:
            raise RuntimeError("no group")
        return "group"

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", make)
    for name in ("split_group", "shrink_group"):
        monkeypatch.delattr(distributed_c10d, name, raising=False)
    flight.watch_groups(recorder_of(), dumps.groups)
    assert distributed_c10d._new_process_group_helper(False) == "group"
    with pytest.raises(RuntimeError):
        distributed_c10d._new_process_group_helper(True)
    assert found == [[None, None], [None, None]]
    assert in_thread(lambda: dumps.dump(nccl_ring()))[1] == b"dump"


def test_a_job_that_hangs_while_it_makes_a_group_is_dumped(gpu, clock):
    dumps = RingDumper(recorder_of())
    dumps.groups.on_making()
    assert in_thread(lambda: dumps.dump(nccl_ring()))[1] is None
    clock.now_s += flight.SETTLED_S + 1
    assert in_thread(lambda: dumps.dump(nccl_ring()))[1] == b"dump"


def test_a_group_that_is_made_waits_for_a_dump(monkeypatch):
    groups = Groups()
    monkeypatch.setattr(flight, "WAIT_S", 60.0)
    dumping, done = threading.Event(), threading.Event()
    order = []

    def dump():
        with groups.kept() as free:
            assert free
            dumping.set()
            done.wait(10)
            order.append("dumped")

    thread = threading.Thread(target=dump)
    thread.start()
    dumping.wait(10)
    threading.Timer(0.05, done.set).start()
    groups.on_making()
    order.append("made")
    thread.join(10)
    assert order == ["dumped", "made"]


class Backend:
    def __init__(self, number):
        self.number = number

    def _get_sequence_number_for_group(self):
        if self.number is None:
            raise RuntimeError("it counts nothing")
        return self.number


@pytest.fixture
def groups(monkeypatch):
    """The process's groups by name, each with its backend."""
    found = {}

    class Group:
        def __init__(self, name):
            self.name = name

        _device_types = ("cpu", "cuda")

        def _get_backend(self, _device):
            return found[self.name]

    class Names:
        @property
        def pg_names(self):
            return {Group(name): name for name in found}

    monkeypatch.setattr(flight.dist.distributed_c10d, "_world", Names())
    return found


def backend(kind, number):
    return type(kind, (Backend,), {})(number)


def test_calls_are_counted_by_group_once_also_of_destroyed_ones(groups):
    counted = Groups()
    groups |= {"0": backend("ProcessGroupNCCL", 7), "1": backend("ProcessGroupGloo", 5)}
    groups |= {"2": backend("ProcessGroupNCCL", 2), "3": backend("Odd", None)}
    assert counted.count() == {NCCL: 9, OTHERS: 5}
    del groups["2"]
    groups["0"].number = 10
    assert counted.count() == {NCCL: 12, OTHERS: 5}


def test_dumps_that_can_wait_do_so_until_a_new_group_was_used(gpu, groups, clock):
    dumps = RingDumper(recorder_of())
    groups["0"] = backend("ProcessGroupNCCL", 0)
    dumps.groups.count()
    assert dumps.dump(nccl_ring(), must=False) is None
    assert dumps.dump(nccl_ring()) == b"dump"
    groups["0"].number = 1
    dumps.groups.count()
    assert dumps.dump(nccl_ring(), must=False) == b"dump"
    groups["1"] = backend("ProcessGroupNCCL", 0)
    dumps.groups.count()
    assert dumps.dump(nccl_ring(), must=False) is None
    clock.now_s += flight.SETTLED_S + 1
    assert dumps.dump(nccl_ring(), must=False) == b"dump", "perhaps it never is"


class Job:
    """NCCL's ring while a job sends and receives several messages at once, as `batch_isend_irecv` does."""

    def __init__(self, clock, recorder, group):
        self.clock, self.recorder, self.group = clock, recorder, group
        self.entries, self.numbers = deque(maxlen=RING), [0, 0]
        self.made = self.dumps = 0

    def call(self, name, is_p2p, state="completed"):
        self.entries.append({
            "record_id": self.made, "pg_id": 0, "process_group": ("0", "default_pg"), "thread_id": "1",
            "collective_seq_id": self.numbers[0], "p2p_seq_id": self.numbers[1], "op_id": self.made,
            "profiling_name": f"nccl:{name}", "time_created_ns": self.clock.time_ns(),
            "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
            "output_dtypes": ["Float"], "state": state, "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None, "retired": state == "completed", "timeout_ms": 600000,
            "is_p2p": is_p2p,
        })  # fmt: skip
        self.made += 1

    def step(self, seconds, messages=8):
        """One collective, and messages of which the group knows one number for all, and no state."""
        self.clock.now_s += seconds
        self.numbers[0] += 1
        self.group.number = self.numbers[0]
        self.call("all_reduce", is_p2p=False)
        self.numbers[1] += 1
        for number in range(messages):
            self.call("send 0->1" if number % 2 else "recv 0<-1", is_p2p=True, state="scheduled")
        self.call("coalesced", is_p2p=True)
        self.recorder.num_messages += messages + 1

    def dump(self):
        self.dumps += 1
        return pickle.dumps(
            {
                "version": "2.10", "pg_status": {"0": {"last_enqueued_collective": self.numbers[0]}},
                "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
                "entries": list(self.entries),
            },
            protocol=2,
        )  # fmt: skip


@pytest.fixture
def job(tmp_path, monkeypatch, clock, gpu, groups):
    (tmp_path / "process").mkdir()
    recorder = recorder_of(tmp_path / "process")
    groups["0"] = backend("ProcessGroupNCCL", 0)
    job = Job(clock, recorder, groups["0"])
    monkeypatch.setattr(flight, "rings", lambda: [nccl_ring(job.dump)])
    monkeypatch.setattr(flight.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(flight, "groups_of_process", dict)
    monkeypatch.setattr(flight.coverage, "entries", lambda: RING)
    monkeypatch.setattr(flight, "Thread", lambda *_: None)
    job.flight = flight.Flight(recorder)
    job.flight.on_open()
    return job


def test_a_thread_that_was_given_up_does_not_dump_beside_its_successor(job):
    wake = job.flight._wake
    job.flight.on_end()
    job.flight.on_open()
    job.flight._drain(wake)  # returns at once
    assert job.flight._wake is not wake


def converted(folder):
    calls.keep_dumps(folder, lambda path: read_dump(path, rank=0).frames)
    calls.write_calls(folder.parent, "rank00000-7", folder, None)
    return written(folder.parent)


def test_no_call_is_lost_where_several_messages_share_a_number(tmp_path, job):
    until_s = job.clock.now_s
    while job.made < 3000:  # 1,000 calls a second
        job.step(1e-2)
        if job.clock.now_s >= until_s:
            job.flight._look(False)
            until_s = job.clock.now_s + job.flight._pause_s
    job.flight.save(must=True)
    rows = converted(tmp_path / "process")
    assert rows.height == job.made
    assert calls.lost_calls(tmp_path / "process") == {}
    assert job.dumps <= 2 * job.made / (RING / 2)
    sends = rows.filter(pl.col("op") == "send")
    assert set(sends["state"]) == {"completed"}, "the end of a coalesced call completes its parts"
    assert sends["peer"].unique().to_list() == [1]


def test_calls_are_counted_without_a_dump(job):
    for _ in range(9):
        job.step(1e-2)
        job.flight._look(False)
    assert job.dumps == 0


def test_calls_that_only_dumps_know_are_followed_by_their_numbers(tmp_path, job):
    """As for messages that C++ code sends."""
    job.step(1e-3)
    job.recorder.num_messages = 0
    job.flight._look(True)
    until_s = job.clock.now_s
    while job.made < 2000:
        job.step(1e-2)
        job.recorder.num_messages = 0
        if job.clock.now_s >= until_s:
            job.flight._look(False)
            until_s = job.clock.now_s + job.flight._pause_s
    job.flight.save(must=True)
    assert converted(tmp_path / "process").height == job.made


def test_a_dump_that_had_to_wait_is_made_later(job):
    graph = type("Graph", (), {})()
    job.step(1e-3)
    captures.begin_capture(graph)
    job.flight._look(True)
    assert job.dumps == 0
    captures.end_capture(graph)
    job.flight._look(False)
    assert job.dumps == 1


def test_only_new_calls_are_shown_to_who_watches(tmp_path, job):
    folder = tmp_path / "process"
    for _ in range(90):
        job.step(1e-3, messages=0)
    job.recorder.last_step_s = job.clock.now_s
    job.flight.show()
    job.step(1e-3, messages=0)
    job.flight.show()
    job.step(1e-3, messages=0)
    job.flight.show()
    shown = json.loads((folder / "calls-nccl.json").read_bytes())
    assert [entry["record_id"] for entry in shown["entries"]] == [180, 181, 182, 183]
    assert shown["pg_config"]["0"]["ranks"] == "[0, 1]"
    calls = read_dump(folder / "calls-nccl.json", rank=0).frames["collectives"]
    assert calls["group_ranks"][0] == "0,1"
    assert sorted(os.listdir(folder)) == ["calls-nccl.json"]
