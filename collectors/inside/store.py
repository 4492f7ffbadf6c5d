"""The job's own store, asked by threads of ours.

In: questions that it answers at once. Out: the answers, or None where there is no store, or it is gone: torch
complains on stderr when one that is gone is asked, so that is done once at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .torch_internals import default_store

EXIT_S = 0.2  # how long the end of the job waits for a question, at most
Answer = TypeVar("Answer")


class JobStore:
    """The store that the job's processes met in."""

    def __init__(self) -> None:
        self.gone = False
        self._asking = threading.Lock()

    def ask(self, question: Callable[[Any], Answer]) -> Answer | None:
        """Put a question to the store, which must not be one to wait for."""
        with self._asking:
            if self.gone or not dist.is_available() or not dist.is_initialized():
                return None
            try:
                store = default_store()
                return question(store) if store is not None else None
            except (RuntimeError, ValueError):
                self.gone = True
                return None

    def leave(self) -> None:
        """Ask no more: an answer that came while the interpreter ends would abort the process."""
        self.gone = True
        if self._asking.acquire(timeout=EXIT_S):
            self._asking.release()
