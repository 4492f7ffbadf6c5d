"""Communication calls of a run, in the form in which the search for a hang needs them.

In: the tables of a run. Out: `Records`: calls with their group's ranks and a number of their own per rank,
and what is known of each rank: when its calls were last saved, how far it had come, how it ended. Nothing is
concluded from them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import polars as pl

from dpro.detect.hang.ras import SOURCE, Ras, read_ras
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, PROCESS_GROUPS, STEPS, WORKERS
from dpro.store import Run

UNFINISHED = ("scheduled", "started")
# A member can finish these only after every other member has come.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
DEFAULT_GROUP = "0 default_pg"
_RANKS_OF_GROUP = "group_ranks"
_LIST = COLLECTIVES.dtypes[_RANKS_OF_GROUP]
_COUNT_SCALE = 2  # a recording numbers its two flight recorders in turn: the first entries are 0 and 1


@dataclass(frozen=True)
class Records:
    """Calls, groups and ranks of a run.

    Attributes:
        calls: `rank`, `order` (of the calls of a rank), `key` (group and its ranks), `group`, `p2p`,
            `sequence`, `op`, `peer`, `bytes_in`, `bytes_out`, `dtype`, `enqueued_ns`, `state`, `counted`
            (the sequence counts the messages of the pair).
        members: `key`, `rank`: who belongs to a group.
        status: `rank`, `key`, `enqueued`, `completed`: last sequence numbers that a rank reported of a group.
        ranks: `rank`, `saved_ns` (-1 unknown), `whole` (its very first call is there), `idle` (it
            reported that it had finished all it had begun), `last_step_ns`, `heartbeat_ns`, `ended_ns`,
            `exit_code`, `exit_signal`, `error`, `failed_ns`, `left_ns`, `final`
            (it made no call after those).
        world_size: number of ranks of the job.
        ras: the report of NCCL's RAS.
    """

    calls: pl.DataFrame
    members: pl.DataFrame
    status: pl.DataFrame
    ranks: pl.DataFrame
    world_size: int
    ras: Ras = field(default_factory=Ras)


def read_records(run: Run) -> Records:
    """Read the records of a run.

    Each call lists the ranks of its group, which takes much memory where groups are large: the lists are read
    only if the ranks of some group are in no other table.
    """
    groups, workers, steps, clock_samples = (
        run.table(table, list(table.columns)) for table in (PROCESS_GROUPS, WORKERS, STEPS, CLOCK_SAMPLES)
    )
    listed = groups.filter(pl.col("group_ranks").list.len() > 0).unique(["group", "group_ranks"])["group"]
    calls = run.table(COLLECTIVES, [name for name in COLLECTIVES.columns if name != _RANKS_OF_GROUP])
    known = calls.filter(pl.col("state") != "")["group"].unique()
    if listed.is_duplicated().any() or not known.is_in(listed.implode()).all():
        calls = run.table(COLLECTIVES)
    else:
        none = pl.lit([], dtype=_LIST)
        calls = calls.with_columns(none.alias(_RANKS_OF_GROUP))
    records = make_records(calls, groups, workers, steps, clock_samples, run.manifest.world_size)
    asked = SOURCE in run.manifest.sources.get(COUNTERS.name, "")  # telemetry is much to read
    return replace(records, ras=read_ras(run.table(COUNTERS))) if asked else records


def records_of(tables: Mapping[str, pl.DataFrame], world_size: int) -> Records:
    """Make the records of tables in memory.

    Args:
        tables: by name, all that there are.
        world_size: number of ranks of the job.
    """
    calls, groups, workers, steps, clock_samples = (
        tables[table.name] for table in (COLLECTIVES, PROCESS_GROUPS, WORKERS, STEPS, CLOCK_SAMPLES)
    )
    records = make_records(calls, groups, workers, steps, clock_samples, world_size)
    return replace(records, ras=read_ras(tables[COUNTERS.name]))


def make_records(
    collectives: pl.DataFrame,
    process_groups: pl.DataFrame,
    workers: pl.DataFrame,
    steps: pl.DataFrame,
    clock_samples: pl.DataFrame,
    world_size: int,
) -> Records:
    """Make the records of tables, all as declared in `dpro.schema`.

    Args:
        collectives, process_groups, workers, steps, clock_samples: the tables.
        world_size: number of ranks of the job.
    """
    said, said_keys = _keyed(process_groups, process_groups, world_size)
    calls, call_keys = _keyed(with_known_state(collectives), process_groups, world_size)
    calls = calls.select(
        "rank",
        "key",
        "group",
        "sequence",
        "op",
        "peer",
        "bytes_in",
        "bytes_out",
        "dtype",
        "enqueued_ns",
        "state",
        record="collective_id",
        p2p=pl.col("op").is_in(["send", "recv"]) & (pl.col("peer") >= 0),
        counted=pl.col("source") == "dpro recorder",
    ).filter(~pl.col("op").str.ends_with(":coalesced"))
    calls = calls.sort("rank", *(["enqueued_ns"] if calls["counted"].any() else []), "record")
    calls = calls.with_columns(order=pl.int_range(pl.len()).over("rank"))
    members = _members(calls, pl.concat([call_keys, said_keys]))
    status = said.filter((pl.col("group") != "") & (pl.col("enqueued") >= 0))
    return Records(
        calls.drop("record"),
        members,
        status.select("rank", "key", "enqueued", "completed").unique(["rank", "key"], keep="any"),
        _ranks(calls, process_groups, workers, steps, clock_samples),
        world_size,
    )


def with_known_state(collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the calls of table `collectives` of which the state and the group are known.

    What a deep window saw run has finished, also where its state was saved before.
    """
    ran = (pl.col("window") >= 0) & (pl.col("duration_ns") >= 0)
    known = collectives.with_columns(state=pl.when(ran).then(pl.lit("completed")).otherwise("state"))
    return known.filter((pl.col("state") != "") & (pl.col("group") != ""))


