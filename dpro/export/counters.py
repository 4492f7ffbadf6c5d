"""Sampled telemetry on the clock of the timeline.

In: tables `counters` and `workers`. Out: one row per value of a counter that changed; counts that only
grow become rates. Counters of steps are left out: viewers show steps as such.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import polars as pl

from dpro.detect.machine.devices import gpus_of_ranks, sampled_gpus
from dpro.detect.machine.telemetry import SERIES
from dpro.export.quantities import RATE, quantity_of
from dpro.units import NS_PER_S

_OF_STEPS = ("step_", "data_wait_ns", "gc_pause_ns", "loader_start_ns")
_INTEREST = ("clock", "power", "temperature", "utilization", "tx_", "rx_", "load", "main_thread", "memory")


def sampled_counters(
    counters: pl.DataFrame, workers: pl.DataFrame, ahead: Mapping[str, int], ranks: Collection[int] = ()
) -> pl.DataFrame:
    """Return what was sampled and changed meanwhile; GPUs that no chosen rank uses are left out.

    Args:
        counters: table `counters`.
        workers: table `workers`, for which rank uses which GPU.
        ahead: by how many ns each host's clock is ahead of the timeline's; others count as 0.
        ranks: whose to keep; all if empty. What belongs to a host is always kept.

    Returns:
        `counter` (with `/s` where it is growth per second), `label` and `unit` (of
        `dpro.export.quantities`), `series` (host, device, rank), `host`, `time_ns` (on the timeline's clock;
        of a rate, the begin of its stretch), `value` (in `unit`). Sorted by interest of the counter, then by
        series and time.
    """
    owned = gpus_of_ranks(counters, workers)
    chosen = owned.filter(pl.col("rank").is_in(ranks)) if ranks else owned
    if owned.height:  # else no GPU is known to be a rank's
        others = sampled_gpus(counters).join(chosen, on=["host", "device"], how="anti")
        counters = counters.join(others, on=["host", "device"], how="anti")
    if ranks:
        counters = counters.filter((pl.col("rank") < 0) | pl.col("rank").is_in(ranks))
    sampled = counters.filter(
        ~pl.any_horizontal(pl.col("counter").str.starts_with(each) for each in _OF_STEPS)
    )
    sampled = sampled.filter(pl.col("value").n_unique().over(SERIES) > 1).sort(*SERIES, "time_ns")
    users_of = chosen.group_by("host", "device").agg(
        used_by=pl.col("rank").cast(pl.String).sort().str.join(", ")
    )
    sampled = sampled.join(_quantities(sampled), on="counter", how="left", maintain_order="left")
    elapsed, growth = (pl.col(column).diff().over(SERIES) for column in ("time_ns", "value"))
    since = pl.col("time_ns") - pl.when("grows").then(elapsed.fill_null(0)).otherwise(0)
    rate = pl.when(growth >= 0).then(growth / (elapsed / NS_PER_S))  # null where the count began anew
    shown = sampled.join(users_of, on=["host", "device"], how="left", maintain_order="left").select(
        counter=pl.when("grows").then(pl.format("{}/s", "counter")).otherwise("counter"),
        label=pl.col("label"),
        unit=pl.col("unit"),
        series=_series(),
        host=pl.col("host"),
        time_ns=since - pl.col("host").replace_strict(dict(ahead), default=0, return_dtype=pl.Int64),
        value=pl.when("grows").then(rate).otherwise("value") * pl.col("scale"),
    )
    return shown.drop_nulls("value").sort(_interest(), "counter", "series", "time_ns")


def _quantities(sampled: pl.DataFrame) -> pl.DataFrame:
    """`counter`, `label`, `unit`, `grows` and `scale` of the counters that were sampled."""
    names = sampled["counter"].unique().sort().to_list()
    rows = [
        (name, shown.label, shown.unit, shown.kind == RATE, shown.scale)
        for name in names
        for shown in [quantity_of(name)]
    ]
    schema = {
        "counter": pl.String,
        "label": pl.String,
        "unit": pl.String,
        "grows": pl.Boolean,
        "scale": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _series() -> pl.Expr:
    """Host, device and rank of a row as one text; of a device, the ranks that use it."""
    rank = (
        pl.when(pl.col("rank") >= 0)
        .then(pl.format("rank {}", "rank"))
        .when(pl.col("used_by").is_not_null())
        .then(pl.format("(rank {})", "used_by"))
        .otherwise(pl.lit(""))
    )
    words = pl.concat_list(pl.col("host"), pl.col("device"), rank)
    return words.list.eval(pl.element().filter(pl.element() != "")).list.join(" ")


def _interest() -> pl.Expr:
    """Place of a counter in the order of `_INTEREST`."""
    place = pl.min_horizontal(
        pl.when(pl.col("counter").str.contains(word, literal=True)).then(pl.lit(place))
        for place, word in enumerate(_INTEREST)
    )
    return place.fill_null(len(_INTEREST))


def within(values: pl.DataFrame, begin_ns: int, end_ns: int) -> pl.DataFrame:
    """Return the values of a stretch of time; of those before it the last of each series, at its begin.

    Args:
        values: as from `sampled_counters`; a value holds until the next of its counter and series.
        begin_ns, end_ns: the stretch, ns.
    """
    key = ["counter", "series"]
    earlier = (pl.col("time_ns") < begin_ns).sum().over(key).cast(pl.Int64)
    place = pl.int_range(pl.len()).over(key)
    kept = values.filter((pl.col("time_ns") < end_ns) & (place >= earlier - 1))
    return kept.with_columns(pl.col("time_ns").clip(begin_ns))
