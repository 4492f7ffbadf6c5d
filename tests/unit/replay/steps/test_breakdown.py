"""Small cases worked out by hand; times are in ns and drawn to scale in the comments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.members import members_text
from dpro.replay.alignment.match import match_collectives
from dpro.replay.alignment.transfers import split_members
from dpro.replay.steps import collective_totals, kernel_totals, step_breakdown
from dpro.schema import COLLECTIVES, SPANS, STEPS, WORKERS, conform
from dpro.table import Table

MAIN, WORKER = 1, 2
PARTS = ["compute_ns", "exposed_comm_ns", "overlapped_comm_ns", "host_bound_ns", "idle_ns"]


def _table(table: Table, rows: list[dict[str, Any]]) -> pl.DataFrame:
    defaults = {
        name: [] if column.default is None else column.default for name, column in table.columns.items()
    }
    return conform(table, pl.DataFrame([defaults | row for row in rows], schema=table.dtypes))


def _span(span_id: int, kind: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    row = {"span_id": span_id, "rank": 0, "window": 0, "kind": kind, "start_ns": start, "name": kind}
    return row | {"duration_ns": end - start} | more


def _kernel(span_id: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    return _span(span_id, "kernel", start, end, **{"device": 0, "stream": 7, **more})


def _op(span_id: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    return _span(span_id, "cpu_op", start, end, **{"pid": 1, "tid": MAIN, **more})


def _collective(number: int, span: dict[str, Any], **more: Any) -> dict[str, Any]:
    copied = {name: span[name] for name in ("rank", "window", "span_id", "start_ns", "duration_ns")}
    return {"collective_id": number, "op": "all_reduce", **copied, **more}


def _step(step: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"rank": 0, "step": step, "window": 0, "start_ns": start, "duration_ns": end - start} | more


def _split(
    spans: list[dict[str, Any]], collectives: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> pl.DataFrame:
    return step_breakdown(_table(SPANS, spans), _table(COLLECTIVES, collectives), _table(STEPS, steps))


def _parts(frame: pl.DataFrame) -> list[tuple[int, ...]]:
    return frame.select(PARTS).rows()


def test_communication_beside_compute_is_overlapped_and_the_rest_of_it_exposed():
    # compute  ####......      0-40
    # comm     ..######..     20-80
    spans = [_kernel(1, 0, 40), _kernel(2, 20, 80, stream=9)]
    frame = _split(spans, [_collective(1, spans[1])], [_step(5, 0, 100)])
    assert frame.select("step", "rank", "duration_ns").rows() == [(5, 0, 100)]
    assert _parts(frame) == [(40, 40, 20, 0, 20)]


def test_a_copy_beside_nothing_is_no_compute_and_a_gpu_annotation_is_nothing():
    spans = [
        _kernel(1, 0, 10),
        _span(2, "memcpy", 20, 30, device=0, stream=8),
        _span(3, "gpu_annotation", 0, 100, device=0, stream=7),
    ]
    split = _split(spans, [], [_step(0, 0, 100)])
    assert _parts(split) == [(10, 0, 0, 0, 80)]
    assert split["copy_ns"].to_list() == [10]


def test_copies_beside_compute_and_communication_are_these():
    # compute  ##........      0-20
    # comm     .###......     10-40
    # copy     ########..      0-80
    spans = [
        _kernel(1, 0, 20),
        _span(2, "kernel", 10, 40, device=0, stream=9),
        _span(3, "memcpy", 0, 80, device=0, stream=8),
    ]
    split = _split(spans, [_collective(1, spans[1])], [_step(0, 0, 100)])
    parts = split.select(
        "compute_ns", "exposed_comm_ns", "copy_ns", pl.col("host_bound_ns") + pl.col("idle_ns")
    )
    assert parts.rows() == [(20, 20, 40, 20)]


def test_a_gpu_that_waits_for_its_launch_is_host_bound():
    # launches     A        B      C         A ends at 10, B at 50, C at 60
    # GPU           AAAA     B   C           10-30, 55-70, 90-95: B came late, C was launched before the gap
    spans = [
        _kernel(1, 10, 30, correlation=1),
        _kernel(2, 55, 70, correlation=2),
        _kernel(3, 90, 95, correlation=3),
        *(_span(10 + i, "runtime", end - 5, end, correlation=i) for i, end in ((1, 10), (2, 50), (3, 60))),
    ]
    # Host bound: 0-10 before A and 30-55 before B. Idle: 70-90 before C, and 95-100 that no work ends.
    assert _parts(_split(spans, [], [_step(0, 0, 100)])) == [(40, 0, 0, 35, 25)]


def test_idleness_before_work_whose_launch_was_not_recorded_is_just_idle():
    spans = [_kernel(1, 0, 10), _kernel(2, 50, 60, correlation=4)]
    assert _parts(_split(spans, [], [_step(0, 0, 60)])) == [(20, 0, 0, 0, 40)]


def test_work_that_crosses_a_step_boundary_counts_on_both_sides():
    spans = [_kernel(1, 80, 130)]
    assert _parts(_split(spans, [], [_step(0, 0, 100), _step(1, 100, 200)])) == [
        (20, 0, 0, 0, 80),
        (30, 0, 0, 0, 70),
    ]


def test_without_a_gpu_communication_is_exposed_while_the_main_thread_runs_no_operator():
    # main    ####..####..#...   ops 0-40, 60-100, 120-130; nothing else is known of 130-160
    # worker  ..######........   gloo 20-80
    spans = [
        _op(1, 0, 40),
        _op(2, 5, 10),
        _op(3, 60, 100),
        _op(4, 120, 130),
        _span(5, "annotation", 20, 80, pid=1, tid=WORKER, name="gloo:all_reduce"),
        _op(6, 0, 160, tid=WORKER),
    ]
    collectives = [_collective(1, spans[4], launch_span_id=2)]
    assert _parts(_split(spans, collectives, [_step(0, 0, 160)])) == [(90, 20, 40, 50, 0)]


def test_without_collectives_the_main_thread_is_the_one_with_most_operator_time():
    spans = [_op(1, 0, 10), _op(2, 0, 30, tid=WORKER)]
    assert _parts(_split(spans, [], [_step(0, 0, 40)])) == [(30, 0, 0, 10, 0)]


def test_steps_outside_deep_windows_are_left_out():
    steps = [_step(0, 0, 10, window=-1), _step(1, 10, 20)]
    assert _split([_op(1, 10, 15)], [], steps)["step"].to_list() == [1]


def test_an_imported_trace_whose_steps_know_no_window_reports_them_all():
    steps = [_step(0, 0, 10, window=-1), _step(1, 10, 20, window=-1)]
    assert _split([_op(1, 5, 15)], [], steps)["compute_ns"].to_list() == [5, 5]


def test_without_steps_each_window_is_one_step_numbered_zero_as_in_the_graph():
    spans = [_op(1, 0, 10), _op(2, 20, 30), _op(3, 1000, 1007, window=1)]
    frame = _split(spans, [], [])
    assert frame.select("step", "duration_ns", "compute_ns").rows() == [(0, 7, 7), (0, 30, 20)]


@pytest.mark.parametrize("missing", ["step", "start_ns", "duration_ns"])
def test_a_mark_without_a_number_a_time_or_a_length_divides_nothing(missing):
    marks = [_step(0, 0, 10), _step(1, 10, 20) | {missing: -1}, _step(2, 20, 30)]
    frame = _split([_op(1, 0, 10), _op(2, 20, 30)], [], marks)
    assert frame["step"].to_list() == [0, 2]
    assert _split([_op(1, 0, 10)], [], [_step(3, 0, 10) | {missing: -1}])["step"].to_list() == [0]


def test_a_run_without_spans_is_refused_with_what_to_record():
    with pytest.raises(Unanswerable, match="deep window"):
        _split([], [], [_step(0, 0, 10)])


moments = st.integers(0, 60)


@given(
    st.lists(
        st.tuples(moments, moments, st.booleans(), st.integers(-1, 4), st.sampled_from([7, 9])), max_size=12
    ),
    st.lists(st.tuples(moments, st.integers(0, 5)), max_size=6),
    st.lists(moments, min_size=2, max_size=5, unique=True),
    st.booleans(),
)
def test_the_parts_of_a_step_add_up_to_it_exactly(work, launches, boundaries, on_gpu):
    spans, collectives = [_op(100, 0, 1)], []
    for index, (a, b, is_comm, correlation, lane) in enumerate(work):
        times = (index, min(a, b), max(a, b))
        spans.append(
            _kernel(*times, stream=lane, correlation=correlation) if on_gpu else _op(*times, tid=lane)
        )
        if is_comm:
            collectives.append(_collective(index, spans[-1]))
    for index, (start, correlation) in enumerate(launches):
        spans.append(_span(200 + index, "runtime", start, start + 3, correlation=correlation))
    edges = sorted(boundaries)
    frame = _split(spans, collectives, [_step(i, *edge) for i, edge in enumerate(pairwise(edges))])
    assert frame.height == len(edges) - 1
    split = pl.col("exposed_wait_ns") + pl.col("exposed_transfer_ns") == pl.col("exposed_comm_ns")
    assert frame.select((split | pl.col("exposed_wait_ns").is_null()).all()).item()
    whole = pl.sum_horizontal("compute_ns", "exposed_comm_ns", "copy_ns", "host_bound_ns", "idle_ns")
    assert frame.select((whole == pl.col("duration_ns")).all()).item()
    assert frame.select((pl.min_horizontal(PARTS) >= 0).all()).item()
    assert frame.select((pl.col("overlapped_comm_ns") <= pl.col("compute_ns")).all()).item()


def _exposed(frame: pl.DataFrame) -> list[tuple[int | None, ...]]:
    return frame.sort("rank").select("exposed_comm_ns", "exposed_wait_ns", "exposed_transfer_ns").rows()


def _two_ranks(second: tuple[int, int], **group: Any) -> pl.DataFrame:
    """Rank 0 computes 0-20 and is in an all-reduce 20-80; rank 1 in it during `second`, to 80 of its step."""
    spans = [_kernel(1, 0, 20), _kernel(2, 20, 80, stream=9), _kernel(2, *second, stream=9, rank=1)]
    rows = [_collective(1, spans[1], **group), _collective(1, spans[2], **group)]
    begin = second[1] - 80
    return _split(spans, rows, [_step(0, 0, 100), _step(0, begin, begin + 100, rank=1)])


def test_exposed_communication_before_the_last_member_arrived_is_wait():
    # rank 0  cc......tt    computes 0-20, in the all-reduce 20-80
    # rank 1  ........tt    in it 65-80: it came last, so 15 are transfer, and rank 0 waited the other 45
    assert _exposed(_two_ranks((65, 80), group_ranks="0,1")) == [(60, 45, 15), (15, 0, 15)]


def test_wait_needs_no_common_clock():
    assert _exposed(_two_ranks((7_065, 7_080), group_ranks="0,1")) == [(60, 45, 15), (15, 0, 15)]


def test_exposed_communication_is_not_split_where_a_member_of_the_group_left_no_record():
    parts = _two_ranks((65, 80), group_ranks="0-2")
    assert _exposed(parts) == [(60, None, None), (15, None, None)]


def test_compute_beside_a_collective_takes_from_the_wait_or_the_transfer_that_it_hides():
    # rank 0 in the all-reduce 20-80, rank 1 last at 65; rank 0 computes 0-30 and 60-70
    spans = [_kernel(1, 0, 30), _kernel(3, 60, 70), _kernel(2, 20, 80, stream=9)]
    spans += [_kernel(2, 65, 80, stream=9, rank=1)]
    rows = [_collective(1, span, group_ranks="0,1") for span in spans[2:]]
    parts = _split(spans, rows, [_step(0, 0, 100), _step(0, 0, 100, rank=1)])
    assert _exposed(parts) == [(40, 30, 10), (15, 0, 15)]


def test_a_transfer_beside_the_wait_of_another_collective_counts_as_transfer():
    # rank 0: one all-reduce 0-100 whose last member comes at 90, another on stream 11, 40-60, with no wait
    groups = {"group": "a", "group_ranks": "0,1"}, {"group": "b", "group_ranks": "0,1"}
    spans = [_kernel(1, 0, 100), _kernel(2, 40, 60, stream=11)]
    spans += [_kernel(1, 90, 100, rank=1), _kernel(2, 40, 60, stream=11, rank=1)]
    rows = [_collective(at % 2, span, **groups[at % 2]) for at, span in enumerate(spans)]
    parts = _split(spans, rows, [_step(0, 0, 100), _step(0, 0, 100, rank=1)])
    assert _exposed(parts) == [(100, 70, 30), (30, 0, 30)]


def test_a_group_of_one_rank_waits_for_no_other():
    spans = [_kernel(1, 0, 40)]
    assert _exposed(_split(spans, [_collective(1, spans[0], group_ranks="0")], [_step(0, 0, 100)])) == [
        (40, 0, 40)
    ]


@pytest.mark.parametrize(("unknown", "split"), [(4, (104, 60, 44)), (6, (106, None, None))])
def test_a_twentieth_of_unmatched_communication_counts_as_transfer_and_more_leaves_all_unsplit(
    unknown, split
):
    # rank 0 in an all-reduce 0-100 of which 60 are wait, and in one that rank 1 did not record
    spans = [_kernel(1, 0, 100), _kernel(1, 60, 100, rank=1), _kernel(2, 100, 100 + unknown)]
    of = {"group": "a", "group_ranks": "0,1"}, {"group": "b", "group_ranks": "0,1"}
    rows = [_collective(1, span, **of[span["span_id"] - 1]) for span in spans]
    parts = _split(spans, rows, [_step(0, 0, 200), _step(0, 0, 200, rank=1)])
    assert _exposed(parts)[0] == split


def test_kernels_are_summed_by_name_over_ranks_with_the_largest_first():
    spans = [_kernel(1, 0, 10, name="gemm"), _kernel(1, 0, 12, name="gemm", rank=1), _kernel(2, 20, 25)]
    totals = kernel_totals(_table(SPANS, [*spans, _op(3, 0, 99)]))
    assert totals.rows() == [("gemm", 2, 22), ("kernel", 1, 5)]


def test_without_kernels_operators_are_summed_by_the_time_not_spent_in_others():
    # linear 0-100 { t 0-10, addmm 20-80 { copy 30-50 } }, then t again on its own, and one on another thread
    spans = [
        _op(1, 0, 100, name="linear"),
        _op(2, 0, 10, name="t"),
        _op(3, 20, 80, name="addmm"),
        _op(4, 30, 50, name="copy"),
        _op(5, 100, 103, name="t"),
        _op(6, 25, 45, name="t", tid=WORKER),
    ]
    totals = kernel_totals(_table(SPANS, spans))
    assert totals.rows() == [("addmm", 1, 40), ("t", 3, 33), ("linear", 1, 30), ("copy", 1, 20)]


@given(st.lists(st.tuples(moments, moments), max_size=12))
def test_own_times_of_nested_operators_add_up_to_the_time_any_of_them_ran(pairs):
    nested: list[tuple[int, int]] = []
    for start, end in ((min(pair), max(pair)) for pair in pairs):
        if start < end and all(a >= end or b <= start or a <= start <= end <= b for a, b in nested):
            nested.append((start, end))
    totals = kernel_totals(_table(SPANS, [_op(i, *pair) for i, pair in enumerate(nested)]))
    assert totals["total_ns"].sum() == len({moment for pair in nested for moment in range(*pair)})
    assert totals["count"].sum() == len(nested)


def _all_reduces(
    durations: dict[int, list[int]], ranks: list[int], **more: Any
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ranks of a group enter at different times and leave together, every 1000 ns."""
    spans, rows = [], []
    for rank, of_rank in durations.items():
        for index, duration in enumerate(of_rank):
            end = 1000 * (index + 1)
            spans.append(_kernel(index, end - duration, end, rank=rank))
            rows.append(
                _collective(
                    index, spans[-1], sequence=index, group="g", group_ranks=members_text(ranks), **more
                )
            )
    return _table(COLLECTIVES, rows), _table(SPANS, spans)


