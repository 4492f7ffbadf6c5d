"""The difference between the steps of two runs, by kind of work.

Takes the graphs of two runs, of any number of steps and ranks; returns the contribution of each kind of work.
Each run is replayed with its work made as long as the other's, one kind after another: from the first run
towards the second and back. A kind contributes the mean of both (two of the orders that a Shapley value
averages over). The remainder is reported as unexplained. Nothing is judged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import polars as pl
from msgspec import UNSET, UnsetType

from dpro.account import Account, AccountedDocument
from dpro.arrays import Floats, Ints
from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import changed_step_times, durations_of, replay_durations, step_ends, usual_steps
from dpro.selection import ALL, Selection, SelectionDocument, selection_document
from dpro.units import ms

MAX_KINDS = 24  # kinds of work listed one by one; the rest, which differs least, is one row
MAX_RATIO = 1000.0  # largest factor on work: beyond it, one run hardly has such work
REST = "all other work"
KINDS = {
    NodeKind.CPU: "operator",
    NodeKind.RUNTIME: "runtime call",
    NodeKind.HOST: "host code",
    NodeKind.GAP: "host code",
    NodeKind.KERNEL: "kernel",
    NodeKind.COPY: "copy",
    NodeKind.TRANSFER: "collective",
    NodeKind.DELAY: "launch",
}


class Contributor(DocumentPart, frozen=True):
    """One kind of work, and its share of the difference.

    Attributes:
        name: name of the work.
        kind: kind of work: kernel, operator, collective and so on.
        delta_ms: by how much it makes the step of B longer.
        a_ms, b_ms: its duration per rank and step in A and in B.
    """

    name: str
    kind: str
    delta_ms: float
    a_ms: float
    b_ms: float


class TypicalChange(DocumentPart, frozen=True, kw_only=True):
    """The typical steps of two runs, as measured outside deep windows.

    Attributes:
        a_ms, b_ms: the typical step of each run.
        change: relative change from A to B, as a share of A.
        between: interval of that share, by the order statistics of both medians.
        a_steps, b_steps: number of steps measured in each run.
    """

    a_ms: float
    b_ms: float
    change: float
    between: tuple[float, float]
    a_steps: int
    b_steps: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the change excludes zero."""
        return self.between[0] > 0 or self.between[1] < 0


class PauseChange(DocumentPart, frozen=True):
    """What pauses add to the mean step of two runs, outside deep windows and first steps.

    Attributes:
        a_ms, b_ms: of each run.
    """

    a_ms: float
    b_ms: float


class DifferenceDocument(AccountedDocument, frozen=True, kw_only=True):
    """Two runs compared.

    Attributes:
        a, b: the runs, as they were named.
        a_ms, b_ms: the usual step of each, without the cost of recording.
        delta_ms: their difference.
        contributors: kinds of work, the largest contribution first; with `unexplained_ms` they add up.
        unexplained_ms: the part of the difference that no kind of work explains.
        by_rank: contribution of the work of each rank, by itself.
        doubts: limits on how far to trust the comparison.
        measured: the change as steps outside deep windows show it; null where a run has too few of them, or
            steps or ranks are selected.
        pauses: what pauses add to the measured steps; null where they do not differ clearly.
        commands: how the commands of the two runs differ, in words; empty where they do not, or are unknown.
        selection: the compared steps, and the ranks whose work is compared; absent where all are.
        account_b: account of B; `account` is that of A.
    """

    a: str
    b: str
    a_ms: float
    b_ms: float
    delta_ms: float
    contributors: list[Contributor]
    unexplained_ms: float
    by_rank: dict[int, float]
    doubts: list[str]
    measured: TypicalChange | None = None
    pauses: PauseChange | None = None
    commands: str = ""
    selection: SelectionDocument | UnsetType = UNSET
    account_b: Account | None = None

    @property
    def known_change(self) -> tuple[float, float, float]:
        """The steps of A and B, in ms, and the relative change; from deep windows without `measured`.

        Typical steps, or, where pauses differ, mean steps with them.
        """
        if self.measured is not None and self.pauses is not None:
            a_ms, b_ms = self.measured.a_ms + self.pauses.a_ms, self.measured.b_ms + self.pauses.b_ms
            return a_ms, b_ms, b_ms / a_ms - 1
        if self.measured is not None:
            return self.measured.a_ms, self.measured.b_ms, self.measured.change
        return self.a_ms, self.b_ms, self.delta_ms / self.a_ms


