"""Time for memory: larger batches, and what helps both, on a made-up job whose allocator is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpro.analysis.answers.whatif import pareto
from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.cost.memory import ALLOCATED, footprint_of, freed_by_recomputing
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import replay
from dpro.replay.whatif.edits.scaling import moves_activations, with_larger_batch
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.graph_ops.scope import blocks_of_run
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import explore
from tests.builders import US, TinyRun
from tests.ddp import ddp_job, gpu_ddp_job
from tests.edits import step_us

LAYERS, LAYER, KEPT, INSIDE = 4, 1000.0, 1000, 300
MB = 1 << 20


def remembered(run: TinyRun, *, device: str = "", stays: int = 5000, free: int | None = None) -> TinyRun:
    """What a job's allocator said: each layer keeps something until its backward pass, and one uses more."""
    for row in run.rows["steps"]:
        begin, rank = row["start_ns"] / US, row["rank"]
        allocated = stays
        run.counter(ALLOCATED, begin, allocated, rank, device)
        for layer in range(LAYERS):
            allocated += KEPT
            run.counter(ALLOCATED, begin + LAYER * (layer + 0.5), allocated, rank, device)
        run.counter(ALLOCATED, begin + LAYERS * LAYER + 10, allocated + INSIDE, rank, device)
        run.counter(ALLOCATED, begin + LAYERS * LAYER + 20, stays, rank, device)
    if free is not None:
        name = "memory_total_bytes" if device else "memory_available_bytes"
        run.counter(name, 0, free, 0, device)
    return run


def built(run: TinyRun, folder: Path) -> Built:
    return build_graph(run.write(folder / "run"))


def test_a_step_takes_what_it_has_at_most_beyond_what_it_found(tmp_path):
    on_cpu = footprint_of(remembered(ddp_job(), free=10_000).write(tmp_path / "cpu"))
    assert (on_cpu.within_step_bytes, on_cpu.free_bytes) == (LAYERS * KEPT + INSIDE, 10_000)
    # A GPU's total holds what stays, and what is left of it is what the peak leaves.
    on_gpu = footprint_of(remembered(ddp_job(), device="gpu 0", free=10_000).write(tmp_path / "gpu"))
    assert on_gpu.free_bytes == 10_000 - 5000 - LAYERS * KEPT - INSIDE
    assert footprint_of(remembered(ddp_job()).write(tmp_path / "untold")).free_bytes is None


def test_of_several_devices_of_a_rank_the_one_with_the_model_counts(tmp_path):
    run = remembered(ddp_job(), device="gpu 0", stays=50_000)
    run.counter(ALLOCATED, 5, 100, 0, "gpu 1")  # a buffer that is copied to a second device
    run.counter(ALLOCATED, 7000, 90, 0, "gpu 1")
    assert footprint_of(run.write(tmp_path / "run")).within_step_bytes == LAYERS * KEPT + INSIDE


def test_of_recomputed_layers_one_at_a_time_keeps_its_activations(tmp_path):
    run = remembered(ddp_job()).write(tmp_path / "run")
    assert freed_by_recomputing(run, [f"layers.{layer}" for layer in range(LAYERS)]) == (LAYERS - 1) * KEPT
    assert freed_by_recomputing(run, ["layers.0"]) == 0
    assert blocks_of_run(run) == {"layers.*": [f"layers.{layer}" for layer in range(LAYERS)]}


def test_a_batch_twice_as_large_takes_twice_the_work_and_as_long_to_reduce(tmp_path):
    graph = built(remembered(ddp_job(), free=10_000), tmp_path).graph
    assert step_us(graph) == 8000 + 10 + LAYERS * 4096 + 50 + 100
    larger = parse_edit("batch:factor=2").apply(graph)
    # The call and the copies of results are operators, too; the optimizer is not of the batch.
    assert step_us(larger) == pytest.approx(16000 + 20 + LAYERS * 4096 + 100 + 100, abs=30)
    assert parse_edit("batch:factor=2").notes(graph)[1] == "a step allocates 4.3 kB now, 8.6 kB then"


def test_on_gpus_kernels_grow_and_launches_do_not(tmp_path):
    graph = built(remembered(gpu_ddp_job(), device="gpu 0", free=100_000), tmp_path).graph
    gained = step_us(parse_edit("batch:factor=2").apply(graph)) - step_us(graph)
    assert gained == pytest.approx(5 * 1000 + 50, abs=5)  # five kernels and the update in no optimizer range


