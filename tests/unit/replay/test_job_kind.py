"""What kind of job a run is of, by names, and which answers are foreign to it."""

from __future__ import annotations

import pytest

from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.job_kind import JobKind, kind_in_words, kind_of
from dpro.replay.mesh import ACTIVATIONS, groups_of, mesh_of_run
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.job import job_of
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import candidates
from tests.builders import TinyRun, cpu_job

FORWARD = ("aten::addmm", "aten::relu", "aten::embedding", "aten::softmax", "aten::layer_norm")
OF_TRAINING = (
    *("accumulate:steps=2", "data-parallel:ranks=4", "optimizer:impl=fused", "bucket:mb=1"),
    *("compress:to=bf16", "overlap:mode=full", "local-updates:every=2"),
)


def forward_job(*more: str, bytes_in: int = 1 << 20, backward: bool = False) -> TinyRun:
    """Two ranks, each step five operators, one sum of activations, and others."""
    run = TinyRun()
    for step in range(3):
        begin = 1000.0 * step
        for rank in range(2):
            for number, name in enumerate((*FORWARD, *more)):
                run.op(name, begin + 50 * number, begin + 50 * number + 40, rank)
            facts = {"group": "0", "group_ranks": "0-1", "bytes_in": bytes_in, "bytes_out": bytes_in}
            run.gloo((begin + 400, begin + 410), (begin + 405, begin + 500), rank, sequence=step, **facts)
            run.op("wait", begin + 410, begin + 510, rank)
            if backward:
                run.op("AddmmBackward0", begin + 600, begin + 700, rank, forward_thread=1)
            run.step(step, begin, begin + 900, rank)
    return run


@pytest.mark.parametrize(
    ("name", "trains"),
    [
        ("autograd::engine::evaluate_function: AddmmBackward0", True),
        ("aten::max_pool2d_with_indices_backward", True),
        ("Optimizer.step#AdamW.step", True),
        ("void cunn_SoftMaxBackward<4, float>(float*)", True),
        ("backward-compute", True),
        ("RegisterPostBackwardFunction", False),
        ("trt_ampere_h16816gemm_64x64_ldg8_relu_stages_64x5_tn_v1", False),
        ("aten::dropout", False),
    ],
)
def test_a_job_trains_where_a_backward_pass_or_an_optimizer_is_seen(tmp_path, name, trains):
    assert kind_of(forward_job(name).write(tmp_path)).trains is trains


def test_few_operators_do_not_show_whether_a_job_trains(tmp_path):
    run = TinyRun()
    run.op("aten::mm", 0, 10)
    run.step(0, 0, 20)
    assert kind_of(run.write(tmp_path)) == JobKind()


def test_what_names_say_of_a_job_is_said():
    kind = JobKind(trains=False, compiled=True, graphs=True, chunks=2)
    said = (
        "inference (no backward pass was recorded), compiled, from CUDA graphs, interleaved, 2 chunks a stage"
    )
    assert kind_in_words(kind) == said
    assert kind_in_words(JobKind(trains=True, chunks=1)) == "training"
    assert kind_in_words(JobKind()) == ""


@pytest.mark.parametrize("edit", OF_TRAINING)
def test_a_job_that_does_not_train_is_offered_nothing_about_gradients(tmp_path, edit):
    graph = forward_job().build(tmp_path).graph
    with pytest.raises(Unanswerable, match="has no backward pass"):
        job_of(graph).under(parse_edit(edit))
    _, refused = candidates(facts_of(graph), [type(parse_edit(edit))])
    assert [refusal.reason for refusal in refused] == [
        "the recording has no backward pass: nothing is trained, so no gradients are reduced or applied"
    ]


def test_a_job_that_trains_is_not_refused(tmp_path):
    graph = cpu_job().build(tmp_path).graph
    assert job_of(graph).under(parse_edit("accumulate:steps=2")).job.graph is not graph


@pytest.mark.parametrize("backward", [False, True])
def test_ranks_that_sum_activations_hold_parts_of_a_layer(tmp_path, backward):
    built = forward_job(backward=backward).build(tmp_path)
    assert built.graph.run is not None
    mesh = mesh_of_run(built.graph.run)
    assert [(axis.name, axis.size) for axis in mesh.axes] == [("tp", 2)]
    assert mesh.ambiguity == ("The axis of size 2, whose calls are activations, all_reduce, has no name: "
                              "its use implies tp.",)  # fmt: skip
    if backward:
        with pytest.raises(Unanswerable, match="no group in the run is data-parallel"):
            job_of(built.graph).under(parse_edit("data-parallel:ranks=4"))


def test_sums_that_are_small_or_follow_a_backward_pass_are_of_no_activations(tmp_path):
    small = forward_job(bytes_in=8, backward=True).write(tmp_path / "small")
    assert [axis.name for axis in mesh_of_run(small).axes] == [""]
    reduced = cpu_job(2).write(tmp_path / "reduced")
    assert all(ACTIVATIONS not in group.ops for group in groups_of(reduced))
    assert [axis.name for axis in mesh_of_run(reduced).axes] != ["tp"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("multirank/lightllm_h200_8r_deepep_cudagraph", JobKind(trains=False, graphs=True)),
        ("multirank/nanogpt_h100_8r_rs_ag", JobKind(trains=True, compiled=True)),
        ("multirank/param_dlrm_v100_8r", JobKind(trains=True, ddp=True)),
        ("multirank/torchrec_v100_2r_kjt", JobKind(trains=False, ddp=True)),
        ("single/h100_bert_pystack.json.gz", JobKind(trains=False)),
        ("nsys/mfu_2gpu_before.sqlite.gz", JobKind(trains=False)),
        ("single_hta/trace_diff__test__test.json.gz", JobKind(True, compiled=True, graphs=True, ddp=True)),
        ("pp_timeline/megatronapp_pp4", JobKind(trains=True, chunks=4)),
        ("straggler_parquet/trace-ST.parquet", JobKind(trains=True, chunks=1)),
    ],
)
def test_kinds_of_real_jobs(traces, source, kind):
    assert kind_of(open_quietly(traces / source)) == kind


@pytest.mark.parametrize(
    ("source", "edit", "why"),
    [
        ("multirank/lightllm_h200_8r_deepep_cudagraph", "accumulate:steps=2", "no backward pass"),
        ("multirank/nanogpt_h100_8r_rs_ag", "bucket:mb=1", "no DistributedDataParallel"),
        ("multirank/nanogpt_h100_8r_rs_ag", "compile", "fused by torch.compile"),
    ],
)
def test_real_jobs_are_offered_nothing_foreign(traces, source, edit, why):
    graph = build_graph(open_quietly(traces / source)).predictive
    with pytest.raises(Unanswerable, match=why):
        job_of(graph).under(parse_edit(edit))
