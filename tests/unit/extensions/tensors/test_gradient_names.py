"""Names of gradients where the job has more of them than DDP reduces."""

from __future__ import annotations

from dpro.extensions.tensors.edits import gradient_names
from dpro.replay.whatif.graph_ops.reductions import reductions_of
from tests.builders import TinyRun
from tests.ddp import ACCUMULATE, KB, ddp_job

SIZES_KB = (KB, 2 * KB, KB // 2, 4 * KB)
NAMES = ("layer3", "layer2", "layer1", "layer0")


def with_a_table(run: TinyRun, *, at: float = 50) -> TinyRun:
    """A job with an embedding whose gradient is ready at the end of each backward, and not reduced."""
    for row in [row for row in run.rows["spans"] if row["name"] == "dpro::backward"]:
        end = (row["start_ns"] + row["duration_ns"]) / 1000
        run.op(ACCUMULATE, end - at - 4, end - at, row["rank"])
    return run


def test_gradients_of_ddp_keep_their_names_beside_others(tmp_path):
    graph = with_a_table(ddp_job(SIZES_KB, (1, 3))).build(tmp_path / "run").graph
    reductions = reductions_of(graph)
    assert not reductions.is_recorded
    assert gradient_names(reductions) == NAMES


def test_gradients_of_other_bytes_than_recorded_have_no_names(tmp_path):
    run = with_a_table(ddp_job(SIZES_KB, (1, 3)))
    for row in run.rows["buckets"]:
        row["parameter_bytes"] = [2 * size for size in row["parameter_bytes"]]
        row["bytes"] *= 2
    names = gradient_names(reductions_of(run.build(tmp_path / "run").graph))
    assert all(name.startswith("#") for name in names)


def test_gradients_of_two_modules_have_no_names(tmp_path):
    run = with_a_table(ddp_job(SIZES_KB, (1, 3)))
    for row in run.rows["buckets"]:
        row["module"] = row["bucket"]
    names = gradient_names(reductions_of(run.build(tmp_path / "run").graph))
    assert all(name.startswith("#") for name in names)
