"""Which operator and module kernels are of: streams made by hand, and real traces whose host is hidden."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl
import pytest

from dpro.opening import open_path
from dpro.replay.attribution import (
    AMBIGUOUS,
    BY_EAGER,
    BY_LAUNCH,
    MODULE,
    UNKNOWN,
    WORK,
    EagerStep,
    align,
    attributed,
    totals,
)
from dpro.replay.steps import recorded_steps
from dpro.schema import SPANS, STEPS
from tests.builders import TinyRun


def eager(kernels: Iterable[str], ranks: Iterable[int] = (0,), shapes: str = "[[8]]") -> EagerStep:
    """A step whose kernels `gemm@0.up` are of `aten::gemm` in module `0.up`, `gemm@0.up@mm` of `mm`."""
    pairs = [kernel.split("@") for kernel in kernels]
    work = [(module, *(operator or [f"aten::{name}"]), shapes) for name, module, *operator in pairs]
    return EagerStep([name for name, *_ in pairs], work, frozenset(ranks))


def said(names: str, *steps: EagerStep) -> list[str]:
    """What is known of each kernel: its module and shapes, or why it is not."""
    found = align(names.split(), steps).on(0)
    return [module + shapes if how == BY_EAGER else how for module, _, shapes, how in found]


def test_a_graph_takes_the_modules_of_the_same_kernels_and_what_is_only_in_one_of_both_is_unknown():
    step = eager(["gemm@0", "relu@0", "gemm@1", "relu@1", "adam@"])
    assert said("gemm relu fused gemm relu", step) == ["0[[8]]", "0[[8]]", UNKNOWN, "1[[8]]", "1[[8]]"]


def test_kernels_that_may_be_of_several_modules_are_ambiguous_and_not_guessed():
    step = eager(["gemm@0@mm", "gemm@1@bmm", "relu@1", "add@2"])
    assert said("gemm relu add", step) == [AMBIGUOUS, "1[[8]]", "2[[8]]"]
    same = eager(["gemm@0", "gemm@1", "relu@1", "add@2"])  # whichever it is, the operator is the same
    assert said("gemm relu add", same) == ["[[8]]", "1[[8]]", "2[[8]]"]


def test_another_program_gives_nothing():
    assert said("gemm relu add mul", eager(["gemm@0", "tanh@0"])) == [UNKNOWN] * 4
    assert said("gemm") == [UNKNOWN]


def test_steps_that_fit_equally_well_have_to_agree_and_shapes_are_of_the_own_rank_or_of_two():
    step, other = eager(["gemm@0", "relu@0"]), eager(["gemm@1", "relu@0"])
    assert said("gemm relu", step, other) == ["[[8]]", "0[[8]]"]
    elsewhere = eager(["gemm@0", "relu@0"], ranks=[3])
    assert said("gemm relu", elsewhere) == ["0", "0"]
    assert said("gemm relu", elsewhere, eager(["gemm@0", "relu@0"], ranks=[5])) == ["0[[8]]", "0[[8]]"]
    assert said("gemm relu", step, eager(["gemm@0", "relu@0"], shapes="[[9]]")) == ["0", "0"]


def a_run(folder: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """A module forward and backward, launched eagerly in step 1, and by a graph in step 2."""
    run = TinyRun()
    run.step(1, 0, 100)
    run.step(2, 100, 200)
    run.mark(f"{MODULE}layers.3.mlp", 5, 30)
    run.op("aten::linear", 10, 20, sequence_number=4, shapes="[[2]]")
    run.op("aten::mm", 12, 18, shapes="[[2, 2]]")
    run.call(14, 16, 1)
    run.kernel("gemm", 20, 25, 1)
    run.op("MmBackward0", 40, 60, sequence_number=4, forward_thread=1, tid=30)
    run.op("aten::mm", 45, 55, tid=30)
    run.call(46, 48, 2, tid=30)
    run.kernel("gemm_nt", 50, 58, 2)
    run.call(70, 72, 3)
    run.kernel("memset", 75, 76, 3)
    run.call(110, 112, 9, name="cudaGraphLaunch")
    run.kernel("gemm", 120, 124, 9)
    run.kernel("gemm_nt", 125, 131, 9)
    run.kernel("other", 132, 133, 9, stream=8)
    written = run.write(folder)
    return written.table(SPANS), written.table(STEPS)


def test_kernels_of_a_graph_have_the_module_of_the_step_before_forward_and_backward(tmp_path):
    found = attributed(*a_run(tmp_path / "run")).sort("span_id")
    known = found.select("name", "module", "operator", "how").rows()
    assert known == [
        ("gemm", "layers.3.mlp", "aten::mm", BY_LAUNCH),
        ("gemm_nt", "layers.3.mlp", "aten::mm", BY_LAUNCH),
        ("memset", "", "", UNKNOWN),
        ("gemm", "layers.3.mlp", "aten::mm", BY_EAGER),
        ("gemm_nt", "layers.3.mlp", "aten::mm", BY_EAGER),
        ("other", "", "", UNKNOWN),
    ]
    first = totals(found).row(0, named=True)
    assert first == {"module": "layers.*.mlp", "operator": "aten::mm", "count": 4, "total_ns": 23_000}


def hidden(spans: pl.DataFrame, stretches: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The spans as if a graph had launched each of some stretches, and the kernels that it launched."""
    graphs = []
    for row in stretches.iter_rows(named=True):
        number = int(spans["correlation"].max()) + 1  # type: ignore[arg-type]
        own = (pl.col("rank") == row["rank"]) & (pl.col("window") == row["window"])
        inside = own & pl.col("start_ns").is_between(row["start_ns"], row["end_ns"], "left")
        calls = spans.filter(inside & (pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
        launched = (
            own & (pl.col("kind") == "kernel") & pl.col("correlation").is_in(calls["correlation"].implode())
        )
        host = inside & pl.col("kind").is_in(["cpu_op", "annotation", "python", "runtime"])
        renumbered = pl.when(launched).then(number).otherwise("correlation").alias("correlation")
        call = calls.head(1).with_columns(
            name=pl.lit("cudaGraphLaunch"), correlation=pl.lit(number, pl.Int64)
        )
        spans = pl.concat([spans.filter(~host).with_columns(renumbered), call])
        graphs.append(number)
    spans = spans.sort("rank", "window", "start_ns", "span_id")
    return spans, spans.filter((pl.col("kind") == "kernel") & pl.col("correlation").is_in(graphs))


@pytest.mark.parametrize(
    ("source", "of_rank", "recall"),
    [
        ("multirank/nanogpt_h100_8r_rs_ag", True, 0.96),  # from the other ranks
        ("multirank/param_dlrm_v100_8r", True, 0.99),
        ("nccl_meta/mi300x_ddp_rank0of8.json.gz", False, 0.99),  # from other steps; its modules are known
    ],
)
def test_operators_that_are_hidden_in_real_traces_are_found_again(traces: Path, source, of_rank, recall):
    run = open_path(str(traces / source))
    spans, steps = run.table(SPANS), run.table(STEPS)
    stretches = recorded_steps(spans, steps).sort("rank", "start_ns")
    chosen = stretches.filter(rank=stretches["rank"][0])
    seen, kernels = hidden(spans, chosen if of_rank else chosen.head(1))
    truth = (
        attributed(spans, steps)
        .filter(pl.col("operator") != "")
        .rename({name: f"true_{name}" for name in WORK})
    )
    both = attributed(seen, steps).join(kernels, on=["rank", "span_id"], how="semi")
    both = both.join(truth, on=["rank", "span_id"])
    assert both.height > 100
    for name in WORK:
        known = both.filter(pl.col(name) != "")
        right = known.filter(pl.col(name) == pl.col(f"true_{name}")).height
        assert right >= 0.98 * known.height, name
    assert both.filter(pl.col("operator") != "").height >= recall * both.height
