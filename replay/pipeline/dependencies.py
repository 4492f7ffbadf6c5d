"""Dependencies among the operations of a pipeline-parallel step.

Takes operations of `dpro.replay.pipeline.operations`; returns dependent pairs, and which operations are one
communication. The rules are those of "Understanding Stragglers in Large Model Training Using What-if
Analysis" (Lin et al., OSDI 2025, section 3.2), stated by role so that they are valid for any number of
stages, chunks and micro-batches: operations keep their order on their stream; a stage computes what it has
received and sends what it has computed; parameters are gathered before the first forward that needs them;
gradients are reduced after the work that makes them, and the optimizer comes after that.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.graph import EdgeKind
from dpro.replay.pipeline.operations import COMMUNICATION, Operations, Role, is_connected

# Starts and ends of one rank's operations may contradict their order by up to this, through rounding and
# clocks that tick at different moments.
CLOCK_SLACK_NS = 200_000
STEP = ["rank", "step"]
COMPUTES = (Role.FORWARD, Role.BACKWARD)
GARBAGE_COLLECTION = "gc"


@dataclass(frozen=True)
class PipelineStructure:
    """The structure of all steps.

    Attributes:
        rows: rows of `Operations` in whole steps, with `id` (0, 1, … in their order) and `instance`: an equal
            number on all operations that are one communication, -1 on work.
        pairs: `source`, `target` (ids), `kind` (`EdgeKind`): the target starts after the source.
        handed: pairs between stages whose communication was not recorded.
        problems: steps that were left out, and communication that lacks members; a line each.
    """

    rows: pl.DataFrame
    pairs: pl.DataFrame
    handed: pl.DataFrame
    problems: tuple[str, ...]


def find_dependencies(operations: Operations) -> PipelineStructure:
    """Find the dependencies of all steps, within each rank and between stages.

    Raises:
        Unanswerable: no step can be understood; the message describes the first problem.
    """
    rows = operations.rows.with_columns(nth=pl.int_range(pl.len()).over(*STEP, "role", "direction"))
    needs = _messages_needed(rows, operations)
    broken = _broken_steps(needs)
    rows = rows.filter(~pl.col("step").is_in(list(broken))).drop("nth").with_row_index("id")
    if rows.is_empty():
        raise Unanswerable(f"no step can be replayed: {next(iter(broken.values()))}")
    rows = rows.with_columns(pl.col("id").cast(pl.Int64))
    ids = rows.select("rank", "span_id", "id")
    messages = needs.filter(pl.col("span_id").is_not_null()).join(ids, on=["rank", "span_id"])
    messages = messages.join(
        ids.rename({"span_id": "compute_span_id", "id": "compute"}), on=["rank", "compute_span_id"]
    )
    rows, short = _instances(rows, messages)
    handed = _handed_over(rows, operations)
    before = pl.col("id").shift(1).over(*STEP, "stream")
    # The optimizer needs the gradients; garbage collection only follows the order of its stream.
    work = _of(rows, Role.WORK).filter(pl.col("name") != GARBAGE_COLLECTION)
    pairs = pl.concat(
        [
            _pairs(rows.select(source=before, target="id"), EdgeKind.STREAM),
            _around_messages(rows, messages),
            _around_collectives(rows),
            _pairs(_last_before(work, _of(rows, Role.GATHER, Role.REDUCE), []), EdgeKind.EVENT),
        ]
    )
    pairs = pairs.unique(["source", "target"], keep="first", maintain_order=True)
    left_out = [f"step {step} is left out: {why}" for step, why in broken.items()]
    return PipelineStructure(rows, pairs, handed, (*left_out, *short))


def _pairs(frame: pl.DataFrame, kind: EdgeKind) -> pl.DataFrame:
    columns = frame.select(pl.col("source", "target").cast(pl.Int64), kind=pl.lit(int(kind), pl.Int64))
    return columns.drop_nulls()


def _of(rows: pl.DataFrame, *roles: Role) -> pl.DataFrame:
    return rows.filter(pl.col("role").is_in([int(role) for role in roles]))


def _messages_needed(rows: pl.DataFrame, operations: Operations) -> pl.DataFrame:
    """Pair forward and backward computes with their sends and receives.

    The k-th message of a direction belongs to the k-th compute of that direction that has a stage to send to
    or receive from. Interleaved schedules may also record messages without a peer stage (the first chunk
    receives nothing), for every compute or for every compute but the first, and idle ones before the first or
    after the last compute, which belong to none.

    Returns:
        A row per compute and message: `rank`, `step`, `direction`, `role` (of the message),
        `compute_span_id`, `span_id` (of the message; null where there is none), `real` (whether anything is
        sent), `recorded` and `expected` (number of messages recorded and needed).
    """
    computes = _of(rows, *COMPUTES).with_columns(at=pl.col("place"))
    last = operations.num_stages * operations.num_chunks - 1
    parts = []
    for role in (Role.SEND, Role.RECEIVE):
        messages = _not_idle(_of(rows, role), computes, role, operations.num_chunks)
        parts.append(_messages_of_role(computes, messages, role, last))
    return pl.concat(parts)


def _messages_of_role(computes: pl.DataFrame, messages: pl.DataFrame, role: Role, last: int) -> pl.DataFrame:
    """Return the rows of `_messages_needed` for sends, or for receives.

    Args:
        computes: forward and backward work, with `at`: its chunk's place in the order of the model, from 0.
        messages: those of the role that are not idle.
        last: the last place in the model.
    """
    by = [*STEP, "direction"]
    # Forward sends go up the model and end at its last chunk, backward ones go down to the first.
    outward = pl.col("direction") == ("forward" if role == Role.SEND else "backward")
    real = pl.when(outward).then(pl.col("at") < last).otherwise(pl.col("at") > 0)
    messages = messages.with_columns(slot=pl.int_range(pl.len()).over(by), recorded=pl.len().over(by))
    wanted = (
        computes.with_columns(real=real)
        .with_columns(
            expected=pl.col("real").sum().over(by),
            among_real=pl.when("real").then(pl.col("real").cum_sum().over(by) - 1),
            every=pl.len().over(by),
        )
        .join(messages.select(*by, "recorded").unique(), on=by, how="left")
        .with_columns(pl.col("recorded").fill_null(0))
    )
    # One message per need, or one per compute, or a receive for every compute but the first.
    slot = (
        pl.when(pl.col("recorded") == pl.col("expected"))
        .then("among_real")
        .when(pl.col("recorded") == pl.col("every"))
        .then("nth")
        .when((pl.col("recorded") == pl.col("every") - 1) & (role == Role.RECEIVE))
        .then(pl.col("nth") - 1)
    )
    matched = wanted.with_columns(slot=slot.cast(pl.Int64)).join(
        messages.select(*by, pl.col("slot").cast(pl.Int64), message="span_id"), on=[*by, "slot"], how="left"
    )
    return matched.select(
        *by,
        "stage",
        role=pl.lit(int(role), pl.Int64),
        compute_span_id="span_id",
        span_id="message",
        nth="nth",
        real="real",
        recorded="recorded",
        expected="expected",
    )


def _not_idle(messages: pl.DataFrame, computes: pl.DataFrame, role: Role, num_chunks: int) -> pl.DataFrame:
    """Drop messages of interleaved schedules that are entirely before or after any compute they serve."""
    if num_chunks == 1:
        return messages
    by = [*STEP, "direction"]
    extent = computes.group_by(by).agg(first_end=pl.col("end").min(), last_start=pl.col("start").max())
    late = pl.col("start") <= pl.col("last_start") + CLOCK_SLACK_NS
    early = pl.col("end") >= pl.col("first_end") - CLOCK_SLACK_NS
    joined = messages.join(extent, on=by, how="left", maintain_order="left")
    return joined.filter(late if role == Role.RECEIVE else early).drop("first_end", "last_start")


def _broken_steps(needs: pl.DataFrame) -> dict[int, str]:
    """Return the steps whose messages cannot be matched to computes, with the reason.

    Steps are not broken by a direction without any recorded message.
    """
    recorded = needs.filter((pl.col("recorded") > 0).any().over("direction", "role"))
    odd = recorded.filter(pl.col("real") & pl.col("span_id").is_null()).sort("step", "rank")
    why = {}
    for row in odd.unique("step", keep="first", maintain_order=True).iter_rows(named=True):
        word = "sends" if row["role"] == Role.SEND else "receives"
        why[row["step"]] = (
            f"rank {row['rank']} (stage {row['stage']}) has {row['recorded']} {row['direction']} {word} for "
            f"{row['expected']} {row['direction']} computes that need one"
        )
    return why


def _instances(rows: pl.DataFrame, messages: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Assign numbers to the communications; also return lines about messages without counterpart.

    The k-th real message from one rank to another in a step is the k-th that the other receives; other
    communication is matched by its group and sequence number, or its order without one.
    """
    real = messages.filter("real").select("id", real=pl.lit(True))
    marked = rows.join(real, on="id", how="left", maintain_order="left").with_columns(
        pl.col("real").fill_null(False)
    )
    sends = pl.col("role") == Role.SEND
    pair = pl.when(pl.col("real") & (pl.col("peer") >= 0)).then(
        pl.format(
            "{} {} {}",
            "direction",
            pl.when(sends).then("rank").otherwise("peer"),
            pl.when(sends).then("peer").otherwise("rank"),
        )
    )
    grouped = pl.col("role").is_in([int(Role.GATHER), int(Role.REDUCE)]) & (pl.col("members_known"))
    keyed = (
        marked.with_columns(members_known=pl.col("group") != "")
        .with_columns(key=pl.when(grouped).then(pl.format("{} {}", "group", "name")).otherwise(pair))
        .with_columns(order=pl.int_range(pl.len()).over("step", "rank", "key"))
        .with_columns(
            order=pl.when((pl.col("sequence") >= 0) & ~pl.col("real")).then("sequence").otherwise("order")
        )
        .with_columns(alone=pl.when(pl.col("key").is_null()).then("id").otherwise(-1))
    )
    communicates = pl.col("role").is_in([int(role) for role in COMMUNICATION])
    numbered = keyed.with_columns(
        instance=pl.when(communicates)
        .then(pl.struct("step", pl.col("key").fill_null(""), "order", "alone").rank("dense").cast(pl.Int64))
        .otherwise(-1)
    )
    single = numbered.filter(pl.col("real") & (pl.len().over("instance") == 1))
    lines = [
        f"step {step}: {count} messages of {key.split()[0]} from rank {key.split()[1]} to rank "
        f"{key.split()[2]} have no counterpart"
        for step, key, count in single.filter(pl.col("key").is_not_null())
        .group_by("step", "key")
        .len()
        .sort("step", "key")
        .iter_rows()
    ]
    lost = single.filter(pl.col("key").is_null()).height
    if lost:
        lines.append(
            f"{lost} sends and receives do not name their peer: their waiting counts as communication"
        )
    return numbered.select(*rows.columns, "instance"), lines


