"""Pieces of work of each rank, in an order that no library runs, for `benchmarks/recording/orders_job.py`.

In: orders of stages, some side by side, and foreign work. Out: the contents of that job's file. Two pieces
of one group wait for the inputs of both; a message is still known by the piece that sends it and the piece
that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro.extensions.plan.schedules import (
    KINDS,
    Order,
    TaskTable,
    branched,
    branched_table,
    dualpipe,
    from_both_ends,
    looped,
    one_forward_one_backward,
    partial,
    table_of,
)

Pieces = list[list[dict[str, Any]]]
Foreign = Mapping[tuple[int, int], float]  # ms of other work, by rank and how many pieces are before it
BRANCHES = (range(1, 2), range(2, 3))
LETTERS = dict(zip(KINDS, "FBW"))


def pieces_named(name: str, stages: int, batches: int, foreign: Foreign | None = None) -> Pieces:
    """Return the pieces of one of the recorded orders.

    Args:
        name: skip, dualpipe, fill, in-turn (stages with branches, as if all followed each other) or branches.
        stages: of the pipeline, one on each rank.
        batches: micro-batches of a step.
        foreign: where fill has other work.
    """
    in_turn = one_forward_one_backward(stages, batches, 1)
    if name == "skip":
        return pieces_of(orders := partial(stages, batches, 1), table_of(orders, looped))
    if name == "dualpipe":
        orders = dualpipe(stages, batches, 1)
        alone = [[task._replace(beside=False) for task in order] for order in orders]
        return pieces_of(orders, table_of(alone, from_both_ends))
    if name == "fill":
        return pieces_of(in_turn, table_of(in_turn, looped), foreign)
    orders = branched(stages, batches, BRANCHES) if name == "branches" else in_turn
    return pieces_of(orders, branched_table(orders, BRANCHES))


def pieces_of(orders: Sequence[Order], table: TaskTable, foreign: Foreign | None = None) -> Pieces:
    """Return the pieces of each rank.

    Args:
        orders: of the stages.
        table: the orders as a table, each piece by itself.
        foreign: other work.
    """
    found: Pieces = [[] for _ in orders]
    tasks = [task for order in orders for task in order]
    stage = table.stage.tolist()
    for at, task in enumerate(tasks):
        mine = found[stage[at]]
        before = sum("place" in piece for piece in mine)
        if foreign and (stage[at], before) in foreign:
            mine.append(_foreign(foreign[stage[at], before], len(mine)))
        place, kind = int(table.place[at]), task.kind
        letter = "I" if table.apart[at] else LETTERS[kind]
        mine.append(
            {
                "kind": kind,
                "place": place,
                "chunk": task.chunk,
                "batch": task.batch,
                "apart": bool(table.apart[at]),
                "group": mine[-1]["group"] if task.beside else len(mine),
                "range": f"PP:{place}{letter}{task.batch}",
                "from": [],
                "to": [],
            }
        )
    for rank, mine in enumerate(found):
        before = sum("place" in piece for piece in mine)
        if foreign and (rank, before) in foreign:
            mine.append(_foreign(foreign[rank, before], len(mine)))
    real = [piece for mine in found for piece in mine if "place" in piece]
    for number, (source, target) in enumerate(zip(table.source.tolist(), table.target.tolist())):
        real[source]["to"].append((number, stage[target]))
        real[target]["from"].append((number, stage[source]))
    return found


def _foreign(milliseconds: float, group: int) -> dict[str, Any]:
    return {"kind": "foreign", "ms": milliseconds, "group": group, "range": "", "from": [], "to": []}
