"""A precision for the products of each module, so that they take the least time within a budget of loss.

In: a graph with GPU kernels, modules and shapes, and what a probe measured of the weights (table
`sensitivities` of the run). Out: a precision for each module, or none, and the time of each of its products
then, from `dpro.replay.cost.kernels`. What rounding costs in loss is half the mean curvature times the
squares of what it moves (HAWQ-V2, Dong et al., NeurIPS 2020, eq. 5): of weights; what activations lose is not
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.estimate import MeasuredOperations, estimate
from dpro.replay.cost.kernels.operations import matmuls
from dpro.replay.cost.kernels.roofline import BYTES, GPUS, common_model, stored_as
from dpro.replay.cost.memory import MODULE
from dpro.replay.graph import Graph
from dpro.replay.whatif.choices.programs import assign
from dpro.replay.whatif.graph_ops.fewer_bits import cast_bytes
from dpro.replay.whatif.graph_ops.scope import LANE, WRAPPER, products_of_kernels, spans_of
from dpro.schema import SENSITIVITIES
from dpro.store import Run

HOW = "dpro try precision:probe -- COMMAND records a run that has them"
DOWN_TO = {"bf16": ("bf16",), "fp16": ("fp16",), "fp8": ("bf16", "fp8")}
SIZES = ("batch", "m", "n", "k")


@dataclass(frozen=True)
class ModulePrecision:
    """What is done to one module.

    Attributes:
        module: its name.
        precision: of its products; empty: as they are.
        loss: what that adds to the loss, as a share of it.
        nodes: [K] kernels of its products.
        ns: [K] how long they take then.
    """

    module: str
    precision: str
    loss: float
    nodes: Ints
    ns: Floats


def choose_precisions(graph: Graph, kernels: Bools, lowest: str, budget: float) -> list[ModulePrecision]:
    """Choose a precision for each module.

    Args:
        kernels: [N] those that may change.
        lowest: the fewest bits, one of `DOWN_TO`.
        budget: what the loss may rise by, as a share of it.

    Raises:
        Unanswerable: the run has no measurements, modules or shapes, or its GPU is not known.
    """
    losses = expected_losses(graph.run)
    model = common_model(graph.run.manifest.gpus if graph.run is not None else [])
    if not model:
        raise Unanswerable("which GPU the kernels ran on is not known, nor what fewer bits gain there")
    products = _products(graph, kernels, losses["module"].unique().to_list())
    options = ["", *DOWN_TO[lowest]]
    modules = products["module"].unique().sort().to_list()
    number = {name: index for index, name in enumerate(modules)}
    module_of = np.array([number[name] for name in products["module"]], np.int64)
    times = np.column_stack([_times_ns(products, precision, model) for precision in options])
    costs = np.zeros((len(modules), len(options)))
    np.add.at(costs, module_of, times)
    costs[~np.isfinite(costs)] = np.inf
    share = {(module, precision): loss for module, precision, loss in losses.iter_rows()}
    errors = np.array(
        [
            [share.get((name, precision), np.inf) if precision else 0.0 for precision in options]
            for name in modules
        ]
    )
    chosen = assign(costs, errors, budget)
    nodes = products["node"].to_numpy()
    return [
        ModulePrecision(
            name, options[c], float(errors[i, c]), nodes[module_of == i], times[module_of == i, c]
        )
        for i, (name, c) in enumerate(zip(modules, chosen.tolist()))
    ]


def expected_losses(run: Run | None) -> pl.DataFrame:
    """What each precision of each module adds to the loss: `module`, `precision`, `loss`, as a share of it.

    Raises:
        Unanswerable: there was no probe, or none of its rows can be used.
    """
    table = run.table(SENSITIVITIES) if run is not None else SENSITIVITIES.empty()
    if table.is_empty():
        raise Unanswerable(f"what each module loses with fewer bits was not measured: {HOW}")
    table = usable_rows(table)
    if table.is_empty():
        raise Unanswerable(
            "no row of table sensitivities has elements, errors, trace and loss: it is damaged; probe again"
        )
    curvature = pl.col("trace").mean().clip(lower_bound=0.0) / pl.col("elements").first()
    added = curvature * pl.col("square_error").mean() / 2
    return (
        table.group_by("module", "precision")
        .agg(loss=added / pl.col("loss").mean().abs().clip(lower_bound=1e-30))
        .sort("module", "precision")
    )


def usable_rows(table: pl.DataFrame) -> pl.DataFrame:
    """The rows of table `sensitivities` that say what they are there for: damaged ones may say anything."""
    errors = [pl.col(name).is_finite() & (pl.col(name) >= 0) for name in ("square_norm", "square_error")]
    others = [pl.col(name).is_finite() for name in ("trace", "loss")]
    return table.filter(pl.col("module") != "", pl.col("elements") > 0, *errors, *others)


def _products(graph: Graph, kernels: Bools, modules: Sequence[str]) -> pl.DataFrame:
    """`node`, `module`, `dtype`, `us`, `batch`, `m`, `n`, `k` of products of modules, also backward."""
    assert graph.run is not None
    spans = spans_of(graph.run)
    placed = _within(products_of_kernels(graph, kernels), _ranges(spans, modules), spans)
    dtypes = [stored_as(graph.names[code]) for code in graph.nodes.name[placed["node"].to_numpy()]]
    us = np.maximum(graph.nodes.duration[placed["node"].to_numpy()], 1) / 1e3
    products = (
        placed.with_columns(dtype=pl.Series(dtypes, dtype=pl.String), us=pl.Series(us))
        .filter(pl.col("dtype") != "")
        .sort("us")
        .unique(["rank", "span_id"], keep="last")  # of the kernels of an operator the longest is the product
        .sort("node")
    )
    if products.is_empty():
        raise Unanswerable("no product of a module that was measured has shapes: record --modules --shapes")
    return products.select("node", "module", "dtype", "us", *SIZES)


def _ranges(spans: pl.DataFrame, modules: Sequence[str]) -> pl.DataFrame:
    """Spans of the innermost modules, and of the backward operators of what ran within: `module`, `until`."""
    until = pl.col("start_ns") + pl.col("duration_ns")
    name = pl.col("name").str.strip_prefix(MODULE).str.strip_prefix(WRAPPER)
    forward = (
        spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.starts_with(MODULE))
        .select(*LANE, "start_ns", until=until, module=name)
        .filter(pl.col("module").is_in(list(modules)))
    )
    numbered = spans.filter((pl.col("kind") == "cpu_op") & (pl.col("sequence_number") >= 0))
    identity = ["rank", "window", "sequence_number"]
    asked = (
        numbered.filter(pl.col("forward_thread") <= 0)
        .sort("start_ns", "span_id")
        .unique(identity, keep="last")
    )
    inside = _joined(asked.select(*LANE, "start_ns", "sequence_number"), forward)
    backward = (
        numbered.filter(pl.col("forward_thread") > 0)
        .join(inside.select(*identity, "module"), on=identity)
        .select(*LANE, "start_ns", until=until, module="module")
    )
    return pl.concat([forward, backward])


def _within(operators: pl.DataFrame, ranges: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Operators with the `module` that they are in."""
    operator_places = spans.select("rank", "span_id", "window", "tid", "start_ns")
    return _joined(operators.join(operator_places, on=["rank", "span_id"]), ranges)


