"""The graph of a run that consists of whole operations: pipeline-parallel jobs traced by their framework.

Takes an opened run whose spans are operations; returns a graph like that of kernels and CPU work from
`construction/graph_builder.py`, and its matching. A compute is one node; a send, receive or collective is an
arrival and a transfer, with one rendezvous for all its members. Such traces lack launches: an operation that
begins later than its dependencies and the previous work on its rank allow has a separate node for the delay,
which makes free launches an edit. A step begins when the previous one has ended on all ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.alignment.match import Matching
from dpro.replay.graph import EdgeKind, Edges, Graph, Message, NodeKind, Nodes, make_graph
from dpro.replay.pipeline.dependencies import CLOCK_SLACK_NS, STEP, PipelineStructure, find_dependencies
from dpro.replay.pipeline.operations import COMMUNICATION, Operations, Role
from dpro.schema import COLLECTIVES
from dpro.schema.members import num_members
from dpro.store import Run
from dpro.units import format_duration

MAX_CONTRADICTIONS = 0.01  # share of transfers that end before they begin, above which it is reported
MIN_BETWEEN = 0.001  # share of the time between steps above which it is reported
LAUNCH_DELAY, RENDEZVOUS, BETWEEN_STEPS = "(launch delay)", "(rendezvous)", "(between steps)"


@dataclass(frozen=True)
class OperationGraph:
    """A graph of operations and its basis.

    Attributes:
        matching: communication and its instances.
        steps_known: whether the run has the beginnings of steps.
        unknown: open questions about the trace, one line each.
        assumed: assumptions, one line each.
    """

    graph: Graph
    matching: Matching
    steps_known: bool
    unknown: tuple[str, ...]
    assumed: tuple[str, ...]


def build_operations(run: Run, operations: Operations) -> OperationGraph:
    """Build the graph of a run's operations.

    Args:
        operations: from `dpro.replay.pipeline.recorded.operations_of`.

    Raises:
        Unanswerable: no step can be understood.
    """
    if operations.rows.is_empty():
        raise Unanswerable("no step outside deep windows has all its operations on every rank")
    pipeline = find_dependencies(operations)
    lanes = pipeline.rows.select("rank", "stream").unique().sort("rank", "stream").with_row_index("lane")
    rows, messages = _with_messages(_numbered(pipeline.rows.join(lanes, on=["rank", "stream"]).sort("id")))
    direct = _lagged_pairs(rows, pipeline)
    ended = rows.group_by("step").agg(ended=pl.col("end").max())
    steps = operations.steps.join(ended, on="step").sort("begin")
    # Operations come first, then delays, rendezvous of several members, and two nodes at each step's end.
    count = int(rows["last"][-1]) + 1
    delays = _with_nodes(_delays(rows, direct, _begins(operations)), count)
    met = rows.filter(pl.col("members") > 1).unique("instance", maintain_order=True).sort("instance")
    met = _with_nodes(met.select("instance", "arrived"), count + delays.height)
    steps = _with_nodes(steps, count + delays.height + met.height, stride=2)
    nodes = [*_operation_nodes(rows), _delay_nodes(delays), _rendezvous_nodes(met), *_step_nodes(steps)]
    given = direct.select(source="leaves", target="enters", lag="lag", kind="kind", inferred="handed")
    moved = rows.filter("communicates").select(source="first", target="last")
    edges = [*[given, _edges(moved, EdgeKind.STREAM)], *_rendezvous_edges(rows, met)]
    doors = _step_entries(rows, direct, steps) if operations.begins is None else _rank_step_entries(rows)
    edges += [*_delay_edges(delays, direct, doors), *_step_edges(rows, steps, doors)]
    graph = _assembled(_joined_nodes(nodes), pl.concat(edges), lanes)
    graph = dataclasses.replace(graph, messages=messages, places=operations.places, run=run)
    matching, unknown = _matching(run, rows), (*pipeline.problems, *_contradictions(rows, direct))
    if not _all_places_recorded(graph):
        unknown += ("ranks of some stages are missing: why the others waited for them is unknown",)
    return OperationGraph(
        graph, matching, operations.steps_known, unknown, _assumed(run, graph, direct, steps)
    )


def _with_nodes(frame: pl.DataFrame, first: int, stride: int = 1) -> pl.DataFrame:
    """Add column `node`: the number of the first node made from each row."""
    return frame.with_columns(node=first + stride * pl.int_range(pl.len(), dtype=pl.Int64))


def _numbered(rows: pl.DataFrame) -> pl.DataFrame:
    """Add `first` and `last` nodes of operations, number of `members`, and when the last `arrived`."""
    communicates = pl.col("role").is_in([int(role) for role in COMMUNICATION])
    size = communicates.cast(pl.Int64) + 1
    together = pl.when(communicates).then("instance").otherwise(-1 - pl.col("id"))
    return rows.with_columns(
        communicates=communicates,
        members=pl.len().over(together),
        arrived=pl.col("start").max().over(together),
        first=size.cum_sum() - size,
        last=size.cum_sum() - 1,
    )


def _with_messages(rows: pl.DataFrame) -> tuple[pl.DataFrame, tuple[Message, ...]]:
    """Add the `message` of each operation, and return the messages it indexes; bytes are not recorded."""
    columns = ["op", "group", "members"]
    kinds = rows.filter("communicates").select(columns).unique().sort(columns).with_row_index("message")
    rows = rows.join(kinds.cast({"message": pl.Int64}), on=columns, how="left", maintain_order="left")
    return rows, tuple(Message(op, group, members, "") for _, op, group, members in kinds.iter_rows())


def _lagged_pairs(rows: pl.DataFrame, pipeline: PipelineStructure) -> pl.DataFrame:
    """Return the dependencies between operations with their lags and the times of both ends.

    An operation that seems to begin before its dependency has ended gets a negative lag, as recorded. An
    unrecorded transfer between stages takes one time, pooled over the operations that waited for it, or over
    all stages where none waited.
    """
    pairs = pl.concat(
        [pipeline.pairs.with_columns(handed=pl.lit(False)), pipeline.handed.with_columns(handed=pl.lit(True))]
    )
    pairs_ended = pairs.join(
        rows.select("rank", "stage", source="id", ended="end", leaves="last"), on="source"
    ).join(
        rows.select("role", to_rank="rank", to="stage", target="id", started="start", enters="first"),
        on="target",
    )
    slack = pl.col("started") - pl.col("ended")
    pairs_ended = pairs_ended.with_columns(latest=pl.col("ended") == pl.col("ended").max().over("target"))
    passed = pl.col("handed") & (pl.col("rank") != pl.col("to_rank"))
    waited = slack.filter(passed & pl.col("latest") & (slack > 0)).median()
    usual = pl.coalesce(waited.over("role", "stage", "to"), waited.over("role"), pl.lit(0.0))
    pooled = pl.when(passed).then(usual.round().cast(pl.Int64)).otherwise(0)
    return pairs_ended.with_columns(lag=pl.min_horizontal(pooled, slack)).sort("target", "source")


def _begins(operations: Operations) -> pl.DataFrame:
    """Return `rank`, `step` and `begin` (ns) of each rank in each step."""
    if operations.begins is not None:
        return operations.begins
    return operations.rows.select(STEP).unique().join(operations.steps.select("step", "begin"), on="step")


def _delays(rows: pl.DataFrame, direct: pl.DataFrame, begins: pl.DataFrame) -> pl.DataFrame:
    """Return the operations that begin later than their dependencies allow.

    Communication is called in program order: after the last work on its rank has ended.

    Returns:
        `id`, columns of its node, `ready` and `start` (ns, begin and end of the delay), and `before`: the
        node of the last work that had ended.
    """
    freed = direct.group_by(id="target").agg(freed=(pl.col("ended") + pl.col("lag").clip(0)).max())
    over = rows.filter(pl.col("end") > pl.col("start")).select(*STEP, before="last", over="end").sort("over")
    called = rows.filter("communicates").sort("start")
    called = called.join_asof(
        over, left_on="start", right_on="over", by=STEP, strategy="backward", check_sortedness=False
    )
    return (
        rows.join(begins, on=STEP)
        .join(freed, on="id", how="left")
        .join(called.select("id", "before", "over"), on="id", how="left")
        .with_columns(ready=pl.max_horizontal("freed", "over", "begin"))
        .filter(pl.col("start") > pl.max_horizontal("freed", "begin"))
        .select("id", "rank", "step", "lane", "stage", "first", "ready", "start", "before")
        .sort("id")
    )


def _operation_nodes(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Return one node per compute, and two per communication: its arrival and its transfer."""
    batch, chunk = pl.col("micro_batch"), pl.col("chunk")
    around = pl.when(batch >= 0).then(pl.format("micro-batch {}", batch)).otherwise(pl.lit(""))
    around = (
        pl.when((batch >= 0) & (chunk.max() > 0))
        .then(pl.format("chunk {} {}", chunk, around))
        .otherwise(around)
    )
    renamed = (
        around.alias("around"),
        pl.max_horizontal("span_id", pl.lit(-1)).alias("span"),
        pl.col("instance").alias("collective"),
    )
    common = ("rank", "step", "lane", "name", *renamed, pl.col("stage").alias("phase"))
    single, moved = rows.filter(~pl.col("communicates")), rows.filter("communicates")
    begun = pl.min_horizontal("arrived", "end")  # if clocks disagree, the last may arrive after the end
    return [
        single.select(*common, node="last", kind=pl.lit(int(NodeKind.KERNEL)), start="start", end="end"),
        moved.select(*common, node="first", kind=pl.lit(int(NodeKind.ARRIVE)), start="start", end="start"),
        moved.select(
            *common, "message", node="last", kind=pl.lit(int(NodeKind.TRANSFER)), start=begun, end="end"
        ),
    ]


