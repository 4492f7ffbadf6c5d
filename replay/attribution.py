"""Attribution of kernels to operators and modules, by their launch or, in CUDA graphs, by eager launches.

Takes spans and the recorded steps; returns one row per kernel, with empty texts where the source is unknown.
A CUDA graph is launched by one call, so its kernels have no operator above them. Their names, in stream
order, are aligned with the names of eagerly launched kernels, in launch order, of one step: of a warm-up,
another window or another rank. A kernel is attributed where all longest common subsequences agree, over all
of the best-fitting steps; where they disagree, it is ambiguous and its texts stay empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.replay.engine import innermost_segments
from dpro.replay.steps import recorded_steps

LANE = ["rank", "window", "tid"]
MODULE = "nn.Module: "  # prefix of module ranges
NUMBER = r"(^|[._])\d+\b"  # the number of a layer
GRAPH_LAUNCH = "(?i)GraphLaunch"
WORK = ["module", "operator", "shapes"]
BY_LAUNCH, BY_EAGER, AMBIGUOUS, UNKNOWN = "launch", "eager", "ambiguous", "unknown"  # values of `how`
MIN_COMMON = 0.5  # share of a graph's kernels in common order, below which the step ran another program
AS_GOOD = 0.9  # share of the best match: all steps that reach it have to agree
MIN_RANKS = 2  # that agree on shapes, which may differ between ranks; the graph's own rank alone is enough
MAX_CELLS = 60_000_000  # cells of a subsequence table, 2 bytes each
MAX_COMPARED = 16  # steps that a graph is aligned with, at most


def innermost(outer: pl.DataFrame, at: pl.DataFrame) -> Ints:
    """Return [K] the row of `outer` of the innermost span open on the thread at each moment; -1 for none.

    Args:
        outer: spans with `LANE`, `start_ns` and `duration_ns`.
        at: moments with `LANE` and `start_ns`.
    """
    open_rows = np.full(at.height, -1)
    lanes = pl.concat([outer.select(LANE), at.select(LANE)]).unique().sort(LANE).with_row_index("lane")
    outer, at = (frame.with_row_index("row").join(lanes, on=LANE, how="left") for frame in (outer, at))
    moments = at.sort("lane").partition_by("lane", as_dict=True)
    for lane, spans in outer.sort("start_ns", -pl.col("duration_ns")).group_by("lane"):
        if (inside := moments.get(lane)) is None:
            continue
        start = spans["start_ns"].to_numpy()
        begins, span = innermost_segments(start, start + spans["duration_ns"].to_numpy())
        segment = np.searchsorted(begins, inside["start_ns"].to_numpy(), side="right") - 1
        rows = np.append(spans["row"].to_numpy().astype(np.int64), -1)  # the last: no span is open
        open_rows[inside["row"].to_numpy()] = rows[np.where(segment >= 0, span[segment], -1)]
    return open_rows


def attributed(spans: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels of a run with the module and operator each belongs to.

    Args:
        spans: spans of any ranks.
        steps: table `steps`.

    Returns:
        `rank`, `window`, `span_id`, `name`, `duration_ns`, `module`, `operator`, `shapes` (empty where
        unknown) and `how`: launch, eager, ambiguous or unknown.
    """
    kernels = _launched_kernels(spans)
    graphs = kernels.filter("of_graph")
    if graphs.height:
        eager = kernels.filter(~pl.col("of_graph") & (pl.col("operator") != ""))
        kernels = pl.concat(
            [kernels.filter(~pl.col("of_graph")), _align_graphs(graphs, _eager_steps(eager, spans, steps))]
        )
    return kernels.select("rank", "window", "span_id", "name", "duration_ns", *WORK, "how")


def totals(kernels: pl.DataFrame) -> pl.DataFrame:
    """Sum up kernels by module and operator, with the layers of a module merged.

    Args:
        kernels: rows of `attributed`.

    Returns:
        `module` (layer numbers as `*`), `operator`, `count` and `total_ns`, the largest total first.
    """
    named = kernels.with_columns(pl.col("module").str.replace_all(NUMBER, "${1}*"))
    sums = named.group_by("module", "operator").agg(
        pl.len().cast(pl.Int64).alias("count"), pl.col("duration_ns").sum().alias("total_ns")
    )
    return sums.sort("total_ns", "module", "operator", descending=[True, False, False])


