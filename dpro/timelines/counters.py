"""Sampled telemetry on the clock of the timeline.

Takes tables `counters` and `workers`; returns one row per value of each counter that changed. Counters that
only grow become rates. Counters of steps are left out, since viewers show the steps themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import polars as pl

from dpro.detect.machine.telemetry import SERIES, gpus_of_ranks, sampled_gpus
from dpro.units import NS_PER_S

_OF_STEPS = ("step_", "data_wait_ns", "gc_pause_ns", "loader_start_ns")
_INTEREST = ("clock", "power", "temperature", "utilization", "tx_", "rx_", "load", "main_thread", "memory")


def sampled_counters(
    counters: pl.DataFrame, workers: pl.DataFrame, ahead: Mapping[str, int], ranks: Collection[int] = ()
) -> pl.DataFrame:
    """Return the samples of counters that changed, without GPUs that no chosen rank uses.

    Args:
        workers: table `workers`, which links ranks to GPUs.
        ahead: lead of each host's clock over the timeline's, in ns; 0 for missing hosts.
        ranks: ranks whose counters to keep; empty for all. Counters of hosts are always kept.

    Returns:
        `counter` (with `/s` for a growth per second), `label` and `unit` (of `Quantity`), `series` (host,
        device, rank), `host`, `time_ns` (on the timeline's clock; for a rate, the begin of its interval),
        `value` (in `unit`). Sorted by interest of the counter, then by series and time.
    """
    owned = gpus_of_ranks(counters, workers)
    chosen = owned.filter(pl.col("rank").is_in(ranks)) if ranks else owned
    if owned.height:  # otherwise no GPU is known to belong to a rank
        others = sampled_gpus(counters).join(chosen, on=["host", "device"], how="anti")
        counters = counters.join(others, on=["host", "device"], how="anti")
    if ranks:
        counters = counters.filter((pl.col("rank") < 0) | pl.col("rank").is_in(ranks))
    sampled = counters.filter(
        ~pl.any_horizontal(pl.col("counter").str.starts_with(prefix) for prefix in _OF_STEPS)
    )
    sampled = sampled.filter(pl.col("value").n_unique().over(SERIES) > 1).sort(*SERIES, "time_ns")
    users_of = chosen.group_by("host", "device").agg(
        used_by=pl.col("rank").cast(pl.String).sort().str.join(", ")
    )
    sampled = sampled.join(_quantities(sampled), on="counter", how="left", maintain_order="left")
    elapsed, growth = (pl.col(column).diff().over(SERIES) for column in ("time_ns", "value"))
    since = pl.col("time_ns") - pl.when("grows").then(elapsed.fill_null(0)).otherwise(0)
    rate = pl.when(growth >= 0).then(growth / (elapsed / NS_PER_S))  # null after a reset of the counter
    shown = sampled.join(users_of, on=["host", "device"], how="left", maintain_order="left").select(
        counter=pl.when("grows").then(pl.format("{}/s", "counter")).otherwise("counter"),
        label=pl.col("label"),
        unit=pl.col("unit"),
        series=_series(),
        host=pl.col("host"),
        time_ns=since - pl.col("host").replace_strict(dict(ahead), default=0, return_dtype=pl.Int64),
        value=pl.when("grows").then(rate).otherwise("value") * pl.col("scale"),
    )
    place = pl.min_horizontal(
        pl.when(pl.col("counter").str.contains(word, literal=True)).then(pl.lit(place))
        for place, word in enumerate(_INTEREST)
    )
    interest = place.fill_null(len(_INTEREST))
    return shown.drop_nulls("value").sort(interest, "counter", "series", "time_ns")


def _quantities(sampled: pl.DataFrame) -> pl.DataFrame:
    """Return `counter`, `label`, `unit`, `grows` and `scale` of the sampled counters."""
    names = sampled["counter"].unique().sort().to_list()
    rows = [
        (name, shown.label, shown.unit, shown.kind == RATE, shown.scale)
        for name in names
        for shown in [quantity_of(name)]
    ]
    schema = {
        "counter": pl.String,
        "label": pl.String,
        "unit": pl.String,
        "grows": pl.Boolean,
        "scale": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _series() -> pl.Expr:
    """Return an expression: host, device and rank as one text, a GPU by its ranks in place of its UUID."""
    rank = (
        pl.when(pl.col("rank") >= 0)
        .then(pl.format("rank {}", "rank"))
        .when(pl.col("used_by").is_not_null())
        .then(pl.format("(rank {})", "used_by"))
        .otherwise(pl.lit(""))
    )
    device, used = pl.col("device"), pl.col("used_by").is_not_null()
    uuid = device.str.extract(r"^(?:GPU-|MIG-)?([0-9a-f]{8})-[0-9a-f]{4}-")
    short = pl.when(used).then(pl.lit("GPU")).otherwise(pl.format("GPU {}", uuid))
    words = pl.concat_list(pl.col("host"), pl.when(uuid.is_not_null()).then(short).otherwise(device), rank)
    return words.list.eval(pl.element().filter(pl.element() != "")).list.join(" ")


def within(values: pl.DataFrame, begin_ns: int, end_ns: int) -> pl.DataFrame:
    """Return the values within a time interval, with the last earlier value of each series at its begin.

    Args:
        values: frame of `sampled_counters`; a value lasts until the next one of its counter and series.
        begin_ns, end_ns: the interval, ns.
    """
    key = ["counter", "series"]
    earlier = (pl.col("time_ns") < begin_ns).sum().over(key).cast(pl.Int64)
    place = pl.int_range(pl.len()).over(key)
    kept = values.filter((pl.col("time_ns") < end_ns) & (place >= earlier - 1))
    return kept.with_columns(pl.col("time_ns").clip(begin_ns))


# Labels and units of sampled counters, for people.

LEVEL, RATE = "level", "rate"
HELD, MOVED = "bytes", "B/s"  # units with larger multiples
_LARGER = {  # unit -> its multiples, each 1,000 times the previous one
    HELD: ("bytes", "kB", "MB", "GB", "TB"),
    MOVED: ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"),
}
_GROWS = (
    "_s",
    "_bytes",
    "_packets",
    "_errors",
    "_segments",
    "_pages",
    "_faults",
    "_corrected",
    "_uncorrected",
)
_LEVELS = ("memory", "disk", "swap_used", "cgroup_memory")  # bytes in use, not bytes moved


class Quantity(NamedTuple):
    """Display of a counter.

    Attributes:
        label: short label; a figure on a phone has room for 46 characters, unit included.
        unit: unit of the shown values; empty for numbers without one.
        kind: `level` or `rate`.
        scale: factor that converts a value, or its growth per second, to `unit`.
    """

    label: str
    unit: str = ""
    kind: str = LEVEL
    scale: float = 1.0

    @property
    def title(self) -> str:
        """The label with the unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label


def _share(label: str, kind: str = RATE) -> Quantity:
    """Return the display of seconds per second, or of 0 and 1, in percent of the time."""
    return Quantity(label, "% of time", kind, 100.0)


def _cores(label: str) -> Quantity:
    """Return the display of CPU seconds per second."""
    return Quantity(label, "cores busy", RATE)


def _per_second(label: str) -> Quantity:
    return Quantity(label, "per second", RATE)


def _held(label: str) -> Quantity:
    return Quantity(label, HELD)


def _moved(label: str) -> Quantity:
    return Quantity(label, MOVED, RATE)


QUANTITIES = {
    # GPUs
    "sm_clock_mhz": Quantity("SM clock", "MHz"),
    "sm_clock_max_mhz": Quantity("highest SM clock", "MHz"),
    "memory_clock_mhz": Quantity("memory clock", "MHz"),
    "power_w": Quantity("power", "W"),
    "power_limit_w": Quantity("power cap", "W"),
    "energy_j": Quantity("mean power between samples", "W", RATE),
    "temperature_c": Quantity("temperature", "°C"),
    "memory_temperature_c": Quantity("memory temperature", "°C"),
    "hotspot_temperature_c": Quantity("hotspot temperature", "°C"),
    "utilization_pct": Quantity("GPU busy", "% of time"),
    "memory_utilization_pct": Quantity("GPU memory being read or written", "% of time"),
    "memory_used_bytes": _held("GPU memory in use"),
    "memory_allocated_bytes": _held("memory allocated by PyTorch"),
    "memory_reserved_bytes": _held("memory reserved by PyTorch"),
    "throttled_power_s": _share("clocks held down by the power cap"),
    "throttled_thermal_s": _share("clocks held down by heat"),
    "throttled_memory_thermal_s": _share("clocks held down by memory heat"),
    "throttled_regulator_thermal_s": _share("clocks held down by regulator heat"),
    "throttled_sync_boost_s": _share("clocks held down by sync boost"),
    "throttled_board_limit_s": _share("clocks held down by board limit"),
    "throttled_reliability_s": _share("clocks held down by voltage limit"),
    "throttled_hardware_s": _share("clocks held down by the hardware"),
    "clocks_gpu_idle": Quantity("clocks down: the GPU is idle"),
    "clocks_application_setting": Quantity("clocks set by an application"),
    "clocks_display_setting": Quantity("clocks set by the display"),
    "clocks_sync_boost": Quantity("clocks held down by sync boost"),
    "clocks_sw_power_cap": Quantity("clocks held down by the power cap"),
    "clocks_hw_slowdown": Quantity("clocks held down by the hardware"),
    "clocks_sw_thermal_slowdown": Quantity("clocks held down by heat (driver)"),
    "clocks_hw_thermal_slowdown": Quantity("clocks held down by heat (hardware)"),
    "clocks_hw_power_brake": Quantity("clocks held down by the power brake"),
    "nvlink_tx_bytes": _moved("sent over NVLink"),
    "nvlink_rx_bytes": _moved("received over NVLink"),
    "xgmi_tx_bytes": _moved("sent over xGMI"),
    "xgmi_rx_bytes": _moved("received over xGMI"),
    "pcie_tx_bytes": _moved("sent over PCIe"),
    "pcie_rx_bytes": _moved("received over PCIe"),
    "pcie_generation": Quantity("PCIe generation"),
    "pcie_lanes": Quantity("PCIe lanes"),
    "pcie_replays": _per_second("PCIe replays"),
    "nvlink_replays": _per_second("NVLink replays"),
    "nvlink_recoveries": _per_second("NVLink recoveries"),
    "nvlink_crc_errors": _per_second("NVLink CRC errors"),
    "ecc_corrected": _per_second("corrected ECC errors"),
    "ecc_uncorrected": _per_second("uncorrected ECC errors"),
    "sampling_us": Quantity("time to sample the GPU", "us"),
    # Network ports
    "tx_bytes": _moved("sent"),
    "rx_bytes": _moved("received"),
    "tx_packets": _per_second("packets sent"),
    "rx_packets": _per_second("packets received"),
    "rate_gbps": Quantity("rate of the port", "Gbit/s"),
    "up": Quantity("port is up"),
    "tcp_retransmitted_segments": _per_second("retransmitted TCP segments"),
    "tcp_sent_bytes": _moved("sent over TCP"),
    "tcp_sent_segments": _per_second("TCP segments sent"),
    "tcp_rtt_us": Quantity("TCP round trip", "us"),
    "tcp_delivered_gbps": Quantity("TCP delivers", "GB/s"),
    # Hosts and processes
    "cpu_user_s": _cores("CPU, user code"),
    "cpu_nice_s": _cores("CPU, niced processes"),
    "cpu_system_s": _cores("CPU, kernel"),
    "cpu_irq_s": _cores("CPU, interrupts"),
    "cpu_softirq_s": _cores("CPU, soft interrupts"),
    "cpu_steal_s": Quantity("CPU taken by the hypervisor", "cores", RATE),
    "cpu_idle_s": Quantity("CPU idle", "cores", RATE),
    "cpu_iowait_s": Quantity("CPU idle, waiting for disks", "cores", RATE),
    "main_thread_cpu_s": _share("main thread on a core"),
    "main_thread_runqueue_s": _share("main thread waiting for a core"),
    "main_thread_switches_voluntary": _per_second("main thread, voluntary switches"),
    "main_thread_switches_nonvoluntary": _per_second("main thread, forced switches"),
    "telemetry_cpu_s": _cores("CPU of the sampler"),
    "cpus": Quantity("CPU cores"),
    "load_1m": Quantity("load, mean of a minute"),
    "runnable_threads": Quantity("runnable threads"),
    "threads": Quantity("threads of the process"),
    "major_faults": _per_second("major page faults"),
    "memory_bytes": _held("memory of the process"),
    "memory_available_bytes": _held("memory available"),
    "memory_total_bytes": _held("memory of the host or GPU"),
    "swap_used_bytes": _held("swap in use"),
    "disk_free_bytes": _held("disk free"),
    "swapped_in_pages": _per_second("pages swapped in"),
    "swapped_out_pages": _per_second("pages swapped out"),
    "oom_kills": Quantity("processes killed for lack of memory"),
    "pressure_cpu_some_s": _share("some processes wait for a core"),
    "pressure_cpu_full_s": _share("all processes wait for a core"),
    "pressure_io_some_s": _share("some processes wait for a disk"),
    "pressure_io_full_s": _share("all processes wait for a disk"),
    "pressure_memory_some_s": _share("some processes wait for memory"),
    "pressure_memory_full_s": _share("all processes wait for memory"),
    "cgroup_cpu_s": _cores("CPU of the cgroup"),
    "cgroup_throttled_s": _share("no CPU: cgroup limit used up"),
    "cgroup_throttled_periods": _per_second("cgroup periods without CPU"),
    "cgroup_cpu_limit_cores": Quantity("CPU limit of the cgroup", "cores"),
    "cgroup_memory_bytes": _held("memory of the cgroup"),
    "cgroup_memory_limit_bytes": _held("memory limit of the cgroup"),
}


def quantity_of(counter: str) -> Quantity:
    """Return the display of a counter; by its own name, with `/s` if it grows, if `QUANTITIES` lacks it."""
    quantity = QUANTITIES.get(counter)
    if quantity is not None:
        return quantity
    grows = counter.endswith(_GROWS) and not counter.startswith(_LEVELS)
    return Quantity(f"{counter}/s", "", RATE) if grows else Quantity(counter)


def readable_unit(largest: float, unit: str) -> tuple[float, str]:
    """Choose a readable unit for values: a larger multiple for bytes, `unit` itself for others.

    Args:
        largest: largest value, in `unit`.

    Returns:
        The chosen unit as a multiple of `unit`, and its name.
    """
    if unit not in _LARGER:
        return 1.0, unit
    names, power = _LARGER[unit], 0
    while power + 1 < len(names) and abs(largest) >= 1000.0 ** (power + 1):
        power += 1
    return 1000.0**power, names[power]
