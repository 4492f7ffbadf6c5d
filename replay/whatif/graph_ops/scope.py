"""The scope of spans: the work of an operator or a module as a whole, its backward pass and its kernels.

In: a graph with the run it was made from. Out: masks over its nodes. A node has the innermost span it is
part of and nothing of those around that; the run's tables do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import numpy as np
import polars as pl

from dpro.arrays import Bools
from dpro.errors import Unanswerable
from dpro.replay.construction.cpu_threads import merge_intervals
from dpro.replay.graph import CPU_KINDS, EdgeKind, Graph, NodeKind, once
from dpro.replay.models.memory import MODULE
from dpro.replay.whatif.grammar import nearest
from dpro.schema import COLLECTIVES, GPU_WORK_KINDS, SPANS
from dpro.store import Run
from dpro.words import few

RANGES = ("annotation", "python")
OPTIMIZER = "Optimizer.step#"  # with the class of the optimizer behind it
MAX_NAMES = 4  # of modules that a reason lists
WRAPPER = "module."  # by which DDP names the module inside
NUMBERED = re.compile(r"(?:.*\.)?\d+")  # as dpro and DDP name modules
OF_CLASS = re.compile(r"\w+_\d+")  # as torch.profiler numbers the modules of a class, with Python stacks
ON_CPU = ("cpu_op", "runtime", "annotation", "python")
COLUMNS = [
    *("span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "tid"),
    *("correlation", "sequence_number", "forward_thread"),
]
LANE = ["rank", "window", "tid"]


def in_modules(graph: Graph, pattern: str) -> Bools:
    """[N] nodes of modules or other ranges that fit a pattern, of their backward pass, and what both launch.

    Args:
        graph: the graph, with its run.
        pattern: a shell pattern for names of ranges.

    Raises:
        Unanswerable: there is no such range.
    """
    columns = (graph.nodes.rank, graph.nodes.span)
    return once(graph, ("in modules", pattern), columns, lambda: _in_modules(graph, pattern))


def _in_modules(graph: Graph, pattern: str) -> Bools:
    spans = spans_of(_run_of(graph))
    ranges = spans.filter(pl.col("kind").is_in(RANGES)).with_columns(pl.col("name").str.strip_prefix(MODULE))
    chosen = ranges.filter(_fits(ranges, pattern))
    if chosen.is_empty():
        near = nearest(pattern, ranges["name"].unique().sort().to_list())
        raise Unanswerable(
            f"no module or range in the run fits {pattern!r}{near}: `dpro record --modules` names modules"
        )
    return _nodes_of(graph, _with_backward(spans, chosen))


def optimizing(graph: Graph) -> Bools:
    """[N] what the optimizer does; nothing where its range was not recorded."""
    try:
        return in_modules(graph, f"{OPTIMIZER}*")
    except Unanswerable:
        return np.zeros(graph.num_nodes, np.bool_)


def blocks_of(graph: Graph, pattern: str) -> pl.DataFrame:
    """The nodes of each call of the outermost modules that fit a pattern, forward and backward.

    Args:
        graph: the graph, with its run.
        pattern: a shell pattern for names of modules.

    Returns:
        `node`, `block` (a number per call), `backward`.

    Raises:
        Unanswerable: there is no such module, or backward runs it again already.
    """
    spans = spans_of(_run_of(graph))
    calls = _modules(spans, pattern)
    again = _run_again(spans, calls)
    if again:
        named = few(again, MAX_NAMES)
        raise Unanswerable(f"the job computes activations again in backward already, those of {named}")
    outermost = _outermost(calls)
    parts = []
    for block, outer in enumerate(outermost.with_row_index("block").partition_by("block", include_key=False)):
        forward = _closure(spans, outer)
        every = _with_backward(spans, outer)
        marked = every.join(forward.with_columns(backward=pl.lit(False)), on=["rank", "span_id"], how="left")
        parts.append(marked.with_columns(pl.col("backward").fill_null(True), block=pl.lit(block)))
    members = pl.concat(parts)
    nodes = pl.DataFrame({"rank": graph.nodes.rank, "span_id": graph.nodes.span}).with_row_index("node")
    return nodes.join(members, on=["rank", "span_id"]).select("node", "block", "backward").sort("node")


def outermost_modules(graph: Graph, pattern: str) -> list[str]:
    """Names of the outermost modules that fit a pattern.

    Args:
        graph: the graph, with its run.
        pattern: a shell pattern for names of modules.

    Raises:
        Unanswerable: there is no such module.
    """
    return _outermost(_modules(spans_of(_run_of(graph)), pattern))["name"].unique().sort().to_list()


def _modules(spans: pl.DataFrame, pattern: str) -> pl.DataFrame:
    """Calls of the modules that fit a pattern, by their names."""
    ranges = spans.filter(pl.col("kind").is_in(RANGES) & pl.col("name").str.starts_with(MODULE))
    ranges = ranges.with_columns(pl.col("name").str.strip_prefix(MODULE))
    fits = ranges.filter(_fits(ranges, pattern))
    if fits.is_empty():
        near = nearest(pattern, ranges["name"].unique().sort().to_list())
        raise Unanswerable(f"no module in the run fits {pattern!r}{near}: `dpro record --modules` names them")
    return fits


def blocks_of_run(run: Run | None) -> dict[str, list[str]]:
    """Patterns for modules that are numbered side by side (`layers.*`), each with the names of its blocks.

    Modules that are numbered by class (`BertLayer_*`) count where they hold others.
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
    found: dict[str, list[str]] = {}
    for name, kind, holds in holding.sort("name").iter_rows():
        if (holds and OF_CLASS.fullmatch(name)) if kind == "python" else NUMBERED.fullmatch(name):
            found.setdefault(re.sub(r"\d+$", "*", name), []).append(name)
    return {pattern: names for pattern, names in found.items() if len(names) > 1}


