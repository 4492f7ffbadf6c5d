"""Gradients in pieces and by priority: by hand on made-up DDP jobs, and properties of the order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.graph import NodeKind
from dpro.replay.whatif.edits.gradients import by_priority
from dpro.replay.whatif.registry import parse_edit
from tests.ddp import KB, ddp_job, gpu_ddp_job
from tests.edits import steps_us

MOVE = 4 * KB  # us for a gradient of 1 MB


@pytest.mark.parametrize("closes", [(3,), (0, 1, 2, 3)])
def test_the_gradient_of_the_first_layer_overtakes_and_only_its_layer_waits_for_it(tmp_path, closes):
    graph = ddp_job(closes=closes, num_steps=5).build(tmp_path / "run").graph
    # The last layer's gradient is ready first and goes first; then, of all others, the first layer's. The
    # third layer's comes last, after all four: two layers of the next forward pass are left then.
    assert steps_us(graph, "priority:mb=1")[1:4] == pytest.approx([1000 + 4 * MOVE + 2000] * 3, rel=0.003)
    # In quarters, all but the last layer's are left when that waits; its last piece was moved long before.
    quarters = steps_us(graph, "priority:mb=0.25")[1:4]
    assert quarters == pytest.approx([1000 + 4 * MOVE + 1000] * 3, rel=0.004)


def test_one_piece_for_all_only_lets_the_update_go_on_beside_it(tmp_path):
    graph = ddp_job(num_steps=5).build(tmp_path / "run").graph
    expected = steps_us(graph)[1] - 150  # copying results and the optimizer
    assert steps_us(graph, "priority:mb=100")[1:4] == pytest.approx([expected] * 3, rel=0.001)


def test_pieces_move_all_the_bytes(tmp_path):
    graph = ddp_job(sizes_kb=(1024, 3072, 10, 2048)).build(tmp_path / "run").graph
    for mb in (0.3, 1, 7):
        changed = parse_edit(f"priority:mb={mb}").apply(graph)
        moved = [each.nodes.bytes[each.nodes.kind == NodeKind.TRANSFER].sum() for each in (graph, changed)]
        assert moved[1] == pytest.approx(moved[0], rel=1e-4)


def test_on_gpus_the_kernel_of_the_forward_pass_waits(tmp_path):
    graph = gpu_ddp_job().build(tmp_path / "run").graph
    # All gradients come from one forward kernel: it waits for all of them, and the update for none.
    with_all = steps_us(graph, "priority:mb=1")[1]
    assert with_all < steps_us(graph, "bucket:mb=1")[1]
    assert with_all >= 2000 + 4 * KB


def test_a_run_without_sequence_numbers_does_not_say_what_needs_what(tmp_path):
    run = ddp_job()
    for row in run.rows["spans"]:
        row.pop("sequence_number", None)
    with pytest.raises(Unanswerable, match="no sequence numbers"):
        parse_edit("priority:mb=1").apply(run.build(tmp_path / "run").graph)


pieces = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=12
)


@given(pieces)
def test_the_link_never_rests_while_a_piece_is_ready_and_takes_the_most_urgent_of_them(pieces):
    ready, urgency, takes = (np.array(column) for column in zip(*pieces))
    order = by_priority(ready, urgency, takes.astype(np.float64))
    assert sorted(order) == list(range(len(pieces)))
    now, left = 0, set(order)
    for piece in order:
        at = max(now, int(ready[piece]))
        others = [other for other in left if ready[other] <= at]
        assert at == max(now, min(int(ready[other]) for other in left))
        assert all(urgency[piece] <= urgency[other] for other in others)
        left.remove(piece)
        now = at + int(takes[piece])


@given(pieces)
def test_without_priorities_pieces_go_as_they_are_ready(pieces):
    ready, _, takes = (np.array(column) for column in zip(*pieces))
    order = by_priority(ready, np.zeros(ready.size, np.int64), np.zeros_like(takes).astype(np.float64))
    assert order == sorted(range(len(pieces)), key=lambda piece: (ready[piece], piece))


def test_pieces_that_are_ready_together_go_as_they_are_needed():
    assert by_priority(np.zeros(3, np.int64), np.array([3, 1, 2]), np.ones(3)) == [1, 2, 0]


def test_one_step_in_a_window_does_not_say_when_the_next_needs_its_gradients(tmp_path):
    run = ddp_job(num_steps=1)
    with pytest.raises(Unanswerable, match="--window-steps 2"):
        parse_edit("priority:mb=1").apply(run.build(tmp_path / "run").graph)
