"""Own time of each rank in each step, inferred from the times of its collective calls.

Takes calls and steps, which are always recorded; needs comparisons of clocks, but no deep window. Returns
calls and steps on one clock, and own time per rank and step: the time between a rank's calls, minus its waits
for others.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from dpro.replay.alignment.align import Alignment, align, on_lines
from dpro.replay.peers import teams_in_groups
from dpro.schema.members import num_members, sorted_members

MESSAGES = ("send", "recv")
COALESCED = ":coalesced"  # suffix of the flight recorder's name for several messages sent as one
MIN_WITHIN = 0.3  # least share of a step's bytes in calls that are waited for before the last one
AS_EXPECTED = 0.25  # of the excess that these calls would have if transfers caused it
LEFT = 0.1  # share of the waits that blocking calls may cut short, since clocks have errors
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
    """Return calls of collectives with several ranks, one row for each rank and call.

    Args:
        collectives: rows of that table, times on one clock; ids need not be unique.

    Returns:
        `[rank, key, sequence, op, size, bytes, time_ns]`; `key` is the group with its ranks, `size` their
        number, -1 where unknown.
    """
    numbered = collectives.filter(
        ~pl.col("op").is_in(MESSAGES)
        & ~pl.col("op").str.ends_with(COALESCED)  # messages, too, whose numbers differ between ranks
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
    """Return work and waits of each rank in each whole step with the rank's usual calls.

    Args:
        calls: as from `calls_of`.
        steps: rows of that table; steps of deep windows are left out.

    Returns:
        `[rank, step, start_ns, own_ns, waited_ns, signature]`; ranks with equal signatures make equal calls.
    """
    return usual_ones(own_time_of_all(calls, steps))


def usual_ones(own_times: pl.DataFrame) -> pl.DataFrame:
    """Return the own times of steps with the calls of most steps of their rank.

    Args:
        own_times: as from `own_time_of_all`.
    """
    return own_times.filter("usual").drop("usual")


def own_time_of_all(calls: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return work and waits of each rank in each whole step, whatever it calls there.

    A step here begins when the last call of the step before was released, and ends with its own last call,
    since all ranks wait for what follows that call. A host that waits in a call goes on when the last member
    has come. Whether it waits, or goes on at once while the call runs, is inferred for each kind of call from
    whether the times to the next call vary with the waits. All calls are waited for at the latest between a
    step's last call and the next step's first; unless hosts go on there, too.

    Args:
        calls: as from `calls_of`.
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
    """Return whether an excess since some step is between steps only, though calls within them move data.

    A transfer takes place between a call that is waited for and the next one. If calls within a step move
    many of its bytes, and ranks do not take longer there, the excess is not a transfer.

    Args:
        calls, steps: as for `own_time_of_all`.
        since: the first step with the excess.
    """
    gaps = _gaps(_in_steps(_released(calls.filter(pl.col("rank").is_in(ranks))), steps))
    gaps = gaps.join(_blocking(gaps), on=["op", "size", "crosses"], how="left")
    waited = pl.col("blocks").fill_null(False)
    rest = pl.col("gap_ns") - pl.when(waited).then("wait_ns").otherwise(0)
    # Calls among some of these ranks use other links.
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
    """Return teams of ranks that do equal work and wait for each other: equal calls, linked groups, a stage.

    Args:
        calls: as from `calls_of`.
        own_times: as from `own_time`.
    """
    kinds = {
        rank: (signature, stages.get(rank, -1))
        for rank, signature in own_times.select("rank", "signature").unique().iter_rows()
    }
    rows = calls.select("key", "rank").unique().sort("key", "rank")
    return teams_in_groups(kinds, rows.group_by("key", maintain_order=True).agg("rank")["rank"].to_list())


def _released(calls: pl.DataFrame) -> pl.DataFrame:
    """Add when the last member came; null unless the calls of all members are there.

    In a group that contains all recorded ranks, these count as all: it is unknown which other ranks they
    waited for, but they did so together, and are compared only with each other.
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
    """Add the step of each call, the call's place in it, and dpro's own time before that step."""
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
    """Return the time from each call to the next of its rank, and how long of it the rank may have waited.

    `cycle` is the step of the later call; at a step's last call, all calls begun in it are waited for.
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
    """Return the kinds of call that are waited for at once: `[op, size, crosses, blocks]`.

    For these, the time to the next call varies from step to step with the wait, and less without it. Compared
    are absolute deviations from each place's median, which are robust to outliers, without what lengthens all
    of a rank's step. Where hosts make their next call before the last member has come, they do not wait.
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


STEP_COUNTERS = "step_"  # prefix of counters of one step


@dataclass(frozen=True)
class AlwaysOn:
    """The tables that are always recorded."""

    collectives: pl.DataFrame
    steps: pl.DataFrame
    counters: pl.DataFrame
    workers: pl.DataFrame
    clock_samples: pl.DataFrame


def on_one_clock(rows: AlwaysOn) -> tuple[AlwaysOn, list[int]]:
    """Move calls, steps and their counters onto the clock of the lowest rank.

    Returns:
        The rows, and the ranks that were left out because their clocks were never compared.
    """
    if rows.steps.is_empty() or (
        rows.workers["clock"].n_unique() <= 1 and not (rows.workers["clock"] == "").any()
    ):
        return rows, []
    # From comparisons of the clocks alone: calls have no ends from which to infer them.
    ranks = sorted({*rows.steps["rank"], *rows.collectives["rank"]})
    # Events on a single clock only set the range of times.
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
    clocks = align(extent, [(rank, 0) for rank in ranks], rows.workers, rows.clock_samples)
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


def _moved(frame: pl.DataFrame, column: str, clocks: Alignment) -> pl.DataFrame:
    lines = {rank: clock.line for (rank, _), clock in clocks.clocks.items()}
    return on_lines(frame, "rank", lines, [column])