def work_of(spans: pl.DataFrame, at: pl.DataFrame) -> pl.DataFrame:
    """Return `module`, `operator` and `shapes` at each moment, and `backward`: whether within a backward.

    Args:
        at: [K] moments with `LANE` and `start_ns`.
    """
    operators = spans.filter(pl.col("kind") == "cpu_op")
    is_module = pl.col("name").str.starts_with(MODULE) & pl.col("kind").is_in(["annotation", "python"])
    modules = spans.filter(is_module)
    numbered = operators.filter(pl.col("sequence_number") >= 0)
    number = ["rank", "window", "sequence_number"]
    asked = numbered.filter(pl.col("forward_thread") <= 0).sort("start_ns", "span_id")
    asked = asked.unique(number, keep="last", maintain_order=True)
    asked = asked.select(*number, asked_by=_names_at(modules["name"], innermost(modules, asked)))
    backward = numbered.filter(pl.col("forward_thread") > 0).join(asked, on=number, how="left")
    operator, of_backward = innermost(operators, at), innermost(backward, at)
    inside = _names_at(
        modules["name"], innermost(modules, at)
    )  # recomputation in a backward is in its module
    asked_by = _names_at(backward["asked_by"].fill_null(""), of_backward)
    return pl.DataFrame(
        {
            "module": inside.zip_with(inside != "", asked_by).str.strip_prefix(MODULE),
            "operator": _names_at(operators["name"], operator),
            "shapes": _names_at(operators["shapes"], operator),
            "backward": of_backward >= 0,
        }
    )


