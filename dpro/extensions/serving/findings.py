"""Findings about a server: what is slow, its cost, and what would help.

Takes results of the other modules; returns findings, costliest first. A cost is in ms of the time per output
token (TPOT) or to the first one (TTFT), mean over requests; the gain is in output tokens per second of a busy
engine, where the engine would do more in the same time. Both are bounds, as if the problem disappeared
completely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl
from msgspec import field

from dpro.documents import DocumentPart
from dpro.extensions.serving.latency import RecordedEngine, counted, mean, number
from dpro.units import NS_PER_MS, format_ms

# Waits of ranks for each other in exchanges of tokens with experts.

EXCHANGES = ("dispatch", "combine", "all_to_all")


@dataclass(frozen=True)
class ExpertWaits:
    """Waits in exchanges of tokens with experts.

    Attributes:
        wait_ms: per iteration, mean over ranks.
        total_ms: the exchanges, per iteration, including waits.
        rank: the rank that was last most often.
        share: of exchanges in which it was the last.
    """

    wait_ms: float
    total_ms: float
    rank: int
    share: float


def expert_waits(members: pl.DataFrame, num_iterations: int) -> ExpertWaits | None:
    """Return the waits in exchanges; None without any, or where some were not found on all their ranks.

    Args:
        members: from `dpro.replay.alignment.transfers.split_members`.
    """
    timed = members.filter(pl.col("op").is_in(EXCHANGES))
    if timed.is_empty() or not num_iterations or not timed["complete"].all():
        return None
    last = timed.group_by("instance").agg(pl.col("rank").sort_by("wait_ns", "rank").first())
    often = last.group_by("rank").len().sort("len", "rank", descending=[True, False])
    return ExpertWaits(
        float(timed["wait_ns"].sum()) / NS_PER_MS / num_iterations,
        float(timed["duration_ns"].sum()) / NS_PER_MS / num_iterations,
        int(often["rank"][0]),
        float(often["len"][0]) / last.height,
    )


MIN_SHARE = 0.1  # of TTFT, TPOT or an iteration: a smaller cost is not a finding
TINY_MS = 1e-3  # smaller times are ignored
FLAT = 0.3  # of an iteration that decodes: maximum that twice the batch adds if a larger one costs little


class ServingFinding(DocumentPart, frozen=True):
    """One thing that makes requests or tokens slow.

    Attributes:
        class: queue, kv_cache, prefill_stall, host_bound, small_batch, experts, communication or idle.
        cost_tpot_ms: of the time per output token, at most; null where it costs none, or is unknown.
        cost_ttft_ms: of the time to the first token, at most; null where it costs none, or is unknown.
        gain_tokens_per_s: additional output tokens per second of a busy engine without it, at most; null
            where there are none, or unknown.
        evidence: observations that show it.
        help: what would change it.
    """

    class_: str = field(name="class")
    cost_tpot_ms: float | None
    cost_ttft_ms: float | None
    gain_tokens_per_s: float | None
    evidence: list[str]
    help: str


@dataclass(frozen=True)
class ServerFacts:
    """Recorded facts about a server.

    Attributes:
        timed: requests with their durations.
        waited: requests within iterations, with what they waited for.
        by_replica: engines.
        parts: ms of each part of an iteration in windows; empty without windows.
        experts: waits in the exchange of experts; None where there is none.
        capacity: output tokens per second of busy engines; None where iterations do not show it.
    """

    timed: pl.DataFrame
    waited: pl.DataFrame
    by_replica: Mapping[int, RecordedEngine]
    parts: Mapping[str, float]
    experts: ExpertWaits | None
    capacity: float | None


def costs_in_words(finding: ServingFinding) -> str:
    """Describe the known costs of a finding: `12 ms of TPOT, 300 ms of TTFT, 40 tokens/s`."""
    costs = (
        (finding.cost_tpot_ms, format_ms, "of TPOT"),
        (finding.cost_ttft_ms, format_ms, "of TTFT"),
        (finding.gain_tokens_per_s, number, "tokens/s"),
    )
    return ", ".join(f"{written(value)} {of}" for value, written, of in costs if value is not None)


def findings_of(seen: ServerFacts) -> list[ServingFinding]:
    """Return all findings, those that cost most of a request's latency first."""
    findings = [
        _queue(seen),
        _kv_cache(seen),
        _stall(seen),
        _idle(seen),
        _small_batch(seen),
        *_in_windows(seen),
    ]
    kept = [finding for finding in findings if finding is not None]
    made = seen.timed.filter(pl.col("output_tokens") > 1)["output_tokens"]
    tokens = max(mean(made) - 1, 1.0)  # after the first

    def cost(finding: ServingFinding) -> float:
        return (finding.cost_tpot_ms or 0.0) * tokens + (finding.cost_ttft_ms or 0.0)

    return sorted(
        kept, key=lambda finding: (-cost(finding), -(finding.gain_tokens_per_s or 0.0), finding.class_)
    )


