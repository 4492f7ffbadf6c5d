"""Real traces, changed on purpose: in ways that must not change the answer, and in ways that must."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpro.cli.analysis import analyse
from dpro.verdict.verdict import Explanation, explain

Trace = dict[str, Any]
STEP = re.compile(r"ProfilerStep#\d+$")
WAITS = re.compile(r"(Stream|Device|Event)Synchronize$")
CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime")
OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
KNOWN = re.compile(r"ProfilerStep|nccl|enumerate\(|Optimizer|gloo|record_param|DistributedData|FSDP|dpro::")
ALL = (
    "multirank/torchrec_v100_2r_kjt",
    "multirank/torchrec_v100_4r_sleep1s_rank2",
    "multirank/lightllm_h200_8r_deepep_cudagraph",
    "single/h100_bert_pystack.json.gz",
    "robust/composer_rank0.trace.json.gz",
    "nccl_meta/mi300x_ddp_rank0of8.json.gz",
    "single_hta/amd_trace__mi250_minitoy_train_ROCm6_2_kineto.json.gz",
)


def timed(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if isinstance(event.get("ts"), (int, float))]


def an_hour_later(trace: Trace) -> None:
    for event in timed(trace):
        event["ts"] += 3.6e9


def in_another_order(trace: Trace) -> None:
    random.Random(1).shuffle(trace["traceEvents"])


def of_other_processes(trace: Trace) -> None:
    for event in timed(trace):
        for key in ("pid", "tid"):
            if isinstance(event.get(key), int) and event[key] > 1000 and event.get("cat") not in OF_GPU:
                event[key] += 7


def without_metadata(trace: Trace) -> None:
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("ph") != "M"]
    for key in ("schemaVersion", "displayTimeUnit", "traceName", "cuda_runtime_version"):
        trace.pop(key, None)


def of_other_functions(trace: Trace) -> None:
    for event in timed(trace):
        if event.get("cat") in ("user_annotation", "gpu_user_annotation") and not KNOWN.match(event["name"]):
            event["name"] = f"my {event['name']}"


def in_text(trace: Trace) -> None:
    for event in timed(trace):
        event["ts"] = str(event["ts"])


def cut_off(trace: Trace) -> None:
    """End within the last step, which then is none."""
    steps = [event for event in timed(trace) if STEP.match(event["name"]) and event.get("cat") not in OF_GPU]
    if len(steps) < 4:
        pytest.skip("the trace has too few steps to lose one")
    last = max(steps, key=lambda event: event["ts"])
    until = last["ts"] + last["dur"] / 2
    gone = {id(event) for event in timed(trace) if event["ts"] + event.get("dur", 0) > until}
    trace["traceEvents"] = [event for event in trace["traceEvents"] if id(event) not in gone]


SAME: tuple[Callable[[Trace], None], ...] = (
    an_hour_later,
    in_another_order,
    of_other_processes,
    without_metadata,
    of_other_functions,
    in_text,
    cut_off,
)


def files_of(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(source.glob("*.json*"))


def changed(source: Path, folder: Path, change: Callable[[Trace], None]) -> Path:
    """Write the files of a trace after a change, and return where."""
    for file in files_of(source):
        read = json.loads(gzip.decompress(file.read_bytes()))
        trace = read if isinstance(read, dict) else {"traceEvents": read}
        change(trace)
        target = folder / file.name if source.is_file() else folder / source.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=1))
    return folder / source.name


def explained(source: Path) -> Explanation:
    return explain(analyse(str(source)))


def assert_same(verdict: Explanation, as_it_is: Explanation) -> None:
    first = [advice.kind for advice in as_it_is.advice[:1]]
    assert (verdict.limit and verdict.limit.kind) == (as_it_is.limit and as_it_is.limit.kind)
    assert verdict.faulty_ranks == as_it_is.faulty_ranks
    assert [advice.kind for advice in verdict.advice[:1]] == first
    assert verdict.step_ms == pytest.approx(as_it_is.step_ms, rel=0.02)


@pytest.mark.few(2)
@pytest.mark.parametrize("change", SAME, ids=lambda change: change.__name__)
def test_what_is_no_part_of_the_job_does_not_change_the_answer(traces, tmp_path, empty_cache, change):
    source = traces / "single/h100_bert_pystack.json.gz"
    assert_same(explained(changed(source, tmp_path, change)), explained(source))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("change", SAME, ids=lambda change: change.__name__)
def test_the_same_for_all_kinds_of_traces(traces, tmp_path, name, change):
    assert_same(explained(changed(traces / name, tmp_path, change)), explained(traces / name))


@pytest.mark.slow
def test_a_slow_rank_of_another_number_is_at_fault_by_that_number(traces, tmp_path):
    def renumber(trace: Trace) -> None:
        of_trace = trace["distributedInfo"]
        of_trace["rank"] = of_trace["world_size"] - 1 - of_trace["rank"]

    source = traces / "multirank/torchrec_v100_4r_sleep1s_rank2"
    for file in files_of(source):
        if "distributedInfo" not in json.loads(gzip.decompress(file.read_bytes())):
            pytest.skip("the files do not state their ranks")
    (tmp_path / "renamed").mkdir()
    moved = changed(source, tmp_path, renumber)
    for number, file in enumerate(files_of(moved)):  # whose names state the old ones
        file.rename(file.with_name(f"part{number}.pt.trace.json.gz"))
    assert explained(moved).faulty_ranks == [1]


def launches_of(trace: Trace) -> dict[int, float]:
    """When work of the GPU was launched, by correlation."""
    calls = (event for event in timed(trace) if event.get("cat") in CALLS)
    return {event["args"]["correlation"]: event["ts"] for event in calls}


def hold_up(trace: Trace, on_host: list[float], launched: list[float], us: float) -> None:
    """Let all come later by a time: what the host does from some moments on, what is launched from some on.

    What the host does at such a moment lasts longer; work of the GPU only begins later, in order of launches.
    """
    host, device = np.sort(np.array(on_host)), np.sort(np.array(launched))
    calls = launches_of(trace)
    for event in timed(trace):
        begin, end, marks = event["ts"], event["ts"] + event.get("dur", 0), host
        if event.get("cat") in OF_GPU:
            begin = end = calls.get(event.get("args", {}).get("correlation"), begin)
            marks = device
        before, until = (int(np.searchsorted(marks, moment, "right")) for moment in (begin, end))
        event["ts"] += us * before
        if "dur" in event:
            event["dur"] += us * (until - before)


def wait_longer(trace: Trace, collectives: list[dict[str, Any]], us: float) -> None:
    """Let collectives last longer, and all that is launched later, or waits for the GPU, come later."""
    waits = [event for event in timed(trace) if WAITS.search(event["name"])]
    starts = np.array([event["ts"] for event in waits])
    order = np.argsort(starts)
    after = np.searchsorted(starts[order], [event["called"] for event in collectives])
    on_host = [waits[place]["ts"] + waits[place]["dur"] for place in order[after].tolist()]
    ids = {event["args"]["correlation"] for event in collectives}
    hold_up(trace, on_host, [event["called"] + 1 for event in collectives], us)
    for event in timed(trace):
        if event.get("cat") == "kernel" and event["args"].get("correlation") in ids:
            event["dur"] += us


def first_collectives(trace: Trace) -> list[dict[str, Any]]:
    """Of each step the first collective that runs on the GPU."""
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in timed(trace)
        if STEP.match(event["name"]) and event.get("cat") not in OF_GPU
    )
    launches = launches_of(trace)
    moved = [
        event | {"called": launches[event["args"]["correlation"]]}
        for event in timed(trace)
        if event.get("cat") == "kernel" and event["name"].startswith("nccl")
        if event["args"]["correlation"] in launches
    ]
    of_steps = ([event for event in moved if begin <= event["called"] < end] for begin, end in steps)
    return [min(events, key=lambda event: event["called"]) for events in of_steps if events]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps_late", [1.0, 2.0])
def test_a_rank_that_is_late_for_a_collective_in_each_step_is_at_fault_for_that_time(
    traces, tmp_path, rank, steps_late
):
    source = traces / "multirank/torchrec_v100_2r_kjt"
    before = explained(source)
    late_us = 1e3 * steps_late * before.step_ms

    def delay(trace: Trace) -> None:
        collectives = first_collectives(trace)
        if trace["distributedInfo"]["rank"] == rank:
            moments = [event["called"] for event in collectives]
            hold_up(trace, moments, moments, late_us)
        else:
            wait_longer(trace, collectives, late_us)

    verdict = explained(changed(source, tmp_path, delay))
    assert verdict.step_ms == pytest.approx((1 + steps_late) * before.step_ms, rel=0.1)
    assert verdict.limit is not None
    assert (verdict.limit.kind, verdict.faulty_ranks) == ("imbalance", [rank])
    healed = verdict.advice[0]
    assert healed.kind == "heal"
    assert healed.gain_low is not None
    assert healed.gain_high is not None
    assert 0.95 * healed.gain_low <= 1 + steps_late <= 1.05 * healed.gain_high


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h100", "mi300x"])
def test_a_host_that_takes_long_for_each_launch_limits_the_job(traces, tmp_path, kind):
    def spread(trace: Trace) -> None:
        launches = [event["ts"] for event in timed(trace) if re.match("(cuda|hip)\\w*Launch", event["name"])]
        hold_up(trace, launches, launches, 200.0)

    source = traces / f"single/{kind}_bert_pystack.json.gz"
    verdict = explained(changed(source, tmp_path, spread))
    assert verdict.step_ms > 2 * explained(source).step_ms
    assert verdict.limit is not None
    assert verdict.limit.kind == "host"
    assert verdict.advice[0].kind == "launch"


def test_without_what_devices_did_no_limit_is_named_and_more_is_to_be_recorded(traces, tmp_path, empty_cache):
    def drop(trace: Trace) -> None:
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") not in OF_GPU]

    verdict = explained(changed(traces / "single/h100_bert_pystack.json.gz", tmp_path, drop))
    assert verdict.limit is None
    assert verdict.advice[0].kind == "record-more"
