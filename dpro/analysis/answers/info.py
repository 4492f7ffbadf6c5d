"""The answer of `dpro info`: what a run contains, and what it lacks.

Takes a run; returns a `ContentsDocument` after an import, or an `InfoDocument`, which includes a summary of
telemetry. Does not judge: for many jobs, clocks held down by a power cap are normal.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import polars as pl
from msgspec import UNSET, UnsetType

from dpro.account import Account
from dpro.analysis.analysis import Analysis
from dpro.analysis.end import JobEnd
from dpro.analysis.recording import RecordingShare, recording_share
from dpro.analysis.step_time import AfterWindow, StepTimeDocument, after_first_window, step_time_document
from dpro.analysis.unanswered import pretended_in_words, why_no_window
from dpro.classify import OTHER, classify, table_version
from dpro.detect.findings_log import LoggedFinding, logged_findings
from dpro.detect.machine.telemetry import ORDER, PCI, gpus_of_ranks
from dpro.documents import Document, DocumentPart
from dpro.replay.job_kind import JobKind, kind_of
from dpro.replay.mesh import Axis, mesh_in_words, mesh_of_run
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, SPANS, WORKERS
from dpro.store import AppliedChange, Run
from dpro.units import format_bytes, us

_HEARTBEAT = "telemetry_cpu_s"  # counter with one row per sample of a host
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
        host: host of the port.
        device: name of the port.
    """

    host: str
    device: str


class MemoryPeak(DocumentPart, frozen=True):
    """Peak allocated memory of a rank.

    Attributes:
        rank: the rank.
        device: the GPU; empty for the host's memory.
        peak_bytes: peak allocated bytes.
    """

    rank: int
    device: str
    peak_bytes: int


class GpuDocument(DocumentPart, frozen=True):
    """Telemetry of a GPU, and its errors.

    Attributes:
        host: host of the GPU.
        gpu: uuid of the GPU.
        ranks: ranks that use the GPU.
        ranks_by: what `ranks` was inferred from; empty without ranks.
        samples: number of samples.
        clocks_held_s: seconds for which its clocks were held down, by reason.
        xids: number of reports of each XID.
        errors: number of errors of each kind while it was sampled.
        remapped_rows_pending: whether memory rows will be remapped at the next reset.
        lost: whether the GPU was lost.
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
    """Telemetry sampled beside the job.

    Attributes:
        hosts: sampled hosts.
        samples: number of samples of all hosts.
        ports: sampled network ports.
        ranks: ranks whose process memory was sampled.
        gpus: sampled GPUs.
        memory_peaks: peaks of allocated memory in deep windows.
    """

    hosts: list[str]
    samples: int
    ports: list[NetworkPort]
    ranks: list[int]
    gpus: list[GpuDocument]
    memory_peaks: list[MemoryPeak]


def summarize(parts: Iterable[pl.DataFrame], workers: pl.DataFrame) -> TelemetryDocument:
    """Summarise telemetry, including errors of GPUs.

    Args:
        parts: table `counters`, part by part, since it is large for a long job.
        workers: table `workers`, which links ranks to GPUs.
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
    """Yield one summary per GPU, in the order of hosts and uuids.

    Args:
        rows: rows of `counters`.
        owned: frame of `gpus_of_ranks`.
    """
    sampled = rows.filter(pl.col("device") != "")
    for host, device in sampled.select("host", "device").unique().sort("host", "device").iter_rows():
        of_gpu = rows.filter(host=host, device=device).sort("time_ns")
        xids = of_gpu.filter(counter="xid")["value"].cast(pl.Int64).value_counts().sort("value")
        owners = owned.filter(host=host, device=device)
        # How long each reason held the clocks down: a value lasts until the next one.
        end = of_gpu["time_ns"].max()
        reasons = of_gpu.filter(
            pl.col("counter").str.starts_with(_REASON) & ~pl.col("counter").is_in(_HARMLESS)
        ).with_columns(until_ns=pl.col("time_ns").shift(-1).over("counter").fill_null(end))
        held = reasons.group_by("counter").agg(
            held_s=((pl.col("until_ns") - pl.col("time_ns")) * pl.col("value")).sum() / 1e9,
            seen=pl.col("value").max(),
        )
        seen = held.filter(pl.col("seen") > 0).sort("counter")
        yield GpuDocument(
            host=host,
            gpu=device,
            ranks=owners["rank"].to_list(),
            ranks_by=next(iter(owners["by"]), ""),
            samples=of_gpu.filter(counter=_GPU_HEARTBEAT).height,
            clocks_held_s={
                name.removeprefix(_REASON): round(held_s, 3) for name, held_s, _ in seen.iter_rows()
            },
            xids={str(xid): count for xid, count in xids.iter_rows()},
            errors={name: grown for name in _ERRORS if (grown := _growth(of_gpu, name))},
            remapped_rows_pending=bool(of_gpu.filter(counter="remapped_rows_pending")["value"].max()),
            lost=of_gpu.filter(counter="lost").height > 0,
        )


