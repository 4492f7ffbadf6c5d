"""What a run holds and what it lacks.

In: a run. Out: `ContentsDocument` after an import, `InfoDocument` for `dpro info`, and of that what telemetry
sampled beside a job. It judges nothing: clocks that a power cap holds down, say, are normal for many jobs.
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
from dpro.replay.mesh import Axis, in_words, mesh_of_run
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, SPANS, WORKERS
from dpro.store import AppliedChange, Run
from dpro.units import format_bytes, us

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


def telemetry_in_words(summary: TelemetryDocument) -> list[str]:
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


# Where the ranks of a run stand on the axes of parallelism.


class OverlayDocument(DocumentPart, frozen=True):
    """Experts, laid over axes that hold all ranks already.

    Attributes:
        name: ep.
        size: ranks that hold all experts together.
        over: the axes along which those differ.
    """

    name: str
    size: int
    over: list[str]


class MeshDocument(DocumentPart, frozen=True):
    """Where each rank stands.

    Attributes:
        line: the layout in words; empty where it is unknown.
        axes: those that are longer than one.
        coordinates: of each rank, by its number: its place on each axis; -1 where unknown.
        source: stated, mesh, descriptions or algebra; empty where nothing implies it.
        ambiguity: what remains open.
        overlays: experts that are laid over the axes.
    """

    line: str
    axes: list[Axis]
    coordinates: dict[str, list[int]]
    source: str
    ambiguity: list[str]
    overlays: list[OverlayDocument]


def layout_document(run: Run) -> MeshDocument:
    """Where each rank of a run stands."""
    mesh = mesh_of_run(run)
    return MeshDocument(
        in_words(mesh),
        list(mesh.axes),
        {str(rank): list(place) for rank, place in sorted(mesh.coordinates.items())},
        mesh.source,
        list(mesh.ambiguity),
        [OverlayDocument(overlay.name, overlay.size, list(overlay.over)) for overlay in mesh.overlays],
    )


_KERNELS_NAMED = 5


class Unclassified(DocumentPart, frozen=True):
    """Kernels of no known class.

    Attributes:
        kernels: how many.
        time_ms: their time.
        share: of GPU time; null without kernels.
        names: those that take most of it.
        classes: version of the table of classes.
    """

    kernels: int
    time_ms: float
    share: float | None
    names: list[str]
    classes: str


class KernelCoverage(DocumentPart, frozen=True):
    """What dpro understands.

    Attributes:
        unclassified: kernels of no known class.
    """

    unclassified: Unclassified


class InfoCoverage(KernelCoverage, frozen=True):
    """What dpro understands, as shares; null where there is nothing to take a share of.

    Attributes:
        collective_bytes_known: collectives whose bytes are known.
        collective_group_known: collectives whose process group is known.
        kernel_time_classified: GPU time in kernels of a known class.
        windows: deep windows.
        steps_in_windows: steps in deep windows.
    """

    collective_bytes_known: float | None
    collective_group_known: float | None
    kernel_time_classified: float | None
    windows: int
    steps_in_windows: int


class ContentsDocument(Document, frozen=True, kw_only=True):
    """What a run holds.

    Attributes:
        run: as it was named.
        ranks: ranks that were recorded.
        world_size: ranks of the job.
        missing_ranks: ranks of the job that left no record.
        rows: by table.
        warnings: of the recorder or the importer.
        skipped: what was left out: how many, by reason.
        coverage: what dpro understands.
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
    """How many clocks the ranks had, and how they were compared.

    Attributes:
        distinct: clocks; null where that is unknown.
        compared: pairs of ranks whose clocks were compared.
        samples: comparisons.
        round_trip_us: median round trip of a comparison; null without any.
    """

    distinct: int | None
    compared: int
    samples: int
    round_trip_us: float | None


class RankEnd(DocumentPart, frozen=True):
    """How a rank ended.

    Attributes:
        rank: the rank.
        host: where it ran.
        exit_code: of its process; -1 where a signal ended it or it is unknown.
        exit_signal: that ended it; -1 where none did or it is unknown.
        how: both, in words.
    """

    rank: int
    host: str
    exit_code: int
    exit_signal: int
    how: str


class WindowCosts(DocumentPart, frozen=True, forbid_unknown_fields=False):
    """What deep windows cost the rank that they slowed most; empty where they cannot be compared with steps.

    Attributes:
        count: windows.
        cost_ms: median cost of one.
        share: of the time of all steps that they cost.
    """

    count: float | UnsetType = UNSET
    cost_ms: float | UnsetType = UNSET
    share: float | UnsetType = UNSET


