"""Verdicts on condensed ranks against those on the whole graph: nothing may differ."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpro.analysis.graphs import make_graph
from dpro.detect.baseline import Baseline
from dpro.detect.context import Context
from dpro.detect.findings import Finding
from dpro.detect.notes import notes_of
from dpro.detect.run import IN_WINDOWS, run_detectors
from dpro.detect.stragglers.replayed import HealingGains, healing_gains, large_gains
from dpro.opening import open_path
from dpro.replay.fidelity.by_rank import condense_run
from dpro.replay.steps import step_breakdown, steps_of
from dpro.schema import COLLECTIVES, SPANS
from dpro.store import Run, open_run
from tests.builders import TinyRun
from tests.jobs import ROOT
from tests.reference.training_jobs import Job, run_job
from tests.reference.training_records import Recording, write_run
from tests.unit.detect.jobs import Work, equal_work, noisy, slower, write_job
from tests.unit.replay.whatif.test_predict_by_rank import condensed_job

WINDOWS = ((2, 2), (5, 2), (8, 2))


def both_of(run: Run, folder: Path) -> tuple[Baseline, Baseline]:
    with ThreadPoolExecutor(1) as executor:
        condensed = condense_run(run, folder, executor)
    return Baseline(make_graph(run)[0].predictive), Baseline(condensed_job(run, condensed, folder))


def judged(run: Run, windows: Baseline) -> tuple[list[Finding], list[str]]:
    tables = run.table(SPANS), run.table(COLLECTIVES), steps_of(run)
    context = Context(run, windows, breakdown=lambda: step_breakdown(*tables))
    found = run_detectors(context, IN_WINDOWS)
    return found, notes_of(context, found)


def same_gains(one: HealingGains | None, other: HealingGains | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.ranks == other.ranks and bool((one.saved == other.saved).all())


def assert_same(run: Run, folder: Path) -> tuple[list[Finding], list[str]]:
    """What both say of a run."""
    whole, ranks = both_of(run, folder)
    said = judged(run, ranks)
    assert said == judged(run, whole)
    every = [[rank] for team in whole.teams for rank in team]
    sets = [*every, [rank for each in every for rank in each]]
    assert same_gains(healing_gains(whole, whole.work, sets), healing_gains(ranks, ranks.work, sets))
    large, bound = large_gains(whole, whole.work, sets), large_gains(ranks, ranks.work, sets)
    # Of condensed ranks more may be known not to save enough.
    assert (large is None) == (bound is None)
    assert large is None or bound is None or all(each in large.ranks for each in bound.ranks)
    return said


def in_turns() -> Work:
    """Rank 2 works longer before another collective in each step, and others nearly as long there."""
    work = equal_work(4, 8, num_collectives=4)
    compute = work.compute.copy()
    for step in range(8):
        compute[2, step, step % 4] += 30.0
        compute[step % 2, step, step % 4] += 29.9
        compute[3, step, step % 4] += 29.9 * (step % 2)
    return replace(work, compute=compute)


def half_hidden() -> Work:
    """Rank 2 works longer before its pair meets; in some steps rank 0 does elsewhere, and hides that."""
    work = equal_work(4, 8, num_collectives=4)
    compute = work.compute.copy()
    compute[2, :, 1] += 20.0
    compute[0, np.arange(8) % 2 == 1, 2] += 20.0
    everyone, pairs = [(0, 1, 2, 3)], [(0, 1), (2, 3)]
    return replace(work, compute=compute, groups=[everyone, pairs, pairs, everyone])


def slow_link() -> Work:
    """Transfers of one of four pairs take longer."""
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    return replace(equal_work(8, 8, 2), groups=[pairs, pairs], links={(2, 3): 8.0})


@pytest.mark.parametrize(
    ("work", "findings", "notes"),
    [
        (lambda: slower(noisy(equal_work(4), 3, 0.02), "compute", 1, plus=10), 1, 0),
        (lambda: slower(equal_work(3), "data", [0, 1, 2], plus=30), 1, 0),
        (lambda: slower(equal_work(5), "tail", [1, 3], plus=8), 1, 0),
        (lambda: noisy(equal_work(4), 1, 0.05), 0, 0),
        (half_hidden, 1, 0),
        (in_turns, 0, 1),
        (slow_link, 1, 0),
    ],
)
def test_made_up_jobs_have_the_verdict_of_the_whole_graph(
    work: Callable[[], Work], findings, notes, tmp_path
):
    found, said = assert_same(open_run(write_job(tmp_path / "run", work())), tmp_path / "shares")
    assert (len(found), len(said)) == (findings, notes)


UNEVEN = Job("dp", 4, 12, True, "1%", windows=WINDOWS, fault="imbalance", severity=2.0, batches="sized")
STAGED = replace(UNEVEN, layout="tp_pp", num_steps=10, severity=3.0, batches="none")


@pytest.mark.parametrize(
    ("job", "class_"), [(STAGED, "imbalance.stage"), (replace(UNEVEN, how="varying"), "imbalance.data")]
)
def test_uneven_work_has_the_verdict_of_the_whole_graph(job, class_, tmp_path):
    run = open_run(write_run(tmp_path / "run", job, run_job(job), Recording()))
    found, _ = assert_same(run, tmp_path / "shares")
    assert class_ in {each.class_ for each in found}


def test_idle_gpus_have_the_verdict_of_the_whole_graph(tmp_path):
    run, begin, free = TinyRun(), 0.0, 0.0
    for step in range(6):
        for rank in range(2):
            at = begin
            for number in range(2):
                run.op("aten::index", at, at + 190, rank)
                run.call(at + 190, at + 200, 100 * step + number, rank)
                at += 200
                free = at + 40
                run.kernel("gemm", at, free, 100 * step + number, rank)
            run.step(step, begin, at, rank)
        begin = at
    for rank in range(2):
        run.call(begin, free, 99, rank, name="cudaDeviceSynchronize")
    (finding,), _ = assert_same(run.write(tmp_path / "run"), tmp_path / "shares")
    assert finding.component_id == "the host"
    assert "aten::index" in finding.evidence[3]


@pytest.mark.slow
def test_real_jobs_have_the_verdict_of_the_whole_graph(traces, tmp_path):
    jobs = [path for path in (traces / "multirank").iterdir() if path.is_dir()]
    for source in sorted(
        [*jobs, *(path.parent for path in (ROOT / "sample_traces").glob("*/manifest.json"))]
    ):
        assert_same(open_path(source), tmp_path / source.name)
