"""How fast communications are that share links: max-min fairness by progressive filling, as time goes on.

In: what each communication puts on links, and what links carry. Out: rates; and, given when communications
begin and how much they have to move, when they end. All rates grow evenly until a link is full; those that
cross it stay, the others grow on (Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2). A
ring is as fast as its slowest flow, so a communication is one thing that loads several links, in the
proportion of its flows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.arrays import Floats
from dpro.replay.cost.fabric.flows import Load
from dpro.replay.engine import compiled

FULL = 1e-9  # share of a link's capacity below which nothing is left


@compiled
def _fill(
    running: Any, indptr: Any, links: Any, share: Any, capacity: Any, left: Any, growing: Any, rate: Any
) -> None:
    # `growing` [L] holds zeros, before and after; `left` [L] is scratch: most links are crossed by nothing.
    size = 0
    for call in running:
        size += indptr[call + 1] - indptr[call]
    touched = np.empty(size, np.int64)
    count = 0
    for call in running:
        rate[call] = -1.0
        for entry in range(indptr[call], indptr[call + 1]):
            link = links[entry]
            if growing[link] == 0.0:
                touched[count] = link
                count += 1
                left[link] = capacity[link]
            growing[link] += share[entry]
    remaining = running.size
    level = 0.0
    while remaining > 0:
        step = np.inf
        for link in touched[:count]:
            if growing[link] > FULL:
                step = min(step, left[link] / growing[link])
        if step == np.inf:  # what is left crosses no link at all
            for call in running:
                if rate[call] < 0:
                    rate[call] = np.inf
            break
        level += step
        for link in touched[:count]:
            left[link] -= step * growing[link]
        for call in running:
            if rate[call] >= 0:
                continue
            for entry in range(indptr[call], indptr[call + 1]):
                if left[links[entry]] <= capacity[links[entry]] * FULL:
                    rate[call] = level
                    remaining -= 1
                    break
            if rate[call] >= 0:  # what it does not take of other links is free for the next round
                for entry in range(indptr[call], indptr[call + 1]):
                    growing[links[entry]] -= share[entry]
    for link in touched[:count]:
        growing[link] = 0.0


def max_min_rates(load: Load, capacity: Floats) -> Floats:
    """[C] rate of each communication while all run: bytes that its busiest rank sends per unit of time.

    Args:
        capacity: [L] of each link, more than 0, bytes per unit of time.
    """
    count = load.indptr.size - 1
    rate = np.zeros(count)
    running = np.arange(count)
    scratch = np.zeros(capacity.size), np.zeros(capacity.size)
    _fill(running, load.indptr, load.links, load.share, capacity, *scratch, rate)
    return rate


@compiled
def _flow(
    order: Any, begin: Any, work: Any, indptr: Any, links: Any, share: Any, capacity: Any, end: Any
) -> None:
    left = work.copy()
    room, growing = np.zeros(capacity.size), np.zeros(capacity.size)
    rate = np.zeros(work.size)
    running = np.zeros(work.size, np.int64)
    count, coming = 0, 0
    now = 0.0
    while coming < order.size or count > 0:
        ends = np.inf
        for place in range(count):
            call = running[place]
            if rate[call] == np.inf or left[call] <= 0:
                ends = now
            else:
                ends = min(ends, now + left[call] / rate[call])
        begins = begin[order[coming]] if coming < order.size else np.inf
        upto = min(ends, begins)
        for place in range(count):
            if rate[running[place]] != np.inf:
                left[running[place]] -= rate[running[place]] * (upto - now)
        now = upto
        kept = 0
        for place in range(count):
            call = running[place]
            done = rate[call] == np.inf or left[call] <= 1e-9 * work[call]
            if ends <= begins and done:
                end[call] = now
            else:
                running[kept] = call
                kept += 1
        count = kept
        while coming < order.size and begin[order[coming]] <= now:
            running[count] = order[coming]
            count += 1
            coming += 1
        _fill(running[:count], indptr, links, share, capacity, room, growing, rate)


def ends_of(begin: Floats, work: Floats, load: Load, capacity: Floats) -> Floats:
    """[C] when each communication ends.

    Args:
        begin: [C] when each begins.
        work: [C] bytes that the busiest rank of each sends.
        capacity: [L] of each link, bytes per unit of time.
    """
    end = begin.astype(np.float64)
    order = np.argsort(begin, kind="stable")
    _flow(
        order, begin.astype(np.float64), work.astype(np.float64), load.indptr, load.links, load.share,
        capacity, end,
    )  # fmt: skip
    return end


@compiled
def _moved(
    events: Any, begins: Any, call_of: Any, indptr: Any, links: Any, share: Any, capacity: Any, moved: Any
) -> None:
    rate = np.zeros(moved.size)
    left, growing = np.zeros(capacity.size), np.zeros(capacity.size)
    running = np.zeros(moved.size, np.int64)
    count = 0
    now = 0.0
    for row in range(events.size):
        if count > 0 and events[row] > now:
            _fill(running[:count], indptr, links, share, capacity, left, growing, rate)
            for place in range(count):
                moved[running[place]] += rate[running[place]] * (events[row] - now)
        now = events[row]
        if begins[row]:
            running[count] = call_of[row]
            count += 1
        else:
            kept = 0
            for place in range(count):
                if running[place] != call_of[row]:
                    running[kept] = running[place]
                    kept += 1
            count = kept


def moved_by(begin: Floats, end: Floats, load: Load, capacity: Floats) -> Floats:
    """[C] bytes that the busiest rank of each communication has sent when it ends.

    Args:
        begin, end: [C] when each runs; each crosses a link.
        capacity: [L] of each link, bytes per unit of time.
    """
    events = np.concatenate([begin, end]).astype(np.float64)
    begins = np.repeat([True, False], begin.size)
    order = np.lexsort((begins, events))
    moved = np.zeros(begin.size)
    _moved(
        events[order], begins[order], np.tile(np.arange(begin.size), 2)[order], load.indptr, load.links,
        load.share, capacity, moved,
    )  # fmt: skip
    return moved