def _growth(rows: pl.DataFrame, counter: str) -> int:
    """Return the growth of a counter over its samples; after a reset it starts from 0."""
    values = rows.filter(counter=counter)["value"]
    steps = values.diff().drop_nulls()
    return int(sum(step if step >= 0 else value for step, value in zip(steps, values[1:])))


def telemetry_in_words(summary: TelemetryDocument) -> list[str]:
    """Word a summary of telemetry: samples, GPUs with errors, ranks with the most and least memory."""
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
    """Word the largest and the smallest peak of all ranks, on GPUs and on CPUs."""
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


# Layout of the ranks of a run along the axes of parallelism.


class OverlayDocument(DocumentPart, frozen=True):
    """Expert parallelism within the axes of the layout.

    Attributes:
        name: ep.
        size: number of ranks that share all experts.
        over: axes along which these ranks differ.
    """

    name: str
    size: int
    over: list[str]


class MeshDocument(DocumentPart, frozen=True):
    """The layout of ranks along the axes of parallelism.

    Attributes:
        line: the layout in words; empty where unknown.
        axes: axes longer than one.
        coordinates: coordinates of each rank along the axes, by number of the rank; -1 where unknown.
        source: stated, mesh, descriptions or algebra; empty if the layout is unknown.
        ambiguity: what remains open.
        overlays: expert parallelism within the axes.
    """

    line: str
    axes: list[Axis]
    coordinates: dict[str, list[int]]
    source: str
    ambiguity: list[str]
    overlays: list[OverlayDocument]


def layout_document(run: Run) -> MeshDocument:
    """Return the layout of the ranks of a run."""
    mesh = mesh_of_run(run)
    return MeshDocument(
        mesh_in_words(mesh),
        list(mesh.axes),
        {str(rank): list(place) for rank, place in sorted(mesh.coordinates.items())},
        mesh.source,
        list(mesh.ambiguity),
        [OverlayDocument(overlay.name, overlay.size, list(overlay.over)) for overlay in mesh.overlays],
    )


_KERNELS_NAMED = 5


class Unclassified(DocumentPart, frozen=True):
    """Kernels of unknown class.

    Attributes:
        kernels: number of kernels.
        time_ms: total time.
        share: share of the GPU time; null without kernels.
        names: names of the kernels with most time.
        classes: version of the table of classes.
    """

    kernels: int
    time_ms: float
    share: float | None
    names: list[str]
    classes: str


class KernelCoverage(DocumentPart, frozen=True):
    """What dpro understands of a run.

    Attributes:
        unclassified: kernels of unknown class.
    """

    unclassified: Unclassified


class InfoCoverage(KernelCoverage, frozen=True):
    """What dpro understands of a run; shares are null without the collectives or kernels that they refer to.

    Attributes:
        collective_bytes_known: share of collectives whose bytes are known.
        collective_group_known: share of collectives whose process group is known.
        kernel_time_classified: share of the GPU time in kernels of a known class.
        windows: number of deep windows.
        steps_in_windows: number of steps in deep windows.
    """

    collective_bytes_known: float | None
    collective_group_known: float | None
    kernel_time_classified: float | None
    windows: int
    steps_in_windows: int


