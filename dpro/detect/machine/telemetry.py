"""Telemetry of a job: which of the sampled GPUs belong to its ranks, and which values became worse.

Reads tables `counters` and `workers`. Returns a row per rank and GPU, the levels of counters in a stretch of
time, and what became worse from one stretch to another, once per kind of change. Leaves out GPUs of other
jobs on the host. Does not infer causes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import polars as pl

from dpro.detect.observations import Observation, observe

SERIES = ["rank", "host", "device", "counter"]
_NS_PER_S = 1e9


class TimeRange(NamedTuple):
    """A stretch of time, in ns on the host's clock."""

    begin_ns: int
    end_ns: int


class CounterRule(NamedTuple):
    """Rule for when a change of a counter is worth a line.

    Attributes:
        what: what the counter counts, in words.
        per_second: whether the counter is cumulative, so that its growth counts.
        worse: +1 where more is worse, -1 where less is.
        min_change: least change, in the counter's own unit (per second where it is cumulative).
    """

    what: str
    per_second: bool
    worse: int
    min_change: float
    unit: str = ""


# Counters of links of GPUs and ports of hosts.
LINKS_OF_GPUS = (
    "nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries", "nvlink_link_recoveries", "nvlink_rx_errors",
    "nvlink_symbol_errors", "nvlink_links", "pcie_replays", "pcie_correctable_errors", "pcie_fatal_errors",
    "pcie_generation", "pcie_lanes",
)  # fmt: skip
LINKS_OF_PORTS = (
    "rate_gbps", "up", "symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors",
    "rx_crc_errors", "rx_errors", "tx_errors", "packet_seq_err", "out_of_sequence", "local_ack_timeout_err",
)  # fmt: skip

