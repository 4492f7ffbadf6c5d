"""Edits that meet groups along several axes of parallelism change only those that they are about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpro.errors import Unanswerable
from dpro.members import members_text
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.registry import parse_edit
from tests.builders import US, TinyRun
from tests.edits import changed, steps_us

LATENCY, PER_BYTE = 40.0, 0.2  # us
ACTIVATIONS, GRADIENTS = (1000, 2000), (3000, 6000)  # bytes, in turn
WORK, UPDATE = 500.0, 100.0


def took(size: int) -> float:
    return LATENCY + PER_BYTE * size


def grid_job(dp: int = 2, tp: int = 2, *, axes: bool = True, steps: int = 8) -> TinyRun:
    """Each step reduces activations along tp, then gradients along dp, and waits for both."""
    run, begin = TinyRun(), 0.0
    for step in range(steps):
        for rank in range(dp * tp):
            across = [rank % tp + tp * each for each in range(dp)]
            along = [rank // tp * tp + each for each in range(tp)]
            at = begin
            for ranks, size in ((along, ACTIVATIONS[step % 2]), (across, GRADIENTS[step % 2])):
                if len(ranks) == 1:
                    continue
                run.op("aten::mm", at, at + WORK, rank)
                at += WORK
                known = {
                    "group": f"group {ranks}",
                    "group_ranks": members_text(ranks),
                    "bytes_in": size,
                    "bytes_out": size,
                }
                run.gloo((at, at + 10), (at + 20, at + 20 + took(size)), rank, sequence=step, **known)
                run.mark("wait", at + 10, at + 20 + took(size), rank)
                at += 20 + took(size)
            run.mark("Optimizer.step#SGD.step", at, at + UPDATE, rank)
            run.op("aten::add_", at, at + UPDATE, rank)
            run.step(step, begin, at + UPDATE, rank)
        begin = at + UPDATE
    if axes:
        places = [{"dp": rank // tp, "tp": rank % tp} for rank in range(dp * tp)]
        run.rows["workers"] += [{"rank": rank, "host": "node", **at} for rank, at in enumerate(places)]
    return run


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Graph]:
    made = {
        "grid": grid_job(),
        "unknown": grid_job(axes=False),
        "tensor": grid_job(dp=1),
        "replicas": grid_job(tp=1),
    }
    return {name: run.build(tmp_path_factory.mktemp(name) / "run").graph for name, run in made.items()}


def times_us(graph: Graph, gradients: bool) -> list[float]:
    """Of the transfers of rank 0 in the third and fourth step."""
    nodes = graph.nodes
    sizes = GRADIENTS if gradients else ACTIVATIONS
    mine = (nodes.kind == NodeKind.TRANSFER) & (nodes.rank == 0) & np.isin(nodes.step, (2, 3))
    return [float(nodes.duration[mine & (nodes.bytes == size)][0] / US) for size in sizes]


def test_a_faster_network_along_one_axis_leaves_the_other_as_it_is(jobs):
    graph = changed(jobs["grid"], "network:bandwidth=2,axis=tp")
    assert times_us(graph, gradients=False) == pytest.approx(
        [LATENCY + PER_BYTE * n / 2 for n in ACTIVATIONS]
    )
    assert times_us(graph, gradients=True) == pytest.approx([took(size) for size in GRADIENTS])


def test_a_delay_along_one_axis_leaves_the_other_as_it_is(jobs):
    graph = changed(jobs["grid"], "delay:us=30,axis=dp")
    assert times_us(graph, gradients=True) == pytest.approx([took(size) + 30 for size in GRADIENTS])
    assert times_us(graph, gradients=False) == pytest.approx([took(size) for size in ACTIVATIONS])


def test_without_communication_along_one_axis_ranks_still_wait_along_the_other(jobs):
    saved = steps_us(jobs["grid"]) - steps_us(jobs["grid"], "no-comm:axis=dp")
    assert saved[2:4] == pytest.approx([took(size) for size in GRADIENTS], abs=25)


def test_work_is_selected_by_the_axis_of_its_collectives(jobs):
    graph = changed(jobs["grid"], "scale:kind=collective,axis=tp,factor=2")
    assert times_us(graph, gradients=False) == pytest.approx([2 * took(size) for size in ACTIVATIONS])
    assert times_us(graph, gradients=True) == pytest.approx([took(size) for size in GRADIENTS])


def test_further_passes_reduce_activations_and_no_gradients(jobs):
    further = steps_us(jobs["grid"], "accumulate:steps=2") - steps_us(jobs["grid"])
    activations = [took(size) for size in ACTIVATIONS]
    assert further[2:4] == pytest.approx([2 * WORK + each + 20 for each in activations], abs=30)


def test_more_replicas_change_what_gradients_cost_and_nothing_along_other_axes(jobs):
    graph = changed(jobs["grid"], "data-parallel:ranks=4")
    # Two ranks send 2 messages and the bytes once; four send 6 and one and a half times the bytes.
    expected = [3 * LATENCY + 1.5 * PER_BYTE * size for size in GRADIENTS]
    assert times_us(graph, gradients=True) == pytest.approx(expected, rel=0.01)
    assert times_us(graph, gradients=False) == pytest.approx([took(size) for size in ACTIVATIONS])
    assert parse_edit("data-parallel:ranks=4").samples(jobs["grid"]) == 2.0


def test_one_replica_reduces_no_gradients(jobs):
    saved = steps_us(jobs["grid"]) - steps_us(jobs["grid"], "data-parallel:ranks=1")
    assert saved[2:4] == pytest.approx([took(size) for size in GRADIENTS], abs=25)


def test_candidates_need_no_group_where_axes_are_known(jobs):
    def asked(name: str, job: str) -> list[str]:
        edit: type[Edit] = type(parse_edit(name))
        return [str(each) for each in edit.candidates(facts_of(jobs[job]))]

    assert asked("accumulate", "grid") == ["accumulate:steps=2"]
    assert asked("data-parallel:ranks=4", "grid") == ["data-parallel:ranks=4"]
    assert "group=" in asked("accumulate", "unknown")[0]


@pytest.mark.parametrize(
    ("job", "edit", "reason"),
    [
        ("unknown", "accumulate:steps=2", "several groups reduce: give the one with the gradients"),
        ("unknown", "data-parallel:ranks=4", "which are data-parallel is not recorded"),
        ("unknown", "network:axis=tp", "no communication in the run is known to be along tp: the axes of"),
        (
            "grid",
            "no-comm:axis=pp",
            "no communication in the run is known to be along pp: it is along dp, tp",
        ),
        ("tensor", "accumulate:steps=2", "no reduction in the run is between data-parallel ranks: all are"),
        ("tensor", "data-parallel:ranks=4", "no group in the run is data-parallel"),
    ],
)
def test_what_is_not_known_of_axes_is_refused(jobs, job, edit, reason):
    with pytest.raises(Unanswerable, match=reason):
        changed(jobs[job], edit)


def test_the_only_axis_of_a_job_of_replicas_is_its_group_of_before(jobs, tmp_path: Path):
    plain = grid_job(tp=1, axes=False).build(tmp_path / "run").graph
    for edit in ("accumulate:steps=2", "data-parallel:ranks=4"):
        assert steps_us(jobs["replicas"], edit) == pytest.approx(steps_us(plain, edit))


def test_one_replica_alone_is_refused_where_transfers_may_be_waiting_for_others(tmp_path: Path):
    run = grid_job(tp=1, axes=False)
    for row in run.rows["collectives"]:
        row["bytes_in"] = row["bytes_out"] = -1
    with pytest.raises(Unanswerable, match=r"known size .*: `dpro record` records the sizes of all calls"):
        changed(run.build(tmp_path / "run").graph, "data-parallel:ranks=1")
