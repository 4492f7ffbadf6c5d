"""What `once` has found for one graph holds for all graphs from which the same was read, and for no other."""

from __future__ import annotations

import ast
import dataclasses
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.whatif import search_once
from dpro.errors import Unanswerable
from dpro.replay import graph as graphs
from dpro.replay.graph import Fact, Graph, observe, once
from dpro.store import open_run
from dpro.verdict.verdict import explain
from tests.builders import tiny_graph
from tests.sources import ROOT, modules

NODES = ["duration", "kind", "rank", "step"]


def read(graph: Graph, name: str) -> list[str]:
    """The columns that a cached value was computed from."""
    return list(graph.facts[name].columns)


def changed(graph: Graph, column: str) -> Graph:
    """The graph with other numbers in a column of its nodes."""
    nodes = dataclasses.replace(graph.nodes, **{column: getattr(graph.nodes, column) + 1})
    return dataclasses.replace(graph, nodes=nodes)


def total(graph: Graph, *columns: str) -> int:
    """The sum of some columns of the nodes, each read once and kept."""

    def compute(graph: Graph) -> int:
        if len(columns) == 1:
            return int(getattr(graph.nodes, columns[0]).sum())
        return sum(total(graph, column) for column in columns)

    return once(graph, columns, compute)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(NODES), st.permutations(NODES)), max_size=8))
def test_a_value_is_what_it_would_be_without_a_cache(steps):
    family = [tiny_graph([3, 4], [(0, 1, 0)])]
    for parent, column, order in steps:
        family.append(changed(family[parent % len(family)], column))
        for graph in family:
            asked = order[: 1 + parent]
            assert total(graph, *asked) == sum(int(getattr(graph.nodes, name).sum()) for name in asked)


def test_a_value_holds_where_only_other_columns_differ():
    graph, asked = tiny_graph([3, 4], [(0, 1, 0)]), []

    def compute(graph: Graph) -> int:
        asked.append(1)
        return len(graph.names) + int(graph.edges.target.sum())

    for each in (graph, graph.with_durations(np.array([5, 5])), graph.with_lags(np.array([7]))):
        once(each, "ends", compute)
    assert (len(asked), read(graph, "ends")) == (1, ["edges.target", "names"])
    once(dataclasses.replace(graph, names=("a", "b")), "ends", compute)
    assert len(asked) == 2


def test_sizes_are_no_reading_of_durations_or_lags():
    graph = tiny_graph([3, 4], [(0, 1, 0)])
    assert once(graph, "sizes", lambda graph: (graph.num_nodes, graph.num_edges, graph.ranks)) == (2, 1, [0])
    assert read(graph, "sizes") == ["edges.source", "nodes.measured_start", "nodes.rank"]


def test_what_a_value_was_computed_from_counts_for_those_computed_from_it():
    graph = tiny_graph([3, 4], [(0, 1, 0)])
    for outer in ("computed with", "cached before"):
        assert once(graph, outer, lambda graph: total(graph, "duration")) == 7
        assert read(graph, outer) == ["nodes.duration"]
        assert (
            once(graph.with_durations(np.array([5, 5])), outer, lambda graph: total(graph, "duration")) == 10
        )


def test_what_was_read_before_an_error_counts():
    def refuse(graph: Graph) -> int:
        raise Unanswerable(f"{graph.nodes.kind.sum()}")

    def compute(graph: Graph) -> str:
        try:
            return str(once(graph, "refused", refuse))
        except Unanswerable as error:
            return str(error)

    graph = tiny_graph([3, 4], [(0, 1, 0)])
    once(graph, "reason", compute)
    assert read(graph, "reason") == ["nodes.kind"]


def test_what_is_given_beside_the_graph_is_compared_by_identity():
    graph, rows = tiny_graph([3, 4], [(0, 1, 0)]), [1, 2]
    assert once(graph, "given", lambda _: len(rows), (rows,)) == 2
    rows.append(3)
    assert once(graph, "given", lambda _: len(rows), (rows,)) == 2
    assert once(graph, "given", lambda _: len(rows), (rows.copy(),)) == 3


