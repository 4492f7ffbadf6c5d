"""The kind of each pause, and which ranks work in it, from what the host counted in its steps.

In: the pauses of a job, its steps and counters; own times of ranks, asked for only where no counter explains
a pause. Out: the pauses with kind and ranks. A rank that only waits for another rank's pause does not work in
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.replay.steps.host import host_facts
from dpro.replay.steps.typical import StepSeries

EXPLAINED = 0.5  # of a pause, on some rank: what it is of
PART = 0.1  # of a pause: so much work without gradients makes waiting for data one of a validation
LOOK_BACK = 3  # steps: a host that runs ahead of its GPU waits for another rank's pause some steps later

CHECKPOINT, COMPILATION, COLLECTION = "checkpoint", "compilation", "garbage collection"
VALIDATION, RESTART, EPOCH, DATA = "validation", "loader restart", "epoch start", "waiting for data"
CONTENTION, BUSY, IDLE = "CPU contention", "other work", "unknown wait"
# What explains a pause, the most specific first: validation may cause a collection, not vice versa.
_ORDER = {
    "checkpoint_ns": CHECKPOINT,
    "compile_ns": COMPILATION,
    "gc_ns": COLLECTION,
    "no_grad_ns": VALIDATION,
    "data_wait_ns": DATA,
    "run_queue_ns": CONTENTION,
}
_CPU = "training_thread_cpu_ns"
_BEGINNING = "loader_start_ns"


@dataclass(frozen=True)
class Pause:
    """One pause.

    Attributes:
        step: which.
        longer_ns: by how much its step is longer than usual.
        lost_ns: what it costs the job.
        kind: what it is of.
        explained: share of it that is.
        ranks: which work in it; empty where that is not known.
    """

    step: int
    longer_ns: float
    lost_ns: float
    kind: str
    explained: float
    ranks: tuple[int, ...]


def pauses_of(
    series: StepSeries, steps: pl.DataFrame, counters: pl.DataFrame, own: Callable[[], pl.DataFrame]
) -> list[Pause]:
    """What each pause of a job is of, in order.

    Args:
        own: returns own times of ranks in all steps, `rank`, `step`, `own_ns`; called only if needed.
    """
    at = np.flatnonzero(series.paused)
    times = {int(series.steps[each]): series.times[each] - series.usual[each] for each in at}
    lost = {int(series.steps[each]): float(series.lost[each]) for each in at}
    more = _counted(series, host_facts(steps, counters))
    explained = {step: _explained(more.get(step, {}), longer) for step, longer in times.items()}
    if not all(kind for kind, *_ in explained.values()):
        mine = _more_of_own(series, own())
        explained |= {
            step: _unexplained(more.get(step, {}), mine.get(step, {}), times[step])
            for step, (kind, *_) in explained.items()
            if not kind
        }
    begun = _begun(steps, counters)
    found = []
    for step, (kind, share, ranks) in explained.items():
        kind = begun.get(step, kind) if kind == DATA else kind
        found.append(Pause(step, float(times[step]), lost[step], kind, share, ranks))
    return found


def _belongs(series: StepSeries) -> pl.DataFrame:
    """To which pause a step belongs, `step` and `pause`: itself, or one that soon follows."""
    rows, last = [], -1
    for at in np.flatnonzero(series.paused).tolist():
        first = max(at - LOOK_BACK, last + 1)
        rows += [(int(series.steps[each]), int(series.steps[at])) for each in range(first, at + 1)]
        last = at
    return pl.DataFrame(rows, schema={"step": pl.Int64, "pause": pl.Int64}, orient="row")


def _more(series: StepSeries, rows: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """By how much values are beyond those of the rank's ordinary steps, `pause`, `rank` and the columns."""
    belongs = _belongs(series)
    ordinary = rows.filter(
        pl.col("step").is_in(series.steps[~series.paused].tolist())
        & ~pl.col("step").is_in(belongs["step"].implode())
    )
    usual = ordinary.group_by("rank").agg(pl.col(columns).median().name.suffix("_usual"))
    beyond = [(pl.col(name) - pl.col(f"{name}_usual").fill_null(0.0)).clip(0.0) for name in columns]
    within = rows.join(belongs, on="step").join(usual, on="rank", how="left")
    return within.group_by("pause", "rank").agg(each.sum() for each in beyond).sort("pause", "rank")


def _counted(series: StepSeries, facts: pl.DataFrame) -> dict[int, dict[int, dict[str, float]]]:
    """What ranks counted more than in ordinary steps: by pause, by rank, by counter, ns."""
    columns = [*_ORDER, _CPU]
    more: dict[int, dict[int, dict[str, float]]] = {}
    for row in _more(series, facts, columns).iter_rows(named=True):
        more.setdefault(row["pause"], {})[row["rank"]] = {name: row[name] or 0.0 for name in columns}
    return more


def _more_of_own(series: StepSeries, own: pl.DataFrame) -> dict[int, dict[int, float]]:
    """By how much ranks worked longer of their own than in ordinary steps: by pause, by rank, ns."""
    more: dict[int, dict[int, float]] = {}
    rows = own.select("rank", "step", pl.col("own_ns").cast(pl.Float64))
    for pause, rank, value in _more(series, rows, ["own_ns"]).iter_rows():
        more.setdefault(pause, {})[rank] = value
    return more


def _explained(more: dict[int, dict[str, float]], longer: float) -> tuple[str, float, tuple[int, ...]]:
    """What explains a pause, by how much of it, and on which ranks; nothing where no counter does."""
    enough = EXPLAINED * longer
    for counter, kind in _ORDER.items():
        most = max((of_rank[counter] for of_rank in more.values()), default=0.0)
        if most >= enough:
            ranks = tuple(rank for rank, of_rank in more.items() if of_rank[counter] >= enough)
            return kind, min(most / longer, 1.0), ranks
    validating = {
        rank: of_rank["no_grad_ns"] + of_rank["data_wait_ns"]
        for rank, of_rank in more.items()
        if of_rank["no_grad_ns"] >= PART * longer
    }
    ranks = tuple(rank for rank, both in validating.items() if both >= enough)
    return (VALIDATION, min(max(validating.values()) / longer, 1.0), ranks) if ranks else ("", 0.0, ())


def _unexplained(
    more: dict[int, dict[str, float]], own: dict[int, float], longer: float
) -> tuple[str, float, tuple[int, ...]]:
    """Who works in a pause that no counter explains, and whether that is work at all."""
    ranks = tuple(rank for rank, value in own.items() if value >= EXPLAINED * longer)
    computing = max((more.get(rank, {}).get(_CPU, 0.0) for rank in ranks), default=0.0)
    return BUSY if computing >= EXPLAINED * longer else IDLE, 0.0, ranks


def _begun(steps: pl.DataFrame, counters: pl.DataFrame) -> dict[int, str]:
    """The steps in which a DataLoader began anew, and whether it had to start its workers."""
    begun = counters.filter(pl.col("counter") == _BEGINNING).select("rank", "device", "time_ns")
    inside = begun.sort("time_ns").join_asof(
        steps.select("rank", "step", "start_ns", "duration_ns").sort("start_ns"),
        left_on="time_ns", right_on="start_ns", by="rank", check_sortedness=False,
    )  # fmt: skip
    inside = inside.filter(pl.col("time_ns") < pl.col("start_ns") + pl.col("duration_ns"))
    starts = ~pl.col("device").str.contains("persistent") & ~pl.col("device").str.starts_with("0 ")
    kinds = inside.group_by("step").agg(restart=starts.any()).iter_rows()
    return {step: RESTART if restart else EPOCH for step, restart in kinds}
