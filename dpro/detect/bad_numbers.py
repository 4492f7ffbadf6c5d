"""Detector of bad losses and gradient norms: the first rank and step at which one is not finite, or jumps.

Reads tables `losses`, `steps`, `counters`, `workers` and `checkpoints`. Returns at most one finding of each
class; its evidence includes whether other ranks followed, whether the number recovered, and what else
differed on that rank in that step. Updates that a GradScaler skips because gradients are not finite are not
faults unless they go on for long.

A jump is a rise within one step: the mean of a step's numbers minus the largest of the few steps before, as
a multiple of their usual level. It must exceed by far all earlier such rises on any rank, and a share of the
range that the number has covered before. If the largest earlier rise was itself an outlier, the jump must be
larger still, since the rises of such a series have no usual size. A number that falls, or rises over several
steps, does not jump.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.findings import Finding
from dpro.detect.machine.gpu_state import errors_in, remedy_of_errors
from dpro.detect.machine.telemetry import HEARTBEAT, TimeRange, changes, gpus_of_ranks
from dpro.detect.observations import Observation, observe
from dpro.units import NS_PER_S
from dpro.words import counted, numbers_in_words, ranks_in_words

LOSS, NORM = "loss", "grad_norm"
NAMES = {LOSS: "loss", NORM: "gradient norm"}
MAX_SKIPPED = 24  # steps in a row: long before, a GradScaler has halved its scale from 65,536 to 1
BEFORE = 8  # steps whose largest value a jump exceeds
LEVEL_STEPS = 64
MIN_STEPS = 32  # with known rises, before a jump is reported
RISE = {LOSS: 1.5, NORM: 4.0}  # the smallest jump, as a multiple of the usual level
MIN_TIMES_EARLIER = 3.0  # the smallest jump, as a multiple of the largest earlier rise
NEXT, MAX_UNUSUAL = 5, 4.0  # the largest rise over the fifth largest: by how much it is an outlier, at most 4
OF_RANGE = 0.03  # the smallest jump, as a share of the range that the number has covered before
MAX_LEFT_OF_RISE = 0.25  # share of the rise that may remain once the number has recovered
COMPARED_STEPS = 200  # earlier steps that the step is compared with
DIFFERS = 1.5  # a quantity differs if it is larger, or smaller, than all compared ones by this factor
LOADED_STEPS = 3  # a checkpoint loaded at most this many steps before may be the cause
AROUND_NS = 60 * NS_PER_S  # telemetry is read from this long before the step to this long after it


class ComparedTables(NamedTuple):
    """Tables that show what else differed in a step; times are on each host's own clock."""

    steps: pl.DataFrame
    counters: pl.DataFrame
    checkpoints: pl.DataFrame


