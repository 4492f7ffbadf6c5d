"""Advice on what ranks exchange: fewer, smaller or hidden transfers, even experts and stages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.edits.coalescing import series_of
from dpro.replay.whatif.edits.synchronisation import redundant_reductions
from dpro.units import format_bytes, format_duration
from dpro.verdict.advice import MAX_GAIN, OFTEN, RECORD_MORE, WORTH, Advice, best_of, by_edit, partly
from dpro.verdict.facts import BYTES, JobFacts, exchanges_of_objects, place_of
from dpro.verdict.limits import (
    BUBBLE,
    COMMUNICATION,
    HOST,
    IMBALANCE,
)
from dpro.words import counted


def join_collectives(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Communicate once per update what is sent several times, or in several pieces."""
    again = best_of(facts, ["reduce-last"])
    if again is not None:
        graph = facts.job.graph
        vain = np.flatnonzero(redundant_reductions(graph) & (graph.nodes.kind == NodeKind.TRANSFER))
        do = "reduce gradients in the last backward pass of an update only (DDP: no_sync; FSDP2: "
        do += f"set_requires_gradient_sync): {counted(_per_step(graph, vain), 'reduction')} a step "
        yield by_edit("reduce-last", f"{do}are repeated by a later pass", again)
    joined = best_of(facts, ["coalesce"])
    if joined is not None and (joined.effect == "faster" or limit == COMMUNICATION):
        yield by_edit("coalesce", _series_in_words(facts), joined)


def exchange_tensors(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Exchange tensors instead of Python objects, which each step pickles and unpickles."""
    collectives = facts.analysis.collectives.filter(pl.col("window") >= 0)
    if not (collectives["dtype"] == BYTES).any():
        return
    exchanges = exchanges_of_objects(collectives, facts.spans)
    if exchanges.height < OFTEN * facts.rank_steps:
        return
    # The last rank to come waits for no other: its time is the least that an exchange takes.
    of_ranks = exchanges.group_by("rank").agg(pl.col("took_ns").sum())["took_ns"]
    took_ns = float(of_ranks.min()) / facts.rank_steps * of_ranks.len()  # type: ignore[arg-type]
    least = 1 / (1 - min(took_ns / facts.step_ns, 1 - 1 / MAX_GAIN))
    sent = format_bytes(float(exchanges["bytes"].sum()) / facts.rank_steps)
    yield Advice(
        "python",
        f"exchange tensors, not Python objects, or do it less often: {exchanges['op'].mode().sort()[0]} of "
        f"{sent} of pickled objects a step and rank takes {format_duration(took_ns)} or more, beside what "
        "makes and reads them",
        least,
        max(least, facts.gains_by_limit().get(HOST, 1.0)),
        "new code",
        "at most, all host work outside operators makes or reads the objects",
    )


def _series_in_words(facts: JobFacts) -> str:
    """Return which collectives are called in series, and where."""
    graph = facts.job.graph
    nodes, series = graph.nodes, series_of(graph)
    ops = pl.Series([graph.messages[message].op for message in nodes.message[series["transfer"]]])
    op = str(ops.mode().sort()[0])
    of_op = series.filter(ops == op)
    count = _per_step(graph, np.concatenate([of_op["transfer"], of_op["last"].unique()]))
    called = of_op.select(pl.col("rank").cast(facts.spans.schema["rank"]), span_id=nodes.span[of_op["call"]])
    calls = facts.spans.join(called, on=["rank", "span_id"], how="semi")
    return (
        f"one {op} for all (torch.cat what they send; of objects, one list): {count:,} of "
        f"{format_bytes(float(np.median(of_op['bytes'])))} a step in a row, each waited for"
        f"{place_of(calls, facts.spans)}"
    )


def _per_step(graph: Graph, transfers: Ints) -> int:
    """Return how many of some transfers are in a step of a rank that has any."""
    nodes = graph.nodes
    steps = np.stack([nodes.rank[transfers], nodes.window[transfers], nodes.step[transfers]])
    return int(np.rint(transfers.size / max(np.unique(steps, axis=1).shape[1], 1)))


def shorten_transfers(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Shorten or hide transfers."""
    gain = facts.gains_by_limit().get(COMMUNICATION, 1.0)
    if gain < 1.03 and limit != COMMUNICATION:
        return
    exposed = 1 - 1 / gain  # share of the step
    manifest = facts.analysis.run.manifest
    missing = len(manifest.ranks) < manifest.world_size
    kernels = facts.communication_kernels
    what = facts.short_names[kernels["name"][0]] if kernels.height else "transfers"
    if missing and limit == COMMUNICATION:
        yield Advice(
            RECORD_MORE,
            "record all ranks: without those that are missing it is not known whether the time in "
            f"{what} is waiting for late peers or slow transfers",
            None,
            None,
            "a setting",
        )
    if limit == COMMUNICATION:
        yield Advice(
            "transfer",
            f"shorten {what}: another algorithm, path or placement",
            partly(gain, 0.3),
            gain,
            "new code",
            "its transfers do not reach the bandwidth of the links",
        )
    hidden = 1 / max(1 / gain, exposed)  # other work of the step hides no more than it lasts
    yield Advice(
        "overlap",
        f"overlap {what} with compute",
        partly(hidden, 0.4),
        hidden,
        "new code",
        "there is compute that does not depend on it",
    )


def balance_experts(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Balance the experts of a mixture."""
    exchanged = facts.communication_kernels.filter(pl.col("name").str.contains("(?i)dispatch|combine"))
    gain = facts.gains_by_limit().get(IMBALANCE, 1.0)
    if exchanged.height and gain >= WORTH:
        yield Advice(
            "balance-experts",
            "balance the load of the experts: which rank is last differs from layer to layer",
            partly(gain, 0.7),
            1 + (gain - 1) * 2,
            "new code",
            "ranks wait in dispatch and combine for experts with more tokens",
        )


def even_out_stages(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Even out the stages of a pipeline, or shrink its bubble."""
    if not facts.analysis.outline.of_operations:
        return
    even = best_of(facts, ["balance:over=stages"])
    if even is not None:
        do = "distribute layers evenly over the stages"
        yield by_edit("stages", do, even, "layers can be moved in small pieces")
    if facts.gains_by_limit().get(BUBBLE, 1.0) < 1.1:
        return
    schedules = facts.candidates("pipeline")
    interleaved = best_of(facts, [text for text in schedules if "interleaved" in text])
    if interleaved is not None:
        do = "interleave two chunks of layers per stage, which halves the bubble"
        yield by_edit("interleave", do, interleaved)
    more = best_of(facts, [text for text in schedules if "micro_batches=" in text])
    if more is not None:
        yield by_edit("microbatches", f"{more.what()}, which shrinks the bubble's share of the step", more)
