"""Which spans lie in which on their threads, what they launch, and which nodes they are.

In: a graph with its run. Out: `Nesting`, worked out once for a run, and masks of spans and nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.construction.cpu_threads import merge_intervals
from dpro.replay.graph import Graph
from dpro.replay.kept import kept
from dpro.schema import COLLECTIVES, GPU_WORK_KINDS, SPANS
from dpro.store import Run

ON_CPU = ("cpu_op", "runtime", "annotation", "python")
COLUMNS = [
    *("span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "tid"),
    *("correlation", "sequence_number", "forward_thread"),
]
MAX_SPARSE = 16  # entries of a look-up table per value that is looked up


@dataclass(frozen=True)
class Nesting:
    """The spans of a run, each column [S].

    Attributes:
        run: whose spans.
        on_cpu: whether a span is of a thread.
        start: ns on one axis for all threads, each thread after the one before it.
        lasts: ns.
        launch: a number that a call shares with what it launched, -1 for none.
        calls, launched: whether a span launches GPU work; whether it is such work.
    """

    run: Run
    on_cpu: Bools
    start: Ints
    lasts: Ints
    launch: Ints
    calls: Bools
    launched: Bools

    @cached_property
    def end(self) -> Ints:
        """ns on the axis of the starts."""
        return self.start + self.lasts

    @cached_property
    def spans(self) -> pl.DataFrame:
        """The rows, with `COLUMNS` and `row`, their number."""
        return self.rows(*COLUMNS)

    def rows(self, *columns: str) -> pl.DataFrame:
        """The rows, with some of `COLUMNS` and `row`, their number; ranks as the graph has them."""
        return _with_wide_ranks(self.run.table(SPANS, columns)).with_row_index("row")

    def inside(self, chosen: Bools) -> Bools:
        """[S] all CPU spans within the chosen ones on their threads, and what they launched.

        Args:
            chosen: [S] spans.
        """
        begin, end = merge_intervals(self.start[chosen], self.end[chosen])
        found = np.zeros(chosen.size, np.bool_)
        if begin.size == 0:
            return found
        cpu = np.flatnonzero(self.on_cpu)
        time = self.start[cpu]
        at = np.searchsorted(begin, time, side="right") - 1
        found[cpu] = (at >= 0) & (time < end[np.maximum(at, 0)])
        calling = np.zeros(int(self.launch.max(initial=-1)) + 2, np.bool_)  # the last: launched by none
        calling[self.launch[found & self.calls]] = True
        calling[-1] = False
        work = np.flatnonzero(self.launched)
        found[work] = calling[self.launch[work]]
        return found

    def with_backward(self, chosen: Bools) -> Bools:
        """[S] what is inside the chosen spans, and inside the backward pass of that.

        A backward operator has the sequence number of the forward operator that asked for it: the last one
        that had it, since those before only looked at the next number.

        Args:
            chosen: [S] spans.
        """
        forward = self.inside(chosen)
        places = ("rank", "window", "sequence_number", "forward_thread", "span_id", "start_ns")
        spans = self.rows("kind", *places)  # read at once
        rank, window, number, thread, ids, start = (spans[name].to_numpy() for name in places)
        numbered = np.flatnonzero((number >= 0) & (spans["kind"] == "cpu_op").to_numpy())
        asked = _numbered(rank[numbered], window[numbered], number[numbered])
        is_forward = thread[numbered] <= 0
        order = np.lexsort((ids[numbered], start[numbered]))
        order = order[is_forward[order]]
        asker = np.full(int(asked.max(initial=-1)) + 1, -1)
        asker[asked[order]] = numbered[order]  # the last of those that are equal stays
        backward = ~is_forward & np.append(forward, False)[asker[asked]]
        late = np.zeros(chosen.size, np.bool_)
        late[numbered[backward]] = True
        return forward | self.inside(late)

    def marked(self, rows: pl.DataFrame) -> Bools:
        """[S] whether a span is among some rows.

        Args:
            rows: of `spans`.
        """
        found = np.zeros(self.start.size, np.bool_)
        found[rows["row"].to_numpy()] = True
        return found

    def column(self, name: str) -> Ints:
        """A column of the rows.

        Args:
            name: of `COLUMNS`.
        """
        return self.rows(name)[name].to_numpy()


def nesting_of(graph: Graph, run: Run) -> Nesting:
    """The spans of a run, in order of their threads."""
    return kept(graph, "nesting-of-spans", (run,), lambda: _nesting(run), {"Nesting": Nesting})


def _with_wide_ranks(spans: pl.DataFrame) -> pl.DataFrame:
    return spans.with_columns(pl.col("^rank$").cast(pl.Int64))


def _nesting(run: Run) -> Nesting:
    columns = ("rank", "window", "kind", "start_ns", "duration_ns", "tid", "correlation")
    spans = _with_wide_ranks(run.table(SPANS, columns))
    rank, window, start, lasts, correlation = (
        spans[name].to_numpy() for name in ("rank", "window", "start_ns", "duration_ns", "correlation")
    )
    kinds, called = spans["kind"], correlation >= 0
    launch = np.full(spans.height, -1)
    launch[called] = _numbered(rank[called], window[called], correlation[called])
    lane = _dense(_numbered(rank, window, _dense(spans["tid"].to_numpy())))
    begins = np.full(int(lane.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins, lane, start)
    since = start - begins[lane]
    begin = since + lane * (int((since + lasts).max(initial=0)) + 1)
    calls = (kinds == "runtime").to_numpy() & called
    launched = kinds.is_in(GPU_WORK_KINDS).to_numpy() & called
    on_cpu = kinds.is_in(ON_CPU).to_numpy()
    return Nesting(run, on_cpu, begin, lasts, launch, calls, launched)


def _dense(values: Ints) -> Ints:
    """Values, of which few differ, as numbers from 0 on."""
    return np.searchsorted(np.sort(pl.Series(values).unique().to_numpy()), values)


def _numbered(*columns: Ints) -> Ints:
    """[K] a number from 0 on for each row, equal where all columns are."""
    columns = tuple(column - column.min(initial=0) for column in columns)
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    if math.prod(sizes) <= MAX_SPARSE * (columns[0].size + 1):
        return np.ravel_multi_index(columns, sizes)
    if any(size > columns[0].size for size in sizes):
        return _numbered(*(np.unique(column, return_inverse=True)[1] for column in columns))
    return np.unique(np.ravel_multi_index(columns, sizes), return_inverse=True)[1]


def nodes_of(graph: Graph, run: Run, members: Bools) -> Bools:
    """[N] nodes of the spans, and of collectives that they called.

    Args:
        members: [S] spans of its `Nesting`.
    """
    found: Bools = np.append(members, False)[rows_of(graph, run)]
    columns = (graph.nodes.rank, graph.nodes.span, run)
    caller, node = kept(graph, "calls-of-collectives", columns, lambda: _calls(graph, run))
    found[node[members[caller]]] = True
    return found


def rows_of(graph: Graph, run: Run) -> Ints:
    """[N] the row of the span that each node is, -1 for none."""
    nodes = graph.nodes
    columns = (nodes.rank, nodes.span, run)
    return kept(
        graph, "rows-of-nodes", columns, lambda: _rows(nesting_of(graph, run), nodes.rank, nodes.span)
    )


def _rows(nesting: Nesting, rank: Ints, span: Ints) -> Ints:
    """[K] the row of each span, -1 where there is none.

    Args:
        rank, span: [K] whose, and which; below 0 for none.
    """
    known = (rank >= 0) & (span >= 0)
    of, ids = nesting.column("rank"), nesting.column("span_id")
    keys = _numbered(np.append(of, rank[known]), np.append(ids, span[known]))
    row = np.full(int(keys.max(initial=-1)) + 1, -1)
    row[keys[: of.size]] = np.arange(of.size)
    found = np.full(rank.size, -1)
    found[known] = row[keys[of.size :]]
    return found


def _calls(graph: Graph, run: Run) -> tuple[Ints, Ints]:
    """Rows of spans that called collectives, and the nodes of these."""
    calls = run.table(COLLECTIVES, ["rank", "span_id", "launch_span_id"])
    calls = calls.with_columns(pl.col("rank").cast(pl.Int64)).filter(pl.col("span_id") >= 0)
    nodes = pl.DataFrame({"rank": graph.nodes.rank, "span_id": graph.nodes.span}).with_row_index("node")
    made = calls.join(nodes, on=["rank", "span_id"])
    rank, launch, node = (made[name].to_numpy() for name in ("rank", "launch_span_id", "node"))
    row = _rows(nesting_of(graph, run), rank, launch)
    return row[row >= 0], node[row >= 0].astype(np.int64)