def _keyed(
    frame: pl.DataFrame, process_groups: pl.DataFrame, world_size: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Add `key`, which identifies a group: its name and ranks, since split groups share a name.

    Args:
        frame: rows with `group` and `group_ranks`, which may be empty.
        process_groups: table `process_groups`.
        world_size: number of ranks of the job.

    Returns:
        The rows with `key`; and `key`, `ranks`.
    """
    on = ["group"]
    if frame[_RANKS_OF_GROUP].list.len().sum():
        on.append(_RANKS_OF_GROUP)
    else:
        frame = frame.drop(_RANKS_OF_GROUP)
    kinds = frame.select(on).unique()  # few, while rows may be millions
    own = kinds if len(on) > 1 else kinds.with_columns(pl.lit([], _LIST).alias(_RANKS_OF_GROUP))
    listed = (
        pl.concat([each.select("group", _RANKS_OF_GROUP) for each in (process_groups, own)])
        .filter(pl.col(_RANKS_OF_GROUP).list.len() > 0)
        .unique()
        .sort("group", _RANKS_OF_GROUP)
    )
    single = listed.filter(pl.len().over("group") == 1).rename({_RANKS_OF_GROUP: "listed"})
    ranks = (
        pl.when(pl.col(_RANKS_OF_GROUP).list.len() > 0)
        .then(_RANKS_OF_GROUP)
        .when(pl.col("listed").is_not_null())
        .then("listed")
        .when(pl.col("group") == DEFAULT_GROUP)
        .then(pl.lit(list(range(world_size)), _LIST))
        .otherwise(_RANKS_OF_GROUP)
        .list.sort()
    )
    text = pl.col("ranks").cast(pl.List(pl.String)).list.join(",")
    # Ranks of large groups are long texts: a category is looked at once and not in every row.
    keys = (
        own.join(single, on="group", how="left")
        .with_columns(ranks=ranks)
        .with_columns(key=(pl.col("group") + "|" + text).cast(pl.Categorical))
    )
    keyed = frame.join(keys.select(*on, "key"), on=on, how="left", maintain_order="left")
    return keyed, keys.select("key", "ranks")


def _members(calls: pl.DataFrame, keys: pl.DataFrame) -> pl.DataFrame:
    """Return `key`, `rank`: the members of each group; those that called it where none are listed."""
    named = keys.unique("key").explode("ranks", empty_as_null=True).drop_nulls().rename({"ranks": "rank"})
    callers = calls.select("key", "rank").unique().join(named, on="key", how="anti")
    return pl.concat([named, callers]).unique().sort("key", "rank")


def _ranks(
    calls: pl.DataFrame,
    process_groups: pl.DataFrame,
    workers: pl.DataFrame,
    steps: pl.DataFrame,
    clock_samples: pl.DataFrame,
) -> pl.DataFrame:
    """Return what is known of each rank; one that only occurs in calls of its peers has no row."""
    saved = process_groups.group_by("rank").agg(
        saved_ns=pl.col("saved_ns").max(),
        idle=(pl.col("enqueued") >= 0).any()
        & ((pl.col("enqueued") < 0) | (pl.col("enqueued") == pl.col("completed"))).all(),
    )
    order = pl.col("record").filter(~pl.col("counted"))
    first = calls.group_by("rank").agg(
        whole=(order.min() < _COUNT_SCALE) & (order.max() - order.min() <= _COUNT_SCALE * (order.len() - 1)),
        last_call_ns=pl.col("enqueued_ns").max(),
    )
    progress = steps.group_by("rank").agg(last_step_ns=(pl.col("start_ns") + pl.col("duration_ns")).max())
    beats = clock_samples.group_by("rank").agg(heartbeat_ns=pl.col("time_ns").max())
    facts = ("host", "pid", "ended_ns", "exit_code", "exit_signal", "stack", "error", "failed_ns", "left_ns")
    ends = workers.select("rank", *facts).unique("rank", keep="last")
    known = pl.concat([each.select("rank") for each in (saved, first, beats, ends)]).unique().sort("rank")
    for each in (saved, first, progress, beats, ends):
        known = known.join(each, on="rank", how="left", maintain_order="left")
    flags = [pl.col(name).fill_null(False) for name in ("idle", "whole", "final")]
    return known.with_columns(
        dumped=pl.col("saved_ns").is_not_null() | pl.col("last_call_ns").is_not_null(),
        final=pl.col("left_ns") > 0,
    ).with_columns(*flags, pl.col(pl.Int64, pl.Int32).fill_null(-1), pl.col(pl.String).fill_null(""))
