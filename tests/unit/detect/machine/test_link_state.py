"""Links of GPUs and ports of hosts as evidence: two nodes of two ranks, each on a GPU that its uuid names."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from dpro.detect.findings import Finding
from dpro.detect.machine.gpu_state import (
    HARDWARE,
    REMEDIES,
    needed_for_errors,
    with_broken_links,
    with_gpus,
    with_links,
)
from dpro.detect.machine.telemetry import LINKS_OF_GPUS, LINKS_OF_PORTS, RULES
from dpro.detect.observations import observe
from dpro.schema import COUNTERS, STEPS, WORKERS, conform
from dpro.units import NS_PER_S

BEGIN = 1_700_000_000 * 10**9
SECONDS = 100
GPUS = {0: ("n1", "g7"), 1: ("n1", "g3"), 2: ("n2", "g5"), 3: ("n2", "g1")}

Row = tuple[str, str, str, list[tuple[float, float]]]  # host, device, counter, times in s with values


def tables(*rows: Row) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Steps, counters (zero on all that are not given) and workers."""
    steps = pl.DataFrame(
        [
            {"rank": rank, "step": step, "start_ns": BEGIN + step * NS_PER_S, "duration_ns": NS_PER_S}
            for rank in GPUS
            for step in range(SECONDS)
        ]
    )
    workers = pl.DataFrame(
        {
            "rank": list(GPUS),
            "host": [host for host, _ in GPUS.values()],
            "gpu_uuid": [f"GPU-{device}" for _, device in GPUS.values()],
        }
    )
    given = {row[:3] for row in rows}
    every = [(host, device, "sampling_us", [(0, 80.0)]) for host, device in GPUS.values()]
    every += [(host, "g9", "sampling_us", [(0, 80.0)]) for host in ("n1", "n2")]  # of another job
    of_gpus = {row[2] for row in rows if row[2] in LINKS_OF_GPUS}
    of_ports = {(row[1], row[2]) for row in rows if row[2] in LINKS_OF_PORTS}
    quiet = [(*gpu, counter) for gpu in GPUS.values() for counter in of_gpus]
    quiet += [(host, device, counter) for host in ("n1", "n2") for device, counter in of_ports]
    high = {"rate_gbps": 400.0, "up": 1.0, "pcie_lanes": 16.0, "pcie_generation": 5.0}
    every += [(*key, [(0, high.get(key[2], 0.0))]) for key in quiet if key not in given]
    flat = [
        (host, device, counter, BEGIN + round(time * NS_PER_S), value)
        for host, device, counter, values in [*every, *rows]
        for time, value in values
    ]
    frame = pl.DataFrame(flat, ["host", "device", "counter", "time_ns", "value"], orient="row")
    return conform(STEPS, steps), conform(COUNTERS, frame), conform(WORKERS, workers)


def slow(kind: str = "rank", id_: str = "2", ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Finding:
    return Finding("slow.nic", kind, id_, ranks, 0.2, 0.8, 1e6, (observe("test", "slow"),))


def explained(finding: Finding, *rows: Row) -> Finding:
    steps, counters, workers = tables(*rows)
    (found,) = with_links([finding], steps, counters, workers)
    return found


def test_nvlink_errors_of_one_gpu_are_the_cause_by_its_uuid() -> None:
    found = explained(slow(), ("n2", "g5", "nvlink_crc_errors", [(0, 0.0), (50, 500.0), (99, 1000.0)]))
    assert found.cause == "NVLink CRC errors of g5 on n2"
    assert found.evidence[1:] == ("g5 on n2 (rank 2): NVLink CRC errors 10 per second, the others' 0",)
    stands_out = found.observations[1]
    assert (stands_out.kind, stands_out.values["ranks"]) == ("link-stands-out", [2])
    assert stands_out.values["value"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("counter", "value", "says"),
    [("pcie_lanes", 8.0, "PCIe lanes 8, the others' 16"), ("pcie_generation", 3.0, "PCIe generation 3")],
)
def test_a_gpu_on_fewer_lanes_than_its_peers_stands_out(counter: str, value: float, says: str) -> None:
    assert says in explained(slow(), ("n1", "g3", counter, [(0, value)])).evidence[-1]


def test_a_port_is_compared_with_those_of_its_name_on_other_hosts() -> None:
    found = explained(
        slow(),
        ("n2", "mlx5_0:1", "rate_gbps", [(0, 100.0)]),
        ("n1", "eth0", "rate_gbps", [(0, 1.0)]),
        ("n2", "eth0", "rate_gbps", [(0, 1.0)]),
    )
    assert found.evidence[1:] == (
        "mlx5_0:1 on n2 (ranks 2, 3): rate of the port 100 Gbit/s, the others' 400",
    )
    assert found.cause == "rate of the port of mlx5_0:1 on n2"


def test_what_all_count_equally_explains_nothing() -> None:
    rows = [(*gpu, "nvlink_replays", [(0, 0.0), (99, 900.0)]) for gpu in GPUS.values()]
    assert explained(slow(), *rows) == slow()


def test_gpus_of_other_jobs_and_ranks_that_are_not_concerned_are_no_evidence() -> None:
    rows = ("n1", "g9", "pcie_replays", [(0, 0.0), (99, 900.0)])
    assert explained(slow(), rows) == slow()
    apart = slow(ranks=(2, 3))
    assert explained(apart, ("n1", "g7", "pcie_replays", [(0, 0.0), (99, 900.0)])) == apart


def test_two_devices_that_stand_out_are_evidence_and_no_cause() -> None:
    rows = [(*GPUS[rank], "pcie_replays", [(0, 0.0), (99, 90.0 * (rank + 1))]) for rank in (1, 2)]
    found = explained(slow(), *rows)
    assert found.cause == ""
    assert len(found.evidence) == 3


def test_a_cause_that_is_known_stays() -> None:
    finding = replace(slow("link", "0 - 2", (0, 2)), class_="slow.link", cause="packet loss")
    found = explained(finding, ("n2", "g5", "nvlink_crc_errors", [(0, 0.0), (99, 1000.0)]))
    assert found.cause == "packet loss"
    assert len(found.evidence) == 2


def test_an_nvlink_xid_is_evidence_of_a_slow_network() -> None:
    steps, counters, workers = tables(("n2", "g5", "xid", [(50, 74.0)]))
    (found,) = with_gpus([slow()], steps, counters, workers)
    assert "XID 74" in found.evidence[-1]
    assert found.remedy == REMEDIES[HARDWARE]


def test_a_port_that_went_down_is_evidence_of_a_hang() -> None:
    hang = Finding("hang.comm", "group", "0-3", (0, 1, 2, 3), 1.0, 0.9, 0.0, (observe("test", "all came"),))
    rows: list[Row] = [
        ("n2", "mlx5_0:1", "link_downed", [(0, 0.0), (SECONDS + 20, 1.0)]),
        ("n2", "mlx5_0:1", "up", [(0, 1.0), (SECONDS + 20, 0.0), (SECONDS + 60, 0.0)]),
    ]
    steps, counters, workers = tables(*rows)
    (found,) = with_broken_links([hang], steps, needed_for_errors(counters), workers)
    assert any("mlx5_0:1 on n2 (ranks 2, 3): times the link was down" in line for line in found.evidence)
    assert with_broken_links([slow()], steps, counters, workers) == [slow()]


def test_each_counter_of_a_link_has_a_rule() -> None:
    assert {*LINKS_OF_GPUS, *LINKS_OF_PORTS} <= RULES.keys()
