"""Pipeline schedules by name: their orders of work, placement of the model, and requirements.

Takes the name of a schedule; returns its `Schedule`. Nothing is timed here.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.errors import UsageError
from dpro.replay.pipeline.operations import BACKWARD, FORWARD, WEIGHTS

# Tasks of a pipeline and their dependencies.

KINDS = (FORWARD, BACKWARD, WEIGHTS)
HALF = 0.5  # share of a backward for gradients of weights: as many products as for those of inputs


class PipelineTask(NamedTuple):
    """One piece of work of a stage.

    Attributes:
        kind: forward, backward (of inputs only where the stage has `WEIGHTS` of that chunk and batch,
            else of both), or weights.
        batch: micro-batch, from 0.
        chunk: chunk on the stage, from 0.
        beside: whether it is fused with the previous piece: both begin once both can, and their outputs are
            sent when both have ended.
    """

    kind: str
    batch: int
    chunk: int = 0
    beside: bool = False


Order = list[PipelineTask]
Place = Callable[[int, int, int], int]  # of (stage, chunk, number of stages)


@dataclass(frozen=True)
class TaskTable:
    """All tasks of a step, stage by stage, each in its order; and further dependencies between them.

    Attributes:
        stage, batch, chunk, place: [N] of each task.
        kind: [N] index into `KINDS`.
        apart: [N] whether it is a backward of inputs only.
        source, target: [E] the target waits for the source.
    """

    stage: Ints
    batch: Ints
    chunk: Ints
    place: Ints
    kind: Ints
    apart: Bools
    source: Ints
    target: Ints


def looped(stage: int, chunk: int, num_stages: int) -> int:
    """Return the place of a chunk where the model visits all stages in turn, repeatedly."""
    return chunk * num_stages + stage


def v_shaped(stage: int, chunk: int, num_stages: int) -> int:
    """Return the place of a chunk where the model goes up all stages and down again: two on each."""
    return 2 * num_stages - 1 - stage if chunk else stage


def from_both_ends(stage: int, chunk: int, num_stages: int) -> int:
    """Return the place of a chunk where stages have the model twice: from the first, and from the last.

    Args:
        chunk: 0 for the copy that begins at the first stage, 1 for the other.
    """
    return num_stages - 1 - stage if chunk else stage


def table_of(orders: Sequence[Order], place: Place) -> TaskTable:
    """Return the tasks of all stages as arrays, with their dependencies.

    A forward waits for that of its micro-batch at the previous place, a backward for that at the following
    place, among the places the micro-batch visits. The backward at the last place that it visits waits for
    the forward there. Gradients of weights wait only for their place in the order. For two fused tasks, the
    first waits for the dependencies of the second, and dependents of the first wait for both.
    """
    work = list(chain.from_iterable(orders))
    stage = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    kind = np.array([_NUMBER[task.kind] for task in work], np.int64)
    batch = np.array([task.batch for task in work], np.int64)
    chunk = np.array([task.chunk for task in work], np.int64)
    places = np.array(
        [
            [place(number, chunk_number, len(orders)) for chunk_number in range(int(chunk.max()) + 1)]
            for number in range(len(orders))
        ]
    )
    place_of = places[stage, chunk]
    alone = chain.from_iterable(map(_are_apart, orders))
    main = np.flatnonzero(kind != _NUMBER[WEIGHTS])
    upwards = np.where(kind == _NUMBER[FORWARD], place_of, -place_of)[main]
    path = main[np.lexsort([upwards, kind[main], batch[main]])]  # each micro-batch's path, up and back
    same = batch[path[1:]] == batch[path[:-1]]
    beside = np.array([task.beside for task in work], np.bool_)
    source, target = path[:-1][same], path[1:][same]
    target = target - beside[target]
    source = source + np.append(beside[1:], False)[source]
    return TaskTable(stage, batch, chunk, place_of, kind, np.fromiter(alone, np.bool_), source, target)


_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


def _are_apart(order: Order) -> list[bool]:
    apart = {(task.batch, task.chunk) for task in order if task.kind == WEIGHTS}
    return [task.kind == BACKWARD and (task.batch, task.chunk) in apart for task in order]


def most_in_flight(order: Order) -> int:
    """Return the maximum number of micro-batch chunks whose activations a stage keeps at a time.

    Activations are needed until both gradients are computed.
    """
    held = most = 0
    for task, apart in zip(order, _are_apart(order)):
        held += 1 if task.kind == FORWARD else -int(not apart)
        most = max(most, held)
    return most


def only_one_chunk(schedule: str, num_chunks: int) -> None:
    """Raise if there are several chunks.

    Raises:
        UsageError: there are several.
    """
    if num_chunks != 1:
        raise UsageError(f"pipeline: schedule={schedule} has one chunk per stage; interleaved has several")


# Schedules of forwards and whole backwards: GPipe, 1F1B, and 1F1B with several chunks on each stage.


def gpipe(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Order all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019)."""
    forward, backward = _in_rounds(num_stages, num_batches, num_chunks, "gpipe")
    return [forward + backward] * num_stages