class ContentsDocument(Document, frozen=True, kw_only=True):
    """What a run contains.

    Attributes:
        run: the run, as the user named it.
        ranks: recorded ranks.
        world_size: number of ranks of the job.
        missing_ranks: ranks of the job that left no record.
        rows: number of rows by table.
        warnings: warnings of the recorder or the importer.
        skipped: number of records left out, by reason.
        coverage: what dpro understands of the run.
    """

    run: str
    ranks: list[int]
    world_size: int
    missing_ranks: list[int]
    rows: dict[str, int]
    warnings: list[str]
    skipped: dict[str, int]
    coverage: KernelCoverage


class ClocksDocument(DocumentPart, frozen=True):
    """The clocks of the ranks, and how they were compared.

    Attributes:
        distinct: number of distinct clocks; null if unknown.
        compared: number of pairs of ranks whose clocks were compared.
        samples: number of comparisons.
        round_trip_us: median round trip of a comparison; null without comparisons.
    """

    distinct: int | None
    compared: int
    samples: int
    round_trip_us: float | None


class RankEnd(DocumentPart, frozen=True):
    """How a rank ended.

    Attributes:
        rank: the rank.
        host: host of the rank.
        exit_code: exit code of its process; -1 if a signal ended it, or if unknown.
        exit_signal: signal that ended its process; -1 for none or unknown.
        how: the end in words.
    """

    rank: int
    host: str
    exit_code: int
    exit_signal: int
    how: str


class WindowCosts(DocumentPart, frozen=True, forbid_unknown_fields=False):
    """The cost of deep windows on the rank that they slowed most; empty without other steps to compare with.

    Attributes:
        count: number of windows.
        cost_ms: median cost of a window.
        share: total cost as a share of the time of all steps.
    """

    count: float | UnsetType = UNSET
    cost_ms: float | UnsetType = UNSET
    share: float | UnsetType = UNSET


class InfoDocument(ContentsDocument, frozen=True, kw_only=True):
    """What a run contains, and what it lacks.

    Attributes:
        cache: folder that traces were imported to; null for a run.
        kind: whether the job trains, is compiled, is launched from CUDA graphs.
        layout: layout of ranks along the axes of parallelism.
        steps: number of recorded steps.
        step_time: time of a step; null if no step was timed.
        hosts: hosts of the job.
        gpus: models of its GPUs.
        clocks: clocks of the ranks, and how they were compared.
        telemetry: telemetry sampled beside the job.
        no_window: why there is no deep window; empty if there is one.
        on_request: whether deep windows were recorded only on request.
        ended: how each rank ended.
        exit_status: exit status of the job's command; null if unknown.
        applied: outcome of each change that `dpro try` made, by rank.
        role: worker group of the ranks, by the name of its Ray actors; empty without groups.
        attempts: runs of earlier attempts, before the job was restarted.
        while_it_ran: findings of `dpro watch` while the job ran.
        windows: cost of deep windows.
        recording: total cost of recording; null where unknown.
        after_first_window: change of the step with the first deep window; null if not significant.
        end: how the job ended.
        pretended: how many ranks were pretended, one by one on one machine; empty if none were.
        account: account of the job, equal in the documents of all commands; null where the run cannot be
            judged.
    """

    coverage: InfoCoverage
    cache: str | None
    kind: JobKind
    layout: MeshDocument
    steps: int
    step_time: StepTimeDocument | None
    hosts: list[str]
    gpus: list[str]
    clocks: ClocksDocument
    telemetry: TelemetryDocument
    no_window: str
    ended: list[RankEnd]
    exit_status: int | None
    applied: list[AppliedChange]
    role: str
    attempts: list[str]
    while_it_ran: list[LoggedFinding]
    windows: WindowCosts
    recording: RecordingShare | None
    after_first_window: AfterWindow | None
    end: JobEnd
    on_request: bool = False
    pretended: str = ""
    account: Account | None = None


def contents_document(run: Run) -> ContentsDocument:
    """Return what a run contains."""
    return ContentsDocument(**_contents(run), coverage=KernelCoverage(_unclassified(run)))


def _contents(run: Run) -> dict[str, Any]:
    """Return the fields of `ContentsDocument`, except `coverage`."""
    manifest = run.manifest
    return {
        "run": run.label,
        "ranks": manifest.ranks,
        "world_size": manifest.world_size,
        "missing_ranks": manifest.missing_ranks,
        "rows": run.rows(),
        "warnings": manifest.warnings,
        "skipped": manifest.skipped,
    }


