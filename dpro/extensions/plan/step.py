"""Predicts the step time of each layout: stages from layers and links, the replayed pipeline, then the rest.

Takes a model, layouts, a machine and a framework; returns a row per layout with the step and its parts. A
stage runs its layers one after the other; a layer takes as long as its GPU or as the host that launches its
kernels, whichever is slower. The pipeline is replayed (`replayed_us`); the reduction of gradients, the
optimizer and fixed time follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import UsageError
from dpro.extensions.plan.layer import Exchanges, LayerTimes, LayerWork, layer_work, parameters_of, traffic
from dpro.extensions.plan.layout import SCHEDULE_NAMES, column, gpus_of
from dpro.extensions.plan.model import Model, Software
from dpro.extensions.plan.schedules import HALF, SCHEDULES, table_of
from dpro.replay.cost.machine import Machine
from dpro.replay.engine import grouped, longest_path, topological_order


class Stages(NamedTuple):
    """Times of the stages of rows with equal numbers of stages and chunks, [n, stages, chunks] microseconds.

    Attributes:
        rows: [n] numbers of the layouts.
        forward, backward: of one micro-batch.
        sent: exposed communication in both passes.
    """

    rows: Ints
    forward: Floats
    backward: Floats
    sent: Floats


@dataclass(frozen=True)
class MeasuredSent:
    """Measured times of a recorded run's collectives relative to modelled ones, and what its work hides.

    Attributes:
        forward, backward, message, reduction: factors on collectives in a layer's passes, on messages between
            stages, and on the collectives of a step.
        hidden_us: hidden part of the reduction of a step.
    """

    forward: float = 1.0
    backward: float = 1.0
    message: float = 1.0
    reduction: float = 1.0
    hidden_us: float = 0.0

    def applied(self, links: Exchanges) -> Exchanges:
        """Scale modelled traffic to that of the run."""
        reduction = np.maximum(self.reduction * links.reduction - self.hidden_us, 0)
        return replace(
            links,
            forward=self.forward * links.forward,
            backward=self.backward * links.backward,
            message=self.message * links.message,
            reduction=reduction,
            gathered=self.reduction * links.gathered,
        )


@dataclass(frozen=True)
class TimedLayouts:
    """Inputs of the step time, except for constants of the machine.

    Attributes:
        model, rows, software: as given.
        work: computation of a GPU.
        sent: measured factors on the collectives of a recorded run.
    """

    model: Model
    rows: pl.DataFrame
    software: Software
    work: LayerWork
    sent: MeasuredSent = MeasuredSent()


def job_of(model: Model, rows: pl.DataFrame, machine: Machine, software: Software) -> TimedLayouts:
    """Time the operations of all layouts once.

    With a recording, measured layers replace `work`.
    """
    return TimedLayouts(model, rows, software, layer_work(model, rows, machine, software))


def layers_of_chunks(layers: int, chunks: int, head: float = 0.0) -> Ints:
    """Return [chunks] layers of each chunk of the model; if they do not divide evenly, the last has fewer.

    Args:
        head: weight of the output layer in layers, where stages are balanced with it: each block goes to the
            first chunk whose cumulative share of the whole it does not exceed, or to the next.
    """
    if head:
        limits = (layers + head) * np.arange(1, chunks + 1) / chunks
        count, chunk = np.zeros(chunks, np.int64), 0
        for layer in range(1, layers + 1):
            chunk = min(chunk + (layer > limits[chunk] + 1e-9), chunks - 1)
            count[chunk] += 1
        return count
    edges = np.ceil(np.arange(chunks + 1) * layers / chunks).astype(np.int64)
    sizes: Ints = np.diff(edges)
    return sizes


class _Pass(NamedTuple):
    """[N] microseconds of a pass: of the GPU, of the launching host, and of communication within `gpu`."""

    gpu: Floats
    host: Floats
    sent: Floats

    def __add__(self, other: _Pass) -> _Pass:  # type: ignore[override]
        return _Pass(self.gpu + other.gpu, self.host + other.host, self.sent + other.sent)


def _pass(work: LayerTimes, sent: Floats, stalled: Floats, machine: Machine) -> _Pass:
    gpu = machine.compute * work.compute + machine.memory * work.memory + sent
    return _Pass(gpu, machine.host_us * work.kernels + stalled * work.ranks, sent)


def stages_of(job: TimedLayouts, machine: Machine, links: Exchanges) -> list[Stages]:
    """Return the times of each chunk of each stage for one micro-batch."""
    rows, work, model = job.rows, job.work, job.model
    recompute = column(rows, "recompute")
    again = LayerTimes(*(np.where(recompute == 1, part, 0.0) for part in work.scores.parts()))
    crosses = (column(rows, "pp") > 1) & (gpus_of(rows) > machine.per_host)
    # Across hosts the launching host stalls for each collective, including its steps from host to host.
    steps = np.where(column(rows, "tp") > machine.per_host, machine.outside_us, 0.0)
    stalled = np.where(crosses & (machine.crossed_us > 0), machine.crossed_us + steps, 0.0)
    sent = (links.forward, links.backward)
    dense = _layer(work.forward, work.backward, again, sent, stalled, recompute, machine)
    sent = (links.expert_forward, links.expert_backward)
    mixed = _layer(work.expert_forward, work.expert_backward, again, sent, stalled, recompute, machine)
    head = [_pass(way, links.head / 2, stalled, machine) for way in (work.head_forward, work.head_backward)]
    stages = []
    shapes = rows.select("pp", "vpp").with_row_index("row").partition_by(["pp", "vpp"], as_dict=True)
    for (pp, vpp), group in shapes.items():
        row_numbers = group["row"].to_numpy()
        count = layers_of_chunks(model.layers, pp * vpp, model.head_weight if job.software.balanced else 0.0)
        before = np.cumsum(count) - count
        plain = np.clip((model.dense_layers if model.experts else model.layers) - before, 0, count)
        numbers = (plain.astype(np.float64), (count - plain).astype(np.float64))
        ways = [_chunks(numbers, dense[way], mixed[way], head[way], row_numbers, (vpp, pp)) for way in (0, 1)]
        stages.append(Stages(row_numbers, ways[0][0], ways[1][0], ways[0][1] + ways[1][1]))
    return stages


def _chunks(
    numbers: tuple[Floats, Floats],
    dense: _Pass,
    mixed: _Pass,
    head: _Pass,
    rows: Ints,
    shape: tuple[int, int],
) -> tuple[Floats, Floats]:
    """Return [n, stages, chunks] times of a pass over each chunk, and of the communication in it.

    The host runs ahead of the GPU within the layers, which take as long as the slower of the two; it waits
    for the loss.
    """

    def layers(part: str) -> Floats:
        usual, other = (getattr(timed, part)[rows, None] for timed in (dense, mixed))
        us: Floats = numbers[0][None, :] * usual + numbers[1][None, :] * other
        return us

    def placed(us: Floats, last: Floats) -> Floats:
        us[:, -1] += last[rows]
        by_stage: Floats = us.reshape(len(rows), *shape).transpose(
            0, 2, 1
        )  # chunk c of stage s is c * stages + s
        return by_stage

    whole = placed(np.maximum(layers("gpu"), layers("host")), np.maximum(head.gpu, head.host))
    return whole, placed(layers("sent"), head.sent)


def _layer(
    forward: LayerTimes,
    backward: LayerTimes,
    again: LayerTimes,
    sent: tuple[Floats, Floats],
    stalled: Floats,
    recompute: Floats,
    machine: Machine,
) -> tuple[_Pass, _Pass]:
    """Return forward and backward of a layer, the latter with recomputation."""
    ahead = _pass(forward, sent[0], stalled, machine)
    whole = recompute == 2
    repeated = _Pass(*(np.where(whole, part, 0.0) for part in ahead))
    return ahead, _pass(backward + again, sent[1], stalled, machine) + repeated


def optimizer_us(job: TimedLayouts, machine: Machine) -> Floats:
    """Return [N] microseconds of the optimizer for the parameters of the fullest GPU."""
    rows, model = job.rows, job.model
    replicated, experts = parameters_of(model, rows)
    zero, ranks = column(rows, "zero"), column(rows, "dp") * column(rows, "cp")
    cut = np.where(zero > 0, ranks, 1.0)
    updated = replicated / cut + experts / np.maximum(cut / column(rows, "ep"), 1)
    us: Floats = machine.memory * updated * job.software.optimizer_bytes / (machine.sheet.gbps * 1e3)
    return us


def after_us(job: TimedLayouts, machine: Machine, links: Exchanges) -> tuple[Floats, Floats]:
    """Return [N] microseconds after the pipeline, and of communication in these."""
    optimizer = optimizer_us(job, machine)
    sent = links.reduction + links.gathered
    return optimizer + sent + 1e3 * machine.fixed_ms, sent


def step_times(job: TimedLayouts, machine: Machine, replay: bool = True) -> pl.DataFrame:
    """Return the step time of each layout.

    Args:
        replay: whether to replay the pipeline; otherwise its closed form (`bound_us`) is used.

    Returns:
        `step_ms`, `pipeline_ms`, `after_ms` (reduction, optimizer, fixed), `bubble` (share of the pipeline in
        which the mean stage is idle), `exposed_ms` (exposed communication), a row per layout.
    """
    rows = job.rows
    links = job.sent.applied(traffic(job.model, rows, machine, job.software))
    pp, vpp, count = (column(rows, name) for name in ("pp", "vpp", "micro_batches"))
    schedules = [SCHEDULE_NAMES[number] for number in rows["schedule"].to_list()]
    working, busy, sent = (np.zeros(rows.height) for _ in range(3))
    for group in stages_of(job, machine, links):
        row_numbers = group.rows
        stage_us = (group.forward + group.backward).sum(2)  # [n, stages]
        busy[row_numbers] = count[row_numbers] * stage_us.mean(1)
        sent[row_numbers] = count[row_numbers] * group.sent.sum(2).mean(1)
        chosen = [schedules[row] for row in row_numbers.tolist()]
        working[row_numbers] = bound_us(
            stage_us, vpp[row_numbers], count[row_numbers], links.message[row_numbers], chosen
        )
        if replay and group.forward.shape[1] > 1:
            for row, ahead, back in zip(row_numbers.tolist(), group.forward, group.backward):
                shape = (int(pp[row]), int(vpp[row]), int(count[row]))
                message = float(links.message[row])
                working[row] = pipelined_us(shape, schedules[row], ahead, back, message)
    rest, after_sent = after_us(job, machine, links)
    hosts = np.maximum(gpus_of(rows) / machine.per_host, 1)
    step = (working + rest) * (1 + machine.growth * np.log2(hosts))
    return pl.DataFrame(
        {
            "step_ms": step / 1e3,
            "pipeline_ms": working / 1e3,
            "after_ms": rest / 1e3,
            "bubble": 1 - busy / np.maximum(working, 1e-9),
            "exposed_ms": (sent + after_sent) / 1e3,
        }
    )


# Pipeline schedules as graphs that the engine replays.

NS_PER_US = 1000
MAX_COMPUTES = 1 << 17  # of a step that is replayed completely: longer ones repeat themselves
# Share of the bubble of 1F1B that remains with many micro-batches, if a forward takes as long as each half of
# a backward: ZB-H1 and ZB-V from arXiv 2401.10241; DualPipe with many stages from arXiv 2412.19437.
BUBBLE: Mapping[str, float] = {"zb-h1": 1 / 3, "zbv": 0.0, "dualpipe": 1 / 3}


@dataclass(frozen=True)
class StageOrder:
    """Computes of one step, in topological order.

    Attributes:
        stage: [N] stage of each compute.
        place: [N] number of its chunk in the model, from the input.
        kind: [N] index into `tasks.KINDS`.
        apart: [N] whether it is a backward of inputs only.
        indptr, source: edges into compute i come from source[indptr[i]:indptr[i + 1]].
        crosses: [E] whether the edge is a message from another stage.
    """

    stage: Ints
    place: Ints
    kind: Ints
    apart: Bools
    indptr: Ints
    source: Ints
    crosses: Bools


@lru_cache(maxsize=512)
def pipeline(stages: int, chunks: int, count: int, schedule: str = "1f1b") -> StageOrder:
    """Return the computes of a step and their dependencies.

    Args:
        schedule: one of `SCHEDULES`; 1F1B with several chunks is interleaved.

    Raises:
        UsageError: the schedule is unknown, or impossible with these numbers.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"no schedule {schedule!r}: there are {', '.join(SCHEDULES)}")
    chosen = SCHEDULES["interleaved" if schedule == "1f1b" and chunks > 1 else schedule]
    work = table_of(chosen.orders(stages, count, chunks), chosen.place)
    number = np.arange(work.stage.size)
    follows = number[1:][work.stage[1:] == work.stage[:-1]]
    source = np.concatenate([follows - 1, work.source])
    target = np.concatenate([follows, work.target])
    roots = np.flatnonzero(np.bincount(target, minlength=number.size) == 0)
    order, stuck = topological_order(number.size, source, target, roots)
    assert not stuck.size, "a schedule waits for itself"
    number[order] = np.arange(order.size)
    indptr, by_target = grouped(number[target], number.size)
    return StageOrder(
        work.stage[order],
        work.place[order],
        work.kind[order],
        work.apart[order],
        indptr,
        number[source][by_target],
        (work.stage[source] != work.stage[target])[by_target],
    )


