"""Links between stages: how long each takes, and which there are, on jobs simulated by hand-written rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl
import pytest

from dpro.errors import Unanswerable
from dpro.extensions.plan.schedules import (
    KINDS,
    TaskTable,
    branched,
    branched_table,
    gpipe,
    looped,
    one_forward_one_backward,
    table_of,
)
from dpro.replay.construction.graph_builder import build_operation_view
from dpro.replay.graph import MeshPosition
from dpro.replay.pipeline.operations import is_connected, recorded_links
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import COLLECTIVES, OPERATIONS, STEPS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from dpro.table import complete

MS, STEP_COUNT = 1_000_000, 4
WORK = {"forward": 10.0, "backward": 20.0}
Link = Callable[[int, int], float]


def simulated(table: TaskTable, link: Link) -> list[tuple[float, float]]:
    """When each piece begins and ends, ms: after the one before it on its stage, and what it was sent."""
    count = table.stage.size
    waits: Mapping[int, list[int]] = {at: [] for at in range(count)}
    for source, target in zip(table.source.tolist(), table.target.tolist()):
        waits[target].append(source)
    done: dict[int, tuple[float, float]] = {}
    while len(done) < count:
        for at in range(count):
            first = at == 0 or table.stage[at - 1] != table.stage[at]
            if at in done or not all(each in done for each in [*waits[at], *([] if first else [at - 1])]):
                continue
            came = [done[each][1] + link(int(table.stage[each]), int(table.stage[at])) for each in waits[at]]
            begin = max([0.0 if first else done[at - 1][1], *came])
            done[at] = begin, begin + WORK[KINDS[table.kind[at]]]
    return [done[at] for at in range(count)]


def length(table: TaskTable, link: Link) -> float:
    return max(end for _, end in simulated(table, link)) + 5


def written(folder: Path, table: TaskTable, link: Link, messages: Mapping[tuple[int, int], int] = {}) -> Run:
    """The same as a recording of several steps, each with 5 ms of update."""
    times, long = simulated(table, link), length(table, link)
    stages = sorted({*table.stage.tolist()})
    rows = [
        (
            *(stage, step, stage, 0, stage, batch, KINDS[kind]),
            *(round((step * long + begin) * MS), round((end - begin) * MS)),
        )
        for step in range(3, 3 + STEP_COUNT)
        for stage, batch, kind, (begin, end) in zip(
            table.stage.tolist(), table.batch.tolist(), table.kind.tolist(), times
        )
    ]  # fmt: skip
    names = ["rank", "step", "stage", "chunk", "place", "micro_batch", "kind", "start_ns", "duration_ns"]
    steps = [
        (rank, step, round(step * long * MS), round(long * MS), -1)
        for rank in stages
        for step in range(3, 3 + STEP_COUNT)
    ]
    sent = [(one, "send", other) for ends, count in messages.items() for one, other in [ends] * count]
    parts = (
        (OPERATIONS, pl.DataFrame(rows, names, orient="row")),
        (STEPS, pl.DataFrame(steps, ["rank", "step", "start_ns", "duration_ns", "window"], orient="row")),
        (WORKERS, pl.DataFrame([(rank, rank, "a") for rank in stages], ["rank", "pp", "host"], orient="row")),
        (
            COLLECTIVES,
            pl.DataFrame(sent, {"rank": pl.Int32, "op": pl.String, "peer": pl.Int32}, orient="row"),
        ),
    )
    for name, part in parts:
        write_part(folder, name, "a", complete(name, part))
    write_manifest(folder, Manifest(world_size=len(stages), ranks=stages))
    return open_run(folder)


def predicted(run: Run, edit: str) -> float:
    graph = parse_edit(edit).apply(build_operation_view(run).predictive)
    timeline = replay(graph)
    return step_times(graph, timeline.start, timeline.end)["duration_ns"].to_list()[-1] / MS


def one_slow(one: int, other: int) -> float:
    """The link between the last two of three stages takes ten times as long as the other."""
    return 0.0 if one == other else 10.0 if {one, other} == {1, 2} else 1.0


@pytest.mark.parametrize("batches", [4, 8])
def test_link_that_is_slower_than_the_others_stays_so_in_another_schedule(tmp_path, batches):
    recorded = table_of(one_forward_one_backward(3, batches, 1), looped)
    other = table_of(gpipe(3, batches, 1), looped)
    run = written(tmp_path, recorded, one_slow)
    assert predicted(run, f"pipeline:schedule=1f1b,micro_batches={batches}") == pytest.approx(
        length(recorded, one_slow), abs=0.01
    )
    assert predicted(run, "pipeline:schedule=gpipe") == pytest.approx(length(other, one_slow), abs=0.01)
    # Links that all are as fast make another step.
    assert abs(length(other, lambda one, to: float(one != to)) - length(other, one_slow)) > 10


BRANCHES = (range(1, 2), range(2, 3))
SENT = {(0, 1): 4, (0, 2): 4, (1, 3): 4, (2, 3): 4, (3, 1): 4, (3, 2): 4, (1, 0): 4, (2, 0): 4}


def test_branches_are_known_by_the_messages_that_stages_sent(tmp_path):
    orders = one_forward_one_backward(4, 8, 1)
    table = branched_table(orders, BRANCHES)
    run = written(tmp_path / "branches", table, lambda one, to: float(one != to), SENT)
    places = {rank: MeshPosition(0, rank) for rank in range(4)}
    links = recorded_links(run, places)
    assert links == {(0, 1): 8, (0, 2): 8, (1, 3): 8, (2, 3): 8}
    assert is_connected(links, 4)
    assert not is_connected({(0, 1): 8, (1, 3): 8}, 4)
    side_by_side = branched_table(branched(4, 8, BRANCHES), BRANCHES)
    expected = length(side_by_side, lambda one, to: float(one != to))
    assert predicted(run, "stages:branches=1/2") == pytest.approx(expected, abs=0.01)


def test_whether_branches_need_each_other_is_not_known_without_peers(tmp_path):
    table = branched_table(one_forward_one_backward(4, 8, 1), BRANCHES)
    run = written(tmp_path, table, lambda one, to: float(one != to))
    with pytest.raises(Unanswerable, match="are unknown"):
        predicted(run, "stages:branches=1/2")
