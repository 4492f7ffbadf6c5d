"""Load imbalance over experts, and over the ranks that all-to-alls send work to.

Takes spans and collectives of deep windows; returns for each layer the load of each rank, or of each expert
where experts are separate modules: the bytes that all-to-alls deliver, and the rows of grouped products and
of the products of each expert, where shapes were recorded. Layers are named by module where it is known, else
numbered. Kernels that dispatch tokens by themselves (DeepEP) report no sizes; their layers are left out.
"""

from __future__ import annotations

import json
from contextlib import suppress

import polars as pl

from dpro.replay.attribution import work_of
from dpro.replay.cost.kernels.roofline import MATMULS, product_of
from dpro.replay.steps import END, recorded_steps

EXCHANGE, GROUPED, PRODUCTS = "all_to_all", "grouped products", "products of experts"
GROUPED_NAME = r"^aten::_(scaled_)?grouped_mm"
EXPERT = r"^(?:module\.)?(.*\bexperts)\.(\d+)\b"
UNEVEN = 1.1  # largest over mean load from which a layer counts as uneven
LOADS = ["source", "layer", "step", "member", "load"]


def imbalances(spans: pl.DataFrame, collectives: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the layers in which work is sent to ranks or experts, the most uneven first.

    Returns:
        `source`, `layer`, `members` (number of ranks or experts), `mean` and `most` (mean and largest load of
        a member in a step: bytes of all-to-alls, else rows), `busiest` (the member with `most`) and
        `imbalance` (largest over mean load of each step, averaged). All-to-alls are included only if those of
        at least one layer are uneven.
    """
    stretches = stretches_of(recorded_steps(spans, steps))
    sources = [_by_layer(_all_to_all_loads(collectives, stretches), spans), *_product_loads(spans, stretches)]
    loads = pl.concat(sources).group_by(LOADS[:-1]).agg(pl.col("load").sum())
    place = LOADS[:2]
    members = loads.group_by(*place, "member").agg(mean=pl.col("load").mean()).sort("mean", "member")
    last = {"busiest": pl.col("member").last(), "most": pl.col("mean").last()}
    layers = members.group_by(place).agg(members=pl.len().cast(pl.Int64), **last, mean=pl.col("mean").mean())
    of_steps = loads.group_by(*place, "step").agg(imbalance=pl.col("load").max() / pl.col("load").mean())
    layers = layers.join(of_steps.group_by(place).agg(pl.col("imbalance").mean()), on=place)
    layers = layers.filter(pl.col("members") > 1)
    sent = pl.col("source") == EXCHANGE
    layers = layers.filter(~sent | ((pl.col("imbalance") >= UNEVEN) & sent).any())
    columns = [*place, "members", "mean", "most", "busiest", "imbalance"]
    return layers.select(columns).sort("imbalance", *place, descending=[True, False, False])


def loads_of_ranks(collectives: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return `rank`, `step`, `workload`: all-to-all bytes that load each rank in each step of a window."""
    loads = _all_to_all_loads(collectives, stretches_of(steps.with_columns(END)))
    return loads.group_by("rank", "step").agg(workload=pl.col("load").sum())


def uneven_layers(layers: pl.DataFrame) -> pl.DataFrame:
    """Return the most uneven layer of each source that has one.

    Args:
        layers: rows of `imbalances`.
    """
    uneven = layers.filter(pl.col("imbalance") >= UNEVEN)
    return uneven.unique("source", keep="first", maintain_order=True)


def member_in_words(source: str, busiest: int, **_: object) -> str:
    """Word a member of a layer as `rank 3` or `expert 3`."""
    return f"{'expert' if source == PRODUCTS else 'rank'} {busiest}"


def stretches_of(steps: pl.DataFrame) -> pl.DataFrame:
    """Return `rank`, `window`, `step`, `begin` and `end_ns` of steps that have `end_ns`."""
    return steps.select("rank", "window", "step", "end_ns", begin="start_ns")


def within_steps(rows: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that begin in a step, with that step.

    Args:
        stretches: steps, from `stretches_of`.
    """
    placed = rows.sort("start_ns").join_asof(
        stretches.sort("begin"),
        left_on="start_ns",
        right_on="begin",
        by=["rank", "window"],
        check_sortedness=False,
    )
    return placed.filter(pl.col("start_ns") < pl.col("end_ns"))


def _named(what: str) -> pl.Expr:
    """Return the module as an expression, or where unknown, `what` with its number in the step."""
    number = pl.col("start_ns").rank("ordinal").over("rank", "step")
    return pl.when(pl.col("module") != "").then("module").otherwise(pl.format(f"{what} {{}}", number))


def _all_to_all_loads(collectives: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """Return all-to-alls with the `load` of each rank: bytes a dispatch delivers, or a combine sends back."""
    sized = (pl.col("bytes_in") >= 0) & (pl.col("bytes_out") >= 0) & (pl.col("group_ranks") != "")
    calls = collectives.filter((pl.col("op") == "all_to_all") & (pl.col("window") >= 0) & sized)
    calls_of = ["step", "group_ranks"]
    call = [*calls_of, "number"]
    number = pl.col("start_ns").rank("ordinal").over("rank", *calls_of)
    placed = within_steps(calls, stretches).with_columns(number=number)
    placed = placed.filter(pl.len().over(call) == pl.col("rank").n_unique().over("group_ranks"))
    got, gave = (
        pl.col(name).max().over(call) / pl.col(name).mean().over(call) for name in ("bytes_out", "bytes_in")
    )
    load = pl.when(got >= gave).then("bytes_out").otherwise("bytes_in")
    return placed.with_columns(load=load.cast(pl.Float64))


def _by_layer(calls: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return `LOADS` of all-to-all calls, by calling module or numbered call."""
    by = pl.when(pl.col("launch_span_id") >= 0).then("launch_span_id").otherwise("span_id")
    threads = spans.select("rank", "span_id", "tid")
    calls = calls.with_columns(span_id=by).join(threads, on=["rank", "span_id"], how="left")
    calls = calls.with_columns(pl.col("tid").fill_null(-1))
    calls = calls.with_columns(module=work_of(spans, calls)["module"]).with_columns(layer=_named("call"))
    member = pl.col("rank").cast(pl.Int64)
    return calls.with_columns(source=pl.lit(EXCHANGE), member=member).select(LOADS)


def _product_loads(spans: pl.DataFrame, stretches: pl.DataFrame) -> list[pl.DataFrame]:
    """Return rows of grouped products by rank, and rows of products within single experts by expert."""
    is_grouped = pl.col("name").str.contains(GROUPED_NAME)
    is_product = (is_grouped | pl.col("name").is_in(list(MATMULS))) & (pl.col("kind") == "cpu_op")
    operators = spans.filter(is_product & (pl.col("shapes") != ""))
    sizes = operators.select("name", "shapes").unique()
    loads = [rows_of(name, shapes) for name, shapes in sizes.iter_rows()]
    sizes = sizes.with_columns(load=pl.Series(loads, dtype=pl.Float64)).filter(pl.col("load") >= 0)
    work = work_of(spans, operators)
    operators = operators.with_columns(work["module"]).filter(~work["backward"])
    placed = within_steps(operators.join(sizes, on=["name", "shapes"]), stretches)
    grouped, single = placed.filter(is_grouped), placed.filter(~is_grouped)
    expert = pl.col("module").str.extract(EXPERT, 2).cast(pl.Int64)
    single = single.with_columns(layer=pl.col("module").str.extract(EXPERT, 1), member=expert)
    grouped = grouped.with_columns(layer=_named("product"), member=pl.col("rank").cast(pl.Int64))
    return [
        grouped.with_columns(source=pl.lit(GROUPED)).select(LOADS),
        single.drop_nulls("layer").with_columns(source=pl.lit(PRODUCTS)).select(LOADS),
    ]


def rows_of(name: str, shapes: str) -> float:
    """Return the number of tokens that a product or grouped product multiplies; -1 where shapes do not say.

    Of `_grouped_mm` only a 2-D input with 3-D weights has tokens; the gradient of weights has none.
    """
    if name in MATMULS:
        size = product_of(name, shapes)
        return float(size[1]) if size is not None else -1.0
    with suppress(ValueError, LookupError, TypeError):
        left, right, *_ = json.loads(shapes)
        return float(left[0]) if (len(left), len(right)) == (2, 3) else -1.0
    return -1.0
