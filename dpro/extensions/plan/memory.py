"""Predicts whether a layout fits: parameters, gradients, optimizer states, activations and temporary buffers.

Takes a model, layouts and a framework; returns the memory of the fullest GPU by kind, and a verdict. Under
ZeRO a GPU keeps its share of optimizer states (stage 1), gradients (2), parameters (3; Rajbhandari et al., SC
2020; FSDP is stage 3). Activations of a micro-batch are kept until its backward, for all micro-batches that
the schedule has begun and not ended (Narayanan et al., SC 2021). Activations of a layer follow Korthikanti et
al. (arXiv 2205.05198, section 4), for fused attention and without dropout unless the framework has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats
from dpro.extensions.plan.layer import SIZE
from dpro.extensions.plan.layout import SCHEDULE_NAMES, column
from dpro.extensions.plan.model import Model, Software
from dpro.extensions.plan.schedules import SCHEDULES, v_shaped
from dpro.extensions.plan.step import layers_of_chunks
from dpro.replay.cost.machine import Machine

GB = 1e9
CONTEXT_BYTES = 1.0 * GB  # CUDA context, communicators and workspaces
RESERVED = 1.05  # reserved over allocated memory (measured: 1.03 to 1.08)
KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
WITHOUT_LAYERS = 2  # balanced stages at the end may have only the output layer and the loss
# Micro-batches in flight on every stage of these schedules, in chunks: as published, and as generated.
IN_FLIGHT: Mapping[str, Callable[[Floats], Floats]] = {
    "zb-h1": lambda pp: pp,
    "zbv": lambda pp: 2 * pp,
    "dualpipe": lambda pp: pp + 1,
}
TIGHT = 0.9  # of the memory: above, a layout may not fit


def memory_of(model: Model, rows: pl.DataFrame, software: Software) -> pl.DataFrame:
    """Return [N] 1e9 bytes of the fullest GPU by kind, and their sum `memory_gb`."""
    fullest = {kind: np.zeros(rows.height) for kind in KINDS}
    numbers = rows["schedule"].to_numpy()
    for number in np.unique(numbers).tolist():
        row_numbers = np.flatnonzero(numbers == number)
        some, schedule = rows[row_numbers], SCHEDULE_NAMES[number]
        ends = [np.full(row_numbers.size, stage) * (column(some, "pp") - 1) for stage in (0.0, 1.0)]
        parts = [_at_stage(model, some, software, schedule, stage) for stage in ends]
        first, last = (sum(part[kind] for kind in KINDS) for part in parts)
        for kind in KINDS:
            fullest[kind][row_numbers] = np.where(first >= last, parts[0][kind], parts[1][kind]) / GB
    return pl.DataFrame(fullest).with_columns(memory_gb=pl.sum_horizontal(KINDS))


def _at_stage(
    model: Model, rows: pl.DataFrame, software: Software, schedule: str, stage: Floats
) -> dict[str, Floats]:
    """Return the bytes of a GPU at the first or the last stage."""
    tp, pp, cp, ep, dp = (column(rows, name) for name in ("tp", "pp", "cp", "ep", "dp"))
    zero, vpp = column(rows, "zero"), column(rows, "vpp")
    layers = _layers_at(model, rows, software, schedule, stage)
    has_head, has_table = _ends_at(pp, stage, schedule)
    copies = SCHEDULES[schedule].copies
    replicated, experts = (copies * weights for weights in _weights(model, layers, stage, tp, ep))
    table = model.vocabulary * model.hidden / tp
    tables = np.where(has_table & has_head & (not model.tied), 2.0, (has_table | has_head).astype(float))
    replicated = replicated + tables * table
    ranks = dp * cp
    apart = np.maximum(ranks / ep, 1)

    def cut(stage_of_zero: int) -> Floats:
        sharded = zero >= stage_of_zero
        return replicated / np.where(sharded, ranks, 1) + experts / np.where(sharded, apart, 1)

    tokens = column(rows, "micro_batch") * model.sequence / cp
    flying = in_flight(pp, vpp, column(rows, "micro_batches"), stage, schedule)
    kept = activation_bytes(model, rows, software) * layers / vpp * flying
    vectors = SIZE * tokens * model.hidden / (tp if software.sequence_parallel else 1)
    logits = np.where(has_head, software.logit_bytes * tokens * model.vocabulary / tp, 0.0)
    gathered = np.where(zero > 2, 2 * SIZE * (replicated + experts) / np.maximum(layers, 1), 0.0)
    return {
        "parameters": SIZE * cut(3),
        "gradients": software.main_gradient_bytes * cut(2),
        "optimizer": software.state_bytes * cut(1),
        "activations": kept,
        "logits": logits,
        "buffers": gathered
        + 4 * vectors
        + np.where(column(rows, "recompute") > 1, _one_layer(model, rows, software), 0),
    }


def _ends_at(pp: Floats, stage: Floats, schedule: str) -> tuple[Bools, Bools]:
    """Return [N] whether a stage has the output layer, and whether it has the embedding."""
    first, last = stage == 0, stage == pp - 1
    if SCHEDULES[schedule].copies > 1:
        return first | last, first | last
    return (first if SCHEDULES[schedule].place is v_shaped else last), first


def _layers_at(model: Model, rows: pl.DataFrame, software: Software, schedule: str, stage: Floats) -> Floats:
    """Return [N] layers of a stage, of one copy of the model."""
    chosen = SCHEDULES[schedule]
    shares = {}
    for pp, vpp in rows.select("pp", "vpp").unique().iter_rows():
        count = layers_of_chunks(model.layers, pp * vpp, model.head_weight if software.balanced else 0.0)
        held = range(vpp * chosen.copies)
        places = np.array([[chosen.place(at_stage, chunk, pp) for chunk in held] for at_stage in range(pp)])
        shares[pp, vpp] = count[places].sum(1) / chosen.copies
    layers = [
        float(shares[pp, vpp][int(at_stage)])
        for (pp, vpp), at_stage in zip(rows.select("pp", "vpp").iter_rows(), stage.tolist())
    ]
    return np.array(layers, np.float64)


def _weights(model: Model, layers: Floats, stage: Floats, tp: Floats, ep: Floats) -> tuple[Floats, Floats]:
    """Return [N] weights of a stage's layers: replicated by data parallelism, and of experts."""
    plain = np.where(stage == 0, np.minimum(layers, model.dense_layers), 0) if model.experts else layers
    mixed = layers - plain
    dense = layers * model.attention_parameters + plain * model.dense_ffn_parameters
    shared = mixed * model.shared_experts * model.expert_parameters
    routed = mixed * model.experts * model.expert_parameters
    return (dense + shared) / tp + mixed * model.hidden * model.experts, routed / (ep * tp)


