"""Communication calls of a run, in the form in which the search for a hang needs them.

Takes the tables of a run. Returns `Records`: calls with their group's ranks and an order per rank, and facts
about each rank: when its calls were last saved, how far it had come, how it ended. Draws no conclusions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import polars as pl

from dpro.detect.observations import Observation, observe
from dpro.members import members_of, members_text
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, PROCESS_GROUPS, RECORDER, STEPS, WORKERS
from dpro.schema.members import GROUP_RANKS, of_each_text, sorted_members
from dpro.store import Run

# What NCCL's RAS reports: ranks that do not answer, are considered dead, or have made fewer calls.

SILENT, DEAD = "ras_unresponsive", "ras_considered_dead"
CALLS = "ras_calls "  # followed by the operation
SOURCE = "NCCL RAS"


@dataclass(frozen=True)
class Ras:
    """Report of NCCL's RAS.

    Attributes:
        dead: ranks that NCCL considers dead.
        silent: ranks that do not answer.
        answering: ranks whose calls are reported.
        behind: by rank, an observation of each communicator and operation that it called less than others
            did.
    """

    dead: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    answering: frozenset[int] = frozenset()
    behind: Mapping[int, list[Observation]] = field(default_factory=dict)

    def suspects(self, ranks: Iterable[int]) -> list[int]:
        """Return which of some ranks the report implicates: the dead, else the silent, else those behind."""
        named = list(ranks)
        for group in (self.dead, self.silent, self.behind):
            if implicated := [rank for rank in named if rank in group]:
                return implicated
        return []

    def observations(self, rank: int) -> list[Observation]:
        """Return what the report says about a rank."""
        observed = []
        if rank in self.dead:
            observed.append(observe("ras-dead", "NCCL's RAS considers rank {rank} dead", rank=rank))
        elif rank in self.silent:
            sentence = "rank {rank} does not answer NCCL's RAS: its process is stopped, gone or cut off"
            observed.append(observe("ras-silent", sentence, rank=rank))
        elif rank in self.answering:
            sentence = "rank {rank} answers NCCL's RAS: its process is alive"
            observed.append(observe("ras-answers", sentence, rank=rank))
        return observed + list(self.behind.get(rank, ()))


def read_ras(counters: pl.DataFrame) -> Ras:
    """Read the report from table `counters`; empty for a run without one."""
    flagged = {
        name: frozenset(counters.filter(pl.col("counter") == name)["rank"].to_list())
        for name in (SILENT, DEAD)
    }
    calls = counters.filter(pl.col("counter").str.starts_with(CALLS))
    behind: dict[int, list[Observation]] = {}
    most = pl.col("value").max().over("device", "counter")
    late = calls.with_columns(most=most).filter(pl.col("value") < pl.col("most"))
    late = late.sort("rank", "device", "counter")
    for rank, communicator, counter, value, top in late.select(
        "rank", "device", "counter", "value", "most"
    ).iter_rows():
        behind.setdefault(rank, []).append(
            observe(
                "ras-behind",
                "by NCCL's RAS it has called {operation} {calls:.0f} times in communicator {communicator}, "
                "others {others:.0f} times",
                operation=counter.removeprefix(CALLS), calls=value, communicator=communicator, others=top,
            )
        )  # fmt: skip
    return Ras(flagged[DEAD], flagged[SILENT], frozenset(calls["rank"].to_list()), behind)


UNFINISHED = ("scheduled", "started")
# A member can finish these only after every other member has called.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
DEFAULT_GROUP = "0 default_pg"
_COUNT_SCALE = 2  # a recording numbers its two flight recorders in turn: the first entries are 0 and 1


@dataclass(frozen=True)
class Records:
    """Calls, groups and ranks of a run.

    Attributes:
        calls: `rank`, `order` (of the calls of a rank), `key` (group and its ranks), `group`, `p2p`,
            `sequence`, `op`, `peer`, `bytes_in`, `bytes_out`, `dtype`, `enqueued_ns`, `state`, `counted`
            (whether the sequence counts the messages of the pair).
        members: `key`, `rank`: the ranks of each group.
        status: `rank`, `key`, `enqueued`, `completed`: last sequence numbers that a rank reported for a
            group.
        ranks: `rank`, `saved_ns` (-1 unknown), `whole` (its calls are complete from the very first), `idle`
            (it reported that it had finished all it had begun), `last_step`, `last_step_ns`, `heartbeat_ns`,
            `ended_ns`, `exit_code`, `exit_signal`, `error`, `failed_ns`, `left_ns`, `final` (its script
            ended: it made no later calls).
        starts_unknown: whether the job runs on GPUs and records no starts: no call is ever `started`.
    """

    calls: pl.DataFrame
    members: pl.DataFrame
    status: pl.DataFrame
    ranks: pl.DataFrame
    world_size: int
    ras: Ras = field(default_factory=Ras)
    starts_unknown: bool = False


def read_records(run: Run) -> Records:
    """Read the records of a run."""
    groups, workers, steps, clock_samples = (
        run.table(table, list(table.columns)) for table in (PROCESS_GROUPS, WORKERS, STEPS, CLOCK_SAMPLES)
    )
    calls = run.table(COLLECTIVES)
    records = make_records(calls, groups, workers, steps, clock_samples, run.manifest.world_size)
    asked = SOURCE in run.manifest.sources.get(COUNTERS.name, "")  # reading all telemetry would be slow
    return replace(records, ras=read_ras(run.table(COUNTERS))) if asked else records


def records_of(tables: Mapping[str, pl.DataFrame], world_size: int) -> Records:
    """Make the records of tables in memory."""
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
    """Make the records of tables, all with the columns of `dpro.schema`."""
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
        counted=pl.col("source") == RECORDER,
    ).filter(~pl.col("op").str.ends_with(":coalesced"))
    calls = calls.sort("rank", *(["enqueued_ns"] if calls["counted"].any() else []), "record")
    calls = calls.with_columns(order=pl.int_range(pl.len()).over("rank"))
    # Ranks that called a group are its members where none are listed.
    keys = pl.concat([call_keys, said_keys])
    ranks_of_text = of_each_text("ranks", members_of, pl.List(pl.Int32()))
    named = keys.unique("key").with_columns(rank=ranks_of_text).drop("ranks")
    named = named.explode("rank", empty_as_null=True).drop_nulls()
    callers = calls.select("key", "rank").unique().join(named, on="key", how="anti")
    members = pl.concat([named, callers]).unique().sort("key", "rank")
    status = said.filter((pl.col("group") != "") & (pl.col("enqueued") >= 0))
    return Records(
        calls.drop("record"),
        members,
        status.select("rank", "key", "enqueued", "completed").unique(["rank", "key"], keep="any"),
        _ranks(calls, process_groups, workers, steps, clock_samples),
        world_size,
        starts_unknown=bool((workers["gpu_name"] != "").any()) and not (calls["state"] == "started").any(),
    )


def with_known_state(collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the calls of table `collectives` whose state and group are known.

    Calls that ran in a deep window count as completed, even if their state was saved before they ended.
    """
    ran = (pl.col("window") >= 0) & (pl.col("duration_ns") >= 0)
    calls = collectives.with_columns(state=pl.when(ran).then(pl.lit("completed")).otherwise("state"))
    return calls.filter((pl.col("state") != "") & (pl.col("group") != ""))


