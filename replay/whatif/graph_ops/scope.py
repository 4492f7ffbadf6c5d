"""Scope of spans: all work of an operator or a module, its backward pass and its kernels.

Takes a graph with its run; returns masks over its nodes. A node has only the innermost span that it is part
of; the run's tables have the spans around that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.errors import NothingToChange, Unanswerable
from dpro.recorders import MODULES, how_to_record
from dpro.replay.attribution import MODULE
from dpro.replay.construction.cpu_threads import merge_intervals
from dpro.replay.cost.kernels.roofline import MATMULS, product_of
from dpro.replay.graph import CPU_KINDS, EdgeKind, Graph, NodeKind, is_one_of, once
from dpro.replay.kept import kept_as
from dpro.schema import COLLECTIVES, GPU_WORK_KINDS, SPANS
from dpro.store import Run
from dpro.words import first_few, suggest

# Nesting of spans on their threads, their launches, and their nodes.

ON_CPU = ("cpu_op", "runtime", "annotation", "python")
COLUMNS = [
    *("span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "tid"),
    *("correlation", "sequence_number", "forward_thread"),
]
MAX_SPARSE = 16  # entries of a look-up table per looked-up value


@dataclass(frozen=True)
class Nesting:
    """Spans of a run, each column [S].

    Attributes:
        run: the run.
        on_cpu: whether a span is on a thread.
        start: ns on one axis for all threads, each thread after the one before it.
        lasts: ns.
        launch: a number shared by a call and the work that it launched, -1 for none.
        calls: whether a span launches GPU work.
        launched: whether a span is launched GPU work.
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
        """Ends, ns on the axis of the starts."""
        return self.start + self.lasts

    @cached_property
    def spans(self) -> pl.DataFrame:
        """Rows with `COLUMNS` and `row`, their number."""
        return self.rows(*COLUMNS)

    def rows(self, *columns: str) -> pl.DataFrame:
        """Return the rows with some of `COLUMNS` and `row`, their number; ranks have the graph's type."""
        return _with_wide_ranks(self.run.table(SPANS, columns)).with_row_index("row")

    def inside(self, chosen: Bools) -> Bools:
        """Return [S] a mask of all CPU spans within the chosen ones on their threads, and their launches.

        Args:
            chosen: [S] spans.
        """
        begin, end = merge_intervals(self.start[chosen], self.end[chosen])
        is_inside = np.zeros(chosen.size, np.bool_)
        if begin.size == 0:
            return is_inside
        cpu = np.flatnonzero(self.on_cpu)
        time = self.start[cpu]
        place = np.searchsorted(begin, time, side="right") - 1
        is_inside[cpu] = (place >= 0) & (time < end[np.maximum(place, 0)])
        calling = np.zeros(int(self.launch.max(initial=-1)) + 2, np.bool_)  # the last entry: launched by none
        calling[self.launch[is_inside & self.calls]] = True
        calling[-1] = False
        work = np.flatnonzero(self.launched)
        is_inside[work] = calling[self.launch[work]]
        return is_inside

    def with_backward(self, chosen: Bools) -> Bools:
        """Return [S] a mask of the inside of the chosen spans, and of the backward pass of that.

        A backward operator has the sequence number of its forward operator: the last one with that number,
        since earlier ones only read the next number.

        Args:
            chosen: [S] spans.
        """
        forward = self.inside(chosen)
        places = ("rank", "window", "sequence_number", "forward_thread", "span_id", "start_ns")
        spans = self.rows("kind", *places)  # read at once
        rank, window, number, thread, ids, start = (spans[name].to_numpy() for name in places)
        numbered = np.flatnonzero((number >= 0) & (spans["kind"] == "cpu_op").to_numpy())
        asked = _row_numbers(rank[numbered], window[numbered], number[numbered])
        is_forward = thread[numbered] <= 0
        order = np.lexsort((ids[numbered], start[numbered]))
        order = order[is_forward[order]]
        asker = np.full(int(asked.max(initial=-1)) + 1, -1)
        asker[asked[order]] = numbered[order]  # the last of equal ones stays
        backward = ~is_forward & np.append(forward, False)[asker[asked]]
        late = np.zeros(chosen.size, np.bool_)
        late[numbered[backward]] = True
        return forward | self.inside(late)

    def marked(self, rows: pl.DataFrame) -> Bools:
        """Return [S] a mask of the spans among some rows.

        Args:
            rows: of `spans`.
        """
        is_marked = np.zeros(self.start.size, np.bool_)
        is_marked[rows["row"].to_numpy()] = True
        return is_marked

    def column(self, name: str) -> Ints:
        """Return a column of the rows.

        Args:
            name: of `COLUMNS`.
        """
        return self.rows(name)[name].to_numpy()