def activations(op: str, forward: bool) -> TinyRun:
    """One step of two ranks, each an operator, a collective, a backward operator, a collective."""
    run = TinyRun()
    for rank in (0, 1):
        for step, begin in enumerate((0, 1000)):
            run.op("aten::mm", begin, begin + 100, rank, sequence_number=step, forward_thread=0)
            if forward:
                run.gloo((begin + 100, begin + 110), (begin + 110, begin + 210), rank, op=op, bytes_in=4000)
            run.op("MmBackward0", begin + 250, begin + 350, rank, sequence_number=step, forward_thread=1)
            run.gloo((begin + 350, begin + 360), (begin + 360, begin + 460), rank, op=op, bytes_in=4000)
            run.step(step, begin, begin + 1000, rank)
    return run


@pytest.mark.parametrize(
    ("op", "forward", "grows"),
    [("all_reduce", True, 4), ("all_reduce", False, 0), ("all_to_all", False, 2), ("all_gather", True, 0)],
)
def test_activations_grow_with_the_batch_and_gradients_do_not(tmp_path, op, forward, grows):
    graph = build_graph(activations(op, forward).write(tmp_path / "run")).graph
    moving = moves_activations(graph)
    assert moving.sum() == 2 * grows  # on two ranks
    larger = with_larger_batch(graph, 3.0)
    transfers = graph.nodes.kind == NodeKind.TRANSFER
    grown = larger.nodes.duration[transfers] / graph.nodes.duration[transfers]
    assert grown == pytest.approx(np.where(moving[transfers], 3.0, 1.0), rel=1e-3)


def loaded(workers: str, waits: float) -> TinyRun:
    """Steps of 3 ms: a batch comes after this long; then a short kernel, a long one, and the optimizer's."""
    run = TinyRun()
    for step in range(3):
        at = 3000.0 * step
        run.mark(f"enumerate(DataLoader)#{workers}DataLoaderIter.__next__", at, at + waits)
        run.mark("Optimizer.step#SGD.step", at + 2800, at + 2900)
        for number, begin, takes in ((0, 2000, 6), (1, 2100, 400), (2, 2810, 6)):
            correlation = 10 * step + number
            run.op("aten::mm", at + begin, at + begin + 10)
            run.call(at + begin + 1, at + begin + 5, correlation)
            run.kernel("k", at + begin + 5, at + begin + 5 + takes, correlation)
        run.step(step, at, at + 3000)
    return run


def kernels_and_fetching(graph: Graph) -> list[float]:
    """[4] us that the three kernels and a DataLoader's `__next__` take in the first step."""
    nodes = graph.nodes
    kernels = np.flatnonzero((nodes.kind == NodeKind.KERNEL) & (nodes.step == 0))
    loading = [graph.names[around].startswith("enumerate") for around in nodes.around]
    fetching = nodes.duration[np.array(loading) & (nodes.step == 0)].sum()
    return [*(nodes.duration[kernels[np.argsort(nodes.measured_start[kernels])]] / US), fetching / US]


def test_short_kernels_and_batches_that_are_ready_grow_less_than_the_batch(tmp_path):
    graph = built(loaded("_MultiProcessing", 500), tmp_path).graph
    assert kernels_and_fetching(graph) == pytest.approx([6, 400, 6, 500])
    edit = parse_edit("batch:factor=4")
    assert kernels_and_fetching(edit.apply(graph)) == pytest.approx([12, 1600, 6, 500])
    least, most = map(kernels_and_fetching, edit.bounds(graph))
    assert (least, most) == (pytest.approx([6, 1600, 6, 500]), pytest.approx([24, 1600, 6, 2000]))
    smaller = kernels_and_fetching(parse_edit("batch:factor=0.25").apply(graph))
    assert smaller == pytest.approx([3, 100, 6, 500])


@pytest.mark.parametrize(("workers", "waits"), [("_SingleProcess", 500), ("_MultiProcessing", 1900)])
def test_batches_that_a_step_waits_for_take_longer_with_their_size(tmp_path, workers, waits):
    graph = built(loaded(workers, waits), tmp_path).graph
    assert kernels_and_fetching(parse_edit("batch:factor=4").apply(graph))[3] == pytest.approx(4 * waits)