class BadNumber(NamedTuple):
    """The first step at which a number goes bad, and the ranks on which it does.

    Attributes:
        of_all: whether these are all ranks that record the number.
        before: an upper bound of the number before, on the first of `ranks`; NaN where unknown.
        after: the bad number on the first of `ranks`.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    of_all: bool
    before: float
    after: float

    @property
    def of_job(self) -> bool:
        """Whether the number is bad on all ranks of a job of several."""
        return self.of_all and len(self.ranks) > 1

    @property
    def whose(self) -> str:
        """Name of the number with its ranks: `the loss of rank 1`."""
        return f"the {NAMES[self.kind]} of {'all ' if self.of_job else ''}{ranks_in_words(self.ranks)}"


FindingParts = tuple[
    str, BadNumber, str, float, list[Observation]
]  # class, place, words, confidence, observations


def find_bad_numbers(
    losses: pl.DataFrame, workers: pl.DataFrame, around: ComparedTables | None = None
) -> list[Finding]:
    """Find the first number that is not finite, and the first jump before it.

    Args:
        losses, workers: the tables of these names.
        around: tables to compare the step with; None while the job runs.
    """
    # Norms that are not finite where a GradScaler skips updates do not count, unless too many in a row.
    losses = losses.filter(pl.col("step") >= 0)
    skipped = losses.filter(pl.col("scaled") & (pl.col("kind") == NORM) & ~pl.col("value").is_finite())
    steps = skipped.select(pl.col("step").unique().sort()).with_columns(run=pl.col("step") - pl.row_index())
    few = skipped.join(steps.filter(pl.len().over("run") <= MAX_SKIPPED), on="step", how="semi")
    losses = losses.join(few, on=["rank", "step", "kind"], how="anti")
    bad = losses.filter(~pl.col("value").is_finite())
    shown = [_describe_not_finite(losses, bad)] if bad.height else []
    good = losses.filter(pl.col("step") < bad["step"].min()) if bad.height else losses
    jumps = [jump for kind in NAMES if (jump := first_jump(good, kind)) is not None]
    if jumps:
        shown.append(_describe_jump(losses, min(jumps, key=lambda jump: jump.step)))
    return [_finding(*one, workers, around) for one in shown]


def _bad_number_at(rows: pl.DataFrame, losses: pl.DataFrame, kind: str, before: float) -> BadNumber:
    """Return the `BadNumber` of `rows`, with step and value of the first row."""
    ranks = tuple(sorted(rows["rank"].unique().to_list()))
    of_all = losses.filter(kind=kind)["rank"].n_unique() == len(ranks)
    return BadNumber(kind, rows["step"][0], ranks, of_all, before, rows["value"][0])


# Numbers that are not finite.


def _describe_not_finite(losses: pl.DataFrame, bad: pl.DataFrame) -> FindingParts:
    at_first = bad.filter(step=bad["step"].min())
    kind = LOSS if (at_first["kind"] == LOSS).any() else NORM  # a loss comes before its gradients
    rows = at_first.filter(kind=kind).sort("rank", "time_ns")
    of_rank = losses.filter(kind=kind, rank=rows["rank"][0]).sort("time_ns")
    before = of_rank.filter(pl.col("step") < rows["step"][0])["value"].tail(1).to_list()
    place = _bad_number_at(rows, losses, kind, *before or [math.nan])
    value = "NaN" if math.isnan(place.after) else "infinite"
    seen = observe(
        "not-finite", f"{place.whose} is {{value}} in step {{step}}: the first number that is not finite",
        value=value, step=place.step, ranks=place.ranks,
    )  # fmt: skip
    seen = seen.then("; the one before was {before:.4g}", before=before[0]) if before else seen
    return "loss.not_finite", place, value, 0.98, [seen, *_observe_aftermath(losses, bad, place)]


def _observe_aftermath(losses: pl.DataFrame, bad: pl.DataFrame, place: BadNumber) -> Iterator[Observation]:
    """Yield which other ranks followed, and whether numbers became finite again."""
    norms = bad.filter(step=place.step, kind=NORM)["rank"].unique().sort().to_list()
    if place.kind == LOSS and norms:
        text = "the gradient norm of {norm_ranks} is not finite in the same step"
        yield observe("gradients-followed", text, norm_ranks=norms)
    later = losses.filter(pl.col("step") > place.step, kind=LOSS)
    others = sorted({*later["rank"]} - {*place.ranks})
    following = bad.filter(pl.col("rank").is_in(others), pl.col("step") > place.step, kind=LOSS)
    ill = following.filter(step=place.step + 1)["rank"].unique().sort().to_list()
    if ill:
        text = "in step {next_step} the loss of {ill_ranks} is not finite either: ranks share their gradients"
        yield observe("others-followed", text, next_step=place.step + 1, ill_ranks=ill)
    elif others and following.is_empty():
        yield observe("others-finite", "the losses of {others_ranks} stay finite", others_ranks=others)
    steps = later.group_by("step").agg(finite=pl.col("value").is_finite().all()).sort("step")
    well = steps.filter("finite")["step"]
    if well.len():
        text = "all losses are finite again in step {again_step}"
        yield observe("finite-again", text, again_step=well[0], later_bad_steps=steps.height - well.len())
    elif steps.height:
        text = f"no step is finite on all ranks in the {counted(steps.height, 'step')} since"
        yield observe("never-finite", text, later_steps=steps.height)


# Jumps.


def first_jump(losses: pl.DataFrame, kind: str) -> BadNumber | None:
    """Return the first jump of a number, or None; `losses` are finite."""
    means = losses.filter(kind=kind).group_by("rank", "step").agg(pl.col("value").mean()).sort("rank", "step")
    earlier = pl.col("value").shift(1).over("rank")
    rises = means.with_columns(
        before=earlier.rolling_max(BEFORE).over("rank"),
        level=earlier.abs().rolling_median(LEVEL_STEPS, min_samples=BEFORE).over("rank"),
    ).filter(pl.col("level") > 0)
    rises = rises.with_columns(rise=(pl.col("value") - pl.col("before")) / pl.col("level")).drop_nulls()
    largest = rises.sort("rise", descending=True).unique("step", keep="first").sort("step")
    rise = largest["rise"].to_numpy()
    records = np.maximum.accumulate(rise) if rise.size else rise
    above = rise[1:] > np.maximum(MIN_TIMES_EARLIER * records[:-1], RISE[kind])
    for index in (np.flatnonzero(above) + 1).tolist():
        row = largest.row(index, named=True)
        covered = np.ptp(means.filter(pl.col("step") < row["step"], rank=row["rank"])["value"].to_numpy())
        enough = row["value"] - row["before"] > OF_RANGE * covered
        if index >= MIN_STEPS and enough and row["rise"] > _usual_record(rise[:index]):
            rows = rises.filter(pl.col("rise") > row["rise"] / 2, step=row["step"])
            return _bad_number_at(rows.sort("rank"), losses, kind, row["before"])
    return None


def _usual_record(earlier: Floats) -> float:
    """Return the limit that a rise must exceed, from the largest rise of each earlier step."""
    first, fifth = np.sort(earlier)[[-1, -NEXT]]
    unusual = first / max(fifth, first / MAX_UNUSUAL) if first > 0 else 0.0
    return float(MIN_TIMES_EARLIER * first * unusual**2)


def _describe_jump(losses: pl.DataFrame, place: BadNumber) -> FindingParts:
    seen = observe(
        "jumped",
        f"{place.whose} rises to {{after:.4g}} in step {{step}}; in the {BEFORE} steps before it was "
        "{before:.4g} at most",
        after=place.after, before=place.before, step=place.step, ranks=place.ranks,
    )  # fmt: skip
    later = losses.filter(pl.col("step") > place.step, kind=place.kind, rank=place.ranks[0])
    means = later.group_by("step").agg(pl.col("value").mean()).sort("step")
    back = means.filter(pl.col("value") <= place.before + MAX_LEFT_OF_RISE * (place.after - place.before))
    if back.height:
        text = "it is back at {back:.4g} in step {back_step}"
        ended = observe("jump-is-over", text, back=back["value"][0], back_step=back["step"][0])
    else:
        text = f"it has not come back in the {counted(means.height, 'step')} since"
        ended = observe("jump-lasts", text, later_steps=means.height)
    sure, what = 0.7 if back.height else 0.9, f"{place.after:.3g} after {place.before:.3g}"
    return "loss.jump", place, what, sure, [seen, ended]


# The finding: where the number went bad, what else differed there, and what to do.

_NOTHING = (
    "nothing that is known of that step differs from the steps before: its time, and, where recorded, size "
    "of batches, evaluation, loaded checkpoints, errors and heat of its GPU"
)


def _finding(
    class_: str, place: BadNumber, what: str, sure: float, seen: Sequence[Observation],
    workers: pl.DataFrame, around: ComparedTables | None,
) -> Finding:  # fmt: skip
    differs = [*_differences(place, workers, around)] if around else []
    nothing = [observe("nothing-differs", _NOTHING, step=place.step)] if around and not differs else []
    kind = "job" if place.of_job else "rank" if len(place.ranks) == 1 else "ranks"
    name = "job" if place.of_job else numbers_in_words(place.ranks)
    cause = f"{NAMES[place.kind]} {what} {'on all ranks ' if place.of_job else ''}in step {place.step}"
    named = workers.filter(pl.col("rank").is_in(place.ranks)).sort("rank")
    remedy = remedy_of_errors(differs) or _remedy(place, named, {one.kind for one in differs})
    observations = (*seen, *_hosts(named.head(0 if place.of_job else 4)), *differs, *nothing)
    return Finding(class_, kind, name, place.ranks, 0.0, sure, 0.0, observations, cause, remedy=remedy)


def _hosts(workers: pl.DataFrame) -> Iterator[Observation]:
    for rank, host, gpu, model in workers.select("rank", "host", "gpu_uuid", "gpu_name").iter_rows():
        text = f"rank {{rank}} runs on host {{host}}{', GPU {gpu} ({model})' if gpu else ''}"
        yield observe("runs-on", text, rank=rank, host=host, gpu=gpu, model=model)


_QUANTITIES = (  # a counter or column of `steps`; its sentence; its usual value in that sentence
    ("step_input_elements", "the batches have {value:,.0f} elements", "{usual:,.0f}"),
    ("duration_ns", "the step takes {value_ns}", "{usual_ns}"),
    ("step_no_grad_ns", "{value_ns} pass without gradients, as in an evaluation", "{usual_ns}"),
)
_OF_GPUS = f"^({HEARTBEAT}|ecc_|temperature_c|clocks_hw|clocks_sw_thermal|throttled_(thermal|hardware))"


def _differences(place: BadNumber, workers: pl.DataFrame, around: ComparedTables) -> Iterator[Observation]:
    """Yield how the step differs from earlier ones on the first of the number's ranks."""
    rank, steps = place.ranks[0], around.steps.select("rank", "step", "start_ns", "duration_ns")
    here = steps.filter(rank=rank, step=place.step)
    if here.is_empty():
        return
    begin, took = here.select("start_ns", "duration_ns").row(0)
    begun = steps.rename({"start_ns": "time_ns"})
    for name, says, usual in _QUANTITIES:
        rows = around.counters.filter(counter=name).join(begun, on=["rank", "time_ns"])
        rows = steps.with_columns(value=pl.col(name).cast(pl.Float64)) if name in steps.columns else rows
        yield from _compare_quantity(
            place, rows, name, took / 10 if name.endswith("_ns") else 0.0, says, usual
        )
    recent = steps.filter(pl.col("step") >= place.step - LOADED_STEPS, rank=rank)
    since = recent["start_ns"].min() if place.step > LOADED_STEPS else 0  # 0: also earlier loads
    text = f"rank {{rank}} loaded a checkpoint at most {LOADED_STEPS} steps before: {{path}}"
    loaded = around.checkpoints.filter(pl.col("start_ns").is_between(since, begin), rank=rank, kind="load")
    yield from (observe("loaded-before", text, rank=rank, path=path) for path in loaded["path"].tail(1))
    mine = gpus_of_ranks(around.counters, workers).filter(~pl.lit(place.of_job), rank=rank)
    if mine.height:
        yield from errors_in(here, around.counters, workers, [rank])
        samples = around.counters.join(mine, on=["host", "device"], how="semi")
        samples = samples.filter(pl.col("counter").str.contains(_OF_GPUS))
        before = TimeRange(int(samples["time_ns"].min()), begin - AROUND_NS)  # type: ignore[arg-type]
        if before.begin_ns < before.end_ns:
            near = TimeRange(before.end_ns, begin + took + AROUND_NS)
            yield from list(changes(samples, workers, before, near).values())[:2]


