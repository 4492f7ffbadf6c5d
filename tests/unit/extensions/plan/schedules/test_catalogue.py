"""Published schedules: each piece of work once, no cycles, and the closed forms of the papers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import UsageError
from dpro.extensions.plan.schedules import (
    BACKWARD,
    FORWARD,
    KINDS,
    SCHEDULES,
    WEIGHTS,
    Order,
    PipelineTask,
    most_in_flight,
    table_of,
)
from dpro.extensions.plan.step import pipeline, replayed_us


def orders_of(schedule: str, stages: int, count: int) -> list[Order]:
    return SCHEDULES[schedule].orders(stages, count, SCHEDULES[schedule].chunks)


def one_by_one(orders: list[Order]) -> list[Order]:
    return [[task._replace(beside=False) for task in order] for order in orders]


class Simulated:
    """Each stage does its pieces of work one after the other, as soon as what they wait for is there.

    Works on the orders as rules, stage by stage, and knows nothing of dpro's graph. Pieces that are `beside`
    the one before begin when both can, and end together, or one by one where they are not held together.
    """

    def __init__(
        self, schedule: str, stages: int, count: int, each: dict[str, Fraction], together: bool = True
    ) -> None:
        self.orders, place = orders_of(schedule, stages, count), SCHEDULES[schedule].place
        chunks = SCHEDULES[schedule].chunks
        table = table_of(one_by_one(self.orders), place)
        waits: dict[int, list[int]] = {}
        for source, target in zip(table.source.tolist(), table.target.tolist()):
            waits.setdefault(target, []).append(source)
        whole = {**each, BACKWARD: each[BACKWARD] + each[WEIGHTS]}
        length = [
            (each if apart else whole)[KINDS[kind]] / chunks for kind, apart in zip(table.kind, table.apart)
        ]
        numbers = iter(range(table.stage.size))
        groups: list[list[list[int]]] = [[] for _ in range(stages)]
        for stage, order in enumerate(self.orders):
            for task in order:
                if task.beside and together:
                    groups[stage][-1].append(next(numbers))
                else:
                    groups[stage].append([next(numbers)])
        ended: dict[int, Fraction] = {}
        free, at, began = [Fraction(0)] * stages, [0] * stages, [None] * stages
        while any(at[s] < len(groups[s]) for s in range(stages)):
            before = list(at)
            for s in range(stages):
                while at[s] < len(groups[s]):
                    group = groups[s][at[s]]
                    needed = [source for piece in group for source in waits.get(piece, [])]
                    if not all(source in ended for source in needed):
                        break
                    begin = max([free[s], *(ended[source] for source in needed)])
                    began[s] = begin if began[s] is None else began[s]
                    free[s] = begin + sum(length[piece] for piece in group)
                    ended |= dict.fromkeys(group, free[s])
                    at[s] += 1
            assert at != before, "the schedule waits for itself"
        work = count * (each[FORWARD] + each[BACKWARD] + each[WEIGHTS])
        self.bubble = max(free) - work
        self.within_stages = max(end - begin - work for begin, end in zip(began, free))


def times(forward: int, backward: int, weights: int) -> dict[str, Fraction]:
    return {
        kind: Fraction(each) for kind, each in zip((FORWARD, BACKWARD, WEIGHTS), (forward, backward, weights))
    }


schedules = st.sampled_from(list(SCHEDULES))


@given(schedules, st.integers(1, 5), st.integers(2, 5))
def test_every_schedule_does_each_piece_of_work_once_and_in_its_turn(schedule, half, times_as_many):
    stages = 2 * half
    count, chosen = stages * times_as_many, SCHEDULES[schedule]
    for stage, order in enumerate(one_by_one(orders_of(schedule, stages, count))):
        done = {(task.batch, task.chunk) for task in order if task.kind == FORWARD}
        assert len(done) == count * chosen.chunks
        assert len(set(order)) == len(order)
        assert {(t.batch, t.chunk) for t in order if t.kind == BACKWARD} == done
        apart = {(t.batch, t.chunk) for t in order if t.kind == WEIGHTS}
        assert apart <= done
        assert bool(apart) == chosen.splits
        at = {task: index for index, task in enumerate(order)}
        for batch, chunk in done:
            assert at[PipelineTask(FORWARD, batch, chunk)] < at[PipelineTask(BACKWARD, batch, chunk)]
        for batch, chunk in apart:
            assert at[PipelineTask(BACKWARD, batch, chunk)] < at[PipelineTask(WEIGHTS, batch, chunk)]
        assert 0 <= stage < stages


@given(schedules, st.integers(1, 4), st.integers(2, 4))
def test_every_micro_batch_visits_every_place_of_the_model_there_and_back(schedule, half, times_as_many):
    stages, chosen = 2 * half, SCHEDULES[schedule]
    count = stages * times_as_many
    table = table_of(one_by_one(orders_of(schedule, stages, count)), chosen.place)
    forward = table.kind == KINDS.index(FORWARD)
    for batch in range(count):
        mine = forward & (table.batch == batch)
        assert sorted(table.place[mine].tolist()) == list(range(stages * chosen.chunks))
    # Each piece but the first forward waits for exactly one other of its micro-batch.
    main = np.flatnonzero(table.kind != KINDS.index(WEIGHTS))
    firsts = np.flatnonzero(forward & (table.place == 0))
    assert sorted(table.target.tolist()) == sorted(set(main.tolist()) - set(firsts.tolist()))
    assert (table.batch[table.source] == table.batch[table.target]).all()


@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_bubbles_of_equal_stages_are_those_of_the_papers(stages, rounds, forward, backward, weights):
    each, count = times(forward, backward, weights), stages * rounds
    whole = forward + backward + weights
    assert Simulated("1f1b", stages, count, each).bubble == (stages - 1) * whole
    assert Simulated("gpipe", stages, count, each).bubble == (stages - 1) * whole
    assert Simulated("interleaved", stages, count, each).bubble == Fraction((stages - 1) * whole, 2)


@given(st.integers(2, 7), st.integers(0, 5), st.integers(0, 5), st.integers(1, 9))
def test_zero_bubble_h1_leaves_what_the_paper_says(stages, forward, backward, weights):
    # (p - 1)(F + B - W) where W is the least of the three (arXiv 2401.10241, section 2.2).
    each = times(weights + forward, weights + backward, weights)
    bubble = Simulated("zb-h1", stages, 2 * stages, each).bubble
    assert bubble == (stages - 1) * (each[FORWARD] + each[BACKWARD] - each[WEIGHTS])


@given(st.integers(2, 7), st.integers(2, 4), st.integers(1, 9))
def test_stages_of_zero_bubble_v_never_stand_still_where_all_takes_as_long(stages, rounds, each):
    made = Simulated("zbv", stages, stages * rounds, times(each, each, each))
    assert made.within_stages == 0
    assert made.bubble == Fraction((stages - 1) * each, 2)  # they begin one after the other


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 5), st.integers(0, 5), st.integers(0, 5))
def test_dualpipe_leaves_what_its_report_says(half, rounds, weights, more, most):
    # (p / 2 - 1)(F&B + B - 3 W) with a whole B and forwards beside backwards (arXiv 2412.19437, table 2),
    # where gradients of weights take no longer than a forward, and those of inputs no less. The middle stages
    # do the first of each one by one, as the published program does: where those of inputs take longer than a
    # forward, a little less is left.
    stages, each = 2 * half, times(weights + more, weights + more + most, weights)
    made = Simulated("dualpipe", stages, stages * rounds, each)
    whole = each[BACKWARD] + each[WEIGHTS]
    published = (half - 1) * (each[FORWARD] + 2 * whole - 3 * each[WEIGHTS])
    assert made.bubble == published if most == 0 else made.bubble <= published
    # Handed on one by one they do not wait for each other, and leave no more.
    assert Simulated("dualpipe", stages, stages * rounds, each, together=False).bubble <= made.bubble


def test_bubbles_worked_out_by_hand():
    # Four stages, eight micro-batches, F = B = W = 1: work of 24.
    each = times(1, 1, 1)
    found = {name: Simulated(name, 4, 8, each).bubble for name in SCHEDULES}
    assert found == {
        "1f1b": 9,
        "gpipe": 9,
        "interleaved": Fraction(9, 2),
        "zb-h1": 3,
        "zbv": Fraction(3, 2),
        "dualpipe": 2,
    }
    # Were a forward handed on before the backward beside it has ended, half of it would be left.
    assert Simulated("dualpipe", 4, 8, each, together=False).bubble == 1


@given(st.integers(1, 5), st.integers(2, 4))
def test_no_stage_holds_more_activations_than_published(half, rounds):
    stages = 2 * half
    count = stages * rounds
    most = {name: [most_in_flight(each) for each in orders_of(name, stages, count)] for name in SCHEDULES}
    assert most["gpipe"] == [count] * stages
    assert most["1f1b"] == [stages - stage for stage in range(stages)]
    # Of chunks half as large: p (1 + (p - 1) / (p v)) micro-batches on the first stage, with v = 2.
    assert most["interleaved"] == [min(3 * stages - 2 * stage - 1, 2 * count) for stage in range(stages)]
    assert most["zb-h1"] == [stages] * stages
    assert max(most["zbv"]) == 2 * stages  # chunks: as much as the first stage of 1F1B holds
    assert most["dualpipe"] == [stages + 1] * stages


@given(schedules, st.integers(1, 4), st.integers(2, 4))
def test_layouts_replay_the_same_schedules(schedule, half, rounds):
    stages, chosen = 2 * half, SCHEDULES[schedule]
    each = np.full((stages, chosen.chunks), 12.0 / chosen.chunks)
    pipe = pipeline(stages, chosen.chunks, stages * rounds, schedule)
    found, busy = replayed_us(pipe, each, 2 * each, 0.0)
    made = Simulated(schedule, stages, stages * rounds, times(12, 12, 12))
    assert found == pytest.approx(float(36 * stages * rounds + made.bubble))
    assert busy == pytest.approx(np.full(stages, 36 * stages * rounds))


def test_schedules_that_cannot_be_made_of_these_numbers_are_refused():
    for schedule, numbers, why in (
        ("dualpipe", (3, 12, 1), "even number of stages"),
        ("dualpipe", (4, 6, 1), "two or more for each stage"),
        ("zbv", (4, 8, 1), "chunks=2"),
        ("zb-h1", (4, 8, 2), "one chunk per stage"),
        ("interleaved", (4, 8, 1), "needs chunks="),
        ("interleaved", (4, 6, 2), "multiple of the 4 stages"),
    ):
        with pytest.raises(UsageError, match=why):
            SCHEDULES[schedule].orders(*numbers)
