"""What binds a real job changes with an edit: launch-bound ones become GPU-bound, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.opening import open_path
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph
from dpro.replay.timeline import changed_step_times, replay, step_ends
from dpro.replay.whatif.registry import parse_edit

TEN_TIMES, HALF = "scale:kind=kernel,factor=0.1", "scale:kind=kernel,factor=0.5"
NO_HOST = ["no-launch", *(f"scale:kind={kind},factor=0" for kind in ("cpu", "host", "runtime"))]
LAUNCH_BOUND = ["multirank/nanogpt_h100_8r_rs_ag", "multirank/torchrec_v100_2r_kjt"]
GPU_BOUND = "nccl_meta/nanogpt_h100_current_rank0of8.json.gz"


@pytest.fixture(scope="module")
def graph_of(traces):
    built: dict[str, Graph] = {}

    def graph(name: str) -> Graph:
        if not (traces / name).exists():
            pytest.skip(f"no {name} among the real traces")
        if name not in built:
            built[name] = build_graph(open_path(traces / name)).graph
        return built[name]

    return graph


def _step_ms(graph: Graph, *edits: str) -> float:
    """The mean step under edits, ms."""
    before = replay(graph)
    changed = graph
    for edit in edits:
        changed = parse_edit(edit).apply(changed)
    after = replay(changed)
    steps = changed_step_times(step_ends(graph, before.start, before.end), changed, after.end)
    return float(steps["duration_ns"].mean()) / 1e6


@pytest.mark.parametrize("name", LAUNCH_BOUND, ids=lambda name: Path(name).name)
def test_a_launch_bound_job_gains_nothing_from_faster_kernels_until_its_host_is_out_of_the_way(
    graph_of, name
):
    # Seen, ms: as it is, kernels ten times faster; host out of the way, and then kernels at half their time:
    #   8 x H100  42.2, 42.2; 33.2, 18.9     2 x V100  43.6, 43.6; 0.84, 0.73
    graph = graph_of(name)
    base = _step_ms(graph)
    assert _step_ms(graph, TEN_TIMES) == pytest.approx(base, rel=0.01)
    free = _step_ms(graph, *NO_HOST)
    assert free < 0.9 * base
    assert _step_ms(graph, *NO_HOST, HALF) < 0.9 * free


def test_free_launches_let_kernels_matter_where_they_did_not(graph_of):
    # Seen: 42.2 ms whatever the kernels take; 37.9 with free launches, and 36.3 with kernels at half time.
    graph = graph_of(LAUNCH_BOUND[0])
    base, free = _step_ms(graph), _step_ms(graph, "no-launch")
    assert base - _step_ms(graph, HALF) < 0.002 * base
    assert free < 0.95 * base
    assert free - _step_ms(graph, "no-launch", HALF) > 0.03 * free


def test_a_gpu_bound_job_gains_nothing_from_free_launches_until_its_kernels_are_faster(graph_of):
    # Seen: 61.0 ms with and without launches; 45.7 with kernels ten times faster, then 11.2 without launches.
    graph = graph_of(GPU_BOUND)
    base = _step_ms(graph)
    assert _step_ms(graph, "no-launch") == pytest.approx(base, rel=0.005)
    fast = _step_ms(graph, TEN_TIMES)
    assert fast < 0.85 * base
    assert _step_ms(graph, TEN_TIMES, "no-launch") < 0.8 * fast
