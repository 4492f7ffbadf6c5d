"""Tables of a server: the requests that it answered, and the iterations of its engine."""

from __future__ import annotations

import polars as pl

from dpro.schema.shared import DURATION, RANK, START
from dpro.table import Column, Table

OUTCOMES = ("finished", "aborted", "unknown")
ITERATION_KINDS = (
    "prefill",  # prompts alone, or parts of them
    "decode",  # one token, or a few speculated ones, for each request in the batch
    "mixed",  # both in one batch
    "unknown",
)

Outcome = pl.Enum(OUTCOMES)
IterationKind = pl.Enum(ITERATION_KINDS)

REPLICA = Column(pl.Int64, "Number of the copy of the engine, from 0.", 0)

REQUESTS = Table(
    "requests",
    "One request that a server answered. Moments are -1 where they did not come or are unknown. Those of a "
    "log that counts from its own start are on a clock of their own.",
    {
        "replica": REPLICA,
        "request": Column(pl.Int64, "Number of the request in order of arrival, unique within the run."),
        "name": Column(pl.String, "Its id in the engine or the log, empty where it has none.", ""),
        "arrival_ns": Column(pl.Int64, "When the server, or the client that measured, had it."),
        "scheduled_ns": Column(pl.Int64, "When its first iteration began."),
        "first_token_ns": Column(pl.Int64, "When its first token was there."),
        "end_ns": Column(pl.Int64, "When its last token was there, or it was given up."),
        "prompt_tokens": Column(pl.Int64, "Tokens of its prompt; -1 unknown."),
        "cached_tokens": Column(pl.Int64, "Tokens of its prompt found in the prefix cache; -1 unknown."),
        "output_tokens": Column(pl.Int64, "Tokens that were made; -1 unknown."),
        "evictions": Column(
            pl.Int64, "How often it lost its blocks of the KV cache, and was computed again; -1 unknown.", -1
        ),
        "evicted_ns": Column(pl.Int64, "From each of these losses until it ran again, in all.", 0),
        "outcome": Column(Outcome, "How it ended.", "unknown"),
        "source": Column(pl.String, "What the row was read from.", ""),
    },
    ("replica", "arrival_ns", "request"),
)

ITERATIONS = Table(
    "iterations",
    "One iteration of the engine of one rank: one pass of one batch through the model.",
    {
        "rank": RANK,
        "replica": REPLICA,
        "iteration": Column(pl.Int64, "Number of the iteration on its rank, from 0."),
        "start_ns": START,
        "duration_ns": DURATION,
        "kind": Column(IterationKind, "What its batch consists of.", "unknown"),
        "prefill_tokens": Column(pl.Int64, "Tokens of prompts in the batch; -1 unknown."),
        "decode_tokens": Column(pl.Int64, "Tokens that follow a prompt in the batch; -1 unknown."),
        "num_requests": Column(pl.Int64, "Requests in the batch; -1 unknown."),
        "context_tokens": Column(
            pl.Int64, "Tokens in the KV cache that the batch attends to, summed over requests; -1 unknown."
        ),
        "waiting": Column(pl.Int64, "Requests that waited when the batch was made; -1 unknown."),
        "kv_waiting": Column(
            pl.Int64, "Requests of those, where no blocks of the KV cache were free for one; -1 unknown.", -1
        ),
        "evicted": Column(
            pl.Int64, "Requests that lost their blocks of the KV cache when it was made; -1 unknown.", -1
        ),
        "source": Column(pl.String, "What its batch was read from: hook, annotation, shapes.", ""),
    },
    ("rank", "start_ns", "iteration"),
)


def kind_of_batch() -> pl.Expr:
    """The kind of an iteration, from its tokens."""
    prefill, decode = pl.col("prefill_tokens"), pl.col("decode_tokens")
    return (
        pl.when((prefill < 0) | (decode < 0))
        .then(pl.lit("unknown"))
        .when(decode == 0)
        .then(pl.lit("prefill"))
        .when(prefill == 0)
        .then(pl.lit("decode"))
        .otherwise(pl.lit("mixed"))
    )