def one_forward_one_backward(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Alternate forwards and backwards in a full pipeline (Narayanan et al., PipeDream, SOSP 2019)."""
    only_one_chunk("1f1b", num_chunks)
    forward, backward = _in_rounds(num_stages, num_batches, 1, "1f1b")
    return [alternating(forward, backward, num_stages - stage - 1) for stage in range(num_stages)]


def interleaved(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Order several model chunks on each stage (Narayanan et al., Megatron-LM, SC 2021, section 2.2).

    Raises:
        UsageError: there is one chunk, or the micro-batches are not a multiple of the stages.
    """
    if num_chunks < 2:
        raise UsageError("pipeline: schedule=interleaved needs chunks=, 2 or more")
    forward, backward = _in_rounds(num_stages, num_batches, num_chunks, "interleaved")
    ahead = [2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages for stage in range(num_stages)]
    return [alternating(forward, backward, count) for count in ahead]


def _in_rounds(num_stages: int, num_batches: int, num_chunks: int, schedule: str) -> tuple[Order, Order]:
    """Return all forwards and backwards of a stage: of each chunk as many in a row as there are stages."""
    if num_chunks > 1 and num_batches % num_stages:
        raise UsageError(
            f"pipeline: {schedule} in chunks needs a multiple of the {num_stages} stages as micro_batches, "
            f"not {num_batches}"
        )
    if num_chunks == 1:
        places = [(batch, 0) for batch in range(num_batches)]
    else:
        rounds = [range(first, first + num_stages) for first in range(0, num_batches, num_stages)]
        places = [(batch, chunk) for batches in rounds for chunk in range(num_chunks) for batch in batches]
    forward = [PipelineTask(FORWARD, batch, chunk) for batch, chunk in places]
    return forward, [PipelineTask(BACKWARD, batch, num_chunks - 1 - chunk) for batch, chunk in places]


def alternating(forward: Order, backward: Order, ahead: int) -> Order:
    """Order `ahead` forwards, then one forward and one backward at a time, then the remaining backwards.

    Args:
        forward, backward: all tasks of a stage, in order.
        ahead: number of forwards before the first forward-backward pair.
    """
    ahead = min(ahead, len(forward))
    turns = len(forward) - ahead
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward[:turns]):
        order += pair
    return order + backward[turns:]


# Schedules with a backward in two parts: gradients of inputs are passed on, those of weights fill idle time
# (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024).


