"""Orders in which stages work through micro-batches, as graphs that the engine replays.

In: numbers of stages, chunks and micro-batches, and a schedule. Out: `StageOrder`: computes in topological
order with what each waits for. A compute waits for the one before it on its stage, and for the message from
the stage that its micro-batch comes from. The orders are those of `dpro.replay.pipeline.schedules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import UsageError
from dpro.replay.engine import grouped, longest_path, topological_order
from dpro.replay.pipeline.schedules.catalogue import SCHEDULES
from dpro.replay.pipeline.schedules.tasks import HALF, TaskTable, table_of

NS_PER_US = 1000
MAX_COMPUTES = 1 << 17  # of a step that is replayed whole: longer ones repeat themselves
# What is left of the bubble of 1F1B where a forward takes as long as either half of a backward, for many
# micro-batches: ZB-H1 and ZB-V as in arXiv 2401.10241; DualPipe, of many stages, as in arXiv 2412.19437.
BUBBLE: Mapping[str, float] = {"zb-h1": 1 / 3, "zbv": 0.0, "dualpipe": 1 / 3}


@dataclass(frozen=True)
class StageOrder:
    """Computes of one step, in topological order.

    Attributes:
        stage, micro_batch: [N] of each compute.
        place: [N] number of its chunk in the model, from the input.
        kind: [N] index into `tasks.KINDS`.
        apart: [N] whether it is a backward of inputs alone.
        indptr, source: edges into compute i come from source[indptr[i]:indptr[i + 1]].
        crosses: [E] whether the edge is a message from another stage.
    """

    stage: Ints
    place: Ints
    micro_batch: Ints
    kind: Ints
    apart: Bools
    indptr: Ints
    source: Ints
    crosses: Bools


@lru_cache(maxsize=512)
def pipeline(stages: int, chunks: int, count: int, schedule: str = "1f1b") -> StageOrder:
    """The computes of a step and what each waits for.

    Args:
        schedule: one of `SCHEDULES`; 1F1B of several chunks is interleaved.

    Raises:
        UsageError: the schedule is not known, or cannot be made of these numbers.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"no schedule {schedule!r}: there are {', '.join(SCHEDULES)}")
    chosen = SCHEDULES["interleaved" if schedule == "1f1b" and chunks > 1 else schedule]
    return _in_order(table_of(chosen.orders(stages, count, chunks), chosen.place))


def _in_order(work: TaskTable) -> StageOrder:
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
        work.batch[order],
        work.kind[order],
        work.apart[order],
        indptr,
        number[source][by_target],
        (work.stage[source] != work.stage[target])[by_target],
    )


def pipelined_us(
    shape: tuple[int, int, int], schedule: str, forward_us: Floats, backward_us: Floats, message_us: float
) -> float:
    """How long the computes of a step take, replayed; of very many, the last as those before.

    Args:
        schedule: one of `SCHEDULES`.
        forward_us, backward_us, message_us: as of `replayed_us`.
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
    """How long the computes of a step take, by the replay's longest path, and how long each stage works.

    Args:
        forward_us, backward_us: [stages, chunks] of one micro-batch, where chunk c of stage s is number
            c * stages + s of the model; half of a backward are the gradients of weights.
        message_us: from stage to stage.
    """
    forward, backward = (
        np.rint(NS_PER_US * each).astype(np.int64).T.ravel()[pipe.place] for each in (forward_us, backward_us)
    )
    weights = np.rint(HALF * backward).astype(np.int64)
    backward = np.where(pipe.apart, backward - weights, backward)
    duration = np.choose(pipe.kind, [forward, backward, weights])
    lag = np.where(pipe.crosses, round(NS_PER_US * message_us), 0)
    _, end, _ = longest_path(duration, np.zeros_like(duration), pipe.indptr, pipe.source, lag)
    busy = np.bincount(pipe.stage, duration, minlength=forward_us.shape[0]) / NS_PER_US
    return float(end.max()) / NS_PER_US, busy


def bound_us(
    each: Floats, chunks: Floats, count: Floats, message_us: Floats, schedules: Sequence[str] = ()
) -> Floats:
    """[N] a closed form, which the replay of 1F1B of equal stages reaches where messages are free.

    A stage works through all its micro-batches, and those before it work on the first before that, and on
    the last after it: with one chunk no schedule is faster. Equal stages have the bubble (p - 1) / (m v) of
    Narayanan et al., SC 2021. Messages are counted once, as in the warm-up. Other schedules leave a part of
    the bubble (`BUBBLE`); half of the micro-batches of DualPipe go the other way.

    Args:
        each: [N, stages] microseconds of a micro-batch on each stage, forward and backward, all its chunks.
        chunks, count: [N] chunks of each stage, micro-batches.
        message_us: [N] from stage to stage.
        schedules: [N] names; all are 1F1B where none is given.
    """
    left = np.array([BUBBLE.get(name, 1.0) for name in schedules] or [1.0])[:, None]
    both_ways = np.array([name == "dualpipe" for name in schedules] or [False])[:, None]
    stages = each.shape[1]
    left = np.where(both_ways, left * (stages - 2) / max(stages - 1, 1), left).clip(0)
    each = np.where(both_ways, (each + each[:, ::-1]) / 2, each)
    before = np.cumsum(each, axis=1) - each
    slowest = (count[:, None] * each + left * before / chunks[:, None]).max(1)
    found: Floats = slowest + 2 * (stages - 1) * message_us
    return found