def pipelined_us(
    shape: tuple[int, int, int], schedule: str, forward_us: Floats, backward_us: Floats, message_us: float
) -> float:
    """Return the replayed time of a step's computes; of very many, extrapolated from fewer micro-batches.

    Args:
        schedule: one of `SCHEDULES`.
        forward_us, backward_us, message_us: as in `replayed_us`.
    """
    stages, chunks, count = shape

    def replayed(some: int) -> float:
        return replayed_us(pipeline(stages, chunks, some, schedule), forward_us, backward_us, message_us)[0]

    half = max(MAX_COMPUTES // (4 * stages * chunks) // stages, 2) * stages
    if count <= 2 * half:
        return replayed(count)
    last = replayed(2 * half)
    return last + (count - 2 * half) * (last - replayed(half)) / half


def replayed_us(
    pipe: StageOrder, forward_us: Floats, backward_us: Floats, message_us: float
) -> tuple[float, Floats]:
    """Return the time of a step's computes, from the replay's longest path, and the busy time of each stage.

    Args:
        forward_us, backward_us: [stages, chunks] of one micro-batch, where chunk c of stage s is number c *
            stages + s of the model; half of a backward computes the gradients of weights.
    """
    forward, backward = (
        np.rint(NS_PER_US * us).astype(np.int64).T.ravel()[pipe.place] for us in (forward_us, backward_us)
    )
    weights = np.rint(HALF * backward).astype(np.int64)
    backward = np.where(pipe.apart, backward - weights, backward)
    duration = np.choose(pipe.kind, [forward, backward, weights])
    lag = np.where(pipe.crosses, round(NS_PER_US * message_us), 0)
    _, end, _ = longest_path(duration, np.zeros_like(duration), pipe.indptr, pipe.source, lag)
    busy = np.bincount(pipe.stage, duration, minlength=forward_us.shape[0]) / NS_PER_US
    return float(end.max()) / NS_PER_US, busy


def bound_us(
    stage_us: Floats, chunks: Floats, count: Floats, message_us: Floats, schedules: Sequence[str] = ()
) -> Floats:
    """Return [N] the pipeline's time in closed form, exact for 1F1B with equal stages and free messages.

    A stage works through all its micro-batches; the stages before it work on the first one before that, and
    on the last one after it: with one chunk no schedule is faster. Equal stages have the bubble (p - 1) / (m
    v) of Narayanan et al., SC 2021. Messages count once, as in the warm-up. Other schedules leave a part of
    the bubble (`BUBBLE`); half of the micro-batches of DualPipe go in the opposite direction.

    Args:
        stage_us: [N, stages] of a micro-batch on each stage, forward and backward, all its chunks.
        chunks, count: [N] chunks per stage, micro-batches.
        message_us: [N] from stage to stage.
        schedules: [N] names; empty if all are 1F1B.
    """
    left = np.array([BUBBLE.get(name, 1.0) for name in schedules] or [1.0])[:, None]
    both_ways = np.array([name == "dualpipe" for name in schedules] or [False])[:, None]
    stages = stage_us.shape[1]
    left = np.where(both_ways, left * (stages - 2) / max(stages - 1, 1), left).clip(0)
    stage_us = np.where(both_ways, (stage_us + stage_us[:, ::-1]) / 2, stage_us)
    before = np.cumsum(stage_us, axis=1) - stage_us
    slowest = (count[:, None] * stage_us + left * before / chunks[:, None]).max(1)
    bound: Floats = slowest + 2 * (stages - 1) * message_us
    return bound