def _delay_nodes(delays: pl.DataFrame) -> pl.DataFrame:
    kind, name = pl.lit(int(NodeKind.DELAY)), pl.lit(LAUNCH_DELAY)
    return delays.select(
        "rank", "step", "lane", "node", kind=kind, name=name, phase="stage", start="ready", end="start"
    )


def _rendezvous_nodes(met: pl.DataFrame) -> pl.DataFrame:
    kind, name = pl.lit(int(NodeKind.RENDEZVOUS)), pl.lit(RENDEZVOUS)
    return met.select("node", kind=kind, name=name, collective="instance", start="arrived", end="arrived")


def _step_nodes(steps: pl.DataFrame) -> list[pl.DataFrame]:
    """Return two nodes per step: all ranks have ended it; and the time until the next step is over."""
    begins = pl.col("begin").shift(-1).fill_null(pl.col("finish"))
    kind, name = pl.lit(int(NodeKind.RENDEZVOUS)), pl.lit(RENDEZVOUS)
    gap = steps.select("step", node=pl.col("node") + 1, start="ended", end=pl.max_horizontal("ended", begins))
    return [
        steps.select("node", kind=kind, name=name, start="ended", end="ended"),
        gap.with_columns(kind=pl.lit(int(NodeKind.GAP)), name=pl.lit(BETWEEN_STEPS)),
    ]


