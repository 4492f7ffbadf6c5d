"""Assigns every second of every rank of a job to exactly one class.

Takes attempts, and the share of a step that each loses to stragglers; returns a frame of pieces by class,
which add up to the wall time of all ranks. Time of unknown use is `set_up` or `down`.

    productive      steps, the first time that each was done, unless they were lost at the end
    straggler       share of these that healing the findings of slow ranks, hosts and links would save
    evaluation      work without gradients beyond the usual amount, in steps done for the first time
    checkpoint      training stalled while a checkpoint was saved, by this rank or by one that it waited for
    repeated        steps, and parts of steps, that were lost: after the last checkpoint of an earlier attempt
                    they are done again, or are still to be
    hang            from the last step of an attempt that hung until its processes were ended
    shutdown        the same of an attempt that failed, or was ended, without a hang
    warm_up         time of the first steps of an attempt beyond typical ones: compilation, caches
    load            training stalled while a checkpoint was loaded
    launch, imports, process_group, set_up      the stages of a start
    finish          after the last step of an attempt that is not known to have failed
    recording       between steps: the cost of recording them
    down            the rank had no process
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import polars as pl

from dpro.extensions.goodput.attempts import (
    BETWEEN,
    DOWN,
    FIRST,
    GROUP,
    IMPORTS,
    LAUNCH,
    LOAD,
    PIECES,
    SAVE,
    SET_UP,
    TAIL,
    WARM_STEPS,
    Attempt,
    pieces_of,
)
from dpro.words import counted

PRODUCTIVE, STRAGGLER, EVALUATION = "productive", "straggler", "evaluation"
CHECKPOINT, REPEATED, HANG, SHUTDOWN = "checkpoint", "repeated", "hang", "shutdown"
WARM_UP, LOADING, FINISH = "warm_up", "load", "finish"
CLASSES = (
    PRODUCTIVE, STRAGGLER, EVALUATION, CHECKPOINT, REPEATED, HANG, SHUTDOWN, WARM_UP, LOADING, LAUNCH,
    IMPORTS, GROUP, SET_UP, FINISH, BETWEEN, DOWN,
)  # fmt: skip
USUAL = 0.1  # of a typical step: less work without gradients is part of the step


def account(
    attempts: Sequence[Attempt], stragglers: Mapping[int, float], hung: Collection[int] = ()
) -> tuple[pl.DataFrame, list[str]]:
    """Divide the wall time of each rank into classes.

    Args:
        stragglers: share of a step that is lost to them, by number of the attempt.
        hung: numbers of attempts that hung before they were ended.

    Returns:
        `[attempt, rank, step, class, start_ns, duration_ns]` in order of rank and time, with `step` the job's
        (-1 outside steps); and what is unknown, one line each.
    """
    pieces, displaced = pieces_of(attempts)
    notes = list(dict.fromkeys(note for attempt in attempts for note in attempt.notes))
    notes += [
        f"attempt {attempt.number} has no record of how it started: all before its first step counts as "
        "launch"
        for attempt in attempts
        if attempt.starts.is_empty() and attempt.steps.height
    ]
    if displaced:
        notes.append(f"{counted(displaced, 'time stamp')} out of order, as after a clock was set back: moved")
    if pieces.is_empty():
        return pieces.rename({"doing": "class"}), [*notes, "no moment of any rank was recorded"]
    typical_steps = [attempt.typical_ns for attempt in attempts if attempt.typical_ns]
    usual = median(typical_steps) if typical_steps else 0.0
    typical = {attempt.number: attempt.typical_ns or usual for attempt in attempts}
    parts = _job_steps(pieces, attempts)
    parts = parts.with_columns(
        typical_ns=pl.col("attempt").replace_strict(typical, default=0.0, return_dtype=pl.Float64),
        wasted=pl.col("attempt").replace_strict(dict(stragglers), default=0.0, return_dtype=pl.Float64),
        well=pl.col("attempt").is_in(
            [attempt.number for attempt in attempts if attempt.ended_well is not False]
        ),
        hung=pl.col("attempt").is_in(list(hung)),
    )
    parts = _with_stalls(parts, attempts)
    return _divide_pieces(parts), notes


def totals(accounted: pl.DataFrame) -> pl.DataFrame:
    """Return `[class, duration_ns, share]`, one row for each class that occurs, in the order of `CLASSES`.

    Args:
        accounted: as `account` returns it.
    """
    order = pl.DataFrame({"class": CLASSES, "order": range(len(CLASSES))})
    summed = (
        accounted.group_by("class").agg(pl.col("duration_ns").sum()).join(order, on="class").sort("order")
    )
    share = pl.col("duration_ns") / pl.col("duration_ns").sum()
    return summed.select("class", "duration_ns", share=share)


def _job_steps(pieces: pl.DataFrame, attempts: Sequence[Attempt]) -> pl.DataFrame:
    """Add `local`, the step's number in its attempt, and `again`: done before, or lost at the end."""
    first = {attempt.number: attempt.first_step for attempt in attempts}
    local = pl.when(pl.col("doing") == FIRST).then(0).otherwise("step").alias("local")
    begun = pieces.with_columns(
        local, pl.col("attempt").replace_strict(first, default=0, return_dtype=pl.Int64).alias("first")
    )
    is_step = pl.col("local") >= 0
    job = begun.with_columns(step=pl.when(is_step).then(pl.col("first") + pl.col("local")).otherwise(-1))
    done = job.group_by("attempt").agg(pl.col("step").max()).sort("attempt")
    reached = done.select("attempt", reached=pl.col("step").cum_max().shift(1, fill_value=-1))
    # The last step of the last attempt that stepped: any steps beyond it are still to be done again.
    at_end = done.filter(pl.col("step") >= 0)["step"].tail(1).sum()
    again = is_step & ((pl.col("step") <= pl.col("reached")) | (pl.col("step") > at_end))
    return job.join(reached, on="attempt", how="left", maintain_order="left").with_columns(again=again)