RULES = {
    "sm_clock_mhz": CounterRule("SM clock", False, -1, 50, "MHz"),
    "memory_clock_mhz": CounterRule("memory clock", False, -1, 50, "MHz"),
    "temperature_c": CounterRule("temperature", False, +1, 8, "°C"),
    "throttled_power_s": CounterRule("clocks held down by the power cap", True, +1, 0.2, "of the time"),
    "throttled_thermal_s": CounterRule("clocks held down by heat", True, +1, 0.02, "of the time"),
    "throttled_memory_thermal_s": CounterRule("clocks held down by heat", True, +1, 0.02, "of the time"),
    "throttled_regulator_thermal_s": CounterRule("clocks held down by heat", True, +1, 0.02, "of the time"),
    "throttled_board_limit_s": CounterRule(
        "clocks held down by a limit of the board", True, +1, 0.02, "of the time"
    ),
    "throttled_reliability_s": CounterRule(
        "clocks held down by the voltage's limit", True, +1, 0.2, "of the time"
    ),
    "throttled_hardware_s": CounterRule("clocks held down by the hardware", True, +1, 0.02, "of the time"),
    "clocks_sw_power_cap": CounterRule("clocks held down by the power cap", False, +1, 0.2, "of the time"),
    "clocks_hw_slowdown": CounterRule("clocks held down by the hardware", False, +1, 0.02, "of the time"),
    "clocks_sw_thermal_slowdown": CounterRule("clocks held down by heat", False, +1, 0.02, "of the time"),
    "clocks_hw_thermal_slowdown": CounterRule("clocks held down by heat", False, +1, 0.02, "of the time"),
    "clocks_hw_power_brake": CounterRule(
        "clocks held down by the power brake", False, +1, 0.02, "of the time"
    ),
    "ecc_corrected": CounterRule("corrected ECC errors", True, +1, 0.01, "per second"),
    "ecc_uncorrected": CounterRule("uncorrected ECC errors", True, +1, 1e-9, "per second"),
    "pcie_replays": CounterRule("PCIe replays", True, +1, 0.1, "per second"),
    "pcie_generation": CounterRule("PCIe generation", False, -1, 0.5),
    "pcie_lanes": CounterRule("PCIe lanes", False, -1, 0.5),
    "nvlink_replays": CounterRule("NVLink replays", True, +1, 0.1, "per second"),
    "nvlink_crc_errors": CounterRule("NVLink CRC errors", True, +1, 0.1, "per second"),
    "pcie_correctable_errors": CounterRule("corrected PCIe errors", True, +1, 1, "per second"),
    "pcie_fatal_errors": CounterRule("fatal PCIe errors", True, +1, 1e-9, "per second"),
    "nvlink_recoveries": CounterRule("NVLink recoveries", True, +1, 0.01, "per second"),
    "nvlink_link_recoveries": CounterRule("NVLink recoveries", True, +1, 0.01, "per second"),
    "nvlink_rx_errors": CounterRule("NVLink receive errors", True, +1, 0.1, "per second"),
    "nvlink_symbol_errors": CounterRule("NVLink symbol errors", True, +1, 1, "per second"),
    "nvlink_links": CounterRule("NVLinks in use", False, -1, 0.5),
    "rate_gbps": CounterRule("rate of the port", False, -1, 1, "Gbit/s"),
    "symbol_error": CounterRule("symbol errors", True, +1, 0.1, "per second"),
    "link_downed": CounterRule("times the link was down", True, +1, 1e-9, "per second"),
    "link_error_recovery": CounterRule("recoveries of the port's link", True, +1, 0.01, "per second"),
    "port_rcv_errors": CounterRule("packets received with errors", True, +1, 0.1, "per second"),
    "packet_seq_err": CounterRule("packets out of sequence", True, +1, 10, "per second"),
    "out_of_sequence": CounterRule("packets out of sequence", True, +1, 10, "per second"),
    "local_ack_timeout_err": CounterRule("acknowledgements that never came", True, +1, 0.1, "per second"),
    "rx_errors": CounterRule("frames received with errors", True, +1, 0.1, "per second"),
    "tx_errors": CounterRule("frames that could not be sent", True, +1, 0.1, "per second"),
    "up": CounterRule("share of the time that the port is up", False, -1, 0.02),
    "rx_crc_errors": CounterRule("frames with a wrong checksum", True, +1, 0.01, "per second"),
    "tcp_retransmitted_segments": CounterRule("retransmitted TCP segments", True, +1, 5, "per second"),
    "load_1m": CounterRule("load", False, +1, 2),
    "pressure_cpu_some_s": CounterRule(
        "time in which processes wait for a core", True, +1, 0.1, "s per second"
    ),
    "pressure_io_some_s": CounterRule(
        "time in which processes wait for a disk", True, +1, 0.1, "s per second"
    ),
    "pressure_memory_some_s": CounterRule(
        "time in which processes wait for memory", True, +1, 0.02, "s per second"
    ),
    "cgroup_throttled_s": CounterRule(
        "time without CPU by the cgroup's limit", True, +1, 0.02, "s per second"
    ),
    "cpu_steal_s": CounterRule("CPU time that the hypervisor took", True, +1, 0.05, "s per second"),
    "swapped_in_pages": CounterRule("pages swapped in", True, +1, 10, "per second"),
    "major_faults": CounterRule("page faults from disk", True, +1, 10, "per second"),
    "main_thread_runqueue_s": CounterRule(
        "time the main thread waits for a core", True, +1, 0.05, "s per second"
    ),
}