def _queue(seen: ServerFacts) -> ServingFinding | None:
    timed = seen.timed.drop_nulls(["queue_ms", "ttft_ms"])
    queue, ttft = mean(timed["queue_ms"]), mean(timed["ttft_ms"])
    blocks = mean(seen.waited["kv_ms"] - seen.waited["evicted_ms"])  # belongs to `_kv_cache`
    queue -= min(blocks, queue)
    if not ttft or queue < MIN_SHARE * ttft:
        return None
    evidence = [
        f"requests wait {format_ms(queue)} for their first iteration, of {format_ms(ttft)} to the first token"
        + (f", and {format_ms(blocks)} more for blocks of the KV cache" if blocks >= TINY_MS else "")
    ]
    if seen.waited.height:
        place = mean(seen.waited["place_ms"])
        largest = max(engine.limit for engine in seen.by_replica.values())
    if seen.waited.height and place >= TINY_MS:
        evidence.append(
            f"{format_ms(place)} of it while a batch held {counted(largest, 'request')}, "
            "the most that any did"
        )
    return ServingFinding(
        "queue", None, queue, None, evidence,
        "more requests in a batch, where memory allows; more replicas; fewer tokens of prompts in a batch",
    )  # fmt: skip


def _kv_cache(seen: ServerFacts) -> ServingFinding | None:
    """Find requests that wait, or are evicted, since no blocks of the KV cache are free."""
    waited = seen.waited.with_columns(before_ms=pl.col("kv_ms") - pl.col("evicted_ms"))
    to_first, per_token = mean(waited["before_ms"]), _per_token(waited, "evicted_ms")
    of_first, of_token = mean(seen.timed["ttft_ms"]), mean(seen.timed["tpot_ms"])
    if to_first < max(MIN_SHARE * of_first, TINY_MS) and per_token < max(MIN_SHARE * of_token, TINY_MS):
        return None
    lacking = sum(int(engine.lacks_blocks.sum()) for engine in seen.by_replica.values())
    whole = sum(engine.durations.size for engine in seen.by_replica.values())
    evidence = [
        f"requests wait {format_ms(to_first)} for blocks of the KV cache, of {format_ms(of_first)} to the "
        f"first token; in {lacking:,} of {counted(whole, 'iteration')} some did"
    ]
    lost = seen.timed.filter(pl.col("evictions") > 0)
    if lost.height:
        times = int(lost["evictions"].sum())
        evicted_ms = float(lost["evicted_ns"].sum()) / NS_PER_MS / times
        evidence.append(
            f"{lost.height:,} of {counted(seen.timed.height, 'request')} lost their blocks, "
            f"{counted(times, 'time')} in all, and ran again after {format_ms(evicted_ms)}, mean"
        )
    return ServingFinding(
        "kv_cache", per_token or None, to_first or None, gain_of_blocks(seen), evidence,
        "more memory for the KV cache (a larger share of the GPU's, blocks of 8 bits, more tensor "
        "parallelism), or fewer requests in a batch where they lose their blocks",
    )  # fmt: skip


def gain_of_blocks(seen: ServerFacts) -> float | None:
    """Return the additional tokens per second without lack of blocks in batches; None if unknown."""
    gained = busy = 0.0
    for engine in seen.by_replica.values():
        grown, lacking = engine.growth(), engine.iterations.filter(pl.Series(engine.lacks_blocks))
        busy += float(engine.durations.sum())
        if grown is None or lacking.is_empty():
            continue
        base, slope = max(grown[0], 0.0), max(grown[1], 0.0)
        size, more = mean(lacking["num_requests"]), mean(lacking["kv_waiting"])
        now, then = base + slope * size, base + slope * (size + more)
        if size > 0 and now > 0:
            gained += float(lacking["duration_ns"].sum()) * ((size + more) / size * now / then - 1)
    return seen.capacity * gained / busy if seen.capacity and gained > 0 else None


def _per_token(waited: pl.DataFrame, part: str) -> float:
    """Return the mean ms of a part of decoding per output token after the first."""
    rows = waited.filter(pl.col("output_tokens") > 1)
    return mean(rows[part] / (rows["output_tokens"] - 1)) if rows.height else 0.0


def _stall(seen: ServerFacts) -> ServingFinding | None:
    cost, tpot = _per_token(seen.waited, "stall_ms"), mean(seen.timed["tpot_ms"])
    if not tpot or cost < MIN_SHARE * tpot:
        return None
    count = seen.waited.filter(pl.col("stall_ms") > 0).height
    longest = max(seen.waited["stall_ms"])
    evidence = [
        f"decoding stalls for {format_ms(cost)} of {format_ms(tpot)} per token, for prompts of others",
        f"{count} of {counted(seen.waited.height, 'request')} stalled, up to {format_ms(longest)}",
    ]
    return ServingFinding(
        "prefill_stall", cost, None, None, evidence,
        "prefill in chunks, so that an iteration holds fewer tokens of prompts, or on an engine of its own",
    )  # fmt: skip


