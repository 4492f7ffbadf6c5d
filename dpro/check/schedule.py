"""Which hosts exchange with which, and when: each pair once, in rounds of ever larger groups.

In: a number of hosts. Out: rounds of steps of disjoint pairs. The hosts are halved, and the halves halved,
until each is alone; a round takes the groups of one such level, the smallest first, and each host of one half
exchanges with each host of the other. So there are log2(N) rounds and N - 1 steps, and all hosts are busy in
each. Hosts that lie together (in the order they are given in) exchange with hosts that are equally far in the
same round, which makes them comparable. Fewer steps cannot do: a link that is slow shows only at the full
rate of both its ends, and a host has N - 1 of them.
"""

from __future__ import annotations

from typing import NamedTuple

Pair = tuple[int, int]


class Round(NamedTuple):
    """What goes on at a time.

    Attributes:
        steps: pairs of each step; no host is in two of a step.
        groups: hosts of each group, all of which exchange within it, here or in rounds before.
    """

    steps: list[list[Pair]]
    groups: list[list[int]]


def rounds_of(num_hosts: int) -> list[Round]:
    """The rounds, the smallest groups first."""
    levels: list[list[range]] = []
    level = [range(num_hosts)]
    while any(len(group) > 1 for group in level):
        levels.append(level)
        level = [half for group in level for half in _halves(group)]
    return [_round(groups) for groups in reversed(levels)]


def _halves(group: range) -> list[range]:
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if len(half)]


def _round(groups: list[range]) -> Round:
    split = [_halves(group) for group in groups if len(group) > 1]
    num_steps = max(len(left) for left, _ in split)
    steps = [
        [
            (left[at], right[(at + step) % len(left)])
            for left, right in split
            if step < len(left)
            for at in range(len(left))
            if (at + step) % len(left) < len(right)
        ]
        for step in range(num_steps)
    ]
    return Round(steps, [[*group] for group in groups if len(group) > 1])
