"""The iterations of a server's engine in a trace: what each batch consisted of, as far as the trace says it.

In: spans of one rank. Out: rows of `iterations`, from the first of these that is there: ranges that engines
set around an iteration (vLLM), the range `dpro::iteration`, Python calls of SGLang's model runner, CUDA
graphs with a whole model, and calls of embedding with their shapes. A trace of training has none. Tokens
are -1 where none of these says them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import polars as pl

from dpro.schema import GPU_WORK_KINDS, ITERATIONS, kind_of_batch

ANNOTATION, SHAPES, GRAPHS, CALLS = "annotation", "shapes", "CUDA graph", "Python calls"
RANGE = "dpro::iteration"
_COUNTS = ("prefill_tokens", "decode_tokens", "num_requests", "context_tokens", "waiting")

_TOKENS = (
    r"^execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)"  # vLLM: requests and tokens of both kinds
)
_REQUESTS = r"^execute_new_(\d+)_cached_(\d+)"  # vLLM before: requests alone
_RUNNER = r"model_runner\.py\(\d+\): forward_(extend|decode|split_prefill)$"
_REPLAY = r"cuda_graph_runner\.py\(\d+\): replay$"
_MODEL_CALL = re.compile(f"{_RUNNER}|{_REPLAY}")
_ATTENTION = r"(?i)attention|attn|fmha|flash_fwd|\bmla\b|mla::|mqa|gqa"


def find_iterations(spans: pl.DataFrame) -> pl.DataFrame:
    """Iterations of one rank, in order; none where the trace shows none.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `correlation`, `forward_thread`, `shapes`.
    """
    ranges = _annotations(spans)
    for find, rows in (
        (_token_ranges, ranges),
        (_request_ranges, ranges),
        (_own_ranges, ranges),
        (_model_calls, spans),
    ):
        found = find(rows)
        if found.height:
            return _numbered(_until_gpu_ends(found, spans))
    if _trains(spans):
        return ITERATIONS.empty()
    graphs = _whole_graphs(spans)
    return _numbered(graphs if graphs.height else _until_gpu_ends(_embeddings(spans), spans))


def model_calls(names: Iterable[str]) -> list[str]:
    """The names of those Python calls that iterations may be found by: others need not be among the spans."""
    return [name for name in names if _MODEL_CALL.search(name)]


def _numbered(found: pl.DataFrame) -> pl.DataFrame:
    """Rows in order, none of which begins before the one before it has ended."""
    if found.is_empty():
        return ITERATIONS.empty()
    ordered = found.sort("start_ns").with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    before = pl.col("end_ns").cum_max().shift(1).fill_null(pl.col("start_ns").min())
    return (
        ordered.with_columns(start_ns=pl.max_horizontal("start_ns", before))
        .with_columns(duration_ns=pl.max_horizontal(pl.col("end_ns") - pl.col("start_ns"), 0))
        .with_columns(iteration=pl.int_range(pl.len(), dtype=pl.Int64))
        .drop("end_ns")
    )


def _annotations(spans: pl.DataFrame) -> pl.DataFrame:
    """Named ranges on CPU threads; without any, their shadows on GPU streams."""
    ranges = spans.select("kind", "name", "start_ns", "duration_ns")
    on_cpu = ranges.filter(pl.col("kind") == "annotation")
    return on_cpu if on_cpu.height else ranges.filter(pl.col("kind") == "gpu_annotation")


def _extracted(ranges: pl.DataFrame, pattern: str, names: list[str]) -> pl.DataFrame:
    """The ranges whose name fits a pattern, with its numbers."""
    groups = [
        pl.col("name").str.extract(pattern, at + 1).cast(pl.Int64).alias(n) for at, n in enumerate(names)
    ]
    fits = ranges.filter(pl.col("name").str.contains(pattern))
    return fits.select("start_ns", "duration_ns", *groups)


def _token_ranges(ranges: pl.DataFrame) -> pl.DataFrame:
    found = _extracted(ranges, _TOKENS, ["contexts", "prefill_tokens", "generations", "decode_tokens"])
    return found.select(
        "start_ns",
        "duration_ns",
        "prefill_tokens",
        "decode_tokens",
        num_requests=pl.col("contexts") + pl.col("generations"),
        kind=kind_of_batch(),
        source=pl.lit(ANNOTATION),
    )


def _request_ranges(ranges: pl.DataFrame) -> pl.DataFrame:
    """New requests begin with their prompt; of the others the name does not say whether a prompt goes on."""
    new, old = pl.col("new"), pl.col("old")
    kind = pl.when(new == 0).then(pl.lit("decode")).when(old == 0).then(pl.lit("prefill"))
    return _extracted(ranges, _REQUESTS, ["new", "old"]).select(
        "start_ns",
        "duration_ns",
        num_requests=new + old,
        kind=kind.otherwise(pl.lit("mixed")),
        source=pl.lit(ANNOTATION),
    )


def _own_ranges(ranges: pl.DataFrame) -> pl.DataFrame:
    """Ranges as `dpro::iteration prefill=128 decode=3 requests=4 context=900 waiting=0`."""
    said = {name: name.removesuffix("_tokens").removeprefix("num_") for name in _COUNTS}
    values = [
        pl.col("name").str.extract(rf"\b{word}=(\d+)").cast(pl.Int64).fill_null(-1).alias(name)
        for name, word in said.items()
    ]
    fits = ranges.filter(pl.col("name").str.starts_with(RANGE))
    return fits.select("start_ns", "duration_ns", *values, source=pl.lit(ANNOTATION)).with_columns(
        kind=kind_of_batch()
    )


def _model_calls(spans: pl.DataFrame) -> pl.DataFrame:
    """Python calls of SGLang's model runner; it replays CUDA graphs to decode alone."""
    columns = spans.select("kind", "name", "start_ns", "duration_ns").filter(pl.col("kind") == "python")
    calls = columns.filter(pl.col("name").str.contains(_RUNNER) | pl.col("name").str.contains(_REPLAY))
    decodes = pl.col("name").str.contains(_REPLAY) | pl.col("name").str.ends_with("decode")
    return calls.select(
        "start_ns",
        "duration_ns",
        kind=pl.when(decodes).then(pl.lit("decode")).otherwise(pl.lit("prefill")),
        source=pl.lit(CALLS),
    )


