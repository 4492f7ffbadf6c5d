"""Causes and advice on small jobs, written down span by span."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.info import info_document
from dpro.analysis.predictions import predict_edits
from dpro.detect.findings import Finding
from dpro.detect.machine.oversubscribed import CAUSE as CROWDED
from dpro.detect.observations import observe
from dpro.detect.regression import LONGER_SINCE
from dpro.errors import DproError
from dpro.replay.graph import NodeKind
from dpro.replay.steps import StepSeries, step_series
from dpro.replay.whatif.edits.host import gpu_waits
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import predict
from dpro.replay.whatif.registry import EDITS, parse_edit
from dpro.schema import STEPS, conform
from dpro.store import CUT, open_run
from dpro.verdict.advice import Advice, partly
from dpro.verdict.facts import JobFacts, place_of
from dpro.verdict.ledger import LIMIT_OF, LedgerRow, cause_of_finding, entries_of
from dpro.verdict.limits import (
    CHECKPOINT,
    COLLECTION,
    COMMUNICATION,
    COMPILATION,
    COMPUTE,
    HOST,
    IMBALANCE,
    INPUT,
    SYNCHRONISATION,
    Free,
    FreeCopies,
    work_of_devices,
)
from dpro.verdict.ranking import advise, advise_of_findings, first_of, within_limit, worth_after
from dpro.verdict.sources.hosts import _longest_names
from dpro.verdict.sources.parts import remedies_of
from dpro.verdict.verdict import (
    Explanation,
    _by_replay,
    cause_of,
    explain,
    fault_in_words,
    limit_of,
    steps_in_words,
)
from dpro.verdict.words import limit_of_run
from tests.builders import MAIN, US, TinyRun, cpu_job, gpu_job
from tests.jobs import ROOT
from tests.unit.replay.whatif.edits.test_coalescing import series_job
from tests.unit.replay.whatif.edits.test_synchronisation import accumulated

pytestmark = pytest.mark.usefixtures("empty_cache")


def facts_of(run: TinyRun, folder) -> JobFacts:
    analysis = Analysis(run.write(folder / "run"))
    return JobFacts(analysis, ReplayedJob(analysis.built.predictive))


def explained(run: TinyRun, folder) -> Explanation:
    return explain(Analysis(run.write(folder / "run")))


def kinds(verdict: Explanation) -> list[str]:
    return [advice.kind for advice in verdict.advice]


def launches_of(kernels: list[tuple[str, float, float]], steps: int = 3) -> TinyRun:
    """A rank whose host needs a time (us) before each launch of a kernel that lasts one; it waits for all."""
    run, at, free = TinyRun(), 0.0, 0.0
    for step in range(steps):
        begin = at
        for number, (name, host, lasts) in enumerate(kernels):
            correlation = 1000 * step + number
            run.op("aten::op", at, at + host)
            run.call(at + host - 3, at + host, correlation)
            free = max(free, at + host + 2) + lasts
            run.kernel(name, free - lasts, free, correlation)
            at += host + 1
        run.call(at, max(at, free) + 2, 1000 * step + 999, name="cudaDeviceSynchronize")
        at = max(at, free) + 3
        run.step(step, begin, at)
    return run


@pytest.mark.parametrize(
    ("ranks", "world", "gpus", "uuids", "devices"),
    [
        ([0, 1], 2, [], ["", ""], "2 ranks"),
        ([0], 1, [], [""], "1 rank"),
        ([0, 1], 2, ["NVIDIA H200"], ["", ""], "2 x H200"),
        ([0, 1], 2, ["NVIDIA H200"], ["a", "b"], "2 x H200"),
        ([0], 1, ["NVIDIA GeForce RTX 4090 D"], ["a"], "1 x RTX 4090 D"),
        ([0, 1], 2, ["NVIDIA H200"], ["a", "a"], "2 ranks on 1 x H200"),
        ([0], 4, ["AMD Instinct MI300X"], [""], "1 of 4 ranks, MI300X"),
        ([0], 4, [], [""], "1 of 4 ranks"),
    ],
)
def test_the_header_names_ranks_and_their_gpus(tmp_path, ranks, world, gpus, uuids, devices):
    job = gpu_job() if len(ranks) > 1 else launches_of([("gemm", 20, 30)])
    for rank, uuid in zip(ranks, uuids, strict=True):
        job.worker(rank, "a", gpu_uuid=uuid)
    run = job.write(tmp_path / "run")
    manifest = dataclasses.replace(run.manifest, gpus=gpus, world_size=world)
    said = explain(Analysis(dataclasses.replace(run, manifest=manifest))).job
    assert said.split("   ")[1] == devices


def test_few_launches_that_cost_milliseconds_are_named_with_their_kernel(tmp_path):
    run = launches_of([("cheap", 20, 10)] * 40 + [("rope_kernel", 2200, 30)] * 5)
    name, count, took_ns = facts_of(run, tmp_path).slow_launches
    assert (name, count) == ("rope_kernel", pytest.approx(5, abs=0.5))
    assert took_ns == pytest.approx(2.2e6, rel=0.02)
    verdict = explained(run, tmp_path)
    assert verdict.limit.kind == HOST
    assert "rope_kernel" in verdict.limit.cause
    assert kinds(verdict)[0] == "launch-one"


def test_one_long_stretch_of_the_host_is_named_with_its_operators_and_no_graph_is_advised_instead(tmp_path):
    run = launches_of([("mul", 20, 10)] * 10 + [("cat", 9000, 10)] + [("mul", 20, 10)] * 10)
    for op in [row for row in run.rows["spans"] if row["duration_ns"] == 9_000_000]:
        at = op["start_ns"] / 1000  # a call that launches nothing is no end of it
        run.call(at + 5000, at + 5001, 10**6 + op["span_id"], name="cudaStreamWaitEvent")
    verdict = explained(run, tmp_path)
    by_kind = {advice.kind: advice for advice in verdict.advice}
    assert verdict.limit.cause == "9 ms before launching cat once a step"
    assert kinds(verdict)[0] == "launch-one"
    assert "aten::op takes 9 ms" in by_kind["launch-one"].do
    assert not {"launch", "batch"} & by_kind.keys()


def test_what_lies_between_two_windows_is_no_work_of_the_host_before_a_launch(tmp_path):
    run = launches_of([("mul", 60, 10)] * 50)
    for name in ("spans", "steps"):
        for row in run.rows[name][:]:
            later = {"window": 1, "start_ns": row["start_ns"] + 10**9}
            numbers = {"step": row["step"] + 10} if name == "steps" else {"span_id": row["span_id"] + 10**6}
            run.rows[name].append(row | later | numbers)
    assert facts_of(run, tmp_path).slow_launches is None


@pytest.mark.parametrize(
    ("often", "is_known", "is_slow"), [(30, True, True), (30, False, False), (2, False, True)]
)
def test_a_few_slow_launches_are_of_the_job_where_steps_show_that_they_come_again(
    tmp_path, often, is_known, is_slow
):
    run, at = TinyRun(), 0
    for step in range(3):
        begin = at
        for number in range(often):
            took = 3_000 if number == often - 1 else 60
            run.op("aten::mul", at, at + took)
            run.call(at + took - 10, at + took - 2, 100 * step + number)
            run.kernel("mul", at + took, at + took + 10, 100 * step + number)
            at += took
        if is_known:
            run.step(step, begin, at)
    assert (facts_of(run, tmp_path).slow_launches is not None) == is_slow


def test_many_cheap_launches_are_no_dear_ones(tmp_path):
    run = launches_of([("mul", 60, 10)] * 50)
    assert facts_of(run, tmp_path).slow_launches is None
    verdict = explained(run, tmp_path)
    assert kinds(verdict)[:2] == ["launch", "batch"]
    assert verdict.advice[0].gain_high == pytest.approx(verdict.limit.gain, rel=0.05)


def test_a_first_call_that_sets_up_the_device_is_no_input_and_asks_for_later_steps(tmp_path):
    run = TinyRun()
    run.call(0, 900, -1, name="cudaDeviceGetStreamPriorityRange")
    for number in range(20):
        at = 900 + 10 * number
        run.op("aten::add", at, at + 8)
        run.call(at + 4, at + 8, number)
        run.kernel("add", at + 9, at + 11, number)
    run.step(0, 0, 1200)
    verdict = explained(run, tmp_path)
    assert verdict.advice[0].kind == "record-more"
    assert "one cudaDeviceGetStreamPriorityRange takes 900 us" in verdict.advice[0].do
    assert "input" not in kinds(verdict)


@pytest.mark.parametrize("cold_us", [10, 900])
def test_what_a_process_allocates_as_it_starts_is_not_what_each_step_does(tmp_path, cold_us):
    run, at = TinyRun(), 0
    for number in range(20):
        took = cold_us if number == 10 else 10
        run.op("aten::empty", at, at + 120)
        run.call(at, at + 100, -1, name="cudaMalloc")
        run.call(at + 120, at + 120 + took, number)
        run.kernel("reduce" if number == 10 else "add", at + took + 130, at + took + 140, number)
        at += 150 + took
    run.step(0, 0, at)
    advised = kinds(explained(run, tmp_path))
    assert ("allocator" in advised, "record-more" in advised) == (
        (False, True) if cold_us > 10 else (True, False)
    )


def test_a_launch_that_loads_code_limits_nothing_and_predictions_from_it_are_not_good(tmp_path):
    run = TinyRun()
    for number in range(10):
        at = 100 * number
        run.call(10 * number, 10 * number + 8, number)
        run.kernel("add", at + 15, at + 110, number)
    run.call(110, 1112, 999, name="cudaDeviceSynchronize")
    run.call(1120, 1720, 10)
    run.kernel("reduce", 1725, 1730, 10)
    run.step(0, 0, 1740)
    verdict = explained(run, tmp_path)
    assert verdict.limit.kind == COMPUTE
    assert verdict.advice[0].kind == "record-more"
    assert verdict.account.recorded_step_ms == pytest.approx(1.73)
    assert verdict.account.step_ms == pytest.approx(1.14, abs=0.01)  # a later launch takes 10 us, not 600
    assert (
        "first calls of a process make up 34% of the recorded steps; figures are corrected for that"
        in verdict.unsure
    )
    assert facts_of(run, tmp_path / "again").analysis.trust.grade == "fair"


def test_steps_that_warm_up_for_longer_than_the_others_take_ask_for_later_steps(tmp_path):
    run = TinyRun()
    at = 0.0
    for step, length in enumerate((4_300, 500, 490)):
        for number in range(10):
            run.call(at + 40 * number, at + 40 * number + 10, 100 * step + number)
            run.kernel("add", at + 40 * number + 15, at + 40 * number + 30, 100 * step + number)
        run.op("aten::convolution", at + 400, at + length - 10)
        run.step(step, at, at + length)
        at += length
    verdict = explained(run, tmp_path)
    assert (verdict.steps, verdict.left_out) == (2, 1)
    assert verdict.advice[0].kind == "record-more"
    assert "record later steps" in verdict.advice[0].do


def test_a_gain_beside_other_jobs_is_of_that_moment(tmp_path, monkeypatch):
    run = launches_of([("mul", 60, 10)] * 50)
    alone = explained(run, tmp_path / "alone")
    monkeypatch.setattr(Analysis, "shared_hosts", ["a"])
    beside = explained(run, tmp_path / "beside")
    assert kinds(beside) == kinds(alone)
    for advice, before in zip(beside.advice, alone.advice, strict=True):
        assert advice.gain_low == pytest.approx(min(before.gain_low, before.gain_low**0.5))
        assert advice.gain_high == pytest.approx(before.gain_high**1.5)
        if advice.edit:
            gain = beside.account.gains[advice.edit]
            assert (gain.low, gain.high) == pytest.approx((advice.gain_low, advice.gain_high))
    assert any("only under that load" in line for line in beside.unsure)
    assert not any("only under that load" in line for line in alone.unsure)


def test_that_a_host_may_wait_unseen_is_said_where_no_faster_kernel_would_gain(tmp_path):
    run, at = TinyRun(), 0
    for number in range(3):  # launched at once, and then nothing is recorded of the host
        run.call(at, at + 500, number, name="cudaGraphLaunch")
        for index in range(20):
            begin = at + 600 + 3_000 * index
            run.kernel("gemm", begin, begin + 2_950, number)
        at += 61_000
    run.call(at, at + 10, 99, name="cudaMemcpyAsync")
    run.kernel("Memcpy", at + 5, at + 9, 99, kind="memcpy")
    verdict = explained(run, tmp_path)
    assert verdict.limit.kind == COMPUTE
    assert any("but may wait" in reason for reason in verdict.unsure), verdict.unsure


def test_a_run_of_one_cuda_graph_is_not_advised_to_use_graphs(tmp_path):
    run = TinyRun()
    for step in range(3):
        begin = 1000 * step
        run.op("decode", begin, begin + 900)
        run.call(begin + 890, begin + 900, step, name="cudaGraphLaunch")
        for number in range(20):
            run.kernel("gemm", begin + 902 + 5 * number, begin + 906 + 5 * number, step)
        run.step(step, begin, begin + 1000)
    assert "launch" not in kinds(explained(run, tmp_path))


def descheduled(ranks: int = 4, steps: int = 3, chance: float = 0.1) -> TinyRun:
    """Ranks whose calls of 50 us take 4 ms now and then, whatever they call."""
    run, noise = TinyRun(), np.random.default_rng(3)
    for rank in range(ranks):
        at = 0.0
        for step in range(steps):
            begin = at
            for number in range(100):
                took = 4000.0 if noise.random() < chance else 50.0
                run.op(f"aten::op{number % 10}", at, at + took, rank)
                correlation = 1000 * step + number
                run.call(at + took - 5, at + took - 1, correlation, rank)
                run.kernel("mul", at + took, at + took + 20, correlation, rank)
                at += took + 1
            run.step(step, begin, at, rank)
    return run


def test_hosts_that_stand_still_in_any_call_lack_cores(tmp_path):
    still = facts_of(descheduled(), tmp_path).still
    assert 0.5 < still.share < 1.0
    assert 1.0 < still.at_once <= 4.0
    verdict = explained(descheduled(), tmp_path)
    assert (verdict.limit.kind, kinds(verdict)[0]) == (HOST, "cores")
    assert "of 4 ranks at a time" in verdict.limit.cause
    (launch,) = (advice for advice in verdict.advice if advice.kind == "launch")
    assert launch.gain_high == pytest.approx(verdict.limit.gain, rel=0.05)  # fewer calls stand still less


def test_one_call_that_is_slow_is_no_lack_of_cores(tmp_path):
    run = launches_of([("mul", 40, 10)] * 50 + [("slow", 5000, 10)])
    assert facts_of(run, tmp_path).still is None


def blocking(waits: bool) -> TinyRun:
    """Ten kernels of 300 us, each after 50 us of its host; calls last 10 us, or until their kernel ends."""
    run, at, free = TinyRun(), 0.0, 0.0
    for number in range(10):
        run.op("aten::op", at, at + 50)
        free = max(free, at + 55) + 300
        run.kernel(f"kernel_{number}", free - 300, free, number)
        run.call(at + 51, free + 2 if waits else at + 61, number)
        at = free + 5 if waits else at + 65
    run.step(0, 0, free + 10)
    return run


def test_launches_that_wait_for_their_kernels_are_to_return_at_once(tmp_path):
    verdict = explained(blocking(waits=True), tmp_path)
    first = verdict.advice[0]
    assert (first.kind, "unset CUDA_LAUNCH_BLOCKING" in first.do) == ("sync", True)
    # 3,600 us, which are 10 kernels of 300 us behind the first 55 us where hosts run ahead.
    assert first.gain_high == pytest.approx(3_600 / 3_065, rel=0.02)
    assert not {"record-more", "launch"} & {*kinds(verdict)}  # a call with its kernel in it is no first call
    assert any("launches wait for their kernels" in line for line in verdict.unsure)
    beside = explained(blocking(waits=False), tmp_path / "again")
    assert "sync" not in kinds(beside)
    assert not any("launches wait" in line for line in beside.unsure)


@pytest.mark.parametrize(("lasts_us", "may_hide"), [(400, True), (20, False)])
def test_input_of_a_single_step_may_hide_behind_what_devices_still_do_then(tmp_path, lasts_us, may_hide):
    run, free = TinyRun(), 0
    run.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 1_000)
    for number in range(10):
        at = 1_000 + 30 * number
        run.op("aten::mul", at, at + 25)
        run.call(at + 15, at + 20, number)
        free = max(free, at + 22) + lasts_us
        run.kernel("mul", free - lasts_us, free, number)
    run.call(1_300, free + 2, 99, name="cudaDeviceSynchronize")
    run.step(0, 0, free + 10)
    (advice,) = (given for given in explained(run, tmp_path).advice if given.kind == "input")
    assert (advice.gain_low == 1) is may_hide
    assert advice.gain_high > 1.2


@pytest.mark.parametrize("longest_us", [100, 400])
def test_convolutions_in_many_kernels_are_to_be_chosen_by_measuring(tmp_path, longest_us):
    kernels = [(f"volta_scudnn_{number}", 5, longest_us if not number else 100) for number in range(8)]
    advised = explained(launches_of([*kernels, ("mul", 5, 100)] * 2), tmp_path).advice
    (tune,) = (advice for advice in advised if advice.kind == "tune-kernel")
    assert "cudnn.benchmark" in tune.do


@pytest.mark.parametrize(
    "name",
    [
        "volta_sgemm_128x64_tn", "ampere_sgemm_128x64_tn", "void cudnn::convertTensor_kernel<float>(int)",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>(int)", "nvjet_hsh_128x8_64x12_2x1_v_bz_TNT",
        "void at::native::vectorized_elementwise_kernel<4, at::native::mul>(int)",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(int)", "Cijk_Ailk_Bljk_SB_MT128x128",
    ],
)  # fmt: skip
def test_kernels_of_libraries_are_to_be_chosen_not_tuned(tmp_path, name):
    run = launches_of([(name, 5, 400), ("another", 5, 100), ("third", 5, 100)] * 4)
    advised = [one.do for one in explained(run, tmp_path).advice if one.kind == "tune-kernel"]
    assert all(do.startswith("a faster kernel than") or "cudnn.benchmark" in do for do in advised)
    assert advised or "at::" in name  # pointwise kernels are to be fused


@pytest.mark.parametrize(
    ("gpu", "is_fused"), [("Tesla P4", False), ("NVIDIA GeForce GTX 1080 Ti", False), ("Tesla T4", True)]
)
def test_gpus_for_which_compile_makes_no_code_are_not_advised_to_use_it(tmp_path, gpu, is_fused):
    pointwise = "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    recorded = launches_of([("volta_sgemm", 5, 300), *[(pointwise, 5, 100)] * 6] * 4).write(tmp_path / "run")
    manifest = dataclasses.replace(recorded.manifest, gpus=[gpu])
    verdict = explain(Analysis(dataclasses.replace(recorded, manifest=manifest)))
    assert ("fuse" in kinds(verdict)) is is_fused


def _written_out(*more: str) -> list[tuple[str, float, float]]:
    """A layer of attention whose softmax is written out: 400 us of products, 700 of what is between."""
    pointwise = "at::native::vectorized_elementwise_kernel<4, at::native::{}(at::TensorIteratorBase&)>"
    largest, total = (
        f"at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, {op}<float>>>"
        for op in ("at::native::MaxOps", "at::native::sum_functor")
    )
    names = ["where", "sub", "exp_kernel_cuda", *more, "div_kernel_cuda"]
    where, sub, *rest, div = (pointwise.format(name) for name in names)
    between = [where, largest, sub, *rest, total, div]
    products = ["ampere_bf16_s16816gemm_bf16_128x128_tn", "ampere_bf16_s16816gemm_bf16_128x128_nn"]
    ran = [products[0], *between, products[1]]
    return [(name, 5, 200 if name in products else 100) for name in ran]


@pytest.mark.parametrize(("more", "is_attention"), [((), True), (("log_kernel_cuda",), False)])
def test_attention_is_also_recognised_by_a_softmax_that_is_written_out(tmp_path, more, is_attention):
    others = [("other_gemm_bf16", 5, 100), ("mul", 5, 50), ("other_gemm_bf16", 5, 100)]
    run = launches_of([*others, *_written_out(*more), *others] * 3)
    advised = [advice for advice in explained(run, tmp_path).advice if advice.kind == "attention"]
    assert bool(advised) is is_attention
    for advice in advised:
        assert "(exp and its matmuls, 67% of compute)" in advice.do  # 1,000 of 1,500 us a layer


def test_attention_whose_softmax_is_short_counts_with_its_products(tmp_path):
    softmax = "at::native::cunn_SoftMaxForward<8, c10::Half, float, float, at::native::Epilogue>"
    scores, values, other = (f"ampere_fp16_s16816gemm_fp16_{tile}" for tile in ("64x64", "128x64", "256x128"))
    run = launches_of([(other, 5, 800), (scores, 5, 80), (softmax, 5, 60), (values, 5, 60)] * 4)
    (attention,) = (advice for advice in explained(run, tmp_path).advice if advice.kind == "attention")
    assert "its matmuls, 20% of compute" in attention.do


def test_a_softmax_after_the_last_product_of_a_model_does_not_make_attention_of_it(tmp_path):
    sampling = ["at::native::cunn_SoftMaxForward<4, c10::Half, float, float, E>", *["sort"] * 8]
    run = launches_of([("head_gemm_fp16", 5, 500), *((name, 5, 20) for name in sampling)] * 4)
    assert "attention" not in kinds(explained(run, tmp_path))


@pytest.mark.parametrize(
    ("kernel", "is_read"),
    [("gemv2T_kernel_val<int>", True), ("nvjet_hsh_128x8_64x12_2x1_v_bz_TNT", True), ("gemm_fp16", False)],
)
def test_products_with_few_rows_that_take_most_of_the_time_ask_for_more_rows(tmp_path, kernel, is_read):
    run = launches_of([(kernel, 5, 600), ("silu", 5, 200)] * 6)
    batches = [advice for advice in explained(run, tmp_path).advice if advice.kind == "batch"]
    # Two rows in a step of 600 + 2 x 200 us in place of 800 each; at best eight in the same time.
    assert [(advice.gain_low, advice.gain_high) for advice in batches] == (
        [(pytest.approx(2 * 800 / 1000, rel=0.03), 8.0)] if is_read else []
    )


def test_what_is_to_be_tuned_is_all_kernels_with_one_short_name(tmp_path):
    kernels = [(f"void mine::splat<{tile}>(int)", 5, 100) for tile in (8, 16, 32)]
    run = launches_of([*kernels, ("another", 5, 130), ("third", 5, 170)] * 4)
    (tune,) = (advice for advice in explained(run, tmp_path).advice if advice.kind == "tune-kernel")
    assert "tune splat: 50% of compute" in tune.do
    assert tune.gain_high == pytest.approx(600 / 450, rel=0.03)


def test_matmuls_in_fp32_are_advised_to_use_tensor_cores(tmp_path):
    run = launches_of([("volta_sgemm_128x64_tn", 5, 900), ("mul", 5, 60)] * 4)
    verdict = explained(run, tmp_path)
    assert verdict.limit.kind == COMPUTE
    assert kinds(verdict)[0] == "amp"
    # Of 960 us 900 take a half, or a sixth, of their time.
    assert verdict.advice[0].gain_low == pytest.approx(960 / 510, rel=0.05)
    assert verdict.advice[0].gain_high == pytest.approx(960 / 210, rel=0.05)


@pytest.mark.parametrize(
    ("softmax", "is_attention"),
    [
        ("at::native::cunn_SoftMaxForward<8, float, float, float, at::native::SoftMaxForwardEpilogue>", True),
        (
            "at::native::cunn_SoftMaxForward<8, float, float, float, at::native::LogSoftMaxForwardEpilogue>",
            False,
        ),
        ("softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false, false>", True),
        ("softmax_warp_forward<float, float, float, 10, true, false>", False),
        ("triton_red_fused__log_softmax_div_mul_prepare_softmax_online_sigmoid_view_31", False),
        ("triton_red_fused__softmax_mul_3", True),
    ],
)
def test_softmax_of_attention_is_distinguished_from_that_of_a_loss(tmp_path, softmax, is_attention):
    run = launches_of([(softmax, 5, 900), ("ampere_bf16_s16816gemm_bf16_128x64", 5, 60)] * 4)
    assert ("attention" in kinds(explained(run, tmp_path))) is is_attention


def test_attention_is_its_softmax_and_what_runs_from_one_product_to_the_other(tmp_path):
    softmax = "at::native::cunn_SoftMaxForward<8, float, float, float, at::native::SoftMaxForwardEpilogue>"
    product, scale = "cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1", "MulFunctor<c10::BFloat16>"
    other, add = "ampere_bf16_s16816gemm_bf16_128x64", "CUDAFunctor_add<c10::BFloat16>"
    layer = [other, add, product, scale, softmax, product, other]
    lasts = dict(zip([other, add, product, scale, softmax], [50, 20, 200, 80, 400]))
    run = launches_of([(name, 5, lasts[name]) for name in layer] * 3)
    (attention,) = (advice for advice in explained(run, tmp_path).advice if advice.kind == "attention")
    # Of 1,000 us a layer two products, scaling and the softmax take 880; a third or an eighth of them stays.
    assert "its matmuls, 88% of compute" in attention.do
    assert attention.gain_low == pytest.approx(1000 / (1000 - 880 * 0.65), rel=0.02)
    assert attention.gain_high == pytest.approx(1000 / (1000 - 880 * 0.88), rel=0.02)


def beside_a_thread(gpu_us: int, thread: int) -> TinyRun:
    """Steps of 1,000 us: a kernel, and a copy by a thread that does nothing known in between."""
    run = TinyRun()
    for step in range(5):
        at = 1000 * step
        run.op("aten::mm", at, at + 12)
        run.call(at + 5, at + 10, step)
        run.kernel("ampere_bf16_s16816gemm_bf16_128x64", at + 12, at + 12 + gpu_us, step)
        run.call(at + 12, at + 15 + gpu_us, 100 + step, name="cudaStreamSynchronize")
        run.call(at + 970, at + 975, 200 + step, name="cudaMemcpyAsync", tid=thread)
        copy = {"stream": 9, "device": 0, "correlation": 200 + step}
        run.span("memcpy", "Memcpy DtoD", at + 977, at + 979, 0, **copy)
        run.step(step, at, at + 1000)
    return run


def test_what_faster_kernels_gain_is_not_known_beside_a_thread_that_may_only_wait(tmp_path):
    doubt = "a host thread counts as busy all the time"
    for name, thread, is_doubtful in (("other", 77, True), ("main", 10, False)):
        verdict = explained(beside_a_thread(950, thread), tmp_path / name)
        assert verdict.limit.kind == "compute"
        assert any(line.startswith(doubt) for line in verdict.unsure) is is_doubtful


FLASH1 = "void pytorch_fmha::fmha_fwd_loop_kernel<FMHA_kernel_traits<256, 64, 16, 1, 4, 8u, __nv_bfloat16>>"
FLASH2 = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>(flash::Params)"


@pytest.mark.parametrize(
    ("kernel", "gpu", "newer"),
    [
        (FLASH1, "NVIDIA A100-SXM4-80GB", "FlashAttention 2: fmha_fwd_loop_kernel is FlashAttention 1, 60%"),
        (FLASH1, "NVIDIA H100 80GB HBM3", "FlashAttention 2: fmha_fwd_loop_kernel is FlashAttention 1, 60%"),
        (FLASH1, "Tesla T4", None),
        (FLASH2, "NVIDIA A100-SXM4-80GB", None),
        (FLASH2, "NVIDIA H100 80GB HBM3", "FlashAttention 3: flash_fwd_kernel is FlashAttention 2, 60%"),
    ],
)
def test_attention_has_the_latest_version_that_the_gpu_runs(tmp_path, kernel, gpu, newer):
    run = launches_of([(kernel, 5, 600), ("ampere_bf16_s16816gemm_bf16_128x64", 5, 400)] * 3)
    recorded = run.write(tmp_path / "run")
    manifest = dataclasses.replace(recorded.manifest, gpus=[gpu])
    advice = explain(Analysis(dataclasses.replace(recorded, manifest=manifest))).advice
    advised = [one for one in advice if one.kind == "attention"]
    assert [one.do.split(" of compute")[0] for one in advised] == ([newer] if newer else [])
    for one in advised:  # of 60% a quarter to a half goes
        assert (one.gain_low, one.gain_high) == (
            pytest.approx(1 / 0.85, rel=0.02),
            pytest.approx(1 / 0.7, rel=0.02),
        )


@pytest.mark.parametrize(
    ("product", "beside", "is_advised"),
    [
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_execute_kernel_trt", "add", True),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_MT256x256x64", "paged_attention_v1", True),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_MT256x256x64", "cunn_SoftMaxBackward", False),  # it trains
        ("Cijk_Alik_Bljk_BBS_BH_Bias_MT256x256x64", "add", False),  # nothing shows that it does not
        ("nvjet_qqtst_128x256_fp8_paged", "paged_attention_v1", False),
    ],
)
def test_inference_that_16_bit_products_limit_is_advised_to_use_8_bits(tmp_path, product, beside, is_advised):
    verdict = explained(launches_of([(product, 5, 900), (beside, 5, 60)] * 4), tmp_path)
    eight_bits = [advice for advice in verdict.advice if "in 8 bits" in advice.do]
    assert bool(eight_bits) == is_advised
    if is_advised:
        assert "94% of compute" in eight_bits[0].do
        # 900 of 960 us in 1 / 1.2 and 1 / 2 of the time.
        assert (eight_bits[0].gain_low, eight_bits[0].gain_high) == (
            pytest.approx(960 / 810, rel=0.02),
            pytest.approx(960 / 510, rel=0.02),
        )


@pytest.mark.parametrize(("gpu", "least"), [("", 1.0), ("NVIDIA A100-SXM4-80GB", 1.0), ("Tesla T4", 5.0)])
def test_matmuls_in_fp64_are_advised_to_be_in_fp32_for_sure_where_a_gpu_has_no_units_for_it(
    tmp_path, gpu, least
):
    run = launches_of([("volta_dgemm_128x64_nt", 5, 900), ("mul", 5, 60)] * 4)
    recorded = run.write(tmp_path / "run")
    manifest = dataclasses.replace(recorded.manifest, gpus=[gpu] if gpu else [])
    first = explain(Analysis(dataclasses.replace(recorded, manifest=manifest))).advice[0]
    assert (first.kind, "not FP64 (volta_dgemm_128x64_nt)" in first.do) == ("amp", True)
    assert least <= first.gain_low < first.gain_high
    assert (least > 1) == (first.gain_low > 1)


def test_a_matmul_of_scaled_blocks_is_none_in_fp64(tmp_path):
    kernel = "kernel_cutlass_mxfp8_gmmSm100GroupedBlockScaledGemmKernel_object"
    assert "amp" not in kinds(explained(launches_of([(kernel, 5, 900), ("mul", 5, 60)] * 4), tmp_path))


def test_a_gpu_whose_tensor_cores_are_twice_as_fast_is_advised_to_use_them_for_no_more(tmp_path):
    recorded = launches_of([("ampere_sgemm_128x64_tn", 5, 900), ("mul", 5, 60)] * 4).write(tmp_path / "run")
    manifest = dataclasses.replace(recorded.manifest, gpus=["NVIDIA GeForce RTX 3070 Ti"])
    first = explain(Analysis(dataclasses.replace(recorded, manifest=manifest))).advice[0]
    assert first.kind == "amp"
    # Of 960 us 900 take a half at least.
    assert first.gain_high == pytest.approx(960 / 510, rel=0.05)
    assert 1.3 < first.gain_low < first.gain_high


def test_autocast_is_advised_where_matmuls_are_tf32_and_what_is_between_them_fp32(tmp_path):
    matmul = "sm86_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw"
    pointwise = "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    norm = "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>"
    run = launches_of([(matmul, 5, 500), (pointwise, 5, 300), (norm, 5, 200)] * 4)
    (first, *_) = explained(run, tmp_path).advice
    assert (first.kind, "100% of compute" in first.do) == ("amp", True)
    # At least: half of 1,000 us takes three quarters; at most all of it takes half.
    assert first.gain_low == pytest.approx(1_000 / 875, rel=0.02)
    assert first.gain_high == pytest.approx(2.0, rel=0.02)


def test_pointwise_kernels_on_floats_halve_only_beside_matmuls_with_more_than_16_bits(tmp_path):
    pointwise = "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    run = launches_of([("ampere_sgemm_128x64_tn", 5, 600), (pointwise, 5, 600)] * 4)
    advice = explained(run, tmp_path).advice[0]
    # At least: matmuls in TF32, twice as fast; at most a sixth of 600 us and half of 600.
    assert (advice.kind, advice.gain_low) == ("amp", pytest.approx(1_200 / 900, rel=0.02))
    assert advice.gain_high == pytest.approx(1_200 / 400, rel=0.02)
    run = launches_of([("ampere_bf16_s16816gemm_bf16_128x64", 5, 600), (pointwise, 5, 600)] * 4)
    assert "amp" not in kinds(explained(run, tmp_path / "again"))


@pytest.mark.parametrize(
    ("kernel", "left_us"),
    [
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>)", 100),
        ("triton_per_fused_add_native_layer_norm_20", 300),
        ("max_pool_forward_nchw<float, float>", 300),
        ("at::native::cunn_SoftMaxForward<4, float, float, float>", 600),
        ("FusedOptimizerTensorListMetadata<float>", 600),
    ],
)
def test_beside_matmuls_in_fp32_attention_gains_as_they_do_and_what_autocast_casts_halves(
    tmp_path, kernel, left_us
):
    run = launches_of([("ampere_sgemm_128x64_tn", 5, 600), (kernel, 5, 600)] * 4)
    (advice,) = (advice for advice in explained(run, tmp_path).advice if advice.kind == "amp")
    assert advice.gain_high == pytest.approx(1_200 / (100 + left_us), rel=0.02)


def test_kernels_with_one_short_name_are_named_once_and_counted(tmp_path):
    kernels = [f"multi_tensor_apply_kernel<TensorListMetadata<{depth}>>" for depth in (1, 2)]
    run = launches_of([(kernels[0], 5, 300), (kernels[1], 5, 250), ("volta_sgemm_128x64_tn", 5, 400)] * 4)
    limit = explained(run, tmp_path).limit
    assert limit is not None
    assert limit.cause == "multi_tensor_apply_kernel 58% in 2 kernels, volta_sgemm_128x64_tn 42%"


@pytest.mark.parametrize(("unknown_us", "is_said"), [(900, True), (60, False)])
def test_that_kernels_of_no_known_kind_compute_is_said_from_half_of_the_time(tmp_path, unknown_us, is_said):
    run = launches_of([("what_is_this", 5, unknown_us), ("volta_sgemm_128x64_tn", 5, 300)] * 4)
    unsure = explained(run, tmp_path).unsure
    assert any("are of unknown kind, by their names" in line for line in unsure) == is_said


def test_matmuls_on_tensor_cores_are_left_alone(tmp_path):
    run = launches_of([("ampere_bf16_s16816gemm_bf16_128x64", 5, 900), ("mul", 5, 60)] * 4)
    assert "amp" not in kinds(explained(run, tmp_path))


def test_a_missing_rank_and_one_step_make_a_verdict_unsure(tmp_path):
    verdict = explained(launches_of([("mul", 60, 10)] * 50, steps=1), tmp_path)
    assert any("one step" in reason for reason in verdict.unsure)
    unmarked = launches_of([("mul", 60, 10)] * 50)
    del unmarked.rows["steps"]
    assert explained(unmarked, tmp_path / "unmarked").unsure[:1] == [
        "no steps are known: the whole recording counts as one"
    ]


def test_what_a_profiler_takes_to_stop_on_one_rank_is_no_part_of_the_step(tmp_path):
    run = TinyRun()
    for rank in range(2):
        run.call(0, 10, 1, rank)
        run.kernel("gemm", 12, 1000, 1, rank)
        run.call(14, 1010 + 500 * rank, 2, rank, name="cudaDeviceSynchronize")
    analysis = Analysis(run.write(tmp_path))
    assert analysis.breakdown["duration_ns"].to_list() == [1_000_000, 1_000_000]
    assert explain(analysis).account.step_ms == pytest.approx(1.0, rel=0.01)


def test_no_worker_is_advised_on_a_host_whose_ranks_wait_for_a_core(tmp_path, monkeypatch):
    facts = facts_of(launches_of([("gemm", 4000, 200), *[("mul", 20, 100)] * 10]), tmp_path)
    crowd = Finding("slow.host", "host", "a", (0,), 0.5, 1.0, 0.5 * facts.step_ns, (), CROWDED)
    free, crowded = advise(facts, INPUT), advise(with_findings(facts, [crowd]), INPUT)
    assert [advice.kind for advice in free][:1] == ["input"]
    assert "beside the step" in free[0].do
    assert {advice.kind for advice in crowded[:2]} == {"input", "cores"}
    assert not any("beside the step" in advice.do for advice in crowded)
    (cores,) = (advice for advice in crowded if advice.kind == "cores")
    assert (cores.gain_low, cores.gain_high) == pytest.approx((4 / 3, 2.0))
    others = [Advice(kind, "", 1.1, 2.0, "a setting") for kind in ("input", "copies", "launch")]
    assert cores in first_of([*others, cores])  # what treats a fault is shown whatever the limit
    monkeypatch.setattr(Analysis, "shared_hosts", ["a"])
    (shared,) = (advice for advice in advise(with_findings(facts, [crowd]), INPUT) if advice.kind == "cores")
    assert shared.gain_low == 1.0


def test_edits_of_an_extension_that_is_not_installed_are_not_advised(tmp_path, monkeypatch):
    facts = facts_of(series_job(), tmp_path)
    assert facts.candidates("coalesce") == ["coalesce"]
    monkeypatch.delitem(EDITS, "coalesce")
    assert facts.candidates("coalesce") == []


def with_findings(facts: JobFacts, findings: list[Finding]) -> JobFacts:
    """The same facts, with findings of another kind of run."""
    other = JobFacts(facts.analysis, facts.job)
    other.__dict__["findings"] = findings
    return other


def test_what_a_finding_says_to_do_is_advised_with_what_it_costs_of_the_mean_step():
    pauses = Finding(
        "pauses", "rank", "1", (1,), 0.5, 0.9, 4e7,
        (observe("pauses", "rank 1 stands still in every 5th step"), observe("share", "steps 5, 10, 15")),
        "unknown wait", remedy="see what it opens",
    )  # fmt: skip
    taken = (observe("turns", "b"),)
    turns = Finding(
        "slow.host", "job", "what ranks take in turn", (0, 1), 0.2, 0.9, 1e7, taken, remedy="look"
    )
    late = Finding("slow.host", "rank", "2", (2,), 0.1, 0.9, 5e6, (observe("late", "rank 2 takes longer"),))
    warm_up = Finding("pauses", "job", "warm-up", (), 0.6, 0.9, 5e6, (), remedy="record more steps")
    first, second, third = remedies_of([pauses, turns, late, warm_up])
    assert first.do == "see what it opens (rank 1 stands still in every 5th step)"
    assert (first.gain_low, first.gain_high) == pytest.approx((4 / 3, 2.0))
    assert second.do == "look (b)"
    assert third.do == "find what makes rank 2 slower than its peers, and remove it"
    assert third.gain_high == pytest.approx(1 / 0.9)
    assert [each.effort for each in (first, second, third)] == ["new code"] * 3


def test_what_is_done_to_a_machine_takes_no_code():
    shared = Finding("slow.compute", "rank", "2", (2,), 0.1, 0.9, 5e6, (), remedy="end the other process")
    (advice,) = remedies_of([shared])
    assert advice.effort == "no code"


UNEVEN = Finding(
    "imbalance.data", "job", "the ranks' batches", (0, 1), 0.2, 0.9, 1e4,
    (observe("uneven-work", "one rank has more"),), remedy="group samples by length",
)  # fmt: skip


def test_uneven_batches_that_few_recorded_steps_do_not_show_are_to_be_evened_out(tmp_path):
    facts = with_findings(facts_of(gpu_job(slow_rank=-1), tmp_path), [UNEVEN])
    (evened,) = (advice for advice in advise(facts, IMBALANCE) if advice.kind == "balance-input")
    assert evened.do == "group samples by length"
    assert (evened.gain_low, evened.gain_high) == pytest.approx((1 / 0.9, 1 / 0.8), rel=1e-3)
    assert advise(facts, IMBALANCE)[0] == evened
    assert fault_in_words([UNEVEN]) == "the ranks' batches cost 10 us a step."


def test_a_part_that_is_named_is_to_be_mended_where_nothing_says_what_limits_the_job(tmp_path, monkeypatch):
    crowd = Finding("slow.host", "host", "vm", (0, 1), 0.4, 0.9, 1e5, (), CROWDED, remedy="add cores")
    facts = with_findings(facts_of(gpu_job(), tmp_path), [crowd])
    (cores,) = advise_of_findings(facts)
    assert (cores.kind, cores.do) == (
        "cores", "add cores: ranks on vm wait 100 us a step for a core",
    )  # fmt: skip
    monkeypatch.setattr("dpro.verdict.verdict.limit_of", lambda *_: None)
    verdict = _by_replay(facts)
    assert [advice.kind for advice in verdict.advice] == ["cores", "record-more"]


def finding(component_kind: str, component_id: str, cost_us: float, cause: str = "") -> Finding:
    return Finding("slow.host", component_kind, component_id, (1,), 0.1, 0.9, 1000 * cost_us, (), cause)


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        ([], "no slow rank or component found."),
        ([finding("rank", "1", 20, "the input pipeline")], "rank 1 (the input pipeline) costs 20 us a step."),
        ([finding("job", "the input pipeline", 20)], "the input pipeline costs 20 us a step."),
        (
            [finding("rank", str(rank), 20) for rank in range(4)],
            "rank 0 (slow host work) costs 20 us a step; rank 1 (slow host work) costs 20 us a step; "
            "2 more (dpro diagnose).",
        ),
    ],
)
def test_the_costliest_two_faults_are_named_and_others_counted(findings, words):
    assert fault_in_words(findings) == words


def test_steps_that_became_longer_are_no_part_that_costs_and_costs_that_cannot_add_up_overlap():
    since = (observe(LONGER_SINCE, "since step {step}", step=62),)
    longer = Finding("slow.regression", "job", "step time", (), 0.68, 0.9, 139_000, since)
    assert fault_in_words([longer]) == "since step 62 steps are 139 us longer."
    crowd = Finding("slow.host", "host", "vm", (0, 1), 0.64, 0.9, 128_000, (), CROWDED)
    said = "host vm (more threads than cores) costs 128 us a step; since step 62 steps are 139 us longer"
    assert fault_in_words([crowd, longer]) == f"{said}; these costs overlap."


def test_a_cost_is_marked_where_the_replay_that_it_comes_from_does_not_fit():
    slow = finding("rank", "1", 20, "the input pipeline")
    assert fault_in_words([slow], fits=False) == "rank 1 (the input pipeline) costs perhaps 20 us a step."


def test_what_may_be_at_fault_is_said_where_nothing_is_for_sure(tmp_path, monkeypatch):
    analysis = Analysis(launches_of([("mul", 60, 10)] * 50).write(tmp_path / "run"))
    doubtful = dataclasses.replace(finding("stage", "7", 20, "uneven stages"), confidence=0.45)
    monkeypatch.setattr(Analysis, "verdict", ([doubtful], []))
    verdict = explain(analysis)
    assert (
        verdict.fault == "none is certain; stage 7 (uneven stages) may cost 20 us a step (confidence 0.45)."
    )
    assert verdict.account.faulty_ranks == []
    sure = finding("rank", "1", 30)
    monkeypatch.setattr(Analysis, "verdict", ([sure, doubtful], []))
    assert explain(Analysis(analysis.run)).fault == "rank 1 (slow host work) costs 30 us a step."


def test_that_nothing_stands_out_is_not_said_where_the_replay_does_not_fit(tmp_path, monkeypatch):
    analysis = Analysis(launches_of([("mul", 60, 10)] * 50).write(tmp_path / "run"))
    poor = dataclasses.replace(analysis.trust, answerable=False, reasons=("the replayed steps are off",))
    monkeypatch.setattr(Analysis, "trust", poor)
    verdict = explain(analysis)
    assert verdict.fault == "not diagnosed: the replay does not fit."
    assert (kinds(verdict), verdict.then) == (["record-more"], None)


def test_waits_are_advised_against_without_a_gain_where_the_replay_does_not_fit(tmp_path, monkeypatch):
    analysis = Analysis(waiting_host().write(tmp_path / "run"))
    assert explain(analysis).limit.kind == SYNCHRONISATION
    analysis = Analysis(analysis.run)
    poor = dataclasses.replace(analysis.trust, answerable=False, reasons=("the replayed steps are off",))
    monkeypatch.setattr(Analysis, "trust", poor)
    (advice,) = explain(analysis).advice
    assert (advice.kind, advice.gain_low, advice.gain_high, advice.edit) == ("sync", None, None, "")


def test_launches_behind_waits_are_advised_against_where_the_replay_does_not_fit(tmp_path, monkeypatch):
    facts = facts_of(launches_of([("mul", 60, 10)] * 40), tmp_path)
    poor = dataclasses.replace(
        facts.analysis.trust, answerable=False, reasons=("the replayed steps are off",)
    )
    monkeypatch.setattr(Analysis, "trust", poor)
    (advice,) = advise(facts, SYNCHRONISATION)
    assert (advice.kind, advice.gain_low, advice.gain_high, advice.edit) == ("launch", None, None, "")


def waiting_host(steps: int = 4) -> TinyRun:
    """Steps in each of which the host waits five times for a kernel of 100 us before it launches another."""
    run, at = TinyRun(), 0.0
    for step in range(steps):
        begin = at
        for number in range(5):
            correlation = 100 * step + 10 * number
            run.op("aten::mul", at, at + 70)
            run.call(at + 60, at + 65, correlation)
            run.kernel("mul", at + 67, at + 167, correlation)
            run.op("aten::item", at + 71, at + 175)
            run.call(at + 72, at + 170, correlation + 1, name="cudaStreamSynchronize")
            at += 180
        run.step(step, begin, at)
    return run


def test_kernels_are_advised_without_a_gain_where_the_replay_does_not_fit(tmp_path, monkeypatch):
    run = launches_of([("volta_sgemm_128x64_tn", 5, 900), ("mul", 5, 60)] * 4)
    analysis = Analysis(run.write(tmp_path / "run"))
    poor = dataclasses.replace(analysis.trust, answerable=False, reasons=("the replayed steps are off",))
    monkeypatch.setattr(Analysis, "trust", poor)
    verdict = explain(analysis)
    assert (verdict.limit.kind, kinds(verdict)[0]) == (COMPUTE, "amp")
    assert all(
        (advice.gain_low, advice.gain_high, advice.edit) == (None, None, "") for advice in verdict.advice
    )


def test_launches_are_counted_and_other_calls_are_not(tmp_path):
    run = launches_of([("mul", 60, 10)] * 50)
    assert "50 launches a rank for 500 us of kernels" in explained(run, tmp_path).limit.cause


@pytest.mark.parametrize(("host_us", "named"), [(700, True), (300, False)])
def test_a_launch_is_dear_from_half_a_millisecond_of_the_host(tmp_path, host_us, named):
    facts = facts_of(launches_of([("mul", 20, 10)] * 10 + [("rope", host_us, 10)] * 6), tmp_path)
    assert (facts.slow_launches is not None) is named


def test_what_cores_give_lies_between_most_of_what_the_pauses_cost_and_a_free_host(tmp_path):
    facts = facts_of(descheduled(), tmp_path)
    ended = facts.typical_gain_of(facts.job.with_change(facts.still.ended))
    cores = advise(facts, HOST)[0]
    assert cores.gain_low == pytest.approx(partly(ended, 0.75))
    assert cores.gain_high == pytest.approx(max(ended, facts.gains_by_limit()[HOST]))


@pytest.mark.parametrize("ranks", [1, 4])
def test_one_rank_that_pauses_is_no_lack_of_cores(tmp_path, ranks):
    run = descheduled(ranks=1)
    for rank in range(1, ranks):  # peers that never pause
        for span in launches_of([("mul", 50, 20)] * 100).rows["spans"]:
            run.rows["spans"].append(span | {"rank": rank})
        for step in launches_of([("mul", 50, 20)] * 100).rows["steps"]:
            run.rows["steps"].append(step | {"rank": rank})
    assert facts_of(run, tmp_path).still is None


def test_pauses_that_take_little_of_the_step_are_no_cause(tmp_path):
    assert facts_of(descheduled(chance=0.001), tmp_path).still is None


def test_input_is_worth_all_that_comes_before_the_first_launch_or_half_of_it(tmp_path):
    facts = facts_of(launches_of([("gemm", 4000, 200), *[("mul", 20, 100)] * 10]), tmp_path)
    gain = facts.gains_by_limit()[INPUT]
    (advice,) = (advice for advice in advise(facts, INPUT) if advice.kind == "input")
    assert (advice.gain_low, advice.gain_high) == pytest.approx((partly(gain, 0.5), gain))


def late_host(late_us: float) -> TinyRun:
    """Three ranks that launch and reduce; the host of one works longer before its launch in each step."""
    run, begin = TinyRun(), 0.0
    for step in range(3):
        moved = begin + 100 + late_us + 130
        for rank in range(3):
            at = begin + 100 + late_us * (rank == 1)
            run.op("aten::work", begin, at, rank)
            run.call(at, at + 5, 10 * step, rank)
            run.kernel("gemm", at + 7, at + 107, 10 * step, rank)
            run.call(at + 5, at + 10, 10 * step + 1, rank)
            run.nccl(at + 107, moved, 10 * step + 1, rank, sequence=step)
            run.call(at + 10, moved + 5, 10 * step + 2, rank, name="cudaDeviceSynchronize")
            run.step(step, begin, moved + 10, rank)
        begin = moved + 10
    return run


def test_the_lateness_of_one_host_is_the_limit_and_not_hosts_as_such(tmp_path):
    facts = facts_of(late_host(600), tmp_path)
    gains = facts.gains_by_limit()
    assert gains[HOST] > gains[IMBALANCE] > 2
    assert limit_of(facts).kind == IMBALANCE


def test_where_all_hosts_work_as_long_they_are_the_limit(tmp_path):
    assert limit_of(facts_of(launches_of([("mul", 60, 10)] * 50), tmp_path)).kind == HOST


def beside_each_other() -> TinyRun:
    """Two ranks of which the host works as long as transfers take, beside them: 800 of 1,000."""
    run = TinyRun()
    for step in range(4):
        begin = 1000.0 * step
        for rank in range(2):
            run.call(begin, begin + 5, 10 * step, rank)
            run.kernel("gemm", begin + 10, begin + 110, 10 * step, rank)
            run.call(begin + 5, begin + 10, 10 * step + 1, rank)
            run.nccl(begin + 110, begin + 910, 10 * step + 1, rank, sequence=step)
            run.op("aten::work", begin + 10, begin + 910, rank)
            run.call(begin + 910, begin + 915, 10 * step + 2, rank, name="cudaDeviceSynchronize")
            run.op("log", begin + 915, begin + 1000, rank)
            run.step(step, begin, begin + 1000, rank)
    return run


def test_of_two_things_beside_each_other_each_has_its_part_of_the_step(tmp_path):
    facts = facts_of(beside_each_other(), tmp_path)
    parts = {entry.cause: entry.ns for entry in entries_of(facts)}
    assert max(facts.gains_by_limit().values()) < 1.3
    lost_ns = parts[HOST] + parts.get(COMMUNICATION, 0.0)
    assert facts.step_ns / (facts.step_ns - lost_ns) > 3


def hidden_transfers(host_us: float) -> TinyRun:
    """Two ranks that compute 100 and reduce for 400, beside a host that works for a time."""
    run = TinyRun()
    for step in range(4):
        begin, host_ends = (host_us + 100) * step, (host_us + 100) * step + host_us
        for rank in range(2):
            run.call(begin, begin + 5, 10 * step, rank)
            run.kernel("gemm", begin + 10, begin + 110, 10 * step, rank)
            run.call(begin + 5, begin + 10, 10 * step + 1, rank)
            run.nccl(begin + 110, begin + 510, 10 * step + 1, rank, sequence=step)
            run.op("aten::work", begin + 10, host_ends, rank)
            run.call(
                host_ends, max(host_ends, begin + 510) + 5, 10 * step + 2, rank, name="cudaDeviceSynchronize"
            )
            run.step(step, begin, begin + host_us + 100, rank)
    return run


def test_nothing_is_said_to_give_nothing_where_the_replay_does_not_fit(tmp_path, monkeypatch):
    analysis = Analysis(hidden_transfers(host_us=900).write(tmp_path))
    trust = dataclasses.replace(analysis.trust, answerable=False, reasons=("no fit",))
    monkeypatch.setattr(Analysis, "trust", trust)
    assert explain(analysis).tempting == []


def test_nothing_is_said_to_give_little_that_gives_as_much_as_what_is_advised(tmp_path, monkeypatch):
    for most, says in ((1.02, True), (0.999, False)):
        advised = [Advice("overlap", "overlap transfers", 0.9, most, "new code")]
        monkeypatch.setattr("dpro.verdict.verdict.first_of", lambda *_, advised=advised: advised)
        assert bool(explained(hidden_transfers(host_us=900), tmp_path / f"{most}").tempting) == says


def test_what_gains_only_once_the_limit_is_gone_comes_after_it(tmp_path):
    verdict = explained(hidden_transfers(host_us=900), tmp_path)
    assert verdict.limit.kind == HOST
    assert verdict.alternatives[COMMUNICATION] < 1.02
    assert not {"transfer", "overlap"} & {*kinds(verdict)}
    assert verdict.tempting == [
        "tune communication: it is 80% of GPU time, but free transfers give x1.00 now"
    ]
    # Without a host it takes 20 to begin and end, 100 are computed, and 400 moved: 30% of them or all can go.
    assert verdict.then.kind == "transfer"
    assert verdict.then.gain_low == pytest.approx(1 / (1 - 0.3 * 400 / 520), rel=0.03)
    assert verdict.then.gain_high == pytest.approx(520 / 120, rel=0.03)


@pytest.mark.parametrize(
    ("gain", "part", "less"), [(50, 0.3, 1.416), (2, 0.5, 4 / 3), (1, 0.5, 1), (4, 1, 4)]
)
def test_a_part_of_what_a_gain_saves_is_a_part_of_its_time(gain, part, less):
    assert partly(gain, part) == pytest.approx(less, rel=1e-3)


def test_graphs_gain_no_more_for_certain_than_their_prediction(tmp_path):
    run = launches_of([("first", 20_000, 10)] + [("mul", 50, 10)] * 20)
    facts = facts_of(run, tmp_path)
    graphs = predict(facts.job, facts.ends, [parse_edit("cuda-graph")], facts.analysis.trust)
    (launch,) = (advice for advice in advise(facts, HOST) if advice.kind == "launch")
    assert launch.gain_low == pytest.approx(max(graphs.speedup_at(graphs.gain_low_ns), 1.0))


def test_advice_that_may_lose_comes_last_and_launches_matter_only_where_the_host_limits():
    advice = explain(Analysis(open_run(ROOT / "sample_traces" / "h200_input"))).advice
    may_lose = [one.gain_low is not None and round(one.gain_low, 2) < 1 for one in advice]
    assert may_lose == sorted(may_lose)
    assert "launch" not in {one.kind for one in advice}  # x0.81 to 1.61, where the input limits


@pytest.mark.parametrize(("cost", "cause"), [(0.5, "threads of ranks wait for a CPU core"), (1e-4, "")])
def test_a_host_limits_by_what_takes_most_of_its_time(tmp_path, cost, cause):
    facts = facts_of(cpu_job(), tmp_path)
    crowd = Finding("slow.host", "host", "vm", (0,), cost, 0.9, cost * facts.step_ns, (), CROWDED)
    assert cause_of(with_findings(facts, [crowd]), HOST) == (cause or "its code outside operators")


def test_cores_gain_no_more_than_a_host_that_takes_no_time():
    cores, input_ = (Advice(kind, "", 1.2, 2.8, "a setting") for kind in ("cores", "input"))
    capped, other = within_limit([cores, input_], HOST, 1.98)
    assert (capped.gain_low, capped.gain_high, other) == (1.2, 1.98, input_)
    assert within_limit([cores], INPUT, 1.98) == [cores]


@pytest.mark.parametrize(
    ("name", "is_input"),
    [("bert.py(181): forward", False), ("module.py(1743): _call_impl", False), ("train.py(9): load", True)],
)
def test_calls_of_the_model_are_never_the_input(tmp_path, monkeypatch, name, is_input):
    facts = facts_of(launches_of([("gemm", 4000, 200), *[("mul", 20, 100)] * 10]), tmp_path)
    prepared = pl.DataFrame({"name": [name, "bert.py(9): forward"], "took_ns": [900_000, 800_000]})
    monkeypatch.setattr("dpro.verdict.sources.hosts._work_by_name", lambda *_: prepared)
    shown = [advice.do for advice in advise(facts, INPUT) if advice.kind == "input"]
    assert bool(shown) is is_input
    assert all("load (train.py:9)" in do and "forward" not in do for do in shown)


def test_a_host_that_launches_little_is_not_advised_to_launch_less(tmp_path):
    assert not {"launch", "batch"} & {*kinds(explained(launches_of([("gemm", 900, 10)] * 3), tmp_path))}


def test_the_calls_are_named_in_which_the_host_waits_and_not_those_that_return_at_once(tmp_path):
    run = TinyRun()
    for step in range(3):
        begin = 2000.0 * step
        run.call(begin, begin + 5, 100 * step)
        run.kernel("gemm", begin + 10, begin + 900, 100 * step)
        run.mark("## read loss ##", begin + 20, begin + 930)
        run.call(begin + 30, begin + 925, 100 * step + 1, name="cudaMemcpyAsync")
        run.kernel(
            "Memcpy DtoH (Device -> Pageable)", begin + 902, begin + 920, 100 * step + 1, kind="memcpy"
        )
        run.mark("## check ##", begin + 940, begin + 990)
        for number in range(5):
            at = begin + 945 + 8 * number
            run.call(at, at + 2, 100 * step + 10 + number, name="cudaStreamSynchronize")
        run.op("aten::work", begin + 1000, begin + 1990)
        run.step(step, begin, begin + 2000)
    (sync,) = (advice for advice in advise(facts_of(run, tmp_path), SYNCHRONISATION) if advice.kind == "sync")
    assert sync.do == "remove waits for the GPU (cudaMemcpyAsync), 1 call a step, all in read loss"


def test_a_call_that_waits_is_named_with_the_operator_that_calls_it(tmp_path):
    run = TinyRun()
    for step in range(4):
        begin = 2000.0 * step
        run.call(begin, begin + 5, 100 * step)
        run.kernel("gemm", begin + 10, begin + 900, 100 * step)
        run.op("aten::item", begin + 20, begin + 930)
        run.op("aten::_local_scalar_dense", begin + 25, begin + 928)
        run.call(begin + 30, begin + 925, 100 * step + 1, name="cudaMemcpyAsync")
        copied = ("Memcpy DtoH (Device -> Pageable)", begin + 902, begin + 920)
        run.kernel(*copied, 100 * step + 1, kind="memcpy")
        run.op("aten::work", begin + 1000, begin + 1990)
        run.step(step, begin, begin + 2000)
    (sync,) = (advice for advice in advise(facts_of(run, tmp_path), SYNCHRONISATION) if advice.kind == "sync")
    assert sync.do.startswith(
        "remove waits for the GPU (cudaMemcpyAsync in aten::_local_scalar_dense), 1 call a step"
    )


def test_a_call_that_does_nothing_but_wait_is_named_too(tmp_path):
    run, at = TinyRun(), 0.0
    for step in range(4):
        begin = at
        run.mark("train", begin, begin + 400)
        run.call(at + 100, at + 110, 10 * step)
        run.kernel("gemm", at + 112, at + 390, 10 * step)
        run.call(at + 120, at + 391, 10 * step + 1, name="cudaDeviceSynchronize")
        at += 400
        run.step(step, begin, at)
    graph = facts_of(run, tmp_path).job.graph
    waits = gpu_waits(graph, graph.nodes.measured_end)
    assert set(waits["name"]) == {"cudaDeviceSynchronize"}
    assert waits["waited_ns"].to_list() == [270 * US] * 4


def test_calls_are_placed_in_the_innermost_function_or_range_of_the_jobs_own_code(tmp_path):
    run = TinyRun()
    run.span("python", "<string>(1): <module>", 0, 1000, tid=MAIN)
    run.span("python", "jobs/train.py(10): step", 10, 900, tid=MAIN)
    run.span("python", "torch/nn/modules/module.py(1743): _call_impl", 20, 800, tid=MAIN)
    run.span("python", "nn.Module: Block_0", 30, 700, tid=MAIN)
    run.span("python", "jobs/model.py(88): forward", 40, 600, tid=MAIN)
    run.mark("## module.layers.3.attention ##", 610, 650)
    for number, at in enumerate((100, 200, 300, 620, 750, 950, 2000)):
        run.call(at, at + 5, number)
        run.kernel("mul", at + 10, at + 20, number)
    run.step(0, 0, 3000)
    spans = Analysis(run.write(tmp_path / "run")).spans
    calls = spans.filter(pl.col("kind") == "runtime")
    assert place_of(calls, spans) == ", 43% in forward (model.py:88)"
    # Of the last four one is in a range, one in `step`, and two in no code of the job.
    later = calls.sort("start_ns").tail(4)
    assert place_of(later, spans).removeprefix(", 25% in ") in (
        "module.layers.*.attention",
        "step (train.py:10)",
    )
    assert place_of(later.filter(pl.col("start_ns") == pl.col("start_ns").max()), spans) == ""
    assert (
        place_of(calls, spans.filter(pl.col("kind") != "python").filter(pl.col("kind") != "annotation")) == ""
    )


def test_nothing_comes_after_a_limit_behind_which_the_device_is_next(tmp_path):
    assert explained(launches_of([("gemm", 400, 200)] * 10), tmp_path).then is None


def test_of_equal_gains_the_lesser_effort_comes_first_and_what_treats_the_limit_before_both(
    tmp_path, monkeypatch
):
    facts = facts_of(launches_of([("gemm", 5, 900)] * 4), tmp_path)
    code, line, setting = (
        Advice(kind, kind, 1.2, 1.4, effort)
        for kind, effort in (("sync", "new code"), ("fuse", "a line of code"), ("input", "a setting"))
    )
    more = Advice("copies", "copies", 1.6, 1.8, "new code")
    monkeypatch.setattr("dpro.verdict.ranking._SOURCES", [lambda *_: [code, setting, more, line]])
    assert [advice.kind for advice in advise(facts, HOST)] == ["copies", "input", "fuse", "sync"]
    assert [advice.kind for advice in advise(facts, COMPUTE)] == ["fuse", "copies", "input", "sync"]


def test_advice_of_now_is_not_repeated_as_what_comes_after():
    now = [
        Advice("overlap", "hide it", 1.1, 1.2, "new code"),
        Advice("fuse", "fuse", 1.0, 1.04, "a line of code"),
    ]
    then = [
        Advice("overlap", "hide it", 1.3, 1.5, "new code"),
        Advice("record-more", "record", None, None, "a setting"),
        Advice("tune-kernel", "tune", 1.0, 3.0, "new code"),
        Advice("fuse", "fuse", 1.1, 1.3, "a line of code"),
    ]
    assert worth_after(now, then) == then[3]
    assert worth_after(now, then[:3]) is None


def test_what_limits_a_run_is_a_sentence_unless_devices_compute(tmp_path):
    host = Analysis(launches_of([("mul", 60, 10)] * 50).write(tmp_path / "host"))
    compute = Analysis(launches_of([("gemm", 5, 900)] * 4).write(tmp_path / "compute"))
    assert limit_of_run(host).startswith("No slow rank or component found. What limits the job is the host")
    assert limit_of_run(compute) == ""


@pytest.mark.parametrize(
    ("times", "is_said"), [(1.0, False), (1.3, False), (2.0, True), (4.0, True), (0.3, True)]
)
def test_a_limit_is_that_of_the_deep_steps_alone_where_the_others_take_another_time(tmp_path, times, is_said):
    run = launches_of([("mul", 60, 10)] * 50)
    rows = run.rows["steps"]
    begin_ns, takes_ns = rows[-1]["start_ns"] + rows[-1]["duration_ns"], rows[-1]["duration_ns"] / times
    for number, varies in enumerate([0.8, 1.25] * 6):  # so that recording does not explain the difference
        times_ns = {"start_ns": begin_ns, "duration_ns": round(varies * takes_ns)}
        rows.append({"rank": 0, "step": 3 + number, "window": -1} | times_ns)
        begin_ns += times_ns["duration_ns"]
    analysis = Analysis(run.write(tmp_path / "run"))
    assert ("the steps of its deep windows is" in limit_of_run(analysis)) == (is_said and times < 3)
    verdict = explain(analysis)
    assert ("what limits those is not known" in " ".join(verdict.unsure)) == is_said
    another = 1.25 / times / 1.1 > 1.1 and not is_said  # the typical one of these is a longer one
    assert ("all figures are of those in deep windows" in " ".join(verdict.unsure)) == another
    assert (verdict.limit is None) == (times > 3)  # nothing that recording slowed so much says what limits
    assert (verdict.advice[0].kind == "record-more") == (times > 3)


def test_the_kernels_that_compute_longest_are_named_behind_compute_and_transfers_behind_communication(
    tmp_path,
):
    compute = explained(launches_of([("gemm", 5, 900), ("mul", 5, 100)] * 3), tmp_path / "compute")
    assert compute.limit.cause == "gemm 90%, mul 10%"
    communication = explained(ranks_that_transfer(), tmp_path / "communication")
    assert communication.limit.kind == COMMUNICATION
    assert communication.limit.cause == "ncclDevKernel"
    assert kinds(communication)[:2] == ["transfer", "overlap"]
    transfer, overlap = communication.advice[:2]
    gain = communication.limit.gain
    exposed = 1 - 1 / gain
    assert (transfer.gain_low, transfer.gain_high) == pytest.approx((partly(gain, 0.3), gain))
    # Transfers of 400 cannot be hidden behind 200 of anything else: what is left is they.
    assert exposed > 0.6
    assert overlap.gain_high == pytest.approx(1 / exposed)
    assert overlap.gain_low == pytest.approx(partly(1 / exposed, 0.4))


def ranks_that_transfer() -> TinyRun:
    """Two ranks that compute 100, and then reduce for 400 with nothing beside it."""
    run = TinyRun()
    for step in range(3):
        begin = 600.0 * step
        for rank in range(2):
            run.call(begin, begin + 5, 10 * step, rank)
            run.kernel("gemm", begin + 10, begin + 110, 10 * step, rank)
            run.call(begin + 5, begin + 10, 10 * step + 1, rank)
            run.nccl(begin + 110, begin + 510, 10 * step + 1, rank, sequence=step)
            run.call(begin + 10, begin + 515, 10 * step + 2, rank, name="cudaDeviceSynchronize")
            run.step(step, begin, begin + 600, rank)
    return run


def test_nothing_comes_after_a_limit_that_is_all_of_the_step(tmp_path):
    run = TinyRun()
    run.step(0, 0, 100)
    run.op("aten::mm", 0, 100)
    run.call(100, 110, 1)
    run.kernel("gemm", 110, 110, 1)
    facts = facts_of(run, tmp_path)
    assert facts.after(HOST) is None


def test_calls_that_launch_work_which_was_not_recorded_name_no_limit_and_say_what_to_record(tmp_path):
    run = TinyRun()
    for step in range(3):
        at = step * 100
        run.op("aten::mul", at, at + 90)
        run.call(at + 10, at + 20, step)
        run.step(step, at, at + 100)
    verdict = explained(run, tmp_path)
    assert verdict.limit is None
    assert kinds(verdict) == ["record-more"]
    assert "no work of devices was recorded" in verdict.unsure[0]
    assert not verdict.shares
    assert not verdict.account.entries


def test_of_devices_that_only_filled_memory_as_the_process_started_no_limit_is_named(tmp_path):
    run = TinyRun()
    run.call(0, 900, 1, name="cudaMemsetAsync")
    run.kernel("Memset", 902, 903, 1, kind="memset")
    run.call(1000, 11_000, 2, name="cuModuleLoadData")
    verdict = explained(run, tmp_path)
    assert verdict.limit is None
    assert [advice.do for advice in verdict.advice] == [
        "record later steps: here the devices worked for 1 us in total"
    ]
    assert verdict.unsure[0] == "hardly any work of devices was recorded: 1 us in total"


def _copying_run() -> TinyRun:
    """Three steps of 100 us, of which devices copy for 80 us."""
    run = TinyRun()
    for step in range(3):
        at = step * 100
        run.step(step, at, at + 100)
        run.call(at + 5, at + 10, step, name="cudaMemcpyAsync")
        run.kernel("Memcpy HtoD (Pageable -> Device)", at + 10, at + 90, step, kind="memcpy")
        run.call(at + 11, at + 91, 100 + step, name="cudaStreamSynchronize")
    return run


def test_of_devices_that_only_copied_while_no_kernel_was_recorded_no_limit_is_named(tmp_path):
    run = _copying_run()
    run.call(92, 94, 200, name="cudaLaunchKernel")
    verdict = explained(run, tmp_path)
    assert verdict.limit is None
    assert kinds(verdict)[0] == "record-more"
    assert verdict.advice[0].do.startswith("record kernels: none was")
    assert verdict.unsure[0].startswith("no kernel was recorded, only copies and fills")


def test_devices_that_copy_while_no_kernel_is_launched_are_limited_by_copies(tmp_path):
    verdict = explained(_copying_run(), tmp_path)
    assert verdict.limit.kind == "memory-copies"
    assert kinds(verdict)[0] == "copies"


def test_a_host_that_takes_nearly_as_long_as_the_devices_it_feeds_is_named_beside_them(tmp_path):
    near = explained(launches_of([("gemm", 90, 100)] * 4), tmp_path / "near")
    ahead = explained(launches_of([("gemm", 5, 100)] * 4), tmp_path / "ahead")
    assert near.limit.kind == ahead.limit.kind == "compute"
    named = ["the host takes nearly as long as the devices" in " ".join(one.unsure) for one in (near, ahead)]
    assert named == [True, False]


def test_what_comes_before_the_first_launch_of_a_program_is_no_input(tmp_path):
    # Without steps: 5 ms of imports, then 10 launches of 40 us.
    run = TinyRun()
    run.op("aten::start", 0, 5000)
    for number in range(10):
        at = 5000 + 40 * number
        run.op("aten::mul", at, at + 30)
        run.call(at + 20, at + 30, number)
        run.kernel("mul", at + 31, at + 35, number)
    assert explained(run, tmp_path / "without").limit.kind == HOST
    run.step(1, 0, 5400)  # of a step it is what the step waits for
    assert explained(run, tmp_path / "with").limit.kind == INPUT


def pausing(counter: str, per_step_ns: float, every: int = 1, num_steps: int = 8) -> TinyRun:
    """Steps of 1 ms, 400 us of compiler ranges in each, and longer ones in which hosts counted something."""
    run, at = TinyRun(), 0.0
    for step in range(num_steps):
        more = per_step_ns / US if step % every == every - 1 and every > 1 else 0.0
        run.op("_compile.compile_inner (dynamo_timed)", at + 10, at + 410)
        run.op("aten::mm", at + 410, at + 990 + more)
        run.step(step, at, at + 1000 + more)
        run.counter(counter, at, more * US if every > 1 else per_step_ns)
        at += 1000 + more
    return run


def test_compiling_in_each_step_is_the_limit_and_to_be_ended(tmp_path):
    verdict = explained(pausing("step_compile_ns", 500_000), tmp_path)
    assert verdict.limit.kind == COMPILATION
    assert verdict.limit.gain == pytest.approx(1000 / 600, rel=0.03)
    first = verdict.advice[0]
    assert first.kind == COMPILATION
    assert "mark_dynamic" in first.do
    # By replay 400 us of 1 ms, by what was counted 500.
    assert (first.gain_low, first.gain_high) == (pytest.approx(1000 / 600, rel=0.03), pytest.approx(2.0))


@pytest.mark.parametrize(
    ("counter", "kind"), [("step_gc_ns", COLLECTION), ("step_checkpoint_ns", CHECKPOINT)]
)
def test_what_hosts_count_in_so_many_steps_that_it_is_no_pause_is_to_be_ended(tmp_path, counter, kind):
    facts = facts_of(pausing(counter, 500_000, every=2, num_steps=40), tmp_path / "often")
    (advice,) = (one for one in advise(facts, HOST) if one.kind == kind)
    assert advice.gain_low == advice.gain_high == pytest.approx(1250 / 1000)
    assert "250 us a step on average" in advice.do
    facts = facts_of(pausing(counter, 500_000, every=10, num_steps=40), tmp_path / "rarely")
    assert kind not in [one.kind for one in advise(facts, HOST)]


def test_gradients_that_are_reduced_in_vain_are_to_be_reduced_once(tmp_path):
    facts = facts_of(accumulated(4), tmp_path)
    first = advise(facts, COMMUNICATION)[0]
    assert first.kind == first.edit == "reduce-last"
    assert "no_sync" in first.do
    assert "3 reductions a step" in first.do


def test_a_series_of_small_collectives_is_to_be_one(tmp_path):
    facts = facts_of(series_job((4,) * 40), tmp_path)
    first = advise(facts, COMMUNICATION)[0]
    assert first.kind == first.edit == "coalesce"
    assert "40 of 4 B a step in a row" in first.do


def computing_on_hosts(outside_us: float) -> TinyRun:
    """Steps of operators that take 100 us, and of nothing recorded for as long as given."""
    run = TinyRun()
    for step in range(4):
        at = step * (100 + outside_us)
        run.op("aten::addmm", at, at + 60)
        run.op("aten::addmm", at + 60 + outside_us, at + 100 + outside_us)
        run.step(step, at, at + 100 + outside_us)
    return run


@pytest.mark.parametrize(("outside_us", "limit"), [(300, HOST), (10, COMPUTE)])
def test_a_job_on_hosts_that_mostly_runs_no_operator_is_limited_by_what_else_they_do(
    tmp_path, outside_us, limit
):
    verdict = explained(computing_on_hosts(outside_us), tmp_path)
    assert verdict.limit.kind == limit
    if limit == HOST:
        assert verdict.limit.gain == pytest.approx(4.0, rel=0.05)
        assert "outside operators" in verdict.advice[0].do


def test_what_the_recorder_itself_runs_is_no_code_to_shorten(tmp_path):
    run = computing_on_hosts(300)
    for step in range(4):
        at = 400.0 * step
        run.span("python", "train.py(9): prepare", at + 65, at + 165, pid=MAIN, tid=MAIN)
        run.span(
            "python", "collectors/inside/recorder.py(310): on_update", at + 170, at + 355, pid=MAIN, tid=MAIN
        )
    do = explained(run, tmp_path).advice[0].do
    assert "prepare (train.py:9) takes 100 us" in do
    assert "on_update" not in do


def test_a_job_that_was_ended_is_said_to_be_before_what_is_at_fault(tmp_path):
    run = launches_of([("mul", 5, 60)] * 4)
    ended = {
        "source": "dpro recorder",
        "exit_code": -1,
        "exit_signal": 15,
        "ended_ns": run.rows["steps"][-1]["start_ns"],
    }
    run.rows["workers"].append({"rank": 0, "host": "a", **ended})
    recorded = run.write(tmp_path / "run")
    manifest = dataclasses.replace(recorded.manifest, exit_status=1)
    verdict = explain(Analysis(dataclasses.replace(recorded, manifest=manifest)))
    assert re.match(r"The job was ended .*SIGTERM.*\. No slow rank or component found\.$", verdict.fault)
    assert verdict.account.fault == verdict.fault


def test_work_between_steps_that_are_marked_in_part_belongs_to_the_next(tmp_path):
    run = launches_of([("mul", 50, 5)] * 8, steps=11)
    for row in run.rows["steps"]:
        row["duration_ns"] //= 4  # the marks end after the second of eight launches
    facts = facts_of(run, tmp_path)
    # Of the first step in a window only what is marked is known to be of it.
    for counted in (facts.launches.height, facts.kernels["count"].sum()):
        assert 7 < counted / facts.rank_steps <= 8


def test_where_devices_wait_for_what_was_not_recorded_that_is_to_be_recorded(tmp_path, monkeypatch):
    unexplained = [LedgerRow("unexplained", (), 1e6, "what is left")]
    monkeypatch.setattr("dpro.verdict.verdict.entries_of", lambda facts: unexplained)
    verdict = explained(launches_of([("mul", 60, 10)] * 10), tmp_path)
    assert verdict.limit is None
    assert kinds(verdict) == ["record-more"]
    assert "what devices wait for was not recorded" in verdict.unsure


def test_what_hosts_do_is_no_compute_beside_kernels(tmp_path):
    on_gpu = facts_of(launches_of([("mul", 60, 10)] * 10), tmp_path / "gpu").job.graph
    on_host = facts_of(computing_on_hosts(10), tmp_path / "host").job.graph
    kernels = on_gpu.nodes.kind == NodeKind.KERNEL
    freed = Free(work_of_devices).apply(on_gpu).nodes.duration
    assert not freed[kernels].any()
    assert (freed[~kernels] == on_gpu.nodes.duration[~kernels]).all()
    assert not Free(work_of_devices).apply(on_host).nodes.duration.any()


def test_where_no_step_is_marked_or_repeats_steps_are_to_be_recorded_besides(tmp_path):
    run = launches_of([(f"kernel{number}", 60, 10) for number in range(40)], steps=1)
    del run.rows["steps"]
    verdict = explained(run, tmp_path)
    assert verdict.advice[-1].kind == "record-more"
    assert "mark them" in verdict.advice[-1].do
    assert len(verdict.advice) <= 3
    marked = explained(launches_of([("mul", 60, 10)] * 40), tmp_path / "marked")
    assert "record-more" not in kinds(marked)


@pytest.mark.parametrize(("kernels", "is_asked"), [(3, True), (40, False)])
def test_a_single_step_of_a_few_kernels_asks_for_more_steps(tmp_path, kernels, is_asked):
    verdict = explained(launches_of([("mul", 60, 500)] * kernels, steps=1), tmp_path)
    assert ("record-more" in kinds(verdict)) == is_asked


@pytest.mark.parametrize(("memory", "copies_us"), [("Pageable", 490), ("Pinned", 100)])
def test_a_call_that_copies_pageable_memory_costs_what_the_host_copies_too(tmp_path, memory, copies_us):
    run, at = TinyRun(), 0.0
    for step in range(4):
        begin = at
        run.op("aten::op", at, at + 300)
        run.call(at + 300, at + 800, 10 * step, name="cudaMemcpy")
        run.kernel(f"Memcpy HtoD ({memory} -> Device)", at + 350, at + 450, 10 * step, kind="memcpy")
        run.call(at + 800, at + 805, 10 * step + 1)
        run.kernel("gemm", at + 810, at + 1000, 10 * step + 1)
        run.call(at + 806, at + 1001, 10 * step + 2, name="cudaDeviceSynchronize")
        at += 1002
        run.step(step, begin, at)
    graph = facts_of(run, tmp_path).job.graph
    saved_ns = graph.nodes.duration.sum() - FreeCopies().apply(graph).nodes.duration.sum()
    assert saved_ns == pytest.approx(4 * (copies_us + 100) * US, rel=0.03)  # less what recording cost


def test_where_nothing_would_gain_the_code_is_to_be_recorded(tmp_path):
    run = launches_of([(f"ampere_bf16_s16816gemm_{number}", 5, 100) for number in range(20)])
    (advice,) = explained(run, tmp_path).advice
    assert advice.kind == "record-more"
    run.span("python", "train.py(3): main", 0, 100)
    assert not explained(run, tmp_path / "code").advice


def test_what_treats_the_limit_is_advised_without_a_gain_where_the_replay_shows_none(tmp_path, monkeypatch):
    facts = facts_of(launches_of([("gemm", 60, 10)] * 40), tmp_path)
    monkeypatch.setattr(JobFacts, "gain_of_faster", lambda facts, factors: 1.0)
    monkeypatch.setattr(JobFacts, "gains_by_limit", lambda facts: {})
    monkeypatch.setattr(JobFacts, "predict", Mock(side_effect=DproError("unknown")))
    (advice,) = advise(facts, COMPUTE)
    assert (advice.kind, advice.gain_low, advice.gain_high) == ("tune-kernel", None, None)


def test_of_traces_that_are_cut_short_no_limit_no_fault_and_no_share_is_named(tmp_path):
    run = gpu_job().write(tmp_path / "run")
    assert explain(Analysis(run)).limit is not None
    cut = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, skipped={CUT: 2}))
    analysis = Analysis(cut)
    verdict = explain(analysis)
    assert (verdict.limit, verdict.shares, verdict.fault) == (None, {}, "not diagnosed.")
    assert kinds(verdict) == ["record-more"]
    assert verdict.unsure[0].startswith("2 traces are cut short")
    assert not analysis.trust.answerable
    assert analysis.trust.grade == "poor"


def test_marks_alone_are_no_work_and_name_no_limit(tmp_path):
    run = TinyRun()
    for step in range(3):
        run.mark("train_batch", step * 100, step * 100 + 90)
        run.step(step, step * 100, step * 100 + 100)
    verdict = explained(run, tmp_path)
    assert (verdict.limit, verdict.fault) == (None, "not diagnosed.")
    assert kinds(verdict) == ["record-more"]


def test_one_step_shows_no_spread_and_is_rated_fair_at_most(tmp_path):
    several, one = (Analysis(gpu_job(num_steps=steps).write(tmp_path / str(steps))).trust for steps in (6, 1))
    assert several.grade == "good"
    assert one.grade == "fair"


def series_of(lengths_ms: list[float]) -> StepSeries:
    """Steps outside deep windows, of these lengths."""
    rows = [(0, step, -1, step * 1_000_000_000, round(took * 1e6)) for step, took in enumerate(lengths_ms)]
    table = pl.DataFrame(rows, ["rank", "step", "window", "start_ns", "duration_ns"], orient="row")
    found = step_series(conform(STEPS, table))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("windows", "typical_ms", "words"),
    [
        ([0, 0, 0], None, "usual step 10 ms (3 steps)"),
        ([0, 0, 0, *[-1] * 6], 10.5, "usual step 10 ms (9 steps, 3 in depth)"),
        ([0, 0, 0, *[-1] * 6], 16.0, "typical step 16 ms (6 steps; 3 in depth: 10 ms)"),
        ([0, -1], 16.0, "typical step 16 ms (1 step; 1 in depth: 10 ms)"),
        ([], None, "usual step 10 ms (1 step)"),
    ],
)
def test_the_headline_counts_all_steps_and_names_those_in_depth_apart(windows, typical_ms, words):
    steps = pl.DataFrame(
        {"step": range(len(windows)), "window": windows}, schema_overrides={"window": pl.Int32}
    )
    others = typical_ms and series_of([typical_ms] * 20)
    assert steps_in_words(steps, 10e6, others) == words


def test_the_headline_has_one_step_where_steps_in_depth_are_scaled_to_the_others():
    steps = pl.DataFrame({"step": range(9), "window": [0, 0, *[-1] * 7]})
    skewed = series_of([1.0] * 9 + [2.0] * 11)
    assert steps_in_words(steps, 10e6, skewed, is_scaled=True) == "usual step 10 ms (9 steps, 2 in depth)"


def test_the_headline_has_the_mean_step_too_where_steps_pause_again_and_again():
    steps, often = (
        pl.DataFrame({"step": range(9), "window": [0, 0, *[-1] * 7]}),
        [10.0, 10.0, 10.0, 50.0] * 20,
    )
    words = "usual step 10 ms, mean with pauses 20 ms (9 steps, 2 in depth)"
    assert steps_in_words(steps, 10e6, series_of(often)) == words
    once = [500.0, *[10.0] * 60, 90.0, *[10.0] * 19]  # at the start, and by chance
    assert steps_in_words(steps, 10e6, series_of(once)) == "usual step 10 ms (9 steps, 2 in depth)"


def test_steps_in_depth_that_took_longer_than_the_others_are_said_to_be_scaled(tmp_path):
    run = cpu_job(num_ranks=2, num_steps=4)
    for step in range(100, 120):
        for rank in range(2):
            run.step(step, step * 10_000, step * 10_000 + 800, rank=rank, window=-1)
    verdict = explained(run, tmp_path)
    assert "usual step 800 us (24 steps, 4 in depth)" in verdict.job
    assert verdict.account.step_ms == pytest.approx(0.8, rel=0.01)
    (line,) = (line for line in verdict.unsure if "in deep windows" in line)
    assert line == "all figures come from steps in deep windows (1.15 ms each), scaled to the others' 800 us"


def test_the_headline_has_the_mean_of_other_steps_where_it_is_not_their_median():
    steps = pl.DataFrame({"step": range(9), "window": [0, 0, *[-1] * 7]})
    words = "step: median 6 ms, mean 11 ms (7 steps; 2 in depth: 10 ms)"
    assert steps_in_words(steps, 10e6, SimpleNamespace(typical_ns=6e6, mean_ns=11e6)) == words


@pytest.mark.parametrize("name", ["slow_rank", "h200_slow_host"])
def test_the_headline_counts_as_many_steps_as_the_run_is_said_to_have(name):
    analysis = Analysis(open_run(ROOT / "sample_traces" / name))
    (said,) = re.findall(r"\((\d+) steps, (\d+) in depth\)", explain(analysis).job)
    document = info_document(analysis)
    assert said == (str(document.steps), str(document.coverage.steps_in_windows))


def test_without_a_limit_a_step_is_no_longer_than_without_one_part_of_it():
    analysis = Analysis(open_run(ROOT / "sample_traces" / "slow_rank"))
    verdict = explain(analysis)
    findings, _ = analysis.verdict
    assert verdict.limit is not None
    of_limit = [one for one in findings if LIMIT_OF.get(cause_of_finding(one)) == verdict.limit.kind]
    assert of_limit
    assert verdict.limit.gain >= max(1 / (1 - one.severity) for one in of_limit) - 1e-3


def test_the_gain_of_a_limit_is_as_uncertain_as_that_of_the_edit_that_removes_it():
    analysis = Analysis(open_run(ROOT / "sample_traces" / "h200_input"))
    limit = explain(analysis).limit
    hidden = predict_edits(analysis, [parse_edit("hide-input")])
    assert limit.kind == "input"
    assert limit.gain_low < hidden.speedup < limit.gain_high
    assert limit.gain_low < limit.gain < limit.gain_high
    account = explain(analysis).account
    assert account.entries[0].cause == "input"
    assert account.entries[0].ms == pytest.approx(account.step_ms * (1 - 1 / hidden.speedup), rel=1e-6)


def test_the_host_of_a_single_rank_is_not_said_to_be_that_of_all():
    fault = explain(Analysis(open_run(ROOT / "sample_traces" / "h200_input"))).fault
    waits = "the rank waits for its host, 73.9 ms a step"
    assert fault == f"{waits}, most of it in the input pipeline."


def test_ranges_of_the_recorder_have_names_that_a_user_knows():
    work = pl.DataFrame({"name": ["dpro::backward", "train.py(9): prepare"], "took_ns": [41e6, 30e6]})
    assert _longest_names(work, 1) == ": the backward pass takes 41 ms, prepare (train.py:9) takes 30 ms"
