"""The framework that reduces gradients is what its buckets say, and edits say its settings."""

from __future__ import annotations

import re

import pytest

from dpro.analysis.analysis import Analysis
from dpro.replay.gradient_buckets import FRAMEWORKS, framework_of
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import BUCKETS, SPANS
from dpro.verdict.sources.edits import REDUCER, reducing_in_bf16
from tests.ddp import ddp_job

SOURCES = {
    "DDP logging data": "",
    "Megatron-core buckets": "Megatron-core",
    "DeepSpeed ZeRO-1 buckets, after backward": "DeepSpeed",
    "FSDP2 parameter groups": "FSDP2",
}


def job(folder, source):
    """Gradients in fp32, by buckets of this source."""
    run = ddp_job()
    for row in run.rows[BUCKETS.name]:
        row["source"] = source
    return run.build(folder / "r").graph


@pytest.mark.parametrize(("source", "framework"), SOURCES.items())
def test_buckets_say_which_framework_reduces(tmp_path, source, framework):
    graph = job(tmp_path, source)
    assert framework_of(graph.run) == framework
    first = parse_edit("bucket:mb=1").notes(graph)[:1]
    assert bool(first and first[0].startswith(f"in {framework}: ")) == bool(framework)


def test_two_frameworks_in_a_run_are_none(tmp_path):
    graph = job(tmp_path, "Megatron-core buckets")
    assert graph.run is not None
    run = ddp_job()
    for row, source in zip(run.rows[BUCKETS.name], ("Megatron-core buckets", "FSDP2 parameter groups")):
        row["source"] = source
    assert framework_of(run.build(tmp_path / "both").graph.run) == ""
    assert framework_of(None) == ""


@pytest.mark.parametrize(
    ("edit", "source", "setting"),
    [
        ("bucket:mb=1", "Megatron-core buckets", "bucket_size=262144, overlap_grad_reduce=True"),
        ("bucket:mb=1", "DeepSpeed ZeRO-2 buckets", '"reduce_bucket_size": 262144'),
        ("bucket:mb=1", "FSDP2 parameter groups", "layers of about 262144 parameters"),
        ("compress:to=bf16", "FSDP2 parameter groups", "reduce_dtype=torch.bfloat16"),
        ("compress:to=fp16", "DeepSpeed ZeRO-2 buckets", '"communication_data_type": "fp16"'),
        ("compress:to=bf16", "Megatron-core buckets", "grad_reduce_in_fp32=False"),
        ("overlap:mode=off", "Megatron-core buckets", "overlap_grad_reduce=False"),
        ("overlap:mode=off", "DeepSpeed ZeRO-2 buckets", '"overlap_comm": false'),
        ("overlap:mode=full", "Megatron-core buckets", "no such setting"),
        ("local-updates:every=4", "FSDP2 parameter groups", "no such setting"),
        ("compress:topk=0.01", "Megatron-core buckets", "no such setting"),
    ],
)
def test_what_to_write_is_said_in_the_words_of_the_framework(tmp_path, edit, source, setting):
    note = parse_edit(edit).notes(job(tmp_path, source))[0]
    assert note.startswith(f"in {next(name for name in FRAMEWORKS if source.startswith(name))}: ")
    assert setting in note


@pytest.mark.parametrize(
    ("source", "ranges", "words", "effort"),
    [
        ("DDP logging data", [], "a communication hook of DDP", "a line of code"),
        ("", ["DistributedDataParallel.forward"], "a communication hook of DDP", "a line of code"),
        ("FSDP2 parameter groups", [], "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)", "a line of code"),
        ("", [], "in the code that reduces them", "new code"),
    ],
)
def test_fewer_bits_of_gradients_are_advised_where_the_job_reduces_them(
    tmp_path, source, ranges, words, effort
):
    run = ddp_job()
    run.rows[BUCKETS.name] = [row | {"source": source} for row in run.rows[BUCKETS.name] if source]
    run.rows[SPANS.name] = [row for row in run.rows[SPANS.name] if not re.search(REDUCER, row["name"])]
    for name in ranges:
        run.op(name, 0, 1)
    analysis = Analysis(run.write(tmp_path / "run"))
    said, takes = reducing_in_bf16(analysis)
    assert words in said
    assert takes == effort
