import polars as pl

from dpro.collectors.convert.windows import KERNEL, merge_window
from dpro.schema import COLLECTIVES, SPANS, conform

GLOO = "kineto gloo range"


def spans(*rows: tuple[int, int, int]) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema=["span_id", "start_ns", "duration_ns"], orient="row")
    return conform(SPANS, frame)


def seen(*rows: dict[str, object]) -> pl.DataFrame:
    base = {"op": "all_reduce", "window": 0, "source": GLOO, "start_ns": 0, "duration_ns": 5}
    return conform(COLLECTIVES, pl.DataFrame([base | row for row in rows]))


def entries(*rows: dict[str, object]) -> pl.DataFrame:
    base = {"op": "all_reduce", "window": -1, "group": "0 default_pg", "group_ranks": "0,1", "start_ns": -1}
    base |= {"bytes_in": 64, "bytes_out": 64, "dtype": "float32", "source": "flight recorder"}
    return conform(COLLECTIVES, pl.DataFrame([base | row for row in rows]))


def test_entry_belongs_to_the_call_it_was_made_in():
    calls = spans((1, 1_000, 100), (2, 10_000_000, 100))
    window = seen(
        {"collective_id": 101, "launch_span_id": 1, "enqueued_ns": 1_000},
        {"collective_id": 102, "launch_span_id": 2, "enqueued_ns": 10_000_000},
    )
    known = entries(
        {"collective_id": 4, "sequence": 2, "enqueued_ns": 500},  # before the window
        {"collective_id": 6, "sequence": 3, "enqueued_ns": 1_040},
        {"collective_id": 8, "sequence": 4, "enqueued_ns": 5_000_000},  # no span: its call was not seen
        {"collective_id": 10, "sequence": 5, "enqueued_ns": 10_000_040},
    )
    merged = merge_window(window, calls, known).sort("collective_id")
    assert merged.columns == window.columns
    assert merged["collective_id"].to_list() == [6, 10]
    assert merged["sequence"].to_list() == [3, 5]
    assert merged["group_ranks"].to_list() == ["0,1", "0,1"]
    assert merged["bytes_in"].to_list() == [64, 64]
    assert merged["enqueued_ns"].to_list() == [1_000, 10_000_000]


def test_entry_of_another_operation_is_not_taken():
    window = seen({"collective_id": 101, "launch_span_id": 1, "enqueued_ns": 1_000})
    known = entries({"collective_id": 6, "sequence": 3, "enqueued_ns": 1_040, "op": "broadcast"})
    merged = merge_window(window, spans((1, 1_000, 100)), known)
    assert merged.select("collective_id", "sequence", "group").row(0) == (101, -1, "")


def test_reduce_scatter_that_gloo_runs_as_an_all_reduce_is_known_by_that_one_and_brings_a_part():
    base = {"launch_span_id": 1, "enqueued_ns": 1_000}
    window = seen(base | {"collective_id": 101, "op": "reduce_scatter"})
    known = entries({"collective_id": 6, "sequence": 3, "enqueued_ns": 1_040, "op": "all_reduce"})
    merged = merge_window(window, spans((1, 1_000, 100)), known)
    row = merged.select("collective_id", "sequence", "group", "op", "bytes_in", "bytes_out").row(0)
    assert row == (6, 3, "0 default_pg", "reduce_scatter", 64, 32)


def test_kernel_takes_the_last_entry_before_its_launch():
    window = seen(
        {"collective_id": 101, "source": KERNEL, "enqueued_ns": 1_060},
        {"collective_id": 102, "source": KERNEL, "enqueued_ns": 2_060},
    )
    known = entries(
        {"collective_id": 7, "sequence": 3, "enqueued_ns": 1_000},
        {"collective_id": 9, "sequence": 4, "enqueued_ns": 2_000},
    )
    merged = merge_window(window, spans((1, 0, 1)), known).sort("enqueued_ns")
    assert merged["collective_id"].to_list() == [7, 9]


def test_messages_that_one_kernel_carries_take_an_entry_each_in_order():
    """As of `batch_isend_irecv`: two sends and two receives, then the same again."""
    window = seen(
        *(
            {"collective_id": 101 + n, "source": KERNEL, "enqueued_ns": 1_060 if n < 4 else 2_060, "op": op}
            for n, op in enumerate(["send", "recv", "send", "recv"] * 2)
        )
    )
    earlier = {"collective_id": 3, "op": "send", "enqueued_ns": 400, "peer": 9}
    known = entries(
        earlier,
        *(
            {"collective_id": 11 + 2 * n, "op": op, "peer": n, "enqueued_ns": 1_000 * (1 + n // 4) + n}
            for n, op in enumerate(["send", "recv", "send", "recv"] * 2)
        ),
        {"collective_id": 31, "op": "nccl:coalesced", "peer": -1, "enqueued_ns": 1_050},
    )
    merged = merge_window(window, spans((1, 0, 1)), known).sort("collective_id")
    assert merged["collective_id"].to_list() == [11 + 2 * n for n in range(8)]
    assert merged["peer"].to_list() == list(range(8))


def test_what_the_window_knew_stays_where_the_flight_recorder_knows_nothing():
    window = seen(
        {"collective_id": 101, "launch_span_id": 1, "enqueued_ns": 0, "dtype": "bfloat16", "bytes_in": 8}
    )
    known = entries({"collective_id": 6, "enqueued_ns": 50, "dtype": "", "bytes_in": -1, "sequence": 1})
    merged = merge_window(window, spans((1, 0, 100)), known)
    assert merged.select("collective_id", "dtype", "bytes_in", "sequence").row(0) == (6, "bfloat16", 8, 1)


def test_one_entry_is_given_to_one_row():
    window = seen({"collective_id": 101, "launch_span_id": 1, "enqueued_ns": 0})
    known = entries({"collective_id": 6, "enqueued_ns": 10}, {"collective_id": 8, "enqueued_ns": 20})
    merged = merge_window(window, spans((1, 0, 100)), known)
    assert merged["collective_id"].to_list() == [6]


def test_message_that_was_noted_long_after_its_call_belongs_to_it_and_not_to_the_next():
    window = seen(
        {"collective_id": 101, "launch_span_id": 1, "enqueued_ns": 1_000, "op": "send"},
        {"collective_id": 102, "launch_span_id": 2, "enqueued_ns": 90_000_000, "op": "send"},
    )
    calls = spans((1, 1_000, 100), (2, 90_000_000, 100))
    known = entries(
        {"collective_id": 6, "sequence": 3, "enqueued_ns": 60_000_000, "op": "send", "peer": 1},
        {"collective_id": 8, "sequence": 4, "enqueued_ns": 90_000_200, "op": "send", "peer": 1},
    )
    merged = merge_window(window, calls, known).sort("enqueued_ns")
    assert merged.select("sequence", "peer").rows() == [(3, 1), (4, 1)]