def changes(
    counters: pl.DataFrame, workers: pl.DataFrame, before: TimeRange, after: TimeRange
) -> dict[str, Observation]:
    """Return what became worse from one stretch to another, the largest changes first.

    Args:
        counters: table `counters`; a value holds until the next one of its series.

    Returns:
        `what` of a rule -> its change, with the device, rank or host on which it is largest.
    """
    samples = counters.filter(pl.col("counter").is_in(list(RULES))).select(*SERIES, "time_ns", "value")
    owned = gpus_of_ranks(counters, workers)
    others = sampled_gpus(counters).join(owned, on=["host", "device"], how="anti")
    samples = samples.join(others, on=["host", "device"], how="anti")
    levels = levels_in(samples, before).join(levels_in(samples, after), on=SERIES, suffix="_after")
    worse = []
    for row in levels.iter_rows(named=True):
        rule = RULES[row["counter"]]
        kind = "growth" if rule.per_second else "mean"
        old, new = row[kind], row[f"{kind}_after"]
        times = rule.worse * (new - old) / rule.min_change
        if times >= 1:
            worse.append((times, rule, old, new, row))
    worse.sort(key=lambda change: (-change[0], change[1].what, change[2]))
    largest: dict[str, Observation] = {}
    for _, rule, old, new, row in worse:
        if rule.what not in largest:
            largest[rule.what] = _observe_place(row, owned).then(
                ": {what} {before:.3g} before, {after:.3g} {unit} since",
                counter=row["counter"], what=rule.what, before=old, after=new, unit=rule.unit,
            )  # fmt: skip
    return largest


def _observe_place(row: dict[str, Any], owned: pl.DataFrame) -> Observation:
    """Return where a counter became worse: `GPU g1 on n1 (rank 3)`, `rank 3`, `host n1`."""
    kind, host, device = "counter-worse", row["host"], row["device"]
    ranks = owned.filter(host=host, device=device)["rank"].to_list()
    if ranks and device:
        gpu = f"GPU {{device}} on {{host}} (rank {', '.join(map(str, ranks))})"
        return observe(kind, gpu, device=device, host=host, ranks=ranks)
    if device:
        return observe(kind, "{device} on {host}", device=device, host=host)
    if row["rank"] != -1:
        return observe(kind, "rank {rank}", rank=row["rank"])
    return observe(kind, "host {host}", host=host)


def levels_in(rows: pl.DataFrame, stretch: TimeRange) -> pl.DataFrame:
    """Return, by series, `mean` over the time of a stretch, and `growth` per second, allowing for resets.

    Args:
        rows: of `counters`; a value holds until the next one of its series.
    """
    begin, end = stretch
    until = pl.col("time_ns").shift(-1).over("series").fill_null(end).clip(begin, end)
    held = until - pl.col("time_ns").clip(begin, end)
    grown = pl.col("value").diff().over("series")
    grown = pl.when(grown < 0).then(pl.col("value")).otherwise(grown)
    inside = pl.col("time_ns").is_between(begin, end, closed="right")
    return (
        rows.sort(*SERIES, "time_ns")
        .with_columns(series=pl.struct(SERIES).rle_id())  # faster keys: one number instead of three strings
        .with_columns(held=held, grown=pl.when(inside).then(grown).fill_null(0.0))
        .group_by("series", maintain_order=True)
        .agg(
            pl.col(SERIES).first(),
            mean=(pl.col("value") * pl.col("held")).sum() / pl.col("held").sum(),
            growth=pl.col("grown").sum() / ((end - begin) / _NS_PER_S),
            known=pl.col("held").sum() > 0,
        )
        .filter("known")
        .drop("series", "known")
    )


# Matching sampled GPUs to ranks: on a shared node, most may belong to other jobs. They are matched by uuid,
# or by PCI address where two libraries give a GPU different uuids. If ranks recorded neither, and their host
# has as many GPUs as ranks, the n-th GPU is that of local rank n, and the row says so.

HEARTBEAT = "sampling_us"  # part of every sample of a GPU
PCI = "pci_address"  # the GPU's, as a number: see `pci_number`
UUID, ADDRESS, ORDER = "uuid", "PCI address", "local rank"
SCHEMA = {"rank": pl.Int32(), "host": pl.String(), "device": pl.String(), "by": pl.String()}
_OF_GPUS = (HEARTBEAT, PCI, "xid", "ras", "lost")
_HIP_ID = re.compile("[0-9a-f]{16}")
_ADDRESS = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)


