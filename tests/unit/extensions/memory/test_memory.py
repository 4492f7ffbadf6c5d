"""What a snapshot of PyTorch's allocator shows, against a replay of it event by event."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.extensions.memory.answer import origin_in_words
from dpro.extensions.memory.peak import find_growth, find_peak, held_at
from dpro.extensions.memory.snapshot import (
    BACKWARD,
    BEFORE,
    FORWARD,
    MODEL,
    OPTIMIZER,
    origin_of,
    read_snapshot,
)
from tests.commands import dpro, refused

MB = 1_000_000
TORCH = "/env/lib/python3.11/site-packages/torch"
MODULE = f"{TORCH}/nn/modules/module.py"
SCRIPT = "/job/train.py"
ATTEND = [
    (f"{TORCH}/nn/functional.py", 9, "softmax"),
    ("/job/model.py", 12, "attend"),
    (MODULE, 1784, "_call_impl"),
    (SCRIPT, 3, "<module>"),
]
MOVE = [(MODULE, 1355, "convert"), (MODULE, 955, "_apply"), (SCRIPT, 1, "<module>")]
STEP = [("/job/adam.py", 7, "step"), (f"{TORCH}/optim/optimizer.py", 5, "wrapper"), (SCRIPT, 4, "<module>")]
NATIVE = [
    ("??", 0, "at::_ops::empty_memory_format::call(c10::ArrayRef<long>)"),
    ("??", 0, "at::_ops::mul_Tensor::redispatch(at::Tensor const&)"),
]
ENGINE = [
    *NATIVE,
    ("??", 0, "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>)"),
    ("??", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask>)"),
]


def frames(stack: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in stack]


def event(action: str, address: int, size: int, stack: list[tuple[str, int, str]] = ATTEND) -> dict[str, Any]:
    key = "device_free" if action == "oom" else "addr"
    return {"action": action, key: address, "size": size, "stream": 0, "frames": frames(stack)}


def freed(address: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", address, size), event("free_completed", address, size)]


def block(address: int, size: int, stack: list[tuple[str, int, str]] | None = None) -> dict[str, Any]:
    """A block that a tensor of this size holds; the allocator rounds up to 512 bytes."""
    state = {"state": "active_allocated", "frames": frames(stack or [])}
    return {"address": address, "size": -(-size // 512) * 512, "requested_size": size} | state


def snapshot(blocks: list[dict[str, Any]], events: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    """As `_dump_snapshot` pickles it: each block in a segment of its own, and one that nothing uses."""
    unused = {"address": 1 << 40, "size": 512, "requested_size": 0, "state": "inactive", "frames": []}
    segments = [
        {"device": device, "address": one["address"], "total_size": one["size"], "stream": 0, "blocks": [one]}
        for one in [*blocks, unused]
    ]
    return {"segments": segments, "device_traces": [[]] * device + [events], "allocator_settings": {}}


def written(file: Path, content: Any) -> Path:
    file.write_bytes(pickle.dumps(content))
    return file


@pytest.fixture
def leaking(tmp_path) -> Path:
    """Five steps of a job that keeps 2 MB of each forward pass: 1, 3, 5, 7, 9 MB of attention at the ends."""
    events = [event("alloc", 1, 9 * MB, MOVE)]
    for step in range(5):
        kept, activation, gradient = 100 + step, 200, 300
        events += [event("alloc", kept, 2 * MB), event("alloc", activation, 40 * MB)]
        events += [event("alloc", gradient, 3 * MB, ENGINE), *freed(activation, 40 * MB)]
        events += [event("alloc", 400, MB, STEP), *freed(gradient, 3 * MB), *freed(400, MB)]
    events += [event("alloc", 500, MB)]
    blocks = [
        block(1, 9 * MB, MOVE),
        *(block(100 + step, 2 * MB, ATTEND) for step in range(5)),
        block(500, MB),
    ]
    return written(tmp_path / "leaking.pickle", snapshot(blocks, events))


def test_a_run_in_place_of_a_snapshot_is_answered_with_where_to_get_one(tmp_path):
    with pytest.raises(InputError, match="a folder; `dpro memory --help` says how a job writes a snapshot"):
        read_snapshot(tmp_path)


def test_the_peak_is_that_of_the_history_and_its_origins_add_up_to_it(leaking):
    (memory,) = read_snapshot(leaking)
    peak = find_peak(memory)
    assert peak.bytes == (9 + 5 * 2 + 40 + 3) * MB
    assert peak.end_bytes == (9 + 5 * 2 + 1) * MB
    assert [(one.origin.phase, one.bytes, one.blocks) for one in peak.held] == [
        (FORWARD, 50 * MB, 6), (MODEL, 9 * MB, 1), (BACKWARD, 3 * MB, 1),
    ]  # fmt: skip
    assert origin_in_words(peak.held[0].origin) == "forward: attend (model.py:12)"
    assert origin_in_words(peak.held[2].origin) == "backward: MulBackward0"


def test_what_each_step_keeps_grows(leaking):
    (memory,) = read_snapshot(leaking)
    (growth,) = find_growth(memory)
    assert origin_in_words(growth.origin) == "forward: attend (model.py:12)"
    assert (growth.bytes_per_step, growth.steps) == (2 * MB, 4)


def test_nothing_grows_where_a_step_gives_back_what_the_one_before_kept(tmp_path):
    events = []
    for step in range(8):
        events += [event("alloc", step, 2 * MB), event("alloc", 400, MB, STEP), *freed(400, MB)]
        events += freed(step - 1, 2 * MB) if step else []
    events += [event("alloc", 500, MB)]
    (memory,) = read_snapshot(
        written(tmp_path / "steady", snapshot([block(7, 2 * MB), block(500, MB)], events))
    )
    assert len(memory.updates) == 8
    assert find_growth(memory) == []


def test_what_was_allocated_before_the_history_counts_in_it(tmp_path):
    events = [*freed(1, 5 * MB), event("alloc", 2, MB), *freed(2, MB)]
    content = snapshot([block(3, 2 * MB, MOVE), block(4, MB)], events, device=1)
    (memory,) = read_snapshot(written(tmp_path / "late.pickle", content))
    peak = find_peak(memory)
    assert (memory.device, peak.event, peak.bytes, peak.end_bytes) == (1, -1, 8 * MB, 3 * MB)
    assert [(one.origin.phase, one.bytes) for one in peak.held] == [(BEFORE, 6 * MB), (MODEL, 2 * MB)]


def test_a_snapshot_without_history_shows_what_is_there_by_stacks_as_far_as_it_has_them(tmp_path):
    old = [{"device": 0, "total_size": 4096, "blocks": [
        {"size": 1024, "state": "active_allocated", "history": [{"frames": frames(ATTEND)}]},
        {"size": 2048, "state": "active_allocated"}, {"size": 1024, "state": "inactive"}]}]  # fmt: skip
    file = tmp_path / "old.pickle.gz"
    file.write_bytes(gzip.compress(pickle.dumps(old)))
    (memory,) = read_snapshot(file)
    peak = find_peak(memory)
    assert [(one.origin.phase, one.bytes) for one in peak.held] == [(BEFORE, 2048), (FORWARD, 1024)]
    assert memory.reserved_bytes == 4096


@pytest.mark.parametrize(
    ("stack", "phase", "words"),
    [
        (ATTEND, FORWARD, "forward: attend (model.py:12)"),
        ([*NATIVE, *ATTEND], FORWARD, "forward: attend (model.py:12), mul"),
        (ENGINE, BACKWARD, "backward: MulBackward0"),
        (MOVE, MODEL, "model.to(device): train.py:1"),
        (STEP, OPTIMIZER, "optimizer: step (adam.py:7)"),
        ([("C:\\env\\site-packages\\torch\\optim\\adam.py", 3, "_foreach"), ("C:\\job\\train.py", 4, "main")],
         OPTIMIZER, "optimizer: main (train.py:4)"),
        ([("/job/train.py", 5, "main")], "elsewhere", "other code: main (train.py:5)"),
    ],
)  # fmt: skip
def test_stacks_show_phase_place_and_operator(stack, phase, words, tmp_path):
    (memory,) = read_snapshot(written(tmp_path / "one", snapshot([block(1, MB, stack)], [])))
    (origin,) = (one.origin for one in find_peak(memory).held)
    assert (origin.phase, origin_in_words(origin)) == (phase, words)


def test_recomputed_activations_belong_to_the_backward():
    within = [("/env/site-packages/torch/autograd/graph.py", 8, "_engine_run_backward")]
    assert origin_of([*ATTEND, *within]).phase == BACKWARD


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/dpro-harmed",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Harmful()),
        pickle.dumps(snapshot([block(1, MB)], []) | {"more": Harmful()}),
        pickle.dumps({"segments": [{"device": 0}]}),
        pickle.dumps([1, 2]),
        pickle.dumps({"a": 1}),
        pickle.dumps(snapshot([block(1, MB)], []))[:-30],
        pickle.dumps(snapshot([], [{"addr": 1}])),
        b"text",
        b"",
        gzip.compress(b"text", mtime=0)[:-5],
    ],
    ids=[
        "class",
        "class within",
        "no blocks",
        "numbers",
        "no segments",
        "cut",
        "no actions",
        "text",
        "empty",
        "cut gzip",
    ],
)
def test_what_is_no_snapshot_is_one_line_and_nothing_of_it_runs(content, tmp_path):
    file = tmp_path / "some.pickle"
    file.write_bytes(content)
    with pytest.raises(InputError, match="not a snapshot of PyTorch's allocator"):
        read_snapshot(file)
    assert not Path("/tmp/dpro-harmed").exists()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), max_size=40), st.integers(0, 30), st.data())
def test_usage_is_that_of_a_replay_event_by_event(tmp_path_factory, moves, cut, data):
    """An allocation at an address that is in use frees it first; the first events are not in the history."""
    live: dict[int, int] = {}
    events, usage = [], [0]
    for address, size in moves:
        if address in live:
            events.append(event("free_requested", address, live.pop(address)))
            usage.append(sum(live.values()))
            if data.draw(st.booleans()):
                continue
        events.append(event("alloc", address, size))
        live[address] = size
        usage.append(sum(live.values()))
    cut = min(cut, len(events))
    content = snapshot([block(address, size) for address, size in live.items()], events[cut:])
    file = written(tmp_path_factory.mktemp("drawn") / "s", content)
    devices = read_snapshot(file)
    (memory,) = devices
    # What was allocated before the history, and neither freed in it nor there at the end, does not exist.
    assert [sum(one.bytes for one in held_at(memory, at)) for at in range(-1, len(events) - cut)] == usage[
        cut:
    ]
    peak = find_peak(memory)
    assert (peak.bytes, peak.end_bytes) == (max(usage[cut:]), usage[-1])
    assert peak.event == usage[cut:].index(peak.bytes) - 1
    counted = Counter({one.origin: one.bytes for one in peak.held})
    assert counted.total() == peak.bytes


# The command.


def test_the_command_says_what_holds_memory_what_grows_and_what_to_do(leaking):
    lines = dpro("memory", leaking).stdout.splitlines()
    assert lines[0] == (
        "GPU 0  peak 62.0 MB (after event 32 of 37), at the end 20.0 MB in use of 20.0 MB reserved"
    )
    assert lines[1].split() == ["at", "the", "peak", "share", "blocks", "allocated", "in"]
    assert lines[2].endswith("50.0 MB    81%       6  forward: attend (model.py:12)")
    assert any(line.startswith("GROWS  2.0 MB more after each of 4 steps: forward: attend") for line in lines)
    assert any(line.startswith("TRY    make the micro-batch smaller") for line in lines)
    (device,) = json.loads(dpro("memory", leaking, "--json").stdout)["devices"]
    assert sum(one["bytes"] for one in device["held"]) == device["peak_bytes"] == 62 * MB


@pytest.mark.parametrize(
    ("unused", "words"), [(4 * MB, "expandable_segments"), (2 * MB, "make the micro-batch smaller")]
)
def test_pieces_are_blamed_where_enough_was_free_in_pieces(unused, words, tmp_path):
    content = snapshot([block(1, 10 * MB)], [event("alloc", 1, 10 * MB), event("oom", 7 * MB, 3 * MB)])
    content["segments"].append({"device": 0, "address": 9, "total_size": unused, "blocks": []})
    lines = dpro("memory", written(tmp_path / "full.pickle", content)).stdout.splitlines()
    failed = "out of memory: an allocation of 3.0 MB failed with 10.0 MB in use and 7.0 MB free on the GPU"
    assert lines[1] == failed
    assert any(line.startswith("TRY") and words in line for line in lines)


def test_two_snapshots_are_compared_at_their_peaks(leaking, tmp_path):
    content = snapshot([block(1, 9 * MB, MOVE), block(2, 80 * MB, ATTEND)], [], device=3)
    larger = written(tmp_path / "larger.pickle", content)
    lines = dpro("memory", leaking, larger).stdout.splitlines()
    assert lines[0] == "GPU 3  peak 62.0 MB before, 89.0 MB after (+27.0 MB)"
    assert [line.split()[0] for line in lines[2:4]] == ["+30.0", "-3.0"]
    (device,) = json.loads(dpro("memory", leaking, larger, "--json").stdout)["devices"]
    changes = {
        one["origin"]["operator"]: one["after_bytes"] - one["before_bytes"] for one in device["changed"]
    }
    assert changes == {"": 30 * MB, "MulBackward0": -3 * MB}


def test_other_commands_name_the_one_for_snapshots(leaking, tmp_path):
    assert "`dpro memory FILE` shows" in refused(dpro(leaking), 1)
    assert "No such file" in refused(dpro("memory", tmp_path / "nope"), 1)