def _run_again(spans: pl.DataFrame, calls: pl.DataFrame) -> list[str]:
    """Names of the called modules, and of those that these call, that run in backward, too."""
    ranges = spans.filter(pl.col("kind").is_in(RANGES) & pl.col("name").str.starts_with(MODULE))
    in_backward = _closure(spans, spans.filter(pl.col("forward_thread") > 0))
    late = ranges.join(in_backward, on=["rank", "span_id"], how="semi")
    if late.is_empty():
        return []
    inside = ranges.join(_closure(spans, calls), on=["rank", "span_id"], how="semi")
    names = inside.join(late, on=["rank", "name"], how="semi")["name"].str.strip_prefix(MODULE)
    return names.unique().sort().to_list()


def _outermost(spans: pl.DataFrame) -> pl.DataFrame:
    """Of spans those that lie in no other of their thread."""
    ordered = spans.sort(*LANE, "start_ns", "duration_ns", descending=[False] * 4 + [True])
    latest = (pl.col("start_ns") + pl.col("duration_ns")).cum_max().shift(1).over(LANE)
    return ordered.filter((pl.col("start_ns") >= latest).fill_null(True))


def names_in_scope(graph: Graph, pattern: str) -> list[str]:
    """Names of the ranges that fit a pattern, and of all CPU spans inside them.

    Args:
        graph: the graph, with its run.
        pattern: a shell pattern for names of ranges.

    Raises:
        Unanswerable: there is no such range.
    """
    spans = spans_of(_run_of(graph))
    ranges = spans.filter(pl.col("kind").is_in(RANGES))
    chosen = ranges.filter(_fits(ranges, pattern))
    if chosen.is_empty():
        raise Unanswerable(f"the run has no range {pattern!r}: record with torch.profiler or `dpro record`")
    inner = spans.join(_closure(spans, chosen), on=["rank", "span_id"], how="semi")
    return inner.filter(pl.col("kind").is_in(ON_CPU))["name"].unique().sort().to_list()