def test_a_graph_made_of_the_view_is_a_plain_one_and_what_is_read_of_it_counts():
    graph, made = tiny_graph([3, 4], [(0, 1, 0)]), []

    def compute(graph: Graph) -> int:
        assert isinstance(graph, Graph)
        assert graph.__class__ is Graph
        longer = graph.with_durations(np.array([5, 5]))
        made.append(type(longer))
        return total(longer, "rank") + int(longer.edges.lag[0])

    once(graph, "longer", compute)
    assert made == [Graph]
    names = [f"nodes.{each.name}" for each in dataclasses.fields(graph.nodes) if each.name != "duration"]
    rest = {each.name for each in dataclasses.fields(graph)} - {"nodes", "edges", "facts"}
    assert {*read(graph, "longer")} == {*names, *rest, "edges.lag"}


# How the product calls it.


def local_names(function: ast.AST) -> set[str]:
    """Names that a function binds itself: its arguments, and what it assigns, defines or loops over."""
    names = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    names |= {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and is_bound(each)}
    inner = [
        each for each in ast.walk(function) if isinstance(each, ast.FunctionDef) and each is not function
    ]
    return names | {each.name for each in inner}


def is_bound(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def used_names(tree: ast.AST) -> set[str]:
    """Names that an expression or a function uses and does not bind."""
    names = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and not is_bound(each)}
    return names - local_names(tree)


def not_declared(function: ast.FunctionDef, call: ast.Call) -> set[str]:
    """Names of a function that the computation of a fact uses, and that are in neither its name nor `given`.

    A name of either stands for what was assigned to it, but never for the graph itself.
    """
    graph = [] if isinstance(call.func, ast.Attribute) else [call.args[0]]
    name, compute, *given = [*call.args[len(graph) :], *(each.value for each in call.keywords)]
    of_graph = used_names(graph[0] if graph else call.func)
    inner = {each.name: each for each in ast.walk(function) if isinstance(each, ast.FunctionDef)}
    assigned: dict[str, set[str]] = {}
    for each in ast.walk(function):
        if isinstance(each, ast.Assign):
            assigned |= dict.fromkeys(local_names(each), used_names(each.value))
    direct = set().union(*map(used_names, (name, *given)))
    behind = set().union(*(assigned.get(each, set()) for each in direct)) - of_graph
    used, left = set[str](), used_names(compute) & local_names(function)
    while left:
        each = left.pop()
        used.add(each)
        if each in inner:
            left |= (used_names(inner[each]) & local_names(function)) - used
    return {each for each in used if each not in inner} - direct - behind


def facts_in(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
    """Each call of `once` or `kept` with the outermost function that it is in."""
    in_class = [each for outer in ast.walk(tree) if isinstance(outer, ast.ClassDef) for each in outer.body]
    for function in [*tree.body, *in_class]:
        for each in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] in ("once", "kept"):
                yield function, each


MEMOISERS = {"once", "kept"}  # which are given what to compute
DECORATORS = {"computed_once", "kept_as"}
FROM = ("dpro.replay.graph", "dpro.replay.kept")


def computes_facts(path: Path, tree: ast.AST) -> bool:
    """Whether a module is in `replay`, or imports from there what caches facts."""
    imported = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.module in FROM]
    names = [alias for each in imported for alias in each.names if alias.name in MEMOISERS | DECORATORS]
    assert all(alias.asname is None for alias in names)
    return path.parts[0] == "replay" or bool(names)


def test_a_fact_is_computed_from_the_graph_that_is_passed_in_and_from_what_is_declared() -> None:
    wrong, count = {}, 0
    for path in modules("replay", "dpro", "dashboards"):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for function, call in facts_in(tree) if computes_facts(path, tree) else ():
            if function.name not in MEMOISERS | DECORATORS:
                count += 1
                wrong[f"{path}:{call.lineno}"] = not_declared(function, call)
    assert count > 30
    assert not {place: names for place, names in wrong.items() if names}


