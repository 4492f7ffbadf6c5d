"""Messages of a pipeline of which some ranks were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.errors import Unanswerable
from dpro.extensions.plan.recorded_job import a_rank_of_each_stage, message_us_of, micro_batches_of
from dpro.replay.graph import Graph
from dpro.replay.mesh import Axis, Mesh
from tests.builders import WORKER, TinyRun

MICRO_BATCHES, MOVES, LATE = 3, 5, 40  # us: a message moves, and its receiver waits


def pipeline(folder: Path, ranks: set[int]) -> Graph:
    """One step of stage 1 of 3: it receives from both neighbours; other ranks only send."""
    run = TinyRun()
    counted = 0
    for number in range(MICRO_BATCHES):
        for sender in (0, 2):
            begin, counted = 100 * counted, counted + 1
            for rank, op, start in ((1, "recv", begin), (sender, "send", begin + LATE)):
                if rank in ranks:
                    called = run.op(f"c10d::{op}_", begin, begin + 10, rank)
                    span = run.mark(f"gloo:{op}", start, begin + LATE + MOVES, rank, tid=WORKER)
                    peer = sender if rank == 1 else 1
                    more = {"peer": peer, "sequence": number, "group": "0", "group_ranks": "0-2"}
                    run.member(span, op, launched_by=called, bytes_in=64, bytes_out=64, **more)
    for rank in ranks:
        run.step(0, 0, 100 * counted, rank)
    return run.build(folder).graph


def test_a_stage_in_the_middle_receives_as_many_micro_batches_from_each_side(tmp_path: Path) -> None:
    assert micro_batches_of(pipeline(tmp_path, {1}), 1) == MICRO_BATCHES


def test_a_message_whose_sender_is_missing_does_not_say_how_long_it_moves(tmp_path: Path) -> None:
    assert message_us_of(pipeline(tmp_path / "alone", {1}), [1]) == 0
    assert message_us_of(pipeline(tmp_path / "with", {0, 1}), [1]) == pytest.approx(MOVES, abs=1)


def test_a_rank_that_receives_nothing_does_not_say_how_many_micro_batches_there_are(tmp_path: Path) -> None:
    with pytest.raises(Unanswerable, match="micro_batches="):
        micro_batches_of(pipeline(tmp_path, {0, 1}), 0)


def test_stages_without_a_recorded_rank_are_left_out(tmp_path: Path) -> None:
    mesh = Mesh(3, (Axis("pp", 3),), {0: (0,), 1: (1,), 2: (2,)}, "mesh")
    assert a_rank_of_each_stage(pipeline(tmp_path, {1, 2}), mesh, 3) == {1: 1, 2: 2}