def _idle(seen: ServerFacts) -> ServingFinding | None:
    cost, tpot = _per_token(seen.waited, "idle_ms"), mean(seen.timed["tpot_ms"])
    if not tpot or cost < MIN_SHARE * tpot:
        return None
    gain = seen.capacity * cost / (tpot - cost) if seen.capacity and cost < tpot else None
    evidence = [
        f"{format_ms(cost)} of {format_ms(tpot)} per token pass between iterations, with requests in the "
        "batch"
    ]
    return ServingFinding(
        "idle", cost, None, gain, evidence,
        "prepare the next batch while the one before runs (asynchronous scheduling), or a faster scheduler",
    )  # fmt: skip


def _small_batch(seen: ServerFacts) -> ServingFinding | None:
    """Find decoding whose time hardly grows with its batch, so that a larger batch costs little.

    Where a lack of blocks of the KV cache keeps batches small, `_kv_cache` reports that instead.
    """
    for engine in seen.by_replica.values():
        grown, decodes = engine.growth(), engine.iterations.filter(pl.col("kind") == "decode")
        size = mean(decodes.filter(pl.col("num_requests") > 0)["num_requests"])
        lacking = float(engine.durations[engine.lacks_blocks].sum()) > MIN_SHARE * float(
            engine.durations.sum()
        )
        if grown is None or not size or lacking:
            continue
        now, slope = grown[0] + grown[1] * size, max(grown[1], 0.0)
        base = now - slope * size
        if base <= 0 or slope * size > FLAT * now:
            continue
        rate, doubled = size / now, 2 * size / (base + slope * 2 * size)
        evidence = [
            f"an iteration decodes {number(size)} requests, mean, in {format_ms(now)}, of which "
            f"{format_ms(base)} do not depend on how many they are",
        ]
        return ServingFinding(
            "small_batch", None, None, 1e3 * (doubled - rate), evidence,
            "more requests at a time on this engine, fewer replicas, or less tensor parallelism",
        )  # fmt: skip
    return None


def _in_windows(seen: ServerFacts) -> list[ServingFinding | None]:
    total = sum(seen.parts.get(part, 0.0) for part in seen.parts if part != "idle")
    if not total:
        return []
    findings = [
        _part(seen, "host", "host_bound", total,
              "CUDA graphs, or fewer and larger kernels: none (without a GPU: no operator) runs while the "
              "host works"),
        _part(seen, "communication", "communication", total,
              f"overlap it (nano-batches), {_other_help(seen)}"),
    ]  # fmt: skip
    experts = seen.experts
    if experts is not None and experts.wait_ms >= MIN_SHARE * total:
        evidence = [
            f"ranks wait {format_ms(experts.wait_ms)} per iteration for each other in "
            f"{format_ms(experts.total_ms)} of dispatch and combine",
            f"rank {experts.rank} was the last in {experts.share:.0%} of them",
        ]
        gain = _gain(seen, experts.wait_ms, total)
        helps = "balance the experts (more copies of busy ones, another placement)"
        findings.append(
            ServingFinding("experts", _of_token(seen, experts.wait_ms, total), None, gain, evidence, helps)
        )
    return findings


def _other_help(seen: ServerFacts) -> str:
    """Return what helps with communication besides overlap, depending on whether most of it is of experts."""
    if seen.experts is not None and seen.experts.total_ms >= seen.parts.get("communication", 0.0) / 2:
        return "faster dispatch and combine, fewer ranks that share the experts"
    return "faster all-reduces of small messages, less tensor parallelism"


def _part(seen: ServerFacts, part: str, name: str, total: float, helps: str) -> ServingFinding | None:
    cost = seen.parts.get(part, 0.0)
    if cost < MIN_SHARE * total:
        return None
    of_whole = f"{format_ms(cost)} of {format_ms(total)}"
    evidence = [f"{of_whole} of an iteration in deep windows ({cost / total:.0%})"]
    return ServingFinding(name, _of_token(seen, cost, total), None, _gain(seen, cost, total), evidence, helps)


def _of_token(seen: ServerFacts, cost: float, total: float) -> float:
    """Return the cost per token of a part of iterations in windows: its share, since windows slow hosts."""
    tpot = mean(seen.timed["tpot_ms"])
    return cost / total * tpot if tpot else cost


def _gain(seen: ServerFacts, cost: float, total: float) -> float | None:
    return seen.capacity * cost / (total - cost) if seen.capacity and cost < total else None