def launching_only(graph: Graph, work: Bools) -> Bools:
    """[N] the outermost operators that launch some of this GPU work and none other, with all inside them.

    Without a run, which names operators, the calls alone.

    Args:
        graph: the graph.
        work: [N] GPU work.
    """
    calls = calls_of(graph, work)
    if graph.run is None:
        return calls
    run = graph.run
    spans = spans_of(run)
    outer, inside = once(graph, "launches in operators", (run,), lambda: _launches_in_operators(spans))
    gone = pl.DataFrame({"rank": graph.nodes.rank[calls], "span_id": graph.nodes.span[calls]}).unique()
    left = inside.join(gone, on=["rank", "span_id"], how="anti")
    idle = inside.join(left, on=["rank", "outer"], how="anti").select("rank", span_id="outer").unique()
    chosen = outer.join(idle, on=["rank", "span_id"], how="semi")
    on_cpu = np.isin(graph.nodes.kind, CPU_KINDS)
    return calls | (_nodes_of(graph, _closure(spans, chosen)) & on_cpu)


def _launches_in_operators(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Outermost operators; and launches of GPU work in them, with `outer`, the operator."""
    outer = _outermost(spans.filter(pl.col("kind") == "cpu_op"))
    launches = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0)).join(
        spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS)), on=["rank", "window", "correlation"], how="semi"
    )
    inside = (
        launches.sort("start_ns")
        .join_asof(
            outer.sort("start_ns").select(
                *LANE, "start_ns", outer="span_id", until=pl.col("start_ns") + pl.col("duration_ns")
            ),
            on="start_ns",
            by=LANE,
            strategy="backward",
            check_sortedness=False,
        )
        .filter(pl.col("start_ns") < pl.col("until"))
    )
    return outer, inside


def operators_of_kernels(graph: Graph, kernels: Bools, names: Collection[str]) -> pl.DataFrame:
    """The operators of these names that launched the masked kernels.

    Args:
        graph: the graph, with its run.
        kernels: [N] which kernels.
        names: of the operators that count.

    Returns:
        `node`, `rank`, `span_id`, `name`, `shapes`, `backward` (whether a backward pass called it), sorted by
        node; kernels that none of these operators launched are left out.
    """
    spans = spans_of(_run_of(graph), [*COLUMNS, "shapes"])
    end = pl.col("start_ns") + pl.col("duration_ns")
    operators = spans.filter((pl.col("kind") == "cpu_op") & pl.col("name").is_in(list(names)))
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
        nodes.filter(pl.Series(kernels))
        .join(launched, on=["rank", "span_id"])
        .drop("span_id")
        .join(called, on=["rank", "window", "correlation"])
        .select("node", "rank", "name", "shapes", pl.col("backward").fill_null(False), span_id="operator")
        .sort("node")
    )


def calls_of(graph: Graph, work: Bools) -> Bools:
    """[N] calls that launch some of this work and no other.

    Args:
        graph: the graph.
        work: [N] GPU work.
    """
    edges = graph.edges
    launch = edges.kind == EdgeKind.LAUNCH
    some, others = np.zeros(graph.num_nodes, np.bool_), np.zeros(graph.num_nodes, np.bool_)
    some[edges.source[launch & work[edges.target]]] = True
    others[edges.source[launch & ~work[edges.target]]] = True
    calls: Bools = some & ~others & np.isin(graph.nodes.kind, (NodeKind.RUNTIME, NodeKind.DELAY))
    return calls


def descendants_of(graph: Graph, pattern: str) -> Bools:
    """[N] nodes of CPU spans whose name fits a pattern, with all that these call and launch.

    Args:
        graph: the graph, with its run.
        pattern: a shell pattern for names of spans.
    """
    run = _run_of(graph)

    def compute() -> Bools:
        spans = spans_of(run)
        on_cpu = spans.filter(pl.col("kind").is_in(ON_CPU))
        return _nodes_of(graph, _closure(spans, on_cpu.filter(_fits(on_cpu, pattern))))

    return once(graph, ("descendants", pattern), (graph.nodes.rank, graph.nodes.span), compute)


def with_descendants(graph: Graph, mask: Bools) -> Bools:
    """[N] the masked nodes with all that their CPU spans call and launch; as they are without a run.

    Args:
        graph: the graph.
        mask: [N] nodes.
    """
    if graph.run is None:
        return mask
    spans = spans_of(graph.run)
    picked = pl.DataFrame({"rank": graph.nodes.rank[mask], "span_id": graph.nodes.span[mask]}).unique()
    outer = spans.filter(pl.col("kind").is_in(ON_CPU)).join(picked, on=["rank", "span_id"], how="semi")
    return mask | _nodes_of(graph, _closure(spans, outer))


def _run_of(graph: Graph) -> Run:
    if graph.run is None:
        raise Unanswerable("the graph does not know the run it is from: what is inside of what is unknown")
    return graph.run


def spans_of(run: Run, columns: Sequence[str] = COLUMNS) -> pl.DataFrame:
    """The run's spans with these columns, ranks as the graph has them.

    Args:
        run: the run.
        columns: of the `spans` table.
    """
    return run.table(SPANS, columns).with_columns(pl.col("rank").cast(pl.Int64))


def _fits(spans: pl.DataFrame, pattern: str) -> pl.Series:
    known = spans["name"].unique().to_list()
    fitting = [name for name in known if _fits_name(name, pattern)]
    return spans["name"].is_in(fitting)


def _fits_name(name: str, pattern: str) -> bool:
    """Whether a pattern is for this name, or for the one that a module has within DDP."""
    inside = name.removeprefix(WRAPPER)
    return pattern in (name, inside) or fnmatchcase(name, pattern) or fnmatchcase(inside, pattern)


def _with_backward(spans: pl.DataFrame, chosen: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `span_id` of what is inside the chosen spans, and of the backward pass of that.

    A backward operator has the sequence number of the forward operator that asked for it: the last one that
    had it, since those before only looked at the next number.
    """
    forward = _closure(spans, chosen)
    numbered = spans.filter((pl.col("sequence_number") >= 0) & (pl.col("kind") == "cpu_op"))
    asked = (
        numbered.filter(pl.col("forward_thread") <= 0)
        .sort("start_ns", "span_id")
        .unique(["rank", "window", "sequence_number"], keep="last", maintain_order=True)
        .join(forward, on=["rank", "span_id"], how="semi")
    )
    backward = numbered.filter(pl.col("forward_thread") > 0).join(
        asked, on=["rank", "window", "sequence_number"], how="semi"
    )
    return pl.concat([forward, _closure(spans, backward)]).unique()


def _closure(spans: pl.DataFrame, chosen: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `span_id` of all CPU spans within the chosen ones on their threads, and what they launched."""
    on_cpu = spans.filter(pl.col("kind").is_in(ON_CPU))
    parts = []
    for lane, outer in chosen.group_by(LANE):
        start = outer["start_ns"].to_numpy()
        begin, end = merge_intervals(start, start + outer["duration_ns"].to_numpy())
        mine = on_cpu.filter(*(pl.col(name) == value for name, value in zip(LANE, lane)))
        time = mine["start_ns"].to_numpy()
        at = np.searchsorted(begin, time, side="right") - 1
        covered = (at >= 0) & (time < end[np.maximum(at, 0)]) if begin.size else np.zeros(time.size, np.bool_)
        parts.append(mine.filter(pl.Series(covered)))
    called = pl.concat(parts) if parts else on_cpu.clear()
    launching = called.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    launched = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS)).join(
        launching, on=["rank", "window", "correlation"], how="semi"
    )
    return pl.concat([called, launched]).select("rank", "span_id").unique()


def _nodes_of(graph: Graph, members: pl.DataFrame) -> Bools:
    """[N] nodes of the spans, and of collectives that they called."""
    calls = _run_of(graph).table(COLLECTIVES, ["rank", "span_id", "launch_span_id"])
    called = calls.with_columns(pl.col("rank").cast(pl.Int64)).join(
        members, left_on=["rank", "launch_span_id"], right_on=["rank", "span_id"], how="semi"
    )
    every = pl.concat([members, called.select("rank", "span_id")]).unique()
    nodes = pl.DataFrame({"rank": graph.nodes.rank, "span_id": graph.nodes.span})
    at = nodes.with_row_index("node").join(every, on=["rank", "span_id"], how="semi")
    mask = np.zeros(graph.num_nodes, np.bool_)
    mask[at.filter(pl.col("span_id") >= 0)["node"].to_numpy()] = True
    return mask
