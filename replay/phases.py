"""Phases of reinforcement learning: the time of rollout, reward, training and so on, and the limit of each.

Takes ranges in deep windows whose names identify a phase: those of TRL, which the recorder marks, of verl and
NeMo-RL, and of loops that set some (`record_function`, NVTX). Returns the time of each phase in a step, split
like steps. A moment belongs to the innermost range around it. Phases need both rollout and training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from dpro.replay.attribution import LANE, innermost
from dpro.replay.engine import innermost_segments
from dpro.replay.steps import recorded_steps, step_breakdown
from dpro.schema import MEANWHILE
from dpro.units import format_duration

ROLLOUT, REWARD, LOGPROBS, ADVANTAGE = "rollout", "reward", "log probabilities", "advantage"
TRAINING, SYNC, REST = "training", "weight sync", "rest"
# Patterns of the last part of a name, lower case and without leading underscores; the first match counts.
NAMES = {
    SYNC: r"sync_weights?|weight_sync|update_weights|refit\w*|transfer_and_update_weights|move_model_to_vllm",
    REWARD: r"rewards?|reward_\w+|(calculate|compute)_rewards?|(\w+_)?compute_rm_score|scor(e|ing)",
    LOGPROBS: r"(old_|ref_|(\w+_)?compute_(ref_)?)?log_?probs?\w*|get_per_token_logps\w*|ref",
    ADVANTAGE: r"adv|(compute_)?advantages?",
    TRAINING: r"(policy_)?train(ing)?(_step)?|update|(\w+_)?update_(actor|critic|policy)|(compute_)?loss",
    # `prepare_inputs` of TRL generates and scores. Methods of verl's workers begin with the worker's role.
    ROLLOUT: r"gen|(\w+_)?generate_sequences|generat\w+|rollouts?|prepare_inputs",
}
OF_UPDATE = r"^dpro::backward$|^Optimizer\.step"  # ranges of PyTorch and the recorder
# Within these ranges, log probabilities are part of training.
OF_LOSS = r"(^|\.)_?((compute_)?loss|(\w+_)?update_(actor|critic|policy))$"
MIN_SHARE = 0.5  # share of a step from which a phase dominates it
MIN_WAIT = 0.05  # share of a phase from which waiting is worth naming a rank
PARTS = {
    "compute_ns": "compute",
    "unsplit_ns": "communication",
    "exposed_transfer_ns": "transfer",
    "exposed_wait_ns": "waiting",
    "host_bound_ns": "host",
    "idle_ns": "idle",
    "copy_ns": "copies",
}


def phase_of() -> pl.Expr:
    """Return the phase that a range's name shows, or null: `GRPOTrainer._calculate_rewards` is `reward`."""
    last = pl.col("name").str.split(".").list.last().str.to_lowercase().str.strip_chars_start("_")
    named = (pl.when(last.str.contains(f"^({text})$")).then(pl.lit(phase)) for phase, text in NAMES.items())
    return pl.coalesce(pl.when(pl.col("name").str.contains(OF_UPDATE)).then(pl.lit(TRAINING)), *named)


