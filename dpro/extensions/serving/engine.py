"""Simulates an inference engine: when each request is scheduled, gives its first token and ends.

Takes requests (arrival, tokens of prompt and output), an `Engine` with its limits, and the cost of an
iteration; returns the requests with their times, and the iterations that served them. The lengths of outputs
are those of the recording. Times are on the clock of the arrivals.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.engine import compiled

TIMES = ("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")
ITERATION_COLUMNS = (
    "replica", "start_ns", "end_ns",
    "prefill_tokens", "decode_tokens", "context_tokens", "prompt_pairs", "waiting",
)  # fmt: skip
MAX_ITERATIONS = 10_000_000  # per simulation: about a day of serving


@dataclass(frozen=True)
class Engine:
    """How an engine forms its batches.

    Attributes:
        token_budget: maximum tokens of an iteration, including decodes.
        max_requests: maximum requests in a batch.
        kv_tokens: capacity of the KV cache, tokens; 0 where it never limits.
        block_tokens: tokens of a block of that memory.
        whole_prompts: whether a prompt is computed in one iteration, unless it is longer than the budget.
        prompts_first: whether iterations with prompts have no decodes, which wait for them.
        ahead: whether an iteration is planned while the one before runs, so that an arrival waits for two.
        keeps_blocks: whether an evicted request finds its blocks that no other took again (prefix cache).
        tokens_per_decode: tokens per decode, more than one with speculative decoding.
        clients: clients that send a request when their previous one has ended; 0 where arrivals are given.
        replicas: number of engines; requests are distributed round-robin.
        masked: whether attention of all tokens of a batch is computed with all its keys, with those of other
            requests masked, as without a kernel made for batches.
    """

    token_budget: int = 2048
    max_requests: int = 256
    kv_tokens: int = 0
    block_tokens: int = 16
    whole_prompts: bool = False
    prompts_first: bool = False
    ahead: bool = False
    keeps_blocks: bool = False
    tokens_per_decode: float = 1.0
    clients: int = 0
    replicas: int = 1
    masked: bool = False


@dataclass(frozen=True)
class IterationCost:
    """Seconds of an iteration, by its contents.

    host + (weights^p + (token · tokens)^p)^(1/p) + request · decodes + context · context read + pair · pairs
    of tokens in the attention of prompts: the weights are read while tokens are multiplied, and the longer of
    the two counts (roofline); p is how well they overlap.

    Attributes:
        host_s: fixed.
        weights_s: to read the weights.
        token_s: to multiply a token.
        request_s: for each request that decodes: sampling, bookkeeping.
        context_s: for each token of context that decodes read.
        pair_s: for each pair of a prompt's token with one before it.
        power: p.
        per_decode: tokens multiplied per decode: more than one with speculative decoding.
        overlapped: share of the shorter of products and attention that overlaps the longer.
        with_prompts, only_decodes: factors on the time of iterations with prompts, and of others.
    """

    host_s: float
    weights_s: float
    token_s: float
    request_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0
    power: float = 2.0
    per_decode: float = 1.0
    overlapped: float = 0.0
    with_prompts: float = 1.0
    only_decodes: float = 1.0

    def array(self) -> Floats:
        """Return the cost as an array for the compiled loop."""
        parts = astuple(self)  # in the order of the loop's entries
        return np.array(parts, dtype=np.float64)


class ServedRequests(NamedTuple):
    """Simulated requests.

    Attributes:
        requests: as given, with `scheduled_ns`, `first_token_ns`, `end_ns`.
        iterations: the columns of `ITERATION_COLUMNS`, and `duration_ns`.
        evictions: how often a request lost its blocks, and was computed again.
    """

    requests: pl.DataFrame
    iterations: pl.DataFrame
    evictions: int


def serve(requests: pl.DataFrame, engine: Engine, cost: IterationCost) -> ServedRequests:
    """Simulate the service of requests.

    Args:
        requests: rows with `arrival_ns`, `prompt_tokens`, `output_tokens`, and `cached_tokens` where known.

    Raises:
        Unanswerable: a request has no known length, never fits into the memory, or they take too many
            iterations.
    """
    order = np.argsort(requests["arrival_ns"].to_numpy(), kind="stable")
    ordered = _array(requests[order])
    times = np.full((requests.height, 4), -1, dtype=np.int64)
    rows, evictions = [], 0
    for replica in range(min(engine.replicas, max(requests.height, 1))):  # any others have no requests
        of_replica = np.ascontiguousarray(ordered[replica :: engine.replicas])
        # The maximum of iterations without evictions; twice as many are allowed below.
        chunks = -(-of_replica[:, PROMPT] // engine.token_budget)
        decodes = of_replica[:, OUTPUT].max(initial=0) / engine.tokens_per_decode
        prompts = (of_replica[:, PROMPT] - of_replica[:, CACHED]).sum() / engine.token_budget
        if max(decodes, prompts) > MAX_ITERATIONS:
            raise _too_long()
        moments, iterations, evicted = run_requests(
            of_replica,
            _limits(engine),
            cost.array(),
            int(min(2 * (of_replica[:, OUTPUT] + chunks).sum() + 1, MAX_ITERATIONS)),
        )
        if len(iterations) == MAX_ITERATIONS:
            raise _too_long()
        times[order[replica :: engine.replicas]] = np.column_stack([of_replica[:, ARRIVAL], moments])
        rows.append(np.column_stack([np.full(len(iterations), replica, dtype=np.int64), iterations]))
        evictions += evicted
    if (times < 0).any():
        longest = int((ordered[:, PROMPT] + ordered[:, OUTPUT]).max(initial=0))
        raise Unanswerable(
            f"a request is never served: the longest has {longest:,} tokens, and the engine has memory for "
            f"{engine.kv_tokens:,}"
        )
    columns = {name: times[:, column] for column, name in enumerate(TIMES)}
    return ServedRequests(requests.with_columns(**columns), _iterations(np.concatenate(rows)), evictions)


def _array(requests: pl.DataFrame) -> Ints:
    """Return [N, 4] rows of requests for the compiled loop.

    Raises:
        Unanswerable: one has no known length.
    """
    lengths = requests.select(pl.min_horizontal("prompt_tokens", "output_tokens").min()).item()
    if lengths is not None and lengths < 1:
        raise Unanswerable(
            "a request has no known length: its tokens are needed, of the prompt and the output"
        )
    cached = pl.lit(0)
    if "cached_tokens" in requests.columns:  # at least one token is left to compute
        cached = pl.col("cached_tokens").clip(0, pl.col("prompt_tokens") - 1)
    columns = requests.select("arrival_ns", "prompt_tokens", "output_tokens", cached.alias("cached"))
    return np.ascontiguousarray(columns.cast(pl.Int64).to_numpy())


def _limits(engine: Engine) -> Ints:
    """Return [NUM_LIMITS] limits of an engine for the compiled loop."""
    limits = np.zeros(NUM_LIMITS, dtype=np.int64)
    limits[BUDGET] = engine.token_budget
    limits[MAX_REQUESTS] = engine.max_requests
    limits[KV_BLOCKS] = engine.kv_tokens // engine.block_tokens
    limits[BLOCK] = engine.block_tokens
    limits[WHOLE] = engine.whole_prompts
    limits[ALONE] = engine.prompts_first
    limits[AHEAD] = engine.ahead
    limits[REUSE] = engine.keeps_blocks
    limits[GAIN] = round(engine.tokens_per_decode * ONE_TOKEN)
    limits[MASKED] = engine.masked
    limits[CLIENTS] = -(-engine.clients // engine.replicas)
    return limits


def _too_long() -> Unanswerable:
    return Unanswerable(f"the requests take more than {MAX_ITERATIONS:,} iterations: ask for shorter ones")


def _iterations(rows: Ints) -> pl.DataFrame:
    """Convert rows of the loop, preceded by the number of the replica, to a frame."""
    columns = dict(zip(ITERATION_COLUMNS, rows.T, strict=True))
    frame = pl.DataFrame({name: np.ascontiguousarray(column) for name, column in columns.items()})
    return frame.with_columns(duration_ns=pl.col("end_ns") - pl.col("start_ns"))


# The compiled loop of an inference engine: which tokens of which requests each iteration computes.

# Entries of `limits`.
BUDGET, MAX_REQUESTS, KV_BLOCKS, BLOCK, WHOLE, ALONE, AHEAD, REUSE, GAIN, CLIENTS, MASKED, NUM_LIMITS = range(
    12
)
NEVER = np.iinfo(np.int64).max  # arrival of requests that are not sent yet
ONE_TOKEN = 1024  # GAIN per token that a decode yields
# Entries of `counts`.
RUNNING, ARRIVED, EVICTED, FREE, EVICTIONS, EVICTIONS_BEFORE, OLDEST, NEWEST, SENT, NUM_COUNTS = range(10)
# Columns of the requests' state.
COMPUTED, PRODUCED, BLOCKS, CHUNK, CREDIT, KEPT, STATE_COLUMNS = range(7)
# Columns of the times of requests.
SCHEDULED, FIRST, END, TIME_COLUMNS = range(4)
# Columns of the requests: arrival ns, tokens of the prompt, of the output, of the prompt that are cached.
ARRIVAL, PROMPT, OUTPUT, CACHED = range(4)
# Columns of iterations: start and end ns, tokens of prompts, decodes, their context, pairs, waiting requests.
START, STOP, PREFILL, DECODES, CONTEXT, ATTENTION, WAITING, NUM_ITERATION_COLUMNS = range(8)
# Entries of a cost: s or s per unit, the power that joins weights and tokens, factors.
HOST, WEIGHTS, TOKEN, REQUEST, READ, PAIR, POWER, PER_DECODE, OVERLAPPED = range(9)
WITH_PROMPTS, ONLY_DECODES = 9, 10  # factors on time


@compiled
def _iteration_s(cost: Any, prefill: float, decodes: float, context: float, attention: float) -> float:
    """Return the seconds of an iteration: reading weights overlapped with multiplication, then attention."""
    multiply = cost[TOKEN] * (prefill + cost[PER_DECODE] * decodes)
    longer = max(cost[WEIGHTS], multiply)
    shorter = min(cost[WEIGHTS], multiply)
    joined = longer
    if shorter > 0:
        joined = longer * (1 + (shorter / longer) ** cost[POWER]) ** (1 / cost[POWER])
    attend = cost[READ] * context + cost[PAIR] * attention
    hidden = cost[OVERLAPPED] * min(joined, attend)
    times = cost[WITH_PROMPTS] if prefill > 0 else cost[ONLY_DECODES]
    return float(times * (cost[HOST] + joined + attend - hidden + cost[REQUEST] * decodes))


@compiled
def _free(owner: int, blocks: int, freed: Any, counts: Any) -> None:
    """Append blocks to the free ones; their contents stay until the blocks are taken."""
    counts[FREE] += blocks
    freed[counts[NEWEST] % freed.shape[0]] = owner, blocks
    counts[NEWEST] += 1


@compiled
def _take(blocks: int, state: Any, freed: Any, counts: Any) -> None:
    """Take the blocks that were freed first; their last owner can no longer find them again."""
    counts[FREE] -= blocks
    while blocks > 0:
        owner, there = freed[counts[OLDEST] % freed.shape[0]]
        taken = min(blocks, there)
        blocks -= taken
        freed[counts[OLDEST] % freed.shape[0], 1] = there - taken
        if owner >= 0:
            state[owner, KEPT] -= taken
        if taken == there:
            counts[OLDEST] += 1


@compiled
def _find_again(request: int, state: Any, freed: Any, counts: Any) -> None:
    """Give a request back the blocks that it left and no other took, which have its first tokens."""
    kept = state[request, KEPT]
    if kept == 0:
        return
    for place in range(counts[OLDEST], counts[NEWEST]):
        if freed[place % freed.shape[0], 0] == request:
            freed[place % freed.shape[0], 1] = 0
    counts[FREE] -= kept
    state[request, BLOCKS] = kept
    state[request, KEPT] = 0


@compiled
def _reserve(request: int, tokens: int, limits: Any, state: Any, freed: Any, counts: Any) -> bool:
    """Reserve blocks for the next tokens of a request; return False where too few are free."""
    if limits[KV_BLOCKS] == 0:
        return True
    needed = -(-(state[request, COMPUTED] + tokens) // limits[BLOCK]) - state[request, BLOCKS]
    if needed > counts[FREE]:
        return False
    if needed > 0:
        _take(needed, state, freed, counts)
        state[request, BLOCKS] += needed
    return True


@compiled
def _evict_last(limits: Any, state: Any, running: Any, evicted: Any, freed: Any, counts: Any) -> None:
    """Evict the request that was scheduled last and free its blocks; it waits before all others."""
    counts[RUNNING] -= 1
    request = running[counts[RUNNING]]
    if limits[REUSE]:
        whole = state[request, COMPUTED] // limits[BLOCK]
        _free(-1, state[request, BLOCKS] - whole, freed, counts)
        _free(request, whole, freed, counts)
        state[request, KEPT] = whole
    else:
        _free(-1, state[request, BLOCKS], freed, counts)
    state[request, BLOCKS] = 0
    state[request, COMPUTED] = 0
    state[request, CHUNK] = 0
    evicted[counts[EVICTED]] = request
    counts[EVICTED] += 1
    counts[EVICTIONS] += 1


@compiled
def _tokens_to_compute(request: int, requests: Any, state: Any) -> int:
    """Return the tokens that are known and not computed; 0 for a request that has all its output."""
    if state[request, PRODUCED] >= requests[request, OUTPUT]:
        return 0
    return int(requests[request, PROMPT] + state[request, PRODUCED] - state[request, COMPUTED])


@compiled
def _continue_running(
    budget: int, requests: Any, limits: Any, state: Any, running: Any, evicted: Any, freed: Any, counts: Any
) -> int:
    """Assign tokens to running requests; return the rest of the budget."""
    position = 0
    while position < counts[RUNNING]:
        request = running[position]
        tokens = min(_tokens_to_compute(request, requests, state), budget)
        while not _reserve(request, tokens, limits, state, freed, counts):
            last = running[counts[RUNNING] - 1]
            if state[last, PRODUCED] >= requests[last, OUTPUT]:  # about to end, which frees its blocks
                tokens = 0
                break
            _evict_last(limits, state, running, evicted, freed, counts)
            if last == request:
                tokens = 0
                break
        state[request, CHUNK] = tokens
        budget -= tokens
        position += 1
    return budget


@compiled
def _admit(
    now: int,
    budget: int,
    requests: Any,
    limits: Any,
    state: Any,
    running: Any,
    evicted: Any,
    freed: Any,
    counts: Any,
    times: Any,
) -> int:
    """Assign the budget to waiting requests; return its rest."""
    while budget > 0 and counts[RUNNING] < limits[MAX_REQUESTS]:
        again = counts[EVICTED] > 0
        if again:
            request = evicted[counts[EVICTED] - 1]
            state[request, COMPUTED] = state[request, KEPT] * limits[BLOCK]
        elif counts[ARRIVED] < requests.shape[0] and requests[counts[ARRIVED], ARRIVAL] <= now:
            request = counts[ARRIVED]
            state[request, COMPUTED] = requests[request, CACHED]
        else:
            break
        lacking = _tokens_to_compute(request, requests, state)
        tokens = min(lacking, budget)
        if limits[WHOLE] and tokens < lacking and budget < limits[BUDGET]:
            break  # a prompt that is longer than the whole budget is still cut
        if limits[KV_BLOCKS] > 0:
            blocks = -(-(state[request, COMPUTED] + tokens) // limits[BLOCK])
            if blocks > counts[FREE]:  # blocks that it finds again are counted as free
                break
            _find_again(request, state, freed, counts)
            _reserve(request, tokens, limits, state, freed, counts)
        if again:
            counts[EVICTED] -= 1
        else:
            counts[ARRIVED] += 1
            times[request, SCHEDULED] = now
        state[request, CHUNK] = tokens
        running[counts[RUNNING]] = request
        counts[RUNNING] += 1
        budget -= tokens
    return budget


@compiled
def _schedule(
    now: int,
    requests: Any,
    limits: Any,
    state: Any,
    running: Any,
    evicted: Any,
    freed: Any,
    counts: Any,
    times: Any,
) -> int:
    """Plan an iteration in `CHUNK` of each running request; return its number of tokens."""
    budget = limits[BUDGET]
    if limits[ALONE]:  # prompts first; decodes stall while there are any
        for position in range(counts[RUNNING]):
            state[running[position], CHUNK] = 0
        left = _admit(now, budget, requests, limits, state, running, evicted, freed, counts, times)
        if left < budget:
            return int(budget - left)
    left = _continue_running(budget, requests, limits, state, running, evicted, freed, counts)
    if left > 0 and counts[EVICTIONS] == counts[EVICTIONS_BEFORE] and not limits[ALONE]:
        left = _admit(now, left, requests, limits, state, running, evicted, freed, counts, times)
    counts[EVICTIONS_BEFORE] = counts[EVICTIONS]
    return int(budget - left)


@compiled
def _compute(requests: Any, limits: Any, state: Any, running: Any, counts: Any, row: Any) -> int:
    """Advance each request by its chunk, and record the contents of the iteration; return its tokens."""
    row[:] = 0
    keys = 0
    for position in range(counts[RUNNING]):
        request = running[position]
        tokens = state[request, CHUNK]
        if tokens == 0:
            continue
        before = state[request, COMPUTED]
        keys += before + tokens
        decodes = state[request, PRODUCED] > 0 and tokens == 1
        if decodes:
            row[DECODES] += 1
            row[CONTEXT] += before
        else:
            row[PREFILL] += tokens
            row[ATTENTION] += tokens * before + tokens * tokens // 2
        state[request, COMPUTED] = before + tokens
        state[request, CHUNK] = 0
        if state[request, COMPUTED] == requests[request, PROMPT] + state[request, PRODUCED]:
            gained = 1
            if decodes:
                state[request, CREDIT] += limits[GAIN]
                gained = state[request, CREDIT] // ONE_TOKEN
                state[request, CREDIT] -= gained * ONE_TOKEN
            gained = min(gained, requests[request, OUTPUT] - state[request, PRODUCED])
            state[request, PRODUCED] += gained
            state[request, COMPUTED] += gained - 1  # speculated tokens are computed already
    if limits[MASKED]:
        row[ATTENTION] = (row[PREFILL] + row[DECODES]) * keys
    return int(row[PREFILL] + row[DECODES])


@compiled
def _release(
    now: int, requests: Any, limits: Any, state: Any, running: Any, freed: Any, counts: Any, times: Any
) -> int:
    """Record first and last tokens, and release finished requests; return their number.

    With `clients`, the client of each finished request sends its next one at that moment.
    """
    kept = 0
    for position in range(counts[RUNNING]):
        request = running[position]
        if state[request, PRODUCED] > 0 and times[request, FIRST] < 0:
            times[request, FIRST] = now
        if state[request, PRODUCED] >= requests[request, OUTPUT]:
            times[request, END] = now
            _free(-1, state[request, BLOCKS], freed, counts)
            state[request, BLOCKS] = 0
            if limits[CLIENTS] and counts[SENT] < requests.shape[0]:
                requests[counts[SENT], ARRIVAL] = now
                counts[SENT] += 1
        else:
            running[kept] = request
            kept += 1
    gone = counts[RUNNING] - kept
    counts[RUNNING] = kept
    return int(gone)


@compiled
def _run(
    requests: Any,
    limits: Any,
    cost: Any,
    state: Any,
    running: Any,
    evicted: Any,
    freed: Any,
    counts: Any,
    times: Any,
    iterations: Any,
) -> int:
    """Iterate until all requests have ended, one never fits, or `iterations` is full; return their number."""
    now = requests[0, ARRIVAL]
    done = 0
    number = 0
    planned = 0
    while done < requests.shape[0] and number < iterations.shape[0]:
        if planned == 0:
            if counts[RUNNING] + counts[EVICTED] == 0:
                now = max(now, requests[counts[ARRIVED], ARRIVAL])
            planned = _schedule(now, requests, limits, state, running, evicted, freed, counts, times)
            if planned == 0:
                break
        row = iterations[number]
        number += 1
        _compute(requests, limits, state, running, counts, row)
        spent = _iteration_s(cost, row[PREFILL], row[DECODES], row[CONTEXT], row[ATTENTION])
        stop = now + max(1, round(spent * 1e9))
        row[START] = now
        row[STOP] = stop
        row[WAITING] = np.searchsorted(requests[:, ARRIVAL], now, side="right") - counts[ARRIVED]
        if limits[AHEAD]:
            planned = _schedule(now, requests, limits, state, running, evicted, freed, counts, times)
            done += _release(stop, requests, limits, state, running, freed, counts, times)
        else:
            done += _release(stop, requests, limits, state, running, freed, counts, times)
            planned = _schedule(stop, requests, limits, state, running, evicted, freed, counts, times)
        now = stop
    return number


def run_requests(requests: Ints, limits: Ints, cost: Floats, max_iterations: int) -> tuple[Ints, Ints, int]:
    """Simulate the service of requests in the compiled loop.

    Args:
        requests: [N, 4] by arrival: arrival ns, tokens of the prompt and of the output, cached ones. Where
            clients send them one after the other, arrivals are written into it.
        limits: [NUM_LIMITS] of the engine.
        cost: [11] of an iteration.
        max_iterations: number after which the simulation stops, with unfinished requests.

    Returns:
        times: [N, 3] ns when each was scheduled, gave its first token and ended, -1 where it did not;
        iterations: [K, 7]; and the number of evictions.
    """
    number = requests.shape[0]
    times = np.full((number, TIME_COLUMNS), -1, dtype=np.int64)
    iterations = np.empty((max_iterations, NUM_ITERATION_COLUMNS), dtype=np.int64)
    if not number:
        return times, iterations[:0], 0
    state = np.zeros((number, STATE_COLUMNS), dtype=np.int64)
    running, evicted = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    counts = np.zeros(NUM_COUNTS, dtype=np.int64)
    freed = np.zeros((4 * number + 8, 2), dtype=np.int64)
    counts[FREE] = freed[0, 1] = limits[KV_BLOCKS]
    freed[0, 0], counts[NEWEST] = -1, 1
    if limits[CLIENTS]:
        counts[SENT] = min(limits[CLIENTS], number)
        requests[counts[SENT] :, ARRIVAL] = NEVER
    count = _run(requests, limits, cost, state, running, evicted, freed, counts, times, iterations)
    return times, iterations[:count], int(counts[EVICTIONS])
