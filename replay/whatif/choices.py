"""Choices bucket by bucket or module by module, within a budget of errors measured on the job itself.

Both are integer programs: one option per bucket or module, at the least cost with the sum of errors within
the budget. Buckets of gradients are compressed on one thread and moved over one link: what is hidden behind
the backward pass costs nothing, so no accuracy is lost there without a gain.

Of buckets: takes the reductions of a graph's gradients, and a probe's measurements of each codec on the job's
own gradients (table `codecs` of the run); returns a codec for each bucket, or none, so that the last
reduction ends first. The error is what codecs lose of all gradients of a step, relative to them; the choice
depends on when gradients are ready, on measured compression times, and on the link's time for the rest
(Espresso, Wang et al., EuroSys 2023; L-GreCo, Markov et al., MLSys 2024). Codecs that keep their losses for
later steps lose less in the end.

Of modules: takes a graph with GPU kernels, modules and shapes, and a probe's measurements of the weights
(table `sensitivities`); returns a precision for the products of each module, or none, and the time of each
product then, from `dpro.replay.cost.kernels`. The cost of rounding in loss is half the mean curvature times
the squared changes (HAWQ-V2, Dong et al., NeurIPS 2020, eq. 5) of weights; the loss by rounded activations is
not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable, UsageError
from dpro.replay.attribution import MODULE, work_of
from dpro.replay.cost.kernels.estimate import MeasuredOperations, estimate
from dpro.replay.cost.kernels.operations import matmuls
from dpro.replay.cost.kernels.roofline import BYTES, GPUS, common_model, stored_as
from dpro.replay.gradient_buckets import ITEM_BYTES as ITEM_BYTES  # edits import it from here
from dpro.replay.graph import Graph
from dpro.replay.whatif.graph_ops.fewer_bits import cast_bytes
from dpro.replay.whatif.graph_ops.reductions import (
    GradientReductions,
    Reduction,
    on_stream,
    plain_reductions,
    workers_of,
)
from dpro.replay.whatif.graph_ops.scope import COLUMNS, WRAPPER, products_of_kernels, spans_of
from dpro.schema import CODECS, SENSITIVITIES
from dpro.store import Run

TIME_LIMIT_S = 20.0
GAP = 1e-6  # relative to the optimum, at which the search ends
TIE_WEIGHT = 1e-4  # of the whole cost, for using the whole budget: equally fast options lose the least


def assign(costs: Floats, errors: Floats, budget: float) -> Ints:
    """Choose an option for each thing at the least sum of costs (multiple-choice knapsack).

    Args:
        costs: [N, C]; infinite where there is no such option.
        errors: [N, C], none negative; their sum must stay within the budget.

    Returns:
        [N] the option of each.

    Raises:
        Unanswerable: no choice stays within the budget.
    """
    things, options = costs.shape
    scale = max(float(np.abs(costs[np.isfinite(costs)]).max(initial=0.0)) * things, 1e-12)
    program = _Program(costs, errors, budget, things * options)
    program.costs[:] = np.where(program.usable, costs.ravel(), 0.0) / scale + program.ties
    return program.solved()


@dataclass(frozen=True)
class ReductionPipeline:
    """Buckets of gradients in the order of their reductions, ns.

    Attributes:
        ready: [B] time at which the gradients of each are ready, if nothing is compressed.
        thread: [B, C] additional time of each option on the calling thread.
        fixed: [B, C] time of the reduction during which others may use the link.
        moving: [B, C] time on the link.
        workers: number of concurrent reductions.
    """

    ready: Floats
    thread: Floats
    fixed: Floats
    moving: Floats
    workers: int


def assign_in_pipeline(buckets: ReductionPipeline, errors: Floats, budget: float) -> Ints:
    """Choose an option for each bucket so that the last reduction ends first.

    With `t` the thread's extra time so far and `f` the end of a reduction, for each bucket `b`:
    `t_b = t_(b-1) + thread`, `f_b >= ready_b + t_b + fixed + moving`, `f_b >= f_(b-1) + moving`, and
    `f_b >= f_(b-workers) + fixed + moving`.

    Args:
        errors: [B, C], none negative; their sum must stay within the budget.

    Returns:
        [B] the option of each.

    Raises:
        Unanswerable: no choice stays within the budget.
    """
    count, options = errors.shape
    chosen = count * options
    duration_ns = buckets.fixed + buckets.moving
    scale = max(
        float(buckets.ready.max() + duration_ns.max(axis=1).sum() + buckets.thread.max(axis=1).sum()), 1e-9
    )
    program = _Program(np.zeros_like(errors), errors, budget, chosen + 2 * count)
    program.costs[:chosen] = program.ties
    program.costs[chosen + 2 * count - 1] = 1.0
    for b in range(count):
        variables = range(b * options, (b + 1) * options)
        thread, end = chosen + b, chosen + count + b
        before = {thread - 1: 1.0} if b else {}
        program.require({thread: 1.0} | _negated(before, zip(variables, buckets.thread[b] / scale)), 0.0, 0.0)
        done = _negated({thread: 1.0}, zip(variables, duration_ns[b] / scale))
        program.require({end: 1.0} | done, float(buckets.ready[b]) / scale)
        if b:
            program.require(
                {end: 1.0} | _negated({end - 1: 1.0}, zip(variables, buckets.moving[b] / scale)), 0.0
            )
        if b >= buckets.workers:
            other = {end - buckets.workers: 1.0}
            program.require({end: 1.0} | _negated(other, zip(variables, duration_ns[b] / scale)), 0.0)
    return program.solved()


def _negated(variables: dict[int, float], terms: Iterable[tuple[int, Any]]) -> dict[int, float]:
    """Return negated coefficients of variables and of option terms."""
    return {name: -float(value) for name, value in (*variables.items(), *terms)}


class _Program:
    """A mixed-integer program whose first variables choose one option for each thing, [N, C].

    Attributes:
        costs: of all variables, to be set.
        ties: [N C] costs by which equally good options differ.
        usable: [N C] mask of the existing options.
    """

    def __init__(self, costs: Floats, errors: Floats, budget: float, variables: int) -> None:
        self._things, self._options = errors.shape
        self.usable = np.isfinite(costs).ravel() & np.isfinite(errors).ravel()
        shares = np.where(self.usable, errors.ravel(), 0.0) / max(budget, 1e-300)
        self.ties = TIE_WEIGHT * np.minimum(shares, 1.0) / self._things
        self.costs = np.zeros(variables)
        self._rows: list[dict[int, float]] = []
        self._limits: list[tuple[float, float]] = []
        for thing in range(self._things):
            choices = range(thing * self._options, (thing + 1) * self._options)
            self.require(dict.fromkeys(choices, 1.0), 1.0, 1.0)
        self.require(dict(enumerate(shares.tolist())), -np.inf, 1.0)
        self.usable &= shares <= 1.0

    def require(self, terms: dict[int, float], least: float, most: float = np.inf) -> None:
        """Constrain a sum of variables times coefficients to a range."""
        self._rows.append(terms)
        self._limits.append((least, most))

    def solved(self) -> Ints:
        """Solve the program and return the option of each thing.

        Raises:
            Unanswerable: there is no solution.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        entries = [
            (row, variable, value)
            for row, terms in enumerate(self._rows)
            for variable, value in terms.items()
        ]
        rows, columns, values = (np.array(entry) for entry in zip(*entries))
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), self.costs.size))
        least, most = np.array(self._limits).T
        choices = self._things * self._options
        upper = np.full(self.costs.size, np.inf)
        upper[:choices] = self.usable
        integral = np.zeros(self.costs.size)
        integral[:choices] = 1
        solution = milp(
            self.costs,
            integrality=integral,
            bounds=Bounds(0, upper),
            constraints=LinearConstraint(matrix, least, most),
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
        )
        if solution.x is None:
            raise Unanswerable("no choice stays within the error budget: raise it")
        chosen: Ints = solution.x[:choices].reshape(self._things, self._options).argmax(axis=1)
        return chosen


