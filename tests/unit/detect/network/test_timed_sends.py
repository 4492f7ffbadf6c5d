"""Wires of a ring, each seen by its sender."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.detect.network.traffic import Traffic, traffic_of_sends
from dpro.detect.network.transfers import delay_matrix
from dpro.detect.run import diagnose_traffic
from dpro.schema import SENDS, STEPS, WORKERS, conform

RANKS, STEPS_RUN, MS = 8, 30, 1_000_000


def ring(slow: dict[tuple[int, int], float], since: int = 0, group: str = "0xa") -> Traffic:
    """Eight ranks, two on each host, that send 1 MB around a ring in each step of 20 ms, 4 ms a wire.

    The communicator numbers its members the other way round than the job does.
    """
    noise = np.random.default_rng(0).lognormal(0, 0.05, (STEPS_RUN, RANKS))
    sends, steps = [], []
    for step in range(STEPS_RUN):
        for rank in range(RANKS):
            begin = step * 20 * MS
            to = (rank + 1) % RANKS
            times = slow.get((rank, to), 1.0) if step >= since else 1.0
            sends.append({
                "rank": rank, "group": group, "member": 7 - rank, "peer_member": 7 - to, "sequence": step,
                "channel": 0, "operation": step, "time_ns": begin + MS, "steps": 4, "bytes": 1_000_000,
                "wire_ns": int(4 * MS * times * noise[step, rank]),
            })  # fmt: skip
            steps.append({"rank": rank, "step": step, "window": -1, "start_ns": begin,
                          "duration_ns": int(20 * MS * (1.5 if step >= since > 0 else 1))})  # fmt: skip
    workers = pl.DataFrame({"rank": range(RANKS), "host": [f"node{rank // 2}" for rank in range(RANKS)]})
    tables = ((SENDS, pl.DataFrame(sends)), (STEPS, pl.DataFrame(steps)), (WORKERS, workers))
    return traffic_of_sends(*(conform(table, frame) for table, frame in tables))


def named(traffic: Traffic) -> list[tuple[str, str, str]]:
    return [(each.class_, each.component_kind, each.component_id) for each in diagnose_traffic(traffic)]


def test_equally_fast_wires_raise_nothing():
    assert named(ring({})) == []


def test_rank_whose_wires_are_slow_both_ways_is_named_in_one_ring():
    assert named(ring({(2, 3): 3.0, (3, 4): 3.0})) == [("slow.nic", "rank", "3")]


def test_one_slow_wire_is_one_of_its_ends_or_the_link():
    ((_, kind, name),) = named(ring({(3, 4): 3.0}))
    assert kind == "one of"
    assert "rank 3" in name
    assert "rank 4" in name
    assert "link 3 -> 4" in name


def test_host_whose_wires_are_slow_both_ways_is_named():
    ((class_, kind, name),) = named(ring({(1, 2): 3.0, (3, 4): 3.0}))
    assert (class_, kind, name) == ("slow.nic", "host", "node1")


def test_wire_that_became_slow_is_dated():
    (finding,) = diagnose_traffic(ring({(3, 4): 3.0}, since=15))
    assert "since step 15" in finding.evidence[0]
    assert finding.ranks == (3, 4)


def test_matrix_has_each_wire_in_its_direction():
    traffic = ring({(3, 4): 3.0})
    matrix = delay_matrix(traffic.transfers, traffic.hosts)
    assert matrix.height == RANKS
    assert matrix["directed"].all()
    slow = matrix.filter((pl.col("source") == 3) & (pl.col("target") == 4))
    assert slow["ratio"].item() == pytest.approx(3.0, rel=0.1)


def test_peer_who_sent_nothing_is_not_guessed():
    sends = {"rank": 0, "group": "g", "member": 0, "peer_member": 1, "time_ns": 5, "bytes": 1, "wire_ns": 1}
    steps = {"rank": 0, "step": 0, "window": -1, "start_ns": 0, "duration_ns": 9}
    frames = (conform(SENDS, pl.DataFrame([sends])), conform(STEPS, pl.DataFrame([steps])))
    assert traffic_of_sends(*frames, WORKERS.empty()).transfers.is_empty()