def _with_stalls(parts: pl.DataFrame, attempts: Sequence[Attempt]) -> pl.DataFrame:
    """Add `saving`, `loading` and `evaluating`, ns of each piece, in steps with waits for other ranks'."""
    beyond = (pl.col("duration_ns") - pl.col("typical_ns")).clip(lower_bound=0.0)
    stalled = parts
    for name, amounts in (
        ("saving", _stalls(parts, attempts, SAVE)),
        ("loading", _stalls(parts, attempts, LOAD)),
        ("evaluating", _evaluations(parts, attempts)),
    ):
        stalled = stalled.join(amounts, on=["attempt", "rank", "start_ns"], how="left", maintain_order="left")
        amount = pl.col("amount").fill_null(0.0)
        longest = amount.max().over("attempt", "step")
        waited = pl.when(pl.col("step") >= 0).then(pl.min_horizontal(longest, beyond)).otherwise(0.0)
        stalled = stalled.with_columns(pl.max_horizontal(amount, waited).alias(name)).drop("amount")
    return stalled


def _stalls(parts: pl.DataFrame, attempts: Sequence[Attempt], kind: str) -> pl.DataFrame:
    """Return `attempt`, `rank`, `start_ns` of pieces, and `amount`: their stall by saves or loads, ns."""
    rows = [
        attempt.checkpoints.filter(pl.col("kind") == kind).select(
            pl.lit(attempt.number, pl.Int32).alias("attempt"), "rank", "stall_ns", at="start_ns"
        )
        for attempt in attempts
    ]
    stalls = pl.concat(rows).sort("at")
    begun = parts.filter(pl.col("doing") != DOWN).select("attempt", "rank", "start_ns").sort("start_ns")
    within = stalls.join_asof(
        begun, left_on="at", right_on="start_ns", by=["attempt", "rank"], check_sortedness=False
    )
    amount = pl.col("stall_ns").clip(lower_bound=0).sum().cast(pl.Float64).alias("amount")
    return within.drop_nulls("start_ns").group_by("attempt", "rank", "start_ns").agg(amount)