def info_document(analysis: Analysis) -> InfoDocument:
    """Return what a run contains, and what it lacks; without the account, which the caller adds."""
    run, manifest, steps = analysis.run, analysis.run.manifest, analysis.steps
    distinct = run.table(WORKERS).filter(pl.col("clock") != "")["clock"].n_unique()
    between = run.table(CLOCK_SAMPLES).filter(pl.col("peer_rank") >= 0)
    ends = run.table(WORKERS).select("rank", "host", "exit_code", "exit_signal")
    collectives, unclassified = run.table(COLLECTIVES), _unclassified(run)
    windows = {window for part in run.part_by_part(SPANS, ["window"]) for window in part["window"].unique()}
    return InfoDocument(
        **_contents(run),
        coverage=InfoCoverage(
            unclassified=unclassified,
            collective_bytes_known=collectives.select((pl.col("bytes_in") >= 0).mean()).item(),
            collective_group_known=collectives.select((pl.col("group") != "").mean()).item(),
            kernel_time_classified=None if unclassified.share is None else 1 - unclassified.share,
            windows=len(windows),
            steps_in_windows=steps.filter(pl.col("window") >= 0)["step"].n_unique(),
        ),
        cache=None if run.source is None else str(run.path),
        kind=kind_of(run),
        layout=layout_document(run),
        steps=steps["step"].n_unique(),
        step_time=step_time_document(steps),
        hosts=manifest.hosts,
        gpus=manifest.gpus,
        clocks=ClocksDocument(
            distinct=distinct or None,
            compared=between.select("rank", "peer_rank").n_unique(),
            samples=between.height,
            round_trip_us=us(between["round_trip_ns"].median()) if between.height else None,  # type: ignore[arg-type]
        ),
        telemetry=summarize(run.part_by_part(COUNTERS, list(COUNTERS.columns)), run.table(WORKERS)),
        no_window=why_no_window(run),
        on_request=bool(manifest.options.get("on_request")),
        ended=[
            RankEnd(rank, host, code, number, how_ended(code, number))
            for rank, host, code, number in ends.iter_rows()
        ],
        exit_status=manifest.exit_status,
        applied=manifest.applied,
        role=", ".join(sorted({*run.table(WORKERS, ["role"])["role"]} - {""})),
        attempts=[str(path.parent) for path in sorted(run.path.glob("attempts/*/manifest.json"))],
        while_it_ran=logged_findings(run.path),
        windows=msgspec.convert(manifest.windows, WindowCosts),
        recording=recording_share(manifest),
        after_first_window=after_first_window(steps, bool(manifest.gpus)),
        end=analysis.end,
        pretended=f"{pretended_in_words(manifest)}: no waiting was measured" if manifest.is_pretended else "",
    )


def how_ended(code: int, number: int) -> str:
    """Return how a process ended: `exit code 3`, `killed by SIGKILL`.

    Args:
        code: exit code; negative for none.
        number: number of the signal that ended the process; negative if unknown.
    """
    if code >= 0:
        return f"exit code {code}"
    if number < 0:
        return "not known"
    names = {one.value: one.name for one in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}"


def _unclassified(run: Run) -> Unclassified:
    """Return the number, time and names of the kernels that the table of classes does not know."""
    # One part is in memory at a time.
    counts, times = Counter[str](), Counter[str]()
    for part in run.part_by_part(SPANS, ["kind", "name", "duration_ns"]):
        kernels = part.filter((pl.col("kind") == "kernel") & (pl.col("duration_ns") >= 0))
        by_name = kernels.group_by("name").agg(pl.len(), pl.col("duration_ns").sum())
        for name, count, spent_ns in by_name.iter_rows():
            counts[name] += count
            times[name] += spent_ns
    unknown = [name for name in times if classify(name).kind == OTHER]
    time_ns, total_ns = sum(times[name] for name in unknown), sum(times.values())
    longest = sorted(unknown, key=lambda name: (-times[name], name))[:_KERNELS_NAMED]
    return Unclassified(
        kernels=sum(counts[name] for name in unknown),
        time_ms=time_ns / 1e6,
        share=time_ns / total_ns if total_ns else None,
        names=longest,
        classes=table_version(),
    )
