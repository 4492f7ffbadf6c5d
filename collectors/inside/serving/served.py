"""The iterations of one process's engine, and its requests.

In: what the hooks of an engine say. Out: two records for each iteration, which also ends a step, and a line
of JSON for each request when it is first scheduled and when it ends; of two lines the later counts.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, NamedTuple

from .. import records
from ..names import REQUESTS
from ..recorder import Recorder
from ..steps.stepping import ITERATION


class ServedBatch(NamedTuple):
    """What one iteration works on; -1 where an engine does not say.

    Attributes:
        prefill_tokens: tokens of prompts.
        decode_tokens: tokens that follow a prompt.
        num_requests: requests.
        context_tokens: tokens in the KV cache that it attends to, summed over requests.
        waiting: requests that are not in it, and wait for their first iteration.
    """

    prefill_tokens: int
    decode_tokens: int
    num_requests: int
    context_tokens: int
    waiting: int


class Served:
    """What one process records of its engine."""

    def __init__(self, recorder: Recorder) -> None:
        """Nothing was served yet."""
        self._recorder = recorder
        self._on_fork()
        for occasion in ("second", "end"):  # a write for each request would hold up the engine
            recorder.listen(occasion, self._write_lines)
        recorder.listen("fork", self._on_fork)

    def _on_fork(self) -> None:
        self._requests: dict[Any, dict[str, Any]] = {}
        self._lines: deque[str] = deque()  # the engine appends, another thread takes
        self._ended_ns = 0

    def knows(self, name: Any) -> bool:
        """Whether a request is in work."""
        return name in self._requests

    def on_request(
        self, name: Any, arrival_ns: int, scheduled_ns: int, prompt_tokens: int, cached_tokens: int
    ) -> None:
        """A request was scheduled for the first time, or given up before.

        Args:
            name: its id in the engine.
            arrival_ns, scheduled_ns: -1 where they did not come or are unknown.
            prompt_tokens: of its prompt.
            cached_tokens: those of them found in the prefix cache; -1 unknown.
        """
        request = {
            "name": str(name),
            "arrival_ns": arrival_ns,
            "scheduled_ns": scheduled_ns,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
        }
        self._requests[name] = request
        self._lines.append(json.dumps(request))

    def on_first_token(self, name: Any, first_token_ns: int) -> None:
        """The first token of a request is there; only the first such call counts.

        Args:
            name: its id.
            first_token_ns: when.
        """
        request = self._requests.get(name)
        if request is not None:
            request.setdefault("first_token_ns", first_token_ns)

    def on_request_end(self, name: Any, end_ns: int, output_tokens: int, outcome: str) -> None:
        """A request ended.

        Args:
            name: its id.
            end_ns: when.
            output_tokens: that were made; -1 unknown.
            outcome: finished, aborted or unknown.
        """
        request = self._requests.pop(name, None)
        if request is not None:
            first = request.get("first_token_ns", end_ns if output_tokens > 0 else -1)
            request |= {"first_token_ns": first, "end_ns": end_ns}
            request |= {"output_tokens": output_tokens, "outcome": outcome}
            self._lines.append(json.dumps(request))

    def on_iteration(self, start_ns: int, end_ns: int, batch: ServedBatch) -> None:
        """An iteration ended.

        Args:
            start_ns, end_ns: on the host's clock; what was prepared during the one before begins at its end.
            batch: what it worked on.
        """
        self._recorder.guarded(self._recorder.on_update, ITERATION)
        own = self._recorder.records
        if own is None:
            return  # a helper of another process
        start_ns, self._ended_ns = max(start_ns, self._ended_ns), end_ns
        own.write(records.ENGINE, start_ns, end_ns, batch.prefill_tokens, batch.decode_tokens)
        own.write(records.BATCH, start_ns, batch.num_requests, batch.context_tokens, batch.waiting)

    def _write_lines(self) -> None:
        if self._recorder.folder is not None and self._lines:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            with (self._recorder.folder / REQUESTS).open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))