def _evaluations(parts: pl.DataFrame, attempts: Sequence[Attempt]) -> pl.DataFrame:
    """Return `attempt`, `rank`, `start_ns` of steps, and `amount`: unusual work without gradients, ns."""
    rows = [
        attempt.counters.filter(pl.col("counter") == "step_no_grad_ns").select(
            pl.lit(attempt.number, pl.Int32).alias("attempt"), "rank", "value", start_ns="time_ns"
        )
        for attempt in attempts
    ]
    beyond = pl.col("value") - pl.col("value").median().over("attempt", "rank")
    evaluations = pl.concat(rows).with_columns(amount=beyond)
    typical = parts.select("attempt", "typical_ns").unique()
    much = pl.col("amount") >= USUAL * pl.col("typical_ns")
    return (
        evaluations.join(typical, on="attempt").filter(much).select("attempt", "rank", "start_ns", "amount")
    )


def _divide_pieces(parts: pl.DataFrame) -> pl.DataFrame:
    """Divide each piece into its classes, one after the other; the main class comes first."""
    doing, is_step, rest = pl.col("doing"), pl.col("step") >= 0, pl.col("rest")
    # The evaluation in a repeated step was done before: it is lost with the step.
    evaluating = pl.when("again").then(0.0).otherwise("evaluating").alias("evaluating")
    amounts = parts.with_columns(evaluating, rest=pl.col("duration_ns").cast(pl.Float64))
    for stall in ("saving", "loading", "evaluating"):
        amounts = amounts.with_columns(pl.min_horizontal(stall, "rest").alias(stall))
        amounts = amounts.with_columns(rest=rest - pl.col(stall))
    longer = (rest - pl.col("typical_ns")).clip(lower_bound=0.0)
    is_first = is_step & (pl.col("local") < WARM_STEPS)
    amounts = amounts.with_columns(
        warming=pl.when(is_first).then(longer).otherwise(0.0),
        standing=pl.when((doing == TAIL) & ~pl.col("well")).then(longer).otherwise(0.0),
    ).with_columns(
        hanging=pl.when("hung").then("standing").otherwise(0.0),
        ending=pl.when("hung").then(0.0).otherwise("standing"),
    )
    slow = pl.col("wasted") * (rest - pl.col("warming"))
    amounts = amounts.with_columns(waiting=pl.when(is_step & ~pl.col("again")).then(slow).otherwise(0.0))
    main = (
        pl.when(is_step & pl.col("again")).then(pl.lit(REPEATED))
        .when(is_step).then(pl.lit(PRODUCTIVE))
        .when((doing == TAIL) & pl.col("well")).then(pl.lit(FINISH))
        .when(doing == TAIL).then(pl.lit(REPEATED))
        .otherwise(doing)
    )  # fmt: skip
    taken = {
        "waiting": STRAGGLER, "evaluating": EVALUATION, "saving": CHECKPOINT, "loading": LOADING,
        "warming": WARM_UP, "hanging": HANG, "ending": SHUTDOWN,
    }  # fmt: skip
    cast = [pl.col(name).round().cast(pl.Int64) for name in taken]
    columns = amounts.with_columns(*cast, main=main, piece=pl.int_range(pl.len()))
    left = pl.col("duration_ns") - pl.sum_horizontal(*taken)
    key = ["piece", "attempt", "rank", "step", "start_ns"]
    parts_of = [columns.select(*key, pl.col("main").alias("class"), order=0, duration_ns=left)]
    for order, (name, what) in enumerate(taken.items(), start=1):
        parts_of.append(
            columns.select(*key, pl.lit(what).alias("class"), order=order, duration_ns=pl.col(name))
        )
    rows = pl.concat(parts_of).filter(pl.col("duration_ns") != 0).sort("piece", "order")
    before = pl.col("duration_ns").cum_sum().over("piece") - pl.col("duration_ns")
    names = [name if name != "doing" else "class" for name in PIECES]
    return rows.with_columns(start_ns=pl.col("start_ns") + before).select(names)
