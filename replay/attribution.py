"""Which operator and module a kernel is of: by its launch, or of a CUDA graph by the same launched eagerly.

In: spans, and the steps that were recorded. Out: a row per kernel, empty where it is not known. A graph is
launched by one call, and its kernels have no operator above them. Their names in the order of each stream are
aligned with the names of kernels that operators launched, in the order of their launches in one step: in a
warm-up, in another window, on another rank. What all longest common subsequences agree on is taken, of all
steps that fit best; the rest is ambiguous, and stays empty.
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
MODULE = "nn.Module: "  # how ranges of modules begin
NUMBER = r"(^|[._])\d+\b"  # of a layer
GRAPH_LAUNCH = "(?i)GraphLaunch"
WORK = ["module", "operator", "shapes"]
BY_LAUNCH, BY_EAGER, AMBIGUOUS, UNKNOWN = "launch", "eager", "ambiguous", "unknown"  # values of `how`
MIN_COMMON = 0.5  # of a graph's kernels, in the same order: else it is another program
AS_GOOD = 0.9  # of the best: steps with so much in common have to agree
MIN_RANKS = 2  # that have to agree on shapes, which may differ, or the graph's own
MAX_CELLS = 60_000_000  # of a table of common subsequences, 2 bytes each
MAX_COMPARED = 16  # steps that a graph is aligned with


def innermost(outer: pl.DataFrame, at: pl.DataFrame) -> Ints:
    """[K] the row of the innermost span that is open on the same thread at each moment, -1 for none.

    Args:
        outer, at: with `LANE` and `start_ns`; the first with `duration_ns`.
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
    """The kernels of a run with what they are of.

    Args:
        spans: of any ranks.
        steps: table `steps`.

    Returns:
        `rank`, `window`, `span_id`, `name`, `duration_ns`, `module`, `operator`, `shapes` (texts, empty where
        unknown) and `how`: launch, eager, ambiguous or unknown.
    """
    kernels = _launched(spans)
    graphs = kernels.filter("of_graph")
    if graphs.height:
        eager = kernels.filter(~pl.col("of_graph") & (pl.col("operator") != ""))
        kernels = pl.concat(
            [kernels.filter(~pl.col("of_graph")), _aligned(graphs, _eager(eager, spans, steps))]
        )
    return kernels.select("rank", "window", "span_id", "name", "duration_ns", *WORK, "how")


def totals(kernels: pl.DataFrame) -> pl.DataFrame:
    """The kernels of each module and operator, layers counted together.

    Args:
        kernels: as of `attributed`.

    Returns:
        `module` (numbers as `*`), `operator`, `count`, `total_ns`, the largest total first.
    """
    named = kernels.with_columns(pl.col("module").str.replace_all(NUMBER, "${1}*"))
    sums = named.group_by("module", "operator").agg(
        pl.len().cast(pl.Int64).alias("count"), pl.col("duration_ns").sum().alias("total_ns")
    )
    return sums.sort("total_ns", "module", "operator", descending=[True, False, False])


def work_of(spans: pl.DataFrame, at: pl.DataFrame) -> pl.DataFrame:
    """What is called at some moments: `module`, `operator`, `shapes`, and whether it is of a `backward`.

    Args:
        at: with `LANE` and `start_ns`, [K].
    """
    operators = spans.filter(pl.col("kind") == "cpu_op")
    is_module = pl.col("name").str.starts_with(MODULE) & pl.col("kind").is_in(["annotation", "python"])
    modules = spans.filter(is_module)
    numbered = operators.filter(pl.col("sequence_number") >= 0)
    number = ["rank", "window", "sequence_number"]
    asked = numbered.filter(pl.col("forward_thread") <= 0).sort("start_ns", "span_id")
    asked = asked.unique(number, keep="last", maintain_order=True)
    asked = asked.select(*number, asked_by=_taken(modules["name"], innermost(modules, asked)))
    backward = numbered.filter(pl.col("forward_thread") > 0).join(asked, on=number, how="left")
    operator, of_backward = innermost(operators, at), innermost(backward, at)
    inside = _taken(modules["name"], innermost(modules, at))  # recomputation in a backward is in its module
    asked_by = _taken(backward["asked_by"].fill_null(""), of_backward)
    return pl.DataFrame(
        {
            "module": inside.zip_with(inside != "", asked_by).str.strip_prefix(MODULE),
            "operator": _taken(operators["name"], operator),
            "shapes": _taken(operators["shapes"], operator),
            "backward": of_backward >= 0,
        }
    )


def _launched(spans: pl.DataFrame) -> pl.DataFrame:
    """Kernels with `WORK` of the operator that launched them, `how`, `of_graph`, `stream`, `launched_ns`."""
    launch = ["rank", "window", "correlation"]
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    calls = calls.unique(launch, keep="first", maintain_order=True)
    # Its middle: in microseconds, a call may begin where the operator before it still seems to last.
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


