"""Stacks of many threads merged into one tree, which shows the calls they share and where they part.

Takes stacks of threads of ranks. Returns a tree for each kind of thread, and its lines as text; threads are
of one kind if their names differ in numbers only. Does not judge which branch is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpro.words import ranks_in_words, shortened

MAIN = "main"  # prefix of the names of main threads, in upper or lower case
_INSTALLED = re.compile(r"^.*(-packages|/lib/python[\d.]+)/")  # the path before the name of a package
_NO_LINE = re.compile(r"^.*/([^/ ]+):0 ")  # a C library without line numbers: its name is enough
_LONGEST = 120  # characters of a call: names of C++ templates have thousands
_NUMBER = re.compile(r"\b0x[0-9a-f]+\b|\d+")
_INDENT = "  "


class StackedThread(NamedTuple):
    """A thread of a rank, with its stack.

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
        calls: calls that all threads of the branch share, outermost first.
        ranks: ranks of the threads, sorted.
        num_threads: number of threads.
        branches: where the threads part, fewest threads first; threads without further calls are in none.
    """

    calls: tuple[str, ...]
    ranks: tuple[int, ...]
    num_threads: int
    branches: tuple[Branch, ...]


def merge_stacks(threads: Iterable[StackedThread]) -> dict[str, Branch]:
    """Merge stacks, starting at their outermost calls.

    Returns:
        Kind of thread -> its tree: main threads first, then the kinds with the fewest threads.
    """
    kinds: dict[str, list[StackedThread]] = {}
    for thread in threads:
        kinds.setdefault(_NUMBER.sub("N", thread.name), []).append(thread)
    order = sorted(kinds, key=lambda kind: (not kind.lower().startswith(MAIN), len(kinds[kind]), kind))
    return {kind: _merged([(one.rank, tuple(reversed(one.calls))) for one in kinds[kind]]) for kind in order}


def _merged(stacks: Sequence[tuple[int, tuple[str, ...]]]) -> Branch:
    """Merge stacks of one kind.

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
    """Return a tree as text, one call per line, indented below the ranks that are in it."""
    return [f"{kind}, {_who(tree)}", *_lines(tree, 1)]


def _lines(branch: Branch, depth: int) -> Iterator[str]:
    yield from (
        _INDENT * depth + shortened(_NO_LINE.sub(r"\1 ", _INSTALLED.sub("", call)), _LONGEST)
        for call in branch.calls
    )
    for part in branch.branches:
        yield f"{_INDENT * (depth + 1)}{_who(part)}"
        yield from _lines(part, depth + 2)


def _who(branch: Branch) -> str:
    """Return the ranks of a branch, with the number of threads if some rank has several."""
    ranks = ranks_in_words(branch.ranks)
    return ranks if branch.num_threads == len(branch.ranks) else f"{ranks} ({branch.num_threads} threads)"
