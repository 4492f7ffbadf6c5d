"""Iterations and requests of vLLM's V1 engine, and steps of its workers.

Hooks its scheduler, once the job itself has imported it. A batch is known when it has been scheduled, and has
ended when the scheduler has its tokens; of batches scheduled ahead, and of stages of a pipeline, the oldest
ends first. Workers in separate processes end a step with each batch that they are given.

A request waits for the KV cache where the cache manager had no blocks for some request in that batch.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from _dpro_inside_the_job.patching import followed_by, wrap
from _dpro_inside_the_job.recorder import Recorder

from .served import Served, ServedBatch

SCHEDULER = "vllm.v1.core.sched.scheduler"
WORKER = "vllm.v1.worker.gpu_worker"  # the CPU's worker derives from it
QUEUES = ("waiting", "kv_holding_waiting", "skipped_waiting")  # of a scheduler; which, depends on the version
ABORTED = ("abort", "error")


class Scheduled(NamedTuple):
    """A batch in work: the scheduler's output, when scheduling began, and what is recorded of it."""

    output: Any
    start_ns: int
    batch: ServedBatch


class VllmHooks:
    """Hooks on the scheduler and the worker of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._served = Served(recorder)
        self._knows_blocks = False
        self._on_fork()
        recorder.listen("fork", self._on_fork)

    def _on_fork(self) -> None:
        self._in_flight: deque[Scheduled] = deque()
        self._known: dict[str, Any] = {}  # requests that have run, until they end
        self._without_token: set[str] = set()
        self._evicted = 0
        self._refused = False
        self._begun = False

    def on_scheduler(self, module: Any) -> None:
        """Set the hooks of the scheduler; those of batches all or, with an error, none."""
        scheduler = getattr(module, "Scheduler", None)
        wanted = (
            ("schedule", self._around_schedule),
            ("update_from_output", followed_by(self._recorder.call, self._on_updated)),
            ("finish_requests", followed_by(self._recorder.call, self._on_finished)),
        )
        missing = [name for name, _ in wanted if not hasattr(scheduler, name)]
        if missing:
            raise LookupError(f"vLLM's scheduler has no {missing[0]}: its iterations are not recorded")
        for name, around in wanted:
            wrap(scheduler, name, around)
        if hasattr(scheduler, "_preempt_request"):
            self._served.knows_evictions = True
            wrap(scheduler, "_preempt_request", followed_by(self._recorder.call, self._on_preempted))
        manager = getattr(module, "KVCacheManager", None)
        if hasattr(manager, "allocate_slots"):
            self._knows_blocks = True
            wrap(manager, "allocate_slots", followed_by(self._recorder.call, self._on_allocated))

    def on_worker(self, module: Any) -> None:
        """Make each batch of a worker end a step, where its process has no scheduler."""
        worker = getattr(module, "Worker", None)
        if not hasattr(worker, "execute_model"):
            raise LookupError("vLLM's worker has no execute_model: its model calls count as steps")
        wrap(worker, "execute_model", followed_by(self._recorder.call, self._on_executed))

    def _around_schedule(self, original: Any) -> Any:
        def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns, self._evicted, self._refused = time.time_ns(), 0, False
            output = original(scheduler, *args, **kwargs)
            self._recorder.call(self._on_scheduled, scheduler, output, start_ns)
            return output

        return schedule

    def _on_allocated(self, blocks: Any, *_: Any) -> None:
        self._refused |= blocks is None

    def _on_executed(self, _result: Any, _worker: Any, output: Any, *_: Any) -> None:
        if not self._begun and getattr(output, "total_num_scheduled_tokens", False):
            self._served.end_step(time.time_ns())

    def _on_scheduled(self, scheduler: Any, output: Any, start_ns: int) -> None:
        total = output.total_num_scheduled_tokens
        if not total:
            return
        if not self._begun:
            self._begun = True
            parallel = scheduler.vllm_config.parallel_config
            replica = int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))
            self._served.on_engine(replica, replica * parallel.world_size)
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        for request in new:
            self._meet(scheduler.requests[request.req_id], start_ns, request.num_computed_tokens)
        for name in getattr(cached, "resumed_req_ids", ()):
            self._served.on_resumed(name, start_ns)
        prefill = _prompt_tokens(output)
        context = (
            total + sum(cached.num_computed_tokens) + sum(request.num_computed_tokens for request in new)
        )
        waiting = sum(len(getattr(scheduler, queue, ())) for queue in QUEUES)
        batch = ServedBatch(
            prefill, total - prefill, len(output.num_scheduled_tokens), context, waiting,
            (waiting if self._refused else 0) if self._knows_blocks else -1,
            self._evicted if self._served.knows_evictions else -1,
        )  # fmt: skip
        self._in_flight.append(Scheduled(output, start_ns, batch))

    def _meet(self, request: Any, scheduled_ns: int, cached_tokens: int) -> None:
        arrival_ns = round(request.arrival_time * 1e9)
        name = request.request_id
        if name not in self._known:
            self._known[name] = request
            self._without_token.add(name)
            self._served.on_request(name, arrival_ns, scheduled_ns, request.num_prompt_tokens, cached_tokens)

    def _on_updated(self, results: Any, _scheduler: Any, output: Any, *_: Any) -> None:
        done = next((scheduled for scheduled in self._in_flight if scheduled.output is output), None)
        if done is None:
            return  # an empty batch
        while self._in_flight.popleft() is not done:
            pass  # it has failed: its tokens never came
        end_ns = time.time_ns()
        waiting = self._without_token
        for result in results.values():
            for reply in result.outputs:
                if waiting and reply.new_token_ids and reply.request_id in waiting:
                    waiting.discard(reply.request_id)
                    self._served.on_first_token(reply.request_id, end_ns)
                if reply.finish_reason is not None:
                    self._on_end(reply.request_id, end_ns, str(reply.finish_reason))
        self._served.on_iteration(done.start_ns, end_ns, done.batch)

    def _on_end(self, name: str, end_ns: int, reason: str) -> None:
        request = self._known.pop(name, None)
        if request is not None:
            self._without_token.discard(name)
            outcome = "aborted" if reason in ABORTED else "finished"
            self._served.on_request_end(name, end_ns, request.num_output_tokens, outcome)

    def _on_finished(self, requests: Any, *_: Any) -> None:
        """Record requests that were ended from outside; older versions do not say which."""
        now_ns = time.time_ns()
        if isinstance(requests, list):
            for entry in requests:
                request = entry[0] if isinstance(entry, tuple) else entry
                if hasattr(request, "arrival_time"):
                    self._meet(request, -1, -1)
        for name in [name for name, request in self._known.items() if request.is_finished()]:
            self._on_end(name, now_ns, str(self._known[name].get_finished_reason()))

    def _on_preempted(self, _result: Any, _scheduler: Any, request: Any, *_: Any) -> None:
        self._evicted += 1
        self._served.on_evicted(request.request_id)


def _prompt_tokens(output: Any) -> int:
    """Return the tokens of prompts in a batch, and of those computed again after an eviction."""
    lengths, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    prefill: int = sum(lengths[request.req_id] for request in output.scheduled_new_reqs)
    others = output.total_num_scheduled_tokens - prefill
    if others == len(cached.req_ids) and 0 not in cached.num_output_tokens:
        return prefill  # the usual case: all others have one token, and made some before
    guessed = output.scheduled_spec_decode_tokens
    return prefill + sum(
        int(lengths[name])
        for name, made in zip(cached.req_ids, cached.num_output_tokens)
        if not made or lengths[name] > 1 + len(guessed.get(name, ()))
    )


def install(recorder: Recorder) -> None:
    """Record what vLLM does."""
    hooks = VllmHooks(recorder)
    recorder.on_import(SCHEDULER, hooks.on_scheduler)
    recorder.on_import(WORKER, hooks.on_worker)
