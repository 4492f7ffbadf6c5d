import itertools

import pytest

from dpro.collectors.inside.stepping import Boundary, StepCounter, number_steps


class Optimizer:
    def __init__(self, weight: float) -> None:
        self.weight = weight


def replayed(
    optimizers: str, weights: dict[str, float] | None = None
) -> tuple[dict[int, int], list[int], list[int]]:
    """Feed updates, one letter each; the steps by number with when they ended, the steps counted live, and
    when an update was recorded."""
    updates: list[tuple[int, int, Boundary]] = []
    anchors: list[tuple[int, int, int]] = []
    live: list[int] = []
    known = {letter: Optimizer((weights or {}).get(letter, 1.0)) for letter in optimizers}
    counter = StepCounter(lambda optimizer: optimizer.weight, lambda *anchor: anchors.append(anchor))
    for time, letter in enumerate(optimizers):
        counted = counter.update(known[letter])
        if counted:
            updates.append((*counted, Boundary(time, time)))
        live.append(counter.step)
    numbered = number_steps(updates, anchors)
    recorded = [boundary.end_ns for _, _, boundary in updates]
    return {step: boundary.end_ns for step, (_, boundary) in numbered.items()}, live, recorded


@pytest.mark.parametrize(
    ("optimizers", "ends"),
    [
        ("A", [0]),
        ("AAAA", [0, 1, 2, 3]),
        ("AB" * 4, [1, 3, 5, 7]),  # two optimizers: the later one ends the step
        ("DDDG" * 3, [3, 7, 11]),  # a GAN: the rarer one does
        ("abcde" * 3, [4, 9, 14]),  # one optimizer per parameter, in backward
        ("io" * 3, [1, 3, 5]),  # an inner optimizer within an outer one
        ("AAABBB", [0, 1, 2, 3, 4, 5]),  # a second phase with an optimizer of its own
        ("DDDDDG" * 3, [5, 11, 17]),  # also where the first guess was another
        ("D" * 20 + "GDDD" * 3, [*range(20), 21, 22, 23, 24, 28]),  # one that joins late counts from there
        ("", []),
    ],
)
def test_steps_end_where_the_rarest_optimizer_updates(optimizers, ends):
    steps, _, _ = replayed(optimizers)
    assert list(steps) == list(range(len(ends)))
    assert list(steps.values()) == ends


@pytest.mark.parametrize(
    "optimizers",
    ["AAAA", "AB" * 4, "DDDG" * 4, "abcde" * 3, "AAABBBBB", "D" * 20 + "GDDD" * 4, "O" + "A" * 200],
)
def test_steps_counted_live_are_those_numbered_afterwards(optimizers):
    steps, live, _ = replayed(optimizers)
    assert live[-1] == len(steps)
    assert list(steps.values()) == sorted(steps.values())


def test_steps_counted_live_do_not_go_back_once_the_job_has_settled():
    for optimizers in ("A" * 20 + "B" * 20, "D" * 20 + "GDDD" * 9, "A" * 50 + "B" * 50 + "A" * 50):
        _, live, _ = replayed(optimizers)
        assert live == sorted(live)


def test_updates_that_cannot_end_a_step_are_not_recorded():
    _, _, recorded = replayed("ABABAB")
    assert recorded == [0, 1, 2, 3, 5]


def test_phases_that_alternate_are_all_counted_but_for_the_updates_that_show_it():
    steps, live, _ = replayed("A" * 100 + "B" * 100 + "A" * 100 + "B" * 100)
    assert live == sorted(live)
    assert 350 <= live[-1] == len(steps) <= 400
    ends = list(steps.values())
    assert ends[:200] == list(range(200))
    assert max(end - before for before, end in itertools.pairwise(ends)) < 30


def test_optimizer_that_updated_once_is_not_waited_for():
    steps, live, _ = replayed("O" + "A" * 200)
    assert live[-1] == 200
    assert list(steps.values())[-100:] == list(range(101, 201))


@pytest.mark.parametrize("extra", ["AS", "SA", "AAAAAS"])
def test_optimizer_that_holds_next_to_nothing_ends_no_step(extra):
    steps, _, _ = replayed(extra * 20, {"A": 1000.0, "S": 1.0})
    assert len(steps) == 20 * extra.count("A")


def test_all_ranks_count_the_same_steps_although_one_has_a_small_optimizer_more():
    usual, _, _ = replayed("DDG" * 20, {"D": 900.0, "G": 1000.0, "S": 1.0})
    more, _, _ = replayed("DDGS" * 20, {"D": 900.0, "G": 1000.0, "S": 1.0})
    assert list(usual) == list(more)


def test_updates_with_the_same_gradients_are_one_step_unless_there_never_are_others():
    counter, optimizer = StepCounter(lambda _: 1.0, lambda *_: None), Optimizer(1.0)
    for gradients in range(10):
        for _ in range(3):  # one parameter group after the other
            counter.update(optimizer, gradients)
    assert counter.step == 10
    for _ in range(100):
        counter.update(optimizer, "the same")
    assert counter.step == 10 + 100 - 64


def test_named_steps_take_over_from_the_first_one_on():
    steps, live, _ = replayed("A" + "AAM" * 10, {"M": float("inf")})
    assert live[-1] == 10
    assert list(steps.values()) == [3 * number + 3 for number in range(10)]


def test_first_optimizer_takes_over_from_model_calls():
    steps, live, _ = replayed("m" * 5 + "mA" * 10, {"m": 0.0})
    assert live[-1] == len(steps) == 10
    assert list(steps.values()) == list(range(6, 25, 2))
    steps, live, _ = replayed("m" * 50 + "mA" * 10, {"m": 0.0})
    assert live[-1] == len(steps) == 51 + 10


def test_new_optimizer_at_the_address_of_an_old_one_is_a_new_one():
    anchors, steps = [], []
    counter = StepCounter(lambda _: 1.0, lambda *anchor: anchors.append(anchor))
    for _ in range(20):
        optimizer = Optimizer(1.0)
        for _ in range(3):
            counter.update(optimizer)
            steps.append(counter.step)
        del optimizer
    assert steps == [0, *range(2, 61)]  # the first update of all could still be one of several
    assert [number for number, _, _ in anchors] == list(range(20))