@kept_as("nesting-of-spans", {"Nesting": Nesting})
def nesting_of(graph: Graph) -> Nesting:
    """Return the spans of a graph's run, in order of their threads.

    Raises:
        Unanswerable: the graph has no run.
    """
    run = _run_of(graph)
    columns = ("rank", "window", "kind", "start_ns", "duration_ns", "tid", "correlation")
    spans = _with_wide_ranks(run.table(SPANS, columns))
    rank, window, start, lasts, correlation = (
        spans[name].to_numpy() for name in ("rank", "window", "start_ns", "duration_ns", "correlation")
    )
    kinds, called = spans["kind"], correlation >= 0
    launch = np.full(spans.height, -1)
    launch[called] = _row_numbers(rank[called], window[called], correlation[called])
    lane = _renumbered(_row_numbers(rank, window, _renumbered(spans["tid"].to_numpy())))
    begins = np.full(int(lane.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins, lane, start)
    since = start - begins[lane]
    begin = since + lane * (int((since + lasts).max(initial=0)) + 1)
    calls = (kinds == "runtime").to_numpy() & called
    launched = kinds.is_in(GPU_WORK_KINDS).to_numpy() & called
    on_cpu = kinds.is_in(ON_CPU).to_numpy()
    return Nesting(run, on_cpu, begin, lasts, launch, calls, launched)


def _with_wide_ranks(spans: pl.DataFrame) -> pl.DataFrame:
    return spans.with_columns(pl.col("^rank$").cast(pl.Int64))


def _renumbered(values: Ints) -> Ints:
    """Replace values, few of which differ, by numbers from 0 on."""
    return np.searchsorted(np.sort(pl.Series(values).unique().to_numpy()), values)


def _row_numbers(*columns: Ints) -> Ints:
    """Return [K] a number for each row, from 0 on, equal where all columns are."""
    columns = tuple(column - column.min(initial=0) for column in columns)
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    if math.prod(sizes) <= MAX_SPARSE * (columns[0].size + 1):
        return np.ravel_multi_index(columns, sizes)
    if any(size > columns[0].size for size in sizes):
        return _row_numbers(*(np.unique(column, return_inverse=True)[1] for column in columns))
    return np.unique(np.ravel_multi_index(columns, sizes), return_inverse=True)[1]


def nodes_of(graph: Graph, members: Bools) -> Bools:
    """Return [N] a mask of the nodes of spans, and of the collectives that they called.

    Args:
        members: [S] spans of its `Nesting`.
    """
    nodes_inside: Bools = np.append(members, False)[rows_of(graph)]
    caller, node = _calls(graph)
    nodes_inside[node[members[caller]]] = True
    return nodes_inside


@kept_as("rows-of-nodes")
def rows_of(graph: Graph) -> Ints:
    """Return [N] the row of each node's span, -1 for none."""
    return _rows(nesting_of(graph), graph.nodes.rank, graph.nodes.span)


def _rows(nesting: Nesting, rank: Ints, span: Ints) -> Ints:
    """Return [K] the row of each span, -1 where there is none.

    Args:
        rank, span: [K] rank and id of the spans; below 0 for none.
    """
    have_spans = (rank >= 0) & (span >= 0)
    of, ids = nesting.column("rank"), nesting.column("span_id")
    keys = _row_numbers(np.append(of, rank[have_spans]), np.append(ids, span[have_spans]))
    row = np.full(int(keys.max(initial=-1)) + 1, -1)
    row[keys[: of.size]] = np.arange(of.size)
    row_of = np.full(rank.size, -1)
    row_of[have_spans] = row[keys[of.size :]]
    return row_of


@kept_as("calls-of-collectives")
def _calls(graph: Graph) -> tuple[Ints, Ints]:
    """Return the rows of spans that called collectives, and the nodes of these."""
    calls = _run_of(graph).table(COLLECTIVES, ["rank", "span_id", "launch_span_id"])
    calls = calls.with_columns(pl.col("rank").cast(pl.Int64)).filter(pl.col("span_id") >= 0)
    nodes = pl.DataFrame({"rank": graph.nodes.rank, "span_id": graph.nodes.span}).with_row_index("node")
    made = calls.join(nodes, on=["rank", "span_id"])
    rank, launch, node = (made[name].to_numpy() for name in ("rank", "launch_span_id", "node"))
    row = _rows(nesting_of(graph), rank, launch)
    return row[row >= 0], node[row >= 0].astype(np.int64)


RANGES = ("annotation", "python")
DATA_LOADING = "enumerate(DataLoader)*"  # pattern for the range in which torch waits for a batch
OPTIMIZER = "Optimizer.step#"  # followed by the class of the optimizer
MAX_NAMES = 4  # modules listed in a reason
WRAPPER = "module."  # prefix of module names within DDP
NUMBERED = re.compile(r"(?:.*\.)?\d+")  # names of modules by dpro and DDP
OF_CLASS = re.compile(r"\w+_\d+")  # names of modules by torch.profiler with Python stacks, numbered by class
LANE = ["rank", "window", "tid"]


def in_modules(graph: Graph, pattern: str) -> Bools:
    """Return [N] a mask of ranges that fit a pattern, their backward pass, and the work that both launch.

    Raises:
        Unanswerable: no module or other range fits.
    """
    return once(graph, ("in modules", pattern), lambda graph: _in_modules(graph, pattern))


def _in_modules(graph: Graph, pattern: str) -> Bools:
    nesting = nesting_of(graph)
    ranges = nesting.rows("kind", "name").filter(pl.col("kind").is_in(RANGES))
    ranges = ranges.with_columns(pl.col("name").str.strip_prefix(MODULE))
    chosen = ranges.filter(_fits(ranges, pattern))
    if chosen.is_empty():
        near = suggest(pattern, ranges["name"].unique().sort().to_list())
        raise NothingToChange(
            f"no module or range in the run fits {pattern!r}{near}: for modules, record with "
            f"{how_to_record(MODULES, graph.run)}"
        )
    return nodes_of(graph, nesting.with_backward(nesting.marked(chosen)))


@kept_as("optimizer")
def optimizing(graph: Graph) -> Bools:
    """Return [N] a mask of the optimizer's work; empty where its range was not recorded."""
    try:
        return in_modules(graph, f"{OPTIMIZER}*")
    except Unanswerable:
        return np.zeros(graph.num_nodes, np.bool_)


def blocks_of(graph: Graph, pattern: str) -> pl.DataFrame:
    """Return the nodes of each call of the outermost modules that fit a pattern, forward and backward.

    Returns:
        `node`, `block` (a number per call), `backward`.

    Raises:
        Unanswerable: there is no such module, or backward already recomputes it.
    """
    nesting = nesting_of(graph)
    calls = _modules(graph, nesting, pattern)
    again = _recomputed_modules(nesting, calls)
    if again:
        named = first_few(again, MAX_NAMES)
        raise Unanswerable(f"the job already recomputes activations in backward: those of {named}")
    rows, parts = rows_of(graph), []
    for block, outer in enumerate(_outermost(calls)["row"].to_list()):
        chosen = np.arange(nesting.start.size) == outer
        forward, every = (
            np.append(rows_in(chosen), False) for rows_in in (nesting.inside, nesting.with_backward)
        )
        node = np.flatnonzero(every[rows])
        parts.append(pl.DataFrame({"node": node, "block": block, "backward": ~forward[rows[node]]}))
    return pl.concat(parts).sort("node", maintain_order=True)


def outermost_modules(graph: Graph, pattern: str) -> list[str]:
    """Return the names of the outermost modules that fit a pattern.

    Raises:
        Unanswerable: there is no such module.
    """
    return _outermost(_modules(graph, nesting_of(graph), pattern))["name"].unique().sort().to_list()


def _modules(graph: Graph, nesting: Nesting, pattern: str) -> pl.DataFrame:
    """Return the calls of the modules whose names fit a pattern."""
    ranges = nesting.spans.filter(pl.col("kind").is_in(RANGES) & pl.col("name").str.starts_with(MODULE))
    ranges = ranges.with_columns(pl.col("name").str.strip_prefix(MODULE))
    fits = ranges.filter(_fits(ranges, pattern))
    if fits.is_empty():
        near = suggest(pattern, ranges["name"].unique().sort().to_list())
        how = how_to_record(MODULES, graph.run)
        raise Unanswerable(f"no module in the run fits {pattern!r}{near}: for modules, record with {how}")
    return fits


def blocks_of_run(run: Run | None) -> dict[str, list[str]]:
    """Return patterns of numbered sibling modules (`layers.*`), each with the names of its blocks.

    Modules that are numbered by class (`BertLayer_*`) count only if they contain others.
    """
    if run is None:
        return {}
    end = pl.col("start_ns") + pl.col("duration_ns")
    modules = (
        run.table(SPANS, [*LANE, "kind", "name", "start_ns", "duration_ns"])
        .filter(pl.col("kind").is_in(RANGES) & pl.col("name").str.starts_with(MODULE))
        .sort(*LANE, "start_ns", "duration_ns", descending=[False] * 4 + [True])
        .with_columns(holds=pl.col("start_ns").shift(-1).over(LANE) < end)
    )
    holding = modules.group_by(pl.col("name").str.strip_prefix(MODULE), "kind").agg(pl.col("holds").any())
    blocks: dict[str, list[str]] = {}
    for name, kind, holds in holding.sort("name").iter_rows():
        if (holds and OF_CLASS.fullmatch(name)) if kind == "python" else NUMBERED.fullmatch(name):
            blocks.setdefault(re.sub(r"\d+$", "*", name), []).append(name)
    return {pattern: names for pattern, names in blocks.items() if len(names) > 1}


def _recomputed_modules(nesting: Nesting, calls: pl.DataFrame) -> list[str]:
    """Return the names of called modules, and of those inside, that also run in backward."""
    spans = nesting.spans
    is_module = (spans["kind"].is_in(RANGES) & spans["name"].str.starts_with(MODULE)).to_numpy()
    late = spans.filter(is_module & nesting.inside(nesting.column("forward_thread") > 0))
    if late.is_empty():
        return []
    inside = spans.filter(is_module & nesting.inside(nesting.marked(calls)))
    names = inside.join(late, on=["rank", "name"], how="semi")["name"].str.strip_prefix(MODULE)
    return names.unique().sort().to_list()


def _outermost(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans that are inside no other of their thread."""
    ordered = spans.sort(*LANE, "start_ns", "duration_ns", descending=[False] * 4 + [True])
    latest = (pl.col("start_ns") + pl.col("duration_ns")).cum_max().shift(1).over(LANE)
    return ordered.filter((pl.col("start_ns") >= latest).fill_null(True))


def names_in_scope(graph: Graph, pattern: str) -> list[str]:
    """Return the names of the ranges that fit a pattern, and of all CPU spans inside them.

    Raises:
        Unanswerable: there is no such range.
    """
    nesting = nesting_of(graph)
    ranges = nesting.spans.filter(pl.col("kind").is_in(RANGES))
    chosen = ranges.filter(_fits(ranges, pattern))
    if chosen.is_empty():
        raise NothingToChange(
            f"the run has no range {pattern!r}: record with torch.profiler or `dpro record`"
        )
    inner = nesting.spans.filter(nesting.inside(nesting.marked(chosen)) & nesting.on_cpu)
    return inner["name"].unique().sort().to_list()


def launching_only(graph: Graph, work: Bools) -> Bools:
    """Return [N] a mask of the outermost operators that launch only work of `work`, and their inside.

    Without a run, which has the operators, only the calls.

    Args:
        work: [N] GPU work.
    """
    calls = calls_only_for(graph, work)
    if graph.run is None:
        return calls
    nesting = nesting_of(graph)
    launch, operator = _launches_in_operators(graph)
    gone = np.zeros(nesting.start.size + 1, np.bool_)
    gone[rows_of(graph)[calls]] = True
    idle = np.zeros(nesting.start.size, np.bool_)
    idle[operator] = True
    idle[operator[~gone[launch]]] = False
    on_cpu = is_one_of(graph.nodes.kind, CPU_KINDS)
    return calls | (nodes_of(graph, nesting.inside(idle)) & on_cpu)


@kept_as("launches-in-operators")
def _launches_in_operators(graph: Graph) -> tuple[Ints, Ints]:
    """Return the rows of launches of GPU work in operators, and of their outermost operators."""
    nesting = nesting_of(graph)
    operators = np.flatnonzero((nesting.rows("kind")["kind"] == "cpu_op").to_numpy())
    operators = operators[np.lexsort((-nesting.end[operators], nesting.start[operators]))]
    latest = np.maximum.accumulate(nesting.end[operators])
    is_outer = np.ones(operators.size, np.bool_)
    is_outer[1:] = nesting.start[operators[1:]] >= latest[:-1]
    outer = operators[is_outer]
    launching = np.zeros(int(nesting.launch.max(initial=-1)) + 1, np.bool_)
    launching[nesting.launch[nesting.launched]] = True
    calls = np.flatnonzero(nesting.calls)
    calls = calls[launching[nesting.launch[calls]]]
    place = np.searchsorted(nesting.start[outer], nesting.start[calls], side="right") - 1
    inside = (place >= 0) & (nesting.start[calls] < np.append(nesting.end[outer], 0)[place])
    return calls[inside], outer[place[inside]]


def matmuls_of_kernels(graph: Graph, kernels: Bools) -> pl.DataFrame:
    """Return the matmuls that launched the masked kernels.

    Args:
        kernels: [N] mask of kernels.

    Returns:
        `node`, `rank`, `span_id`, `name`, `shapes`, `backward` (whether a backward pass called it), sorted by
        node; kernels that no matmul launched are left out.
    """
    matmuls = _matmuls_of_kernels(graph)
    return matmuls.filter(kernels[matmuls["node"].to_numpy()])


def products_of_kernels(graph: Graph, kernels: Bools) -> pl.DataFrame:
    """Return the rows of `matmuls_of_kernels` with shapes, with `batch`, `m`, `n`, `k`."""
    operators = matmuls_of_kernels(graph, kernels)
    shapes = operators.select("name", "shapes").unique().rows()
    rows = [(*shape, *size) for shape in shapes if (size := product_of(*shape)) is not None]
    sizes = dict.fromkeys(("name", "shapes"), pl.String) | dict.fromkeys(("batch", "m", "n", "k"), pl.Float64)
    return operators.join(pl.DataFrame(rows, schema=sizes, orient="row"), on=["name", "shapes"])


@kept_as("matmuls-of-kernels")
def _matmuls_of_kernels(graph: Graph) -> pl.DataFrame:
    spans = spans_of(_run_of(graph), [*COLUMNS, "shapes"])
    end = pl.col("start_ns") + pl.col("duration_ns")
    operators = spans.filter((pl.col("kind") == "cpu_op") & pl.col("name").is_in(list(MATMULS)))
    backward_threads = spans.filter(pl.col("forward_thread") > 0).select(LANE).unique()
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    called = (
        calls.select(*LANE, "start_ns", "correlation")
        .sort("start_ns")
        .join_asof(
            operators.select(*LANE, "start_ns", "name", "shapes", operator="span_id", until=end).sort(
                "start_ns"
            ),
            on="start_ns",
            by=LANE,
            strategy="backward",
            check_sortedness=False,
        )
        .filter(pl.col("start_ns") < pl.col("until"))
        .join(backward_threads.with_columns(backward=pl.lit(True)), on=LANE, how="left")
        .unique(["rank", "window", "correlation"], keep="first", maintain_order=True)
    )
    nodes = pl.DataFrame({"rank": graph.nodes.rank, "span_id": graph.nodes.span}).with_row_index("node")
    launched = spans.filter(pl.col("kind") == "kernel").select("rank", "window", "span_id", "correlation")
    return (
        nodes.filter(pl.Series(graph.nodes.kind == NodeKind.KERNEL))
        .join(launched, on=["rank", "span_id"])
        .drop("span_id")
        .join(called, on=["rank", "window", "correlation"])
        .select("node", "rank", "name", "shapes", pl.col("backward").fill_null(False), span_id="operator")
        .sort("node")
    )


def calls_only_for(graph: Graph, work: Bools) -> Bools:
    """Return [N] a mask of calls that launch some of this work and no other.

    Args:
        work: [N] GPU work.
    """
    edges = graph.edges
    launch = np.flatnonzero(edges.kind == EdgeKind.LAUNCH)
    source, of_work = edges.source[launch], work[edges.target[launch]]
    some, others = np.zeros(graph.num_nodes, np.bool_), np.zeros(graph.num_nodes, np.bool_)
    some[source[of_work]] = True
    others[source[~of_work]] = True
    calls: Bools = some & ~others & is_one_of(graph.nodes.kind, (NodeKind.RUNTIME, NodeKind.DELAY))
    return calls


def descendants_of(graph: Graph, pattern: str) -> Bools:
    """Return [N] a mask of CPU spans whose name fits a pattern, with everything they call and launch."""

    def spans(graph: Graph) -> Bools:
        nesting = nesting_of(graph)
        on_cpu = nesting.rows("name").filter(nesting.on_cpu)
        return nesting.inside(nesting.marked(on_cpu.filter(_fits(on_cpu, pattern))))

    def nodes(graph: Graph) -> Bools:
        return nodes_of(graph, once(graph, ("descending spans", pattern), spans))

    return once(graph, ("descendants", pattern), nodes)


def with_descendants(graph: Graph, mask: Bools) -> Bools:
    """Return [N] the masked nodes with all that their CPU spans call and launch; unchanged without a run.

    Args:
        mask: [N] nodes.
    """
    if graph.run is None:
        return mask
    nesting = nesting_of(graph)
    picked = np.zeros(nesting.start.size + 1, np.bool_)
    picked[rows_of(graph)[mask]] = True
    return mask | nodes_of(graph, nesting.inside(picked[:-1] & nesting.on_cpu))


def _run_of(graph: Graph) -> Run:
    if graph.run is None:
        raise Unanswerable("the graph has no run, so the nesting of its spans is unknown")
    return graph.run


def spans_of(run: Run, columns: Sequence[str] = COLUMNS) -> pl.DataFrame:
    """Return the run's spans with these columns; ranks have the graph's type.

    Args:
        columns: of the `spans` table.
    """
    return run.table(SPANS, columns).with_columns(pl.col("rank").cast(pl.Int64))


def _fits(spans: pl.DataFrame, pattern: str) -> pl.Series:
    names = spans["name"].unique().to_list()
    fitting = [name for name in names if _fits_name(name, pattern)]
    return spans["name"].is_in(fitting)


def _fits_name(name: str, pattern: str) -> bool:
    """Return whether a pattern fits this name, with or without the prefix of DDP."""
    inside = name.removeprefix(WRAPPER)
    return pattern in (name, inside) or fnmatchcase(name, pattern) or fnmatchcase(inside, pattern)
