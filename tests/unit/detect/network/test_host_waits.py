"""Hosts that all began to wait, found from calls and counters alone, of jobs of a model of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.findings import Finding
from dpro.detect.network.degradation import _longer_waits
from dpro.store import open_run
from dpro.units import NS_PER_MS
from tests.reference.training_jobs import HOST_FAULTS, Job, run_job
from tests.reference.training_records import Recording, write_run

SLOWLY = pytest.mark.slow
SINCE = 30
HEALTHY = Job("fsdp", 4, 70, seed=3)
SLOW = replace(HEALTHY, fault="network", how="nic", victim=2, severity=3.0, since=SINCE)


def found(folder: Path, job: Job, **recorded: object) -> list[Finding]:
    recording = Recording(**recorded)
    verdict = Analysis(open_run(write_run(folder, job, run_job(job), recording))).verdict_by_calls
    assert verdict is not None
    return [finding for finding in verdict[0] if finding.class_ != "slow.regression"]


@pytest.mark.parametrize(
    "layout", ["dp", *(pytest.param(layout, marks=SLOWLY) for layout in ("fsdp", "moe"))]
)
def test_network_that_became_slow_is_one_of_two_things_since_that_step(tmp_path, layout):
    (finding,) = found(tmp_path, replace(SLOW, layout=layout, severity=5.0))
    assert (finding.class_, finding.component_kind) == ("slow.fabric", "one of")
    assert finding.component_id == "the network between ranks 0-3, code that waits on all of them"
    # Hosts wait for what a step has begun until the next one calls.
    assert re.match(f"since step ({SINCE}|{SINCE + 1}) each of ranks 0-3 spends ", finding.evidence[0])
    assert finding.confidence <= 0.5


def test_cost_is_what_the_steps_have_grown_by(tmp_path):
    (finding,) = found(tmp_path, SLOW)
    log = run_job(SLOW)
    times = [float((step["end"] - step["begin"]).mean()) for step in log.steps]
    grown = sum(times[SINCE:]) / len(times[SINCE:]) - sum(times[:SINCE]) / SINCE
    assert finding.cost_ns / 1e6 == pytest.approx(grown, rel=0.15)
    observed = {one.kind: one.values for one in finding.observations}
    assert observed["idle-since"]["ranks"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "noise", ["10%", "heavy", pytest.param("5%", marks=SLOWLY), pytest.param("periodic", marks=SLOWLY)]
)
def test_healthy_job_raises_nothing(tmp_path, noise):
    # Where long steps come regularly they are pauses, which is another finding.
    assert {finding.class_ for finding in found(tmp_path, replace(HEALTHY, noise=noise))} <= {"pauses"}


@pytest.mark.parametrize("how", ["sleep", *(pytest.param(how, marks=SLOWLY) for how in HOST_FAULTS[:3])])
def test_one_slow_host_is_no_network(tmp_path, how):
    job = replace(SLOW, fault="host", how=how, severity=1.5)
    assert [finding.class_ for finding in found(tmp_path, job)] == ["slow.host"]


def test_all_ranks_that_compute_longer_are_no_network(tmp_path):
    assert found(tmp_path, replace(SLOW, fault="regression", severity=1.5)) == []


@pytest.mark.parametrize("grows", [False, True])
def test_waits_that_become_longer_and_longer_are_no_network(grows):
    steps = np.arange(100)
    waited_ms = np.where(steps >= SINCE, steps - SINCE if grows else 40, 0)
    took_ns = (50 + waited_ms) * NS_PER_MS
    end_ns = took_ns.cumsum()
    job = pl.DataFrame(
        {"step": steps, "begin_ns": end_ns - took_ns, "end_ns": end_ns, "duration_ns": took_ns}
    )
    idle = pl.DataFrame({"step": steps, "idle_ns": waited_ms * float(NS_PER_MS)})
    idle = pl.concat(idle.with_columns(rank=pl.lit(rank)) for rank in (0, 1))
    assert (_longer_waits(idle, job, [0, 1]) is None) == grows


def test_rank_that_left_no_record_may_be_late_instead(tmp_path):
    (finding,) = found(tmp_path, SLOW, lost=(1,))
    assert finding.component_id.endswith(", rank 1 coming late")
    assert finding.confidence <= 1 / 3
    assert finding.ranks == (0, 2, 3)


def test_nothing_is_said_of_ranks_whose_peers_have_clocks_that_nothing_connects(tmp_path):
    assert found(tmp_path, replace(SLOW, layout="moe", severity=5.0), skew="unknown") == []


def test_device_that_may_be_slow_is_no_network(tmp_path):
    assert found(tmp_path, replace(SLOW, gpu=True)) == []
