import pytest

from dpro.collectors.inside.stepping import Boundary, StepCounter, number_steps


def replayed(optimizers: str) -> tuple[dict[int, int], list[int]]:
    """Feed updates, one letter each; the steps by number with when they ended, and the steps counted live."""
    updates: list[tuple[int, int, Boundary]] = []
    anchors: list[tuple[int, int]] = []
    live: list[int] = []
    counter = StepCounter(lambda optimizer, base: anchors.append((optimizer, base)))
    for time, optimizer in enumerate(optimizers):
        counted = counter.update(optimizer)
        if counted:
            updates.append((*counted, Boundary(time, time)))
        live.append(counter.step)
    return {step: boundary.end_ns for step, boundary in number_steps(updates, anchors).items()}, live


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
        ("", []),
    ],
)
def test_steps_end_where_the_rarest_optimizer_updates(optimizers, ends):
    steps, _ = replayed(optimizers)
    assert list(steps) == list(range(len(ends)))
    assert list(steps.values()) == ends


@pytest.mark.parametrize("optimizers", ["AAAA", "AB" * 4, "DDDG" * 4, "abcde" * 3, "AAABBBBB"])
def test_steps_counted_live_are_those_numbered_afterwards(optimizers):
    steps, live = replayed(optimizers)
    assert live[-1] == len(steps)


def test_updates_that_cannot_end_a_step_are_not_recorded():
    counter = StepCounter(lambda *_: None)
    for optimizer in "ABAB":
        assert counter.update(optimizer)
    assert counter.update("A") is None
    assert counter.update("B") == (1, 3)