# Codecs of gradients: the reduction of a bucket under each.

HALF = {"fp16": "float16", "bf16": "bfloat16"}
INDEX_BYTES = 4
MIN_COMPRESSION_RATE = 2  # PowerSGDState: a matrix is compressed only if that saves this factor

# Passes over the gradients, one being 4 bytes read and 4 written per element: before and after the reduction.
HALF_PASSES = (10 / 8, 6 / 8)  # read 4, write 2, divide 2 in place; read 2, write 4
# Add the error, copy, orthogonalise, multiply; orthogonalise, multiply twice, subtract. A product with a
# matrix of a few columns took as long as 3 passes on one CPU, and as a third of a pass on another.
POWERSGD_PASSES = (4.0, 4.0)
TOPK_PASSES = (10.0, 2.0)  # select; scatter


@dataclass(frozen=True)
class Codec:
    """One way to compress gradients; exactly one attribute is set.

    Attributes:
        to: half precision, fp16 or bf16.
        powersgd_rank: rank of PowerSGD's matrices.
        topk: share of gradients that is sent.
    """

    to: str = ""
    powersgd_rank: int | None = None
    topk: float | None = None

    def __str__(self) -> str:
        """Return the text of the codec, as the edit `compress` accepts it."""
        if self.to:
            return f"to={self.to}"
        return f"topk={self.topk:g}" if self.topk is not None else f"powersgd_rank={self.powersgd_rank}"


