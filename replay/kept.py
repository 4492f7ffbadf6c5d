"""Facts about a saved graph, stored in files beside it for the next command.

Takes a graph and an expensive function that computes a fact; returns the fact, from its file if an earlier
command has written one. A stored fact is valid for the saved columns: for a graph changed by an edit it is
computed again and not written. Without a saved graph, `kept` is the same as `once`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from dpro.arrays import Ints
from dpro.replay.archive import read_archive, write_archive
from dpro.replay.graph import Graph, once
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
        columns: columns of the saved graph, and other values that facts follow from.
        tables: `tables_written` of its run.
    """

    graph_file: Path
    columns: tuple[object, ...]
    tables: tuple[tuple[str, int], ...]

    def file_of(self, name: str, columns: Sequence[object]) -> Path | None:
        """Return the file of a fact; None where the fact does not follow from the saved columns."""
        saved_ids = set(map(id, self.columns))
        runs = [column for column in columns if isinstance(column, Run)]
        saved = all(id(column) in saved_ids for column in columns if not isinstance(column, Run))
        if not saved or any(tables_written(run) != self.tables for run in runs):
            return None
        return self.graph_file.with_suffix(f".{name}{SUFFIX}")


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


def with_kept_facts(graph: Graph, graph_file: Path, duration: Ints | None = None) -> Graph:
    """Return the graph with its facts stored beside its file.

    Args:
        duration: [N] durations of the graph that facts are computed for, in ns, where they differ from those
            of `graph`: each fact has only one file.
    """
    nodes = graph.nodes if duration is None else replace(graph.nodes, duration=duration)
    tuples = (graph.names, graph.lanes, graph.messages)
    columns = (*nodes.columns, *graph.edges.columns, *tuples, graph.network)
    tables = () if graph.run is None else tables_written(graph.run)
    facts = KeptFacts(graph_file, columns, tables)
    return replace(graph, facts={**graph.facts, KEPT_FACTS: ((), facts)})


def with_facts_alone(graph: Graph) -> Graph:
    """Return the graph without any cached facts, but with the place where they are stored."""
    facts = graph.facts.get(KEPT_FACTS)
    return replace(graph, facts={} if facts is None else {KEPT_FACTS: facts})


def kept(
    graph: Graph,
    name: str,
    columns: Sequence[object],
    compute: Callable[[], Value],
    records: Mapping[str, Any] = NO_RECORDS,
) -> Value:
    """Return a fact as `once` does, and store it in a file for the next command.

    Args:
        name: name of the fact, used in its file name.
        records: classes that the fact consists of, by name.
    """

    def find() -> Value:
        facts: tuple[Hashable, Any] | None = graph.facts.get(KEPT_FACTS)
        file = None if facts is None else facts[1].file_of(name, columns)
        if file is None:
            return compute()
        record = read_archive(file, records, graph.run)
        if isinstance(record, tuple) and len(record) == 1:
            value: Value = record[0]
            return value
        value = compute()
        with suppress(OSError):  # a full disk: the computed fact is still returned
            write_archive(file, (value,), records)
        return value

    return once(graph, name, columns, find)


def remove_facts_without_graph(folder: Path) -> None:
    """Remove stored facts whose graph is no longer saved."""
    for file in folder.glob(f"*{SUFFIX}"):
        if not file.with_name(f"{file.name.partition('.')[0]}.npz").exists():
            file.unlink(missing_ok=True)