def _joined(operators: pl.DataFrame, ranges: pl.DataFrame) -> pl.DataFrame:
    ordered = ranges.sort("start_ns")
    placed = operators.sort("start_ns").join_asof(
        ordered, on="start_ns", by=LANE, strategy="backward", check_sortedness=False
    )
    return placed.filter(pl.col("start_ns") < pl.col("until"))


def _times_ns(products: pl.DataFrame, precision: str, model: str) -> Floats:
    """[K] how long products take at a precision with casts of what they read; infinite where not known."""
    us: Floats = products["us"].to_numpy()
    if not precision:
        return us * 1e3
    result = np.full(us.size, np.inf)
    for (dtype,), rows in products.with_row_index("row").partition_by("dtype", as_dict=True).items():
        row = rows["row"].to_numpy()
        sizes = [rows[name].to_numpy() for name in ("m", "n", "k", "batch")]
        if BYTES[str(dtype)] <= BYTES[precision]:
            result[row] = us[row] * 1e3  # it has as few bits already
            continue
        given = MeasuredOperations(model, matmuls(str(dtype), *sizes), us[row])
        predicted = estimate(matmuls(precision, *sizes), model, given=given)
        m, n, k, batch = sizes
        cast_ns = batch * (m * k + k * n) * cast_bytes(str(dtype), precision) / GPUS[model].gbps
        result[row] = predicted["us"].fill_null(np.inf).to_numpy() * 1e3 + cast_ns
    return result


def precision_lines(chosen: Sequence[ModulePrecision]) -> list[str]:
    """A line per precision: which modules have it, and what the loss may rise by."""
    lines = []
    for precision in dict.fromkeys(choice.precision for choice in chosen):
        choices = [choice for choice in chosen if choice.precision == precision]
        some = ", ".join(choice.module for choice in choices[:3]) + ", …" * (len(choices) > 3)
        how = f"in {precision}" if precision else "as they are"
        what = f"{len(choices)} of {len(chosen)} modules {how} ({some})"
        rise = sum(choice.loss for choice in choices)
        lines.append(f"{what}: the loss may rise by {rise:.2g} of itself" if precision else what)
    return lines
