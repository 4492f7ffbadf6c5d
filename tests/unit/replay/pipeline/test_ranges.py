"""Operations of traces that dpro did not record, by the ranges that PyTorch marks; and on GPUs."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from dpro.replay.construction.graph_builder import build_operation_view
from dpro.replay.pipeline.recorded import (
    has_operations,
    has_ranges,
    operations_by_ranges,
    operations_of,
    pipeline_bubbles,
)
from dpro.schema import SPANS, STEPS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from dpro.table import complete
from tests.builders import gpu_job

MS = 1_000_000
RANGE = "annotation"


def traced(folder: Path, spans: list[tuple[int, str, str, float, float, int]], gpus: bool = False) -> Run:
    """A trace of two stages: rank, kind, name, start and end in ms, correlation; a step of 100 ms."""
    rows = pl.DataFrame(
        [
            (number, rank, kind, name, round(start * MS), round((end - start) * MS), correlation)
            for number, (rank, kind, name, start, end, correlation) in enumerate(spans)
        ],
        ["span_id", "rank", "kind", "name", "start_ns", "duration_ns", "correlation"],
        orient="row",
    )
    steps = [
        {"rank": rank, "step": 5, "window": 0, "start_ns": 0, "duration_ns": 100 * MS} for rank in (0, 1)
    ]
    workers = [{"rank": rank, "pp": rank, "host": "a"} for rank in (0, 1)]
    for table, frame in ((SPANS, rows), (STEPS, pl.DataFrame(steps)), (WORKERS, pl.DataFrame(workers))):
        write_part(folder, table, "rank00000", complete(table, frame))
    write_manifest(folder, Manifest(world_size=2, ranks=[0, 1], gpus=["H100"] if gpus else []))
    return open_run(folder)


def test_range_that_waits_first_counts_from_its_first_operator(tmp_path):
    run = traced(
        tmp_path,
        [
            (0, RANGE, "Forward 0", 0, 10, -1), (0, "cpu_op", "aten::mm", 1, 9, -1),
            (0, "cpu_op", "c10d::send", 9, 10, -1), (1, RANGE, "Forward 0", 0, 20, -1),
            (1, "cpu_op", "c10d::recv_", 0, 11, -1), (1, "cpu_op", "aten::mm", 12, 19, -1),
        ],
    )  # fmt: skip
    assert has_ranges(run)
    found = operations_by_ranges(run)
    columns = ("rank", "step", "stage", "place", "micro_batch", "kind", "start_ns", "duration_ns")
    assert found.select(columns).rows() == [
        (0, 5, 0, 0, 0, "forward", 1 * MS, 8 * MS),
        (1, 5, 1, 1, 0, "forward", 12 * MS, 7 * MS),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("2F1", "forward"), ("2B1", "backward"), ("2I1", "backward_input"), ("2W1", "backward_weight")],
)
def test_action_of_a_schedule_says_its_place_in_the_model_and_what_it_does(tmp_path, name, kind):
    spans = [(0, RANGE, f"PP:{name}", 0, 10, -1), (0, "cpu_op", "aten::mm", 0, 9, -1)]
    spans += [(0, RANGE, "PP:0F0", 20, 30, -1), (0, "cpu_op", "aten::mm", 20, 29, -1)]
    spans += [(0, RANGE, "PP:2SEND_F1", 10, 11, -1), (0, "cpu_op", "aten::mm", 10, 11, -1)]
    found = operations_by_ranges(traced(tmp_path, spans)).sort("start_ns")
    assert found.select("place", "chunk", "micro_batch", "kind").rows() == [
        (2, 1, 1, kind), (0, 0, 0, "forward"),
    ]  # fmt: skip


def test_forward_and_backward_of_one_action_are_two_operations(tmp_path):
    spans = [
        (0, RANGE, "PP:(0F1;3B0)OVERLAP_F_B", 0, 30, -1), (0, "cpu_op", "aten::mm", 1, 10, -1),
        (0, "cpu_op", "autograd::engine::evaluate_function: MmBackward0", 11, 29, -1),
    ]  # fmt: skip
    found = operations_by_ranges(traced(tmp_path, spans))
    assert found.select("place", "micro_batch", "kind", "start_ns", "duration_ns").rows() == [
        (0, 1, "forward", 1 * MS, 9 * MS), (3, 0, "backward", 11 * MS, 18 * MS),
    ]  # fmt: skip


def test_on_a_gpu_an_operation_takes_as_long_as_its_kernels(tmp_path):
    spans = []
    # (rank, name, host start, kernel start, kernel end): GPipe of one micro-batch, forward 10, backward 20.
    for number, (rank, name, host, start, end) in enumerate(
        [
            (0, "Forward 0", 0, 5, 15), (1, "Forward 0", 0, 15, 25), (1, "Backward 0", 2, 25, 45),
            (0, "Backward 0", 2, 45, 65),
        ]
    ):  # fmt: skip
        spans += [
            (rank, RANGE, name, host, host + 1, -1), (rank, "cpu_op", "aten::mm", host, host + 1, -1),
            (rank, "runtime", "cudaLaunchKernel", host + 0.2, host + 0.4, 2 * number),
            (rank, "kernel", "gemm", start, end, 2 * number),
            (rank, "runtime", "cudaLaunchKernel", host + 0.5, host + 0.6, 2 * number + 1),
            (rank, "kernel", "ncclDevKernel_SendRecv", end, end + 1, 2 * number + 1),
        ]  # fmt: skip
    run = traced(tmp_path, spans, gpus=True)
    operations = operations_of(run)
    assert operations is not None
    lasts = operations.rows.filter(pl.col("micro_batch") >= 0).with_columns(
        ms=(pl.col("end") - pl.col("start")) / MS
    )
    assert lasts.select("rank", "name", "ms").rows() == [
        (0, "forward", 10.0), (0, "backward", 20.0), (1, "forward", 10.0), (1, "backward", 20.0),
    ]  # fmt: skip
    assert pipeline_bubbles(run)["bubble_share"].to_list() == [0.5, 0.5]
    assert build_operation_view(run).of_operations


def test_trace_without_such_ranges_has_no_operations(tmp_path):
    run = gpu_job().write(tmp_path)
    assert not has_ranges(run)
    assert not has_operations(run)