def codec_of(text: str) -> Codec:
    """Parse a codec from the text of the edit `compress`.

    Args:
        text: such as `to=bf16`, `powersgd_rank=4` or `topk=0.01`.

    Raises:
        UsageError: it is none of these.
    """
    name, _, value = text.partition("=")
    with suppress(ValueError):
        if name == "to" and value in HALF:
            return Codec(to=value)
        if name == "powersgd_rank":
            return Codec(powersgd_rank=int(value))
        if name == "topk":
            return Codec(topk=float(value))
    raise UsageError(f"no codec {text!r}")


def compressed(reductions: GradientReductions, plain: Reduction, codec: Codec) -> Reduction:
    """Return a reduction of fewer bytes, with the time of compression.

    Raises:
        Unanswerable: gradients are of a type that cannot be compressed, or have few bits already.
    """
    dtype = plain.dtype
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise Unanswerable(f"gradients of type {dtype or 'unknown'} are not known to be compressed")
    messages, passes = 1, HALF_PASSES
    if codec.to:
        if item <= 2:
            raise Unanswerable(f"gradients are {dtype} already")
        size = plain.num_bytes * 2 // item
    elif codec.powersgd_rank is not None:
        if not plain.shapes or not reductions.are_bytes_known:
            raise Unanswerable("shapes of gradients are not in the run: record with --shapes")
        # Its factors are all-reduced, which moves twice the bytes of a reduce-scatter.
        size = item * _low_rank(plain.shapes, codec.powersgd_rank) * (2 if reductions.is_scattered else 1)
        messages, passes = 3, POWERSGD_PASSES
    else:
        kept = plain.num_bytes / item * float(codec.topk or 0.0)
        # A rank receives k from each of n - 1 others; in an all-reduce of b bytes it receives 2 b (n - 1) /
        # n, in a reduce-scatter half of that.
        per_byte = reductions.message.num_ranks / (1 if reductions.is_scattered else 2)
        size = round(kept * (item + INDEX_BYTES) * per_byte)
        passes = TOPK_PASSES
    copying = reductions.copy_ns_per_byte * plain.num_bytes
    return replace(
        plain,
        num_bytes=max(size, 1),
        moving_ns=float(reductions.line.moving_ns(size)),
        fixed_ns=messages * reductions.line.latency_ns + passes[1] * copying,
        call_ns=plain.call_ns + passes[0] * copying,
    )


def _low_rank(shapes: tuple[tuple[int, ...], ...], rank: int) -> int:
    """Return the elements that PowerSGD exchanges of tensors as matrices; others are sent uncompressed."""
    total = 0
    for shape in shapes:
        rows, columns = shape[0] if shape else 1, prod(shape[1:])
        used = min(rows, columns, rank)
        shrunk = (rows + columns) * used
        small = shrunk * MIN_COMPRESSION_RATE < rows * columns
        total += shrunk if small else rows * columns
    return total


