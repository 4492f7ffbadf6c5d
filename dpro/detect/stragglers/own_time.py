"""How long each rank worked of its own in each step, from the times of its collective calls alone.

In: calls and steps, which are always recorded: no deep window is needed, only comparisons of clocks. Out:
calls and steps on one clock; own time per rank and step: the time between its calls, less its waiting for the
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

from dpro.replay.alignment.align import Alignment, align, on_lines
from dpro.replay.peers import teams_in_groups
from dpro.schema.members import num_members, sorted_members

MESSAGES = ("send", "recv")
COALESCED = ":coalesced"  # what the flight recorder calls several messages that go as one ends with
MIN_WITHIN = 0.3  # of a step's bytes, that calls move which are waited for before the last one
AS_EXPECTED = 0.25  # of what these would take longer if it were for what they move
LEFT = 0.1  # share of the waits that may be left out before hosts are taken not to wait: clocks have errors
_CALLS = {
    "rank": pl.Int32,
    "key": pl.String,
    "sequence": pl.Int64,
    "op": pl.String,
    "size": pl.Int64,
    "bytes": pl.Int64,
    "time_ns": pl.Int64,
}


def calls_of(collectives: pl.DataFrame) -> pl.DataFrame:
    """Calls of collectives that several ranks take part in, one row for each rank and call.

    Args:
        collectives: rows of that table, times on one clock; ids need not be unique.

    Returns:
        `[rank, key, sequence, op, size, bytes, time_ns]`; `key` is the group with its ranks, `size` how many
        these are, -1 where that is unknown.
    """
    numbered = collectives.filter(
        ~pl.col("op").is_in(MESSAGES)
        & ~pl.col("op").str.ends_with(COALESCED)  # messages, too: each rank counts its own
        & (pl.col("sequence") >= 0)
        & (pl.col("enqueued_ns") >= 0)
        & (pl.col("group") != "")
        & (num_members() != 1)
    )
    by = ["group", "group_ranks"]
    groups = numbered.select(by).unique().with_columns(size=num_members())
    groups = groups.with_columns(
        key=pl.col("group") + "|" + sorted_members(),
        size=pl.when(pl.col("size") > 0).then("size").otherwise(-1),
    )
    rows = numbered.select(*by, "rank", "sequence", "op", bytes="bytes_in", time_ns="enqueued_ns").join(
        groups, on=by
    )
    first = rows.group_by("rank", "key", "sequence").agg(
        pl.col("op").first(), pl.col("size").first(), pl.col("bytes").max(), pl.col("time_ns").min()
    )
    return first.select(pl.col(name).cast(dtype) for name, dtype in _CALLS.items())


def own_time(calls: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Work and waiting of each rank in each whole step that is like most of its steps.

    Args:
        calls: as `calls_of` gives them.
        steps: rows of that table; steps of deep windows are left out.

    Returns:
        `[rank, step, start_ns, own_ns, waited_ns, signature]`; ranks whose signature is the same make the
        same calls.
    """
    return usual_ones(own_time_of_all(calls, steps))


def usual_ones(own_times: pl.DataFrame) -> pl.DataFrame:
    """The own times of steps that are like most steps of their rank.

    Args:
        own_times: as `own_time_of_all` gives it.
    """
    return own_times.filter("usual").drop("usual")