def zb_h1(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Order as 1F1B with backward for inputs only; gradients of weights fill idle time.

    A stage delays as many of them as there are stages before it (Qi et al., section 2.2).
    """
    only_one_chunk("zb-h1", num_chunks)
    plain = one_forward_one_backward(num_stages, num_batches, 1)
    return [_with_weights(order, stage) for stage, order in enumerate(plain)]


def _with_weights(order: Order, held: int) -> Order:
    """Follow each backward by the weights' gradients of the backward `held` earlier; append the rest."""
    order_with_weights: Order = []
    waiting: deque[int] = deque()
    for task in order:
        order_with_weights.append(task)
        if task.kind == BACKWARD:
            waiting.append(task.batch)
            if len(waiting) > held:
                order_with_weights.append(PipelineTask(WEIGHTS, waiting.popleft()))
    return [*order_with_weights, *(PipelineTask(WEIGHTS, batch) for batch in waiting)]


def zb_v(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Order two chunks per stage, the second on the way back, so that the first stage has the loss.

    Source: Qi et al., section 6. With fewer micro-batches than fill the pipeline, the missing ones are left
    out of the order.

    Raises:
        UsageError: the number of chunks is not two.
    """
    if num_chunks != 2:
        raise UsageError(f"pipeline: schedule=zbv has chunks=2, not {num_chunks}")
    full = max(2 * num_stages - 1, num_batches)
    orders = [_zero_bubble_stage(stage, num_stages, full) for stage in range(num_stages)]
    return [[task for task in order if task.batch < num_batches] for order in orders]


def _zero_bubble_stage(stage: int, num_stages: int, num_batches: int) -> Order:
    """Return the order of one ZB-V stage: chunk 0 is on the way up, chunk 1 on the way down."""
    order: Order = []
    done = {(kind, chunk): 0 for kind in (FORWARD, BACKWARD, WEIGHTS) for chunk in (0, 1)}

    def do(chunk: int, *kinds: str) -> None:
        for kind in kinds:
            order.append(PipelineTask(kind, done[kind, chunk], chunk))
            done[kind, chunk] += 1

    for _ in range(2 * (num_stages - stage) - 1):
        do(0, FORWARD)
    for _ in range(stage):
        do(1, FORWARD)
        do(0, FORWARD)
    for _ in range(num_stages - stage):
        do(1, FORWARD, BACKWARD, WEIGHTS)
    while done[FORWARD, 1] < num_batches:
        if done[FORWARD, 0] < num_batches:
            do(0, FORWARD)
        do(0, BACKWARD, WEIGHTS)
        do(1, FORWARD, BACKWARD, WEIGHTS)
    for _ in range(stage):
        do(0, BACKWARD)
        do(1, BACKWARD)
    for _ in range(num_stages - stage):
        do(0, BACKWARD, WEIGHTS)
    for chunk in (1, 0):
        while done[WEIGHTS, chunk] < done[BACKWARD, chunk]:
            do(chunk, WEIGHTS)
    return order


# DualPipe: half of the micro-batches enter the pipeline at its first stage, half at its last one
# (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).


def dualpipe(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Order forwards of one direction beside backwards of the other.

    Chunk 0 of a stage belongs to the copy of the model that begins at the first stage, chunk 1 to the other;
    the second half of the micro-batches uses the latter.

    Args:
        num_batches: micro-batches per step; even, and at least two for each stage.

    Raises:
        UsageError: these numbers do not make such a schedule.
    """
    only_one_chunk("dualpipe", num_chunks)
    if num_stages % 2 or num_batches % 2 or num_batches < 2 * num_stages:
        raise UsageError(
            f"pipeline: dualpipe needs an even number of stages, and an even number of micro_batches, two "
            f"or more for each stage; there are {num_stages} and {num_batches}"
        )
    return [_dualpipe_order(stage, num_stages, num_batches // 2) for stage in range(num_stages)]


class _Stage:
    """A stage while its order is made; its near direction begins at its half of the pipeline."""

    def __init__(self, near: int, count: int) -> None:
        self.order: Order = []
        self._near, self._count = near, count
        self._done = {(kind, chunk): 0 for kind in (FORWARD, BACKWARD) for chunk in (0, 1)}
        self._held_back: deque[tuple[int, int]] = deque()

    def _next_stop(self, kind: str, chunk: int, beside: bool = False) -> PipelineTask:
        number = self._done[kind, chunk]
        self._done[kind, chunk] += 1
        return PipelineTask(kind, chunk * self._count + number, chunk, beside)

    def forward(self, far: int) -> None:
        self.order.append(self._next_stop(FORWARD, self._near ^ far))

    def backward(self, far: int, only_inputs: bool = False) -> None:
        task = self._next_stop(BACKWARD, self._near ^ far)
        self.order.append(task)
        if only_inputs:
            self._held_back.append((task.batch, task.chunk))

    def both(self, far: int) -> None:
        """Add a forward of one direction beside a backward of the other."""
        self.forward(far)
        self.order.append(self._next_stop(BACKWARD, self._near ^ far ^ 1, beside=True))

    def weights(self) -> None:
        self.order.append(PipelineTask(WEIGHTS, *self._held_back.popleft()))


def _dualpipe_order(stage: int, num_stages: int, count: int) -> Order:
    """Return the eight phases of a stage; `count` micro-batches come from either end."""
    from_end = min(stage, num_stages - 1 - stage)
    inner = num_stages // 2 - from_end - 1
    made = _Stage(int(stage >= num_stages // 2), count)
    for _ in range(2 * inner):
        made.forward(0)
    for _ in range(from_end + 1):
        made.forward(0)
        made.forward(1)
    for _ in range(inner):
        made.backward(1, only_inputs=True)
        made.weights()
        made.forward(1)
    for turn in range(count - num_stages + from_end + 1):
        if turn or inner:
            made.both(0)
        else:  # the middle stages pass on the first of each separately
            made.forward(0)
            made.backward(1)
        made.both(1)
    for _ in range(inner):
        made.backward(1)
        made.both(1)
    for turn in range(2 * (from_end + 1)):  # the second half delays gradients of weights
        made.backward(1 - turn % 2, only_inputs=turn > from_end)
    for _ in range(inner):
        made.weights()
        made.backward(0, only_inputs=True)
    for _ in range(from_end + 1):
        made.weights()
    return made.order


@dataclass(frozen=True)
class Schedule:
    """A published schedule.

    Attributes:
        orders: returns the orders of all stages, from the numbers of stages, micro-batches and chunks.
        code: code that runs it.
        place: returns the place of each chunk of each stage in the model.
        chunks: default number of chunks per stage.
        copies: number of copies of the model's parameters.
        splits: whether gradients of weights are computed apart from those of inputs.
    """

    orders: Callable[[int, int, int], list[Order]]
    code: str
    place: Place = looped
    chunks: int = 1
    copies: int = 1
    splits: bool = False


_TORCH = "torch.distributed.pipelining."
SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": Schedule(one_forward_one_backward, f"{_TORCH}Schedule1F1B(stage, n_microbatches={{}})"),
    "gpipe": Schedule(gpipe, f"{_TORCH}ScheduleGPipe(stage, n_microbatches={{}})"),
    "interleaved": Schedule(
        interleaved,
        f"{_TORCH}ScheduleInterleaved1F1B(stages, n_microbatches={{}})",
        chunks=2,
    ),
    "zb-h1": Schedule(
        zb_h1, f"{_TORCH}ScheduleInterleavedZeroBubble(stages, n_microbatches={{}})", splits=True
    ),
    "zbv": Schedule(
        zb_v,
        f"{_TORCH}ScheduleZBVZeroBubble(stages, n_microbatches={{}})",
        place=v_shaped,
        chunks=2,
        splits=True,
    ),
    "dualpipe": Schedule(
        dualpipe,
        "github.com/deepseek-ai/DualPipe with {} micro-batches (ScheduleDualPipeV of torch: half the stages)",
        place=from_both_ends,
        copies=2,
        splits=True,
    ),
}


# Partial pipelines: each micro-batch skips some stages, and the order of work follows.

Path = tuple[int, ...]


def paths_of(num_stages: int, num_batches: int, num_skipped: int) -> list[Path]:
    """Return the stages that each micro-batch visits, in order.

    Raises:
        UsageError: there are fewer stages than `num_skipped` between the first and the last.
    """
    inner = num_stages - 2
    if not 0 <= num_skipped <= inner:
        raise UsageError(
            f"skip: {num_skipped} of {num_stages} stages cannot be skipped: the first and last are required"
        )
    choices = []
    for first in range(max(inner, 1)):
        skipped = {1 + (first + further) % inner for further in range(num_skipped)}
        choices.append(tuple(stage for stage in range(num_stages) if stage not in skipped))
    used: Counter[Path] = Counter()
    taken: set[tuple[int, int]] = set()
    chosen: list[Path] = []
    enters = 0
    for _ in range(num_batches):
        late = {path: _wait(path, enters, taken) for path in choices}
        path = min(choices, key=lambda choice: (late[choice] + used[choice], choices.index(choice)))
        enters += late[path]
        taken |= {(stage, enters + slot) for slot, stage in enumerate(path)}
        used[path] += 1
        chosen.append(path)
        enters += 1
    return chosen


def _wait(path: Path, enters: int, taken: set[tuple[int, int]]) -> int:
    """Return by how many slots a micro-batch has to be delayed to meet no other on a path."""
    late = 0
    while any((stage, enters + late + slot) in taken for slot, stage in enumerate(path)):
        late += 1
    return late


def partial(num_stages: int, num_batches: int, num_skipped: int) -> list[Order]:
    """Return the order of each stage: a backward as soon as there is one, else the next forward.

    A stage keeps at most as many micro-batches as in 1F1B. The order comes from a simulation in which a
    backward takes as long as two forwards.
    """
    paths = paths_of(num_stages, num_batches, num_skipped)
    orders: list[Order] = [[] for _ in range(num_stages)]
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]  # (kind, micro-batch), a heap
    held, busy = [0] * num_stages, [False] * num_stages
    events = [(0, 0, 1, batch) for batch in range(num_batches)]  # time, stage that it reaches, kind, batch
    done: list[tuple[int, int, int, int]] = []
    while events or done:
        now = min(queue[0][0] for queue in (events, done) if queue)
        while done and done[0][0] == now:
            _, stage, kind, batch = heapq.heappop(done)
            busy[stage] = False
            heapq.heappush(events, (now, *_next_stop(paths[batch], stage, kind), batch))
        while events and events[0][0] == now:
            _, stage, kind, batch = heapq.heappop(events)
            if stage >= 0:
                heapq.heappush(waiting[stage], (kind, batch))
        for stage in range(num_stages):
            may = waiting[stage] and (waiting[stage][0][0] == 0 or held[stage] < num_stages - stage)
            if busy[stage] or not may:
                continue
            kind, batch = heapq.heappop(waiting[stage])
            orders[stage].append(PipelineTask(FORWARD if kind else BACKWARD, batch))
            held[stage] += 1 if kind else -1
            busy[stage] = True
            heapq.heappush(done, (now + (1 if kind else 2), stage, kind, batch))
    return orders


def _next_stop(path: Path, stage: int, kind: int) -> tuple[int, int]:
    """Return the next stage of a micro-batch, -1 at the end, and whether forward (1) or backward (0)."""
    position = path.index(stage)
    if kind:
        return (path[position + 1], 1) if position + 1 < len(path) else (stage, 0)
    return (path[position - 1], 0) if position else (-1, 0)


# Stages that work in parallel on each micro-batch, where a model has branches.

Branch = range  # of stages


def distances(num_stages: int, branches: Sequence[Branch]) -> list[int]:
    """Return the number of stages behind each one on the longest path to the end.

    Args:
        branches: the consecutive stages of each branch; each branch begins where the previous one ends.
    """
    inside = {stage: branch for branch in branches for stage in branch}
    longest, after = max(map(len, branches)), num_stages - max(inside) - 1
    behind = []
    for stage in range(num_stages):
        if stage in inside:
            behind.append(after + inside[stage].stop - stage - 1)
        else:
            before = stage < min(inside)
            behind.append(after + longest + min(inside) - stage - 1 if before else num_stages - stage - 1)
    return behind


def branched(num_stages: int, num_batches: int, branches: Sequence[Branch]) -> list[Order]:
    """Order as 1F1B that runs ahead by the length of the longest path.

    Args:
        branches: see `distances`.
    """
    forward, backward = (
        [PipelineTask(kind, batch) for batch in range(num_batches)] for kind in (FORWARD, BACKWARD)
    )
    return [alternating(forward, backward, ahead) for ahead in distances(num_stages, branches)]


def branched_table(orders: Sequence[Order], branches: Sequence[Branch]) -> TaskTable:
    """Return tasks with branches: all follow the stages before them, and the stage after waits for all.

    Args:
        branches: see `distances`.
    """
    plain = table_of(orders, looped)
    start, stop = min(branch.start for branch in branches), max(branch.stop for branch in branches)
    keys = zip(plain.kind.tolist(), plain.batch.tolist(), plain.stage.tolist())
    number = {key: task for task, key in enumerate(keys)}
    ways = [(stage, stage + 1) for stage in range(len(orders) - 1)]
    ways = [way for way in ways if not any(way[1] == branch.start > start for branch in branches)]
    ways += [(start - 1, branch.start) for branch in branches if branch.start > start > 0]
    ways += [(branch.stop - 1, stop) for branch in branches if branch.stop < stop]
    pairs = []
    for batch in sorted(set(plain.batch.tolist())):
        forward, backward = KINDS.index(FORWARD), KINDS.index(BACKWARD)
        last = len(orders) - 1
        pairs.append((number[forward, batch, last], number[backward, batch, last]))
        for one, other in ways:
            pairs.append((number[forward, batch, one], number[forward, batch, other]))
            pairs.append((number[backward, batch, other], number[backward, batch, one]))
    source, target = np.array(pairs, np.int64).T
    return dataclasses.replace(plain, source=source, target=target)