def _totals(
    collectives: pl.DataFrame, spans: pl.DataFrame, workers: pl.DataFrame | None = None
) -> pl.DataFrame:
    members = split_members(match_collectives(collectives, spans).rows)
    return collective_totals(members, WORKERS.empty() if workers is None else workers)


def test_waiting_is_what_a_rank_spends_beyond_the_fastest_member():
    collectives, spans = _all_reduces({0: [100] * 4, 1: [40] * 4}, [0, 1], bytes_in=800)
    row = _totals(collectives, spans).row(0, named=True)
    assert (row["op"], row["bytes"], row["count"], row["matched"]) == ("all_reduce", 800, 8, 8)
    assert (row["total_ns"], row["wait_ns"], row["transfer_ns"]) == (560, 240, 320)
    # 800 bytes in 40 ns are 20 GB/s, times 2 (n - 1) / n = 1.
    assert row["busbw_gbps"] == pytest.approx(20.0)


def test_where_ranks_are_missing_collectives_of_unknown_ranks_are_not_split():
    collectives, spans = _all_reduces({0: [100] * 4, 1: [40] * 4}, [], bytes_in=800)
    matched = match_collectives(collectives, spans).rows
    assert split_members(matched)["wait_ns"].sum() == 240
    assert split_members(matched, missing=[2])["wait_ns"].null_count() == 8
    collectives, spans = _all_reduces({0: [100] * 4, 1: [40] * 4}, [0, 1], bytes_in=800)
    assert split_members(match_collectives(collectives, spans).rows, missing=[2])["wait_ns"].sum() == 240


