"""Which nodes an edit is about: by name, kind, rank, place in the job, step, or the annotation around them.

In: `key=value` pairs. Out: a `Selection`, and a mask over a graph's nodes. Names are shell patterns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from dpro.errors import Unanswerable, UsageError
from dpro.replay.graph import Graph, NodeKind

Bools = NDArray[np.bool_]

# What users call the kinds of work, and the nodes each stands for.
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
class Selection:
    """Work that fits all the given conditions; an empty string or None is no condition.

    Attributes:
        name: pattern for the name of a span, such as `aten::mm` or `*gemm*`.
        within: pattern for the innermost annotation around CPU work, or the micro-batch of an operation.
        kind: one of `KINDS`.
        rank: a rank.
        step: a step.
        stage: a pipeline stage.
        dp: a data-parallel rank.
    """

    name: str = ""
    within: str = ""
    kind: str = ""
    rank: int | None = None
    step: int | None = None
    stage: int | None = None
    dp: int | None = None

    def __post_init__(self) -> None:
        """Refuse a kind that does not exist."""
        if self.kind and self.kind not in KINDS:
            raise UsageError(f"no kind {self.kind!r} of work; there are {', '.join(KINDS)}")

    def __str__(self) -> str:
        """The conditions as `key=value`, comma-separated."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return ",".join(f"{key}={_quoted(value)}" for key, value in given.items() if value not in ("", None))

    def describe(self) -> str:
        """The conditions in words."""
        words = [self.name or (f"{self.kind} work" if self.kind else "all work")]
        words += [f"within {self.within}"] if self.within else []
        words += [f"on rank {self.rank}"] if self.rank is not None else []
        words += [f"on stage {self.stage}"] if self.stage is not None else []
        words += [f"of data-parallel rank {self.dp}"] if self.dp is not None else []
        words += [f"in step {self.step}"] if self.step is not None else []
        return " ".join(words)

    def mask(self, graph: Graph) -> Bools:
        """[N] the nodes that fit; a rendezvous never does."""
        nodes = graph.nodes
        mask: Bools = nodes.kind != NodeKind.RENDEZVOUS
        if self.kind:
            mask &= np.isin(nodes.kind, KINDS[self.kind])
        if self.name:
            mask &= _fitting(graph, self.name)[nodes.name] & (nodes.span >= 0)
        if self.within:
            mask &= (nodes.around >= 0) & _fitting(graph, self.within)[nodes.around]
        if self.rank is not None:
            mask &= nodes.rank == self.rank
        if self.step is not None:
            mask &= nodes.step == self.step
        if self.stage is not None or self.dp is not None:
            mask &= np.isin(nodes.rank, self._ranks_there(graph))
        return mask

    def _ranks_there(self, graph: Graph) -> list[int]:
        """Ranks on the stage and of the data-parallel rank that are asked for."""
        if not graph.places:
            raise Unanswerable("the run does not tell which stage and data-parallel rank its ranks are")
        return [
            rank
            for rank, place in graph.places.items()
            if self.stage in (None, place.stage) and self.dp in (None, place.dp)
        ]


def _quoted(value: str | int) -> str:
    """A value as `--edit` reads it: in quotes where it holds what ends a value."""
    text = str(value).replace('"', "?")
    return f'"{text}"' if any(mark in text for mark in ", =") else text


def _fitting(graph: Graph, pattern: str) -> Bools:
    return np.array([name == pattern or fnmatchcase(name, pattern) for name in graph.names])
