"""A recorded job of equal layers, and its other layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.extensions.plan.layout import in_words, schedule_of
from dpro.extensions.plan.recorded_job import GivenJob, RecordedJob, is_own, own_layout, ranked, recorded_job
from dpro.extensions.plan.stack import stack_of, work_of
from dpro.opening import open_path
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay
from dpro.store import Run
from tests.gpu_layers import TENSOR, stack_trace
from tests.layers import BATCH, HEADS, LAYERS, LENGTH, VOCABULARY, WIDE, WIDTH


@pytest.fixture(scope="module")
def graph(layered: Run) -> Graph:
    return build_graph(layered).predictive


@pytest.fixture(scope="module")
def job(graph: Graph) -> RecordedJob:
    return recorded_job(graph)


def planned(job: RecordedJob, **layout: int) -> pl.DataFrame:
    """The job in one layout: what is not given stays."""
    keep = job.layout.row(0, named=True) | layout
    sequences = keep["dp"] * keep["micro_batch"] * keep.pop("micro_batches")
    return ranked(job, keep["dp"] * keep["tp"] * keep["pp"] * keep["cp"], sequences, keep)


@pytest.mark.slow
def test_the_model_of_a_real_job_is_found_in_its_operators(job: RecordedJob) -> None:
    model = job.model
    assert (model.layers, model.hidden, model.heads, model.ffn) == (LAYERS, WIDTH, HEADS, WIDE)
    assert (model.vocabulary, model.sequence, model.gated) == (VOCABULARY, LENGTH, False)
    assert in_words(job.layout.row(0, named=True)) == f"dp 1, micro-batch {BATCH} x 1"


def test_the_run_s_own_layout_comes_out_at_its_measured_step(job: RecordedJob) -> None:
    own = own_layout(job)
    assert own["step_ms"][0] == pytest.approx(job.step_ms, rel=1e-6)
    rows = ranked(job, 1, job.global_batch)
    assert rows.filter(is_own(job))["step_ms"].to_list() == pytest.approx([job.step_ms], rel=1e-6)
    assert own["low_ms"][0] < job.step_ms < own["high_ms"][0]


def test_a_product_that_waited_for_a_core_in_most_steps_hides_no_layers(graph: Graph) -> None:
    work, _ = work_of(replay(graph), 0)
    slow = graph.nodes.duration.copy()
    for step in np.unique(work.step)[1:].tolist():
        outputs = np.flatnonzero((work.token >= 0) & work.backward & (work.step == step))
        slow[work.node[outputs[0]]] += 50_000_000
    stack = stack_of(replay(replace(graph, nodes=replace(graph.nodes, duration=slow))), 0)
    assert stack.layers == LAYERS


def test_products_that_took_less_than_recording_them_are_layers_all_the_same(graph: Graph) -> None:
    work, _ = work_of(replay(graph), 0)
    left = graph.nodes.duration.copy()
    left[work.node[work.product]] = 0
    for step in np.unique(work.step).tolist():  # the head, last forward and first backward, is longer
        heads = [
            np.flatnonzero((work.token >= 0) & (work.backward == way) & (work.step == step)) for way in (0, 1)
        ]
        left[work.node[[heads[0][-1], heads[1][0]]]] = 9_000
    stack = stack_of(replay(replace(graph, nodes=replace(graph.nodes, duration=left))), 0)
    assert stack.layers == LAYERS


def test_half_the_sequences_at_a_time_take_no_longer(job: RecordedJob) -> None:
    one, two = (planned(job, micro_batch=size, micro_batches=2)["step_ms"][0] for size in (1, 2))
    assert one < two


def test_ranks_that_share_a_layer_or_a_stack_take_less_work_each(job: RecordedJob) -> None:
    work = job.timed(planned(job, tp=2).select(job.layout.columns)).work
    own = job.timed(job.layout).work
    assert np.allclose(work.forward.compute, own.forward.compute / 2)
    assert np.allclose(work.forward.memory, own.forward.memory)


@pytest.mark.parametrize("layout", [{"tp": 8}, {"pp": 2}, {"ep": 2}])
def test_layouts_that_divide_nothing_are_refused(job: RecordedJob, layout: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="divides"):
        planned(job, **layout)


def test_what_is_given_of_a_layout_has_to_be_whole(graph: Graph) -> None:
    with pytest.raises(Unanswerable, match="--layout"):
        recorded_job(graph, GivenJob(layout={"dp": 4}))


def test_no_layout_of_too_many_ranks_is_an_error_of_use(job: RecordedJob) -> None:
    with pytest.raises(UsageError, match="no layout"):
        ranked(job, 7, 1)


@pytest.mark.parametrize(
    "trace",
    [
        "multirank/torchrec_v100_2r_kjt",
        "nccl_meta/mi300x_ddp_rank0of8.json.gz",
        "robust/kineto2021_v100.json.gz",
    ],
)
def test_real_jobs_without_a_stack_of_layers_are_refused_in_one_line(traces: Path, trace: str) -> None:
    path = traces / trace
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with pytest.raises(Unanswerable) as refused:
        recorded_job(build_graph(open_path(path)).predictive)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> RecordedJob:
    trace = stack_trace(tmp_path_factory.mktemp("stack"))
    graph = build_graph(open_path(trace)).predictive
    return recorded_job(graph, GivenJob(layout={"tp": TENSOR}))


def test_the_model_of_a_trace_of_one_gpu_of_eight_is_found(on_gpu: RecordedJob) -> None:
    model = on_gpu.model
    assert (model.layers, model.hidden, model.heads, model.kv_heads) == (4, 4096, 32, 8)
    assert (model.ffn, model.gated, model.vocabulary, model.sequence) == (14336, True, 128256, 4096)
    assert on_gpu.cut_head
    assert on_gpu.stack.forward.sent == pytest.approx(500)  # two all-reduces of 250 us
    assert on_gpu.stack.backward.sent == pytest.approx(500)


def test_a_gpu_s_own_layout_is_at_its_measured_step_with_its_utilisation(on_gpu: RecordedJob) -> None:
    own = own_layout(on_gpu)
    assert own["step_ms"][0] == pytest.approx(on_gpu.step_ms, rel=1e-3)
    assert 0.1 < own["mfu"][0] < 0.6
    assert on_gpu.explained == pytest.approx(1, abs=0.05)


def test_half_the_ranks_of_a_layer_nearly_double_its_products(on_gpu: RecordedJob) -> None:
    rows = pl.concat([on_gpu.layout, on_gpu.layout.with_columns(tp=pl.lit(4, pl.Int64))])
    work = on_gpu.timed(rows).work
    assert work.forward.compute[0] == pytest.approx(on_gpu.stack.forward.product)
    assert 1.4 < work.forward.compute[1] / work.forward.compute[0] < 2.2


def test_layouts_that_do_not_fit_say_why(on_gpu: RecordedJob) -> None:
    small = replace(on_gpu, machine=replace(on_gpu.machine, memory_gb=20.0))
    rows = ranked(small, 8, 8)
    assert set(rows["fits"]) >= {"no"}
    assert (rows.filter(pl.col("fits") == "no")["why"] != "").all()


def test_layouts_of_a_run_are_ranked_under_other_schedules(on_gpu: RecordedJob) -> None:
    rows = ranked(on_gpu, 8, 32, {"pp": 2}, schedules=("zbv", "zb-h1"))
    assert {schedule_of(row) for row in rows.iter_rows(named=True)} == {"zbv", "zb-h1"}