def _edges(frame: pl.DataFrame, kind: EdgeKind, inferred: bool = False) -> pl.DataFrame:
    """Return edges of one kind from a frame with `source`, `target` (nodes) and optionally `lag`."""
    lag = pl.col("lag") if "lag" in frame.columns else pl.lit(0, pl.Int64)
    return frame.select(
        "source", "target", lag=lag, kind=pl.lit(int(kind), pl.Int64), inferred=pl.lit(inferred)
    )


def _rendezvous_edges(rows: pl.DataFrame, met: pl.DataFrame) -> list[pl.DataFrame]:
    """Return edges from arrivals to rendezvous to transfers, and from sends to receives."""
    members = rows.filter(pl.col("members") > 1).join(met, on="instance")
    sent = members.filter(pl.col("role") == Role.SEND).select("instance", source="first")
    received = members.filter(pl.col("role") == Role.RECEIVE).select("instance", target="last")
    return [
        _edges(members.select(source="first", target="node"), EdgeKind.RENDEZVOUS),
        _edges(members.select(source="node", target="last"), EdgeKind.RENDEZVOUS),
        _edges(sent.join(received, on="instance"), EdgeKind.HANDOVER),
    ]


def _delay_edges(delays: pl.DataFrame, direct: pl.DataFrame, doors: pl.DataFrame) -> list[pl.DataFrame]:
    """Return edges to each delay, from dependencies and the program before it, and on to its operation.

    Args:
        delays: rows of `_delays`, with nodes.
        doors: operations that begin a step on their rank, with the node that they wait for, `door`.
    """
    after = direct.join(delays.select("node", target="id"), on="target")
    rooted = delays.join(doors.select("id", "door"), on="id")
    return [
        _edges(after.select("lag", source="leaves", target="node"), EdgeKind.SYNC, inferred=True),
        _edges(
            delays.drop_nulls("before").select(source="before", target="node"), EdgeKind.SYNC, inferred=True
        ),
        _edges(rooted.select(source="door", target="node"), EdgeKind.SYNC, inferred=True),
        _edges(delays.select(source="node", target="first"), EdgeKind.LAUNCH, inferred=True),
    ]


