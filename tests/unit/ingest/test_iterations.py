"""Iterations of a server's engine, from what a trace has of them."""

import polars as pl

from dpro.ingest.derived import find_iterations
from dpro.schema import ITERATIONS, SPANS, conform
from dpro.table import complete

COUNTS = ("kind", "prefill_tokens", "decode_tokens", "num_requests")


def spans(*rows):
    """Rows of (kind, name, start, duration) and further columns."""
    columns = ("kind", "name", "start_ns", "duration_ns")
    return complete(
        SPANS,
        pl.DataFrame([dict(zip(columns, row, strict=False)) | (row[4] if row[4:] else {}) for row in rows]),
    )


def found(*rows):
    return conform(ITERATIONS, find_iterations(spans(*rows)))


def test_ranges_of_vllm_say_tokens_and_requests():
    rows = found(
        ("annotation", "execute_context_2(300)_generation_5(5)", 0, 10),
        ("annotation", "execute_context_0(0)_generation_7(7)", 20, 10),
        ("annotation", "execute_context_1(64)_generation_0(0)", 40, 10),
        ("gpu_annotation", "execute_context_1(64)_generation_0(0)", 42, 10),
    )
    assert rows.select(COUNTS).rows() == [("mixed", 300, 5, 7), ("decode", 0, 7, 7), ("prefill", 64, 0, 1)]


def test_ranges_of_vllm_that_say_more_than_tokens_are_read():
    rows = found(
        ("annotation", "execute_context_1(888_sq888_sk888)_generation_0(0)", 0, 10),
        ("annotation", "execute_context_0(0)_generation_3(3_sk2048)", 20, 10),
    )
    assert rows.select(COUNTS).rows() == [("prefill", 888, 0, 1), ("decode", 0, 3, 3)]


def test_older_ranges_of_vllm_say_requests_alone():
    rows = found(
        ("annotation", "execute_new_2_cached_0", 0, 10), ("annotation", "execute_new_0_cached_4", 20, 10)
    )
    assert rows.select(COUNTS).rows() == [("prefill", -1, -1, 2), ("decode", -1, -1, 4)]


def test_any_loop_can_say_what_its_batch_is():
    rows = found(("annotation", "dpro::iteration prefill=12 decode=3 requests=4 context=99", 0, 10))
    assert rows.select(*COUNTS, "context_tokens", "waiting").rows() == [("mixed", 12, 3, 4, 99, -1)]


def test_python_calls_of_sglangs_runner_say_the_kind():
    runner = "sglang/srt/model_executor/model_runner.py(812): forward_extend"
    replay = "sglang/srt/model_executor/cuda_graph_runner.py(7): replay"
    other = "sglang/srt/layers/attention/flash_backend.py(7): forward_decode"
    rows = found(("python", runner, 0, 10), ("python", other, 2, 3), ("python", replay, 20, 10))
    assert rows["kind"].to_list() == ["prefill", "decode"]


def test_an_iteration_lasts_until_its_gpu_work_is_done_and_the_next_begins_then():
    rows = found(
        ("annotation", "execute_context_0(0)_generation_1(1)", 0, 10),
        ("annotation", "execute_context_0(0)_generation_1(1)", 20, 10),
        ("runtime", "cudaLaunchKernel", 5, 1, {"correlation": 7}),
        ("kernel", "gemm", 12, 23, {"correlation": 7}),
    )
    assert rows.select("start_ns", "duration_ns").rows() == [(0, 35), (35, 0)]


def test_a_cuda_graph_with_a_whole_model_decodes_and_a_piece_is_no_iteration():
    layers = [("kernel", "flash_fwd_splitkv", 10 + n, 1, {"correlation": 7}) for n in range(8)]
    piece = [("kernel", "flash_fwd_splitkv", 40 + n, 1, {"correlation": 8}) for n in range(2)]
    rows = found(
        ("runtime", "cudaGraphLaunch", 5, 1, {"correlation": 7}),
        ("runtime", "cudaGraphLaunch", 30, 1, {"correlation": 8}),
        *layers,
        *piece,
    )
    assert rows.select("kind", "start_ns", "duration_ns", "source").rows() == [
        ("decode", 5, 13, "CUDA graph")
    ]


def test_shapes_of_embeddings_say_the_tokens_of_a_padded_batch():
    def embedding(start, shape):
        return ("cpu_op", "aten::embedding", start, 2, {"shapes": f"[[32000, 64], {shape}]"})

    rows = found(embedding(0, [2, 50]), embedding(10, [3, 1]), embedding(20, [77]))
    assert rows.select(COUNTS).rows() == [
        ("prefill", 100, 0, 2),
        ("decode", 0, 3, 3),
        ("unknown", -1, -1, -1),
    ]
    assert rows["duration_ns"].to_list() == [10, 10, 2]


def test_a_model_that_is_always_given_many_tokens_of_each_request_is_no_server_of_tokens():
    def embedding(start):
        return ("cpu_op", "aten::embedding", start, 2, {"shapes": "[[30522, 64], [1, 141]]"})

    assert found(embedding(0), embedding(10), embedding(20)).is_empty()


def test_a_trace_of_training_has_none():
    embedding = ("cpu_op", "aten::embedding", 0, 2, {"shapes": "[[32000, 64], [2, 50]]"})
    backward = ("cpu_op", "MulBackward0", 5, 2, {"forward_thread": 1})
    assert found(embedding, embedding, backward).is_empty()
    assert found(embedding, embedding, ("annotation", "Optimizer.step#SGD.step", 9, 1)).is_empty()
