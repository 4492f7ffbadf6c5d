"""What slows pipeline-parallel jobs down: made-up jobs with known faults, and two published analyses."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpro.detect.findings import Finding
from dpro.detect.pipeline_slowdown import (
    analyse_slowdown,
    diagnose_operations,
    equal_batches,
    find_uneven_stages,
    replayed_steps,
    typical_durations,
    without_launches,
)
from dpro.opening import open_path
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import measured_step_times, replay, step_times
from dpro.replay.whatif.registry import parse_edit
from tests.pipelines import MS, Job, written

NS_PER_S = 1e9
PRECISE = {"rel": 1e-6, "abs": 0}


def graph_of(job: Job, folder: Path) -> Graph:
    return build_graph(written(job.run(), folder)).graph


def diagnosed(job: Job, folder: Path) -> list[Finding]:
    graph = graph_of(job, folder)
    return diagnose_operations(graph, analyse_slowdown(graph))


@pytest.mark.parametrize(("num_stages", "num_dp"), [(1, 4), (2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_healthy_jobs_raise_nothing(num_stages, num_dp, seed, tmp_path):
    assert diagnosed(Job(num_stages, num_dp, 6, num_steps=6, late=0.1, noise=0.03, seed=seed), tmp_path) == []


def test_one_slow_worker_is_named_with_what_it_costs(tmp_path):
    def length(stage: int, dp: int) -> float:
        return 15.0 if (stage, dp) == (1, 0) else 10.0

    job = Job(2, 3, 4, num_steps=6, forward=length, backward=lambda s, d: 2 * length(s, d), noise=0.01)
    (finding,) = diagnosed(job, tmp_path)
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.compute", "rank", "3")
    # By hand: each of four micro-batches takes it 15 ms longer than the others, which is 5/6 of that longer
    # than the mean over all six.
    assert finding.cost_ns == pytest.approx(4 * 15 * 5 / 6 * MS, rel=0.05)


def test_a_stage_with_more_work_is_uneven_and_no_rank_is_blamed(tmp_path):
    job = Job(4, 2, 6, num_steps=6, backward=lambda stage, dp: 32.0 if stage == 3 else 20.0, noise=0.02)
    (finding,) = diagnosed(job, tmp_path)
    assert (finding.class_, finding.component_kind, finding.component_id) == ("imbalance.stage", "stage", "3")
    assert finding.ranks == (6, 7)
    # Spread evenly each backward takes 23 ms: six of the last stage 9 ms less, three that drain 3 ms more.
    # With equal stages up to six messages of 1 ms are on the critical path, too.
    assert (6 * 9 - 3 * 3 - 7) * MS < finding.cost_ns < (6 * 9 - 3 * 3) * MS
    # As fast as the others the six would save 12 ms each, but their work is there.
    assert any("as fast as the others" in line for line in finding.evidence)


def test_with_one_rank_per_stage_it_is_said_that_a_slow_worker_looks_the_same(tmp_path):
    job = Job(3, 1, 6, num_steps=6, backward=lambda stage, dp: 32.0 if stage == 1 else 20.0)
    (finding,) = diagnosed(job, tmp_path)
    assert finding.component_id == "1"
    assert 0.5 <= finding.confidence <= 0.7
    assert any("would look the same" in line for line in finding.evidence)


def test_a_stage_that_became_slow_meanwhile_is_found_in_the_latest_steps(tmp_path):
    graph = graph_of(Job(3, 2, 6, num_steps=16, noise=0.01), tmp_path)
    assert find_uneven_stages(graph) == []
    nodes, slow = graph.nodes, [rank for rank, place in graph.places.items() if place.stage == 1]
    late = (nodes.kind == NodeKind.KERNEL) & np.isin(nodes.rank, slow) & (nodes.step >= nodes.step.max() - 5)
    longer = replace(nodes, duration=np.where(late, nodes.duration * 3 // 2, nodes.duration))
    (finding,) = find_uneven_stages(replace(graph, nodes=longer))
    assert (finding.class_, finding.component_id, finding.ranks) == ("imbalance.stage", "1", tuple(slow))


def test_a_slow_worker_and_an_uneven_stage_are_distinguished_in_one_job(tmp_path):
    def backward(stage: int, dp: int) -> float:
        return 20.0 + (14 if stage == 3 else 0) + (30 if (stage, dp) == (1, 2) else 0)

    found = diagnosed(Job(4, 4, 8, num_steps=6, backward=backward, noise=0.01), tmp_path)
    named = {(finding.class_, finding.component_id) for finding in found}
    assert ("slow.compute", "6") in named
    assert named <= {("slow.compute", "6"), ("imbalance.stage", "3")}


def test_ratios_of_a_small_job_are_those_worked_out_by_hand(tmp_path):
    # One stage, two data-parallel ranks, one micro-batch; rank 1's forward takes 30 ms instead of 10.
    # Own: 3 + 30 + 20 + 5 + 2 + 4 = 64 ms. Typical: forward 20: 54. Only rank 1, or its kind, as it is: 64.
    job = Job(1, 2, 1, num_steps=2, forward=lambda stage, dp: 30.0 if dp else 10.0)
    slowdown = analyse_slowdown(graph_of(job, tmp_path)).slowdown
    assert slowdown.total == pytest.approx(64 / 54)
    assert slowdown.launch == pytest.approx(1)
    assert slowdown.by_rank == pytest.approx({0: 1, 1: 64 / 54})
    assert slowdown.by_dp == pytest.approx({0: 1, 1: 64 / 54})
    assert slowdown.by_stage == pytest.approx({0: 64 / 54})
    assert slowdown.by_op["forward-compute"] == pytest.approx(64 / 54)
    assert slowdown.by_op["optimizer"] == pytest.approx(1)
    assert slowdown.workers_share == pytest.approx(1)
    assert slowdown.last_stage_share == pytest.approx(1)


class Published:
    """One of the published analyses, and dpro's of the same trace."""

    def __init__(self, traces: Path, name: str) -> None:
        self.folder, self.name = traces / "straggler_parquet", name
        self.graph = build_graph(open_path(self.folder / f"trace-{name}.parquet")).graph
        self.analysed = analyse_slowdown(self.graph)
        self.slowdown = self.analysed.slowdown
        self.free = without_launches(self.graph)
        self.oracle: dict[str, Any] = json.loads((self.folder / "oracle.json").read_text())[name]

    def read(self, kind: str) -> dict[str, Any]:
        return json.loads(gzip.decompress((self.folder / f"{kind}-{self.name}.json.gz").read_bytes()))

    def mean(self, *edits: str) -> float:
        """Mean step in seconds without launch delays under edits."""
        graph = self.free
        for edit in edits:
            graph = parse_edit(edit).apply(graph)
        timeline = replay(graph)
        return float(step_times(graph, timeline.start, timeline.end)["duration_ns"].mean()) / NS_PER_S

    def healed(self, kinds: set[str]) -> float:
        """Mean step in seconds with some kinds of operations taking their typical time."""
        own, typical = self.free.nodes.duration, typical_durations(self.free)
        codes = [code for code, name in enumerate(self.free.names) if name in kinds]
        column = np.where(np.isin(self.free.nodes.name, codes), typical, own)
        return float(replayed_steps(self.free, [column]).mean()) / NS_PER_S