def _around_messages(rows: pl.DataFrame, messages: pl.DataFrame) -> pl.DataFrame:
    """Return pairs from computes to their sends, from receives to their computes, and before receives.

    A receive is posted once the compute before the one it serves is done; the first of the backward pass
    together with the send before the last forward of the warm-up.
    """
    sent = messages.filter(pl.col("role") == Role.SEND).select(source="compute", target="id")
    received = messages.filter(pl.col("role") == Role.RECEIVE).sort("compute")
    served = received.select(source="id", target="compute")
    before = _of(rows, *COMPUTES).select(target="id", source=pl.col("id").shift(1).over(*STEP, "role"))
    posted = received.join(before, left_on="compute", right_on="target").select("source", target="id")
    return pl.concat([_pairs(ends, EdgeKind.EVENT) for ends in (sent, served, posted, _first_backward(rows))])


def _first_backward(rows: pl.DataFrame) -> pl.DataFrame:
    """Return pairs from the last forward but one of the warm-up to the first backward messages."""
    computes = _of(rows, *COMPUTES).sort("step", "rank", "start", "end", "span_id")
    warm_up = computes.filter((pl.col("role") == Role.BACKWARD).cum_sum().over(STEP) == 0)
    last_but_one = warm_up.group_by(STEP).agg(source=pl.col("id").get(-2, null_on_oob=True))
    backward = _of(rows, Role.SEND, Role.RECEIVE).filter(pl.col("direction") == "backward")
    first = backward.unique([*STEP, "role"], keep="first", maintain_order=True)
    return first.join(last_but_one, on=STEP).select("source", target="id")


