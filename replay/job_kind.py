"""What kind of job a run is of: whether it trains, is compiled, is launched from CUDA graphs, interleaves.

In: a run. Out: `JobKind`, by the names of its operators, kernels and ranges; what they do not show is None.
How ranks share the model is `dpro.replay.mesh`.
"""

from __future__ import annotations

from itertools import islice

import polars as pl

from dpro.documents import DocumentPart
from dpro.schema import SPANS
from dpro.store import Run

# Not what only prepares it, such as RegisterPostBackwardFunction in a forward pass.
BACKWARD = r"Backward\d*([<( ]|$)|(^|[^A-Za-z])backward([^a-z]|$)|_bwd_|bwd_kernel|autograd::engine"
_TRAINS = rf"{BACKWARD}|^Optimizer\.|optimizer"
# What engines of inference name their iterations, their kernels and their caches.
_SERVES = r"(?i)execute_context|generation_\d|prefill|paged_?attention|reshape_and_cache|kv_?cache|sampling"
_COMPILED = r"^triton_(poi|red|per|tem)_|^Torch-Compiled Region|^## Call CompiledFxGraph|^CompiledFunction"
_GRAPHS = r"GraphLaunch"
_DDP = r"^DistributedDataParallel|^torch::distributed::reducer|^torch.distributed.ddp"
MIN_OPERATORS = 5  # different ones; a window of fewer need not show whether gradients are computed
_MAX_PARTS = 4  # of the spans: all ranks of a job are of one kind


class JobKind(DocumentPart, frozen=True):
    """What kind of job a run is of.

    Attributes:
        trains: whether it computes gradients; null where nothing recorded says.
        compiled: whether torch.compile made some of its kernels.
        graphs: whether CUDA graphs launch kernels.
        ddp: whether DistributedDataParallel runs its model.
        chunks: of the model on each stage of a pipeline; 0 where that was not recorded.
    """

    trains: bool | None = None
    compiled: bool = False
    graphs: bool = False
    ddp: bool = False
    chunks: int = 0


def is_backward() -> pl.Expr:
    """Whether a span is of a backward pass: it has a forward thread, or its name says so."""
    return (pl.col("forward_thread") > 0) | pl.col("name").str.contains(BACKWARD)


def kind_of(run: Run) -> JobKind:
    """The kind of job, by the spans of its first ranks."""
    columns = ["rank", "kind", "name", "forward_thread", "model_chunk"]
    parts = list(islice(run.part_by_part(SPANS, columns), _MAX_PARTS))
    if not parts:
        return JobKind()
    spans = pl.concat(parts).unique()
    name = pl.col("name").str
    shown = spans.select(
        trains=(is_backward() | name.contains(_TRAINS)).any(),
        serves=name.contains(_SERVES).any(),
        operators=pl.col("name").filter((pl.col("kind") == "cpu_op") & name.starts_with("aten::")).n_unique(),
        compiled=name.contains(_COMPILED).any(),
        graphs=name.contains(_GRAPHS).any(),
        ddp=name.contains(_DDP).any(),
    ).row(0, named=True)
    of_stage = spans.filter(pl.col("model_chunk") >= 0).group_by("rank").agg(pl.col("model_chunk").n_unique())
    infers = shown["serves"] or shown["operators"] >= MIN_OPERATORS
    return JobKind(
        trains=True if shown["trains"] else False if infers else None,
        compiled=shown["compiled"],
        graphs=shown["graphs"],
        ddp=shown["ddp"],
        chunks=max(of_stage["model_chunk"].to_list(), default=0),
    )


def kind_in_words(kind: JobKind) -> str:
    """`training, compiled, from CUDA graphs`; empty where nothing is known."""
    said = [{True: "training", False: "inference (no backward pass was recorded)", None: ""}[kind.trains]]
    said += ["compiled"] * kind.compiled + ["from CUDA graphs"] * kind.graphs
    said += [f"interleaved, {kind.chunks} chunks a stage"] * (kind.chunks > 1)
    return ", ".join(filter(None, said))
