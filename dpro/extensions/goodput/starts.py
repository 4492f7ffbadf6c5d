"""Explains the time until the first step: the stages of a start by rank, and the longest parts of each.

Takes an attempt and the account of its time; returns a `StartDocument`. On each rank the stages add up to the
time from the start of the job (in later attempts, of the process) to the end of its first step. A process
group takes until its last member arrives; which member that was follows from how long each took, where all
were recorded and finished at the same time.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from dpro.documents import DocumentPart
from dpro.extensions.goodput.account import LOADING
from dpro.extensions.goodput.attempts import DOWN, GROUP, IMPORTS, LAUNCH, LOAD, SET_UP, Attempt
from dpro.schema import START_PARTS
from dpro.schema.members import GROUP_RANKS, num_members
from dpro.units import NS_PER_S, format_bytes
from dpro.words import counted

FIRST_STEP = "first_step"
STAGES = (LAUNCH, IMPORTS, GROUP, LOADING, SET_UP, FIRST_STEP)
_STAGE_OF = {"import": IMPORTS, "process_group": GROUP, LOAD: LOADING}  # by kind of part
MAX_PARTS, MIN_SHARE = 3, 0.1  # of a stage: parts that are listed, and their minimum share of its time
MAX_APART = 0.5  # of a wait: how far apart members may have finished creating their group


class StartPart(DocumentPart, frozen=True):
    """One of the longest parts of a stage on one rank.

    Attributes:
        what: an import, a process group or a load, in words.
        took_s: its duration.
        waited_s: time of it spent waiting for the last member of a group; null where that is unknown.
        waited_for: the rank that came last; null where that is unknown.
    """

    what: str
    took_s: float
    waited_s: float | None = None
    waited_for: int | None = None


class StartStage(DocumentPart, frozen=True):
    """One stage of a start.

    Attributes:
        stage: launch, imports, process_group, load, set_up (none of the others) or first_step.
        last_s: its duration on the rank whose start took longest: these add up.
        median_s: median over all ranks.
        longest_s: its duration on the rank on which it took longest.
        rank: that rank.
        parts: the longest parts there, longest first.
    """

    stage: str
    last_s: float
    median_s: float
    longest_s: float
    rank: int
    parts: list[StartPart]


class StartDocument(DocumentPart, frozen=True):
    """How long an attempt took to the end of its first step.

    Attributes:
        attempt: its number, from 0.
        total_s: on the rank that took longest.
        rank: that rank.
        median_s: median over all ranks.
        has_parts: whether imports and process groups were recorded one by one.
        stages: in their usual order, without those that took no time.
    """

    attempt: int
    total_s: float
    rank: int
    median_s: float
    has_parts: bool
    stages: list[StartStage]


def start_of(attempt: Attempt, pieces: pl.DataFrame) -> StartDocument | None:
    """Return the start of an attempt by stages; None if no rank is known to have done a step.

    Args:
        pieces: of the time of all attempts, as `account` returns them.
    """
    updated = attempt.starts.filter(pl.col("first_update_ns") >= 0).select("rank", "first_update_ns")
    there = pieces.filter((pl.col("attempt") == attempt.number) & (pl.col("class") != DOWN))
    until = there.join(updated, on="rank").filter(pl.col("start_ns") < pl.col("first_update_ns"))
    if until.is_empty():
        return None
    stage = pl.when(pl.col("class").is_in(STAGES)).then("class").otherwise(pl.lit(FIRST_STEP)).alias("stage")
    took = until.group_by("rank", stage).agg(pl.col("duration_ns").sum())
    by_rank = took.pivot("stage", index="rank", values="duration_ns").fill_null(0).sort("rank")
    names = [name for name in STAGES if name in by_rank.columns]
    totals = by_rank.select("rank", total=pl.sum_horizontal(names))
    last = totals.filter(pl.col("total") == pl.col("total").max()).row(0, named=True)
    parts = _parts(attempt, until)
    stages = []
    for name in names:
        longest = by_rank.filter(pl.col(name) == pl.col(name).max()).row(0, named=True)
        on_last = by_rank.filter(pl.col("rank") == last["rank"])[name][0]
        of_stage = parts.filter((pl.col("rank") == longest["rank"]) & (pl.col("stage") == name))
        times_s = (on_last / NS_PER_S, _median_s(by_rank[name]), longest[name] / NS_PER_S)
        stages.append(StartStage(name, *times_s, longest["rank"], _longest(of_stage, longest[name])))
    has_parts = bool(attempt.run.parts(START_PARTS))
    seconds = (last["total"] / NS_PER_S, last["rank"], _median_s(totals["total"]))
    return StartDocument(attempt.number, *seconds, has_parts, stages)


def _median_s(ns: pl.Series) -> float:
    median = ns.median()
    return median / NS_PER_S if isinstance(median, float) else 0.0


def _parts(attempt: Attempt, until: pl.DataFrame) -> pl.DataFrame:
    """Return `rank`, `stage`, `what`, `duration_ns`, `waited_ns` and `late` of the parts, imports by package.

    Args:
        until: pieces of the attempt's time until its first step had ended.
    """
    first_ns = pl.col("start_ns").filter(pl.col("step") >= 0).min().alias("first_ns")
    ends = until.group_by("rank").agg(pl.col("first_update_ns").max(), first_ns)
    parts = _with_waits(attempt.parts).join(ends, on="rank")
    started = parts.filter(pl.col("start_ns") < pl.col("first_update_ns"))
    in_step = (pl.col("start_ns") >= pl.col("first_ns")).fill_null(value=False) & (pl.col("kind") != LOAD)
    stage = pl.col("kind").replace_strict(_STAGE_OF, return_dtype=pl.String)
    what = pl.Series("what", map(_in_words, started.iter_rows(named=True)), dtype=pl.String)
    named = started.with_columns(what, stage=pl.when(in_step).then(pl.lit(FIRST_STEP)).otherwise(stage))
    alone = pl.when(pl.col("kind") == "import").then(-1).otherwise(pl.int_range(pl.len())).alias("alone")
    sums = named.group_by("rank", "stage", "what", alone).agg(
        pl.col("duration_ns").sum(), pl.col("waited_ns", "late").first()
    )
    moments = attempt.starts.filter(pl.min_horizontal("process_ns", "imported_ns") >= 0)
    took = (pl.col("imported_ns") - pl.col("process_ns")).alias("duration_ns")
    python = moments.select(
        "rank", took, stage=pl.lit(IMPORTS), what=pl.lit("Python and imports up to torch")
    )
    return pl.concat([sums, python], how="diagonal")


def _with_waits(parts: pl.DataFrame) -> pl.DataFrame:
    """Add `waited_ns` for the last member of a group, and its rank `late`; null where unknown."""
    group = ["name", GROUP_RANKS]
    came = parts.filter((pl.col("kind") == "process_group") & (pl.col("name") != "")).group_by(group).agg(
        pl.len().alias("members"),
        pl.col("duration_ns").min().alias("least_ns"),
        pl.col("rank").sort_by("duration_ns", "rank").first().alias("late"),
        (pl.col("end_ns").max() - pl.col("end_ns").min()).alias("apart_ns"),
    )  # fmt: skip
    whole = came.filter(pl.col("members") == num_members())  # not groups created twice under one name
    joined = parts.join(whole, on=group, how="left").with_columns(ranks=num_members())
    waited, apart = pl.col("duration_ns") - pl.col("least_ns"), pl.col("apart_ns")
    inferred = (waited > MIN_SHARE * pl.col("duration_ns")) & (apart <= MAX_APART * waited)
    return joined.with_columns(waited_ns=pl.when(inferred).then(waited), late=pl.when(inferred).then("late"))


def _in_words(part: dict[str, Any]) -> str:
    """Describe a part: `import transformers.models`, `group of 8 ranks (nccl)`, `/ckpt/step-9 (42.0 GB)`."""
    name = part["name"]
    if part["kind"] == "import":
        return f"import {'.'.join(name.split('.')[:2])}"
    if part["kind"] == LOAD:
        return (name or "a checkpoint") + (f" ({format_bytes(part['bytes'])})" if part["bytes"] >= 0 else "")
    called = f' "{part["purpose"]}"' if part["purpose"] not in ("", "undefined", "default_pg") else ""
    backend = f" ({part['backend']})" if part["backend"] else ""
    return f"group{called} of {counted(part['ranks'], 'rank')}{backend}"


def _longest(parts: pl.DataFrame, stage_ns: int) -> list[StartPart]:
    """Return the longest parts of a stage of one rank, each at least `MIN_SHARE` of it."""
    much = parts.filter(pl.col("duration_ns") >= MIN_SHARE * stage_ns)
    longest = much.sort("duration_ns", "what", descending=[True, False]).head(MAX_PARTS)
    return [
        StartPart(what, took / NS_PER_S, None if late is None else waited / NS_PER_S, late)
        for what, took, waited, late in longest.select("what", "duration_ns", "waited_ns", "late").iter_rows()
    ]
