"""All ranks take the same windows, and windows keep to their budget."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.collectors.inside.plan import Window, WindowPlan
from dpro.collectors.inside.windows import SETTLED, WARM_UP, Budget


def taken(plan, steps, announcements=()):
    """The windows that begin within this many steps; announcements are by the step that hears them."""
    found = []
    for step in range(1, steps + 1):
        for heard, window in announcements:
            if heard == step:
                plan.announce(window)
        window = plan.take(step)
        if window is not None and window.steps and window.step == step:
            found.append((window.number, window.step, window.steps))
    return found


def test_windows_at_a_fixed_distance_need_no_announcement():
    assert taken(WindowPlan(5, 2, 10), 40) == [(0, 5, 2), (1, 15, 2), (2, 25, 2), (3, 35, 2)]


def test_without_a_distance_only_the_first_window_and_announced_ones_are_taken():
    assert taken(WindowPlan(5, 2, None), 100, [(20, Window(1, 60, 2))]) == [(0, 5, 2), (1, 60, 2)]


def test_window_learned_of_too_late_is_missed_but_counted():
    plan = WindowPlan(5, 2, None)
    assert taken(plan, 60, [(50, Window(1, 40, 2))]) == [(0, 5, 2)]
    assert plan.number == 2


def test_requested_window_leaves_regular_ones_where_they_are():
    plan = WindowPlan(5, 2, 100)
    for step in range(1, 11):
        plan.take(step)
    window = plan.place(10, 5, 3)
    assert window == Window(1, 15, 3)
    plan.announce(window._replace(request="me"))
    assert [found for step in range(11, 220) if (found := plan.take(step)) and found.step == step] == [
        Window(1, 15, 3, True, "me"), Window(2, 105, 2), Window(3, 205, 2)
    ]  # fmt: skip


def test_request_waits_for_a_regular_window_that_is_near():
    plan = WindowPlan(5, 2, 100)
    assert plan.place(1, 10, 3) is None
    for step in range(1, 7):
        plan.take(step)
    assert plan.place(6, 10, 3) == Window(1, 16, 3)


def test_request_takes_the_place_of_a_regular_window_where_there_is_no_room_between_them():
    plan = WindowPlan(5, 2, 10)
    for step in range(1, 8):
        plan.take(step)
    window = plan.place(7, 30, 5)
    assert window == Window(4, 45, 5)
    assert taken(plan, 70, [(8, window._replace(request="me"))]) == [
        (1, 15, 2), (2, 25, 2), (3, 35, 2), (4, 45, 5), (5, 55, 2), (6, 65, 2)
    ]  # fmt: skip


def test_nothing_follows_once_windows_are_switched_off_until_they_are_switched_on():
    plan = WindowPlan(5, 2, 10)
    off, on = Window(2, 22, 0, goes_on=False), Window(2, 50, 2)
    found = taken(plan, 65, [(18, off), (40, on)])
    assert found == [(0, 5, 2), (1, 15, 2), (2, 50, 2), (3, 60, 2)]


@given(st.data())
def test_ranks_that_hear_in_time_take_the_same_windows(data):
    every = data.draw(st.sampled_from([None, 7, 40, 100]))
    leader = WindowPlan(5, 2, every)
    asked = sorted(data.draw(st.sets(st.integers(6, 300), max_size=6)))
    ahead = data.draw(st.integers(3, 20))
    announcements = []
    mine = []
    for step in range(1, 500):
        window = leader.take(step)
        if window is not None:
            mine.append(window)
        if asked and step >= asked[0]:
            placed = leader.place(step, ahead, data.draw(st.integers(1, 5)))
            if placed is not None:
                leader.announce(placed._replace(request="me"))
                announcements.append((step, placed._replace(request="me")))
                asked.pop(0)
    delays = [data.draw(st.integers(0, ahead - 1)) for _ in announcements]
    heard = [(step + delay, window) for (step, window), delay in zip(announcements, delays)]
    other = WindowPlan(5, 2, every)
    assert taken(other, 499, heard) == [(w.number, w.step, w.steps) for w in mine]
    assert [w.number for w in mine] == list(range(len(mine)))


# What windows cost. Times are in ns.


def after_a_window(own=1000, inside=(120, 130), after=150, plain=100, share=0.01, least=10):
    budget = Budget(share, least)
    for _ in range(5):
        budget.step(plain)
    budget.opened(own // 2)
    for duration in inside:
        budget.step(duration)
    budget.closed(own // 2)
    budget.step(after)
    return budget


def test_period_makes_up_for_all_that_a_window_costs():
    budget = after_a_window()
    for _ in range(SETTLED):
        assert budget.period() is None
        budget.step(100)
    cost = 1000 + 20 + 30 + 50
    assert budget.period() == math.ceil(cost / 0.01 / 100)


@pytest.mark.parametrize(("own", "least"), [(10, 10), (10, 500)])
def test_cheap_windows_keep_the_least_distance(own, least):
    budget = after_a_window(own=own, inside=(100, 100), after=100, least=least)
    for _ in range(SETTLED):
        budget.step(100)
    assert budget.period() == max(least, math.ceil(own / 0.01 / 100))


def test_one_expensive_window_of_three_does_not_count():
    budget = after_a_window(own=1000, inside=(100, 100), after=100)
    for own in (90_000, 1000):
        for _ in range(SETTLED):
            budget.step(100)
        budget.opened(own)
        budget.step(100)
        budget.step(100)
        budget.closed(0)
        budget.step(100)
    for _ in range(SETTLED):
        budget.step(100)
    assert budget.period() == 1000


def test_nothing_is_decided_while_a_window_is_open():
    budget = Budget(0.01, 10)
    for _ in range(30):
        budget.step(100)
    assert budget.period() == 10
    budget.opened(5)
    budget.step(100)
    assert budget.period() is None


def test_step_of_a_host_that_runs_ahead_of_its_device_is_the_mean_over_its_waits():
    budget = Budget(0.01, 10)
    for duration in [90_000] * WARM_UP + [10, 10, 10, 10, 10, 10, 10, 10, 10, 410] * 5:
        budget.step(duration)
    assert (budget.step_ns, budget.hurried_ns) == (50, 10)
    budget.opened(1000)
    budget.step(50)
    budget.closed(1000)
    for duration in [50] + [10, 10, 10, 10, 10, 10, 10, 10, 10, 410] * (SETTLED // 10):
        budget.step(duration)
    assert budget.period() == math.ceil(2000 / 0.01 / 50)
