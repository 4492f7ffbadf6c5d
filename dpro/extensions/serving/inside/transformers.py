"""Iterations and requests of continuous batching of Hugging Face transformers.

Hooks its batch processor, once the job itself has imported it. A batch is known when its tensors are
prepared, and has ended when its requests have its tokens. Where the next batch is prepared meanwhile
(`use_async_batching`), batches end in the order in which they were prepared. A request that is moved out of
the KV cache, to the CPU or to be computed again, has not ended, though the scheduler is done with it for now.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from _dpro_inside_the_job.patching import followed_by, preceded_by, wrap
from _dpro_inside_the_job.recorder import Recorder

from .served import Served, ServedBatch

PACKAGE = "transformers.generation.continuous_batching"
MODULES = ("continuous_api", "input_outputs", "scheduler")
FINISHED = "FINISHED"


class TransformersHooks:
    """Hooks on the batch processors of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._served = Served(recorder)
        self._set = False
        self._on_fork()
        recorder.listen("fork", self._on_fork)

    def _on_fork(self) -> None:
        self._begun_ns = 0
        self._preparing: Any = None  # the processor that makes a batch at this moment
        self._offloading = self._refused = False
        self._evicted = 0
        self._in_flight: deque[tuple[int, ServedBatch, list[Any]]] = deque()

    def look(self, *_: Any) -> None:
        """Set the hooks once the job has imported all that they need."""
        if self._set:
            return
        api, outputs, scheduling = (sys.modules.get(f"{PACKAGE}.{module}") for module in MODULES)
        processor = getattr(api, "ContinuousBatchProcessor", None)
        tensors = getattr(outputs, "ContinuousBatchingIOs", None)
        scheduler = getattr(scheduling, "Scheduler", None)
        call = self._recorder.call
        wanted = (
            (processor, "prepare_next_batch", self._around_prepare),
            (processor, "update_batch", followed_by(call, self._on_updated)),
            (tensors, "prepare_batch_tensors", followed_by(call, self._on_prepared)),
            (scheduler, "finish_request", preceded_by(call, self._on_finish)),
            (scheduler, "clear_cancelled_requests", followed_by(call, self._on_cancelled)),
        )
        if all(hasattr(owner, name) for owner, name, _ in wanted):
            self._set = True
            for owner, name, around in wanted:
                wrap(owner, name, around)
            self._look_at_cache(scheduler)

    def _look_at_cache(self, scheduler: Any) -> None:
        """Install hooks on requests that wait for blocks or lose them, where this version has such hooks."""
        manager = getattr(sys.modules.get(f"{PACKAGE}.offloading_manager"), "OffloadingManager", None)
        call = self._recorder.call
        wanted = (
            (scheduler, "_process_candidates", followed_by(call, self._on_candidates)),
            (manager, "offload_requests", self._around_offload),
        )
        if all(hasattr(owner, name) for owner, name, _ in wanted):
            self._served.knows_evictions = True
            for owner, name, around in wanted:
                wrap(owner, name, around)
            if hasattr(scheduler, "_try_to_meet_safety_margin"):
                wrap(scheduler, "_try_to_meet_safety_margin", followed_by(call, self._on_margin))

    def _on_margin(self, result: Any, *_: Any) -> None:
        self._refused |= result is False  # so few blocks are free that no prompt is begun

    def _on_candidates(self, result: Any, *_: Any) -> None:
        self._refused |= isinstance(result, tuple) and result[1:2] == (True,)

    def _around_offload(self, original: Any) -> Any:
        def offload_requests(manager: Any, *args: Any, **kwargs: Any) -> Any:
            self._offloading = True
            try:
                return original(manager, *args, **kwargs)
            finally:
                self._offloading = False

        return offload_requests

    def _around_prepare(self, original: Any) -> Any:
        def prepare_next_batch(processor: Any, *args: Any, **kwargs: Any) -> Any:
            self._begun_ns, self._preparing, self._refused = time.time_ns(), processor, False
            try:
                return original(processor, *args, **kwargs)
            finally:
                self._preparing = None

        return prepare_next_batch

    def _on_prepared(self, _result: Any, _tensors: Any, requests: Sequence[Any], *_: Any) -> None:
        """Record a batch; positions are those after it, so prompts are judged by those before."""
        lengths = [request.query_length for request in requests]
        prompts = [
            request
            for request in requests
            if request.state.position_offset - request.query_length < len(request.state.initial_tokens)
        ]
        processor = self._preparing
        drives = getattr(processor, "input_queue", None) is not None  # one of the ranks that share the work
        for request in prompts:
            if drives and not self._served.knows(request.state.request_id):
                self._meet(
                    request.state, self._begun_ns, request.state.position_offset - request.query_length
                )
        prefill = sum(request.query_length for request in prompts)
        context = sum(request.state.position_offset for request in requests)
        waiting = len(processor.scheduler.waiting_requests) if processor is not None else -1
        for request in requests if self._served.evicted else ():
            self._served.on_resumed(request.state.request_id, self._begun_ns)
        blocks = (
            (waiting if self._refused else 0, self._evicted) if self._served.knows_evictions else (-1, -1)
        )
        self._evicted = 0
        batch = ServedBatch(prefill, sum(lengths) - prefill, len(requests), context, waiting, *blocks)
        first = [request.state.request_id for request in prompts if request.has_new_token]
        self._in_flight.append((self._begun_ns, batch, first))

    def _meet(self, state: Any, scheduled_ns: int, cached_tokens: int) -> None:
        arrival_ns = time.time_ns() - int((time.perf_counter() - state.created_time) * 1e9)
        own_tokens = getattr(state, "_true_initial_tokens", 0) or len(state.initial_tokens)
        self._served.on_request(state.request_id, arrival_ns, scheduled_ns, own_tokens, cached_tokens)

    def _on_updated(self, *_: Any) -> None:
        if not self._in_flight:
            return
        start_ns, batch, first = self._in_flight.popleft()
        end_ns = time.time_ns()
        for name in first:
            self._served.on_first_token(name, end_ns)
        self._served.on_iteration(start_ns, end_ns, batch)

    def _on_finish(self, scheduler: Any, request_id: Any, *_: Any) -> None:
        state = scheduler.active_requests.get(request_id)
        if self._offloading:
            self._evicted += 1
            self._served.on_evicted(request_id)
        elif state is not None:
            self._on_end(state, "finished" if state.status.name == FINISHED else "aborted")

    def _on_cancelled(self, states: Sequence[Any] | None, *_: Any) -> None:
        for state in states or ():
            if not self._served.knows(state.request_id):
                self._meet(state, -1, -1)
            self._on_end(state, "aborted")

    def _on_end(self, state: Any, outcome: str) -> None:
        own_tokens = getattr(state, "_true_initial_tokens", 0)
        reset = (
            len(state.initial_tokens) - own_tokens if own_tokens else 0
        )  # made before it was started again
        made = len(state.generated_tokens) + reset
        self._served.on_request_end(state.request_id, time.time_ns(), made, outcome)


def install(recorder: Recorder) -> None:
    """Record what continuous batching of transformers does."""
    hooks = TransformersHooks(recorder)
    for module in MODULES:
        recorder.on_import(f"{PACKAGE}.{module}", hooks.look)
