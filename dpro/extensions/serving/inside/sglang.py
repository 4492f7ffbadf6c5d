"""Iterations and requests of SGLang's scheduler, which runs in the process of each worker.

Hooks its scheduler, once the job itself has imported it. A batch is known when it is passed to the worker,
and has ended when its results have been processed; where the next batch is passed on meanwhile, the oldest
ends first. Requests are recorded by the first rank of those that share them.

A request waits for the KV cache where the last attempt to add one to a batch found no free tokens in it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from _dpro_inside_the_job.patching import followed_by, preceded_by, wrap
from _dpro_inside_the_job.recorder import Recorder

from .served import Served, ServedBatch

SCHEDULER = "sglang.srt.managers.scheduler"
RANKS = ("attn_tp_rank", "attn_cp_rank", "pp_rank")  # of what shares requests: the first of each records them
MAX_GONE = 1000  # arrivals kept of requests that were given up before they ran
NO_TOKEN = "NO_TOKEN"  # the result of an attempt that found no free tokens in the KV cache


class RunningBatch(NamedTuple):
    """A batch in work: when it was passed on, what is recorded of it, and its requests in their prompt."""

    start_ns: int
    batch: ServedBatch
    prompts: list[Any]


class SglangHooks:
    """Hooks on the scheduler of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._served = Served(recorder)
        self._knows_tokens = False
        self._parallel: Any = None  # returns what knows this rank; in older versions the scheduler does
        self._on_fork()
        recorder.listen("fork", self._on_fork)

    def _on_fork(self) -> None:
        self._in_flight: deque[RunningBatch] = deque()
        self._arrivals: dict[str, int] = {}
        self._retracted: set[str] = set()
        self._without_token: dict[str, Any] = {}
        self._evicted = 0
        self._refused = self._begun = self._shares = False

    def on_scheduler(self, module: Any) -> None:
        """Set the hooks; those of batches all or, with an error, none."""
        scheduler = getattr(module, "Scheduler", None)
        missing = [name for name in ("run_batch", "process_batch_result") if not hasattr(scheduler, name)]
        if missing:
            raise LookupError(f"SGLang's scheduler has no {missing[0]}: its iterations are not recorded")
        self._parallel = getattr(module, "get_parallel", None)
        call = self._recorder.call
        wrap(scheduler, "run_batch", preceded_by(call, self._on_run))
        wrap(scheduler, "process_batch_result", followed_by(call, self._on_processed))
        if hasattr(scheduler, "_add_request_to_queue"):
            wrap(scheduler, "_add_request_to_queue", preceded_by(call, self._on_arrival))
        if hasattr(getattr(module, "ScheduleBatch", None), "retract_decode"):
            self._served.knows_evictions = True
            wrap(module.ScheduleBatch, "retract_decode", followed_by(call, self._on_retracted))
        if hasattr(getattr(module, "PrefillAdder", None), "add_one_req"):
            self._knows_tokens = True
            wrap(module.PrefillAdder, "add_one_req", followed_by(call, self._on_attempt))

    def _on_attempt(self, result: Any, *_: Any) -> None:
        self._refused = getattr(result, "name", "") == NO_TOKEN

    def _begin(self, scheduler: Any) -> None:
        """Learn which engine this is, and which of its ranks."""
        if not self._begun:
            self._begun = True
            place = self._parallel() if self._parallel is not None else scheduler
            self._shares = any(getattr(place, name, None) for name in RANKS)
            self._served.on_engine(getattr(place, "dp_rank", None) or 0, 0)

    def _on_arrival(self, scheduler: Any, request: Any, *_: Any) -> None:
        self._begin(scheduler)
        if not self._shares and request.rid not in self._retracted:
            self._arrivals.setdefault(request.rid, time.time_ns())

    def _on_retracted(self, result: Any, *_: Any) -> None:
        for request in result[0]:
            self._evicted += 1
            self._retracted.add(request.rid)
            self._served.on_evicted(request.rid)

    def _on_run(self, scheduler: Any, batch: Any, *_: Any) -> None:
        mode, start_ns = batch.forward_mode, time.time_ns()
        self._begin(scheduler)
        if mode.is_idle():
            return
        prompts, prefill, decode = [], 0, len(batch.reqs)
        if mode.is_extend():
            decode = len(batch.decoding_reqs or ()) if mode.is_mixed() else 0
            prompts = batch.reqs[: len(batch.reqs) - decode]  # those that decode come last
            prefill = int(batch.extend_num_tokens) - decode
            self._on_prompts(scheduler, batch, prompts, start_ns)
        context = -1 if batch.seq_lens_sum is None else int(batch.seq_lens_sum)
        waiting = len(scheduler.waiting_queue)
        lacking = self._refused and scheduler.running_batch.batch_is_full
        recorded = ServedBatch(
            prefill, decode, len(batch.reqs), context, waiting,
            (waiting if lacking else 0) if self._knows_tokens else -1,
            self._evicted if self._served.knows_evictions else -1,
        )  # fmt: skip
        self._evicted = 0
        self._in_flight.append(RunningBatch(start_ns, recorded, list(prompts)))

    def _on_prompts(self, scheduler: Any, batch: Any, prompts: list[Any], start_ns: int) -> None:
        if self._shares:
            return  # another rank has the same requests
        for request, cached in zip(prompts, batch.prefix_lens):
            if request.rid in self._retracted:
                self._retracted.discard(request.rid)
                self._served.on_resumed(request.rid, start_ns)
            elif not self._served.knows(request.rid):
                arrival_ns = self._arrivals.pop(request.rid, -1)
                self._served.on_request(
                    request.rid, arrival_ns, start_ns, len(request.origin_input_ids), int(cached)
                )
                self._without_token[request.rid] = request
        if len(self._arrivals) > len(scheduler.waiting_queue) + MAX_GONE:
            present = {request.rid for request in scheduler.waiting_queue}
            self._arrivals = {name: came_ns for name, came_ns in self._arrivals.items() if name in present}

    def _on_processed(self, _result: Any, _scheduler: Any, batch: Any, *_: Any) -> None:
        if batch.forward_mode.is_idle() or not self._in_flight:
            return
        done, end_ns = self._in_flight.popleft(), time.time_ns()
        for request in done.prompts:
            if request.rid in self._without_token and len(request.output_ids):
                del self._without_token[request.rid]
                self._served.on_first_token(request.rid, end_ns)
        for request in batch.reqs:
            if request.finished() and self._served.knows(request.rid):
                reason = type(request.finished_reason).__name__
                outcome = "aborted" if "ABORT" in reason.upper() else "finished"
                self._without_token.pop(request.rid, None)
                self._served.on_request_end(request.rid, end_ns, len(request.output_ids), outcome)
        self._served.on_iteration(done.start_ns, end_ns, done.batch)


def install(recorder: Recorder) -> None:
    """Record what SGLang does."""
    recorder.on_import(SCHEDULER, SglangHooks(recorder).on_scheduler)
