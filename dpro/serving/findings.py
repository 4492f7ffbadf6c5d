"""What is slow in a server, what it costs, and what would help.

In: what the other modules found. Out: findings, costliest first. A cost is in ms of the time per output token
(TPOT) or to the first one (TTFT), mean over requests; the gain is in output tokens per second while the
engine is busy, where the engine would do more in the same time. Both are bounds: as if all of it went away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl
from msgspec import field

from dpro.documents import DocumentPart
from dpro.serving.engine import RecordedEngine
from dpro.serving.experts import ExpertWaits
from dpro.serving.latency import mean

CLEAR = 0.1  # of TTFT, TPOT or an iteration: less is no finding
FLAT = 0.3  # of an iteration that decodes, that a batch of twice the size adds, at most


class ServingFinding(DocumentPart, frozen=True):
    """One thing that makes requests or tokens slow.

    Attributes:
        class: queue, prefill_stall, host_bound, small_batch, experts, communication or idle.
        cost_tpot_ms: of the time per output token, at most; null where it costs none, or is not known.
        cost_ttft_ms: of the time to the first token, likewise.
        gain_tokens_per_s: more output tokens per second of a busy engine without it, at most; null likewise.
        evidence: what shows it.
        help: what would change it.
    """

    class_: str = field(name="class")
    cost_tpot_ms: float | None
    cost_ttft_ms: float | None
    gain_tokens_per_s: float | None
    evidence: list[str]
    help: str


@dataclass(frozen=True)
class SeenServer:
    """What is known of a server.

    Attributes:
        timed: requests with their durations.
        waited: those that lie within iterations, with what they waited for.
        by_replica: engines.
        parts: ms of each part of an iteration in windows; empty without windows.
        experts: waiting in the exchange of experts; None where there is none.
        capacity: output tokens per second of busy engines; None where iterations do not say.
    """

    timed: pl.DataFrame
    waited: pl.DataFrame
    by_replica: Mapping[int, RecordedEngine]
    parts: Mapping[str, float]
    experts: ExpertWaits | None
    capacity: float | None


def findings_of(seen: SeenServer) -> list[ServingFinding]:
    """All findings, those that cost most of a token first."""
    found = [_queue(seen), _stall(seen), _idle(seen), _small_batch(seen), *_in_windows(seen)]
    kept = [each for each in found if each is not None]
    return sorted(
        kept, key=lambda each: (-(each.cost_tpot_ms or 0.0), -(each.cost_ttft_ms or 0.0), each.class_)
    )


def _queue(seen: SeenServer) -> ServingFinding | None:
    both = seen.timed.drop_nulls(["queue_ms", "ttft_ms"])
    queue, ttft = mean(both["queue_ms"]), mean(both["ttft_ms"])
    if not ttft or queue < CLEAR * ttft:
        return None
    evidence = [
        f"requests wait {queue:.3g} ms for their first iteration, of {ttft:.3g} ms to the first token"
    ]
    if seen.waited.height:
        place = mean(seen.waited["place_ms"])
        largest = max(engine.limit for engine in seen.by_replica.values())
        evidence.append(f"{place:.3g} ms of it while a batch held {largest} requests, the most that any did")
    return ServingFinding(
        "queue", None, queue, None, evidence,
        "more requests in a batch, where memory allows; more replicas; fewer tokens of prompts in a batch",
    )  # fmt: skip


def _per_token(waited: pl.DataFrame, part: str) -> float:
    """Mean ms of a part of decoding for each output token after the first."""
    rows = waited.filter(pl.col("output_tokens") > 1)
    return mean(rows[part] / (rows["output_tokens"] - 1)) if rows.height else 0.0


def _stall(seen: SeenServer) -> ServingFinding | None:
    cost, tpot = _per_token(seen.waited, "stall_ms"), mean(seen.timed["tpot_ms"])
    if not tpot or cost < CLEAR * tpot:
        return None
    count = seen.waited.filter(pl.col("stall_ms") > 0).height
    longest = max(seen.waited["stall_ms"])
    evidence = [
        f"decoding stands still {cost:.3g} of {tpot:.3g} ms per token, for prompts of other requests",
        f"{count} of {seen.waited.height} requests are stalled, up to {longest:.3g} ms",
    ]
    return ServingFinding(
        "prefill_stall", cost, None, None, evidence,
        "prefill in chunks, so that an iteration holds fewer tokens of prompts, or on an engine of its own",
    )  # fmt: skip


def _idle(seen: SeenServer) -> ServingFinding | None:
    cost, tpot = _per_token(seen.waited, "idle_ms"), mean(seen.timed["tpot_ms"])
    if not tpot or cost < CLEAR * tpot:
        return None
    gain = seen.capacity * cost / (tpot - cost) if seen.capacity and cost < tpot else None
    evidence = [
        f"{cost:.3g} ms of {tpot:.3g} ms per token pass between iterations, with requests in the batch"
    ]
    return ServingFinding(
        "idle", cost, None, gain, evidence,
        "prepare the next batch while the one before runs (asynchronous scheduling), or a faster scheduler",
    )  # fmt: skip


def _small_batch(seen: SeenServer) -> ServingFinding | None:
    """Decoding whose time hardly grows with its batch: a larger one costs little."""
    for engine in seen.by_replica.values():
        grown, decodes = engine.growth(), engine.iterations.filter(pl.col("kind") == "decode")
        size = mean(decodes.filter(pl.col("num_requests") > 0)["num_requests"])
        if grown is None or not size:
            continue
        base, slope = grown
        now = base + slope * size
        if base <= 0 or now <= 0 or slope * size > FLAT * now:
            continue
        rate, doubled = size / now, 2 * size / max(base + slope * 2 * size, base)
        evidence = [
            f"an iteration decodes {size:.3g} requests in {now:.3g} ms, of which {base:.3g} ms do not depend "
            "on how many they are",
        ]
        return ServingFinding(
            "small_batch", None, None, 1e3 * (doubled - rate), evidence,
            "more requests at a time on this engine, fewer replicas, or less tensor parallelism",
        )  # fmt: skip
    return None


def _in_windows(seen: SeenServer) -> list[ServingFinding | None]:
    """Findings on the inside of iterations."""
    total = sum(seen.parts.get(part, 0.0) for part in seen.parts if part != "idle")
    if not total:
        return []
    found = [
        _part(seen, "host", "host_bound", total,
              "no kernel runs, and the host is still at work: CUDA graphs, or fewer and larger kernels"),
        _part(seen, "communication", "communication", total,
              "overlap it (nano-batches), faster all-reduces of small messages, less tensor parallelism"),
    ]  # fmt: skip
    experts = seen.experts
    if experts is not None and experts.wait_ms >= CLEAR * total:
        evidence = [
            f"ranks wait {experts.wait_ms:.3g} ms per iteration for each other in {experts.total_ms:.3g} ms "
            "of dispatch and combine",
            f"rank {experts.rank} was the last in {experts.share:.0%} of them",
        ]
        gain = _gain(seen, experts.wait_ms, total)
        helps = "balance the experts (more copies of busy ones, another placement)"
        found.append(ServingFinding("experts", experts.wait_ms, None, gain, evidence, helps))
    return found


def _part(seen: SeenServer, part: str, name: str, total: float, helps: str) -> ServingFinding | None:
    cost = seen.parts.get(part, 0.0)
    if cost < CLEAR * total:
        return None
    evidence = [f"{cost:.3g} of {total:.3g} ms of an iteration in deep windows ({cost / total:.0%})"]
    return ServingFinding(name, cost, None, _gain(seen, cost, total), evidence, helps)


def _gain(seen: SeenServer, cost: float, total: float) -> float | None:
    return seen.capacity * cost / (total - cost) if seen.capacity and cost < total else None