class InfoDocument(ContentsDocument, frozen=True, kw_only=True):
    """What a run holds and what it lacks.

    Attributes:
        cache: where traces were imported to; null for a run.
        kind: whether it trains, is compiled, is launched from CUDA graphs.
        layout: where each rank stands on the axes of parallelism.
        steps: that were recorded.
        step_time: how long a step takes; null where none was timed.
        hosts, gpus: of the job.
        clocks: how they were compared.
        telemetry: what was sampled beside the job.
        no_window: why there is no deep window; empty where there is one.
        on_request: whether deep windows were recorded on request only.
        ended: how each rank ended.
        exit_status: of the job's command; null if unknown.
        applied: what became of each change that `dpro try` made, by rank.
        role: the worker group that the ranks are, as Ray's actors are called; empty without groups.
        attempts: runs of the job before it was restarted.
        while_it_ran: what `dpro watch` found while the job ran.
        windows: what deep windows cost.
        recording: what recording cost in all; null where nothing shows it.
        after_first_window: how steps changed with the first deep window; null where they did not.
        end: how the job ended.
        pretended: that its ranks ran one after the other on one machine; empty where they did not.
        account: of the job, the same in the documents of all commands; null where the run cannot be judged.
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
    """What a run holds."""
    return ContentsDocument(**_contents(run), coverage=KernelCoverage(_unclassified(run)))


def _contents(run: Run) -> dict[str, Any]:
    """The fields of `ContentsDocument`, but for what dpro understands."""
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
    """What a run holds and what it lacks."""
    run, manifest, steps = analysis.run, analysis.run.manifest, analysis.steps
    return InfoDocument(
        **_contents(run),
        coverage=_coverage(run, steps),
        cache=None if run.source is None else str(run.path),
        kind=kind_of(run),
        layout=layout_document(run),
        steps=steps["step"].n_unique(),
        step_time=step_time_document(steps),
        hosts=manifest.hosts,
        gpus=manifest.gpus,
        clocks=_clocks(run),
        telemetry=summarize(run.part_by_part(COUNTERS, list(COUNTERS.columns)), run.table(WORKERS)),
        no_window=why_no_window(run),
        on_request=bool(manifest.options.get("on_request")),
        ended=_ends(run),
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


def _clocks(run: Run) -> ClocksDocument:
    """How many clocks the ranks had, and how often and how well those were compared."""
    distinct = run.table(WORKERS).filter(pl.col("clock") != "")["clock"].n_unique()
    between = run.table(CLOCK_SAMPLES).filter(pl.col("peer_rank") >= 0)
    return ClocksDocument(
        distinct=distinct or None,
        compared=between.select("rank", "peer_rank").n_unique(),
        samples=between.height,
        round_trip_us=us(between["round_trip_ns"].median()) if between.height else None,  # type: ignore[arg-type]
    )


def _ends(run: Run) -> list[RankEnd]:
    """How each rank ended; none where nothing watched them."""
    ends = run.table(WORKERS).select("rank", "host", "exit_code", "exit_signal")
    return [
        RankEnd(rank, host, code, number, how_ended(code, number))
        for rank, host, code, number in ends.iter_rows()
    ]


def how_ended(code: int, number: int) -> str:
    """How a process ended: `exit code 3`, `killed by SIGKILL`.

    Args:
        code: its exit code; negative where it had none.
        number: the signal that ended it; negative if unknown.
    """
    if code >= 0:
        return f"exit code {code}"
    if number < 0:
        return "not known"
    names = {one.value: one.name for one in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}"


def _coverage(run: Run, steps: pl.DataFrame) -> InfoCoverage:
    collectives, unclassified = run.table(COLLECTIVES), _unclassified(run)
    windows = {window for part in run.part_by_part(SPANS, ["window"]) for window in part["window"].unique()}
    return InfoCoverage(
        unclassified=unclassified,
        collective_bytes_known=collectives.select((pl.col("bytes_in") >= 0).mean()).item(),
        collective_group_known=collectives.select((pl.col("group") != "").mean()).item(),
        kernel_time_classified=None if unclassified.share is None else 1 - unclassified.share,
        windows=len(windows),
        steps_in_windows=steps.filter(pl.col("window") >= 0)["step"].n_unique(),
    )


def _unclassified(run: Run) -> Unclassified:
    """Kernels that the table of classes does not know: how many, their time, and which take most of it."""
    counts, times = _kernels_by_name(run)
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


def _kernels_by_name(run: Run) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel ran, and for how many ns, with one part in memory at a time."""
    counts, times = Counter[str](), Counter[str]()
    for part in run.part_by_part(SPANS, ["kind", "name", "duration_ns"]):
        kernels = part.filter((pl.col("kind") == "kernel") & (pl.col("duration_ns") >= 0))
        for name, count, time_ns in (
            kernels.group_by("name").agg(pl.len(), pl.col("duration_ns").sum()).iter_rows()
        ):
            counts[name] += count
            times[name] += time_ns
    return counts, times
