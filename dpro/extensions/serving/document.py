"""The answer of `dpro serving`: what a server's latency and throughput consist of.

Reads tables `requests`, `iterations`, and those of windows; returns a `ServingDocument`, whose `unknown`
lists what the run lacks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import polars as pl
from msgspec import field
from numpy.typing import NDArray

from dpro.analysis.analysis import Analysis
from dpro.classify import classify
from dpro.documents import Document, DocumentPart
from dpro.errors import InputError
from dpro.extensions.serving.findings import EXCHANGES, ServerFacts, ServingFinding, expert_waits, findings_of
from dpro.extensions.serving.latency import (
    PARTS,
    PercentilesDocument,
    RecordedEngine,
    durations,
    engines,
    mean,
    number,
    percentiles,
    waits,
)
from dpro.extensions.serving.outlook import ServingPrediction
from dpro.schema import COLLECTIVES, GPU_WORK_KINDS, ITERATIONS, REQUESTS, SPANS
from dpro.store import Run
from dpro.units import NS_PER_MS, NS_PER_S, format_ms

MAX_REQUESTS = 10  # that are listed, by descending latency


class IterationsDocument(DocumentPart, frozen=True):
    """Iterations of one kind, of one rank of each replica.

    Attributes:
        kind: prefill, decode, mixed or unknown.
        count: their number.
        mean_ms, p50_ms, p99_ms: their durations.
        share: of the time of all iterations.
        prefill_tokens, decode_tokens, requests: means of recorded values; null where none was recorded.
    """

    kind: str
    count: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    share: float
    prefill_tokens: float | None
    decode_tokens: float | None
    requests: float | None


class SlowRequest(DocumentPart, frozen=True):
    """One request, and what it waited for.

    Attributes:
        request: its number.
        name: its id, empty where it has none.
        latency_ms: from arrival to the last token.
        ttft_ms: to the first token; null where unknown.
        waited: ms by reason; empty where its engine's iterations are unknown.
        stalled_by: number of the request whose prompt stalled it longest; -1 for none.
    """

    request: int
    name: str
    latency_ms: float
    ttft_ms: float | None
    waited: dict[str, float]
    stalled_by: int


class ServingDocument(Document, frozen=True, kw_only=True):
    """What a server's latency and throughput consist of.

    Attributes:
        sentences: what limits throughput, what limits latency, what would help.
        requests: number of requests.
        outcomes: number of requests by outcome.
        latency: percentiles by measure: ttft_ms, tpot_ms, queue_ms, latency_ms.
        requests_per_s, output_tokens_per_s, prompt_tokens_per_s: from the first arrival to the last end; null
            where unknown.
        arrivals_per_s: requests from the first arrival to the last; null where unknown. It exceeds
            `requests_per_s` where requests queue.
        busy: share of the time from the first arrival to the last end in which engines run iterations; null
            without both.
        waited: ms of a request's latency by reason, mean.
        iterations: by kind.
        parts: ms of an iteration in deep windows by part, mean.
        windows: number of iterations in that mean.
        findings: what is slow, costliest first.
        slowest: requests with the longest latency.
        unknown: what the run lacks, and how to get it.
        predictions: predictions of changes, where requested.
    """

    sentences: list[str]
    requests: int
    outcomes: dict[str, int]
    latency: dict[str, PercentilesDocument]
    requests_per_s: float | None
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    arrivals_per_s: float | None
    busy: float | None
    waited: dict[str, float]
    iterations: list[IterationsDocument]
    parts: dict[str, float]
    windows: int
    findings: list[ServingFinding]
    slowest: list[SlowRequest]
    unknown: list[str]
    predictions: list[ServingPrediction] = field(default_factory=list)


def has_serving(run: Run) -> bool:
    """Return whether a run has requests or iterations of a server."""
    return bool(run.parts(REQUESTS) or run.parts(ITERATIONS))


def serving_document(run: Run) -> ServingDocument:
    """Analyse a run of a server.

    Raises:
        InputError: it has neither requests nor iterations, or cannot be read.
    """
    requests, iterations = run.table(REQUESTS), run.table(ITERATIONS)
    if requests.is_empty() and iterations.is_empty():
        raise InputError(
            f"{run.label}: no requests and no iterations of a server; record one, or import its traces with "
            "`--requests LOG`"
        )
    spans = run.table(SPANS, ["rank", "window", "kind", "name", "start_ns", "duration_ns"])
    parts, count = parts_of_iterations(spans, iterations)
    by_replica = engines(iterations)
    timed = durations(requests)
    waited = waits(timed, by_replica)
    busy, capacity = _busy(requests, by_replica)
    exchanges = run.table(COLLECTIVES, ["op"])["op"].is_in(EXCHANGES).any()
    experts = expert_waits(Analysis(run).members, count) if exchanges else None
    seen = ServerFacts(timed, waited, by_replica, parts, experts, capacity)
    findings = findings_of(seen)
    means = {part: mean(waited[part]) for part in PARTS} if waited.height else {}
    span_s = _span_s(requests)
    return ServingDocument(
        sentences=[
            throughput_limit(busy, seen),
            latency_limit(means, timed, seen),
            what_helps(findings),
        ],
        requests=requests.height,
        outcomes={str(k): int(n) for k, n in requests["outcome"].value_counts(sort=True).iter_rows()},
        latency=percentiles(timed),
        requests_per_s=requests.filter(pl.col("end_ns") >= 0).height / span_s if span_s else None,
        output_tokens_per_s=_tokens(requests, "output_tokens", span_s),
        prompt_tokens_per_s=_tokens(requests, "prompt_tokens", span_s),
        arrivals_per_s=_arrivals_per_s(requests),
        busy=busy,
        waited=means,
        iterations=_by_kind(by_replica),
        parts=parts,
        windows=count,
        findings=findings,
        slowest=_slowest(timed, waited),
        unknown=_unknown(requests, iterations, waited, parts),
    )


def _arrivals_per_s(requests: pl.DataFrame) -> float | None:
    arrivals = requests.filter(pl.col("arrival_ns") >= 0)["arrival_ns"]
    span_ns = int(arrivals.max()) - int(arrivals.min()) if arrivals.len() else 0  # type: ignore[arg-type]
    return arrivals.len() / span_ns * NS_PER_S if span_ns else None


def _span_s(requests: pl.DataFrame) -> float:
    ended = requests.filter(pl.col("end_ns") >= 0)
    return (max(ended["end_ns"]) - min(requests["arrival_ns"])) / NS_PER_S if ended.height else 0.0


def _tokens(requests: pl.DataFrame, column: str, span_s: float) -> float | None:
    counted = requests.filter((pl.col(column) >= 0) & (pl.col("end_ns") >= 0))
    return float(counted[column].sum()) / span_s if span_s and counted.height else None


def _busy(requests: pl.DataFrame, by_replica: dict[int, RecordedEngine]) -> tuple[float | None, float | None]:
    """Return the busy share of engines, from first arrival to last end, and tokens per busy second."""
    work_ns = present_ns = tokens = 0.0
    says = False
    for replica, engine in by_replica.items():
        begin, end = int(engine.starts[0]), int((engine.starts + engine.durations).max())
        present = requests.filter((pl.col("replica") == replica) & (pl.col("end_ns") > begin))
        present = present.filter((pl.col("arrival_ns") >= 0) & (pl.col("arrival_ns") < end))
        made = engine.iterations["decode_tokens"]
        says |= bool((made >= 0).any())
        if present.height:
            present_ns += max(present["end_ns"]) - min(present["arrival_ns"])
        work_ns += float(engine.durations.sum())
        tokens += float(made.clip(0).sum()) + present.height
    busy = min(work_ns / present_ns, 1.0) if present_ns else None
    return busy, tokens / work_ns * NS_PER_S if work_ns and says else None


def _by_kind(by_replica: dict[int, RecordedEngine]) -> list[IterationsDocument]:
    if not by_replica:
        return []
    rows = pl.concat([engine.iterations for engine in by_replica.values()])
    whole = float(rows["duration_ns"].clip(0).sum()) or 1.0
    documents = []
    for (kind,), of_kind in sorted(
        rows.partition_by("kind", as_dict=True).items(), key=lambda item: (-item[1].height, str(item[0][0]))
    ):
        took = of_kind["duration_ns"].clip(0) / NS_PER_MS
        tokens = [
            of_kind.filter(pl.col(name) >= 0)[name]
            for name in ("prefill_tokens", "decode_tokens", "num_requests")
        ]
        documents.append(
            IterationsDocument(
                str(kind),
                of_kind.height,
                mean(took),
                float(took.quantile(0.5, "linear") or 0.0),
                float(took.quantile(0.99, "linear") or 0.0),
                float(took.sum()) * NS_PER_MS / whole,
                *(mean(counts) if counts.len() else None for counts in tokens),
            )
        )
    return documents


def _slowest(timed: pl.DataFrame, waited: pl.DataFrame) -> list[SlowRequest]:
    waited_for = {row["request"]: row for row in waited.iter_rows(named=True)}
    rows = (
        timed.drop_nulls("latency_ms")
        .sort("latency_ms", "request", descending=[True, False])
        .head(MAX_REQUESTS)
    )
    return [
        SlowRequest(
            row["request"],
            row["name"],
            row["latency_ms"],
            row["ttft_ms"],
            {part: waited_for[row["request"]][part] for part in PARTS}
            if row["request"] in waited_for
            else {},
            waited_for[row["request"]]["stalled_by"] if row["request"] in waited_for else -1,
        )
        for row in rows.iter_rows(named=True)
    ]


def _unknown(
    requests: pl.DataFrame, iterations: pl.DataFrame, waited: pl.DataFrame, parts: dict[str, float]
) -> list[str]:
    unknown = []
    if requests.is_empty():
        unknown.append("no log of requests: latency and queue are unknown; give it with --requests FILE")
    if iterations.is_empty():
        unknown.append(
            "no iterations: what a request waited for is unknown; record the server, or import its profile"
        )
    elif not (iterations["prefill_tokens"] >= 0).any():
        unknown.append("the trace does not say how many tokens of prompts and of answers a batch holds")
    if iterations.height and not (iterations["kv_waiting"] >= 0).any():
        unknown.append("no iteration says whether requests waited for blocks of the KV cache")
    if requests.height and iterations.height and waited.is_empty():
        unknown.append("no request lies within the iterations: the log has another time or clock")
    if not parts:
        unknown.append("no deep window: the inside of an iteration is unknown")
    return unknown


# The three sentences on a server: what limits throughput, what limits latency, what would help.

SEEN = 0.01  # of the time of iterations: a smaller share is not mentioned
QUEUED = 0.2  # of the latency, spent before the first iteration: with a smaller share the engine keeps up
_WORDS = {
    "place_ms": "waiting for a place in the batch",
    "kv_ms": "waiting for blocks of the KV cache",
    "running_ms": "waiting for the iteration that runs",
    "prompt_ms": "their own prompt",
    "decode_ms": "decoding",
    "stall_ms": "prompts of others while they decode",
    "idle_ms": "time between iterations",
}


def throughput_limit(busy: float | None, seen: ServerFacts) -> str:
    """Describe what limits throughput: the engine if requests wait long for it, otherwise arrivals.

    Args:
        busy: share of the time in which engines run iterations; None where unknown.
    """
    timed = seen.timed.drop_nulls(["queue_ms", "latency_ms"])
    latency, queue = mean(timed["latency_ms"]), mean(timed["queue_ms"])
    if not latency:
        return (
            "Throughput: without a log of requests it is not known whether arrivals or the engine limit it."
        )
    said = [f"of {format_ms(latency)} requests wait {format_ms(queue)} for their first iteration"]
    if busy is not None:
        said.append(f"the engine is busy {busy:.0%} of the time")
    if seen.capacity:
        said.append(f"it makes {number(seen.capacity)} output tokens per busy second")
    # Share of the time of iterations in which requests wait for blocks of the KV cache.
    engines = seen.by_replica.values()
    whole = sum(float(engine.durations.sum()) for engine in engines)
    share = (
        sum(float(engine.durations[engine.lacks_blocks].sum()) for engine in engines) / whole
        if whole
        else 0.0
    )
    if share >= SEEN:
        said.append(f"requests wait for blocks of the KV cache in {share:.0%} of its iterations' time")
    parts = {part: ms for part, ms in seen.parts.items() if part != "idle"}
    if parts:
        most = max(parts, key=lambda part: parts[part])
        said.append(f"most of an iteration is {most} ({parts[most] / sum(parts.values()):.0%})")
    what = "The engine limits" if queue >= QUEUED * latency else "Arrivals limit"
    return f"{what} throughput: {'; '.join(said)}."


def latency_limit(means: dict[str, float], timed: pl.DataFrame, seen: ServerFacts) -> str:
    """Describe what limits latency.

    Args:
        means: ms of a request by what it waited for.
    """
    whole = sum(means.values())
    if whole:
        first, second = sorted(means, key=lambda part: -means[part])[:2]
        return (
            f"Latency is limited by {_WORDS[first]} ({means[first] / whole:.0%} of {format_ms(whole)}) and "
            f"{_WORDS[second]} ({means[second] / whole:.0%})."
        )
    latency, ttft, queue = (mean(timed[name]) for name in ("latency_ms", "ttft_ms", "queue_ms"))
    if latency:
        return (
            f"Latency: of {format_ms(latency)} a request waits {format_ms(queue)} for its first iteration, "
            f"has its first token after {format_ms(ttft)}, and makes the others in "
            f"{format_ms(latency - ttft)}."
        )
    parts = {part: ms for part, ms in seen.parts.items() if part != "idle"}
    if parts:
        most = max(parts, key=lambda part: parts[part])
        return (
            f"Latency per token is limited by {most}: {format_ms(parts[most])} of "
            f"{format_ms(sum(parts.values()))} of an iteration, not counting time in the queue (that needs a "
            "log of requests)."
        )
    return "Latency: neither a log of requests nor a deep window says what it consists of."


def what_helps(findings: list[ServingFinding]) -> str:
    """Describe what would help most, and by how much at most."""
    if not findings:
        return "What would help: nothing stands out."
    best = findings[0]
    gains = [
        text
        for value, text in (
            (best.cost_tpot_ms, f"{format_ms(best.cost_tpot_ms or 0.0)} per token"),
            (best.cost_ttft_ms, f"{format_ms(best.cost_ttft_ms or 0.0)} to the first token"),
            (best.gain_tokens_per_s, f"{number(best.gain_tokens_per_s or 0.0)} tokens per second"),
        )
        if value
    ]
    return f"What would help: {best.help}; worth {', '.join(gains) or 'what is not known'}, at most."


# The parts of iterations in deep windows.

WORK = ("attention", "matmul", "sampling", "other", "communication")
HOST, IDLE = "host", "idle"
ITERATION_PARTS = (*WORK, HOST, IDLE)
_SAMPLING = re.compile(r"(?i)sampl|multinomial|argmax|penalt|top_?[kp]_?(mask|renorm)|logits_?process")
_MATMUL = re.compile(
    r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm)$|^_C::\w*(linear|mm)$|^mkldnn|^onednn"
)
_NAMES = {"attention": "attention", "gemm": "matmul", "communication": "communication"}


def part_of(name: str) -> str:
    """Return the part of an iteration that a kernel or an operator belongs to, by its name."""
    if _SAMPLING.search(name):
        return "sampling"
    if _MATMUL.search(name):
        return "matmul"
    return _NAMES.get(classify(name).kind, "other")


def parts_of_iterations(spans: pl.DataFrame, iterations: pl.DataFrame) -> tuple[dict[str, float], int]:
    """Return mean ms of each part of an iteration, and the number of iterations; empty without spans in one.

    Args:
        spans: with `rank`, `window`, `kind`, `name`, `start_ns`, `duration_ns`.
    """
    total, count = dict.fromkeys(ITERATION_PARTS, 0.0), 0
    gpu = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    work = gpu if gpu.height else spans.filter(pl.col("kind") == "cpu_op")
    for (rank,), of_rank in work.partition_by("rank", as_dict=True).items():
        begun, ended = of_rank["start_ns"].min(), (of_rank["start_ns"] + of_rank["duration_ns"]).max()
        covered = iterations.filter(
            (pl.col("rank") == rank)
            & (pl.col("duration_ns") > 0)
            & (pl.col("start_ns") + pl.col("duration_ns") > begun)
            & (pl.col("start_ns") < ended)
        )
        starts = of_rank["start_ns"].sort().to_numpy()
        low = np.searchsorted(starts, covered["start_ns"].to_numpy())
        high = np.searchsorted(starts, (covered["start_ns"] + covered["duration_ns"]).to_numpy())
        seen = _within_windows(covered.filter(pl.Series(high > low)), spans.filter(pl.col("rank") == rank))
        if seen.height:
            count += seen.height
            for part, ns in _of_rank(of_rank, seen).items():
                total[part] += ns / NS_PER_MS
    return ({part: ms / count for part, ms in total.items()} if count else {}), count


def _within_windows(iterations: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the iterations within a window, not those cut by its ends; all where there are none."""
    windows = spans.group_by("window").agg(
        first=pl.col("start_ns").min(), last=(pl.col("start_ns") + pl.col("duration_ns").clip(0)).max()
    )
    end = pl.col("start_ns") + pl.col("duration_ns")
    within = [
        (pl.col("start_ns") >= first) & (end <= last) for _, first, last in windows.sort("window").iter_rows()
    ]
    whole = iterations.filter(pl.any_horizontal(within)) if within else iterations
    return whole if whole.height else iterations


