"""Ranks that hold a part of the model are not left out; replicas that hold all of it are."""

from __future__ import annotations

from itertools import product

import pytest

from dpro.errors import Unanswerable
from dpro.members import members_text
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.mesh import with_layout
from dpro.replay.timeline import replay
from dpro.schema import WORKERS
from tests.builders import TinyRun
from tests.edits import changed


def replicas(num_ranks: int = 2, **call: object) -> TinyRun:
    """Steps of 1000 with forward, backward with an all-reduce of 1 MB, and one more call between the two."""
    run = TinyRun()
    ranks = list(range(num_ranks))
    for step in range(2):
        begin = 1000.0 * step
        for rank in ranks:
            run.op("aten::mm", begin, begin + 200, rank)
            if call:
                more = {"group": "0", "group_ranks": members_text(ranks), **call}
                run.gloo(
                    (begin + 200, begin + 210), (begin + 205, begin + 300), rank, sequence=2 * step, **more
                )
            run.op("MmBackward0", begin + 310, begin + 600, rank, forward_thread=1)
            reduced = {
                "group": "0",
                "group_ranks": members_text(ranks),
                "bytes_in": 1 << 20,
                "bytes_out": 1 << 20,
            }
            run.gloo(
                (begin + 600, begin + 610), (begin + 605, begin + 900), rank, sequence=2 * step + 1, **reduced
            )
            run.op("aten::add", begin + 910, begin + 1000, rank)
            run.step(step, begin, begin + 1000, rank)
    return run


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"op": "all_reduce", "bytes_in": 8, "bytes_out": 8},  # a metric
        {"op": "all_gather", "bytes_in": 256, "bytes_out": 512},  # statistics of a batch
        {"op": "broadcast", "bytes_in": 1 << 18, "bytes_out": 1 << 18},  # buffers
    ],
)
def test_a_replica_that_holds_the_whole_model_can_be_left_out(call, tmp_path):
    graph = replicas(**call).build(tmp_path / "r").graph
    assert (replay(changed(graph, "drop:rank=1")).end <= replay(graph).end).all()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            {"op": "reduce_scatter", "bytes_in": 1 << 20, "bytes_out": 1 << 19},
            "rank 1 is tensor-parallel rank 1",  # of sequences, too, between forward and backward
        ),
        ({"op": "all_gather", "bytes_in": 1 << 19, "bytes_out": 1 << 20}, "its own shard of them"),
        ({"op": "all_gather"}, "its own shard of them"),  # of no known size
        ({"op": "all_to_all", "bytes_in": 64, "bytes_out": 64}, "each holds its own part"),
        ({"op": "all_reduce", "bytes_in": 1 << 20, "bytes_out": 1 << 20}, "rank 1 is tensor-parallel rank 1"),
        ({"op": "all_reduce", "bytes_in": 8, "bytes_out": 8, "group": "mesh_tp"}, "'mesh_tp' holds parts"),
        (
            {"op": "all_reduce", "bytes_in": 8, "bytes_out": 8, "group": "TENSOR_MODEL_PARALLEL_GROUP"},
            "holds parts",
        ),
    ],
)
def test_a_rank_whose_calls_show_that_it_holds_a_part_is_refused(call, reason, tmp_path):
    graph = replicas(**call).build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match=rf"rank 1 cannot be left out: .*{reason}"):
        changed(graph, "drop:rank=1")


def tensor_parallel(size: int, grouped: bool) -> TinyRun:
    """Steps of 1000, two layers of which sum their activations, forward and backward, as Megatron does."""
    run, group = TinyRun(), {"group": "0", "group_ranks": "0-1"} if grouped else {}
    for step, rank in product(range(3), range(2)):
        begin = at = 1000.0 * step
        for layer in range(4):
            forward = {} if layer < 2 else {"forward_thread": 1}
            run.op("aten::mm" if layer < 2 else "MmBackward0", at, at + 100, rank, **forward)
            sums = {"op": "all_reduce", "bytes_in": size, "bytes_out": size, "sequence": 4 * step + layer}
            run.gloo((at + 100, at + 105), (at + 102, at + 200), rank, **sums, **group)
            at += 200
        run.op("aten::add", at, begin + 1000, rank)
        run.step(step, begin, begin + 1000, rank)
    return run


@pytest.mark.parametrize(
    ("size", "grouped", "reason"),
    [
        (1 << 20, True, "rank 1 is tensor-parallel rank 1"),
        (1 << 20, False, "activations are summed with it in forward passes"),
        (-1, True, "unknown size .* --layout dp=2"),
        (-1, False, "unknown size .* --layout dp=2"),
    ],
)
def test_a_tensor_parallel_shard_is_refused_whatever_is_known_of_its_sums(size, grouped, reason, tmp_path):
    graph = tensor_parallel(size, grouped).build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match=f"rank 1 cannot be left out: .*{reason}"):
        changed(graph, "drop:rank=1")


def test_a_layout_that_the_user_states_settles_what_forward_passes_sum(tmp_path):
    run = tensor_parallel(-1, grouped=True).write(tmp_path / "r")
    graph = build_graph(with_layout(run, {"dp": 2})).predictive
    assert (replay(changed(graph, "drop:rank=1")).end <= replay(graph).end).all()


def test_a_replica_without_known_groups_or_sizes_can_be_left_out(tmp_path):
    graph = replicas(op="all_reduce", group="", group_ranks="").build(tmp_path / "r").graph  # of a loss
    assert (replay(changed(graph, "drop:rank=1")).end <= replay(graph).end).all()


def _placed(run: TinyRun, places: list[tuple[int, int]]) -> TinyRun:
    for rank, (dp, tp) in enumerate(places):
        run.rows[WORKERS.name].append({"rank": rank, "dp": dp, "tp": tp})
    return run


def test_coordinates_say_that_a_rank_is_a_shard_and_that_a_replica_is_not(tmp_path):
    graph = _placed(replicas(4), [(0, 0), (0, 1), (1, 0), (1, 1)]).build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match=r"rank 3 is tensor-parallel rank 1 \(tp\) of a model"):
        changed(graph, "drop:rank=3")
    assert (replay(changed(graph, "drop:dp=1")).end <= replay(graph).end).all()
    alone = _placed(replicas(2), [(0, 0), (1, 0)]).build(tmp_path / "dp").graph
    assert (replay(changed(alone, "drop:rank=1")).end <= replay(alone).end).all()


@pytest.mark.parametrize("folder", ["nanogpt_h100_8r_rs_ag", "torchrec_v100_2r_kjt"])
def test_ranks_of_real_jobs_that_hold_shards_are_refused(folder, traces):
    from dpro.cli.analysis import open_quietly

    graph = build_graph(open_quietly(traces / "multirank" / folder)).predictive
    with pytest.raises(Unanswerable, match="cannot be left out"):
        changed(graph, "drop:rank=1")
