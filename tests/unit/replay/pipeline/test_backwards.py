"""Operations of traces without ranges, by messages and by the numbers of backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from dpro.replay.pipeline.recorded import has_operations, operations_by_backwards
from dpro.schema import SPANS, STEPS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from dpro.table import complete

MS = 1_000_000
OP, FUNCTION, SEND, RECEIVE = (
    "aten::mm",
    "autograd::engine::evaluate_function: MmBackward0",
    "c10d::send",
    "c10d::recv_",
)
Row = tuple[int, str, float, float, int]  # rank, name, start and end in ms, number


def traced(folder: Path, rows: list[Row], annotations: Sequence[Row] = ()) -> Run:
    """Spans of two ranks in step 5, of 100 ms."""
    spans = pl.DataFrame(
        [
            (number, rank, 0, kind, name, round(start * MS), round((end - start) * MS), sequence)
            for number, (kind, (rank, name, start, end, sequence)) in enumerate(
                [*(("cpu_op", row) for row in rows), *(("annotation", row) for row in annotations)]
            )
        ],
        ["span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "sequence_number"],
        orient="row",
    )
    ranks = sorted(spans["rank"].unique().to_list())
    steps = [{"rank": rank, "step": 5, "window": 0, "start_ns": 0, "duration_ns": 100 * MS} for rank in ranks]
    workers = [{"rank": rank, "pp": rank, "host": "a"} for rank in ranks]
    for table, frame in ((SPANS, spans), (STEPS, pl.DataFrame(steps)), (WORKERS, pl.DataFrame(workers))):
        write_part(folder, table, "a", complete(table, frame))
    write_manifest(folder, Manifest(world_size=len(ranks), ranks=ranks))
    return open_run(folder)


# Two stages and micro-batches, 1F1B. Of the two operators of stage 0 the first needs no gradient.
FIRST: list[Row] = [
    (0, "aten::embedding", 1, 2, -1), (0, OP, 2, 5, 7), (0, SEND, 5, 6, 8),
    (0, "aten::embedding", 6, 7, -1), (0, OP, 7, 10, 8), (0, SEND, 10, 11, 9), (0, RECEIVE, 11, 12, 9),
    (0, FUNCTION, 20, 25, 7), (0, FUNCTION, 25, 26, -1), (0, RECEIVE, 26, 27, 9), (0, FUNCTION, 40, 46, 8),
    (0, "aten::add_", 60, 61, -1),
]  # fmt: skip
LAST: list[Row] = [
    (1, RECEIVE, 1, 2, 3), (1, OP, 8, 12, 4), (1, "aten::mse_loss", 12, 13, 5), (1, FUNCTION, 13, 15, 5),
    (1, FUNCTION, 15, 19, 4), (1, SEND, 19, 20, 6), (1, RECEIVE, 20, 21, 6), (1, OP, 28, 32, 6),
    (1, "aten::mse_loss", 32, 33, 7), (1, FUNCTION, 33, 35, 7), (1, FUNCTION, 35, 39, 6),
    (1, SEND, 39, 40, 8),
]  # fmt: skip


def found_in(run: Run) -> list[tuple[object, ...]]:
    rows = (
        operations_by_backwards(run)
        .with_columns(pl.col("start_ns", "duration_ns") / MS)
        .sort("rank", "start_ns")
    )
    return rows.select("rank", "step", "stage", "kind", "micro_batch", "start_ns", "duration_ns").rows()


def test_forward_is_what_has_the_numbers_of_a_backward_between_two_messages(tmp_path):
    run = traced(tmp_path, FIRST + LAST)
    assert found_in(run) == [
        (0, 5, 0, "forward", 0, 1, 4), (0, 5, 0, "forward", 1, 6, 4), (0, 5, 0, "backward", 0, 20, 6),
        (0, 5, 0, "backward", 1, 40, 6), (1, 5, 1, "forward", 0, 8, 5), (1, 5, 1, "backward", 0, 13, 6),
        (1, 5, 1, "forward", 1, 28, 5), (1, 5, 1, "backward", 1, 33, 6),
    ]  # fmt: skip
    assert has_operations(run)


def test_what_the_optimizer_did_before_the_first_forward_is_not_of_it(tmp_path):
    early: list[Row] = [(0, "aten::zero_", 0.2, 0.4, -1)]
    run = traced(tmp_path, FIRST + LAST + early, [(0, "Optimizer.zero_grad#SGD.zero_grad", 0.1, 0.5, -1)])
    assert found_in(run)[0] == (0, 5, 0, "forward", 0, 1, 4)


def test_second_pass_with_the_numbers_of_the_first_is_of_weights(tmp_path):
    later: list[Row] = [(1, FUNCTION, 45, 47, 6), (1, FUNCTION, 47, 48, -1)]
    kinds = {(row[3], row[4]) for row in found_in(traced(tmp_path, FIRST + LAST + later)) if row[0] == 1}
    assert kinds == {
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward_input", 1), ("backward_weight", 1),
    }  # fmt: skip


def test_operators_that_are_recomputed_are_of_the_backward(tmp_path):
    again: list[Row] = [(0, OP, 21, 22, 9)]
    assert found_in(traced(tmp_path, FIRST + LAST + again)) == found_in(
        traced(tmp_path / "plain", FIRST + LAST)
    )


def ring(rank: int) -> list[Row]:
    """A rank that sends its keys on while it attends to them, as context parallelism does."""
    rows: list[Row] = []
    for turn in range(2):
        at = 10 * turn
        rows += [
            (rank, OP, at + 1, at + 4, turn),
            (rank, SEND, at + 4, at + 5, turn),
            (rank, RECEIVE, at + 5, at + 6, turn),
        ]
    for turn in (1, 0):
        at = 40 - 10 * turn
        rows += [
            (rank, FUNCTION, at, at + 4, turn),
            (rank, SEND, at + 4, at + 5, 3),
            (rank, RECEIVE, at + 5, at + 6, 3),
        ]
    return rows


def interleaved() -> list[Row]:
    """The stages above, with a third message that stage 0 sends for two micro-batches."""
    return [*FIRST, *LAST, (0, SEND, 50, 51, 9)]


@pytest.mark.parametrize(
    "rows", [ring(0) + ring(1), interleaved(), FIRST, [row for row in LAST if row[1] != SEND]]
)
def test_what_is_no_pipeline_of_one_chunk_has_no_operations(tmp_path, rows):
    run = traced(tmp_path, rows)
    assert found_in(run) == []
    assert not has_operations(run)
