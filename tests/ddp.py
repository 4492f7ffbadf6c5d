"""A DDP job written down span by span: gradients ready one after the other, reduced in buckets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from dpro.members import members_text
from tests.builders import MAIN, US, WORKER, TinyRun

ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
KB = 1024


def ddp_job(
    sizes_kb: tuple[int, ...] = (1024, 1024, 1024, 1024),
    closes: tuple[int, ...] = (3,),
    *,
    num_ranks: int = 2,
    num_steps: int = 3,
    layer: float = 1000,
    latency: float = 0,
    us_per_kb: float = 4.0,
    call: float = 10,
    copy_out: float = 50,
    hook: str = "",
    late: float = 0,
) -> TinyRun:
    """Forward and backward of as many layers as gradients; one link, on which reductions follow each other.

    Args:
        sizes_kb: sizes of gradients in the order in which they are ready.
        closes: the last gradient of each bucket.
        num_ranks, num_steps: how many.
        layer: us, forward and backward, each.
        latency, us_per_kb: what a reduction costs.
        call: us, to call one.
        copy_out: us, of all results after the last reduction.
        hook: communication hook that is recorded.
        late: us by which the last rank begins its backward later than the others.
    """
    run, count = TinyRun(), len(sizes_kb)
    origin: dict[str, Any]
    firsts = [0, *(close + 1 for close in closes[:-1])]
    begin = 0.0
    for step in range(num_steps):
        forward = begin + layer * len(sizes_kb)
        moved, calls = 0.0, dict.fromkeys(range(num_ranks), 0.0)
        starts = {rank: forward + late * (rank == num_ranks - 1) for rank in range(num_ranks)}
        ready = dict(starts)
        plan: list[tuple[int, dict[int, float]]] = []
        for index in range(len(sizes_kb)):
            for rank in range(num_ranks):
                ready[rank] += layer
                origin = {"sequence_number": _sequence(step, count - 1 - index), "forward_thread": 1}
                run.op("LinearBackward", ready[rank] - layer, ready[rank] - 5, rank, **origin)
                end = ready[rank] + (call + 2 if index in closes else 0)
                run.op(ACCUMULATE, ready[rank] - 5, end, rank)
                if index in closes:
                    calls[rank] = ready[rank]
                    ready[rank] = end
            if index in closes:
                plan.append((index, dict(calls)))
        ends = []
        for bucket, (index, called) in enumerate(plan):
            size = sum(sizes_kb[firsts[bucket] : index + 1])
            together = max(called.values()) + call
            moved = max(together + latency, moved) + us_per_kb * size
            ends.append(moved)
            for rank in range(num_ranks):
                facts = {"group": "dp", "group_ranks": members_text(range(num_ranks)), "dtype": "float32"}
                facts |= {"bytes_in": size * KB, "bytes_out": size * KB}
                op = run.op("c10d::allreduce_", called[rank], called[rank] + call, rank)
                thread = WORKER + bucket % 2
                begun = max(called[rank] + call, ends[bucket - 2] if bucket > 1 else 0)  # two workers
                ran = run.mark("gloo:all_reduce", begun, moved, rank, tid=thread)
                run.member(ran, launched_by=op, sequence=step * len(closes) + bucket, **facts)
        done = max([*ends, *ready.values()]) + copy_out
        for rank in range(num_ranks):
            for index in range(count):
                at, facts = begin + layer * index, {"sequence_number": _sequence(step, index)}
                run.mark(f"nn.Module: layers.{index}", at, at + layer, rank)
                run.op("LinearForward", at, at + layer, rank, **facts)
            run.mark("dpro::backward", forward, done, rank, tid=MAIN)
            run.op("aten::copy_", done - copy_out, done, rank)
            run.mark("Optimizer.step#SGD.step", done, done + 100, rank)
            run.op("aten::add_", done + 1, done + 99, rank)
            run.step(step, begin, done + 100, rank)
        begin = done + 100
    _record_buckets(run, sizes_kb, closes, num_ranks, hook)
    return run


def _sequence(step: int, layer: int) -> int:
    """Autograd's number of a layer's forward pass."""
    return 100 * step + layer


def _record_buckets(
    run: TinyRun, sizes_kb: tuple[int, ...], closes: tuple[int, ...], num_ranks: int, hook: str
) -> None:
    count = len(sizes_kb)
    for rank in range(num_ranks):
        for bucket, (before, last) in enumerate(pairwise([-1, *closes])):
            within = range(before + 1, last + 1)
            run.rows["buckets"].append(
                {
                    "rank": rank,
                    "bucket": bucket,
                    "bytes": KB * sum(sizes_kb[i] for i in within),
                    "parameters": [count - 1 - i for i in within],
                    "names": [f"layer{count - 1 - i}" for i in within],
                    "parameter_bytes": [KB * sizes_kb[i] for i in within],
                    "shapes": [[16, 16 * sizes_kb[i]] for i in within],
                    "hook": hook,
                    "source": "DDP logging data",
                }
            )


__all__ = ["ACCUMULATE", "KB", "US", "ddp_job", "gpu_ddp_job"]


def gpu_ddp_job(closes: tuple[int, ...] = (3,), *, kernel: float = 1000, us_per_kb: float = 1.0) -> TinyRun:
    """Four gradients of 1 MB on GPUs: all is launched at once, each gradient is one kernel, NCCL reduces."""
    run = TinyRun()
    begin = 0.0
    for step in range(3):
        forward_end = begin + 20 + kernel
        ready = [forward_end + kernel * (index + 1) for index in range(4)]
        ends: list[float] = []
        for close in closes:
            size = KB * (close - ([-1, *closes][len(ends)]))
            ends.append(max([ready[close], *ends[-1:]]) + us_per_kb * size)
        for rank in (0, 1):
            number = iter(range(100 * step, 100 * step + 99))
            at, bucket = begin, 0
            correlation = next(number)
            run.op("forward", at, at + 14, rank, sequence_number=step)
            run.call(at, at + 10, correlation, rank)
            run.kernel("forward_gemm", begin + 20, forward_end, correlation, rank)
            at += 14
            for index in range(4):
                correlation = next(number)
                run.op("backward", at, at + 10, rank, sequence_number=step, forward_thread=1)
                run.call(at, at + 10, correlation, rank)
                run.kernel("backward_gemm", ready[index] - kernel, ready[index], correlation, rank)
                at += 10
                closing = index in closes
                run.op(ACCUMULATE, at, at + (24 if closing else 4), rank)
                if closing:
                    size = KB * KB * (index - [-1, *closes][bucket])
                    run.op("c10d::allreduce_", at + 2, at + 22, rank)
                    correlation = next(number)
                    run.call(at + 4, at + 20, correlation, rank)
                    facts = {"group": "dp", "group_ranks": "0,1", "dtype": "float32", "bytes_in": size}
                    begun = max([ready[index], *ends[bucket - 1 : bucket]])
                    run.nccl(
                        begun,
                        ends[bucket],
                        correlation,
                        rank,
                        sequence=8 * step + bucket,
                        bytes_out=size,
                        **facts,
                    )
                    bucket += 1
                at += 24 if closing else 4
            run.call(at, at + 2, next(number), rank, name="cudaStreamWaitEvent")
            correlation = next(number)
            run.call(at + 2, at + 10, correlation, rank)
            run.kernel("adam", ends[-1] + 2, ends[-1] + 52, correlation, rank)
            run.call(at + 10, ends[-1] + 56, next(number), rank, name="cudaDeviceSynchronize")
            run.op("log", ends[-1] + 56, ends[-1] + 70, rank)
            run.step(step, begin, ends[-1] + 70, rank)
        begin = ends[-1] + 70
    _record_buckets(run, (KB,) * 4, closes, 2, "")
    return run
