"""A graph or condensed ranks, with the judgement of its replay, in one file for the next command.

Takes both and a path; writes the file, and reads both from it. `dpro.replay.kept` defines the format.
Which run a file belongs to is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpro.replay.alignment.align import Alignment, Clock, ClockLine
from dpro.replay.alignment.match import Matching
from dpro.replay.construction.graph_builder import Built
from dpro.replay.construction.lags import Lags
from dpro.replay.construction.recording_cost import RecordingCost
from dpro.replay.fidelity.accuracy import (
    Criterion,
    EdgeCounts,
    Evidence,
    Starts,
    StreamPairs,
    TraceCoverage,
    Trust,
)
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.fidelity.missing_ranks import PartialCollectives
from dpro.replay.fidelity.overlap import Contention
from dpro.replay.graph import Edges, Fact, Graph, MeshPosition, Message, Nodes, recall
from dpro.replay.kept import read_archive, write_archive
from dpro.replay.sharded import JoinedGraph, MatchedRun, Pooled, parts_of
from dpro.replay.timeline import HostsAlone
from dpro.store import Run

RECORDS: Mapping[str, Any] = {  # dataclasses and named tuples
    kind.__name__: kind
    for kind in (
        Alignment, Built, Clock, ClockLine, CondensedRun, Contention, Criterion, EdgeCounts, Edges, Evidence,
        Fact, Graph, HostsAlone, JoinedGraph, Lags, MatchedRun, Matching, MeshPosition, Message, Nodes,
        PartialCollectives, Pooled, RecordingCost, Starts, StreamPairs, TraceCoverage, Trust,
    )
}  # fmt: skip


def save(file: Path, built: Built, trust: Trust) -> None:
    """Write a graph and its trust atomically: the complete file or none.

    Raises:
        OSError: the file cannot be written.
    """
    write_archive(file, (dataclasses.replace(built, graph=_without_columns(built.graph)), trust), RECORDS)


def save_condensed(file: Path, condensed: CondensedRun) -> None:
    """Write condensed ranks atomically: the complete file or none.

    Raises:
        OSError: the file cannot be written.
    """
    matched = dataclasses.replace(condensed.matched, parts={})  # files are listed again on loading
    joined = dataclasses.replace(condensed.joined, graph=_without_columns(condensed.joined.graph))
    write_archive(file, dataclasses.replace(condensed, matched=matched, joined=joined), RECORDS)


def _without_columns(graph: Graph) -> Graph:
    """Return the graph with the facts that follow from it alone, and only the names of their columns."""
    facts = {name: fact for name, fact in graph.facts.items() if not fact.given and recall(graph, name)}
    return dataclasses.replace(graph, facts={name: fact.of(None) for name, fact in facts.items()})


def _with_columns(graph: Graph) -> Graph:
    """Return a graph that was read, with its own columns in its facts."""
    return dataclasses.replace(graph, facts={name: fact.of(graph) for name, fact in graph.facts.items()})


def load(file: Path, run: Run) -> tuple[Built, Trust] | None:
    """Read a graph and its trust; None where the file is missing, incomplete or damaged.

    Args:
        file: a file of `save`.
    """
    match read_archive(file, RECORDS, run):
        case (Built() as built, Trust() as trust):
            return dataclasses.replace(built, graph=_with_columns(built.graph)), trust
    return None


def load_condensed(file: Path, run: Run) -> CondensedRun | None:
    """Read condensed ranks; None where the file is missing, incomplete or damaged.

    Args:
        file: a file of `save_condensed`.
    """
    condensed = read_archive(file, RECORDS, run)
    if not isinstance(condensed, CondensedRun):
        return None
    matched = dataclasses.replace(condensed.matched, parts=parts_of(run, condensed.matched.windows))
    joined = dataclasses.replace(condensed.joined, graph=_with_columns(condensed.joined.graph))
    return dataclasses.replace(condensed, matched=matched, joined=joined)