def in_flight(pp: Floats, vpp: Floats, count: Floats, stage: Floats, schedule: str = "1f1b") -> Floats:
    """Return [N] micro-batches whose activations a stage keeps at the same time, counted in its chunks.

    Args:
        pp, vpp, count: [N] stages, chunks per stage, micro-batches.
        stage: [N] number of the stage.
    """
    total = count * vpp
    if schedule == "gpipe":
        return total
    if schedule in IN_FLIGHT:  # by every stage
        return np.minimum(IN_FLIGHT[schedule](pp), total)
    plain = pp - stage
    interleaved = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    held: Floats = np.minimum(np.where(vpp > 1, interleaved, plain), total)
    return held


def activation_bytes(model: Model, rows: pl.DataFrame, software: Software) -> Floats:
    """Return [N] bytes that one layer keeps of one micro-batch until its backward."""
    recompute = column(rows, "recompute")
    tokens = column(rows, "micro_batch") * model.sequence / column(rows, "cp")
    tp = column(rows, "tp")
    shared = tp if software.sequence_parallel else np.ones_like(tp)
    vector = SIZE * tokens * model.hidden
    whole = software.activations * _one_layer(model, rows, software)
    scores = _score_bytes(model, rows, software)
    num_bytes: Floats = np.where(
        recompute > 1, vector / shared, np.where(recompute == 1, whole - scores, whole)
    )
    return num_bytes


def _score_bytes(model: Model, rows: pl.DataFrame, software: Software) -> Floats:
    if software.flash:
        return np.zeros(rows.height)
    squares = column(rows, "micro_batch") * model.heads / column(rows, "tp") * model.sequence**2
    return (SIZE + (SIZE + 1 if software.dropout else 0)) * squares / column(rows, "cp")


def _one_layer(model: Model, rows: pl.DataFrame, software: Software) -> Floats:
    """Return the bytes of everything that the backward of a layer needs."""
    tp = column(rows, "tp")
    tokens = column(rows, "micro_batch") * model.sequence / column(rows, "cp")
    shared = tp if software.sequence_parallel else np.ones_like(tp)
    # Inputs of two norms and of two column-cut products, with masks of two dropouts.
    replicated = (4 * SIZE + (2 if software.dropout else 0)) * model.hidden
    kept = sum(outputs for cut, _, outputs in model.projections if cut == "column")
    attended = model.heads * (model.value_size or model.head_size)
    wide = model.ffn * (
        SIZE * (4 if model.gated else 2)
    )  # products, activation and its result, input of the next
    cut = SIZE * (kept + attended)
    ffn: float = wide
    if model.experts:
        met = model.experts_per_token + model.shared_experts
        ffn = (
            met * model.expert_ffn * SIZE * (4 if model.gated else 2)
            + model.experts_per_token * 2 * SIZE * model.hidden
        )
    num_bytes: Floats = tokens * (replicated / shared + (cut + ffn) / tp) + _score_bytes(
        model, rows, software
    )
    return num_bytes


def verdicts(parts: pl.DataFrame, machine: Machine) -> list[tuple[str, str]]:
    """Return whether each layout fits ("yes", "tight", "no"), and why not.

    Args:
        parts: as `memory_of` returns it.
    """
    verdicts = []
    for row in parts.iter_rows(named=True):
        needed = row["memory_gb"] * RESERVED + CONTEXT_BYTES / GB
        if needed <= TIGHT * machine.memory_gb:
            verdicts.append(("yes", ""))
            continue
        largest = sorted(KINDS, key=lambda kind: -float(row[kind]))[:2]
        most = ", ".join(f"{kind} {row[kind]:.0f} GB" for kind in largest)
        word = "tight" if needed <= machine.memory_gb else "no"
        verdicts.append((word, f"needs {needed:.0f} GB of {machine.memory_gb:.0f}: {most}"))
    return verdicts


def refusals(model: Model, rows: pl.DataFrame, software: Software) -> list[str]:
    """Return why a framework refuses each layout; empty where it does not."""
    bare = {}  # stages without layers
    for pp, vpp in rows.select("pp", "vpp").unique().iter_rows():
        count = layers_of_chunks(model.layers, pp * vpp, model.head_weight if software.balanced else 0.0)
        bare[pp, vpp] = int((count == 0).sum())
    reasons = []
    for row in rows.iter_rows(named=True):
        stages = row["pp"] * row["vpp"]
        if bare[row["pp"], row["vpp"]] > (WITHOUT_LAYERS if software.balanced else 0):
            reasons.append(f"{model.layers} layers leave some of {stages} stages empty")
        elif row["micro_batches"] < row["pp"] - 1:
            reasons.append(f"{row['micro_batches']} micro-batches are too few for {row['pp']} stages")
        else:
            reasons.append("")
    return reasons
