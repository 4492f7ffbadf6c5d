"""The operations of one process of a pipeline: what it did with which micro-batch, from when to when.

Takes what the hooks of a framework report. Writes records of kind `OPERATION`, and `pipeline.json`: the
chunks of the model that the process has. Work without gradients, such as a validation, is not recorded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import records
from ..files import OPERATIONS, PIPELINE
from ..recorder import Recorder


class PipelineOperations:
    """The work of one process on micro-batches."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._facts: dict[str, Any] = {}
        self._saved = False
        recorder.listen("open", self._save)
        recorder.listen("fork", self._on_fork)

    def _on_fork(self) -> None:
        self._facts, self._saved = {}, False

    def describe(self, source: str, stage: int, places: Mapping[int, int], num_places: int) -> None:
        """Describe the part of the model that the process has; save it where it is new.

        Args:
            source: the framework and, where known, the schedule.
            stage: place of the process on the pipeline axis, from 0.
            places: the number of each of its chunks among its own, by the chunk's place in the model.
        """
        facts = {
            "source": source,
            "stage": stage,
            "num_places": num_places,
            "chunks": {str(place): chunk for place, chunk in sorted(places.items())},
        }
        if facts != self._facts:
            self._facts, self._saved = facts, False
            self._save()

    def note(self, kind: str, place: int, micro_batch: int, start_ns: int, end_ns: int) -> None:
        """Record one operation.

        Args:
            kind: one of `OPERATIONS`.
            place: place of its chunk in the model.
        """
        writer = self._recorder.records
        if writer is not None:
            where = place << 32 | micro_batch
            writer.write(records.OPERATION, start_ns, end_ns, where, OPERATIONS.index(kind))

    def _save(self) -> None:
        if self._facts and not self._saved and self._recorder.folder is not None:
            self._recorder.write_file(PIPELINE, json.dumps(self._facts).encode())
            self._saved = True


def timed(recorder: Recorder, noted: Callable[..., None]) -> Callable[[Any], Any]:
    """Return an `around` for `wrap` that reports each call of a function once it has returned.

    Args:
        noted: gets start and end of the call on the host's clock in ns, its arguments, those by keyword, and
            its result.
    """

    def around(original: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            start_ns = time.time_ns()
            result = original(*args, **kwargs)
            recorder.call(noted, start_ns, time.time_ns(), args, kwargs, result)
            return result

        return timed

    return around
