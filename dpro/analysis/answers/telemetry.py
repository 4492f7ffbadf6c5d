"""What telemetry sampled beside a job, in short, and what was wrong with which GPU.

In: `counters` of a run. Out: a `TelemetryDocument`, and lines of text. It judges nothing: clocks that a power
cap holds down, say, are normal for many jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import polars as pl

from dpro.detect.machine.telemetry import ORDER, PCI, gpus_of_ranks
from dpro.documents import DocumentPart
from dpro.schema import COUNTERS
from dpro.units import format_bytes

_HEARTBEAT = "telemetry_cpu_s"  # of every sample of a node there is a row
_GPU_HEARTBEAT = "sampling_us"
_SERIES = ["rank", "host", "device", "counter"]
_ALLOCATED = "memory_allocated_bytes"
_REASON = "clocks_"
_HARMLESS = ("clocks_gpu_idle", "clocks_application_setting", "clocks_display_setting")
_ERRORS = {
    "ecc_corrected": "corrected ECC errors",
    "ecc_uncorrected": "uncorrected ECC errors",
    "pcie_replays": "PCIe replays",
    "nvlink_replays": "NVLink replays",
    "nvlink_crc_errors": "NVLink CRC errors",
    "nvlink_recoveries": "NVLink recoveries",
}


class NetworkPort(DocumentPart, frozen=True):
    """A network port.

    Attributes:
        host: of the port.
        device: its name.
    """

    host: str
    device: str


class MemoryPeak(DocumentPart, frozen=True):
    """The most memory that a rank has had allocated.

    Attributes:
        rank: the rank.
        device: the GPU; empty for the host's memory.
        peak_bytes: how much.
    """

    rank: int
    device: str
    peak_bytes: int


class GpuDocument(DocumentPart, frozen=True):
    """What was sampled of a GPU, and what was wrong with it.

    Attributes:
        host: where it is.
        gpu: its uuid.
        ranks: ranks that use it.
        ranks_by: what those were inferred from; empty without any.
        samples: how often it was sampled.
        clocks_held_s: for how many seconds each reason held its clocks down.
        xids: how often each XID was reported.
        errors: how many errors of each kind were counted meanwhile.
        remapped_rows_pending: whether rows of its memory are to be remapped at the next reset.
        lost: whether it was lost.
    """

    host: str
    gpu: str
    ranks: list[int]
    ranks_by: str
    samples: int
    clocks_held_s: dict[str, float]
    xids: dict[str, int]
    errors: dict[str, int]
    remapped_rows_pending: bool
    lost: bool


class TelemetryDocument(DocumentPart, frozen=True):
    """What was sampled beside the job.

    Attributes:
        hosts: that were sampled.
        samples: of all hosts.
        ports: network ports that were sampled.
        ranks: ranks of which the host's memory was sampled.
        gpus: that were sampled.
        memory_peaks: of allocators, in deep windows.
    """

    hosts: list[str]
    samples: int
    ports: list[NetworkPort]
    ranks: list[int]
    gpus: list[GpuDocument]
    memory_peaks: list[MemoryPeak]


def summarize(parts: Iterable[pl.DataFrame], workers: pl.DataFrame) -> TelemetryDocument:
    """What was sampled beside the job; of GPUs, also what was wrong.

    Args:
        parts: `counters`, part by part: of a long job there are many.
    """
    summarized = pl.col("counter").str.starts_with(_REASON) | pl.col("counter").is_in(
        [*_ERRORS, "xid", "ras", "lost", "remapped_rows_pending", PCI, _GPU_HEARTBEAT, _HEARTBEAT]
    )
    kept = [COUNTERS.empty()]
    seen = [COUNTERS.empty().select(_SERIES)]
    allocated = [COUNTERS.empty().select("rank", "device", "value")]
    for part in parts:
        in_use = part.filter(counter=_ALLOCATED)
        allocated.append(in_use.group_by("rank", "device").agg(pl.col("value").max()))
        kept.append(part.filter((pl.col("rank") < 0) & summarized))
        seen.append(part.select(_SERIES).unique())
    series = pl.concat(seen).unique().sort(_SERIES)
    rows = pl.concat(kept)
    moves = pl.col("counter").is_in(["tx_bytes", "rx_bytes"])
    is_rank = (pl.col("rank") >= 0) & (pl.col("counter") == "memory_bytes")
    ports = series.filter(moves).select("host", "device").unique().sort("host", "device")
    peaks = (
        pl.concat(allocated)
        .group_by("rank", "device")
        .agg(peak_bytes=pl.col("value").max().cast(pl.Int64))
        .sort("rank", "device")
    )
    return TelemetryDocument(
        hosts=series.filter(counter=_HEARTBEAT)["host"].to_list(),
        samples=rows.filter(counter=_HEARTBEAT).height,
        ports=[NetworkPort(*row) for row in ports.iter_rows()],
        ranks=series.filter(is_rank)["rank"].unique().sort().to_list(),
        gpus=list(_gpus(rows, gpus_of_ranks(rows, workers))),
        memory_peaks=[MemoryPeak(*row) for row in peaks.iter_rows()],
    )


def _gpus(rows: pl.DataFrame, owned: pl.DataFrame) -> Iterator[GpuDocument]:
    """One summary per GPU, in the order of hosts and uuids.

    Args:
        rows: of `counters`.
        owned: as `gpus_of_ranks` gives them.
    """
    sampled = rows.filter(pl.col("device") != "")
    for host, device in sampled.select("host", "device").unique().sort("host", "device").iter_rows():
        of_gpu = rows.filter(host=host, device=device).sort("time_ns")
        xids = of_gpu.filter(counter="xid")["value"].cast(pl.Int64).value_counts().sort("value")
        owners = owned.filter(host=host, device=device)
        yield GpuDocument(
            host=host,
            gpu=device,
            ranks=owners["rank"].to_list(),
            ranks_by=next(iter(owners["by"]), ""),
            samples=of_gpu.filter(counter=_GPU_HEARTBEAT).height,
            clocks_held_s=_seconds_held(of_gpu),
            xids={str(xid): count for xid, count in xids.iter_rows()},
            errors={name: grown for name in _ERRORS if (grown := _growth(of_gpu, name))},
            remapped_rows_pending=bool(of_gpu.filter(counter="remapped_rows_pending")["value"].max()),
            lost=of_gpu.filter(counter="lost").height > 0,
        )


def _seconds_held(rows: pl.DataFrame) -> dict[str, float]:
    """For how long each reason held the clocks of a GPU down: a value holds until the next, or the end."""
    end = rows["time_ns"].max()
    reasons = rows.filter(
        pl.col("counter").str.starts_with(_REASON) & ~pl.col("counter").is_in(_HARMLESS)
    ).with_columns(until_ns=pl.col("time_ns").shift(-1).over("counter").fill_null(end))
    held = reasons.group_by("counter").agg(
        held_s=((pl.col("until_ns") - pl.col("time_ns")) * pl.col("value")).sum() / 1e9,
        seen=pl.col("value").max(),
    )
    seen = held.filter(pl.col("seen") > 0).sort("counter")
    return {name.removeprefix(_REASON): round(held_s, 3) for name, held_s, _ in seen.iter_rows()}


def _growth(rows: pl.DataFrame, counter: str) -> int:
    """By how much a count has grown while it was watched, through resets."""
    values = rows.filter(counter=counter)["value"]
    steps = values.diff().drop_nulls()
    return int(sum(step if step >= 0 else value for step, value in zip(steps, values[1:])))


def in_words(summary: TelemetryDocument) -> list[str]:
    """The same for people: what was sampled, GPUs in trouble, and which ranks use most memory."""
    if not summary.samples:
        return list(_peaks(summary.memory_peaks))
    counts = {
        "sample": summary.samples,
        "host": len(summary.hosts),
        "GPU": len(summary.gpus),
        "network port": len(summary.ports),
        "rank": len(summary.ranks),
    }
    samples, *what = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
    lines = [f"{samples} of {', '.join(what)}"]
    others = sum(not gpu.ranks for gpu in summary.gpus)
    if others and others < len(summary.gpus):
        lines.append(f"{others} of the GPUs {'is' if others == 1 else 'are'} of no rank of this job")
    if any(gpu.ranks_by == ORDER for gpu in summary.gpus):
        lines.append(
            "which rank has which GPU is known by their order alone: no rank recorded its GPU's uuid"
        )
    for gpu in summary.gpus:
        troubles = list(_troubles(gpu))
        if troubles:
            ranks = f"rank {', '.join(map(str, gpu.ranks))}" if gpu.ranks else "no rank of this job"
            lines.append(f"GPU {gpu.gpu} on {gpu.host} ({ranks}): {'; '.join(troubles)}")
    return [*lines, *_peaks(summary.memory_peaks)]


def _peaks(peaks: Sequence[MemoryPeak]) -> Iterator[str]:
    """The largest and the smallest peak of the ranks, on GPUs and on CPUs."""
    for where, peaks_there in (
        ("GPUs", [peak for peak in peaks if peak.device]),
        ("CPUs", [peak for peak in peaks if not peak.device]),
    ):
        if peaks_there:
            least, most = (chosen(peaks_there, key=lambda peak: peak.peak_bytes) for chosen in (min, max))
            yield (
                f"memory allocated on {where} in deep windows: at most {format_bytes(most.peak_bytes)} "
                f"(rank {most.rank}), at least {format_bytes(least.peak_bytes)} (rank {least.rank})"
            )


def _troubles(gpu: GpuDocument) -> Iterator[str]:
    if gpu.lost:
        yield "lost"
    for xid, count in gpu.xids.items():
        yield f"XID {xid}" + (f" {count} times" if count > 1 else "")
    for name, count in gpu.errors.items():
        yield f"{count} {_ERRORS[name]}"
    if gpu.remapped_rows_pending:
        yield "rows to be remapped at the next reset"
    for reason, held_s in gpu.clocks_held_s.items():
        yield f"clocks held down by {reason.replace('_', ' ')} for {held_s:.1f} s"
