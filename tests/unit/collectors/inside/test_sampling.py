"""At which ends of steps clocks are read, and what that costs."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.collectors.inside.sampling import APART, FARTHEST, FIRST, Sampling

US = 1_000


def read_at(sampling, step_ns, own_ns, steps):
    """The steps at whose ends clocks are read, as the recorder asks for them."""
    read = []
    for step in range(steps):
        sampling.left -= 1
        if step_ns(step) >= sampling.paying_ns or sampling.left <= 1 or sampling.ahead:
            read.append(step)
            sampling.took(own_ns(step), step_ns(step))
    return read


def settled(step_ns, own_ns, steps=400):
    sampling = Sampling()
    read_at(sampling, step_ns, own_ns, 100)
    return read_at(sampling, step_ns, own_ns, steps)


@pytest.mark.parametrize("own_us", [10, 45, 79])
def test_steps_of_twenty_milliseconds_have_clocks_read_at_each_end_while_that_is_cheap(own_us):
    assert settled(lambda _: 20_000 * US, lambda _: own_us * US) == list(range(400))


def test_short_steps_have_them_read_at_two_ends_in_a_row_and_then_at_none():
    read = settled(lambda _: 1_000 * US, lambda _: 45 * US)
    pairs = [step for step in read if step + 1 in read]
    assert len(read) in (2 * len(pairs), 2 * len(pairs) + 1)
    assert {after - before for before, after in pairwise(pairs)} == {APART}


def test_the_shortest_steps_have_them_read_more_rarely_still():
    read = settled(lambda _: 100 * US, lambda _: 45 * US)
    assert len(read) <= 2 * 400 / FARTHEST + 2


def test_long_step_among_short_ones_has_them_read_at_its_end():
    lasts = lambda step: (50_000 if step == 201 else 1_000) * US  # noqa: E731
    assert 201 in settled(lasts, lambda _: 45 * US)


def test_host_that_is_ahead_of_its_device_has_them_read_at_each_end():
    sampling = Sampling()
    read_at(sampling, lambda _: 1_000 * US, lambda _: 200 * US, 100)
    sampling.see(True)
    sampling.see(False)
    assert len(read_at(sampling, lambda _: 1_000 * US, lambda _: 200 * US, 50)) == 50
    for _ in range(FARTHEST):
        sampling.see(False)
    assert len(read_at(sampling, lambda _: 1_000 * US, lambda _: 200 * US, 50)) < 20


def test_few_times_that_the_recorder_is_held_up_change_nothing():
    held_up = lambda step: (20_000 if step % 5 == 0 else 45) * US  # noqa: E731
    assert settled(lambda _: 20_000 * US, held_up) == list(range(400))


@given(st.integers(100, 100_000), st.integers(5, 500))
def test_reading_clocks_takes_no_more_than_half_a_percent_or_two_of_seven_steps(step_us, own_us):
    steps = 700
    read = settled(lambda _: step_us * US, lambda _: own_us * US, steps)
    assert len(read) * own_us <= 0.005 * steps * step_us or len(read) <= 2 * (steps / APART + 1)


def test_first_steps_are_all_read():
    assert read_at(Sampling(), lambda _: 100 * US, lambda _: 45 * US, FIRST) == list(range(FIRST))
