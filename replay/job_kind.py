"""The kind of job of a run: training or inference, compiled, launched from CUDA graphs, interleaved.

Takes a run; returns its `JobKind`, judged by the names of operators, kernels and ranges; `trains` is None
where they do not show it. `dpro.replay.mesh` infers how ranks share the model.
"""

from __future__ import annotations

from itertools import islice

import polars as pl

from dpro.documents import DocumentPart
from dpro.schema import SPANS
from dpro.store import Run

# Names of backward work, but not of its preparation in forward, such as RegisterPostBackwardFunction.
BACKWARD = r"Backward\d*([<( ]|$)|(^|[^A-Za-z])backward([^a-z]|$)|_bwd_|bwd_kernel|autograd::engine"
_TRAINS = rf"{BACKWARD}|^Optimizer\.|optimizer"
# Names that inference engines give their iterations, kernels and caches.
_SERVES = (
    r"(?i)execute_context|generation_\d|prefill|paged_?attention|reshape_and_cache|kv_?cache|sampling"
    r"|_trt$|^trt_"
)
_COMPILED = r"^triton_(poi|red|per|tem)_|^Torch-Compiled Region|^## Call CompiledFxGraph|^CompiledFunction"
_GRAPHS = r"GraphLaunch"
_DDP = r"^DistributedDataParallel|^torch::distributed::reducer|^torch.distributed.ddp"
MIN_OPERATORS = 5  # distinct ones; with fewer, a window without backward work need not be inference
_MAX_PARTS = 4  # parts of table `spans` that are read, since all ranks of a job share one kind


class JobKind(DocumentPart, frozen=True):
    """The kind of job of a run.

    Attributes:
        trains: whether it computes gradients; null where no recorded name says.
        compiled: whether torch.compile made some of its kernels.
        graphs: whether CUDA graphs launch kernels.
        ddp: whether DistributedDataParallel runs its model.
        chunks: model chunks on each stage of a pipeline; 0 where not recorded.
    """

    trains: bool | None = None
    compiled: bool = False
    graphs: bool = False
    ddp: bool = False
    chunks: int = 0


def is_backward() -> pl.Expr:
    """Return an expression for whether a span is in a backward pass, by its forward thread or its name."""
    return (pl.col("forward_thread") > 0) | pl.col("name").str.contains(BACKWARD)


def kind_of(run: Run) -> JobKind:
    """Return the kind of job, from the spans of its first ranks."""
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
    """Word a kind of job, such as `training, compiled, from CUDA graphs`; empty where nothing is known."""
    said = [{True: "training", False: "inference (no backward pass was recorded)", None: ""}[kind.trains]]
    said += ["compiled"] * kind.compiled + ["from CUDA graphs"] * kind.graphs
    said += [f"interleaved, {kind.chunks} chunks a stage"] * (kind.chunks > 1)
    return ", ".join(filter(None, said))
