"""Facts about a saved graph, stored in files beside it for the next command.

Takes a graph and an expensive function that computes a fact; returns the fact, from its file if an earlier
command has written one. The file names the columns that the fact was computed from: for a graph of which an
edit has changed one of them, the fact is computed again and not written. Without a saved graph, `kept` is the
same as `once`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from dpro.arrays import Ints
from dpro.replay.archive import read_archive, write_archive
from dpro.replay.graph import Fact, Graph, column_of, observe, once, recall, unwatched
from dpro.store import Run

Value = TypeVar("Value")

KEPT_FACTS = "kept facts"  # key in `Graph.facts`
SUFFIX = ".fact"
NO_RECORDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class KeptFacts:
    """The place where facts about a saved graph are stored.

    Attributes:
        graph_file: the saved graph; names of fact files begin with its name.
        graph: the saved graph without facts, with the durations that facts are computed for.
        tables: `tables_written` of its run.
    """

    graph_file: Path
    graph: Graph
    tables: tuple[tuple[str, int], ...]

    def has(self, graph: Graph, columns: Iterable[str]) -> bool:
        """Return whether these columns of a graph are those of the saved one; of its run, the tables."""
        return all(
            _tables_of(graph.run) == self.tables
            if name == "run"
            else column_of(graph, name) is column_of(self.graph, name)
            for name in columns
        )

    def file_of(self, name: str) -> Path:
        """Return the file of a fact."""
        return self.graph_file.with_suffix(f".{name}{SUFFIX}")

    def read(self, run: Run | None, name: str, records: Mapping[str, Any]) -> Fact | None:
        """Return a stored fact with the columns of the saved graph; None without a complete one.

        Args:
            run: the run as the graph that asks has it; a fact that follows from it needs the saved tables.
        """
        fact = read_archive(self.file_of(name), {**records, "Fact": Fact}, run)
        if not isinstance(fact, Fact) or ("run" in fact.columns and _tables_of(run) != self.tables):
            return None
        with suppress(AttributeError):  # written by another version, whose graphs had other columns
            return fact.of(replace(self.graph, run=run))
        return None


def tables_written(run: Run) -> tuple[tuple[str, int], ...]:
    """Return each table's folder with the time it last changed: complete parts are renamed into their folder.

    A layout stated by the user counts as a table.
    """
    stated = tuple(run.layout.items())
    try:
        folders = sorted((str(folder), folder.stat().st_mtime_ns) for folder in run.path.iterdir())
        return (*stated, *folders)
    except OSError:  # the error is reported where tables are read
        return ()


def _tables_of(run: Run | None) -> tuple[tuple[str, int], ...]:
    return () if run is None else tables_written(run)


def with_kept_facts(graph: Graph, graph_file: Path, duration: Ints | None = None) -> Graph:
    """Return the graph with its facts stored beside its file.

    Args:
        duration: [N] durations of the graph that facts are computed for, in ns, where they differ from those
            of `graph`: each fact has only one file.
    """
    nodes = graph.nodes if duration is None else replace(graph.nodes, duration=duration)
    saved = replace(graph, nodes=nodes, facts={})
    place = Fact({}, (), KeptFacts(graph_file, saved, _tables_of(graph.run)))
    return replace(graph, facts={**graph.facts, KEPT_FACTS: place})


def kept(
    graph: Graph, name: str, compute: Callable[[Graph], Value], records: Mapping[str, Any] = NO_RECORDS
) -> Value:
    """Return a fact as `once` does, and store it in a file for the next command.

    Args:
        name: name of the fact, used in its file name.
        records: classes that the fact consists of, by name.
    """
    place = graph.facts.get(KEPT_FACTS)
    if place is None:
        return once(graph, name, compute)
    fact = recall(graph, name)
    if fact is None and _load(place.value, unwatched(graph), name, records):
        fact = recall(graph, name)
    if fact is None:
        fact = observe(graph, compute)
        _store(place.value, unwatched(graph), name, fact, records)
    value: Value = fact.value
    return value


def _load(saved: KeptFacts, graph: Graph, name: str, records: Mapping[str, Any]) -> bool:
    """Cache the stored fact, unless there is none, or a cached one shows that the graph is a changed one."""
    cached = graph.facts.get(name)
    if cached is not None and not saved.has(graph, cached.columns):
        return False
    fact = saved.read(graph.run, name, records)
    if fact is not None:
        graph.facts[name] = fact
    return fact is not None


def _store(saved: KeptFacts, graph: Graph, name: str, fact: Fact, records: Mapping[str, Any]) -> None:
    """Cache a computed fact, and write it to its file if it follows from the saved columns."""
    if not saved.has(graph, fact.columns):
        graph.facts.setdefault(name, fact)
        return
    graph.facts[name] = fact
    with suppress(OSError):  # a full disk: the computed fact is still returned
        write_archive(saved.file_of(name), fact.without_columns(), {**records, "Fact": Fact})


def remove_facts_without_graph(folder: Path) -> None:
    """Remove stored facts whose graph is no longer saved."""
    for file in folder.glob(f"*{SUFFIX}"):
        if not file.with_name(f"{file.name.partition('.')[0]}.npz").exists():
            file.unlink(missing_ok=True)
