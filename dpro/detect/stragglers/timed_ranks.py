"""Ranks that the others wait for on their GPUs, inferred from calls that were timed without deep windows.

In: collectives outside of deep windows that have a duration (NCCL's Inspector, or the flight recorder with
timing on), steps, counters and workers. Out: findings. All members of a call end together, so what a member
takes longer than the shortest of them it has waited for the last; what is left of its steps is its own.
Clocks need not agree, and hosts may run ahead of their GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_COST
from dpro.detect.stragglers.from_calls import HOST_OR_GPU, HOST_OR_GPU_SURE, find_late_ranks
from dpro.detect.stragglers.own_time import COALESCED, MESSAGES, calls_of, usual_ones
from dpro.schema.members import num_members

LAST_ON_GPU = (
    "by the times of its collectives on the GPU, to which it comes last; no counter of its host explains it, "
    "but its host may launch late"
)
LAST_ON_GPU_SURE = 0.6  # factor of the confidence then
WHOLE = 0.9  # of a rank's calls in a step must have been timed on all members
_OWN = ["rank", "step", "start_ns", "own_ns", "waited_ns", "signature", "usual"]


def find_late_gpus(
    collectives: pl.DataFrame,
    steps: pl.DataFrame,
    counters: pl.DataFrame,
    workers: pl.DataFrame,
    *,
    doubtful: bool,
) -> list[Finding]:
    """Name the ranks that the others wait for by what was timed; none where nothing was.

    Args:
        steps: rows of that table, with `time_ns` where it is known how long they took.
        doubtful: whether ranks may also have waited for messages.
    """
    own = own_time_when_timed(collectives, steps)
    if own.is_empty():
        return []
    found = find_late_ranks(usual_ones(own), calls_of(collectives), counters, workers, doubtful=doubtful)
    # Waits in several streams at once are counted several times: what costs little may be no more than that.
    return [_on_gpu(finding) for finding in found if finding.severity >= MIN_COST]


def is_timed(collectives: pl.DataFrame) -> bool:
    """Whether calls outside of deep windows were timed."""
    return not _timed(collectives).is_empty()


def own_time_when_timed(collectives: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Work and waiting of each rank in each whole step outside of deep windows, by its GPU.

    Args:
        collectives, steps: as `find_late_gpus` takes them.

    Returns:
        The columns of `own_time_of_all`; steps with calls that not all members timed are left out.
    """
    outside = steps.filter(pl.col("window") < 0)
    calls = _timed(collectives)
    if calls.is_empty() or outside.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(_OWN, pl.Int64) | {"usual": pl.Boolean})
    begins = steps.select("rank", "step", "window", begun_ns="start_ns").sort("begun_ns")
    inside = calls.sort("enqueued_ns").join_asof(
        begins, left_on="enqueued_ns", right_on="begun_ns", by="rank", check_sortedness=False
    )
    waits = (
        inside.filter(pl.col("window") < 0)
        .group_by("rank", "step")
        .agg(
            waited_ns=pl.col("wait_ns").sum(),
            known=pl.col("wait_ns").is_not_null().mean(),
            signature=pl.struct("op", "size").hash().sum(),
        )
    )
    usual = waits.group_by("rank").agg(usual=pl.col("signature").mode().min())
    own = pl.col("took_ns") - pl.col("waited_ns")
    return (
        _took(outside)
        .join(waits.filter(pl.col("known") >= WHOLE), on=["rank", "step"])
        .join(usual, on="rank")
        .with_columns(usual=pl.col("signature") == pl.col("usual"), own_ns=own.clip(lower_bound=1))
        .select(_OWN)
        .sort("step", "rank")
    )


def _timed(collectives: pl.DataFrame) -> pl.DataFrame:
    """Calls that were timed, from the source with most of them: what the rank waited in each.

    Null where a member is missing: which rank it waited for is not known then.
    """
    timed = collectives.filter(
        (pl.col("window") < 0)
        & (pl.col("duration_ns") > 0)
        & (pl.col("sequence") >= 0)
        & (pl.col("enqueued_ns") >= 0)
        & (pl.col("group") != "")
        & (num_members() != 1)
        & ~pl.col("op").is_in([*MESSAGES, "send_recv"])
        & ~pl.col("op").str.ends_with(COALESCED)
    )
    timed = timed.filter(pl.col("source") == pl.col("source").mode().min())
    call = ["group", "group_ranks", "op", "sequence"]
    callers = timed.group_by("group", "group_ranks").agg(callers=pl.col("rank").n_unique())
    size = pl.when(num_members() > 0).then(num_members())
    return (
        timed.join(callers, on=["group", "group_ranks"])
        .with_columns(
            size=pl.coalesce(size, "callers").cast(pl.Int64),
            met=pl.len().over(call),
            transfer_ns=pl.col("duration_ns").min().over(call),
        )
        .with_columns(
            wait_ns=pl.when(pl.col("met") == pl.col("callers")).then(
                pl.col("duration_ns") - pl.col("transfer_ns")
            )
        )
        .filter(pl.col("callers") > 1)
        .select("rank", "op", "size", "enqueued_ns", "wait_ns")
    )


def _took(steps: pl.DataFrame) -> pl.DataFrame:
    """How long each step took; where only the host timed it, as long as the rank's steps do on average.

    A host that runs ahead is done with most steps long before its GPU is.
    """
    known = pl.col("time_ns").clip(lower_bound=-1) if "time_ns" in steps.columns else pl.lit(-1, pl.Int64)
    by_device = pl.col("by_device") if "by_device" in steps.columns else pl.lit(value=False)
    mean = pl.col("duration_ns").mean().over("rank").cast(pl.Int64)
    took = pl.when(by_device).then(known).otherwise(mean)
    return steps.with_columns(took_ns=took).filter(pl.col("took_ns") > 0)


def _on_gpu(finding: Finding) -> Finding:
    """The same, where no counter of the host explains it, as what the GPU's own times say."""
    if HOST_OR_GPU not in finding.evidence:
        return finding
    evidence = tuple(LAST_ON_GPU if line == HOST_OR_GPU else line for line in finding.evidence)
    confidence = round(min(finding.confidence / HOST_OR_GPU_SURE * LAST_ON_GPU_SURE, 1.0), 3)
    return replace(finding, evidence=evidence, confidence=confidence)
