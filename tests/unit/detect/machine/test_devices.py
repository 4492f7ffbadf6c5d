"""Which sampled GPU is whose, on hosts that jobs share."""

import polars as pl
import pytest

from dpro.detect.machine.telemetry import ADDRESS, ORDER, PCI, UUID, bare_uuid, gpus_of_ranks, pci_number
from dpro.schema import COUNTERS, WORKERS, conform

EIGHT = [f"8c5bf1a2-0000-0000-0000-00000000000{number}" for number in range(8)]


def sampled(*devices: str, host: str = "n1", pci: bool = True) -> pl.DataFrame:
    """Counters of GPUs, of which the n-th has PCI bus 0x10 + n, in any order."""
    rows = [(host, device, "sampling_us", 100.0) for device in reversed(devices)]
    rows += [
        (host, each, PCI, float((0x10 + n) << 8)) for n, each in enumerate(devices) if pci and "/" not in each
    ]
    rows.append((host, "eth0", "tx_bytes", 1.0))
    return conform(COUNTERS, pl.DataFrame(rows, ["host", "device", "counter", "value"], orient="row"))


def workers(*uuids: str, host: str = "n1", pci: tuple[str, ...] = (), first: int = 0) -> pl.DataFrame:
    ranks = range(first, first + len(uuids))
    columns = {"rank": ranks, "local_rank": range(len(uuids)), "gpu_uuid": list(uuids), "host": host}
    columns |= {"gpu_name": "H100", "gpu_pci": list(pci) or ""}
    return conform(WORKERS, pl.DataFrame(columns))


def joined(counters: pl.DataFrame, ranks: pl.DataFrame) -> list[tuple]:
    return gpus_of_ranks(counters, ranks).select("rank", "device", "by").rows()


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_of_eight_gpus_a_job_has_those_four_that_its_ranks_name(prefix):
    mine = [EIGHT[number] for number in (6, 1, 4, 3)]
    found = joined(sampled(*EIGHT), workers(*(prefix + uuid.upper() for uuid in mine)))
    assert found == [(rank, uuid, UUID) for rank, uuid in enumerate(mine)]


def test_ranks_that_share_a_gpu_both_have_it():
    assert joined(sampled(*EIGHT), workers(EIGHT[2], EIGHT[2])) == [(0, EIGHT[2], UUID), (1, EIGHT[2], UUID)]


def test_a_gpu_of_another_host_is_nobodys_here():
    counters = pl.concat([sampled(*EIGHT[:1]), sampled(*EIGHT[1:2], host="n2")])
    ranks = pl.concat([workers(EIGHT[1]), workers(EIGHT[1], host="n2", first=1)])
    assert joined(counters, ranks) == [(1, EIGHT[1], UUID)]


def test_a_rank_on_an_instance_has_the_instance_and_the_gpu_around_it():
    counters = sampled("a", "a/p1", "a/p2", "b")
    assert joined(counters, workers("MIG-p2")) == [(0, "a", UUID), (0, "a/p2", UUID)]
    assert joined(counters, workers("GPU-a")) == [(0, "a", UUID)]  # which of its instances is not known


def test_where_uuids_differ_the_pci_address_decides():
    ranks = workers("other-1", "other-2", pci=("0000:12:00.0", "0000:10:00.0"))
    assert joined(sampled("a", "b", "c"), ranks) == [(0, "c", ADDRESS), (1, "a", ADDRESS)]


def test_the_uuid_that_hip_makes_of_an_id_is_that_id():
    uuid = "61316232-6333-6434-6535-663630373138"  # the characters of a1b2c3d4e5f60718
    assert joined(sampled("a1b2c3d4e5f60718", "b"), workers(uuid)) == [(0, "a1b2c3d4e5f60718", UUID)]


def test_without_uuids_the_order_decides_where_the_host_has_as_many_gpus_as_ranks():
    devices = ["z", "a", "m"]  # by PCI address
    assert joined(sampled(*devices), workers("", "", "")) == [
        (n, each, ORDER) for n, each in enumerate(devices)
    ]


@pytest.mark.parametrize(
    ("counters", "ranks"),
    [
        (sampled("a", "b", "c"), workers("", "")),  # a GPU too many: which two?
        (sampled("a", "b", pci=False), workers("", "")),  # in which order?
        (sampled("a", "b"), workers("c", "")),  # one names its GPU, and it was not sampled
        (sampled("a", "b"), workers("", "").with_columns(gpu_name=pl.lit(""))),  # a job without GPUs
        (sampled("a", "b"), workers("", "").with_columns(local_rank=pl.lit(-1, pl.Int32))),
    ],
)
def test_where_nothing_identifies_gpus_no_rank_has_one(counters, ranks):
    assert joined(counters, ranks) == []


def test_no_samples_and_no_ranks_are_no_trouble():
    assert joined(COUNTERS.empty(), workers("a")) == []
    assert joined(sampled("a"), WORKERS.empty()) == []


def test_addresses_and_uuids_are_read_as_they_are_written():
    assert pci_number("0000:c1:00.0") == pci_number("C1:00.0") == pci_number("00000000:c1:00.0") == 0xC1 << 8
    assert pci_number("0001:02:1f.3") == 1 << 16 | 2 << 8 | 0x1F << 3 | 3
    assert (pci_number(""), pci_number("eth0")) == (-1, -1)
    assert bare_uuid("MIG-8C5") == bare_uuid("GPU-8c5") == bare_uuid("8c5") == "8c5"
