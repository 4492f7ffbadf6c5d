"""What the browser is shown: one run; while it is being recorded, the latest copy of it.

In: a run, and later states of it, if there will be any. Out: the latest of them, with a number that grows.
Whoever asks in the middle of a change gets one state or the other, never a mixture.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from dpro.dashboards.loaded import Loaded
from dpro.errors import DproError

log = logging.getLogger(__name__)


class Shown:
    """A run in its latest state.

    Attributes:
        loaded: that state.
        version: how many states there were before it.
        lives: whether there may be later ones.
    """

    def __init__(self, loaded: Loaded, later: Iterator[Loaded] | None = None) -> None:
        """Show a run.

        Args:
            loaded: as it is now.
            later: its later states, each as soon as it is there; None where there are none.
        """
        self.loaded, self.version, self.lives = loaded, 0, later is not None
        self._later = iter(()) if later is None else later

    def follow(self) -> None:
        """Wait for later states and show each, until the last is there, or what remains cannot be read."""
        try:
            for state in self._later:
                self.loaded = state
                self.version += 1
        except DproError as error:
            log.error("dpro dashboard: the latest copy stays: %s", error)
        finally:
            self.lives = False