def _around_collectives(rows: pl.DataFrame) -> pl.DataFrame:
    """Return pairs from gathers to the first forward that uses them, and from work to its reduction.

    A reduction during computes needs the backward of its chunk; one after them, all work before it. A gather
    that no forward follows needs all work before it, too.
    """
    gathers, forwards = _of(rows, Role.GATHER), _of(rows, Role.FORWARD)
    of_chunk = _next_after(gathers.filter(pl.col("chunk") >= 0), forwards, ["chunk"])
    of_all = _next_after(gathers.filter(pl.col("chunk") < 0), forwards, [])
    to_forward = pl.concat([of_chunk, of_all])
    computed = pl.col("end").filter(pl.col("role").is_in([int(role) for role in COMPUTES])).max().over(STEP)
    unused = ~pl.col("id").is_in(to_forward["source"].implode())
    waiting = rows.with_columns(during=pl.col("start") + CLOCK_SLACK_NS < computed).filter(
        (pl.col("role") == Role.REDUCE) | ((pl.col("role") == Role.GATHER) & unused)
    )
    during = pl.col("during") & (pl.col("chunk") >= 0) & (pl.col("role") == Role.REDUCE)
    after_chunk = _last_before(waiting.filter(during), _of(rows, Role.BACKWARD), ["chunk"])
    work = _of(rows, *COMPUTES, Role.WEIGHTS, Role.WORK)
    after_all = _last_before(waiting.filter(~during), work, [])
    return pl.concat([_pairs(ends, EdgeKind.EVENT) for ends in (to_forward, after_chunk, after_all)])