def phases(
    spans: pl.DataFrame, collectives: pl.DataFrame, steps: pl.DataFrame, members: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Return the phases of the steps in deep windows, the longest first.

    Args:
        members: as in `step_breakdown`.

    Returns:
        `phase`, `duration_ns` and its `PARTS` (of a step, averaged over ranks and steps), `share` (of the
        step), `latest` (the rank that works longest in it, which others wait for; -1 for none). Empty where
        no range is named as a rollout, or none as training.
    """
    ranges = spans.filter(pl.col("kind") == "annotation")
    names = ranges.select(pl.col("name").unique()).with_columns(phase=phase_of()).drop_nulls()
    if not {ROLLOUT, TRAINING} <= {*names["phase"]}:
        return pl.DataFrame(schema={"phase": pl.String})
    ranges = ranges.join(names, on="name", maintain_order="left")
    within = innermost(ranges.filter(pl.col("name").str.contains(OF_LOSS)), ranges) >= 0
    ranges = ranges.filter(~((pl.col("phase") == LOGPROBS) & pl.Series(within)))
    whole = recorded_steps(spans, steps)
    pieces = _pieces(ranges, whole)
    parts = step_breakdown(spans, collectives, pieces, members)
    parts = parts.join(pieces.select("rank", "step", "phase", "waits"), on=["rank", "step"])
    split = pl.col("exposed_wait_ns").fill_null(0) + pl.col("exposed_transfer_ns").fill_null(0)
    parts = parts.with_columns(unsplit_ns=pl.col("exposed_comm_ns") - split).fill_null(0)
    meanwhile = {name: "duration_ns" if name == "exposed_wait_ns" else pl.lit(0) for name in PARTS}
    parts = parts.with_columns(**{n: pl.when("waits").then(of).otherwise(n) for n, of in meanwhile.items()})
    sums = parts.group_by("phase").agg(pl.col("duration_ns", *PARTS).sum() / whole.height)
    work = (pl.col("duration_ns") - pl.col("exposed_wait_ns")).sum().alias("work")
    works = parts.group_by("phase", "rank").agg(work).sort("work", "rank")
    last = works.group_by("phase").agg(pl.col("work").last(), latest=pl.col("rank").last().cast(pl.Int64))
    sums = sums.join(last, on="phase")
    waits = (pl.col("exposed_wait_ns") >= MIN_WAIT * pl.col("duration_ns")) & (pl.col("work") > 0)
    latest = pl.when(waits).then("latest").otherwise(-1)
    share = pl.col("duration_ns") / pl.col("duration_ns").sum()
    table = sums.with_columns(share=share, latest=latest).drop("work")
    return table.sort("duration_ns", "phase", descending=[True, False])


def _pieces(ranges: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Cut each step into stretches of one phase, as rows of `steps` with new step numbers.

    `waits` marks stretches in which another actor works. Only the rank's thread with most phase time counts.
    """
    lanes = ranges.group_by(LANE).agg(pl.col("duration_ns").sum()).sort("duration_ns", *LANE)
    lanes = lanes.unique(["rank", "window"], keep="last", maintain_order=True)
    pieces = []
    for of_rank in steps.partition_by("rank", "window"):
        rank, window = of_rank.row(0, named=True)["rank"], of_rank.row(0, named=True)["window"]
        inside = ranges.join(lanes.filter(rank=rank, window=window), on=LANE, how="semi")
        inside = inside.sort("start_ns", -pl.col("duration_ns"))
        start = inside["start_ns"].to_numpy()
        cuts, span = innermost_segments(start, start + inside["duration_ns"].to_numpy())
        begins, ends = (np.sort(of_rank[name].to_numpy()) for name in ("start_ns", "end_ns"))
        edges = np.unique(np.concatenate([cuts, begins, ends]))
        edges = edges[(edges >= begins[0]) & (edges <= ends[-1])]
        step = np.searchsorted(begins, edges[:-1], side="right") - 1
        segment = np.searchsorted(cuts, edges[:-1], side="right") - 1
        place = np.where(segment >= 0, np.append(span, -1)[segment], -1)
        names = np.array([*inside["phase"], REST])
        others = np.array([*inside["name"].str.starts_with(MEANWHILE), False])
        frame = pl.DataFrame({"start_ns": edges[:-1], "duration_ns": np.diff(edges), "phase": names[place]})
        frame = frame.with_columns(waits=others[place])
        in_step = pl.Series((step >= 0) & (edges[:-1] < ends[np.maximum(step, 0)]))
        of = {"rank": pl.lit(rank, pl.Int32), "window": pl.lit(window, pl.Int32)}
        pieces.append(frame.filter(in_step).with_columns(**of))
    return pl.concat(pieces).with_row_index("step").with_columns(pl.col("step").cast(pl.Int64))


def in_words(phases: pl.DataFrame) -> str:
    """Word the phase that dominates a step, and its main part; empty where no phase does.

    Args:
        phases: rows of `phases`.
    """
    if phases.is_empty() or phases["share"][0] < MIN_SHARE:
        return ""
    row = phases.row(0, named=True)
    took = format_duration(row["duration_ns"])
    return f"{row['phase']} takes {row['share']:.0%} of a step, {took}, {limit_in_words(row)}"


def limit_of(row: dict[str, Any]) -> str:
    """Return the column of `PARTS` that takes most of a phase."""
    return max(PARTS, key=lambda name: float(row[name]))


def limit_in_words(row: dict[str, Any]) -> str:
    """Word the main part of a phase, such as `90% of it host` or `60% of it waiting, for rank 3`."""
    part = limit_of(row)
    waits = f", for rank {row['latest']}" if part == "exposed_wait_ns" and row["latest"] >= 0 else ""
    return f"{row[part] / max(row['duration_ns'], 1):.0%} of it {PARTS[part]}{waits}"
