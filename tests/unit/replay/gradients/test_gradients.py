"""Compressed gradients, local updates, overlap: by hand on made-up DDP jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.gradient_passes import MB, Launches
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from tests.builders import US, tiny_graph
from tests.ddp import ddp_job
from tests.edits import steps_us

# Four gradients of 1 MB in one bucket. Forward and backward 8000 us, the call 10 us, 4 us per KB, then 150.
COMPUTE, CALL, WHOLE, AFTER = 8000, 10, 4 * 4096, 150


@pytest.fixture(scope="module")
def one_bucket(tmp_path_factory) -> Graph:
    return _built(tmp_path_factory.mktemp("one"))


def _built(folder: Path, **options) -> Graph:
    ddp_job(**options).write(folder / "run")
    return build_graph(open_run(folder / "run")).graph


def test_a_graph_that_communicates_nothing_has_no_calls_of_a_kind():
    assert Launches(tiny_graph([1, 1], [(0, 1, 0)]), {("all_reduce", "0")}).source.size == 0


@pytest.mark.parametrize(
    ("edit", "num_bytes"),
    [
        ("compress:to=fp16", 2 * MB),
        ("compress:to=bf16", 2 * MB),
        # Matrices of 16 x 16384: (16 + 16384) x 2 elements of 4 bytes each.
        ("compress:powersgd_rank=2", 4 * (16 + 16384) * 2 * 4),
        # 1% of 4 x 262144 elements, 4 bytes and 4 of index, from one peer.
        ("compress:topk=0.01", round(0.01 * MB * 8)),
    ],
)
def test_compression_moves_fewer_bytes_in_proportion(one_bucket, edit, num_bytes):
    changed = parse_edit(edit).apply(one_bucket)
    moved = changed.nodes.bytes[changed.nodes.kind == NodeKind.TRANSFER]
    assert set(moved.tolist()) == {num_bytes}
    expected = COMPUTE + CALL + WHOLE * num_bytes / (4 * MB) + AFTER
    assert steps_us(changed)[1] == pytest.approx(expected, abs=15)


def test_compressing_costs_passes_over_the_gradients(tmp_path):
    run = ddp_job()
    for row in run.rows["spans"]:
        if row["name"] == "LinearBackward":  # the last 100 us of each copy 1 MB into the bucket
            row["duration_ns"] -= 100 * US
    for row in [row for row in run.rows["spans"] if row["name"] == "LinearBackward"]:
        end = (row["start_ns"] + row["duration_ns"]) / US
        run.op("aten::mul", end, end + 100, row["rank"])
    run.write(tmp_path / "run")
    graph = build_graph(open_run(tmp_path / "run")).graph
    # Of the first gradient the copy begins before it is ready: three of four are seen, 300 us for 4 MB.
    casts = (10 / 8 + 6 / 8) * 300
    expected = COMPUTE + CALL + casts + WHOLE / 2 + AFTER
    assert steps_us(graph, "compress:to=fp16")[1] == pytest.approx(expected, abs=15)


def test_what_is_compressed_already_is_refused(one_bucket, tmp_path):
    with pytest.raises(Unanswerable, match="already compressed"):
        steps_us(one_bucket, "compress:to=fp16", "compress:to=fp16")
    half = ddp_job()
    for row in half.rows["collectives"]:
        row["dtype"] = "bfloat16"
    half.write(tmp_path / "run")
    with pytest.raises(Unanswerable, match="bfloat16 already"):
        steps_us(build_graph(open_run(tmp_path / "run")).graph, "compress:to=fp16")


@pytest.mark.parametrize("text", ["compress", "compress:to=fp16,topk=0.1", "compress:to=fp8"])
def test_there_must_be_one_way_of_compressing(text):
    with pytest.raises(UsageError):
        parse_edit(text)


def test_compression_and_a_faster_network_agree_in_either_order(one_bucket):
    one = steps_us(one_bucket, "compress:to=fp16", "network:bandwidth=2")
    other = steps_us(one_bucket, "network:bandwidth=2", "compress:to=fp16")
    assert one == pytest.approx(other, abs=1)
    assert one[1] == pytest.approx(COMPUTE + CALL + WHOLE / 4 + AFTER, abs=15)


def test_compressed_gradients_go_in_other_buckets_too(one_bucket):
    both = steps_us(one_bucket, "compress:to=fp16", "bucket:mb=1")
    assert both[1] == pytest.approx(5000 + CALL + WHOLE / 2 + AFTER, abs=40)
    assert both == pytest.approx(steps_us(one_bucket, "bucket:mb=1", "compress:to=fp16"), abs=40)


def test_local_updates_average_every_so_many_steps(one_bucket):
    # A step without reductions, and a quarter of one of all parameters at its end.
    expected = COMPUTE + AFTER + (WHOLE + CALL) / 4
    assert steps_us(one_bucket, "local-updates:every=4")[1] == pytest.approx(expected, abs=15)
    assert parse_edit("local-updates:every=1").apply(one_bucket) is one_bucket


def test_averages_beside_the_steps_cost_their_calls_alone(one_bucket):
    edit = parse_edit("local-updates:every=4,overlap=yes")
    assert steps_us(one_bucket, str(edit))[1] == pytest.approx(COMPUTE + AFTER + CALL / 4, abs=15)
    assert not edit.is_proven(one_bucket)
    assert parse_edit("local-updates:every=4").is_proven(one_bucket)


def test_local_updates_wait_for_slow_ranks_only_when_they_average(tmp_path):
    graph = _built(tmp_path, late=400)
    expected = COMPUTE + 400 + AFTER + (WHOLE + CALL) / 4
    assert steps_us(graph, "local-updates:every=4")[1] == pytest.approx(expected, abs=15)


def test_without_overlap_all_is_reduced_behind_the_last_gradient(tmp_path):
    graph = _built(tmp_path, closes=(0, 1, 2, 3))
    assert steps_us(graph)[1] == pytest.approx(5000 + CALL + WHOLE + AFTER, abs=1)
    assert steps_us(graph, "overlap:mode=off")[1] == pytest.approx(COMPUTE + CALL + WHOLE + AFTER, abs=60)


@pytest.mark.parametrize(("us_per_kb", "bound"), [(1.0, COMPUTE + CALL + AFTER), (4.0, WHOLE + CALL)])
def test_with_full_overlap_a_step_takes_the_longer_of_compute_and_communication(tmp_path, us_per_kb, bound):
    graph = _built(tmp_path, us_per_kb=us_per_kb, num_steps=6)
    steps = steps_us(graph, "overlap:mode=full")
    assert np.mean(steps[2:5]) == pytest.approx(bound, rel=0.02)
