"""Which ranks hold a part of the model that the others cannot do without.

In: a graph with the run it was made from, and ranks. Out: why they cannot be left out, in words; nothing
where they hold what others hold, too. Coordinates on the axes of the job decide, else the names of process
groups, else what is communicated: gathered or scattered parameters, tokens sent to experts or tables,
activations reduced in forward. Whole operations are no shards: their replicas are given by their places.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import polars as pl

from dpro.errors import Unanswerable
from dpro.members import members_of
from dpro.replay.graph import Graph
from dpro.replay.whatif.edits.parallelism.pipeline import computes
from dpro.schema import COLLECTIVES, SPANS, STEPS, WORKERS
from dpro.store import Run

AXES = {"tp": "tensor-parallel", "pp": "pipeline", "cp": "context-parallel", "ep": "expert-parallel"}
NAMES_A_SHARD = re.compile(r"(?<![a-z])(tp|tensor|fsdp|shard|sharded)(?![a-z])")
ALSO_DATA = re.compile(r"data|(?<![a-z])dp(?![a-z])")
MIN_SHARE = 0.1  # of the bytes of all-reduces: less is metrics or statistics, not parameters or activations


def why_needed(graph: Graph, ranks: Collection[int]) -> str:
    """Why the others cannot do without these ranks; empty where nothing says that they cannot."""
    if graph.run is None or _is_of_operations(graph):
        return ""
    calls = _calls_with_others(graph.run, ranks)
    return (
        _by_coordinates(graph.run.table(WORKERS), ranks)
        or _by_names(calls)
        or _by_kind(calls)
        or _by_forward(graph.run, calls)
    )


def _is_of_operations(graph: Graph) -> bool:
    try:
        return computes(graph).height > 0
    except Unanswerable:
        return False


def _by_coordinates(workers: pl.DataFrame, ranks: Collection[int]) -> str:
    """By ranks that stay and differ from one that goes in a single axis other than data parallelism."""
    gone = workers.filter(pl.col("rank").is_in(list(ranks)))
    stay = workers.filter(~pl.col("rank").is_in(list(ranks)))
    for axis, words in AXES.items():
        same = [other for other in ("dp", *AXES) if other != axis]
        known = gone.filter(pl.col(axis) >= 0).select("rank", axis, *same)
        left = known.join(stay.select(axis, *same), on=same, suffix="_left")
        apart = left.filter((pl.col(f"{axis}_left") >= 0) & (pl.col(f"{axis}_left") != pl.col(axis)))
        if apart.height:
            rank, at = apart.sort("rank").select("rank", axis).row(0)
            return f"rank {rank} is {words} rank {at} ({axis}) of a model that other ranks hold the rest of"
    return ""


def _calls_with_others(run: Run, ranks: Collection[int]) -> pl.DataFrame:
    """Collective calls of these ranks with others: `rank`, `op`, `group`, `bytes`, `at` (ns), `window`."""
    columns = ["rank", "window", "op", "group", "group_ranks", "bytes_in", "bytes_out", "start_ns"]
    calls = run.table(COLLECTIVES, [*columns, "launch_span_id"]).filter(pl.col("rank").is_in(list(ranks)))
    alone = [text for text in calls["group_ranks"].unique() if text and set(members_of(text)) <= set(ranks)]
    with_others = ~pl.col("group_ranks").is_in(pl.Series(alone, dtype=pl.String).implode())
    calls = calls.filter(with_others) if run.manifest.world_size > 1 else calls.clear()
    launched = run.table(SPANS, ["rank", "span_id", "start_ns"]).rename({"start_ns": "called_ns"})
    return calls.join(
        launched, left_on=["rank", "launch_span_id"], right_on=["rank", "span_id"], how="left"
    ).select(
        "rank", "window", "op", "group",
        bytes=pl.max_horizontal("bytes_in", "bytes_out"),
        at=pl.coalesce("called_ns", "start_ns"),
    )  # fmt: skip


def _by_names(calls: pl.DataFrame) -> str:
    for group in calls["group"].unique().sort().to_list():
        name = group.lower()
        if NAMES_A_SHARD.search(name) and not ALSO_DATA.search(name):
            return f"its process group {group!r} holds parts of one model"
    return ""


def _by_kind(calls: pl.DataFrame) -> str:
    ops = set(calls["op"].to_list())
    if "all_to_all" in ops:
        return "it exchanges tokens or rows of tables with others (all_to_all): each holds its own part"
    if "reduce_scatter" in ops:
        return "gradients are scattered to it (reduce_scatter): it holds its own shard of the parameters"
    gathered = calls.filter(pl.col("op") == "all_gather")["bytes"]
    if gathered.len() and (gathered.min() < 0 or gathered.sum() >= MIN_SHARE * _reduced(calls)):  # type: ignore[operator]
        return "parameters are gathered from it (all_gather): it holds its own shard of them"
    return ""


def _reduced(calls: pl.DataFrame) -> float:
    return float(calls.filter((pl.col("op") == "all_reduce") & (pl.col("bytes") > 0))["bytes"].sum())


def _by_forward(run: Run, calls: pl.DataFrame) -> str:
    """By all-reduces before the first backward operator of a step: those are of activations."""
    reduced = calls.filter((pl.col("op") == "all_reduce") & (pl.col("bytes") > 0))
    spans = run.table(SPANS, ["rank", "window", "kind", "name", "forward_thread", "start_ns"])
    backward = spans.filter((pl.col("forward_thread") > 0) | (pl.col("name") == "dpro::backward"))
    steps = run.table(STEPS, ["rank", "window", "step", "start_ns", "duration_ns"])
    early = 0.0
    for rank, window, begin, lasts in steps.select("rank", "window", "start_ns", "duration_ns").iter_rows():
        here = (pl.col("rank") == rank) & (pl.col("window") == window)
        starts = backward.filter(here, pl.col("start_ns").is_between(begin, begin + lasts))["start_ns"]
        turn = starts.min() if starts.len() else begin
        forward = reduced.filter(here, pl.col("at") >= begin, pl.col("at") < turn)
        early += float(forward["bytes"].sum())
    if early >= MIN_SHARE * _reduced(calls) and early > 0:
        return (
            "activations are reduced with it before the backward pass (all_reduce): it holds a part of layers"
        )
    return ""
