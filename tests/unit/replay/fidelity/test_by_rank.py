"""A run that is judged rank by rank against the same run as a whole: nothing may differ."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.analysis.graphs import make_graph
from dpro.opening import open_path
from dpro.replay.fidelity.accuracy import PERCENTILES, Trust, counted, start_errors
from dpro.replay.fidelity.by_rank import CondensedRun, condense_run, path_of_run
from dpro.replay.fidelity.saved import load_condensed, save, save_condensed
from dpro.replay.graph import NodeKind
from dpro.replay.timeline import critical_path, critical_path_of_steps, replay
from dpro.store import Run
from tests.builders import cpu_job, gpu_job
from tests.jobs import ROOT
from tests.unit.replay.fidelity.test_saved import equal


def condensed(run: Run, folder: Path) -> CondensedRun:
    with ThreadPoolExecutor(2) as executor:
        return condense_run(run, folder, executor)


def comparable(trust: Trust) -> Trust:
    """With collectives that missing ranks take part in in one order."""
    if trust.rendezvous is None:
        return trust
    columns = trust.rendezvous.collective, trust.rendezvous.rank, trust.rendezvous.fastest
    return dataclasses.replace(trust, rendezvous=tuple(sorted(zip(*(each.tolist() for each in columns)))))


def assert_judged_as_whole(run: Run, folder: Path) -> Trust:
    found, (built, trust) = condensed(run, folder), make_graph(run)
    whole, small = replay(built.predictive), replay(found.joined.graph)
    assert equal(comparable(found.trust), comparable(trust))
    assert found.joined.graph.num_nodes < built.graph.num_nodes
    assert found.pooled.num_nodes == np.count_nonzero(built.graph.nodes.kind != NodeKind.RENDEZVOUS)
    path_to, steps = path_of_run(run, found, small), trust.steps
    assert critical_path(small, path_to).equals(critical_path(whole))
    of_steps = critical_path_of_steps(small, steps, path_to=path_to)
    assert of_steps.equals(critical_path_of_steps(whole, steps))
    return trust


@pytest.mark.parametrize("job", [cpu_job, gpu_job])
def test_a_run_is_judged_rank_by_rank_as_it_is_as_a_whole(job, tmp_path):
    run = job().write(tmp_path / "run")
    assert assert_judged_as_whole(run, tmp_path / "shares").steps.height


@pytest.mark.parametrize("job", [cpu_job, gpu_job])
def test_a_run_at_another_pace_than_in_its_windows_is_judged_so_too(job, tmp_path):
    tiny = job(num_steps=3)
    for step in range(100, 120):
        for rank in range(2):
            tiny.step(step, step * 10_000, step * 10_000 + 1500, rank=rank, window=-1)
    run = tiny.write(tmp_path / "run")
    assert assert_judged_as_whole(run, tmp_path / "shares").pace not in (0, 1)


def test_a_rank_without_work_on_a_gpu_is_judged_by_what_the_run_has(tmp_path):
    job = gpu_job()
    job.step(2, 0, 1000, rank=2)
    for begin in (0, 300, 600):
        job.op("alone", begin + 50, begin + 250, rank=2)
    assert_judged_as_whole(job.write(tmp_path / "run"), tmp_path / "shares")


def test_a_recorded_job_is_judged_rank_by_rank_as_it_is_as_a_whole(tmp_path):
    assert_judged_as_whole(open_path(ROOT / "sample_traces" / "slow_rank"), tmp_path)


@pytest.mark.slow
def test_real_jobs_are_judged_rank_by_rank_as_they_are_as_a_whole(traces, tmp_path):
    slowed = 0
    for folder in sorted(path for path in (traces / "multirank").iterdir() if path.is_dir()):
        slowed += assert_judged_as_whole(open_path(folder), tmp_path / folder.name).overlap is not None
    assert slowed  # by communication


def test_condensed_ranks_are_read_as_they_were_written(tmp_path):
    run = gpu_job().write(tmp_path / "run")
    found = condensed(run, tmp_path / "shares")
    save_condensed(tmp_path / "condensed.npz", found)
    again = load_condensed(tmp_path / "condensed.npz", run)
    assert again is not None
    assert equal(again, found)
    save(tmp_path / "graph.npz", found.built, found.trust)
    assert load_condensed(tmp_path / "graph.npz", run) is None
    assert load_condensed(tmp_path / "missing.npz", run) is None


def test_percentiles_of_counted_errors_are_those_of_all_of_them(tmp_path):
    misses = pl.DataFrame({"rank": 0, "window": 0, "step": 1, "miss_ns": [7, 1, 1, 4, 9, 2, 2, 2]})
    expected = [misses["miss_ns"].quantile(percent / 100, "linear") for percent in PERCENTILES]
    assert list(start_errors(counted(misses)).values()) == pytest.approx(expected, rel=1e-15)
    assert start_errors(counted(misses.clear())) == {}
