"""Closed forms and published figures, beside the simulation of jobs that fail.

In: a folder with `published_figures.csv` and `spot_availability.parquet`, for two of three checks. Out: check
→ {n, figures, bar, holds}. Public truth is thin: a few totals, some of them projections of their authors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.extensions.goodput.outlook import young_daly
from dpro.extensions.goodput.simulate import Recovery, exponential, simulate
from dpro.extensions.goodput.stages import PRESETS
from dpro.units import S_PER_H

FIGURES, SPOT = "published_figures.csv", "spot_availability.parquet"
JOBS = 64
LOSSES = 1000  # of hosts at full size, within the time that an elastic job is simulated
GPUS = 8  # of a host
RSC_H = {
    1024: "mean time to failure, 1024 GPUs, measured",
    16384: "mean time to failure, 16384 GPUs, projected by its authors",
    131072: "mean time to failure, 131072 GPUs, projected by its authors",
}
EXPLAINED = (1024, 16384)  # numbers of GPUs whose times one model has to explain
RSC_BAR, CLOSED_BAR, BLOOM_BAR, SPOT_BAR = 5.0, 0.5, 0.5, 10.0


def closed_forms() -> dict[str, Any]:
    """Compare goodput under memoryless failures with Daly's closed form, and Young's interval with others."""
    per_s, stall_s, restart_s = 1 / (4 * S_PER_H), 30.0, 120.0
    intervals = [100, 200, 465, 900, 2000]
    simulated, errors = [], []
    for every in intervals:
        recovery = Recovery(1.0, every, stall_s, 0.0, restart_s, 0.0, 0.0)
        said = _goodput(recovery, per_s, 16_000.0)
        # Daly, FGCS 22 (2006): a segment takes e^(rR) (e^(r(w+C)) - 1) / r on average.
        takes_s = np.exp(per_s * restart_s) * np.expm1(per_s * (every + stall_s)) / per_s
        simulated.append(said)
        errors.append(100 * abs(said / float(every / takes_s) - 1))
    young = _goodput(_interval(young_daly(Recovery(1.0, 1, stall_s, 0, 0, 0, 0), per_s)), per_s, 16_000.0)
    behind = 100 * (max(simulated) / young - 1)
    return {
        "n": len(intervals),
        "figures": {"worst_pct": round(max(errors), 3), "young_behind_best_pct": round(behind, 3)},
        "bar": f"within {CLOSED_BAR:g}% of Daly's form, Young's interval within {CLOSED_BAR:g}% of the best",
        "holds": max(errors) <= CLOSED_BAR and behind <= CLOSED_BAR,
    }


def published_figures(folder: Path) -> dict[str, Any]:
    """Compare with RSC-1, BLOOM and Llama 3: times between failures, best interval, cost of an interruption.

    Args:
        folder: with `FIGURES`.
    """
    table = pl.read_csv(folder / FIGURES, infer_schema_length=None)
    rsc = PRESETS["rsc-1"]
    said_h = {gpus: 1 / (rsc.job + rsc.host * gpus / GPUS) for gpus in RSC_H}
    rsc_pct = {gpus: 100 * (said_h[gpus] / _value(table, RSC_H[gpus]) - 1) for gpus in RSC_H}
    small, large = EXPLAINED
    independent_h = _value(table, RSC_H[large]) * large / small
    step_s = _value(table, "step time at full batch 2048")
    failure_s = 168 * S_PER_H / _value(table, "hardware failures, about")
    bloom = Recovery(step_s, 100, _value(table, "time to save a checkpoint"), 0.0, 0.0, 0.0, 0.0)
    best = young_daly(bloom, 1 / failure_s)
    with_best, with_used = (_goodput(_interval(n, bloom), 1 / failure_s, 100_000.0) for n in (best, 100))
    llama_h = 54 * 24
    interruptions = sum(_value(table, f"interruptions, {kind}") for kind in ("planned", "unexpected"))
    share = _value(table, "effective training time, lower bound")
    # The whole cost of an interruption as one start, which another may cut off: the share e^(-rate * start).
    per_s = interruptions / (llama_h * S_PER_H)
    lost_s = -np.log(share) / per_s
    llama = Recovery(1.0, 0, 0.0, 0.0, lost_s, 0.0, 0.0, kept_steps=0)
    llama_said = _goodput(llama, per_s, llama_h)
    explained = max(abs(rsc_pct[gpus]) for gpus in EXPLAINED)
    behind, llama_pct = 100 * (with_best / with_used - 1), 100 * abs(llama_said / share - 1)
    return {
        "n": len(RSC_H) + 3,
        "figures": {
            **{f"rsc_{gpus}_gpus_h": round(hours, 2) for gpus, hours in said_h.items()},
            **{f"rsc_{gpus}_gpus_pct": round(error, 1) for gpus, error in rsc_pct.items()},
            "rsc_independent_1024_gpus_h": round(independent_h, 1),
            "bloom_best_steps": best,
            "bloom_100_steps_behind_pct": round(behind, 2),
            "bloom_100_steps_lose_h": round(100 * step_s / S_PER_H, 2),
            "llama_interruption_costs_min": round(lost_s / 60, 1),
            "llama_goodput": round(llama_said, 3),
        },
        "bar": f"RSC-1 within {RSC_BAR:g}% at {small} and {large} GPUs, BLOOM's 100 steps within "
        f"{BLOOM_BAR:g}% of its best interval, Llama 3's {share:.0%} within {CLOSED_BAR:g}%",
        "holds": explained <= RSC_BAR and 0 <= behind <= BLOOM_BAR and llama_pct <= CLOSED_BAR,
    }


def spot_availability(folder: Path) -> dict[str, Any]:
    """Predict the hosts of an elastic job in the second half of a trace, by rates of the first half.

    Args:
        folder: with `SPOT`.
    """
    figures: dict[str, float] = {}
    errors = []
    table = pl.read_parquet(folder / SPOT)
    for (name,), trace in table.group_by("trace", maintain_order=True):
        ordered = trace.sort("time_s", maintain_order=True)
        at_s, hosts = ordered["time_s"].to_numpy(), ordered["available"].to_numpy()
        changes, took_s = np.diff(hosts), np.diff(at_s)
        lost, first = np.maximum(-changes, 0), at_s[:-1] < at_s[-1] / 2
        most = int(hosts.max())
        host_s = float((hosts[:-1] * took_s)[first].sum())
        away_s = most * float(took_s[first].sum()) - host_s
        # Little's law: the number of hosts away is the rate of losses times how long each is away.
        elastic = Recovery(
            1.0, 1, 0.0, 0.0, 0.0, 0.0, 0.0, hosts=most, spares=0, replicas=most,
            repair_s=away_s / float(lost[first].sum()),
        )  # fmt: skip
        host_per_s = float(lost[first].sum()) / host_s
        said = most * _goodput(elastic, 0.0, LOSSES / (host_per_s * most * S_PER_H), host_per_s)
        measured = float((hosts[:-1] * took_s)[~first].sum() / took_s[~first].sum())
        errors.append(100 * (said / measured - 1))
        figures[f"{name}_pct"] = round(errors[-1], 1)
        figures[f"{name}_lost_second_to_first"] = round(float(lost[~first].sum() / lost[first].sum()), 2)
        at_once = ordered.slice(1).with_columns(lost=lost).group_by("time_s").agg(pl.col("lost").sum())
        figures[f"{name}_most_lost_at_once"] = int(at_once["lost"].to_numpy().max())
    return {
        "n": len(errors),
        "figures": figures,
        "bar": f"hosts in the second half within {SPOT_BAR:g}%",
        "holds": max(map(abs, errors)) <= SPOT_BAR if errors else None,
    }


def _interval(every: int, recovery: Recovery | None = None) -> Recovery:
    """Change the interval of checkpoints of a recovery; without one, of that of `closed_forms`."""
    given = recovery or Recovery(1.0, 1, 30.0, 0.0, 120.0, 0.0, 0.0)
    return Recovery(given.step_s, every, given.stall_s, 0.0, given.start_s, 0.0, 0.0)


def _goodput(recovery: Recovery, job_per_s: float, hours: float, host_per_s: float = 0.0) -> float:
    """Return the mean goodput of simulated jobs that fail at the given rates."""
    rng = np.random.default_rng(1)
    failures = exponential(job_per_s, host_per_s, rng)
    return float(simulate(recovery, failures, hours * S_PER_H, rng, JOBS).goodput.mean())


def _value(table: pl.DataFrame, quantity: str) -> float:
    return float(table.filter(quantity=quantity)["value"][0])