def _keyed(
    frame: pl.DataFrame, process_groups: pl.DataFrame, world_size: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Add `key`, which identifies a group: its name and ranks, since split groups share a name.

    Args:
        frame: rows with `group` and `group_ranks`.

    Returns:
        The rows with `key`; and `key`, `ranks` (as text) of each group.
    """
    on = ["group", GROUP_RANKS] if (frame[GROUP_RANKS] != "").any() else ["group"]
    kinds = frame.select("group", GROUP_RANKS).unique()  # few, while rows may be millions
    listed = (
        pl.concat([rows.select("group", GROUP_RANKS) for rows in (process_groups, kinds)])
        .filter(pl.col(GROUP_RANKS) != "")
        .unique()
        .sort("group", GROUP_RANKS)
    )
    single = listed.filter(pl.len().over("group") == 1).rename({GROUP_RANKS: "listed"})
    ranks = (
        pl.when(pl.col(GROUP_RANKS) != "")
        .then(GROUP_RANKS)
        .when(pl.col("listed").is_not_null())
        .then("listed")
        .when(pl.col("group") == DEFAULT_GROUP)
        .then(pl.lit(members_text(range(world_size))))
        .otherwise(GROUP_RANKS)
    )
    # Categories are parsed once each rather than in every row.
    keys = (
        kinds.join(single, on="group", how="left")
        .with_columns(ranks=ranks)
        .with_columns(sorted_members("ranks"))
        .with_columns(key=(pl.col("group") + "|" + pl.col("ranks")).cast(pl.Categorical))
    )
    keyed = frame.join(keys.select(*on, "key"), on=on, how="left", maintain_order="left")
    return keyed, keys.select("key", "ranks")


def _ranks(
    calls: pl.DataFrame,
    process_groups: pl.DataFrame,
    workers: pl.DataFrame,
    steps: pl.DataFrame,
    clock_samples: pl.DataFrame,
) -> pl.DataFrame:
    """Return the known facts about each rank; a rank that occurs only in calls of its peers has no row."""
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
    ends_ns = pl.col("start_ns") + pl.col("duration_ns")
    progress = steps.group_by("rank").agg(last_step=pl.col("step").max(), last_step_ns=ends_ns.max())
    beats = clock_samples.group_by("rank").agg(heartbeat_ns=pl.col("time_ns").max())
    facts = ("host", "pid", "ended_ns", "exit_code", "exit_signal", "stack", "error", "failed_ns", "left_ns")
    ends = workers.select("rank", *facts).unique("rank", keep="last")
    ranks = (
        pl.concat([facts_of.select("rank") for facts_of in (saved, first, beats, ends)]).unique().sort("rank")
    )
    for facts_of in (saved, first, progress, beats, ends):
        ranks = ranks.join(facts_of, on="rank", how="left", maintain_order="left")
    flags = [pl.col(name).fill_null(False) for name in ("idle", "whole", "final")]
    return ranks.with_columns(
        dumped=pl.col("saved_ns").is_not_null() | pl.col("last_call_ns").is_not_null(),
        final=pl.col("left_ns") > 0,
    ).with_columns(*flags, pl.col(pl.Int64, pl.Int32).fill_null(-1), pl.col(pl.String).fill_null(""))