def explain(
    a: Graph,
    b: Graph,
    selection: Selection = ALL,
    names: tuple[str, str] = ("A", "B"),
    doubts: Sequence[str] = (),
    longest_ns: tuple[float | None, float | None] = (None, None),
) -> DifferenceDocument:
    """Compare two runs.

    Args:
        selection: the steps whose mean is compared, and the ranks whose work in them is. A step ends with the
            last of its work on any rank, selected or not.
        longest_ns: the `longest_ns` argument of `usual_steps` for each run.

    Raises:
        Unanswerable: a run has no whole step, or its steps take no time.
    """
    keys = selection.keep(_work_nodes(a)), selection.keep(_work_nodes(b))
    work = _side_by_side(*map(_work_by_kind, keys))
    times_a, times_b = _with_ratios(*(_with_rows(of_run, work) for of_run in keys))
    longest_a, longest_b = longest_ns
    forth = _stepwise_means(a, times_a, work, selection, longest_a)
    back = _stepwise_means(b, times_b, work, selection, longest_b)
    towards_b, towards_a = np.diff(forth), np.diff(back)
    # Work that one run lacks cannot be put into it, only taken out of the other.
    lacks_a, lacks_b = (work[column].to_numpy() == 0 for column in ("a_ns", "b_ns"))
    share = np.where(lacks_a, -towards_a, np.where(lacks_b, towards_b, (towards_b - towards_a) / 2))
    rows = work.select("name", "kind", "a_ns", "b_ns").rows()
    contributors = [
        Contributor(name, kind, ms(delta), ms(a_ns), ms(b_ns))
        for (name, kind, a_ns, b_ns), delta in zip(rows, share.tolist())
        if delta
    ]
    contributors.sort(key=lambda change: (-abs(change.delta_ms), change.kind, change.name))
    before, after = float(forth[0]), float(back[0])
    rest = after - before - float(share.sum())
    return DifferenceDocument(
        a=names[0],
        b=names[1],
        a_ms=ms(before),
        b_ms=ms(after),
        delta_ms=ms(after - before),
        contributors=contributors,
        unexplained_ms=ms(rest),
        by_rank={rank: ms(delta) for rank, delta in _by_rank(b, times_b, selection, longest_b).items()},
        doubts=list(doubts),
        selection=selection_document(selection),
    )


def _work_nodes(graph: Graph) -> pl.DataFrame:
    """Return each node of work in a step with its place, duration, `name`, `op` and `kind`."""
    nodes = graph.nodes
    chosen = np.flatnonzero(np.isin(nodes.kind, list(KINDS)) & (nodes.step >= 0) & (nodes.rank >= 0))
    kind = nodes.kind[chosen]
    outside = np.isin(kind, (NodeKind.HOST, NodeKind.GAP))
    name = np.where(outside, nodes.around[chosen], nodes.name[chosen])
    plain = pl.Series([*(re.sub(r"#\d+", "", text) for text in graph.names), "outside any range"])
    operation = pl.Series([message.op for message in graph.messages] + [""], dtype=pl.String)
    transfer = (kind == NodeKind.TRANSFER) & (nodes.message[chosen] >= 0)
    return pl.DataFrame(
        {
            "node": chosen,
            "rank": nodes.rank[chosen],
            "window": nodes.window[chosen],
            "step": nodes.step[chosen],
            "work_ns": nodes.duration[chosen],
            "name": plain.gather(np.where(name >= 0, name, len(plain) - 1)),
            "op": operation.gather(np.where(transfer, nodes.message[chosen], len(operation) - 1)),
            "transfer": transfer,
            "kind": [KINDS[NodeKind(number)] for number in kind],
        },
        schema_overrides={"kind": pl.String},
    ).with_columns(name=pl.when("transfer").then("op").otherwise("name"))


def _work_by_kind(keys: pl.DataFrame) -> pl.DataFrame:
    """Return the mean work of each kind per rank and step: `name`, `kind`, `work_ns`."""
    share = _num_steps(keys) * max(keys["rank"].n_unique(), 1)
    return keys.group_by("name", "kind").agg(pl.col("work_ns").sum() / share).sort("kind", "name")


def _num_steps(keys: pl.DataFrame) -> int:
    return max(keys.select("window", "step").n_unique(), 1)


def _side_by_side(a: pl.DataFrame, b: pl.DataFrame) -> pl.DataFrame:
    """Return the work of both runs side by side, largest difference first, with a last row for the rest."""
    pairs = a.join(b, on=["name", "kind"], how="full", coalesce=True, suffix="_b").select(
        "name", "kind", a_ns=pl.col("work_ns").fill_null(0.0), b_ns=pl.col("work_ns_b").fill_null(0.0)
    )
    change = (pl.col("b_ns") - pl.col("a_ns")).abs()
    pairs = pairs.sort([change, "kind", "name"], descending=[True, False, False])
    rest = pairs[MAX_KINDS:].select(
        name=pl.lit(REST), kind=pl.lit(""), a_ns=pl.col("a_ns").sum(), b_ns=pl.col("b_ns").sum()
    )
    return pl.concat([pairs[:MAX_KINDS], rest])


