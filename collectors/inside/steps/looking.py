"""A thread of ours that looks, again and again, where the threads of the job stand.

In: what to do in it. Out: nothing; the thread ends when it is asked to, or with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..recorder import Recorder


class LookingThread:
    """One such thread: started once in a process, ended once."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        """It does not run yet.

        Args:
            recorder: its `call` keeps what fails in the thread from the job.
        """
        self._recorder, self._name = recorder, name
        self.on_fork()

    def on_fork(self) -> None:
        """This is a forked child: the thread stayed behind."""
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def start(self, look: Callable[[], None]) -> None:
        """Run a function in the thread, unless it was started already."""
        if self._thread is None:
            run, action = self._recorder.call, (look,)
            self._thread = threading.Thread(target=run, args=action, name=self._name, daemon=True)
            self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether it runs, or has run."""
        return self._thread is not None

    def sleep(self, seconds: float = 0.0) -> bool:
        """Wait until the next look is due; whether the thread has to end."""
        return self._end.wait(seconds)

    def end(self, patience_s: float | None = None) -> None:
        """Have the thread end, and wait for it, at most this long; it may call this itself."""
        self._end.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(patience_s)
