"""Rows of a rank: nesting, overlaps, waits of collectives, phases."""

from __future__ import annotations

import itertools

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from dpro.dashboards.timeline.lanes import BACKWARD, FORWARD, KINDS, OPTIMIZER, SpanNames, depths, make_lanes
from dpro.schema import SPANS, conform


def _lanes(*spans: dict, until: dict[int, int] | None = None):
    rest = {"tid": 1, "device": -1, "stream": -1, "correlation": -1, "forward_thread": -1}
    frame = conform(SPANS, pl.DataFrame([{"span_id": n, **rest, **span} for n, span in enumerate(spans)]))
    known = pl.DataFrame(
        list((until or {}).items()), {"span_id": pl.Int64, "until_ns": pl.Int64}, orient="row"
    )
    names = SpanNames()
    return make_lanes(frame.join(known, on="span_id", how="left"), names, 1000, 100), names


def _op(name: str, start: int, stop: int, **more) -> dict:
    return {"name": name, "kind": "cpu_op", "start_ns": start, "duration_ns": stop - start, "rank": 0} | more


def _kernel(name: str, start: int, stop: int, **more) -> dict:
    return _op(name, start, stop, kind="kernel", tid=-1, device=0, stream=7) | more


def _row(lanes, number: int) -> list[tuple[int, int]]:
    first = lanes.all.first
    at = slice(int(first[number]), int(first[number + 1]))
    return list(zip(lanes.all.start[at].tolist(), lanes.all.end[at].tolist()))


def test_operators_lie_in_rows_by_their_depth():
    lanes, _ = _lanes(
        _op("step", 100, 200), _op("a", 110, 150), _op("b", 120, 130), _op("c", 150, 190), _op("d", 210, 220)
    )
    assert [(lane.label, lane.rows, lane.spans) for lane in lanes.lanes] == [("main thread", (0, 3), 5)]
    assert [_row(lanes, row) for row in range(3)] == [
        [(0, 100), (110, 120)],
        [(10, 50), (50, 90)],
        [(20, 30)],
    ]
    assert lanes.row_of(lanes.find(2)) == 2
    assert [lanes.ident[item] for item in lanes.around(lanes.find(2))] == [1, 0]
    assert lanes.find(99) == -1


def test_what_overlaps_without_lying_inside_moves_to_a_deeper_row():
    lanes, _ = _lanes(
        _kernel("k", 100, 200), _kernel("l", 150, 250), _kernel("m", 200, 240), _kernel("n", 260, 270)
    )
    rows = [_row(lanes, row) for row in range(lanes.all.first.size - 1)]
    assert rows[0][0] == (0, 100)
    assert (50, 150) in rows[1]
    assert sum(map(len, rows)) == 4
    assert all(one[1] <= other[0] for row in rows for one, other in itertools.pairwise(row))


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60), st.integers(0, 2)), max_size=40))
def test_no_two_spans_of_a_lane_and_depth_overlap(spans):
    ordered = sorted((lane, start, -length) for start, length, lane in spans)
    place, start, length = (
        (np.array(each, np.int64) for each in zip(*ordered)) if ordered else [np.empty(0, np.int64)] * 3
    )
    end = start - length
    depth = depths(place, start, end)
    for i in range(len(ordered)):
        for j in range(i):
            if (place[i], depth[i]) == (place[j], depth[j]):
                assert end[j] <= start[i] or end[i] <= start[j]


def test_streams_come_first_the_busiest_on_top_and_then_the_main_thread():
    lanes, _ = _lanes(
        _kernel("short", 100, 110), _kernel("long", 100, 190, stream=9), _op("x", 100, 101, tid=5),
        _op("ProfilerStep#1", 100, 200, tid=3, kind="annotation"),
        _kernel("r", 100, 190, kind="gpu_annotation"),
    )  # fmt: skip
    labels = [lane.label for lane in lanes.lanes]
    assert labels == [
        "stream 9 (compute)",
        "stream 7 (compute)",
        "stream 7 (compute) ranges",
        "main thread",
        "x thread",
    ]


def test_lanes_are_named_by_what_takes_most_of_their_time_and_addresses_are_counted():
    lanes, _ = _lanes(
        _kernel("gemm", 100, 190), _kernel("Memcpy DtoD", 190, 195, kind="memcpy"),
        _kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100, 180, stream=94_132_000_000_016),
        _kernel("ncclDevKernel_SendRecv", 100, 175, stream=94_132_000_000_944),
        _kernel("Memcpy HtoD", 100, 160, stream=20, kind="memcpy"), _kernel("add", 160, 170, stream=20),
        _kernel("exchange", 100, 150, stream=21),
        _op("ProfilerStep#1", 100, 101, tid=3), _op("autograd::engine::evaluate_function", 100, 150, tid=4),
        _op("a", 150, 151, tid=4), _op("b", 100, 102, tid=5, forward_thread=3),
        _op("pin_memory", 100, 110, tid=6), _op("poll", 100, 109, tid=7), _op("c", 100, 101, tid=7),
        _op("gloo:all_reduce", 100, 101, tid=8), until={6: 120},
    )  # fmt: skip
    assert [lane.label for lane in lanes.lanes] == [
        "stream 7 (compute)", "NCCL 1", "NCCL 2", "stream 20 (copy)", "stream 21 (transfer)",
        "main thread", "poll thread", "data loader", "gloo thread", "autograd", "autograd 2",
    ]  # fmt: skip


def test_streams_of_several_gpus_say_which():
    lanes, _ = _lanes(_kernel("a", 100, 190), _kernel("b", 100, 150, device=1))
    assert [lane.label for lane in lanes.lanes] == ["GPU 0 stream 7 (compute)", "GPU 1 stream 7 (compute)"]


def test_a_collective_is_its_wait_and_its_transfer():
    lanes, names = _lanes(_kernel("nccl", 100, 200), until={0: 160})
    kinds = [KINDS[kind] for kind in lanes.all.kind]
    assert list(zip(kinds, _row(lanes, 0))) == [("wait", (0, 60)), ("transfer", (60, 100))]
    assert lanes.ident.tolist() == [0, 0]
    assert names.texts == ["nccl"]
    late, _ = _lanes(_kernel("nccl", 100, 200), until={0: 100})
    assert [KINDS[kind] for kind in late.all.kind] == ["transfer"]
    never, _ = _lanes(_kernel("nccl", 100, 200), until={0: 300})
    assert [KINDS[kind] for kind in never.all.kind] == ["wait"]


def test_work_has_the_phase_of_what_is_around_it_or_launched_it():
    lanes, names = _lanes(
        _op("aten::mm", 100, 120), _op("launch", 105, 110, kind="runtime", correlation=1),
        _op("autograd::engine::evaluate_function: MmBackward0", 130, 160), _op("aten::mm", 140, 155),
        _op("launch", 141, 142, kind="runtime", correlation=2),
        _op("Optimizer.step#Adam.step", 170, 190, kind="annotation"), _op("aten::mul_", 172, 180),
        _kernel("gemm", 112, 118, correlation=1), _kernel("gemm", 145, 150, correlation=2),
    )  # fmt: skip
    phase = {int(ident): int(phase) for ident, phase in zip(lanes.ident, lanes.phase)}
    assert phase == {
        0: FORWARD, 1: FORWARD, 2: BACKWARD, 3: BACKWARD, 4: BACKWARD, 5: OPTIMIZER, 6: OPTIMIZER, 7: FORWARD,
        8: BACKWARD,
    }  # fmt: skip
    assert len(names.texts) == len(set(names.texts))
