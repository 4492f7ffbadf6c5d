"""Requests served by an engine: when each is scheduled, gives its first token and ends.

In: requests (arrival, tokens of prompt and output), an `Engine` with its limits, and the cost of an
iteration. Out: the same requests with their times, and the iterations that served them. Requests have a fixed
length: what a server answers is taken from the recording. The clock of the result is that of the arrivals.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.serving import loop

TIMES = ("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")
ITERATION_COLUMNS = (
    "replica", "start_ns", "end_ns",
    "prefill_tokens", "decode_tokens", "context_tokens", "prompt_pairs", "waiting",
)  # fmt: skip
MAX_ITERATIONS = 50_000_000


@dataclass(frozen=True)
class Engine:
    """How an engine forms its batches.

    Attributes:
        token_budget: tokens of an iteration at most, decodes included.
        max_requests: in a batch at most.
        kv_tokens: for which there is memory for keys and values; 0 where it never binds.
        block_tokens: tokens of a block of that memory.
        whole_prompts: a prompt is computed in one iteration, unless it is longer than the budget.
        prompts_first: iterations with prompts hold no decodes, which wait for them.
        ahead: an iteration is planned while the one before runs, so that an arrival waits for two.
        keeps_blocks: blocks of an evicted request that no other took are found again (prefix cache).
        tokens_per_decode: what a decode yields, more than one where tokens are guessed.
        clients: that send a request when the one before has ended; 0 where arrivals are given.
        replicas: of the engine; requests take turns.
        masked: attention of all tokens of a batch is computed with all keys of the batch, and what belongs to
            other requests is masked, as without a kernel made for batches.
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
    """Seconds of an iteration, by what it holds.

    host + (weights^p + (token · tokens)^p)^(1/p) + request · decodes + context · context read
    + pair · pairs of tokens in the attention of prompts: the weights are read while tokens are multiplied,
    and the longer of the two counts (roofline); p says how well they overlap.

    Attributes:
        host_s: fixed.
        weights_s: to read the weights.
        token_s: to multiply a token.
        request_s: for each request that decodes: sampling, bookkeeping.
        context_s: for each token of context that decodes read.
        pair_s: for each pair of a prompt's token with one before it.
        power: p.
        per_decode: tokens that are multiplied for each decode: more than one where tokens are guessed.
        overlapped: share of the shorter, of products and attention, that runs beside the longer.
        with_prompts, only_decodes: how many times as long iterations with prompts take, and the others.
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
        """As the loop takes it."""
        parts = astuple(self)  # in the order of the loop's entries
        return np.array(parts, dtype=np.float64)


class ServedRequests(NamedTuple):
    """What became of requests.

    Attributes:
        requests: as they were given, with `scheduled_ns`, `first_token_ns`, `end_ns`.
        iterations: the columns of `ITERATION_COLUMNS`, and `duration_ns`.
        evictions: how often a request lost its place, and was computed again.
    """

    requests: pl.DataFrame
    iterations: pl.DataFrame
    evictions: int


def serve(requests: pl.DataFrame, engine: Engine, cost: IterationCost) -> ServedRequests:
    """Serve requests.

    Args:
        requests: rows with `arrival_ns`, `prompt_tokens`, `output_tokens`, and `cached_tokens` where known.

    Raises:
        Unanswerable: a request has no known length, or never fits into the memory.
    """
    order = np.argsort(requests["arrival_ns"].to_numpy(), kind="stable")
    ordered = _array(requests[order])
    times = np.full((requests.height, 4), -1, dtype=np.int64)
    rows, evictions = [], 0
    for replica in range(engine.replicas):
        mine = np.ascontiguousarray(ordered[replica :: engine.replicas])
        found, iterations, evicted = loop.run_requests(
            mine, _limits(engine), cost.array(), _at_most(mine, engine)
        )
        times[order[replica :: engine.replicas]] = np.column_stack([mine[:, loop.ARRIVAL], found])
        rows.append(np.column_stack([np.full(len(iterations), replica, dtype=np.int64), iterations]))
        evictions += evicted
    if (times < 0).any():
        longest = int((ordered[:, loop.PROMPT] + ordered[:, loop.OUTPUT]).max(initial=0))
        raise Unanswerable(
            f"a request is never served: the longest has {longest:,} tokens, and the engine has memory for "
            f"{engine.kv_tokens:,}"
        )
    columns = {name: times[:, column] for column, name in enumerate(TIMES)}
    return ServedRequests(requests.with_columns(**columns), _iterations(np.concatenate(rows)), evictions)


def _array(requests: pl.DataFrame) -> Ints:
    """[N, 4] rows of requests as the loop takes them.

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
    found = requests.select("arrival_ns", "prompt_tokens", "output_tokens", cached.alias("cached"))
    return np.ascontiguousarray(found.cast(pl.Int64).to_numpy())


def _limits(engine: Engine) -> Ints:
    """[NUM_LIMITS] of an engine, as the loop takes them."""
    limits = np.zeros(loop.NUM_LIMITS, dtype=np.int64)
    limits[loop.BUDGET] = engine.token_budget
    limits[loop.MAX_REQUESTS] = engine.max_requests
    limits[loop.KV_BLOCKS] = engine.kv_tokens // engine.block_tokens
    limits[loop.BLOCK] = engine.block_tokens
    limits[loop.WHOLE] = engine.whole_prompts
    limits[loop.ALONE] = engine.prompts_first
    limits[loop.AHEAD] = engine.ahead
    limits[loop.REUSE] = engine.keeps_blocks
    limits[loop.GAIN] = round(engine.tokens_per_decode * loop.ONE_TOKEN)
    limits[loop.MASKED] = engine.masked
    limits[loop.CLIENTS] = -(-engine.clients // engine.replicas)
    return limits


def _at_most(requests: Ints, engine: Engine) -> int:
    """Iterations that serve the requests at most, if nothing is evicted; room for as many again."""
    chunks = -(-requests[:, loop.PROMPT] // engine.token_budget)
    return int(min(2 * (requests[:, loop.OUTPUT] + chunks).sum() + 1, MAX_ITERATIONS))


def _iterations(rows: Ints) -> pl.DataFrame:
    """Rows of the loop, with the number of the replica before them, as a frame."""
    columns = dict(zip(ITERATION_COLUMNS, rows.T, strict=True))
    frame = pl.DataFrame({name: np.ascontiguousarray(column) for name, column in columns.items()})
    return frame.with_columns(duration_ns=pl.col("end_ns") - pl.col("start_ns"))
