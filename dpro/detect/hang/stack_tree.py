"""Stacks of many threads merged into one tree: where they are together, and where they part.

In: stacks of threads of ranks. Out: a tree for each kind of thread, and its lines as text. Threads are of one
kind if their names differ in numbers only. Nothing here says which place is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpro.words import ranks_in_words, shortened

MAIN = "main"  # begins the names of main threads, in any case
_INSTALLED = re.compile(r"^.*(-packages|/lib/python[\d.]+)/")  # what comes before the name of a package
_NO_LINE = re.compile(r"^.*/([^/ ]+):0 ")  # a library of C without lines: its name is enough
_LONGEST = 120  # characters of a call: names of templates of C++ have thousands
_NUMBER = re.compile(r"\b0x[0-9a-f]+\b|\d+")
_INDENT = "  "


class StackedThread(NamedTuple):
    """A thread of a rank.

    Attributes:
        calls: `file:line function`, innermost first.
    """

    rank: int
    name: str
    calls: Sequence[str]


@dataclass(frozen=True)
class Branch:
    """Calls that several threads share.

    Attributes:
        calls: outermost first; all threads of the branch are in these.
        ranks: of the threads, sorted.
        num_threads: how many there are.
        branches: where they part, the fewest threads first; none where the last call is the innermost of all.
            Threads that are in no further call are in no branch.
    """

    calls: tuple[str, ...]
    ranks: tuple[int, ...]
    num_threads: int
    branches: tuple[Branch, ...]


def merge_stacks(threads: Iterable[StackedThread]) -> dict[str, Branch]:
    """Merge stacks from their outermost calls on.

    Returns:
        Kind of thread -> its tree, main threads first, then the kinds with the fewest threads.
    """
    kinds: dict[str, list[StackedThread]] = {}
    for thread in threads:
        kinds.setdefault(_NUMBER.sub("N", thread.name), []).append(thread)
    order = sorted(kinds, key=lambda kind: (not kind.lower().startswith(MAIN), len(kinds[kind]), kind))
    return {kind: _merged([(one.rank, tuple(reversed(one.calls))) for one in kinds[kind]]) for kind in order}


def _merged(stacks: Sequence[tuple[int, tuple[str, ...]]]) -> Branch:
    """Merge stacks.

    Args:
        stacks: rank and calls of each thread, outermost first.
    """
    first, *others = (calls for _, calls in stacks)
    shared = 0
    while shared < len(first) and all(
        calls[shared : shared + 1] == first[shared : shared + 1] for calls in others
    ):
        shared += 1
    apart: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for rank, calls in stacks:
        if calls[shared:]:
            apart.setdefault(calls[shared], []).append((rank, calls[shared:]))
    branches = sorted(map(_merged, apart.values()), key=lambda one: (one.num_threads, one.ranks, one.calls))
    ranks = sorted({rank for rank, _ in stacks})
    return Branch(first[:shared], tuple(ranks), len(stacks), tuple(branches))


def lines_of(kind: str, tree: Branch) -> list[str]:
    """Write a tree as text, a call a line, indented below the ranks that are in it."""
    return [f"{kind}, {_who(tree)}", *_lines(tree, 1)]


def _lines(branch: Branch, depth: int) -> Iterator[str]:
    yield from (_INDENT * depth + _in_words(call) for call in branch.calls)
    for part in branch.branches:
        yield f"{_INDENT * (depth + 1)}{_who(part)}"
        yield from _lines(part, depth + 2)


def _in_words(call: str) -> str:
    return shortened(_NO_LINE.sub(r"\1 ", _INSTALLED.sub("", call)), _LONGEST)


def _who(branch: Branch) -> str:
    """The ranks of a branch, with the number of threads where some rank has several."""
    ranks = ranks_in_words(branch.ranks)
    return ranks if branch.num_threads == len(branch.ranks) else f"{ranks} ({branch.num_threads} threads)"
