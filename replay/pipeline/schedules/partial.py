"""Partial pipelines: each micro-batch skips some stages, and the order of work follows.

In: numbers of stages, micro-batches and skipped stages. Out: which stages each micro-batch visits, and the
order of each stage. The first and the last stage, which hold embedding and loss, are never skipped. As in
SkipPipe (arXiv 2502.19913) paths are chosen so that stages are skipped equally often, and no two
micro-batches reach a stage at the same time if all forwards take as long; here one micro-batch after the
other takes the best path that is left, where SkipPipe searches among all of them.
"""

from __future__ import annotations

import heapq
from collections import Counter

from dpro.errors import UsageError
from dpro.replay.pipeline.schedules.tasks import BACKWARD, FORWARD, Order, PipelineTask

Path = tuple[int, ...]


def paths_of(num_stages: int, num_batches: int, num_skipped: int) -> list[Path]:
    """The stages that each micro-batch visits, in order.

    Raises:
        UsageError: there are not as many stages between the first and the last.
    """
    inner = num_stages - 2
    if not 0 <= num_skipped <= inner:
        raise UsageError(
            f"skip: {num_skipped} of {num_stages} stages cannot be skipped: the first and the last are not"
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
        path = min(choices, key=lambda each: (late[each] + used[each], choices.index(each)))
        enters += late[path]
        taken |= {(stage, enters + slot) for slot, stage in enumerate(path)}
        used[path] += 1
        chosen.append(path)
        enters += 1
    return chosen


def _wait(path: Path, enters: int, taken: set[tuple[int, int]]) -> int:
    """How many slots later a micro-batch has to enter so as to meet no other on a path."""
    late = 0
    while any((stage, enters + late + slot) in taken for slot, stage in enumerate(path)):
        late += 1
    return late


def partial(num_stages: int, num_batches: int, num_skipped: int) -> list[Order]:
    """The order of each stage: a backward as soon as there is one, else the next forward.

    A stage holds as many micro-batches at most as in 1F1B. The order is that of a simulation in which a
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
            heapq.heappush(events, (now, *_next(paths[batch], stage, kind), batch))
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


def _next(path: Path, stage: int, kind: int) -> tuple[int, int]:
    """Where a micro-batch goes from a stage, and whether forward (1) or backward (0); -1 where it is done."""
    at = path.index(stage)
    if kind:
        return (path[at + 1], 1) if at + 1 < len(path) else (stage, 0)
    return (path[at - 1], 0) if at else (-1, 0)
