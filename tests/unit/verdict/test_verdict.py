"""Causes and advice on small jobs, written down span by span."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.findings import Finding
from dpro.detect.machine.oversubscribed import CAUSE as CROWDED
from dpro.replay.whatif.job import ReplayedJob
from dpro.verdict.advice import advise
from dpro.verdict.causes import dear_launches, stand_still
from dpro.verdict.facts import JobFacts
from dpro.verdict.limits import COMPUTE, HOST, INPUT
from dpro.verdict.verdict import Explanation, explain
from tests.builders import TinyRun


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path / "cache"))


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


def test_few_launches_that_cost_milliseconds_are_named_with_their_kernel(tmp_path):
    run = launches_of([("cheap", 20, 10)] * 40 + [("rope_kernel", 2200, 30)] * 5)
    name, count, took_ns = dear_launches(facts_of(run, tmp_path))
    assert (name, count) == ("rope_kernel", pytest.approx(5, abs=0.5))
    assert took_ns == pytest.approx(2.2e6, rel=0.02)
    verdict = explained(run, tmp_path)
    assert verdict.limit.kind == HOST
    assert "rope_kernel" in verdict.limit.cause
    assert kinds(verdict)[0] == "launch-one"


def test_many_cheap_launches_are_no_dear_ones(tmp_path):
    run = launches_of([("mul", 60, 10)] * 50)
    assert dear_launches(facts_of(run, tmp_path)) is None
    verdict = explained(run, tmp_path)
    assert kinds(verdict)[:2] == ["launch", "batch"]
    assert verdict.advice[0].gain_high == pytest.approx(verdict.limit.gain)


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


def descheduled(ranks: int = 4, steps: int = 3) -> TinyRun:
    """Ranks whose calls of 50 us take 4 ms now and then, whatever they call."""
    run, noise = TinyRun(), np.random.default_rng(3)
    for rank in range(ranks):
        at = 0.0
        for step in range(steps):
            begin = at
            for number in range(100):
                took = 4000.0 if noise.random() < 0.1 else 50.0
                run.op(f"aten::op{number % 10}", at, at + took, rank)
                correlation = 1000 * step + number
                run.call(at + took - 5, at + took - 1, correlation, rank)
                run.kernel("mul", at + took, at + took + 20, correlation, rank)
                at += took + 1
            run.step(step, begin, at, rank)
    return run


def test_hosts_that_stand_still_in_any_call_lack_cores(tmp_path):
    still = stand_still(facts_of(descheduled(), tmp_path))
    assert 0.5 < still.share < 1.0
    assert 1.0 < still.at_once <= 4.0
    verdict = explained(descheduled(), tmp_path)
    assert (verdict.limit.kind, kinds(verdict)[0]) == (HOST, "cores")
    assert "of 4 at a time" in verdict.limit.cause


def test_one_call_that_is_slow_is_no_lack_of_cores(tmp_path):
    run = launches_of([("mul", 40, 10)] * 50 + [("slow", 5000, 10)])
    assert stand_still(facts_of(run, tmp_path)) is None


def test_matmuls_in_fp32_are_advised_to_use_tensor_cores(tmp_path):
    run = launches_of([("volta_sgemm_128x64_tn", 5, 900), ("mul", 5, 60)] * 4)
    verdict = explained(run, tmp_path)
    assert verdict.limit.kind == COMPUTE
    assert kinds(verdict)[0] == "amp"
    # Of 960 us 900 take a half, or a sixth, of their time.
    assert verdict.advice[0].gain_low == pytest.approx(960 / 510, rel=0.05)
    assert verdict.advice[0].gain_high == pytest.approx(960 / 210, rel=0.05)


def test_matmuls_on_tensor_cores_are_left_alone(tmp_path):
    run = launches_of([("ampere_bf16_s16816gemm_bf16_128x64", 5, 900), ("mul", 5, 60)] * 4)
    assert "amp" not in kinds(explained(run, tmp_path))


def test_a_missing_rank_and_one_step_make_a_verdict_unsure(tmp_path):
    verdict = explained(launches_of([("mul", 60, 10)] * 50, steps=1), tmp_path)
    assert any("one step" in reason for reason in verdict.unsure)


def test_no_worker_is_advised_on_a_host_whose_ranks_wait_for_a_core(tmp_path):
    facts = facts_of(launches_of([("gemm", 4000, 200), *[("mul", 20, 100)] * 10]), tmp_path)
    crowd = Finding("slow.host", "host", "a", (0,), 0.5, 1.0, 0.5 * facts.step_ns, (), CROWDED)
    free, crowded = advise(facts, INPUT), advise(with_findings(facts, [crowd]), INPUT)
    assert [advice.kind for advice in free][:1] == ["input"]
    assert "beside the step" in free[0].do
    assert {advice.kind for advice in crowded[:2]} == {"input", "cores"}
    assert not any("beside the step" in advice.do for advice in crowded)
    (cores,) = (advice for advice in crowded if advice.kind == "cores")
    assert cores.gain_high == pytest.approx(2.0)


def with_findings(facts: JobFacts, findings: list[Finding]) -> JobFacts:
    """The same facts, with findings of another kind of run."""
    other = JobFacts(facts.analysis, facts.job)
    other.__dict__["findings"] = findings
    return other