def own_time_of_all(calls: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Work and waiting of each rank in each whole step, whatever it calls there.

    A step here begins when the last call of the step before was released, and ends with its own last call:
    what follows that call, all ranks wait for. A host that waits in a call goes on when the last member has
    come; whether it waits, or goes on at once while the call runs, is inferred for each kind of call from
    whether the times to the next call move with the waits. All that is begun is waited for at the latest
    between a step's last call and the next step's first; unless there, too, hosts go on.

    Args:
        calls: as `calls_of` gives them.
        steps: rows of that table; steps of deep windows are left out.

    Returns:
        The columns of `own_time`, and `usual`: whether the rank makes the same calls in most steps.
    """
    gaps = _gaps(_in_steps(_released(calls), steps))
    waits = _blocking(gaps)
    gaps = gaps.join(waits, on=["op", "size", "crosses"], how="left", maintain_order="left")
    wait = pl.when(pl.col("blocks").fill_null(False)).then("wait_ns").otherwise(0)
    whole = gaps.group_by("rank", "cycle").agg(
        own_ns=(pl.col("gap_ns") - wait).sum(),
        waited_ns=wait.sum(),
        begins=pl.col("crosses").sum(),
        known=pl.col("known").all(),
    )
    signatures = gaps.select("rank", cycle="step", signature="signature").unique()
    usual = signatures.group_by("rank").agg(usual=pl.col("signature").mode().min())
    starts = steps.filter(pl.col("window") < 0).select("rank", "start_ns", cycle="step")
    return (
        whole.filter((pl.col("begins") == 1) & pl.col("known"))
        .join(signatures, on=["rank", "cycle"])
        .join(usual, on="rank")
        .join(starts, on=["rank", "cycle"])
        .with_columns(usual=pl.col("signature") == pl.col("usual"))
        .select("rank", "start_ns", "own_ns", "waited_ns", "signature", "usual", step="cycle")
        .sort("step", "rank")
    )


def outside_calls(calls: pl.DataFrame, steps: pl.DataFrame, ranks: list[int], since: int) -> bool:
    """Whether what ranks take longer since some step lies between steps, though calls within them move data.

    A transfer lies between a call that is waited for and the next one. Where calls within a step move much of
    its bytes, and ranks take no longer there, it is no transfer.

    Args:
        calls, steps: as `own_time_of_all` takes them.
        since: the first step of those that take longer.
    """
    gaps = _gaps(_in_steps(_released(calls.filter(pl.col("rank").is_in(ranks))), steps))
    gaps = gaps.join(_blocking(gaps), on=["op", "size", "crosses"], how="left")
    waited = pl.col("blocks").fill_null(False)
    rest = pl.col("gap_ns") - pl.when(waited).then("wait_ns").otherwise(0)
    # Calls of a part of these ranks take other links.
    within = ~pl.col("crosses") & waited & (pl.col("size") == len(ranks))
    per_step = gaps.group_by("rank", "cycle").agg(
        within=rest.filter(within).sum(),
        between=rest.filter("crosses").sum(),
        moved=pl.col("bytes").filter(within).sum(),
        all=pl.col("bytes").sum(),
    )
    late = pl.col("cycle") >= since
    grown = per_step.group_by("rank").agg(
        _grown("within", late), _grown("between", late), moved=(pl.col("moved") / pl.col("all")).median()
    )
    rows = grown.drop_nulls().drop_nans()
    if rows.is_empty() or float(rows["moved"].min()) < MIN_WITHIN:  # type: ignore[arg-type]
        return False
    expected = (pl.col("within") + pl.col("between")) * pl.col("moved")
    return bool(rows.select((pl.col("within") <= AS_EXPECTED * expected).all()).item())


def _grown(name: str, late: pl.Expr) -> pl.Expr:
    return pl.col(name).filter(late).median() - pl.col(name).filter(~late).median()


def teams_by_calls(calls: pl.DataFrame, own_times: pl.DataFrame, stages: dict[int, int]) -> list[list[int]]:
    """Ranks that do the same work and wait for each other: the same calls, linked by groups, of one stage.

    Args:
        calls: as `calls_of` gives them.
        own_times: as `own_time` gives it.
    """
    kinds = {
        rank: (signature, stages.get(rank, -1))
        for rank, signature in own_times.select("rank", "signature").unique().iter_rows()
    }
    return teams_in_groups(kinds, _members(calls))


def _members(calls: pl.DataFrame) -> Iterable[list[int]]:
    """Ranks of each group that is called, in order."""
    rows = calls.select("key", "rank").unique().sort("key", "rank")
    return rows.group_by("key", maintain_order=True).agg("rank")["rank"].to_list()


def _released(calls: pl.DataFrame) -> pl.DataFrame:
    """Add when the last member came; null where not all members' calls are there.

    Of a group that has all recorded ranks, these count: which others they waited for is not known, but they
    did so together, and are compared with each other alone.
    """
    callers = calls.group_by("key").agg(callers=pl.col("rank").n_unique())
    all_there = pl.col("callers") == calls["rank"].n_unique()
    size = pl.when((pl.col("size") > 0) & ~all_there).then("size").otherwise("callers")
    return (
        calls.join(callers, on="key")
        .with_columns(size=size.cast(pl.Int64))
        .with_columns(
            came=pl.len().over("key", "sequence"), last=pl.col("time_ns").max().over("key", "sequence")
        )
        .with_columns(release_ns=pl.when(pl.col("came") == pl.col("size")).then("last"))
        .drop("callers", "came", "last")
        .filter(pl.col("size") > 1)
    )


def _in_steps(calls: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Add the step that each call was made in, its place there, and dpro's own time before that step."""
    before = pl.col("start_ns") + pl.col("duration_ns")
    extents = steps.sort("rank", "start_ns").select(
        "rank",
        "step",
        "window",
        "start_ns",
        end_ns=before,
        ours_ns=(pl.col("start_ns") - before.shift(1).over("rank")).clip(lower_bound=0).fill_null(0),
    )
    joined = calls.sort("time_ns").join_asof(
        extents.sort("start_ns"), left_on="time_ns", right_on="start_ns", by="rank", check_sortedness=False
    )
    inside = joined.filter((pl.col("time_ns") < pl.col("end_ns")) & (pl.col("window") < 0))
    ordered = inside.sort("rank", "time_ns", "key", "sequence")
    place = pl.int_range(pl.len()).over("rank", "step")
    signature = pl.struct("op", "size", "place").hash().sum().over("rank", "step")
    return (
        ordered.with_columns(place=place)
        .with_columns(signature=signature)
        .drop("window", "start_ns", "end_ns")
    )


def _gaps(calls: pl.DataFrame) -> pl.DataFrame:
    """From each call to the next of its rank: how long, and how long of it the rank may have waited.

    `cycle` is the step of the later call; at a step's last call all that was begun in it is waited for.
    `left_ns` is by how much the later call came before the wait would have ended.
    """
    following = {name: pl.col(name).shift(-1).over("rank") for name in ("time_ns", "step", "ours_ns")}
    gaps = calls.with_columns(
        next_ns=following["time_ns"],
        cycle=following["step"],
        ours=following["ours_ns"],
        latest_ns=pl.col("release_ns").max().over("rank", "step"),
    ).drop_nulls(["next_ns", "cycle"])
    gaps = gaps.with_columns(crosses=pl.col("cycle") != pl.col("step"))
    until = pl.when("crosses").then("latest_ns").otherwise("release_ns")
    ours = pl.when("crosses").then("ours").otherwise(0)
    gap = (pl.col("next_ns") - pl.col("time_ns") - ours).clip(lower_bound=0)
    waiting = (until - pl.col("time_ns")).clip(lower_bound=0)
    return gaps.with_columns(
        gap_ns=gap,
        wait_ns=pl.min_horizontal(gap, waiting).fill_null(0),
        left_ns=(waiting - gap).clip(lower_bound=0).fill_null(0),
        known=pl.col("release_ns").is_not_null() & (pl.col("cycle") - pl.col("step") <= 1),
    )


def _blocking(gaps: pl.DataFrame) -> pl.DataFrame:
    """Which kinds of call are waited for at once: `[op, size, crosses, blocks]`.

    If they are, the time to the next call moves from step to step with the wait; then it varies less once the
    wait is taken off. Absolute deviations from each place's median are compared, which outliers do not sway,
    once what all of a rank's step takes longer is taken off.
    Where hosts make their next call before the last member has come, they do not wait.
    """
    place, step = ["rank", "place", "crosses", "signature"], ["rank", "step", "op", "size", "crosses"]
    held = gaps.filter(pl.col("known")).with_columns(waiting=pl.col("gap_ns") - pl.col("wait_ns"))
    of_place = {name: pl.col(name).median().over(place) for name in ("waiting", "gap_ns")}
    usual = held.with_columns(usual_waiting=of_place["waiting"], usual_gap_ns=of_place["gap_ns"])

    def spread(name: str) -> pl.Expr:
        times = pl.col(name) / pl.col(f"usual_{name}").clip(lower_bound=1)
        of_step = pl.when(pl.len().over(step) > 1).then(times.median().over(step)).otherwise(1.0)
        return (pl.col(name) - pl.col(f"usual_{name}") * of_step).abs()

    spreads = usual.with_columns(waiting=spread("waiting"), going_on=spread("gap_ns"))
    return (
        spreads.group_by("op", "size", "crosses")
        .agg(pl.col("waiting", "going_on", "wait_ns", "left_ns").sum())
        .with_columns(
            blocks=(
                (pl.col("waiting") < pl.col("going_on"))
                | (pl.col("crosses") & (pl.col("waiting") == pl.col("going_on")))
            )
            & (pl.col("left_ns") <= LEFT * (pl.col("wait_ns") + pl.col("left_ns")))
        )
        .drop("waiting", "going_on", "wait_ns", "left_ns")
    )


STEP_COUNTERS = "step_"  # begins the names of counters that are about one step


@dataclass(frozen=True)
class AlwaysOn:
    """Rows of what is always recorded."""

    collectives: pl.DataFrame
    steps: pl.DataFrame
    counters: pl.DataFrame
    workers: pl.DataFrame
    clock_samples: pl.DataFrame


def on_one_clock(rows: AlwaysOn) -> tuple[AlwaysOn, list[int]]:
    """Move calls, steps and their counters onto the clock of the lowest rank.

    Returns:
        The rows, and the ranks that had to be left out: their clocks were never compared.
    """
    if rows.steps.is_empty() or _is_one(rows.workers):
        return rows, []
    clocks = _clocks(rows)
    apart = sorted(rank for (rank, _), clock in clocks.clocks.items() if clock.line.uncertainty_ns < 0)
    here = ~pl.col("rank").is_in(apart)
    collectives, steps = rows.collectives.filter(here), rows.steps.filter(here)
    counters = rows.counters.filter(here & pl.col("counter").str.starts_with(STEP_COUNTERS))
    moved = AlwaysOn(
        _moved(collectives, "enqueued_ns", clocks),
        _moved(steps, "start_ns", clocks),
        _moved(counters, "time_ns", clocks),
        rows.workers.filter(here),
        rows.clock_samples,
    )
    return moved, apart


def _is_one(workers: pl.DataFrame) -> bool:
    return workers["clock"].n_unique() <= 1 and not (workers["clock"] == "").any()


def _clocks(rows: AlwaysOn) -> Alignment:
    """The clocks by their comparisons: calls have no ends that clocks could be inferred from."""
    ranks = sorted({*rows.steps["rank"], *rows.collectives["rank"]})
    # Seen by one clock alone, these say no more than what times it is about.
    moments = rows.steps.select(start_ns=pl.concat_list(pl.col("start_ns").min(), pl.col("start_ns").max()))
    extent = (
        moments.head(1)
        .explode("start_ns", empty_as_null=True)
        .with_columns(
            rank=pl.lit(ranks[0], pl.Int32),
            window=pl.lit(0, pl.Int32),
            instance=pl.int_range(pl.len()),
            op=pl.lit(""),
            duration_ns=pl.lit(0, pl.Int64),
            members=pl.lit(2),
        )
    )
    return align(extent, [(rank, 0) for rank in ranks], rows.workers, rows.clock_samples)


def _moved(frame: pl.DataFrame, column: str, clocks: Alignment) -> pl.DataFrame:
    lines = {rank: clock.line for (rank, _), clock in clocks.clocks.items()}
    return on_lines(frame, "rank", lines, [column])
