"""Parallel layouts of a job, one row each: all layouts of a number of GPUs, and what rules some out.

Takes degrees of parallelism; returns frames with the columns of `COLUMNS`. Ranks are numbered as in
Megatron-LM: tensor parallelism innermost, then context and expert, then data, with pipeline stages outermost.
Expert parallelism divides data and context parallelism, and needs no GPUs of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import isqrt
from typing import Any

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import UsageError
from dpro.extensions.plan.model import Model
from dpro.extensions.plan.schedules import SCHEDULES
from dpro.words import whole_number

AXES = ("dp", "tp", "pp", "cp", "ep")
# Columns and their defaults.
COLUMNS: Mapping[str, int] = {
    **dict.fromkeys(AXES, 1),
    "vpp": 1,  # model chunks per stage
    "micro_batch": 1,  # sequences
    "micro_batches": 1,  # per pipeline and step
    "zero": 1,  # stage of ZeRO: 0 nothing is sharded, 1 optimizer states, 2 gradients, 3 parameters
    "recompute": 0,  # recomputed activations: 0 none, 1 of attention, 2 of complete layers
    "schedule": 0,  # number in `SCHEDULE_NAMES`: 0 is 1F1B, or interleaved with several chunks
}
SCHEDULE_NAMES = tuple(SCHEDULES)
USUAL_SCHEDULES = ("1f1b", "interleaved")
RECOMPUTE = ("none", "selective", "full")
MAX_MICRO_BATCH = 16
MAX_STAGES = 128  # twice those of any job: the replay of a pipeline grows with their square
# Bounds of values; 1 and a million for other keys.
_BOUNDS = {"zero": (0, 3), "recompute": (0, len(RECOMPUTE) - 1), "schedule": (0, len(SCHEDULE_NAMES) - 1)}


def layouts(rows: Sequence[Mapping[str, Any]] | pl.DataFrame) -> pl.DataFrame:
    """Return layouts with all columns of `COLUMNS`, in that order.

    Args:
        rows: known columns of each; `COLUMNS` has the defaults of the others.

    Raises:
        UsageError: a degree is not a positive number.
    """
    frame = rows if isinstance(rows, pl.DataFrame) else _frame(rows)
    whole = frame.select(
        (pl.col(name).fill_null(usual) if name in frame.columns else pl.lit(usual)).cast(pl.Int64).alias(name)
        for name, usual in COLUMNS.items()
    )
    for name in COLUMNS:
        least = 0 if name in ("zero", "recompute", "schedule") else 1
        if whole.height and int(whole[name].to_numpy().min()) < least:
            raise UsageError(f"a layout has {name}={whole[name].to_numpy().min()}: {least} is the least")
    return whole


def _frame(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame({name: [row.get(name, usual) for row in rows] for name, usual in COLUMNS.items()})


def column(rows: pl.DataFrame, name: str) -> Floats:
    """Return [N] a column as floats.

    Args:
        name: a key of `COLUMNS`.
    """
    values: Floats = rows[name].to_numpy().astype(np.float64)
    return values


def gpus_of(rows: pl.DataFrame) -> Ints:
    """Return [N] GPUs of each layout."""
    taken: Ints = (rows["dp"] * rows["tp"] * rows["pp"] * rows["cp"]).to_numpy()
    return taken


def parse_layout(text: str) -> dict[str, int]:
    """Parse a layout given on the command line: `dp=8,tp=4,pp=2,micro_batch=1`.

    Args:
        text: keys of `COLUMNS`, comma-separated.

    Raises:
        UsageError: a key is unknown, or a value is not a number or out of bounds.
    """
    layout = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in COLUMNS:
            raise UsageError(f"{part!r} is not part of a layout: there are {', '.join(COLUMNS)}")
        if key == "recompute" and value in RECOMPUTE:
            value = str(RECOMPUTE.index(value))
        if key == "schedule":
            if value not in SCHEDULES:
                raise UsageError(f"{part!r}: there are {', '.join(SCHEDULES)}")
            value = str(0 if value in USUAL_SCHEDULES else SCHEDULE_NAMES.index(value))
        if (number := whole_number(value.strip())) < 0:
            takes = f"is one of {', '.join(RECOMPUTE)}" if key == "recompute" else "needs a whole number"
            raise UsageError(f"{part!r}: {key} {takes}")
        least, most = _BOUNDS.get(key, (1, 1_000_000))
        if not least <= number <= most:
            raise UsageError(f"{part!r}: {key} is from {least} to {most:,}")
        layout[key] = number
    if not layout:
        raise UsageError("the layout is empty: give one such as dp=8,tp=4,pp=2")
    return layout


def in_words(row: Mapping[str, int]) -> str:
    """Return a layout on one line: `dp 8 x tp 4 x pp 2, micro-batch 1 x 16`."""
    axes = " x ".join(f"{axis} {row[axis]}" for axis in AXES if row[axis] > 1 or axis == "dp")
    more = [f"micro-batch {row['micro_batch']} x {row['micro_batches']}"]
    if row["schedule"]:
        more.append(schedule_of(row))
    elif row["vpp"] > 1:
        more.append(f"{row['vpp']} chunks")
    if row["zero"] != 1:
        more.append(f"ZeRO {row['zero']}")
    if row["recompute"]:
        more.append(f"{RECOMPUTE[row['recompute']]} recomputation")
    return ", ".join([axes, *more])


def schedule_of(row: Mapping[str, int]) -> str:
    """Return the name of a layout's schedule; empty without a pipeline."""
    if row["pp"] == 1:
        return ""
    return "interleaved" if row["schedule"] == 0 and row["vpp"] > 1 else SCHEDULE_NAMES[row["schedule"]]


