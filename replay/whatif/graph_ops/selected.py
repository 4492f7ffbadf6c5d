"""Selections of nodes by name, kind, place in the job, stream, step, module, axis or collective.

Takes `key=value` pairs; returns a `NodeSelection`, and a mask over a graph's nodes. Names are shell patterns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import polars as pl

from dpro.arrays import Bools
from dpro.errors import NothingToChange, Unanswerable
from dpro.members import members_of
from dpro.replay.graph import Graph, NodeKind, once
from dpro.replay.mesh import AXES, BY, axes_of_messages
from dpro.replay.whatif.grammar import check, key, text_of
from dpro.replay.whatif.graph_ops.scope import in_modules
from dpro.schema import COLLECTIVES, WORKERS
from dpro.words import first_few, short_name, suggest

# Kinds of work in users' words, with their kinds of nodes.
KINDS: dict[str, tuple[NodeKind, ...]] = {
    "cpu": (NodeKind.CPU,),
    "runtime": (NodeKind.RUNTIME,),
    "host": (NodeKind.HOST, NodeKind.GAP),
    "delay": (NodeKind.DELAY,),
    "kernel": (NodeKind.KERNEL,),
    "copy": (NodeKind.COPY,),
    "collective": (NodeKind.TRANSFER,),
}


@dataclass(frozen=True)
class NodeSelection:
    """Work that meets all given conditions; an empty string or None is not a condition."""

    name: str = key("pattern for the name of a span, such as `aten::mm` or `*gemm*`", "")
    within: str = key("pattern for the innermost annotation around CPU work, or `micro-batch 3`", "")
    module: str = key(
        (
            "pattern for a module or another range: all work inside it, its backward pass, and the GPU work "
            "of both"
        ),
        "",
    )
    kind: str = key("kind of work", "", choices=tuple(KINDS))
    rank: int | None = key("a rank", None)
    host: str = key("pattern for the name of a host", "")
    stage: int | None = key("a pipeline stage", None)
    dp: int | None = key("a data-parallel rank", None)
    stream: int | None = key("a GPU stream, or a stream of an operation-level trace", None)
    step: int | None = key("a step", None)
    op: str = key("pattern for the collective operation, such as `all_reduce`", "")
    group: str = key("pattern for the name of the collectives' process group", "")
    axis: str = key("parallelism axis of collectives", "", choices=AXES)

    def __post_init__(self) -> None:
        """Raise if the kind does not exist."""
        check(self, "selection")

    def __str__(self) -> str:
        """Return the conditions as `key=value`, comma-separated."""
        return text_of(self)

    def describe(self) -> str:
        """Return the conditions in words."""
        words = [short_name(self.name) or (f"{self.kind} work" if self.kind else "all work")]
        words += [f"within {short_name(self.within)}"] if self.within else []
        words += [f"of module {self.module}"] if self.module else []
        words += [f"of {self.op}"] if self.op else []
        words += [f"in group {self.group}"] if self.group else []
        words += [f"along {self.axis}"] if self.axis else []
        words += [f"on rank {self.rank}"] if self.rank is not None else []
        words += [f"on host {self.host}"] if self.host else []
        words += [f"on stage {self.stage}"] if self.stage is not None else []
        words += [f"of data-parallel rank {self.dp}"] if self.dp is not None else []
        words += [f"on stream {self.stream}"] if self.stream is not None else []
        words += [f"in step {self.step}"] if self.step is not None else []
        return " ".join(words)

    def mask(self, graph: Graph) -> Bools:
        """Return [N] a mask of the selected nodes, read-only; a rendezvous never fits.

        Raises:
            Unanswerable: the run lacks what a condition needs.
        """
        return once(graph, ("selected", self), self._mask)

    def _mask(self, graph: Graph) -> Bools:
        nodes = graph.nodes
        mask: Bools = nodes.kind != NodeKind.RENDEZVOUS
        if self.kind:
            mask &= np.isin(nodes.kind, KINDS[self.kind])
        if self.name:
            mask &= fitting(graph.names, self.name)[nodes.name] & (nodes.span >= 0)
        if self.within:
            mask &= (nodes.around >= 0) & fitting(graph.names, self.within)[nodes.around]
        if self.step is not None:
            mask &= nodes.step == self.step
        if self.stream is not None:
            stream = self.stream
            labels = {f"stream {stream}", f"communication {stream}"} | ({"compute"} if stream == 0 else set())
            mask &= np.array([what in labels for _, what in graph.lanes] + [False], np.bool_)[nodes.lane]
        if self.rank is not None or self.host or self.stage is not None or self.dp is not None:
            mask &= np.isin(nodes.rank, ranks_at(graph, self.rank, self.host, self.stage, self.dp))
        if self.op or self.group or self.axis:
            mask &= _of_collectives(graph, self.op, self.group, self.axis)
        if self.module:
            mask &= in_modules(graph, self.module)
        return mask

    @property
    def of_transfers(self) -> bool:
        """Whether a condition can be met only by transfers."""
        return bool(self.op or self.group or self.axis) or self.kind == "collective"

    def ranks(self, graph: Graph) -> list[int]:
        """Return the ranks that selected work may be on.

        Raises:
            Unanswerable: the run does not name hosts, or places in the job.
        """
        return ranks_at(graph, self.rank, self.host, self.stage, self.dp)

    def chosen(self, graph: Graph) -> Bools:
        """Return `mask`, which must not be empty.

        Raises:
            NothingToChange: nothing fits; the message has the nearest name.
        """
        mask = self.mask(graph)
        if not mask.any():
            fits_name = not self.name or fitting(graph.names, self.name).any()
            near = "" if fits_name else suggest(self.name, graph.names)
            raise NothingToChange(f"nothing in the run fits {self}{near}")
        return mask


def selection_of(name: str, kind: NodeKind) -> NodeSelection:
    """Return the selection of work with a name and a kind."""
    return NodeSelection(name=name, kind=next(word for word, kinds in KINDS.items() if kind in kinds))


def fitting(names: Iterable[str], pattern: str) -> Bools:
    """Return a mask of the names that equal a pattern, or fit it as a shell pattern.

    Args:
        names: to be tested.
    """
    return np.array([name == pattern or fnmatchcase(name, pattern) for name in names], np.bool_)


def ranks_at(
    graph: Graph, rank: int | None = None, host: str = "", stage: int | None = None, dp: int | None = None
) -> list[int]:
    """Return the ranks that meet all given conditions.

    Args:
        rank: any where None.
        host: a shell pattern for its name, any where empty.
        stage: a pipeline stage, any where None.
        dp: a data-parallel rank, any where None.

    Raises:
        Unanswerable: the run does not name hosts, or places in the job.
    """
    ranks = [candidate for candidate in graph.ranks if rank in (None, candidate)]
    if host:
        hosts = hosts_of(graph)
        ranks = [candidate for candidate in ranks if fitting([hosts.get(candidate, "")], host)[0]]
    if stage is not None or dp is not None:
        if not graph.places:
            raise Unanswerable("the stage and data-parallel rank of the ranks were not recorded")
        places = {candidate: graph.places[candidate] for candidate in ranks if candidate in graph.places}
        ranks = [
            candidate
            for candidate, place in places.items()
            if stage in (None, place.stage) and dp in (None, place.dp)
        ]
    return ranks


def absence_reason(graph: Graph, what: str) -> str:
    """Word that a rank, host or stage is not in the run, with the ranks that are."""
    ranks = ranks_at(graph)
    return f"{what} is not in the run, which has rank{'s' * (len(ranks) != 1)} {first_few(ranks, 8)}"


def hosts_of(graph: Graph) -> dict[int, str]:
    """Return the host of each rank.

    Raises:
        Unanswerable: the run does not record them.
    """
    workers = graph.run.table(WORKERS) if graph.run is not None else WORKERS.empty()
    hosts = {rank: host for rank, host in workers.select("rank", "host").iter_rows() if host}
    if not hosts:
        raise Unanswerable("the hosts of the ranks were not recorded")
    return hosts


def _of_collectives(graph: Graph, op: str, group: str, axis: str) -> Bools:
    """Return [N] a mask of transfers of an operation, a group and an axis."""
    if not graph.messages:
        raise Unanswerable("the collectives of the run were not recorded")
    fits = np.append(messages_fitting(graph, op, group, axis), False)  # the last entry: no message
    of_messages: Bools = fits[graph.nodes.message]
    return of_messages


def messages_fitting(graph: Graph, op: str = "", group: str = "", axis: str = "") -> Bools:
    """Return [messages] a mask of an operation, a group (named with or without its ranks) and an axis.

    Args:
        op: a shell pattern, any where empty.
        group: a shell pattern, any where empty.
        axis: of parallelism, any where empty; groups that differ along several axes fit each of these.

    Raises:
        Unanswerable: no group is known to be along the axis.
    """
    fits = np.ones(len(graph.messages), np.bool_)
    if op:
        fits &= fitting((message.op for message in graph.messages), op)
    if group:
        groups = [message.group for message in graph.messages]
        fits &= (
            fitting(groups, group)
            | fitting((name.partition("[")[0] for name in groups), group)
            | fitting((_with_each_rank(name) for name in groups), group)
        )
    if axis:
        fits &= messages_along(graph, axis)
    return fits


def _with_each_rank(label: str) -> str:
    """Return the label of a group as earlier versions wrote it, for saved edits: `data[0, 1, 2]`."""
    name, _, ranks = label.partition("[")
    return f"{name}[{', '.join(map(str, members_of(ranks.removesuffix(']'))))}]"


def messages_along(graph: Graph, axis: str) -> Bools:
    """Return [messages] a mask of groups whose ranks differ along an axis, and perhaps along others.

    Raises:
        Unanswerable: no group is known to be along it.
    """
    axes = axes_of_messages(graph)
    fits = np.array([axis in label.split(BY) for label in axes], np.bool_)
    if not fits.any():
        names = ", ".join(sorted(set(axes) - {""}))
        raise Unanswerable(
            f"no communication in the run is known to be along {axis}: "
            + (f"it is along {names}" if names else "the axes of its groups are unknown")
        )
    return fits


def recorded_word(graph: Graph, op: str, column: str, allowed: Sequence[str]) -> str:
    """Return the one word recorded for all collectives of an operation, in lower case; else empty.

    Args:
        column: `algorithm` or `protocol`.
        allowed: words; empty for others.
    """
    if graph.run is None:
        return ""
    rows = graph.run.table(COLLECTIVES, ["op", column]).filter(pl.col("op") == op)
    words = [word.lower() for word in rows[column].unique().to_list()]
    return words[0] if len(words) == 1 and words[0] in allowed else ""
