"""Orders in which stages work through micro-batches, as graphs that the engine replays.

In: numbers of stages, chunks and micro-batches, and a schedule. Out: `StageOrder`: computes in topological
order with what each waits for. A compute waits for the one before it on its stage, and for the message from
the stage that its micro-batch comes from. GPipe (Huang et al., 2019), one forward and one backward in turn
(1F1B; PipeDream-flush, Narayanan et al., ICML 2021), and the same with several chunks per stage (interleaved;
Narayanan et al., SC 2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import UsageError
from dpro.replay.engine import grouped, longest_path, topological_order

SCHEDULES = ("1f1b", "gpipe")
NS_PER_US = 1000


@dataclass(frozen=True)
class StageOrder:
    """Computes of one step, in topological order.

    Attributes:
        stage, chunk, micro_batch: [N] of each compute; chunk c of stage s is number c * stages + s of the
            model.
        backward: [N] whether it is a backward.
        indptr, source: edges into compute i come from source[indptr[i]:indptr[i + 1]].
        crosses: [E] whether the edge is a message from another stage.
    """

    stage: Ints
    chunk: Ints
    micro_batch: Ints
    backward: Bools
    indptr: Ints
    source: Ints
    crosses: Bools


def order_of_stage(
    stage: int, stages: int, chunks: int, count: int, schedule: str
) -> Iterator[tuple[bool, int, int]]:
    """What a stage computes, in order: (backward, chunk, micro-batch).

    Args:
        stage: which.
        stages, chunks: of the pipeline; chunks of each stage.
        count: micro-batches.
        schedule: one of `SCHEDULES`.
    """
    total = count * chunks
    if schedule == "gpipe":
        warm_up = total
    elif chunks == 1:
        warm_up = min(stages - stage - 1, total)
    else:
        warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)

    def place(number: int) -> tuple[int, int]:
        """Chunk and micro-batch of the n-th forward: each chunk has as many in a row as there are stages."""
        if chunks == 1:
            return 0, number
        turn, within = divmod(number, stages * chunks)
        return within // stages, turn * stages + within % stages

    for number in range(warm_up):
        chunk, batch = place(number)
        yield False, chunk, batch
    for number in range(total - warm_up):
        chunk, batch = place(warm_up + number)
        yield False, chunk, batch
        chunk, batch = place(number)
        yield True, chunks - 1 - chunk, batch
    for number in range(total - warm_up, total):
        chunk, batch = place(number)
        yield True, chunks - 1 - chunk, batch


@lru_cache(maxsize=512)
def pipeline(stages: int, chunks: int, count: int, schedule: str = "1f1b") -> StageOrder:
    """The computes of a step and what each waits for.

    Args:
        stages, chunks: of the pipeline; chunks of each stage.
        count: micro-batches; with chunks a multiple of the stages.
        schedule: one of `SCHEDULES`.

    Raises:
        UsageError: the schedule is not known, or cannot be made of these numbers.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"no schedule {schedule!r}: there are {', '.join(SCHEDULES)}")
    if chunks > 1 and count % stages:
        raise UsageError(f"{count} micro-batches in {stages} stages: interleaving needs a multiple of them")
    orders = [list(order_of_stage(s, stages, chunks, count, schedule)) for s in range(stages)]
    each = len(orders[0])
    work = np.array(list(chain.from_iterable(orders)), np.int64).reshape(-1, 3)
    stage = np.repeat(np.arange(stages), each)
    backward, chunk, batch = work[:, 0], work[:, 1], work[:, 2]
    number = np.arange(stage.size)
    depth = chunk * stages + stage  # of the model's chunks, from the input
    last = stages * chunks - 1
    at = np.empty((2, last + 1, count), np.int64)
    at[backward, depth, batch] = number
    deeper = np.where(backward == 1, depth + 1, depth - 1)  # where the micro-batch comes from
    turns = (backward == 1) & (depth == last)
    source = np.where(turns, at[0, depth, batch], at[backward, np.clip(deeper, 0, last), batch])
    comes = turns | ((backward == 0) & (depth > 0)) | ((backward == 1) & (depth < last))
    follows = number[number % each > 0]
    sources = np.concatenate([follows - 1, source[comes]])
    targets = np.concatenate([follows, number[comes]])
    crosses = np.concatenate([np.zeros(follows.size, np.bool_), (~turns & (stages > 1))[comes]])
    return _in_order(stage, chunk, batch, backward == 1, sources, targets, crosses)


def _in_order(
    stage: Ints, chunk: Ints, batch: Ints, backward: Bools, source: Ints, target: Ints, crosses: Bools
) -> StageOrder:
    roots = np.flatnonzero(np.bincount(target, minlength=stage.size) == 0)
    order, stuck = topological_order(stage.size, source, target, roots)
    assert not stuck.size, "a schedule waits for itself"
    number = np.empty(order.size, np.int64)
    number[order] = np.arange(order.size)
    source, target = number[source], number[target]
    indptr, by_target = grouped(target, stage.size)
    return StageOrder(
        stage[order],
        chunk[order],
        batch[order],
        backward[order],
        indptr,
        source[by_target],
        crosses[by_target],
    )


def replayed_us(
    pipe: StageOrder, forward_us: Floats, backward_us: Floats, message_us: float
) -> tuple[float, Floats]:
    """How long the computes of a step take, by the replay's longest path, and how long each stage works.

    Args:
        pipe: the schedule.
        forward_us, backward_us: [stages, chunks] of one micro-batch.
        message_us: from stage to stage.
    """
    forward, backward = (np.rint(NS_PER_US * each).astype(np.int64) for each in (forward_us, backward_us))
    stage, chunk = pipe.stage, pipe.chunk
    duration = np.where(pipe.backward, backward[stage, chunk], forward[stage, chunk])
    lag = np.where(pipe.crosses, round(NS_PER_US * message_us), 0)
    start, _ = longest_path(duration, np.zeros_like(duration), pipe.indptr, pipe.source, lag)
    busy = np.bincount(stage, duration, minlength=forward.shape[0]) / NS_PER_US
    return float((start + duration).max()) / NS_PER_US, busy


def bound_us(each: Floats, chunks: Floats, count: Floats, message_us: Floats) -> Floats:
    """[N] a closed form of 1F1B, which the replay of equal stages reaches where messages are free.

    A stage works through all its micro-batches, and those before it work on the first before that, and on
    the last after it: with one chunk no schedule is faster. Equal stages have the bubble (p - 1) / (m v) of
    Narayanan et al., SC 2021. Messages are counted once, as in the warm-up.

    Args:
        each: [N, stages] microseconds of a micro-batch on each stage, forward and backward, all its chunks.
        chunks, count: [N] chunks of each stage, micro-batches.
        message_us: [N] from stage to stage.
    """
    before = np.cumsum(each, axis=1) - each
    slowest = (count[:, None] * each + before / chunks[:, None]).max(1)
    found: Floats = slowest + 2 * (each.shape[1] - 1) * message_us
    return found