def _last_before(rows: pl.DataFrame, others: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Pair each row, as `target`, with the last of the others to end before it began, as `source`."""
    began = rows.select(*STEP, *by, target="id", at=pl.col("start") + CLOCK_SLACK_NS).sort("at")
    ended = others.select(*STEP, *by, source="id", at="end").sort("at")
    joined = began.join_asof(ended, on="at", by=[*STEP, *by], strategy="backward", check_sortedness=False)
    return joined.filter(pl.col("source") != pl.col("target")).select("source", "target")


def _next_after(rows: pl.DataFrame, others: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Pair each row, as `source`, with the first of the others to begin after it had ended, as `target`."""
    ended = rows.select(*STEP, *by, source="id", at=pl.col("end") - CLOCK_SLACK_NS).sort("at")
    began = others.select(*STEP, *by, target="id", at="start").sort("at")
    joined = ended.join_asof(began, on="at", by=[*STEP, *by], strategy="forward", check_sortedness=False)
    return joined.filter(pl.col("target").is_not_null()).select("source", "target")


def _handed_over(rows: pl.DataFrame, operations: Operations) -> pl.DataFrame:
    """Pair computes of a micro-batch on linked stages, for directions without a recorded message.

    Forward goes up the chunks of all stages, backward down. Where stages of one chunk sent each other
    messages, pairs follow these links, from the lower to the higher stage in forward. Micro-batches without a
    number are numbered by their order, if there is one chunk.
    """
    recorded = _of(rows, Role.SEND, Role.RECEIVE)["direction"].unique().to_list()
    order = pl.int_range(pl.len()).over(*STEP, "role")
    computes = _of(rows, *COMPUTES).with_columns(
        at=pl.col("place"), batch=pl.when(pl.col("micro_batch") >= 0).then("micro_batch").otherwise(order)
    )
    key = ["step", "dp", "batch", "at"]
    # Links between places in the model, from `low` to `high` in forward.
    places = operations.num_stages * operations.num_chunks
    links = [(low, low + 1) for low in range(places - 1)]
    if operations.num_chunks == 1 and is_connected(operations.links, operations.num_stages):
        links = sorted(operations.links)
    ways = pl.DataFrame(links, {"low": pl.Int64, "high": pl.Int64}, orient="row")
    parts = [rows.clear().select(source="id", target="id")]
    for role, (one, other) in ((Role.FORWARD, ways.columns), (Role.BACKWARD, ways.columns[::-1])):
        of_role = _of(computes, role)
        if role.name.lower() in recorded:
            continue
        sources = of_role.select(*key[:3], pl.col("at").alias(one), source="id").join(ways, on=one)
        targets = of_role.select(*key[:3], pl.col("at").alias(other), target="id")
        parts.append(sources.join(targets, on=[*key[:3], other]).select("source", "target"))
    return _pairs(pl.concat(parts), EdgeKind.HANDOVER)