def test_a_batch_of_todays_size_changes_no_nanosecond(tmp_path):
    graph = built(remembered(ddp_job(), free=0), tmp_path).graph
    assert (parse_edit("batch:factor=1").apply(graph).nodes.duration == graph.nodes.duration).all()


def test_a_batch_for_which_there_is_no_memory_is_refused(tmp_path):
    graph = built(remembered(ddp_job(), free=4000), tmp_path / "little").graph
    with pytest.raises(Unanswerable, match=r"would allocate 4.3 kB more, and 4.0 kB are free"):
        parse_edit("batch:factor=2").apply(graph)
    assert parse_edit("batch:factor=1.9").apply(graph)
    untold = built(remembered(ddp_job()), tmp_path / "untold").graph
    with pytest.raises(Unanswerable, match=r"4.3 kB more, and 0 B are free"):
        parse_edit("batch:factor=2,memory_gb=0").apply(untold)
    with pytest.raises(Unanswerable, match="record with `dpro record --memory`"):
        parse_edit("batch:factor=2,memory_gb=1").apply(built(ddp_job(), tmp_path / "none").graph)


def test_where_a_run_does_not_say_what_memory_there_is_only_the_time_of_a_batch_is_predicted(tmp_path):
    edit = parse_edit("batch:factor=2")
    for job in (ddp_job(), remembered(ddp_job())):
        graph = built(job, tmp_path / str(len(job.rows))).graph
        changed = edit.apply(graph)
        assert changed.nodes.duration.tolist() == with_larger_batch(graph, 2.0).nodes.duration.tolist()
        assert changed.step_bytes is None
        assert "the memory size was not recorded, so the fit is unknown" in edit.notes(graph)[1]
        with pytest.raises(Unanswerable, match="memory"):  # a search does not advise what may not fit
            type(edit).candidates(facts_of(graph))


def test_a_batch_has_the_memory_that_recomputed_layers_free(tmp_path):
    graph = built(remembered(ddp_job(), free=4000), tmp_path).graph
    again = parse_edit("recompute:module=layers.*").apply(graph)
    assert again.step_bytes == LAYERS * KEPT + INSIDE - (LAYERS - 1) * KEPT
    larger = parse_edit("batch:factor=4").apply(again)  # refused without
    assert larger.step_bytes == 4 * again.step_bytes
    with pytest.raises(Unanswerable, match=r"would allocate 6.1 kB more, and 4.0 kB are free"):
        parse_edit("batch:factor=8").apply(again)


def test_a_search_makes_room_for_batches_that_do_not_fit(tmp_path):
    run = remembered(ddp_job(), free=4000).write(tmp_path / "run")
    whole = build_graph(run)
    found = explore(whole.graph, assess(whole, replay(whole.graph), run.manifest))
    ways = {" ".join(map(str, each.edits)) for each in found.predictions}
    assert "recompute:module=layers.* batch:factor=4" in ways
    assert not any(way.startswith("batch:") for way in ways)
    assert any(refusal.edit.startswith("batch:") for refusal in found.refused)


def test_of_time_against_memory_that_is_best_which_nothing_beats_in_both(tmp_path):
    made = remembered(ddp_job(), free=5000).write(tmp_path / "run")
    whole = build_graph(made)
    points = pareto(whole.graph, assess(whole, replay(whole.graph), made.manifest))
    by_text = {" ".join(map(str, point.edits)): point for point in points}
    now, within = by_text[""], LAYERS * KEPT + INSIDE
    assert now.within_step_bytes == within
    again = by_text["recompute:module=layers.*"]
    assert again.within_step_bytes == within - (LAYERS - 1) * KEPT
    assert again.ms_per_batch == pytest.approx(now.ms_per_batch + LAYERS * LAYER * US / 1e6, rel=0.01)
    twice = by_text["batch:factor=2,memory_gb=1000000"]
    assert twice.within_step_bytes == 2 * within
    assert twice.ms_per_batch < now.ms_per_batch
    assert (now.fits, twice.fits, by_text["batch:factor=4,memory_gb=1000000"].fits) == (True, True, False)
    for point in points:
        others = [other for other in points if other is not point]
        beaten = any(
            other.ms_per_batch <= point.ms_per_batch and other.within_step_bytes <= point.within_step_bytes
            for other in others
        )
        assert point.best != beaten
    assert points == sorted(points, key=lambda point: (point.within_step_bytes, point.ms_per_batch))
