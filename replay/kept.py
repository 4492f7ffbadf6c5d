"""Facts about a saved graph, kept in files beside it for the next command.

In: a graph, and a function that takes long to compute a fact. Out: the fact, from its file if an earlier
command has written it. A fact holds for the columns that were saved: for a graph that an edit has changed, it
is computed again and not written. Without a saved graph, `kept` is the same as `once`.
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

KEPT_FACTS = "kept facts"  # their name among what is known of a graph
SUFFIX = ".fact"
NO_RECORDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class KeptFacts:
    """Where facts about a saved graph are kept.

    Attributes:
        graph_file: the saved graph; files of facts begin with its name.
        columns: of the saved graph, and what else facts follow from.
        tables: `tables_written` of its run.
    """

    graph_file: Path
    columns: tuple[object, ...]
    tables: tuple[tuple[str, int], ...]

    def file_of(self, name: str, columns: Sequence[object]) -> Path | None:
        """Where a fact is kept; None where it does not follow from what was saved."""
        saved_ids = set(map(id, self.columns))
        runs = [column for column in columns if isinstance(column, Run)]
        saved = all(id(column) in saved_ids for column in columns if not isinstance(column, Run))
        if not saved or any(tables_written(run) != self.tables for run in runs):
            return None
        return self.graph_file.with_suffix(f".{name}{SUFFIX}")


def tables_written(run: Run) -> tuple[tuple[str, int], ...]:
    """When parts of each table were last added: parts are renamed into their folder when they are whole.

    A layout that the user states counts as a table.
    """
    stated = tuple(run.layout.items())
    try:
        folders = sorted((str(folder), folder.stat().st_mtime_ns) for folder in run.path.iterdir())
        return (*stated, *folders)
    except OSError:  # what cannot be read says so where it is read
        return ()


def with_kept_facts(graph: Graph, graph_file: Path, duration: Ints | None = None) -> Graph:
    """Let facts about a saved graph be kept beside its file.

    Args:
        duration: [N] ns, how long nodes last in the graph that facts are asked of, where that is another:
            a fact has one file.
    """
    nodes = graph.nodes if duration is None else replace(graph.nodes, duration=duration)
    tuples = (graph.names, graph.lanes, graph.messages)
    columns = (*nodes.columns, *graph.edges.columns, *tuples, graph.network)
    tables = () if graph.run is None else tables_written(graph.run)
    facts = KeptFacts(graph_file, columns, tables)
    return replace(graph, facts={**graph.facts, KEPT_FACTS: ((), facts)})


def with_facts_alone(graph: Graph) -> Graph:
    """The same graph, of which nothing is known but where its facts are kept."""
    facts = graph.facts.get(KEPT_FACTS)
    return replace(graph, facts={} if facts is None else {KEPT_FACTS: facts})


def kept(
    graph: Graph,
    name: str,
    columns: Sequence[object],
    compute: Callable[[], Value],
    records: Mapping[str, Any] = NO_RECORDS,
) -> Value:
    """As `once`, of a fact that is also kept for the next command.

    Args:
        name: of the fact, as a part of a file's name.
        records: classes of which it consists, by their names.
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
        with suppress(OSError):  # a full disk: the fact is there all the same
            write_archive(file, (value,), records)
        return value

    return once(graph, name, columns, find)


def remove_facts_without_graph(folder: Path) -> None:
    """Remove facts about graphs that are not kept any more."""
    for file in folder.glob(f"*{SUFFIX}"):
        if not file.with_name(f"{file.name.partition('.')[0]}.npz").exists():
            file.unlink(missing_ok=True)