PROBE_CODECS = "dpro try compress:probe -- COMMAND records a run that has them"


@dataclass(frozen=True)
class CodecOption:
    """A codec on the gradients of one bucket, mean over ranks and steps.

    Attributes:
        codec: None leaves gradients as they are.
        error: sum of squares of the loss.
        encode_ns, decode_ns: time of compressing and decompressing.
    """

    codec: Codec | None
    error: float = 0.0
    encode_ns: float = 0.0
    decode_ns: float = 0.0


@dataclass(frozen=True)
class BucketChoice:
    """The choice for one bucket.

    Attributes:
        names: its parameters.
        option: the codec, with its loss and times.
        share: the error of the bucket, relative to the bucket.
    """

    names: tuple[str, ...]
    option: CodecOption
    share: float


def choose(reductions: GradientReductions, budget: float) -> list[BucketChoice]:
    """Choose a codec for each bucket.

    Args:
        budget: allowed loss: the norm of the error of all gradients over their norm.

    Returns:
        The choice for each bucket, in the order of their reductions.

    Raises:
        Unanswerable: the run has no measurements of codecs, or they are of other buckets.
    """
    closes = reductions.passes[0].closes
    if any(not np.array_equal(backward.closes, closes) for backward in reductions.passes):
        raise Unanswerable("buckets change from step to step: a codec for each cannot be chosen")
    names, norms, options = _options(reductions, closes)
    given = {option.codec for of_bucket in options for option in of_bucket if option.codec is not None}
    codecs = [None, *sorted(given, key=str)]
    by_codec = [{option.codec: option for option in of_bucket} for of_bucket in options]
    errors = np.array(
        [[of_bucket[c].error if c in of_bucket else np.inf for c in codecs] for of_bucket in by_codec]
    )
    buckets = plain_reductions(reductions, reductions.passes[0], closes)
    made = [
        [reduction_of(reductions, bucket, of_bucket[c]) if c in of_bucket else bucket for c in codecs]
        for bucket, of_bucket in zip(buckets, by_codec)
    ]
    total = sum(norms)
    chosen = assign_in_pipeline(_pipeline(reductions, buckets, made), errors, budget**2 * total)
    options_chosen = [of_bucket[codecs[c]] for of_bucket, c in zip(by_codec, chosen.tolist())]
    return [
        BucketChoice(tuple(parameters), option, (option.error / norm) ** 0.5 if norm else 0.0)
        for parameters, option, norm in zip(names, options_chosen, norms)
    ]


def reduction_of(reductions: GradientReductions, plain: Reduction, option: CodecOption) -> Reduction:
    """Return a reduction with measured times of a codec: on a GPU they delay the result, not the thread."""
    if option.codec is None:
        return plain
    made = compressed(replace(reductions, copy_ns_per_byte=0.0), plain, option.codec)
    on_thread, later = (0.0, option.encode_ns) if on_stream(reductions) else (option.encode_ns, 0.0)
    return replace(made, call_ns=made.call_ns + on_thread, fixed_ns=made.fixed_ns + later + option.decode_ns)


def by_choice(
    reductions: GradientReductions, plain: Sequence[Reduction], chosen: Sequence[BucketChoice]
) -> list[Reduction]:
    """Return the reductions of a pass, each with the codec chosen for its bucket."""
    return [reduction_of(reductions, bucket, choice.option) for bucket, choice in zip(plain, chosen)]


def _pipeline(
    reductions: GradientReductions, plain: Sequence[Reduction], made: Sequence[Sequence[Reduction]]
) -> ReductionPipeline:
    """Return the median pass: when each bucket is ready after the first gradient, and the options' times."""
    end = reductions.end
    ready = np.array(
        [end[backward.ready[backward.closes]] - end[backward.ready[0]] for backward in reductions.passes]
    )

    def of(what: str) -> Floats:
        return np.array([[float(getattr(option, what)) for option in of_bucket] for of_bucket in made])

    before = np.array([reduction.call_ns for reduction in plain])[:, None]
    return ReductionPipeline(
        np.median(ready, axis=0),
        of("call_ns") - before,
        of("fixed_ns"),
        of("moving_ns"),
        min(workers_of(reductions.graph).values()),
    )


