"""Facts about a saved graph, stored in files beside it for the next command.

Takes a graph and an expensive function that computes a fact; returns the fact, from its file if an earlier
command has written one. The file names the columns that the fact was computed from: for a graph of which an
edit has changed one of them, the fact is computed again and not written. Without a saved graph, `kept` is the
same as `once`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from dpro.arrays import Ints
from dpro.replay.archive import read_archive, write_archive
from dpro.replay.graph import Fact, Graph, observe, once, recall, unwatched
from dpro.store import Run

Value = TypeVar("Value")

KEPT_FACTS = "kept facts"  # key in `Graph.facts`
SUFFIX = ".fact"
RUN = "run"  # the column of a graph that has other objects for the same content
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

    def has(self, graph: Graph, columns: Collection[str]) -> bool:
        """Return whether these columns of a graph are those of the saved one; of its run, the tables."""
        same = all(attrgetter(name)(graph) is attrgetter(name)(self.graph) for name in columns if name != RUN)
        return same and (RUN not in columns or _tables_of(graph.run) == self.tables)

    def file_of(self, name: str) -> Path:
        """Return the file of a fact."""
        return self.graph_file.with_suffix(f".{name}{SUFFIX}")

    def read(self, run: Run | None, name: str, records: Mapping[str, Any]) -> Fact | None:
        """Return a stored fact with the columns of the saved graph; None without a complete one.

        Args:
            run: the run as the graph that asks has it; a fact that follows from it needs the saved tables.
        """
        fact = read_archive(self.file_of(name), {**records, "Fact": Fact}, run)
        if not isinstance(fact, Fact) or (RUN in fact.columns and _tables_of(run) != self.tables):
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
    place, fact = graph.facts.get(KEPT_FACTS), recall(graph, name)
    if place is None:
        return once(graph, name, compute)
    saved, plain = place.value, unwatched(graph)
    cached = plain.facts.get(name)
    if fact is None and (cached is None or saved.has(plain, cached.columns)):
        stored = saved.read(plain.run, name, records)
        if stored is not None:  # which does not hold for a changed graph, and says so without its file
            plain.facts[name] = stored
        fact = recall(graph, name)
    if fact is None:
        fact = observe(graph, compute)
        if not saved.has(plain, fact.columns):
            plain.facts.setdefault(name, fact)
        else:
            plain.facts[name] = fact
            with suppress(OSError):  # a full disk: the computed fact is still returned
                write_archive(saved.file_of(name), fact.of(None), {**records, "Fact": Fact})
    value: Value = fact.value
    return value


def kept_as(
    name: str, records: Mapping[str, Any] = NO_RECORDS
) -> Callable[[Callable[[Graph], Value]], Callable[[Graph], Value]]:
    """Make a function of a graph return its value by `kept`."""

    def keep(compute: Callable[[Graph], Value]) -> Callable[[Graph], Value]:
        @wraps(compute)
        def recalled(graph: Graph) -> Value:
            return kept(graph, name, compute, records)

        return recalled

    return keep


def remove_facts_without_graph(folder: Path) -> None:
    """Remove stored facts whose graph is no longer saved."""
    for file in folder.glob(f"*{SUFFIX}"):
        if not file.with_name(f"{file.name.partition('.')[0]}.npz").exists():
            file.unlink(missing_ok=True)