def _of_rank(work: pl.DataFrame, iterations: pl.DataFrame) -> dict[str, float]:
    """Return ns of each part over all iterations of a rank."""
    names = work["name"].unique().to_list()
    parts = work["name"].replace_strict(names, [part_of(name) for name in names], return_dtype=pl.String)
    start = work["start_ns"].to_numpy()
    end = start + work["duration_ns"].clip(0).to_numpy()
    begin = iterations["start_ns"].to_numpy()
    until = begin + iterations["duration_ns"].to_numpy()
    edges = np.unique(np.concatenate([start, end, begin, until]))
    lengths = np.diff(edges)
    inside = _covered(edges, begin, until)
    ns_of, free = dict.fromkeys(ITERATION_PARTS, 0.0), inside.copy()
    for part in WORK:
        chosen = (parts == part).to_numpy()
        here = _covered(edges, start[chosen], end[chosen]) & free
        ns_of[part] = float(lengths[here].sum())
        free &= ~here
    ns_of[HOST] = float(lengths[free].sum())
    ordered = iterations.sort("start_ns")
    gaps = ordered["start_ns"].shift(-1) - ordered["start_ns"] - ordered["duration_ns"]
    follows = ordered["iteration"].diff().shift(-1) == 1
    ns_of[IDLE] = float(gaps.filter(follows.fill_null(False)).clip(0).sum())
    return ns_of


def _covered(
    edges: NDArray[np.int64],
    starts: NDArray[np.int64] | Sequence[int],
    ends: NDArray[np.int64] | Sequence[int],
) -> NDArray[np.bool_]:
    """Return which stretches between edges are covered by an interval."""
    change = np.zeros(edges.size, np.int64)
    np.add.at(change, np.searchsorted(edges, starts), 1)
    np.add.at(change, np.searchsorted(edges, ends), -1)
    return np.cumsum(change)[:-1] > 0
