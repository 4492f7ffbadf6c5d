"""Telemetry of two stretches of one job compared: which values became worse.

In: table `counters`, and which GPUs are the job's. Out: a line per kind of change for the worse. No cause is
inferred: what a change explains is for its reader to decide. GPUs of other jobs on the host are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from dpro.detect.machine.devices import gpus_of_ranks, sampled_gpus

SERIES = ["rank", "host", "device", "counter"]
_NS_PER_S = 1e9


class TimeRange(NamedTuple):
    """A stretch of time, ns on the host's clock."""

    begin_ns: int
    end_ns: int


class CounterRule(NamedTuple):
    """When a change of a counter is worth a line.

    Attributes:
        what: the counter, in words.
        per_second: whether it only grows, so that its growth is what counts.
        worse: +1 where more is worse, -1 where less is.
        min_change: by how much it must have changed, in its own unit (per second where it grows).
        unit: of what is printed.
    """

    what: str
    per_second: bool
    worse: int
    min_change: float
    unit: str = ""


# What links of GPUs and ports of hosts count, by their counters.
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
) -> dict[str, str]:
    """Return what became worse from one stretch to another, the largest changes first.

    Args:
        counters: table `counters`; a value holds until the next one of its series.
        workers: table `workers`, for which GPUs are the job's.

    Returns:
        Per kind of change a line, with the device, rank or host on which it is largest.
    """
    known = counters.filter(pl.col("counter").is_in(list(RULES))).select(*SERIES, "time_ns", "value")
    owned = gpus_of_ranks(counters, workers)
    others = sampled_gpus(counters).join(owned, on=["host", "device"], how="anti")
    known = known.join(others, on=["host", "device"], how="anti")
    levels = levels_in(known, before).join(levels_in(known, after), on=SERIES, suffix="_after")
    worse = []
    for row in levels.iter_rows(named=True):
        rule = RULES[row["counter"]]
        kind = "growth" if rule.per_second else "mean"
        old, new = row[kind], row[f"{kind}_after"]
        times = rule.worse * (new - old) / rule.min_change
        if times >= 1:
            worse.append(
                (times, rule, row, f"{rule.what} {old:.3g} before, {new:.3g} {rule.unit} since".rstrip())
            )
    worse.sort(key=lambda each: (-each[0], each[3]))
    lines: dict[str, str] = {}
    for _, rule, row, line in worse:
        lines.setdefault(rule.what, f"{_where(row, owned)}: {line}")
    return lines


def _where(row: dict[str, object], owned: pl.DataFrame) -> str:
    ranks = owned.filter(host=row["host"], device=row["device"])["rank"].to_list()
    if row["device"]:
        of = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
        return f"{'GPU ' if ranks else ''}{row['device']} on {row['host']}{of}"
    return f"rank {row['rank']}" if row["rank"] != -1 else f"host {row['host']}"


def levels_in(rows: pl.DataFrame, stretch: TimeRange) -> pl.DataFrame:
    """Return, by series, `mean` over the time of a stretch, and `growth` per second, through resets.

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
        .with_columns(series=pl.struct(SERIES).rle_id())  # one number in place of three texts
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
