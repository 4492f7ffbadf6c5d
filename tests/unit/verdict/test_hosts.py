"""The verdict on a job that computes on its hosts: neither names nor advises anything of a GPU."""

from __future__ import annotations

import re

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.replay.whatif.code import code_difference
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from dpro.verdict.limits import COMPUTE, HOST
from dpro.verdict.verdict import Limit, _fewer_windows, explain
from dpro.verdict.words import limit_in_words, lines_of
from tests.builders import TinyRun, gpu_job
from tests.jobs import ROOT

OF_GPUS = re.compile(r"(?i)\bgpus?\b|cuda|pin_memory|\bdevices?\b|kernel")


def verdict_on(run: TinyRun, folder):
    return explain(Analysis(run.write(folder / "run")))


@pytest.mark.parametrize("name", ["healthy", "slow_input", "slow_rank"])
def test_a_job_without_gpus_gets_no_words_about_them(name):
    verdict = explain(Analysis(open_run(ROOT / "sample_traces" / name)))
    assert not OF_GPUS.search("\n".join(lines_of(verdict)))


@pytest.mark.parametrize("edit", ["workers:count=2", "hide-input"])
def test_loading_the_input_beside_the_step_takes_no_gpu(edit):
    assert not OF_GPUS.search(parse_edit(edit).how())
    assert not any(OF_GPUS.search(line) for line in code_difference([parse_edit(edit)]))


def multiplying(steps: int = 4) -> TinyRun:
    """Each step: 60 us of aten::mm within 70 us of aten::linear, 20 us of aten::add, 15 us of an exchange."""
    run = TinyRun()
    for step in range(steps):
        at = 110 * step
        run.op("aten::linear", at, at + 70)
        run.op("aten::mm", at + 5, at + 65)
        run.op("aten::add", at + 70, at + 90)
        run.op("c10d::allreduce_", at + 90, at + 105)
        run.step(step, at, at + 110)
    return run


def test_compute_of_hosts_is_named_by_the_operators_with_the_longest_time_of_their_own(tmp_path):
    limit = verdict_on(multiplying(), tmp_path).limit
    assert (limit.kind, limit.cause) == (COMPUTE, "aten::mm 67%, aten::add 22%")  # 60 and 20 of 90 us


def test_compute_of_devices_is_named_by_kernels(tmp_path):
    limit = verdict_on(gpu_job(), tmp_path).limit
    assert limit is None or "aten::" not in limit.cause


@pytest.mark.parametrize("kind", [COMPUTE, HOST])
def test_a_limit_has_equal_words_with_and_without_devices(kind):
    assert not OF_GPUS.search(limit_in_words(Limit(kind, 1.5, 0.4), 10.0))


def steps_with_windows(windows: int) -> pl.DataFrame:
    """60 steps of a rank: two in each deep window."""
    deep = {20 * window + step: window for window in range(windows) for step in (5, 6)}
    return pl.DataFrame({"step": range(60), "window": [deep.get(step, -1) for step in range(60)]})


@pytest.mark.parametrize(("windows", "option"), [(1, "--skip 30"), (3, "--every 40")])
def test_fewer_windows_are_advised_only_where_there_were_several(windows, option):
    assert option in _fewer_windows(steps_with_windows(windows))


@pytest.mark.parametrize(
    ("loads_us", "idle_s", "said"),
    [(300, 1, True), (300, 9, False), (100, 2.5, False)],
    ids=["no core is left", "cores are left", "one worker hides the input"],
)
def test_input_that_more_workers_cannot_load_for_want_of_cores_is_to_be_made_cheaper(
    tmp_path, loads_us, idle_s, said
):
    """Of 10 s on 8 cores, these idle for some; a step of 400 us loads for a part of it."""
    run = TinyRun()
    run.worker(0, "")
    for step in range(6):
        at = 400 * step
        run.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + loads_us)
        run.op("aten::mm", at + loads_us, at + 400)
        run.step(step, at, at + 400)
    run.counter("cpus", 0, 8)
    for state, seconds in (("cpu_user_s", 10 - idle_s), ("cpu_idle_s", idle_s)):
        run.counter(state, 0, 100, rank=-1)
        run.counter(state, 2_400, 100 + seconds, rank=-1)
    (advice,) = (one for one in verdict_on(run, tmp_path).advice if one.kind == "input")
    assert ("prepare less per sample" in advice.do) == said
    if not said:
        assert advice.edit == f"workers:count={loads_us // 100}"