def _taken(names: pl.Series, rows: Ints) -> pl.Series:
    """[K] the name of each row, empty where the row is -1."""
    return pl.concat([names, pl.Series([""])]).gather(np.where(rows < 0, names.len(), rows))


class EagerStep(NamedTuple):
    """What operators launched on one rank in one step, in the order of launches.

    Attributes:
        names: [E] of the kernels.
        work: [E] their `WORK`.
        ranks: that launched the same in a step.
    """

    names: list[str]
    work: list[tuple[str, ...]]
    ranks: frozenset[int]


def _eager(kernels: pl.DataFrame, spans: pl.DataFrame, steps: pl.DataFrame) -> list[EagerStep]:
    """What operators launched, by rank and step; steps in which the same was launched are one."""
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


def _aligned(graphs: pl.DataFrame, eager: Sequence[EagerStep]) -> pl.DataFrame:
    """Kernels of graphs with the work of those that they are aligned with."""
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
    """What the kernels of a graph are of.

    Attributes:
        work: [K] `WORK` and `how`.
        ranks: whose steps say that.
    """

    work: list[tuple[str, ...]]
    ranks: frozenset[int]

    def on(self, rank: int) -> list[tuple[str, ...]]:
        """The same on a rank: shapes are those of its own steps, or what two ranks agree on."""
        if rank in self.ranks or len(self.ranks) >= MIN_RANKS:
            return self.work
        return [(module, operator, "", how) for module, operator, _, how in self.work]


def align(names: Sequence[str], eager: Sequence[EagerStep]) -> Aligned:
    """What the kernels of a graph are of, as the steps that fit best agree.

    Args:
        names: of the kernels of one stream, in their order, [K].
    """
    count, enough = Counter(names), MIN_COMMON * len(names)
    bounded = [((count & Counter(step.names)).total(), step) for step in eager]
    bounded.sort(key=lambda pair: (-pair[0], len(pair[1].names)))
    options = []
    for most, step in bounded[:MAX_COMPARED]:
        if most >= enough and len(names) * len(step.names) <= MAX_CELLS:
            options.append((*_agreed(names, step), step.ranks))
            enough = max(enough, AS_GOOD * options[-1][0])
    chosen = [(works, ranks) for common, works, ranks in options if common >= enough]
    if not chosen:
        return Aligned([("", "", "", UNKNOWN)] * len(names), frozenset())
    united = [_united(said) for said in zip(*(works for works, _ in chosen), strict=True)]
    return Aligned(united, frozenset().union(*(ranks for _, ranks in chosen)))


def _united(options: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What some steps say of one kernel, as far as they agree."""
    said = [option for option in options if option[3] != UNKNOWN] or options[:1]
    agreed = tuple(values[0] if len(set(values)) == 1 else "" for values in zip(*said, strict=True))
    is_ambiguous = any(option[1] or option[3] == AMBIGUOUS for option in options)
    return (*agreed[:3], BY_EAGER if agreed[1] else AMBIGUOUS if is_ambiguous else UNKNOWN)


def _agreed(names: Sequence[str], step: EagerStep) -> tuple[int, list[tuple[str, ...]]]:
    """How long the longest common subsequence is, and what all of these say of each kernel.

    Of two sequences, these subsequences are paths through a table; all lie between one that skips kernels of
    the step as early as it can and one that skips kernels of the graph. What a kernel may be aligned with is
    between the two.
    """
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    ours = np.array([codes[name] for name in names])
    kept = [place for place, name in enumerate(step.names) if name in codes]
    theirs = np.array([codes[step.names[place]] for place in kept], np.int64)
    table = np.zeros((ours.size + 1, theirs.size + 1), np.int16)
    for row, code in enumerate(ours):
        better = np.maximum(table[row, 1:], table[row, :-1] + (theirs == code))
        table[row + 1, 1:] = np.maximum.accumulate(better)
    first, last = (_path(table, ours, theirs, skip_theirs) for skip_theirs in (True, False))
    works: list[tuple[str, ...]] = []
    for place, code in enumerate(ours):
        begin, end = sorted((int(first[place]), int(last[place])))
        if begin < 0 or end < 0:
            works.append(("", "", "", AMBIGUOUS if max(begin, end) >= 0 else UNKNOWN))
            continue
        between = begin + np.flatnonzero(theirs[begin : end + 1] == code)
        works.append(_united([(*step.work[kept[index]], BY_EAGER) for index in between]))
    return int(table[-1, -1]), works


def _path(table: NDArray[np.int16], ours: Ints, theirs: Ints, skip_theirs: bool) -> Ints:
    """[K] the place that each kernel is aligned with on an outermost path, -1 for none."""
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