def bare_uuid(uuid: str) -> str:
    """Return a uuid without its prefix: `GPU-8c5…`, `MIG-8c5…` and `8C5…` become `8c5…`."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _of_hip(uuid: str) -> str:
    """Return the id of an AMD GPU, 16 hexadecimal digits; HIP encodes its characters as bytes of a uuid."""
    try:
        text = bytes.fromhex(uuid.replace("-", "")).decode("ascii").lower()
    except ValueError:
        return ""
    return text if _HIP_ID.fullmatch(text) else ""


def pci_number(address: str) -> int:
    """Return `0000:c1:00.0` as domain << 16 | bus << 8 | device << 3 | function; -1 if not an address."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return -1
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return domain << 16 | bus << 8 | device << 3 | function


def sampled_gpus(counters: pl.DataFrame) -> pl.DataFrame:
    """Return the GPUs and GPU instances that were sampled: `host`, `device`, `pci` (-1 unknown), in order."""
    rows = counters.filter(
        (pl.col("rank") < 0) & (pl.col("device") != "") & pl.col("counter").is_in(_OF_GPUS)
    )
    pci = pl.col("value").filter(pl.col("counter") == PCI).last().fill_null(-1).cast(pl.Int64)
    return rows.group_by("host", "device").agg(pci=pci).sort("host", "device")


def gpus_of_ranks(counters: pl.DataFrame, workers: pl.DataFrame) -> pl.DataFrame:
    """Return the GPUs of each rank.

    Returns:
        `rank`, `host`, `device`, `by` (the kind of match: `UUID`, `ADDRESS` or `ORDER`), by rank. A rank on
        an instance of a partitioned GPU has two rows: the instance, for its memory, and the whole GPU, for
            its
        clocks and errors.
    """
    gpus = sampled_gpus(counters)
    rows = []
    for (host,), of_host in (
        workers.filter(pl.col("rank") >= 0).sort("rank").group_by("host", maintain_order=True)
    ):
        here = gpus.filter(host=host)
        rows += [(rank, host, *match) for rank, *match in _of_host(here, of_host)]
    return pl.DataFrame(rows, SCHEMA, orient="row").unique().sort("rank", "device")


def _of_host(gpus: pl.DataFrame, workers: pl.DataFrame) -> Iterator[tuple[int, str, str]]:
    devices = gpus["device"].to_list()
    addresses = {pci: device for device, pci in gpus.select("device", "pci").iter_rows() if pci >= 0}
    has_addresses = "gpu_pci" in workers.columns
    pcis = dict(zip(workers["rank"], workers["gpu_pci"] if has_addresses else pl.Series([], dtype=pl.String)))
    is_known = False
    for rank, uuid in workers.select("rank", "gpu_uuid").iter_rows():
        address = pci_number(pcis.get(rank, ""))
        is_known = is_known or bool(uuid) or address >= 0
        ids = {bare_uuid(uuid), _of_hip(uuid)}
        by_uuid = [device for device in devices if uuid and bare_uuid(device.rpartition("/")[2]) in ids]
        matches = [(device, UUID) for device in by_uuid]
        if not matches and address in addresses:
            matches = [(addresses[address], ADDRESS)]
        for device, by in matches:
            yield rank, device, by
            whole, is_part, _ = device.partition("/")
            if is_part and whole in devices:
                yield rank, whole, by
    if not is_known:
        # Drivers count GPUs by PCI address: the n-th is that of local rank n, if there is one for each.
        whole_gpus = gpus.filter(~pl.col("device").str.contains("/", literal=True)).sort("pci", "device")
        local = dict(workers.filter(pl.col("gpu_name") != "").select("local_rank", "rank").iter_rows())
        computes = sorted(local) == list(range(workers.height)) and whole_gpus.height == workers.height
        if computes and whole_gpus["pci"].n_unique() == whole_gpus.height:
            for place, nth in enumerate(whole_gpus["device"]):
                yield local[place], nth, ORDER