def test_a_function_that_is_computed_once_uses_no_names_of_another() -> None:
    top, everywhere = 0, 0
    for path in modules("replay", "dpro", "dashboards"):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for each in ast.walk(tree):
            marks = each.decorator_list if isinstance(each, ast.FunctionDef) else []
            is_cached = any(ast.unparse(mark).partition("(")[0] in DECORATORS for mark in marks)
            everywhere += is_cached
            top += is_cached and each in tree.body
    assert top == everywhere > 30


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("return once(graph, 'a', lambda _: graph.names)", {"graph"}),
        ("return once(graph, 'a', lambda graph: len(rows))", {"rows"}),
        ("return once(graph, 'a', lambda graph: len(rows), (rows,))", set()),
        ("return once(graph, ('a', rows), lambda graph: len(rows))", set()),
        ("nodes = graph.nodes; return once(graph, 'a', lambda _: nodes.rank, (nodes.kind,))", set()),
        ("nodes = graph.nodes; return once(graph, 'a', lambda _: nodes.rank)", {"nodes"}),
        ("all_rows = graph.names; return once(graph, 'a', lambda _: graph.run, (all_rows,))", {"graph"}),
        ("key = ('a', rows); return once(graph, key, lambda _: rows)", set()),
        ("def of(graph): return more()\n def more(): return rows\n return once(graph, 'a', of)", {"rows"}),
        ("return rows.once('a', lambda job: rows.graph)", {"rows"}),
    ],
)  # fmt: skip
def test_what_is_not_declared_is_seen(body, names):
    ((function, call),) = facts_in(ast.parse(f"def fact(graph, rows):\n {body}"))
    assert not_declared(function, call) == names


# Real runs.

CHECKED = 10  # of the times that a fact is handed to another graph


def same(one: Any, other: Any) -> bool:
    """Whether two facts are equal, column by column."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Exception):
        return str(one) == str(other)
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
    fields = {
        name: dataclasses.fields(kind) for name, kind in (("nodes", graphs.Nodes), ("edges", graphs.Edges))
    }
    names = [f"{group}.{each.name}" for group in fields for each in fields[group]]
    names += [each.name for each in dataclasses.fields(Graph) if each.name not in {"nodes", "edges", "facts"}]
    return [attrgetter(name)(graphs.unwatched(graph)) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow_rank", "h200_slow_host"])
def test_facts_follow_from_what_was_read_and_keep_no_view(name, repository: Path, empty_cache, monkeypatch):
    of: dict[int, tuple[object, list[object]]] = {}  # fact -> itself, and the columns of its graph
    views: list[weakref.ref[Graph]] = []
    checked: Counter[Hashable] = Counter()
    wrong: set[Hashable] = set()

    def observed(graph: Graph, compute: Callable[[Graph], Any], given: tuple[object, ...] = ()) -> Fact:
        def noted(view: Graph) -> Any:
            value = compute(view)  # an error holds the view by its traceback, but is not kept here
            views.extend(map(weakref.ref, (view, view.nodes, view.edges)))
            return value

        return observe(graph, noted, given)

    def watched(
        graph: Graph, name: Hashable, compute: Callable[[Graph], Any], given: tuple[object, ...] = ()
    ) -> Any:
        value = once(graph, name, compute, given)
        now = columns_of(graph)
        _, before = of.setdefault(id(value), (value, now))
        differs = any(one is not other for one, other in zip(before, now, strict=True))
        if (
            differs and checked[name] < CHECKED and "kept tables" not in str(name)
        ):  # which fill as they are read
            checked[name] += 1
            if not same(value, compute(graph)):
                wrong.add(name)
        return value

    for module in [module for key, module in sys.modules.items() if key.startswith("dpro.")]:
        if getattr(module, "once", None) is once:
            monkeypatch.setattr(module, "once", watched)
        if getattr(module, "observe", None) is observe:
            monkeypatch.setattr(module, "observe", observed)
    analysis = Analysis(open_run(repository / "sample_traces" / name))
    explain(analysis)
    search_once(analysis)
    assert graphs.once is watched
    assert len(checked) > 20
    assert not wrong
    gc.collect()
    assert len(views) > 500
    assert not any(view() for view in views)
    assert analysis.built.graph.facts