def why_undividable(model: Model, row: Mapping[str, int]) -> str:
    """Return why a model cannot be cut by a layout; empty where it can.

    Args:
        row: degrees of a layout; missing ones are 1.
    """
    tp, pp, cp, ep, vpp = (row.get(name, 1) for name in ("tp", "pp", "cp", "ep", "vpp"))
    if model.heads % tp or model.ffn % tp:
        return f"tp={tp} does not divide {model.heads} heads and {model.ffn} columns"
    if pp * vpp > model.layers:
        return f"{model.layers} layers do not make {pp * vpp} stages and chunks"
    if pp > MAX_STAGES:
        return f"pp={pp}: no pipeline has more than {MAX_STAGES} stages"
    if vpp > 1 and pp == 1:
        return f"vpp={vpp}: only pipeline stages have chunks, and pp is 1"
    if model.sequence % cp:
        return f"cp={cp} does not divide sequences of {model.sequence} tokens"
    if ep > 1 and (not model.experts or model.experts % ep):
        return f"ep={ep}: the model has {model.experts or 'no'} experts"
    return ""


def candidates(
    model: Model,
    gpus: int,
    per_host: int,
    global_batch: int,
    keep: Mapping[str, int] | None = None,
    schedules: Sequence[str] = USUAL_SCHEDULES,
) -> pl.DataFrame:
    """Return all layouts of a number of GPUs that divide model and batch.

    Tensor parallelism stays within a host, as in practice: across hosts it is never best.

    Raises:
        UsageError: no layout is left.
    """
    keep = dict(keep or {})
    if "schedule" in keep:
        schedules = [SCHEDULE_NAMES[keep["schedule"]]] if keep["schedule"] else USUAL_SCHEDULES
    rows = [
        row
        for degrees in _degrees(model, gpus, per_host, keep)
        for row in _of_degrees(degrees, model, global_batch, keep, schedules)
    ]
    if not rows:
        kept = ", ".join(f"{key}={value}" for key, value in keep.items())
        raise UsageError(
            f"no layout of {gpus} GPUs divides {model.layers} layers, {model.heads} heads and a batch of "
            f"{global_batch} sequences{' with ' + kept if kept else ''}"
        )
    return layouts(rows)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _choices(keep: Mapping[str, int], key: str, among: Sequence[int]) -> Sequence[int]:
    return [keep[key]] if key in keep else among


def _degrees(model: Model, gpus: int, per_host: int, keep: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield degrees of all axes whose product is the number of GPUs."""
    shared = model.kv_heads if not model.kv_rank else model.heads
    tps = _choices(keep, "tp", [t for t in _divisors(gpus) if t <= per_host and model.heads % t == 0])
    pps = _choices(keep, "pp", [p for p in _divisors(gpus) if p <= model.layers])
    cps = _choices(keep, "cp", [1, 2, 4, 8] if model.sequence > 8192 else [1])
    for tp, pp, cp in product(tps, pps, cps):
        if tp > 1 and (max(tp, shared) % min(tp, shared) or model.ffn % tp):
            continue
        if gpus % (tp * pp * cp) or model.sequence % (2 * cp):
            continue
        dp = gpus // (tp * pp * cp)
        if ("dp" in keep and keep["dp"] != dp) or why_undividable(
            model, {**keep, "tp": tp, "pp": pp, "cp": cp}
        ):
            continue
        eps = [e for e in _divisors(model.experts) if (dp * cp) % e == 0] if model.experts else [1]
        for ep in [choice for choice in _choices(keep, "ep", eps) if (dp * cp) % choice == 0]:
            yield {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}


def _of_degrees(
    degrees: Mapping[str, int],
    model: Model,
    global_batch: int,
    keep: Mapping[str, int],
    schedules: Sequence[str],
) -> Iterator[dict[str, int]]:
    """Yield the combinations of degrees with micro-batches, schedules, chunks, ZeRO and recomputation."""
    dp, pp = degrees["dp"], degrees["pp"]
    if global_batch % dp:
        return
    sequences = global_batch // dp
    sizes = [size for size in _divisors(sequences) if size <= MAX_MICRO_BATCH]
    for micro_batch in _choices(keep, "micro_batch", sizes):
        count = sequences // micro_batch
        if sequences % micro_batch or count < pp:  # fewer micro-batches than stages: another layout is better
            continue
        ways = [
            (schedule, chunks)
            for schedule, chunks in _possible_schedules(schedules, pp, count, model.layers)
            if chunks in _choices(keep, "vpp", [chunks])
        ]
        zeros = (1, 3) if pp == 1 and dp > 1 else (1,)
        for (schedule, vpp), zero, recompute in product(
            ways,
            _choices(keep, "zero", zeros),
            _choices(keep, "recompute", (0, 1, 2)),
        ):
            yield {
                **degrees,
                "vpp": vpp,
                "micro_batch": micro_batch,
                "micro_batches": count,
                "zero": zero,
                "recompute": recompute,
                "schedule": schedule,
            }


def _possible_schedules(
    schedules: Sequence[str], stages: int, count: int, layers: int
) -> list[tuple[int, int]]:
    """Return the schedules possible with these stages and micro-batches, with chunks per stage."""
    if stages == 1:
        return [(0, 1)]
    ways = []
    for name in schedules:
        if name == "interleaved":
            ways += [(0, c) for c in (2, 4) if count % stages == 0 and layers >= c * stages]
        elif name != "dualpipe" or (stages % 2 == 0 and count % 2 == 0 and count >= 2 * stages):
            chunks = SCHEDULES[name].chunks
            ways += [(SCHEDULE_NAMES.index(name), chunks)] if layers >= chunks * stages else []
    return ways
