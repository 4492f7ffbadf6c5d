"""What `once` and `kept` have found for one graph holds for all others to which they give it.

Their callers list by hand the columns that a fact follows from. Here, facts that were found for a graph that
differs in any column are computed again, and have to be the same.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.whatif import search_once
from dpro.replay import graph as graphs
from dpro.replay.graph import Graph, once
from dpro.store import open_run
from dpro.verdict.verdict import explain

CHECKED = 10  # of the times that a fact is handed to another graph


def same(one: Any, other: Any) -> bool:
    """Whether two facts are equal, column by column."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, pl.DataFrame):
        return one.equals(other) or one.sort(pl.all()).equals(other.sort(pl.all()))  # groups have no order
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one):
        names = [each.name for each in dataclasses.fields(one) if each.compare]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


def columns_of(graph: Graph) -> list[object]:
    """All that a fact can follow from."""
    known = {"nodes", "edges", "facts"}
    rest = [getattr(graph, each.name) for each in dataclasses.fields(graph) if each.name not in known]
    return [*graph.nodes.columns, *graph.edges.columns, *rest]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow_rank", "h200_slow_host"])
def test_facts_follow_from_the_columns_that_are_listed(name, repository: Path, empty_cache, monkeypatch):
    of: dict[int, tuple[object, list[object]]] = {}  # fact -> itself, and the columns of its graph
    checked: Counter[Hashable] = Counter()
    wrong: set[Hashable] = set()

    def watched(graph: Graph, name: Hashable, columns: Sequence[object], compute: Callable[[], Any]) -> Any:
        value = once(graph, name, columns, compute)
        now = columns_of(graph)
        _, before = of.setdefault(id(value), (value, now))
        differs = any(one is not other for one, other in zip(before, now, strict=True))
        if (
            differs and checked[name] < CHECKED and "kept tables" not in str(name)
        ):  # which fill as they are read
            checked[name] += 1
            if not same(value, compute()):
                wrong.add(name)
        return value

    for module in [module for key, module in sys.modules.items() if key.startswith("dpro.")]:
        if getattr(module, "once", None) is once:
            monkeypatch.setattr(module, "once", watched)
    analysis = Analysis(open_run(repository / "sample_traces" / name))
    explain(analysis)
    search_once(analysis)
    assert graphs.once is watched
    assert len(checked) > 20
    assert not wrong
