"""A run without steps is one step from where its devices are first given work, or its input is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.replay.steps import recorded_steps
from dpro.replay.timeline import measured_step_times
from dpro.schema import SPANS, STEPS
from tests.builders import US, TinyRun

START = 12_000.0  # us before the first launch


def _started(*, load: float | None = None, first: float = START, works: float | None = None) -> TinyRun:
    run = TinyRun()
    if works is not None:
        run.kernel("launched before", works, works + 100)
    run.op("import", 0, first)
    if load is not None:
        run.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", load, load + 100)
    run.op("aten::mm", first, first + 30)
    run.call(first, first + 10, 1)
    run.kernel("gemm", first + 20, first + 500, 1)
    return run


@pytest.mark.parametrize(
    ("run", "step_us"),
    [
        (_started(), 500),
        (_started(load=11_000), 1_000 + 500),
        (_started(first=900), 900 + 500),  # too little to be the start of a process
        (_started(works=START - 200), 500),
    ],
    ids=["start", "loaded", "short", "just before"],
)
def test_what_precedes_the_first_launch_is_in_no_step(run: TinyRun, step_us: float, tmp_path: Path):
    graph = run.build(tmp_path).graph
    assert measured_step_times(graph)["duration_ns"].to_list() == [step_us * US]
    steps = recorded_steps(graph.run.table(SPANS), graph.run.table(STEPS))
    assert (steps["end_ns"] - steps["start_ns"]).to_list() == [step_us * US]


@pytest.mark.parametrize(("is_computed", "step_us"), [(True, 500), (False, 1_900)])
def test_what_is_copied_before_the_first_kernel_is_in_no_step(
    is_computed: bool, step_us: float, tmp_path: Path
):
    run = _started() if is_computed else TinyRun()
    run.mark("import", 0, 11_000)
    for number, at in enumerate((10_000, 11_000)):  # weights
        run.call(at, at + 10, 5 + number, name="cudaMemcpyAsync")
        run.span("memcpy", "Memcpy HtoD", at + 20, at + 900, correlation=5 + number, stream=7)
    graph = run.build(tmp_path).graph
    assert measured_step_times(graph)["duration_ns"].to_list() == [step_us * US]


def test_a_hole_behind_work_that_was_launched_before_the_window_is_no_start(tmp_path: Path):
    graph = _started(works=50).build(tmp_path).graph
    assert measured_step_times(graph)["duration_ns"].to_list() == [(START + 500 - 150) * US]
    steps = recorded_steps(graph.run.table(SPANS), graph.run.table(STEPS))
    assert steps.select("start_ns", "end_ns").rows() == [(0, (START + 500) * US)]


def test_a_run_without_work_of_devices_is_one_step_from_its_first_span(tmp_path: Path):
    run = TinyRun()
    run.op("import", 0, START)
    run.gloo((START, START + 5), (START + 5, START + 100))
    graph = run.build(tmp_path).graph
    assert measured_step_times(graph)["duration_ns"].to_list() == [(START + 100) * US]
