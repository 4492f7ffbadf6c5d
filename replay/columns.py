"""The columns of one rank's nodes: pieces of its CPU threads, then its work on streams and workers.

In: a `Local`, its threads, and the numbering of the nodes. Out: `Nodes`. Dependencies are not looked at here,
but for one thing: work whose launch the trace does not hold and that comes first on its lane keeps its time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpro.replay.cpu import Threads
from dpro.replay.graph import NodeKind, Nodes
from dpro.replay.links import Numbering
from dpro.replay.local import KIND, Local
from dpro.replay.sections import Positions, sections

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

COMMUNICATION_THREAD = "communication thread"
KIND_OF_PIECE = np.full(len(KIND) + 1, NodeKind.GAP, np.int64)  # by kind of the innermost span; -1: no span
KIND_OF_PIECE[KIND["cpu_op"]] = NodeKind.CPU
KIND_OF_PIECE[KIND["runtime"]] = NodeKind.RUNTIME
KIND_OF_PIECE[[KIND["annotation"], KIND["python"]]] = NodeKind.HOST

Block = dict[str, Ints]  # kind, start, end, span, around, caused, lane, anchored: one entry per node
Lanes = list[tuple[int, str]]


def node_columns(
    local: Local, threads: Threads, numbering: Numbering, positions: Positions
) -> tuple[Nodes, Lanes]:
    """The nodes of a rank in the order of their numbers, and its lanes.

    Args:
        local: the rank.
        threads: its CPU threads.
        numbering: its nodes.
        positions: where in its step each of its collectives stands.
    """
    lanes: Lanes = []
    blocks = [_pieces(local, threads, numbering, tid, lanes) for tid in numbering.pieces]
    blocks.append(_work(local, numbering, lanes))
    block = {name: np.concatenate([b[name] for b in blocks]) for name in blocks[-1]}
    span, around, total = block["span"], block["around"], numbering.num_nodes
    inner = np.maximum(span, 0)
    step = local.step_of(block["caused"])
    is_work = np.isin(block["kind"], (NodeKind.ARRIVE, NodeKind.TRANSFER))
    anchored = block["anchored"].astype(np.bool_)
    nodes = Nodes(
        kind=block["kind"],
        duration=block["end"] - block["start"],
        earliest=np.where(anchored, block["start"], 0),
        anchored=anchored,
        rank=np.full(total, local.rank),
        window=np.full(total, local.window),
        step=step,
        lane=block["lane"],
        name=np.where(span >= 0, local.name[inner], -1),
        around=np.where(around >= 0, local.name[np.maximum(around, 0)], -1),
        span=np.where(span >= 0, local.span_id[inner], -1),
        collective=np.where(is_work, local.instance[inner], -1),
        bytes=np.where(block["kind"] == NodeKind.TRANSFER, local.payload[inner], -1),
        message=np.where(block["kind"] == NodeKind.TRANSFER, local.message[inner], -1),
        section=sections(local, block["caused"], step, positions),
        measured_start=block["start"],
        measured_end=block["end"],
    )
    return nodes, lanes


def _pieces(local: Local, threads: Threads, numbering: Numbering, tid: int, lanes: Lanes) -> Block:
    piece = numbering.pieces[tid]
    around = threads.annotations[tid]
    anchored = np.zeros(piece.start.size, np.int64)
    anchored[0] = tid not in threads.backward  # those start when they are handed work
    lanes.append((local.rank, "main thread" if tid == local.main_tid else f"thread {tid}"))
    return {
        "kind": KIND_OF_PIECE[np.where(piece.span >= 0, local.kind[np.maximum(piece.span, 0)], -1)],
        "start": piece.start,
        "end": piece.end,
        "span": piece.span,
        "around": around.span[around.at(piece.start)],
        "caused": piece.start,
        "lane": np.full(piece.start.size, len(lanes) - 1),
        "anchored": anchored,
    }


def _work(local: Local, numbering: Numbering, lanes: Lanes) -> Block:
    """One node per kernel or copy; an arrival and a transfer per collective."""
    work = numbering.work
    collective = local.instance[work] >= 0
    single = np.where(local.kind[work] == KIND["kernel"], NodeKind.KERNEL, NodeKind.COPY)
    moved_from = np.clip(local.rendezvous[work], local.start[work], local.end[work])
    lane, first_on_lane = _lanes_of_work(local, work, lanes)
    anchored = first_on_lane & (local.launch[work] < 0)
    caused = _when_asked_for(local, work, lane)
    first = {
        "kind": np.where(collective, NodeKind.ARRIVE, single),
        "start": local.start[work],
        "end": np.where(collective, local.start[work], local.end[work]),
        "span": work,
        "around": np.full(work.size, -1),
        "caused": caused,
        "lane": lane,
        "anchored": anchored.astype(np.int64),
    }
    second = first | {
        "kind": np.full(work.size, NodeKind.TRANSFER),
        "start": moved_from,
        "end": local.end[work],
        "anchored": np.zeros(work.size, np.int64),
    }
    # An arrival's number is followed by its transfer's.
    both = np.concatenate([numbering.begins[work], numbering.ends[work][collective]])
    order = np.argsort(both, kind="stable")
    return {name: np.concatenate([first[name], second[name][collective]])[order] for name in first}


def _lanes_of_work(local: Local, work: Ints, lanes: Lanes) -> tuple[Ints, Bools]:
    """[W] lane of each piece of work, and whether it is the first there; new lanes are appended."""
    place = place_of_work(local, work)
    lane = np.empty(work.size, np.int64)
    first = np.zeros(work.size, np.bool_)
    for here in np.unique(place).tolist():
        mine = np.flatnonzero(place == here)
        lane[mine] = len(lanes)
        first[mine[np.argmin(local.start[work[mine]])]] = True
        one = work[mine[0]]
        on_gpu = bool(local.on_gpu[one])
        what = (
            f"stream {local.stream[one] % 100_000}" if on_gpu else f"{COMMUNICATION_THREAD} {local.tid[one]}"
        )
        lanes.append((local.rank, what))
    return lane, first


def place_of_work(local: Local, work: Ints) -> Ints:
    """[W] a number for where each piece of work runs: one per stream, and per thread with collectives."""
    on_gpu = local.on_gpu[work]
    runs_on = np.where(on_gpu, local.stream[work], local.tid[work])
    return 2 * np.unique(runs_on, return_inverse=True)[1] + on_gpu


def _when_asked_for(local: Local, work: Ints, lane: Ints) -> Ints:
    """[W] ns when each piece of work was launched; where unknown, as the work before it on its lane, and
    where there is none, before the window. A trace without launches tells only when work ran.
    """
    if not (local.launch[work] >= 0).any():
        return local.start[work]
    asked = np.where(local.launch[work] >= 0, local.start[np.maximum(local.launch[work], 0)], -1)
    order = np.lexsort((local.start[work], lane))
    known = np.maximum.accumulate(np.where(asked[order] >= 0, np.arange(order.size), -1))
    same_lane = (known >= 0) & (lane[order][np.maximum(known, 0)] == lane[order])
    result = np.empty(work.size, np.int64)
    result[order] = np.where(same_lane, asked[order][np.maximum(known, 0)], local.begin - 1)
    return result
