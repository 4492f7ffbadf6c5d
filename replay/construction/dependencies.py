"""Dependencies before nodes exist: between moments on threads and spans of work.

The rules that find dependencies (launches, events, waits, hand-overs) refer to moments on CPU threads, and to
spans of work on a stream or worker. Once threads are cut into pieces and all nodes are numbered, `resolve`
turns these dependencies into edges between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from dpro.arrays import Bools, Ints
from dpro.replay.construction.cpu_threads import ThreadPieces
from dpro.replay.graph import EdgeKind, Edges

# Used in place of a thread, where an end is a span of work. Thread ids may be any other number, even -1.
WORK = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Dependencies:
    """Dependencies, each [K].

    Attributes:
        kind: `EdgeKind`.
        inferred: whether the trace only suggests it.
        source_thread, source_at: a thread and a time in ns (the work that ended there by then), or `WORK` and
            the index of a span.
        target_thread, target_at: a thread and a time in ns (the work that starts there from then on), or
            `WORK` and the index of a span.
    """

    kind: Ints
    inferred: Bools
    source_thread: Ints
    source_at: Ints
    target_thread: Ints
    target_at: Ints


End = tuple[ArrayLike, ArrayLike]


def links(kind: EdgeKind | Ints, source: End, target: End, inferred: ArrayLike = False) -> Dependencies:
    """Make dependencies; each end is (thread, time) or (`WORK`, span), scalars or [K].

    Args:
        kind: one for all, or [K].
        source, target: what has to end, and what may start then.
        inferred: whether the trace only suggests it; one for all, or [K].
    """
    columns = np.broadcast_arrays(np.asarray(kind, np.int64), *source, *target, np.atleast_1d(inferred))
    kinds, source_thread, source_at, target_thread, target_at = (c.astype(np.int64) for c in columns[:-1])
    return Dependencies(
        kinds, columns[-1].astype(np.bool_), source_thread, source_at, target_thread, target_at
    )


def join(parts: Sequence[Dependencies]) -> Dependencies:
    """Concatenate the dependencies of several rules."""
    return Dependencies(
        **{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Dependencies)}
    )


@dataclass(frozen=True)
class Numbering:
    """The nodes of a rank, by thread piece and span.

    Attributes:
        pieces: pieces of each thread, by thread.
        first: node of each thread's first piece.
        work: [W] span indices of work, in the order of their nodes.
        begins, ends: [S] first and last node of each span of work (two for a collective), -1 for others.
    """

    pieces: dict[int, ThreadPieces]
    first: dict[int, int]
    work: Ints
    begins: Ints
    ends: Ints


def number_nodes(pieces: dict[int, ThreadPieces], work: Ints, is_collective: Bools) -> Numbering:
    """Assign ids to the nodes of a rank: pieces thread by thread, then work.

    Args:
        work: [W] span indices.
        is_collective: [S] spans that become two nodes, arrival and transfer.
    """
    sizes = [piece.start.size for piece in pieces.values()]
    first = dict(zip(pieces, np.cumsum([0, *sizes])[:-1].tolist()))
    begins, ends = np.full(is_collective.size, -1, np.int64), np.full(is_collective.size, -1, np.int64)
    size = np.where(is_collective[work], 2, 1)
    begins[work] = sum(sizes) + np.cumsum(size) - size
    ends[work] = begins[work] + size - 1
    return Numbering(pieces, first, work, begins, ends)


def resolve(dependencies: Dependencies, numbering: Numbering) -> Edges:
    """Return the edges between nodes, of lag 0: dependencies, program order, and arrivals to transfers.

    A dependency on the time before a thread's first piece is dropped, as is one from a node to itself.
    """
    source = numbering.ends[np.where(dependencies.source_thread == WORK, dependencies.source_at, 0)]
    target = numbering.begins[np.where(dependencies.target_thread == WORK, dependencies.target_at, 0)]
    for tid, piece in numbering.pieces.items():
        leaving = dependencies.source_thread == tid
        last = piece.ending_by(dependencies.source_at[leaving])
        source[leaving] = np.where(last >= 0, numbering.first[tid] + last, -1)
        entering = dependencies.target_thread == tid
        target[entering] = numbering.first[tid] + piece.starting_from(dependencies.target_at[entering])
    real = (source >= 0) & (target >= 0) & (source != target)
    # What follows a piece on its thread, and the transfer that follows an arrival, have the next number.
    ordered = [
        numbering.first[tid] + np.arange(piece.start.size - 1) for tid, piece in numbering.pieces.items()
    ]
    work = numbering.work
    arrivals = numbering.begins[work[numbering.ends[work] > numbering.begins[work]]]
    given = np.concatenate([*ordered, arrivals])
    kind = np.repeat([EdgeKind.THREAD, EdgeKind.STREAM], [given.size - arrivals.size, arrivals.size])
    return Edges(
        source=np.append(source[real], given),
        target=np.append(target[real], given + 1),
        lag=np.zeros(int(real.sum()) + given.size, np.int64),
        kind=np.append(dependencies.kind[real], kind),
        inferred=np.append(dependencies.inferred[real], np.zeros(given.size, np.bool_)),
    )
