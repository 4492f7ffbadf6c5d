"""Whole operations of a pipeline-parallel job, with their role, step and stage.

Takes an opened run whose spans are operations of known role (forward, backward, send, all-gather, …) rather
than the kernels and CPU work inside them. Returns one frame with a row per operation, and the mesh position
of each rank. `dpro.replay.pipeline.dependencies` finds their dependencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import polars as pl

from dpro.replay.graph import MeshPosition
from dpro.replay.mesh import mesh_of_run, places_along
from dpro.schema import COLLECTIVES, OPERATIONS, SPANS, STEPS, WORKERS
from dpro.store import Run
from dpro.table import complete

# Options of commands that state the number of layers of a model.
LAYERS_FLAGS = ("--num-layers", "--num_layers", "--n-layers", "--n_layers", "--layers")

# Links between the stages of a pipeline, from the messages between their ranks.

Links = Mapping[tuple[int, int], int]  # number of messages by the stages of their ends, the lower one first


def recorded_links(run: Run, places: Mapping[int, MeshPosition]) -> Links:
    """Count the messages between stages; empty where peers were not recorded."""
    stage = {rank: place.stage for rank, place in places.items()}
    sent = run.table(COLLECTIVES, ["rank", "op", "peer"]).filter(
        (pl.col("op") == "send") & (pl.col("peer") >= 0)
    )
    ends = [pl.col(end).replace_strict(stage, default=-1, return_dtype=pl.Int64) for end in ("rank", "peer")]
    pairs = sent.select(low=pl.min_horizontal(ends), high=pl.max_horizontal(ends))
    forwards = pairs.filter((pl.col("low") >= 0) & (pl.col("low") < pl.col("high")))
    counts = forwards.group_by("low", "high").len().sort("low", "high")
    return {(low, high): count for low, high, count in counts.iter_rows()}


def is_connected(links: Links, num_stages: int) -> bool:
    """Return whether each stage but the first receives from an earlier one, so that no link is missing.

    Args:
        links: from `recorded_links`.
    """
    return {high for _, high in links} == set(range(1, num_stages))


class Role(IntEnum):
    """The role of an operation in a step."""

    FORWARD = 0
    BACKWARD = 1
    WORK = 2  # other work on the compute stream: garbage collection, optimizer
    SEND = 3
    RECEIVE = 4
    GATHER = 5  # parameters, before the first forward that needs them
    REDUCE = 6  # all other communication: gradients, their norm
    WEIGHTS = 7  # gradients of weights without those of inputs: no stage waits for them


COMMUNICATION = (Role.SEND, Role.RECEIVE, Role.GATHER, Role.REDUCE)
FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"  # kinds of computes
FORWARD_NAMES = ("forward", "forward-compute")
INPUTS_NAME = "backward-inputs"
BACKWARD_NAMES = ("backward", "backward-compute", INPUTS_NAME)
WEIGHTS_NAMES = ("backward-weights",)  # gradients of weights, where they are computed separately


@dataclass(frozen=True)
class Operations:
    """Operations of a run.

    Attributes:
        rows: sorted by step, rank, start; columns `rank`, `dp`, `stage`, `step` (its number), `span_id`
            (below -1 for none), `name`, `role`, `direction` (forward, backward; of sends and receives),
            `start` and `end` (ns), `stream`, `chunk`, `place` (of the chunk in the model over all stages,
            from 0), `micro_batch`, `op`, `group`, `sequence`, `peer` (-1 none).
        steps: `step`, `begin`, `finish` (ns), from its first beginning to its last end on any rank.
        places: mesh position of each rank.
        steps_known: whether the run has the beginnings of steps.
        begins: `rank`, `step`, `begin` (ns), where each rank begins a step after its own previous one; None
            where a step begins when the previous one has ended on all ranks.
        links: stages that sent each other messages that are not operations; empty where unknown.
    """

    rows: pl.DataFrame
    steps: pl.DataFrame
    places: Mapping[int, MeshPosition]
    steps_known: bool
    begins: pl.DataFrame | None = None
    links: Links = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return max(place.stage for place in self.places.values()) + 1

    @property
    def num_chunks(self) -> int:
        """Number of model chunks on each stage."""
        return int(self.rows["chunk"].to_numpy().max(initial=0)) + 1


def consists_of_operations(spans: pl.DataFrame) -> bool:
    """Return whether spans are whole operations: no launches, and forward work by name on every rank."""
    if spans.is_empty() or not ((spans["kind"] == "kernel") & (spans["correlation"] == -1)).all():
        return False
    has_forward = pl.col("name").str.to_lowercase().is_in(FORWARD_NAMES).any()
    return bool(spans.group_by("rank").agg(has_forward.alias("forward"))["forward"].all())


def read_operations(run: Run) -> Operations:
    """Return the operations of a run whose spans satisfy `consists_of_operations`."""
    spans, workers = run.table(SPANS), run.table(WORKERS)
    places = {rank: MeshPosition(0, 0) for rank in sorted(spans["rank"].unique().to_list())}
    for rank, dp, stage in workers.select("rank", "dp", "pp").iter_rows():
        if rank in places:  # a job without an axis has one rank along it
            places[rank] = MeshPosition(max(dp, 0), max(stage, 0))
    placed = pl.DataFrame([(rank, *place) for rank, place in places.items()], _PLACED, orient="row")
    steps = run.table(STEPS).filter(pl.col("duration_ns") >= 0).select("rank", "step", begin="start_ns")
    named = (
        spans.filter(pl.col("duration_ns") >= 0)
        .join(run.table(COLLECTIVES).select(_OF_COLLECTIVES), on=["rank", "span_id"], how="left")
        .join(placed, on="rank")
        .sort("start_ns", "rank", "span_id")
        .join_asof(
            steps.sort("begin"),
            left_on="start_ns",
            right_on="begin",
            by="rank",
            strategy="backward",
            check_sortedness=False,
        )
    )
    has_steps = steps.height > 0
    # Chunks are distributed over the stages in turn.
    num_stages = max(place.stage for place in places.values()) + 1
    rows = (
        named.with_columns(pl.col("step") if has_steps else pl.lit(0, pl.Int64).alias("step"), role=_role())
        .drop_nulls("step")
        .select(
            *("rank", "dp", "stage", "step", "span_id", "name", "role"),
            direction=pl.col("name").str.to_lowercase().str.extract("^(forward|backward)"),
            start="start_ns",
            end=pl.col("start_ns") + pl.col("duration_ns"),
            stream="stream",
            chunk=pl.col("model_chunk").cast(pl.Int64),
            place=pl.col("model_chunk").cast(pl.Int64).clip(lower_bound=0) * num_stages + pl.col("stage"),
            micro_batch=pl.col("micro_batch").cast(pl.Int64),
            op=pl.col("op").fill_null(""),
            group=pl.col("group").fill_null(""),
            sequence=pl.col("sequence").fill_null(-1),
            peer=pl.col("peer").fill_null(-1),
        )
        .sort("step", "rank", "start", "end", "span_id")
    )
    return Operations(rows, _extents(rows, run.table(STEPS) if has_steps else None), places, has_steps)


_PLACED = {"rank": pl.Int32, "dp": pl.Int64, "stage": pl.Int64}
_OF_COLLECTIVES = ("rank", "span_id", "op", "group", "sequence", "peer")


def _role() -> pl.Expr:
    """Return the role of a span by its row in `collectives`, else by its name."""
    name, op = pl.col("name").str.to_lowercase(), pl.col("op")
    return (
        pl.when(op == "send")
        .then(Role.SEND)
        .when(op == "recv")
        .then(Role.RECEIVE)
        .when(op == "all_gather")
        .then(Role.GATHER)
        .when(op.is_not_null())
        .then(Role.REDUCE)
        .when(name.is_in(FORWARD_NAMES))
        .then(Role.FORWARD)
        .when(name.is_in(BACKWARD_NAMES))
        .then(Role.BACKWARD)
        .otherwise(Role.WORK)
        .cast(pl.Int64)
    )


def _extents(rows: pl.DataFrame, recorded: pl.DataFrame | None) -> pl.DataFrame:
    """Return `step`, `begin`, `finish` over all ranks, from recorded steps and the operations in them."""
    ran = rows.group_by("step").agg(begin=pl.col("start").min(), finish=pl.col("end").max())
    if recorded is None:
        return ran
    end = pl.col("start_ns") + pl.col("duration_ns")
    said = recorded.filter(pl.col("step").is_in(ran["step"].to_list())).group_by("step")
    extents = pl.concat([ran, said.agg(begin=pl.col("start_ns").min(), finish=end.max())])
    return extents.group_by("step").agg(pl.col("begin").min(), pl.col("finish").max()).sort("begin")


# Operations found in a trace, with their stages and steps.

# Operators that are not work: messages, and allocations for them.
MESSAGE = r"^(?:c10d::|gloo:|nccl:|record_param_comms|ProcessGroup|aten::(?:empty|detach))"


def placed_in_steps(run: Run, operations: pl.DataFrame, source: str) -> pl.DataFrame:
    """Return rows of `operations` with their stage and step; outside the steps of their rank, step -1.

    Args:
        operations: `rank`, `start_ns`, `end`, `place` (in the model; null where it is that of the stage),
            `micro_batch`, `kind`.
        source: how they were found, for column `source`.
    """
    # Stages are those of the job's groups, else in the order of each rank's first chunk, else of ranks.
    along = places_along(mesh_of_run(run), "pp")
    recorded = pl.DataFrame([*along.items()], {"rank": pl.Int32, "recorded": pl.Int64}, orient="row")
    first = operations.group_by("rank").agg(pl.col("place").min()).sort("place", "rank")
    by_place = first.with_columns(by_place=pl.col("place").rank("dense").cast(pl.Int64) - 1)
    by_rank = pl.col("rank").rank("dense").cast(pl.Int64) - 1
    stages = by_place.join(recorded, on="rank", how="left").with_columns(by_rank=by_rank)
    stages = stages.select("rank", stage=pl.coalesce("recorded", "by_place", "by_rank"))
    placed = operations.join(stages, on="rank").with_columns(pl.col("place").fill_null(pl.col("stage")))
    chunk = pl.col("place").rank("dense").over("rank").cast(pl.Int64) - 1
    steps = run.table(STEPS).filter(pl.col("duration_ns") >= 0)
    begun = steps.select("rank", "step", begin="start_ns", until=pl.col("start_ns") + pl.col("duration_ns"))
    joined = placed.sort("start_ns").join_asof(
        begun.sort("begin"), left_on="start_ns", right_on="begin", by="rank", check_sortedness=False
    )
    within = pl.when(pl.col("start_ns") < pl.col("until")).then("step").otherwise(-1)
    rows = joined.select(
        *("rank", "stage", "place", "micro_batch", "kind", "start_ns"),
        step=within.fill_null(-1),
        chunk=chunk,
        duration_ns=pl.col("end") - pl.col("start_ns"),
        source=pl.lit(source),
    )
    return complete(OPERATIONS, rows).sort(OPERATIONS.sort_by)
