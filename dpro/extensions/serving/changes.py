"""Changes to a server: `max-batch:requests=64`, `chunked-prefill:tokens=512`, `pools:prefill=1,decode=1`.

Takes the text of a change, and a `Server`: its requests, its engine and the cost of an iteration; returns the
changed `Server`. A value that a change needs and the recording does not show must be given as a key; none is
assumed silently.

Edits of `dpro.replay.whatif` change the inside of iterations: the graph of deep windows is replayed with
them, which gives factors on the time of iterations with prompts, and of those that only decode. Batches
outside of deep windows are assumed to change like those of their kind; a kind with too few iterations in
windows stays unchanged. Does not schedule requests: `predict` does that again with the changed cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dpro.errors import Unanswerable, UsageError
from dpro.extensions.serving.engine import Engine, IterationCost
from dpro.extensions.serving.fit import seconds
from dpro.extensions.serving.sized import ServedModel, cached_tokens, cost_of, scaled_to_device
from dpro.replay.cost.kernels.roofline import GPUS
from dpro.replay.cost.machine import machine_of
from dpro.replay.graph import Graph
from dpro.replay.timeline import (
    AFTER_STEPS,
    BEFORE_STEPS,
    changed_step_times,
    durations_of,
    replay,
    step_ends,
)
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.grammar import (
    MAX_VALUE,
    Key,
    KnownChange,
    Values,
    amount_key,
    count_key,
    split_edit,
    values_of,
)
from dpro.replay.whatif.job import with_kept_tables
from dpro.replay.whatif.predict import apply_all
from dpro.replay.whatif.registry import apply_change
from dpro.words import suggest

MIN_ITERATIONS = 2  # of a kind

# Maximum tokens of all requests, absolute or relative to those recorded: some microseconds each to simulate.
MAX_TOKENS, MAX_TIMES_TOKENS = 10_000_000, 4


class ChangedIterations(NamedTuple):
    """Factors on the time of iterations.

    Attributes:
        prompts: of those with prompts.
        decodes: of those that only decode.
        doubt: standard deviation of the logarithm of both.
    """

    prompts: float
    decodes: float
    doubt: float


def changed_iterations(graph: Graph, iterations: pl.DataFrame, edits: Sequence[Edit]) -> ChangedIterations:
    """Predict the effect of edits on iterations.

    Args:
        graph: of the deep windows of a server's run.
        iterations: rows of table `iterations` of one rank, with known tokens.

    Raises:
        Unanswerable: an edit needs what the run lacks, or windows have too few iterations.
    """
    ordered = iterations.sort("start_ns")
    # Make iterations the steps of the graph: each node belongs to the one in which it was recorded to begin.
    starts = ordered["start_ns"].to_numpy() - graph.origin_ns
    last = starts[-1] + ordered["duration_ns"][-1] if starts.size else 0
    began = graph.nodes.measured_start
    number = np.searchsorted(starts, began, side="right") - 1
    number = np.where(began >= last, AFTER_STEPS, np.where(number < 0, BEFORE_STEPS, number))
    by_iteration = with_kept_tables(replace(graph, nodes=replace(graph.nodes, step=number.astype(np.int64))))
    changed = apply_all(by_iteration, edits).graphs[-1]
    before, after = replay(by_iteration), replay(changed)
    baseline = step_ends(by_iteration, before.start, before.end)
    times = durations_of(baseline).join(
        changed_step_times(baseline, changed, after.end), on=["window", "step"], suffix="_after"
    )
    has_prompts = ordered["prefill_tokens"].to_numpy()[times["step"].to_numpy()] > 0
    kinds = [times.filter(pl.Series(kind)) for kind in (has_prompts, ~has_prompts)]
    if max(kind.height for kind in kinds) < MIN_ITERATIONS:
        raise Unanswerable(
            f"deep windows hold {times.height} iterations: {MIN_ITERATIONS} of a kind are needed to say "
            "what changes in them; record more windows"
        )
    prompts, decodes = map(_times_as_long, kinds)
    assumed = max((edit.doubt for edit in edits), default=0.0)
    return ChangedIterations(prompts, decodes, assumed * max(abs(np.log(prompts)), abs(np.log(decodes))))


def _times_as_long(durations: pl.DataFrame) -> float:
    """Return the factor on the time of iterations of a kind; 1 where there are too few."""
    before, after = (int(durations[name].to_numpy().sum()) for name in ("duration_ns", "duration_ns_after"))
    return after / before if durations.height >= MIN_ITERATIONS and before and after else 1.0


NO_LIMIT = 1 << 20  # tokens
# Standard deviation of the time of an iteration on another device or parallelism, in log: 90% of the rows of
# the tables of docs/accuracy.md are within 30%.
HARDWARE_ERROR = 0.16
# Factor on the estimate of `cost_of`, per token: in 95% of the rows of these tables an engine takes less, in
# the median 0.78; one limited by its host takes up to 2.7.
TIMES_NEEDED = 1.0


# Reached share of the ideal saving by fewer bytes, and the standard deviation of the time, in log: fp8
# products of 8 to 32 tokens with 50 to 200 MB of weights took 0.64 to 0.67 times as long as bf16, attention
# over 100 MB and more of fp8 keys and values 0.7 times (medians of five GPUs and three engines).
FEWER_BYTES_SAVE, FEWER_BYTES_ERROR = 0.7, 0.2
WIDE_BITS = 16.0


AS_THEY_ARE = ChangedIterations(1.0, 1.0, 0.0)


@dataclass(frozen=True)
class Pools:
    """Engines that compute prompts, others that decode, and the link between them for keys and values.

    Attributes:
        prefill, decode: number of engines of each kind.
        gbps: bandwidth of the link, 1e9 bytes per second.
        kv_bytes: per token.
    """

    prefill: int
    decode: int
    gbps: float
    kv_bytes: float


@dataclass(frozen=True)
class GivenFacts:
    """Facts about a server besides its recording.

    Attributes:
        served: the model, and the GPUs that serve it; None where unknown.
        logs: other requests by the name of their file, as rows of table `requests`.
        inside: effect of edits of the inside of iterations, which apply besides all other changes.
    """

    served: ServedModel | None = None
    logs: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    inside: ChangedIterations = AS_THEY_ARE


NOTHING_GIVEN = GivenFacts()


@dataclass(frozen=True)
class Server:
    """Requests, engine and cost of a server.

    Attributes:
        requests: rows of table `requests`, with arrivals and lengths.
        engine: how batches are formed.
        cost: of an iteration.
        pools: of engines; None where each engine does everything.
        given: facts besides the recording.
        doubt: standard deviation of each part of the cost that a change causes, in log.
    """

    requests: pl.DataFrame
    engine: Engine
    cost: IterationCost
    pools: Pools | None = None
    given: GivenFacts = NOTHING_GIVEN
    doubt: float = 0.0


def _engine(**keys: str) -> Callable[[Server, Values], Server]:
    """Return a change that sets limits of the engine, each from the named key."""

    def apply(server: Server, values: Values) -> Server:
        limits = {limit: values[key] for limit, key in keys.items()}
        return replace(server, engine=replace(server.engine, **limits))

    return apply


def _chunked(server: Server, values: Values) -> Server:
    alone = bool(values["alone"])
    if not values["tokens"]:
        engine = replace(server.engine, token_budget=NO_LIMIT, whole_prompts=True, prompts_first=alone)
        return replace(server, engine=engine)
    budget = values["tokens"]
    engine = replace(server.engine, token_budget=budget, whole_prompts=False, prompts_first=alone)
    return replace(server, engine=engine)


def _arrivals(server: Server, values: Values) -> Server:
    since = pl.col("arrival_ns") - pl.col("arrival_ns").min()
    sooner = (pl.col("arrival_ns").min() + since / values["rate"]).round().cast(pl.Int64)
    return replace(server, requests=server.requests.with_columns(arrival_ns=sooner))


def _longer(column: str) -> Callable[[Server, Values], Server]:
    def apply(server: Server, values: Values) -> Server:
        recorded = float(server.requests[column].sum())
        total = recorded * values["length"]
        if total > max(MAX_TOKENS, MAX_TIMES_TOKENS * recorded):  # bounds the time of the simulation
            raise Unanswerable(
                f"{total:,.0f} tokens are more than are replayed: at most {MAX_TOKENS:,}, or "
                f"{MAX_TIMES_TOKENS} times those recorded"
            )
        longer = (pl.col(column) * values["length"]).round().clip(1).cast(pl.Int64)
        return replace(server, requests=server.requests.with_columns(longer.alias(column)))

    return apply


def _prefix(server: Server, values: Values) -> Server:
    if values["share"] == 1:
        raise UsageError("prefix: share must be less than 1, since a prompt ends with tokens of its own")
    cached = (pl.col("prompt_tokens") * values["share"]).floor().cast(pl.Int64)
    return replace(server, requests=server.requests.with_columns(cached_tokens=cached))


def _speculate(server: Server, values: Values) -> Server:
    guessed, accepted, branches = values["tokens"], values["acceptance"], values["branches"]
    first = values["first"] if values["first"] is not None else accepted
    if branches > 1 and values["first"] is None:
        raise UsageError(
            "speculate: with branches=, also give first=, the probability that one of them begins right"
        )
    # Guesses are accepted in order up to the first wrong one, which is replaced by the right token.
    later = guessed if accepted == 1 else (1 - accepted**guessed) / (1 - accepted)
    made = 1 + first * later
    drafted_s = guessed * values["draft"] * (server.cost.weights_s + server.cost.host_s)
    cost = replace(
        server.cost,
        per_decode=server.cost.per_decode * (guessed * branches + 1),
        host_s=server.cost.host_s + drafted_s,
    )
    return replace(server, cost=cost, engine=replace(server.engine, tokens_per_decode=made))


def _pools(server: Server, values: Values) -> Server:
    pools = Pools(values["prefill"], values["decode"], values["gbps"], values["kv"])
    return replace(server, pools=pools)


def _nano_batches(server: Server, values: Values) -> Server:
    return replace(server, cost=replace(server.cost, overlapped=values["overlap"]))


def _faster(server: Server, values: Values) -> Server:
    cost = server.cost
    return replace(server, cost=replace(
        cost,
        host_s=cost.host_s / values["host"], request_s=cost.request_s / values["host"],
        weights_s=cost.weights_s / values["memory"], context_s=cost.context_s / values["memory"],
        token_s=cost.token_s / values["compute"], pair_s=cost.pair_s / values["compute"],
    ))  # fmt: skip


def _device(server: Server, values: Values) -> Server:
    if values["name"] not in GPUS:
        raise UsageError(f"device: no data sheet of {values['name']!r}{suggest(values['name'], GPUS)}")
    here = _served("device", server)
    return _moved_to_device(server, here, replace(here, gpu=values["name"]))


def _tensor_parallel(server: Server, values: Values) -> Server:
    here = _served("tensor-parallel", server)
    running = _mean_decoding(server)
    tokens = server.requests.select(pl.col("prompt_tokens") + pl.col("output_tokens") / 2).mean().item()
    computed = cost_of(here.model, machine_of(here.gpu), here.tp, here.dtype, running)
    batch = (np.zeros(1), np.full(1, running), np.full(1, running * tokens), np.zeros(1))
    needed_s, took_s = (float(seconds(cost, *batch)[0]) for cost in (computed, server.cost))
    if took_s > TIMES_NEEDED * needed_s:
        raise Unanswerable(
            f"tensor-parallel: a token takes {took_s * 1e3:.1f} ms, {took_s / needed_s:.1f} times what "
            f"{here.tp} x {here.gpu} need for it: the rest, as a rule the engine's host, need not change "
            "with the GPUs; `dpro record` the server, and `dpro serving` says what it waits for"
        )
    return _moved_to_device(server, here, replace(here, tp=values["degree"]))


def _quantized(server: Server, values: Values) -> Server:
    """Use fewer bits for weights, keys and values, or both: less to read, and room for more tokens."""
    weights, kept = (values[name] / WIDE_BITS for name in ("weights", "kv"))
    reading = (1 - FEWER_BYTES_SAVE * (1 - share) for share in (weights, kept))
    weights_s, context_s = (
        part * took for part, took in zip(reading, (server.cost.weights_s, server.cost.context_s))
    )
    memory, served = server.engine.kv_tokens, server.given.served
    if memory and served is not None and weights < 1:
        memory = round(memory * cached_tokens(served, weights) / cached_tokens(served))
    return replace(
        server,
        cost=replace(server.cost, weights_s=weights_s, context_s=context_s),
        engine=replace(server.engine, kv_tokens=round(memory / kept)),
        doubt=float(np.hypot(server.doubt, FEWER_BYTES_ERROR if min(weights, kept) < 1 else 0.0)),
    )


def _served(name: str, server: Server) -> ServedModel:
    """Return the model of a server.

    Raises:
        Unanswerable: it is unknown.
    """
    if server.given.served is None:
        raise Unanswerable(
            f"{name}: the model and the device of the recording are not known: give --model config.json "
            "and --device"
        )
    return server.given.served


def _moved_to_device(server: Server, here: ServedModel, there: ServedModel) -> Server:
    """Move a server to another device or parallelism; a known KV cache grows with the memory of the GPUs."""
    cost, memory = scaled_to_device(server.cost, here, there, _mean_decoding(server)), server.engine.kv_tokens
    if memory:
        memory = round(memory * cached_tokens(there) / cached_tokens(here))
    return replace(
        server,
        cost=cost,
        engine=replace(server.engine, kv_tokens=memory),
        given=replace(server.given, served=there),
        doubt=HARDWARE_ERROR,
    )


def logs_of(changes: Sequence[str]) -> list[str]:
    """Return the files of requests that changes name."""
    named = (
        values_of(name, rest, [key.name for key in CHANGES[name].keys], CHANGES[name].example)
        for name, rest in map(split_edit, changes)
        if name == "requests"
    )
    return [values["file"] for values in named if "file" in values]


def _mean_decoding(server: Server) -> int:
    """Return the mean number of requests that decode, while any does; 1 where their times are unknown."""
    if not {"first_token_ns", "end_ns"} <= set(server.requests.columns):
        return 1
    begun, ended = (server.requests[name].to_numpy() for name in ("first_token_ns", "end_ns"))
    decoded = (begun >= 0) & (ended > begun)
    if not decoded.any():
        return 1
    first, last = np.sort(begun[decoded]), np.sort(ended[decoded])
    idle = np.maximum(first[1:] - last[:-1], 0).sum()  # no request decodes
    busy = last[-1] - first[0] - idle
    return max(round(float((ended - begun)[decoded].sum() / busy)), 1)


def _other_requests(server: Server, values: Values) -> Server:
    if values["file"] not in server.given.logs:
        raise Unanswerable(f"requests: the log {values['file']} was not read")
    log = server.given.logs[values["file"]]
    others = log.filter(pl.col("prompt_tokens") > 0, pl.col("output_tokens") > 0).sort("arrival_ns")
    if others.is_empty():
        raise Unanswerable(f"{values['file']}: no request has its tokens of prompt and output")
    since = pl.col("arrival_ns") - pl.col("arrival_ns").min() + server.requests["arrival_ns"].min()
    kept = others.head(values["count"] or others.height)
    columns = ("prompt_tokens", "output_tokens", pl.col("cached_tokens").clip(0))
    return replace(server, requests=kept.select(since, *columns))


def _factor(name: str, default: Any = MISSING) -> Key:
    return Key(name, float, "times as much", default, 1 / MAX_VALUE, MAX_VALUE)


def _bits(name: str, help: str) -> Key:
    return Key(name, float, help, WIDE_BITS, 1, WIDE_BITS)


def _share(name: str, default: Any = MISSING) -> Key:
    return Key(name, float, "a share", default, 0, 1)


CHANGES: Mapping[str, KnownChange[Server]] = {
    "max-batch": KnownChange(
        _engine(max_requests="requests"),
        [count_key("requests", "at most")],
        "max-batch:requests=64",
        "Limit the number of requests per batch.",
    ),
    "chunked-prefill": KnownChange(
        _chunked,
        [count_key("tokens", "at most; 0: no limit", 0), count_key("alone", "1: prompts first", 0, 0)],
        "chunked-prefill:tokens=512",
        "Limit the tokens per iteration, mixing prompt chunks and decodes; with 0, prompts are computed "
        "whole. With alone=1, decodes wait while there are prompts.",
        "Sarathi-Serve (OSDI'24), DeepSpeed-FastGen",
    ),
    "arrivals": KnownChange(
        _arrivals, [_factor("rate")], "arrivals:rate=2", "Scale the request rate by this factor."
    ),
    "prompts": KnownChange(
        _longer("prompt_tokens"),
        [_factor("length")],
        "prompts:length=2",
        "Scale the length of prompts by this factor.",
    ),
    "outputs": KnownChange(
        _longer("output_tokens"),
        [_factor("length")],
        "outputs:length=0.5",
        "Scale the length of outputs by this factor.",
    ),
    "prefix": KnownChange(
        _prefix,
        [_share("share")],
        "prefix:share=0.5",
        "Find this share of each prompt in the prefix cache, which is assumed to contain it.",
        "BatchLLM (MLSys'25)",
    ),
    "speculate": KnownChange(
        _speculate,
        [
            count_key("tokens", "guessed"),
            _share("acceptance"),
            amount_key("draft", "of an iteration", 0.0),
            count_key("branches", "sequences of guesses", default=1),
            _share("first", None),
        ],
        "speculate:tokens=3,acceptance=0.7,draft=0.1",
        "Draft this many tokens per request and verify them in one iteration; `acceptance` is the "
        "probability that a token is right, `draft` the drafting cost, as a share of an iteration "
        "without tokens. With branches=3,first=0.9, three sequences of guesses are verified as a tree; "
        "`first` is the probability that one of them begins right.",
        "trees: SpecInfer (ASPLOS'24); expected number: Leviathan et al., ICML'23",
    ),
    "pools": KnownChange(
        _pools,
        [
            count_key("prefill", "engines"),
            count_key("decode", "engines"),
            _factor("gbps", 100.0),
            amount_key("kv", "bytes", 131072.0),
        ],
        "pools:prefill=1,decode=1,gbps=50",
        "Prefill on some engines and decode on others; keys and values, `kv` bytes per token, are sent "
        "over a link of `gbps` GB/s.",
        "Splitwise (ISCA'24)",
    ),
    "nano-batches": KnownChange(
        _nano_batches,
        [_share("overlap", 1.0)],
        "nano-batches:overlap=0.8",
        "Overlap attention and matmuls of two halves of a batch: this share of the shorter one is hidden.",
        "NanoFlow (OSDI'25)",
    ),
    "faster": KnownChange(
        _faster,
        [_factor("compute", 1.0), _factor("memory", 1.0), _factor("host", 1.0)],
        "faster:compute=2,memory=1.4",
        (
            "Use a device that computes and reads memory this much faster, or a faster host (CUDA graphs, "
            "more GPUs)."
        ),
    ),
    "kv-cache": KnownChange(
        _engine(kv_tokens="tokens"),
        [count_key("tokens", "that fit")],
        "kv-cache:tokens=80000",
        "Set the KV cache to this many tokens.",
    ),
    "quantize": KnownChange(
        _quantized,
        [_bits("weights", "bits of a weight"), _bits("kv", "bits of a key or value")],
        "quantize:weights=4.25,kv=8",
        "Quantize 16-bit weights, keys and values to this many bits, scales included; they are "
        "dequantized at use, so matmuls take as long. The effect on answers is not predicted.",
        "SliM-LLM (ICML'25), LLM-PQ (PPoPP'24)",
    ),
    "replicas": KnownChange(
        _engine(replicas="count"),
        [count_key("count", "how many")],
        "replicas:count=2",
        "Use this many engines, round-robin.",
    ),
    "requests": KnownChange(
        _other_requests,
        [Key("file", str, "a log of requests", MISSING), count_key("count", "of requests; 0: all", 0, 0)],
        "requests:file=AzureLLMInferenceTrace_conv.csv,count=500",
        (
            "Replace the requests by the first `count` requests of another log, or by all: arrivals and "
            "lengths."
        ),
        "Azure's public traces: Splitwise (ISCA'24)",
    ),
    "tensor-parallel": KnownChange(
        _tensor_parallel,
        [count_key("degree", "GPUs")],
        "tensor-parallel:degree=4",
        "Split each layer over this many GPUs; needs --model and --device. Parts of the cost scale as "
        "data sheets and measured kernels predict for the model.",
    ),
    "device": KnownChange(
        _device,
        [Key("name", str, "of the GPU", MISSING)],
        "device:name=H200",
        "Use another GPU; needs --model and --device. Costs scale as for tensor-parallel.",
    ),
    "clients": KnownChange(
        _engine(clients="count"),
        [count_key("count", "how many")],
        "clients:count=64",
        "Send the requests from this many clients, each after its previous one has ended; recorded "
        "arrivals are ignored.",
    ),
}


def changed_by_all(server: Server, changes: Sequence[str]) -> Server:
    """Apply changes, and the given effect of edits on the inside of iterations.

    Raises:
        UsageError: there is no such change, or its values are invalid.
    """
    after, inside = reduce(changed, changes, server), server.given.inside
    cost = replace(after.cost, with_prompts=inside.prompts, only_decodes=inside.decodes)
    return replace(after, cost=cost, doubt=float(np.hypot(after.doubt, inside.doubt)))


def changed(server: Server, text: str) -> Server:
    """Apply a change.

    Raises:
        UsageError: there is no such change, or its values are invalid.
    """
    return apply_change(server, text, CHANGES)
