"""A hand-written trace of a GPU that trains a stack of layers, one of eight that share each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.traces import Event, annotation, cpu_op, kernel, launch, write

LAYERS, TOKENS, HIDDEN, TENSOR = 4, 4096, 4096, 8
HEADS, KV_HEADS, SIZE, WIDE, ROWS = 32, 8, 128, 14336, 128256
MAIN, BACKWARD = 11, 12
GEMM, FLASH = "nvjet_tst_128x256_64x4_bz_TNT", "flash_fwd_kernel"
GROUP = {
    "Collective name": "allreduce", "In msg nelems": TOKENS * HIDDEN, "Out msg nelems": TOKENS * HIDDEN,
    "dtype": "BFloat16", "Group size": TENSOR, "Process Group Name": "1",
    "Process Group Ranks": str(list(range(TENSOR))),
}  # fmt: skip


class _Trace:
    """Events of a host that runs ahead of its GPU."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.host, self.gpu, self.number = 0.0, 0.0, 0

    def work(self, name: str, shapes: Any, what: str, us: float, backward: bool = False, **more: Any) -> None:
        tid = BACKWARD if backward else MAIN
        self.number += 1
        if backward:
            around = {"Fwd thread id": 1, "Sequence number": self.number}
            self.events.append(cpu_op(f"autograd::engine: {name}", self.host, 8, tid=tid, **around))
        self.events.append(cpu_op(name, self.host + 1, 6, tid=tid, **{"Input Dims": shapes}))
        self.events.append(launch(self.host + 2, 3, self.number, tid=tid))
        start = max(self.gpu, self.host + 6)
        self.events.append(kernel(what, start, us, self.number, **more))
        self.host, self.gpu = self.host + 9, start + us + 1

    def product(self, rows: int, inner: int, columns: int, backward: bool = False) -> None:
        us = 2e-6 * rows * inner * columns / 500
        self.work("aten::mm", [[rows, inner], [inner, columns]], GEMM, us, backward)

    def linear_backward(self, inner: int, columns: int) -> None:
        self.product(TOKENS, columns, inner, True)
        self.product(inner, TOKENS, columns, True)

    def reduced(self, backward: bool) -> None:
        self.work("c10d::allreduce_", [], "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 250, backward, **GROUP)


def stack_trace(folder: Path, steps: int = 3) -> Path:
    """Rank 0 of eight."""
    queries, keys, wide = HEADS // TENSOR, KV_HEADS // TENSOR, WIDE // TENSOR
    qkv, out = (queries + 2 * keys) * SIZE, queries * SIZE
    attended = [[1, TOKENS, heads, SIZE] for heads in (queries, keys, keys)]
    trace = _Trace()
    for step in range(steps):
        begun = trace.host
        trace.work("aten::embedding", [[ROWS // TENSOR, HIDDEN], [1, TOKENS]], "indexSelect", 30)
        for _ in range(LAYERS):
            trace.product(TOKENS, HIDDEN, qkv)
            trace.work("aten::_flash_attention_forward", attended, FLASH, 90)
            trace.product(TOKENS, out, HIDDEN)
            trace.reduced(False)
            trace.product(TOKENS, HIDDEN, 2 * wide)
            trace.work("aten::silu", [[TOKENS, wide]], "vectorized_elementwise_kernel", 20)
            trace.product(TOKENS, wide, HIDDEN)
            trace.reduced(False)
        trace.product(TOKENS, HIDDEN, ROWS // TENSOR)
        trace.linear_backward(HIDDEN, ROWS // TENSOR)
        for _ in range(LAYERS):
            trace.linear_backward(wide, HIDDEN)
            trace.work("aten::silu_backward", [[TOKENS, wide]], "vectorized_elementwise_kernel", 40, True)
            trace.linear_backward(HIDDEN, 2 * wide)
            trace.reduced(True)
            trace.linear_backward(out, HIDDEN)
            trace.work("aten::_flash_attention_backward", attended, "flash_bwd_kernel", 220, True)
            trace.linear_backward(HIDDEN, qkv)
            trace.reduced(True)
        trace.work("aten::_fused_adam_", [], "multi_tensor_apply_kernel", 600)
        trace.events.append(launch(trace.host, trace.gpu - trace.host, -1, "cudaDeviceSynchronize"))
        trace.host = trace.gpu + 5
        trace.events.append(annotation(f"ProfilerStep#{step}", begun, trace.host - begun))
    facts = {
        "distributedInfo": {"rank": 0, "world_size": TENSOR, "backend": "nccl"},
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "host_name": "node0",
    }
    return write(folder / "rank0.json.gz", trace.events, **facts)