def _with_rows(keys: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Add column `row`: the row of `work` that each key counts towards, the last for unlisted kinds."""
    rows = work.select("name", "kind").with_row_index("row")
    joined = keys.join(rows, on=["name", "kind"], how="left", maintain_order="left")
    return joined.with_columns(pl.col("row").fill_null(work.height - 1).cast(pl.Int64))


def _with_ratios(a: pl.DataFrame, b: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Add `times` to the keys of each run: the factor by which such work is longer in the other run.

    Where both runs have the same ranks, each is compared with itself; otherwise all ranks together.
    """
    same = set(a["rank"]) == set(b["rank"])
    by = ["row", "rank"] if same else ["row"]
    ranks = (1, 1) if same else (keys["rank"].n_unique() for keys in (a, b))
    work_a, work_b = (
        keys.group_by(by).agg(pl.col("work_ns").sum() / (_num_steps(keys) * number))
        for keys, number in zip((a, b), ranks)
    )
    pairs = work_a.join(work_b, on=by, how="full", coalesce=True, suffix="_b").with_columns(
        pl.col("work_ns", "work_ns_b").fill_null(0.0)
    )
    ratio = pl.col("work_ns_b") / pl.col("work_ns")
    factors = pairs.select(
        *by,
        forth=ratio.fill_nan(1.0).clip(0.0, MAX_RATIO),
        back=(1 / ratio).fill_nan(1.0).clip(0.0, MAX_RATIO),
    )
    forth, back = (factors.select(*by, times=way) for way in ("forth", "back"))
    return (
        a.join(forth, on=by, how="left", maintain_order="left"),
        b.join(back, on=by, how="left", maintain_order="left"),
    )


def _stepwise_means(
    graph: Graph, keys: pl.DataFrame, work: pl.DataFrame, selection: Selection, longest_ns: float | None
) -> Floats:
    """Return [K + 1] mean steps in ns: unchanged, then with one more kind of work as in the other run."""
    node, row = keys["node"].to_numpy(), keys["row"].to_numpy()
    changed = _changed_durations(graph, keys)
    durations = np.repeat(graph.nodes.duration[:, None], work.height + 1, axis=1)
    for number in range(work.height):
        of_kind = node[row == number]
        durations[of_kind, number + 1 :] = changed[of_kind, None]
    return _mean_steps(graph, durations, selection, longest_ns)


def _changed_durations(graph: Graph, keys: pl.DataFrame) -> Ints:
    """Return [N] durations, in ns, with all work as long as in the other run."""
    node = keys["node"].to_numpy()
    duration = graph.nodes.duration.copy()
    duration[node] = np.rint(duration[node] * keys["times"].to_numpy()).astype(np.int64)
    return duration


def _mean_steps(graph: Graph, durations: Ints, selection: Selection, longest_ns: float | None) -> Floats:
    """Return [S] mean selected steps in ns, one per column of durations [N, S]; the first is the baseline."""
    ends = replay_durations(graph, durations)
    first = np.ascontiguousarray(ends[:, 0])
    baseline = step_ends(graph, first - durations[:, 0], first)
    if baseline.is_empty():
        raise Unanswerable("no complete step in the run: record at least two steps")
    baseline = baseline if selection else usual_steps(baseline, longest_ns)
    means = [_mean(durations_of(baseline), selection)]
    if not means[0]:
        raise Unanswerable("no step of the run takes any time: record steps with work in them")
    for column in range(1, durations.shape[1]):
        end = np.ascontiguousarray(ends[:, column])
        steps = changed_step_times(baseline, graph, end)
        means.append(_mean(steps, selection))
    return np.array(means)


def _mean(steps: pl.DataFrame, selection: Selection) -> float:
    return float(selection.keep(steps)["duration_ns"].to_numpy().mean())


def _by_rank(
    b: Graph, keys: pl.DataFrame, selection: Selection, longest_ns: float | None
) -> dict[int, float]:
    """Return by rank the ns per step that run B would save if the work of that rank took as long as in A."""
    ranks = sorted(keys["rank"].unique().to_list())
    changed = _changed_durations(b, keys)
    durations = [b.nodes.duration]
    durations += [np.where(b.nodes.rank == rank, changed, b.nodes.duration) for rank in ranks]
    steps = _mean_steps(b, np.stack(durations, axis=1), selection, longest_ns)
    return {rank: float(steps[0] - step) for rank, step in zip(ranks, steps[1:])}
