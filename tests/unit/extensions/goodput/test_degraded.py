"""How long a step takes with fewer replicas, by a replay of the job's own recording."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.campaigns.compared import logged
from dpro.errors import UsageError
from dpro.extensions.goodput.life import life_of
from dpro.extensions.goodput.outlook import with_replayed_step
from dpro.extensions.goodput.simulate import Recovery, simulate
from dpro.store import open_run
from tests.commands import dpro
from tests.lives import WrittenAttempt, job

HEALTHY = Path(__file__).parents[4] / "sample_traces" / "healthy"  # two ranks, one replica each
JOB = Recovery(step_s=2, every=50, stall_s=0, background_s=0, start_s=30, down_s=0, detect_s=0, hosts=2)


@pytest.fixture(scope="module")
def healthy():
    return life_of([open_run(HEALTHY)])


def keys(text):
    return dict(part.split("=") for part in text.partition(":")[2].split(","))


def test_step_with_one_replica_fewer_is_what_the_replay_predicts(healthy):
    found = keys(with_replayed_step(healthy, JOB, "smaller:replicas=2,repair=1"))
    whatif = json.loads(dpro("whatif", HEALTHY, "--edit", "data-parallel:ranks=1", "--json").stdout)
    (prediction,) = whatif["predictions"]
    assert float(found["slower"]) == pytest.approx(
        prediction["predicted_ms"] / whatif["baseline_ms"], rel=1e-3
    )
    assert 0 < float(found["unsure"]) < 0.1
    assert (found["replicas"], found["repair"]) == ("2", "1")


def test_batch_that_fewer_replicas_share_takes_longer(healthy):
    fewer, as_many = (
        keys(with_replayed_step(healthy, JOB, f"smaller:replicas=2{more}")) for more in ("", ",batch=1")
    )
    assert float(as_many["slower"]) > 1.2 * float(fewer["slower"])


@pytest.mark.parametrize("text", ["smaller:replicas=2,slower=1.5", "detect:s=3", "smaller:repair=2"])
def test_change_that_says_all_or_lacks_something_else_stays_as_it_is(healthy, text):
    assert with_replayed_step(healthy, JOB, text) == text


def test_run_without_deep_windows_asks_for_the_step(tmp_path):
    attempt = WrittenAttempt(begin=0)
    run = job(tmp_path, [attempt.ended(attempt.trained(10))])
    with pytest.raises(UsageError, match=r"no deep window.*give it, as in smaller:.*slower="):
        with_replayed_step(life_of([run]), JOB, "smaller:replicas=2")


def test_replay_that_has_no_answer_says_why_and_asks(healthy):
    with pytest.raises(UsageError, match=r"no formula for broadcast.*give it"):
        with_replayed_step(healthy, JOB, "smaller:replicas=4")


def test_doubt_about_a_step_widens_the_interval_and_moves_no_failure():
    job_ = replace(JOB, replicas=2, spares=0, repair_s=1e6, slower=1.2, keeps_batch=True)
    failures = logged(np.array([100.0]), np.ones(1, bool))

    def steps(unsure):
        rng = np.random.default_rng(0)
        return simulate(replace(job_, unsure=unsure), failures, 10_000, rng, 400).steps, rng.random()

    (sure, after), (doubted, then) = steps(0.0), steps(0.1)
    assert after == then
    assert np.ptp(sure) == 0
    # 50 steps are saved by 130 s; from 160 s on a step takes 2.4 s, give or take a twelfth of it.
    assert np.std(doubted) / np.mean(doubted) == pytest.approx(0.1 / 1.2, rel=0.15)