def _options(
    reductions: GradientReductions, closes: Ints
) -> tuple[list[list[str]], list[float], list[list[CodecOption]]]:
    """Return the parameters of each bucket, the squares of their norms, and their options."""
    table = measurements(reductions.graph.run)
    first = np.append(0, closes[:-1] + 1)
    sizes = np.add.reduceat(reductions.parameters.num_bytes[: closes[-1] + 1], first).tolist()
    means = table.group_by("module", "bucket", "codec").agg(
        pl.col("names").first(), pl.col("elements").first(),
        *(pl.col(name).mean() for name in ("square_norm", "square_error", "encode_ns", "decode_ns")),
    )  # fmt: skip
    buckets = means.sort("module", "bucket", "codec").partition_by("module", "bucket", maintain_order=True)
    elements = [int(bucket["elements"][0]) for bucket in buckets]
    ratios = {size / max(count, 1) for size, count in zip(sizes, elements)}
    if len(elements) != len(sizes) or len(ratios) > 1:
        raise Unanswerable(
            f"the probe saw {len(elements)} buckets, of other sizes than the {len(sizes)} of the run: "
            f"{PROBE_CODECS}"
        )
    crashes = not on_stream(reductions) and len(buckets) > 1  # `dpro try` refuses these, too
    options = [
        [CodecOption(None)]
        + [
            CodecOption(codec, row["square_error"], row["encode_ns"], row["decode_ns"])
            for row in bucket.iter_rows(named=True)
            if not ((codec := codec_of(row["codec"])).powersgd_rank is not None and crashes)
        ]
        for bucket in buckets
    ]
    return (
        [bucket["names"][0].to_list() for bucket in buckets],
        [bucket["square_norm"][0] for bucket in buckets],
        options,
    )


def measurements(run: Run | None) -> pl.DataFrame:
    """Return a probe's measurements of codecs on a run's gradients.

    Raises:
        Unanswerable: there was no probe, or none of its rows can be used.
    """
    table = run.table(CODECS) if run is not None else CODECS.empty()
    if table.is_empty():
        raise Unanswerable(f"the loss of each codec on the job's gradients was not measured: {PROBE_CODECS}")
    usable = usable_codecs(table)
    if usable.is_empty():
        raise Unanswerable("no row of table codecs has elements, norms and times: it is damaged; probe again")
    return usable


