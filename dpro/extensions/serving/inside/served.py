"""The iterations of one process's engine, and its requests.

Takes what the hooks of an engine report. Writes records of each iteration, and a line of JSON for each
request when it is first scheduled and when it ends; of two lines the later counts. An engine whose process
has no rank, since its workers are others, writes beside them, and ends no steps.

An iteration also ends a step. What all probes do then takes 0.2 ms where caches are cold, so iterations that
follow each other within 100 ms share a step; where several ranks have to end the same steps, none do.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from _dpro_inside_the_job import records
from _dpro_inside_the_job.files import ENGINE, ENGINES, REQUESTS, append_lines, write_whole
from _dpro_inside_the_job.recorder import Recorder, identity
from _dpro_inside_the_job.stepping import ITERATION
from _dpro_inside_the_job.threads import Bell, Thread

SHORT_NS = 100_000_000  # a step takes at least this


class ServedBatch(NamedTuple):
    """The work of one iteration; -1 where an engine does not report it.

    Attributes:
        prefill_tokens: tokens of prompts.
        decode_tokens: tokens that follow a prompt.
        context_tokens: tokens in the KV cache that it attends to, summed over requests.
        waiting: requests outside it that wait for their first iteration.
        kv_waiting: those of them that wait because no blocks of the KV cache were free.
        evicted: requests that lost their blocks when it was made.
    """

    prefill_tokens: int
    decode_tokens: int
    num_requests: int
    context_tokens: int
    waiting: int
    kv_waiting: int = -1
    evicted: int = -1


class Served:
    """What one process records of its engine.

    Attributes:
        knows_evictions: whether its hooks report which requests lose their blocks of the KV cache.
        evicted: when requests lost their blocks, by id, until they have blocks again.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.knows_evictions = False
        self._on_fork()
        for occasion in ("second", "end"):  # a write for each request would hold up the engine
            recorder.listen(occasion, self._write_lines)
        recorder.listen("exit", self._on_exit)
        recorder.listen("fork", self._on_fork)

    def _on_fork(self) -> None:
        self._requests: dict[Any, dict[str, Any]] = {}
        self.evicted: dict[Any, int] = {}
        self._lines: deque[dict[str, Any]] = deque()  # the engine appends, another thread takes
        self._apart: ApartEngine | None = None
        self._ended_ns = self._stepped_ns = self._num_ranks = 0

    def on_engine(self, replica: int, first_rank: int) -> None:
        """Record that an engine has begun to serve, and which of several it is.

        Args:
            first_rank: the rank of the first of its workers, under which it is recorded where it has none.
        """
        facts = {"replica": replica, "rank": first_rank}
        if self._recorder.folder is not None:
            self._recorder.write_file(ENGINE, json.dumps(facts).encode())
        elif self._apart is None:
            self._apart = ApartEngine(
                self._recorder.launch, facts, lambda: self._recorder.call(self._write_lines)
            )

    def _on_exit(self) -> None:
        if self._apart is not None:
            self._apart.end()

    def knows(self, name: Any) -> bool:
        """Return whether a request is in work."""
        return name in self._requests

    def on_request(
        self, name: Any, arrival_ns: int, scheduled_ns: int, prompt_tokens: int, cached_tokens: int
    ) -> None:
        """Record a request that was scheduled for the first time, or given up before.

        Args:
            arrival_ns, scheduled_ns: -1 where they did not come or are unknown.
            cached_tokens: prompt tokens found in the prefix cache; -1 unknown.
        """
        request = {
            "name": str(name),
            "arrival_ns": arrival_ns,
            "scheduled_ns": scheduled_ns,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "evictions": 0 if self.knows_evictions else -1,
        }
        self._requests[name] = request
        self._lines.append(dict(request))

    def on_first_token(self, name: Any, first_token_ns: int) -> None:
        """Record the first token of a request; only the first such call counts."""
        request = self._requests.get(name)
        if request is not None:
            request.setdefault("first_token_ns", first_token_ns)

    def on_evicted(self, name: Any) -> None:
        """Record that a request lost its blocks of the KV cache, and will be computed again."""
        request = self._requests.get(name)
        if request is not None:
            request["evictions"] = max(request["evictions"], 0) + 1
            self.evicted[name] = time.time_ns()

    def on_resumed(self, name: Any, scheduled_ns: int) -> None:
        """Record that a request runs, which may have been evicted."""
        since_ns, request = self.evicted.pop(name, -1), self._requests.get(name)
        if request is not None and since_ns >= 0:
            request["evicted_ns"] = request.get("evicted_ns", 0) + max(scheduled_ns - since_ns, 0)

    def on_request_end(self, name: Any, end_ns: int, output_tokens: int, outcome: str) -> None:
        """Record the end of a request.

        Args:
            output_tokens: tokens that were made; -1 unknown.
        """
        self.on_resumed(name, end_ns)
        request = self._requests.pop(name, None)
        if request is not None:
            first = request.get("first_token_ns", end_ns if output_tokens > 0 else -1)
            request |= {"first_token_ns": first, "end_ns": end_ns}
            request |= {"output_tokens": output_tokens, "outcome": outcome}
            self._lines.append(request)
        if self._apart is not None and not self._requests:
            self._apart.hurry()

    def on_iteration(self, start_ns: int, end_ns: int, batch: ServedBatch) -> None:
        """Record an iteration that ended.

        Args:
            start_ns, end_ns: on the host's clock; a batch prepared during the previous iteration begins at
                its end.
        """
        if self._apart is None:
            self.end_step(end_ns)
        writer = self._apart.records if self._apart is not None else self._recorder.records
        if writer is None:
            return  # a helper of another process
        start_ns, self._ended_ns = max(start_ns, self._ended_ns), end_ns
        writer.write(records.ENGINE, start_ns, end_ns, batch.prefill_tokens, batch.decode_tokens)
        writer.write(records.BATCH, start_ns, batch.num_requests, batch.context_tokens, batch.waiting)
        if batch.kv_waiting >= 0 or batch.evicted >= 0:
            writer.write(records.KV_CACHE, start_ns, batch.kv_waiting, batch.evicted)

    def end_step(self, end_ns: int) -> None:
        """End a step with an iteration, unless one of this rank alone has just ended."""
        self._num_ranks = self._num_ranks or identity()[1]
        if self._num_ranks > 1 or end_ns - self._stepped_ns >= SHORT_NS:
            self._stepped_ns = end_ns
            self._recorder.guarded(self._recorder.on_update, ITERATION)

    def _write_lines(self) -> None:
        folder: Path | None = self._apart.folder if self._apart is not None else self._recorder.folder
        if folder is not None and self._lines:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            append_lines(folder / REQUESTS, *map(json.dumps, lines))


# The output of an engine in a process without a rank, beside the output of its workers.

SECOND_S, JOIN_S = 1.0, 5.0


class ApartEngine:
    """The files of an engine without a rank."""

    def __init__(self, launch: Path, facts: dict[str, int], write_lines: Callable[[], None]) -> None:
        """Make the folder.

        Args:
            facts: `rank`, the first of its workers; `replica`.
            write_lines: writes the lines of requests that are there; called about once a second.

        Raises:
            OSError: it cannot be made.
        """
        self.folder = launch / f"{ENGINES}{socket.gethostname()}-{os.getpid()}"
        self.folder.mkdir()
        self.records = records.RecordWriter(self.folder / "records.bin")
        write_whole(self.folder / ENGINE, json.dumps({**facts, "pid": os.getpid()}).encode())
        self._write_lines = write_lines
        self._idle = Bell()
        self._ending = False
        self._thread = Thread(self._run)

    def hurry(self) -> None:
        """Write soon, since no request is in work: the process may be ended."""
        self._idle.ring()

    def end(self) -> None:
        """Write what is left before the interpreter exits."""
        self._ending = True
        self._idle.ring()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._idle.wait(SECOND_S)
            is_last = self._ending
            self._write_lines()
            self.records.flush()