@pytest.mark.parametrize(
    ("op", "factor"), [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 3.0), ("broadcast", 1.0)]
)
def test_bus_bandwidth_follows_the_convention_of_the_nccl_tests(op, factor):
    durations = {rank: [50] * 4 for rank in range(4)}
    collectives, spans = _all_reduces(durations, list(durations), op=op, bytes_in=1000)
    assert _totals(collectives, spans)["busbw_gbps"].to_list() == [pytest.approx(factor * 20.0)]


@pytest.mark.parametrize(("op", "into", "out"), [("all_gather", 500, 1000), ("reduce_scatter", 1000, 500)])
def test_size_of_a_gather_and_of_a_scatter_is_that_of_the_whole_buffer(op, into, out):
    collectives, spans = _all_reduces({0: [50], 1: [50]}, [0, 1], op=op, bytes_in=into, bytes_out=out)
    totals = _totals(collectives, spans)
    assert totals.select("bytes", "busbw_gbps").rows() == [(1000, 10.0)]  # 500 bytes in 50 ns, either way


def test_operations_within_a_host_are_distinguished_from_those_between_hosts():
    parts = [
        _all_reduces({rank: [duration] * 4 for rank in ranks}, ranks, bytes_in=800)
        for ranks, duration in (([0, 1], 40), ([1, 2], 80))
    ]
    collectives = parts[0][0], parts[1][0].with_columns(pl.lit("h").alias("group"), pl.col("span_id") + 9)
    spans = parts[0][1], parts[1][1].with_columns(pl.col("span_id") + 9, stream=pl.lit(9, pl.Int64))
    hosts = _table(WORKERS, [{"rank": rank, "host": "ab"[rank // 2]} for rank in range(3)])
    tables = pl.concat(collectives), pl.concat(spans)
    totals = _totals(*tables, hosts).sort("hosts")
    assert totals.select("hosts", "count", "busbw_gbps").rows() == [(1, 8, 20.0), (2, 8, 10.0)]
    assert _totals(*tables)["hosts"].to_list() == [None]


def test_without_sizes_there_is_no_bandwidth():
    collectives, spans = _all_reduces({0: [100] * 4, 1: [40] * 4}, [0, 1])
    row = _totals(collectives, spans).row(0, named=True)
    assert (row["bytes"], row["transfer_ns"], row["busbw_gbps"]) == (-1, 320, None)


def test_a_rank_whose_peers_left_no_record_does_not_know_its_waiting():
    collectives, spans = _all_reduces({0: [100] * 4}, [0, 1], bytes_in=800)
    row = _totals(collectives, spans).row(0, named=True)
    assert (row["total_ns"], row["matched"]) == (400, 0)
    assert (row["wait_ns"], row["transfer_ns"], row["busbw_gbps"]) == (None, None, None)


def test_a_run_without_collectives_has_an_empty_table_of_them():
    assert _totals(COLLECTIVES.empty(), SPANS.empty()).height == 0


def test_a_rank_without_steps_is_left_out_where_others_have_some_and_each_window_is_one_where_none_has():
    spans = [_op(1, 0, 100), _op(2, 0, 100, rank=1)]
    of_both = _split(spans, [], [_step(4, 0, 80)])
    assert of_both.select("rank", "step", "duration_ns").rows() == [(0, 4, 80)]
    of_none = _split(spans, [], [_step(4, 0, 80, rank=2)])  # which has no spans
    assert of_none.select("rank", "step", "duration_ns").rows() == [(0, 0, 100), (1, 0, 100)]


def _ahead(backlog: int) -> list[dict[str, Any]]:
    """A host that enqueues steps of 100 us, and a GPU that works on each for 300, or waits for 100 more.

    It had older work until `backlog`, in us; the gap of 100 us is in the second step.
    """
    spans, free = [], backlog
    for number in range(3):
        called = 1000 * (100 * number + 10)
        spans.append(_span(2 * number + 1, "runtime", called, called + 5000, correlation=number))
        begin = free + (100 if number == 1 else 0)
        free = begin + 300
        spans.append(_kernel(2 * number + 2, 1000 * begin, 1000 * free, correlation=number))
    return spans


def test_work_of_a_gpu_that_is_behind_its_host_counts_in_the_step_that_it_was_launched_in():
    steps = [_step(number, 100_000 * number, 100_000 * (number + 1)) for number in range(3)]
    frame = _split(_ahead(1000), [], steps)
    # Until 1,000 us the GPU has work that is not recorded; the host's three steps are over by 300.
    assert frame["duration_ns"].to_list() == [300_000, 400_000, 300_000]
    assert frame["compute_ns"].to_list() == [300_000] * 3
    assert frame["idle_ns"].to_list() == [0, 100_000, 0]


def test_a_gpu_that_has_no_older_work_begins_with_its_host():
    steps = [_step(number, 100_000 * number, 100_000 * (number + 1)) for number in range(3)]
    frame = _split(_ahead(20), [], steps)  # begins 5 us after its launch has returned
    assert frame["duration_ns"].to_list() == [320_000, 400_000, 300_000]
    assert frame["host_bound_ns"].to_list() == [20_000, 0, 0]