def _trains(spans: pl.DataFrame) -> bool:
    if spans.select((pl.col("forward_thread") > 0).any()).item():
        return True
    names = spans.filter(pl.col("kind") == "annotation")["name"]
    return bool(names.str.starts_with("Optimizer.step").any())


def _launched(spans: pl.DataFrame, which: pl.Expr) -> pl.DataFrame:
    """When GPU work was launched by some calls, when it began, and when it ended."""
    columns = spans.select("kind", "name", "correlation", "start_ns", "duration_ns")  # filtered faster
    columns = columns.filter(pl.col("correlation") > 0)
    calls = columns.filter(pl.col("kind") == "runtime").filter(which)
    work = columns.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    return work.select("correlation", kernel="name", end_ns=pl.col("start_ns") + pl.col("duration_ns")).join(
        calls.select("correlation", launched_ns="start_ns").unique("correlation", keep="first"),
        on="correlation",
    )


def _until_gpu_ends(found: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """The ranges until the GPU work is done that was launched in them."""
    if found.is_empty():
        return found
    ranges = found.sort("start_ns").with_row_index("at")
    bounds = ranges.select("at", range_ns="start_ns", until_ns=pl.col("start_ns") + pl.col("duration_ns"))
    launched = _launched(spans, pl.lit(True)).select("launched_ns", "end_ns").sort("launched_ns")
    within = launched.join_asof(bounds, left_on="launched_ns", right_on="range_ns").filter(
        pl.col("launched_ns") < pl.col("until_ns")
    )
    ends = within.group_by("at").agg(pl.col("end_ns").max())
    until = pl.max_horizontal(pl.col("start_ns") + pl.col("duration_ns"), "end_ns")
    return (
        ranges.join(ends, on="at", how="left", maintain_order="left")
        .with_columns(duration_ns=until - pl.col("start_ns"))
        .drop("at", "end_ns")
    )


def _whole_graphs(spans: pl.DataFrame) -> pl.DataFrame:
    """Launches of CUDA graphs that hold a whole model: engines capture batches that decode, alone.

    A graph with half as many kernels of attention as the largest one, or fewer, is a piece of a model.
    """
    work = _launched(spans, pl.col("name").str.starts_with("cudaGraphLaunch"))
    graphs = (
        work.group_by("correlation")
        .agg(
            attentions=pl.col("kernel").str.contains(_ATTENTION).sum(),
            start_ns=pl.col("launched_ns").min(),
            end_ns=pl.col("end_ns").max(),
        )
        .filter((pl.col("attentions") > 1) & (2 * pl.col("attentions") > pl.col("attentions").max()))
    )
    return graphs.select(
        "start_ns",
        duration_ns=pl.col("end_ns") - pl.col("start_ns"),
        kind=pl.lit("decode"),
        source=pl.lit(GRAPHS),
    )


def _embeddings(spans: pl.DataFrame) -> pl.DataFrame:
    """From one call of the largest embedding to the next, with the shape of its indices.

    Of indices in two dimensions, requests and tokens of each, one token means that the batch decodes. Packed
    batches have one dimension: their tokens are known, and not of what kind they are.
    """
    is_operator = pl.col("kind") == "cpu_op"
    calls = spans.select("kind", "name", "start_ns", "shapes").filter(
        is_operator & (pl.col("name") == "aten::embedding")
    )
    shape = r"^\[\s*\[(\d+),\s*(\d+)\],\s*\[(\d+)(?:,\s*(\d+))?\]"
    sized = calls.with_columns(
        rows=pl.col("shapes").str.extract(shape, 1).cast(pl.Int64),
        batch=pl.col("shapes").str.extract(shape, 3).cast(pl.Int64),
        length=pl.col("shapes").str.extract(shape, 4).cast(pl.Int64),
    ).drop_nulls("batch")
    if sized.height < 2:  # one alone may be of anything
        return pl.DataFrame(schema={"start_ns": pl.Int64})
    first = sized.filter(pl.col("rows") == pl.col("rows").max()).sort("start_ns")
    last_ns = spans.select((pl.col("start_ns") + pl.col("duration_ns")).filter(is_operator).max()).item()
    until = pl.col("start_ns").shift(-1).fill_null(last_ns)
    tokens, decodes = pl.col("batch") * pl.col("length"), pl.col("length") == 1
    return first.select(
        "start_ns",
        duration_ns=until - pl.col("start_ns"),
        prefill_tokens=pl.when(decodes).then(0).otherwise(tokens).fill_null(-1),
        decode_tokens=pl.when(decodes).then(tokens).otherwise(0 * tokens).fill_null(-1),
        num_requests=pl.when(pl.col("length").is_not_null()).then("batch").otherwise(-1),
        source=pl.lit(SHAPES),
    ).with_columns(kind=kind_of_batch())
