"""Predictions for condensed ranks against those of the whole graph: nothing may differ."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dpro.analysis.graphs import make_graph
from dpro.errors import Unanswerable
from dpro.opening import open_path
from dpro.replay.fidelity.by_rank import CondensedRun, condense_run
from dpro.replay.fidelity.overlap import Contention
from dpro.replay.whatif.condensed import CondensedJob
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.job import WHOLE_ONLY
from dpro.replay.whatif.predict import Prediction, baseline_steps, predict, ranked
from dpro.replay.whatif.registry import all_kinds, parse_edit
from dpro.replay.whatif.search import explore
from dpro.store import Run
from tests.builders import TinyRun, cpu_job, gpu_job
from tests.fabrics import crossing_pairs
from tests.jobs import ROOT

EDITED = (
    ["no-comm", "scale:kind=cpu,rank=0,step=0,factor=9", "scale:kind=cpu,rank=1,step=1,factor=9"],
    ["network:bandwidth=2"],
    ["network:bandwidth=0.5,latency=2"],
    ["delay:us=500"],
    ["algorithm:to=tree"],
    ["no-comm"],
    ["scale:kind=collective,factor=2"],
    ["slow:rank=1,factor=1.3"],
    ["slow:rank=0,ms=3"],
    ["scale:kind=cpu,rank=1,factor=0.1"],
    ["scale:kind=kernel,factor=0.5"],
    ["replace:kind=kernel,us=10"],
    ["scale:name=nothing,factor=2"],
    ["heal:rank=0"],
    ["heal:rank=1"],
    ["slow:rank=1,factor=1.3", "heal:rank=1", "scale:kind=cpu,factor=0.7", "heal:rank=0"],
    ["heal:rank=17"],
    ["heal:host=*"],
    ["heal:stage=1"],
    ["slow:rank=1,factor=1.3", "network:bandwidth=4", "no-comm", "scale:kind=cpu,factor=0.8"],
)
IN_RANKS = (
    ["scale:module=*,factor=0.5"],
    ["remove:name=aten*"],
    ["remove:kind=kernel"],
    ["remove:module=*"],
    ["remove:op=all_reduce,rank=0"],
    ["remove:op=all_reduce,rank=1"],
    ["remove:kind=collective", "delay:us=100"],
    ["remove:kind=cpu,rank=0", "slow:rank=1,factor=2"],
    ["no-launch"],
    ["free-host"],
    ["cuda-graph", "network:bandwidth=2"],
    ["cpu:factor=2"],
    ["no-sync", "free-host"],
    ["compile", "slow:rank=1,factor=1.3"],
    ["network:bandwidth=0.5", "cuda-graph", "compile"],
    ["hide-input"],
    ["optimizer:impl=fused"],
    ["optimizer:impl=foreach", "slow:rank=1,factor=1.3"],
)
ON_FABRICS = (
    ["ecmp"],
    ["paths"],
    ["spray:headroom=0.2"],
    ["fail:link=leaf0/spine0,then=hash"],
    ["oversubscription:ratio=2"],
    ["place"],
    ["paths", "slow:rank=1,factor=1.3"],
)


def condensed_job(run: Run, condensed: CondensedRun, folder: Path) -> CondensedJob:
    graph, node = condensed.joined.graph, condensed.joined.node
    return CondensedJob(graph=graph, node=node, run=run, condensed=condensed, folder=folder, map_tasks=map)


class Both:
    """Predicts the same from the whole graph and from condensed ranks."""

    def __init__(self, run: Run, folder: Path, overlap: Contention | None = None) -> None:
        self.run, self.folder = run, folder
        built, trust = make_graph(run)
        self.graph, self.trust = (
            built.predictive,
            dataclasses.replace(trust, overlap=overlap or trust.overlap),
        )
        with ThreadPoolExecutor(2) as executor:
            self.condensed = condense_run(run, folder, executor)
        self.job = condensed_job(run, self.condensed, folder)

    def whole(self, edits: list[str]) -> Prediction | str:
        baseline, parsed = baseline_steps(self.graph), list(map(parse_edit, edits))
        try:
            return predict(self.graph, baseline, parsed, self.trust)
        except Unanswerable as error:
            return str(error)

    def by_rank(self, edits: list[str]) -> Prediction | str:
        baseline, parsed = baseline_steps(self.job.graph), list(map(parse_edit, edits))
        try:
            return predict(self.job, baseline, parsed, self.trust)
        except Unanswerable as error:
            return str(error)

    def assert_same(self, edits: list[str]) -> float:
        one, other = self.whole(edits), self.by_rank(edits)
        if isinstance(one, str) or isinstance(other, str):
            one, other = (str(each).partition(" (did you mean")[0] for each in (one, other))
            assert one == other
            return 0.0
        assert other.predicted_ns == one.predicted_ns
        numbers = [[each.low_ns, each.high_ns, each.gain_low_ns, each.gain_high_ns] for each in (one, other)]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-9)
        assert (other.notes, other.proven, other.samples) == (one.notes, one.proven, one.samples)
        return one.predicted_ns


@pytest.mark.few(1)
@pytest.mark.parametrize("job", [cpu_job, gpu_job])
def test_predictions_by_rank_are_those_of_the_whole_graph(job, tmp_path):
    both = Both(job().write(tmp_path / "run"), tmp_path / "shares")
    assert len({both.assert_same(edits) for edits in (*EDITED, *IN_RANKS)}) > 15


def test_paths_and_cables_of_a_fabric_change_the_joined_graph(tmp_path):
    run = crossing_pairs(tmp_path / "run", 2000).run
    assert run is not None
    both = Both(run, tmp_path / "shares")
    assert len({both.assert_same(edits) for edits in ON_FABRICS}) > 3


@pytest.mark.parametrize("job", [cpu_job, gpu_job])
def test_a_search_by_rank_predicts_what_the_whole_graph_does(job, tmp_path):
    both = Both(job().write(tmp_path / "run"), tmp_path / "shares")
    found = explore(both.job, both.trust)
    assert found.predictions == ranked(found.predictions)
    for each in found.predictions:
        whole = both.whole([str(edit) for edit in each.edits])
        assert isinstance(whole, Prediction)
        assert whole.predicted_ns == each.predicted_ns
    assert found.predictions
    refused = {each.edit for each in found.refused if each.reason == WHOLE_ONLY}
    assert refused == {kind.name for kind in all_kinds() if kind.within_ranks is Edit.within_ranks}
    few = explore(both.job, both.trust, budget=2)
    assert few.untried
    assert len(few.predictions) + len(few.little) <= 2 < len(found.predictions) + len(found.little)


def overlapping_job(num_ranks: int = 2, num_steps: int = 3) -> TinyRun:
    """Kernels of 100 us, of which an all-reduce on another stream covers the first three of eight."""
    run, begin = TinyRun(), 0.0
    for step in range(num_steps):
        for rank in range(num_ranks):
            call = iter(range(1000 * step, 1000 * (step + 1)))
            number = next(call)
            run.call(begin, begin + 10, number, rank)
            run.nccl(begin + 16 + rank, begin + 320, number, rank, sequence=step)
            for index in range(8):
                number, at = next(call), begin + 12 * (index + 1)
                run.call(at, at + 10, number, rank)
                run.kernel("gemm", begin + 30 + 100 * index, begin + 130 + 100 * index, number, rank)
            run.call(begin + 120, begin + 835, next(call), rank, name="cudaDeviceSynchronize")
            run.step(step, begin, begin + 840, rank)
        begin += 840
    return run


@pytest.mark.slow
def test_kernels_that_communication_slows_down_are_slowed_down_rank_by_rank(tmp_path):
    run = overlapping_job().write(tmp_path / "run")
    both = Both(run, tmp_path / "shares", Contention(1.5, 1.2, 1.9))
    several = (["remove:kind=collective,rank=1"], ["free-host"], ["cuda-graph", "network:bandwidth=2"])
    for edits in (["network:bandwidth=0.5"], ["slow:rank=1,factor=2"], ["no-comm"], *several):
        both.assert_same(edits)
    slowed = both.whole(["network:bandwidth=0.5"])
    both.trust = dataclasses.replace(both.trust, overlap=None)
    assert slowed != both.whole(["network:bandwidth=0.5"])  # else nothing was put to the test


def test_edits_that_look_at_all_ranks_at_once_are_refused(tmp_path):
    both = Both(gpu_job().write(tmp_path / "run"), tmp_path / "shares")
    assert "needs the graph of all ranks at once" in str(both.by_rank(["data-parallel:ranks=16"]))
    assert {kind.name for kind in all_kinds() if kind.of_operations}  # and so are those of operations
    assert all(parse_edit(kind.example).within_ranks() is None for kind in all_kinds() if kind.of_operations)


@pytest.mark.parametrize(
    ("where", "edits"),
    [
        ("ranks", ["scale:kind=cpu", "replace:module=*,op=all_reduce,us=1", "remove:op=all_reduce"]),
        ("transfers", ["scale:op=all_reduce", "scale:axis=dp", "replace:kind=collective,us=1"]),
        ("everything", ["scale:module=*,axis=dp", "replace:module=*,axis=dp,us=1", "remove:axis=dp"]),
    ],
)
def test_selected_work_changes_in_ranks_among_transfers_or_in_the_graph_of_everything(where, edits):
    for within in (parse_edit(text).within_ranks() for text in edits):
        if within is None:
            assert where == "everything"
        else:
            assert where == ("transfers" if within.ranks is None else "ranks")


@pytest.mark.slow
def test_predictions_for_real_jobs_by_rank_are_those_of_the_whole_graph(traces, tmp_path):
    jobs = sorted(path for path in (traces / "multirank").iterdir() if path.is_dir())
    for source in [ROOT / "sample_traces" / "slow_rank", *jobs]:
        both = Both(open_path(source), tmp_path / source.name)
        for edits in (*EDITED, *IN_RANKS):
            both.assert_same(edits)
