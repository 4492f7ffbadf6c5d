"""The kind of span that an event of a Kineto trace is, by its category.

In: a category, as profilers since 2020 spell it. Out: the kind of `spans`, or that it is none. Accelerators
name theirs after themselves (`mtia_runtime`, `privateuse1_driver`): the ending decides.
"""

from __future__ import annotations

from dpro.schema import GPU_WORK_KINDS, SPAN_KINDS

SYNC = "sync"  # events that explain a runtime call; they are no spans
KINDS = (*SPAN_KINDS, SYNC)
GPU_KINDS = (*GPU_WORK_KINDS, "gpu_annotation")

_KINDS = {
    "cpu_op": "cpu_op",
    "operator": "cpu_op",
    "runtime": "runtime",
    "driver": "runtime",
    "kernel": "kernel",
    "hpu_op": "kernel",
    "mtia_ccp_events": "kernel",
    "memcpy": "memcpy",
    "memset": "memset",
    "user_annotation": "annotation",
    "python_function": "python",
    "overhead": "overhead",
}
_ENDINGS = {
    "_runtime": "runtime",
    "_driver": "runtime",
    "_kernel": "kernel",
    "_memcpy": "memcpy",
    "_memset": "memset",
    "_user_annotation": "gpu_annotation",
    "_sync": SYNC,
}


def kind_of(category: str | None) -> str:
    """The kind of an event, or `SYNC`; empty where it is neither."""
    lower = (category or "").lower()
    known = _KINDS.get(lower)
    return known or next((kind for ending, kind in _ENDINGS.items() if lower.endswith(ending)), "")


def is_frame(category: str | None) -> bool:
    """Whether an event is only the profiler's own frame around the recording."""
    return (category or "").lower() == "trace"
