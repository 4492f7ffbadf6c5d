"""Stages that work side by side on each micro-batch, where a model has branches.

In: numbers of stages and micro-batches, and which stages are a branch each. Out: the order of each stage, and
what waits for what. As in GraphPipe (Jeon et al., ASPLOS 2025) the pipeline is as deep as its longest path,
so that fewer micro-batches are under way: 1F1B in which a stage runs ahead by its distance from the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dpro.replay.pipeline.schedules.in_turn import alternating
from dpro.replay.pipeline.schedules.tasks import (
    BACKWARD,
    FORWARD,
    KINDS,
    Order,
    PipelineTask,
    TaskTable,
    looped,
    table_of,
)

Branch = range  # of stages


def distances(num_stages: int, branches: Sequence[Branch]) -> list[int]:
    """How many stages are behind each on the longest path to the end.

    Args:
        branches: stages that follow each other in each; one branch begins where the one before ends.
    """
    inside = {stage: branch for branch in branches for stage in branch}
    longest, after = max(map(len, branches)), num_stages - max(inside) - 1
    found = []
    for stage in range(num_stages):
        if stage in inside:
            found.append(after + inside[stage].stop - stage - 1)
        else:
            before = stage < min(inside)
            found.append(after + longest + min(inside) - stage - 1 if before else num_stages - stage - 1)
    return found


def branched(num_stages: int, num_batches: int, branches: Sequence[Branch]) -> list[Order]:
    """1F1B that runs ahead as far as the longest path is.

    Args:
        branches: as for `distances`.
    """
    forward, backward = (
        [PipelineTask(kind, batch) for batch in range(num_batches)] for kind in (FORWARD, BACKWARD)
    )
    return [alternating(forward, backward, ahead) for ahead in distances(num_stages, branches)]


def branched_table(orders: Sequence[Order], branches: Sequence[Branch]) -> TaskTable:
    """What waits for what: the first of each branch for what is before all, what follows for all of them.

    Args:
        branches: as for `distances`.
    """
    plain = table_of(orders, looped)
    start, stop = min(each.start for each in branches), max(each.stop for each in branches)
    keys = zip(plain.kind.tolist(), plain.batch.tolist(), plain.stage.tolist())
    number = {key: at for at, key in enumerate(keys)}
    ways = [(stage, stage + 1) for stage in range(len(orders) - 1)]
    ways = [way for way in ways if not any(way[1] == each.start > start for each in branches)]
    ways += [(start - 1, each.start) for each in branches if each.start > start > 0]
    ways += [(each.stop - 1, stop) for each in branches if each.stop < stop]
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
