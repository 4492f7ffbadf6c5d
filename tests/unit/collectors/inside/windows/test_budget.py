"""Windows keep to their budget, also where what one costs does not end. Times are in ns; no clock is read."""

import math
import random
from statistics import fmean
from typing import NamedTuple

import pytest

from dpro.collectors.inside.budget import (
    BLOCK,
    GUESSED_NS,
    MIN_BEFORE,
    MIN_SLOW_BLOCKS,
    REMEMBERED,
    SETTLED,
    WARM_UP,
    Budget,
    Sample,
    WindowsChange,
    longer_ns,
    spread,
)

# By hand.


def steps(budget, count, duration):
    """What is said at which of these steps, of equal duration."""
    said = [(step, budget.step(duration)) for step in range(1, count + 1)]
    return [(step, change) for step, change in said if change is not None]


def window(budget, own=0, inside=(100, 100), after=100):
    budget.opened(own // 2)
    for duration in inside:
        budget.step(duration)
    budget.closed(own - own // 2)
    budget.step(after)


def after_a_window(own=1000, inside=(120, 130), after=150, plain=100, share=0.01, before=5):
    budget = Budget(share, 10)
    steps(budget, before, plain)
    window(budget, own, inside, after)
    return budget


def test_first_window_that_no_person_asked_for_waits_until_what_it_may_cost_is_paid():
    budget = Budget(0.01, 10)
    steps(budget, 1000, GUESSED_NS // 100)
    assert budget.wait_ns(0) == 90 * GUESSED_NS
    assert budget.wait_ns(9000) == 0


def test_one_more_waits_for_as_long_as_it_is_not_affordable():
    budget = after_a_window()
    assert budget.wait_ns(10**9) == SETTLED * 100
    steps(budget, SETTLED, 100)
    wait = budget.wait_ns(7)
    assert not budget.affords(7 + wait // 100 - 1)
    assert budget.affords(7 + math.ceil(wait / 100))
    steps(budget, math.ceil(wait / 100), 100)
    assert budget.wait_ns(7) == 0


def test_none_is_ever_paid_where_windows_have_stopped():
    budget = after_a_window(before=REMEMBERED + WARM_UP)
    assert [change.stops for _, change in steps(budget, BLOCK * (MIN_SLOW_BLOCKS + 1), 200)] == [True]
    assert budget.wait_ns(10**9) is None


def test_next_window_waits_until_it_and_the_first_are_paid():
    budget = after_a_window()
    for _ in range(SETTLED):
        assert not budget.affords(10**9)
        budget.step(100)
    cost, elapsed = 1000 + 20 + 30 + 50, 5 * 100 + 1000 + 120 + 130 + 150 + SETTLED * 100
    later = math.ceil((2 * cost / 0.01 - elapsed) / 100)
    assert not budget.affords(later - 1)
    assert budget.affords(later)
    steps(budget, later - 1, 100)
    assert not budget.affords(0)
    budget.step(100)
    assert budget.affords(0)


def test_what_the_recorder_takes_at_ends_of_steps_is_paid_by_the_same_budget():
    budget = Budget(0.01, 10)
    for _ in range(5):
        budget.step(100, own_ns=20)
    window(budget, 1000, (120, 130), 150)
    steps(budget, SETTLED, 100)
    cost, elapsed = 1000 + 20 + 30 + 50, 5 * 100 + 1000 + 120 + 130 + 150 + SETTLED * 100
    later = math.ceil(((2 * cost + 5 * 20) / 0.01 - elapsed) / 100)
    assert budget.affords(later)
    assert not budget.affords(later - 1)


def test_no_window_follows_where_ends_of_steps_take_more_than_the_budget():
    budget = after_a_window(own=0)
    for _ in range(100_000):
        budget.step(100, own_ns=2)
    assert not budget.affords(0)
    assert budget.wait_ns(0) > 0


def test_window_that_cost_nothing_is_paid_once_that_is_known():
    budget = after_a_window(own=0, inside=(100, 100), after=100)
    steps(budget, SETTLED - 1, 100)
    assert not budget.affords(0)
    budget.step(100)
    assert budget.affords(0)


def test_one_expensive_window_of_three_is_paid_for_and_not_expected_again():
    budget = after_a_window(own=1000, inside=(100, 100), after=100)
    for own in (90_000, 1000):
        steps(budget, SETTLED, 100)
        window(budget, own)
    steps(budget, SETTLED, 100)
    assert budget.usual_ns == 1000
    elapsed = 92_000 + (5 + 3 * 3 + 3 * SETTLED) * 100
    later = math.ceil((92_000 + 1000) / 0.01 - elapsed) // 100
    assert budget.affords(later)
    assert not budget.affords(later - 1)


def test_windows_that_follow_at_once_are_paid_for_all_the_same():
    budget = after_a_window(own=1000, inside=(100, 100), after=100)
    window(budget, 3000)
    steps(budget, SETTLED, 100)
    elapsed = 4000 + (5 + 2 * 3 + SETTLED) * 100
    later = (4000 + 2000) * 100 - elapsed
    assert budget.affords(math.ceil(later / 100))
    assert not budget.affords(math.ceil(later / 100) - 1)


def test_nothing_is_decided_while_a_window_is_open():
    budget = Budget(0.01, 10)
    steps(budget, 30, 100)
    assert budget.affords(0)
    budget.opened(5)
    budget.step(100)
    assert not budget.affords(10**9)


def test_step_of_a_host_that_runs_ahead_of_its_device_is_the_mean_over_its_waits():
    budget = Budget(0.01, 10)
    hurried = [10, 10, 10, 10, 10, 10, 10, 10, 10, 410]
    for duration in [90_000] * WARM_UP + hurried * 5:
        budget.step(duration)
    assert (budget.step_ns, budget.median_step_ns) == (50, 10)
    window(budget, 2000, [50], 50)
    for duration in hurried * (SETTLED // 10):
        budget.step(duration)
    assert budget.usual_ns == 2000


def test_same_waits_of_a_host_that_runs_ahead_are_no_lasting_cost():
    budget = Budget(0.01, 10)
    hurried = [10, 10, 10, 10, 10, 10, 10, 10, 10, 410]
    for duration in [50] * WARM_UP + hurried * 5:
        budget.step(duration)
    window(budget, 0, [50], 50)
    assert [each for duration in hurried * 500 if (each := budget.step(duration))] == []
    assert budget.affords(0)


def test_steps_that_stay_slower_end_automatic_windows_and_that_is_said_once():
    budget = after_a_window(own=0, inside=(100, 100), after=100, before=WARM_UP + REMEMBERED)
    slow = MIN_SLOW_BLOCKS * BLOCK
    elapsed = (WARM_UP + REMEMBERED + 3) * 100 + slow * 127
    assert steps(budget, 20_000, 127) == [
        (slow, WindowsChange(True, slow * 27, elapsed, pytest.approx(0.27)))
    ]
    assert not budget.affords(10**9)


def test_slow_spell_that_ends_is_paid_for_and_then_windows_go_on():
    budget = after_a_window(0, (100, 100), 100, share=0.1, before=WARM_UP + REMEMBERED)
    assert MIN_SLOW_BLOCKS * BLOCK == 200
    elapsed = (WARM_UP + REMEMBERED + 3) * 100 + 200 * 150
    assert elapsed == 35_600
    assert steps(budget, 200, 150) == [(200, WindowsChange(True, 10_000, elapsed, 0.5))]
    # 10,000 are a tenth of 100,000, which 644 more steps make whole; a block ends at the 650th.
    assert steps(budget, 649, 100) == []
    assert not budget.affords(10**6)
    assert steps(budget, 1, 100) == [(1, WindowsChange(False, 10_000, 100_600, 0.5))]
    assert budget.affords(0)
    assert steps(budget, 5000, 100) == []


def test_slow_steps_that_the_budget_has_room_for_stop_nothing():
    budget = after_a_window(own=0, inside=(100, 100), after=100, share=0.3, before=WARM_UP + REMEMBERED)
    assert steps(budget, 5000, 127) == []
    assert budget.affords(0)


def test_steps_that_became_faster_pay_for_nothing():
    budget = after_a_window(0, (100, 100), 100, share=0.1, before=WARM_UP + REMEMBERED)
    steps(budget, 1000, 50)
    [(_, change)] = steps(budget, 1000, 200)
    window_cost = 3 * (100 - (40 * 100 + SETTLED * 50) // REMEMBERED)
    assert change.spent_ns == window_cost + MIN_SLOW_BLOCKS * BLOCK * 100


@pytest.mark.parametrize("known", [MIN_BEFORE - 1, MIN_BEFORE])
def test_few_steps_before_the_first_window_are_compared_with_nothing(known):
    budget = after_a_window(own=0, inside=(100, 100), after=100, before=WARM_UP + known)
    assert bool(steps(budget, 1000, 200)) == (known == MIN_BEFORE)


def test_only_steps_before_the_first_window_are_compared_with():
    budget = after_a_window(0, (100, 100), 100, before=WARM_UP + REMEMBERED)
    steps(budget, 60, 127)
    window(budget)
    steps(budget, 60, 127)
    window(budget)
    [(_, change)] = steps(budget, 20_000, 127)
    assert change.longer == pytest.approx(0.27)


def test_difference_of_means_counts_from_some_standard_errors_on():
    before, since = Sample.of([90, 110] * 25), Sample.of([100, 120] * 25)
    error = math.sqrt(2 * 5000 / 98 * (2 / 50))
    assert (before.mean_ns, before.squares, since.mean_ns) == (100, 5000, 110)
    assert error == pytest.approx(2.0203, abs=1e-4)
    assert longer_ns(since, before, 0) == 10
    assert longer_ns(since, before, 10 / 4.4) == 0
    assert longer_ns(before, since, 0) == 0
    assert longer_ns(since._replace(mean_ns=109), before, 0) == 0


def test_spread_is_that_of_most_blocks():
    assert spread([100, 100, 100, 900]) == 0
    assert spread([100, 900, 900, 900]) == 0
    assert spread([90, 100, 110, 100, 90]) == pytest.approx(14.826)


# Simulated jobs. A window costs as much as a few steps, and all steps after the first one take longer.

STEP, OWN = 20_000_000, 4_000_000


class Outcome(NamedTuple):
    windows: list[int]
    changes: list[tuple[int, WindowsChange]]
    share: float  # of the time that windows took, as the simulation knows it
    late: list[float]  # the same at each window but the first, with that window, as the budget knows it


def varying(count, noise, seed):
    draw = random.Random(seed)
    return [STEP * max(0.05, draw.gauss(1, noise)) for _ in range(count)]


def train(durations, lasting=0.0, first=60, share=0.01, own=OWN, detaches=False):
    """Take windows of two steps, each announced five steps ahead where one is due, as rank 0 does.

    Args:
        lasting: how much longer steps take after a window, until CUPTI is detached.
        detaches: whether it is: once steps are slower, and from then on after each window.
    """
    budget, upcoming, latest, left, after = Budget(share, 200), first, 0, 0, False
    found = Outcome([], [], 0, [])
    is_attached = detaches_each = False
    spent = elapsed = 0.0
    for step, plain in enumerate(durations, 1):
        taken = plain * (1 + lasting * is_attached) + STEP * (1.0 * bool(left) + 0.5 * after)
        after = False
        spent, elapsed = spent + taken - plain, elapsed + taken
        change = budget.step(int(taken))
        if change is not None:
            found.changes.append((step, change))
        if left:
            left -= 1
            if not left:
                budget.closed(own)
                spent, elapsed, after = spent + own, elapsed + own, True
                is_attached = not detaches_each
        if detaches and budget.is_slower and not left:
            is_attached, detaches_each = False, True
        if step == upcoming:
            if found.windows:
                found.late.append((budget._spent_ns + budget.usual_ns) / budget._elapsed_ns)
            budget.opened(own)
            spent, elapsed, left, latest = spent + own, elapsed + own, 2, step
            found.windows.append(step)
            is_attached = True
            upcoming = None
        is_asked = upcoming is None and not left and step % 50 == 0
        if is_asked and step + 5 >= latest + budget.least and budget.affords(5):
            upcoming = step + 5
    return found._replace(share=spent / elapsed)


@pytest.mark.parametrize("seed", range(3))
def test_windows_go_on_where_their_cost_ends_and_cost_their_share(seed):
    found = train(varying(20_000, 0.2, seed))
    assert len(found.windows) >= 40
    assert found.windows[1] - found.windows[0] < 2 * 100 * 3
    assert found.changes == []
    assert max(found.late) <= 0.0101  # it was announced five steps earlier
    assert found.share <= 0.0105  # the steps of a window vary, too, and so does what is known of its cost


@pytest.mark.parametrize(
    ("lasting", "most"), [(0.0, 0.0105), (0.27, 0.0105), (0.38, 0.0105), (0.01, 0.0205)]
)  # no fifty steps that vary by a fifth show one percent, which then comes on top
def test_windows_go_on_and_cost_their_share_where_their_lasting_cost_ends_with_cupti(lasting, most):
    found = [train(varying(20_000, 0.2, seed), lasting, detaches=True) for seed in range(6)]
    assert all(len(each.windows) >= 40 and each.changes == [] for each in found)
    assert fmean(each.share for each in found) <= most
    # Fifty steps that take 27% longer do not always show it: each fifty more are 0.07% of the time.
    assert max(each.share for each in found) <= most + 0.27 * 50 / 20_000


@pytest.mark.parametrize("lasting", [0.27, 0.38])
@pytest.mark.parametrize("seed", range(3))
def test_exactly_one_automatic_window_where_its_cost_never_ends(lasting, seed):
    found = train(varying(20_000, 0.2, seed), lasting)
    assert found.windows == [60]
    [(step, change)] = found.changes
    assert change.stops
    assert 60 + MIN_SLOW_BLOCKS * BLOCK <= step < 1000
    assert change.longer == pytest.approx(lasting, abs=0.2)


@pytest.mark.parametrize("lasting", [0.27, 0.38])
def test_few_steps_before_the_first_window_are_enough_where_steps_vary_little(lasting):
    for seed in range(10):
        found = train(varying(2000, 0.05, seed), lasting, first=10)
        assert found.windows == [10]
        assert [change.stops for _, change in found.changes] == [True]


@pytest.mark.parametrize(
    ("seeds", "count"), [(30, 2000), pytest.param(1000, 5000, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("first", [10, 60])
def test_no_job_is_stopped_by_chance(seeds, count, first):
    found = [train(varying(count, 0.2, seed), first=first) for seed in range(seeds)]
    assert sum(len(each.changes) for each in found) == 0
    assert min(len(each.windows) for each in found) > 1


def test_job_with_rare_long_steps_is_not_stopped():
    for seed in range(20):
        draw = random.Random(seed)
        durations = [STEP * (10 if draw.random() < 0.02 else draw.gauss(1, 0.02)) for _ in range(2000)]
        assert train(durations).changes == []


def test_few_jobs_that_are_faster_and_slower_for_hundreds_of_steps_are_stopped():
    stopped = []
    for seed in range(20):
        draw = random.Random(seed)
        wander, durations = draw.gauss(0, 0.03), []
        for _ in range(5000):
            wander = wander * (1 - 1 / 500) + draw.gauss(0, 0.03 * math.sqrt(2 / 500))
            durations.append(STEP * (1 + wander) * draw.gauss(1, 0.05))
        stopped.append(bool(train(durations).changes))
    assert fmean(stopped) <= 0.1


def test_slow_spell_of_a_job_that_varies_delays_windows():
    durations = varying(20_000, 0.2, 7)
    spell = [each * 1.5 if 2000 <= step < 2500 else each for step, each in enumerate(durations)]
    plain, slowed = train(durations, share=0.05), train(spell, share=0.05)
    assert plain.changes == []
    assert [change.stops for _, change in slowed.changes] == [True, False]
    (stop, _), (resume, _) = slowed.changes
    assert 2000 + (MIN_SLOW_BLOCKS - 1) * BLOCK <= stop < 2500 + BLOCK
    assert resume > 2500
    assert not [each for each in slowed.windows if stop + 5 < each < resume]
    assert max(slowed.windows) > 19_000
    assert max(slowed.late) <= 0.0505