@pytest.fixture(scope="module", params=["AR", "ST"])
def published(request, traces) -> Published:
    return Published(traces, request.param)


def test_with_launch_delays_the_replay_is_what_was_measured(published):
    timeline = replay(published.graph)
    assert (timeline.start == published.graph.nodes.measured_start).all()
    measured = measured_step_times(published.graph)["duration_ns"].to_numpy() / NS_PER_S
    assert measured == pytest.approx(list(published.read("result")["step_t_base"].values()), **PRECISE)
    assert measured.mean() == pytest.approx(published.oracle["T"], **PRECISE)


def test_without_launch_delays_each_step_takes_the_published_time(published):
    timeline = replay(published.free)
    steps = step_times(published.free, timeline.start, timeline.end)["duration_ns"].to_numpy() / NS_PER_S
    assert steps == pytest.approx(list(published.read("result")["step_t_nodelay"].values()), **PRECISE)
    assert steps.mean() == pytest.approx(published.oracle["T_nodelay"], **PRECISE)


def test_the_typical_step_and_the_slowdown_are_the_published_ones(published):
    steps = replayed_steps(published.free, [typical_durations(published.free)])
    assert steps.mean() / NS_PER_S == pytest.approx(published.oracle["T_ideal"], **PRECISE)
    assert published.slowdown.total == pytest.approx(published.oracle["float64"]["S"], **PRECISE)
    assert published.slowdown.launch == pytest.approx(published.oracle["float64"]["launch"], **PRECISE)