def usable_codecs(table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of table `codecs` with plausible values, since damaged ones may have any."""
    norms = [pl.col(name).is_finite() & (pl.col(name) >= 0) for name in ("square_norm", "square_error")]
    times = [pl.col(name) >= 0 for name in ("encode_ns", "decode_ns")]
    return table.filter(pl.col("elements") > 0, *norms, *times)


def compression_lines(chosen: Sequence[BucketChoice]) -> list[str]:
    """Word a line per codec: its buckets, and their loss."""
    lines = []
    for codec in dict.fromkeys(choice.option.codec for choice in chosen):
        choices = [choice for choice in chosen if choice.option.codec == codec]
        what = f"{len(choices)} of {len(chosen)} buckets"
        if codec is None:
            lines.append(f"{what} as they are ({_named(choices)})")
        else:
            worst = max(choice.share for choice in choices)
            lines.append(f"{what} by {codec} ({_named(choices)}), which loses at most {worst:.2g} of each")
    return lines


def _named(chosen: Sequence[BucketChoice]) -> str:
    names = [name for choice in chosen for name in choice.names]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


PROBE_PRECISION = "dpro try precision:probe -- COMMAND records a run that has them"
DOWN_TO = {"bf16": ("bf16",), "fp16": ("fp16",), "fp8": ("bf16", "fp8")}
SIZES = ("batch", "m", "n", "k")


@dataclass(frozen=True)
class ModulePrecision:
    """The choice for one module.

    Attributes:
        module: its name.
        precision: of its products; empty leaves them as they are.
        loss: the relative increase of the loss.
        nodes: [K] kernels of its products.
        ns: [K] times of these kernels then.
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
        lowest: the precision with the fewest bits, one of `DOWN_TO`.
        budget: allowed relative increase of the loss.

    Raises:
        Unanswerable: the run has no measurements, modules or shapes, or its GPU is not known.
    """
    losses = expected_losses(graph.run)
    model = common_model(graph.run.manifest.gpus if graph.run is not None else [])
    if not model:
        raise Unanswerable("the GPU of the kernels is not known, nor what fewer bits gain on it")
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
    """Return how each precision of each module raises the loss, relatively: `module`, `precision`, `loss`.

    Raises:
        Unanswerable: there was no probe, or none of its rows can be used.
    """
    table = run.table(SENSITIVITIES) if run is not None else SENSITIVITIES.empty()
    if table.is_empty():
        raise Unanswerable(f"the loss of each module with fewer bits was not measured: {PROBE_PRECISION}")
    table = usable_sensitivities(table)
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


def usable_sensitivities(table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of table `sensitivities` with plausible values, since damaged ones may have any."""
    errors = [pl.col(name).is_finite() & (pl.col(name) >= 0) for name in ("square_norm", "square_error")]
    others = [pl.col(name).is_finite() for name in ("trace", "loss")]
    return table.filter(pl.col("module") != "", pl.col("elements") > 0, *errors, *others)


def _products(graph: Graph, kernels: Bools, modules: Sequence[str]) -> pl.DataFrame:
    """Return `node`, `module`, `dtype`, `us`, `batch`, `m`, `n`, `k` of modules' products, also backward."""
    assert graph.run is not None
    spans = spans_of(graph.run, [*COLUMNS, "shapes"])
    # The innermost of `modules` around each operator, or around the forward operator of a backward one.
    name = pl.col("name").str.strip_prefix(MODULE).str.strip_prefix(WRAPPER)
    is_module = pl.col("name").str.starts_with(MODULE)
    spans = spans.filter(~is_module | (name.is_in(list(modules)) & (pl.col("kind") == "annotation")))
    places = spans.select("rank", "span_id", "window", "tid", "start_ns")
    placed = products_of_kernels(graph, kernels).join(places, on=["rank", "span_id"]).sort("start_ns")
    placed = placed.with_columns(module=work_of(spans, placed)["module"].str.strip_prefix(WRAPPER))
    placed = placed.filter(pl.col("module") != "")
    dtypes = [stored_as(graph.names[code]) for code in graph.nodes.name[placed["node"].to_numpy()]]
    us = np.maximum(graph.nodes.duration[placed["node"].to_numpy()], 1) / 1e3
    products = (
        placed.with_columns(dtype=pl.Series(dtypes, dtype=pl.String), us=pl.Series(us))
        .filter(pl.col("dtype") != "")
        .sort("us")
        .unique(["rank", "span_id"], keep="last")  # the longest kernel of an operator is the product
        .sort("node")
    )
    if products.is_empty():
        raise Unanswerable("no product of a module that was measured has shapes: record --modules --shapes")
    return products.select("node", "module", "dtype", "us", *SIZES)


def _times_ns(products: pl.DataFrame, precision: str, model: str) -> Floats:
    """Return [K] ns of products at a precision, with casts of their inputs; infinite where not known."""
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
    """Word a line per precision: its modules, and the possible increase of the loss."""
    lines = []
    for precision in dict.fromkeys(choice.precision for choice in chosen):
        choices = [choice for choice in chosen if choice.precision == precision]
        some = ", ".join(choice.module for choice in choices[:3]) + ", …" * (len(choices) > 3)
        how = f"in {precision}" if precision else "as they are"
        what = f"{len(choices)} of {len(chosen)} modules {how} ({some})"
        rise = sum(choice.loss for choice in choices)
        lines.append(f"{what}: the loss may rise by a share of {rise:.2g}" if precision else what)
    return lines
