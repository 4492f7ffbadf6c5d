"""All ranks take the same windows."""

from hypothesis import given
from hypothesis import strategies as st

from dpro.collectors.inside.plan import Window, WindowPlan


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


def test_without_a_first_window_only_announced_ones_are_taken():
    plan = WindowPlan(None, 2, None)
    assert plan.place(20, 5, 3) == Window(0, 25, 3)
    assert taken(plan, 100, [(20, Window(0, 60, 3))]) == [(0, 60, 3)]
    assert plan.upcoming is None


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
