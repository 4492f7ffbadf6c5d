"""The three sentences on a server: what limits throughput, what limits latency, what would help.

In: what the other modules found. Out: sentences; where the run cannot answer, the sentence says so.
"""

from __future__ import annotations

import polars as pl

from dpro.serving.findings import SeenServer, ServingFinding
from dpro.serving.latency import mean
from dpro.serving.words import duration, number

SEEN = 0.01  # of the time of iterations: less is not worth a word
QUEUED = 0.2  # of the latency, spent before the first iteration: less, and the engine keeps up
_WORDS = {
    "place_ms": "waiting for a place in the batch",
    "kv_ms": "waiting for blocks of the KV cache",
    "running_ms": "waiting for the iteration that runs",
    "prompt_ms": "their own prompt",
    "decode_ms": "decoding",
    "stall_ms": "prompts of others while they decode",
    "idle_ms": "time between iterations",
}


def throughput_limit(busy: float | None, seen: SeenServer) -> str:
    """What limits throughput: the engine where requests wait long for their first iteration, else arrivals.

    Args:
        busy: share of the time in which engines run iterations; None where unknown.
    """
    both = seen.timed.drop_nulls(["queue_ms", "latency_ms"])
    latency, queue = mean(both["latency_ms"]), mean(both["queue_ms"])
    if not latency:
        return (
            "Throughput: without a log of requests it is not known whether arrivals or the engine limit it."
        )
    said = [f"of {duration(latency)} requests wait {duration(queue)} for their first iteration"]
    if busy is not None:
        said.append(f"the engine is busy {busy:.0%} of the time")
    if seen.capacity:
        said.append(f"it makes {number(seen.capacity)} output tokens per busy second")
    share = _lacking(seen)
    if share >= SEEN:
        said.append(f"requests wait for blocks of the KV cache in {share:.0%} of its iterations' time")
    parts = {part: ms for part, ms in seen.parts.items() if part != "idle"}
    if parts:
        most = max(parts, key=lambda part: parts[part])
        said.append(f"most of an iteration is {most} ({parts[most] / sum(parts.values()):.0%})")
    what = "The engine limits" if queue >= QUEUED * latency else "Arrivals limit"
    return f"{what} throughput: {'; '.join(said)}."


def _lacking(seen: SeenServer) -> float:
    """Share of the time of iterations in which requests wait for blocks of the KV cache."""
    engines = seen.by_replica.values()
    whole = sum(float(each.durations.sum()) for each in engines)
    return sum(float(each.durations[each.lacks_blocks].sum()) for each in engines) / whole if whole else 0.0


def latency_limit(means: dict[str, float], timed: pl.DataFrame, seen: SeenServer) -> str:
    """What limits latency.

    Args:
        means: ms of a request by what it waited for.
    """
    whole = sum(means.values())
    if whole:
        first, second = sorted(means, key=lambda part: -means[part])[:2]
        return (
            f"Latency is limited by {_WORDS[first]} ({means[first] / whole:.0%} of {duration(whole)}) and "
            f"{_WORDS[second]} ({means[second] / whole:.0%})."
        )
    latency, ttft, queue = (mean(timed[name]) for name in ("latency_ms", "ttft_ms", "queue_ms"))
    if latency:
        return (
            f"Latency: of {duration(latency)} a request waits {duration(queue)} for its first iteration, has "
            f"its first token after {duration(ttft)}, and makes the others in {duration(latency - ttft)}."
        )
    parts = {part: ms for part, ms in seen.parts.items() if part != "idle"}
    if parts:
        most = max(parts, key=lambda part: parts[part])
        return (
            f"Latency per token is limited by {most}: {duration(parts[most])} of "
            f"{duration(sum(parts.values()))} of an iteration; without a log of requests their queue is not "
            "known."
        )
    return "Latency: neither a log of requests nor a deep window says what it consists of."


def what_helps(found: list[ServingFinding]) -> str:
    """What would help most, and by how much at most."""
    if not found:
        return "What would help: nothing stands out."
    best = found[0]
    gains = [
        text
        for value, text in (
            (best.cost_tpot_ms, f"{duration(best.cost_tpot_ms or 0.0)} per token"),
            (best.cost_ttft_ms, f"{duration(best.cost_ttft_ms or 0.0)} to the first token"),
            (best.gain_tokens_per_s, f"{number(best.gain_tokens_per_s or 0.0)} tokens per second"),
        )
        if value
    ]
    return f"What would help: {best.help}; worth {', '.join(gains) or 'what is not known'}, at most."
