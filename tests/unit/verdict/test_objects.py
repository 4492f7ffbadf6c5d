"""Python objects that ranks exchange are recognised, and take as long as they hold their thread up."""

from __future__ import annotations

import pytest

from dpro.analysis.analysis import Analysis
from dpro.schema import COLLECTIVES, SPANS
from dpro.verdict.facts import exchanges_of_objects
from dpro.verdict.limits import HOST
from dpro.verdict.ranking import advise
from tests.builders import US, TinyRun
from tests.unit.verdict.test_verdict import facts_of


def gathering(steps: int = 4, every: int = 1, lengths: str = "int64") -> TinyRun:
    """Each step works for 200 us; then ranks pickle for 10 us, gather lengths, then bytes, and unpickle."""
    run = TinyRun()
    for rank in (0, 1):
        for step in range(steps):
            at = 400.0 * step
            run.step(step, at, at + 400, rank)
            run.op("aten::mm", at, at + 200, rank)
            if step % every == 0:
                for begin, dtype, size in ((210, lengths, 8), (240, "uint8", 5000)):
                    called = (at + begin, at + begin + 2)
                    more = {"sequence": 2 * step + begin // 240, "dtype": dtype, "bytes_in": size}
                    ran = (at + begin + 2, at + begin + 20 + 5 * rank)
                    run.gloo(called, ran, rank, op="all_gather", **more)
            run.op("aten::add", at + 290 + 5 * rank, at + 400, rank)
    return run


def test_an_exchange_lasts_from_what_ran_before_it_to_what_runs_after_it(tmp_path):
    run = gathering().write(tmp_path)
    exchanges = exchanges_of_objects(run.table(COLLECTIVES), run.table(SPANS))
    assert exchanges.height == 8
    assert set(exchanges["bytes"]) == {5000}
    by_rank = exchanges.sort("rank").partition_by("rank")
    assert [set(of_rank["took_ns"]) for of_rank in by_rank] == [{90 * US}, {95 * US}]


def test_objects_of_each_step_are_to_be_tensors_for_at_least_what_the_last_rank_needs(tmp_path):
    (advised,) = (
        advice for advice in advise(facts_of(gathering(), tmp_path), HOST) if "objects" in advice.do
    )
    assert "all_gather of 5.0 kB of pickled objects a step and rank takes 90 us or more" in advised.do
    assert advised.gain_low == pytest.approx(1 / (1 - 90 / 400), rel=0.05)
    assert advised.gain_high >= advised.gain_low


@pytest.mark.parametrize("job", [gathering(every=4), gathering(lengths="float32")], ids=["seldom", "tensors"])
def test_objects_that_are_exchanged_seldom_and_bytes_that_are_tensors_are_left_alone(tmp_path, job):
    assert not any("objects" in advice.do for advice in advise(facts_of(job, tmp_path), HOST))


def test_a_job_without_collectives_exchanges_no_objects(tmp_path):
    run = TinyRun()
    run.op("aten::mm", 0, 10)
    analysis = Analysis(run.write(tmp_path))
    assert exchanges_of_objects(analysis.collectives, analysis.spans).is_empty()