def _compare_quantity(
    place: BadNumber, rows: pl.DataFrame, name: str, floor: float, says: str, usual: str
) -> Iterator[Observation]:
    """Yield a quantity outside its range in the steps before, with the median of other ranks in that step."""
    rank, here, mine = place.ranks[0], rows.filter(step=place.step), rows.filter(rank=place.ranks[0])
    lately = pl.col("step").is_between(place.step - COMPARED_STEPS, place.step, closed="left")
    value, before = here.filter(rank=rank)["value"].to_numpy(), mine.filter(lately)["value"].to_numpy()
    if not value.size or before.size < BEFORE:
        return
    is_more = value[0] > max(DIFFERS * before.max(), floor)
    if is_more or (not floor and value[0] < before.min() / DIFFERS):
        unit, limit = "_ns" if name.endswith("_ns") else "", before.max() if is_more else before.min()
        values = {f"value{unit}": float(value[0]), f"usual{unit}": float(limit)}
        text = f"on rank {{rank}} {says}, in its steps before at {'most' if is_more else 'least'} {usual}"
        peers = here.filter(pl.col("rank") != rank)["value"].median()
        if isinstance(peers, float):
            text += f", and on other ranks {usual.replace('usual', 'peers')}"
            values[f"peers{unit}"] = peers
        yield observe(f"differs-{name.removesuffix('_ns').replace('_', '-')}", text, rank=rank, **values)


def _remedy(place: BadNumber, workers: pl.DataFrame, differs: set[str]) -> str:
    """Return what to look at; `workers` are the rows of the ranks of `place`."""
    step = place.step
    if "loaded-before" in differs:
        return "compare the loss with that before the checkpoint was saved: it may not hold all of the state"
    if place.kind == NORM:
        how = "" if math.isfinite(place.after) else " (`torch.autograd.detect_anomaly`)"
        return f"losses do not show it yet: look at the backward of step {step}{how}"
    if place.of_all:
        causes = f"the data of step {step}, or the update before it (learning rate, clipping, precision)"
        return f"look at {causes}; continue from a checkpoint before both"
    other = "GPU" if (workers["gpu_name"] != "").any() else "host"
    hosts = ", ".join(workers["host"].unique().sort()) or "its host"
    return (
        f"look at the batch of {ranks_in_words(place.ranks)} in step {step}, and run it on another {other}: "
        f"if the loss is the same there, it is the batch; if not, `dpro check` tests {hosts}"
    )