def test_slowdowns_by_stage_data_parallel_rank_and_operation_are_the_published_ones(published):
    result, mine = published.read("result"), published.slowdown
    for by, ratios in (("stage", mine.by_stage), ("dp_rank", mine.by_dp), ("optype", mine.by_op)):
        expected = result[f"blocking_decompose_by_{by}"]
        assert {str(key): ratio for key, ratio in ratios.items()} == pytest.approx(expected, **PRECISE)


def test_exact_slowdowns_of_all_workers_are_those_of_the_oracle(published):
    mine = {str(rank): ratio for rank, ratio in published.slowdown.by_rank.items()}
    assert mine == pytest.approx(published.oracle["S_w_exact"], **PRECISE)


def test_shares_of_the_slowest_workers_and_the_last_stage_are_the_published_ones(published):
    assert published.slowdown.workers_share == pytest.approx(published.read("mw")["Mw"], rel=1e-6, abs=1e-6)
    assert published.slowdown.last_stage_share == pytest.approx(
        published.read("ms")["Ms"], rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize(
    ("key", "edits"),
    [
        ("forward-compute_2x_speedup", ["scale:name=forward-compute,factor=0.5"]),
        ("backward-compute_2x_speedup", ["scale:name=backward-compute,factor=0.5"]),
        ("pp_comm_zero_speedup", ["scale:name=*ward-send,factor=0", "scale:name=*ward-recv,factor=0"]),
        (
            "dp_comm_zero_speedup",
            ["scale:name=params-all-gather,factor=0", "scale:name=grads-reduce-scatter,factor=0"],
        ),
    ],
)
def test_what_ifs_are_those_of_the_oracle(key, edits, published):
    base = published.mean()
    assert base / published.mean(*edits) == pytest.approx(published.oracle[key], **PRECISE)


def test_each_kind_of_operation_healed_removes_the_oracles_share(published):
    base, even = published.oracle["T_nodelay"], published.oracle["T_ideal"]
    shares = {key.removeprefix("rem_"): share for key, share in published.oracle.items() if key[:4] == "rem_"}
    for kind, share in shares.items():
        # A share is a small difference of times: 1e-6 of the step is what it can be known to.
        assert (base - published.healed({kind})) / (base - even) == pytest.approx(
            share, rel=1e-6, abs=2e-6
        ), kind


def test_the_slow_worker_and_the_uneven_stage_are_distinguished(published):
    (finding,) = diagnose_operations(published.graph, published.analysed)
    if published.name == "AR":
        assert (finding.class_, finding.component_id, finding.ranks) == ("slow.compute", "0", (0,))
        healed = published.read("mw")
        assert finding.cost_ns / NS_PER_S == pytest.approx(healed["tori"] - healed["trem"], rel=1e-6)
    else:
        assert (finding.class_, finding.component_kind, finding.component_id) == (
            "imbalance.stage",
            "stage",
            "3",
        )


def test_transfers_are_as_long_as_the_published_ones(published):
    nodes, names = published.graph.nodes, np.array(published.graph.names)
    moving = nodes.kind == NodeKind.TRANSFER
    for name, expected in published.oracle["transfer"].items():
        own = nodes.duration[moving & (names[nodes.name] == name)] / NS_PER_S
        # The oracle rounds to microseconds, and the trace is in float32: 46 s are known to 4 us.
        assert float(np.median(own)) == pytest.approx(expected["median"], abs=4e-6)
        assert own.min() == pytest.approx(expected["min"], abs=8e-6)
        assert own.max() == pytest.approx(expected["max"], abs=8e-6)


def test_micro_batches_of_the_published_jobs_are_even_within_each_rank(published):
    # Over all ranks of AR's first stage the correlation is 0.999: that is its slow worker.
    even, findings = equal_batches(published.free)
    assert findings == []
    assert even is published.free
