"""What is known of a span except its times: shapes, bytes, and the communication it is part of.

In: a graph and the tables it was made from. Out: one row per node of which anything is known. Texts are short
whatever the trace holds: a viewer keeps them for every slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.members import members_of
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.models.gradients.buckets import gradient_passes
from dpro.replay.models.gradients.passes import Pass, parameters_of, passes_of
from dpro.schema import COLLECTIVES, SPANS
from dpro.schema.members import of_each_text
from dpro.words import shortened

MAX_TEXT = 200  # characters of an argument
SPAN = ["rank", "window", "span"]
# What a slice may say, and what it is; null where it is not known, or does not apply.
ARGUMENTS = {
    "shapes": pl.String,
    "bytes": pl.Int64,
    "dtype": pl.String,
    "op": pl.String,
    "process_group": pl.String,
    "group_ranks": pl.String,
    "seq": pl.Int64,
    "peer": pl.Int64,
    "bucket": pl.Int64,
    "algorithm": pl.String,
    "protocol": pl.String,
}
_COMMUNICATION = (NodeKind.ARRIVE, NodeKind.TRANSFER)


def arguments_of(graph: Graph) -> pl.DataFrame:
    """Return what is known of the nodes of a graph.

    Returns:
        `node` and the columns of `ARGUMENTS`, in order of the nodes; only of nodes of which one is known. For
        spans of communication `bytes` is the larger of what its rank puts in and gets; for others it is what
        is copied or set.
    """
    schema = pl.Schema({"node": pl.Int64, **ARGUMENTS})
    empty = schema.to_frame()
    if graph.run is None:
        return empty
    nodes = graph.nodes
    (known,) = np.nonzero(nodes.span >= 0)
    places = pl.DataFrame({"node": known, **{name: getattr(nodes, name)[known] for name in SPAN}})
    moves = np.isin(nodes.kind[known], _COMMUNICATION)
    work = places.filter(~pl.Series(moves)).join(_of_spans(graph), on=SPAN)
    moved = places.filter(pl.Series(moves)).join(_of_communication(graph), on=SPAN)
    moved = moved.join(_buckets(graph), on="node", how="left")
    frames = [frame.select(pl.exclude("rank", "window", "span")) for frame in (work, moved)]
    return pl.concat([empty, *frames], how="diagonal_relaxed").sort("node").cast(schema)


def _of_spans(graph: Graph) -> pl.DataFrame:
    """Return shapes of operators and bytes of copies, by span."""
    assert graph.run is not None
    spans = graph.run.table(SPANS, ["rank", "window", "span_id", "shapes", "bytes"])
    said = spans.filter((pl.col("shapes") != "") | (pl.col("bytes") >= 0))
    return said.select(
        pl.col("rank", "window").cast(pl.Int64),
        span="span_id",
        shapes=_short(pl.col("shapes")),
        bytes=_if_known(pl.col("bytes")),
    )


def _of_communication(graph: Graph) -> pl.DataFrame:
    """Return what `collectives` says of spans; of several messages in one span the first, and all bytes."""
    assert graph.run is not None
    rows = graph.run.table(COLLECTIVES).filter((pl.col("span_id") >= 0) & (pl.col("window") >= 0))
    payload = _if_known(pl.max_horizontal("bytes_in", "bytes_out"))
    first = (
        rows.with_columns(pl.col("rank", "window").cast(pl.Int64), span="span_id", payload=payload)
        .sort("collective_id")
        .group_by(SPAN)
        .agg(
            pl.exclude("payload").first(),
            pl.when(pl.col("payload").count() > 0).then(pl.col("payload").sum()),
        )
    )
    return first.select(
        *SPAN,
        bytes="payload",
        dtype=_short(pl.col("dtype")),
        op=_short(pl.col("op")),
        process_group=_short(pl.col("group")),
        group_ranks=of_each_text("group_ranks", _ranks_in_words, pl.String()),
        seq=_if_known(pl.col("sequence")),
        peer=_if_known(pl.col("peer")),
        algorithm=_short(pl.col("algorithm")),
        protocol=_short(pl.col("protocol")),
    )


def _buckets(graph: Graph) -> pl.DataFrame:
    """Return `node` and `bucket` of transfers that reduce gradients: their order within the pass."""
    found: dict[int, int] = {}
    with suppress(Unanswerable):
        for each in _passes(graph):
            found |= dict(zip(each.transfer.tolist(), range(each.transfer.size)))
            found |= dict(zip(each.arrive.tolist(), range(each.arrive.size)))
    return pl.DataFrame(
        {"node": [*found], "bucket": [*found.values()]}, schema={"node": pl.Int64, "bucket": pl.Int64}
    )


def _passes(graph: Graph) -> list[Pass]:
    """Return the passes of DDP, also with a communication hook, else those of any framework."""
    with suppress(Unanswerable):
        return passes_of(graph, parameters_of(graph.run))
    return gradient_passes(graph)


def _ranks_in_words(text: str) -> str | None:
    return in_ranges(members_of(text)) or None


def in_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text: `0-7`, `0-56 by 8`, or a list, cut off where it is long."""
    steps = set(np.diff(ranks).tolist())
    if len(ranks) > 2 and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return shortened(", ".join(map(str, ranks)), MAX_TEXT)


def _if_known(number: pl.Expr) -> pl.Expr:
    return pl.when(number >= 0).then(number)


def _short(text: pl.Expr) -> pl.Expr:
    """Return text of at most `MAX_TEXT` characters; null for none."""
    cut = pl.concat_str(text.str.slice(0, MAX_TEXT - 1), pl.lit("…"))
    return pl.when(text.str.len_chars() > MAX_TEXT).then(cut).when(text != "").then(text)