def _step_entries(rows: pl.DataFrame, direct: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the operations without a dependency in their step, which begin after the previous step.

    Args:
        steps: with their nodes; the first step has no door.

    Returns:
        `id` and `first` (node) of the operations, `door`: the node that they wait for.
    """
    after = steps.select("step", door=pl.col("node").shift(1) + 1).drop_nulls()
    return (
        rows.join(direct.select(id="target"), on="id", how="anti")
        .join(after, on="step")
        .select(*_ENTRY_COLUMNS)
    )


def _rank_step_entries(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the first operation of each rank and step, which follows the rank's last of the step before."""
    of_rank = rows.sort("start", "end").group_by(STEP, maintain_order=True)
    extents = of_rank.agg(pl.col("id", "first").first(), at=pl.col("start").first())
    lasts = rows.sort("end", "start").group_by(STEP).agg(leaves=pl.col("last").last())
    placed = extents.join(lasts, on=STEP).sort("rank", "at")
    return (
        placed.with_columns(door=pl.col("leaves").shift(1).over("rank"))
        .drop_nulls("door")
        .select(*_ENTRY_COLUMNS)
    )


_ENTRY_COLUMNS = ("id", "first", "door")


def _step_edges(rows: pl.DataFrame, steps: pl.DataFrame, doors: pl.DataFrame) -> list[pl.DataFrame]:
    """Return edges from the last operation of each stream to the step's end, and from doors to operations."""
    last = rows.group_by(*STEP, "stream").agg(source=pl.col("last").last()).join(steps, on="step")
    return [
        _edges(last.select("source", target="node"), EdgeKind.THREAD),
        _edges(steps.select(source="node", target=pl.col("node") + 1), EdgeKind.THREAD),
        _edges(doors.select(source="door", target="first"), EdgeKind.THREAD),
    ]


def _joined_nodes(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Return all nodes in the order of their numbers, with -1 (or no name) in missing columns."""
    nodes = pl.concat(parts, how="diagonal_relaxed").sort("node")
    return nodes.with_columns(pl.col("around").fill_null(""), pl.exclude("around", "name").fill_null(-1))


def _assembled(nodes: pl.DataFrame, edges: pl.DataFrame, lanes: pl.DataFrame) -> Graph:
    labels = pl.concat([nodes["name"], nodes["around"].filter(nodes["around"] != "")]).unique().sort()
    code = pl.Enum(labels)

    def column(name: str) -> np.typing.NDArray[np.int64]:
        return nodes[name].cast(pl.Int64).to_numpy().copy()

    def coded(name: str) -> np.typing.NDArray[np.int64]:
        names = nodes.select(pl.when(pl.col(name) != "").then(name).alias(name))[name]
        return names.cast(code).to_physical().cast(pl.Int64).fill_null(-1).to_numpy().copy()

    size = nodes.height
    origin = int(nodes["start"].min())  # type: ignore[arg-type]
    columns = Nodes(
        kind=column("kind"),
        duration=column("end") - column("start"),
        earliest=np.zeros(size, np.int64),
        anchored=np.zeros(size, np.bool_),
        rank=column("rank"),
        window=np.zeros(size, np.int64),
        step=column("step"),
        lane=column("lane"),
        name=coded("name"),
        around=coded("around"),
        span=column("span"),
        collective=column("collective"),
        bytes=np.full(size, -1, np.int64),
        message=column("message"),
        phase=column("phase"),
        measured_start=column("start") - origin,
        measured_end=column("end") - origin,
    )
    edges = edges.sort("source", "target", "kind", "lag")
    arrays = {name: edges[name].to_numpy().copy() for name in ("source", "target", "lag", "kind", "inferred")}
    streams = lanes.select("rank", "stream").iter_rows()
    named = tuple((rank, "compute" if stream == 0 else f"communication {stream}") for rank, stream in streams)
    return make_graph(columns, Edges(**arrays), tuple(labels), named, origin)


def _matching(run: Run, rows: pl.DataFrame) -> Matching:
    """Return the rows of `collectives` with their instances, as in other runs."""
    members = pl.col("members").cast(pl.Int64)
    communicating = rows.filter("communicates").select("rank", "span_id", "instance", members, key="group")
    matched = run.table(COLLECTIVES).join(communicating, on=["rank", "span_id"])
    expected = pl.max_horizontal(num_members(), 1)
    return Matching(matched.with_columns(expected=expected, covering=expected), ())


def _contradictions(rows: pl.DataFrame, direct: pl.DataFrame) -> list[str]:
    """Return a line if transfers between ranks often ended before they began: the clocks disagree."""
    moved = rows.filter(pl.col("members") > 1).select(odd=pl.col("end") + CLOCK_SLACK_NS < pl.col("arrived"))
    handed = direct.filter("handed").select(odd=pl.col("started") + CLOCK_SLACK_NS < pl.col("ended"))
    odd = pl.concat([moved, handed])["odd"]
    share = float(odd.mean() or 0.0)  # type: ignore[arg-type]
    if share <= MAX_CONTRADICTIONS:
        return []
    return [
        f"the clocks of the ranks disagree: {share:.0%} of transfers between them ended before they began"
    ]


def _all_places_recorded(graph: Graph) -> bool:
    """Return whether every known stage of every known data-parallel rank has a recorded rank."""
    places = set(graph.places.values())
    return len(places) == (max(p.dp for p in places) + 1) * (max(p.stage for p in places) + 1)


def _assumed(run: Run, graph: Graph, direct: pl.DataFrame, steps: pl.DataFrame) -> tuple[str, ...]:
    lines = []
    total = run.manifest.world_size
    others = total - len(run.manifest.ranks)
    if others and _all_places_recorded(graph):
        lines.append(
            f"{others} of {total} ranks are not recorded: each is assumed to match the recorded one of "
            "its stage and data-parallel rank"
        )
    waited = direct.filter(pl.col("handed") & (pl.col("lag") > 0)).group_by("role").agg(pl.col("lag").max())
    if waited.height:
        longest = format_duration(float(waited["lag"].max()))  # type: ignore[arg-type]
        lines.append(
            f"communication between stages was not recorded: it is assumed to take at most {longest} on any "
            "network, and its wait is not separated from its transfer"
        )
    gaps = graph.nodes.duration[graph.nodes.kind == NodeKind.GAP].sum()
    length = int(steps["finish"].to_numpy().max() - steps["begin"].to_numpy().min())
    if gaps > MIN_BETWEEN * length:
        lines.append(
            f"{gaps / length:.1%} of the time is after the last operation of a step: it is kept as it is"
        )
    return tuple(lines)


def with_typical_delays(graph: Graph) -> Graph:
    """Return the graph on which predictions are based, with no launch later than usual for its operation.

    A delay much longer than others of its name is a wait for something unrecorded (a barrier, another rank),
    and would remain under an edit that removes its cause. The usual delay is the median over all ranks.
    """
    late = np.flatnonzero(graph.nodes.kind == NodeKind.DELAY)
    launch = np.flatnonzero(graph.nodes.kind[graph.edges.source] == NodeKind.DELAY)
    launched = np.full(graph.num_nodes, -1, np.int64)
    launched[graph.edges.source[launch]] = graph.nodes.name[graph.edges.target[launch]]
    delays = pl.DataFrame({"node": late, "name": launched[late], "delay": graph.nodes.duration[late]})
    usual = pl.min_horizontal("delay", pl.col("delay").median().over("name")).round().cast(pl.Int64)
    duration = graph.nodes.duration.copy()
    duration[late] = delays.select(usual).to_series().to_numpy()
    return graph.with_durations(duration)
