"""Edit `tensors`: by hand on made-up DDP jobs, against edits that say the same, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.extensions.tensors.edits import gradient_names
from dpro.extensions.tensors.plan_file import PlannedReduction, TensorPlan, write_plan
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.graph_ops.reductions import reductions_of
from dpro.replay.whatif.registry import parse_edit
from tests.builders import TinyRun
from tests.ddp import KB, ddp_job, gpu_ddp_job
from tests.edits import steps_us

MOVING = 4096  # us, of 1 MB
COPY_OUT_AND_UPDATE = 150
CALL = 10


@pytest.fixture
def three(tmp_path) -> Graph:
    """Forward until 3000 us; layer2, layer1 and layer0 of 1 MB are ready at 4000, 5000 and 6000."""
    return ddp_job((KB, KB, KB), (2,)).build(tmp_path / "three").graph


def plan_edit(tmp_path, *reductions: PlannedReduction | tuple[str, ...]) -> str:
    """The edit of a plan of these reductions."""
    path = tmp_path / "plan.json"
    whole = [
        reduction if isinstance(reduction, PlannedReduction) else PlannedReduction(reduction)
        for reduction in reductions
    ]
    write_plan(TensorPlan(tuple(whole)), path)
    return f"tensors:plan={path}"


@pytest.mark.parametrize(
    ("buckets", "begins"),
    [
        ([("layer2",), ("layer1", "layer0")], 4000),
        ([("layer2",), ("layer1",), ("layer0",)], 4000),
        ([("layer2", "layer1"), ("layer0",)], 5000),
        ([("layer2", "layer0"), ("layer1",)], 6000),  # layer1 is ready, but its turn comes second
        ([("layer0",), ("layer2", "layer1")], 6000),
        ([("layer0",), ("layer1",), ("layer2",)], 6000),
    ],
)
def test_reductions_are_called_in_their_order_once_their_last_gradient_is_ready(
    tmp_path, three, buckets, begins
):
    expected = begins + CALL + 3 * MOVING + COPY_OUT_AND_UPDATE
    assert steps_us(three, plan_edit(tmp_path, *buckets))[1:] == pytest.approx([expected] * 2, abs=25)


def test_an_order_decides_which_bytes_are_moved_while_others_are_not_ready(tmp_path):
    graph = ddp_job((KB, 2 * KB, KB), (2,), us_per_kb=0.5).build(tmp_path / "run").graph
    early = steps_us(graph, plan_edit(tmp_path, ("layer2",), ("layer1",), ("layer0",)))[1]
    late = steps_us(graph, plan_edit(tmp_path, ("layer1",), ("layer2",), ("layer0",)))[1]
    # 1 MB moves until 4522, 2 MB from 5010 until 6034, 1 MB until 6546; or 2 MB first, both others behind.
    assert early == pytest.approx(6034 + 512 + COPY_OUT_AND_UPDATE, abs=25)
    assert late == pytest.approx(6034 + 512 + 512 + COPY_OUT_AND_UPDATE, abs=25)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([(3,), (1, 3), (0, 1, 2, 3)]), st.sampled_from([1, 2, 3, 4]), st.floats(0, 300))
def test_a_plan_of_one_size_is_edit_bucket(tmp_path_factory, closes, mb, late):
    folder = tmp_path_factory.mktemp("same")
    graph = ddp_job(closes=closes, late=late).build(folder / "run").graph
    names = [f"layer{3 - number}" for number in range(4)]
    buckets = [tuple(names[first : first + mb]) for first in range(0, 4, mb)]
    assert steps_us(graph, plan_edit(folder, *buckets)) == pytest.approx(steps_us(graph, f"bucket:mb={mb}"))


def test_a_plan_that_the_job_has_already_changes_nothing(tmp_path, three):
    assert parse_edit(plan_edit(tmp_path, ("layer0", "layer1", "layer2"))).apply(three) is three


def test_positions_stand_for_names(tmp_path, three):
    by_name = steps_us(three, plan_edit(tmp_path, ("layer2",), ("layer1", "layer0")))
    assert steps_us(three, plan_edit(tmp_path, ("#0",), ("#1", "#2"))) == pytest.approx(by_name)


def test_each_piece_moves_its_share_and_costs_a_call(tmp_path, three):
    edit = plan_edit(tmp_path, PlannedReduction(("layer2", "layer1", "layer0"), pieces=4))
    graph = parse_edit(edit).apply(three)
    moved = graph.nodes.bytes[graph.nodes.kind == NodeKind.TRANSFER]
    assert moved.tolist() == [3 * KB * KB // 4] * (4 * 3 * 2)  # pieces, steps, ranks
    whole = steps_us(three)[1]
    assert steps_us(three, edit)[1] == pytest.approx(whole, abs=4 * CALL)
    calls = graph.nodes.duration[np.isin(graph.nodes.name, [graph.names.index("c10d::allreduce_")])]
    assert (calls > 0).sum() == 4 * 3 * 2


@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_half_precision_is_edit_compress(tmp_path, three, to):
    edit = plan_edit(tmp_path, PlannedReduction(("layer2", "layer1", "layer0"), reduce_in=to))
    assert steps_us(three, edit) == pytest.approx(steps_us(three, f"compress:to={to}"))
    assert steps_us(three, edit)[1] < steps_us(three)[1] - MOVING


def test_on_gpus_a_bucket_waits_for_its_kernels(tmp_path):
    graph = gpu_ddp_job().build(tmp_path / "run").graph
    assert steps_us(graph, plan_edit(tmp_path, ("#0",), ("#1",), ("#2",), ("#3",))) == pytest.approx(
        steps_us(graph, "bucket:mb=1")
    )


def test_names_are_those_of_the_buckets_and_positions_where_there_are_none(tmp_path, three):
    assert gradient_names(reductions_of(three)) == ("layer2", "layer1", "layer0")
    unnamed = ddp_job((KB, KB, KB), (2,))
    for row in unnamed.rows["buckets"]:
        row["names"] = []
    assert gradient_names(reductions_of(unnamed.build(tmp_path / "unnamed").graph)) == ("#0", "#1", "#2")


def _of_two_types() -> TinyRun:
    run = ddp_job((KB, KB, KB), (0, 2))
    for row in run.rows["collectives"]:
        if row["bytes_in"] == 2 * KB * KB:
            row["dtype"] = "bfloat16"
    return run


@pytest.mark.parametrize(
    ("run", "buckets", "said"),
    [
        (ddp_job((KB,) * 2, (1,)), [("layer1", "layer0", "other")], "reduces other, which is not a gradient"),
        (ddp_job((KB,) * 3, (2,)), [("layer2",), ("layer0",)], "does not reduce layer1, a gradient of this"),
        (_of_two_types(), [("layer2", "layer1"), ("layer0",)], r"layer2 \(float32\) together with layer1"),
        (ddp_job((KB,) * 2, (1,), hook="fp16_compress_hook"), [("layer1", "layer0")], "communication hook"),
    ],
)
def test_a_plan_that_does_not_fit_the_run_is_refused_with_the_first_that_differs(
    tmp_path, run, buckets, said
):
    graph = run.build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match=said):
        parse_edit(plan_edit(tmp_path, *buckets)).apply(graph)


def test_that_a_job_has_no_buckets_is_refused(tmp_path):
    run = ddp_job((KB, KB), (1,))
    del run.rows["buckets"]
    graph = run.build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match="no DistributedDataParallel"):
        parse_edit(plan_edit(tmp_path, ("#0",), ("#1",))).apply(graph)


def test_what_differs_from_the_job_is_said(tmp_path, three):
    def note(*buckets: PlannedReduction | tuple[str, ...]) -> str:
        return parse_edit(plan_edit(tmp_path, *buckets)).notes(three)[0]

    whole = ("layer2", "layer1", "layer0")
    assert note(whole) == "the plan has the buckets of the job (1)"
    assert note(("layer2",), ("layer1", "layer0")) == (
        "the plan has 2 buckets, the job 1; they begin or end elsewhere at layer1"
    )
    assert note(PlannedReduction(whole, 2, "bf16")) == (
        "the plan has 1 bucket, the job 1; 1 in pieces; 1 in half precision"
    )