def _launched_kernels(spans: pl.DataFrame) -> pl.DataFrame:
    """Return kernels with `WORK` of the launching operator, `how`, `of_graph`, `stream` and `launched_ns`."""
    launch = ["rank", "window", "correlation"]
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    calls = calls.unique(launch, keep="first", maintain_order=True)
    # Use the middle of the call: rounded to microseconds, it may begin before the previous operator ends.
    middle = calls.with_columns(start_ns=pl.col("start_ns") + pl.col("duration_ns") // 2)
    of_graph = pl.col("name").str.contains(GRAPH_LAUNCH)
    calls = calls.select(*launch, launched_ns="start_ns", of_graph=of_graph).hstack(work_of(spans, middle))
    calls = calls.with_columns(
        pl.when("of_graph").then(pl.lit("")).otherwise(name).alias(name) for name in WORK
    )
    kernels = spans.filter((pl.col("kind") == "kernel") & (pl.col("duration_ns") >= 0))
    kernels = kernels.select(*launch, "span_id", "name", "stream", "start_ns", "duration_ns")
    how = pl.when(pl.col("operator") != "").then(pl.lit(BY_LAUNCH)).otherwise(pl.lit(UNKNOWN))
    return (
        kernels.join(calls, on=launch, how="left")
        .with_columns(pl.col(WORK).fill_null(""), pl.col("of_graph").fill_null(False))
        .with_columns(how=how)
    )


def _names_at(names: pl.Series, rows: Ints) -> pl.Series:
    """Return [K] the name at each row, empty where the row is -1."""
    return pl.concat([names, pl.Series([""])]).gather(np.where(rows < 0, names.len(), rows))


class EagerStep(NamedTuple):
    """The kernels that operators launched on one rank in one step, in launch order.

    Attributes:
        names: [E] kernel names.
        work: [E] `WORK` of each kernel.
        ranks: all ranks that launched this sequence in some step.
    """

    names: list[str]
    work: list[tuple[str, ...]]
    ranks: frozenset[int]


def _eager_steps(kernels: pl.DataFrame, spans: pl.DataFrame, steps: pl.DataFrame) -> list[EagerStep]:
    """Return the eager launches of each rank and step, with equal sequences merged into one `EagerStep`."""
    stretches = recorded_steps(spans, steps).select("rank", "step", "end_ns", begin="start_ns").sort("begin")
    placed = kernels.sort("launched_ns").join_asof(
        stretches, left_on="launched_ns", right_on="begin", by="rank", check_sortedness=False
    )
    step = pl.when(pl.col("launched_ns") < pl.col("end_ns")).then("step").otherwise(None)
    placed = placed.with_columns(step=step).sort("launched_ns", "start_ns", maintain_order=True)
    groups = placed.group_by("rank", "window", "step", maintain_order=True).agg("name", *WORK)
    by_launches: dict[tuple[Hashable, ...], EagerStep] = {}
    for row in groups.iter_rows(named=True):
        work = list(zip(*(row[column] for column in WORK), strict=True))
        key = (*row["name"], *work)
        ranks = by_launches[key].ranks if key in by_launches else frozenset()
        by_launches[key] = EagerStep(row["name"], work, ranks | {row["rank"]})
    return list(by_launches.values())


def _align_graphs(graphs: pl.DataFrame, eager: Sequence[EagerStep]) -> pl.DataFrame:
    """Return kernels of graphs with the work of the eager kernels that they align with."""
    stream = ["rank", "window", "correlation", "stream"]
    graphs = graphs.sort(*stream, "start_ns", "span_id")
    aligned: dict[tuple[str, ...], Aligned] = {}
    works: list[tuple[str, ...]] = []
    sequences = graphs.group_by(stream, maintain_order=True).agg("name")
    for rank, names in sequences.select("rank", "name").iter_rows():
        if (key := tuple(names)) not in aligned:
            aligned[key] = align(names, eager)
        works += aligned[key].on(rank)
    columns = [*WORK, "how"]
    return graphs.with_columns(pl.DataFrame(works, schema=dict.fromkeys(columns, pl.String), orient="row"))


class Aligned(NamedTuple):
    """The work attributed to the kernels of one graph.

    Attributes:
        work: [K] `WORK` and `how`.
        ranks: the ranks whose eager steps the attribution comes from.
    """

    work: list[tuple[str, ...]]
    ranks: frozenset[int]

    def on(self, rank: int) -> list[tuple[str, ...]]:
        """Return `work` for a rank; shapes are kept if its own steps gave them or `MIN_RANKS` ranks agree."""
        if rank in self.ranks or len(self.ranks) >= MIN_RANKS:
            return self.work
        return [(module, operator, "", how) for module, operator, _, how in self.work]


def align(names: Sequence[str], eager: Sequence[EagerStep]) -> Aligned:
    """Attribute the kernels of a graph where the best-fitting eager steps agree.

    Args:
        names: [K] kernel names of one stream, in stream order.
    """
    count, enough = Counter(names), MIN_COMMON * len(names)
    bounded = [((count & Counter(step.names)).total(), step) for step in eager]
    bounded.sort(key=lambda pair: (-pair[0], len(pair[1].names)))
    options = []
    for most, step in bounded[:MAX_COMPARED]:
        if most >= enough and len(names) * len(step.names) <= MAX_CELLS:
            options.append((*_align_to_step(names, step), step.ranks))
            enough = max(enough, AS_GOOD * options[-1][0])
    chosen = [(works, ranks) for common, works, ranks in options if common >= enough]
    if not chosen:
        return Aligned([("", "", "", UNKNOWN)] * len(names), frozenset())
    united = [_merge_attributions(said) for said in zip(*(works for works, _ in chosen), strict=True)]
    return Aligned(united, frozenset().union(*(ranks for _, ranks in chosen)))


def _merge_attributions(options: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Merge several attributions of one kernel: values on which they differ become empty."""
    said = [option for option in options if option[3] != UNKNOWN] or options[:1]
    agreed = tuple(values[0] if len(set(values)) == 1 else "" for values in zip(*said, strict=True))
    is_ambiguous = any(option[1] or option[3] == AMBIGUOUS for option in options)
    return (*agreed[:3], BY_EAGER if agreed[1] else AMBIGUOUS if is_ambiguous else UNKNOWN)


def _align_to_step(names: Sequence[str], step: EagerStep) -> tuple[int, list[tuple[str, ...]]]:
    """Return the length of the longest common subsequence, and [K] the attributions on which all such agree.

    The longest common subsequences are paths through the table of lengths. All lie between two outermost
    paths: one skips kernels of the step as early as possible, the other kernels of the graph. Only the
    kernels between these two can match a given kernel.
    """
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    ours = np.array([codes[name] for name in names])
    kept = [place for place, name in enumerate(step.names) if name in codes]
    theirs = np.array([codes[step.names[place]] for place in kept], np.int64)
    table = np.zeros((ours.size + 1, theirs.size + 1), np.int16)
    for row, code in enumerate(ours):
        better = np.maximum(table[row, 1:], table[row, :-1] + (theirs == code))
        table[row + 1, 1:] = np.maximum.accumulate(better)
    first, last = (_outermost_path(table, ours, theirs, skip_theirs) for skip_theirs in (True, False))
    works: list[tuple[str, ...]] = []
    for place, code in enumerate(ours):
        begin, end = sorted((int(first[place]), int(last[place])))
        if begin < 0 or end < 0:
            works.append(("", "", "", AMBIGUOUS if max(begin, end) >= 0 else UNKNOWN))
            continue
        between = begin + np.flatnonzero(theirs[begin : end + 1] == code)
        works.append(_merge_attributions([(*step.work[kept[index]], BY_EAGER) for index in between]))
    return int(table[-1, -1]), works


def _outermost_path(table: NDArray[np.int16], ours: Ints, theirs: Ints, skip_theirs: bool) -> Ints:
    """Return [K] the index in `theirs` that each kernel matches on an outermost path; -1 for none."""
    places = np.full(ours.size, -1)
    row, column = ours.size, theirs.size
    while row and column:
        length = table[row, column]
        if table[row, column - 1] == length if skip_theirs else table[row - 1, column] == length:
            skips = skip_theirs
        elif ours[row - 1] == theirs[column - 1]:
            row, column = row - 1, column - 1
            places[row] = column
            continue
        else:
            skips = not skip_theirs
        row, column = (row, column - 1) if skips else (row - 1, column)
    return places
