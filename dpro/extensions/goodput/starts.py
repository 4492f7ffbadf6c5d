"""Why it took so long until the first step: the stages of a start by rank, and what took longest in each.

In: an attempt, and the account of its time. Out: `StartDocument`. On each rank the stages add up to the time
from the start of the job, of later attempts of its process, to the end of its first step. A process group
takes as long as its last member is late: who that was follows from how long its members took, where all of
them were recorded and had it at the same time.
"""

from __future__ import annotations

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
MAX_PARTS, MIN_SHARE = 3, 0.1  # of a stage: parts that are listed, and what they take of it at least
MAX_APART = 0.5  # of a wait: how far apart members may have got their group


class StartPart(DocumentPart, frozen=True):
    """One of the longest parts of a stage on one rank.

    Attributes:
        what: an import, a process group or a load, in words.
        took_s: how long it took.
        waited_s: how long of it for the last member of a group to come; null where that is not known.
        waited_for: the rank that came last; null likewise.
    """

    what: str
    took_s: float
    waited_s: float | None = None
    waited_for: int | None = None


class StartStage(DocumentPart, frozen=True):
    """One stage of a start.

    Attributes:
        stage: launch, imports, process_group, load, set_up (what is none of the others) or first_step.
        last_s: how long it took on the rank whose start took longest: these add up.
        median_s: median of all ranks.
        longest_s: on the rank on which it took longest.
        rank: that rank.
        parts: the longest there, longest first.
    """

    stage: str
    last_s: float
    median_s: float
    longest_s: float
    rank: int
    parts: list[StartPart]


class StartDocument(DocumentPart, frozen=True):
    """How long an attempt took until its first step had ended.

    Attributes:
        attempt: its number, from 0.
        total_s: on the rank that took longest.
        rank: that rank.
        median_s: median of all ranks.
        has_parts: whether its imports and process groups were recorded one by one.
        stages: in the order in which they mostly come, without those that took no time.
    """

    attempt: int
    total_s: float
    rank: int
    median_s: float
    has_parts: bool
    stages: list[StartStage]


def start_of(attempt: Attempt, pieces: pl.DataFrame) -> StartDocument | None:
    """How an attempt came to its first step; None if no rank of it is known to have done one.

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
    """`rank`, `stage`, `what`, `duration_ns`, `waited_ns` and `late`: parts of stages, imports by package.

    Args:
        until: pieces of the attempt's time until its first step had ended.
    """
    steps = until.filter(pl.col("step") >= 0).group_by("rank").agg(first_ns=pl.col("start_ns").min())
    ends = until.group_by("rank").agg(pl.col("first_update_ns").max())
    parts = _with_waits(attempt.parts).join(ends, on="rank").join(steps, on="rank", how="left")
    started = parts.filter(pl.col("start_ns") < pl.col("first_update_ns"))
    in_step = (pl.col("start_ns") >= pl.col("first_ns")).fill_null(value=False) & (pl.col("kind") != LOAD)
    stage = pl.col("kind").replace_strict(_STAGE_OF, return_dtype=pl.String)
    started = started.with_columns(ranks=num_members())
    world = attempt.workers.height or attempt.starts.height
    what = [_in_words(row, world) for row in started.iter_rows(named=True)]
    named = started.with_columns(
        stage=pl.when(in_step).then(pl.lit(FIRST_STEP)).otherwise(stage),
        what=pl.Series(what, dtype=pl.String),
    )
    imported = pl.when(pl.col("kind") == "import").then(pl.lit(-1)).otherwise(pl.int_range(pl.len()))
    sums = named.group_by("rank", "stage", "what", imported.alias("part")).agg(
        pl.col("duration_ns").sum(), pl.col("waited_ns", "late").first()
    )
    moments = attempt.starts.filter(pl.min_horizontal("process_ns", "imported_ns") >= 0)
    python = moments.select(
        "rank", stage=pl.lit(IMPORTS), what=pl.lit("up to torch"),
        duration_ns=pl.col("imported_ns") - pl.col("process_ns"),
    )  # fmt: skip
    return pl.concat([sums.drop("part"), python], how="diagonal")


def _with_waits(parts: pl.DataFrame) -> pl.DataFrame:
    """With `waited_ns` for the member of a group that came last, and `late`, its rank; null where unknown."""
    made = pl.int_range(pl.len()).over("rank", "name")  # a group may be made again under the same name
    group = ["name", GROUP_RANKS, "made"]
    counted_groups = parts.with_columns(made=made)
    named = counted_groups.filter((pl.col("kind") == "process_group") & (pl.col(GROUP_RANKS) != ""))
    came = named.group_by(group).agg(
        pl.len().alias("members"),
        pl.col("duration_ns").min().alias("least_ns"),
        pl.col("rank").sort_by("duration_ns", "rank").first().alias("late"),
        (pl.col("end_ns").max() - pl.col("end_ns").min()).alias("apart_ns"),
    )
    whole = came.filter(pl.col("members") == num_members())
    waited = pl.col("duration_ns") - pl.col("least_ns")
    joined = counted_groups.join(whole, on=group, how="left").with_columns(waited_ns=waited)
    inferred = (pl.col("waited_ns") > MIN_SHARE * pl.col("duration_ns")) & (
        pl.col("apart_ns") <= MAX_APART * pl.col("waited_ns")
    )
    return joined.with_columns(pl.when(inferred).then(name).alias(name) for name in ("waited_ns", "late"))


def _in_words(part: dict[str, object], world: int) -> str:
    """`import transformers.models`, `all 8 ranks (nccl)` or `/ckpt/step-100 (42.0 GB)`."""
    name, kind = str(part["name"]), part["kind"]
    if kind == "import":
        return f"import {'.'.join(name.split('.')[:2])}"
    if kind == LOAD:
        size = part["bytes"]
        stored = f" ({format_bytes(size)})" if isinstance(size, int) and size >= 0 else ""
        return f"{name or 'a checkpoint'}{stored}"
    ranks = part["ranks"]
    if not ranks:
        return "groups of other ranks"
    backend = f" ({part['backend']})" if part["backend"] else ""
    purpose = str(part["purpose"])
    called = f' "{purpose}"' if purpose not in ("", "undefined", "default_pg") else ""
    of = f"all {ranks} ranks" if ranks == world else f"{counted(int(str(ranks)), 'rank')}"
    return f"group{called} of {of}{backend}"


def _longest(parts: pl.DataFrame, stage_ns: int) -> list[StartPart]:
    """The longest parts of a stage of one rank, those that took a tenth of it or more."""
    much = parts.filter(pl.col("duration_ns") >= MIN_SHARE * stage_ns)
    longest = much.sort("duration_ns", "what", descending=[True, False]).head(MAX_PARTS)
    return [
        StartPart(what, took / NS_PER_S, None if late is None else waited / NS_PER_S, late)
        for what, took, waited, late in longest.select("what", "duration_ns", "waited_ns", "late").iter_rows()
    ]
