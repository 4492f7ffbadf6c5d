"""Traffic of calls that were timed without deep windows, of jobs of a model of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.findings import Finding
from dpro.detect.network.traffic import traffic_of_calls
from dpro.detect.network.transfers import find_slow_network
from dpro.members import members_text
from dpro.schema import COLLECTIVES, STEPS, WORKERS, conform
from dpro.store import open_run
from tests.reference.training_jobs import Job, run_job
from tests.reference.training_records import Recording, write_run

SINCE = 30
MS = 1_000_000
HEALTHY = Job("fsdp", 4, 60, gpu=True, seed=3)
SLOW = replace(HEALTHY, fault="network", how="nic", victim=2, severity=3.0, since=SINCE)


def found(folder: Path, job: Job, **recorded: object) -> list[Finding]:
    recording = Recording(timed=True, **recorded)
    verdict = Analysis(open_run(write_run(folder, job, run_job(job), recording))).verdict_by_calls
    assert verdict is not None
    return [finding for finding in verdict[0] if finding.class_ != "slow.regression"]


def test_network_that_became_slow_is_found_and_dated_without_common_clocks(tmp_path):
    (finding,) = found(tmp_path, SLOW, skew="unknown")
    assert (finding.class_, finding.component_kind) == ("slow.fabric", "network")
    assert finding.component_id == "between hosts"
    assert finding.evidence[0].startswith(f"since step {SINCE} transfers between hosts take 3.")
    assert any("at most" in line for line in finding.evidence)


def test_port_that_is_slow_all_along_is_found_by_other_groups_of_its_kind(tmp_path):
    job = Job("moe", 16, 30, gpu=True, seed=1, fault="network", how="rank", victim=5, severity=2.0)
    (finding,) = found(tmp_path, job)
    assert finding.class_ == "slow.nic"
    assert 5 in finding.ranks
    assert finding.ranks == (4, 5, 6, 7)


@pytest.mark.parametrize("noise", ["heavy", pytest.param("10%", marks=pytest.mark.slow)])
def test_healthy_network_is_left_alone(tmp_path, noise):
    assert found(tmp_path, replace(HEALTHY, layout="moe", noise=noise)) == []


def test_change_that_the_steps_do_not_show_is_none(tmp_path):
    assert found(tmp_path, replace(SLOW, layout="dp", severity=1.2)) == []  # hidden behind backward


@pytest.mark.slow
def test_rank_that_computes_slowly_is_no_network(tmp_path):
    assert [f for f in found(tmp_path, replace(SLOW, fault="compute")) if f.class_ != "slow.compute"] == []


def table(rows: list[dict[str, object]], **columns: object) -> pl.DataFrame:
    given = {"group": "g", "window": -1, "op": "all_reduce", "bytes_in": 8, "bytes_out": 8, "start_ns": 5}
    return conform(COLLECTIVES, pl.DataFrame([given | columns | row for row in rows]))


def transfers(calls: pl.DataFrame, world_size: int = 2) -> pl.DataFrame:
    steps = pl.DataFrame({"rank": [0, 1], "step": 7, "window": -1, "start_ns": 0, "duration_ns": 100})
    workers = pl.DataFrame({"rank": [0, 1], "host": ["a", "b"]})
    traffic = traffic_of_calls(calls, conform(STEPS, steps), conform(WORKERS, workers), world_size)
    return traffic.transfers


def test_transfer_is_what_the_last_member_took():
    calls = table([
        {"collective_id": 0, "rank": 0, "sequence": 1, "duration_ns": 50},
        {"collective_id": 0, "rank": 1, "sequence": 1, "duration_ns": 20},
        {"collective_id": 1, "rank": 0, "sequence": 2, "duration_ns": 30},  # the other one was lost
    ])  # fmt: skip
    (row,) = transfers(calls).rows(named=True)
    assert (row["members"], row["step"], row["transfer_ns"], row["num_hosts"]) == ("0,1", 7, 20, 2)
    assert row["whole"]


def test_group_is_whole_only_if_no_rank_may_be_missing():
    calls = table([
        {"collective_id": 0, "rank": rank, "sequence": 1, "duration_ns": 50} for rank in (0, 1)
    ])  # fmt: skip
    assert not transfers(calls, world_size=3)["whole"].any()


def test_messages_are_met_in_order_each_end_counting_its_own():
    calls = table([
        {"collective_id": 0, "rank": 0, "op": "send", "peer": 1, "sequence": 4, "duration_ns": 50},
        {"collective_id": 1, "rank": 0, "op": "send", "peer": 1, "sequence": 5, "duration_ns": 60},
        {"collective_id": 0, "rank": 1, "op": "recv", "peer": 0, "sequence": 1, "duration_ns": 40},
        {"collective_id": 1, "rank": 1, "op": "recv", "peer": 0, "sequence": 2, "duration_ns": 70},
        {"collective_id": 2, "rank": 1, "op": "send", "peer": 0, "sequence": 3, "duration_ns": 70},
    ])  # fmt: skip
    rows = transfers(calls).select("op", "members", "transfer_ns", "whole").rows()
    assert rows == [("message", "0,1", 40, True), ("message", "0,1", 60, True)]


def test_nothing_was_timed():
    calls = table([{"collective_id": 0, "rank": 0, "sequence": 1, "duration_ns": -1}])
    assert transfers(calls).is_empty()


def test_a_link_that_slow_rings_share_is_named_from_timed_calls_alone():
    # As with `--nccl-timing`: rings of three ranks that overlap, 10 ms each, 30 ms over the link of 1 and 2.
    rings = [(0, 1, 2), (1, 2, 3), (3, 4, 5), (0, 4, 5), (0, 3, 5), (1, 3, 4), (2, 4, 5)]
    rows = [
        {
            "collective_id": 100 * step + number,
            "rank": rank,
            "group": f"g{number}",
            "group_ranks": members_text(ring),
            "sequence": step,
            "start_ns": 1000 * MS * step + 50 * MS * number,
            "duration_ns": (30 if {1, 2} <= {*ring} else 10) * MS + (5 * MS if rank == ring[0] else 0),
        }
        for step in range(8)
        for number, ring in enumerate(rings)
        for rank in ring
    ]
    calls = conform(
        COLLECTIVES, pl.DataFrame([{"op": "all_reduce", "bytes_in": 8, "window": -1} | row for row in rows])
    )
    steps = pl.DataFrame(
        [
            {"rank": rank, "step": step, "window": -1, "start_ns": 1000 * MS * step, "duration_ns": 1000 * MS}
            for rank in range(6)
            for step in range(8)
        ]
    )
    workers = pl.DataFrame({"rank": range(6), "host": list("abcdef")})
    traffic = traffic_of_calls(calls, conform(STEPS, steps), conform(WORKERS, workers), 6)
    (finding,) = find_slow_network(traffic)
    assert (finding.class_, finding.component_kind, finding.component_id) == ("slow.link", "link", "1 - 2")
    assert finding.cost_ns == pytest.approx(40 * MS)  # 20 of each of two rings, on ranks 1 and 2
